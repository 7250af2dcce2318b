// Packs the rows of a matrix into tiles: see `Format` in types.h.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"
#include "types.h"

namespace {

constexpr int TILE = 16, BLOCK = 32;

// 32 numbers of one output: scale · code + offset. The second scale is that of inputs 16–31, where a format has two.
// In compact formats codes are the bits that are stored, and scales of two factors have the second one in `whole`.
struct Block {
  int32_t codes[BLOCK];
  float scales[2], offset;
  int32_t whole[2], whole_offset;
};

uint16_t half_at(const uint8_t* p) {
  uint16_t half;
  memcpy(&half, p, 2);
  return half;
}

float f16_at(const uint8_t* p) { return from_f16(half_at(p)); }

bool has_bytes(int32_t format) { return format == INT8 || format == INT8_PAIR; }
bool is_wide(int32_t format) { return format == INT8_PAIR || format == INT4_WIDE; }

int64_t float_bytes(int32_t format) { return format == FLOAT32 ? 4 : 2; }

// -- sources ----------------------------------------------------------------------------------------------------------

// Inputs in one block of a source, and its bytes.
struct Layout { int64_t inputs, bytes; };

Layout layout(int32_t source) {
  switch (source) {
    case FROM_FLOAT32: return {1, 4};
    case FROM_FLOAT16:
    case FROM_BFLOAT16: return {1, 2};
    case FROM_Q4_0:
    case FROM_IQ4_NL: return {32, 18};
    case FROM_Q4_1: return {32, 20};
    case FROM_Q5_0: return {32, 22};
    case FROM_Q5_1: return {32, 24};
    case FROM_Q8_0: return {32, 34};
    case FROM_MXFP4: return {32, 17};
    case FROM_Q2_K: return {256, 84};
    case FROM_Q3_K: return {256, 110};
    case FROM_Q4_K: return {256, 144};
    case FROM_Q5_K: return {256, 176};
    case FROM_IQ4_XS: return {256, 136};
    case FROM_PAIRS: return {32, 40};
    default: return {256, 210};
  }
}

bool of_floats(int32_t source) { return source <= FROM_BFLOAT16; }

float float_at(int32_t source, const uint8_t* row, int64_t input) {
  float value;
  if (source == FROM_FLOAT32) {
    memcpy(&value, row + 4 * input, 4);
    return value;
  }
  uint16_t half = half_at(row + 2 * input);
  return source == FROM_FLOAT16 ? from_f16(half) : from_bf16(half);
}

// Four bits each: the first half of the codes in the low halves of the bytes.
void read_nibbles(const uint8_t* bytes, int32_t* codes) {
  for (int i = 0; i < 16; i++) {
    codes[i] = bytes[i] & 15;
    codes[16 + i] = bytes[i] >> 4;
  }
}

Block read_q4_0(const uint8_t* p) {
  Block block;
  float scale = f16_at(p);
  read_nibbles(p + 2, block.codes);
  block.scales[0] = block.scales[1] = scale;
  block.offset = -8 * scale;
  return block;
}

Block read_q4_1(const uint8_t* p) {
  Block block;
  read_nibbles(p + 4, block.codes);
  block.scales[0] = block.scales[1] = f16_at(p);
  block.offset = f16_at(p + 2);
  return block;
}

// Five bits each: four bytes of the highest ones, then half bytes.
void read_fives(const uint8_t* bytes, int32_t* codes) {
  uint32_t fifth;
  memcpy(&fifth, bytes, 4);
  read_nibbles(bytes + 4, codes);
  for (int i = 0; i < BLOCK; i++) codes[i] |= (int32_t)(fifth >> i & 1) << 4;
}

Block read_q5_0(const uint8_t* p) {
  Block block = {};
  read_fives(p + 2, block.codes);
  block.scales[0] = f16_at(p);
  return block;
}

Block read_q5_1(const uint8_t* p) {
  Block block = {};
  read_fives(p + 4, block.codes);
  block.scales[0] = f16_at(p);
  block.offset = f16_at(p + 2);
  return block;
}

Block read_q8_0(const uint8_t* p) {
  Block block;
  for (int i = 0; i < BLOCK; i++) block.codes[i] = (int8_t)p[2 + i];
  block.scales[0] = block.scales[1] = f16_at(p);
  block.offset = 0;
  return block;
}

// The scale and the minimum of part `part`, of 8, of 6 bits each in 12 bytes.
void read_sixes(const uint8_t* packed, int part, int32_t* scale, int32_t* minimum) {
  if (part < 4) {
    *scale = packed[part] & 63;
    *minimum = packed[part + 4] & 63;
  } else {
    *scale = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4;
    *minimum = (packed[part + 4] >> 4) | (packed[part] >> 6) << 4;
  }
}

// Part `part`, of 8, of 256 numbers: d, dmin, 12 bytes of scales and minima of 6 bits, 128 bytes of codes.
Block read_q4_k(const uint8_t* p, int part) {
  Block block;
  const uint8_t* codes = p + 16 + part / 2 * 32;
  int32_t scale, minimum;
  read_sixes(p + 4, part, &scale, &minimum);
  for (int i = 0; i < BLOCK; i++) block.codes[i] = part % 2 ? codes[i] >> 4 : codes[i] & 15;
  block.scales[0] = block.scales[1] = f16_at(p) * (float)scale;
  block.offset = -(f16_at(p + 2) * (float)minimum);
  return block;
}

// Part `part`, of 8, of 256 numbers: 128 bytes of low halves, 64 of two high bits, 16 scales, d.
Block read_q6_k(const uint8_t* p, int part) {
  Block block = {};
  int half = part / 4, quarter = part % 4;
  const uint8_t *low = p + 64 * half + 32 * (quarter % 2), *high = p + 128 + 32 * half;
  for (int i = 0; i < BLOCK; i++) {
    int four = quarter < 2 ? low[i] & 15 : low[i] >> 4;
    block.codes[i] = four | (high[i] >> 2 * quarter & 3) << 4;
  }
  block.scales[0] = f16_at(p + 208);
  for (int i = 0; i < 2; i++) block.whole[i] = p[192 + 2 * part + i];
  return block;
}

// As Q4_K, with 32 bytes of the highest bits before the codes.
Block read_q5_k(const uint8_t* p, int part) {
  Block block = {};
  const uint8_t *high = p + 16, *low = p + 48 + part / 2 * 32;
  for (int i = 0; i < BLOCK; i++) block.codes[i] = (low[i] >> part % 2 * 4 & 15) | (high[i] >> part & 1) << 4;
  block.scales[0] = f16_at(p), block.offset = f16_at(p + 2);
  read_sixes(p + 4, part, &block.whole[0], &block.whole_offset);
  return block;
}

// 16 bytes of a scale and a minimum, 64 of codes, d, dmin.
Block read_q2_k(const uint8_t* p, int part) {
  Block block = {};
  const uint8_t* codes = p + 16 + part / 4 * 32;
  for (int i = 0; i < BLOCK; i++) block.codes[i] = codes[i] >> part % 4 * 2 & 3;
  block.scales[0] = f16_at(p + 80), block.offset = f16_at(p + 82);
  for (int i = 0; i < 2; i++) block.whole[i] = p[2 * part + i];
  return block;
}

// 32 bytes of the highest bits, 64 of the others, 12 of scales of 6 bits, d.
Block read_q3_k(const uint8_t* p, int part) {
  Block block = {};
  const uint8_t *low = p + 32 + part / 4 * 32, *packed = p + 96;
  for (int i = 0; i < BLOCK; i++) block.codes[i] = (low[i] >> part % 4 * 2 & 3) | (p[i] >> part & 1) << 2;
  block.scales[0] = f16_at(p + 108);
  for (int i = 0; i < 2; i++) {
    int scale = 2 * part + i;
    int four = scale < 8 ? packed[scale] & 15 : packed[scale - 8] >> 4;
    block.whole[i] = (four | (packed[8 + scale % 4] >> scale / 4 * 2 & 3) << 4) - 32;
  }
  return block;
}

Block read_iq4_nl(const uint8_t* p) {
  Block block = {};
  read_nibbles(p + 2, block.codes);
  block.scales[0] = f16_at(p);
  return block;
}

// d, the high 2 bits of 8 scales in two bytes, the low 4 in four, 128 bytes of codes.
Block read_iq4_xs(const uint8_t* p, int part) {
  Block block = {};
  int high = half_at(p + 2) >> 2 * part & 3, low = p[4 + part / 2] >> part % 2 * 4 & 15;
  read_nibbles(p + 8 + 16 * part, block.codes);
  block.scales[0] = f16_at(p);
  block.whole[0] = (low | high << 4) - 32;
  return block;
}

Block read_mxfp4(const uint8_t* p) {
  Block block = {};
  read_nibbles(p + 1, block.codes);
  block.whole[0] = p[0];
  return block;
}

Block read_pairs(const uint8_t* p) {
  Block block = {};
  memcpy(block.scales, p, 8);
  for (int i = 0; i < BLOCK; i++) block.codes[i] = (int8_t)p[8 + i];
  return block;
}

Block read_block(int32_t source, const uint8_t* row, int64_t block) {
  const uint8_t* p = row + block * BLOCK / layout(source).inputs * layout(source).bytes;
  switch (source) {
    case FROM_Q4_0: return read_q4_0(p);
    case FROM_Q4_1: return read_q4_1(p);
    case FROM_Q5_0: return read_q5_0(p);
    case FROM_Q8_0: return read_q8_0(p);
    case FROM_Q4_K: return read_q4_k(p, (int)(block % 8));
    case FROM_Q5_1: return read_q5_1(p);
    case FROM_Q5_K: return read_q5_k(p, (int)(block % 8));
    case FROM_Q2_K: return read_q2_k(p, (int)(block % 8));
    case FROM_Q3_K: return read_q3_k(p, (int)(block % 8));
    case FROM_IQ4_NL: return read_iq4_nl(p);
    case FROM_IQ4_XS: return read_iq4_xs(p, (int)(block % 8));
    case FROM_MXFP4: return read_mxfp4(p);
    case FROM_PAIRS: return read_pairs(p);
    default: return read_q6_k(p, (int)(block % 8));
  }
}

// -- floats to codes --------------------------------------------------------------------------------------------------

float rounded(int32_t format, float value) { return is_wide(format) ? value : from_f16(to_f16(value)); }

int32_t nearest_code(float value, float scale, int32_t lowest, int32_t highest) {
  if (!(scale > 0)) return 0;
  float code = std::nearbyint(value / scale);
  return (int32_t)std::min(std::max(code, (float)lowest), (float)highest);
}

// Codes of -127 … 127, scaled by the largest number of every `count` of them.
void quantise_bytes(int32_t format, const float* x, int count, int32_t* codes, float* scale) {
  float most = 0;
  for (int i = 0; i < count; i++) most = std::max(most, std::fabs(x[i]));
  *scale = rounded(format, most / 127);
  for (int i = 0; i < count; i++) codes[i] = nearest_code(x[i], *scale, -127, 127);
}

Block quantised(int32_t format, const float* x, int count) {
  Block block = {};
  if (format == INT8) {
    quantise_bytes(format, x, count, block.codes, &block.scales[0]);
  } else if (format == INT8_PAIR) {
    quantise_bytes(format, x, std::min(count, 16), block.codes, &block.scales[0]);
    if (count > 16) quantise_bytes(format, x + 16, count - 16, block.codes + 16, &block.scales[1]);
  } else {
    block.offset = rounded(format, *std::min_element(x, x + count));
    float range = *std::max_element(x, x + count) - block.offset;
    block.scales[0] = rounded(format, std::max(range, 0.0f) / 15);
    for (int i = 0; i < count; i++) block.codes[i] = nearest_code(x[i] - block.offset, block.scales[0], 0, 15);
  }
  return block;
}

// -- tiles ------------------------------------------------------------------------------------------------------------

void put_number(int32_t format, uint8_t* numbers, int lane, float value) {
  uint16_t half = is_wide(format) ? 0 : to_f16(value);
  if (is_wide(format)) memcpy(numbers + 4 * lane, &value, 4);
  else memcpy(numbers + 2 * lane, &half, 2);
}

bool fits(int32_t format, float value) {
  return std::isfinite(value) && (is_wide(format) || from_f16(to_f16(value)) == value);
}

// Four bits of each code, and two, as planes; see types.h. Codes may have more bits above these.
void put_halves(const int32_t* codes, uint8_t* at, int lane) {
  for (int i = 0; i < 16; i++) {
    int low = i / 4 * 8 + i % 4;
    at[64 * (i / 4) + 4 * lane + i % 4] = (uint8_t)((codes[low] & 15) | (codes[low + 4] & 15) << 4);
  }
}

void put_quarters(const int32_t* codes, int shift, uint8_t* at, int lane) {
  for (int i = 0; i < 8; i++) {
    int byte = 0;
    for (int quad = 0; quad < 4; quad++) byte |= (codes[i / 4 * 16 + 4 * quad + i % 4] >> shift & 3) << 2 * quad;
    at[64 * (i / 4) + 4 * lane + i % 4] = (uint8_t)byte;
  }
}

// Bit `bit` of each code, as a plane.
void put_bits(const int32_t* codes, int bit, uint8_t* at, int lane) {
  for (int j = 0; j < 4; j++) {
    int byte = 0;
    for (int quad = 0; quad < BLOCK / 4; quad++) byte |= (codes[4 * quad + j] >> bit & 1) << quad;
    at[4 * lane + j] = (uint8_t)byte;
  }
}

// Of MXFP4: 12 times half the power of two of a larger one is not finite.
constexpr int32_t MOST_EXPONENT = 252;

bool put_compact(int32_t format, const Block& block, uint8_t* at, int lane) {
  if (!std::isfinite(block.scales[0]) || !std::isfinite(block.offset)) return false;
  if (format == MXFP4 && block.whole[0] > MOST_EXPONENT) return false;
  int64_t planes = 4;
  if (format == Q2_K || format == Q3_K) put_quarters(block.codes, 0, at, lane), planes = 2;
  else put_halves(block.codes, at, lane);
  if (format == Q6_K) put_quarters(block.codes, 4, at + 64 * planes, lane), planes += 2;
  if (format == Q3_K) put_bits(block.codes, 2, at + 64 * planes++, lane);
  if (format == Q5_0 || format == Q5_1 || format == Q5_K) put_bits(block.codes, 4, at + 64 * planes++, lane);
  uint8_t* numbers = at + 64 * planes;
  if (format != MXFP4) {
    put_number(INT8, numbers, lane, block.scales[0]);
    numbers += 2 * TILE;
  }
  if (format == Q5_1 || format == Q5_K || format == Q2_K) {
    put_number(INT8, numbers, lane, block.offset);
    numbers += 2 * TILE;
  }
  if (format == Q5_0 || format == Q5_1 || format == IQ4_NL) return true;
  numbers[lane] = (uint8_t)block.whole[0];
  if (format == Q5_K) numbers[TILE + lane] = (uint8_t)block.whole_offset;
  if (format == Q6_K || format == Q2_K || format == Q3_K) numbers[TILE + lane] = (uint8_t)block.whole[1];
  return true;
}

bool put_block(int32_t format, const Block& block, uint8_t* at, int lane) {
  if (format > INT4_WIDE) return put_compact(format, block, at, lane);
  bool pair = format == INT8_PAIR;
  if (!fits(format, block.scales[0]) || (pair && !fits(format, block.scales[1]))) return false;
  if (has_offsets(format) && !fits(format, block.offset)) return false;
  int64_t width = is_wide(format) ? 4 : 2;
  uint8_t* numbers = at + (has_bytes(format) ? 512 : 256);
  if (has_bytes(format))
    for (int i = 0; i < BLOCK; i++) at[64 * (i / 4) + 4 * lane + i % 4] = (uint8_t)(block.codes[i] + 128);
  else
    put_halves(block.codes, at, lane);
  put_number(format, numbers, lane, block.scales[0]);
  if (pair) put_number(format, numbers + TILE * width, lane, block.scales[1]);
  if (has_offsets(format)) put_number(format, numbers + TILE * width, lane, block.offset);
  return true;
}

void put_float(int32_t format, uint8_t* at, int lane, float value) {
  uint16_t half = format == FLOAT16 ? to_f16(value) : to_bf16(value);
  if (format == FLOAT32) memcpy(at + 4 * lane, &value, 4);
  else memcpy(at + 2 * lane, &half, 2);
}

bool pack_floats(int32_t format, int32_t source, const uint8_t* row, int64_t inputs, uint8_t* tile, int lane) {
  for (int64_t i = 0; i < inputs; i++) {
    float value = float_at(source, row, i);
    if (format == FLOAT16 && std::isfinite(value) && std::fabs(value) >= 65520.0f) return false;
    put_float(format, tile + i * TILE * float_bytes(format), lane, value);
  }
  return true;
}

bool pack_blocks(int32_t format, int32_t source, const uint8_t* row, int64_t inputs, uint8_t* tile, int lane) {
  for (int64_t first = 0; first < inputs; first += BLOCK, tile += block_bytes(format)) {
    if (!of_floats(source)) {
      if (!put_block(format, read_block(source, row, first / BLOCK), tile, lane)) return false;
      continue;
    }
    float x[BLOCK];
    int count = (int)std::min<int64_t>(BLOCK, inputs - first);
    for (int i = 0; i < count; i++) {
      x[i] = float_at(source, row, first + i);
      if (!std::isfinite(x[i])) return false;
    }
    if (!put_block(format, quantised(format, x, count), tile, lane)) return false;
  }
  return true;
}

// Outputs that only fill the last tile: all their numbers are 0.
void pack_nothing(int32_t format, int64_t inputs, uint8_t* tile, int lane) {
  if (is_float(format)) {
    for (int64_t i = 0; i < inputs; i++) put_float(format, tile + i * TILE * float_bytes(format), lane, 0);
    return;
  }
  for (int64_t first = 0; first < inputs; first += BLOCK, tile += block_bytes(format))
    put_block(format, Block{}, tile, lane);
}

bool exists(int32_t format, int32_t source) {
  switch (source) {
    case FROM_FLOAT32:
    case FROM_FLOAT16:
    case FROM_BFLOAT16: return format >= 0 && format <= INT4_WIDE;
    case FROM_Q4_0:
    case FROM_Q4_1: return format == INT4 || format == INT4_WIDE;
    case FROM_Q5_0: return format == Q5_0;
    case FROM_Q5_1: return format == Q5_1;
    case FROM_Q5_K: return format == Q5_K;
    case FROM_Q2_K: return format == Q2_K;
    case FROM_Q3_K: return format == Q3_K;
    case FROM_IQ4_NL: return format == IQ4_NL;
    case FROM_IQ4_XS: return format == IQ4_XS;
    case FROM_MXFP4: return format == MXFP4;
    case FROM_PAIRS: return format == INT8_PAIR;
    case FROM_Q8_0: return format == INT8 || format == INT8_PAIR;
    case FROM_Q4_K: return format == INT4_WIDE;
    case FROM_Q6_K: return format == Q6_K;
    default: return false;
  }
}

}  // namespace

