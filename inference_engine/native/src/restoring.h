// Chosen tokens that have left the regions come back from their codes: the contract is `LayerDecoder`, in
// `inference_engine/kv/context.py`.
//
//   match     which of a head's tokens its slab holds; the others get the slots that were chosen from longest ago
//   restore   bits → levels · scale → product with the head's matrix, plus means → rotation → the slab
//
// The bits of an entry depend on its code and the matrix alone, so what a slab holds changes no result.
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

constexpr int64_t AT_ONCE = 16;  // tokens whose entries are restored together
constexpr float LARGEST_F16 = 65504.0f;

struct Missing {
  int32_t position, slot;
};

// Finds `count` positions, ascending, of one head: slots[i] is where positions[i] is or will be. Those that have to be
// restored are added to `missing`. False if the slab has too few slots.
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
  std::vector<uint8_t> bytes, ends;
  std::vector<int32_t> codes;
  std::vector<float> units, entries, turns;
  Threads alone{1};

  static Room& own() {
    static thread_local Room room;
    return room;
  }
};

// The group's numbers of one token, [count]. Codes are read as 32 bits from the byte in which they begin.
static void take_units(const Codes& given, const LayerDecoder& decoder, int64_t place, Room& room, float* out) {
  int64_t count = decoder.count, chains = decoder.chains, first = decoder.first_byte, size = decoder.bytes;
  room.bytes.resize((size_t)size + 8);
  room.ends.assign((size_t)(count + 3 * chains), 0);
  room.codes.resize((size_t)count);
  uint8_t* bytes = room.bytes.data();
  int64_t low = std::min(std::max<int64_t>(given.half - first, 0), size);
  memcpy(bytes, given.low + place * given.half + first, (size_t)low);
  memcpy(bytes + low, given.high + place * given.half + (first + low - given.half), (size_t)(size - low));
  memset(bytes + size, 0, 8);
  const uint8_t* packed = bytes + 1;
  int32_t* codes = room.codes.data();
  uint8_t* end = room.ends.data() + 3 * chains;  // the lowest bit of each code, zeros before the first ones
  for (int64_t c = 0; c < count; c++) {
    uint32_t word;
    memcpy(&word, packed + (decoder.begins[c] >> 3), 4);
    word = __builtin_bswap32(word) << (decoder.begins[c] & 7) >> (32 - decoder.widths[c]);
    codes[c] = (int32_t)word;
    end[c] = word & 1;
  }
  float scale = decoder.scales[bytes[0]];
  for (int64_t c = 0; c < count; c++) {
    int32_t subset = (end[c] ^ end[c - chains] ^ end[c - 3 * chains]) << 1 | end[c - 2 * chains];
    out[c] = decoder.levels[decoder.tables[c] + (codes[c] >> 1 << 2) + subset] * scale;
  }
}

// Cosines and sines of a position, as the model's own rotation has them.
static void take_turns(const Turning& turning, int64_t position, float* turns) {
  int64_t half = turning.turned / 2;
  for (int64_t f = 0; f < half; f++) {
    if (position < turning.trained) {
      float angle = (float)position * turning.frequencies[f];
      turns[f] = std::cos(angle), turns[half + f] = std::sin(angle);
    } else {
      double angle = (double)position * (double)turning.frequencies[f];
      turns[f] = (float)std::cos(angle), turns[half + f] = (float)std::sin(angle);
    }
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
  room.units.resize((size_t)(AT_ONCE * decoder.count) + LANES);
  room.entries.resize((size_t)(AT_ONCE * width) + LANES);
  room.turns.resize((size_t)(AT_ONCE * stride));
  for (int64_t i = 0; i < count; i++) {
    take_units(codes, decoder, positions(i) - codes.first, room, room.units.data() + i * decoder.count);
    take_turns(turning, positions(i), room.turns.data() + i * stride);
  }
  F rest = all(0.0f), most = all(0.0f);
  for (int head = from; head < to; head++) {
    linear(room.alone, decoder.matrices[head], EXACT, room.units.data(), decoder.count, count, room.entries.data(),
           width);
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

// Missing tokens of one head into the slab.
static void restore_missing(const KeyIndex& index, int head, int dim, int32_t kv_type, void* keys, void* values,
                            const Missing* missing, int64_t count) {
  Archive& archive = *index.archive;
  Turning turning = {index.frequencies, index.turned, archive.trained};
  int32_t* held = archive.held + head * archive.slots;
  bool is_finite = restore(
      archive.codes, *archive.decoder, turning, dim, kv_type, keys, values, count, head, head + 1,
      [&](int64_t i) { return (int64_t)missing[i].position; },
      [&](int, int64_t i) { return archive.start + head * archive.slots + missing[i].slot; });
  for (int64_t i = 0; i < count; i++) held[missing[i].slot] = missing[i].position;
  if (!is_finite) __atomic_store_n(&archive.is_broken, 1, __ATOMIC_RELAXED);
}

}  // namespace restoring

// Consecutive tokens of all heads. False if a number is not finite.
static bool restore_run(Threads& threads, const RestoredRun& run) {
  std::atomic<bool> is_finite{true};
  int64_t blocks = (run.count + restoring::AT_ONCE - 1) / restoring::AT_ONCE;
  threads.split(blocks, 1, [&](int64_t block, int64_t end) {
    for (; block < end; block++) {
      int64_t first = block * restoring::AT_ONCE, count = std::min(restoring::AT_ONCE, run.count - first);
      bool found = restoring::restore(
          run.codes, *run.decoder, run.turning, run.head_dim, run.kv_type, run.keys, run.values, count, 0, run.kv_heads,
          [&](int64_t i) { return run.first + first + i; },
          [&](int head, int64_t i) { return head * run.count + first + i; });
      if (!found) is_finite.store(false, std::memory_order_relaxed);
    }
  });
  return is_finite;
}

}  // namespace KERNELS
