// The functions that Python calls. Plain C: the library depends on no version of Python.
#include <cstring>
#include <exception>

#include "threads.h"
#include "types.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

// From the build: EACH(name) for every level that is compiled, which ones were asked for, and the fingerprint of what it
// is compiled from.
#if !defined(LEVELS) || !defined(COMPILED_FOR) || !defined(FINGERPRINT)
#error "compile with `python -m inference_engine.native.build`"
#endif

namespace {

#if defined(__x86_64__)
// The processor and the system, which has to save the wide registers. Not asked of the compiler's own runtime, which
// some compilers do not bring.
struct Processor {
  bool avx2 = false, avxvnni = false, avx512 = false;

  Processor() {
    unsigned a, b, c, d, b7, c7, d7, states, high, leaves;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const unsigned needed = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29;  // fma, xgetbv, avx, f16c
    if ((c & needed) != needed || !__get_cpuid_count(7, 0, &leaves, &b7, &c7, &d7)) return;
    asm volatile("xgetbv" : "=a"(states), "=d"(high) : "c"(0));
    avx2 = (states & 0x06) == 0x06 && b7 >> 5 & 1;
    avxvnni = avx2 && leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
    const unsigned wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // avx512 f, dq, bw, vl
    avx512 = avx2 && (states & 0xe6) == 0xe6 && (b7 & wide) == wide && c7 >> 11 & 1;  // vnni
  }
};
#endif

// Whether this machine has the instructions of a level.
bool runs(const char* level) {
#if defined(__x86_64__)
  static const Processor processor;
  if (!strcmp(level, "avx2")) return processor.avx2;
  if (!strcmp(level, "avxvnni")) return processor.avxvnni;
  if (!strcmp(level, "avx512")) return processor.avx512;
#elif defined(__aarch64__) && defined(__linux__)
  const unsigned long needed = 1ul << 8 | 1ul << 20;  // atomics, which armv8.2-a has, and dotprod
  bool neon = (getauxval(AT_HWCAP) & needed) == needed;
  if (!strcmp(level, "neon")) return neon;
  if (!strcmp(level, "i8mm")) return neon && getauxval(AT_HWCAP2) >> 13 & 1;
#elif defined(__aarch64__) && defined(__APPLE__)
  auto has = [](const char* feature) {
    int value = 0;
    size_t size = sizeof value;
    return !sysctlbyname(feature, &value, &size, nullptr, 0) && value;
  };
  bool neon = has("hw.optional.arm.FEAT_DotProd");
  if (!strcmp(level, "neon")) return neon;
  if (!strcmp(level, "i8mm")) return neon && has("hw.optional.arm.FEAT_I8MM");
#endif
  return !strcmp(level, "plain");
}

// 0, or -1 if body throws: out of memory, as nothing else here throws. Python's calls cannot be unwound.
template <class Body>
int32_t guarded(const Body& body) {
  try {
    body();
  } catch (const std::exception&) {
    return -1;
  }
  return 0;
}

}  // namespace

