// What Python and the kernels share: plain structures, the same on both sides (`inference_engine/native/library.py`).
#pragma once
#include <cstdint>
#include <vector>

class Threads;

// How the numbers of a matrix are stored. A tile is 16 outputs; quantised tiles are blocks of 32 inputs.
//
//   FLOAT32, FLOAT16, BFLOAT16   [K][16]
//   INT8      512 bytes of codes (byte 64c + 4r + j: output r, input 4c + j; the number + 128), 16 scales of 16 bits
//   INT8_PAIR the same codes, then 16 float32 scales of inputs 0–15 and 16 of inputs 16–31
//   INT4      256 bytes of codes (byte 64c + 4r + j: output r, low half input 8c + j, high half 8c + 4 + j), 16 scales
//             and 16 offsets of 16 bits: number = scale · code + offset
//   INT4_WIDE the same codes, scales and offsets of 32 bits
//
// Compact tiles have the bits of llama.cpp's blocks of the same name, and are made to one of the others when they are
// multiplied (compact.h): to INT8, INT8_PAIR, or INT8_OFFSETS, which has the codes and scales of INT8_PAIR, then 16
// float32 offsets of each half, and is never stored. A plane is 64 bytes, byte 4r + j for output r and input j of the
// eight quads of 4 inputs: four planes of half bytes as in INT4, two of 2 bits (quads 4c … 4c + 3, the first one in the
// lowest bits), one of single bits (quad q in bit q). Scales and offsets follow, 16 of each kind.
//
//   Q5_0    half bytes, bits     scales of 16 bits
//   Q5_1    half bytes, bits     scales, offsets of 16 bits
//   Q5_K    half bytes, bits     units of scales and of minima of 16 bits; scales, minima of 8 bits
//   Q6_K    half bytes, 2 bits   units of 16 bits; of each half scales of 8 bits
//   Q2_K    2 bits               the same as Q5_K's units; of each half a byte: the scale in its low half, the minimum
//   Q3_K    2 bits, bits         units of 16 bits; of each half scales of 8 bits
//   IQ4_NL  half bytes           scales of 16 bits
//   IQ4_XS  half bytes           units of 16 bits, scales of 8 bits
//   MXFP4   half bytes           exponents of 8 bits
enum Format : int32_t {
  FLOAT32, FLOAT16, BFLOAT16, INT8, INT8_PAIR, INT4, INT4_WIDE,
  Q5_0, Q5_1, Q5_K, Q6_K, Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4, FORMATS
};
constexpr int32_t INT8_OFFSETS = FORMATS;

constexpr bool is_float(int32_t format) { return format <= BFLOAT16; }

// The format that products read.
constexpr int32_t product_format(int32_t format) {
  switch (format) {
    case Q5_0: case IQ4_NL: return INT8;
    case Q6_K: case Q3_K: case IQ4_XS: case MXFP4: return INT8_PAIR;
    case Q5_1: case Q5_K: case Q2_K: return INT8_OFFSETS;
    default: return format;
  }
}

// Whether a product's block has offsets, and how many scales an output has in it. It has as many offsets.
constexpr bool has_offsets(int32_t format) { return format == INT4 || format == INT4_WIDE || format == INT8_OFFSETS; }
constexpr int parts_of(int32_t format) { return format == INT8_PAIR || format == INT8_OFFSETS ? 2 : 1; }

// 32 inputs of a quantised tile.
constexpr int64_t block_bytes(int32_t format) {
  switch (format) {
    case INT8: return 512 + 32;
    case INT8_PAIR: return 512 + 128;
    case INT8_OFFSETS: return 512 + 256;
    case INT4: return 256 + 64;
    case INT4_WIDE: return 256 + 128;
    case Q5_0: return 320 + 32;
    case Q5_1: return 320 + 64;
    case Q5_K: return 320 + 96;
    case Q6_K: return 384 + 64;
    case Q2_K: return 128 + 96;
    case Q3_K: return 192 + 64;
    case IQ4_NL: return 256 + 32;
    case IQ4_XS: return 256 + 48;
    case MXFP4: return 256 + 16;
    default: return 0;
  }
}

