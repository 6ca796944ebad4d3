// Attention over a record, or half of it, by one warp.
//
// Tokens (K) and channels (V) are the M side of mma.m16n8k16, query rows the N side:
//
//   scores[token][row] = codes_K[token][channel] * Q'[channel][row]     Q' = Q * channel scale
//   sums[channel][row] = codes_V[channel][token] * P'[token][row]       P' = P * token scale
//
// No scale and no zero point ever meets a code. A field of codes becomes a half2 by one AND: where
// it stands it is a subnormal number, code * 2^(k - 24) at mantissa bit k. (A bias, 1024 + code by
// an and-or, costs the same but has sums of a thousand times the result, which tensor cores
// truncate.) Registers of a fragment that differ in k differ in the unit of their codes: rows of
// the matrix are brought back by the scale of their token or channel, columns by Q' or P'. Of codes
// of 4 bits, registers of rows 8 to 15 hold whole bytes, 16 times their codes and those of rows 0
// to 7: a mask less, and sums of the latter are subtracted from the former. The zero
// points are a row-wise constant of a tile, sum(Q' * zero) and sum(P' * zero): one chain of mma
// makes it, and the accumulators start there.
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

__device__ __forceinline__ uint32_t multiply_add_half2(uint32_t a, uint32_t b, uint32_t c) {
  const __half2 sum =
      __hfma2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b),
              reinterpret_cast<const __half2&>(c));
  return reinterpret_cast<const uint32_t&>(sum);
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

/// Where the codes of register i of a fragment stand: at mantissa bit row * (i % 2) + column *
/// (i / 2), where that saves shifting them. Registers 1 and 3 are other rows of the matrix than 0
/// and 2, registers 2 and 3 other columns.
struct CodeBits {
  int row;
  int column;

  KVARN_HD constexpr explicit CodeBits(int bits)
      : row(bits == 2   ? 2
            : bits == 4 ? 4
                        : 0),
        column(bits == 2 ? 4 : 0) {}

  KVARN_HD constexpr int at(int reg) const { return reg % 2 * row + reg / 2 * column; }
  /// What Q' or P' of columns 8 to 15 is multiplied by.
  KVARN_HD constexpr float column_factor() const { return 1.f / static_cast<float>(1 << column); }
  /// What a result of the rows (0: 0 to 7) is multiplied by.
  KVARN_HD constexpr float row_factor(int half) const {
    return static_cast<float>(1 << 24) / static_cast<float>(half == 0 ? 1 : 1 << row);
  }
  KVARN_HD constexpr float row_unit(int half) const {
    return static_cast<float>(half == 0 ? 1 : 1 << row) / static_cast<float>(1 << 24);
  }
};

/// Whether registers of rows 8 to 15 hold the codes of rows 0 to 7 too. (With two blocks of rows
/// there are twice as many sums to take apart: no faster.)
constexpr KVARN_HD bool rows_are_nested(int bits, int blocks) { return bits == 4 && blocks == 1; }

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

/// Sums with the zero points, rows 0 to 7 those of columns 0 to 7, rows 8 to 15 those of columns 8
/// to 15 -> where accumulators start.
template <int kBlocks>
__device__ __forceinline__ void start_of(const float (&sums)[kBlocks][2][4], int bits,
                                         float (&start)[kBlocks][4]) {
  const CodeBits at(bits);
  const bool nested = rows_are_nested(bits, kBlocks);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float first = sums[b][0][i] + sums[b][1][i];
      const float second = sums[b][0][2 + i] + sums[b][1][2 + i];
      const float zero = fmaf(second, 1.f / at.column_factor(), first);
      start[b][i] = zero * at.row_unit(0);
      start[b][2 + i] = zero * (at.row_unit(1) + (nested ? at.row_unit(0) : 0.f));
    }
  }
}

/// scales, zero_points: [D] fp16.
template <int kDim, int kBlocks>
__device__ __forceinline__ void scale_query(const QueryOperand<kDim, kBlocks>& q,
                                            const uint8_t* scales, const uint8_t* zero_points,
                                            int bits, int lane, ScaledQuery<kDim, kBlocks>& to) {
  const CodeBits code(bits);
  const Normalizer n =
      normalizer(largest_half(scales, kDim, lane, [](int, uint32_t pair) { return pair; }));
  to.inverse = n.inverse;
  const uint32_t norm[] = {n.half2, n.half2 - static_cast<uint32_t>(code.column) * 0x04000400u};
  float sums[kBlocks][2][4] = {};  // two chains: an mma takes long
#pragma unroll
  for (int j = 0; j < kDim / 32; ++j) {
    const int at = 2 * (32 * j + lane % 4 * 8);
    const uint4 s = load_16(scales + at);
    const uint4 z = load_16(zero_points + at);
    const uint32_t scale[] = {multiply_half2(s.x, norm[0]), multiply_half2(s.y, norm[1]),
                              multiply_half2(s.z, norm[0]), multiply_half2(s.w, norm[1])};
    const uint32_t low[] = {z.x, 0, 0, z.y};
    const uint32_t high[] = {z.z, 0, 0, z.w};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t (&scaled)[4] = to.q.b[b][j];
#pragma unroll
      for (int i = 0; i < 4; ++i) scaled[i] = multiply_half2(q.b[b][j][i], scale[i]);
      mma_m16n8k16(sums[b][0], low, scaled[0], scaled[1]);
      mma_m16n8k16(sums[b][1], high, scaled[2], scaled[3]);
    }
  }
  start_of(sums, bits, to.start);
}

