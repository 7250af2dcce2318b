// Coded vectors become entries: what `inference_engine/kv/compressors` decode, to the bit.
//
//   code ──level──▶ (level + centre) · scale ──Hadamard──▶ + mean ──rotation──▶ rounded, in a region
//
// 16 entries of a head are decoded together. Their channels lie in columns, an entry in each lane, so that whatever is
// done along a vector is done lane by lane in the reference's own order.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"
#include "step.h"
#include "threads.h"
#include "types.h"

namespace KERNELS {
namespace unpacking {

constexpr int FRACTIONS = 16;  // of a step, in which a centre is counted
constexpr int BLOCKS = 4;      // of 16 entries, that share the rotation's numbers and go through the layers together
constexpr int MOST_CHANNELS = 4096;
constexpr float LARGEST_F16 = 65504.0f;

INLINE float scale_of(uint32_t stored, bool is_signed) {
  uint32_t word = stored << (is_signed ? 16 : 15);
  float scale;
  memcpy(&scale, &word, 4);
  return scale;
}

// Pieces of WIDTH bits, `shift` bits into each code, as `kv/compressors/bits.py` packs them; returns what lies behind.
template <int WIDTH>
INLINE const uint8_t* take_pieces(const uint8_t* codes, int dim, int& shift, uint8_t* found) {
  constexpr int SHARE = 8 / WIDTH;
  for (int byte = 0; byte < dim / SHARE; byte++)
    for (int place = 0; place < SHARE; place++)
      found[byte * SHARE + place] |= (uint8_t)((codes[byte] >> place * WIDTH & ((1 << WIDTH) - 1)) << shift);
  shift += WIDTH;
  return codes + dim / SHARE;
}

// The levels of one vector, before they are scaled. pairs: by byte, the levels of two codes of four bits.
static void take_levels(const Coding& coding, const uint8_t* codes, int dim, const float* pairs, float* out) {
  if (coding.bits == 4) {
    for (int byte = 0; byte < dim / 2; byte++) memcpy(out + 2 * byte, pairs + 2 * codes[byte], 2 * sizeof(float));
    return;
  }
  if (coding.bits == 8 && !coding.levels) {
    for (int d = 0; d < dim; d += LANES) store(out + d, as_floats(codes_as_ints(codes + d)));
    return;
  }
  uint8_t found[MOST_CHANNELS];
  memset(found, 0, (size_t)dim);
  int shift = 0;
  if (coding.bits & 8) codes = take_pieces<8>(codes, dim, shift, found);
  if (coding.bits & 4) codes = take_pieces<4>(codes, dim, shift, found);
  if (coding.bits & 2) codes = take_pieces<2>(codes, dim, shift, found);
  if (coding.bits & 1) codes = take_pieces<1>(codes, dim, shift, found);
  for (int d = 0; d < dim; d++) out[d] = coding.levels ? coding.levels[found[d]] : (float)found[d];
}

// Sums and differences of vectors `span` apart.
INLINE void butterflies(F* x, int count, int span) {
#pragma GCC unroll 8
  for (int base = 0; base < count; base += 2 * span)
#pragma GCC unroll 8
    for (int i = base; i < base + span; i++) {
      F first = x[i], second = x[i + span];
      x[i] = add(first, second), x[i + span] = sub(first, second);
    }
}

class Unpacker {
 public:
  Unpacker(const Unpacking& call, const float* pairs) : call_(call), pairs_(pairs), dim_(call.head_dim) {
    static thread_local std::vector<float> memory;
    size_t needed = (size_t)(LANES * (2 * dim_ + BLOCKS * call.turned)) + (size_t)dim_ + LANES;
    if (memory.size() < needed) memory.resize(needed);
    rows_ = (float*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    columns_ = rows_ + LANES * dim_;
    turns_ = columns_ + LANES * dim_;
    mean_ = turns_ + LANES * BLOCKS * call.turned;
  }

  // Entries first … end - 1, at most BLOCKS · LANES of them, of every layer and head.
  void unpack(int64_t first, int64_t end) {
    float* turns = turns_;
    for (begin(first, end); count_; begin(first_ + LANES, end), turns += LANES * call_.turned) turn_turns(turns);
    for (int layer = 0; layer < call_.layers; layer++)
      for (int head = 0; head < call_.heads; head++) {
        take_mean(layer, head);
        turns = turns_;
        for (begin(first, end); count_; begin(first_ + LANES, end), turns += LANES * call_.turned) {
          take(layer, head);
          finish(turns);
          put_all(layer, head);
        }
      }
  }

 private:
  void begin(int64_t first, int64_t end) {
    first_ = first, count_ = (int)std::min<int64_t>(LANES, std::max<int64_t>(0, end - first));
  }

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

  const uint8_t* codes(int layer, int head, int lane) const {
    return call_.codes[layer] + call_.from[entry(lane)] * call_.slot_bytes + head * call_.head_bytes;
  }

  void take(int layer, int head) {
    const Coding& coding = call_.coding;
    const uint8_t* coded[LANES];
    for (int lane = 0; lane < LANES; lane++) coded[lane] = codes(layer, head, lane);
    int groups = coding.group ? (dim_ + coding.group - 1) / coding.group : 0;
    int64_t before = 2 * groups * (1 + coding.has_centres);
    for (int lane = 0; lane < LANES; lane++) {
      float* row = rows_ + lane * dim_;
      if (coding.kind == CODED_FLOAT32) memcpy(row, coded[lane], (size_t)dim_ * sizeof(float));
      else if (coding.kind == CODED_BFLOAT16)
        for (int d = 0; d < dim_; d += LANES) store(row + d, load_bf16((const uint16_t*)coded[lane] + d));
      else take_levels(coding, coded[lane] + before, dim_, pairs_, row);
    }
    F scale = all(1.0f), centre = all(0.0f);
    for (int d = 0; d < dim_; d += LANES) {
      if (groups && d % coding.group == 0) take_scales(coded, d / coding.group, groups, scale, centre);
      F x[LANES];
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; lane++) x[lane] = load(rows_ + lane * dim_ + d);
      transpose(x);
      if (groups) {
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) x[j] = mul(coding.has_centres ? add(x[j], centre) : x[j], scale);
      }
      if (coding.is_rotated) {
        butterflies(x, LANES, 1);
        butterflies(x, LANES, 2);
        butterflies(x, LANES, 4);
        butterflies(x, LANES, 8);
      }
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++) store(columns_ + (d + j) * LANES, x[j]);
    }
    for (int span = LANES; coding.is_rotated && span < dim_; span *= 2)
      for (int base = 0; base < dim_; base += 2 * span)
        for (int d = base; d < base + span; d++) {
          F first = load(columns_ + d * LANES), second = load(columns_ + (d + span) * LANES);
          store(columns_ + d * LANES, add(first, second));
          store(columns_ + (d + span) * LANES, sub(first, second));
        }
  }