// From one tile to the next.
constexpr int64_t tile_bytes(int32_t format, int64_t inputs) {
  if (is_float(format)) return inputs * 16 * (format == FLOAT32 ? 4 : 2);
  return (inputs + 31) / 32 * block_bytes(format);
}

// What a matrix is packed from: rows of floats, or of llama.cpp's blocks; PAIRS: of 32 numbers two float32 scales, of
// the first and the last 16, and signed bytes.
enum Source : int32_t {
  FROM_FLOAT32, FROM_FLOAT16, FROM_BFLOAT16, FROM_Q4_0, FROM_Q4_1, FROM_Q5_0, FROM_Q8_0, FROM_Q4_K, FROM_Q6_K,
  FROM_Q5_1, FROM_Q5_K, FROM_Q2_K, FROM_Q3_K, FROM_IQ4_NL, FROM_IQ4_XS, FROM_MXFP4, FROM_PAIRS, SOURCES
};

// Why a matrix could not be packed: the source has no such format; its rows are not whole blocks; a number, or a scale
// or offset, does not fit into the format's 16 bits or is not finite.
enum PackError : int32_t { PACKED, NO_SUCH_FORMAT, BROKEN_BLOCKS, TOO_LARGE };

// A matrix of `outputs` × `inputs` numbers, packed in tiles. Outputs are padded to 16 and quantised inputs to 32.
struct Matrix {
  int32_t format, outputs, inputs, reserved;
  const uint8_t* tiles;
};

// How activations enter a product with a quantised matrix: as they are, or as signed bytes, 32 to a scale.
enum Identity : int32_t { EXACT, QUANTISED };

// The dtype of K and V.
enum KVType : int32_t { KV_FLOAT32, KV_FLOAT16, KV_BFLOAT16 };

// Attention of `count` single queries, each over a region of its own; see `inference_engine/kernels/ragged_attention.py`.
struct Attention {
  const float* queries;    // [count][query_heads][head_dim], `query_stride` floats from one to the next
  const void* keys;        // vectors of head_dim numbers, `row` numbers from one to the next
  const void* values;      // of value_dim numbers, as far apart
  const int64_t* regions;  // [count][20], `region_stride` from one to the next
  const float* head_sinks; // [query_heads], logits that join each head's softmax; null: none
  float* out;              // [count][query_heads][value_dim], `out_stride` from one to the next
  float* lse;              // [count][query_heads], ln Σ e^score of what each sees; null: not asked for, and not of
                           // queries that choose
  int64_t count, query_stride, region_stride, out_stride, row;
  int32_t query_heads, kv_heads, head_dim, value_dim, kv_type, reserved;
  float scaling, softcap;  // softcap 0: none
};

// How the code of a token becomes the entries of one layer: `LayerDecoder` of `inference_engine/kv/context.py` has the
// contract, restoring.h the kernel.
struct LayerDecoder {
  // [count]: of each code the byte behind the scale in which it begins, how many bits stand before and behind it in the
  // 32 bits from there, and where its levels begin.
  const int32_t *octets, *lefts, *rights, *tables;
  // float32, and 32 more can be read. EXACT: whole numbers of 16 bits, and 64 more.
  const void* levels;
  const float* scales;                      // [256], by the group's first byte
  const float* means;                       // [kv_heads][2 · head_dim]
  // [kv_heads], 2 · head_dim outputs and `count` inputs. EXACT: none, but `whole`: [kv_heads][2 · head_dim / 16] tiles of
  // 32 inputs, which are [16][16] pairs of whole numbers of 16 bits, then 16 scales of float32.
  const Matrix* matrices;
  const uint8_t* whole;
  int32_t count, chains, first_byte, bytes; // bytes: of the group's codes, its scale among them
  int32_t identity, reserved;               // of the product
};

