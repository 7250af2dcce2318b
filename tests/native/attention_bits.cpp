// The bits of attention over odd sizes: tiles of queries that see all, and queries that choose blocks. Compiled for each
// level of instructions, with KERNELS naming it, by `test_other_processors.py`: all have to print the same lines.
#include <cstdio>
#include <tuple>

#include "blocks.h"

using namespace KERNELS;
using namespace KERNELS::attention;

static float noise() {  // within ±2, the same everywhere
  static uint64_t state = 1;
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (float)((int64_t)(state >> 40) - (1 << 23)) / (1 << 22);
}

template <class T>
struct Stored;
template <>
struct Stored<float> {
  static constexpr int32_t type = KV_FLOAT32;
  static float of(float x) { return x; }
};
template <>
struct Stored<Half> {
  static constexpr int32_t type = KV_FLOAT16;
  static Half of(float x) { return {to_f16(x)}; }
};
template <>
struct Stored<Brain> {
  static constexpr int32_t type = KV_BFLOAT16;
  static Brain of(float x) { return {to_bf16(x)}; }
};

struct Case {
  int group, heads, dim, length, queries, block, threads;
  float softcap;
};

template <class T>
static void print(const Case& c) {
  int64_t slots = c.length + (c.length + 3) / 4 + 1, width = (int64_t)c.heads * c.group * c.dim;
  std::vector<T> keys(slots * c.heads * c.dim), values(keys.size());
  for (T& x : keys) x = Stored<T>::of(noise());
  for (T& x : values) x = Stored<T>::of(noise());
  std::vector<float> queries(c.queries * width), out(queries.size());
  for (float& x : queries) x = noise() * 2;
  std::vector<int64_t> lines(c.queries * FIELDS);
  for (int i = 0; i < c.queries; i++) {
    int64_t *line = &lines[i * FIELDS], upto = c.length - c.queries + i;
    line[HEAD_SLOTS] = slots, line[COUNT] = c.length, line[UPTO] = upto, line[LAST] = c.length - 1;
    if (!c.block) continue;
    line[KIND] = BLOCK_READ, line[attention::BLOCK] = c.block, line[SINK] = 5, line[KEPT] = 3 + i, line[BOUNDS] = c.length;
    line[LOCAL] = std::max<int64_t>(0, (upto - 40) / c.block * c.block);
  }
  Attention call = {};
  call.queries = queries.data(), call.keys = keys.data(), call.values = values.data(), call.regions = lines.data();
  call.out = out.data(), call.count = c.queries, call.query_stride = call.out_stride = width, call.region_stride = FIELDS;
  call.query_heads = c.heads * c.group, call.kv_heads = c.heads, call.head_dim = call.value_dim = c.dim;
  call.row = c.dim;
  call.kv_type = Stored<T>::type, call.scaling = 0.125f, call.softcap = c.softcap;
  Threads threads(c.threads);
  attend_as<T>(threads, call);
  blocks::attend_all<T>(threads, call);
  uint64_t hash = 14695981039346656037ull;
  for (float x : out) {
    uint32_t word;
    memcpy(&word, &x, 4);
    hash = (hash ^ word) * 1099511628211ull;
  }
  printf("%d: %d %d %d %d %d %d %g: %016llx\n", Stored<T>::type, c.group, c.heads, c.dim, c.length, c.queries, c.block,
         c.softcap, (unsigned long long)hash);
}

int main() {
  for (int threads : {1, 2})
    for (auto [group, heads, dim] : {std::tuple{3, 3, 64}, {1, 2, 16}, {8, 1, 80}, {7, 2, 48}, {4, 1, 256}})
      for (auto [length, queries] : {std::tuple{700, 3}, {300, 17}, {1, 1}, {40, 2}, {1500, 1}})
        for (int block : {0, 4, 16})
          for (float softcap : {0.0f, 4.0f}) {
            Case one = {group, heads, dim, length, queries, block, threads, softcap};
            print<float>(one), print<Half>(one), print<Brain>(one);
          }
}
