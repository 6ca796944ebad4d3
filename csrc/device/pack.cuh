// Codes of a tile, as the lanes of tile.cuh hold them -> the words of a record (layout.h).
//
// A code comes as the bits of 2^23 + code (fit.cuh). Multiplying and adding such words puts fields
// of bits side by side; what the exponents leave behind is above bit 23.
#pragma once

#include <cstdint>

#include "device/tile.cuh"
#include "kvarn/layout.h"

namespace kvarn::device {

/// `bits` fields: codes[0] lowest. At most 16 bits of it count.
template <int kBits, int kCount>
__device__ __forceinline__ uint32_t fields(const uint32_t (&codes)[kCount]) {
  static_assert(kBits * kCount <= 16);
  uint32_t all = codes[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) all += codes[i] << (kBits * i);
  return all;
}

/// Two half words -> a word.
__device__ __forceinline__ uint32_t join(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x5410);
}

/// K: rows are channels. code(i, j): of the lane's channel i and token j. For every pair of tokens
/// it has four half2 of a fragment, numbers 4 * quarter .. 4 * quarter + 3 of the 16 whose words
/// make 64 channels. With 3 bits `out` must be 0 (lanes of two warps have parts of the same words).
template <class Shape, int kBits, class Code>
__device__ __forceinline__ void pack_keys(const TilePlace<Shape>& at, const Code& code,
                                          uint8_t* out) {
  constexpr int kTiles = Shape::kRows / kFragmentDim;  // fragments of 16 tokens
  const int record_lane = (at.col % 64 / 8) * 4 + at.row % 32 / 8;
  const int row_tile = at.col / 64 * 4;
  const int col_tile = at.row / 32 * 2 + at.row % 8 / 4;
  const auto word = [&](int number) {
    return reinterpret_cast<uint32_t*>(out + word_offset(number, record_lane));
  };
  // Bits of the four channels of pair `jj`, those of even ones in the low half.
  const auto half = [&](int jj, int hi, int first, int last) {
    uint32_t all = code(first / 2 * 2 + hi, 2 * jj + first % 2);
#pragma unroll
    for (int k = first + 1; k < last; ++k) {
      all += code(k / 2 * 2 + hi, 2 * jj + k % 2) << (kBits * (k - first));
    }
    return all;
  };
  if constexpr (kBits == 8) {
#pragma unroll
    for (int jj = 0; jj < 4; ++jj) {
      const int fragment = (row_tile + jj) * kTiles + col_tile;
      *word(2 * fragment) = join(half(jj, 0, 0, 2), half(jj, 1, 0, 2));
      *word(2 * fragment + 1) = join(half(jj, 0, 2, 4), half(jj, 1, 2, 4));
    }
  } else if constexpr (kBits == 4) {
#pragma unroll
    for (int jj = 0; jj < 4; ++jj) {
      *word((row_tile + jj) * kTiles + col_tile) = join(half(jj, 0, 0, 4), half(jj, 1, 0, 4));
    }
  } else if constexpr (kBits == 2) {
    // A word is of two lanes. Each keeps two pairs of tokens and sends the bytes of the others.
    const bool second = col_tile % 2 == 1;
    uint32_t bytes[4];  // 0, 2: this lane's
#pragma unroll
    for (int jj = 0; jj < 4; ++jj) {
      bytes[jj] = join(half(jj, 0, 0, 4), half(jj, 1, 0, 4)) & 0x00ff00ffu;
    }
    const uint32_t send = second ? bytes[0] | bytes[1] << 8 : bytes[2] | bytes[3] << 8;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, send, 4);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t own = second ? bytes[2 + k] : bytes[k];
      const uint32_t theirs = other >> (8 * k) & 0x00ff00ffu;
      const int jj = second ? 2 + k : k;
      *word(((row_tile + jj) * kTiles + col_tile) / 2) =
          second ? theirs | own << 8 : own | theirs << 8;
    }
  } else {
    // The fields 0 .. 14 are a string of bits in words of 15 (in each half); this lane's 12 start
    // at 12 * quarter.
    const int quarter = col_tile % 4;
    const int word_of = 12 * quarter / 15;
    const int shift = 12 * quarter % 15;
    const uint32_t keep = 0x00010001u * ((1u << (15 - shift)) - 1);
#pragma unroll
    for (int jj = 0; jj < 4; ++jj) {
      const int unit = 3 * (((row_tile + jj) * kTiles + col_tile) / 4);
      const uint32_t all = join(half(jj, 0, 0, 4), half(jj, 1, 0, 4)) & 0x0fff0fffu;
      atomicOr(word(unit + word_of), (all & keep) << shift);
      const uint32_t rest = (all & ~keep) >> (15 - shift);
      if (quarter == 3) {
#pragma unroll
        for (int k = 0; k < 3; ++k) atomicOr(word(unit + k), (rest >> k & 0x00010001u) << 15);
      } else if (quarter > 0) {
        atomicOr(word(unit + word_of + 1), rest);
      }
    }
  }
}

