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

/// The words of a unit of 16 half2 of 3-bit codes, in one of the halves: field number `index` of it
/// is code(index). `kFirst`, `kLast`: those that this lane has.
template <int kFirst, int kLast, class Code>
__device__ __forceinline__ void put_3_bits(const Code& code, uint32_t (&half)[3]) {
#pragma unroll
  for (int index = kFirst; index < kLast; ++index) {
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

/// K: rows are channels. code(i, j): of the lane's channel i and token j. The lane has whole words,
/// but for 3 bits, where lanes of neighbouring 32 channels have half of their fields each.
template <class Shape, int kBits, class Code>
__device__ __forceinline__ void pack_keys(const TilePlace<Shape>& at, const Code& code,
                                          uint8_t* out) {
  constexpr int kTiles = Shape::kRows / kFragmentDim;  // fragments of 16 tokens
  const int record_lane = (at.col % 64 / 8) * 4 + at.row % 32 / 8;
  const int row_tile = at.col / 64 * 4;
  const int col_tile = at.row / 32 * 2;
  const auto store = [&](int word, uint32_t bits) {
    *reinterpret_cast<uint32_t*>(out + word_offset(word, record_lane)) = bits;
  };
  if constexpr (kBits == 3) {
    const bool second = at.row / 32 % 2 == 1;  // fields 8 .. 15
#pragma unroll
    for (int jj = 0; jj < 2; ++jj) {
      // This lane writes the words of two pairs of tokens and sends those of the other two.
      uint32_t words[2][3];  // own, sent
#pragma unroll
      for (int sent = 0; sent < 2; ++sent) {
        const bool upper = second != (sent == 1);
        uint32_t half[2][3] = {};
#pragma unroll
        for (int hi = 0; hi < 2; ++hi) {
          const auto own = [&](int index) {
            const int i = index % 8 / 4 * 4 + index % 4 / 2 * 2 + hi;
            const uint32_t of_low = code(i, 2 * jj + index % 2);
            const uint32_t of_high = code(i, 2 * (jj + 2) + index % 2);
            return upper ? of_high : of_low;
          };
          uint32_t first[3] = {};
          uint32_t last[3] = {};
          put_3_bits<0, 8>(own, first);
          put_3_bits<8, 16>(own, last);
#pragma unroll
          for (int w = 0; w < 3; ++w) half[hi][w] = second ? last[w] : first[w];
        }
#pragma unroll
        for (int w = 0; w < 3; ++w) words[sent][w] = join(half[0][w], half[1][w]);
      }
      const int pair = jj + (second ? 2 : 0);
      const int unit = ((row_tile + pair) * kTiles + col_tile / 4 * 4) / 4;
#pragma unroll
      for (int w = 0; w < 3; ++w) {
        store(3 * unit + w, words[0][w] | __shfl_xor_sync(0xffffffffu, words[1][w], 16));
      }
    }
  } else {
#pragma unroll
    for (int jj = 0; jj < 4; ++jj) {
      const int fragment = (row_tile + jj) * kTiles + col_tile;
      uint32_t half[2][8];  // by channel parity: codes in the order of their numbers, two fragments
#pragma unroll
      for (int hi = 0; hi < 2; ++hi) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          half[hi][k] = code(k / 4 * 4 + k % 4 / 2 * 2 + hi, 2 * jj + k % 2);
        }
      }
      constexpr int kFields = 16 / kBits;
#pragma unroll
      for (int w = 0; w < 8 / kFields; ++w) {
        uint32_t sides[2];
#pragma unroll
        for (int hi = 0; hi < 2; ++hi) {
          uint32_t part[kFields];
#pragma unroll
          for (int k = 0; k < kFields; ++k) part[k] = half[hi][w * kFields + k];
          sides[hi] = fields<kBits>(part);
        }
        store(fragment * 4 / kFields + w, join(sides[0], sides[1]));
      }
    }
  }
}

/// V: rows are tokens. code(i, j): of the lane's token i and channel j. The lane has one half of
/// each word, its neighbour of the other eight tokens the other; each of them writes half of the
/// words.
template <class Shape, int kBits, class Code>
__device__ __forceinline__ void pack_values(const TilePlace<Shape>& at, const Code& code,
                                            uint8_t* out) {
  constexpr int kTiles = Shape::kCols / kFragmentDim;  // fragments of 16 tokens
  constexpr int kHalves = 2 * kBits;                   // of two pairs of tokens
  const int record_lane = (at.col % 64 / 8) * 4 + at.row % 64 / 16;
  const bool upper = at.row / 8 % 2 == 1;
  const int row_tile = at.col / 64 * 4;
  const int col_tile = at.row / 64 * 4;
  uint32_t own[2][kHalves];  // of the pairs of tokens 0, 1 and 2, 3
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t* const halves = own[pair / 2] + pair % 2 * kBits;
    // Number of a half2 among the lane's 16: 4 * (channel pair) + channel % 2 + 2 * (token % 2).
    const auto number = [&](int index) {
      return code(2 * pair + index % 4 / 2, index / 4 * 2 + index % 2);
    };
    if constexpr (kBits == 3) {
      uint32_t words[3] = {};
      put_3_bits<0, 16>(number, words);
#pragma unroll
      for (int w = 0; w < 3; ++w) halves[w] = words[w];
    } else {
      constexpr int kFields = 16 / kBits;
#pragma unroll
      for (int w = 0; w < kBits; ++w) {
        uint32_t part[kFields];
#pragma unroll
        for (int k = 0; k < kFields; ++k) part[k] = number(w * kFields + k);
        halves[w] = fields<kBits>(part);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kHalves; k += 2) {
    const uint32_t send = upper ? join(own[0][k], own[0][k + 1]) : join(own[1][k], own[1][k + 1]);
    const uint32_t other = __shfl_xor_sync(0xffffffffu, send, 4);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint32_t mine = upper ? own[1][k + m] : own[0][k + m];
      const uint32_t theirs = m == 0 ? other & 0xffff : other >> 16;
      const int pair = (k + m) / kBits + (upper ? 2 : 0);
      const int word = ((col_tile + pair) * kTiles + row_tile) * kBits / 4 + (k + m) % kBits;
      *reinterpret_cast<uint32_t*>(out + word_offset(word, record_lane)) =
          upper ? join(theirs, mine) : join(mine, theirs);
    }
  }
}

}  // namespace kvarn::device
