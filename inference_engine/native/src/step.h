// A step of a model: a list of operations over registers, run by one call (`inference_engine/models/operations.py`).
//
// A register holds one vector for each token of the step. What an operation does to one token depends on that token
// alone, attention apart, and sums run in one order: so a token's logits do not depend on what else is in the step.
#pragma once
#include <algorithm>
#include <vector>

#include "attention.h"
#include "entries.h"
#include "largest.h"
#include "matrix.h"
#include "selection.h"
#include "simd.h"
#include "states.h"
#include "threads.h"
#include "types.h"

namespace KERNELS {

// Root mean square norm (Zhang and Sennrich, arXiv 1910.07467).
static void norm(const float* x, const float* weights, float epsilon, int64_t width, float* out) {
  F squares = all(0.0f);
  for (int64_t i = 0; i < width; i += LANES) {
    F v = load_some(x + i, width - i);
    squares = fma(v, v, squares);
  }
  F scale = all(1.0f / std::sqrt(sum(squares) / (float)width + epsilon));
  for (int64_t i = 0; i < width; i += LANES)
    store_some(out + i, mul(mul(load_some(x + i, width - i), scale), load_some(weights + i, width - i)), width - i);
}

INLINE F activated(F x, int32_t activation) {
  if (activation == RELU) return mul(x, where_least(x, 0.0f, all(1.0f)));  // zero times what is not a number is none
  if (activation == SILU) return divide(x, add(all(1.0f), exponential(sub(all(0.0f), x))));
  // GELU by tanh (Hendrycks and Gimpel, arXiv 1606.08415)
  F inner = mul(all(0.7978845608028654f), fma(mul(mul(x, x), x), all(0.044715f), x));
  return mul(mul(all(0.5f), x), add(all(1.0f), hyperbolic_tangent(inner)));
}

class Run {
 public:
  Run(Program& program, const Step& step) : p_(program), s_(step), tokens_(step.tokens) {}

  void run(int32_t first, int32_t end) {
    if (first == 0) prepare();
    for (int32_t index = first; index < end; index++) one(p_.operations[index]);
    if (s_.largest && (size_t)end == p_.operations.size())
      largest_ids(*p_.threads, s_.logits, s_.logit_count, s_.vocabulary, s_.largest);
  }

 private:
  Program& p_;
  const Step& s_;
  int64_t tokens_;

  float* at(int32_t index) { return p_.registers[index].data(); }
  int64_t width(int32_t index) { return p_.widths[index]; }

  // body(token) for each token, on all threads if there are enough of them.
  template <class Body>
  void each(int64_t count, const Body& body) {
    each(*p_.threads, count, body);
  }

  template <class Body>
  static void each(Threads& threads, int64_t count, const Body& body) {
    auto part = [&](int64_t first, int64_t end) {
      for (int64_t token = first; token < end; token++) body(token);
    };
    if (count < 8) part(0, count);
    else threads.split(count, 1, part);
  }

  void prepare() {
    size_t most = (size_t)std::max(s_.tokens, s_.logit_count);
    for (size_t i = 0; i < p_.widths.size(); i++) {
      size_t needed = most * (size_t)p_.widths[i] + LANES;
      if (p_.registers[i].size() < needed) p_.registers[i].resize(needed);
    }
    for (size_t i = 0; i < p_.rotaries.size(); i++) angles(p_.rotaries[i], p_.turns[i]);
  }

  // Cosines and sines of each token's position. The product is rounded to float32 as in training; beyond the trained
  // positions it is not, so that distances stay exact.
  void angles(const Rotary& rotary, std::vector<float>& turns) {
    int64_t half = rotary.turned / 2;
    turns.resize((size_t)(s_.tokens * rotary.turned) + 2 * LANES);
    each(s_.tokens, [&](int64_t token) {
      int64_t position = s_.positions[token];
      const float* frequencies = position < 0 ? rotary.short_frequencies : rotary.frequencies;
      if (position < 0) position = ~position;
      float* cosines = turns.data() + token * rotary.turned;
      for (int64_t i = 0; i < half; i++) {
        double angle = position < rotary.trained ? (double)((float)position * frequencies[i])
                                                 : (double)position * (double)frequencies[i];
        cosines[i] = (float)std::cos(angle) * rotary.factor;
        cosines[half + i] = (float)std::sin(angle) * rotary.factor;
      }
    });
  }

