// Entries become coded vectors, and these become entries again: what `inference_engine/kv/compressors` give, to the bit.
//
//   entry, in a region ⇄ rotation ⇄ mean ⇄ Hadamard ⇄ (level + centre) · scale ⇄ code
//
// 16 entries of a head are done together. Their channels lie in columns, an entry in each lane, so that whatever is done
// along a vector is done lane by lane in the reference's own order.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"
#include "step.h"
#include "threads.h"
#include "types.h"

namespace KERNELS {
namespace coded {

constexpr int FRACTIONS = 16;  // of a step, in which a centre is counted
constexpr double CENTRE_RANGE = 2000;
constexpr int BLOCKS = 4;      // of 16 entries, that share the rotation's numbers and go through the layers together
constexpr int MOST_CHANNELS = 4096;
constexpr int CELLS = 512, FARTHEST = 4;  // of the line on which levels are looked up: to a unit, and units from zero
constexpr int FITS = 5;  // scales that are tried
constexpr float LARGEST_F16 = 65504.0f;
constexpr float SMALLEST_SCALE = 1.0f / (1ull << 40);

INLINE uint32_t word_of(float number) {
  uint32_t word;
  memcpy(&word, &number, 4);
  return word;
}
INLINE float number_of(uint32_t word) {
  float number;
  memcpy(&number, &word, 4);
  return number;
}

// Scales of 16 bits, as `kv/compressors/scales.py` has them.
constexpr int DROPPED = 15;
INLINE uint32_t stored_scale(float scale) {
  return (uint32_t)((int32_t)(word_of(scale) + (1u << (DROPPED - 1))) >> DROPPED) & 0xffff;
}
INLINE float scale_of(uint32_t stored) { return number_of(stored << DROPPED); }
INLINE float rounded_scale(float scale) { return number_of((word_of(scale) + (1u << (DROPPED - 1))) >> DROPPED << DROPPED); }

// Pieces of WIDTH bits, `shift` bits into each code, as `kv/compressors/bits.py` packs them; returns what lies behind.
template <int WIDTH>
INLINE const uint8_t* take_pieces(const uint8_t* packed, int dim, int& shift, uint8_t* codes) {
  constexpr int SHARE = 8 / WIDTH;
  for (int byte = 0; byte < dim / SHARE; byte++)
    for (int place = 0; place < SHARE; place++)
      codes[byte * SHARE + place] |= (uint8_t)((packed[byte] >> place * WIDTH & ((1 << WIDTH) - 1)) << shift);
  shift += WIDTH;
  return packed + dim / SHARE;
}
template <int WIDTH>
INLINE uint8_t* put_pieces(const uint8_t* codes, int dim, int& shift, uint8_t* packed) {
  constexpr int SHARE = 8 / WIDTH;
  for (int byte = 0; byte < dim / SHARE; byte++) {
    uint8_t pieces = 0;
    for (int place = 0; place < SHARE; place++)
      pieces |= (uint8_t)((codes[byte * SHARE + place] >> shift & ((1 << WIDTH) - 1)) << place * WIDTH);
    packed[byte] = pieces;
  }
  shift += WIDTH;
  return packed + dim / SHARE;
}

// The levels of one vector, before they are scaled. pairs: by byte, the levels of two codes of four bits.
static void take_levels(const Coding& coding, const uint8_t* packed, int dim, const float* pairs, float* out) {
  if (coding.bits == 4) {
    for (int byte = 0; byte < dim / 2; byte++) memcpy(out + 2 * byte, pairs + 2 * packed[byte], 2 * sizeof(float));
    return;
  }
  if (coding.bits == 8 && !coding.levels) {
    for (int d = 0; d < dim; d += LANES) store(out + d, as_floats(codes_as_ints(packed + d)));
    return;
  }
  uint8_t codes[MOST_CHANNELS];
  memset(codes, 0, (size_t)dim);
  int shift = 0;
  if (coding.bits & 8) packed = take_pieces<8>(packed, dim, shift, codes);
  if (coding.bits & 4) packed = take_pieces<4>(packed, dim, shift, codes);
  if (coding.bits & 2) packed = take_pieces<2>(packed, dim, shift, codes);
  if (coding.bits & 1) packed = take_pieces<1>(packed, dim, shift, codes);
  for (int d = 0; d < dim; d++) out[d] = coding.levels ? coding.levels[codes[d]] : (float)codes[d];
}

// Sums and differences of columns in registers, `span` apart.
INLINE void butterflies(F* x, int span) {
#pragma GCC unroll 8
  for (int base = 0; base < LANES; base += 2 * span)
#pragma GCC unroll 8
    for (int i = base; i < base + span; i++) {
      F first = x[i], second = x[i + span];
      x[i] = add(first, second), x[i + span] = sub(first, second);
    }
}
// The first of them, of 16 columns.
INLINE void turn_sixteen(F* x) {
  butterflies(x, 1);
  butterflies(x, 2);
  butterflies(x, 4);
  butterflies(x, 8);
}
// The others.
static void turn_blocks(float* columns, int dim) {
  for (int span = LANES; span < dim; span *= 2)
    for (int base = 0; base < dim; base += 2 * span)
      for (int d = base; d < base + span; d++) {
        F first = load(columns + d * LANES), second = load(columns + (d + span) * LANES);
        store(columns + d * LANES, add(first, second));
        store(columns + (d + span) * LANES, sub(first, second));
      }
}

// 16 entries of a head at a time, and what they share.
class Columns {
 public:
  Columns(const CodedEntries& call, float* memory)
      : call_(call), coding_(call.coding), dim_(call.head_dim),
        groups_(coding_.group ? (dim_ + coding_.group - 1) / coding_.group : 0),
        before_(2 * groups_ * (1 + coding_.has_centres)) {
    rows_ = memory;
    columns_ = rows_ + LANES * dim_;
    turns_ = columns_ + LANES * dim_;
    mean_ = turns_ + LANES * BLOCKS * call.turned;
  }

