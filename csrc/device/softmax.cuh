// The running softmax of the rows of a warp, in the C layout of mma.m16n8k16: lane (r, t) =
// (lane / 4, lane % 4) has rows 8b + 2t + {0, 1} of every block b of 8 rows.
#pragma once

#include <cstdint>

#include "device/hadamard.cuh"
#include "device/numeric.cuh"
#include "kvarn/layout.h"

namespace kvarn::device {

inline constexpr int kBlockRowsShift = 3;
inline constexpr int kBlockRows = 1 << kBlockRowsShift;  ///< rows of the attention matrix in an mma
inline constexpr unsigned kAllLanes = ~0u;
inline constexpr float kLog2e = 1.44269504088896341f;
inline constexpr float kLn2 = 0.69314718055994531f;

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

/// Over the eight lanes that share t.
__device__ __forceinline__ float max_over_tokens(float x) {
#pragma unroll
  for (int distance = 4; distance < kWarpLanes; distance *= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

__device__ __forceinline__ float sum_over_tokens(float x) {
#pragma unroll
  for (int distance = 4; distance < kWarpLanes; distance *= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

/// Weighted sum of values, and what is needed to go on with it.
///
/// out[block][tile][2*i + parity] belongs to row 8*block + 2t + parity and channel
/// 64*(tile/4) + 8r + 2*(tile%4) + i, the accumulators of an A operand whose rows are channels.
template <int kDim, int kBlocks>
struct SoftmaxState {
  static constexpr int kTiles = kDim / kFragmentDim;
  /// float4 of a lane in memory.
  static constexpr int kVectors = kBlocks * (kTiles + 1);

  float out[kBlocks][kTiles][4];
  float top[kBlocks][2];  ///< reference of the exponentials, base 2; -infinity: nothing seen yet
  float sum[kBlocks][2];  ///< of the lane's own tokens

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[b][i] = negative_infinity();
        sum[b][i] = 0.f;
      }
#pragma unroll
      for (int c = 0; c < kTiles; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[b][c][i] = 0.f;
      }
    }
  }

  __device__ __forceinline__ void scale_row(int block, int parity, float factor) {
    // Not to be fused with what is added next: kernels must agree bit for bit.
    sum[block][parity] = __fmul_rn(sum[block][parity], factor);
#pragma unroll
    for (int c = 0; c < kTiles; ++c) {
      out[block][c][parity] *= factor;
      out[block][c][2 + parity] *= factor;
    }
  }

  /// Between the rotated basis and the original one.
  __device__ __forceinline__ void rotate(int lane) {
    constexpr int kChannels = kDim / 8;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        float v[kChannels];  // 8 * (channel / 64) + channel % 8
#pragma unroll
        for (int k = 0; k < kChannels; ++k) v[k] = out[b][k / 2][k % 2 * 2 + parity];
        butterfly_registers<1, kChannels>(v);
        butterfly_lanes<4, kWarpLanes>(v, lane);
#pragma unroll
        for (int k = 0; k < kChannels; ++k) {
          out[b][k / 2][k % 2 * 2 + parity] = v[k] * orthonormal_scale(kDim);
        }
      }
    }
  }

  /// memory: [kVectors][32 lanes]; the last kBlocks vectors are top and sum.
  __device__ __forceinline__ void store(float4* memory, int lane) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int c = 0; c < kTiles; ++c) {
        const float (&v)[4] = out[b][c];
        memory[(b * kTiles + c) * kWarpLanes + lane] = {v[0], v[1], v[2], v[3]};
      }
      memory[(kBlocks * kTiles + b) * kWarpLanes + lane] = {top[b][0], top[b][1], sum[b][0],
                                                            sum[b][1]};
    }
  }

  __device__ __forceinline__ void load(const float4* memory, int lane) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int c = 0; c < kTiles; ++c) {
        const float4 v = memory[(b * kTiles + c) * kWarpLanes + lane];
        float (&o)[4] = out[b][c];
        o[0] = v.x;
        o[1] = v.y;
        o[2] = v.z;
        o[3] = v.w;
      }
      const float4 v = memory[(kBlocks * kTiles + b) * kWarpLanes + lane];
      top[b][0] = v.x;
      top[b][1] = v.y;
      sum[b][0] = v.z;
      sum[b][1] = v.w;
    }
  }
};

/// What a finished row is multiplied by, and its LSE (natural logarithm). `sum` is that of all
/// lanes; `sink` (natural logarithm) takes part in the denominator, -infinity: none.
struct RowResult {
  float factor;
  float lse;
};

__device__ __forceinline__ RowResult finish_row(float top, float sum, float sink) {
  const float none = negative_infinity();
  const bool empty = sum == 0.f;  // not `top`, which a row of NaN leaves alone
  const float own = empty ? none : top + log2_fast(sum);
  RowResult result{empty ? 0.f : __fdividef(1.f, sum), own * kLn2};
  if (sink != none) {
    sink *= kLog2e;
    const float most = fmaxf(own, sink);
    const float mine = own == most ? 1.f : exp2_fast(own - most);  // both may be infinite
    const float all = mine + (sink == most ? 1.f : exp2_fast(sink - most));
    result.factor *= __fdividef(mine, all);
    result.lse = (most + log2_fast(all)) * kLn2;
  }
  return result;
}

}  // namespace kvarn::device
