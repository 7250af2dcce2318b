// Layers that keep a recurrent state of the history: a short convolution, and the gated delta rule or a state space over
// its outputs (`DeltaRule`, `SelectiveScan` of `inference_engine/models/operations.py`).
//
// Of one session and layer there is the state after a whole number of chunks, counted from position 0, and the entries of
// the tokens since: the open chunk. A token's output is read from both, and a chunk that is full is folded into the state.
//
//     position   … 15 | 16 17 18 … 23 | 24 25 26        a chunk of 8
//                state after 24 tokens  open entries: keys, values (what a token adds), decays; inputs of the convolution
//
// So a token's bits depend on its position and on the tokens before it, not on how they came: a fold begins at a multiple
// of a chunk, and sums have one order. A step writes its entries behind those that are open, and what is rejected is left
// out. A step of more entries than there is room for gives a state of its own (`after`).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "activations.h"
#include "entries.h"
#include "simd.h"
#include "threads.h"
#include "types.h"

namespace KERNELS {

// Of one layer of one session.
struct OpenState {
  float *matrices, *keys, *values, *decays, *inputs;
  OpenState(const StateLayer& l, float* memory)
      : matrices(memory + l.offset),
        keys(matrices + (int64_t)l.value_heads * l.key_dim * l.value_dim),
        values(keys + (int64_t)l.room * l.key_heads * l.key_dim),
        decays(values + (int64_t)l.room * l.value_heads * l.value_dim),
        inputs(decays + (int64_t)l.room * l.value_heads) {}
};

inline int64_t chunk_of(const StateLayer& l, int64_t position) { return position - position % l.chunk; }

// -- the convolution --------------------------------------------------------------------------------------------------

// weights: [taps][channels]; bias: null, or [channels].
static void convolve(Threads& threads, const StateLayer& l, const Step& step, const float* in, float* out,
                     const float* weights, const float* bias, bool is_activated) {
  int64_t channels = l.channels, before = l.taps - 1;
  for (int64_t s = 0; s < step.span_count; s++) {
    const StateSpan& span = step.spans[s];
    const OpenState own(l, span.before);
    int64_t base = chunk_of(l, span.position), end = span.position + span.count;
    auto inputs_of = [&](int64_t position) {
      return position < span.position ? own.inputs + (position - base + before) * channels
                                      : in + (span.first + position - span.position) * channels;
    };
    auto tokens = [&](int64_t first, int64_t last) {
      for (int64_t token = first; token < last; token++) {
        float* y = out + (span.first + token) * channels;
        int64_t oldest = span.position + token - before;
        for (int64_t c = 0; c < channels; c += LANES) {
          int64_t left = channels - c;
          F sum = bias ? load_some(bias + c, left) : all(0.0f);
          for (int64_t tap = 0; tap <= before; tap++)
            sum = fma(load_some(inputs_of(oldest + tap) + c, left), load_some(weights + tap * channels + c, left), sum);
          if (is_activated) sum = divide(sum, add(all(1.0f), exponential(sub(all(0.0f), sum))));
          store_some(y + c, sum, left);
        }
      }
    };
    if (span.count < 8) tokens(0, span.count);
    else threads.split(span.count, 1, tokens);
    size_t bytes = (size_t)channels * sizeof(float);
    if (!span.after) {
      memcpy(own.inputs + (span.position - base + before) * channels, in + span.first * channels,
             (size_t)span.count * bytes);
      continue;
    }
    const OpenState next(l, span.after);
    int64_t begin = chunk_of(l, end) - before;
    for (int64_t position = begin; position < end; position++)
      memcpy(next.inputs + (position - begin) * channels, inputs_of(position), bytes);
  }
}

// -- the delta rule, and a state space ---------------------------------------------------------------------------------------------------

INLINE float dot_of(const float* x, const float* y, int64_t width) {
  F total = all(0.0f);
  for (int64_t i = 0; i < width; i += LANES) total = fma(load(x + i), load(y + i), total);
  return sum(total);
}

// out[n][value_dim] = x[n] · matrix, for N vectors x.
template <int N, int COLUMNS>
INLINE int64_t read_columns(const float* matrix, const float* const* x, int64_t keys, int64_t values, int64_t column,
                            float* const* out) {
  for (; column + COLUMNS * LANES <= values; column += COLUMNS * LANES) {
    F sums[N][COLUMNS];
    for (int n = 0; n < N; n++)
      for (int c = 0; c < COLUMNS; c++) sums[n][c] = all(0.0f);
    for (int64_t i = 0; i < keys; i++) {
      const float* row = matrix + i * values + column;
      F own[COLUMNS];
      for (int c = 0; c < COLUMNS; c++) own[c] = load(row + c * LANES);
      for (int n = 0; n < N; n++) {
        F factor = all(x[n][i]);
        for (int c = 0; c < COLUMNS; c++) sums[n][c] = fma(factor, own[c], sums[n][c]);
      }
    }
    for (int n = 0; n < N; n++)
      for (int c = 0; c < COLUMNS; c++) store(out[n] + column + c * LANES, sums[n][c]);
  }
  return column;
}

// Sums that are kept in registers.
#if defined(__AVX512F__)
constexpr int STATE_SUMS = 16;
#else
constexpr int STATE_SUMS = 4;
#endif
constexpr int STATE_READS = STATE_SUMS / 2;  // keys and queries that read the matrix together

template <int N>
INLINE void read_state(const float* matrix, const float* const* x, int64_t keys, int64_t values, float* const* out) {
  int64_t column = read_columns<N, STATE_SUMS / N>(matrix, x, keys, values, 0, out);
  read_columns<N, 1>(matrix, x, keys, values, column, out);
}

// The entries of one chunk, of one head: `count` keys, values and decays since its first token.
struct ChunkEntries {
  const float* const* keys;
  const float* const* values;
  const float* decays;
  int64_t count;
};

// exp(log) of what has decayed, where it counts: less than this, of numbers like these, is rounded away by what came
// later. Left as they are, such shares make numbers that are below the normal ones, for which a processor may take a
// hundred times as long.
INLINE float share_of(float log) { return log < -69.0f ? 0.0f : std::exp(log); }

template <int ROWS, int COLUMNS>
INLINE int64_t fold_rows(const float* matrix, const ChunkEntries& entries, const float* factors, float decay,
                         int64_t values, int64_t column, float* out) {
  for (; column + COLUMNS * LANES <= values; column += COLUMNS * LANES) {
    F totals[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < COLUMNS; c++)
        totals[r][c] = mul(load(matrix + r * values + column + c * LANES), all(decay));
    for (int64_t p = 0; p < entries.count; p++)
      for (int r = 0; r < ROWS; r++) {
        F factor = all(factors[r * entries.count + p]);
        for (int c = 0; c < COLUMNS; c++)
          totals[r][c] = fma(factor, load(entries.values[p] + column + c * LANES), totals[r][c]);
      }
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < COLUMNS; c++) store(out + r * values + column + c * LANES, totals[r][c]);
  }
  return column;
}

