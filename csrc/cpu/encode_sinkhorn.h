// Variance normalization: log-space Sinkhorn scales (KVarN, arXiv 2606.03458), best round.
//
// A round is one pass over the tile. The scales are kept as factors, not as logarithms: adding a
// logarithm is multiplying, the clips are the same. Row deviations after a row's scale changed are
// the old ones divided by the change, so only the columns have to be measured again.
#pragma once

#include "cpu/encode.h"
#include "cpu/numeric.h"

namespace kvarn::cpu::KVARN_ISA {
namespace {

inline constexpr float kMinFactor = 0.74081822f;  // exp(-0.3)
inline constexpr float kMaxFactor = 22026.466f;   // exp(10)
/// Imbalances that differ by less are equal: a later round is taken, whatever the rounding errors.
inline constexpr float kEqual = 1.000001f;

/// lo for NaN.
inline float clip(float x, float lo, float hi) {
  x = x > lo ? x : lo;
  return x < hi ? x : hi;
}

/// max / min of the deviations of active rows or columns.
class Spread {
 public:
  void add(float deviation, float active) {
    if (active == 0) return;
    nan_ += deviation - deviation;
    min_ = deviation < min_ ? deviation : min_;
    max_ = deviation > max_ ? deviation : max_;
  }
  /// 0 when there were none, NaN when one was no number.
  float ratio() const { return nan_ + (max_ == 0 ? 0 : max_ / (min_ < 1e-8f ? 1e-8f : min_)); }

 private:
  float min_ = __builtin_inff();
  float max_ = 0;
  float nan_ = 0;
};

/// The deviation (n - 1) of x[j] * inv_col[j]; y receives that product.
inline float balanced_row(const float* __restrict x, const float* __restrict inv_col, int cols,
                          float* __restrict y) {
  // Moments about one of the values: then the sum of squares is at most cols + 1 times what is left
  // of it after the subtraction, and that is exactly 0 for a constant row.
  const float first = x[0] * inv_col[0];
  float sum = 0;
  float squares = 0;
#pragma omp simd reduction(+ : sum, squares)
  for (int j = 0; j < cols; ++j) {
    y[j] = x[j] * inv_col[j];
    const float d = y[j] - first;
    sum += d;
    squares += d * d;
  }
  if (cols < 2) return 0;
  const float central = squares - sum * (sum / static_cast<float>(cols));
  return __builtin_sqrtf((central < 0 ? 0 : central) / static_cast<float>(cols - 1));
}

/// Adds row number `count` (from 1), scale * y, to the means and the summed squares about them of
/// the columns (Welford).
inline void add_row(const float* __restrict y, float scale, int cols, int count,
                    float* __restrict mean, float* __restrict squares) {
  const float weight = 1.f / static_cast<float>(count);
#pragma omp simd
  for (int j = 0; j < cols; ++j) {
    const float z = y[j] * scale;
    const float d = z - mean[j];
    const float m = mean[j] + d * weight;
    squares[j] += d * (z - m);
    mean[j] = m;
  }
}

/// row_scale and col_scale of x [rows][cols], rows `stride` apart: those of the best round. Rows
/// and columns that are constant in x keep scale 1 and stay out of the imbalance. scratch:
/// normalize_scratch_floats(rows, cols).
inline void sinkhorn(const float* x, int rows, int cols, int64_t stride, float factor,
                     int iterations, float* row_scale, float* col_scale, float* scratch) {
  float* const row = scratch;
  float* const row_active = row + rows;  // 0 or 1, as col_active
  float* const col = row_active + rows;
  float* const col_active = col + cols;
  float* const col_deviation = col_active + cols;
  float* const inv_col = col_deviation + cols;
  float* const mean = inv_col + cols;
  float* const squares = mean + cols;
  float* const y = squares + cols;

  for (int i = 0; i < rows; ++i) row[i] = row_scale[i] = 1;
  for (int j = 0; j < cols; ++j) {
    col[j] = col_scale[j] = 1;
    inv_col[j] = factor;
  }
  float best = 0;
  for (int round = 0; round <= iterations; ++round) {
    if (round > 0) {
      for (int j = 0; j < cols; ++j) {
        if (col_active[j] == 0) continue;
        col[j] = clip(col[j] * clip(col_deviation[j], 1e-3f, 1e3f), kMinFactor, kMaxFactor);
        inv_col[j] = factor / col[j];
      }
    }
    for (int j = 0; j < cols; ++j) mean[j] = squares[j] = 0;
    Spread row_spread;
    for (int i = 0; i < rows; ++i) {
      float deviation = balanced_row(x + i * stride, inv_col, cols, y) / row[i];
      if (round == 0) {
        row_active[i] = deviation != 0;
      } else if (row_active[i] != 0) {
        const float before = row[i];
        row[i] = clip(before * clip(deviation, 1e-3f, 1e3f), kMinFactor, kMaxFactor);
        deviation *= before / row[i];
      }
      row_spread.add(deviation, row_active[i]);
      add_row(y, 1 / row[i], cols, i + 1, mean, squares);
    }
    Spread col_spread;
    for (int j = 0; j < cols; ++j) {
      col_deviation[j] = rows < 2 ? 0 : __builtin_sqrtf(squares[j] / static_cast<float>(rows - 1));
      if (round == 0) col_active[j] = col_deviation[j] != 0;
      col_spread.add(col_deviation[j], col_active[j]);
    }
    const float imbalance = row_spread.ratio() + col_spread.ratio();
    if (round == 0) {
      best = imbalance;
    } else if (imbalance <= best * kEqual) {
      best = imbalance;
      __builtin_memcpy(row_scale, row, static_cast<uint64_t>(rows) * sizeof(float));
      __builtin_memcpy(col_scale, col, static_cast<uint64_t>(cols) * sizeof(float));
    }
  }
}

inline void normalize(float* x, int rows, int cols, int iterations, float* row_scale,
                      float* col_scale, float* scratch) {
  sinkhorn(x, rows, cols, cols, 1.f, iterations, row_scale, col_scale, scratch);
  for (int i = 0; i < rows; ++i) {
    float* const y = x + static_cast<int64_t>(i) * cols;
    const float scale = row_scale[i];
#pragma omp simd
    for (int j = 0; j < cols; ++j) y[j] = y[j] / col_scale[j] / scale;
  }
}

}  // namespace
}  // namespace kvarn::cpu::KVARN_ISA
