// Products of activations with packed matrices.
//
// The bits of a token's outputs depend on its numbers and on the matrix alone: not on how many tokens there are, where
// among them it is, how many threads compute, or which instructions. So there is one order of adding, for one token and
// for many, and every product is added with one rounding:
//
//   floats      one sum over all inputs, ascending
//   codes       of every block of 32 inputs (where a half has a scale of its own: of each), ascending, one sum of
//               code · number; then total += scale · sum, and where a format has offsets, total += offset · (sum of the
//               numbers)
//   codes, activations in bytes
//               of every block (or half) the exact sum of code · byte; then total += (scale · byte scale) · sum, and
//               total += offset · (byte scale · sum of the bytes)
//
// What is not a number stays so, but which of the many such it is may differ.
#pragma once
#include <algorithm>
#include <type_traits>

#include "activations.h"
#include "compact.h"
#include "simd.h"
#include "threads.h"
#include "types.h"

#define UNROLL _Pragma("GCC unroll 32")

namespace KERNELS {

// -- what a tile holds ------------------------------------------------------------------------------------------------

template <int FORMAT>
struct Tile {
  static constexpr bool FLOATS = is_float(FORMAT);
  static constexpr bool NIBBLES = FORMAT == INT4 || FORMAT == INT4_WIDE;
  static constexpr bool OFFSETS = has_offsets(FORMAT);
  static constexpr bool WIDE = FORMAT != INT8 && FORMAT != INT4;
  static constexpr int PARTS = parts_of(FORMAT);          // scales of a block
  static constexpr int SUMS = OFFSETS ? PARTS : 1;        // of a block's numbers
  static constexpr int AT_ONCE = NIBBLES ? 8 : 4;         // inputs in 64 bytes of codes
  static constexpr int64_t CODE_BYTES = BLOCK / AT_ONCE * 64;
  static constexpr int64_t STEP = FLOATS ? tile_bytes(FORMAT, 1) : block_bytes(FORMAT);

  INLINE F number(const uint8_t* at) {
    if constexpr (FORMAT == FLOAT32) return load((const float*)at);
    else if constexpr (FORMAT == FLOAT16) return load_f16((const uint16_t*)at);
    else return load_bf16((const uint16_t*)at);
  }
  INLINE F code(Bytes codes, int n) {
    if constexpr (NIBBLES) return nibble(codes, n);
    else return byte(codes, n);
  }
  INLINE F after_codes(const uint8_t* block, int index) {
    const uint8_t* at = block + CODE_BYTES;
    if constexpr (WIDE) return load((const float*)at + index * LANES);
    else return load_f16((const uint16_t*)at + index * LANES);
  }
  INLINE F scale(const uint8_t* block, int part) { return after_codes(block, part); }
  INLINE F offset(const uint8_t* block, int part) { return after_codes(block, PARTS + part); }
};

// Asks for the tiles that come next, some lines at each step. A processor predicts what a loop reads next only once it has
// read some of it, and a tile is over soon: while tiles are computed, the next ones come into the second cache. Each group
// of tokens asks for its part of them: the first one alone would wait for all of it.
struct Ahead {
  const uint8_t *at, *end;
  int64_t lines;  // at a step

