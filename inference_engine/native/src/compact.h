// Compact tiles, made to tiles that products read: some at a time, into memory that stays in the nearest caches.
//
// A kind of block has a decoder here, of 30 lines at most, and no product of its own: `put_codes` writes the bytes of a
// block (the number + 128), `put_scales` the scales and offsets behind them. What a tile holds: types.h.
#pragma once
#include <cstring>

#include "activations.h"
#include "simd.h"
#include "types.h"

namespace KERNELS {

constexpr bool expands_to(int32_t format) {
  return format == INT8 || format == INT8_PAIR || format == INT8_OFFSETS;
}

namespace compact {

constexpr int PLANE = 64;

// What the sixteen codes of a half byte stand for, + 128.
constexpr uint8_t IQ4_NUMBERS[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t MXFP4_NUMBERS[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

// Half bytes with a bit above each: quad q is plane q / 2's low or high half and bit q.
template <int ADDED>
INLINE void put_five_bits(const uint8_t* __restrict at, uint8_t* __restrict out) {
  const uint8_t* bits = at + 4 * PLANE;
#pragma GCC unroll 8
  for (int q = 0; q < QUADS; q++)
    for (int i = 0; i < PLANE; i++)
      out[q * PLANE + i] = (uint8_t)(((at[q / 2 * PLANE + i] >> q % 2 * 4 & 15) | (bits[i] >> q & 1) << 4) + ADDED);
}

INLINE void put_six_bits(const uint8_t* __restrict at, uint8_t* __restrict out) {
  const uint8_t* two = at + 4 * PLANE;
#pragma GCC unroll 8
  for (int q = 0; q < QUADS; q++)
    for (int i = 0; i < PLANE; i++)
      out[q * PLANE + i] =
          (uint8_t)(((at[q / 2 * PLANE + i] >> q % 2 * 4 & 15) | (two[q / 4 * PLANE + i] >> q % 4 * 2 & 3) << 4) + 96);
}

INLINE void put_two_bits(const uint8_t* __restrict at, uint8_t* __restrict out) {
#pragma GCC unroll 8
  for (int q = 0; q < QUADS; q++)
    for (int i = 0; i < PLANE; i++) out[q * PLANE + i] = (uint8_t)((at[q / 4 * PLANE + i] >> q % 4 * 2 & 3) + 128);
}

INLINE void put_three_bits(const uint8_t* __restrict at, uint8_t* __restrict out) {
  const uint8_t* bits = at + 2 * PLANE;
#pragma GCC unroll 8
  for (int q = 0; q < QUADS; q++)
    for (int i = 0; i < PLANE; i++)
      out[q * PLANE + i] = (uint8_t)(((at[q / 4 * PLANE + i] >> q % 4 * 2 & 3) | (bits[i] >> q & 1) << 2) + 124);
}

INLINE void put_picked(const uint8_t* table, const uint8_t* __restrict at, uint8_t* __restrict out) {
  for (int plane = 0; plane < 4; plane++, at += PLANE, out += 2 * PLANE) {
    Bytes both = load_bytes(at);
    save_bytes(out, pick_bytes(table, low_nibbles(both)));
    save_bytes(out + PLANE, pick_bytes(table, high_nibbles(both)));
  }
}

INLINE F halves_at(const uint8_t* at) { return load_f16((const uint16_t*)at); }
INLINE void put(uint8_t* out, int index, F numbers) { store((float*)out + index * LANES, numbers); }
INLINE F negative(F a) { return sub(all(0.0f), a); }

// A scale or an offset is a unit times a whole number: 24 bits hold the product of 11 and 8.
INLINE F scaled(F unit, const uint8_t* whole) { return mul(unit, as_floats(codes_as_ints(whole))); }
INLINE F scaled_signed(F unit, const uint8_t* whole) { return mul(unit, as_floats(bytes_as_ints((const int8_t*)whole))); }

// Both halves of a block have these.
INLINE void put_for_both(uint8_t* out, F scales, F offsets) {
  put(out, 0, scales), put(out, 1, scales);
  put(out, 2, offsets), put(out, 3, offsets);
}

// The power of two that an exponent of 8 bits stands for, less one: the numbers are halves.
INLINE float half_power(uint8_t exponent) {
  uint32_t word = exponent < 2 ? 0x00200000u << exponent : (uint32_t)(exponent - 1) << 23;
  float power;
  memcpy(&power, &word, 4);
  return power;
}

// A block of 32 inputs.
template <int STORED>
INLINE void expand(const uint8_t* __restrict at, uint8_t* __restrict out) {
  uint8_t* scales = out + QUADS * PLANE;
  if constexpr (STORED == Q5_0) {
    put_five_bits<112>(at, out);
    memcpy(scales, at + 320, 32);
  } else if constexpr (STORED == Q5_1) {
    put_five_bits<128>(at, out);
    put_for_both(scales, halves_at(at + 320), halves_at(at + 352));
  } else if constexpr (STORED == Q5_K) {
    put_five_bits<128>(at, out);
    put_for_both(scales, scaled(halves_at(at + 320), at + 384), negative(scaled(halves_at(at + 352), at + 400)));
  } else if constexpr (STORED == Q6_K) {
    put_six_bits(at, out);
    F unit = halves_at(at + 384);
    for (int part = 0; part < 2; part++) put(scales, part, scaled_signed(unit, at + 416 + part * LANES));
  } else if constexpr (STORED == Q2_K) {
    put_two_bits(at, out);
    F unit = halves_at(at + 128), minimum_unit = halves_at(at + 160);
    for (int part = 0; part < 2; part++) {
      F both = as_floats(codes_as_ints(at + 192 + part * LANES));
      F high = as_floats(as_ints(mul(sub(both, all(7.5f)), all(1.0f / 16))));  // less than half away from the nearest
      put(scales, part, mul(unit, fma(all(-16.0f), high, both)));
      put(scales, 2 + part, negative(mul(minimum_unit, high)));
    }
  } else if constexpr (STORED == Q3_K) {
    put_three_bits(at, out);
    F unit = halves_at(at + 192);
    for (int part = 0; part < 2; part++) put(scales, part, scaled_signed(unit, at + 224 + part * LANES));
  } else if constexpr (STORED == IQ4_NL) {
    put_picked(IQ4_NUMBERS, at, out);
    memcpy(scales, at + 256, 32);
  } else if constexpr (STORED == IQ4_XS) {
    put_picked(IQ4_NUMBERS, at, out);
    F scale = scaled_signed(halves_at(at + 256), at + 288);
    put(scales, 0, scale), put(scales, 1, scale);
  } else {
    static_assert(STORED == MXFP4);
    put_picked(MXFP4_NUMBERS, at, out);
    float power[LANES];
    for (int i = 0; i < LANES; i++) power[i] = half_power(at[256 + i]);
    put(scales, 0, load(power)), put(scales, 1, load(power));
  }
}

template <int STORED>
__attribute__((noinline)) void expand_blocks(const uint8_t* __restrict at, int64_t blocks, uint8_t* __restrict out) {
  for (; blocks; blocks--, at += block_bytes(STORED), out += block_bytes(product_format(STORED))) expand<STORED>(at, out);
}

inline void expand_blocks(int32_t stored, const uint8_t* at, int64_t blocks, uint8_t* out) {
  switch (stored) {
    case Q5_0: return expand_blocks<Q5_0>(at, blocks, out);
    case Q5_1: return expand_blocks<Q5_1>(at, blocks, out);
    case Q5_K: return expand_blocks<Q5_K>(at, blocks, out);
    case Q6_K: return expand_blocks<Q6_K>(at, blocks, out);
    case Q2_K: return expand_blocks<Q2_K>(at, blocks, out);
    case Q3_K: return expand_blocks<Q3_K>(at, blocks, out);
    case IQ4_NL: return expand_blocks<IQ4_NL>(at, blocks, out);
    case IQ4_XS: return expand_blocks<IQ4_XS>(at, blocks, out);
    case MXFP4: return expand_blocks<MXFP4>(at, blocks, out);
  }
}

}  // namespace compact

// `count` tiles from `tiles` on, as products in FORMAT read them, in this thread's memory until its next call.
template <int FORMAT>
const uint8_t* expanded(const Matrix& matrix, const uint8_t* tiles, int64_t count) {
  static thread_local Scratch memory;
  int64_t bytes = count * tile_bytes(FORMAT, matrix.inputs);
  uint8_t* out = memory.of<uint8_t>(bytes);
  compact::expand_blocks(matrix.format, tiles, bytes / block_bytes(FORMAT), out);
  return out;
}

}  // namespace KERNELS
