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

/// Two units of four fragments: 4 * unit .. 4 * unit + 3 of a record's lane.
struct UnitPair {
  unsigned first;
  unsigned second;
  CodePairs codes[2];
};

/// K: rows are channels. The units are those of two neighbouring row tiles, whose tokens are
/// neighbours in shared memory.
template <class Shape>
__device__ __forceinline__ UnitPair key_units(const uint8_t* codes, unsigned i, unsigned lane) {
  constexpr unsigned kUnits = Shape::kRows / (4 * kFragmentDim);  // of a row of fragments
  const unsigned row_tile = i / kUnits * 2;
  const unsigned token = row_tile / 4 * 64 + lane / 4 * 8 + row_tile % 4 * 2;
  const unsigned channel = i % kUnits * 64 + lane % 4 * 8;
  const uint8_t* const from = codes + code_place<Shape>(true, channel, token);
  UnitPair units;
  units.first = row_tile * kUnits + i % kUnits;
  units.second = units.first + kUnits;
#pragma unroll
  for (int f = 0; f < 4; ++f) {
    uint32_t tokens[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      tokens[c] = *reinterpret_cast<const uint32_t*>(from + (f / 2 * 32 + f % 2 * 4 + c) *
                                                                (4 * Shape::kCols));
    }
    units.codes[0].low[f] = __byte_perm(tokens[0], tokens[2], 0x5410);
    units.codes[1].low[f] = __byte_perm(tokens[0], tokens[2], 0x7632);
    units.codes[0].high[f] = __byte_perm(tokens[1], tokens[3], 0x5410);
    units.codes[1].high[f] = __byte_perm(tokens[1], tokens[3], 0x7632);
  }
  return units;
}

/// V: rows are tokens. The units are neighbours.
template <class Shape>
__device__ __forceinline__ UnitPair value_units(const uint8_t* codes, unsigned i, unsigned lane) {
  constexpr unsigned kUnits = Shape::kCols / (4 * kFragmentDim);  // of a column of fragments
  const unsigned col_tile = 2 * i / kUnits;
  const unsigned token = col_tile / 4 * 64 + lane % 4 * 16 + col_tile % 4 * 2;
  const unsigned channel = 2 * i % kUnits * 64 + lane / 4 * 8;
  const uint8_t* const from = codes + code_place<Shape>(false, token, channel);
  UnitPair units;
  units.first = 2 * i;
  units.second = 2 * i + 1;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const auto channels = [&](int g) {
      const int row = g + (kUnits == 1 ? 2 * u : 0);
      return *reinterpret_cast<const uint2*>(from + row * (4 * Shape::kCols) +
                                             (kUnits == 1 ? 0 : 64 * u));
    };
    const auto join = [](uint2 even, uint2 odd, uint32_t (&to)[4]) {
      to[0] = __byte_perm(even.x, odd.x, 0x5410);
      to[1] = __byte_perm(even.x, odd.x, 0x7632);
      to[2] = __byte_perm(even.y, odd.y, 0x5410);
      to[3] = __byte_perm(even.y, odd.y, 0x7632);
    };
    join(channels(0), channels(1), units.codes[u].low);
    join(channels(8), channels(9), units.codes[u].high);
  }
  return units;
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
        x += x >> (8 - kBits);  // no carries; an addition and a shift are one instruction
        return kBits == 2 ? x + (x >> 12) : x;
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

/// A unit's words, to a record that may start at any address.
template <int kBits>
__device__ __forceinline__ void store_unit(const uint32_t (&words)[kBits], unsigned unit,
                                           unsigned lane, bool aligned, uint8_t* out) {
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
    return;
  }
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

/// All codes of a part of a record, two units a thread.
template <class Shape, int kBits>
__device__ __forceinline__ void store_codes(const uint8_t* codes, bool key, uint8_t* out) {
  static_assert(Shape::kRows * Shape::kCols == 64 * Shape::kThreads);
  const unsigned lane = own_thread() % kWarpLanes;
  const unsigned i = own_thread() / kWarpLanes;
  const bool aligned = reinterpret_cast<uintptr_t>(out) % kLaneBytes == 0;
  const UnitPair units =
      key ? key_units<Shape>(codes, i, lane) : value_units<Shape>(codes, i, lane);
  uint32_t words[2][kBits];
#pragma unroll
  for (int u = 0; u < 2; ++u) pack_pairs<kBits>(units.codes[u], words[u]);
  if (kBits == 2 && !key && aligned) {
    *reinterpret_cast<uint4*>(out + word_offset(2 * units.first, lane)) = {
        words[0][0], words[0][1], words[1][0], words[1][1]};
  } else {
    store_unit<kBits>(words[0], units.first, lane, aligned, out);
    store_unit<kBits>(words[1], units.second, lane, aligned, out);
  }
}

}  // namespace kvarn::device
