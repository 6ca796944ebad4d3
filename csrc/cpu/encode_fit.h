// From a tile to codes, row scales and offsets, column scales: both fits of docs/format.md.
//
// A tile is `rows` x `cols` numbers T, rows being what shares a scale and an offset (K: channels,
// V: tokens); only live tokens are in it. The fit is T ~ (q * scale[i] + offset[i]) * col_scale[j].
#pragma once

#include "cpu/encode_sinkhorn.h"
#include "cpu/numeric.h"

namespace kvarn::cpu::KVARN_ISA {
namespace {

inline constexpr int kMaxLine = kMaxHeadDim;  ///< rows or columns of a tile, at most

struct Tile {
  float* data;
  int rows;
  int cols;
  int64_t stride;  ///< of the rows, of the codes too
  bool rows_are_tokens;
  int bits;

  float* row(int i) const { return data + i * stride; }
  float levels() const { return static_cast<float>((1 << bits) - 1); }
};

struct TileFit {
  alignas(64) uint8_t codes[kMaxGroup * kMaxHeadDim];
  alignas(64) float scale[kMaxLine];
  alignas(64) float offset[kMaxLine];
  alignas(64) float mean[kMaxLine];  ///< of a row of T / col_scale
};

struct FitScratch {
  alignas(64) float normalize[normalize_scratch_floats(kMaxLine, kMaxLine)];
  alignas(64) float x[kMaxLine];
  alignas(64) float q[kMaxLine];
  alignas(64) float inv_col[kMaxLine];
  alignas(64) float weight[kMaxLine];
  alignas(64) float col_sums[2][kMaxLine];
  alignas(64) float row_scale[kMaxLine];
  alignas(64) float alternative[kMaxLine];
  alignas(64) float energy[kMaxLine];
  alignas(64) float raw_scale[kMaxLine];  ///< before the gain correction
  alignas(64) float raw_offset[kMaxLine];
  alignas(64) float rest[kMaxLine];      ///< weighted mean of a centred row: rounding errors
  alignas(64) float variance[kMaxLine];  ///< weighted, of a row
  alignas(64) uint16_t halves[kMaxLine];
};

/// To the nearest integer, ties to even; |x| < 2^22. A loop of it vectorizes.
inline float round_even(float x) { return (x + 12582912.f) - 12582912.f; }

inline float inverse_or_0(float x) { return x >= __FLT_MIN__ ? 1 / x : 0; }

inline void round_to_halves(float* x, int n, uint16_t* halves) {
  store_halves(x, halves, n);
  load_halves(halves, x, n);
}

inline void store_codes(const float* __restrict q, int n, uint8_t* __restrict codes) {
#pragma omp simd
  for (int j = 0; j < n; ++j) codes[j] = static_cast<uint8_t>(static_cast<int32_t>(q[j]));
}

// ---- Column scales ----------------------------------------------------------------------------

/// K in closed form: the token's root mean square, all of them divided by one power of two so that
/// the mean logarithm is about 0.
inline void token_rms(const Tile& tile, float* __restrict col_scale) {
  for (int j = 0; j < tile.cols; ++j) col_scale[j] = 0;
  for (int i = 0; i < tile.rows; ++i) {
    const float* const t = tile.row(i);
#pragma omp simd
    for (int j = 0; j < tile.cols; ++j) col_scale[j] += t[j] * t[j];
  }
  float log_sum = 0;
  int count = 0;
  for (int j = 0; j < tile.cols; ++j) {
    col_scale[j] = __builtin_sqrtf(col_scale[j] / static_cast<float>(tile.rows));
    if (col_scale[j] > 0) {
      log_sum += __builtin_log2f(col_scale[j]);
      ++count;
    }
  }
  if (count == 0) return;
  const float factor =
      __builtin_ldexpf(1.f, -static_cast<int>(round_even(log_sum / static_cast<float>(count))));
  for (int j = 0; j < tile.cols; ++j) col_scale[j] *= factor;
}

/// V in closed form: of the tokens divided by their deviations, the channel's geometric mean of
/// deviation and root mean square, where the former counts at least an eighth of the latter.
inline void channel_spread(const Tile& tile, float* __restrict col_scale, FitScratch& scratch) {
  float* const __restrict sum = scratch.col_sums[0];
  float* const __restrict squares = scratch.col_sums[1];
  for (int j = 0; j < tile.cols; ++j) {
    sum[j] = squares[j] = 0;
    scratch.inv_col[j] = 1;
  }
  int count = 0;
  for (int i = 0; i < tile.rows; ++i) {
    float* const __restrict y = scratch.x;
    const float deviation = balanced_row(tile.row(i), scratch.inv_col, tile.cols, y);
    if (deviation == 0) continue;
    const float inverse = 1 / deviation;
    ++count;
#pragma omp simd
    for (int j = 0; j < tile.cols; ++j) {
      const float z = y[j] * inverse;
      sum[j] += z;
      squares[j] += z * z;
    }
  }
  const float share = count > 0 ? 1.f / static_cast<float>(count) : 0.f;
  for (int j = 0; j < tile.cols; ++j) {
    const float mean = sum[j] * share;
    const float mean_square = squares[j] * share;
    const float variance = mean_square - mean * mean;
    const float least = mean_square * (1.f / 64);
    const float spread = (variance > least ? variance : least) * mean_square;
    col_scale[j] = __builtin_sqrtf(__builtin_sqrtf(spread));
  }
}

inline void closed_form(const Tile& tile, float* col_scale, FitScratch& scratch) {
  if (tile.rows_are_tokens) {
    channel_spread(tile, col_scale, scratch);
  } else {
    token_rms(tile, col_scale);
  }
}

/// Sinkhorn determines the column scales but for a factor, and rounds that balance equally well
/// differ in it; weights and rounding must not depend on that. Divides by the geometric mean.
inline void fix_factor(float* col_scale, int cols) {
  double log_sum = 0;
  for (int j = 0; j < cols; ++j) log_sum += static_cast<double>(__builtin_log2f(col_scale[j]));
  const float inverse = __builtin_exp2f(static_cast<float>(-log_sum / cols));
  for (int j = 0; j < cols; ++j) col_scale[j] *= inverse;
}

inline void limit_col_scale(float* col_scale, int cols) {
  for (int j = 0; j < cols; ++j) {
    col_scale[j] = col_scale[j] == 0 ? 1.f : clip(col_scale[j], 0x1p-12f, 0x1p14f);
  }
}

/// Summed squares of every token.
inline void token_energy(const Tile& tile, float* __restrict energy) {
  if (!tile.rows_are_tokens) {
    for (int j = 0; j < tile.cols; ++j) energy[j] = 0;
  }
  for (int i = 0; i < tile.rows; ++i) {
    const float* const t = tile.row(i);
    if (tile.rows_are_tokens) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int j = 0; j < tile.cols; ++j) sum += t[j] * t[j];
      energy[i] = sum;
    } else {
#pragma omp simd
      for (int j = 0; j < tile.cols; ++j) energy[j] += t[j] * t[j];
    }
  }
}

