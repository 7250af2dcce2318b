// What Python and the kernels share: plain structures, the same on both sides (`inference_engine/native/library.py`).
#pragma once
#include <cstdint>

class Threads;

// How the numbers of a matrix are stored. A tile is 16 outputs; quantised tiles are blocks of 32 inputs.
//
//   FLOAT32, FLOAT16, BFLOAT16   [K][16]
//   INT8      512 bytes of codes (byte 64c + 4r + j: output r, input 4c + j; the number + 128), 16 scales of 16 bits
//   INT8_PAIR the same codes, then 16 float32 scales of inputs 0–15 and 16 of inputs 16–31
//   INT4      256 bytes of codes (byte 64c + 4r + j: output r, low half input 8c + j, high half 8c + 4 + j), 16 scales
//             and 16 offsets of 16 bits: number = scale · code + offset
//   INT4_WIDE the same codes, scales and offsets of 32 bits
enum Format : int32_t { FLOAT32, FLOAT16, BFLOAT16, INT8, INT8_PAIR, INT4, INT4_WIDE, FORMATS };

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
  const void* keys;        // the buffer's vectors, [R][head_dim]
  const void* values;
  const int64_t* regions;  // [count][16], `region_stride` from one to the next
  const float* head_sinks; // [query_heads], logits that join each head's softmax; null: none
  float* out;              // as queries, `out_stride` from one to the next
  int64_t count, query_stride, region_stride, out_stride;
  int32_t query_heads, kv_heads, head_dim, kv_type;
  float scaling, softcap;  // softcap 0: none
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
};

extern "C" {
const Kernels* kernels_plain();
const Kernels* kernels_avx2();
const Kernels* kernels_avxvnni();
const Kernels* kernels_avx512();
const Kernels* kernels_neon();
}
