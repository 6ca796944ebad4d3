// Attention over staged tokens, 16 at a time: rows of 16-bit pages, in the original basis, by one
// warp.
//
// The same two products as for records (attention_records.cuh), with the same assignment of
// channels to matrix rows, so that sums lie in the same registers; lane (r, t) has the scores of
// tokens 2r and 2r + 1. Pages are read from L2, where the feeder has brought them, straight into
// registers, 16 bytes a lane: a K row is an A operand as it is, of V movmatrix makes one. Values
// are asked for before the keys are used, if the registers hold both: a wait a step, not two.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "device/attention_records.cuh"

namespace kvarn::device {

/// Rows of the keys or values of one head.
struct StagedRows {
  const uint16_t* data;  ///< token 0
  int64_t stride;        ///< elements
  int begin;             ///< tokens that may be read; others are 0
  int end;
  bool aligned;           ///< every row, to 16 bytes
  uint64_t left_out = 0;  ///< bit i: token left_out_from + i is 0 too
  int left_out_from = 0;

  __device__ __forceinline__ uint4 load(int token, int channel) const {
    if (token < begin || token >= end ||
        (left_out != 0 && (left_out >> (token - left_out_from) & 1) != 0))
      return {0, 0, 0, 0};
    const uint16_t* const at = data + token * stride + channel;
    if (aligned) return __ldcs(reinterpret_cast<const uint4*>(at));
    uint4 bits{};
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      bits = {__funnelshift_r(bits.x, bits.y, 16), __funnelshift_r(bits.y, bits.z, 16),
              __funnelshift_r(bits.z, bits.w, 16),
              bits.w >> 16 | static_cast<uint32_t>(at[i]) << 16};
    }
    return bits;
  }
};

template <bool kBFloat16>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (kBFloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    return pack_half2(low, high);
  }
}

/// Channels whose loads are under way together: all, if the registers hold them.
constexpr KVARN_HD int channels_at_once(int dim, int blocks) {
  return dim == 256 || blocks == 2 ? 64 : dim;
}

/// A lane's channels 32c + 8t + 0..7 of the keys of tokens `token` and `token + 1`, its own.
template <int kChannels>
struct StagedKeys {
  uint4 rows[kChannels / 32][2];

  __device__ __forceinline__ void load(const StagedRows& from, int token, int channel, int lane) {
#pragma unroll
    for (int c = 0; c < kChannels / 32; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        rows[c][i] = from.load(token + i, channel + 32 * c + lane % 4 * 8);
      }
    }
  }
};

/// Channels 64c + 16t + 0..15 of their values.
template <int kChannels>
struct StagedValues {
  uint4 rows[kChannels / 64][2][2];

  __device__ __forceinline__ void load(const StagedRows& from, int token, int channel, int lane) {
#pragma unroll
    for (int c = 0; c < kChannels / 64; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rows[c][i / 2][i % 2] =
            from.load(token + i / 2, channel + 64 * c + lane % 4 * 16 + i % 2 * 8);
      }
    }
  }
};

/// Adds what the channels from `channel` on have of the scores of 16 tokens.
template <bool kBFloat16, int kChannels, int kDim, int kBlocks>
__device__ __forceinline__ void score_staged(const StagedKeys<kChannels>& keys, int channel,
                                             const QueryOperand<kDim, kBlocks>& q,
                                             float (&scores)[kBlocks][1][4]) {
#pragma unroll
  for (int c = 0; c < kChannels / 32; ++c) {
    const uint4(&pair)[2] = keys.rows[c];
    const uint32_t low[] = {pair[0].x, pair[1].x, pair[0].y, pair[1].y};
    const uint32_t high[] = {pair[0].z, pair[1].z, pair[0].w, pair[1].w};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint32_t (&operand)[4] = q.b[b][channel / 32 + c];
      mma_m16n8k16<kBFloat16>(scores[b][0], low, operand[0], operand[1]);
      mma_m16n8k16<kBFloat16>(scores[b][0], high, operand[2], operand[3]);
    }
  }
}

/// Adds these channels of the values of the same tokens to the state, which is in the original
/// basis.
template <bool kBFloat16, int kChannels, int kDim, int kBlocks>
__device__ __forceinline__ void sum_staged(const StagedValues<kChannels>& values, int channel,
                                           const ProbabilityOperand<1, kBlocks>& p,
                                           SoftmaxState<kDim, kBlocks>& state) {
#pragma unroll
  for (int c = 0; c < kChannels / 64; ++c) {
    uint32_t operand[2][8];  // [token][channel % 8]
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4(&pair)[2] = values.rows[c][i];
      const uint32_t low[] = {pair[0].x, pair[0].y, pair[0].z, pair[0].w};
      const uint32_t high[] = {pair[1].x, pair[1].y, pair[1].z, pair[1].w};
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        operand[i][k] =
            transpose_8x8(__byte_perm(low[k / 2], high[k / 2], k % 2 == 0 ? 0x5410 : 0x7632));
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t a[] = {operand[0][2 * e], operand[0][2 * e + 1], operand[1][2 * e],
                            operand[1][2 * e + 1]};
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        mma_m16n8k16<kBFloat16>(state.out[b][channel / 16 + 4 * c + e], a, p.b[b][0][0],
                                p.b[b][0][1]);
      }
    }
  }
}

/// Which tokens first .. last - 1 have a value that is not finite; bit i: token `half` + i.
template <bool kBFloat16, int kDim>
__device__ __forceinline__ uint64_t find_not_finite(const StagedRows& values, int half, int first,
                                                    int last, int lane) {
  constexpr uint32_t kExponent = kBFloat16 ? 0x7f80u : 0x7c00u;
  uint64_t found = 0;
  for (int base = first; base < last; base += kWarpLanes) {
    const int token = base + lane;
    bool bad = false;
    if (token < last) {
      for (int c = 0; c < kDim; c += 8) {
        const uint4 bits = values.load(token, c);
        for (const uint32_t w : {bits.x, bits.y, bits.z, bits.w}) {
          bad |= (w & kExponent) == kExponent || (w >> 16 & kExponent) == kExponent;
        }
      }
    }
    found |= static_cast<uint64_t>(__ballot_sync(kAllLanes, bad)) << (base - half);
  }
  return found;
}

}  // namespace kvarn::device