// out = matrix · decay + Σ key ⊗ value · decay since then. out may be matrix.
static void fold(const float* matrix, const ChunkEntries& entries, int64_t keys, int64_t values, float* out) {
  constexpr int ROWS = 4;  // keys are a multiple of it
  static thread_local Scratch weight_memory;
  int64_t count = entries.count;
  float *weights = weight_memory.of<float>((1 + ROWS) * count), *factors = weights + count;
  float last = entries.decays[count - 1], decay = share_of(last);
  for (int64_t p = 0; p < count; p++) weights[p] = share_of(last - entries.decays[p]);
  for (int64_t i = 0; i < keys; i += ROWS) {
    for (int r = 0; r < ROWS; r++)
      for (int64_t p = 0; p < count; p++) factors[r * count + p] = entries.keys[p][i + r] * weights[p];
    const float* from = matrix + i * values;
    int64_t column = fold_rows<ROWS, 2>(from, entries, factors, decay, values, 0, out + i * values);
    fold_rows<ROWS, 1>(from, entries, factors, decay, values, column, out + i * values);
  }
}

// The registers of a step, and where in them queries, keys, values and decays begin. A token's decay becomes that since
// its chunk began, its value what it adds to the state.
struct RuleRegisters {
  float *inputs, *gates, *out;
  int64_t input_width, gate_width, out_width, queries_at, keys_at, values_at, decays_at;
};

