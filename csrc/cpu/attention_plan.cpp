#include "cpu/attention_plan.h"

namespace kvarn::cpu {
namespace {

constexpr int kRows = 8;         // r of K, c of V: lane / 4
constexpr int kLaneColumns = 4;  // t of K, r2 of V: lane % 4

int row_tiles(const Format& f) { return f.group / kFragmentDim; }
int half_row_tiles(const Format& f) { return row_tiles(f) / 2; }

/// Where the scores of tokens (row tile, odd or even, all r) stand.
int token_place(const Format& f, int row_tile, int odd) {
  const int half = half_row_tiles(f);
  return (2 * (row_tile % half) + odd) * kTokenStride + row_tile / half * kRows;
}

CodePlan key_plan(const Format& f) {
  CodePlan plan{};
  const int bits = f.key_bits;
  const int columns = f.head_dim / kFragmentDim;
  const int units = columns / unit_fragments(bits);
  plan.words = row_tiles(f) * units * unit_words(bits);
  plan.lanes = 2 * kRows;
  plan.passes = half_row_tiles(f);
  plan.steps = kLaneColumns * units;
  plan.lane_step = units * unit_words(bits) * plan.lanes;
  for (int w = 0; w < plan.words; ++w) {
    const int half = w / (plan.words / 2);
    const int pass = w % (plan.words / 2) / (units * unit_words(bits));
    const int in_row = w % (units * unit_words(bits));
    plan.word_to[w] = (pass * plan.steps * unit_words(bits) + in_row) * plan.lanes + half * kRows;
  }
  for (int t = 0; t < kLaneColumns; ++t) {
    for (int column = 0; column < columns; ++column) {
      plan.factor[t * columns + column] = column / 2 * 32 + 8 * t + column % 2 * 4;
    }
  }
  return plan;
}

/// Row tiles of V that stand side by side: those of a half of them, or all.
int value_halves(const Format& f) {
  const int units = f.head_dim / kFragmentDim / unit_fragments(f.value_bits);
  return units % 2 == 0 ? 2 : 1;
}

CodePlan value_plan(const Format& f) {
  CodePlan plan{};
  const int bits = f.value_bits;
  const int halves = value_halves(f);
  const int fragments = unit_fragments(bits);
  const int units = f.head_dim / kFragmentDim / fragments / halves;
  const int columns = f.group / kFragmentDim;
  const int column_words = halves * units * unit_words(bits);
  plan.words = columns * column_words;
  plan.lanes = halves * kRows;
  plan.passes = units;
  plan.steps = columns * kLaneColumns;
  plan.lane_step = unit_words(bits) * plan.lanes;
  for (int w = 0; w < plan.words; ++w) {
    const int column = w / column_words;
    const int half = w % column_words / (units * unit_words(bits));
    const int unit = w % (units * unit_words(bits)) / unit_words(bits);
    const int step = unit * plan.steps + column * kLaneColumns;
    plan.word_to[w] = (step * unit_words(bits) + w % unit_words(bits)) * plan.lanes + half * kRows;
  }
  for (int column = 0; column < columns; ++column) {
    for (int r2 = 0; r2 < kLaneColumns; ++r2) {
      for (int i = 0; i < fragments; ++i) {
        plan.factor[(column * kLaneColumns + r2) * fragments + i] =
            token_place(f, column, 0) + 2 * r2;
      }
    }
  }
  return plan;
}

}  // namespace

TilePlan make_tile_plan(const Format& f) {
  TilePlan plan{};
  plan.format = f;
  plan.key = key_plan(f);
  plan.value = value_plan(f);
  for (int i = 0; i < f.group / 64; ++i) {
    for (int t = 0; t < 8; ++t) {
      const int place = token_place(f, 4 * i + t / 2, t % 2);
      plan.token_to[8 * i + t] = place;
      for (int r = 0; r < kRows; ++r) plan.token[place + r] = 64 * i + 8 * r + t;
    }
  }
  const int halves = value_halves(f);
  const int row_tiles = f.head_dim / kFragmentDim / halves;
  for (int b = 0; b < f.head_dim / 64; ++b) {
    for (int e = 0; e < 8; ++e) {
      const int row_tile = 4 * b + e / 2;
      plan.channel_to[8 * b + e] =
          (row_tile % row_tiles * 2 + e % 2) * halves * kRows + row_tile / row_tiles * kRows;
    }
  }
  return plan;
}

}  // namespace kvarn::cpu
