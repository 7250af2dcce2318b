// Attention of one query and KV head over a list of slots, for queries that choose what they read (blocks.h,
// selection.h): 256 of the list are a chunk.
//
//   score    scaling · q · k, 16 chains of fma over the channels, a lane each, added as `sum` adds
//   chunk    as in attention.h, in the order of the list
//
// Keys that one query reads are not worth turning: a vector of 16 sums takes as many shuffles for each head as turning
// takes for each 8 channels.
#pragma once
#include <algorithm>

#include "attention.h"
#include "simd.h"
#include "types.h"

namespace KERNELS {
namespace listed {

using namespace attention;

constexpr int KEYS_AHEAD = 64;  // of the list, fetched before they are multiplied
constexpr int MOST_HEADS = 4;   // that are multiplied at once

// At most CHUNK slots of a region, in the order in which they are read.
template <class T>
struct Chunk {
  const T *keys = nullptr, *values = nullptr;  // of the region
  int64_t row = 0;
  int key_dim = 0, value_dim = 0;
  const int64_t* slots = nullptr;
  int count = 0;

  // Keys, or values, of `some` of them from the first on.
  ListedAhead<T> keys_ahead(int first, int some) const {
    return {keys, row, key_dim, slots + first, std::min(some, count - first)};
  }
  ListedAhead<T> values_ahead(int first, int some) const {
    return {values, row, value_dim, slots + first, std::min(some, count - first)};
  }
};

// Of one query and KV head; `slots` are counted from its region.
template <class T>
static Chunk<T> chunk_of(const Attention& call, int64_t query, int head, const int64_t* slots, int64_t count) {
  const int64_t* line = line_of(call, query);
  int64_t region = (line[START] + head * line[HEAD_SLOTS]) * call.row;
  return {(const T*)call.keys + region, (const T*)call.values + region, call.row, call.head_dim, call.value_dim, slots,
          (int)std::max<int64_t>(0, std::min<int64_t>(CHUNK, count))};
}

// Products of 16 keys at most with R vectors, into out[r · CHUNK …]; those that there are not give 0.
template <int R, class T>
static void score_some(const float* queries, const Chunk<T>& chunk, int first, float* out) {
  int dim = chunk.key_dim, count = std::min(16, chunk.count - first);
  F parts[R][16];
  for (int i = count; i < 16; i++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) parts[r][i] = all(0.0f);
  for (int i = 0; i < count; i++) {
    const T* key = chunk.keys + chunk.slots[first + i] * chunk.row;
    F sums[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[r] = all(0.0f);
    for (int d = 0; d < dim; d += 16) {
      F k = load(key + d);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sums[r] = fma(load(queries + r * dim + d), k, sums[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) parts[r][i] = sums[r];
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) store(out + r * CHUNK, sums_of(parts[r]));
}

template <class T>
static void score_heads(int heads, const float* queries, const Chunk<T>& chunk, int first, float* out) {
  switch (heads) {
    case 1: return score_some<1>(queries, chunk, first, out);
    case 2: return score_some<2>(queries, chunk, first, out);
    case 3: return score_some<3>(queries, chunk, first, out);
    default: return score_some<4>(queries, chunk, first, out);
  }
}

// The state of each head over a chunk. The keys of `next` are fetched while this one's values are added.
template <class T>
static void read(const Attention& call, int64_t query, int head, const Chunk<T>& chunk, const Chunk<T>& next,
                 float* states) {
  int dim = call.head_dim, value_dim = call.value_dim, group = call.query_heads / call.kv_heads;
  int64_t size = padded((int64_t)group * dim);
  float* queries = Room::own().floats(size + (int64_t)group * CHUNK);
  float* scores = queries + size;
  const float* from = call.queries + query * call.query_stride + (int64_t)head * group * dim;
  for (int d = 0; d < group * dim; d += 16) store(queries + d, mul(load(from + d), all(call.scaling)));
  memset(states, 0, sizeof(float) * group * state_size(value_dim));
  ListedAhead<T> begin = chunk.keys_ahead(0, KEYS_AHEAD);
  for (int i = 0; i < KEYS_AHEAD; i++) begin.fetch(i);
  for (int first = 0; first < chunk.count; first += 16) {
    ListedAhead<T> keys = chunk.keys_ahead(first + KEYS_AHEAD, 16), values = chunk.values_ahead(first, 16);
    for (int i = 0; i < 16; i++) keys.fetch(i), values.fetch(i);
    for (int g = 0; g < group; g += MOST_HEADS)
      score_heads(std::min(MOST_HEADS, group - g), queries + (int64_t)g * dim, chunk, first,
                  scores + (int64_t)g * CHUNK + first);
  }
  Sight sight = {};
  sight.add(0, chunk.count);
  for (int g = 0; g < group; g++)
    weigh(scores + (int64_t)g * CHUNK, sight, call.softcap, states + g * state_size(value_dim), value_dim);
  for (int g = 0; g < group; g += ROWS)
    product_of(std::min(ROWS, group - g), scores + (int64_t)g * CHUNK, CHUNK,
               ListedRows<T>{chunk.values, chunk.row, chunk.slots}, chunk.count, states + g * state_size(value_dim),
               state_size(value_dim), value_dim / 16, g ? ListedAhead<T>{} : next.keys_ahead(0, KEYS_AHEAD));
}

}  // namespace listed
}  // namespace KERNELS