  // How many floats that takes, the own ones of `Compressor` included.
  static int64_t room(const CodedEntries& call) {
    return LANES * (3 * (int64_t)call.head_dim + BLOCKS * call.turned) + call.head_dim;
  }

  // body(layer, head, turns) for each 16 entries of [first, end), at most BLOCKS · LANES, of every layer and head.
  template <class Body>
  void each(int64_t first, int64_t end, const Body& body) {
    float* turns = turns_;
    for (begin(first, end); count_; begin(first_ + LANES, end), turns += LANES * call_.turned) turn_turns(turns);
    for (int layer = 0; layer < call_.layers; layer++)
      for (int head = 0; head < call_.heads; head++) {
        for (int d = 0; d < dim_; d += LANES)
          store(mean_ + d, call_.means ? get(call_.kv_type, call_.means[layer], (int64_t)head * dim_ + d) : all(0.0f));
        turns = turns_;
        for (begin(first, end); count_; begin(first_ + LANES, end), turns += LANES * call_.turned)
          body(layer, head, turns);
      }
  }

 protected:
  void begin(int64_t first, int64_t end) {
    first_ = first, count_ = (int)std::min<int64_t>(LANES, std::max<int64_t>(0, end - first));
  }

  // Lanes that are too many have the last entry.
  int64_t entry(int lane) const { return first_ + std::min(lane, count_ - 1); }

  void turn_turns(float* turns) {
    for (int i = 0; i < call_.turned; i += LANES) {
      F x[LANES];
      for (int lane = 0; lane < LANES; lane++)
        x[lane] = load_some(call_.turns + entry(lane) * call_.turned + i, call_.turned - i);
      transpose(x);
      for (int j = 0; j < LANES && i + j < call_.turned; j++) store(turns + (i + j) * LANES, x[j]);
    }
  }

  uint8_t* codes(int layer, int head, int lane) const {
    return call_.codes[layer] + call_.code_slots[entry(lane)] * call_.slot_bytes + head * call_.head_bytes;
  }

  // The first number of an entry in its layer's region.
  int64_t place(int head, int lane) const {
    return ((int64_t)head * call_.region_slots + call_.entry_slots[entry(lane)]) * call_.row;
  }