// Codes of archived tokens: low, high [places][half], the bytes of a code in two halves. first: the position of place 0.
struct Codes {
  const uint8_t *low, *high;
  int64_t half, first;
};

// A rotation of the first `turned` numbers: cosines, then sines, [turned] for each of the positions 0 to 255 in `fine`,
// and for each 256th in `coarse`.
struct Turning {
  const float *fine, *coarse;
  int64_t turned;
};

// Archived tokens of one session and layer, and the restore cache in which those that were chosen stay restored. A
// number that is 0 in `held` and `slot_of` stands for none. Slots [0, first) of a head lie in the first room, those behind
// it in rooms of `each`, head after head. Rooms behind the first may be taken back at any time: then `slots` falls, and
// they are not written by others before the call is over.
struct Archive {
  Codes codes;
  Turning turning;
  const LayerDecoder* decoder;
  int32_t* held;               // [kv_heads][most]: 1 + the position in each slot
  uint32_t *until, *clocks;    // [kv_heads][most], [kv_heads]: how long it is to stay, by a clock that counts tokens
  void* slot_of;               // [kv_heads][tokens]: 1 + the slot of each position from codes.first on
  int32_t* known;              // [kv_heads]: as many slots have a part in these tables
  const int64_t* rooms;        // buffer vector with which each begins
  int64_t most, tokens, first, each;
  int32_t slots, is_wide;      // that may be used now; are numbers of `slot_of` of 32 bits, or of 16?
  int32_t is_broken, reserved; // has an entry that was restored not been finite?
};

// Entries of consecutive tokens, from position `first` on, that are restored into keys and values [kv_heads][count], a
// head every `apart` vectors, a vector every `row` numbers. archive: whose restore cache, in vectors of `held_keys` and
// `held_values`, may hold some, and gets others where it has room; null: there is none.
struct RestoredRun {
  Codes codes;
  Turning turning;
  const LayerDecoder* decoder;
  void *keys, *values;
  Archive* archive;
  void *held_keys, *held_values;
  int64_t first, count, apart, row, held_row;
  int32_t kv_heads, head_dim, kv_type, reserved;
};

// The numbers of vectors, [vectors][count], and their codes, as many. By number: where its levels begin in `values`, how
// many they are, and what a squared error costs (`Levels` of `inference_engine/kernels/trellis.py`).
struct TrellisCodes {
  const float *numbers, *values, *weights;
  const int32_t *first, *size;
  int32_t* codes;
  int64_t vectors, count, chains;
};

// The index of one layer's keys by their leading components: `inference_engine/kernels/components.py` has the contract,
// selection.h the kernel. Plan lines name it by its address.
struct KeyIndex {
  const uint8_t *even, *odd;  // tiles 0, 2, 4, … and 1, 3, 5, …: [pairs][kv_heads][words][16] words of 32 bits
  const float* rows;          // [kv_heads][head_dim][rank + 1, padded to 16]: what codes are multiplied with, and is added
  const float* middles;       // [tiles][2][turned / 2]: cosines and sines of each tile's middle
  const float* tables;        // [2][fast + 2][16]: even and odd functions of the distance from the middle
  const float* frequencies;   // [turned / 2], falling
  Archive* archive;           // of tokens that have left the regions; null: none do
  // run: tokens that share a rotation. words: of a tile's lane. turned: numbers of a head that are rotated. Frequencies
  // before `fast` have a row of the tables each, those before `crawling` four terms of their series, the others two.
  int32_t rank, bits, run, words, turned, fast, crawling, reserved;
};

// How a vector is coded: as numbers, or as codes of `bits` bits that name levels (`inference_engine/kv/compressor.py`).
enum CodedAs : int32_t { CODED_FLOAT32, CODED_BFLOAT16, CODED_LEVELS };

// Before the codes lie a scale for each group of channels and, if it has centres, a centre: 16 bits each.
struct Coding {
  int32_t kind, bits;
  int32_t group;  // channels that share a scale, a multiple of 16; 0: numbers, which have none
  int32_t has_centres, is_rotated;
  float middle;            // subtracted from a centre
  float spread, outermost; // of scales to try: mean magnitudes and the largest one are multiplied by
  const float* levels;     // by code; null: the code itself
  const uint8_t* nearest;  // of rotated ones, by cell of the line: the code of the nearest level
};

