// Tokens that have left the regions come back from their codes: the contract is `LayerDecoder`, in
// `inference_engine/kv/context.py`.
//
//   match     which of a head's tokens its restore cache holds, by a table; the others get the slots that are worth least
//   restore   bits → levels → product with the head's matrix · scale, plus means → rotation → the restore cache
//
// The bits of an entry depend on its code and the matrix alone, so what a restore cache holds changes no result.
//
// Levels come from small tables, so both sides of the product can be whole numbers, of which a processor multiplies twice
// as many at once. They lose some times what floats of 16 bits do, and less than a hundredth of what codes do. In EXACT a level is one of ±8191 parts of its
// table's largest, and a number of an output one of ±8191 parts of the largest of 32. Of 32 products 32 bits hold the
// sum, which is exact; then total += scale · sum as floats, blocks ascending. In QUANTISED bytes are multiplied
// (matrix.h).
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "entries.h"
#include "matrix.h"
#include "simd.h"
#include "threads.h"
#include "types.h"

namespace KERNELS {
namespace restoring {

// Tokens whose entries are restored together: numbers of a matrix are made of its 16 bits once for all of them.
constexpr int64_t AT_ONCE = 128;
constexpr int64_t LEAST_AT_ONCE = LANES;
constexpr float LARGEST_F16 = 65504.0f;

// As many of `count` tokens at once as leave some for each thread. Their bits do not depend on it.
INLINE int64_t at_once(int64_t count, int threads) {
  int64_t fair = (count / (2 * threads) + LEAST_AT_ONCE - 1) / LEAST_AT_ONCE * LEAST_AT_ONCE;
  return std::min(AT_ONCE, std::max(LEAST_AT_ONCE, fair));
}

struct Missing {
  int32_t position, slot;
};

// How long an entry stays that is not chosen any more, in tokens: STAY for each time that it was chosen, as long as it
// was chosen again before that ended. What many tokens chose comes back more often than what was chosen last.
// What was chosen often stays for as long as three times, or nothing new would stay when a text turns to something else.
constexpr int32_t STAY = 8, LONGEST_STAY = 24;

// What `until` says, in tokens from now: less than any that was ever chosen, and more.
constexpr int32_t EMPTY = -(1 << 28), CHOSEN = 1 << 24;

// Which slot each archived token of one head is in.
class Slots {
 public:
  Slots(const Archive& archive, int head)
      : own_((uint8_t*)archive.slot_of + head * archive.tokens * (archive.is_wide ? 4 : 2)),
        first_(archive.codes.first),
        is_wide_(archive.is_wide != 0) {}

  // -1: in none.
  int32_t of(int64_t position) const {
    int64_t place = position - first_;
    return (is_wide_ ? ((const int32_t*)own_)[place] : ((const uint16_t*)own_)[place]) - 1;
  }

  void set(int64_t position, int32_t slot) {
    int64_t place = position - first_;
    if (is_wide_) ((int32_t*)own_)[place] = slot + 1;
    else ((uint16_t*)own_)[place] = (uint16_t)(slot + 1);
  }