/// The power of two that brings the root mean square of the tile to about 64. The clips of the
/// normalization are absolute: the lower one would keep a small tile as it is.
inline float size_factor(const Tile& tile, const float* energy) {
  const int tokens = tile.rows_are_tokens ? tile.rows : tile.cols;
  float sum = 0;
  for (int i = 0; i < tokens; ++i) sum += energy[i];
  if (!(sum > 0)) return 1;
  const float mean_square = sum / static_cast<float>(tile.rows * tile.cols);
  return __builtin_ldexpf(64.f, -static_cast<int>(round_even(__builtin_log2f(mean_square) / 2)));
}

/// What the guard compares: the sum over tokens of squared step / energy, up to a common factor.
/// The step of an element is the range of its row of T / col_scale times the scale of its column,
/// so it is a product of a sum over rows and one over columns.
inline float guard_loss(const Tile& tile, const float* __restrict col_scale, FitScratch& scratch) {
  const float* const energy = scratch.energy;
  const auto share = [&](int token) { return energy[token] > 0 ? 1 / energy[token] : 0.f; };
  float* const __restrict inv_col = scratch.inv_col;
  float of_cols = 0;
  for (int j = 0; j < tile.cols; ++j) {
    inv_col[j] = 1 / col_scale[j];
    of_cols += col_scale[j] * col_scale[j] * (tile.rows_are_tokens ? 1.f : share(j));
  }
  float of_rows = 0;
  for (int i = 0; i < tile.rows; ++i) {
    const float* const __restrict t = tile.row(i);
    float lo = __builtin_inff();
    float hi = -__builtin_inff();
#pragma omp simd reduction(min : lo) reduction(max : hi)
    for (int j = 0; j < tile.cols; ++j) {
      const float x = t[j] * inv_col[j];
      lo = x < lo ? x : lo;
      hi = x > hi ? x : hi;
    }
    of_rows += (hi - lo) * (hi - lo) * (tile.rows_are_tokens ? share(i) : 1.f);
  }
  return of_rows * of_cols;
}