  // Of a group of channels, for each lane. Low bytes of all groups are stored before the high ones.
  void take_scales(const uint8_t* const* coded, int group, int groups, F& scale, F& centre) const {
    float scales[LANES], centres[LANES];
    for (int lane = 0; lane < LANES; lane++) {
      const uint8_t* stored = coded[lane] + group;
      scales[lane] = scale_of(stored[0] | (uint32_t)stored[groups] << 8, call_.coding.is_signed);
      if (!call_.coding.has_centres) continue;
      int16_t steps = (int16_t)(stored[2 * groups] | stored[3 * groups] << 8);
      centres[lane] = (float)steps / FRACTIONS - call_.coding.middle;
    }
    scale = load(scales);
    if (call_.coding.has_centres) centre = load(centres);
  }

  void take_mean(int layer, int head) {
    for (int d = 0; d < dim_; d += LANES)
      store(mean_ + d, call_.means ? get(call_.kv_type, call_.means[layer], (int64_t)head * dim_ + d) : all(0.0f));
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

  F with_mean(const float* column, int d) const { return call_.means ? add(load(column), all(mean_[d])) : load(column); }

  void put_all(int layer, int head) {
    for (int d = 0; d < dim_; d += LANES) {
      F x[LANES];
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++) x[j] = load(columns_ + (d + j) * LANES);
      transpose(x);
      for (int lane = 0; lane < count_; lane++) {
        int64_t slot = (int64_t)head * call_.region_slots + call_.to[first_ + lane], at = slot * dim_ + d;
        if (call_.kv_type == KV_FLOAT16 && !is_large_) store_f16((uint16_t*)call_.out[layer] + at, x[lane]);
        else put_lanes(call_.kv_type, call_.out[layer], at, x[lane]);
      }
    }
  }

  const Unpacking& call_;
  const float* pairs_;
  int dim_, count_ = 0;
  int64_t first_ = 0;
  bool is_large_ = false;  // has the block a number that may be too large for 16 bits?
  float *rows_, *columns_, *turns_, *mean_;
};

}  // namespace unpacking

static void unpack(Threads& threads, const Unpacking& call) {
  float pairs[2 * 256];
  for (int byte = 0; call.coding.bits == 4 && byte < 256; byte++)
    for (int half = 0; half < 2; half++) {
      int code = byte >> 4 * half & 15;
      pairs[2 * byte + half] = call.coding.levels ? call.coding.levels[code] : (float)code;
    }
  threads.split(call.count, LANES, [&](int64_t first, int64_t end) {
    unpacking::Unpacker unpacker(call, pairs);
    for (constexpr int SOME = unpacking::BLOCKS * LANES; first < end; first += SOME)
      unpacker.unpack(first, std::min(first + SOME, end));
  });
}

}  // namespace KERNELS
