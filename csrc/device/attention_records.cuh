// Attention over a record, or half of it, by one warp.
//
// Tokens (K) and channels (V) are the M side of mma.m16n8k16, query rows the N side:
//
//   scores[token][row] = codes_K[token][channel] * Q'[channel][row]     Q' = Q * channel scale
//   sums[channel][row] = codes_V[channel][token] * P'[token][row]       P' = P * token scale
//
// No scale and no zero point ever meets a code. What a code carries too much, the bias of
// biased_code(), and the zero points are row-wise constants of a tile, sum(Q' * (zero - bias)) and
// sum(P' * (zero - bias)): one chain of mma with an A operand whose upper half is the zero points
// and whose lower half the biases gives both, and the accumulators start there.
//
// Q' and P' are fp16. So that scales of any size neither overflow nor vanish, they are scaled by a
// power of two that a tile's largest scale decides; it is taken off the fp32 results.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/codes.cuh"
#include "device/mma.cuh"
#include "device/softmax.cuh"

namespace kvarn::device {

/// Scores are in tiles of 16 tokens: lane (r, t) has of tile j the tokens
/// 64 * (j / 4) + 8r + 2 * (j % 4) + {0, 1}.
inline constexpr int kHalfTokens = 64;
inline constexpr int kHalfTiles = kHalfTokens / kFragmentDim;

__device__ __forceinline__ uint4 load_16(const void* shared) {
  return *static_cast<const uint4*>(shared);
}

__device__ __forceinline__ uint32_t multiply_half2(uint32_t a, uint32_t b) {
  const __half2 product =
      __hmul2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(product);
}

__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

/// Eight fp16 numbers.
__device__ __forceinline__ void unpack_half8(uint4 bits, float (&v)[8]) {
  const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ bool is_finite_half(uint32_t low_bits) {
  return (low_bits & 0x7c00u) != 0x7c00u;
}

/// x & mask | bits in one instruction: given as C++ with two constants it becomes two.
__device__ __forceinline__ uint32_t select_and_set(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}

/// Half2 number `index` of a lane's words as 2^k + code, the cheapest exact form: the field where
/// it stands under the exponent that makes its lowest bit a unit. (3 bits have too many different
/// k; there it is the code itself.)
template <int kBits>
__device__ __forceinline__ uint32_t biased_code(const uint32_t* words, int index) {
  if constexpr (kBits == 3) {
    return code_pair<kBits>(words, index);
  } else {
    const FieldPosition f = field_position(index, kBits);
    const uint32_t word = words[f.word];
    if constexpr (kBits == 8) {
      return __byte_perm(word, 0x64646464u, f.shift == 0 ? 0x4240 : 0x4341);
    } else {
      const int at = f.shift % 8;
      constexpr uint32_t kFirst = 0x00010001u;
      const uint32_t mask = (kFirst * ((1u << kBits) - 1)) << at;
      return select_and_set(f.shift < 8 ? word : word >> 8, mask, kFirst * ((25u - at) << 10));
    }
  }
}

/// The biases of the four registers of a fragment, those of registers 1 and 3 as multiples of those
/// of 0 and 2 (the registers of the same row of the matrix).
struct Bias {
  uint32_t low;   ///< register 0, negative half2
  uint32_t high;  ///< register 2
  float ratio;
};

__device__ __forceinline__ Bias bias_of(int bits) {
  constexpr uint32_t k1024 = 0xe400e400u;
  constexpr uint32_t k64 = 0xd400d400u;
  return bits == 2   ? Bias{k1024, k64, 1.f / 4}
         : bits == 3 ? Bias{0, 0, 1.f}
         : bits == 4 ? Bias{k1024, k1024, 1.f / 16}
                     : Bias{k1024, k1024, 1.f};
}

/// A power of two and its inverse, such that the scales of a tile times it are below 2^7.
struct Normalizer {
  uint32_t half2;
  float factor;
  float inverse;
};

/// `largest`: of the scales of the tile, as the bits of an fp16 number.
__device__ __forceinline__ Normalizer normalizer(uint32_t largest) {
  const int exponent = min(21 - static_cast<int>(largest >> 10), 15);
  return {static_cast<uint32_t>(exponent + 15) * 0x04000400u,
          __int_as_float((127 + exponent) << 23), __int_as_float((127 - exponent) << 23)};
}

/// The largest magnitude of `count` fp16 numbers in shared memory, as bits.
/// keep(i): whether pair i counts.
template <class Keep>
__device__ __forceinline__ uint32_t largest_half(const uint8_t* numbers, int count, int lane,
                                                 const Keep& keep) {
  uint32_t largest = 0;
  for (int i = lane; i < count / 2; i += kWarpLanes) {
    const uint32_t pair = reinterpret_cast<const uint32_t*>(numbers)[i];
    const uint32_t kept = keep(i, pair);
    largest = max(largest, max(kept & 0x7fffu, kept >> 16 & 0x7fffu));
  }
  return __reduce_max_sync(kAllLanes, largest);
}

/// Query rows as B operands: lane (n, t) has of row 8b + n the channels 32j + 8t + 0..7.
template <int kDim, int kBlocks>
struct QueryOperand {
  uint32_t b[kBlocks][kDim / 32][4];
};

/// Q' of a record, and where the scores start.
template <int kDim, int kBlocks>
struct ScaledQuery {
  QueryOperand<kDim, kBlocks> q;
  float start[kBlocks][4];
  float inverse;  ///< of the normalizer
};

/// Zero points (rows 0 to 7) and biases (8 to 15) -> where accumulators start.
template <int kBlocks>
__device__ __forceinline__ void start_of(const float (&sums)[kBlocks][2][4], const Bias& bias,
                                         float (&start)[kBlocks][4]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float zero = sums[b][0][i] + sums[b][1][i];
      const float biases = sums[b][0][2 + i] + sums[b][1][2 + i];
      start[b][i] = zero + biases;
      start[b][2 + i] = zero + biases * bias.ratio;
    }
  }
}