  void one(const Operation& o) {
    switch (o.kind) {
      case EMBED: return embed(o);
      case NORM: return norms(o);
      case PRODUCT: return product(o);
      case ROTATE: return turn(o);
      case ATTEND: return attention(o);
      case ADD: return sum_up(o);
      case GATED: return gated(o);
      case TAP: return tap(o);
      case SELECT: return select(o);
      case SOFTCAP: return cap(o);
      case EXPERTS: return experts(o);
      case GIVEN: return given(o);
      case SIGMOID_GATE: return sigmoid_gate(o);
      case SLICE: return slice(o);
      case CONVOLVE: return convolution(o);
      case DELTA_RULE: return delta(o);
      case GATED_NORM: return gated_norm(o);
      case SELECTIVE_SCAN: return scan(o);
      case MULTIPLY: return multiply(o);
      case SCALE: return scale(o);
      case ARRANGE: return arrange(o);
      case WRITE: return write(p_.layers[o.layer], o.layer, at(o.input), width(o.input));
    }
  }

  void embed(const Operation& o) {
    const Matrix& table = p_.matrices[o.matrix];
    float* out = at(o.output);
    each(tokens_, [&](int64_t token) {
      float* x = out + token * width(o.output);
      row(table, s_.ids[token], x);
      if (o.number != 1.0f)
        for (int64_t i = 0; i < width(o.output); i++) x[i] *= o.number;
    });
  }

  void norms(const Operation& o) {
    const float* weights = p_.vectors[o.vector];
    const float* in = at(o.input) + o.offset;
    float* out = at(o.output) + (o.output == o.input ? o.offset : 0);
    each(tokens_, [&](int64_t token) {
      for (int64_t head = 0; head < o.heads; head++)
        norm(in + token * width(o.input) + head * o.width, weights, o.number, o.width,
             out + token * width(o.output) + head * o.width);
    });
  }

  void product(const Operation& o) {
    const Matrix& matrix = p_.matrices[o.matrix];
    bool is_last = o.output < 0;  // logits
    float* out = is_last ? s_.logits : at(o.output) + o.offset;
    int64_t stride = is_last ? matrix.outputs : width(o.output);
    linear(*p_.threads, matrix, (Identity)p_.identity, at(o.input), width(o.input), tokens_, out, stride);
    if (o.vector < 0) return;
    const float* bias = p_.vectors[o.vector];
    each(tokens_, [&](int64_t token) {
      float* y = out + token * stride;
      for (int64_t i = 0; i < matrix.outputs; i++) y[i] += bias[i];
    });
  }

  void turn(const Operation& o) {
    const Rotary& rotary = p_.rotaries[o.table];
    const float* turns = p_.turns[o.table].data();
    float* in = at(o.input) + o.offset;
    each(tokens_, [&](int64_t token) {
      const float* cosines = turns + token * rotary.turned;
      for (int64_t head = 0; head < o.heads; head++)
        rotate(in + token * width(o.input) + head * o.width, cosines, cosines + rotary.turned / 2, rotary.turned);
    });
  }

  void given(const Operation& o) {
    memcpy(at(o.output), s_.given, (size_t)(tokens_ * width(o.output)) * sizeof(float));
  }

  // Writes keys and values of each token, which lie one behind the other, `stride` floats from one token to the next.
  void write(const Layer& layer, int32_t index, const float* keys, int64_t stride) {
    int64_t dim = layer.head_dim, value_dim = layer.value_dim;
    // Whole vectors of a key's last numbers; those among them that are shared are the value's, which comes behind.
    int64_t own = (dim - layer.shared + LANES - 1) / LANES * LANES, skipped = dim - own;
    const float* values = keys + layer.kv_heads * dim;
    const int64_t* writes = s_.writes[index];
    each(tokens_, [&](int64_t token) {
      for (int64_t head = 0; head < layer.kv_heads; head++) {
        int64_t at = writes[token * layer.kv_heads + head] * layer.row;
        put(p_.kv_type, s_.pool, at + layer.key_at + skipped, keys + token * stride + head * dim + skipped, own);
        put(p_.kv_type, s_.pool, at + layer.value_at, values + token * stride + head * value_dim, value_dim);
      }
    });
  }

