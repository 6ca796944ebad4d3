// Keys and values of a record, from its codes: what dequantize_tiles and gather_kv share.
//
// The tensor core does the part of the rotation that crosses lanes (cuda/dequantize.cu tells why
// and how); a block of kThreads takes a record apart, a warp 16 tokens at a time.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/codes.cuh"
#include "device/hadamard.cuh"
#include "device/mma.cuh"
#include "device/numeric.cuh"

namespace kvarn::device::dequantize {

// Of a block. Two sizes, as measured.
template <int kDim>
constexpr int kThreads = kDim == 128 ? 128 : 256;
template <int kDim>
constexpr int kWarps = kThreads<kDim> / kWarpLanes;
inline constexpr int kTokens = 16;  // of a fragment: what a warp has at once
template <int kDim>
constexpr int kWarpUnits = kDim == 128 ? 2 : 1;  // how often it has so many of a record
template <int kDim>
constexpr int kBlockTokens = kWarps<kDim> * kWarpUnits<kDim> * kTokens;
inline constexpr int kMaxTiles = 8;  // fragments that have accumulators of their own: 128 channels
inline constexpr uint32_t kSigns = 0x80008000u;  // of a half2
inline constexpr uint32_t kHighSign = 0x80000000u;

/// K or V of one record, in shared memory.
struct Part {
  const uint8_t* codes;
  const __half* channel_scale;
  const __half* zero_point;  // K: of channels, V: of tokens
  const __half* token_scale;
};

template <bool kKey>
__device__ __forceinline__ Part part_of(const uint8_t* record, const RecordLayout& at) {
  const auto field = [&](int offset) { return reinterpret_cast<const __half*>(record + offset); };
  if constexpr (kKey) {
    return {record + at.key_codes, field(at.key_channel_scale), field(at.key_zero_point),
            field(at.key_token_scale)};
  } else {
    return {record + at.value_codes, field(at.value_channel_scale), field(at.value_zero_point),
            field(at.value_token_scale)};
  }
}

/// Of 16 tokens.
template <int kDim>
struct Fragments {
  static constexpr int kCount = kDim / kFragmentDim;
  static constexpr int kTiles = kCount < kMaxTiles ? kCount : kMaxTiles;
  static constexpr int kPasses = kCount / kTiles;  ///< each makes 128 channels; pass is their bit 7
  static_assert(kPasses <= 2);
  /// B of them all, then once more and negated of those that have channel bit 7.
  static constexpr int kOperands = kCount + (kPasses - 1) * kTiles;
};

/// What the warps of a record need of K or V besides it.
template <int kDim, bool kKey>
struct Operands {
  float start[kKey ? 2 * kDim : kDim];              // see make_start
  uint4 b[Fragments<kDim>::kOperands][kWarpLanes];  // B operands of a lane, n-tiles 0 and 1
};

/// Shared memory of a block, but for the records.
template <int kDim>
struct Scratch {
  uint4 keep[2][kWarpLanes];  // see make_masks; K, V
  uint4 flip[2][kWarpLanes];
  struct {
    Operands<kDim, true> key;
    Operands<kDim, false> value;
  } slot[kBlockTokens<kDim> / 64];
};

/// Records that a block takes at once, so that every warp has tokens; a choice between constants.
template <int kDim>
KVARN_HD constexpr int slots_of(const Format& f) {
  return f.group == 64 ? kBlockTokens<kDim> / 64 : kBlockTokens<kDim> / 128;
}

/// Whether codes enter the product as they are and not as subnormal numbers, of which tensor cores
/// keep fewer bits: 1e-5 of a row, far below the rounding to 16 bits. (Where channel scales are
/// subnormal too it is more, but always about 2^-7 of the rounding of those scales.)
template <class T>
constexpr bool is_exact = sizeof(T) == 4;

/// Mantissa bit at which the codes of a lane's first or second token stand: where most fields need
/// no shift of their own.
KVARN_HD constexpr int code_bit(int bits, bool key, int second) {
  return bits == 4 ? 4 * second : bits == 2 ? (key ? 2 : 4) * second : 0;
}

/// The number that a code 1 of that token is.
template <bool kExact>
__device__ __forceinline__ float code_unit(int bits, bool key, int second) {
  constexpr int kBias = 127 - 24;
  return kExact ? 1.f : __uint_as_float((kBias + code_bit(bits, key, second)) << 23);
}

/// start: the zero points (K) or ones (V) times the channel scale, transformed over the channel
/// bits of a fragment (K: 0, 1, 3, 4; V: 0, 3, 4, 5) and those above bit 6. V: [channel], K: in the
/// order of the accumulators, [channel / 2][first or second token][channel % 2]. Thread i of kDim
/// or 128.
template <int kDim, bool kKey>
__device__ __forceinline__ void make_start(const Part& part, float* start, bool rotated, int i,
                                           float first_unit, float second_unit) {
  constexpr int kWidth = kDim < 128 ? kDim : 128;
  constexpr int kCount = kDim / kWidth;
  // The bits of the fragment are lane bits.
  const int channel =
      kKey ? i : (i & 1) | (i >> 1 & 7) << 3 | (i >> 4 & 1) << 1 | (i >> 5 & 1) << 2 | i >> 6 << 6;
  float v[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int c = channel + k * kWidth;
    v[k] = __half2float(part.channel_scale[c]) * (kKey ? __half2float(part.zero_point[c]) : 1.f);
  }
  if (!rotated) {
    if constexpr (kKey) {
      butterfly_lanes<1, 4>(v, i);
      butterfly_lanes<8, 32>(v, i);
    } else {
      butterfly_lanes<1, 16>(v, i);
    }
    butterfly_registers<1, kCount>(v);
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int c = channel + k * kWidth;
    if constexpr (kKey) {
      start[c / 2 * 4 + c % 2] = v[k] * first_unit;
      start[c / 2 * 4 + c % 2 + 2] = v[k] * second_unit;
    } else {
      start[c] = v[k];
    }
  }
}

/// How a lane makes B of the channel scales: b = scales & keep ^ flip.
///
/// B: rows are the channels of a fragment, row 2t + p + 8h: of K, p is channel bit 0, h bit 1, t
/// bits 3-4; of V, h is bit 0, p bit 3, t bits 4-5. Columns are channels too, column r of n-tile m:
/// of K, r is the bits 0, 3, 4 and m bit 1; of V, r is the bits 0, 3, 4 and m bit 5. An element is
/// the scale of its row, its sign the parity of the bits that row and column have in common (in the
/// rotated basis: 0 unless row and column are the same channel).
template <bool kKey>
__device__ __forceinline__ void make_masks(uint4& keep, uint4& flip, bool rotated, int lane) {
  const int r = lane / 4;
  const int t = lane % 4;
  uint32_t keeps[4];  // 2 * m + h, of the pair p = 0, 1
  uint32_t flips[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int m = i / 2;
    const int h = i % 2;
    const int p = kKey ? r & 1 : r >> 1 & 1;  // of the column
    bool odd;                                 // sign of p = 0
    bool same;                                // whether all bits but p agree
    if constexpr (kKey) {
      odd = (__popc(t & r >> 1) + h * m) & 1;
      same = t == r >> 1 && h == m;
    } else {
      odd = ((t & r >> 2) + (t >> 1) * m + h * (r & 1)) & 1;
      same = (t & 1) == r >> 2 && t >> 1 == m && h == (r & 1);
    }
    keeps[i] = !rotated ? ~0u : !same ? 0 : p == 0 ? 0x0000ffffu : 0xffff0000u;
    flips[i] = rotated ? 0 : (odd ? kSigns : 0) ^ (p == 0 ? 0 : kHighSign);
  }
  keep = {keeps[0], keeps[1], keeps[2], keeps[3]};
  flip = {flips[0], flips[1], flips[2], flips[3]};
}

/// B of fragment f.
template <bool kKey>
__device__ __forceinline__ uint4 make_b(const Part& part, const uint4& keep, const uint4& flip,
                                        int f, int lane) {
  const int t = lane % 4;
  uint32_t pair[2];  // p = 0, 1; by h
  if constexpr (kKey) {
    const uint2 scales =
        *reinterpret_cast<const uint2*>(part.channel_scale + f / 2 * 32 + 8 * t + f % 2 * 4);
    pair[0] = scales.x;
    pair[1] = scales.y;
  } else {
    const __half* const at = part.channel_scale + f / 4 * 64 + 16 * t + f % 4 * 2;
    const uint32_t p0 = *reinterpret_cast<const uint32_t*>(at);
    const uint32_t p1 = *reinterpret_cast<const uint32_t*>(at + 8);
    pair[0] = __byte_perm(p0, p1, 0x5410);
    pair[1] = __byte_perm(p0, p1, 0x7632);
  }
  return {pair[0] & keep.x ^ flip.x, pair[1] & keep.y ^ flip.y, pair[0] & keep.z ^ flip.z,
          pair[1] & keep.w ^ flip.w};
}

/// Both for K and V of a record: a warp of them makes pieces warp, warp + warps, ...
template <int kDim, bool kExact>
__device__ __forceinline__ void make_operands(const uint8_t* record, const RecordLayout& layout,
                                              int key_bits, Scratch<kDim>& scratch, int slot,
                                              bool rotated, int warp, int warps, int lane) {
  using F = Fragments<kDim>;
  constexpr int kStarts = (kDim < 128 ? kDim : 128) / kWarpLanes;
  const Part key = part_of<true>(record, layout);
  const Part value = part_of<false>(record, layout);
  auto& out = scratch.slot[slot];
#pragma unroll 1
  for (int i = warp; i < 2 * kStarts; i += warps) {
    if (i < kStarts) {
      make_start<kDim, true>(key, out.key.start, rotated, i * kWarpLanes + lane,
                             code_unit<kExact>(key_bits, true, 0),
                             code_unit<kExact>(key_bits, true, 1));
    } else {
      make_start<kDim, false>(value, out.value.start, rotated, (i - kStarts) * kWarpLanes + lane,
                              1.f, 1.f);
    }
  }
#pragma unroll 1
  for (int f = warp; f < F::kCount; f += warps) {
    const uint4 k = make_b<true>(key, scratch.keep[0][lane], scratch.flip[0][lane], f, lane);
    const uint4 v = make_b<false>(value, scratch.keep[1][lane], scratch.flip[1][lane], f, lane);
    out.key.b[f][lane] = k;
    out.value.b[f][lane] = v;
    if (F::kPasses > 1 && f >= F::kTiles) {
      out.key.b[f + F::kTiles][lane] = {k.x ^ kSigns, k.y ^ kSigns, k.z ^ kSigns, k.w ^ kSigns};
      out.value.b[f + F::kTiles][lane] = {v.x ^ kSigns, v.y ^ kSigns, v.z ^ kSigns, v.w ^ kSigns};
    }
  }
}

/// Where element (row, channel 32j + 8t + channel) stands among a lane's accumulators
/// [fragment][n-tile][2 * row + column]: of K, the 8 channels are column, n-tile and fragment % 2,
/// of V column and fragment % 4.
template <bool kKey>
__device__ __forceinline__ constexpr int accumulator(int row, int j, int channel) {
  const int fragment = kKey ? 2 * j + channel / 4 : j / 2 * 4 + channel / 2;
  const int tile = kKey ? channel / 2 % 2 : j % 2;
  return 8 * fragment + 4 * tile + 2 * row + channel % 2;
}

/// The lane's two tokens, or the first `rows` of them, 8 neighbouring channels at a time.
template <class T, bool kKey, bool kAligned, int kCount>
__device__ __forceinline__ void store_rows(T* out, int64_t token_stride, const float (&d)[kCount],
                                           const float (&scale)[2], int rows) {
  constexpr int kVector = kAccessBytes / static_cast<int>(sizeof(T));
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if (row >= rows) continue;
#pragma unroll
    for (int j = 0; j < kCount / 16; ++j) {
      T* const to = out + row * token_stride + 32 * j;
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = d[accumulator<kKey>(row, j, i)];
#pragma unroll
      for (int i = 0; i < 8; i += kVector) {
        const auto piece = from_float<T, kVector>(v + i, scale[row]);
        if constexpr (kAligned) {
          *reinterpret_cast<Vector<T, kVector>*>(to + i) = piece;
        } else {
#pragma unroll
          for (int k = 0; k < kVector; ++k) to[i + k] = piece.element[k];
        }
      }
    }
  }
}