/// Fragments that whole 16-byte pieces of a lane hold, and how many pieces that takes.
template <int kBits, bool kNested>
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
    if constexpr (kNested) {
      static_assert(kBits == 4 && field_position(5, 4).word == 1 &&
                    field_position(5, 4).shift == 4);
      const uint32_t low = words[index] & 0x00ff00ffu;
      const uint32_t high = __byte_perm(words[index], 0, 0x4341);
      a[0] = words[index] & 0x000f000fu;
      a[1] = low;
      a[2] = high & 0x000f000fu;
      a[3] = high;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = code_field<kBits>(words, index * kFragmentRegisters + i, CodeBits(kBits).at(i));
      }
    }
  }
};

/// Takes the sums of rows 0 to 7 out of those of rows 8 to 15, where they are in them.
template <int kBits, int kBlocks, int kTiles>
__device__ __forceinline__ void part_rows(float (&sums)[kBlocks][kTiles][4]) {
  if constexpr (rows_are_nested(kBits, kBlocks)) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        sums[b][j][2] -= sums[b][j][0];
        sums[b][j][3] -= sums[b][j][1];
      }
    }
  }
}

/// scores[block][j][2*i + parity]: token i of tile j, row 8*block + 2t + parity; without the token
/// scale and without CodeBits::row_factor(i).
/// kChains: tiles that are computed side by side.
template <int kBits, int kChains, int kDim, int kBlocks, int kRowTiles>
__device__ __forceinline__ void score_tiles(const uint8_t* codes,
                                            const ScaledQuery<kDim, kBlocks>& query, int lane,
                                            float (&scores)[kBlocks][kRowTiles][4]) {
  using Codes = CodeBlock<kBits, rows_are_nested(kBits, kBlocks)>;
  constexpr int kTiles = kDim / kFragmentDim;  // column tiles
  constexpr int kAtOnce = kTiles < Codes::kFragments ? kTiles : Codes::kFragments;
  constexpr int kRowTilesOfBlock = Codes::kFragments / kAtOnce;
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
  part_rows<kBits>(scores);
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
                                           int bits, int lane, float (&start)[kBlocks][4]) {
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
      uint32_t a[4] = {__byte_perm(low[j], high[j], 0x5410), 0, 0,
                       __byte_perm(low[j], high[j], 0x7632)};
      if constexpr (kFiniteOnly) {
#pragma unroll
        for (int i = 0; i < 4; i += 3) {
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
  start_of(sums, bits, start);
}

/// sums: as SoftmaxState::out, of the row tiles (16 channels) from `first` on, a multiple of 4;
/// without the channel scale and without CodeBits::row_factor(channel % 2).
template <int kBits, int kDim, int kBlocks, int kRowTiles, int kSumTiles>
__device__ __forceinline__ void sum_tiles(const uint8_t* codes, int first,
                                          const ProbabilityOperand<kRowTiles, kBlocks>& p,
                                          const float (&start)[kBlocks][4], int lane,
                                          float (&sums)[kBlocks][kSumTiles][4]) {
  using Codes = CodeBlock<kBits, rows_are_nested(kBits, kBlocks)>;
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
  part_rows<kBits>(sums);
}

/// out += sums * channel scale. With kSkip not in the rows of `skip` (bit 2*block + parity), which
/// see nothing of the tokens.
template <bool kSkip, int kDim, int kBlocks, int kSumTiles>
__device__ __forceinline__ void add_sums(const uint8_t* scales, float inverse, const CodeBits& code,
                                         unsigned skip, int first,
                                         const float (&sums)[kBlocks][kSumTiles][4], int lane,
                                         SoftmaxState<kDim, kBlocks>& state) {
#pragma unroll
  for (int c = 0; c < kSumTiles; c += 4) {
    float scale[8];
    unpack_half8(load_16(scales + 2 * ((first + c) * kFragmentDim + lane / 4 * 8)), scale);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      scale[k] *= inverse * code.row_factor(k % 2);
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