// Where entries of some layers lie, and their codes: `count` of every layer and head.
struct CodedEntries {
  Coding coding;
  uint8_t* const* codes;      // by layer
  const void* const* means;   // by layer, [heads][head_dim], coded apart; null: there are none
  void* const* regions;       // by layer
  const int64_t *code_slots, *entry_slots;  // [count]
  const float* turns;         // cosines and sines of the rotation of each entry, [count][turned]
  int64_t slot_bytes, head_bytes, region_slots, row, count;  // row: numbers from one slot of a region to the next
  int32_t layers, heads, head_dim, turned, kv_type, reserved;
};

// -- a step of a model --------------------------------------------------------------------------------------------------

// Named as the classes of `inference_engine/models/operations.py`.
enum Kind : int32_t {
  EMBED, NORM, PRODUCT, ROTATE, ATTEND, ADD, GATED, TAP, SELECT, SOFTCAP, EXPERTS, GIVEN, WRITE, SIGMOID_GATE,
  SLICE, CONVOLVE, DELTA_RULE, GATED_NORM, SELECTIVE_SCAN, MULTIPLY, SCALE, ARRANGE
};
enum Activation : int32_t { SILU, GELU_TANH, RELU };
enum Routing : int32_t { SUMS_TO_ONE = 1, SIGMOID_SCORES = 2, WITHOUT_GATE = 4 };  // bits of an EXPERTS' flag

// input, second, output: registers; an output of -1 is the logits. matrix, vector, table, layer: indexes, or -1.
// [offset, offset + heads · width): the part of a register that a norm or a rotation is about.
// SLICE: `layer` has where in `output` it begins, `flag` how many numbers of a head, from `offset` on.
// CONVOLVE, DELTA_RULE: `layer` names one of the layers that keep a state. CONVOLVE: `vector` has the weights, `matrix`
// the number of another vector, the bias, or -1; `flag`: SiLU. DELTA_RULE: `vector` has the rates of decay, the next one
// its bias; `flag`: beta is doubled. SELECTIVE_SCAN: the same, and its skips; `number`: the least size of a step.
// GATED_NORM: `flag`: the gate comes first. SCALE: of `width` numbers from `offset` on.
// EXPERTS: `second` has the router's logits, `heads` experts are chosen; `width` matrices of each: gate and up below each
// other, and down, or all three, or of experts without a gate up and down; `vector`: what is added to scores before they are compared; `table`: the number of
// another one, of factors of the experts' weights, or -1.
// ATTEND: `flag`: nothing is written, and the input is queries alone. ARRANGE: `matrix` is the number of a vector of int32,
// where each number comes from, `vector` what it is multiplied by.
struct Operation {
  int32_t kind, input, second, output, matrix, vector, table, layer;
  int32_t offset, heads, width, activation, flag;
  int32_t groups, chosen_groups;  // EXPERTS
  float number;  // NORM: epsilon; ATTEND: scaling; EMBED, ADD, EXPERTS, SCALE: factor; SOFTCAP: limit
  float other;   // ATTEND: softcap
};

// An entry of a KV head is a row of `row` numbers; its key begins with number `key_at`, its value with `value_at`. The first
// `shared` numbers of a key are the last ones of the value.
struct Layer {
  int32_t query_heads, kv_heads, head_dim, value_dim, key_at, value_at, shared, row;
};

// What a layer keeps of a session's history, from number `offset` of its states on (states.h): matrices [value_heads]
// [key_dim][value_dim]; `room` open entries, of keys [key_heads][key_dim], values [value_heads][value_dim] and decays
// [value_heads]; inputs of a convolution over `taps` tokens [taps - 1 + room][channels]. chunk: tokens folded together.
struct StateLayer {
  int32_t channels, taps, key_heads, value_heads, key_dim, value_dim, chunk, room;
  int64_t offset;
};