// What one head gives the tokens of a span. CORRECTS: what the state knows of a key is subtracted of its value, and the
// rest counts by the gate; else the output has its skip already.
template <bool CORRECTS>
static void run_head(const StateLayer& l, const StateSpan& span, int64_t head, const RuleRegisters& r) {
  static thread_local Scratch matrix_memory, read_memory, pointer_memory, decay_memory;
  int64_t keys = l.key_dim, values = l.value_dim, all_keys = l.key_heads * keys, all_values = l.value_heads * values;
  int64_t key_at = head / (l.value_heads / l.key_heads) * keys, value_at = head * values, size = keys * values;
  int64_t base = chunk_of(l, span.position), end = span.position + span.count;
  const OpenState before(l, span.before);
  const float* matrix = before.matrices + head * size;
  float* folded = matrix_memory.of<float>(size);
  float* reads = read_memory.of<float>(2 * l.chunk * values + 2 * l.chunk);
  float* weights = reads + 2 * l.chunk * values;
  const float** own_keys = pointer_memory.of<const float*>(2 * l.chunk);
  const float** own_values = own_keys + l.chunk;
  float* decays = decay_memory.of<float>(l.chunk);
  auto row = [&](int64_t position) { return span.first + position - span.position; };
  auto enter = [&](int64_t position, int64_t place) {
    bool is_open = position < span.position;
    int64_t at = position - base;
    own_keys[place] = is_open ? before.keys + at * all_keys + key_at
                              : r.inputs + row(position) * r.input_width + r.keys_at + key_at;
    own_values[place] = is_open ? before.values + at * all_values + value_at
                                : r.inputs + row(position) * r.input_width + r.values_at + value_at;
    decays[place] = is_open ? before.decays[at * l.value_heads + head]
                            : r.gates[row(position) * r.gate_width + r.decays_at + head];
  };

  for (int64_t start = base; start < end; start += l.chunk) {
    int64_t first = std::max(start, span.position), stop = std::min(start + l.chunk, end);
    if (start != base) {  // those of the chunk before are entered
      fold(matrix, {own_keys, own_values, decays, l.chunk}, keys, values, folded);
      matrix = folded;
    }
    float since = 0.0f;
    for (int64_t position = start; position < stop; position++) {
      if (position >= first) {
        float* decay = r.gates + row(position) * r.gate_width + r.decays_at + head;
        *decay += since;
      }
      enter(position, position - start);
      since = decays[position - start];
    }
    // What keys and queries read of the state, for several tokens at once.
    constexpr int OWN = CORRECTS ? 2 : 1, TOKENS = STATE_READS / OWN;  // of a token; at once
    for (int64_t position = first; position < stop;) {
      const float* x[STATE_READS];
      float* out[STATE_READS];
      int64_t count = stop - position < TOKENS ? 1 : TOKENS;
      for (int64_t n = 0; n < count; n++) {
        const float* token = r.inputs + row(position + n) * r.input_width;
        float* read = reads + 2 * (position + n - start) * values;
        if (CORRECTS) x[OWN * n] = token + r.keys_at + key_at, out[OWN * n] = read;
        x[OWN * n + OWN - 1] = token + r.queries_at + key_at, out[OWN * n + OWN - 1] = read + values;
      }
      if (count == TOKENS) read_state<STATE_READS>(matrix, x, keys, values, out);
      else read_state<OWN>(matrix, x, keys, values, out);
      position += count;
    }
    for (int64_t position = first; position < stop; position++) {
      int64_t n = position - start, entries = n;
      const float* query = r.inputs + row(position) * r.input_width + r.queries_at + key_at;
      const float *by_key = reads + 2 * n * values, *by_query = by_key + values;
      float decay = share_of(decays[n]), beta = CORRECTS ? r.gates[row(position) * r.gate_width + head] : 0.0f;
      float *key_weights = weights, *query_weights = weights + l.chunk;
      for (int64_t p = 0; p < entries; p++) {
        float weight = share_of(decays[n] - decays[p]);
        if (CORRECTS) key_weights[p] = dot_of(own_keys[n], own_keys[p], keys) * weight;
        query_weights[p] = dot_of(query, own_keys[p], keys) * weight;
      }
      float itself = dot_of(query, own_keys[n], keys);
      float* value = r.inputs + row(position) * r.input_width + r.values_at + value_at;
      float* out = r.out + row(position) * r.out_width + value_at;
      for (int64_t column = 0; column < values; column += LANES) {
        F known = CORRECTS ? mul(load(by_key + column), all(decay)) : all(0.0f);
        F found = mul(load(by_query + column), all(decay));
        for (int64_t p = 0; p < entries; p++) {
          F own = load(own_values[p] + column);
          if (CORRECTS) known = fma(all(key_weights[p]), own, known);
          found = fma(all(query_weights[p]), own, found);
        }
        F added = load(value + column);
        if (CORRECTS) {
          added = mul(sub(added, known), all(beta));
          store(value + column, added);
        } else {
          found = add(load(out + column), found);
        }
        store(out + column, fma(all(itself), added, found));
      }
    }
  }
  if (!span.after) return;
  float* next = OpenState(l, span.after).matrices + head * size;
  if (end % l.chunk) memcpy(next, matrix, (size_t)size * sizeof(float));
  else fold(matrix, {own_keys, own_values, decays, l.chunk}, keys, values, next);
}