  static Ahead of(const uint8_t* next, int64_t bytes, int64_t steps, int64_t group, int64_t groups) {
    int64_t lines = (bytes + 64 * steps * groups - 1) / (64 * steps * groups), own = 64 * steps * lines;
    return {next + std::min(group * own, bytes), next + std::min((group + 1) * own, bytes), lines};
  }
  INLINE void fetch(Ahead& ahead) {
    for (int64_t line = 0; line < ahead.lines; line++) __builtin_prefetch(ahead.at + 64 * line, 0, 2);
    if ((ahead.at += 64 * ahead.lines) >= ahead.end) ahead.lines = 0;
  }
};

// Totals of `T` tokens and `C` tiles.
template <int T, int C>
struct Totals {
  F at[T][C];
};

// -- activations as they are ------------------------------------------------------------------------------------------

// A few tokens: numbers are made of the codes as they are needed. N blocks behind each other side by side, each with sums
// of its own: one token and one tile have one chain of additions in a block, and would wait for each of them.
template <int FORMAT, int T, int C, int N>
INLINE void direct_blocks(const uint8_t* block, int64_t tile_bytes, const float* x, const float* sums,
                          Totals<T, C>& y) {
  using Kind = Tile<FORMAT>;
  constexpr int INPUTS = BLOCK / Kind::PARTS, LOADS = INPUTS / Kind::AT_ONCE, SIDE_BY_SIDE = N == 1 ? 1 : N * Kind::PARTS;
  for (int begin = 0; begin < N * Kind::PARTS; begin += SIDE_BY_SIDE) {  // counted in parts of blocks
    F chain[SIDE_BY_SIDE][T][C];
    UNROLL for (int s = 0; s < SIDE_BY_SIDE; s++)
      UNROLL for (int t = 0; t < T; t++) UNROLL for (int c = 0; c < C; c++) chain[s][t][c] = all(0.0f);
    UNROLL for (int i = 0; i < LOADS; i++) {
      Bytes codes[SIDE_BY_SIDE][C];
      UNROLL for (int s = 0; s < SIDE_BY_SIDE; s++)
        UNROLL for (int c = 0; c < C; c++)
          codes[s][c] = load_bytes(block + (begin + s) / Kind::PARTS * Kind::STEP + c * tile_bytes +
                                   64 * ((begin + s) % Kind::PARTS * LOADS + i));
      UNROLL for (int n = 0; n < Kind::AT_ONCE; n++)
        UNROLL for (int s = 0; s < SIDE_BY_SIDE; s++) {
          F w[C];
          UNROLL for (int c = 0; c < C; c++) w[c] = Kind::code(codes[s][c], n);
          const float* numbers = x + ((begin + s) * INPUTS + i * Kind::AT_ONCE + n) * T;
          UNROLL for (int t = 0; t < T; t++) {
            F number = all(numbers[t]);
            UNROLL for (int c = 0; c < C; c++) chain[s][t][c] = fma(w[c], number, chain[s][t][c]);
          }
        }
    }
    UNROLL for (int s = 0; s < SIDE_BY_SIDE; s++) {
      int n = (begin + s) / Kind::PARTS, part = (begin + s) % Kind::PARTS;
      UNROLL for (int c = 0; c < C; c++) {
        const uint8_t* at = block + n * Kind::STEP + c * tile_bytes;
        F scale = Kind::scale(at, part);
        UNROLL for (int t = 0; t < T; t++) y.at[t][c] = fma(scale, chain[s][t][c], y.at[t][c]);
        if constexpr (Kind::OFFSETS) {
          F offset = Kind::offset(at, part);
          UNROLL for (int t = 0; t < T; t++) y.at[t][c] = fma(offset, all(sums[(begin + s) * T + t]), y.at[t][c]);
        }
      }
    }
  }
}

// How many blocks of one token.
#if defined(__AVX512F__) || defined(__AVX2__)
constexpr int BLOCKS_AT_ONCE = 3;
#else
constexpr int BLOCKS_AT_ONCE = 1;
#endif

template <int FORMAT, int T, int C>
INLINE void direct(const uint8_t* tiles, int64_t tile_bytes, Ahead ahead, const Activations& a, int64_t group,
                   Totals<T, C>& y) {
  using Kind = Tile<FORMAT>;
  int64_t first = a.groups.first(group);
  const float* x = a.numbers + first * a.inputs;
  if constexpr (Kind::FLOATS) {
    for (int64_t i = 0; i < a.inputs; i++, tiles += Kind::STEP, x += T) {
      Ahead::fetch(ahead);
      F w[C];
      UNROLL for (int c = 0; c < C; c++) w[c] = Kind::number(tiles + c * tile_bytes);
      UNROLL for (int t = 0; t < T; t++) {
        F number = all(x[t]);
        UNROLL for (int c = 0; c < C; c++) y.at[t][c] = fma(w[c], number, y.at[t][c]);
      }
    }
  } else {
    constexpr int N = T == 1 ? BLOCKS_AT_ONCE : 1;
    const float* sums = a.sums + first * a.blocks * Kind::SUMS;
    int64_t b = 0;
    for (; N > 1 && b + N <= a.blocks; b += N, tiles += N * Kind::STEP, x += N * BLOCK * T, sums += N * Kind::SUMS * T) {
      for (int n = 0; n < N; n++) Ahead::fetch(ahead);
      direct_blocks<FORMAT, T, C, N>(tiles, tile_bytes, x, sums, y);
    }
    for (; b < a.blocks; b++, tiles += Kind::STEP, x += BLOCK * T, sums += Kind::SUMS * T) {
      Ahead::fetch(ahead);
      direct_blocks<FORMAT, T, C, 1>(tiles, tile_bytes, x, sums, y);
    }
  }
}

// -- activations as bytes ---------------------------------------------------------------------------------------------

// Adds a block's products of codes and bytes, or those of the half that `codes` and `quads` begin with. The sums are
// exact: it does not matter which products an instruction adds at once.
#if defined(__ARM_FEATURE_MATMUL_INT8)
template <int FORMAT, int T, int C>
INLINE void add_dots(const uint8_t* codes, int64_t tile_bytes, const int32_t* quads, I (&dots)[T][C]) {
  using Kind = Tile<FORMAT>;
  Pair pairs[T / 2 + 1][C];
  UNROLL for (int t = 1; t < T; t += 2)
    UNROLL for (int c = 0; c < C; c++) pairs[t / 2][c] = together(dots[t - 1][c], dots[t][c]);
  UNROLL for (int q = 0; q < QUADS / Kind::PARTS; q += 2)
    UNROLL for (int c = 0; c < C; c++) {
      Bytes first = load_bytes(codes + c * tile_bytes + q * 4 / Kind::AT_ONCE * 64), next;
      if constexpr (Kind::NIBBLES) next = high_nibbles(first), first = low_nibbles(first);
      else next = load_bytes(codes + c * tile_bytes + (q + 1) * 64);
      UNROLL for (int t = 1; t < T; t += 2)
        pairs[t / 2][c] = dot_pair(pairs[t / 2][c], first, next, quads + quad_at(q, t - 1, T));
      if constexpr (T % 2) {  // a token alone: a second one of zeros would take as many instructions
        const int32_t* last = quads + quad_at(q, T - 1, T);
        dots[T - 1][c] = dot(dot(dots[T - 1][c], first, last[0]), next, last[1]);
      }
    }
  UNROLL for (int t = 1; t < T; t += 2)
    UNROLL for (int c = 0; c < C; c++) apart(pairs[t / 2][c], dots[t - 1][c], dots[t][c]);
}
#else
template <int FORMAT, int T, int C>
INLINE void add_dots(const uint8_t* codes, int64_t tile_bytes, const int32_t* quads, I (&dots)[T][C]) {
  using Kind = Tile<FORMAT>;
  UNROLL for (int q = 0; q < QUADS / Kind::PARTS; q++) {
    const uint8_t* at = codes + q * 4 / Kind::AT_ONCE * 64;
    UNROLL for (int c = 0; c < C; c++) {
      Bytes some = load_bytes(at + c * tile_bytes);
      if constexpr (Kind::NIBBLES) {
        Bytes half = q % 2 ? high_nibbles(some) : low_nibbles(some);
        UNROLL for (int t = 0; t < T; t++) dots[t][c] = dot_nibbles(dots[t][c], half, quads[q * T + t]);
      } else {
        UNROLL for (int t = 0; t < T; t++) dots[t][c] = dot(dots[t][c], factors(some), quads[q * T + t]);
      }
    }
  }
  if constexpr (Kind::NIBBLES)
    UNROLL for (int t = 0; t < T; t++) UNROLL for (int c = 0; c < C; c++) dots[t][c] = total(dots[t][c]);
}
#endif

template <int FORMAT, int T, int C>
INLINE void bytes_block(const uint8_t* block, int64_t tile_bytes, const int32_t* quads, const float* scales,
                        const int32_t* corrections, const float* sums, Totals<T, C>& y) {
  using Kind = Tile<FORMAT>;
  for (int part = 0; part < Kind::PARTS; part++) {
    I dots[T][C];
    UNROLL for (int t = 0; t < T; t++)
      UNROLL for (int c = 0; c < C; c++)
        dots[t][c] = Kind::NIBBLES || CENTRED ? zeros() : all_int(corrections[part * T + t]);
    add_dots<FORMAT, T, C>(block + part * (Kind::CODE_BYTES / Kind::PARTS), tile_bytes,
                           quads + part * (QUADS / Kind::PARTS) * T, dots);
    UNROLL for (int c = 0; c < C; c++) {
      F scale = Kind::scale(block + c * tile_bytes, part);
      UNROLL for (int t = 0; t < T; t++)
        y.at[t][c] = fma(mul(scale, all(scales[t])), as_floats(dots[t][c]), y.at[t][c]);
      if constexpr (Kind::OFFSETS) {
        F offset = Kind::offset(block + c * tile_bytes, part);
        UNROLL for (int t = 0; t < T; t++) y.at[t][c] = fma(offset, all(sums[part * T + t]), y.at[t][c]);
      }
    }
  }
}

template <int FORMAT, int T, int C>
INLINE void bytes(const uint8_t* tiles, int64_t tile_bytes, Ahead ahead, const Activations& a, int64_t group,
                  Totals<T, C>& y) {
  int64_t first = a.groups.first(group) * a.blocks;
  const int32_t *quads = a.quads + first * QUADS, *corrections = a.corrections + first * 2;
  const float *scales = a.scales + first, *sums = a.sums + first * Tile<FORMAT>::SUMS;
  for (int64_t b = 0; b < a.blocks; b++) {
    Ahead::fetch(ahead);
    bytes_block<FORMAT, T, C>(tiles, tile_bytes, quads, scales, corrections, sums, y);
    tiles += Tile<FORMAT>::STEP;
    quads += QUADS * T;
    corrections += 2 * T;
    scales += T;
    sums += Tile<FORMAT>::SUMS * T;
  }
}

// -- from tiles to outputs --------------------------------------------------------------------------------------------

// Where the products go: tiles [0, tiles) of every token.
struct Outputs {
  float* y;
  int64_t stride, outputs;