extern "C" {

// The bytes of a packed matrix; -1: there is no such format.
int64_t kakeya_packed_bytes(int32_t format, int64_t outputs, int64_t inputs) {
  if (format < 0 || format >= FORMATS || outputs < 0 || inputs < 0) return -1;
  return (outputs + TILE - 1) / TILE * tile_bytes(format, inputs);
}

// Packs a matrix into `tiles`, which begins at a multiple of 64; `order` has the source's row of each output, or is
// null. Blocks of codes are packed only into formats that hold exactly the same numbers; floats are rounded.
int32_t kakeya_pack(int32_t format, int32_t source, const uint8_t* data, int64_t outputs, int64_t inputs,
                    const int64_t* order, uint8_t* tiles) {
  if (!exists(format, source)) return NO_SUCH_FORMAT;
  Layout blocks = layout(source);
  if (inputs % blocks.inputs) return BROKEN_BLOCKS;
  int64_t row_bytes = inputs / blocks.inputs * blocks.bytes, padded = (outputs + TILE - 1) / TILE * TILE;
  auto pack_row = is_float(format) ? pack_floats : pack_blocks;
  for (int64_t output = 0; output < padded; output++) {
    uint8_t* tile = tiles + output / TILE * tile_bytes(format, inputs);
    int lane = (int)(output % TILE);
    if (output >= outputs) {
      pack_nothing(format, inputs, tile, lane);
      continue;
    }
    const uint8_t* row = data + (order ? order[output] : output) * row_bytes;
    if (!pack_row(format, source, row, inputs, tile, lane)) return TOO_LARGE;
  }
  return PACKED;
}

}  // extern "C"
