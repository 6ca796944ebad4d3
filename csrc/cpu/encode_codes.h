// Codes in [rows][cols] order <-> codes in fragment order (kvarn/layout.h).
//
// The eight codes of a lane in a fragment stand in four rows at two neighbouring columns: with K
// rows are channels and the four are neighbours, with V rows are tokens and they are two pairs of
// neighbours, 8 apart. So both are one loop over such fours of rows, and along them over pairs of
// columns.
#pragma once

#include "cpu/encode.h"
#include "cpu/numeric.h"

namespace kvarn::cpu::KVARN_ISA {
namespace {

/// Four rows: registers 0 and 1 hold the columns 2x and 2x + 1 of row[0] (low half) and row[1]
/// (high half), registers 2 and 3 those of row[2] and row[3].
struct RowQuad {
  int row[4];
  int lane;        ///< of x = 0; x % 32 / 4 * 4 more for pair x
  int fragment;    ///< of x = 0
  int block_step;  ///< fragments more for each 32 pairs
  int pair_step;   ///< fragments more for each x % 4
};

inline RowQuad row_quad(int index, int rows, int cols, bool rows_are_tokens) {
  if (rows_are_tokens) {
    const int fragments = cols / kFragmentDim;
    const int block = index / 16, t = index / 4 % 4, p = index % 4;
    const int token = 64 * block + 16 * t + 2 * p;
    return {{token, token + 8, token + 1, token + 9}, t, (4 * block + p) * fragments, 4, 1};
  }
  const int fragments = rows / kFragmentDim;
  const int channel = 4 * index;
  return {{channel, channel + 1, channel + 2, channel + 3},
          channel % 32 / 8,
          channel / 32 * 2 + channel % 8 / 4,
          4 * fragments,
          fragments};
}

struct Registers {
  uint32_t of[kFragmentRegisters];
};

inline uint32_t load_word(const uint8_t* codes, int word, int lane) {
  uint32_t x;
  __builtin_memcpy(&x, codes + word_offset(word, lane), sizeof x);
  return x;
}

inline void store_word(uint8_t* codes, int word, int lane, uint32_t x) {
  __builtin_memcpy(codes + word_offset(word, lane), &x, sizeof x);
}

inline void or_word(uint8_t* codes, int word, int lane, uint32_t x) {
  store_word(codes, word, lane, load_word(codes, word, lane) | x);
}

/// 3 bits: four fragments share three words; this is number kPlace of the four.
template <int kPlace>
void put_fragment3(uint8_t* codes, int first_word, int lane, const Registers& r) {
  uint32_t words[3] = {};
  for (int i = 0; i < kFragmentRegisters; ++i) {
    const FieldPosition at = field_position(kFragmentRegisters * kPlace + i, 3);
    if (at.shift < 15) {
      words[at.word] |= r.of[i] << at.shift;
    } else {
      for (int k = 0; k < 3; ++k) words[k] |= (r.of[i] >> k & 0x00010001u) << 15;
    }
  }
  for (int k = 0; k < 3; ++k) or_word(codes, first_word + k, lane, words[k]);
}

template <int kPlace>
Registers get_fragment3(const uint8_t* codes, int first_word, int lane) {
  uint32_t words[3];
  for (int k = 0; k < 3; ++k) words[k] = load_word(codes, first_word + k, lane);
  Registers r{};
  for (int i = 0; i < kFragmentRegisters; ++i) {
    const FieldPosition at = field_position(kFragmentRegisters * kPlace + i, 3);
    if (at.shift < 15) {
      r.of[i] = words[at.word] >> at.shift & 0x00070007u;
    } else {
      for (int k = 0; k < 3; ++k) r.of[i] |= (words[k] >> 15 & 0x00010001u) << k;
    }
  }
  return r;
}

/// Into codes that were zero before the first fragment came.
template <int kBits>
void put_fragment(uint8_t* codes, int fragment, int lane, const Registers& r) {
  if (kBits == 8) {
    store_word(codes, 2 * fragment, lane, r.of[0] | r.of[1] << 8);
    store_word(codes, 2 * fragment + 1, lane, r.of[2] | r.of[3] << 8);
  } else if (kBits == 4) {
    store_word(codes, fragment, lane, r.of[0] | r.of[1] << 4 | r.of[2] << 8 | r.of[3] << 12);
  } else if (kBits == 2) {
    const uint32_t x = r.of[0] | r.of[1] << 2 | r.of[2] << 4 | r.of[3] << 6;
    or_word(codes, fragment / 2, lane, x << fragment % 2 * 8);
  } else {
    const int first_word = fragment / 4 * 3;
    switch (fragment % 4) {
      case 0:
        return put_fragment3<0>(codes, first_word, lane, r);
      case 1:
        return put_fragment3<1>(codes, first_word, lane, r);
      case 2:
        return put_fragment3<2>(codes, first_word, lane, r);
      default:
        return put_fragment3<3>(codes, first_word, lane, r);
    }
  }
}

template <int kBits>
Registers get_fragment(const uint8_t* codes, int fragment, int lane) {
  constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x00010001u;
  if (kBits == 8) {
    const uint32_t a = load_word(codes, 2 * fragment, lane);
    const uint32_t b = load_word(codes, 2 * fragment + 1, lane);
    return {{a & kMask, a >> 8 & kMask, b & kMask, b >> 8 & kMask}};
  }
  if (kBits == 4 || kBits == 2) {
    const uint32_t x = kBits == 4 ? load_word(codes, fragment, lane)
                                  : load_word(codes, fragment / 2, lane) >> fragment % 2 * 8;
    return {{x & kMask, x >> kBits & kMask, x >> 2 * kBits & kMask, x >> 3 * kBits & kMask}};
  }
  const int first_word = fragment / 4 * 3;
  switch (fragment % 4) {
    case 0:
      return get_fragment3<0>(codes, first_word, lane);
    case 1:
      return get_fragment3<1>(codes, first_word, lane);
    case 2:
      return get_fragment3<2>(codes, first_word, lane);
    default:
      return get_fragment3<3>(codes, first_word, lane);
  }
}

template <int kBits>
void pack_codes(const uint8_t* codes, const TilePart<uint8_t>& part) {
  const int cols = part.cols;
  __builtin_memset(part.codes, 0, static_cast<uint64_t>(part.rows) * cols * kBits / 8);
  for (int index = 0; index < part.rows / 4; ++index) {
    const RowQuad quad = row_quad(index, part.rows, cols, part.rows_are_tokens);
    const uint8_t* row[4];
    for (int i = 0; i < 4; ++i) row[i] = codes + static_cast<int64_t>(quad.row[i]) * cols;
    for (int x = 0; x < cols / 2; ++x) {
      const int c = 2 * x;
      const auto halves = [](uint8_t lo, uint8_t hi) {
        return lo | static_cast<uint32_t>(hi) << 16;
      };
      put_fragment<kBits>(part.codes,
                          quad.fragment + x / 32 * quad.block_step + x % 4 * quad.pair_step,
                          quad.lane + x % 32 / 4 * 4,
                          {{halves(row[0][c], row[1][c]), halves(row[0][c + 1], row[1][c + 1]),
                            halves(row[2][c], row[3][c]), halves(row[2][c + 1], row[3][c + 1])}});
    }
  }
}

template <int kBits>
void unpack_codes(const TilePart<const uint8_t>& part, uint8_t* codes) {
  const int cols = part.cols;
  for (int index = 0; index < part.rows / 4; ++index) {
    const RowQuad quad = row_quad(index, part.rows, cols, part.rows_are_tokens);
    for (int x = 0; x < cols / 2; ++x) {
      const Registers r = get_fragment<kBits>(
          part.codes, quad.fragment + x / 32 * quad.block_step + x % 4 * quad.pair_step,
          quad.lane + x % 32 / 4 * 4);
      for (int i = 0; i < 4; ++i) {
        uint8_t* const pair = codes + static_cast<int64_t>(quad.row[i]) * cols + 2 * x;
        pair[0] = static_cast<uint8_t>(r.of[i / 2 * 2] >> i % 2 * 16);
        pair[1] = static_cast<uint8_t>(r.of[i / 2 * 2 + 1] >> i % 2 * 16);
      }
    }
  }
}

inline void pack_codes(const uint8_t* codes, const TilePart<uint8_t>& part) {
  switch (part.bits) {
    case 2:
      return pack_codes<2>(codes, part);
    case 3:
      return pack_codes<3>(codes, part);
    case 4:
      return pack_codes<4>(codes, part);
    default:
      return pack_codes<8>(codes, part);
  }
}

inline void unpack_codes(const TilePart<const uint8_t>& part, uint8_t* codes) {
  switch (part.bits) {
    case 2:
      return unpack_codes<2>(part, codes);
    case 3:
      return unpack_codes<3>(part, codes);
    case 4:
      return unpack_codes<4>(part, codes);
    default:
      return unpack_codes<8>(part, codes);
  }
}

}  // namespace
}  // namespace kvarn::cpu::KVARN_ISA
