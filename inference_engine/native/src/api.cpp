// The functions that Python calls. Plain C: the library depends on no version of Python.
#include <cstring>

#include "threads.h"
#include "types.h"

namespace {

bool runs(const char* level) {
#if defined(__x86_64__)
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!strcmp(level, "avx2")) return avx2;
  if (!strcmp(level, "avx512"))
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#endif
  return !strcmp(level, "plain");
}

}  // namespace

extern "C" {

// The kernels of a level; null if this processor, or this build, has none.
const Kernels* kakeya_kernels(const char* level) {
  if (!runs(level)) return nullptr;
#if defined(__x86_64__)
  if (!strcmp(level, "avx512")) return kernels_avx512();
  if (!strcmp(level, "avx2")) return kernels_avx2();
#endif
  return kernels_plain();
}

void* kakeya_open_threads(int32_t count) { return new Threads(count); }
void kakeya_close_threads(void* threads) { delete (Threads*)threads; }

void kakeya_linear(const Kernels* kernels, void* threads, const Matrix* matrix, int32_t identity, const float* x,
                   int64_t count, float* y) {
  kernels->linear(*(Threads*)threads, *matrix, (Identity)identity, x, matrix->inputs, count, y, matrix->outputs);
}

void kakeya_row(const Kernels* kernels, const Matrix* matrix, int64_t output, float* out) {
  kernels->row(*matrix, output, out);
}

void kakeya_attend(const Kernels* kernels, void* threads, const Attention* attention) {
  kernels->attend(*(Threads*)threads, *attention);
}

}  // extern "C"
