// The record: where every code and every scale of a (block, KV head) lies. docs/format.md draws it.
//
// A record is the K part followed by the V part; each part is codes, then 16-bit (fp16) scales:
//
//   K part: codes [G*D*bk/8] | channel scale [D] | channel zero point [D] | token scale [G]
//   V part: codes [G*D*bv/8] | token scale [G]   | token zero point [G]   | channel scale [D]
//
//   K[g][d] = (q + zero_point[d]) * channel_scale[d] * token_scale[g]
//   V[g][d] = (q + zero_point[g]) * token_scale[g]   * channel_scale[d]
//
// Scales stand in natural order. Codes stand in fragment order: as the 32 lanes of a warp hold the
// A operand of mma.m16n8k16 (rows: tokens for K, channels for V), so that a reader needs no
// shuffle. Which token or channel a matrix row stands for is free, so it is chosen such that a
// lane's scales are 16 contiguous bytes.
#pragma once

#include <cstdint>

#include "kvarn/variants.h"

#if defined(__CUDACC__)
#define KVARN_HD __host__ __device__
#else
#define KVARN_HD
#endif

namespace kvarn {

/// Changes whenever the bytes of a record change their meaning.
inline constexpr int kLayoutVersion = 1;

inline constexpr int kWarpLanes = 32;
inline constexpr int kFragmentDim = 16;       ///< mma.m16n8k16: a fragment is 16 x 16 codes
inline constexpr int kFragmentRegisters = 4;  ///< half2 registers a lane holds of a fragment
inline constexpr int kLaneBytes = 16;         ///< what a lane reads at once
inline constexpr int kChunkBytes = kWarpLanes * kLaneBytes;

struct Format {
  int key_bits;    ///< 2, 3, 4 or 8
  int value_bits;  ///< 2, 3, 4 or 8
  int group;       ///< tokens in a tile = block size: 64 or 128
  int head_dim;    ///< 64, 128, 256 or 512

  friend constexpr KVARN_HD bool operator==(const Format& a, const Format& b) {
    return a.key_bits == b.key_bits && a.value_bits == b.value_bits && a.group == b.group &&
           a.head_dim == b.head_dim;
  }
};

#define KVARN_OR_EQUALS(n) || x == n
constexpr KVARN_HD bool valid_bits(int x) { return false KVARN_FOR_EACH_BITS(KVARN_OR_EQUALS); }
constexpr KVARN_HD bool valid_group(int x) { return false KVARN_FOR_EACH_GROUP(KVARN_OR_EQUALS); }
constexpr KVARN_HD bool valid_head_dim(int x) {
  return false KVARN_FOR_EACH_HEAD_DIM(KVARN_OR_EQUALS);
}
#undef KVARN_OR_EQUALS
constexpr KVARN_HD bool valid(const Format& f) {
  return valid_bits(f.key_bits) && valid_bits(f.value_bits) && valid_group(f.group) &&
         valid_head_dim(f.head_dim);
}

/// Bytes of the codes of one tile.
constexpr KVARN_HD int code_bytes(int group, int head_dim, int bits) {
  return group * head_dim * bits / 8;
}

/// Byte offsets of the fields inside a record; each is a multiple of 16.
struct RecordLayout {
  int key_codes;
  int key_channel_scale;    ///< s_chan [D]
  int key_zero_point;       ///< zp [D]
  int key_token_scale;      ///< s_tok [G]
  int value_codes;          ///< also the size of the K part
  int value_token_scale;    ///< s_tok [G]
  int value_zero_point;     ///< zp [G]
  int value_channel_scale;  ///< s_chan [D]
  int bytes;                ///< of the whole record
};

constexpr KVARN_HD RecordLayout record_layout(const Format& f) {
  RecordLayout r{};
  r.key_codes = 0;
  r.key_channel_scale = r.key_codes + code_bytes(f.group, f.head_dim, f.key_bits);
  r.key_zero_point = r.key_channel_scale + 2 * f.head_dim;
  r.key_token_scale = r.key_zero_point + 2 * f.head_dim;
  r.value_codes = r.key_token_scale + 2 * f.group;
  r.value_token_scale = r.value_codes + code_bytes(f.group, f.head_dim, f.value_bits);
  r.value_zero_point = r.value_token_scale + 2 * f.group;
  r.value_channel_scale = r.value_zero_point + 2 * f.group;
  r.bytes = r.value_channel_scale + 2 * f.head_dim;
  return r;
}

/// A code's place among the registers of a warp: half `hi` of register `reg` of A fragment
/// `fragment` in lane `lane`.
struct FragmentPosition {
  int fragment;
  int lane;
  int reg;
  int hi;
};

/// K code of (token, channel): matrix rows are tokens, matrix columns are channels.
/// Lane (r, t) = (lane / 4, lane % 4) owns tokens 64i + 8r + 0..7 and channels 32j + 8t + 0..7.
constexpr KVARN_HD FragmentPosition key_position(int token, int channel, int head_dim) {
  const int row_tile = token / 64 * 4 + token % 8 / 2;
  const int col_tile = channel / 32 * 2 + channel % 8 / 4;
  return {row_tile * (head_dim / kFragmentDim) + col_tile, token % 64 / 8 * 4 + channel % 32 / 8,
          token % 2 + channel % 4 / 2 * 2, channel % 2};
}

/// V code of (token, channel): matrix rows are channels, matrix columns are tokens. A column tile
/// holds the tokens of the K row tile of the same number, in the order in which the scores leave
/// the first product, so that they enter the second one by movmatrix alone.
constexpr KVARN_HD FragmentPosition value_position(int token, int channel, int head_dim) {
  const int col_tile = token / 64 * 4 + token % 8 / 2;
  const int row_tile = channel / 64 * 4 + channel % 8 / 2;
  const int col = token % 64 / 8;
  return {col_tile * (head_dim / kFragmentDim) + row_tile, channel % 64 / 8 * 4 + col / 2,
          channel % 2 + token % 2 * 2, col % 2};
}

/// Where a lane's half2 number `index` (4 * fragment + reg) lies in the lane's stream of 32-bit
/// words: half `hi` of it is the field of `bits` bits at bit `shift + 16 * hi` of word `word`.
/// With 3 bits, 3 words hold 16 half2: five fields a half-word each, and number 15 is spread over
/// the bits 15 and 31 of the three (bit k of the code in word + k): `shift` is then 15.
struct FieldPosition {
  int word;
  int shift;
};

constexpr KVARN_HD FieldPosition field_position(int index, int bits) {
  if (bits == 3) {
    const int unit = index / 16;
    const int field = index % 16;
    return field == 15 ? FieldPosition{3 * unit, 15}
                       : FieldPosition{3 * unit + field / 5, field % 5 * 3};
  }
  const int fields = 16 / bits;
  return {index / fields, index % fields * bits};
}

/// Byte offset of a lane's word inside the codes of a tile: chunks of 512 bytes, in each of which
/// lane after lane has 16 bytes.
constexpr KVARN_HD int word_offset(int word, int lane) {
  return word / 4 * kChunkBytes + lane * kLaneBytes + word % 4 * 4;
}

}  // namespace kvarn