// The tokens of one session in a step, from index `first` of the step and from `position` of its history on. before: its
// states, where the step's entries are written, too; after: where the states behind the step go instead, if not null.
struct StateSpan {
  int64_t first, count, position;
  float *before, *after;
};

// A rotation table. turned: numbers of a head that are rotated; frequencies: [turned / 2]; factor: of cosine and sine.
// short_frequencies: of tokens whose position is given as ~position; null: there are none.
struct Rotary {
  const float *frequencies, *short_frequencies;
  int64_t turned, trained;
  float factor;
};

// The tokens of one step. writes: by layer [tokens][kv_heads], rows of the pool; regions: [layers][tokens][20].
struct Step {
  const int64_t *ids, *positions;
  const int64_t* const* writes;
  const int64_t* regions;
  void* pool;
  const int64_t* logit_queries;
  float* logits;         // [logit_count][vocabulary]
  const int32_t* taps;   // layers, ascending
  float* tapped;         // [tokens][tap_count][hidden]
  const float* given;    // [tokens][width of the register they go to]: for lists that begin with states
  const StateSpan* spans;  // of layers that keep a state
  int64_t* largest;      // [logit_count], once all operations have run; null: not asked for. See largest.h
  int64_t tokens, logit_count, vocabulary, span_count;
  int32_t tap_count;
};

struct Kernels;

// Of a mixture of experts: by token, its experts in ascending order, their weights, and where their outputs lie; those of
// one expert, whose pairs of token and place begin at `first`, lie together.
struct Mixture {
  std::vector<int32_t> experts, places, tokens, first;
  std::vector<float> weights, outputs;
};

// A model that is ready to run. One thread at a time.
struct Program {
  const Kernels* kernels;
  Threads* threads;
  std::vector<Operation> operations;
  std::vector<Matrix> matrices;
  std::vector<const float*> vectors;
  std::vector<Layer> layers;
  std::vector<Rotary> rotaries;
  std::vector<StateLayer> states;
  std::vector<int64_t> widths;
  int32_t identity, kv_type;
  std::vector<std::vector<float>> registers, turns;
  Mixture mixture;
};

// What one level of instructions computes with.
struct Kernels {
  const char* level;
  // y[count][outputs] = x[count][inputs] · matrix; `stride` floats from one output vector to the next.
  void (*linear)(Threads&, const Matrix&, Identity, const float* x, int64_t x_stride, int64_t count, float* y,
                 int64_t y_stride);
  // The numbers of one output, [inputs]: an embedding.
  void (*row)(const Matrix&, int64_t output, float* out);
  void (*attend)(Threads&, const Attention&);
  void (*decompress)(Threads&, const CodedEntries&);
  bool (*compress)(Threads&, const CodedEntries&);
  bool (*restore)(Threads&, const RestoredRun&);
  void (*choose)(Threads&, const TrellisCodes&);
  // Of each row of logits [width]: its heavy ids, ascending, at most `room` [count][room]; how many there are [count]; and
  // what the others weigh together [count]. masks: [count], a bit for each id, the lowest first, set if it may be one; or
  // null. scales: [count], 1 / temperature.
  void (*weigh)(Threads&, const float* const* rows, const uint8_t* const* masks, const float* scales, int64_t count,
                int64_t width, int64_t room, int64_t* ids, int64_t* found, double* rest);
  // The operations [first, end) of a program; a run begins with operation 0.
  void (*run)(Program&, const Step&, int32_t first, int32_t end);
  // The states of one session between two steps; see states.h.
  void (*settle)(Threads&, const std::vector<StateLayer>&, float* memory, int64_t held, int64_t kept, int64_t staged);
};

extern "C" {
const Kernels* kernels_plain();
const Kernels* kernels_avx2();
const Kernels* kernels_avxvnni();
const Kernels* kernels_avx512();
const Kernels* kernels_neon();
const Kernels* kernels_i8mm();
}