/// scales, zero_points: [D] fp16.
template <int kDim, int kBlocks>
__device__ __forceinline__ void scale_query(const QueryOperand<kDim, kBlocks>& q,
                                            const uint8_t* scales, const uint8_t* zero_points,
                                            const Bias& bias, int lane,
                                            ScaledQuery<kDim, kBlocks>& to) {
  const Normalizer n =
      normalizer(largest_half(scales, kDim, lane, [](int, uint32_t pair) { return pair; }));
  to.inverse = n.inverse;
  float sums[kBlocks][2][4] = {};  // two chains: an mma takes long
#pragma unroll
  for (int j = 0; j < kDim / 32; ++j) {
    const int at = 2 * (32 * j + lane % 4 * 8);
    const uint4 s = load_16(scales + at);
    const uint4 z = load_16(zero_points + at);
    const uint32_t scale[] = {multiply_half2(s.x, n.half2), multiply_half2(s.y, n.half2),
                              multiply_half2(s.z, n.half2), multiply_half2(s.w, n.half2)};
    const uint32_t low[] = {z.x, bias.low, z.y, bias.high};
    const uint32_t high[] = {z.z, bias.low, z.w, bias.high};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t (&scaled)[4] = to.q.b[b][j];
#pragma unroll
      for (int i = 0; i < 4; ++i) scaled[i] = multiply_half2(q.b[b][j][i], scale[i]);
      mma_m16n8k16(sums[b][0], low, scaled[0], scaled[1]);
      mma_m16n8k16(sums[b][1], high, scaled[2], scaled[3]);
    }
  }
  start_of(sums, bias, to.start);
}

/// Fragments that whole 16-byte pieces of a lane hold, and how many pieces that takes.
template <int kBits>
struct CodeBlock {
  static constexpr int kFragments = kBits == 3 ? 16 : 16 / kBits;
  static constexpr int kPieces = kBits == 3 ? 3 : 1;

  uint32_t words[4 * kPieces];

  /// codes: of the tile or of half of it.
  __device__ __forceinline__ void load(const uint8_t* codes, int block, int lane) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 w = load_16(codes + (block * kPieces + i) * kChunkBytes + lane * kLaneBytes);
      words[4 * i] = w.x;
      words[4 * i + 1] = w.y;
      words[4 * i + 2] = w.z;
      words[4 * i + 3] = w.w;
    }
  }

  __device__ __forceinline__ void fragment(int index, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = biased_code<kBits>(words, index * kFragmentRegisters + i);
  }
};

/// scores[block][j][2*i + parity]: token i of tile j, row 8*block + 2t + parity; without the token
/// scale.
template <int kBits, int kDim, int kBlocks, int kRowTiles>
__device__ __forceinline__ void score_tiles(const uint8_t* codes,
                                            const ScaledQuery<kDim, kBlocks>& query, int lane,
                                            float (&scores)[kBlocks][kRowTiles][4]) {
  using Codes = CodeBlock<kBits>;
  constexpr int kTiles = kDim / kFragmentDim;  // column tiles
  constexpr int kAtOnce = kTiles < Codes::kFragments ? kTiles : Codes::kFragments;
  constexpr int kRowTilesOfBlock = Codes::kFragments / kAtOnce;
  // Chains of mma that run side by side; with D = 256 more would not fit the registers.
  constexpr int kChains = kDim == 256 ? 2 : kRowTiles;
#pragma unroll
  for (int chain = 0; chain < kRowTiles; chain += kChains) {
#pragma unroll
    for (int first = 0; first < kTiles; first += kAtOnce) {
      Codes block[kChains / kRowTilesOfBlock];
#pragma unroll
      for (int i = 0; i < kChains / kRowTilesOfBlock; ++i) {
        block[i].load(codes, ((chain + i * kRowTilesOfBlock) * kTiles + first) / Codes::kFragments,
                      lane);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int c = first + k;
#pragma unroll
        for (int i = 0; i < kChains; ++i) {
          const int j = chain + i;
          uint32_t a[4];
          block[i / kRowTilesOfBlock].fragment(i % kRowTilesOfBlock * kAtOnce + k, a);
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
            const uint32_t* const q = query.q.b[b][c / 2] + c % 2 * 2;
            if (c == 0) {
              mma_m16n8k16(scores[b][j], a, q[0], q[1], query.start[b]);
            } else {
              mma_m16n8k16(scores[b][j], a, q[0], q[1]);
            }
          }
        }
      }
    }
  }
}

