// Attention of single queries that choose which blocks they read: the contract is `inference_engine/kernels/
// ragged_attention.py`, and this is its kernel for processors.
//
//   score    of every block that may be chosen, from its bounds: Σ max(q, 0) · high + min(q, 0) · low, 16 chains of fma
//            over the channels, a lane each, added as `sum` adds; the best head of the group counts
//   choose   the blocks of the highest scores, the first among equals
//   read     the sink, these blocks and the window, listed (listed.h)
//
// What a query does depends on its own vector, its line and what it reads: neither other queries nor threads change a
// bit.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "attention.h"
#include "listed.h"
#include "simd.h"
#include "threads.h"
#include "types.h"

namespace KERNELS {
namespace blocks {

using namespace attention;
using listed::Chunk;
using listed::MOST_HEADS;

// One query and KV head.
struct Choice {
  int64_t query;
  int head;
  int64_t first, end;     // blocks that may be chosen
  int64_t kept, pieces, chunks;
  int64_t scores, slots, states;  // where its part of each buffer begins
};

// What a call needs; reused by the next call of the same thread.
struct Lists {
  std::vector<Choice> choices;
  std::vector<std::pair<int32_t, int32_t>> items;  // choice, part
  std::vector<int32_t> scores;  // by choice and block, in the order of their numbers
  std::vector<int64_t> slots;   // by choice, those that are read, ascending
  std::vector<int32_t> counts;  // of them
  std::vector<float> states;    // of chunks, by choice
};

// -- scores -----------------------------------------------------------------------------------------------------------

// Integers in the order of the numbers: what is not a number comes first, and -0 equals 0.
INLINE int32_t order(float number) {
  int32_t word;
  float zero = number + 0.0f;
  memcpy(&word, &zero, 4);
  word ^= word >> 31 & 0x7fffffff;
  return number != number ? INT32_MAX : word;
}

// Scores of at most 16 blocks for R heads, from their bounds on; `more` more blocks lie behind.
template <int R, class T>
static void score_some(const float* positive, const float* negative, const T* high, const T* low, int64_t row, int dim,
                       int count, int64_t more, float* out) {
  F parts[R][16];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int i = count; i < 16; i++) parts[r][i] = all(0.0f);
  for (int i = 0; i < count; i++, high += row, low += row) {
    if (i < more)
      for (int64_t byte = 0; byte < dim * (int64_t)sizeof(T); byte += 64) {
        __builtin_prefetch((const char*)(high + 16 * row) + byte);
        __builtin_prefetch((const char*)(low + 16 * row) + byte);
      }
    F sums[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[r] = all(0.0f);
    for (int d = 0; d < dim; d += 16) {
      F h = load(high + d), l = load(low + d);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        sums[r] = fma(load(positive + r * dim + d), h, sums[r]);
        sums[r] = fma(load(negative + r * dim + d), l, sums[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) parts[r][i] = sums[r];
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) store(out + 16 * r, sums_of(parts[r]));
}

template <class T>
static void score_heads(int heads, const float* positive, const float* negative, const T* high, const T* low,
                        int64_t row, int dim, int count, int64_t more, float* out) {
  switch (heads) {
    case 1: return score_some<1>(positive, negative, high, low, row, dim, count, more, out);
    case 2: return score_some<2>(positive, negative, high, low, row, dim, count, more, out);
    case 3: return score_some<3>(positive, negative, high, low, row, dim, count, more, out);
    default: return score_some<4>(positive, negative, high, low, row, dim, count, more, out);
  }
}

// Scores the blocks of a piece, 16 at a time.
template <class T>
static void score_piece(const Attention& call, const Choice& choice, int64_t piece, Lists& lists) {
  int dim = call.head_dim, group = call.query_heads / call.kv_heads;
  const int64_t* line = line_of(call, choice.query);
  int64_t words = (choice.end - choice.first + 15) / 16;
  int64_t first = choice.first + words * piece / choice.pieces * 16;
  int64_t end = std::min(choice.first + words * (piece + 1) / choice.pieces * 16, choice.end);
  int64_t size = padded((int64_t)group * dim);
  float* positive = Room::own().floats(2 * size + (int64_t)group * 16);
  float *negative = positive + size, *scores = negative + size;
  const float* from = call.queries + choice.query * call.query_stride + (int64_t)choice.head * group * dim;
  for (int d = 0; d < group * dim; d += 16) {
    F x = mul(load(from + d), all(call.scaling)), zero = all(0.0f);
    store(positive + d, larger(zero, x));  // what is not a number stays
    store(negative + d, smaller(zero, x));
  }
  int64_t slot = line[START] + choice.head * line[HEAD_SLOTS] + line[BOUNDS];
  int32_t* out = lists.scores.data() + choice.scores - choice.first;
  for (; first < end; first += 16) {
    int count = (int)std::min<int64_t>(end - first, 16);
    const T *high = (const T*)call.values + (slot + first) * call.row;
    const T* low = (const T*)call.keys + (slot + first) * call.row;
    for (int head = 0; head < group; head += MOST_HEADS)
      score_heads(std::min(MOST_HEADS, group - head), positive + (int64_t)head * dim, negative + (int64_t)head * dim, high,
                  low, call.row, dim, count, end - first - 16, scores + 16 * head);
    for (int i = 0; i < count; i++) {
      int32_t best = order(scores[i]);
      for (int head = 1; head < group; head++) best = std::max(best, order(scores[16 * head + i]));
      out[first + i] = best;
    }
  }
}

// -- choice -----------------------------------------------------------------------------------------------------------

// The largest number of which at least `wanted` of these are as large or larger.
INLINE int32_t threshold(const int32_t* scores, int64_t count, int64_t wanted) {
  int64_t least = INT32_MIN, most = INT32_MAX;
  while (least < most) {
    int64_t middle = least + (most - least + 1) / 2;
    int32_t bound = (int32_t)middle, found = 0;
    for (int64_t i = 0; i < count; i++) found += scores[i] >= bound;
    if (found == wanted) return bound;
    if (found > wanted) least = middle;
    else most = middle - 1;
  }
  return (int32_t)least;
}

// Lists the slots that are read, by the scores of all blocks. Returns how many.
static int64_t choose(const Attention& call, const Choice& choice, Lists& lists) {
  const int64_t* line = line_of(call, choice.query);
  int64_t block = line[attention::BLOCK], upto = std::min(line[COUNT], line[UPTO] + 1);
  int64_t blocks = choice.end - choice.first, wanted = choice.kept, at = 0;
  int64_t* out = lists.slots.data() + choice.slots;
  int64_t count = 0;
  auto add = [&](int64_t first, int64_t end) {  // ascending, and none twice
    for (at = std::max(at, first); at < end; at++) out[count++] = at;
  };
  int64_t distant = std::min(line[LOCAL], line[COUNT]);
  add(0, std::min(line[SINK], upto));
  if (wanted == blocks) {
    add(choice.first * block, distant);
  } else if (wanted) {
    const int32_t* scores = lists.scores.data() + choice.scores;
    int32_t least = threshold(scores, blocks, wanted);
    int64_t equal = wanted;  // of the least score, as many as the better ones leave
    for (int64_t b = 0; b < blocks; b++) equal -= scores[b] > least;
    for (int64_t b = 0; b < blocks; b++) {
      if (scores[b] < least || (scores[b] == least && equal-- <= 0)) continue;
      int64_t first = (choice.first + b) * block;
      add(first, std::min(first + block, distant));
    }
  }
  add(line[LOCAL], upto);
  return count;
}

// -- reading ----------------------------------------------------------------------------------------------------------

// Joins the states of a query and KV head.
static void finish_choice(const Attention& call, const Choice& choice, int64_t count, Lists& lists) {
  int group = call.query_heads / call.kv_heads, dim = call.value_dim;
  int64_t each = state_size(dim);
  for (int g = 0; g < group; g++) {
    float* state = lists.states.data() + choice.states + g * each;
    if (!count) state[dim] = 0;
    for (int64_t chunk = 1; chunk * CHUNK < count; chunk++) join(state, state + chunk * group * each, dim);
    int query_head = choice.head * group + g;
    const float* sink = call.head_sinks ? call.head_sinks + query_head : nullptr;
    finish(state, sink, dim, call.out + choice.query * call.out_stride + (int64_t)query_head * dim);
  }
}

// -- division of work ------------------------------------------------------------------------------------------------

// One choice for each query that chooses blocks and KV head.
static void make_choices(const Attention& call, int threads, Lists& lists) {
  int64_t size = (int64_t)(call.query_heads / call.kv_heads) * state_size(call.value_dim);
  int64_t scores = 0, slots = 0, states = 0;
  lists.choices.clear();
  for (int64_t query = 0; query < call.count; query++) {
    const int64_t* line = line_of(call, query);
    if (!chooses_blocks(line)) continue;
    Choice one = {};
    int64_t block = line[attention::BLOCK], sink = line[SINK], local = line[LOCAL];
    one.query = query;
    one.first = sink / block, one.end = std::max(one.first, local > sink ? (local + block - 1) / block : 0);
    one.kept = std::min(line[KEPT], one.end - one.first);
    int64_t always = std::min(sink, line[UPTO] + 1) + line[UPTO] + 1 - std::min(local, line[UPTO] + 1);
    int64_t most = std::max<int64_t>(0, std::min(line[COUNT], always + one.kept * block));
    one.chunks = (most + CHUNK - 1) / CHUNK;
    for (int head = 0; head < call.kv_heads; head++) {
      one.head = head, one.scores = scores, one.slots = slots, one.states = states;
      scores += one.end - one.first, slots += most, states += std::max<int64_t>(1, one.chunks) * size;
      lists.choices.push_back(one);
    }
  }
  // Some pieces for each thread: a decode step has as many queries as sessions.
  auto count = (int64_t)lists.choices.size();
  int64_t fair = threads == 1 || !count ? 1 : (4 * threads + count - 1) / count;
  for (Choice& one : lists.choices) {
    int64_t words = one.kept && one.kept < one.end - one.first ? (one.end - one.first + 15) / 16 : 0;
    one.pieces = std::min(words, fair);  // none: which are chosen is known without scores
  }
  auto grow = [](auto& memory, int64_t wanted) {
    if ((int64_t)memory.size() < wanted) memory.resize((size_t)wanted);
  };
  grow(lists.scores, scores), grow(lists.slots, slots), grow(lists.states, states), grow(lists.counts, count);
}

template <class T>
static void attend_all(Threads& threads, const Attention& call) {
  static thread_local Lists own;
  Lists& lists = own;  // the other threads use the caller's
  make_choices(call, threads.count(), lists);
  auto count = (int64_t)lists.choices.size();
  if (!count) return;
  int64_t work = 0;
  for (const Choice& one : lists.choices)
    work += (one.chunks * CHUNK * (call.query_heads / call.kv_heads + 2) + 2 * (one.end - one.first)) * call.head_dim / 16;
  bool is_alone = !worth_dividing(threads, work);
  std::vector<std::atomic<int32_t>> left((size_t)count);
  // body(item, choice, part) for each part; the thread that does the last one of a choice calls after(choice).
  auto each_part = [&](auto parts_of, const auto& body, const auto& after) {
    lists.items.clear();
    for (int64_t c = 0; c < count; c++) {
      int64_t parts = std::max<int64_t>(1, parts_of(lists.choices[(size_t)c]));
      left[(size_t)c] = (int32_t)parts;
      for (int64_t part = 0; part < parts; part++) lists.items.emplace_back((int32_t)c, (int32_t)part);
    }
    take_turns(threads, (int64_t)lists.items.size(), is_alone, [&](int64_t item) {
      auto [c, part] = lists.items[(size_t)item];
      body(item, c, part);
      if (left[(size_t)c].fetch_sub(1, std::memory_order_acq_rel) == 1) after(c);
    });
  };
  each_part([](const Choice& one) { return one.pieces; },
            [&](int64_t, int64_t c, int64_t piece) {
              const Choice& one = lists.choices[(size_t)c];
              if (piece < one.pieces) score_piece<T>(call, one, piece, lists);
            },
            [&](int64_t c) {
              const Choice& one = lists.choices[(size_t)c];
              int64_t found = choose(call, one, lists);
              lists.counts[(size_t)c] = (int32_t)found;
              Chunk<T> first = listed::chunk_of<T>(call, one.query, one.head, lists.slots.data() + one.slots, found);
              ListedAhead<T> keys = first.keys_ahead(0, listed::KEYS_AHEAD);
              for (int i = 0; i < keys.count; i++) keys.fetch(i);
            });
  auto chunk_at = [&](int64_t item) {
    auto [c, chunk] = lists.items[(size_t)item];
    const Choice& one = lists.choices[(size_t)c];
    return listed::chunk_of<T>(call, one.query, one.head, lists.slots.data() + one.slots + chunk * CHUNK,
                               lists.counts[(size_t)c] - chunk * CHUNK);
  };
  each_part([](const Choice& one) { return one.chunks; },
            [&](int64_t item, int64_t c, int64_t chunk) {
              const Choice& one = lists.choices[(size_t)c];
              int64_t size = (int64_t)(call.query_heads / call.kv_heads) * state_size(call.value_dim);
              // While the others do one item each, this thread does one.
              int64_t next = item + (is_alone ? 1 : threads.count());
              Chunk<T> own_chunk = chunk_at(item);
              if (own_chunk.count)
                listed::read(call, one.query, one.head, own_chunk,
                             next < (int64_t)lists.items.size() ? chunk_at(next) : Chunk<T>{},
                             lists.states.data() + one.states + chunk * size);
            },
            [&](int64_t c) { finish_choice(call, lists.choices[(size_t)c], lists.counts[(size_t)c], lists); });
}

}  // namespace blocks
}  // namespace KERNELS