  // 16 outputs of a token, or as many as there are.
  void put(int64_t token, int64_t tile, F total) const {
    float* at = y + token * stride + tile * LANES;
    int64_t left = outputs - tile * LANES;
    if (left >= LANES) {
      store(at, total);
      return;
    }
    float last[LANES];
    store(last, total);
    memcpy(at, last, (size_t)left * sizeof(float));
  }
};

// Tiles that one group of tokens is multiplied with at once: so many sums run side by side that none waits for itself.
// One token waits for the memory instead, which is read fastest as one stream: it has several blocks side by side.
constexpr int tiles_at_once(int tokens, bool floats, bool bytes) {
  if (tokens == 1) return floats ? 4 : bytes || BLOCKS_AT_ONCE > 1 ? 1 : 2;
#if defined(__AVX512F__)
  if (tokens >= 7 && !floats && !bytes) return 1;  // two tiles: their totals would leave the registers to their sums
  return tokens == 2 && !bytes ? 4 : 2;
#else
  return tokens == 2 ? 2 : 1;
#endif
}

template <int FORMAT, bool BYTES, int T, int C>
__attribute__((noinline)) void few(const uint8_t* tiles, int64_t tile_bytes, Ahead ahead,
                                   const Activations& a, int64_t group, const Outputs& out, int64_t tile) {
  Totals<T, C> y;
  UNROLL for (int t = 0; t < T; t++) UNROLL for (int c = 0; c < C; c++) y.at[t][c] = all(0.0f);
  if constexpr (BYTES) bytes<FORMAT, T, C>(tiles, tile_bytes, ahead, a, group, y);
  else direct<FORMAT, T, C>(tiles, tile_bytes, ahead, a, group, y);
  int64_t first = a.groups.first(group);
  UNROLL for (int t = 0; t < T; t++) UNROLL for (int c = 0; c < C; c++) out.put(first + t, tile + c, y.at[t][c]);
}

// Calls body with `width`, of 1 to GROUP, as a constant.
template <int T = GROUP, class Body>
INLINE void with_width(int width, const Body& body) {
  if constexpr (T > 1)
    if (width < T) {
      with_width<T - 1>(width, body);
      return;
    }
  body(std::integral_constant<int, T>());
}

// The products of groups [from, to) with tiles [tile, end); every tile stays in the nearest cache for all groups.
// upcoming: says which tile this thread most likely begins with when it has finished these.
template <int FORMAT, bool BYTES, class Upcoming>
void few_tokens(const Matrix& matrix, const Activations& a, int64_t from, int64_t to, int64_t tile, int64_t end,
                const Outputs& out, const Upcoming& upcoming) {
  int64_t stored = tile_bytes(matrix.format, matrix.inputs), read = tile_bytes(FORMAT, matrix.inputs);
  int64_t steps = std::max<int64_t>(1, Tile<FORMAT>::FLOATS ? a.inputs : a.blocks);
  bool is_compact = matrix.format != FORMAT;
  int most = 4, next;
  for (int64_t g = from; g < to; g++)
    most = std::min(most, tiles_at_once(a.groups.width(g), Tile<FORMAT>::FLOATS, BYTES));
  for (; tile < end; tile += next) {
    const uint8_t* at = matrix.tiles + tile * stored;
    next = most;
    while (next > end - tile) next /= 2;
    const uint8_t* later = tile + next < end ? at + next * stored : matrix.tiles + upcoming() * stored;
    if constexpr (expands_to(FORMAT)) if (is_compact) at = expanded<FORMAT>(matrix, at, next);
    for (int64_t g = from; g < to; g++)
      with_width(a.groups.width(g), [&](auto width) {
        constexpr int T = width, MOST = tiles_at_once(T, Tile<FORMAT>::FLOATS, BYTES);
        Ahead ahead = Ahead::of(later, next * stored, steps, g - from, to - from);
        if (next == 4) if constexpr (MOST >= 4) return few<FORMAT, BYTES, T, 4>(at, read, ahead, a, g, out, tile);
        if (next == 2) if constexpr (MOST >= 2) return few<FORMAT, BYTES, T, 2>(at, read, ahead, a, g, out, tile);
        few<FORMAT, BYTES, T, 1>(at, read, ahead, a, g, out, tile);
      });
  }
}

// -- many tokens, activations as they are -----------------------------------------------------------------------------

// Numbers are made of the codes of a few tiles once, by the first group, a piece of some blocks at a time that stays in
// the nearest cache, and multiplied with all tokens. Their totals wait in memory meanwhile.
constexpr int PIECE = 128;  // inputs
#if defined(__AVX512F__)
constexpr int MANY_TILES = 3;
#else
constexpr int MANY_TILES = 1;
#endif

// Inputs [first, first + count) of C tiles of floats, as [input][tile][16].
template <int FORMAT, int C>
INLINE void widen(const uint8_t* tiles, int64_t tile_bytes, int64_t first, int64_t count, float* out) {
  using Kind = Tile<FORMAT>;
  for (int c = 0; c < C; c++, tiles += tile_bytes)
    for (int64_t i = 0; i < count; i++)
      store(out + (i * C + c) * LANES, Kind::number(tiles + (first + i) * Kind::STEP));
}

template <int T, int C>
INLINE void add_product(const F (&numbers)[C], const float* x, Totals<T, C>& chain) {
  UNROLL for (int t = 0; t < T; t++) {
    F number = all(x[t]);
    UNROLL for (int c = 0; c < C; c++) chain.at[t][c] = fma(numbers[c], number, chain.at[t][c]);
  }
}

template <int T, int C>
INLINE void add_products(const float* w, const float* x, int64_t count, Totals<T, C>& chain) {
  for (int64_t i = 0; i < count; i++, w += C * LANES, x += T) {
    F numbers[C];
    UNROLL for (int c = 0; c < C; c++) numbers[c] = load(w + c * LANES);
    add_product<T, C>(numbers, x, chain);
  }
}

// The same of codes, whose numbers are written to `w` for the groups that follow. To write them takes as long as two
// products each, and nothing beside products.
template <int FORMAT, int T, int C>
INLINE void decode_and_add(const uint8_t* codes, int64_t tile_bytes, float* w, const float* x, int64_t count,
                           Totals<T, C>& chain) {
  using Kind = Tile<FORMAT>;
  for (int64_t i = 0; i < count; i += Kind::AT_ONCE, codes += 64) {
    Bytes some[C];
    UNROLL for (int c = 0; c < C; c++) {
      __builtin_prefetch(codes + (c + C) * tile_bytes, 0, 2);
      some[c] = load_bytes(codes + c * tile_bytes);
    }
    UNROLL for (int n = 0; n < Kind::AT_ONCE; n++, w += C * LANES, x += T) {
      F numbers[C];
      UNROLL for (int c = 0; c < C; c++) store(w + c * LANES, numbers[c] = Kind::code(some[c], n));
      add_product<T, C>(numbers, x, chain);
    }
  }
}

template <int T, int C>
INLINE void load_totals(const float* y, Totals<T, C>& totals) {
  UNROLL for (int t = 0; t < T; t++)
    UNROLL for (int c = 0; c < C; c++) totals.at[t][c] = load(y + (t * C + c) * LANES);
}

template <int T, int C>
INLINE void store_totals(const Totals<T, C>& totals, float* y) {
  UNROLL for (int t = 0; t < T; t++)
    UNROLL for (int c = 0; c < C; c++) store(y + (t * C + c) * LANES, totals.at[t][c]);
}

// Adds one block, or the half of one that has a scale of its own. Not inlined: the compiler would keep the totals where
// the sums should be.
template <int FORMAT, bool DECODES, int T, int C>
__attribute__((noinline)) void many_block(const uint8_t* block, int64_t tile_bytes, int part, float* w, const float* x,
                                          const float* sums, float* y) {
  using Kind = Tile<FORMAT>;
  constexpr int RUN = BLOCK / Kind::PARTS;
  Totals<T, C> chain;
  UNROLL for (int t = 0; t < T; t++) UNROLL for (int c = 0; c < C; c++) chain.at[t][c] = all(0.0f);
  if constexpr (DECODES)
    decode_and_add<FORMAT, T, C>(block + part * (RUN / Kind::AT_ONCE) * 64, tile_bytes, w, x, RUN, chain);
  else add_products(w, x, RUN, chain);
  UNROLL for (int c = 0; c < C; c++) {
    F scale = Kind::scale(block + c * tile_bytes, part), offset = scale;
    if constexpr (Kind::OFFSETS) offset = Kind::offset(block + c * tile_bytes, part);
    UNROLL for (int t = 0; t < T; t++) {
      float* at = y + (t * C + c) * LANES;
      F total = fma(scale, chain.at[t][c], load(at));
      store(at, Kind::OFFSETS ? fma(offset, all(sums[t]), total) : total);
    }
  }
}

// One piece and one group: `w` the piece's numbers, `y` the group's totals, [token][tile][16].
template <int FORMAT, bool DECODES, int T, int C>
void many_piece(const uint8_t* tiles, int64_t tile_bytes, int64_t first, int64_t count, float* w, const float* x,
                const float* sums, float* y) {
  using Kind = Tile<FORMAT>;
  if constexpr (Kind::FLOATS) {
    Totals<T, C> totals;
    load_totals(y, totals);
    add_products(w, x, count, totals);
    store_totals(totals, y);
  } else {
    constexpr int RUN = BLOCK / Kind::PARTS;
    for (int64_t i = 0; i < count; i += RUN) {
      const uint8_t* block = tiles + (first + i) / BLOCK * Kind::STEP;
      int part = (int)(i % BLOCK / RUN);
      const float* own = sums + i * Kind::SUMS / BLOCK * T;
      many_block<FORMAT, DECODES, T, C>(block, tile_bytes, part, w + i * C * LANES, x + i * T, own, y);
    }
  }
}

template <int FORMAT, int C>
void many_tiles(const Matrix& matrix, const Activations& a, int64_t from, int64_t to, int64_t tile,
                const Outputs& out) {
  static thread_local Scratch number_memory, total_memory;
  constexpr int SUMS = Tile<FORMAT>::SUMS;
  int64_t read = tile_bytes(FORMAT, matrix.inputs), begin = a.groups.first(from), end = a.groups.first(to);
  const uint8_t* tiles = matrix.tiles + tile * tile_bytes(matrix.format, matrix.inputs);
  if constexpr (expands_to(FORMAT)) if (matrix.format != FORMAT) tiles = expanded<FORMAT>(matrix, tiles, C);
  float *w = number_memory.of<float>(PIECE * C * LANES), *totals = total_memory.of<float>((end - begin) * C * LANES);
  memset(totals, 0, (size_t)((end - begin) * C * LANES) * sizeof(float));
  for (int64_t first = 0; first < a.inputs; first += PIECE) {
    int64_t count = std::min<int64_t>(PIECE, a.inputs - first);
    if constexpr (Tile<FORMAT>::FLOATS) widen<FORMAT, C>(tiles, read, first, count, w);
    for (int64_t g = from; g < to; g++)
      with_width(a.groups.width(g), [&](auto width) {
        constexpr int T = width;
        int64_t token = a.groups.first(g);
        const float* x = a.numbers + token * a.inputs + first * T;
        const float* sums = a.sums ? a.sums + (token * a.blocks + first / BLOCK * T) * SUMS : nullptr;
        float* y = totals + (token - begin) * C * LANES;
        if (g == from) many_piece<FORMAT, !Tile<FORMAT>::FLOATS, T, C>(tiles, read, first, count, w, x, sums, y);
        else many_piece<FORMAT, false, T, C>(tiles, read, first, count, w, x, sums, y);
      });
  }
  for (int64_t token = begin; token < end; token++)
    for (int c = 0; c < C; c++) out.put(token, tile + c, load(totals + ((token - begin) * C + c) * LANES));
}

template <int FORMAT>
void many_tokens(const Matrix& matrix, const Activations& a, int64_t from, int64_t to, int64_t tile, int64_t end,
                 const Outputs& out) {
  for (; end - tile >= MANY_TILES; tile += MANY_TILES) many_tiles<FORMAT, MANY_TILES>(matrix, a, from, to, tile, out);
  if constexpr (MANY_TILES > 2)
    if (end - tile == 2) return many_tiles<FORMAT, 2>(matrix, a, from, to, tile, out);
  for (; tile < end; tile++) many_tiles<FORMAT, 1>(matrix, a, from, to, tile, out);
}

// -- all of it --------------------------------------------------------------------------------------------------------

// Tokens that are prepared together: it bounds the memory that a thread keeps.
constexpr int64_t TOKENS_AT_ONCE = 512;

// In how many parts the groups are divided so that every thread has about as much to do, when there are few tiles.
inline int64_t token_parts(int64_t tile_units, int64_t groups, int64_t threads) {
  for (int64_t parts = 1; parts < groups / 4; parts++) {
    int64_t rounds = (tile_units * parts + threads - 1) / threads;
    if (tile_units * parts * 8 >= rounds * threads * 7) return parts;
  }
  return std::max<int64_t>(groups / 4, 1);
}

template <int FORMAT>
void multiply(Threads& threads, const Matrix& matrix, bool bytes, const Activations& a, const Outputs& out) {
  bool many = !bytes && a.groups.count > 1;
  int64_t tiles = (matrix.outputs + LANES - 1) / LANES, unit = many ? MANY_TILES : a.groups.count > 1 ? 2 : 1;
  int64_t units = (tiles + unit - 1) / unit, parts = token_parts(units, a.groups.count, threads.count());
  threads.split(units * parts, 1, [&](int64_t first, int64_t end, const auto& next) {
    auto upcoming = [&] {  // a tile; when none is left, what lies behind the matrix
      int64_t free = next();
      return free < units * parts ? free % units * unit : tiles;
    };
    while (first < end) {  // the rest of one part's tiles
      int64_t part = first / units, stop = std::min(end, (part + 1) * units);
      int64_t from = a.groups.count * part / parts, to = a.groups.count * (part + 1) / parts;
      int64_t tile = (first - part * units) * unit, last = std::min((stop - part * units) * unit, tiles);
      if (many) many_tokens<FORMAT>(matrix, a, from, to, tile, last, out);
      else if (!bytes) few_tokens<FORMAT, false>(matrix, a, from, to, tile, last, out, upcoming);
      else if constexpr (!Tile<FORMAT>::FLOATS) few_tokens<FORMAT, true>(matrix, a, from, to, tile, last, out, upcoming);
      first = stop;
    }
  });
}

// Calls body with the format that products read as a constant.
template <class Body>
INLINE void with_format(int32_t format, const Body& body) {
  switch (product_format(format)) {
    case FLOAT32: return body(std::integral_constant<int, FLOAT32>());
    case FLOAT16: return body(std::integral_constant<int, FLOAT16>());
    case BFLOAT16: return body(std::integral_constant<int, BFLOAT16>());
    case INT8: return body(std::integral_constant<int, INT8>());
    case INT8_PAIR: return body(std::integral_constant<int, INT8_PAIR>());
    case INT4: return body(std::integral_constant<int, INT4>());
    case INT4_WIDE: return body(std::integral_constant<int, INT4_WIDE>());
    case INT8_OFFSETS: return body(std::integral_constant<int, INT8_OFFSETS>());
  }
}

// Of tokens that are prepared, for this matrix or one of the same format and inputs.
inline void linear_prepared(Threads& threads, const Matrix& matrix, Identity identity, const Activations& a, float* y,
                            int64_t y_stride) {
  Outputs out{y, y_stride, matrix.outputs};
  with_format(matrix.format, [&](auto format) {
    multiply<decltype(format)::value>(threads, matrix, identity == QUANTISED && matrix.format >= INT8, a, out);
  });
}

inline void linear(Threads& threads, const Matrix& matrix, Identity identity, const float* x, int64_t x_stride,
                   int64_t count, float* y, int64_t y_stride) {
  for (int64_t first = 0; first < count; first += TOKENS_AT_ONCE) {
    int64_t tokens = std::min(TOKENS_AT_ONCE, count - first);
    Activations a = prepare(threads, matrix, identity, x + first * x_stride, x_stride, tokens);
    linear_prepared(threads, matrix, identity, a, y + first * y_stride, y_stride);
  }
}

// The numbers of one output: scale · code + offset.
inline void row(const Matrix& matrix, int64_t output, float* out) {
  int64_t tile = output / LANES, lane = output % LANES;
  const uint8_t* stored = matrix.tiles + tile * tile_bytes(matrix.format, matrix.inputs);
  with_format(matrix.format, [&](auto format) {
    constexpr int FORMAT = decltype(format)::value;
    using Kind = Tile<FORMAT>;
    const uint8_t* at = stored;
    if constexpr (expands_to(FORMAT)) if (matrix.format != FORMAT) at = expanded<FORMAT>(matrix, stored, 1);
    float numbers[LANES];
    for (int64_t i = 0; i < matrix.inputs; i++) {
      F number;
      if constexpr (Kind::FLOATS) {
        number = Kind::number(at + i * Kind::STEP);
      } else {
        const uint8_t* block = at + i / BLOCK * Kind::STEP;
        int in_block = (int)(i % BLOCK);
        F code = Kind::code(load_bytes(block + in_block / Kind::AT_ONCE * 64), in_block % Kind::AT_ONCE);
        int part = in_block * Kind::PARTS / BLOCK;
        F scale = Kind::scale(block, part);
        if constexpr (Kind::OFFSETS) number = fma(scale, code, Kind::offset(block, part));
        else number = mul(scale, code);
      }
      store(numbers, number);
      out[i] = numbers[lane];
    }
  });
}

}  // namespace KERNELS