/// Sinkhorn's column scales, of the tile as it is or `brought_to_size`, unless one massive token
/// has driven them so far that the others are lost: then V does without and K takes the closed
/// form. Of keys it takes one channel, less than the rounding error of 2 or 3 bits.
inline void guarded_sinkhorn(const Tile& tile, int iterations, bool brought_to_size,
                             float* col_scale, FitScratch& scratch) {
  token_energy(tile, scratch.energy);
  sinkhorn(tile.data, tile.rows, tile.cols, tile.stride,
           brought_to_size ? size_factor(tile, scratch.energy) : 1.f, iterations, scratch.row_scale,
           col_scale, scratch.normalize);
  if (!tile.rows_are_tokens && tile.bits < 4) return;
  float* const alternative = scratch.alternative;
  if (tile.rows_are_tokens) {
    for (int j = 0; j < tile.cols; ++j) alternative[j] = 1;
  } else {
    token_rms(tile, alternative);
    limit_col_scale(alternative, tile.cols);
  }
  if (guard_loss(tile, alternative, scratch) < 0.75f * guard_loss(tile, col_scale, scratch)) {
    __builtin_memcpy(col_scale, alternative, static_cast<uint64_t>(tile.cols) * sizeof(float));
  }
}

// ---- fit = minmax -----------------------------------------------------------------------------

/// Codes over the whole range of each row.
inline void minmax_codes(const Tile& tile, const float* __restrict col_scale, TileFit& fit,
                         FitScratch& scratch) {
  const int cols = tile.cols;
  const float levels = tile.levels();
  float* const __restrict inv_col = scratch.inv_col;
  float* const __restrict x = scratch.x;
  float* const __restrict q = scratch.q;
  for (int j = 0; j < cols; ++j) inv_col[j] = 1 / col_scale[j];
  for (int i = 0; i < tile.rows; ++i) {
    const float* const __restrict t = tile.row(i);
    float lo = __builtin_inff();
    float hi = -__builtin_inff();
#pragma omp simd reduction(min : lo) reduction(max : hi)
    for (int j = 0; j < cols; ++j) {
      x[j] = t[j] * inv_col[j];
      lo = x[j] < lo ? x[j] : lo;
      hi = x[j] > hi ? x[j] : hi;
    }
    const float scale = (hi - lo) / levels;
    const float inverse = inverse_or_0(scale);
#pragma omp simd
    for (int j = 0; j < cols; ++j) {
      q[j] = round_even(clip((x[j] - lo) * inverse, 0.f, levels));
    }
    store_codes(q, cols, fit.codes + i * tile.stride);
    fit.scale[i] = scale;
    fit.offset[i] = lo;
    fit.mean[i] = (lo + hi) / 2;
  }
}

// ---- fit = unbiased ---------------------------------------------------------------------------

/// What part of the range min..max the codes span at the start (flat optima: 4 % more or less
/// changes the error by less than 2 %).
inline float start_range(int bits, int64_t row_length) {
  constexpr float kShare[4][3] = {
      {.65f, .86f, .955f}, {.62f, .80f, .925f}, {.58f, .76f, .90f}, {.55f, .73f, .88f}};
  if (bits == 8) return 1;
  return kShare[row_length <= 64 ? 0 : row_length <= 128 ? 1 : row_length <= 256 ? 2 : 3][bits - 2];
}