  // input: queries, keys and values of each token, one behind the other; or queries alone, and nothing is written.
  void attention(const Operation& o) {
    const Layer& layer = p_.layers[o.layer];
    const float* in = at(o.input);
    int64_t stride = width(o.input), dim = layer.head_dim;
    if (!o.flag) write(layer, o.layer, in + layer.query_heads * dim, stride);
    Attention what = {};
    what.queries = in;
    int64_t size = p_.kv_type == KV_FLOAT32 ? 4 : 2;
    what.keys = (const char*)s_.pool + layer.key_at * size;
    what.values = (const char*)s_.pool + layer.value_at * size;
    what.regions = s_.regions + o.layer * tokens_ * attention::FIELDS;
    what.head_sinks = o.vector < 0 ? nullptr : p_.vectors[o.vector];
    what.out = at(o.output);
    what.count = tokens_;
    what.query_stride = stride;
    what.region_stride = attention::FIELDS;
    what.out_stride = width(o.output);
    what.row = layer.row;
    what.query_heads = layer.query_heads;
    what.kv_heads = layer.kv_heads;
    what.head_dim = layer.head_dim;
    what.value_dim = layer.value_dim;
    what.kv_type = p_.kv_type;
    what.scaling = o.number;
    what.softcap = o.other;
    attend(*p_.threads, what);
  }

  void sum_up(const Operation& o) {
    const float* in = at(o.input);
    float* out = at(o.output);
    int64_t count = width(o.output);
    each(tokens_, [&](int64_t token) {
      const float* x = in + token * width(o.input);
      float* y = out + token * count;
      if (o.number == 1.0f)
        for (int64_t i = 0; i < count; i++) y[i] += x[i];
      else
        for (int64_t i = 0; i < count; i++) y[i] += x[i] * o.number;
    });
  }

  static void gate(const float* x, float* y, int64_t count, int32_t activation) {
    for (int64_t i = 0; i < count; i += LANES) {
      int64_t left = count - i;
      store_some(y + i, mul(activated(load_some(x + i, left), activation), load_some(x + count + i, left)), left);
    }
  }

  void gated(const Operation& o) {
    const float* in = at(o.input);
    float* out = at(o.output);
    each(tokens_, [&](int64_t token) {
      gate(in + token * width(o.input), out + token * width(o.output), width(o.output), o.activation);
    });
  }

  void tap(const Operation& o) {
    const float* in = at(o.input);
    for (int32_t place = 0; place < s_.tap_count; place++) {
      if (s_.taps[place] != o.layer) continue;
      size_t bytes = (size_t)width(o.input) * sizeof(float);
      for (int64_t token = 0; token < tokens_; token++)
        memcpy(s_.tapped + (token * s_.tap_count + place) * width(o.input), in + token * width(o.input), bytes);
    }
  }

  // Only tokens whose logits are asked for go on from here.
  void select(const Operation& o) {
    size_t bytes = (size_t)width(o.input) * sizeof(float);
    for (int64_t i = 0; i < s_.logit_count; i++)
      memcpy(at(o.output) + i * width(o.output), at(o.input) + s_.logit_queries[i] * width(o.input), bytes);
    tokens_ = s_.logit_count;
  }

  void cap(const Operation& o) {
    F limit = all(o.number);
    int64_t count = s_.vocabulary;
    each(tokens_, [&](int64_t token) {
      float* x = s_.logits + token * count;
      for (int64_t i = 0; i < count; i += LANES) {
        F v = load_some(x + i, count - i);
        // The tangent of what is not a number is one: 0 / 0 keeps it.
        F is_number = where_least(v, -INFINITY, all(1.0f));
        F capped = mul(mul(hyperbolic_tangent(divide(v, limit)), limit), is_number);
        store_some(x + i, divide(capped, is_number), count - i);
      }
    });
  }