  const CodedEntries& call_;
  const Coding& coding_;
  int dim_, groups_, before_;  // before_: bytes of the scales and centres
  int count_ = 0;
  int64_t first_ = 0;
  float *rows_, *columns_, *turns_, *mean_;
};

class Decompressor : Columns {
 public:
  Decompressor(const CodedEntries& call, float* memory, const float* pairs) : Columns(call, memory), pairs_(pairs) {}

  void run(int64_t first, int64_t end) {
    each(first, end, [&](int layer, int head, const float* turns) {
      take(layer, head);
      finish(turns);
      put_all(layer, head);
    });
  }

 private:
  void take(int layer, int head) {
    const uint8_t* coded[LANES];
    for (int lane = 0; lane < LANES; lane++) coded[lane] = codes(layer, head, lane);
    for (int lane = 0; lane < LANES; lane++) {
      float* row = rows_ + lane * dim_;
      if (coding_.kind == CODED_FLOAT32) memcpy(row, coded[lane], (size_t)dim_ * sizeof(float));
      else if (coding_.kind == CODED_BFLOAT16)
        for (int d = 0; d < dim_; d += LANES) store(row + d, load_bf16((const uint16_t*)coded[lane] + d));
      else take_levels(coding_, coded[lane] + before_, dim_, pairs_, row);
    }
    F scale = all(1.0f), centre = all(0.0f);
    for (int d = 0; d < dim_; d += LANES) {
      if (groups_ && d % coding_.group == 0) take_scales(coded, d / coding_.group, scale, centre);
      F x[LANES];
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; lane++) x[lane] = load(rows_ + lane * dim_ + d);
      transpose(x);
      if (groups_) {
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) x[j] = mul(coding_.has_centres ? add(x[j], centre) : x[j], scale);
      }
      if (coding_.is_rotated) turn_sixteen(x);
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++) store(columns_ + (d + j) * LANES, x[j]);
    }
    if (coding_.is_rotated) turn_blocks(columns_, dim_);
  }

  // Of a group of channels, for each lane. Low bytes of all groups are stored before the high ones.
  void take_scales(const uint8_t* const* coded, int group, F& scale, F& centre) const {
    float scales[LANES], centres[LANES];
    for (int lane = 0; lane < LANES; lane++) {
      const uint8_t* stored = coded[lane] + group;
      scales[lane] = scale_of(stored[0] | (uint32_t)stored[groups_] << 8);
      if (!coding_.has_centres) continue;
      int16_t steps = (int16_t)(stored[2 * groups_] | stored[3 * groups_] << 8);
      centres[lane] = (float)steps / FRACTIONS - coding_.middle;
    }
    scale = load(scales);
    if (coding_.has_centres) centre = load(centres);
  }

  // Adds the means and rotates.
  void finish(const float* turns) {
    F largest_seen = all(0.0f);  // what is not a number does not count
    int half = call_.turned / 2;
    for (int i = 0; i < half; i++) {
      float *left = columns_ + i * LANES, *right = left + half * LANES;
      F first = with_mean(left, i), second = with_mean(right, i + half);
      F c = load(turns + i * LANES), s = load(turns + (i + half) * LANES);
      F x = sub(mul(first, c), mul(second, s)), y = add(mul(second, c), mul(first, s));
      store(left, x), store(right, y);
      largest_seen = larger(absolute(x), larger(absolute(y), largest_seen));
    }
    for (int d = 2 * half; d < dim_; d++) {
      F x = with_mean(columns_ + d * LANES, d);
      store(columns_ + d * LANES, x);
      largest_seen = larger(absolute(x), largest_seen);
    }
    is_large_ = call_.kv_type == KV_FLOAT16 && largest(largest_seen) > LARGEST_F16;
  }

  F with_mean(const float* column, int d) const {
    return call_.means ? add(load(column), all(mean_[d])) : load(column);
  }

  void put_all(int layer, int head) {
    for (int d = 0; d < dim_; d += LANES) {
      F x[LANES];
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++) x[j] = load(columns_ + (d + j) * LANES);
      transpose(x);
      for (int lane = 0; lane < count_; lane++) {
        int64_t at = place(head, lane) + d;
        if (call_.kv_type == KV_FLOAT16 && !is_large_) store_f16((uint16_t*)call_.regions[layer] + at, x[lane]);
        else put_lanes(call_.kv_type, call_.regions[layer], at, x[lane]);
      }
    }
  }

  const float* pairs_;
  bool is_large_ = false;  // has the block a number that may be too large for 16 bits?
};

