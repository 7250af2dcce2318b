// Vectors of 16 numbers, whatever the machine's own width.
//
// Every kernel is written once with these, and compiled once for each level of instructions. A lane is an output or a
// key, sums run in one fixed order, and every product is added with one rounding (fma), so all levels give equal bits.
//
//   F    16 float32            I    16 int32
//   sum, largest               over the lanes, in one fixed order: halves are combined, 16 to 8 to 4 to 2 to 1
//   transpose                  16 vectors as the rows of a square: afterwards lane i of vector j is what j had in lane i
//   dot                        adds to lane i the products of the factors and signed bytes 4i … 4i+3; the factors are the
//                              codes, or where CENTRED the codes less 128
//   dot_nibbles, total         the same of codes of at most 15, for 32 products of a lane at most: then `total` has them
//   dot_pair                   where the machine multiplies small matrices of bytes: two quads, and of two tokens at once
//   pick_bytes                 byte i: what the table has at byte i, below 16
//   byte, nibble               lane i: byte 4i+n less 128; half byte n of bytes 4i … 4i+3, low halves first
//   pick                       lane i: what the table has at index i of 16, all below `size`; at least 32 can be read
//   dot_shorts                 lane i: pair i times `pair`, both numbers of 16 bits, added
//   pick_short                 as pick, of whole numbers, in the low halves of lanes; 64 can be read behind the first
//   in_pairs                   lane i: the low halves of both, the first one below
//   lanes_least, count_least   which lanes have `floor` or more, a bit for each, and how many; what is not a number has not
//   lane_field                 lane i: `width` bits from bit `offset` on of the words i, 16 + i, 32 + i, …, as a number
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "half.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#ifndef KERNELS
#error "KERNELS names the namespace of this level of instructions"
#endif

#define INLINE static inline __attribute__((always_inline))

namespace KERNELS {

constexpr int LANES = 16;

// -- the machine's own vectors ----------------------------------------------------------------------------------------

#if defined(__AVX512F__)

constexpr const char* LEVEL = "avx512";
using F = __m512;
using I = __m512i;
using Bytes = __m512i;  // 64 bytes

INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a); }
INLINE F all(float a) { return _mm512_set1_ps(a); }
INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F divide(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F larger(F a, F b) { return _mm512_max_ps(a, b); }
INLINE F smaller(F a, F b) { return _mm512_min_ps(a, b); }
INLINE F absolute(F a) { return _mm512_abs_ps(a); }
INLINE F nearest(F a) { return _mm512_roundscale_ps(a, 8); }
// Lanes below `count` of a, the others of b.
INLINE F below(int count, F a, F b) {
  __mmask16 mask = count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
  return _mm512_mask_blend_ps(mask, b, a);
}
// Lanes of a where x is at least `floor`, 0 elsewhere.
INLINE F where_least(F x, float floor, F a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(floor), _CMP_GE_OQ), a);
}
// A bit for each lane of x that is at least `floor`.
INLINE uint32_t lanes_least(F x, float floor) { return _mm512_cmp_ps_mask(x, _mm512_set1_ps(floor), _CMP_GE_OQ); }
INLINE F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE void store_f16(uint16_t* p, F a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, 0)); }
INLINE F load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
INLINE F pick(const float* table, int32_t size, const int32_t* index) {  // a gather takes as long as ten permutations
  __m512i places = _mm512_loadu_si512(index);
  if (size <= 16) return _mm512_permutexvar_ps(places, load(table));
  if (size <= 32) return _mm512_permutex2var_ps(load(table), places, load(table + 16));
  return _mm512_i32gather_ps(places, table, 4);
}
INLINE I zeros() { return _mm512_setzero_si512(); }
INLINE I all_int(int32_t a) { return _mm512_set1_epi32(a); }
INLINE F as_floats(I a) { return _mm512_cvtepi32_ps(a); }
INLINE I as_ints(F a) { return _mm512_cvtps_epi32(a); }  // to nearest, ties to even
INLINE I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE F bits(I a) { return _mm512_castsi512_ps(a); }
INLINE F lane_field(const uint8_t* words, int offset, int width) {
  const uint8_t* word = words + offset / 32 * 64;
  int shift = offset % 32;
  __m512i found = _mm512_srl_epi32(_mm512_loadu_si512(word), _mm_cvtsi32_si128(shift));
  if (shift + width > 32)
    found = _mm512_or_si512(found, _mm512_sll_epi32(_mm512_loadu_si512(word + 64), _mm_cvtsi32_si128(32 - shift)));
  return _mm512_cvtepi32_ps(_mm512_and_si512(found, _mm512_set1_epi32((1 << width) - 1)));
}
INLINE I shift_left(I a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE I bytes_as_ints(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I codes_as_ints(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE void store_bytes(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }
INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE void save_bytes(uint8_t* p, Bytes a) { _mm512_storeu_si512(p, a); }
INLINE Bytes pick_bytes(const uint8_t* table, Bytes index) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), index);
}
INLINE Bytes low_nibbles(Bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INLINE Bytes high_nibbles(Bytes a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
constexpr bool CENTRED = false;
INLINE Bytes factors(Bytes codes) { return codes; }
// `quad` has the four bytes that every lane is multiplied with.
INLINE I dot(I sum, Bytes codes, int32_t quad) { return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(quad)); }
INLINE I dot_nibbles(I sum, Bytes codes, int32_t quad) { return dot(sum, codes, quad); }
INLINE I total(I sums) { return sums; }
using Shorts = __m512i;  // 16 pairs of numbers of 16 bits
INLINE Shorts load_shorts(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE I dot_shorts(I sum, Shorts pairs, int32_t pair) {
  sum = _mm512_dpwssd_epi32(sum, pairs, _mm512_set1_epi32(pair));
  asm("" : "+v"(sum));  // in its register: compilers else keep copies in memory
  return sum;
}
INLINE I pick_short(const int16_t* table, int32_t size, const int32_t* index) {
  __m512i places = _mm512_loadu_si512(index);
  if (size <= 32) return _mm512_permutexvar_epi16(places, _mm512_loadu_si512(table));
  if (size <= 64) return _mm512_permutex2var_epi16(_mm512_loadu_si512(table), places, _mm512_loadu_si512(table + 32));
  return _mm512_i32gather_epi32(places, table, 2);
}
INLINE I in_pairs(I low, I high) { return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16)); }
// A byte becomes the last bits of 2^23, from which 2^23 + 128 is taken.
INLINE F byte(Bytes codes, int n) {
  __m512i index = _mm512_broadcast_i32x4(_mm_setr_epi32(n, n + 4, n + 8, n + 12));
  __m512i word = _mm512_mask_shuffle_epi8(_mm512_set1_epi32(0x4b000000), 0x1111111111111111, codes, index);
  return _mm512_sub_ps(_mm512_castsi512_ps(word), _mm512_set1_ps(8388736.0f));
}
INLINE F nibble(Bytes codes, int n) {
  __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int shift = n < 4 ? 8 * n : 8 * n - 28;
  return _mm512_permutexvar_ps(shift ? _mm512_srli_epi32(codes, shift) : codes, table);
}
INLINE __m256 upper(F a) { return _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(a), 1)); }
INLINE __m256 lower(F a) { return _mm512_castps512_ps256(a); }

