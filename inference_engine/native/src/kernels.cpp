// Every kernel, for one level of instructions: compiled once for each, with KERNELS naming it.
#include "simd.h"
#include "threads.h"
#include "types.h"

#include "attention.h"
#include "coded.h"
#include "matrix.h"
#include "restoring.h"
#include "selection.h"
#include "step.h"
#include "trellis.h"
#include "weigh.h"

#define PASTE(a, b) a##b
#define NAMED(a, b) PASTE(a, b)

extern "C" const Kernels* NAMED(kernels_, KERNELS)() {
  static const Kernels table = {
      KERNELS::LEVEL,
      KERNELS::linear,
      KERNELS::row,
      KERNELS::attend,
      KERNELS::decompress,
      KERNELS::compress,
      KERNELS::restore_run,
      KERNELS::choose_codes,
      KERNELS::weigh,
      KERNELS::run,
      KERNELS::settle,
  };
  return &table;
}