  // output = input · sigmoid(second), which has one number or as many as they.
  void sigmoid_gate(const Operation& o) {
    int64_t count = width(o.output), step = width(o.second) == 1 ? 0 : LANES;
    each(tokens_, [&](int64_t token) {
      const float *x = at(o.input) + token * count, *gates = at(o.second) + token * width(o.second);
      float* y = at(o.output) + token * count;
      for (int64_t i = 0; i < count; i += LANES) {
        int64_t left = count - i;
        F g = step ? load_some(gates + i, left) : all(gates[0]);
        F share = add(all(1.0f), exponential(sub(all(0.0f), g)));
        store_some(y + i, divide(load_some(x + i, left), share), left);
      }
    });
  }

  void slice(const Operation& o) {
    each(tokens_, [&](int64_t token) {
      const float* x = at(o.input) + token * width(o.input) + o.offset;
      float* y = at(o.output) + token * width(o.output) + o.layer;
      for (int64_t head = 0; head < o.heads; head++)
        memcpy(y + head * o.flag, x + head * o.width, (size_t)o.flag * sizeof(float));
    });
  }

  // Zeros for tokens that are padding: they are of no session.
  void clear_padding(int32_t output) {
    int64_t real = 0;
    for (int64_t s = 0; s < s_.span_count; s++) real += s_.spans[s].count;
    if (real != tokens_) std::fill(at(output), at(output) + tokens_ * width(output), 0.0f);
  }

  void convolution(const Operation& o) {
    clear_padding(o.output);
    const float* bias = o.matrix < 0 ? nullptr : p_.vectors[o.matrix];
    convolve(*p_.threads, p_.states[o.layer], s_, at(o.input), at(o.output), p_.vectors[o.vector], bias, o.flag);
  }

  void delta(const Operation& o) {
    clear_padding(o.output);
    delta_rule(*p_.threads, p_.states[o.layer], s_, registers_of(o), p_.vectors[o.vector], p_.vectors[o.vector + 1],
               o.flag);
  }

  void scan(const Operation& o) {
    clear_padding(o.output);
    const float* const* own = &p_.vectors[o.vector];
    selective_scan(*p_.threads, p_.states[o.layer], s_, registers_of(o), own[0], own[1], own[2], o.number);
  }

  RuleRegisters registers_of(const Operation& o) {
    return {at(o.input), at(o.second), at(o.output), width(o.input), width(o.second), width(o.output), 0, 0, 0, 0};
  }

  void multiply(const Operation& o) {
    int64_t count = width(o.output);
    each(tokens_, [&](int64_t token) {
      const float *x = at(o.input) + token * count, *z = at(o.second) + token * count;
      float* y = at(o.output) + token * count;
      for (int64_t i = 0; i < count; i++) y[i] = x[i] * z[i];
    });
  }

  void scale(const Operation& o) {
    each(tokens_, [&](int64_t token) {
      float* x = at(o.input) + token * width(o.input) + o.offset;
      for (int64_t i = 0; i < o.width; i++) x[i] *= o.number;
    });
  }

  void arrange(const Operation& o) {
    const float* factors = p_.vectors[o.vector];
    const int32_t* order = (const int32_t*)p_.vectors[o.matrix];
    each(tokens_, [&](int64_t token) {
      static thread_local Scratch memory;
      float* before = memory.of<float>(o.width);
      float* x = at(o.input) + token * width(o.input) + o.offset;
      for (int64_t head = 0; head < o.heads; head++, x += o.width) {
        memcpy(before, x, (size_t)o.width * sizeof(float));
        for (int64_t i = 0; i < o.width; i++) x[i] = before[order[i]] * factors[i];
      }
    });
  }

  // output = norm(input) · silu(second), or norm(input · silu(second)) with weights of each piece.
  void gated_norm(const Operation& o) {
    const float* weights = p_.vectors[o.vector];
    each(tokens_, [&](int64_t token) {
      const float *x = at(o.input) + token * width(o.input), *gates = at(o.second) + token * width(o.second);
      float* y = at(o.output) + token * width(o.output);
      auto multiply = [&](const float* from) {
        for (int64_t i = 0; i < o.heads * o.width; i += LANES) {
          int64_t left = o.heads * o.width - i;
          store_some(y + i, mul(load_some(from + i, left), activated(load_some(gates + i, left), SILU)), left);
        }
      };
      if (o.flag) multiply(x);
      for (int64_t head = 0; head < o.heads; head++)
        norm((o.flag ? y : x) + head * o.width, weights + (o.flag ? head * o.width : 0), o.number, o.width,
             y + head * o.width);
      if (!o.flag) multiply(y);
    });
  }