#elif defined(__AVX2__)

#if defined(__AVXVNNI__)
constexpr const char* LEVEL = "avxvnni";
#else
constexpr const char* LEVEL = "avx2";
#endif
struct F { __m256 a, b; };
struct I { __m256i a, b; };
using Bytes = I;

INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE F all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F divide(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F larger(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F smaller(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F absolute(F x) {
  __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
INLINE F nearest(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
INLINE F below(int count, F x, F y) {
  __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), end = _mm256_set1_epi32(count);
  __m256 low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(end, index));
  __m256 high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(end, _mm256_add_epi32(index, _mm256_set1_epi32(8))));
  return {_mm256_blendv_ps(y.a, x.a, low), _mm256_blendv_ps(y.b, x.b, high)};
}
INLINE F where_least(F x, float floor, F y) {
  __m256 least = _mm256_set1_ps(floor);
  return {_mm256_and_ps(y.a, _mm256_cmp_ps(x.a, least, _CMP_GE_OQ)),
          _mm256_and_ps(y.b, _mm256_cmp_ps(x.b, least, _CMP_GE_OQ))};
}
INLINE uint32_t lanes_least(F x, float floor) {
  __m256 least = _mm256_set1_ps(floor);
  return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.a, least, _CMP_GE_OQ)) |
         (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.b, least, _CMP_GE_OQ)) << 8;
}
INLINE F load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
INLINE void store_f16(uint16_t* p, F x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, 0));
  _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(x.b, 0));
}
INLINE F load_bf16(const uint16_t* p) {
  __m128i a = _mm_loadu_si128((const __m128i*)p), b = _mm_loadu_si128((const __m128i*)p + 1);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16))};
}
INLINE F pick(const float* table, int32_t, const int32_t* index) {
  return {_mm256_i32gather_ps(table, _mm256_loadu_si256((const __m256i*)index), 4),
          _mm256_i32gather_ps(table, _mm256_loadu_si256((const __m256i*)index + 1), 4)};
}
INLINE I zeros() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE I all_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE F as_floats(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE I as_ints(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE I add_int(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE F bits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
INLINE __m256i half_field(const uint8_t* word, int shift, int width) {
  __m256i found = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i*)word), _mm_cvtsi32_si128(shift));
  if (shift + width > 32) {
    __m256i next = _mm256_loadu_si256((const __m256i*)(word + 64));
    found = _mm256_or_si256(found, _mm256_sll_epi32(next, _mm_cvtsi32_si128(32 - shift)));
  }
  return _mm256_and_si256(found, _mm256_set1_epi32((1 << width) - 1));
}
INLINE F lane_field(const uint8_t* words, int offset, int width) {
  const uint8_t* word = words + offset / 32 * 64;
  return {_mm256_cvtepi32_ps(half_field(word, offset % 32, width)),
          _mm256_cvtepi32_ps(half_field(word + 32, offset % 32, width))};
}
INLINE I shift_left(I x, int n) {
  return {_mm256_sll_epi32(x.a, _mm_cvtsi32_si128(n)), _mm256_sll_epi32(x.b, _mm_cvtsi32_si128(n))};
}
INLINE I bytes_as_ints(const int8_t* p) {
  __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}