// -1, or null for what is opened: there is no memory for it.
extern "C" {

// The fingerprint of the sources, as `inference_engine/native/build.py` makes it.
const char* kakeya_sources() { return FINGERPRINT; }

// Read from the file, too (`is_current` there).
const char* kakeya_compiled_for() { return "compiled for " COMPILED_FOR; }

// 1 if this machine has the instructions of a level, whether it is compiled or not.
int32_t kakeya_runs(const char* level) { return runs(level); }

// Of the structures that Python fills in.
void kakeya_sizes(int64_t* sizes) {
  const int64_t found[] = {sizeof(Matrix), sizeof(Attention), sizeof(Operation),
                           sizeof(Layer),  sizeof(Rotary),    sizeof(Step), sizeof(CodedEntries),
                           sizeof(KeyIndex), sizeof(LayerDecoder), sizeof(Archive), sizeof(RestoredRun),
                           sizeof(TrellisCodes), sizeof(StateLayer), sizeof(StateSpan)};
  memcpy(sizes, found, sizeof found);
}

// The kernels of a level; null if this processor, or this build, has none.
const Kernels* kakeya_kernels(const char* level) {
#define EACH(name) \
  if (!strcmp(level, #name) && runs(#name)) return kernels_##name();
  LEVELS
#undef EACH
  return nullptr;
}

void* kakeya_open_threads(int32_t count) {
  Threads* threads = nullptr;
  guarded([&] { threads = new Threads(count); });
  return threads;
}
int32_t kakeya_count_threads(const void* threads) { return ((const Threads*)threads)->count(); }
void kakeya_close_threads(void* threads) { delete (Threads*)threads; }

int32_t kakeya_linear(const Kernels* kernels, void* threads, const Matrix* matrix, int32_t identity, const float* x,
                      int64_t count, float* y) {
  return guarded([&] {
    kernels->linear(*(Threads*)threads, *matrix, (Identity)identity, x, matrix->inputs, count, y, matrix->outputs);
  });
}

void kakeya_row(const Kernels* kernels, const Matrix* matrix, int64_t output, float* out) {
  kernels->row(*matrix, output, out);
}

int32_t kakeya_attend(const Kernels* kernels, void* threads, const Attention* attention) {
  return guarded([&] { kernels->attend(*(Threads*)threads, *attention); });
}

int32_t kakeya_decompress(const Kernels* kernels, void* threads, const CodedEntries* entries) {
  return guarded([&] { kernels->decompress(*(Threads*)threads, *entries); });
}

int32_t kakeya_weigh(const Kernels* kernels, void* threads, const float* const* rows,
                     const uint8_t* const* masks, const float* scales, int64_t count, int64_t width, int64_t room,
                     int64_t* ids, int64_t* found, double* rest) {
  return guarded([&] { kernels->weigh(*(Threads*)threads, rows, masks, scales, count, width, room, ids, found, rest); });
}

// 1 if an entry is not finite.
int32_t kakeya_compress(const Kernels* kernels, void* threads, const CodedEntries* entries) {
  bool is_finite = true;
  int32_t fails = guarded([&] { is_finite = kernels->compress(*(Threads*)threads, *entries); });
  return fails ? fails : !is_finite;
}

int32_t kakeya_restore(const Kernels* kernels, void* threads, const RestoredRun* run) {
  bool is_finite = true;
  int32_t fails = guarded([&] { is_finite = kernels->restore(*(Threads*)threads, *run); });
  return fails ? fails : !is_finite;
}

int32_t kakeya_choose(const Kernels* kernels, void* threads, const TrellisCodes* codes) {
  return guarded([&] { kernels->choose(*(Threads*)threads, *codes); });
}

void* kakeya_open_program(const Kernels* kernels, void* threads, int32_t identity, int32_t kv_type,
                          const Operation* operations, int64_t operation_count, const Matrix* matrices,
                          int64_t matrix_count, const float* const* vectors, int64_t vector_count, const Layer* layers,
                          int64_t layer_count, const Rotary* rotaries, int64_t rotary_count, const StateLayer* states,
                          int64_t state_count, const int64_t* widths, int64_t register_count) {
  Program* program = nullptr;
  bool fails = guarded([&] {
    program = new Program();
    program->kernels = kernels;
    program->threads = (Threads*)threads;
    program->identity = identity;
    program->kv_type = kv_type;
    program->operations.assign(operations, operations + operation_count);
    program->matrices.assign(matrices, matrices + matrix_count);
    program->vectors.assign(vectors, vectors + vector_count);
    program->layers.assign(layers, layers + layer_count);
    program->rotaries.assign(rotaries, rotaries + rotary_count);
    program->states.assign(states, states + state_count);
    program->widths.assign(widths, widths + register_count);
    program->registers.resize((size_t)register_count);
    program->turns.resize((size_t)rotary_count);
  });
  if (fails) {
    delete program;
    program = nullptr;
  }
  return program;
}

void kakeya_close_program(void* program) { delete (Program*)program; }

// Runs the operations [first, end) of a step; a run begins with operation 0.
int32_t kakeya_run(void* program, const Step* step, int32_t first, int32_t end) {
  Program& opened = *(Program*)program;
  return guarded([&] { opened.kernels->run(opened, *step, first, end); });
}

// The states of one session, between two steps: see states.h.
int32_t kakeya_settle(void* program, float* states, int64_t held, int64_t kept, int64_t staged) {
  Program& opened = *(Program*)program;
  return guarded([&] { opened.kernels->settle(*opened.threads, opened.states, states, held, kept, staged); });
}

// The numbers of a register, [tokens][width]: valid until the next step.
float* kakeya_register(void* program, int32_t index) { return ((Program*)program)->registers[(size_t)index].data(); }

}  // extern "C"