class Compressor : Columns {
 public:
  Compressor(const CodedEntries& call, float* memory)
      : Columns(call, memory), sums_(mean_ + dim_), found_((size_t)(FITS * dim_ * LANES)) {}

  // False if an entry is not finite.
  bool run(int64_t first, int64_t end) {
    bool is_finite = true;
    each(first, end, [&](int layer, int head, const float* turns) {
      is_finite = take(layer, head) && is_finite;
      rotate(turns);
      if (call_.means)
        for (int d = 0; d < dim_; d++) store(column(d), sub(load(column(d)), all(mean_[d])));
      if (!groups_) return put_numbers(layer, head);
      normalise();
      if (coding_.has_centres) put_integers(layer, head);
      else put_turned(layer, head);
    });
    return is_finite;
  }

 private:
  float* column(int d) const { return columns_ + d * LANES; }
  uint8_t* found(int fit, int d) { return found_.data() + ((size_t)fit * (size_t)dim_ + (size_t)d) * LANES; }

  bool take(int layer, int head) {
    F wrong = all(0.0f);
    for (int d = 0; d < dim_; d += LANES) {
      F x[LANES];
      for (int lane = 0; lane < LANES; lane++)
        x[lane] = get(call_.kv_type, call_.regions[layer], place(head, lane) + d);
      transpose(x);
      for (int j = 0; j < LANES; j++) {
        wrong = fma(x[j], all(0.0f), wrong);
        store(column(d + j), x[j]);
      }
    }
    return sum(wrong) == 0;
  }

  void rotate(const float* turns) {
    int half = call_.turned / 2;
    for (int i = 0; i < half; i++) {
      F first = load(column(i)), second = load(column(i + half));
      F c = load(turns + i * LANES), s = load(turns + (i + half) * LANES);
      store(column(i), sub(mul(first, c), mul(second, s)));
      store(column(i + half), add(mul(second, c), mul(first, s)));
    }
  }

  // Divides each vector by a power of two. One that is not finite becomes 0, and its power is not a number.
  void normalise() {
    F most = all(0.0f), wrong = all(0.0f);
    for (int d = 0; d < dim_; d++) {
      most = larger(absolute(load(column(d))), most);
      wrong = fma(load(column(d)), all(0.0f), wrong);
    }
    float lanes[LANES], wrongs[LANES];
    store(lanes, most), store(wrongs, wrong);
    for (int lane = 0; lane < LANES; lane++)
      powers_[lane] = number_of(std::max(word_of(lanes[lane]) & 0x7f800000, 0x00800000u));
    F powers = load(powers_);
    for (int d = 0; d < dim_; d++) store(column(d), divide(load(column(d)), powers));
    for (int lane = 0; lane < LANES; lane++) {
      if (wrongs[lane] == 0) continue;
      for (int d = 0; d < dim_; d++) column(d)[lane] = 0.0f;
      powers_[lane] = NAN;
    }
  }

  void put_numbers(int layer, int head) {
    for (int d = 0; d < dim_; d += LANES) {
      F x[LANES];
      for (int j = 0; j < LANES; j++) x[j] = load(column(d + j));
      transpose(x);
      for (int lane = 0; lane < count_; lane++) {
        uint8_t* out = codes(layer, head, lane);
        if (coding_.kind == CODED_FLOAT32) store((float*)out + d, x[lane]);
        else store_bf16((uint16_t*)out + d, x[lane]);
      }
    }
  }

  // -- equal steps between the extremes of a group --

