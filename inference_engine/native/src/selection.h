// Attention of single queries that choose which tokens they read: the contract is `inference_engine/kernels/
// components.py`, and this is its kernel for processors.
//
//   score    of every token that may be chosen, from the codes of its key, tile by tile
//   weigh    a group's softmax over these and what is read anyway; the tokens of largest weight
//   restore  those that have left the regions and that the session does not hold restored (restoring.h)
//   read     the sink, the window and those tokens, listed
//
// A tile is 32 runs of tokens. The query, rotated back and projected, is wanted at every run: with m the tile's middle
// and d ≥ 0 the distance of a run from it,
//
//   q'(m ± d) = Σ_f cos(dθ_f) U_f ± sin(dθ_f) V_f      U_f = cos(mθ_f) u_f + sin(mθ_f) v_f, V_f its derivative / θ_f
//
// so two runs cost one product with a table of 16 distances. Slow frequencies are four terms of their series together:
// a quarter of a radian from the middle, the first one left out is 0.0002 of its component.
//
// What a query does depends on its own vector, its line and what it reads. Pieces of tiles are fixed parts of the
// history, and sums run over them in order: so neither other queries nor threads change a bit.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "attention.h"
#include "blocks.h"
#include "restoring.h"
#include "simd.h"
#include "threads.h"
#include "types.h"

namespace KERNELS {
namespace selection {

using namespace attention;

constexpr int64_t PIECE = 1024;       // tokens that are scored in one go
constexpr int64_t QUERIES_AT_ONCE = 8;
constexpr int SERIES = 4;             // terms of slow frequencies
constexpr int HEADS_AT_ONCE = 4;
constexpr int MOST_TILE = 256;        // tokens
constexpr int BUCKETS = 1 << 11;      // of weights, by their leading bits
constexpr int BUCKET_SHIFT = 20;
constexpr int64_t SAMPLED = 8;        // of so many vectors of weights one says about where the bucket is
#if defined(__AVX512F__)  // twice the registers
constexpr int PRODUCT_ROWS = 6;
constexpr int VECTORS_AT_ONCE = 4;    // of a tile's codes: all of a side, or one
#else
constexpr int PRODUCT_ROWS = 3;
constexpr int VECTORS_AT_ONCE = 1;
#endif

// One query and KV head.
struct Job {
  int64_t query;
  int head;
  const KeyIndex* index;
  int64_t sink, local, upto, kept;
  int64_t ring, gone;                // entries behind the sink lie `ring` apart (0: all are there); those before `gone` are not
  int64_t first_tile, end_tile;      // that are scored
  int64_t pieces, near_chunks, chosen_chunks;
  int64_t weights, parts, near, chosen, far;  // where its part of each buffer begins
};

// What a call needs; reused by the next call of the same thread.
struct Scratch {
  std::vector<Job> jobs;
  std::vector<std::pair<int32_t, int32_t>> items;  // job, part
  std::vector<float> weights;   // by job [group][tokens]: scores, then e^(score - top of the piece)
  std::vector<float> parts;     // by job and piece [group][2]: top, sum
  std::vector<float> near, far; // states of chunks, by job
  std::vector<int32_t> chosen;
  std::vector<int32_t> counts;  // chosen tokens of each job
  std::vector<int64_t> places;  // as `chosen`, where these entries lie, from the region's first vector on
  std::vector<std::vector<restoring::Missing>> missing;  // by job
};

INLINE const KeyIndex* index_of(const int64_t* line) { return (const KeyIndex*)(uintptr_t)line[INDEX]; }

INLINE int64_t tile_tokens(const KeyIndex& index) { return 32 * index.run; }

// e^x of one number, with the bits of a vector's lane.
INLINE float exponential_of(float x) {
  float lanes[LANES];
  store(lanes, exponential(all(x)));
  return lanes[0];
}

// -- scores -----------------------------------------------------------------------------------------------------------

// The scores of one query and KV head, tile by tile.
class Scorer {
 public:
  Scorer(const Attention& call, const Job& job)
      : index_(*job.index),
        dim_(call.head_dim),
        group_(call.query_heads / call.kv_heads),
        rows_((int64_t)group_ * (index_.rank + 1)),
        padded_((rows_ + LANES - 1) / LANES * LANES),
        half_(index_.turned / 2),
        fields_(2 * index_.run * index_.rank),
        heads_(call.kv_heads),
        head_(job.head) {
    int64_t spectrum = half_ * padded_, even = (index_.fast + 2) * padded_, odd = (index_.fast + 2) * padded_;
    int64_t beyond = padded(index_.rank + 1);  // that a head's last vector may reach
    cosines_ = Room::own().floats(2 * spectrum + padded_ + 3 * beyond + even + odd + 2 * LANES * padded_ +
                                  fields_ * LANES);
    sines_ = cosines_ + spectrum + beyond;
    still_ = sines_ + spectrum + beyond;
    even_ = still_ + padded_ + beyond;
    odd_ = even_ + even;
    turned_ = odd_ + odd;
    codes_ = turned_ + 2 * LANES * padded_;
    take_query(call, job);
  }

