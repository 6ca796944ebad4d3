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

/// Half2 number `index` of a lane's words as the subnormal fp16 numbers code * 2^(at - 24): the
/// field moved to mantissa bit `at`. Tensor cores take subnormals; as they do not normalize them
/// first, sums keep fewer bits.
template <int kBits>
__device__ __forceinline__ uint32_t code_field(const uint32_t* words, int index, int at) {
  constexpr uint32_t kFirst = 0x00010001u;  // bit 0 of both halves
  const FieldPosition f = field_position(index, kBits);
  const uint32_t word = words[f.word];
  if (kBits == 3 && f.shift == 15) {
    return ((word >> 15 & kFirst) | (words[f.word + 1] >> 14 & kFirst << 1) |
            (words[f.word + 2] >> 13 & kFirst << 2))
           << at;
  }
  return (f.shift < at ? word << (at - f.shift) : word >> (f.shift - at)) &
         (kFirst * ((1u << kBits) - 1)) << at;
}

}  // namespace kvarn::device
