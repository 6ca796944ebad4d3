// Butterflies of the fast Walsh-Hadamard transform (Sylvester order) over a vector that lies in
// the registers of several lanes. A stage of distance d replaces the elements a, b at i, i + d
// (bit d of i clear) by a + b, a - b. The stages of all powers of two below the length, in any
// order, are the transform; in ascending order the result does not depend on how the elements are
// spread over registers and lanes.
#pragma once

#include "kvarn/layout.h"

namespace kvarn::device {

/// 1/sqrt(dim) of a power of two, which makes the transform orthonormal.
constexpr KVARN_HD float orthonormal_scale(int dim) {
  float scale = 1.f;
  for (; dim >= 4; dim /= 4) scale /= 2;
  return dim == 2 ? scale * 0.70710678118654752f : scale;
}

/// Stages of distance kFrom, 2*kFrom, ... < kTo between the registers of a thread.
template <int kFrom, int kTo, int N>
__device__ __forceinline__ void butterfly_registers(float (&v)[N]) {
#pragma unroll
  for (int distance = kFrom; distance < kTo; distance *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if ((i & distance) == 0) {
        const float a = v[i];
        const float b = v[i + distance];
        v[i] = a + b;
        v[i + distance] = a - b;
      }
    }
  }
}

/// Stages of distance kFrom, 2*kFrom, ... < kTo between lanes, for every register. All 32 lanes of
/// the warp must take part.
template <int kFrom, int kTo, int N>
__device__ __forceinline__ void butterfly_lanes(float (&v)[N], int lane) {
#pragma unroll
  for (int distance = kFrom; distance < kTo; distance *= 2) {
    const float sign = (lane & distance) == 0 ? 1.f : -1.f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = fmaf(v[i], sign, __shfl_xor_sync(0xffffffffu, v[i], distance));
    }
  }
}

}  // namespace kvarn::device