/// The tokens of a warp; `out`: token 0, channel 0. With kPartial only tokens below `tokens` are
/// stored.
template <class T, int kDim, bool kAligned, bool kPartial, int kBits, bool kKey>
__device__ __forceinline__ void dequantize_part(const Part& part,
                                                const Operands<kDim, kKey>& operands, T* out,
                                                int64_t token_stride, int warp, int warps,
                                                bool rotated, int tokens) {
  using F = Fragments<kDim>;
  constexpr bool kExact = is_exact<T>;
  int lane = threadIdx.x % kWarpLanes;
#pragma unroll 1
  for (int i = 0; i < kWarpUnits<kDim>; ++i) {
    // Hides from the compiler that addresses are the same for every record: it would keep them in
    // registers that the accumulators need.
    asm volatile("" : "+r"(lane), "+r"(warp));
    const int unit = warp + i * warps;
    const int r = lane / 4;
    const int t = lane % 4;
#pragma unroll 1
    for (int pass = 0; pass < F::kPasses; ++pass) {
      // The lane's rows of the accumulators: two neighbouring tokens.
      const int token = unit / 4 * 64 + r * 8 + unit % 4 * 2;
      const int first_channel = pass * kMaxTiles * kFragmentDim + 8 * t;
      float2 zero = {1.f, 1.f};
      if constexpr (!kKey) {
        zero = __half22float2(*reinterpret_cast<const __half2*>(part.zero_point + token));
        zero.x *= code_unit<kExact>(kBits, kKey, 0);
        zero.y *= code_unit<kExact>(kBits, kKey, 1);
      }
      float d[F::kTiles * 8];
#pragma unroll
      for (int j = 0; j < F::kTiles / 2; ++j) {
#pragma unroll
        for (int i = 0; i < 8; i += kKey ? 2 : 4) {
          const int channel = first_channel + 32 * j + i;
          const float4 start =
              *reinterpret_cast<const float4*>(operands.start + (kKey ? 2 : 1) * channel);
          if constexpr (kKey) {
            d[accumulator<kKey>(0, j, i)] = start.x;
            d[accumulator<kKey>(0, j, i + 1)] = start.y;
            d[accumulator<kKey>(1, j, i)] = start.z;
            d[accumulator<kKey>(1, j, i + 1)] = start.w;
          } else {
            const float channels[] = {start.x, start.y, start.z, start.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              d[accumulator<kKey>(0, j, i + k)] = channels[k] * zero.x;
              d[accumulator<kKey>(1, j, i + k)] = channels[k] * zero.y;
            }
          }
        }
      }
#pragma unroll
      for (int f = 0; f < F::kCount; f += kFragmentsAtOnce) {
        const int above = f / F::kTiles;  // bit 7 of its channels
        if (rotated && above != pass) continue;
        const auto* const b = operands.b + f + (rotated ? 0 : above * pass * F::kTiles);
        uint32_t words[kBits];
        load_words<kBits>(part.codes, (unit * F::kCount + f) / kFragmentsAtOnce, lane, words);
        if constexpr (!kKey) {
          // All the matrices of a word at once: its fields stay where they are.
#pragma unroll
          for (int i = 0; i < kBits; ++i) words[i] = transpose_8x8(words[i]);
        }
#pragma unroll
        for (int k = 0; k < kFragmentsAtOnce; ++k) {
          uint32_t a[kFragmentRegisters];
#pragma unroll
          for (int i = 0; i < kFragmentRegisters; ++i) {
            const int index = k * kFragmentRegisters + i;
            // Transposed, rows and columns change places, and so do registers 1 and 2.
            a[kKey ? i : i % 2 * 2 + i / 2] =
                kExact
                    ? code_pair<kBits>(words, index)
                    : code_field<kBits>(words, index, code_bit(kBits, kKey, kKey ? i % 2 : i / 2));
          }
          const uint4 scales = b[k][lane];
          float* const tile = d + 8 * ((f + k) % F::kTiles);
          mma_m16n8k16(tile, a, scales.x, scales.y);
          mma_m16n8k16(tile + 4, a, scales.z, scales.w);
        }
      }
      if (!rotated) butterfly_registers<8, F::kTiles * 8>(d);
      const float2 token_scale =
          __half22float2(*reinterpret_cast<const __half2*>(part.token_scale + token));
      const float norm = rotated ? 1.f : orthonormal_scale(kDim);
      const float row_scale[2] = {token_scale.x * (norm / code_unit<kExact>(kBits, kKey, 0)),
                                  token_scale.y * (norm / code_unit<kExact>(kBits, kKey, 1))};
      store_rows<T, kKey, kAligned>(out + token * token_stride + first_channel, token_stride, d,
                                    row_scale, kPartial ? tokens - token : 2);
    }
  }
}

/// bits -> template argument.
template <class T, int kDim, bool kAligned, bool kPartial, bool kKey, class... Args>
__device__ __forceinline__ void dequantize_part(int bits, Args&&... args) {
  switch (bits) {
    case 2:
      return dequantize_part<T, kDim, kAligned, kPartial, 2, kKey>(args...);
    case 3:
      return dequantize_part<T, kDim, kAligned, kPartial, 3, kKey>(args...);
    case 4:
      return dequantize_part<T, kDim, kAligned, kPartial, 4, kKey>(args...);
    case 8:
      return dequantize_part<T, kDim, kAligned, kPartial, 8, kKey>(args...);
  }
}

}  // namespace kvarn::device::dequantize