  // The scores of a tile: head g's from out + g · stride on, vector after vector.
  void score(int64_t tile, float* out, int64_t stride) {
    const uint8_t* words = (tile & 1 ? index_.odd : index_.even) + ((tile / 2) * heads_ + head_) * index_.words * 64;
    for (int64_t at = 0; at < (int64_t)index_.words * 64; at += LINE_BYTES) __builtin_prefetch(words + at);
    turn(tile);
    // The usual sizes of a code: where its fields lie is known here.
    if (index_.bits == 3 && index_.rank == 16 && index_.run == 4) return add_fields<3, 16>(words, out, stride);
    if (index_.bits == 3 && index_.rank == 32 && index_.run == 4) return add_fields<3, 32>(words, out, stride);
    switch (index_.bits) {
      case 2: unpack<2>(words); break;
      case 3: unpack<3>(words); break;
      case 4: unpack<4>(words); break;
      default:
        for (int64_t field = 0; field < fields_; field++)
          store(codes_ + field * LANES, lane_field(words, (int)(field * index_.bits), index_.bits));
    }
    for (int first = 0; first < group_; first += HEADS_AT_ONCE) switch (std::min(HEADS_AT_ONCE, group_ - first)) {
        case 1: add_up<1>(first, out, stride); break;
        case 2: add_up<2>(first, out, stride); break;
        case 3: add_up<3>(first, out, stride); break;
        default: add_up<4>(first, out, stride);
      }
  }

 private:
  // 32 fields are as many words as a field has bits, so that their shifts are known here.
  template <int BITS>
  void unpack(const uint8_t* words) {
    float* out = codes_;
    int64_t field = 0;
    for (; field + 32 <= fields_; field += 32, words += BITS * 64, out += 32 * LANES) {
#pragma GCC unroll 32
      for (int i = 0; i < 32; i++) store(out + i * LANES, lane_field(words, i * BITS, BITS));
    }
    for (int i = 0; field + i < fields_; i++) store(out + i * LANES, lane_field(words, i * BITS, BITS));
  }

  // u_f, v_f and the part that does not turn, of all rows of all heads of the group: row = head · (rank + 1) + component.
  void take_query(const Attention& call, const Job& job) {
    const float* query = call.queries + job.query * call.query_stride + (int64_t)head_ * group_ * dim_;
    int64_t each = index_.rank + 1, width = padded(each);
    const float* rows = index_.rows + head_ * dim_ * width;
    memset(cosines_, 0, sizeof(float) * (2 * half_ + 1) * padded_);
    // A head's last vector reaches into the rows of the next one, which are written after it.
    for (int64_t f = 0; f < half_; f++)
      for (int g = 0; g < group_; g++) {
        F a = all(query[g * dim_ + f] * call.scaling), b = all(query[g * dim_ + f + half_] * call.scaling);
        for (int64_t j = 0; j < each; j += LANES) {
          F m = load(rows + f * width + j), n = load(rows + (f + half_) * width + j);
          store(cosines_ + f * padded_ + g * each + j, fma(b, n, mul(a, m)));
          store(sines_ + f * padded_ + g * each + j, sub(mul(b, m), mul(a, n)));
        }
      }
    for (int g = 0; g < group_; g++)
      for (int64_t j = 0; j < each; j += LANES) {
        F still = all(0.0f);
        for (int64_t d = 2 * half_; d < dim_; d++)
          still = fma(all(query[g * dim_ + d] * call.scaling), load(rows + d * width + j), still);
        store(still_ + g * each + j, still);
      }
  }

