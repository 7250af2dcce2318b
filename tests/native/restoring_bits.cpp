// The bits of entries that come back from their codes, over odd sizes and the largest whole numbers. Compiled for each
// level of instructions, with KERNELS naming it, by `test_other_processors.py`: all have to print the same lines.
#include <cstdio>
#include <cstring>
#include <tuple>

#include "restoring.h"
#include "pack.cpp"

using namespace KERNELS;

constexpr int32_t MOST = 8191, FIRST = 250;  // whole numbers; the position of place 0: turns of two coarse steps

static uint32_t drawn() {
  static uint64_t state = 1;
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(state >> 40);
}
static float noise() { return (float)((int32_t)drawn() - (1 << 23)) / (1 << 22); }  // within ±2, the same everywhere
static std::vector<float> noises(int64_t count) {
  std::vector<float> numbers((size_t)count);
  for (float& x : numbers) x = noise();
  return numbers;
}

struct Case {
  int count, chains, heads, dim, turned, tokens;
  bool is_largest;
};

// Of whole numbers, and of bytes and floats of 16 bits: what the product is made of.
enum Product { WHOLE, OF_BYTES, OF_FLOATS };

static std::vector<int16_t> whole_numbers(int64_t count, bool is_largest) {
  std::vector<int16_t> numbers((size_t)count);
  for (int16_t& x : numbers) x = (int16_t)(is_largest ? MOST : (int32_t)(drawn() % (2 * MOST + 1)) - MOST);
  return numbers;
}

static std::vector<uint8_t> whole_tiles(const Case& c, int64_t blocks) {
  std::vector<uint8_t> tiles((size_t)(c.heads * 2 * c.dim / LANES * blocks * restoring::WHOLE_BYTES));
  for (size_t at = 0; at < tiles.size(); at += restoring::WHOLE_BYTES) {
    std::vector<int16_t> pairs = whole_numbers(restoring::PAIRS * 32, c.is_largest);
    std::vector<float> scales = noises(LANES);
    for (float& scale : scales) scale = (scale + 2) / (1 << 26);
    memcpy(&tiles[at], pairs.data(), pairs.size() * 2);
    memcpy(&tiles[at + pairs.size() * 2], scales.data(), scales.size() * 4);
  }
  return tiles;
}

static void print(const Case& c, Product kind, int32_t kv_type, int threads) {
  std::vector<int32_t> octets, lefts, rights, tables;
  int32_t bit = 0, levels = 0;
  for (int i = 0; i < c.count; i++) {
    int32_t width = 1 + i % 6;
    octets.push_back(bit / 8), lefts.push_back(bit % 8), rights.push_back(32 - width), tables.push_back(levels);
    bit += width, levels += 2 << width;
  }
  LayerDecoder decoder = {};
  decoder.octets = octets.data(), decoder.lefts = lefts.data(), decoder.rights = rights.data();
  decoder.tables = tables.data(), decoder.count = c.count, decoder.chains = c.chains, decoder.first_byte = 3;
  decoder.bytes = 1 + (bit + 7) / 8, decoder.identity = kind == WHOLE ? EXACT : QUANTISED;
  std::vector<float> scales = noises(256), means = noises(c.heads * 2 * c.dim), numbers = noises(levels + 32);
  std::vector<int16_t> shorts = whole_numbers(levels + 64, c.is_largest);
  std::vector<uint8_t> whole = whole_tiles(c, restoring::whole_blocks(decoder));
  decoder.scales = scales.data(), decoder.means = means.data(), decoder.whole = whole.data();
  decoder.levels = kind == WHOLE ? (const void*)shorts.data() : numbers.data();
  std::vector<std::vector<uint8_t>> packed;
  std::vector<Matrix> matrices;
  for (int head = 0; head < c.heads && kind != WHOLE; head++) {
    std::vector<float> weights = noises(2 * c.dim * c.count);
    int32_t format = kind == OF_BYTES ? INT8 : FLOAT16;
    packed.emplace_back((size_t)kakeya_packed_bytes(format, 2 * c.dim, c.count) + 64);
    uint8_t* tiles = packed.back().data() + (64 - (uintptr_t)packed.back().data() % 64) % 64;
    if (kakeya_pack(format, FROM_FLOAT32, (const uint8_t*)weights.data(), 2 * c.dim, c.count, nullptr, tiles) != PACKED)
      printf("not packed\n");
    matrices.push_back({format, 2 * c.dim, c.count, 0, tiles});
  }
  decoder.matrices = matrices.data();

  int64_t half = (decoder.first_byte + decoder.bytes + 1) / 2;
  std::vector<uint8_t> low((size_t)((c.tokens + 2) * half)), high(low.size());
  for (uint8_t& byte : low) byte = (uint8_t)drawn();
  for (uint8_t& byte : high) byte = (uint8_t)drawn();
  std::vector<float> fine = noises(256 * c.turned), coarse = noises(4 * c.turned);
  int64_t apart = c.tokens + 1, bytes = c.heads * apart * c.dim * (kv_type == KV_FLOAT32 ? 4 : 2);
  std::vector<uint8_t> keys((size_t)bytes), values((size_t)bytes);
  RestoredRun run = {};
  run.codes = {low.data(), high.data(), half, FIRST}, run.turning = {fine.data(), coarse.data(), c.turned};
  run.decoder = &decoder, run.keys = keys.data(), run.values = values.data();
  run.first = FIRST + 2, run.count = c.tokens, run.apart = apart, run.row = c.dim;
  run.kv_heads = c.heads, run.head_dim = c.dim, run.kv_type = kv_type;
  Threads own(threads);
  bool is_finite = restore_run(own, run);
  uint64_t hash = 14695981039346656037ull;
  for (const std::vector<uint8_t>& all : {keys, values})
    for (uint8_t byte : all) hash = (hash ^ byte) * 1099511628211ull;
  printf("%d %d %d %d: %d %d %d %d: %d %016llx\n", kind, kv_type, threads, c.is_largest, c.count, c.heads, c.dim,
         c.tokens, is_finite, (unsigned long long)hash);
}

int main() {
  for (auto [count, chains, heads, dim, turned] :
       {std::tuple{1, 1, 1, 16, 16}, {37, 2, 2, 48, 24}, {64, 3, 1, 80, 80}, {131, 8, 2, 64, 64}})
    for (int tokens : {1, 5, 33, 150})
      for (Product kind : {WHOLE, OF_BYTES, OF_FLOATS})
        for (bool is_largest : {false, true}) {
          if (is_largest && kind != WHOLE) continue;
          for (int32_t kv_type : {KV_FLOAT32, KV_FLOAT16, KV_BFLOAT16})
            print({count, chains, heads, dim, turned, tokens, is_largest}, kind, kv_type, 1 + tokens % 2);
        }
}