  void put_integers(int layer, int head) {
    float top = (float)((1 << coding_.bits) - 1);
    for (int group = 0; group < groups_; group++) {
      int first = group * coding_.group, end = std::min(dim_, first + coding_.group);
      F low = load(column(first)), high = low;
      for (int d = first + 1; d < end; d++) low = smaller(low, load(column(d))), high = larger(high, load(column(d)));
      F widest = mul(larger(high, sub(all(0.0f), low)), all((float)(1 / CENTRE_RANGE)));
      F wanted = larger(larger(mul(sub(high, low), all((float)(1.0 / top))), widest), all(SMALLEST_SCALE));
      float scales[LANES], centres[LANES];
      store(scales, wanted);
      for (float& scale : scales) scale = rounded_scale(scale);
      F scale = load(scales);
      F centre = nearest(divide(mul(add(low, high), all((float)FRACTIONS / 2)), scale));
      store(centres, centre);
      F offset = sub(all(top / 2), divide(centre, all((float)FRACTIONS)));
      for (int d = first; d < end; d++) {
        float levels[LANES];
        F level = nearest(add(divide(load(column(d)), scale), offset));
        store(levels, smaller(larger(level, all(0.0f)), all(top)));
        for (int lane = 0; lane < LANES; lane++) found(0, d)[lane] = (uint8_t)(int32_t)levels[lane];
      }
      for (int lane = 0; lane < count_; lane++) {
        uint8_t* out = codes(layer, head, lane) + group;
        put_word(out, stored_scale(scales[lane] * powers_[lane]));
        put_word(out + 2 * groups_, (uint32_t)(int32_t)centres[lane]);
      }
    }
    int best[LANES] = {};
    put_codes(layer, head, best);
  }

  void put_word(uint8_t* out, uint32_t word) const { out[0] = (uint8_t)word, out[groups_] = (uint8_t)(word >> 8); }

  void put_codes(int layer, int head, const int* best) {
    uint8_t own[MOST_CHANNELS];
    for (int lane = 0; lane < count_; lane++) {
      for (int d = 0; d < dim_; d++) own[d] = found(best[lane], d)[lane];
      uint8_t* out = codes(layer, head, lane) + before_;
      int shift = 0;
      if (coding_.bits & 8) out = put_pieces<8>(own, dim_, shift, out);
      if (coding_.bits & 4) out = put_pieces<4>(own, dim_, shift, out);
      if (coding_.bits & 2) out = put_pieces<2>(own, dim_, shift, out);
      if (coding_.bits & 1) out = put_pieces<1>(own, dim_, shift, out);
    }
  }

  // -- after a Hadamard rotation, the best of some scales --

  void put_turned(int layer, int head) {
    for (int d = 0; d < dim_; d += LANES) {
      F x[LANES];
      for (int j = 0; j < LANES; j++) x[j] = load(column(d + j));
      turn_sixteen(x);
      for (int j = 0; j < LANES; j++) store(column(d + j), x[j]);
    }
    turn_blocks(columns_, dim_);
    F starts[FITS];
    scales_to_try(starts);
    float scales[LANES], least[LANES];
    int best[LANES] = {};
    for (int fit = 0; fit < FITS; fit++) {
      float own[LANES], misses[LANES];
      store(misses, fit_at(fit, starts[fit], own));
      for (int lane = 0; lane < LANES; lane++)
        if (!fit || misses[lane] < least[lane]) least[lane] = misses[lane], scales[lane] = own[lane], best[lane] = fit;
    }
    for (int lane = 0; lane < count_; lane++)
      put_word(codes(layer, head, lane), stored_scale(scales[lane] * (powers_[lane] / (float)dim_)));
    put_codes(layer, head, best);
  }

  void scales_to_try(F* starts) {
    F most = all(0.0f);
    for (int d = 0; d < dim_; d++) most = larger(absolute(load(column(d))), most);
    F spread = mul(sum_of([&](int d) { return absolute(load(column(d))); }), all(coding_.spread / (float)dim_));
    F largest = mul(most, all(coding_.outermost));
    const F found[] = {spread, mul(spread, all(0.87f)), mul(spread, all(1.13f)), largest, mul(largest, all(0.9f))};
    for (int fit = 0; fit < FITS; fit++) starts[fit] = larger(found[fit], all(SMALLEST_SCALE));
  }