  // The query at the middle of a tile, and from there at its runs: turned_ [row][2][16], runs behind and before it.
  void turn(int64_t tile) {
    const float *cosines = index_.middles + tile * 2 * half_, *sines = cosines + half_, *speeds = index_.frequencies;
    const int64_t padded = padded_, half = half_, fast = std::min<int64_t>(index_.fast, half);
    const int64_t crawling = std::max<int64_t>(fast, std::min<int64_t>(index_.crawling, half));
    for (int64_t row = 0; row < padded; row += LANES) {
      const float *us = cosines_ + row, *vs = sines_ + row;
      float *even = even_ + row, *odd = odd_ + row;
      auto turned = [&](int64_t f, F& value, F& slope) {
        F u = load(us + f * padded), v = load(vs + f * padded), c = all(cosines[f]), s = all(sines[f]);
        value = fma(s, v, mul(c, u)), slope = sub(mul(c, v), mul(s, u));
      };
      F terms[SERIES] = {load(still_ + row), all(0.0f), all(0.0f), all(0.0f)}, value, slope;
      int64_t f = 0;
      for (; f < fast; f++, even += padded, odd += padded) {
        turned(f, value, slope);
        store(even, value), store(odd, slope);
      }
      for (; f < crawling; f++) {
        turned(f, value, slope);
        float speed = speeds[f];
        terms[0] = add(terms[0], value);
        terms[1] = fma(all(speed), slope, terms[1]);
        terms[2] = fma(all(speed * speed), value, terms[2]);
        terms[3] = fma(all(speed * speed * speed), slope, terms[3]);
      }
      for (; f < half; f++) {
        turned(f, value, slope);
        terms[0] = add(terms[0], value);
        terms[1] = fma(all(speeds[f]), slope, terms[1]);
      }
      store(even, terms[0]), store(even + padded, terms[2]);
      store(odd, terms[1]), store(odd + padded, terms[3]);
    }
    int64_t row = 0;
    for (; row + PRODUCT_ROWS <= rows_; row += PRODUCT_ROWS) spread<PRODUCT_ROWS>(row);
    for (; row + PRODUCT_ROWS / 2 <= rows_; row += PRODUCT_ROWS / 2) spread<PRODUCT_ROWS / 2>(row);
    for (; row < rows_; row++) spread<1>(row);
  }

  // tables: [fast + 2][16] of even functions of the distance, then as many of odd ones.
  template <int R>
  void spread(int64_t row) {
    F evens[R], odds[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) evens[r] = odds[r] = all(0.0f);
    const float *even = even_ + row, *odd = odd_ + row;
    const float *of_even = index_.tables, *of_odd = of_even + (index_.fast + 2) * LANES;
    for (int k = 0; k < index_.fast + 2; k++, even += padded_, odd += padded_) {
      F a = load(of_even + k * LANES), b = load(of_odd + k * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        evens[r] = fma(all(even[r]), a, evens[r]);
        odds[r] = fma(all(odd[r]), b, odds[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      store(turned_ + (row + r) * 2 * LANES, add(evens[r], odds[r]));
      store(turned_ + (row + r) * 2 * LANES + LANES, sub(evens[r], odds[r]));
    }
  }

  template <int G>
  void add_up(int first, float* out, int64_t stride) {
    int64_t each = (index_.rank + 1) * 2 * LANES;
    for (int v = 0; v < 2 * index_.run; v++) {
      const float* turned = turned_ + first * each + (v & 1) * LANES;
      const float* codes = codes_ + (int64_t)v * index_.rank * LANES;
      F sums[G];
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) sums[g] = load(turned + g * each + index_.rank * 2 * LANES);
      for (int j = 0; j < index_.rank; j++) {
        F code = load(codes + j * LANES);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) sums[g] = fma(load(turned + g * each + j * 2 * LANES), code, sums[g]);
      }
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) store(out + (first + g) * stride + v * LANES, sums[g]);
    }
  }

  // As `unpack` and `add_up` would, for runs of four tokens: codes stay in registers.
  template <int BITS, int RANK>
  void add_fields(const uint8_t* words, float* out, int64_t stride) {
    for (int first = 0; first < group_; first += HEADS_AT_ONCE) switch (std::min(HEADS_AT_ONCE, group_ - first)) {
        case 1: add_runs<BITS, RANK, 1>(words, first, out, stride); break;
        case 2: add_runs<BITS, RANK, 2>(words, first, out, stride); break;
        case 3: add_runs<BITS, RANK, 3>(words, first, out, stride); break;
        default: add_runs<BITS, RANK, 4>(words, first, out, stride);
      }
  }

  template <int BITS, int RANK, int G>
  void add_runs(const uint8_t* words, int first, float* out, int64_t stride) {
    add_side<BITS, RANK, G, 0>(words, first, out, stride);
    add_side<BITS, RANK, G, 1>(words, first, out, stride);
  }

