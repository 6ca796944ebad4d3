// The record layout: for every format, every code has a bit field of its own, the fields fill the
// code area, lanes read 16 aligned bytes, and the sizes are those of the formula.
#include "kvarn/layout.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "check.h"

namespace {

#define KVARN_ITEM(n) n,
constexpr int kBits[] = {KVARN_FOR_EACH_BITS(KVARN_ITEM)};
constexpr int kGroups[] = {KVARN_FOR_EACH_GROUP(KVARN_ITEM)};
constexpr int kHeadDims[] = {KVARN_FOR_EACH_HEAD_DIM(KVARN_ITEM)};
#undef KVARN_ITEM

/// Bits of the code area that a code of `bits` bits at `position` occupies.
std::vector<int> bits_of(const kvarn::FragmentPosition& position, int bits) {
  const kvarn::FieldPosition field =
      kvarn::field_position(kvarn::kFragmentRegisters * position.fragment + position.reg, bits);
  std::vector<int> result;
  for (int k = 0; k < bits; ++k) {
    const bool spread = bits == 3 && field.shift == 15;
    const int word = field.word + (spread ? k : 0);
    const int shift = field.shift + (spread ? 0 : k) + 16 * position.hi;
    result.push_back(8 * kvarn::word_offset(word, position.lane) + shift);
  }
  return result;
}

template <class Position>
int check_codes_fill_area(Position position, int bits, int group, int head_dim) {
  std::vector<bool> used(static_cast<size_t>(8 * kvarn::code_bytes(group, head_dim, bits)));
  for (int token = 0; token < group; ++token) {
    for (int channel = 0; channel < head_dim; ++channel) {
      const kvarn::FragmentPosition p = position(token, channel, head_dim);
      CHECK(p.lane >= 0 && p.lane < kvarn::kWarpLanes);
      CHECK(p.reg >= 0 && p.reg < kvarn::kFragmentRegisters);
      CHECK(p.hi == 0 || p.hi == 1);
      for (int bit : bits_of(p, bits)) {
        CHECK(bit >= 0 && bit < static_cast<int>(used.size()));
        CHECK(!used[static_cast<size_t>(bit)]);
        used[static_cast<size_t>(bit)] = true;
      }
    }
  }
  CHECK(std::find(used.begin(), used.end(), false) == used.end());
  return 0;
}

int check_matrix_rows(int group, int head_dim) {
  // In the A operand of mma.m16n8k16 register r, half h of a lane is row lane / 4 + 8 * (r % 2),
  // column 2 * (lane % 4) + 8 * (r / 2) + h. All elements of a matrix row are one token (K), one
  // channel (V); of a matrix column one channel (K), one token (V).
  const int fragments = group * head_dim / (kvarn::kFragmentDim * kvarn::kFragmentDim);
  std::vector<int> key_rows(static_cast<size_t>(16 * fragments), -1), key_cols = key_rows;
  std::vector<int> value_rows = key_rows, value_cols = key_rows;
  const auto same = [](int& slot, int id) {
    return slot == id || (slot == -1 && (slot = id, true));
  };
  for (int token = 0; token < group; ++token) {
    for (int channel = 0; channel < head_dim; ++channel) {
      const auto row_col = [](const kvarn::FragmentPosition& p) {
        const int row = p.lane / 4 + 8 * (p.reg % 2);
        const int col = 2 * (p.lane % 4) + 8 * (p.reg / 2) + p.hi;
        return std::pair<size_t, size_t>(16 * p.fragment + row, 16 * p.fragment + col);
      };
      const auto [key_row, key_col] = row_col(kvarn::key_position(token, channel, head_dim));
      CHECK(same(key_rows[key_row], token));
      CHECK(same(key_cols[key_col], channel));
      const auto [value_row, value_col] = row_col(kvarn::value_position(token, channel, head_dim));
      CHECK(same(value_rows[value_row], channel));
      CHECK(same(value_cols[value_col], token));
    }
  }
  return 0;
}

int check_offsets(const kvarn::Format& f) {
  const kvarn::RecordLayout r = kvarn::record_layout(f);
  const int offsets[] = {r.key_codes,        r.key_channel_scale,   r.key_zero_point,
                         r.key_token_scale,  r.value_codes,         r.value_token_scale,
                         r.value_zero_point, r.value_channel_scale, r.bytes};
  for (int i = 0; i + 1 < 9; ++i) CHECK(offsets[i] < offsets[i + 1]);
  for (int offset : offsets) CHECK(offset % kvarn::kLaneBytes == 0);
  // One scale and one zero point a channel and one scale a token for K, the other way for V.
  const int scales = 2 * (2 * f.head_dim + f.group) + 2 * (2 * f.group + f.head_dim);
  CHECK(r.bytes == f.group * f.head_dim * (f.key_bits + f.value_bits) / 8 + scales);
  return 0;
}

int check_chunks(int bits) {
  // A lane's words 4n .. 4n+3 are 16 aligned bytes, and the chunks of the lanes are adjacent.
  for (int word = 0; word < 16 * bits; ++word) {
    for (int lane = 0; lane < kvarn::kWarpLanes; ++lane) {
      const int offset = kvarn::word_offset(word, lane);
      CHECK(offset == kvarn::word_offset(word / 4 * 4, lane) + 4 * (word % 4));
      CHECK(kvarn::word_offset(word / 4 * 4, lane) % kvarn::kLaneBytes == 0);
    }
  }
  return 0;
}

int check_valid() {
  CHECK(kvarn::valid({4, 2, 128, 128}));
  CHECK(!kvarn::valid({5, 2, 128, 128}));
  CHECK(!kvarn::valid({4, 1, 128, 128}));
  CHECK(!kvarn::valid({4, 2, 32, 128}));
  CHECK(!kvarn::valid({4, 2, 128, 96}));
  return 0;
}

}  // namespace

int main() {
  if (check_valid()) return 1;
  for (int group : kGroups) {
    for (int head_dim : kHeadDims) {
      if (check_matrix_rows(group, head_dim)) return 1;
      for (int bits : kBits) {
        if (check_codes_fill_area(kvarn::key_position, bits, group, head_dim)) return 1;
        if (check_codes_fill_area(kvarn::value_position, bits, group, head_dim)) return 1;
        for (int value_bits : kBits) {
          CHECK(kvarn::valid({bits, value_bits, group, head_dim}));
          if (check_offsets({bits, value_bits, group, head_dim})) return 1;
        }
      }
    }
  }
  for (int bits : kBits) {
    if (check_chunks(bits)) return 1;
  }
  return kvarn::test::failures();
}
