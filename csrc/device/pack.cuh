// Codes of a tile in shared memory, a byte each -> the words of a record (layout.h).
#pragma once

#include <cstdint>

#include "device/tile.cuh"
#include "kvarn/layout.h"

namespace kvarn::device {

/// What four fragments have of one lane: sixteen pairs of codes, of low and high halves, four to a
/// word. Pairs are numbered as half2 registers are.
struct CodePairs {
  uint32_t low[4];
  uint32_t high[4];
};

/// K: rows are channels. Fragments 4 * unit .. 4 * unit + 3 of a record's lane.
template <class Shape>
__device__ __forceinline__ CodePairs key_pairs(const uint8_t* codes, int unit, int lane) {
  constexpr int kUnits = Shape::kRows / (4 * kFragmentDim);  // of a row of fragments
  const int row_tile = unit / kUnits;
  const int token = row_tile / 4 * 64 + lane / 4 * 8 + row_tile % 4 * 2;
  const int channel = unit % kUnits * 64 + lane % 4 * 8;
  const uint8_t* const from = codes + code_place<Shape>(true, channel, token);
  CodePairs pairs;
#pragma unroll
  for (int f = 0; f < 4; ++f) {
    const auto tokens = [&](int c) -> uint32_t {
      return *reinterpret_cast<const uint16_t*>(from +
                                                (f / 2 * 32 + f % 2 * 4 + c) * (4 * Shape::kCols));
    };
    pairs.low[f] = __byte_perm(tokens(0), tokens(2), 0x5410);
    pairs.high[f] = __byte_perm(tokens(1), tokens(3), 0x5410);
  }
  return pairs;
}

/// V: rows are tokens.
template <class Shape>
__device__ __forceinline__ CodePairs value_pairs(const uint8_t* codes, int unit, int lane) {
  constexpr int kUnits = Shape::kCols / (4 * kFragmentDim);  // of a column of fragments
  const int col_tile = unit / kUnits;
  const int token = col_tile / 4 * 64 + lane % 4 * 16 + col_tile % 4 * 2;
  const int channel = unit % kUnits * 64 + lane / 4 * 8;
  const uint8_t* const from = codes + code_place<Shape>(false, token, channel);
  const auto channels = [&](int g) {
    return *reinterpret_cast<const uint2*>(from + g * (4 * Shape::kCols));
  };
  const auto join = [](uint2 even, uint2 odd, uint32_t (&to)[4]) {
    to[0] = __byte_perm(even.x, odd.x, 0x5410);
    to[1] = __byte_perm(even.x, odd.x, 0x7632);
    to[2] = __byte_perm(even.y, odd.y, 0x5410);
    to[3] = __byte_perm(even.y, odd.y, 0x7632);
  };
  CodePairs pairs;
  join(channels(0), channels(1), pairs.low);
  join(channels(8), channels(9), pairs.high);
  return pairs;
}

/// The kBits words of sixteen pairs.
template <int kBits>
__device__ __forceinline__ void pack_pairs(const CodePairs& pairs, uint32_t (&words)[kBits]) {
  if constexpr (kBits == 8) {
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      words[2 * f] = __byte_perm(pairs.low[f], pairs.high[f], 0x5410);
      words[2 * f + 1] = __byte_perm(pairs.low[f], pairs.high[f], 0x7632);
    }
  } else if constexpr (kBits == 3) {
#pragma unroll
    for (int w = 0; w < 3; ++w) words[w] = 0;
#pragma unroll
    for (int index = 0; index < 16; ++index) {
      const int byte = index % 4;
      const uint32_t pair = __byte_perm(pairs.low[index / 4] >> 8 * byte & 0xff,
                                        pairs.high[index / 4] >> 8 * byte & 0xff, 0x5410);
      const FieldPosition f = field_position(index, 3);
      if (f.shift == 15) {
#pragma unroll
        for (int w = 0; w < 3; ++w) words[w] |= (pair >> w & 0x00010001u) << 15;
      } else {
        words[f.word] |= pair << f.shift;
      }
    }
  } else {
    // Two codes of a word into one byte; then, with 2 bits, four.
    uint32_t low[4];
    uint32_t high[4];
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      const auto gather = [](uint32_t x) {
        x |= x >> (8 - kBits);
        return kBits == 2 ? x | x >> 12 : x;
      };
      low[f] = gather(pairs.low[f]);
      high[f] = gather(pairs.high[f]);
    }
    if constexpr (kBits == 4) {
#pragma unroll
      for (int f = 0; f < 4; ++f) words[f] = __byte_perm(low[f], high[f], 0x6420);
    } else {
#pragma unroll
      for (int f = 0; f < 4; f += 2) {
        words[f / 2] = __byte_perm(__byte_perm(low[f], low[f + 1], 0x0040),
                                   __byte_perm(high[f], high[f + 1], 0x0040), 0x5410);
      }
    }
  }
}

/// All codes of a part of a record, which may start at any address.
template <class Shape, int kBits>
__device__ __forceinline__ void store_codes(const uint8_t* codes, bool key, uint8_t* out) {
  const bool aligned = reinterpret_cast<uintptr_t>(out) % kLaneBytes == 0;
#pragma unroll 1
  for (int i = own_thread(); i < Shape::kRows * Shape::kCols / 32; i += Shape::kThreads) {
    const int unit = i / kWarpLanes;
    const int lane = i % kWarpLanes;
    uint32_t words[kBits];
    pack_pairs<kBits>(
        key ? key_pairs<Shape>(codes, unit, lane) : value_pairs<Shape>(codes, unit, lane), words);
    if (aligned) {
      if constexpr (kBits == 3) {
#pragma unroll
        for (int w = 0; w < 3; ++w) {
          *reinterpret_cast<uint32_t*>(out + word_offset(3 * unit + w, lane)) = words[w];
        }
      } else if constexpr (kBits == 2) {
        *reinterpret_cast<uint2*>(out + word_offset(2 * unit, lane)) = {words[0], words[1]};
      } else {
#pragma unroll
        for (int w = 0; w < kBits; w += 4) {
          *reinterpret_cast<uint4*>(out + word_offset(kBits * unit + w, lane)) = {
              words[w], words[w + 1], words[w + 2], words[w + 3]};
        }
      }
    } else {
#pragma unroll 1
      for (int w = 0; w < kBits; ++w) {
        uint32_t word = words[0];
#pragma unroll
        for (int k = 1; k < kBits; ++k) word = k == w ? words[k] : word;
        uint8_t* const to = out + word_offset(kBits * unit + w, lane);
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) to[byte] = static_cast<uint8_t>(word >> 8 * byte);
      }
    }
  }
}

}  // namespace kvarn::device
