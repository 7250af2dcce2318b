// K and V of tokens: rotated, written in the dtype in which they are kept, read.
#pragma once
#include <algorithm>
#include <cstring>

#include "simd.h"
#include "types.h"

namespace KERNELS {

// Up to 16 numbers from p; the lanes behind them are 0.
INLINE F load_some(const float* p, int64_t count) {
  if (count >= LANES) return load(p);
  float lanes[LANES] = {};
  memcpy(lanes, p, (size_t)count * sizeof(float));
  return load(lanes);
}
INLINE void store_some(float* p, F x, int64_t count) {
  if (count >= LANES) {
    store(p, x);
    return;
  }
  float lanes[LANES];
  store(lanes, x);
  memcpy(p, lanes, (size_t)count * sizeof(float));
}

// Rotary position embedding by halves: the pairs are (i, i + turned / 2) of the first `turned` numbers of a head.
static void rotate(float* head, const float* cosines, const float* sines, int64_t turned) {
  int64_t half = turned / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    F first = load_some(head + i, half - i), second = load_some(head + half + i, half - i);
    F c = load_some(cosines + i, half - i), s = load_some(sines + i, half - i);
    store_some(head + i, sub(mul(first, c), mul(second, s)), half - i);
    store_some(head + half + i, add(mul(second, c), mul(first, s)), half - i);
  }
}

// Writes numbers of K or V. What is too large for 16 bits becomes NaN, not infinite: an infinite key may just have no
// weight, unnoticed, and NaN reaches the logits.
INLINE void put_lanes(int32_t type, void* buffer, int64_t at, F v) {
  if (type == KV_FLOAT32) store((float*)buffer + at, v);
  else if (type == KV_FLOAT16) {
    uint16_t* out = (uint16_t*)buffer + at;
    store_f16(out, v);
    store_f16(out, fma(load_f16(out), all(0.0f), v));
  } else store_bf16((uint16_t*)buffer + at, v);
}

INLINE F get(int32_t type, const void* buffer, int64_t at) {
  if (type == KV_FLOAT32) return load((const float*)buffer + at);
  return type == KV_FLOAT16 ? load_f16((const uint16_t*)buffer + at) : load_bf16((const uint16_t*)buffer + at);
}

static void put(int32_t type, void* buffer, int64_t at, const float* x, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES) put_lanes(type, buffer, at + i, load(x + i));
}

}  // namespace KERNELS