/// Columns count by the square of their scale, as their errors do; large ones no further.
inline void column_weights(const float* __restrict col_scale, int cols, float* __restrict inv_col,
                           float* __restrict weight) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int j = 0; j < cols; ++j) {
    inv_col[j] = 1 / col_scale[j];
    const float square = col_scale[j] * col_scale[j];
    weight[j] = square < 16 ? square : 16;
    sum += weight[j];
  }
  const float share = 1 / sum;
  for (int j = 0; j < cols; ++j) weight[j] *= share;
}

/// A row of T / col_scale, less `mean`.
struct CentredRow {
  float mean;
  float rest;      ///< weighted mean of what is left: rounding errors
  float variance;  ///< weighted
  float lo;
  float hi;
};

inline CentredRow centre(const float* __restrict t, const float* __restrict inv_col,
                         const float* __restrict weight, int cols, float* __restrict x) {
  float mean = 0;
  float lo = __builtin_inff();
  float hi = -__builtin_inff();
#pragma omp simd reduction(+ : mean) reduction(min : lo) reduction(max : hi)
  for (int j = 0; j < cols; ++j) {
    const float value = t[j] * inv_col[j];
    x[j] = value;
    mean += weight[j] * value;
    lo = value < lo ? value : lo;
    hi = value > hi ? value : hi;
  }
  float rest = 0;
  float squares = 0;
#pragma omp simd reduction(+ : rest, squares)
  for (int j = 0; j < cols; ++j) {
    x[j] -= mean;
    const float weighted = weight[j] * x[j];
    rest += weighted;
    squares += weighted * x[j];
  }
  return {mean, rest, squares - rest * rest, lo - mean, hi - mean};
}

/// Codes q of a row of numbers x, and their weighted moments.
struct CodeMoments {
  float mean;
  float variance;
  float covariance;  ///< with x
};

template <bool kShifted>
CodeMoments take_codes(const float* __restrict x, const float* __restrict shift, float scale,
                       float offset, float levels, const float* __restrict weight, float rest,
                       int cols, float* __restrict q) {
  const float inverse = inverse_or_0(scale);
  // Moments about the code of x = 0, the mean of a centred row: little is lost by subtraction.
  const float middle = round_even(clip(-offset * inverse, 0.f, levels));
  float sum = 0;
  float squares = 0;
  float products = 0;
#pragma omp simd reduction(+ : sum, squares, products)
  for (int j = 0; j < cols; ++j) {
    const float place = (x[j] - offset) * inverse + (kShifted ? shift[j] : 0.f);
    const float code = round_even(clip(place, 0.f, levels));
    const float distance = code - middle;
    const float weighted = weight[j] * distance;
    q[j] = code;
    sum += weighted;
    squares += weighted * distance;
    products += weighted * x[j];
  }
  return {middle + sum, squares - sum * sum, products - sum * rest};
}

/// Least squares of x against the codes.
inline void refit(const CodeMoments& m, float rest, float& scale, float& offset) {
  if (m.covariance > 0 && m.variance > 0) {
    scale = m.covariance / m.variance;
    offset = rest - scale * m.mean;
  }
}

/// The scale whose products with x are those of x with itself (reverse regression): least squares
/// shrinks, and a shrinkage does not average out over tokens as other errors do.
inline void restore_gain(const CodeMoments& m, float rest, float variance, float& scale,
                         float& offset) {
  if (m.covariance > 0 && variance > 0) {
    scale = variance / m.covariance;
    offset = rest - scale * m.mean;
  }
}

