// Activations as the products take them: tokens in groups that fit into registers, their numbers beside each other.
//
// A group's numbers are ordered by input, then token: a product reads them one after another. Nothing here depends on
// how the tokens are grouped: every number, scale and sum is computed from one token alone.
#pragma once
#include <cstdlib>
#include <limits>
#include <new>

#include "simd.h"
#include "threads.h"
#include "types.h"

namespace KERNELS {

constexpr int BLOCK = 32;  // inputs that share a scale
constexpr int QUADS = BLOCK / 4;

// The most tokens in a group: as many as keep their sums in registers.
#if defined(__AVX512F__)
constexpr int GROUP = 8;
#elif defined(__AVX2__)
constexpr int GROUP = 6;
#elif defined(__ARM_NEON)
constexpr int GROUP = 4;
#else
constexpr int GROUP = 2;
#endif

// Memory that a thread keeps from one call to the next.
class Scratch {
 public:
  ~Scratch() { free(memory_); }
  template <class T>
  T* of(int64_t count) {
    int64_t bytes = (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    if (bytes > bytes_) {
      free(memory_);
      memory_ = aligned_alloc(64, (size_t)bytes);
      bytes_ = memory_ ? bytes : 0;
      if (!memory_) throw std::bad_alloc();
    }
    return (T*)memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

// `count` tokens in groups of nearly the same size: 18 are three groups of 6, not two of 8 and one of 2.
struct Groups {
  int64_t tokens, count;
  explicit Groups(int64_t tokens) : tokens(tokens), count((tokens + GROUP - 1) / GROUP) {}
  int64_t first(int64_t group) const { return tokens * group / count; }
  int width(int64_t group) const { return (int)(first(group + 1) - first(group)); }
  int64_t of(int64_t token) const { return ((token + 1) * count - 1) / tokens; }
};

// Where quad `quad` of token `token` lies in a block of a group. Those that one instruction reads are neighbours.
INLINE int quad_at(int quad, int token, int width) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return (quad & ~1) * width + 2 * token + (quad & 1);
#else
  return quad * width + token;
#endif
}

// Of a group that begins with token t, everything begins at t times what one token has.
struct Activations {
  Groups groups;
  int64_t inputs, blocks;     // inputs of one token, those of the last block's padding included
  const float* numbers;       // [input][token]; exact
  const float* sums;          // [block][token]; exact: of the block's numbers; bytes: of its bytes, times the scale.
                              // [block][2][token] where a half of a block has an offset of its own
  const int32_t* quads;       // [block][QUADS · token], see quad_at: four bytes each
  const float* scales;        // [block][token]
  const int32_t* corrections; // [block][2][token]: of each half, what 128 too much in every code adds; negative
};

// Block `block` of a token's numbers, as two vectors; 0 beyond the last.
INLINE void load_block(const float* x, int64_t inputs, int64_t block, F& low, F& high) {
  int64_t left = inputs - block * BLOCK;
  if (left >= BLOCK) {
    low = load(x + block * BLOCK);
    high = load(x + block * BLOCK + LANES);
    return;
  }
  float padded[BLOCK] = {};
  memcpy(padded, x + block * BLOCK, (size_t)left * sizeof(float));
  low = load(padded);
  high = load(padded + LANES);
}

// A group's numbers, by input; those beyond `inputs` are 0.
INLINE void interleave(const float* x, int64_t x_stride, int64_t inputs, int64_t padded, int width, float* out) {
  int64_t i = 0;
  // A vector has an input of all tokens, and more lanes than there are tokens: the next vector is stored over these.
  for (; GROUP >= 6 && width >= 4 && (i + LANES) * width + LANES <= inputs * width; i += LANES) {
    F square[LANES];
    for (int t = 0; t < LANES; t++) square[t] = t < width ? load(x + t * x_stride + i) : all(0.0f);
    transpose(square);
    for (int k = 0; k < LANES; k++) store(out + (i + k) * width, square[k]);
  }
  for (; i < inputs; i++)
    for (int t = 0; t < width; t++) out[i * width + t] = x[t * x_stride + i];
  for (i = inputs * width; i < padded * width; i++) out[i] = 0;
}

struct Quantised {
  int32_t quads[QUADS], sum, later;  // sums of the bytes, and of those in the second half
  float scale;
};

// 32 numbers as signed bytes. A block with a number that is not finite has that as its scale, and bytes of 0: every
// output of the token becomes it. One with numbers that are smaller than any activation counts as zeros: the inverse of
// its scale would not be finite. halves: is the second sum wanted?
INLINE Quantised quantise(F low, F high, bool halves) {
  constexpr float MOST = std::numeric_limits<float>::max();
  Quantised result;
  F size = absolute(low), later = absolute(high), zero = all(0.0f);
  bool finite = (lanes_least(sub(zero, size), -MOST) & lanes_least(sub(zero, later), -MOST)) == 0xffff;
  float most = largest(larger(size, later));
  bool some = finite && most >= 1e-30f;
  F inverse = all(some ? 127.0f / most : 0.0f);
  result.scale = !finite ? std::numeric_limits<float>::quiet_NaN() : some ? most / 127.0f : 0.0f;
  if (!some) low = high = zero;
  I a = as_ints(mul(low, inverse)), b = as_ints(mul(high, inverse));
  store_bytes((int8_t*)result.quads, a);
  store_bytes((int8_t*)result.quads + LANES, b);
  result.sum = sum_int(add_int(a, b));
  result.later = halves ? sum_int(b) : 0;
  return result;
}

// The arrays of `Activations`, while they are written. halves: scales are those of halves of blocks, and sums where there
// are offsets.
struct Preparation {
  bool halves, sums_of_halves;
  const float* x;
  int64_t x_stride, inputs, padded, blocks;
  Groups groups;
  float *numbers, *sums, *scales;
  int32_t *quads, *corrections;

  void exact(int64_t group) const {
    int64_t first = groups.first(group);
    int width = groups.width(group);
    const float* rows = x + first * x_stride;
    if (numbers) interleave(rows, x_stride, inputs, padded, width, numbers + first * padded);
    if (!sums) return;
    for (int t = 0; t < width; t++)
      for (int64_t b = 0; b < blocks; b++) {
        F low, high;
        load_block(rows + t * x_stride, inputs, b, low, high);
        if (!sums_of_halves) {
          sums[first * blocks + b * width + t] = sum(add(low, high));
          continue;
        }
        float* own = sums + (first * blocks + b * width) * 2 + t;
        own[0] = sum(low), own[width] = sum(high);
      }
  }

  // Blocks [from, to) of all tokens, counted token by token.
  void bytes(int64_t from, int64_t to) const {
    while (from < to) {
      int64_t token = from / blocks, b = from - token * blocks, end = std::min(blocks, b + to - from);
      int64_t group = groups.of(token), first = groups.first(group);
      int width = groups.width(group);
      from += end - b;
      for (; b < end; b++) {
        F low, high;
        load_block(x + token * x_stride, inputs, b, low, high);
        put(quantise(low, high, halves), first, b, (int)(token - first), width);
      }
    }
  }

 private:
  void put(const Quantised& block, int64_t first, int64_t b, int t, int width) const {
    int32_t* own = quads + first * blocks * QUADS + b * QUADS * width;
    for (int q = 0; q < QUADS; q++) own[quad_at(q, t, width)] = block.quads[q];
    int32_t* correction = corrections + first * blocks * 2 + b * 2 * width + t;
    correction[0] = -128 * (block.sum - block.later);
    correction[width] = -128 * block.later;
    scales[first * blocks + b * width + t] = block.scale;
    if (!sums_of_halves) {
      sums[first * blocks + b * width + t] = block.scale * (float)block.sum;
      return;
    }
    float* two = sums + (first * blocks + b * width) * 2 + t;
    two[0] = block.scale * (float)(block.sum - block.later), two[width] = block.scale * (float)block.later;
  }
};

// Numbers of a call that dividing among threads pays for: to bytes, and into groups as they are.
constexpr int64_t WORTH_BYTES = 8192, WORTH_NUMBERS = 16384;

// Prepares the tokens on all threads; the arrays live in the caller's thread until its next call.
inline Activations prepare(Threads& threads, const Matrix& matrix, Identity identity, const float* x, int64_t x_stride,
                           int64_t count) {
  static thread_local Scratch number_memory, sum_memory, quad_memory, scale_memory, correction_memory;
  int32_t format = product_format(matrix.format);
  bool floats = is_float(format), bytes = identity == QUANTISED && !floats, offsets = has_offsets(format);
  bool halves = parts_of(format) == 2, sums_of_halves = halves && offsets;
  int64_t inputs = matrix.inputs, blocks = (inputs + BLOCK - 1) / BLOCK, padded = floats ? inputs : blocks * BLOCK;
  bool as_it_is = count == 1 && padded == inputs;
  Preparation work{halves, sums_of_halves, x, x_stride, inputs, padded, blocks, Groups(count),
                   nullptr, nullptr, nullptr, nullptr, nullptr};
  if (bytes) {
    work.quads = quad_memory.of<int32_t>(count * blocks * QUADS);
    work.scales = scale_memory.of<float>(count * blocks);
    work.corrections = correction_memory.of<int32_t>(count * blocks * 2);
  } else if (!as_it_is) {
    work.numbers = number_memory.of<float>(count * padded);
  }
  if (bytes || offsets) work.sums = sum_memory.of<float>(count * blocks * (sums_of_halves ? 2 : 1));
  if (bytes) {
    auto quantise = [&](int64_t from, int64_t to) { work.bytes(from, to); };
    if (count * inputs < WORTH_BYTES) quantise(0, count * blocks);
    else threads.split(count * blocks, 8, quantise);
  } else {
    auto groups = [&](int64_t first, int64_t end) {
      for (int64_t g = first; g < end; g++) work.exact(g);
    };
    if (count * inputs < WORTH_NUMBERS) groups(0, work.groups.count);
    else threads.split(work.groups.count, 1, groups);
  }
  const float* numbers = as_it_is ? x : work.numbers;
  return {work.groups, padded, blocks, numbers, work.sums, work.quads, work.scales, work.corrections};
}

}  // namespace KERNELS
