// Which of the levels named by the arguments a library runs here, the best first, each with a hash of the bits of its
// products. Linked with a library that `build.py` has made for another processor, by `test_other_processors.py`.
#include <cstdio>
#include <cstring>
#include <vector>

#include "types.h"

extern "C" {
const Kernels* kakeya_kernels(const char* level);
void* kakeya_open_threads(int32_t count);
void kakeya_close_threads(void* threads);
int64_t kakeya_packed_bytes(int32_t format, int64_t outputs, int64_t inputs);
int32_t kakeya_pack(int32_t format, int32_t source, const uint8_t* data, int64_t outputs, int64_t inputs,
                    const int64_t* order, uint8_t* tiles);
int32_t kakeya_linear(const Kernels* kernels, void* threads, const Matrix* matrix, int32_t identity, const float* x,
                      int64_t count, float* y);
}

static uint64_t state, hash;

static float noise() {  // within ±2, the same everywhere
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (float)((int64_t)(state >> 40) - (1 << 23)) / (1 << 22);
}

static void add_products(const Kernels* kernels, void* threads, int32_t format, int64_t outputs, int64_t inputs) {
  std::vector<float> weights((size_t)(outputs * inputs));
  for (float& w : weights) w = noise();
  std::vector<uint8_t> memory((size_t)kakeya_packed_bytes(format, outputs, inputs) + 64);
  uint8_t* tiles = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
  kakeya_pack(format, FROM_FLOAT32, (const uint8_t*)weights.data(), outputs, inputs, nullptr, tiles);
  Matrix matrix = {format, (int32_t)outputs, (int32_t)inputs, 0, tiles};
  for (int64_t count : {1, 2, 3, 4, 9, 21}) {
    std::vector<float> x((size_t)(count * inputs)), y((size_t)(count * outputs));
    for (float& one : x) one = noise();
    for (int32_t identity : {EXACT, QUANTISED}) {
      kakeya_linear(kernels, threads, &matrix, identity, x.data(), count, y.data());
      for (const float& one : y) {
        uint32_t word;
        memcpy(&word, &one, 4);
        hash = (hash ^ word) * 1099511628211ull;
      }
    }
  }
}

int main(int count, char** levels) {
  for (int i = 1; i < count; i++) {
    const Kernels* kernels = kakeya_kernels(levels[i]);
    if (!kernels) continue;
    state = 1, hash = 14695981039346656037ull;
    void* threads = kakeya_open_threads(2);
    for (int32_t format = 0; format < FORMATS; format++) {
      add_products(kernels, threads, format, 17, 33);
      add_products(kernels, threads, format, 37, 160);
    }
    kakeya_close_threads(threads);
    printf("%s %016llx\n", levels[i], (unsigned long long)hash);
  }
}
