// Attention of single queries, each over a region of its own: the contract is `inference_engine/kernels/
// ragged_attention.py`, and this is its kernel for processors.
//
// A query's bits depend on its own vector, its line and what it reads, never on the other queries of a call or on
// threads. So there is one arithmetic, and what is shared between queries is only the work of reading:
//
//   score     scaling · q · k, one chain of fma over the channels, ascending
//   chunk     256 slots: top = the largest score seen, weight = e^(score - top), sum and out = Σ weight · v over what
//             is seen, each channel one chain of fma, slots ascending
//   chunks    ascending: both sides are scaled to the larger top, then added; chunks where nothing is seen are no part
//
// What is not seen is not added at all, so whatever lies there has no effect. A seen score that is not finite makes the
// query's sum, hence its output, not a number.
//
// Keys are turned, 64 at a time, so that 16 of them lie in the lanes; then scores are a product of small matrices as
// the weighted sum of values is. Queries next to each other that look at one region form a tile and share the keys; a
// query alone waits for memory, so what it reads next is fetched while it multiplies: where a value lies beside its key,
// of the chunk after both, as one stream.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"
#include "threads.h"
#include "types.h"

namespace KERNELS {
namespace attention {

// Of a row, as kernels/reads.py has it: the header, then the words of the records that are served here.
enum Field { START, HEAD_SLOTS, COUNT, SINK, RING, LAST, UPTO, FLOOR, SINK_FLOOR, KIND, PREFIX_START, PREFIX_HEAD_SLOTS,
             BASE, KEPT, LOCAL, BLOCK, BOUNDS, SHAPE = BLOCK, INDEX = BOUNDS };
constexpr int FIELDS = 20;
enum Kind { REGION_READ, BLOCK_READ, TOKEN_READ = 3 };

constexpr int WORD = 64;           // slots whose sight is one word of bits
constexpr int CHUNK = 4 * WORD;
constexpr int TURN_FETCHES = 8;    // slots whose values are fetched while 16 keys are turned; others, while they score
constexpr int ROWS = 6;            // rows of a small matrix product
constexpr int MOST_ROWS = 96;      // of a tile: a row is a query head of a query
constexpr int64_t MOST_STATES = 32 << 20;  // floats that wait to be merged
// row · slots · channels / 16 of a call that dividing among threads pays for: those that spin, and those to be woken
constexpr int64_t WORTH_SPINNING = 8000, WORTH_WAKING = 40000;
inline bool worth_dividing(const Threads& threads, int64_t work) {
  return work >= (threads.are_awake() ? WORTH_SPINNING : WORTH_WAKING);
}
constexpr float HIDDEN = -std::numeric_limits<float>::max();  // the score of what is not seen, until it has no weight
// Vectors across it, as many as there are registers for.
#if defined(__AVX512F__)
constexpr int wide(int) { return 4; }
#elif defined(__AVX2__)
constexpr int wide(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
constexpr int wide(int rows) { return rows <= 2 ? 2 : 1; }
#endif

struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };
INLINE F load(const Half* p) { return load_f16(&p->bits); }
INLINE F load(const Brain* p) { return load_bf16(&p->bits); }
using KERNELS::load;

// -- products of small matrices ---------------------------------------------------------------------------------------

constexpr int LINE_BYTES = 64;  // bytes that a processor's caches hold together

// Memory that is read next: while a product computes, it is fetched, `each` lines at a time, row after row.
struct Ahead {
  const char* at = nullptr;
  int each = 0;
  int row = 0, left = 0;  // lines of a row, and of this one
  int64_t gap = 0;        // bytes from the end of a row to the next one
  bool is_far = false;    // read so late that the nearest cache would not hold it
  void fetch(int) {
    for (int i = 0; i < each; i++) {
      if (is_far) __builtin_prefetch(at, 0, 2);
      else __builtin_prefetch(at);
      at += LINE_BYTES;
      if (!--left) at += gap, left = row;
    }
  }
};
constexpr Ahead NOTHING = {};

// The same for rows that a list names.
template <class T>
struct ListedAhead {
  const T* from = nullptr;
  int64_t stride = 0, width = 0;
  const int64_t* list = nullptr;
  int count = 0;
  void fetch(int k) const {
    if (k >= count) return;
    for (int64_t at = 0; at < width; at += LINE_BYTES / (int64_t)sizeof(T)) __builtin_prefetch(from + list[k] * stride + at);
  }
};

// The rows of b: one behind the other, or as a list says.
template <class T>
struct Rows {
  const T* from;
  int64_t stride;
  const T* operator()(int k) const { return from + k * stride; }
};
template <class T>
struct ListedRows {
  const T* from;
  int64_t stride;
  const int64_t* list;
  const T* operator()(int k) const { return from + list[k] * stride; }
};

// c[R][16 N] += a[R][count] · b[count][16 N], from column `at` on: every element is one chain of fma, `count` ascending.
template <int R, int N, class B, class A>
static void product_tile(const float* a, int64_t a_stride, const B& b, int at, int count, float* c, int64_t c_stride,
                         A ahead) {
  F sums[R][N];
  c += at;
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[r][n] = load(c + r * c_stride + 16 * n);
  for (int k = 0; k < count; k++) {
    ahead.fetch(k);
    const auto* from = b(k) + at;
    F row[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) row[n] = load(from + 16 * n);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      F weight = all(a[r * a_stride + k]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sums[r][n] = fma(weight, row[n], sums[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(c + r * c_stride + 16 * n, sums[r][n]);
}

template <int R, class B, class A>
static void product_rows(const float* a, int64_t a_stride, const B& b, int count, float* c, int64_t c_stride, int vectors,
                         A ahead) {
  constexpr int WIDE = wide(R);
  int v = 0;
  for (; v + WIDE <= vectors; v += WIDE, ahead = A{})
    product_tile<R, WIDE>(a, a_stride, b, 16 * v, count, c, c_stride, ahead);
  if (WIDE > 2 && v + 2 <= vectors) {
    product_tile<R, 2>(a, a_stride, b, 16 * v, count, c, c_stride, ahead);
    v += 2, ahead = A{};
  }
  if (v < vectors) product_tile<R, 1>(a, a_stride, b, 16 * v, count, c, c_stride, ahead);
}

// c[rows][16 · vectors] += a[rows][count] · b[count][16 · vectors], at most ROWS rows.
template <class B, class A>
static void product_of(int rows, const float* a, int64_t a_stride, const B& b, int count, float* c, int64_t c_stride,
                       int vectors, const A& ahead) {
  switch (rows) {
    case 1: return product_rows<1>(a, a_stride, b, count, c, c_stride, vectors, ahead);
    case 2: return product_rows<2>(a, a_stride, b, count, c, c_stride, vectors, ahead);
    case 3: return product_rows<3>(a, a_stride, b, count, c, c_stride, vectors, ahead);
    case 4: return product_rows<4>(a, a_stride, b, count, c, c_stride, vectors, ahead);
    case 5: return product_rows<5>(a, a_stride, b, count, c, c_stride, vectors, ahead);
    default: return product_rows<6>(a, a_stride, b, count, c, c_stride, vectors, ahead);
  }
}
template <class T>
static void product(int rows, const float* a, int64_t a_stride, const T* b, int64_t b_stride, int count, float* c,
                    int64_t c_stride, int vectors, Ahead ahead = NOTHING) {
  product_of(rows, a, a_stride, Rows<T>{b, b_stride}, count, c, c_stride, vectors, ahead);
}

// 16 vectors into columns: channel d of vector i goes to out[d · WORD + i]. `ahead` counts 16 channels.
template <class T>
static void turn(const T* const* vectors, int dim, float* out, Ahead ahead = NOTHING) {
  for (int d = 0; d < dim; d += 16) {
    ahead.fetch(d / 16);
    F x[16];
    for (int i = 0; i < 16; i++) x[i] = load(vectors[i] + d);
    transpose(x);
    for (int i = 0; i < 16; i++) store(out + (d + i) * WORD, x[i]);
  }
}

// -- what a query sees ------------------------------------------------------------------------------------------------

// Which of a chunk's slots a query sees, a bit for each.
struct Sight {
  uint64_t words[CHUNK / WORD];

  // Slots first … end - 1, counted from the chunk's.
  void add(int64_t first, int64_t end) {
    first = std::max<int64_t>(first, 0), end = std::min<int64_t>(end, CHUNK);
    for (int w = 0; w < CHUNK / WORD; w++) {
      int64_t from = std::max<int64_t>(first - w * WORD, 0), to = std::min<int64_t>(end - w * WORD, WORD);
      if (from < to) words[w] |= (~0ull >> (WORD - (to - from))) << from;
    }
  }
  bool none() const { return !(words[0] | words[1] | words[2] | words[3]); }
};

// `seen` of the reference, for the slots from `chunk` on.
INLINE Sight sight_of(const int64_t* line, int64_t chunk) {
  Sight sight = {};
  int64_t count = line[COUNT], sink = line[SINK], ring = line[RING], upto = line[UPTO] + 1;
  sight.add(std::max<int64_t>(line[SINK_FLOOR], 0) - chunk, std::min(std::min(sink, upto), count) - chunk);
  int64_t floor = std::max(line[FLOOR], sink);
  if (!ring) {
    sight.add(floor - chunk, std::min(upto, count) - chunk);
    return sight;
  }
  // Where a turn of the ring begins, its position is the oldest, last - ring + 1; from there positions ascend.
  int64_t oldest = line[LAST] + 1 - ring, turn = chunk - ((chunk - oldest) % ring + ring) % ring;
  int64_t from = std::max<int64_t>(floor - oldest, 0), to = std::min(upto - oldest, ring);
  if (from < to)
    for (; turn < std::min(chunk + CHUNK, count); turn += ring)
      sight.add(std::max(turn + from, sink) - chunk, std::min(turn + to, count) - chunk);
  return sight;
}

// Is the query one of those that choose tokens, or blocks? They are attended to by selection.h and blocks.h.
INLINE bool chooses_tokens(const int64_t* line) { return line[COUNT] && line[KIND] == TOKEN_READ; }
INLINE bool chooses_blocks(const int64_t* line) { return line[COUNT] && line[KIND] == BLOCK_READ; }

// Between which slots a query may see any.
INLINE int64_t first_slot(const int64_t* line) {
  bool from_floor = !line[RING] && line[SINK_FLOOR] >= line[SINK];
  return from_floor ? std::max<int64_t>(line[FLOOR], 0) : 0;
}
INLINE int64_t end_slot(const int64_t* line) {
  if (line[RING]) return line[COUNT];
  return std::max<int64_t>(0, std::min(line[COUNT], line[UPTO] + 1));
}

INLINE bool same_prefix(const int64_t* a, const int64_t* b) {
  return a[BASE] == b[BASE] && a[PREFIX_START] == b[PREFIX_START] && a[PREFIX_HEAD_SLOTS] == b[PREFIX_HEAD_SLOTS];
}
INLINE bool same_region(const int64_t* a, const int64_t* b) {
  return a[START] == b[START] && a[HEAD_SLOTS] == b[HEAD_SLOTS] &&
         (same_prefix(a, b) || (a[BASE] <= 0 && b[BASE] <= 0 && a[BASE] == b[BASE]));
}
// May two queries be in one tile?
INLINE bool alike(const int64_t* a, const int64_t* b) {
  if (!a[COUNT] || !b[COUNT] || a[KIND] || b[KIND]) return false;
  return same_region(a, b) || (a[BASE] > 0 && same_prefix(a, b));
}

// -- a chunk's state --------------------------------------------------------------------------------------------------

// Of a row: `dim` channels of weighted values, then the sum of the weights as a channel more, then the top.
INLINE int64_t state_size(int dim) { return dim + 16; }

// The lanes of `mask` stay, the others become `value`.
INLINE void keep(float* lanes, int mask, float value) {
  for (int i = 0; i < 16; i++) lanes[i] = mask >> i & 1 ? lanes[i] : value;
}

// The largest score of 16 lanes and those before; `wrong` stays 0, unless a score is not finite.
INLINE F top_of(float* lanes, int mask, float softcap, F top, F& wrong) {
  if (mask != 0xffff) keep(lanes, mask, HIDDEN);
  F score = load(lanes);
  wrong = fma(score, all(0.0f), wrong);
  if (softcap == 0) return larger(score, top);
  store(lanes, mul(all(softcap), hyperbolic_tangent(divide(score, all(softcap)))));
  if (mask != 0xffff) keep(lanes, mask, HIDDEN);
  return larger(load(lanes), top);
}

// Scores become weights; returns their sum and those before.
INLINE F weights_of(float* lanes, int mask, F top, F total) {
  F weights = exponential(sub(load(lanes), top));
  store(lanes, weights);
  if (mask == 0xffff) return add(total, weights);
  keep(lanes, mask, 0.0f);
  return add(total, load(lanes));
}

// body(lanes, mask) for each 16 slots of which the query sees any.
template <class Body>
INLINE void groups_of(float* lanes, const Sight& sight, const Body& body) {
  for (int w = 0; w < CHUNK / WORD; w++, lanes += WORD) {
    uint64_t word = sight.words[w];
    if (word == ~0ull) {
#pragma GCC unroll 4
      for (int g = 0; g < 4; g++) body(lanes + 16 * g, 0xffff);
    } else {
      for (int g = 0; word; g++, word >>= 16)
        if (word & 0xffff) body(lanes + 16 * g, (int)(word & 0xffff));
    }
  }
}

// Turns a row's scores into weights; sets the sum and the top of its state.
INLINE void weigh(float* scores, const Sight& sight, float softcap, float* state, int dim) {
  F tops = all(-INFINITY), total = all(0.0f), wrong = all(0.0f);
  groups_of(scores, sight, [&](float* lanes, int mask) { tops = top_of(lanes, mask, softcap, tops, wrong); });
  float top = largest(tops);
  groups_of(scores, sight, [&](float* lanes, int mask) { total = weights_of(lanes, mask, all(top), total); });
  state[dim] = sum(total) + sum(wrong);
  state[dim + 1] = top;
}

// Adds a later chunk's state to the state of those before it. A sum of 0 says that nothing was seen.
INLINE void join(float* state, const float* later, int dim) {
  if (later[dim] == 0) return;
  if (state[dim] == 0) {
    memcpy(state, later, sizeof(float) * state_size(dim));
    return;
  }
  float top = state[dim + 1] > later[dim + 1] ? state[dim + 1] : later[dim + 1];
  F old = exponential(all(state[dim + 1] - top)), fresh = exponential(all(later[dim + 1] - top));
  for (int d = 0; d <= dim; d += 16) store(state + d, fma(load(later + d), fresh, mul(load(state + d), old)));
  state[dim + 1] = top;
}

// The output of a row: its state divided by the sum. A head's sink is one score more, without a value.
INLINE void finish(const float* state, const float* sink, int dim, float* out) {
  float sum = state[dim];
  if (sum == 0) {
    memset(out, 0, sizeof(float) * dim);
    return;
  }
  F share = all(1.0f), divisor = all(sum);
  if (sink) {
    float top = state[dim + 1] > *sink ? state[dim + 1] : *sink;
    share = exponential(all(state[dim + 1] - top));
    divisor = fma(divisor, share, exponential(all(*sink - top)));
  }
  share = divide(share, divisor);
  for (int d = 0; d < dim; d += 16) store(out + d, mul(load(state + d), share));
}

// -- the work of a call -----------------------------------------------------------------------------------------------

// Queries that share what they read.
struct Tile {
  int64_t first, end;              // queries
  int64_t first_chunk, end_chunk;  // where any of them sees something
  int64_t pieces = 1;              // items for each KV head
  int64_t states = -1, left = -1;  // of a tile in pieces: its place in the states, and in the counts of what is left
};

// A part of a tile for one KV head that a thread does in one go.
struct Item {
  int32_t tile, head;
  int64_t first_chunk, end_chunk;
};

// What a call needs besides its tensors; reused by the next call of the same thread.
struct Plan {
  std::vector<Tile> tiles;
  std::vector<Item> items;
  std::vector<float> states;
  int64_t states_size = 0, counts = 0;
};

// A chunk of which a query sees something.
struct Seen {
  int64_t chunk;
  Sight sight;
};

// What a thread computes with; reused by its next item.
class Room {
 public:
  std::vector<Sight> sights;
  std::vector<Seen> ahead;

  // Memory that begins with a cache line.
  float* floats(int64_t count) {
    if ((int64_t)memory_.size() < count + 16) memory_.resize(count + 16);
    return (float*)(((uintptr_t)memory_.data() + 63) & ~(uintptr_t)63);
  }

  static Room& own() {
    static thread_local Room room;
    return room;
  }

 private:
  std::vector<float> memory_;
};

INLINE int64_t padded(int64_t floats) { return (floats + 15) / 16 * 16; }

// The attention of one KV head for the queries of a tile.
template <class T>
class Reader {
 public:
  Reader(const Attention& call)
      : call_(call), dim_(call.head_dim), value_dim_(call.value_dim), group_(call.query_heads / call.kv_heads) {
    auto apart = (intptr_t)call.values - (intptr_t)call.keys;
    is_joint_ = apart >= 0 && apart < call.row * (int64_t)sizeof(T);
  }

  // Chunks first … end - 1 of a tile. states: where each chunk's state goes; null: they are joined and finished here.
  void read(const Tile& tile, int head, int64_t first, int64_t end, float* states) {
    head_ = head, first_ = tile.first, count_ = (int)(tile.end - tile.first);
    int64_t rows = (int64_t)count_ * group_, size = rows * state_size(value_dim_);
    make_room(rows);
    take_queries();
    if (!states) memset(totals_, 0, sizeof(float) * size);
    bool is_alone = count_ == 1;
    if (is_alone) look_ahead(first, end);
    for (int64_t chunk = first; chunk < end; chunk++) {
      float* state = states ? states + (chunk - first) * size : parts_;
      if (!(is_alone ? take_sight(chunk) : take_sights(chunk))) {
        for (int64_t row = 0; states && row < rows; row++) state[row * state_size(value_dim_) + value_dim_] = 0;
        continue;
      }
      memset(state, 0, sizeof(float) * size);
      read_chunk(chunk * CHUNK, state);
      for (int64_t row = 0; !states && row < rows; row++)
        join(totals_ + row * state_size(value_dim_), state + row * state_size(value_dim_), value_dim_);
    }
    if (!states) finish_rows(tile, head, totals_);
  }

  // Joins the states of all chunks of a tile and finishes it.
  void merge(const Tile& tile, int head, float* states) {
    int64_t rows = (tile.end - tile.first) * group_, each = state_size(value_dim_);
    for (int64_t chunk = 1; chunk < tile.end_chunk - tile.first_chunk; chunk++)
      for (int64_t row = 0; row < rows; row++)
        join(states + row * each, states + (chunk * rows + row) * each, value_dim_);
    finish_rows(tile, head, states);
  }

 private:
  const int64_t* line(int query) const { return call_.regions + (first_ + query) * call_.region_stride; }

  void make_room(int64_t rows) {
    if ((int64_t)room_.sights.size() < count_) room_.sights.resize(count_);
    sights_ = room_.sights.data();
    int64_t queries = padded(rows * dim_), keys = (int64_t)dim_ * WORD, state = rows * state_size(value_dim_);
    queries_ = room_.floats(queries + rows * CHUNK + keys + 2 * state + dim_);
    scores_ = queries_ + queries;
    keys_ = scores_ + rows * CHUNK;
    parts_ = keys_ + keys;
    totals_ = parts_ + state;
    nothing_ = totals_ + state;
    memset(nothing_, 0, sizeof(float) * dim_);
  }

  void take_queries() {
    float* row = queries_;
    for (int query = 0; query < count_; query++) {
      const float* from = call_.queries + (first_ + query) * call_.query_stride + (int64_t)head_ * group_ * dim_;
      for (int d = 0; d < group_ * dim_; d += 16, row += 16) store(row, mul(load(from + d), all(call_.scaling)));
    }
  }

  Sight look(int query, int64_t chunk) const {
    return sight_of(line(query), chunk);
  }

  // What each query sees of a chunk; false if that is nothing.
  bool take_sights(int64_t chunk) {
    bool any = false;
    for (int query = 0; query < count_; query++) {
      sights_[query] = look(query, chunk * CHUNK);
      any = any || !sights_[query].none();
    }
    return any;
  }

  // The same for a tile of one query, whose keys and values are fetched while others are multiplied.
  bool take_sight(int64_t chunk) {
    if (next_ == room_.ahead.size() || room_.ahead[next_].chunk != chunk) return false;
    sights_[0] = room_.ahead[next_++].sight;
    std::fill_n(next_keys_, CHUNK / WORD, nullptr);
    if (next_ == room_.ahead.size()) return true;
    int at = 0;
    for (int w = 0; w < CHUNK / WORD; w++) {
      if (!room_.ahead[next_].sight.words[w]) continue;
      while (at < CHUNK / WORD && !sights_[0].words[at]) at++;
      if (at < CHUNK / WORD) next_keys_[at++] = key_bytes(room_.ahead[next_].chunk, w);
    }
    return true;
  }

  // Finds the chunks first … end - 1 of which the only query sees any, and fetches the keys of the first of them.
  void look_ahead(int64_t first, int64_t end) {
    room_.ahead.clear(), next_ = 0;
    for (int64_t chunk = first; chunk < end; chunk++) {
      Sight sight = look(0, chunk * CHUNK);
      if (!sight.none()) room_.ahead.push_back({chunk, sight});
    }
    take_region(line(0));
    for (int w = 0; !room_.ahead.empty() && w < CHUNK / WORD; w++)
      if (room_.ahead[0].sight.words[w])
        rows_ahead(key_bytes(room_.ahead[0].chunk, w), dim_, WORD * lines_of(dim_)).fetch(0);
  }

  const char* key_bytes(int64_t chunk, int w) const {
    return (const char*)vector(call_.keys, chunk * CHUNK + w * WORD);
  }

  static int lines_of(int width) { return (width * (int)sizeof(T) + LINE_BYTES - 1) / LINE_BYTES; }

  // Vectors of `width` numbers, from these bytes on, `each` lines at a time.
  Ahead rows_ahead(const void* from, int width, int each) const {
    int lines = lines_of(width);
    return {(const char*)from, each, lines, lines, call_.row * (int64_t)sizeof(T) - lines * LINE_BYTES};
  }

  // Vectors `first` … `first` + count - 1 of word w of the chunk after, in `steps` parts: keys, and values beside them.
  Ahead next_ahead(int w, int first, int count, int steps) const {
    if (count_ > 1 || !next_keys_[w]) return NOTHING;
    int width = is_joint_ ? (int)call_.row : dim_;
    Ahead ahead = rows_ahead(next_keys_[w] + first * call_.row * (int64_t)sizeof(T), width,
                             (count * lines_of(width) + steps - 1) / steps);
    ahead.is_far = true;
    return ahead;
  }

  // Has nothing fetched this chunk's values yet? They lie apart from the keys, or it is the first chunk.
  bool lacks_values() const { return !is_joint_ || next_ <= 1; }

  void take_region(const int64_t* numbers) {
    base_ = numbers[BASE];
    own_ = numbers[START] + head_ * numbers[HEAD_SLOTS] - base_;
    prefix_ = numbers[PREFIX_START] + head_ * numbers[PREFIX_HEAD_SLOTS];
  }

  // The state of each row over the slots from `chunk` on.
  void read_chunk(int64_t chunk, float* states) {
    // Forks of one prefix share what lies in it, and only that.
    for (int first = 0, end; first < count_; first = end) {
      bool in_prefix = chunk + CHUNK <= line(first)[BASE];
      end = first + 1;
      while (end < count_ && (in_prefix || same_region(line(first), line(end)))) end++;
      read_together(first, end, chunk, states);
    }
  }

  // Queries first … end - 1 of the tile, which read the same memory.
  void read_together(int first, int end, int64_t chunk, float* states) {
    take_region(line(first));
    for (int w = 0; w < CHUNK / WORD; w++) {
      uint64_t seen = turn_keys(first, end, chunk, w);
      if (!seen) continue;
      strips(first, end, [&](int from, int to, int64_t row, int rows) { score(from, to, row, rows, chunk, w); });
    }
    for (int query = first; query < end; query++) {
      if (sights_[query].none()) continue;
      for (int64_t row = (int64_t)query * group_; row < (int64_t)(query + 1) * group_; row++)
        weigh(scores_ + row * CHUNK, sights_[query], call_.softcap, states + row * state_size(value_dim_), value_dim_);
    }
    for (int w = 0; w < CHUNK / WORD; w++)
      strips(first, end, [&](int from, int to, int64_t row, int rows) {
        add_values(from, to, row, rows, chunk, w, states);
      });
  }

  // body(first query, end, first row, rows) for rows that fit one product: some queries, or some heads of one query.
  template <class Body>
  void strips(int first, int end, const Body& body) const {
    int queries = std::max(1, ROWS / group_), parts = (group_ + ROWS - 1) / ROWS;
    for (int query = first; query < end; query += queries) {
      int stop = std::min(query + queries, end);
      for (int part = 0; part < parts; part++) {
        int from = group_ * part / parts, to = group_ * (part + 1) / parts;
        int64_t row = (int64_t)query * group_ + from;
        body(query, stop, row, parts > 1 ? to - from : (stop - query) * group_);
      }
    }
  }

  const T* vector(const void* buffer, int64_t slot) const {
    return (const T*)buffer + ((slot < base_ ? prefix_ : own_) + slot) * call_.row;
  }

  uint64_t seen_by_any(int first, int end, int w) const {
    uint64_t seen = 0;
    for (int query = first; query < end; query++) seen |= sights_[query].words[w];
    return seen;
  }

  // Turns the keys of a word that any of these queries sees; returns which.
  uint64_t turn_keys(int first, int end, int64_t chunk, int w) {
    uint64_t seen = seen_by_any(first, end, w);
    for (int g = 0; g < WORD / 16; g++) {
      if (!(seen >> 16 * g & 0xffff)) continue;
      const T* vectors[16];
      for (int i = 0; i < 16; i++) {
        int slot = w * WORD + 16 * g + i;
        // Memory outside what a query sees may belong to something else, or to nothing.
        vectors[i] = seen >> (16 * g + i) & 1 ? vector(call_.keys, chunk + slot) : (const T*)nothing_;
      }
      Ahead ahead = NOTHING;
      int64_t first_value = chunk + w * WORD + g * TURN_FETCHES;
      int each = TURN_FETCHES * 16 * (int)sizeof(T) / LINE_BYTES;
      if (!lacks_values()) ahead = next_ahead(w, 4 * g, 4, dim_ / 16);
      else if (count_ == 1) ahead = rows_ahead(vector(call_.values, first_value), value_dim_, each);
      turn(vectors, dim_, keys_ + 16 * g, ahead);
    }
    return seen;
  }

  void score(int first, int end, int64_t row, int rows, int64_t chunk, int w) {
    uint64_t seen = seen_by_any(first, end, w);
    if (!seen) return;
    int from = __builtin_ctzll(seen) / 16, to = (63 - __builtin_clzll(seen)) / 16 + 1;
    float* scores = scores_ + row * CHUNK + w * WORD + 16 * from;
    for (int r = 0; r < rows; r++) memset(scores + r * CHUNK, 0, sizeof(float) * 16 * (to - from));
    Ahead ahead = NOTHING;
    int64_t first_value = w * WORD + WORD / 16 * TURN_FETCHES;
    int each = (WORD - WORD / 16 * TURN_FETCHES) * (int)sizeof(T) / LINE_BYTES;
    if (!lacks_values()) ahead = next_ahead(w, WORD / 4, WORD / 4, dim_);
    else if (count_ == 1) ahead = rows_ahead(vector(call_.values, chunk + first_value), value_dim_, each);
    product(rows, queries_ + row * dim_, dim_, keys_ + 16 * from, WORD, dim_, scores, CHUNK, to - from, ahead);
  }

  // Slots that all these queries see are added to all at once, others to each query by itself; ascending for each.
  void add_values(int first, int end, int64_t row, int rows, int64_t chunk, int w, float* states) {
    uint64_t any = 0, shared = ~0ull;
    for (int query = first; query < end; query++) any |= sights_[query].words[w], shared &= sights_[query].words[w];
    while (any) {
      int from = __builtin_ctzll(any), to;
      if (shared >> from & 1) {
        to = run_end(shared, from);
        add_run(row, rows, chunk, w * WORD + from, w * WORD + to, states);
      } else {
        uint64_t later = shared & ~below(from);
        to = later ? __builtin_ctzll(later) : WORD;
        for (int query = first; query < end; query++)
          add_runs(query, sights_[query].words[w] & below(to) & ~below(from), chunk, w, states);
      }
      any &= ~below(to);
    }
  }

  // Bits 0 … bit - 1.
  static uint64_t below(int bit) { return bit >= WORD ? ~0ull : (1ull << bit) - 1; }

  static int run_end(uint64_t word, int from) {
    uint64_t gap = ~word & ~below(from);
    return gap ? __builtin_ctzll(gap) : WORD;
  }

  void add_runs(int query, uint64_t seen, int64_t chunk, int w, float* states) {
    while (seen) {
      int from = __builtin_ctzll(seen), to = run_end(seen, from);
      add_run((int64_t)query * group_, group_, chunk, w * WORD + from, w * WORD + to, states);
      seen &= ~below(to);
    }
  }

  void add_run(int64_t row, int rows, int64_t chunk, int from, int to, float* states) {
    int border = (int)std::min<int64_t>(std::max<int64_t>(base_ - chunk, from), to);
    for (; from < to; from = border, border = to) {
      if (from == border) continue;
      int w = from / WORD, place = from % WORD, count = border - from;
      // Where values lie beside keys, half of it was fetched while keys were turned and scored.
      Ahead next = lacks_values() ? next_ahead(w, place, count, count)
                                  : next_ahead(w, WORD / 2 + place / 2, count / 2, count);
      product(rows, scores_ + row * CHUNK + from, CHUNK, vector(call_.values, chunk + from), call_.row, count,
              states + row * state_size(value_dim_), state_size(value_dim_), value_dim_ / 16, next);
    }
  }

  void finish_rows(const Tile& tile, int head, const float* states) const {
    for (int64_t query = tile.first; query < tile.end; query++)
      for (int g = 0; g < group_; g++, states += state_size(value_dim_)) {
        int query_head = head * group_ + g;
        const float* sink = call_.head_sinks ? call_.head_sinks + query_head : nullptr;
        finish(states, sink, value_dim_, call_.out + query * call_.out_stride + (int64_t)query_head * value_dim_);
        if (call_.lse)  // of a query that sees nothing there is no largest score
          call_.lse[query * call_.query_heads + query_head] =
              states[value_dim_] == 0 ? -INFINITY : states[value_dim_ + 1] + std::log(states[value_dim_]);
      }
  }

  const Attention& call_;
  Room& room_ = Room::own();
  int dim_, value_dim_, group_;
  bool is_joint_;  // does a value lie in the vector of its key?
  size_t next_ = 0;                           // of what is ahead
  const char* next_keys_[CHUNK / WORD] = {};  // of the chunk after, to fetch while these words' values are added
  int head_ = 0, count_ = 0;
  int64_t first_ = 0, base_ = 0, own_ = 0, prefix_ = 0;
  float *queries_ = nullptr, *scores_ = nullptr, *keys_ = nullptr, *parts_ = nullptr, *totals_ = nullptr;
  float* nothing_ = nullptr;
  Sight* sights_ = nullptr;
};

// -- division of work ------------------------------------------------------------------------------------------------

INLINE const int64_t* line_of(const Attention& call, int64_t query) {
  return call.regions + query * call.region_stride;
}

// Cuts the queries into tiles; those that read nothing get zeros here.
static void make_tiles(const Attention& call, int threads, Plan& plan) {
  int group = call.query_heads / call.kv_heads;
  int64_t strip = std::max(1, ROWS / group), most = std::max<int64_t>(1, MOST_ROWS / group);
  if (threads > 1) {  // some items for each thread
    int64_t fair = call.count * call.kv_heads / (4 * threads);
    most = std::min(most, std::max(strip, fair / strip * strip));
  }
  plan.tiles.clear();
  for (int64_t query = 0; query < call.count;) {
    const int64_t* line = line_of(call, query);
    if (!line[COUNT]) {
      memset(call.out + query * call.out_stride, 0, sizeof(float) * call.query_heads * call.value_dim);
      if (call.lse) std::fill_n(call.lse + query * call.query_heads, call.query_heads, -INFINITY);
      query++;
      continue;
    }
    if (line[KIND]) {
      query++;
      continue;
    }
    Tile tile = {query, query + 1, first_slot(line) / CHUNK, (end_slot(line) + CHUNK - 1) / CHUNK};
    for (; tile.end < call.count && tile.end - query < most; tile.end++) {
      const int64_t* next = line_of(call, tile.end);
      if (!alike(line, next)) break;
      tile.first_chunk = std::min(tile.first_chunk, first_slot(next) / CHUNK);
      tile.end_chunk = std::max(tile.end_chunk, (end_slot(next) + CHUNK - 1) / CHUNK);
    }
    query = tile.end;
    plan.tiles.push_back(tile);
  }
}

// Chunks that a tile reads, times its rows; turning the keys counts as two rows.
INLINE int64_t cost_of(const Attention& call, const Tile& tile) {
  int64_t chunks = std::max<int64_t>(1, tile.end_chunk - tile.first_chunk);
  return chunks * ((tile.end - tile.first) * (call.query_heads / call.kv_heads) + 2);
}

// Cuts the tiles into items: a tile that is more than a thread's fair share is cut where a chunk begins.
static void make_items(const Attention& call, int threads, Plan& plan) {
  int64_t cost = 0, group = call.query_heads / call.kv_heads;
  for (const Tile& tile : plan.tiles) cost += cost_of(call, tile);
  int64_t share = std::max<int64_t>(1, cost * call.kv_heads / (4 * threads));
  plan.items.clear(), plan.states_size = 0, plan.counts = 0;
  for (size_t t = 0; t < plan.tiles.size(); t++) {
    Tile& tile = plan.tiles[t];
    int64_t chunks = std::max<int64_t>(0, tile.end_chunk - tile.first_chunk);
    int64_t size = chunks * (tile.end - tile.first) * group * state_size(call.value_dim) * call.kv_heads;
    int64_t pieces = std::min((cost_of(call, tile) + share - 1) / share, chunks);
    if (threads > 1 && pieces > 1 && plan.states_size + size <= MOST_STATES) {
      tile.pieces = pieces, tile.states = plan.states_size, tile.left = plan.counts;
      plan.states_size += size, plan.counts += call.kv_heads;
    }
    for (int head = 0; head < call.kv_heads; head++)
      for (int64_t p = 0; p < tile.pieces; p++)
        plan.items.push_back({(int32_t)t, head, tile.first_chunk + chunks * p / tile.pieces,
                              tile.first_chunk + chunks * (p + 1) / tile.pieces});
  }
  if ((int64_t)plan.states.size() < plan.states_size) plan.states.resize(plan.states_size);
}

// Items are taken by the next free thread: each has an output, or a state, of its own, so that changes no bits.
template <class Body>
static void take_turns(Threads& threads, int64_t items, bool alone, const Body& body) {
  std::atomic<int64_t> next{0};
  auto work = [&](int, int) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(item);
  };
  if (alone || items < 2) work(0, 1);
  else threads.run(work);
}

template <class T>
static void attend_as(Threads& threads, const Attention& call) {
  static thread_local Plan own;
  Plan& plan = own;  // the other threads use the caller's
  make_tiles(call, threads.count(), plan);
  make_items(call, threads.count(), plan);
  std::vector<std::atomic<int64_t>> left(plan.counts);  // pieces, for each KV head of a tile in pieces
  int64_t work = 0;
  for (const Tile& tile : plan.tiles) {
    work += cost_of(call, tile) * call.kv_heads * CHUNK * call.head_dim / 16;
    for (int head = 0; tile.pieces > 1 && head < call.kv_heads; head++) left[tile.left + head] = tile.pieces;
  }
  int64_t last = (int64_t)plan.items.size() - 1;
  take_turns(threads, last + 1, !worth_dividing(threads, work), [&](int64_t index) {
    const Item& item = plan.items[last - index];  // the later ones of a prefill are the larger ones
    const Tile& tile = plan.tiles[item.tile];
    Reader<T> reader(call);
    if (tile.pieces == 1) return reader.read(tile, item.head, item.first_chunk, item.end_chunk, nullptr);
    int64_t each = (tile.end - tile.first) * (call.query_heads / call.kv_heads) * state_size(call.value_dim);
    float* states = plan.states.data() + tile.states + item.head * (tile.end_chunk - tile.first_chunk) * each;
    float* own_states = states + (item.first_chunk - tile.first_chunk) * each;
    reader.read(tile, item.head, item.first_chunk, item.end_chunk, own_states);
    // The thread that finishes the last piece joins them all, in their order.
    bool is_last = left[tile.left + item.head].fetch_sub(1, std::memory_order_acq_rel) == 1;
    if (is_last) reader.merge(tile, item.head, states);
  });
}

}  // namespace attention

}  // namespace KERNELS
