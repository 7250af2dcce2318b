// What a draw asks of a row of logits: which are heavy, and what all others weigh together
// (`inference_engine/kernels/cpu_sampling.py`).
//
// The weight of a logit is e^(scale · (logit - largest)); heavy are those of at least e^-REACH. The sum is rough, each 64
// weights in float32 and these in float64, and the same on every machine, alone or beside other rows.
#pragma once
#include "simd.h"
#include <cmath>
#include <vector>

#include "threads.h"
#include "types.h"

namespace KERNELS {

// What is far below weighs nothing, however far it is.
INLINE F weight(F scaled) { return exponential(larger(scaled, all(-100.0f))); }

// The logits that the mask allows, and -inf of all others.
static const float* allowed_of(const float* x, const uint8_t* mask, int64_t width) {
  static thread_local std::vector<float> memory;
  memory.resize(width);
  float* own = memory.data();
  for (int64_t i = 0; i < width; i += 8) {
    int64_t end = width - i < 8 ? width : i + 8;
    uint8_t bits = mask[i >> 3];
    if (bits == 0xFF) for (int64_t k = i; k < end; k++) own[k] = x[k];
    else for (int64_t k = i; k < end; k++, bits >>= 1) own[k] = bits & 1 ? x[k] : -INFINITY;
  }
  return own;
}

static void weigh_row(const float* x, int64_t width, float scale, int64_t room, int64_t* ids, int64_t* found, double* rest) {
  constexpr int64_t PIECE = 4 * LANES;
  constexpr float REACH = 8.0f;
  float lanes[PIECE];
  F most = all(x[0]);
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) most = larger(load(x + i), most);
  store(lanes, most);
  float largest = lanes[0];
  for (int lane = 1; lane < LANES; lane++) largest = lanes[lane] > largest ? lanes[lane] : largest;
  for (; i < width; i++) largest = x[i] > largest ? x[i] : largest;
  float least = largest - REACH / scale;
  int64_t count = 0;
  double total = 0.0;
  for (i = 0; i < width; i += PIECE) {
    int64_t here = width - i < PIECE ? width - i : PIECE;
    int heavy = 0;
    for (int64_t k = 0; k < here; k++) heavy |= x[i + k] >= least;
    if (!heavy && here == PIECE) {
      F sums = all(0.0f);
      for (int v = 0; v < 4; v++)
        sums = add(sums, weight(mul(sub(load(x + i + v * LANES), all(largest)), all(scale))));
      total += (double)sum(sums);
      continue;
    }
    for (int64_t k = 0; k < PIECE; k++) lanes[k] = k < here ? (x[i + k] - largest) * scale : 0.0f;
    for (int v = 0; v < 4; v++) store(lanes + v * LANES, weight(load(lanes + v * LANES)));
    float some = 0.0f;
    for (int64_t k = 0; k < here; k++) {
      if (x[i + k] < least) some += lanes[k];
      else if (count++ < room) ids[count - 1] = i + k;
    }
    total += (double)some;
  }
  *found = count;
  *rest = total;
}

static void weigh(Threads& threads, const float* const* rows, const uint8_t* const* masks, const float* scales, int64_t count,
                  int64_t width, int64_t room, int64_t* ids, int64_t* found, double* rest) {
  threads.split(count, 1, [&](int64_t first, int64_t end) {
    for (int64_t r = first; r < end; r++) {
      const float* x = masks[r] ? allowed_of(rows[r], masks[r], width) : rows[r];
      weigh_row(x, width, scales[r], room, ids + r * room, found + r, rest + r);
    }
  });
}

}  // namespace KERNELS
