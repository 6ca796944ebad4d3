// The rotation of query rows, on the tensor core.
//
// The matrix is the signs of the Walsh-Hadamard matrix, exact in 16 bits, times the rows as they
// are in memory; sums are fp32. In the order of channels that the lanes have anyway, a fragment of
// signs is a register of the lane and its negative.
#pragma once

#include <cstdint>

#include "device/hadamard.cuh"
#include "device/mma.cuh"
#include "device/numeric.cuh"

namespace kvarn::device {

/// words: lane (n, t) = (lane / 4, lane % 4) has of row n the channels 32j + 8t + 0..7, as
/// [j][pair]. to: the same of the rotated row times its factor, fp16. factor: of rows 2t, 2t + 1.
///
/// The sign of (output o, input c) is the parity of o & c. Row r of the upper half of the matrix
/// tile (j', q) is channel o = 32j' + 8 (r / 2) + 4q + r % 2, of the lower half o + 2, which is
/// what transposing gives back in order. Of the products with words 2h and 2h + 1 of j, column pair
/// p has c = 32j + 8t + 4h + {0, 2} + p: r / 2 meets t, r % 2 meets p, q meets h, and only the
/// lower half meets the 2.
template <bool kBFloat16, int kDim>
__device__ __forceinline__ void rotate_query(const uint32_t (&words)[kDim / 32][4],
                                             const float (&factor)[2], int lane,
                                             uint32_t (&to)[kDim / 32][4]) {
  constexpr int kTiles = kDim / kFragmentDim;
  constexpr uint32_t kOnes = kBFloat16 ? 0x3f803f80u : 0x3c003c00u;
  const int r = lane / 4;
  const uint32_t turned = __popc(r / 2 & lane % 4) % 2 != 0 ? 0x80008000u : 0u;
  const uint32_t plus = kOnes ^ turned ^ (r % 2 != 0 ? 0x80000000u : 0u);
  const uint32_t minus = plus ^ 0x80008000u;
  const float scale[] = {factor[0] * orthonormal_scale(kDim), factor[1] * orthonormal_scale(kDim)};
  constexpr int kAtOnce = 4;  // chains that hide each other's latency; more would take registers
#pragma unroll
  for (int first = 0; first < kTiles; first += kAtOnce) {
    float sums[kAtOnce][4] = {};
#pragma unroll
    for (int step = 0; step < kTiles; ++step) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool odd = __popc(step & (first + i)) % 2 != 0;
        const uint32_t sign = odd ? minus : plus;
        const uint32_t signs[] = {sign, sign, sign, odd ? plus : minus};
        const uint32_t* const of = words[step / 2] + step % 2 * 2;
        mma_m16n8k16<kBFloat16>(sums[i], signs, of[0], of[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int tile = first + i;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to[tile / 2][tile % 2 * 2 + half] = transpose_8x8(
            pack_pair<false>(sums[i][2 * half] * scale[0], sums[i][2 * half + 1] * scale[1]));
      }
    }
  }
}

}  // namespace kvarn::device