/// P' as B operands of the second product: [block][tile][token].
template <int kTiles, int kBlocks>
struct ProbabilityOperand {
  uint32_t b[kBlocks][kTiles][2];
};

/// Where the sums start. zero_points: [16 * kRowTiles] fp16 of the tokens; with kFiniteOnly others
/// are left out (their probabilities are NaN or 0).
template <bool kFiniteOnly, int kBlocks, int kRowTiles>
__device__ __forceinline__ void start_sums(const uint8_t* zero_points,
                                           const ProbabilityOperand<kRowTiles, kBlocks>& p,
                                           const Bias& bias, int lane, float (&start)[kBlocks][4]) {
  float sums[kBlocks][2][4] = {};
#pragma unroll
  for (int first = 0; first < kRowTiles; first += kHalfTiles) {
    const uint8_t* const at = zero_points + first * kFragmentDim * 2 + lane % 4 * 32;
    const uint4 z0 = load_16(at);
    const uint4 z1 = load_16(at + 16);
    const uint32_t low[] = {z0.x, z0.y, z0.z, z0.w};
    const uint32_t high[] = {z1.x, z1.y, z1.z, z1.w};
#pragma unroll
    for (int j = 0; j < kHalfTiles; ++j) {
      uint32_t a[4] = {__byte_perm(low[j], high[j], 0x5410), bias.low,
                       __byte_perm(low[j], high[j], 0x7632), bias.high};
      if constexpr (kFiniteOnly) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          if (!is_finite_half(a[i])) a[i] &= 0xffff0000u;
          if (!is_finite_half(a[i] >> 16)) a[i] &= 0xffffu;
        }
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const uint32_t (&operand)[2] = p.b[b][first + j];
        mma_m16n8k16(sums[b][j % 2], a, operand[0], operand[1]);
      }
    }
  }
  start_of(sums, bias, start);
}

/// sums: as SoftmaxState::out, of the row tiles (16 channels) from `first` on, a multiple of 4;
/// without the channel scale.
template <int kBits, int kDim, int kBlocks, int kRowTiles, int kSumTiles>
__device__ __forceinline__ void sum_tiles(const uint8_t* codes, int first,
                                          const ProbabilityOperand<kRowTiles, kBlocks>& p,
                                          const float (&start)[kBlocks][4], int lane,
                                          float (&sums)[kBlocks][kSumTiles][4]) {
  using Codes = CodeBlock<kBits>;
  constexpr int kTiles = kDim / kFragmentDim;
#pragma unroll
  for (int i = 0; i < kRowTiles * kTiles / Codes::kFragments; ++i) {
    // Whether any of the block's fragments is wanted.
    bool wanted = false;
#pragma unroll
    for (int k = 0; k < Codes::kFragments; ++k) {
      const int c = (i * Codes::kFragments + k) % kTiles - first;
      wanted |= c >= 0 && c < kSumTiles;
    }
    if (!wanted) continue;
    Codes block;
    block.load(codes, i, lane);
#pragma unroll
    for (int k = 0; k < Codes::kFragments; ++k) {
      const int j = (i * Codes::kFragments + k) / kTiles;
      const int c = (i * Codes::kFragments + k) % kTiles - first;
      if (c < 0 || c >= kSumTiles) continue;
      uint32_t a[4];
      block.fragment(k, a);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (j == 0) {
          mma_m16n8k16(sums[b][c], a, p.b[b][j][0], p.b[b][j][1], start[b]);
        } else {
          mma_m16n8k16(sums[b][c], a, p.b[b][j][0], p.b[b][j][1]);
        }
      }
    }
  }
}

/// out += sums * channel scale. With kSkip not in the rows of `skip` (bit 2*block + parity), which
/// see nothing of the tokens.
template <bool kSkip, int kDim, int kBlocks, int kSumTiles>
__device__ __forceinline__ void add_sums(const uint8_t* scales, float inverse, unsigned skip,
                                         int first, const float (&sums)[kBlocks][kSumTiles][4],
                                         int lane, SoftmaxState<kDim, kBlocks>& state) {
#pragma unroll
  for (int c = 0; c < kSumTiles; c += 4) {
    float scale[8];
    unpack_half8(load_16(scales + 2 * ((first + c) * kFragmentDim + lane / 4 * 8)), scale);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      scale[k] *= inverse;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int parity = 0; parity < 2; ++parity) {
          const int i = k % 2 * 2 + parity;
          float& out = state.out[b][first + c + k / 2][i];
          const float next = fmaf(sums[b][c + k / 2][i], scale[k], out);
          if (!kSkip || (skip >> (2 * b + parity) & 1) == 0) out = next;
        }
      }
    }
  }
}

}  // namespace kvarn::device