 private:
  void* own_;
  int64_t first_;
  bool is_wide_;
};

// The buffer vector of a slot.
INLINE int64_t vector_of(const Archive& archive, int head, int32_t slot) {
  if (slot < archive.first) return archive.rooms[0] + head * archive.first + slot;
  auto beyond = (uint32_t)(slot - archive.first), each = (uint32_t)archive.each;
  return archive.rooms[1 + beyond / each] + head * archive.each + beyond % each;
}

// How many slots a head has, those not among them whose rooms were taken back: what they held is forgotten.
INLINE int32_t usable_slots(const Archive& archive, int head, uint32_t now) {
  int32_t usable = __atomic_load_n(&archive.slots, __ATOMIC_RELAXED), *held = archive.held + head * archive.most;
  Slots slot_of(archive, head);
  for (int32_t& known = archive.known[head]; known > usable;) {
    known--;
    if (held[known]) slot_of.set(held[known] - 1, -1);
    held[known] = 0, archive.until[head * archive.most + known] = now + (uint32_t)EMPTY;
  }
  return usable;
}

// How many of `count` slots stay for `limit` tokens or less.
INLINE int64_t count_staying(const uint32_t* until, int64_t count, uint32_t now, int32_t limit) {
  int32_t found = 0;
  for (int64_t i = 0; i < count; i++) found += (int32_t)(until[i] - now) <= limit;
  return found;
}

// Finds `count` positions, ascending, of one head: slots[i] is where positions[i] is or will be. Those that have to be
// restored are added to `missing`. False if the restore cache has too few slots.
static bool match(const Archive& archive, int head, const int32_t* positions, int64_t count, int64_t* slots,
                  std::vector<Missing>& missing) {
  int32_t* held = archive.held + head * archive.most;
  uint32_t *until = archive.until + head * archive.most, now = ++archive.clocks[head];
  Slots slot_of(archive, head);
  int32_t usable = usable_slots(archive, head, now);
  if (count > usable) return false;
  size_t first = missing.size();
  for (int64_t i = 0; i < count; i++) {
    int32_t slot = slot_of.of(positions[i]);
    slots[i] = slot;
    if (slot < 0) {
      missing.push_back({positions[i], (int32_t)i});  // its slot comes below
      continue;
    }
    auto left = (int32_t)(until[slot] - now);
    until[slot] = now + (uint32_t)(CHOSEN + std::min(std::max(left, 0) + STAY, LONGEST_STAY));
  }
  auto wanting = (int64_t)(missing.size() - first);
  if (wanting) {
    // Those that stay no longer than `limit` make room, of those that stay as long the first. Empty slots come before
    // all others, and what has not been chosen for long is alike.
    int32_t below = EMPTY - 1, limit = EMPTY;
    int64_t fewer = 0, empty = count_staying(until, usable, now, EMPTY);
    if (empty < wanting) {
      below = EMPTY, fewer = empty, limit = LONGEST_STAY;
      for (int32_t low = -LONGEST_STAY - 1; limit - low > 1;) {
        int32_t middle = low + (limit - low) / 2;
        int64_t found = count_staying(until, usable, now, middle);
        if (found >= wanting) limit = middle;
        else low = below = middle, fewer = found;
      }
    }
    int64_t as_long = wanting - fewer;
    constexpr int32_t BLOCK = 64;
    size_t next = first;
    for (int32_t block = 0; next < missing.size(); block += BLOCK) {
      int32_t end = std::min(block + BLOCK, usable);
      if (!count_staying(until + block, end - block, now, limit)) continue;
      for (int32_t slot = block; slot < end && next < missing.size(); slot++) {
        auto left = (int32_t)(until[slot] - now);
        if (left > limit || (left > below && as_long-- <= 0)) continue;
        if (held[slot]) slot_of.set(held[slot] - 1, -1);
        int32_t position = missing[next].position;
        slots[missing[next].slot] = slot;
        missing[next++].slot = slot;
        held[slot] = position + 1;
        slot_of.set(position, slot);
        until[slot] = now + (uint32_t)(CHOSEN + STAY);
      }
    }
  }
  for (int64_t i = 0; i < count; i++) until[slots[i]] -= (uint32_t)CHOSEN;
  return true;
}

// What a thread needs to restore AT_ONCE tokens.
struct Room {
  std::vector<uint8_t> bytes;
  std::vector<uint32_t> words, ends;
  std::vector<int32_t> pairs;
  std::vector<float> numbers, units, totals, entries, turns;
  Threads alone{1};

