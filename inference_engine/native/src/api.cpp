// The functions that Python calls. Plain C: the library depends on no version of Python.
#include <cstring>
#include <new>

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

void* kakeya_open_program(const Kernels* kernels, void* threads, int32_t identity, int32_t kv_type,
                          const Operation* operations, int64_t operation_count, const Matrix* matrices,
                          int64_t matrix_count, const float* const* vectors, int64_t vector_count, const Layer* layers,
                          int64_t layer_count, const Rotary* rotaries, int64_t rotary_count, const int64_t* widths,
                          int64_t register_count) {
  Program* program = new Program();
  program->kernels = kernels;
  program->threads = (Threads*)threads;
  program->identity = identity;
  program->kv_type = kv_type;
  program->operations.assign(operations, operations + operation_count);
  program->matrices.assign(matrices, matrices + matrix_count);
  program->vectors.assign(vectors, vectors + vector_count);
  program->layers.assign(layers, layers + layer_count);
  program->rotaries.assign(rotaries, rotaries + rotary_count);
  program->widths.assign(widths, widths + register_count);
  program->registers.resize((size_t)register_count);
  program->turns.resize((size_t)rotary_count);
  return program;
}

void kakeya_close_program(void* program) { delete (Program*)program; }

// Runs the operations [first, end) of a step; a run begins with operation 0. -1: there is no memory for its registers.
int32_t kakeya_run(void* program, const Step* step, int32_t first, int32_t end) {
  Program& opened = *(Program*)program;
  try {
    opened.kernels->run(opened, *step, first, end);
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return 0;
}

// The numbers of a register, [tokens][width]: valid until the next step.
float* kakeya_register(void* program, int32_t index) { return ((Program*)program)->registers[(size_t)index].data(); }

}  // extern "C"
