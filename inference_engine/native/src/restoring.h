// Chosen tokens that have left the regions come back from their codes: the contract is `LayerDecoder`, in
// `inference_engine/kv/context.py`.
//
//   match     which of a head's tokens its restore cache holds; the others get the slots used longest ago
//   restore   bits → levels · scale → product with the head's matrix, plus means → rotation → the restore cache
//
// The bits of an entry depend on its code and the matrix alone, so what a restore cache holds changes no result.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
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

// Finds `count` positions, ascending, of one head: slots[i] is where positions[i] is or will be. Those that have to be
// restored are added to `missing`. False if the restore cache has too few slots.
static bool match(const Archive& archive, int head, const int32_t* positions, int64_t count, int64_t* slots,
                  std::vector<Missing>& missing) {
  int32_t* held = archive.held + head * archive.slots;
  uint32_t *used = archive.used + head * archive.slots, now = ++archive.clocks[head];
  if (count > archive.slots) return false;
  static thread_local std::vector<int32_t> table, free;
  int bits = 4;
  while ((int64_t)1 << bits < 2 * archive.slots) bits++;
  table.assign((size_t)1 << bits, -1);
  uint32_t mask = (1u << bits) - 1;
  auto place_of = [&](int32_t position) { return ((uint32_t)position * 2654435769u) >> (32 - bits); };
  for (int32_t slot = 0; slot < archive.slots; slot++) {
    if (held[slot] < 0) continue;
    uint32_t at = place_of(held[slot]);
    while (table[at] >= 0) at = (at + 1) & mask;
    table[at] = slot;
  }
  size_t first = missing.size();
  for (int64_t i = 0; i < count; i++) {
    uint32_t at = place_of(positions[i]);
    while (table[at] >= 0 && held[table[at]] != positions[i]) at = (at + 1) & mask;
    if (table[at] >= 0) used[slots[i] = table[at]] = now;
    else missing.push_back({positions[i], (int32_t)i});  // its slot comes below
  }
  if (missing.size() == first) return true;
  free.clear();
  for (int32_t slot = 0; slot < archive.slots; slot++)
    if (held[slot] < 0 || used[slot] != now) free.push_back(slot);
  auto wanted = (std::ptrdiff_t)(missing.size() - first);
  auto before = [&](int32_t a, int32_t b) {  // empty ones first; the clock may have gone round
    if ((held[a] < 0) != (held[b] < 0)) return held[a] < 0;
    return held[a] >= 0 && now - used[a] > now - used[b];
  };
  if (wanted < (std::ptrdiff_t)free.size()) std::nth_element(free.begin(), free.begin() + wanted, free.end(), before);
  for (size_t i = first; i < missing.size(); i++) {
    int32_t slot = free[i - first];
    slots[missing[i].slot] = slot;
    missing[i].slot = slot;
    held[slot] = -1;  // until it is restored
    used[slot] = now;
  }
  return true;
}