// Queries and keys of a token are normed; its gates become beta and the logarithm of its decay. rates: [value_heads],
// negative; bias: as many.
static void prepare_delta(const StateLayer& l, float* inputs, float* gates, const float* rates, const float* bias,
                          bool doubles) {
  int64_t keys = l.key_dim;
  float scaling = 1.0f / std::sqrt((float)keys);
  for (int64_t head = 0; head < 2 * l.key_heads; head++) {
    float* x = inputs + head * keys;
    float norm = 1.0f / std::sqrt(dot_of(x, x, keys) + 1e-6f);
    if (head < l.key_heads) norm *= scaling;
    for (int64_t i = 0; i < keys; i += LANES) store(x + i, mul(load(x + i), all(norm)));
  }
  for (int64_t head = 0; head < l.value_heads; head++) {
    float beta = 1.0f / (1.0f + std::exp(-gates[head])), x = gates[l.value_heads + head] + bias[head];
    gates[head] = doubles ? 2.0f * beta : beta;
    gates[l.value_heads + head] = rates[head] * (x > 20.0f ? x : std::log1p(std::exp(x)));
  }
}

// What a token's output has of its own value; its value times its step, and the logarithm of its decay.
static void prepare_scan(const StateLayer& l, float* inputs, float* gates, float* out, const float* rates,
                         const float* bias, const float* skips, float least) {
  for (int64_t head = 0; head < l.value_heads; head++) {
    float *x = inputs + head * l.value_dim, *y = out + head * l.value_dim;
    float given = gates[head] + bias[head], size = given > 20.0f ? given : std::log1p(std::exp(given));
    if (size < least) size = least;
    gates[head] = rates[head] * size;
    for (int64_t i = 0; i < l.value_dim; i += LANES) {
      F own = load(x + i);
      store(y + i, mul(own, all(skips[head])));
      store(x + i, mul(own, all(size)));
    }
  }
}

// prepare(token): what is done to the numbers of a token by itself.
template <bool CORRECTS, class Prepare>
static void run_rule(Threads& threads, const StateLayer& l, const Step& step, const RuleRegisters& r,
                     const Prepare& prepare) {
  for (int64_t s = 0; s < step.span_count; s++) {
    const StateSpan& span = step.spans[s];
    auto tokens = [&](int64_t first, int64_t end) {
      for (int64_t token = span.first + first; token < span.first + end; token++) prepare(token);
    };
    if (span.count < 8) tokens(0, span.count);
    else threads.split(span.count, 1, tokens);
  }
  threads.split(step.span_count * l.value_heads, 1, [&](int64_t first, int64_t end) {
    for (int64_t one = first; one < end; one++)
      run_head<CORRECTS>(l, step.spans[one / l.value_heads], one % l.value_heads, r);
  });
  int64_t keys = l.key_heads * l.key_dim, values = l.value_heads * l.value_dim;
  for (int64_t s = 0; s < step.span_count; s++) {
    const StateSpan& span = step.spans[s];
    int64_t end = span.position + span.count;
    int64_t begin = span.after ? chunk_of(l, end) : span.position, base = span.after ? begin : chunk_of(l, begin);
    const OpenState next(l, span.after ? span.after : span.before);
    for (int64_t position = begin; position < end; position++) {
      int64_t at = position - base, token = span.first + position - span.position;
      const float *inputs = r.inputs + token * r.input_width, *gates = r.gates + token * r.gate_width;
      memcpy(next.keys + at * keys, inputs + r.keys_at, (size_t)keys * sizeof(float));
      memcpy(next.values + at * values, inputs + r.values_at, (size_t)values * sizeof(float));
      memcpy(next.decays + at * l.value_heads, gates + r.decays_at, (size_t)l.value_heads * sizeof(float));
    }
  }
}