  static Room& own() {
    static thread_local Room room;
    return room;
  }
};

typedef uint32_t __attribute__((aligned(1), may_alias)) Word;

// A lane is a token, so that where a code lies and how wide it is are the same for all lanes. In plain loops over arrays,
// which compilers turn into vectors.

// Of each lane, the bits from `shift` on of its word in this row and the next one, all but `right` of 32.
INLINE void take_codes(const uint32_t* __restrict row, int32_t shift, int32_t right, uint32_t* __restrict codes) {
  for (int lane = 0; lane < LANES; lane++)
    codes[lane] = (row[lane] << shift | (row[LANES + lane] >> 1) >> (31 - shift)) >> right;
}

// Which level a code names, counted from its table. The lowest bits of codes in a chain, its own and those of the three
// before it, say which of four.
INLINE void take_places(const uint32_t* __restrict codes, uint32_t* __restrict ends, const uint32_t* __restrict one,
                        const uint32_t* __restrict two, const uint32_t* __restrict three, int32_t* __restrict places) {
  for (int lane = 0; lane < LANES; lane++) {
    uint32_t end = codes[lane] & 1;
    ends[lane] = end;
    places[lane] = (int32_t)((codes[lane] >> 1) << 2 | (end ^ one[lane] ^ three[lane]) << 1 | two[lane]);
  }
}

// The group's bytes of one token, 0 behind them.
static void take_bytes(const Codes& given, const LayerDecoder& decoder, int64_t place, int64_t behind, uint8_t* bytes) {
  int64_t first = decoder.first_byte, size = decoder.bytes;
  int64_t low = std::min(std::max<int64_t>(given.half - first, 0), size);
  memcpy(bytes, given.low + place * given.half + first, (size_t)low);
  memcpy(bytes + low, given.high + place * given.half + (first + low - given.half), (size_t)(size - low));
  memset(bytes + size, 0, (size_t)behind);
}

// body(c, places) for each code of at most LANES tokens, in order: which of its levels it is, by token. Into `scales` go
// those of the tokens, 0 where there is none.
template <class Positions, class Body>
static void each_code(const Codes& given, const LayerDecoder& decoder, int64_t first, int64_t tokens,
                      const Positions& positions, Room& room, float* scales, const Body& body) {
  int64_t rows = (decoder.bytes + 3) / 4 + 1, chain = decoder.chains * LANES;  // a code may end in the row behind its own
  room.bytes.resize((size_t)(decoder.bytes + 16));
  room.words.assign((size_t)(rows * LANES), 0);
  room.ends.resize((size_t)(3 * chain + decoder.count * LANES));
  std::fill(scales, scales + LANES, 0.0f);
  for (int64_t lane = 0; lane < tokens; lane++) {
    uint8_t* bytes = room.bytes.data();
    take_bytes(given, decoder, positions(first + lane) - given.first, 16, bytes);
    scales[lane] = decoder.scales[bytes[0]];
    for (int64_t row = 0; row < rows; row++)
      room.words[(size_t)(row * LANES + lane)] = __builtin_bswap32(*(const Word*)(bytes + 1 + 4 * row));
  }
  std::fill(room.ends.begin(), room.ends.begin() + 3 * chain, 0u);  // nothing stands before the first codes
  uint32_t* ends = room.ends.data() + 3 * chain;
  for (int32_t c = 0; c < decoder.count; c++, ends += LANES) {
    uint32_t codes[LANES];
    int32_t bit = 8 * decoder.octets[c] + decoder.lefts[c], places[LANES];
    take_codes(room.words.data() + bit / 32 * LANES, bit % 32, decoder.rights[c], codes);
    take_places(codes, ends, ends - chain, ends - 2 * chain, ends - 3 * chain, places);
    body(c, places);
  }
}

// How many levels code c has.
INLINE int32_t level_count(const LayerDecoder& decoder, int32_t c) { return 2 << (32 - decoder.rights[c]); }

// -- products of bytes ------------------------------------------------------------------------------------------------

// The group's numbers of at most LANES tokens, [token][count], `stride` from one token to the next: a multiple of LANES.
template <class Positions>
static void take_units(const Codes& given, const LayerDecoder& decoder, int64_t first, int64_t tokens,
                       const Positions& positions, Room& room, float* out, int64_t stride) {
  room.numbers.resize((size_t)(stride * LANES));
  float *numbers = room.numbers.data(), scales[LANES];
  const auto* levels = (const float*)decoder.levels;
  each_code(given, decoder, first, tokens, positions, room, scales, [&](int32_t c, const int32_t* places) {
    F level = pick(levels + decoder.tables[c], level_count(decoder, c), places);
    store(numbers + c * LANES, mul(level, load(scales)));
  });
  for (int64_t c = 0; c < decoder.count; c += LANES) {
    F square[LANES];
    for (int i = 0; i < LANES; i++) square[i] = load(numbers + (c + i) * LANES);
    transpose(square);
    for (int64_t lane = 0; lane < tokens; lane++) store(out + lane * stride + c, square[lane]);
  }
}

// -- products of whole numbers ----------------------------------------------------------------------------------------

constexpr int64_t PAIRS = 16;                            // of inputs that share a scale
constexpr int64_t WHOLE_BYTES = PAIRS * 64 + LANES * 4;  // of a block of a tile
constexpr int64_t FETCHED = 4 * WHOLE_BYTES;             // so far before it is used

INLINE int64_t whole_blocks(const LayerDecoder& decoder) { return (decoder.count + 2 * PAIRS - 1) / (2 * PAIRS); }

// The group's levels of at most LANES tokens, [pair][token] from `out` on: two codes of a token are one word.
template <class Positions>
static void take_pairs(const Codes& given, const LayerDecoder& decoder, int64_t first, int64_t tokens,
                       const Positions& positions, Room& room, int32_t* out, float* scales) {
  const auto* levels = (const int16_t*)decoder.levels;
  I low = zeros();
  each_code(given, decoder, first, tokens, positions, room, scales, [&](int32_t c, const int32_t* places) {
    I level = pick_short(levels + decoder.tables[c], level_count(decoder, c), places);
    if (c % 2) store((float*)(out + c / 2 * LANES), bits(in_pairs(low, level)));
    else low = level;
  });
  int64_t pairs = decoder.count / 2;
  if (decoder.count % 2) store((float*)(out + pairs++ * LANES), bits(in_pairs(low, zeros())));
  std::fill(out + pairs * LANES, out + whole_blocks(decoder) * PAIRS * LANES, 0);
}

// Exact sums of `T` tokens and `C` tiles.
template <int T, int C>
struct Sums {
  I at[T][C];
};

template <int T, int C>
INLINE void add_pairs(const uint8_t* block, int64_t tile_bytes, const int32_t* pairs, Sums<T, C>& sums) {
  for (int p = 0; p < PAIRS; p++, block += 64, pairs += LANES) {
    Shorts numbers[C];
    UNROLL for (int c = 0; c < C; c++) {
      __builtin_prefetch(block + c * tile_bytes + FETCHED);
      numbers[c] = load_shorts(block + c * tile_bytes);
    }
    UNROLL for (int t = 0; t < T; t++)
      UNROLL for (int c = 0; c < C; c++) sums.at[t][c] = dot_shorts(sums.at[t][c], numbers[c], pairs[t]);
  }
}

// Adds a block of C tiles to the totals of T tokens, [token][tile][16]. Not inlined: the compiler would keep the totals
// where the sums should be.
template <int T, int C>
__attribute__((noinline)) void add_block(const uint8_t* block, int64_t tile_bytes, const int32_t* pairs,
                                         float* totals) {
  Sums<T, C> sums;
  UNROLL for (int t = 0; t < T; t++) UNROLL for (int c = 0; c < C; c++) sums.at[t][c] = zeros();
  add_pairs(block, tile_bytes, pairs, sums);
  UNROLL for (int c = 0; c < C; c++) {
    F scale = load((const float*)(block + c * tile_bytes + PAIRS * 64));
    UNROLL for (int t = 0; t < T; t++) {
      float* total = totals + (t * C + c) * LANES;
      store(total, fma(scale, as_floats(sums.at[t][c]), load(total)));
    }
  }
}

// Tiles [tile, tile + C) of a head's products with all tokens, into out[token][16 · tile …]. A block of the tiles stays in
// the nearest cache for all tokens.
template <int C>
static void add_tiles(const LayerDecoder& decoder, int head, int64_t tile, int64_t tiles, const int32_t* pairs,
                      int64_t tokens, Room& room, float* out, int64_t stride) {
  int64_t blocks = whole_blocks(decoder), tile_bytes = blocks * WHOLE_BYTES;
  const uint8_t* from = decoder.whole + (head * tiles + tile) * tile_bytes;
  room.totals.assign((size_t)(tokens * C * LANES), 0.0f);
  float* totals = room.totals.data();
  for (int64_t b = 0; b < blocks; b++, from += WHOLE_BYTES)
    for (int64_t i = 0; i < tokens; i += LANES) {
      const int32_t* own = pairs + (i * blocks + b * LANES) * PAIRS;
      Groups groups(std::min<int64_t>(LANES, tokens - i));
      for (int64_t g = 0; g < groups.count; g++)
        with_width(groups.width(g), [&](auto width) {
          int64_t t = groups.first(g);
          add_block<decltype(width)::value, C>(from, tile_bytes, own + t, totals + (i + t) * C * LANES);
        });
    }
  for (int64_t token = 0; token < tokens; token++)
    memcpy(out + token * stride + tile * LANES, totals + token * C * LANES, C * LANES * sizeof(float));
}

static void add_all(const LayerDecoder& decoder, int head, const int32_t* pairs, int64_t tokens, Room& room, float* out,
                    int64_t width) {
  int64_t tiles = width / LANES, tile = 0;
  for (; tiles - tile >= MANY_TILES; tile += MANY_TILES)
    add_tiles<MANY_TILES>(decoder, head, tile, tiles, pairs, tokens, room, out, width);
  if constexpr (MANY_TILES > 2)
    if (tiles - tile == 2) return add_tiles<2>(decoder, head, tile, tiles, pairs, tokens, room, out, width);
  for (; tile < tiles; tile++) add_tiles<1>(decoder, head, tile, tiles, pairs, tokens, room, out, width);
}

// -- entries ----------------------------------------------------------------------------------------------------------

// Cosines and sines of a position: those of the sum of two angles.
static void take_turns(const Turning& turning, int64_t position, float* __restrict turns) {
  int64_t half = turning.turned / 2;
  const float *fine = turning.fine + position % 256 * turning.turned;
  const float *coarse = turning.coarse + position / 256 * turning.turned;
  for (int64_t f = 0; f < half; f++) {
    turns[f] = coarse[f] * fine[f] - coarse[half + f] * fine[half + f];
    turns[half + f] = coarse[half + f] * fine[f] + coarse[f] * fine[half + f];
  }
}

// Restores at most AT_ONCE tokens, the i-th of them at positions(i). For each of the heads [from, to), vector
// `places(head, i)` of K and of V is written. False if a number is not finite.
template <class Positions, class Places>
static bool restore(const Codes& codes, const LayerDecoder& decoder, const Turning& turning, int dim, int32_t kv_type,
                    void* keys, void* values, int64_t row, int64_t count, int from, int to, const Positions& positions,
                    const Places& places) {
  Room& room = Room::own();
  int64_t width = 2 * dim, turned = turning.turned, stride = turned + 2 * LANES;
  bool is_exact = decoder.identity == EXACT;
  int64_t apart = (decoder.count + LANES - 1) / LANES * LANES, words = whole_blocks(decoder) * PAIRS;
  if (is_exact) room.pairs.resize((size_t)(AT_ONCE * words));
  else room.units.resize((size_t)(AT_ONCE * apart));
  room.entries.resize((size_t)(AT_ONCE * width) + LANES);
  room.turns.resize((size_t)(AT_ONCE * stride));
  float scales[AT_ONCE];
  for (int64_t i = 0; i < count; i += LANES) {
    int64_t tokens = std::min<int64_t>(LANES, count - i);
    if (is_exact) take_pairs(codes, decoder, i, tokens, positions, room, room.pairs.data() + i * words, scales + i);
    else take_units(codes, decoder, i, tokens, positions, room, room.units.data() + i * apart, apart);
  }
  for (int64_t i = 0; i < count; i++) take_turns(turning, positions(i), room.turns.data() + i * stride);
  F rest = all(0.0f), most = all(0.0f);
  // The heads' matrices are alike, so what they are multiplied with is prepared once.
  Activations units = {Groups(0), 0, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
  if (!is_exact) units = prepare(room.alone, decoder.matrices[from], QUANTISED, room.units.data(), apart, count);
  for (int head = from; head < to; head++) {
    if (is_exact) add_all(decoder, head, room.pairs.data(), count, room, room.entries.data(), width);
    else linear_prepared(room.alone, decoder.matrices[head], QUANTISED, units, room.entries.data(), width);
    const float* means = decoder.means + head * width;
    for (int64_t i = 0; i < count; i++) {
      float *entry = room.entries.data() + i * width, *turns = room.turns.data() + i * stride;
      F scale = all(is_exact ? scales[i] : 1.0f);
      for (int64_t d = 0; d < width; d += LANES) {
        F number = fma(load(entry + d), scale, load(means + d));
        rest = fma(number, all(0.0f), rest);
        most = larger(absolute(number), most);
        store(entry + d, number);
      }
      rotate(entry, turns, turns + turned / 2, turned);
      int64_t at = places(head, i) * row;
      put(kv_type, keys, at, entry, dim);
      put(kv_type, values, at, entry + dim, dim);
    }
  }
  return sum(rest) == 0.0f && (kv_type != KV_FLOAT16 || largest(most) < LARGEST_F16);
}

// Missing tokens of one head into the restore cache.
static void restore_missing(const KeyIndex& index, int head, const Attention& call, const Missing* missing,
                            int64_t count) {
  Archive& archive = *index.archive;
  bool is_finite = restore(
      archive.codes, *archive.decoder, archive.turning, call.head_dim, call.kv_type, (void*)call.keys,
      (void*)call.values, call.row, count, head, head + 1,
      [&](int64_t i) { return (int64_t)missing[i].position; },
      [&](int, int64_t i) { return vector_of(archive, head, missing[i].slot); });
  if (!is_finite) __atomic_store_n(&archive.is_broken, 1, __ATOMIC_RELAXED);
}

// Of consecutive tokens, which the restore cache holds, and which it gets: by head and token.
class HeldRun {
 public:
  explicit HeldRun(const RestoredRun& run) : run_(run), vectors_((size_t)(run.kv_heads * run.count), NONE) {
    Archive& archive = *run.archive;
    for (int head = 0; head < run.kv_heads; head++) {
      Slots slot_of(archive, head);
      const uint32_t *until = archive.until + head * archive.most, now = archive.clocks[head];
      int32_t usable = usable_slots(archive, head, now);
      // Not in the first room, which a step that reads chunks may use for something else.
      auto slot = (int32_t)archive.first;
      for (int64_t i = 0; i < run.count; i++) {
        int64_t& vector = vectors_[(size_t)(head * run.count + i)];
        int32_t found = slot_of.of(run.first + i);
        if (found >= 0) {
          vector = vector_of(archive, head, found);
          continue;
        }
        while (slot < usable && (int32_t)(until[slot] - now) > EMPTY) slot++;
        if (slot == usable) continue;
        vector = ~vector_of(archive, head, slot);
        fresh_.push_back({(int32_t)(run.first + i), slot++, head});
      }
    }
  }

  bool holds(int head, int64_t i) const { return at(head, i) >= 0; }

  // Copies an entry from the cache, or one that was just restored there, if it gets it.
  void copy(int head, int64_t i) const {
    int64_t held = at(head, i), size = run_.kv_type == KV_FLOAT32 ? 4 : 2, bytes = run_.head_dim * size;
    if (held == NONE) return;
    int64_t own = (head * run_.apart + i) * run_.row * size, there = (held < 0 ? ~held : held) * run_.held_row * size;
    auto one = [&](void* of_run, void* of_cache) {
      char *here = (char*)of_run + own, *cached = (char*)of_cache + there;
      if (held < 0) memcpy(cached, here, (size_t)bytes);
      else memcpy(here, cached, (size_t)bytes);
    };
    one(run_.keys, run_.held_keys), one(run_.values, run_.held_values);
  }

  // What the cache got is in it. Nothing chose it, so it goes first when others need its slot.
  void finish() const {
    Archive& archive = *run_.archive;
    for (const Fresh& one : fresh_) {
      Slots(archive, one.head).set(one.position, one.slot);
      archive.held[one.head * archive.most + one.slot] = one.position + 1;
      archive.until[one.head * archive.most + one.slot] = archive.clocks[one.head] - (uint32_t)LONGEST_STAY;
    }
  }

 private:
  static constexpr int64_t NONE = INT64_MIN;
  struct Fresh {
    int32_t position, slot, head;
  };

  int64_t at(int head, int64_t i) const { return vectors_[(size_t)(head * run_.count + i)]; }

  const RestoredRun& run_;
  std::vector<int64_t> vectors_;  // the vector that holds it; ~vector: that will; NONE: there is none
  std::vector<Fresh> fresh_;
};

// Restores tokens `some` of a run, for the heads [from, to).
static bool restore_some(const RestoredRun& run, const std::vector<int64_t>& some, int from, int to) {
  return restore(
      run.codes, *run.decoder, run.turning, run.head_dim, run.kv_type, run.keys, run.values, run.row,
      (int64_t)some.size(), from, to, [&](int64_t i) { return run.first + some[(size_t)i]; },
      [&](int head, int64_t i) { return head * run.apart + some[(size_t)i]; });
}

// Tokens [first, end) of a run, at most AT_ONCE: what the cache holds is copied.
static bool restore_others(const RestoredRun& run, const HeldRun& held, int64_t first, int64_t end) {
  static thread_local std::vector<int64_t> some;
  some.clear();
  int64_t missing = 0;
  auto is_missing = [&](int from, int to, int64_t i) {
    int64_t found = 0;
    for (int head = from; head < to; head++) found += !held.holds(head, i);
    return found;
  };
  for (int64_t i = first; i < end; i++) {
    int64_t found = is_missing(0, run.kv_heads, i);
    missing += found;
    if (found) some.push_back(i);
  }
  bool is_finite = true;
  // To unpack a token's code takes about as long as a product with a head's matrix.
  if (2 * missing >= (int64_t)some.size() * (1 + run.kv_heads)) {
    if (missing) is_finite = restore_some(run, some, 0, run.kv_heads);
  } else {
    for (int head = 0; head < run.kv_heads; head++) {
      some.clear();
      for (int64_t i = first; i < end; i++)
        if (is_missing(head, head + 1, i)) some.push_back(i);
      if (!some.empty()) is_finite &= restore_some(run, some, head, head + 1);
    }
  }
  for (int head = 0; head < run.kv_heads; head++)
    for (int64_t i = first; i < end; i++) held.copy(head, i);
  return is_finite;
}

}  // namespace restoring

// Consecutive tokens of all heads. False if a number is not finite.
static bool restore_run(Threads& threads, const RestoredRun& run) {
  std::atomic<bool> is_finite{true};
  int64_t each = restoring::at_once(run.count, threads.count()), blocks = (run.count + each - 1) / each;
  std::unique_ptr<restoring::HeldRun> held;
  if (run.archive) held = std::make_unique<restoring::HeldRun>(run);
  threads.split(blocks, 1, [&](int64_t block, int64_t end) {
    for (; block < end; block++) {
      int64_t first = block * each, count = std::min(each, run.count - first);
      bool found = held ? restoring::restore_others(run, *held, first, first + count)
                        : restoring::restore(
                              run.codes, *run.decoder, run.turning, run.head_dim, run.kv_type, run.keys, run.values,
                              run.row, count, 0, run.kv_heads, [&](int64_t i) { return run.first + first + i; },
                              [&](int head, int64_t i) { return head * run.apart + first + i; });
      if (!found) is_finite.store(false, std::memory_order_relaxed);
    }
  });
  if (held && is_finite) held->finish();
  return is_finite;
}

}  // namespace KERNELS
