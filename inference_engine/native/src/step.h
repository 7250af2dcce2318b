// A step of a model: a list of operations over registers, run by one call (`inference_engine/models/step_list.py` makes it).
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
    auto part = [&](int64_t first, int64_t end) {
      for (int64_t token = first; token < end; token++) body(token);
    };
    if (count < 8) part(0, count);
    else p_.threads->split(count, 1, part);
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
      float* cosines = turns.data() + token * rotary.turned;
      for (int64_t i = 0; i < half; i++) {
        double angle = position < rotary.trained ? (double)((float)position * rotary.frequencies[i])
                                                 : (double)position * (double)rotary.frequencies[i];
        cosines[i] = (float)std::cos(angle) * rotary.factor;
        cosines[half + i] = (float)std::sin(angle) * rotary.factor;
      }
    });
  }

  void one(const Operation& o) {
    switch (o.kind) {
      case EMBED: return embed(o);
      case NORM: return norms(o);
      case LINEAR: return product(o);
      case ROTATE: return turn(o);
      case ATTEND: return attention(o);
      case ADD: return sum_up(o);
      case GATED: return gated(o);
      case TAP: return tap(o);
      case SELECT: return select(o);
      case SOFTCAP: return cap(o);
      case EXPERTS: return experts(o);
      case GIVEN: return given(o);
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
    int64_t dim = layer.head_dim;
    const float* values = keys + layer.kv_heads * dim;
    const int64_t* writes = s_.writes[index];
    each(tokens_, [&](int64_t token) {
      for (int64_t head = 0; head < layer.kv_heads; head++) {
        int64_t place = writes[token * layer.kv_heads + head];
        put(p_.kv_type, s_.keys, place, keys + token * stride + head * dim, dim);
        put(p_.kv_type, s_.values, place, values + token * stride + head * dim, dim);
      }
    });
  }

  // input: queries, keys and values of each token, one behind the other.
  void attention(const Operation& o) {
    const Layer& layer = p_.layers[o.layer];
    const float* in = at(o.input);
    int64_t stride = width(o.input), dim = layer.head_dim;
    write(layer, o.layer, in + layer.query_heads * dim, stride);
    Attention what = {};
    what.queries = in;
    what.keys = s_.keys;
    what.values = s_.values;
    what.regions = s_.regions + o.layer * tokens_ * 16;
    what.head_sinks = o.vector < 0 ? nullptr : p_.vectors[o.vector];
    what.out = at(o.output);
    what.count = tokens_;
    what.query_stride = stride;
    what.region_stride = 16;
    what.out_stride = width(o.output);
    what.query_heads = layer.query_heads;
    what.kv_heads = layer.kv_heads;
    what.head_dim = layer.head_dim;
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

  void gate(const float* x, float* y, int64_t count, int32_t activation) {
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

  // A mixture of experts: `second` has the router's logits. An expert has `width` matrices: gate and up below each other,
  // and down, or all three. A token's experts are added up in the order of their numbers.
  void experts(const Operation& o) {
    int64_t count = width(o.second), chosen = o.heads, hidden = width(o.input);
    std::vector<float> shares((size_t)(tokens_ * count), 0.0f);
    const float* router = at(o.second);
    for (int64_t token = 0; token < tokens_; token++) share(router + token * count, count, chosen, o.flag, &shares[(size_t)(token * count)]);
    float* out = at(o.output);
    std::fill(out, out + tokens_ * hidden, 0.0f);
    std::vector<int64_t> mine;
    std::vector<float> inputs, gates, inner, outputs;
    for (int64_t expert = 0; expert < count; expert++) {
      mine.clear();
      for (int64_t token = 0; token < tokens_; token++)
        if (shares[(size_t)(token * count + expert)] != 0.0f) mine.push_back(token);
      if (mine.empty()) continue;
      const Matrix *first = &p_.matrices[o.matrix + o.width * expert], &down = first[o.width - 1];
      int64_t n = (int64_t)mine.size(), middle = o.width == 2 ? first->outputs / 2 : first->outputs;
      inputs.resize((size_t)(n * hidden) + LANES);
      gates.resize((size_t)(n * 2 * middle) + LANES);
      inner.resize((size_t)(n * middle) + LANES);
      outputs.resize((size_t)(n * hidden) + LANES);
      for (int64_t i = 0; i < n; i++)
        memcpy(&inputs[(size_t)(i * hidden)], at(o.input) + mine[(size_t)i] * hidden, (size_t)hidden * sizeof(float));
      Identity identity = (Identity)p_.identity;
      for (const Matrix* own = first; own < &down; own++)
        linear(*p_.threads, *own, identity, inputs.data(), hidden, n, gates.data() + (own - first) * middle, 2 * middle);
      each(n, [&](int64_t i) { gate(&gates[(size_t)(i * 2 * middle)], &inner[(size_t)(i * middle)], middle, o.activation); });
      linear(*p_.threads, down, identity, inner.data(), middle, n, outputs.data(), hidden);
      each(n, [&](int64_t i) {
        float share = shares[(size_t)(mine[(size_t)i] * count + expert)];
        float* y = out + mine[(size_t)i] * hidden;
        const float* x = &outputs[(size_t)(i * hidden)];
        for (int64_t d = 0; d < hidden; d++) y[d] += x[d] * share;
      });
    }
  }

  // Softmax over all experts; the `chosen` largest keep their share, the lower number first among equals. If a logit is
  // not a number, no share is one.
  static void share(const float* logits, int64_t count, int64_t chosen, bool sums_to_one, float* shares) {
    float most = logits[0], total = 0.0f;
    for (int64_t i = 1; i < count; i++) most = std::max(most, logits[i]);
    std::vector<float> weights((size_t)count);
    for (int64_t i = 0; i < count; i++) total += weights[(size_t)i] = std::exp(logits[i] - most);
    if (!std::isfinite(total)) {
      std::fill(shares, shares + count, total - total);
      return;
    }
    std::vector<int64_t> order((size_t)count);
    for (int64_t i = 0; i < count; i++) order[(size_t)i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
    float kept = 0.0f;
    for (int64_t i = 0; i < chosen; i++) kept += weights[(size_t)order[(size_t)i]] / total;
    for (int64_t i = 0; i < chosen; i++) {
      int64_t expert = order[(size_t)i];
      shares[expert] = weights[(size_t)expert] / total / (sums_to_one ? kept : 1.0f);
    }
  }
};

static void run(Program& program, const Step& step, int32_t first, int32_t end) { Run(program, step).run(first, end); }

}  // namespace KERNELS