/// On return `tile` holds T / col_scale less fit.mean, by rows.
inline void unbiased_codes(const Tile& tile, float* __restrict col_scale, TileFit& fit,
                           FitScratch& scratch) {
  const int cols = tile.cols;
  const float levels = tile.levels();
  float* const __restrict x = scratch.x;
  float* const __restrict q = scratch.q;
  float* const inv_col = scratch.inv_col;
  float* const weight = scratch.weight;

  // First fit of the rows, and what the refit of the columns needs of it.
  float* const __restrict products = scratch.col_sums[0];
  float* const __restrict squares = scratch.col_sums[1];
  for (int j = 0; j < cols; ++j) products[j] = squares[j] = 0;
  column_weights(col_scale, cols, inv_col, weight);
  const float range = start_range(tile.bits, tile.stride);
  for (int i = 0; i < tile.rows; ++i) {
    const CentredRow row = centre(tile.row(i), inv_col, weight, cols, x);
    float scale = range * (row.hi - row.lo) / levels;
    float offset = (row.hi + row.lo) / 2 - scale * levels / 2;
    for (int round = 0; round < 2; ++round) {
      refit(take_codes<false>(x, nullptr, scale, offset, levels, weight, row.rest, cols, q),
            row.rest, scale, offset);
    }
    offset += row.mean;
    fit.scale[i] = scale;
    fit.offset[i] = offset;
    // Rows count by the inverse of their variance, lest one massive token decide. One that is
    // constant but for rounding errors must not either.
    const float least = 0x1p-20f * row.mean * row.mean;
    const float spread = row.variance > least ? row.variance : least;
    if (spread < __FLT_MIN__) continue;
    const float share = 1 / spread;
    const float mean = row.mean;
#pragma omp simd
    for (int j = 0; j < cols; ++j) {
      const float y = q[j] * scale + offset;
      const float weighted = y * share;
      products[j] += weighted * (x[j] + mean);
      squares[j] += weighted * y;
    }
  }
  for (int j = 0; j < cols; ++j) {
    if (squares[j] > 0) col_scale[j] *= clip(products[j] / squares[j], 0.5f, 2.f);
  }
  round_to_halves(col_scale, cols, scratch.halves);

  // The rows again. V: also the mean error of each channel, in units of the codes.
  column_weights(col_scale, cols, inv_col, weight);
  float* const __restrict error = scratch.col_sums[0];
  for (int j = 0; j < cols; ++j) error[j] = 0;
  int count = 0;
  for (int i = 0; i < tile.rows; ++i) {
    float* const __restrict t = tile.row(i);
    const CentredRow row = centre(t, inv_col, weight, cols, x);
    float scale = fit.scale[i];
    float offset = fit.offset[i] - row.mean;
    refit(take_codes<false>(x, nullptr, scale, offset, levels, weight, row.rest, cols, q), row.rest,
          scale, offset);
    const CodeMoments m =
        take_codes<false>(x, nullptr, scale, offset, levels, weight, row.rest, cols, q);
    scratch.raw_scale[i] = scale;
    scratch.raw_offset[i] = offset;
    scratch.rest[i] = row.rest;
    scratch.variance[i] = row.variance;
    restore_gain(m, row.rest, row.variance, scale, offset);
    fit.scale[i] = scale;
    fit.offset[i] = offset + row.mean;
    fit.mean[i] = row.mean;
    __builtin_memcpy(t, x, static_cast<uint64_t>(cols) * sizeof(float));
    if (!tile.rows_are_tokens) {
      store_codes(q, cols, fit.codes + i * tile.stride);
    } else if (scale > 0) {
      ++count;
      const float inverse = 1 / scale;
#pragma omp simd
      for (int j = 0; j < cols; ++j) {
        error[j] += clip((x[j] - offset) * inverse - q[j], -1.f, 1.f);
      }
    }
  }
  if (!tile.rows_are_tokens) return;

  // V: the codes once more, such that the error of each channel has no mean.
  const float share = count > 0 ? 1.f / static_cast<float>(count) : 0.f;
  for (int j = 0; j < cols; ++j) error[j] *= share;
  for (int i = 0; i < tile.rows; ++i) {
    float scale = scratch.raw_scale[i];
    float offset = scratch.raw_offset[i];
    const auto take = inverse_or_0(scale) > 0 ? take_codes<true> : take_codes<false>;
    const CodeMoments m =
        take(tile.row(i), error, scale, offset, levels, weight, scratch.rest[i], cols, q);
    restore_gain(m, scratch.rest[i], scratch.variance[i], scale, offset);
    fit.scale[i] = scale;
    fit.offset[i] = offset + fit.mean[i];
    store_codes(q, cols, fit.codes + i * tile.stride);
  }
}

}  // namespace
}  // namespace kvarn::cpu::KVARN_ISA