INLINE I codes_as_ints(const uint8_t* p) {
  __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
INLINE void store_bytes(int8_t* p, I x) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
INLINE Bytes load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
INLINE void save_bytes(uint8_t* p, Bytes x) {
  _mm256_storeu_si256((__m256i*)p, x.a), _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
INLINE Bytes pick_bytes(const uint8_t* table, Bytes index) {
  __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(both, index.a), _mm256_shuffle_epi8(both, index.b)};
}
INLINE Bytes low_nibbles(Bytes x) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
INLINE Bytes high_nibbles(Bytes x) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), mask)};
}
// Added now: compilers else compute all products of a block, keep them in memory, and add them in pairs.
INLINE __m256i added(__m256i sum) { asm("" : "+x"(sum)); return sum; }
#if defined(__AVXVNNI__)
constexpr bool CENTRED = false;
INLINE Bytes factors(Bytes codes) { return codes; }
INLINE I dot(I sum, Bytes codes, int32_t quad) {
  __m256i q = _mm256_set1_epi32(quad);
  return {_mm256_dpbusd_avx_epi32(sum.a, codes.a, q), _mm256_dpbusd_avx_epi32(sum.b, codes.b, q)};
}
INLINE I dot_nibbles(I sum, Bytes codes, int32_t quad) { return dot(sum, codes, quad); }
INLINE I total(I sums) { return sums; }
#else
constexpr bool CENTRED = true;
// Codes less 128, and their magnitudes. Two products of a magnitude and a byte fit into 16 bits: at most 2 · 128 · 127.
// Two of a code would not.
struct Factors { Bytes numbers, magnitudes; };
INLINE Factors factors(Bytes codes) {
  __m256i middle = _mm256_set1_epi8(-128);
  Bytes numbers = {_mm256_xor_si256(codes.a, middle), _mm256_xor_si256(codes.b, middle)};
  return {numbers, {_mm256_abs_epi8(numbers.a), _mm256_abs_epi8(numbers.b)}};
}
INLINE __m256i dot_half(__m256i sum, __m256i number, __m256i magnitude, __m256i q) {
  __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(q, number));
  return added(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
INLINE I dot(I sum, Factors by, int32_t quad) {
  __m256i q = _mm256_set1_epi32(quad);
  return {dot_half(sum.a, by.numbers.a, by.magnitudes.a, q), dot_half(sum.b, by.numbers.b, by.magnitudes.b, q)};
}
// Sums stay in 16 bits: eight of two products, at most 16 · 15 · 127.
INLINE I dot_nibbles(I sum, Bytes codes, int32_t quad) {
  __m256i q = _mm256_set1_epi32(quad);
  return {added(_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(codes.a, q))),
          added(_mm256_add_epi16(sum.b, _mm256_maddubs_epi16(codes.b, q)))};
}
INLINE I total(I sums) {
  __m256i one = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(sums.a, one), _mm256_madd_epi16(sums.b, one)};
}
#endif
using Shorts = I;  // 16 pairs of numbers of 16 bits
INLINE Shorts load_shorts(const uint8_t* p) { return load_bytes(p); }
INLINE I dot_shorts(I sum, Shorts pairs, int32_t pair) {
  __m256i q = _mm256_set1_epi32(pair);
#if defined(__AVXVNNI__)
  return {added(_mm256_dpwssd_avx_epi32(sum.a, pairs.a, q)), added(_mm256_dpwssd_avx_epi32(sum.b, pairs.b, q))};
#else
  return {added(_mm256_add_epi32(sum.a, _mm256_madd_epi16(pairs.a, q))),
          added(_mm256_add_epi32(sum.b, _mm256_madd_epi16(pairs.b, q)))};
#endif
}
// A table of up to 32 is looked up eight numbers at a time, by the bytes of each: a gather takes several times as long.
INLINE I pick_short(const int16_t* table, int32_t size, const int32_t* index) {
  __m256i places[2] = {_mm256_loadu_si256((const __m256i*)index), _mm256_loadu_si256((const __m256i*)index + 1)}, found[2];
  auto eight = [&](int n) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table + n)); };
  auto either = [](__m256i low, __m256i high, __m256i bytes) { return _mm256_blendv_epi8(low, high, bytes); };
  for (int i = 0; i < 2; i++) {
    if (size > 32) {
      found[i] = _mm256_i32gather_epi32((const int*)table, places[i], 2);
      continue;
    }
    // Bytes 2 · place and 2 · place + 1: bits below the fifth say where in a table of eight, the others which table.
    __m256i bytes = _mm256_add_epi16(_mm256_mullo_epi16(places[i], _mm256_set1_epi32(0x202)), _mm256_set1_epi32(0x100));
    found[i] = _mm256_shuffle_epi8(eight(0), bytes);
    if (size <= 8) continue;
    __m256i odd = _mm256_slli_epi16(bytes, 3);
    found[i] = either(found[i], _mm256_shuffle_epi8(eight(1), bytes), odd);
    if (size <= 16) continue;
    __m256i upper = either(_mm256_shuffle_epi8(eight(2), bytes), _mm256_shuffle_epi8(eight(3), bytes), odd);
    found[i] = either(found[i], upper, _mm256_slli_epi16(bytes, 2));
  }
  return {found[0], found[1]};
}
INLINE I in_pairs(I low, I high) {
  return {_mm256_blend_epi16(low.a, _mm256_slli_epi32(high.a, 16), 0xaa),
          _mm256_blend_epi16(low.b, _mm256_slli_epi32(high.b, 16), 0xaa)};
}
INLINE F byte(Bytes codes, int n) {
  __m256i index = _mm256_or_si256(_mm256_set1_epi32((int32_t)0x80808000),
                                  _mm256_setr_epi32(n, n + 4, n + 8, n + 12, n, n + 4, n + 8, n + 12));
  __m256 middle = _mm256_set1_ps(128.0f);
  return {_mm256_sub_ps(_mm256_cvtepi32_ps(_mm256_shuffle_epi8(codes.a, index)), middle),
          _mm256_sub_ps(_mm256_cvtepi32_ps(_mm256_shuffle_epi8(codes.b, index)), middle)};
}
INLINE F nibble(Bytes codes, int n) {
  int shift = n < 4 ? 8 * n : 8 * n - 28;
  __m256i mask = _mm256_set1_epi32(15);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(codes.a, shift), mask)),
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(codes.b, shift), mask))};
}
INLINE __m256 upper(F x) { return x.b; }
INLINE __m256 lower(F x) { return x.a; }