static void delta_rule(Threads& threads, const StateLayer& l, const Step& step, RuleRegisters r, const float* rates,
                       const float* bias, bool doubles) {
  int64_t keys = l.key_heads * l.key_dim;
  r.queries_at = 0, r.keys_at = keys, r.values_at = 2 * keys, r.decays_at = l.value_heads;
  run_rule<true>(threads, l, step, r, [&](int64_t token) {
    prepare_delta(l, r.inputs + token * r.input_width, r.gates + token * r.gate_width, rates, bias, doubles);
  });
}

static void selective_scan(Threads& threads, const StateLayer& l, const Step& step, RuleRegisters r, const float* rates,
                           const float* bias, const float* skips, float least) {
  int64_t values = l.value_heads * l.value_dim;
  r.values_at = 0, r.keys_at = values, r.queries_at = values + l.key_heads * l.key_dim, r.decays_at = 0;
  run_rule<false>(threads, l, step, r, [&](int64_t token) {
    prepare_scan(l, r.inputs + token * r.input_width, r.gates + token * r.gate_width, r.out + token * r.out_width,
                 rates, bias, skips, least);
  });
}

// -- between steps ----------------------------------------------------------------------------------------------------

// Of `held` open entries and `staged` ones behind them, the first `held` + `kept` stay: whole chunks are folded, the rest
// moves to the front, and what is left behind it is wiped. All layers of one session.
static void settle(Threads& threads, const std::vector<StateLayer>& layers, float* memory, int64_t held, int64_t kept,
                   int64_t staged) {
  for (const StateLayer& l : layers) {
    const OpenState own(l, memory);
    int64_t keys = l.key_heads * l.key_dim, values = l.value_heads * l.value_dim, size = l.key_dim * l.value_dim;
    int64_t entries = held + kept, folds = entries / l.chunk, gone = folds * l.chunk;
    if (folds)
      threads.split(l.value_heads, 1, [&](int64_t first, int64_t end) {
        static thread_local Scratch pointer_memory, decay_memory;
        const float** own_keys = pointer_memory.of<const float*>(2 * l.chunk);
        float* decays = decay_memory.of<float>(l.chunk);
        for (int64_t head = first; head < end; head++)
          for (int64_t chunk = 0; chunk < folds; chunk++) {
            for (int64_t p = 0; p < l.chunk; p++) {
              int64_t at = chunk * l.chunk + p;
              own_keys[p] = own.keys + at * keys + head / (l.value_heads / l.key_heads) * l.key_dim;
              own_keys[l.chunk + p] = own.values + at * values + head * l.value_dim;
              decays[p] = own.decays[at * l.value_heads + head];
            }
            float* matrix = own.matrices + head * size;
            fold(matrix, {own_keys, own_keys + l.chunk, decays, l.chunk}, l.key_dim, l.value_dim, matrix);
          }
      });
    auto move = [&](float* rows, int64_t width, int64_t more) {
      int64_t left = entries - gone + more, end = held + staged + more;
      if (gone) memmove(rows, rows + gone * width, (size_t)(left * width) * sizeof(float));
      std::fill(rows + left * width, rows + end * width, 0.0f);
    };
    move(own.keys, keys, 0), move(own.values, values, 0), move(own.decays, l.value_heads, 0);
    move(own.inputs, l.channels, l.taps - 1);
  }
}

}  // namespace KERNELS
