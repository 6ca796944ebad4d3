// Attention over 16 staged tokens: rows of a 16-bit page, in the original basis, by one warp.
//
// The same two products as for records (attention_records.cuh), with the same assignment of
// channels to matrix rows, so that sums lie in the same registers; lane (r, t) has the scores of
// tokens 2r and 2r + 1. The rows are in shared memory, keys before values: a K row is an A operand
// as it is, of V movmatrix makes one.
#pragma once

#include <cstdint>

#include "device/attention_records.cuh"

namespace kvarn::device {

inline constexpr int kStagedTokens = kFragmentDim;

constexpr KVARN_HD int staged_bytes(int head_dim) { return 2 * kStagedTokens * head_dim * 2; }

/// Adds to the scores of tokens 2r and 2r + 1, in the layout of one tile of score_tiles.
/// keys: [16][kDim].
template <bool kBFloat16, int kDim, int kBlocks>
__device__ __forceinline__ void score_staged(const uint8_t* keys,
                                             const QueryOperand<kDim, kBlocks>& q, int lane,
                                             float (&scores)[kBlocks][1][4]) {
  float second[kBlocks][4] = {};  // two chains: an mma takes long
#pragma unroll
  for (int j = 0; j < kDim / 32; ++j) {
    const uint8_t* const at = keys + 2 * (lane / 4 * 2 * kDim + 32 * j + lane % 4 * 8);
    const uint4 even = load_16(at);
    const uint4 odd = load_16(at + 2 * kDim);
    const uint32_t low[] = {even.x, odd.x, even.y, odd.y};
    const uint32_t high[] = {even.z, odd.z, even.w, odd.w};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint32_t (&operand)[4] = q.b[b][j];
      mma_m16n8k16<kBFloat16>(scores[b][0], low, operand[0], operand[1]);
      mma_m16n8k16<kBFloat16>(second[b], high, operand[2], operand[3]);
    }
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[b][0][i] += second[b][i];
  }
}

/// Adds the values of those of the same tokens that are in `kept` (bit i: token i) to the state,
/// which is in the original basis. Others are zeros, whatever their bytes.
template <bool kBFloat16, int kDim, int kBlocks>
__device__ __forceinline__ void sum_staged(const uint8_t* values, unsigned kept,
                                           const ProbabilityOperand<1, kBlocks>& p, int lane,
                                           SoftmaxState<kDim, kBlocks>& state) {
#pragma unroll
  for (int c = 0; c < kDim / 64; ++c) {
    // Lane (k, t) has channels 64c + 16t + 0..15 of tokens 2k and 2k + 1.
    uint32_t operand[2][8];  // [token][channel % 8]
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = lane / 4 * 2 + i;
      const int channel = 64 * c + lane % 4 * 16;
      uint4 first{}, second{};
      if ((kept >> token & 1) != 0) {
        first = load_16(values + 2 * (token * kDim + channel));
        second = load_16(values + 2 * (token * kDim + channel + 8));
      }
      const uint32_t low[] = {first.x, first.y, first.z, first.w};
      const uint32_t high[] = {second.x, second.y, second.z, second.w};
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
        mma_m16n8k16<kBFloat16>(state.out[b][4 * c + e], a, p.b[b][0][0], p.b[b][0][1]);
      }
    }
  }
}

/// Which tokens of those in `tokens` have a value that is not finite. Bit i: token i.
template <bool kBFloat16, int kDim>
__device__ __forceinline__ unsigned find_not_finite(const uint8_t* values, unsigned tokens,
                                                    int lane) {
  constexpr uint32_t kExponent = kBFloat16 ? 0x7f80u : 0x7c00u;
  bool bad = false;
  if (lane < kStagedTokens && (tokens >> lane & 1) != 0) {
#pragma unroll 1
    for (int channel = 0; channel < kDim; channel += 8) {
      const uint4 bits = load_16(values + 2 * (lane * kDim + channel));
      for (const uint32_t w : {bits.x, bits.y, bits.z, bits.w}) {
        bad |= (w & kExponent) == kExponent || (w >> 16 & kExponent) == kExponent;
      }
    }
  }
  return __ballot_sync(kAllLanes, bad);
}

}  // namespace kvarn::device