  // The runs of one side of the middle have one query: VECTORS_AT_ONCE tokens of each are multiplied with it at once.
  template <int BITS, int RANK, int G, int SIDE>
  void add_side(const uint8_t* words, int first, float* out, int64_t stride) {
    constexpr int64_t EACH = (RANK + 1) * 2 * LANES;
    const float* turned = turned_ + first * EACH + SIDE * LANES;
    out += first * stride;
    add_vectors<BITS, RANK, G, SIDE, 0>(words, turned, out, stride);
    if constexpr (VECTORS_AT_ONCE == 1) {
      add_vectors<BITS, RANK, G, SIDE, 1>(words, turned, out, stride);
      add_vectors<BITS, RANK, G, SIDE, 2>(words, turned, out, stride);
      add_vectors<BITS, RANK, G, SIDE, 3>(words, turned, out, stride);
    }
  }

  template <int BITS, int RANK, int G, int SIDE, int FIRST>
  static void add_vectors(const uint8_t* words, const float* turned, float* out, int64_t stride) {
    constexpr int64_t EACH = (RANK + 1) * 2 * LANES;
    F sums[VECTORS_AT_ONCE][G];
    UNROLL for (int g = 0; g < G; g++) {
      F still = load(turned + g * EACH + RANK * 2 * LANES);
      UNROLL for (int v = 0; v < VECTORS_AT_ONCE; v++) sums[v][g] = still;
    }
#pragma GCC unroll 32
    for (int j = 0; j < RANK; j++) {
      F codes[VECTORS_AT_ONCE];
      UNROLL for (int v = 0; v < VECTORS_AT_ONCE; v++)
        codes[v] = lane_field(words, ((2 * (FIRST + v) + SIDE) * RANK + j) * BITS, BITS);
      UNROLL for (int g = 0; g < G; g++) {
        F query = load(turned + g * EACH + j * 2 * LANES);
        UNROLL for (int v = 0; v < VECTORS_AT_ONCE; v++) sums[v][g] = fma(query, codes[v], sums[v][g]);
      }
    }
    UNROLL for (int g = 0; g < G; g++)
      UNROLL for (int v = 0; v < VECTORS_AT_ONCE; v++)
        store(out + g * stride + (2 * (FIRST + v) + SIDE) * LANES, sums[v][g]);
  }

