// Codes of a latent, chosen along a trellis: the contract is `choose` of `inference_engine/kernels/trellis.py`, whose
// operations and their order these are, so that the codes are the same.
//
// A lane is a vector. A chain's numbers are taken one after another: the nearest level of each subset, what it costs, and
// the cheapest way into each of the 8 states.
#pragma once
#include <cstring>
#include <limits>
#include <vector>

#include "simd.h"
#include "threads.h"
#include "types.h"

namespace KERNELS {
namespace trellis {

constexpr int SUBSETS = 4, STATES = 8;
constexpr int32_t SEARCHED = 64;  // levels from which on halving is faster than looking at each

// The subset that u leads to from a state: 2 · (u ⊕ u₋₁ ⊕ u₋₃) + u₋₂.
constexpr int subset_of(int branch) {
  int u = branch & 1, state = branch >> 1;
  return ((u ^ (state & 1) ^ ((state >> 2) & 1)) << 1) | ((state >> 1) & 1);
}

// How many of the middles between neighbours of a subset's `count` levels are less than a number.
static int32_t search(const float* own, int32_t count, float number) {
  int32_t least = 0, most = count - 1;
  while (least < most) {
    int32_t half = (least + most) / 2;
    bool is_less = (own[SUBSETS * (half + 1)] + own[SUBSETS * half]) / 2 < number;
    least = is_less ? half + 1 : least;
    most = is_less ? most : half;
  }
  return least;
}

INLINE void cost(const float* __restrict numbers, const float* __restrict level, const int32_t* __restrict index,
                 float weight, uint16_t* __restrict nearest, float* __restrict costs) {
  for (int lane = 0; lane < LANES; lane++) {
    float missed = numbers[lane] - level[lane];
    nearest[lane] = (uint16_t)index[lane];
    costs[lane] = missed * missed * weight;
  }
}

// Of the numbers of LANES vectors, the nearest level of each subset, counted in the subset, and what it costs.
static void near(const float* __restrict numbers, const float* table, int32_t size, float weight,
                 uint16_t* __restrict nearest, float* __restrict costs) {
  for (int subset = 0; subset < SUBSETS; subset++) {
    const float* own = table + subset;
    int32_t index[LANES];
    float level[LANES];
    if (size > SEARCHED) {
      for (int lane = 0; lane < LANES; lane++) index[lane] = search(own, (size + SUBSETS - 1 - subset) / SUBSETS, numbers[lane]);
      for (int lane = 0; lane < LANES; lane++) level[lane] = own[SUBSETS * index[lane]];
      cost(numbers, level, index, weight, nearest + subset * LANES, costs + subset * LANES);
      continue;
    }
    for (int lane = 0; lane < LANES; lane++) index[lane] = 0, level[lane] = own[0];
    for (int32_t next = SUBSETS; next < size - subset; next += SUBSETS) {
      float middle = (own[next] + own[next - SUBSETS]) / 2, other = own[next];
      for (int lane = 0; lane < LANES; lane++) {
        index[lane] += middle < numbers[lane];
        level[lane] = middle < numbers[lane] ? other : level[lane];
      }
    }
    cost(numbers, level, index, weight, nearest + subset * LANES, costs + subset * LANES);
  }
}

// One number further: what the states have spent, and for each of them if it came from the upper half.
static void advance(const float* __restrict costs, float* __restrict spent, uint8_t* __restrict from_above) {
  float next[STATES * LANES], least[LANES];
  int32_t above[LANES] = {};
  for (int state = 0; state < STATES; state++) {
    int below = state, upper = state + STATES;  // branches
    const float *cost = costs + subset_of(below) * LANES, *other = costs + subset_of(upper) * LANES;
    const float *from = spent + (below >> 1) * LANES, *others = spent + (upper >> 1) * LANES;
    for (int lane = 0; lane < LANES; lane++) {
      float a = cost[lane] + from[lane], b = other[lane] + others[lane];
      above[lane] |= (b < a) << state;
      next[state * LANES + lane] = b < a ? b : a;
    }
  }
  for (int lane = 0; lane < LANES; lane++) least[lane] = next[lane];
  for (int state = 1; state < STATES; state++)
    for (int lane = 0; lane < LANES; lane++) {
      float own = next[state * LANES + lane];
      least[lane] = own < least[lane] ? own : least[lane];
    }
  for (int state = 0; state < STATES; state++)
    for (int lane = 0; lane < LANES; lane++) spent[state * LANES + lane] = next[state * LANES + lane] - least[lane];
  for (int lane = 0; lane < LANES; lane++) from_above[lane] = (uint8_t)above[lane];
}

// At most LANES vectors from `first` on.
static void choose(const TrellisCodes& given, int64_t first, int64_t vectors, std::vector<float>& numbers,
                   std::vector<uint16_t>& nearest, std::vector<uint8_t>& from_above) {
  int64_t count = given.count, chains = given.chains, steps = (count + chains - 1) / chains;
  numbers.assign((size_t)(count * LANES), 0.0f);
  for (int64_t lane = 0; lane < vectors; lane++)
    for (int64_t c = 0; c < count; c++) numbers[(size_t)(c * LANES + lane)] = given.numbers[(first + lane) * count + c];
  nearest.resize((size_t)(steps * SUBSETS * LANES));
  from_above.resize((size_t)(steps * LANES));
  for (int64_t chain = 0; chain < chains; chain++) {
    float spent[STATES * LANES], costs[SUBSETS * LANES];
    for (int lane = 0; lane < LANES; lane++) spent[lane] = 0.0f;
    for (int at = LANES; at < STATES * LANES; at++) spent[at] = std::numeric_limits<float>::infinity();
    for (int64_t step = 0; step < steps; step++) {
      int64_t c = step * chains + chain;
      uint16_t* own = nearest.data() + step * SUBSETS * LANES;
      if (c < count) {
        near(numbers.data() + c * LANES, given.values + given.first[c], given.size[c], given.weights[c], own, costs);
      } else {  // a chain that has ended goes on at no cost
        memset(own, 0, SUBSETS * LANES * sizeof *own);
        memset(costs, 0, sizeof costs);
      }
      advance(costs, spent, from_above.data() + step * LANES);
    }
    for (int64_t lane = 0; lane < vectors; lane++) {
      int state = 0;
      for (int other = 1; other < STATES; other++)
        if (spent[other * LANES + lane] < spent[state * LANES + lane]) state = other;
      for (int64_t step = steps - 1; step >= 0; step--) {
        int branch = state | ((from_above[(size_t)(step * LANES + lane)] >> state & 1) << 3);
        int64_t c = step * chains + chain;
        if (c < count) {
          int32_t index = nearest[(size_t)((step * SUBSETS + subset_of(branch)) * LANES + lane)];
          given.codes[(first + lane) * count + c] = index << 1 | (branch & 1);
        }
        state = branch >> 1;
      }
    }
  }
}

}  // namespace trellis

static void choose_codes(Threads& threads, const TrellisCodes& given) {
  int64_t blocks = (given.vectors + LANES - 1) / LANES;
  threads.split(blocks, 1, [&](int64_t block, int64_t end) {
    static thread_local std::vector<float> numbers;
    static thread_local std::vector<uint16_t> nearest;
    static thread_local std::vector<uint8_t> from_above;
    for (; block < end; block++) {
      int64_t first = block * LANES;
      trellis::choose(given, first, std::min((int64_t)LANES, given.vectors - first), numbers, nearest, from_above);
    }
  });
}

}  // namespace KERNELS