  // A mixture of experts. All pairs of token and expert are known before the first product, so threads take experts where
  // there are enough, and else share out each product. A token's experts are added up in the order of their numbers.
  void experts(const Operation& o) {
    int64_t count = width(o.second), chosen = o.heads, hidden = width(o.input), pairs = tokens_ * chosen;
    Mixture& m = p_.mixture;
    m.experts.resize((size_t)pairs), m.places.resize((size_t)pairs), m.tokens.resize((size_t)pairs);
    m.weights.resize((size_t)pairs), m.first.resize((size_t)count + 2);
    if (m.outputs.size() < (size_t)(pairs * hidden)) m.outputs.resize((size_t)(pairs * hidden));
    const float* bias = o.vector < 0 ? nullptr : p_.vectors[o.vector];
    each(tokens_, [&](int64_t token) {
      choose(o, bias, at(o.second) + token * count, count, &m.experts[(size_t)(token * chosen)],
             &m.weights[(size_t)(token * chosen)]);
      for (int64_t pair = token * chosen; o.table >= 0 && pair < (token + 1) * chosen; pair++)
        m.weights[(size_t)pair] *= p_.vectors[o.table][m.experts[(size_t)pair]];
    });
    sort_pairs(count, chosen, pairs);
    int64_t used = 0;
    for (int64_t expert = 0; expert < count; expert++) used += m.first[(size_t)expert] != m.first[(size_t)expert + 1];
    if (used >= 2 * p_.threads->count()) {
      p_.threads->split(count, 1, [&](int64_t first, int64_t end) {
        static thread_local Threads alone(1);
        for (int64_t expert = first; expert < end; expert++) products_of(alone, o, expert);
      });
    } else {
      for (int64_t expert = 0; expert < count; expert++) products_of(*p_.threads, o, expert);
    }
    each(tokens_, [&](int64_t token) {
      float* y = at(o.output) + token * hidden;
      std::fill(y, y + hidden, 0.0f);
      for (int64_t pair = token * chosen; pair < (token + 1) * chosen; pair++) {
        float share = m.weights[(size_t)pair];
        if (share == 0.0f) continue;
        const float* x = &m.outputs[(size_t)(m.places[(size_t)pair] * hidden)];
        for (int64_t d = 0; d < hidden; d++) y[d] += x[d] * share;
      }
    });
  }

  // Where each pair's output lies: by expert, then by token. Pairs without a weight are left out.
  void sort_pairs(int64_t count, int64_t chosen, int64_t pairs) {
    Mixture& m = p_.mixture;
    std::fill(m.first.begin(), m.first.end(), 0);
    for (size_t pair = 0; pair < (size_t)pairs; pair++)
      if (m.weights[pair] != 0.0f) m.first[(size_t)m.experts[pair] + 2]++;
    for (size_t expert = 2; expert < (size_t)count + 2; expert++) m.first[expert] += m.first[expert - 1];
    for (size_t pair = 0; pair < (size_t)pairs; pair++) {
      if (m.weights[pair] == 0.0f) continue;
      m.places[pair] = m.first[(size_t)m.experts[pair] + 1]++;
      m.tokens[(size_t)m.places[pair]] = (int32_t)((int64_t)pair / chosen);
    }
  }