// What a thread needs to restore AT_ONCE tokens.
struct Room {
  std::vector<uint8_t> bytes;
  std::vector<uint32_t> words, ends;
  std::vector<float> numbers, units, entries, turns;
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

// The group's numbers of at most LANES tokens, [token][count], `stride` from one token to the next: a multiple of LANES.
template <class Positions>
static void take_units(const Codes& given, const LayerDecoder& decoder, int64_t first, int64_t tokens,
                       const Positions& positions, Room& room, float* out, int64_t stride) {
  int64_t rows = (decoder.bytes + 3) / 4 + 1, chain = decoder.chains * LANES;  // a code may end in the row behind its own
  room.bytes.resize((size_t)(decoder.bytes + 16));
  room.words.assign((size_t)(rows * LANES), 0);
  room.ends.resize((size_t)(3 * chain + decoder.count * LANES));
  room.numbers.resize((size_t)(stride * LANES));
  float scales[LANES] = {};
  for (int64_t lane = 0; lane < tokens; lane++) {
    uint8_t* bytes = room.bytes.data();
    take_bytes(given, decoder, positions(first + lane) - given.first, 16, bytes);
    scales[lane] = decoder.scales[bytes[0]];
    for (int64_t row = 0; row < rows; row++)
      room.words[(size_t)(row * LANES + lane)] = __builtin_bswap32(*(const Word*)(bytes + 1 + 4 * row));
  }
  std::fill(room.ends.begin(), room.ends.begin() + 3 * chain, 0u);  // nothing stands before the first codes
  uint32_t* ends = room.ends.data() + 3 * chain;
  float* numbers = room.numbers.data();
  F scale = load(scales);
  for (int32_t c = 0; c < decoder.count; c++, ends += LANES) {
    uint32_t codes[LANES];
    int32_t bit = 8 * decoder.octets[c] + decoder.lefts[c], places[LANES];
    int32_t right = decoder.rights[c], levels = 2 << (32 - right);
    take_codes(room.words.data() + bit / 32 * LANES, bit % 32, right, codes);
    take_places(codes, ends, ends - chain, ends - 2 * chain, ends - 3 * chain, places);
    store(numbers + c * LANES, mul(pick(decoder.levels + decoder.tables[c], levels, places), scale));
  }
  for (int64_t c = 0; c < decoder.count; c += LANES) {
    F square[LANES];
    for (int i = 0; i < LANES; i++) square[i] = load(numbers + (c + i) * LANES);
    transpose(square);
    for (int64_t lane = 0; lane < tokens; lane++) store(out + lane * stride + c, square[lane]);
  }
}

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
                    void* keys, void* values, int64_t count, int from, int to, const Positions& positions,
                    const Places& places) {
  Room& room = Room::own();
  int64_t width = 2 * dim, turned = turning.turned, stride = turned + 2 * LANES;
  int64_t apart = (decoder.count + LANES - 1) / LANES * LANES;
  room.units.resize((size_t)(AT_ONCE * apart));
  room.entries.resize((size_t)(AT_ONCE * width) + LANES);
  room.turns.resize((size_t)(AT_ONCE * stride));
  for (int64_t i = 0; i < count; i += LANES) {
    int64_t tokens = std::min<int64_t>(LANES, count - i);
    take_units(codes, decoder, i, tokens, positions, room, room.units.data() + i * apart, apart);
  }
  for (int64_t i = 0; i < count; i++) take_turns(turning, positions(i), room.turns.data() + i * stride);
  F rest = all(0.0f), most = all(0.0f);
  // The heads' matrices are alike, so what they are multiplied with is prepared once.
  auto identity = (Identity)decoder.identity;
  Activations units = prepare(room.alone, decoder.matrices[from], identity, room.units.data(), apart, count);
  for (int head = from; head < to; head++) {
    linear_prepared(room.alone, decoder.matrices[head], identity, units, room.entries.data(), width);
    const float* means = decoder.means + head * width;
    for (int64_t i = 0; i < count; i++) {
      float *entry = room.entries.data() + i * width, *turns = room.turns.data() + i * stride;
      for (int64_t d = 0; d < width; d += LANES) {
        F number = add(load(entry + d), load(means + d));
        rest = fma(number, all(0.0f), rest);
        most = larger(absolute(number), most);
        store(entry + d, number);
      }
      rotate(entry, turns, turns + turned / 2, turned);
      int64_t place = places(head, i);
      put(kv_type, keys, place, entry, dim);
      put(kv_type, values, place, entry + dim, dim);
    }
  }
  return sum(rest) == 0.0f && (kv_type != KV_FLOAT16 || largest(most) < LARGEST_F16);
}

// Missing tokens of one head into the restore cache.
static void restore_missing(const KeyIndex& index, int head, int dim, int32_t kv_type, void* keys, void* values,
                            const Missing* missing, int64_t count) {
  Archive& archive = *index.archive;
  int32_t* held = archive.held + head * archive.slots;
  bool is_finite = restore(
      archive.codes, *archive.decoder, archive.turning, dim, kv_type, keys, values, count, head, head + 1,
      [&](int64_t i) { return (int64_t)missing[i].position; },
      [&](int, int64_t i) { return archive.start + head * archive.slots + missing[i].slot; });
  for (int64_t i = 0; i < count; i++) held[missing[i].slot] = missing[i].position;
  if (!is_finite) __atomic_store_n(&archive.is_broken, 1, __ATOMIC_RELAXED);
}

}  // namespace restoring

// Consecutive tokens of all heads. False if a number is not finite.
static bool restore_run(Threads& threads, const RestoredRun& run) {
  std::atomic<bool> is_finite{true};
  int64_t each = restoring::at_once(run.count, threads.count()), blocks = (run.count + each - 1) / each;
  threads.split(blocks, 1, [&](int64_t block, int64_t end) {
    for (; block < end; block++) {
      int64_t first = block * each, count = std::min(each, run.count - first);
      bool found = restoring::restore(
          run.codes, *run.decoder, run.turning, run.head_dim, run.kv_type, run.keys, run.values, count, 0, run.kv_heads,
          [&](int64_t i) { return run.first + first + i; },
          [&](int head, int64_t i) { return head * run.apart + first + i; });
      if (!found) is_finite.store(false, std::memory_order_relaxed);
    }
  });
  return is_finite;
}

}  // namespace KERNELS
