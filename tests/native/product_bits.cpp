// The bits of products of every format over odd sizes, one token and several. Compiled for each level of instructions,
// with KERNELS naming it, by `test_other_processors.py`: all have to print the same lines.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <tuple>

#include "matrix.h"
#include "pack.cpp"

using namespace KERNELS;

static float noise() {  // within ±2, the same everywhere
  static uint64_t state = 1;
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (float)((int64_t)(state >> 40) - (1 << 23)) / (1 << 22);
}

static uint64_t hashed(const std::vector<float>& numbers) {
  uint64_t hash = 14695981039346656037ull;
  for (float x : numbers) {
    uint32_t word;
    memcpy(&word, &x, 4);
    hash = (hash ^ word) * 1099511628211ull;
  }
  return hash;
}

// The blocks that a compact format holds, with their inputs and bytes.
struct Blocks { int32_t source; int64_t inputs, bytes; };

static Blocks blocks_of(int32_t format) {
  switch (format) {
    case Q5_0: return {FROM_Q5_0, 32, 22};
    case Q5_1: return {FROM_Q5_1, 32, 24};
    case Q5_K: return {FROM_Q5_K, 256, 176};
    case Q6_K: return {FROM_Q6_K, 256, 210};
    case Q2_K: return {FROM_Q2_K, 256, 84};
    case Q3_K: return {FROM_Q3_K, 256, 110};
    case IQ4_NL: return {FROM_IQ4_NL, 32, 18};
    case IQ4_XS: return {FROM_IQ4_XS, 256, 136};
    case MXFP4: return {FROM_MXFP4, 32, 17};
    default: return {FROM_FLOAT32, 1, 4};
  }
}

// Random ones, whose scales of 16 bits are finite whatever their place is.
static std::vector<uint8_t> packable(const Blocks& kind, int64_t outputs, int64_t inputs) {
  std::vector<uint8_t> data((size_t)(outputs * inputs / kind.inputs * kind.bytes));
  for (size_t i = 0; i < data.size(); i += 4) {
    float number = noise();
    if (kind.source == FROM_FLOAT32) memcpy(&data[i], &number, 4);
    else for (size_t j = i; j < std::min(i + 4, data.size()); j++) data[j] = (uint8_t)((int)(noise() * 64) + 128) & 0xbf;
  }
  return data;
}

static void print(int32_t format, int64_t outputs, int64_t asked) {
  Blocks kind = blocks_of(format);
  int64_t inputs = (asked + kind.inputs - 1) / kind.inputs * kind.inputs;
  std::vector<uint8_t> weights = packable(kind, outputs, inputs);
  int64_t size = kakeya_packed_bytes(format, outputs, inputs);
  std::vector<uint8_t> memory(size + 64);
  uint8_t* tiles = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
  if (kakeya_pack(format, kind.source, weights.data(), outputs, inputs, nullptr, tiles) != PACKED) {
    printf("%d: not packed\n", format);
    return;
  }
  Matrix matrix = {format, (int32_t)outputs, (int32_t)inputs, 0, tiles};
  std::vector<float> unpacked((size_t)(outputs * inputs));
  for (int64_t output = 0; output < outputs; output++) row(matrix, output, &unpacked[output * inputs]);
  printf("%d %d %d: %016llx", format, (int)outputs, (int)asked, (unsigned long long)hashed(unpacked));
  for (int threads : {1, 2})
    for (int64_t count : {1, 2, 3, 7, 21}) {
      std::vector<float> x(count * inputs), y(count * outputs);
      for (float& one : x) one = noise() * (noise() > 1 ? 100 : 1);
      for (Identity identity : {EXACT, QUANTISED}) {
        if (identity == QUANTISED && format < INT8) continue;
        Threads own(threads);
        linear(own, matrix, identity, x.data(), inputs, count, y.data(), outputs);
        printf(" %016llx", (unsigned long long)hashed(y));
      }
    }
  printf("\n");
}

int main() {
  for (int32_t format = 0; format < FORMATS; format++)
    for (auto [outputs, inputs] : {std::tuple{1, 1}, {17, 33}, {48, 64}, {70, 100}, {131, 320}, {16, 31}, {33, 1000}})
      print(format, outputs, inputs);
}