  // What one expert gives its tokens.
  void products_of(Threads& threads, const Operation& o, int64_t expert) {
    static thread_local Scratch input_memory, gate_memory, inner_memory;
    const Mixture& m = p_.mixture;
    int64_t begin = m.first[(size_t)expert], n = m.first[(size_t)expert + 1] - begin, hidden = width(o.input);
    if (!n) return;
    const Matrix *first = &p_.matrices[o.matrix + o.width * expert], &down = first[o.width - 1];
    bool is_gated = !(o.flag & WITHOUT_GATE);
    int64_t middle = o.width == 2 && is_gated ? first->outputs / 2 : first->outputs;
    float* inputs = input_memory.of<float>(n * hidden + LANES);
    float* gates = gate_memory.of<float>(n * 2 * middle + LANES);
    float* inner = inner_memory.of<float>(n * middle + LANES);
    for (int64_t i = 0; i < n; i++)
      memcpy(inputs + i * hidden, at(o.input) + m.tokens[(size_t)(begin + i)] * hidden, (size_t)hidden * sizeof(float));
    Identity identity = (Identity)p_.identity;
    for (const Matrix* own = first; own < &down; own++)
      linear(threads, *own, identity, inputs, hidden, n, gates + (own - first) * middle, 2 * middle);
    each(threads, n, [&](int64_t i) {
      float* own = gates + i * 2 * middle;
      if (!is_gated) memcpy(own + middle, own, (size_t)middle * sizeof(float));
      gate(own, inner + i * middle, middle, o.activation);
    });
    linear(threads, down, identity, inner, middle, n, &p_.mixture.outputs[(size_t)(begin * hidden)], hidden);
  }

  // The experts of one token, ascending, and their weights; see `Router` of `inference_engine/kernels/routing.py`. If a
  // logit is not a number, no weight is one. Of equal scores the lower number comes first.
  static void choose(const Operation& o, const float* bias, const float* logits, int64_t count, int32_t* experts,
                     float* weights) {
    static thread_local Scratch score_memory, rank_memory;
    float *scores = score_memory.of<float>(count), *ranks = rank_memory.of<float>(count);
    int chosen = o.heads;
    float total = 0.0f, kept = 0.0f;
    bool is_sigmoid = o.flag & SIGMOID_SCORES;
    float most = logits[0];
    for (int64_t i = 1; i < count; i++) most = std::max(most, logits[i]);
    for (int64_t i = 0; i < count; i++)
      total += scores[i] = is_sigmoid ? 1.0f / (1.0f + std::exp(-logits[i])) : std::exp(logits[i] - most);
    if (!std::isfinite(total)) {
      for (int i = 0; i < chosen; i++) experts[i] = i, weights[i] = total - total;
      return;
    }
    if (is_sigmoid) total = 1.0f;
    bool is_grouped = o.chosen_groups < o.groups;
    memcpy(ranks, logits, (size_t)count * sizeof(float));
    if (bias || is_grouped)
      for (int64_t i = 0; i < count; i++) ranks[i] = scores[i] / total + (bias ? bias[i] : 0.0f);
    if (is_grouped) keep_groups(ranks, count / o.groups, o.groups, o.chosen_groups);
    for (int i = 0; i < chosen; i++) {
      int64_t best = 0;
      for (int64_t e = 1; e < count; e++) if (ranks[e] > ranks[best]) best = e;
      ranks[best] = -INFINITY;
      float weight = scores[best] / total;
      kept += weight;
      int at = i;  // among those before it, which are in ascending order
      for (; at > 0 && experts[at - 1] > best; at--) experts[at] = experts[at - 1], weights[at] = weights[at - 1];
      experts[at] = (int32_t)best, weights[at] = weight;
    }
    float whole = o.flag & SUMS_TO_ONE ? kept + 1e-20f : 1.0f;
    for (int i = 0; i < chosen; i++) weights[i] = weights[i] / whole * o.number;
  }

  // Leaves those groups whose two best ranks have the largest sums.
  static void keep_groups(float* ranks, int64_t size, int groups, int chosen) {
    static thread_local Scratch memory;
    float* sums = memory.of<float>(groups);
    for (int g = 0; g < groups; g++) {
      float first = -INFINITY, second = -INFINITY;
      for (int64_t i = 0; i < size; i++) {
        float rank = ranks[g * size + i];
        if (rank > first) second = first, first = rank;
        else second = std::max(second, rank);
      }
      sums[g] = size > 1 ? first + second : first;
    }
    for (int left = groups - chosen; left > 0; left--) {
      int worst = -1;
      for (int g = 0; g < groups; g++)
        if (sums[g] != INFINITY && (worst < 0 || sums[g] <= sums[worst])) worst = g;
      sums[worst] = INFINITY;
      std::fill(ranks + worst * size, ranks + (worst + 1) * size, -INFINITY);
    }
  }
};

static void run(Program& program, const Step& step, int32_t first, int32_t end) { Run(program, step).run(first, end); }

}  // namespace KERNELS
