// The Walsh-Hadamard transform of one row.
#pragma once

#include "cpu/numeric.h"

namespace kvarn::cpu::KVARN_ISA {
namespace {

/// The transform of x [dim] in Sylvester order, not scaled; returns x or y, whichever holds it, the
/// other one is overwritten. Every stage is the same (Pease): butterflies of the two halves, their
/// results side by side, so that all of them are loops over neighbours. Never inlined: GCC then
/// forgets that x and y do not overlap and leaves the loop scalar.
__attribute__((noinline)) float* walsh_hadamard(float* __restrict x, float* __restrict y, int dim) {
  for (int stage = 1; stage < dim; stage *= 2) {
    const int half = dim / 2;
#pragma omp simd
    for (int i = 0; i < half; ++i) {
      const float a = x[i];
      const float b = x[i + half];
      y[2 * i] = a + b;
      y[2 * i + 1] = a - b;
    }
    float* const swap = x;
    x = y;
    y = swap;
  }
  return x;
}

inline void hadamard(const void* x, int64_t x_offset, void* out, int64_t out_offset, DType dtype,
                     int dim, float scale, float* scratch) {
  load_row(x, dtype, x_offset, scratch, dim);
  // Scaled first: what overflows then is infinite in the result too.
#pragma omp simd
  for (int i = 0; i < dim; ++i) scratch[i] *= scale;
  store_row(walsh_hadamard(scratch, scratch + dim, dim), out, dtype, out_offset, dim);
}

}  // namespace
}  // namespace kvarn::cpu::KVARN_ISA
