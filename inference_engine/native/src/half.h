// Numbers of 16 bits, in plain C++: what the instructions of every level must equal.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

static inline float from_f16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, rest = half & 0x3ff, word;
  float value;
  if (exponent == 31) word = sign | 0x7f800000 | rest << 13;
  else if (exponent) word = sign | (exponent + 112) << 23 | rest << 13;
  else {
    value = (float)rest * 5.9604644775390625e-08f;
    return sign ? -value : value;
  }
  memcpy(&value, &word, 4);
  return value;
}

static inline uint16_t to_f16(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  uint16_t sign = (uint16_t)(word >> 16 & 0x8000);
  uint32_t rest = word & 0x7fffffff;
  if (rest > 0x7f800000) return sign | 0x7e00 | (uint16_t)(rest >> 13 & 0x3ff);
  if (rest >= 0x477ff000) return sign | 0x7c00;
  if (rest < 0x38800000) {  // below the smallest normal number of 16 bits
    float magnitude;
    memcpy(&magnitude, &rest, 4);
    return sign | (uint16_t)std::nearbyint(magnitude * 16777216.0f);
  }
  rest += 0xfff + (rest >> 13 & 1);
  return sign | (uint16_t)((rest - 0x38000000) >> 13);
}

static inline float from_bf16(uint16_t half) {
  uint32_t word = (uint32_t)half << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
}

static inline uint16_t to_bf16(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  if ((word & 0x7fffffff) > 0x7f800000) return (uint16_t)(word >> 16 | 64);  // not a number stays one
  return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}