/// The words of a unit of 16 half2 of 3-bit codes, in one of the halves: field number `index` of it
/// is code(index).
template <class Code>
__device__ __forceinline__ void put_3_bits(const Code& code, uint32_t (&half)[3]) {
#pragma unroll
  for (int index = 0; index < 16; ++index) {
    const FieldPosition f = field_position(index, 3);
    const uint32_t q = code(index) & 7;
    if (f.shift == 15) {
#pragma unroll
      for (int k = 0; k < 3; ++k) half[k] |= (q >> k & 1) << 15;
    } else {
      half[f.word] |= q << f.shift;
    }
  }
}

/// V: rows are tokens. code(i, j): of the lane's token i and channel j. For each of its two pairs
/// of tokens the lane has one half of every word of a unit, its neighbour of the other eight tokens
/// the other half; each of them writes the words of one pair.
template <class Shape, int kBits, class Code>
__device__ __forceinline__ void pack_values(const TilePlace<Shape>& at, const Code& code,
                                            uint8_t* out) {
  constexpr int kTiles = Shape::kCols / kFragmentDim;  // fragments of 16 tokens
  const int record_lane = (at.col % 64 / 8) * 4 + at.row % 64 / 16;
  const bool upper = at.row / 8 % 2 == 1;
  const int row_tile = at.col / 64 * 4;
  const int col_tile = at.row / 64 * 4 + at.row % 8 / 2;
  uint32_t own[2][kBits];  // half words, by pair
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    // Number of a half2 among the lane's 16: 4 * (channel pair) + channel % 2 + 2 * (token % 2).
    const auto number = [&](int index) {
      return code(2 * pair + index % 4 / 2, index / 4 * 2 + index % 2);
    };
    if constexpr (kBits == 3) {
      uint32_t words[3] = {};
      put_3_bits(number, words);
#pragma unroll
      for (int w = 0; w < 3; ++w) own[pair][w] = words[w];
    } else {
      constexpr int kFields = 16 / kBits;
#pragma unroll
      for (int w = 0; w < kBits; ++w) {
        uint32_t part[kFields];
#pragma unroll
        for (int k = 0; k < kFields; ++k) part[k] = number(w * kFields + k);
        own[pair][w] = fields<kBits>(part);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kBits; k += 2) {
    const int next = k + 1 < kBits ? k + 1 : k;
    const uint32_t send = upper ? join(own[0][k], own[0][next]) : join(own[1][k], own[1][next]);
    const uint32_t other = __shfl_xor_sync(0xffffffffu, send, 8);
#pragma unroll
    for (int m = 0; m <= next - k; ++m) {
      const uint32_t mine = upper ? own[1][k + m] : own[0][k + m];
      const uint32_t theirs = m == 0 ? other & 0xffff : other >> 16;
      const int word = ((col_tile + (upper ? 1 : 0)) * kTiles + row_tile) * kBits / 4 + k + m;
      *reinterpret_cast<uint32_t*>(out + word_offset(word, record_lane)) =
          upper ? join(theirs, mine) : join(mine, theirs);
    }
  }
}

}  // namespace kvarn::device