#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr const char* LEVEL = "i8mm";
#else
constexpr const char* LEVEL = "neon";
#endif
struct F { float32x4_t v[4]; };
struct I { int32x4_t v[4]; };
struct Bytes { uint8x16_t v[4]; };
#define EACH for (int i = 0; i < 4; i++)

INLINE F load(const float* p) { F r; EACH r.v[i] = vld1q_f32(p + 4 * i); return r; }
INLINE void store(float* p, F x) { EACH vst1q_f32(p + 4 * i, x.v[i]); }
INLINE F all(float x) { F r; EACH r.v[i] = vdupq_n_f32(x); return r; }
INLINE F add(F x, F y) { EACH x.v[i] = vaddq_f32(x.v[i], y.v[i]); return x; }
INLINE F sub(F x, F y) { EACH x.v[i] = vsubq_f32(x.v[i], y.v[i]); return x; }
INLINE F mul(F x, F y) { EACH x.v[i] = vmulq_f32(x.v[i], y.v[i]); return x; }
INLINE F divide(F x, F y) { EACH x.v[i] = vdivq_f32(x.v[i], y.v[i]); return x; }
INLINE F fma(F x, F y, F z) { EACH z.v[i] = vfmaq_f32(z.v[i], x.v[i], y.v[i]); return z; }
// As on x86: the second where either is not a number.
INLINE F larger(F x, F y) { EACH x.v[i] = vbslq_f32(vcgtq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); return x; }
INLINE F smaller(F x, F y) { EACH x.v[i] = vbslq_f32(vcltq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); return x; }
INLINE F absolute(F x) { EACH x.v[i] = vabsq_f32(x.v[i]); return x; }
INLINE F nearest(F x) { EACH x.v[i] = vrndnq_f32(x.v[i]); return x; }
INLINE F below(int count, F x, F y) {
  const int32_t index[4] = {0, 1, 2, 3};
  int32x4_t first = vld1q_s32(index);
  EACH x.v[i] = vbslq_f32(vcltq_s32(vaddq_s32(first, vdupq_n_s32(4 * i)), vdupq_n_s32(count)), x.v[i], y.v[i]);
  return x;
}
INLINE F where_least(F x, float floor, F y) {
  EACH y.v[i] = vreinterpretq_f32_u32(
      vandq_u32(vreinterpretq_u32_f32(y.v[i]), vcgeq_f32(x.v[i], vdupq_n_f32(floor))));
  return y;
}
INLINE uint32_t lanes_least(F x, float floor) {
  const uint32_t bits[4] = {1, 2, 4, 8};
  uint32_t found = 0;
  EACH found |= vaddvq_u32(vandq_u32(vcgeq_f32(x.v[i], vdupq_n_f32(floor)), vld1q_u32(bits))) << 4 * i;
  return found;
}
#define COUNTS_LANES  // faster than it finds them
INLINE int count_least(F x, float floor) {
  uint32x4_t found = vdupq_n_u32(0);
  EACH found = vsubq_u32(found, vcgeq_f32(x.v[i], vdupq_n_f32(floor)));  // a lane that is, is -1
  return (int)vaddvq_u32(found);
}
INLINE F load_f16(const uint16_t* p) {
  F r;
  EACH r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  return r;
}
INLINE void store_f16(uint16_t* p, F x) { EACH vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i]))); }
INLINE F load_bf16(const uint16_t* p) {
  F r;
  EACH r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
  return r;
}
INLINE F pick(const float* table, int32_t, const int32_t* index) {
  float lanes[LANES];
  for (int i = 0; i < LANES; i++) lanes[i] = table[index[i]];
  return load(lanes);
}
INLINE I zeros() { I r; EACH r.v[i] = vdupq_n_s32(0); return r; }
INLINE I all_int(int32_t x) { I r; EACH r.v[i] = vdupq_n_s32(x); return r; }
INLINE F as_floats(I x) { F r; EACH r.v[i] = vcvtq_f32_s32(x.v[i]); return r; }
INLINE I as_ints(F x) { I r; EACH r.v[i] = vcvtnq_s32_f32(x.v[i]); return r; }
INLINE I add_int(I x, I y) { EACH x.v[i] = vaddq_s32(x.v[i], y.v[i]); return x; }
INLINE F bits(I x) { F r; EACH r.v[i] = vreinterpretq_f32_s32(x.v[i]); return r; }
INLINE F lane_field(const uint8_t* words, int offset, int width) {
  const uint8_t* word = words + offset / 32 * 64;
  int shift = offset % 32;
  F r;
  EACH {
    uint32x4_t found = vshlq_u32(vreinterpretq_u32_u8(vld1q_u8(word + 16 * i)), vdupq_n_s32(-shift));
    if (shift + width > 32) {
      uint32x4_t next = vreinterpretq_u32_u8(vld1q_u8(word + 64 + 16 * i));
      found = vorrq_u32(found, vshlq_u32(next, vdupq_n_s32(32 - shift)));
    }
    r.v[i] = vcvtq_f32_u32(vandq_u32(found, vdupq_n_u32((1u << width) - 1)));
  }
  return r;
}
INLINE I shift_left(I x, int n) { EACH x.v[i] = vshlq_s32(x.v[i], vdupq_n_s32(n)); return x; }
INLINE I bytes_as_ints(const int8_t* p) {
  int8x16_t x = vld1q_s8(p);
  int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
  return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
           vmovl_s16(vget_high_s16(high))}};
}
INLINE I codes_as_ints(const uint8_t* p) {
  uint8x16_t x = vld1q_u8(p);
  uint16x8_t low = vmovl_u8(vget_low_u8(x)), high = vmovl_u8(vget_high_u8(x));
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))),
           vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))}};
}
INLINE void store_bytes(int8_t* p, I x) {
  int16x8_t low = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1]));
  int16x8_t high = vcombine_s16(vmovn_s32(x.v[2]), vmovn_s32(x.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
INLINE Bytes load_bytes(const uint8_t* p) { Bytes r; EACH r.v[i] = vld1q_u8(p + 16 * i); return r; }
INLINE void save_bytes(uint8_t* p, Bytes x) { EACH vst1q_u8(p + 16 * i, x.v[i]); }
INLINE Bytes pick_bytes(const uint8_t* table, Bytes x) { EACH x.v[i] = vqtbl1q_u8(vld1q_u8(table), x.v[i]); return x; }
INLINE Bytes low_nibbles(Bytes x) { EACH x.v[i] = vandq_u8(x.v[i], vdupq_n_u8(15)); return x; }
INLINE Bytes high_nibbles(Bytes x) { EACH x.v[i] = vshrq_n_u8(x.v[i], 4); return x; }
INLINE I total(I sums) { return sums; }
// Codes of at most 15 are signed bytes, too.
INLINE I dot_nibbles(I sum, Bytes codes, int32_t quad) {
  int8x16_t q = vreinterpretq_s8_s32(vdupq_n_s32(quad));
  EACH sum.v[i] = vdotq_s32(sum.v[i], vreinterpretq_s8_u8(codes.v[i]), q);
  return sum;
}
INLINE F lane_bits(Bytes codes, int shift, uint32_t mask) {
  F r;
  EACH {
    uint32x4_t word = vshlq_u32(vreinterpretq_u32_u8(codes.v[i]), vdupq_n_s32(-shift));
    r.v[i] = vcvtq_f32_u32(vandq_u32(word, vdupq_n_u32(mask)));
  }
  return r;
}
INLINE F byte(Bytes codes, int n) { return sub(lane_bits(codes, 8 * n, 255), all(128.0f)); }
INLINE F nibble(Bytes codes, int n) { return lane_bits(codes, n < 4 ? 8 * n : 8 * n - 28, 15); }
// 16 pairs of numbers of 16 bits: the first of each pair, and the second.
struct Shorts { int16x8_t first[2], second[2]; };
INLINE Shorts load_shorts(const uint8_t* p) {
  Shorts r;
  for (int i = 0; i < 2; i++) {
    int16x8_t a = vreinterpretq_s16_u8(vld1q_u8(p + 32 * i)), b = vreinterpretq_s16_u8(vld1q_u8(p + 32 * i + 16));
    r.first[i] = vuzp1q_s16(a, b), r.second[i] = vuzp2q_s16(a, b);
  }
  return r;
}
INLINE I dot_shorts(I sum, Shorts pairs, int32_t pair) {
  int16_t first = (int16_t)pair, second = (int16_t)(pair >> 16);
  for (int i = 0; i < 2; i++) {
    int32x4_t low = vmlal_n_s16(sum.v[2 * i], vget_low_s16(pairs.first[i]), first);
    int32x4_t high = vmlal_high_n_s16(sum.v[2 * i + 1], pairs.first[i], first);
    sum.v[2 * i] = vmlal_n_s16(low, vget_low_s16(pairs.second[i]), second);
    sum.v[2 * i + 1] = vmlal_high_n_s16(high, pairs.second[i], second);
  }
  return sum;
}
INLINE I pick_short(const int16_t* table, int32_t, const int32_t* index) {
  I r;
  EACH {
    const int32_t lanes[4] = {table[index[4 * i]], table[index[4 * i + 1]], table[index[4 * i + 2]],
                              table[index[4 * i + 3]]};
    r.v[i] = vld1q_s32(lanes);
  }
  return r;
}
INLINE I in_pairs(I low, I high) { EACH low.v[i] = vsliq_n_s32(low.v[i], high.v[i], 16); return low; }
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool CENTRED = false;
INLINE Bytes factors(Bytes codes) { return codes; }
INLINE I dot(I sum, Bytes codes, int32_t quad) {
  int8x16_t q = vreinterpretq_s8_s32(vdupq_n_s32(quad));
  EACH sum.v[i] = vusdotq_s32(sum.v[i], codes.v[i], q);
  return sum;
}

// The sums of two tokens. Vector i: output 2i of the first and of the second, then output 2i + 1.
struct Pair { int32x4_t v[8]; };
INLINE Pair together(I x, I y) {
  Pair r;
  EACH r.v[2 * i] = vzip1q_s32(x.v[i], y.v[i]), r.v[2 * i + 1] = vzip2q_s32(x.v[i], y.v[i]);
  return r;
}
INLINE void apart(Pair sums, I& x, I& y) {
  EACH x.v[i] = vuzp1q_s32(sums.v[2 * i], sums.v[2 * i + 1]), y.v[i] = vuzp2q_s32(sums.v[2 * i], sums.v[2 * i + 1]);
}
// `first` and `next` are the codes of two quads, `quads` those of the first token, then of the second. One instruction
// multiplies 8 inputs of two outputs with 8 of two tokens; an output's quads become neighbours here, not in memory.
INLINE Pair dot_pair(Pair sums, Bytes first, Bytes next, const int32_t* quads) {
  int8x16_t q = vreinterpretq_s8_s32(vld1q_s32(quads));
  EACH {
    uint32x4_t a = vreinterpretq_u32_u8(first.v[i]), b = vreinterpretq_u32_u8(next.v[i]);
    sums.v[2 * i] = vusmmlaq_s32(sums.v[2 * i], vreinterpretq_u8_u32(vzip1q_u32(a, b)), q);
    sums.v[2 * i + 1] = vusmmlaq_s32(sums.v[2 * i + 1], vreinterpretq_u8_u32(vzip2q_u32(a, b)), q);
  }
  return sums;
}
#else
constexpr bool CENTRED = true;
INLINE Bytes factors(Bytes codes) { EACH codes.v[i] = veorq_u8(codes.v[i], vdupq_n_u8(128)); return codes; }
INLINE I dot(I sum, Bytes by, int32_t quad) { return dot_nibbles(sum, by, quad); }  // both are signed bytes
#endif
#undef EACH

#else

// Plain C++: what the others must equal, and what runs where nothing else does.
constexpr const char* LEVEL = "plain";
struct F { float v[16]; };
struct I { int32_t v[16]; };
struct Bytes { uint8_t v[64]; };
#define EACH for (int i = 0; i < 16; i++)

INLINE F load(const float* p) { F r; memcpy(r.v, p, 64); return r; }
INLINE void store(float* p, F x) { memcpy(p, x.v, 64); }
INLINE F all(float x) { F r; EACH r.v[i] = x; return r; }
INLINE F add(F x, F y) { EACH x.v[i] += y.v[i]; return x; }
INLINE F sub(F x, F y) { EACH x.v[i] -= y.v[i]; return x; }
INLINE F mul(F x, F y) { EACH x.v[i] *= y.v[i]; return x; }
INLINE F divide(F x, F y) { EACH x.v[i] /= y.v[i]; return x; }
INLINE F fma(F x, F y, F z) { EACH z.v[i] = std::fma(x.v[i], y.v[i], z.v[i]); return z; }
INLINE F larger(F x, F y) { EACH x.v[i] = x.v[i] > y.v[i] ? x.v[i] : y.v[i]; return x; }
INLINE F smaller(F x, F y) { EACH x.v[i] = x.v[i] < y.v[i] ? x.v[i] : y.v[i]; return x; }
INLINE F absolute(F x) { EACH x.v[i] = std::fabs(x.v[i]); return x; }
INLINE F nearest(F x) { EACH x.v[i] = std::nearbyint(x.v[i]); return x; }
INLINE F below(int count, F x, F y) { EACH x.v[i] = i < count ? x.v[i] : y.v[i]; return x; }
INLINE F where_least(F x, float floor, F y) { EACH y.v[i] = x.v[i] >= floor ? y.v[i] : 0.0f; return y; }
INLINE uint32_t lanes_least(F x, float floor) {
  uint32_t found = 0;
  EACH found |= (uint32_t)(x.v[i] >= floor) << i;
  return found;
}
INLINE F load_f16(const uint16_t* p) { F r; EACH r.v[i] = from_f16(p[i]); return r; }
INLINE void store_f16(uint16_t* p, F x) { EACH p[i] = to_f16(x.v[i]); }
INLINE F load_bf16(const uint16_t* p) { F r; EACH r.v[i] = from_bf16(p[i]); return r; }
INLINE F pick(const float* table, int32_t, const int32_t* index) { F r; EACH r.v[i] = table[index[i]]; return r; }
INLINE I zeros() { I r; EACH r.v[i] = 0; return r; }
INLINE I all_int(int32_t x) { I r; EACH r.v[i] = x; return r; }
INLINE F as_floats(I x) { F r; EACH r.v[i] = (float)x.v[i]; return r; }
INLINE I as_ints(F x) { I r; EACH r.v[i] = (int32_t)std::nearbyint(x.v[i]); return r; }
INLINE I add_int(I x, I y) { EACH x.v[i] += y.v[i]; return x; }
INLINE F bits(I x) { F r; memcpy(r.v, x.v, 64); return r; }
INLINE F lane_field(const uint8_t* words, int offset, int width) {
  F r;
  EACH {
    uint32_t word, next = 0;
    memcpy(&word, words + offset / 32 * 64 + 4 * i, 4);
    int shift = offset % 32;
    if (shift + width > 32) memcpy(&next, words + offset / 32 * 64 + 64 + 4 * i, 4);
    uint64_t both = (uint64_t)next << 32 | word;
    r.v[i] = (float)(uint32_t)(both >> shift & ((1u << width) - 1));
  }
  return r;
}
INLINE I shift_left(I x, int n) { EACH x.v[i] = (int32_t)((uint32_t)x.v[i] << n); return x; }
INLINE I bytes_as_ints(const int8_t* p) { I r; EACH r.v[i] = p[i]; return r; }
INLINE I codes_as_ints(const uint8_t* p) { I r; EACH r.v[i] = p[i]; return r; }
INLINE void store_bytes(int8_t* p, I x) { EACH p[i] = (int8_t)x.v[i]; }
INLINE Bytes load_bytes(const uint8_t* p) { Bytes r; memcpy(r.v, p, 64); return r; }
INLINE void save_bytes(uint8_t* p, Bytes x) { memcpy(p, x.v, 64); }
INLINE Bytes pick_bytes(const uint8_t* table, Bytes x) { for (uint8_t& byte : x.v) byte = table[byte]; return x; }
INLINE Bytes low_nibbles(Bytes x) { for (uint8_t& byte : x.v) byte &= 15; return x; }
INLINE Bytes high_nibbles(Bytes x) { for (uint8_t& byte : x.v) byte >>= 4; return x; }
constexpr bool CENTRED = false;
INLINE Bytes factors(Bytes codes) { return codes; }
INLINE I dot(I sum, Bytes codes, int32_t quad) {
  int8_t q[4];
  memcpy(q, &quad, 4);
  for (int i = 0; i < 64; i++) sum.v[i / 4] += (int32_t)codes.v[i] * q[i % 4];
  return sum;
}
INLINE I dot_nibbles(I sum, Bytes codes, int32_t quad) { return dot(sum, codes, quad); }
INLINE I total(I sums) { return sums; }
struct Shorts { int16_t v[32]; };  // 16 pairs
INLINE Shorts load_shorts(const uint8_t* p) { Shorts r; memcpy(r.v, p, 64); return r; }
INLINE I dot_shorts(I sum, Shorts pairs, int32_t pair) {
  int16_t first = (int16_t)pair, second = (int16_t)(pair >> 16);
  EACH sum.v[i] += pairs.v[2 * i] * first + pairs.v[2 * i + 1] * second;
  return sum;
}
INLINE I pick_short(const int16_t* table, int32_t, const int32_t* index) {
  I r;
  EACH r.v[i] = table[index[i]];
  return r;
}
INLINE I in_pairs(I low, I high) {
  EACH low.v[i] = (int32_t)(((uint32_t)low.v[i] & 0xffff) | (uint32_t)high.v[i] << 16);
  return low;
}
INLINE F byte(Bytes codes, int n) { F r; EACH r.v[i] = (float)codes.v[4 * i + n] - 128.0f; return r; }
INLINE F nibble(Bytes codes, int n) {
  F r;
  EACH r.v[i] = (float)(codes.v[4 * i + n % 4] >> (n < 4 ? 0 : 4) & 15);
  return r;
}
#undef EACH

#endif

#ifndef COUNTS_LANES
INLINE int count_least(F x, float floor) { return __builtin_popcount(lanes_least(x, floor)); }
#endif

// -- over the lanes, in one order -------------------------------------------------------------------------------------

#if defined(__AVX512F__) || defined(__AVX2__)
INLINE float sum(F x) {
  __m256 eight = _mm256_add_ps(lower(x), upper(x));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
INLINE float largest(F x) {
  __m256 eight = _mm256_max_ps(lower(x), upper(x));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
INLINE int32_t sum_int(I x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32(x);
#else
  __m256i eight = _mm256_add_epi32(x.a, x.b);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#endif
}
#else
INLINE float sum(F x) {
  float v[16];
  store(v, x);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) v[i] += v[i + n];
  return v[0];
}
INLINE float largest(F x) {
  float v[16];
  store(v, x);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) v[i] = v[i] > v[i + n] ? v[i] : v[i + n];
  return v[0];
}
INLINE int32_t sum_int(I x) {
  int32_t total = 0;
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) {
#if defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
      total += x.v[i][j];
#else
      total += x.v[4 * i + j];
#endif
    }
  return total;
}
#endif

INLINE void store_bf16(uint16_t* p, F x) {
  float v[16];
  store(v, x);
  for (int i = 0; i < 16; i++) p[i] = to_bf16(v[i]);
}

// -- rows become columns ----------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
INLINE void transpose(F* x) {
  F t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)  // x[i + j]: column j of each quarter, rows i … i + 3
    for (int j = 0; j < 2; j++) {
      __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + 2 + j]);
      x[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      x[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  for (int j = 0; j < 4; j++) {
    F even_top = _mm512_shuffle_f32x4(x[j], x[j + 4], 0x88), odd_top = _mm512_shuffle_f32x4(x[j], x[j + 4], 0xdd);
    F even = _mm512_shuffle_f32x4(x[j + 8], x[j + 12], 0x88), odd = _mm512_shuffle_f32x4(x[j + 8], x[j + 12], 0xdd);
    t[j] = _mm512_shuffle_f32x4(even_top, even, 0x88);
    t[j + 4] = _mm512_shuffle_f32x4(odd_top, odd, 0x88);
    t[j + 8] = _mm512_shuffle_f32x4(even_top, even, 0xdd);
    t[j + 12] = _mm512_shuffle_f32x4(odd_top, odd, 0xdd);
  }
  for (int i = 0; i < 16; i++) x[i] = t[i];
}
#elif defined(__AVX2__)
INLINE void transpose_eight(__m256* x) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0x44);
      u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0xee);
    }
  for (int j = 0; j < 4; j++) {
    x[j] = _mm256_permute2f128_ps(u[j], u[j + 4], 0x20);
    x[j + 4] = _mm256_permute2f128_ps(u[j], u[j + 4], 0x31);
  }
}
INLINE void transpose(F* x) {
  __m256 square[4][8];
  for (int i = 0; i < 8; i++) square[0][i] = x[i].a, square[1][i] = x[i].b;
  for (int i = 0; i < 8; i++) square[2][i] = x[i + 8].a, square[3][i] = x[i + 8].b;
  for (__m256* eight : square) transpose_eight(eight);
  for (int i = 0; i < 8; i++) x[i] = {square[0][i], square[2][i]}, x[i + 8] = {square[1][i], square[3][i]};
}
#else
INLINE void transpose(F* x) {
  float rows[16][16], column[16];
  for (int i = 0; i < 16; i++) store(rows[i], x[i]);
  for (int j = 0; j < 16; j++) {
    for (int i = 0; i < 16; i++) column[i] = rows[i][j];
    x[j] = load(column);
  }
}
#endif