  const KeyIndex& index_;
  int dim_, group_;
  int64_t rows_, padded_, half_, fields_;
  int heads_, head_;
  float *cosines_, *sines_, *still_, *even_, *odd_, *turned_, *codes_;
};

// Offset in a tile of place i of its scores.
INLINE int64_t offset_of(const KeyIndex& index, int64_t place) {
  int64_t vector = place / LANES, lane = place % LANES;
  return (vector % 2 ? LANES - 1 - lane : LANES + lane) * index.run + vector / 2;
}

INLINE int64_t tokens_of(const Job& job) { return (job.end_tile - job.first_tile) * tile_tokens(*job.index); }

// A piece's scores become weights against its own top.
static void score_piece(const Attention& call, const Job& job, int64_t piece, Scratch& scratch) {
  const KeyIndex& index = *job.index;
  int group = call.query_heads / call.kv_heads;
  int64_t tile_size = tile_tokens(index), stride = tokens_of(job), per_piece = PIECE / tile_size;
  int64_t first = job.first_tile + piece * per_piece, end = std::min(first + per_piece, job.end_tile);
  float* out = scratch.weights.data() + job.weights + (first - job.first_tile) * tile_size;
  Scorer scorer(call, job);
  for (int64_t tile = first; tile < end; tile++) {
    float* scores = out + (tile - first) * tile_size;
    scorer.score(tile, scores, stride);
    for (int g = 0; call.softcap != 0 && g < group; g++)
      for (int64_t i = 0; i < tile_size; i += LANES) {
        float* lanes = scores + g * stride + i;
        store(lanes, mul(all(call.softcap), hyperbolic_tangent(divide(load(lanes), all(call.softcap)))));
      }
    if (tile * tile_size >= job.sink) continue;
    for (int64_t place = 0; place < tile_size; place++)
      if (tile * tile_size + offset_of(index, place) < job.sink)
        for (int g = 0; g < group; g++) scores[g * stride + place] = HIDDEN;
  }
  float* parts = scratch.parts.data() + job.parts + piece * group * 2;
  for (int g = 0; g < group; g++) {
    float* scores = out + g * stride;
    int64_t count = (end - first) * tile_size;
    F tops = all(HIDDEN), total = all(0.0f);
    for (int64_t i = 0; i < count; i += LANES) tops = larger(load(scores + i), tops);
    F top = all(largest(tops));
    for (int64_t i = 0; i < count; i += LANES) {
      F weights = exponential(sub(load(scores + i), top));
      store(scores + i, weights);
      total = add(total, weights);
    }
    parts[2 * g] = largest(tops);
    parts[2 * g + 1] = sum(total);
  }
}

// -- reading ----------------------------------------------------------------------------------------------------------

// Entries that are read whatever is chosen: the sink, then the window.
INLINE int64_t near_sink(const Job& job) { return std::min(job.sink, job.upto + 1); }
INLINE int64_t near_count(const Job& job) {
  return near_sink(job) + std::max<int64_t>(0, job.upto + 1 - std::max(job.local, job.sink));
}

template <class T>
static void read_near(const Attention& call, const Job& job, int64_t chunk, Scratch& scratch) {
  int64_t first = chunk * CHUNK, sink = near_sink(job), local = std::max(job.local, job.sink) - sink;
  int64_t size = (int64_t)(call.query_heads / call.kv_heads) * state_size(call.value_dim);
  // The window is no longer than the ring buffer, so that it wraps around once at most.
  int64_t begin = job.ring ? (local + sink - job.sink) % job.ring : 0;
  auto slot = [&](int i) {
    int64_t place = first + i;
    if (place < sink) return place;
    if (!job.ring) return local + place;
    int64_t in_ring = begin + place - sink;
    return job.sink + (in_ring < job.ring ? in_ring : in_ring - job.ring);
  };
  int64_t slots[CHUNK], count = std::min<int64_t>(CHUNK, near_count(job) - first);
  for (int i = 0; i < count; i++) slots[i] = slot(i);
  listed::read(call, job.query, job.head, listed::chunk_of<T>(call, job.query, job.head, slots, count), {},
               scratch.near.data() + job.near + chunk * size);
}

template <class T>
static void read_chosen(const Attention& call, const Job& job, int64_t chunk, int64_t found, Scratch& scratch) {
  int64_t size = (int64_t)(call.query_heads / call.kv_heads) * state_size(call.value_dim);
  int64_t slots[CHUNK], first = job.chosen + chunk * CHUNK, count = std::min<int64_t>(CHUNK, found - chunk * CHUNK);
  for (int64_t i = 0; i < count; i++)
    slots[i] = job.ring ? scratch.places[(size_t)(first + i)] : scratch.chosen[(size_t)(first + i)];
  listed::read(call, job.query, job.head, listed::chunk_of<T>(call, job.query, job.head, slots, count), {},
               scratch.far.data() + job.far + chunk * size);
}

// -- choice -----------------------------------------------------------------------------------------------------------

INLINE float bucket_start(int bucket) {
  uint32_t bits = bucket < BUCKETS ? (uint32_t)bucket << BUCKET_SHIFT : 0x7f800000u;
  float number;
  memcpy(&number, &bits, 4);
  return number != number ? INFINITY : number;
}

// body(tile, offset in it, weight) of every token whose weight is `floor` or more and, if that is a number, less than
// `ceiling`, tile after tile.
template <class Body>
INLINE void each_least(const KeyIndex& index, const Job& job, const float* weights, int64_t tokens, float floor,
                       float ceiling, const Body& body) {
  int64_t tile_size = tile_tokens(index), tile = job.first_tile;
  for (int64_t first = 0; first < tokens; first += tile_size, tile++)
    for (int64_t place = 0; place < tile_size; place += LANES) {
      F own = load(weights + first + place);
      for (uint32_t lanes = lanes_least(own, floor) & ~lanes_least(own, ceiling); lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        body(tile, offset_of(index, place + lane), weights[first + place + lane]);
      }
    }
}

// The tokens of largest weight, ascending; the first among equals. Returns how many.
static int64_t choose(const Attention& call, const Job& job, Scratch& scratch) {
  const KeyIndex& index = *job.index;
  int group = call.query_heads / call.kv_heads;
  int64_t tile_size = tile_tokens(index), tokens = tokens_of(job), each = state_size(call.value_dim);
  if (!tokens || !job.kept) return 0;
  const float* parts = scratch.parts.data() + job.parts;
  float* weights = scratch.weights.data() + job.weights;
  static thread_local std::vector<float> shares;
  shares.resize((size_t)(job.pieces * group));
  for (int g = 0; g < group; g++) {
    float top = HIDDEN, total = 0;
    auto near = [&](int64_t chunk) { return scratch.near.data() + job.near + (chunk * group + g) * each + call.value_dim; };
    for (int64_t chunk = 0; chunk < job.near_chunks; chunk++) top = std::max(top, near(chunk)[1]);
    for (int64_t piece = 0; piece < job.pieces; piece++) top = std::max(top, parts[(piece * group + g) * 2]);
    for (int64_t chunk = 0; chunk < job.near_chunks; chunk++)
      total = std::fma(near(chunk)[0], exponential_of(near(chunk)[1] - top), total);
    for (int64_t piece = 0; piece < job.pieces; piece++) {
      float share = exponential_of(parts[(piece * group + g) * 2] - top);
      shares[(size_t)(piece * group + g)] = share;
      total = std::fma(parts[(piece * group + g) * 2 + 1], share, total);
    }
    for (int64_t piece = 0; piece < job.pieces; piece++) shares[(size_t)(piece * group + g)] /= total;
  }
  int64_t per_piece = PIECE / tile_size * tile_size;
  for (int64_t piece = 0; piece < job.pieces; piece++) {
    int64_t end = std::min((piece + 1) * per_piece, tokens);
    for (int64_t i = piece * per_piece; i < end; i += LANES) {
      F weight = all(0.0f);
      for (int g = 0; g < group; g++)
        weight = fma(load(weights + g * tokens + i), all(shares[(size_t)(piece * group + g)]), weight);
      store(weights + i, weight);
    }
  }
  for (int64_t i = 0; i < tokens && job.first_tile * tile_size + i / tile_size * tile_size < job.sink; i++) {
    int64_t token = (job.first_tile + i / tile_size) * tile_size + offset_of(index, i % tile_size);
    if (token < job.sink) weights[i] = -1.0f;
  }
  // How many of every `apart`-th vector weigh a bucket's least or more; what is not a number is not counted, and not chosen.
  auto from = [&](int bucket, int64_t apart) {
    float floor = bucket_start(bucket);
    int64_t count = 0;
    for (int64_t i = 0; i < tokens; i += apart * LANES) count += count_least(load(weights + i), floor);
    return count;
  };
  // The last bucket that, with those above it, has enough; the first where none has. A part of the tokens says about where
  // it is, and steps away from there grow.
  int bucket = 0, tried = 1;
  for (int beyond = BUCKETS, middle; tried + 1 < beyond;)
    (from(middle = (tried + beyond) / 2, SAMPLED) * SAMPLED >= job.kept ? tried : beyond) = middle;
  int64_t above = 0, inside = -1;  // tokens of the buckets above, and of it
  for (int beyond = BUCKETS, step = 1; bucket + 1 < beyond; step *= 2) {
    int64_t count = from(tried, 1);
    if (count >= job.kept) bucket = tried, inside = count, tried += step;
    else beyond = tried, above = count, tried -= step;
    if (tried <= bucket || tried >= beyond) tried = (bucket + beyond) / 2;
  }
  inside = (inside < 0 ? from(0, 1) : inside) - above;
  int64_t left = job.kept - above;
  // Where more are in the last bucket than are left, the least of them that are chosen: their weight, and the last token.
  float floor = bucket_start(bucket), ceiling = bucket_start(bucket + 1);
  int32_t last_token = INT32_MAX;
  if (inside > left) {
    static thread_local std::vector<std::pair<float, int32_t>> found;
    found.clear();
    each_least(index, job, weights, tokens, floor, ceiling, [&](int64_t tile, int64_t offset, float weight) {
      found.emplace_back(weight, (int32_t)(tile * tile_size + offset));
    });
    left = std::min<int64_t>(left, (int64_t)found.size());
    if (!left) return 0;
    auto before = [](const auto& a, const auto& b) {
      return a.first > b.first || (a.first == b.first && a.second < b.second);  // among equals the first token
    };
    std::nth_element(found.begin(), found.begin() + (left - 1), found.end(), before);
    floor = found[(size_t)(left - 1)].first, last_token = found[(size_t)(left - 1)].second;
  }
  int32_t* out = scratch.chosen.data() + job.chosen;
  int64_t chosen = 0, tile_now = -1;
  uint64_t seen[MOST_TILE / 64] = {};
  auto emit = [&] {
    for (int w = 0; w < MOST_TILE / 64; seen[w++] = 0)
      for (uint64_t word = seen[w]; word; word &= word - 1)
        out[chosen++] = (int32_t)(tile_now * tile_size + 64 * w + __builtin_ctzll(word));
  };
  each_least(index, job, weights, tokens, floor, NAN, [&](int64_t tile, int64_t offset, float weight) {
    if (weight == floor && tile * tile_size + offset > last_token) return;
    if (tile != tile_now) emit(), tile_now = tile;
    seen[offset / 64] |= 1ull << offset % 64;
  });
  emit();
  return chosen;
}

// Where the chosen tokens lie, if entries leave the regions: in the restore cache, where some have to be restored first, or
// still in the ring buffer.
static void find_places(const Attention& call, int64_t j, int64_t found, Scratch& scratch) {
  const Job& job = scratch.jobs[(size_t)j];
  Archive* archive = job.index->archive;
  const int64_t* line = line_of(call, job.query);
  const int32_t* chosen = scratch.chosen.data() + job.chosen;
  int64_t* places = scratch.places.data() + job.chosen;
  int64_t gone = std::lower_bound(chosen, chosen + found, (int32_t)job.gone) - chosen;
  auto& missing = scratch.missing[(size_t)j];
  int64_t region = line[START] + job.head * line[HEAD_SLOTS];
  if (gone && !restoring::match(*archive, job.head, chosen, gone, places, missing)) {
    std::fill(places, places + gone, 0);  // never read: the archive is reported as broken
    __atomic_store_n(&archive->is_broken, 1, __ATOMIC_RELAXED);
  } else {
    for (int64_t i = 0; i < gone; i++) places[i] = restoring::vector_of(*archive, job.head, (int32_t)places[i]) - region;
  }
  for (int64_t i = gone; i < found; i++) places[i] = job.sink + (chosen[i] - job.sink) % job.ring;
}

// Joins the states of a query and KV head, those that are read anyway first.
static void finish_job(const Attention& call, const Job& job, int64_t found, Scratch& scratch) {
  int group = call.query_heads / call.kv_heads, dim = call.value_dim;
  int64_t each = state_size(dim);
  for (int g = 0; g < group; g++) {
    float* state = scratch.near.data() + job.near + g * each;
    for (int64_t chunk = 1; chunk < job.near_chunks; chunk++) join(state, state + chunk * group * each, dim);
    for (int64_t chunk = 0; chunk * CHUNK < found; chunk++)
      join(state, scratch.far.data() + job.far + (chunk * group + g) * each, dim);
    int query_head = job.head * group + g;
    const float* sink = call.head_sinks ? call.head_sinks + query_head : nullptr;
    finish(state, sink, dim, call.out + job.query * call.out_stride + (int64_t)query_head * dim);
  }
}

// -- division of work ------------------------------------------------------------------------------------------------

static void make_jobs(const Attention& call, const int64_t* queries, int64_t count, Scratch& scratch) {
  int64_t group = call.query_heads / call.kv_heads, size = group * state_size(call.value_dim);
  int64_t weights = 0, parts = 0, near = 0, chosen = 0, far = 0;
  scratch.jobs.clear();
  for (int64_t i = 0; i < count; i++) {
    const int64_t* line = line_of(call, queries[i]);
    for (int head = 0; head < call.kv_heads; head++) {
      Job job = {};
      job.query = queries[i], job.head = head, job.index = index_of(line);
      job.sink = line[SINK], job.local = line[LOCAL], job.upto = line[UPTO], job.kept = line[KEPT];
      if (job.index->archive) job.ring = line[RING], job.gone = line[FLOOR];
      int64_t tile = tile_tokens(*job.index);
      job.end_tile = job.local / tile, job.first_tile = std::min(job.sink / tile, job.end_tile);
      int64_t tokens = tokens_of(job);
      job.kept = std::min(job.kept, tokens);
      job.pieces = (tokens + PIECE - 1) / PIECE;
      job.near_chunks = (near_count(job) + CHUNK - 1) / CHUNK;
      job.chosen_chunks = (job.kept + CHUNK - 1) / CHUNK;
      job.weights = weights, job.parts = parts, job.near = near, job.chosen = chosen, job.far = far;
      weights += group * tokens, parts += job.pieces * group * 2, near += job.near_chunks * size;
      chosen += job.kept, far += job.chosen_chunks * size;
      scratch.jobs.push_back(job);
    }
  }
  auto grow = [](auto& memory, int64_t wanted) {
    if ((int64_t)memory.size() < wanted) memory.resize((size_t)wanted);
  };
  grow(scratch.weights, weights + LANES), grow(scratch.parts, parts), grow(scratch.near, near);
  grow(scratch.far, far), grow(scratch.chosen, chosen);
  scratch.counts.assign(scratch.jobs.size(), 0);
  if ((int64_t)scratch.places.size() < chosen) scratch.places.resize((size_t)chosen);
  if (scratch.missing.size() < scratch.jobs.size()) scratch.missing.resize(scratch.jobs.size());
  for (auto& missing : scratch.missing) missing.clear();
}

template <class T>
static void attend_some(Threads& threads, const Attention& call, const int64_t* queries, int64_t count) {
  static thread_local Scratch own;
  Scratch& scratch = own;  // the other threads use the caller's
  make_jobs(call, queries, count, scratch);
  auto jobs = (int64_t)scratch.jobs.size();
  auto each_part = [&](auto parts_of, const auto& body) {
    scratch.items.clear();
    for (int64_t j = 0; j < jobs; j++)
      for (int64_t part = 0; part < parts_of(scratch.jobs[(size_t)j]); part++)
        scratch.items.emplace_back((int32_t)j, (int32_t)part);
    take_turns(threads, (int64_t)scratch.items.size(), false, [&](int64_t item) {
      auto [j, part] = scratch.items[(size_t)item];
      body(j, scratch.jobs[(size_t)j], part);
    });
  };
  each_part([](const Job& job) { return job.pieces + job.near_chunks; }, [&](int64_t, const Job& job, int64_t part) {
    if (part < job.pieces) score_piece(call, job, part, scratch);
    else read_near<T>(call, job, part - job.pieces, scratch);
  });
  each_part([](const Job&) { return 1; }, [&](int64_t j, const Job& job, int64_t) {
    int64_t found = choose(call, job, scratch);
    scratch.counts[(size_t)j] = (int32_t)found;
    if (job.ring) find_places(call, j, found, scratch);
  });
  int64_t missed = 0;
  for (int64_t j = 0; j < jobs; j++) missed += (int64_t)scratch.missing[(size_t)j].size();
  int64_t at_once = restoring::at_once(missed, threads.count());
  scratch.items.clear();
  for (int64_t j = 0; j < jobs; j++)
    for (int64_t first = 0; first < (int64_t)scratch.missing[(size_t)j].size(); first += at_once)
      scratch.items.emplace_back((int32_t)j, (int32_t)first);
  if (!scratch.items.empty())
    take_turns(threads, (int64_t)scratch.items.size(), false, [&](int64_t item) {
      auto [j, first] = scratch.items[(size_t)item];
      const Job& job = scratch.jobs[(size_t)j];
      const auto& missing = scratch.missing[(size_t)j];
      int64_t count = std::min<int64_t>(at_once, (int64_t)missing.size() - first);
      restoring::restore_missing(*job.index, job.head, call, missing.data() + first, count);
    });
  std::vector<std::atomic<int64_t>> left((size_t)jobs);
  for (int64_t j = 0; j < jobs; j++) left[(size_t)j] = std::max<int64_t>(1, scratch.jobs[(size_t)j].chosen_chunks);
  each_part([](const Job& job) { return std::max<int64_t>(1, job.chosen_chunks); },
            [&](int64_t j, const Job& job, int64_t part) {
              int64_t found = scratch.counts[(size_t)j];
              if (part * CHUNK < found) read_chosen<T>(call, job, part, found, scratch);
              if (left[(size_t)j].fetch_sub(1, std::memory_order_acq_rel) == 1) finish_job(call, job, found, scratch);
            });
}

template <class T>
static void attend_all(Threads& threads, const Attention& call) {
  static thread_local std::vector<int64_t> queries;
  queries.clear();
  for (int64_t query = 0; query < call.count; query++)
    if (chooses_tokens(line_of(call, query))) queries.push_back(query);
  auto count = (int64_t)queries.size();
  for (int64_t first = 0, end; first < count; first = end) {
    // Queries of one session share a restore cache: they restore into it one after another.
    auto is_new = [&](int64_t i) {
      const KeyIndex* index = index_of(line_of(call, queries[(size_t)i]));
      for (int64_t other = first; index->archive && other < i; other++)
        if (index_of(line_of(call, queries[(size_t)other])) == index) return false;
      return true;
    };
    for (end = first + 1; end < count && end - first < QUERIES_AT_ONCE && is_new(end);) end++;
    attend_some<T>(threads, call, queries.data() + first, end - first);
  }
}

}  // namespace selection

// Attention of every query of a call: over all it sees, over blocks and over tokens that it chooses.
template <class T>
static void attend_as(Threads& threads, const Attention& call) {
  attention::attend_as<T>(threads, call);
  blocks::attend_all<T>(threads, call);
  selection::attend_all<T>(threads, call);
}

static void attend(Threads& threads, const Attention& call) {
  switch (call.kv_type) {
    case KV_FLOAT16: return attend_as<attention::Half>(threads, call);
    case KV_BFLOAT16: return attend_as<attention::Brain>(threads, call);
    default: return attend_as<float>(threads, call);
  }
}

}  // namespace KERNELS