  // Codes at a scale, and the scale that fits them best; returns the squared error.
  F fit_at(int fit, F start, float* scales) {
    store(scales, start);
    for (int lane = 0; lane < LANES; lane++) scales[lane] = rounded_scale(scales[lane]);
    F scale = load(scales);
    constexpr float LAST = 2 * FARTHEST * CELLS - 1;
    for (int d = 0; d < dim_; d++) {
      F x = divide(load(column(d)), scale);
      uint8_t* out = found(fit, d);
      float* points = rows_ + d * LANES;
      float lanes[LANES];
      F cell = add(mul(x, all((float)CELLS)), all((float)(FARTHEST * CELLS)));
      store(lanes, smaller(larger(cell, all(0.0f)), all(LAST)));
      for (int lane = 0; lane < LANES; lane++) out[lane] = coding_.nearest[(int32_t)lanes[lane]];
      for (int lane = 0; lane < LANES; lane++) points[lane] = coding_.levels[out[lane]];
    }
    auto point = [&](int d) { return load(rows_ + d * LANES); };
    F along = sum_of([&](int d) { return mul(load(column(d)), point(d)); });
    F squares = sum_of([&](int d) { return mul(point(d), point(d)); });
    store(scales, divide(along, squares));
    for (int lane = 0; lane < LANES; lane++) scales[lane] = rounded_scale(scales[lane]);
    scale = load(scales);
    return sum_of([&](int d) {
      F miss = sub(mul(point(d), scale), load(column(d)));
      return mul(miss, miss);
    });
  }

  // The sum over the channels, by halves; their number is a power of two.
  template <class Number>
  F sum_of(const Number& number) {
    int half = dim_ / 2;
    for (int d = 0; d < half; d++) store(sums_ + d * LANES, add(number(d), number(d + half)));
    for (half /= 2; half; half /= 2)
      for (int d = 0; d < half; d++)
        store(sums_ + d * LANES, add(load(sums_ + d * LANES), load(sums_ + (d + half) * LANES)));
    return load(sums_);
  }

  float powers_[LANES];
  float* sums_;
  std::vector<uint8_t> found_;  // by scale that is tried: the codes, [dim][LANES]
};

// body(memory, first, end) for at most BLOCKS · LANES entries at a time, on all threads.
template <class Body>
static void pieces(Threads& threads, const CodedEntries& call, const Body& body) {
  threads.split(call.count, LANES, [&](int64_t first, int64_t end) {
    static thread_local std::vector<float> memory;
    size_t needed = (size_t)Columns::room(call) + LANES;
    if (memory.size() < needed) memory.resize(needed);
    float* aligned = (float*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    for (constexpr int SOME = BLOCKS * LANES; first < end; first += SOME)
      body(aligned, first, std::min(first + SOME, end));
  });
}

}  // namespace coded

// Codes become entries in regions.
static void decompress(Threads& threads, const CodedEntries& call) {
  float pairs[2 * 256];
  for (int byte = 0; call.coding.bits == 4 && byte < 256; byte++)
    for (int half = 0; half < 2; half++) {
      int code = byte >> 4 * half & 15;
      pairs[2 * byte + half] = call.coding.levels ? call.coding.levels[code] : (float)code;
    }
  coded::pieces(threads, call, [&](float* memory, int64_t first, int64_t end) {
    coded::Decompressor(call, memory, pairs).run(first, end);
  });
}

// Entries in regions become codes. False if an entry is not finite: then the codes mean nothing.
static bool compress(Threads& threads, const CodedEntries& call) {
  std::atomic<bool> is_finite{true};
  coded::pieces(threads, call, [&](float* memory, int64_t first, int64_t end) {
    if (!coded::Compressor(call, memory).run(first, end)) is_finite = false;
  });
  return is_finite;
}

}  // namespace KERNELS
