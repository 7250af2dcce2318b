// The id of the largest of each row of logits, while they are still in the caches that they were written from.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "simd.h"
#include "threads.h"

namespace KERNELS {

constexpr int64_t LOGITS_AT_ONCE = 4096;

// The largest of some logits; NaN if one of them is not finite.
static float largest_or_nan(const float* x, int64_t count) {
  F most = all(-std::numeric_limits<float>::infinity()), nothing = all(0.0f);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    F v = load(x + i);
    most = larger(most, v);
    nothing = fma(v, all(0.0f), nothing);  // NaN, of a number that is not finite
  }
  float found = largest(most), none = sum(nothing);
  for (; i < count; i++) {
    found = x[i] > found ? x[i] : found;
    none += x[i] * 0.0f;
  }
  return none == 0.0f ? found : std::numeric_limits<float>::quiet_NaN();
}

// ids[row]: the lower one of equals; -1 where a logit of the row is not finite.
static void largest_ids(Threads& threads, const float* logits, int64_t rows, int64_t width, int64_t* ids) {
  int64_t pieces = (width + LOGITS_AT_ONCE - 1) / LOGITS_AT_ONCE;
  auto size = [&](int64_t piece) { return std::min(LOGITS_AT_ONCE, width - piece * LOGITS_AT_ONCE); };
  std::vector<float> found((size_t)(rows * pieces));
  threads.split(rows * pieces, 1, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
      int64_t piece = i % pieces;
      found[(size_t)i] = largest_or_nan(logits + i / pieces * width + piece * LOGITS_AT_ONCE, size(piece));
    }
  });
  for (int64_t row = 0; row < rows; row++) {
    const float* own = found.data() + row * pieces;
    int64_t best = 0;
    bool is_finite = true;
    for (int64_t piece = 0; piece < pieces; piece++) {
      is_finite &= own[piece] == own[piece];
      if (own[piece] > own[best]) best = piece;
    }
    const float* x = logits + row * width;
    int64_t id = best * LOGITS_AT_ONCE;
    while (is_finite && x[id] != own[best]) id++;
    ids[row] = is_finite ? id : -1;
  }
}

}  // namespace KERNELS