// Lane i: `sum` of x[i], to the bit.
INLINE F sums_of(F* x) {
#if defined(__AVX512F__)
  // Halves are added of two vectors at once, so that what is left of 16 vectors fits one.
  F t[4];
  for (int i = 0; i < 4; i++) {
    F eight[2], four[2];
    for (int j = 0; j < 2; j++) {
      F a = x[i + 8 * j], b = x[i + 8 * j + 4];
      eight[j] = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    four[0] = _mm512_shuffle_f32x4(eight[0], eight[1], 0x88), four[1] = _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd);
    t[i] = add(four[0], four[1]);
  }
  for (int i = 0; i < 4; i += 2) {
    __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 1]);
    t[i / 2] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  return add(_mm512_shuffle_ps(t[0], t[1], 0x88), _mm512_shuffle_ps(t[0], t[1], 0xdd));
#elif defined(__AVX2__)
  __m256 out[2];
  for (int half = 0; half < 2; half++) {
    F* own = x + 8 * half;
    __m256 t[4];
    for (int i = 0; i < 4; i++) {
      __m256 a = _mm256_add_ps(own[i].a, own[i].b), b = _mm256_add_ps(own[i + 4].a, own[i + 4].b);
      t[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    for (int i = 0; i < 4; i += 2)
      t[i / 2] = _mm256_add_ps(_mm256_shuffle_ps(t[i], t[i + 1], 0x44), _mm256_shuffle_ps(t[i], t[i + 1], 0xee));
    out[half] = _mm256_add_ps(_mm256_shuffle_ps(t[0], t[1], 0x88), _mm256_shuffle_ps(t[0], t[1], 0xdd));
  }
  return {out[0], out[1]};
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
  F out;
  for (int part = 0; part < 4; part++) {
    float32x4_t t[4];
    for (int i = 0; i < 4; i++) {
      const F& own = x[4 * part + i];
      t[i] = vaddq_f32(vaddq_f32(own.v[0], own.v[2]), vaddq_f32(own.v[1], own.v[3]));
    }
    for (int i = 0; i < 4; i += 2)
      t[i / 2] = vaddq_f32(vcombine_f32(vget_low_f32(t[i]), vget_low_f32(t[i + 1])),
                           vcombine_f32(vget_high_f32(t[i]), vget_high_f32(t[i + 1])));
    out.v[part] = vpaddq_f32(t[0], t[1]);
  }
  return out;
#else
  transpose(x);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) x[i] = add(x[i], x[i + n]);
  return x[0];
#endif
}

// -- functions --------------------------------------------------------------------------------------------------------

// e^x, within 2 units in the last place; 0 below x = -87.3, so that a masked score has no weight at all.
INLINE F exponential(F x) {
  F clamped = larger(smaller(x, all(88.0f)), all(-87.0f));
  F n = nearest(mul(clamped, all(1.44269504088896341f)));
  F r = fma(n, all(-0.693359375f), clamped);
  r = fma(n, all(2.12194440e-4f), r);
  F p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, all(1.0f)));
  return where_least(x, -87.3f, mul(p, bits(shift_left(add_int(as_ints(n), all_int(127)), 23))));
}

// tanh x = 1 - 2 / (e^2x + 1), within 2e-7.
INLINE F hyperbolic_tangent(F x) {
  return sub(all(1.0f), divide(all(2.0f), add(exponential(add(x, x)), all(1.0f))));
}

}  // namespace KERNELS
