// Codes of a record: from the words of a lane to fp16 numbers, and which code stands where.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kvarn/layout.h"

namespace kvarn::device {

struct CodeIndex {
  int token;
  int channel;
};

/// The inverse of key_position.
__device__ __forceinline__ CodeIndex key_code_at(const FragmentPosition& p, int head_dim) {
  const int tiles = head_dim / kFragmentDim;
  const int row_tile = p.fragment / tiles;
  const int col_tile = p.fragment % tiles;
  return {row_tile / 4 * 64 + p.lane / 4 * 8 + row_tile % 4 * 2 + p.reg % 2,
          col_tile / 2 * 32 + p.lane % 4 * 8 + col_tile % 2 * 4 + p.reg / 2 * 2 + p.hi};
}

/// The inverse of value_position.
__device__ __forceinline__ CodeIndex value_code_at(const FragmentPosition& p, int head_dim) {
  const int tiles = head_dim / kFragmentDim;
  const int col_tile = p.fragment / tiles;
  const int row_tile = p.fragment % tiles;
  return {col_tile / 4 * 64 + (p.lane % 4 * 2 + p.hi) * 8 + col_tile % 4 * 2 + p.reg / 2,
          row_tile / 4 * 64 + p.lane / 4 * 8 + row_tile % 4 * 2 + p.reg % 2};
}

inline constexpr int kFragmentsAtOnce = 4;  ///< their 16 half2 are whole words, for all bits

/// A lane's words of the fragments 4 * group .. 4 * group + 3.
template <int kBits>
__device__ __forceinline__ void load_words(const uint8_t* codes, int group, int lane,
                                           uint32_t (&words)[kBits]) {
  constexpr int kWidth = kBits % 4 == 0 ? 4 : kBits % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < kBits; i += kWidth) {
    const uint8_t* const at = codes + word_offset(group * kBits + i, lane);
    if constexpr (kWidth == 4) {
      const uint4 w = *reinterpret_cast<const uint4*>(at);
      words[i] = w.x;
      words[i + 1] = w.y;
      words[i + 2] = w.z;
      words[i + 3] = w.w;
    } else if constexpr (kWidth == 2) {
      const uint2 w = *reinterpret_cast<const uint2*>(at);
      words[i] = w.x;
      words[i + 1] = w.y;
    } else {
      words[i] = *reinterpret_cast<const uint32_t*>(at);
    }
  }
}

/// Half2 number `index` of a lane's words (field_position), as exact fp16 numbers.
///
/// A field whose lowest bit stands at mantissa bit k becomes the number 2^(10 - k) + code by one
/// and-or with the exponent 10 - k; the subtraction then is exact. Fields beyond the ten bits of
/// the mantissa share one shift by 8.
template <int kBits>
__device__ __forceinline__ uint32_t code_pair(const uint32_t* words, int index) {
  constexpr uint32_t kFirst = 0x00010001u;  // bit 0 of both halves
  const FieldPosition f = field_position(index, kBits);
  uint32_t field;
  int at = 0;
  if (kBits == 3 && f.shift == 15) {
    field = (words[f.word] >> 15 & kFirst) | (words[f.word + 1] >> 14 & kFirst << 1) |
            (words[f.word + 2] >> 13 & kFirst << 2);
  } else {
    const int shift = f.shift + kBits <= 10 ? 0 : 8;
    at = f.shift - shift;
    field = words[f.word] >> shift & (kFirst * ((1u << kBits) - 1)) << at;
  }
  const uint32_t bias = kFirst * static_cast<uint32_t>((25 - at) << 10);  // of 2^(10 - at)
  const uint32_t number = field | bias;
  const __half2 code =
      __hsub2(reinterpret_cast<const __half2&>(number), reinterpret_cast<const __half2&>(bias));
  return reinterpret_cast<const uint32_t&>(code);
}

/// Puts half2 number `index` (two codes below 2^kBits, one a half) into a lane's words, which are 0
/// there.
template <int kBits>
__device__ __forceinline__ void put_code_pair(uint32_t (&words)[kBits], int index, uint32_t pair) {
  const FieldPosition f = field_position(index, kBits);
  if (kBits == 3 && f.shift == 15) {
#pragma unroll
    for (int k = 0; k < kBits; ++k) words[k] |= (pair >> k & 0x00010001u) << 15;
  } else {
    words[f.word] |= pair << f.shift;
  }
}

/// The inverse of load_words. Records may start at any address; `aligned`: at a multiple of 16.
template <int kBits>
__device__ __forceinline__ void store_words(uint8_t* codes, int group, int lane,
                                            const uint32_t (&words)[kBits], bool aligned) {
  constexpr int kWidth = kBits % 4 == 0 ? 4 : kBits % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < kBits; i += kWidth) {
    uint8_t* const at = codes + word_offset(group * kBits + i, lane);
    if (!aligned) {
      for (int b = 0; b < 4 * kWidth; ++b) {
        at[b] = static_cast<uint8_t>(words[i + b / 4] >> (8 * (b % 4)));
      }
    } else if constexpr (kWidth == 4) {
      *reinterpret_cast<uint4*>(at) = {words[i], words[i + 1], words[i + 2], words[i + 3]};
    } else if constexpr (kWidth == 2) {
      *reinterpret_cast<uint2*>(at) = {words[i], words[i + 1]};
    } else {
      *reinterpret_cast<uint32_t*>(at) = words[i];
    }
  }
}

/// Codes of a tile, one a byte in [row][column] (K: [channel][token], V: [token][channel]) order in
/// shared memory -> fragment order. The eight codes of a lane in a fragment stand in four rows at
/// two neighbouring columns: with K rows are channels and the four are neighbours, with V rows are
/// tokens and they are two pairs of neighbours, 8 apart.
template <class Shape, int kBits>
__device__ __forceinline__ void pack_tile(const uint8_t* tile, uint8_t* codes, bool aligned) {
  constexpr int kFragments = Shape::kTokens * Shape::kDim / (kFragmentDim * kFragmentDim);
  for (int i = threadIdx.x; i < kFragments / kFragmentsAtOnce * kWarpLanes; i += Shape::kThreads) {
    const int lane = i % kWarpLanes;
    const int group = i / kWarpLanes;
    uint32_t words[kBits] = {};
#pragma unroll
    for (int k = 0; k < kFragmentsAtOnce; ++k) {
      const FragmentPosition first = {group * kFragmentsAtOnce + k, lane, 0, 0};
      const CodeIndex at =
          Shape::kKey ? key_code_at(first, Shape::kDim) : value_code_at(first, Shape::kDim);
      const int row = Shape::kKey ? at.channel : at.token;
      const int column = Shape::kKey ? at.token : at.channel;
      const uint8_t* const place = tile + row * Shape::kCodePitch + column;
      uint32_t pairs[4];  // by row: columns c and c + 1 in the two low bytes
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int below = Shape::kKey ? j : j % 2 * 8 + j / 2;
        pairs[j] = *reinterpret_cast<const uint16_t*>(place + below * Shape::kCodePitch);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // The lower row in the low half, the other in the high half.
        const uint32_t both = __byte_perm(pairs[2 * j], pairs[2 * j + 1], 0x5410);
        const int index = k * kFragmentRegisters + 2 * j;
        put_code_pair<kBits>(words, index, both & 0x00ff00ffu);
        put_code_pair<kBits>(words, index + 1, both >> 8 & 0x00ff00ffu);
      }
    }
    store_words<kBits>(codes, group, lane, words, aligned);
  }
}

}  // namespace kvarn::device
