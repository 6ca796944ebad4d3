// From a rotated tile in registers to codes and scales: both fits of docs/format.md.
//
// Every pass over the tile is followed by what the line threads make of its sums. What a pass needs
// of a row is two numbers, `slope` and `start`: the code of x is
//
//   q = round(levels * saturate(x * slope + start)),   slope = 1 / (scale * levels),
//                                                      start = -offset * slope,
//
// two multiply-adds: saturation is free, and the rounding is that of an addition to 2^23. Codes are
// not stored but taken anew wherever they are needed.
#pragma once

#include <cstdint>

#include "device/numeric.cuh"
#include "device/sinkhorn.cuh"
#include "device/tile.cuh"

namespace kvarn::device {

inline constexpr float kRounding = 8388608.f;    ///< 2^23: adding it rounds to an integer
inline constexpr float kMeanFloor = 1.f / 1024;  ///< of a scale against the mean of its row
inline constexpr float kGuardShare = 0.75f;      ///< of the loss, that an alternative must undercut
inline constexpr float kSmallest = 1.17549435e-38f;  ///< normal number
inline constexpr float kMaxHalf = 65504.f;

__device__ __forceinline__ float half_rounded(float x) {
  return __half2float(__float2half_rn(clip(x, -kMaxHalf, kMaxHalf)));
}

__device__ __forceinline__ float inverse_or_0(float x) { return x >= kSmallest ? inverse(x) : 0.f; }

/// 2^23 plus the code of x.
__device__ __forceinline__ float rounded_code(float x, float slope, float start, float levels) {
  return fmaf(__saturatef(fmaf(x, slope, start)), levels, kRounding);
}

// ---- Column scales ------------------------------------------------------------------------------

/// K in closed form: the token's root mean square, over one power of two. Contains a barrier.
template <class Shape>
__device__ __forceinline__ float token_rms(TileMemory<Shape>& memory, const Tokens<Shape>& tokens,
                                           const Line& line) {
  const float rms = square_root(line.energy * (1.f / Shape::kRows));
  const bool counts = line.live && rms > 0.f;
  put_warp_sum(counts ? log2f(rms) : 0.f, memory.stat[6]);
  put_warp_sum(counts ? 1.f : 0.f, memory.stat[7]);
  __syncthreads();
  const float log_sum = sum_of_warps<Shape>(memory.stat[6]);
  const float count = sum_of_warps<Shape>(memory.stat[7]);
  return count > 0.f ? rms * exp2f(-rintf(log_sum / count)) : rms;
}

/// V in closed form: of the tokens divided by their deviations, the channel's geometric mean of
/// deviation and root mean square, where the former counts at least an eighth of the latter.
/// Starts and ends with a barrier.
template <class Shape>
__device__ __forceinline__ float channel_spread(const float (&x)[kElements],
                                                TileMemory<Shape>& memory, bool counts_as_row) {
  float* const first_col = memory.row[0];
  float* const inverse_row = memory.row[1];
  const int n = threadIdx.x;
  put_col<Shape>(x, 0, first_col);
  __syncthreads();
  {
    const TilePlace<Shape> at;
    reduce_rows<Shape, 2, 0>(at, memory.partial, [&](int i, float* out) {
      const float about = first_col[at.row + i];
      out[0] = out[1] = 0.f;
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const float d = x[element(i, j)] - about;
        out[0] += d;
        out[1] = fmaf(d, d, out[1]);
      }
    });
  }
  __syncthreads();
  bool counted = false;
  if (n < Shape::kRows) {
    const float spread_of_row = deviation(row_total<Shape>(memory.partial, 0),
                                          row_total<Shape>(memory.partial, 1), Shape::kCols);
    counted = counts_as_row && spread_of_row > 0.f;
    inverse_row[n] = counted ? inverse(spread_of_row) : 0.f;
  }
  put_warp_sum(counted ? 1.f : 0.f, memory.stat[6]);
  __syncthreads();
  const TilePlace<Shape> at;
  float inverse_of[kSide];
  load_8(inverse_row + at.row, inverse_of);
  float sums[2][kSide] = {};
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const float z = x[element(i, j)] * inverse_of[i];
      sums[0][j] += z;
      sums[1][j] = fmaf(z, z, sums[1][j]);
    }
  }
  reduce_cols<Shape, 2>(at, memory.partial, sums);
  __syncthreads();
  float scale = 0.f;
  if (n < Shape::kCols) {
    const float count = sum_of_warps<Shape>(memory.stat[6]);
    const float share = count > 0.f ? inverse(count) : 0.f;
    const float mean = col_total<Shape>(memory.partial, 0) * share;
    const float mean_square = col_total<Shape>(memory.partial, 1) * share;
    const float variance = fmaxf(mean_square - mean * mean, mean_square * (1.f / 64));
    scale = square_root(square_root(variance * mean_square));
  }
  __syncthreads();
  return scale;
}

/// Line threads: their column's scale divided by the geometric mean of all that count: the factor
/// of Sinkhorn's is not determined, and weights and rounding depend on it. `stat` is for this call
/// alone. Contains a barrier.
template <class Shape>
__device__ __forceinline__ float without_factor(const Tokens<Shape>& tokens, float scale,
                                                bool counts, float* stat) {
  put_warp_sum(counts ? log2f(scale) : 0.f, stat);
  __syncthreads();
  const float mean = divide(sum_of_warps<Shape>(stat), tokens.row_length());
  return counts ? scale * exp2f(-mean) : 1.f;
}

__device__ __forceinline__ float limited_col_scale(float scale) {
  return scale == 0.f ? 1.f : clip(scale, 0x1p-12f, 0x1p14f);
}

/// The smallest and the largest x * inverse_col of each row, and its weighted sum. Ends with a
/// barrier.
template <class Shape>
__device__ __forceinline__ void row_ranges(const float (&x)[kElements], TileMemory<Shape>& memory,
                                           const Tokens<Shape>& tokens, const float* inverse_col,
                                           const float* weight) {
  const TilePlace<Shape> at;
  float inverse_of[kSide];
  float w[kSide];
  load_8(inverse_col + at.col, inverse_of);
  load_8(weight + at.col, w);
  if (tokens.are_cols && !tokens.all_live()) {
    // A dead token holds the numbers of the first live one, and changes no range as long as it has
    // its scale too.
    const int dead = tokens.dead(at);
    const float inverse_of_first = inverse_col[tokens.first()];
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      if (is_dead(dead, j)) inverse_of[j] = inverse_of_first;
    }
  }
  reduce_rows<Shape, 1, 2>(at, memory.partial, [&](int i, float* out) {
    float sum = 0.f;
    float lo = kInfinity;
    float hi = kInfinity;
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const float y = x[element(i, j)] * inverse_of[j];
      lo = fminf(lo, y);
      hi = fminf(hi, -y);
      sum = fmaf(w[j], y, sum);
    }
    out[0] = sum;
    out[1] = lo;
    out[2] = hi;
  });
  __syncthreads();
}

/// What the guard compares: the sum over tokens of squared step / energy, up to a common factor. A
/// row's step is its range; an element's that times the scale of its column. So it is a product of
/// a sum over rows and a sum over columns; these are the line threads' terms of them.
__device__ __forceinline__ float loss_of_row(float range, float energy, bool tokens_are_cols,
                                             bool counts) {
  if (!counts || (!tokens_are_cols && !(energy > 0.f))) return 0.f;
  return range * range * (tokens_are_cols ? 1.f : inverse(energy));
}

__device__ __forceinline__ float loss_of_col(float scale, float energy, bool tokens_are_cols,
                                             bool counts) {
  if (!counts || (tokens_are_cols && !(energy > 0.f))) return 0.f;
  return scale * scale * (tokens_are_cols ? inverse(energy) : 1.f);
}

/// Column scales in effect: inverse and weight of line.col_scale in memory.col[0], [1], and the
/// ranges of the rows. With `guarded`, an alternative takes the place of all column scales where it
/// loses less than 0.75 as much: one massive token can drive those of the normalization so far that
/// the others are lost. Starts and ends with a barrier.
template <class Shape>
__device__ __forceinline__ void apply_col_scales(const float (&x)[kElements],
                                                 TileMemory<Shape>& memory,
                                                 const Tokens<Shape>& tokens, Line& line,
                                                 bool guarded, float alternative) {
  float* const inverse_col = memory.col[0];
  float* const weight = memory.col[1];
  const int n = threadIdx.x;
  const bool has_row = n < Shape::kRows;
  const bool has_col = n < Shape::kCols;
  const float scale = line.col_scale;
  if (guarded) line.col_scale = alternative;
  float alternative_loss = 0.f;
  RowRange& range = line.range;
#pragma unroll 1
  for (int pass = guarded ? 0 : 1;; ++pass) {
    __syncthreads();
    const float chosen = line.col_scale;
    const float own_weight = line.counts_as_col ? fminf(chosen * chosen, 16.f) : 0.f;
    if (has_col) {
      inverse_col[n] = divide(1.f, chosen);
      weight[n] = own_weight;
    }
    put_warp_sum(own_weight, memory.stat[2]);
    put_warp_sum(loss_of_col(chosen, line.energy, tokens.are_cols, line.counts_as_col),
                 memory.stat[1]);
    __syncthreads();
    row_ranges(x, memory, tokens, inverse_col, weight);
    if (has_row) {
      range.mean =
          row_total<Shape>(memory.partial, 0) * inverse_or_0(sum_of_warps<Shape>(memory.stat[2]));
      range.lo = row_total<Shape, true>(memory.partial, 1);
      range.hi = -row_total<Shape, true>(memory.partial, 2);
    }
    if (!guarded || pass == 2) break;
    put_warp_sum(loss_of_row(has_row ? range.hi - range.lo : 0.f, line.energy, tokens.are_cols,
                             line.counts_as_row),
                 memory.stat[0]);
    __syncthreads();
    const float loss = sum_of_warps<Shape>(memory.stat[0]) * sum_of_warps<Shape>(memory.stat[1]);
    if (pass == 1 && !(alternative_loss < kGuardShare * loss)) break;
    alternative_loss = loss;
    line.col_scale = pass == 0 ? scale : line.counts_as_col ? alternative : 1.f;
  }
  __syncthreads();
}

// ---- fit = unbiased -----------------------------------------------------------------------------

/// What part of the range min..max the codes span at the start.
__device__ __forceinline__ float start_range(int bits, int row_length) {
  const float share2 = row_length == 64 ? .65f : row_length == 128 ? .62f : .58f;
  const float share3 = row_length == 64 ? .86f : row_length == 128 ? .80f : .76f;
  const float share4 = row_length == 64 ? .955f : row_length == 128 ? .925f : .90f;
  return bits == 2 ? share2 : bits == 3 ? share3 : bits == 4 ? share4 : 1.f;
}

/// Weighted moments of the codes of a row, from their sums about `middle`.
struct CodeMoments {
  float mean;
  float variance;
  float covariance;  ///< with x
};

__device__ __forceinline__ CodeMoments code_moments(float sum, float squares, float products,
                                                    float middle, float rest,
                                                    float inverse_weight) {
  const float mean = sum * inverse_weight;
  return {middle + mean, squares * inverse_weight - mean * mean,
          products * inverse_weight - mean * rest};
}

/// Least squares of x against the codes.
__device__ __forceinline__ void refit(const CodeMoments& m, float rest, Affine& fit) {
  if (m.covariance > 0.f && m.variance > 0.f) {
    fit.scale = divide(m.covariance, m.variance);
    fit.offset = rest - fit.scale * m.mean;
  }
}

/// The scale whose products with x are those of x with itself (reverse regression): least squares
/// shrinks, and a shrinkage does not average out over tokens as other errors do.
__device__ __forceinline__ void restore_gain(const CodeMoments& m, float rest, float variance,
                                             Affine& fit) {
  if (m.covariance > 0.f && variance > 0.f) {
    fit.scale = divide(variance, m.covariance);
    fit.offset = rest - fit.scale * m.mean;
  }
}

/// The code of x = 0, about which moments are taken.
__device__ __forceinline__ float middle_code(float start, float levels) {
  return fmaf(__saturatef(start), levels, kRounding);
}

/// Adds one element to a row's sums: q, its square (kSquares) and x * q.
template <bool kSquares>
__device__ __forceinline__ void add_code(float x, float w, float q, float (&sums)[3]) {
  const float weighted = w * q;
  sums[0] += weighted;
  if constexpr (kSquares) sums[1] = fmaf(weighted, q, sums[1]);
  sums[2] = fmaf(weighted, x, sums[2]);
}

/// One more code for every element, from slope and start of its row (memory.row[0], [1]), and the
/// sums of code_moments: (with kCentre weighted sum and squares of x,) codes, their squares
/// (kSquares), products. kCentre: x is brought to where the codes are taken, by `centre`. kShifted:
/// a column's shift (memory.col[2]) is added where the row says so (memory.row[2]). Ends with a
/// barrier.
template <class Shape, bool kCentre, bool kSquares, bool kShifted, class Centre>
__device__ __forceinline__ void take_codes(float (&x)[kElements], TileMemory<Shape>& memory,
                                           const Centre& centre) {
  const float levels = memory.levels;
  constexpr int kFirst = kCentre ? 2 : 0;
  const TilePlace<Shape> at;
  float w[kSide];
  load_8(memory.col[1] + at.col, w);
  float shift[kSide];
  if constexpr (kShifted) load_8(memory.col[2] + at.col, shift);
  reduce_rows<Shape, kFirst + 2 + kSquares, 0>(at, memory.partial, [&](int i, float* out) {
    const float slope = memory.row[0][at.row + i];
    const float start = memory.row[1][at.row + i];
    const float middle = middle_code(start, levels);
    const float shifted = kShifted ? memory.row[2][at.row + i] : 0.f;
    const auto place = centre(at.row + i);
    float rest = 0.f;
    float squares = 0.f;
    float sums[3] = {};
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      float d = x[element(i, j)];
      if constexpr (kCentre) {
        d = place(d, j);
        x[element(i, j)] = d;
        const float weighted = w[j] * d;
        rest += weighted;
        squares = fmaf(weighted, d, squares);
      }
      const float begin = kShifted ? fmaf(shift[j], shifted, start) : start;
      add_code<kSquares>(d, w[j], rounded_code(d, slope, begin, levels) - middle, sums);
    }
    if constexpr (kCentre) {
      out[0] = rest;
      out[1] = squares;
    }
    out[kFirst] = sums[0];
    if constexpr (kSquares) out[kFirst + 1] = sums[1];
    out[kFirst + 1 + kSquares] = sums[2];
  });
  __syncthreads();
}

/// Writes what take_codes needs of the line thread's row.
template <class Shape>
__device__ __forceinline__ void put_fit(TileMemory<Shape>& memory, const Affine& fit) {
  const float slope = divide(inverse_or_0(fit.scale), memory.levels);
  memory.row[0][threadIdx.x] = slope;
  memory.row[1][threadIdx.x] = -fit.offset * slope;
}

/// Codes and scales, from column scales that are in effect (apply_col_scales). Afterwards x, slope,
/// start, shift say what the codes are. Starts and ends with a
/// barrier.
template <class Shape>
__device__ __forceinline__ void fit_unbiased(float (&x)[kElements], TileMemory<Shape>& memory,
                                             const Tokens<Shape>& tokens) {
  const int n = threadIdx.x;
  const bool has_row = n < Shape::kRows;
  const bool has_col = n < Shape::kCols;
  const auto unmoved = [](int) { return [](float d, int) { return d; }; };
  const auto sum = [&](int q) { return row_total<Shape>(memory.partial, q); };

  float inverse_weight = inverse_or_0(sum_of_warps<Shape>(memory.stat[2]));
  if (has_row) {
    Line& line = memory.own_line();
    const float lo = line.range.lo - line.range.mean;
    const float hi = line.range.hi - line.range.mean;
    line.mean = line.range.mean;
    line.fit.scale = divide(start_range(memory.bits, Shape::kCols) * (hi - lo), memory.levels);
    line.fit.offset = (hi + lo) / 2 - line.fit.scale * memory.levels / 2;
    memory.row[2][n] = line.range.mean;
    put_fit(memory, line.fit);
  }
  __syncthreads();

  // Codes and least squares, twice.
  take_codes<Shape, true, true, false>(x, memory, [&](int row) {
    const float mean = memory.row[2][row];
    return [mean](float d, int) { return d - mean; };
  });
  if (has_row) {
    Line& line = memory.own_line();
    line.rest = sum(0) * inverse_weight;
    line.variance = sum(1) * inverse_weight - line.rest * line.rest;
    const float middle = middle_code(memory.row[1][n], memory.levels) - kRounding;
    refit(code_moments(sum(2), sum(3), sum(4), middle, line.rest, inverse_weight), line.rest,
          line.fit);
    put_fit(memory, line.fit);
  }
  __syncthreads();
  take_codes<Shape, false, true, false>(x, memory, unmoved);
  if (has_row) {
    Line& line = memory.own_line();
    const float middle = middle_code(memory.row[1][n], memory.levels) - kRounding;
    refit(code_moments(sum(0), sum(1), sum(2), middle, line.rest, inverse_weight), line.rest,
          line.fit);
    // Rows count by the inverse of their variance, lest one massive token decide. One that is
    // constant but for rounding errors must not either.
    const float mean = line.mean + line.rest;
    const float spread_of_row = fmaxf(line.variance, kMeanFloor * kMeanFloor * mean * mean);
    const float share = line.counts_as_row && spread_of_row >= kSmallest
                            ? square_root(inverse(spread_of_row))
                            : 0.f;
    memory.row[2][n] = line.fit.scale * share;
    memory.row[3][n] = (line.fit.offset + line.mean) * share;
    memory.row[4][n] = share;
    memory.row[5][n] = line.mean * share;
  }
  __syncthreads();

  // The columns again, by the codes that the last least squares were taken from.
  {
    const TilePlace<Shape> at;
    const float levels = memory.levels;
    float sums[2][kSide] = {};
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const float slope = memory.row[0][at.row + i];
      const float start = memory.row[1][at.row + i];
      const float y_scale = memory.row[2][at.row + i];
      const float y_offset = memory.row[3][at.row + i];
      const float x_scale = memory.row[4][at.row + i];
      const float x_offset = memory.row[5][at.row + i];
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const float d = x[element(i, j)];
        const float q = rounded_code(d, slope, start, levels) - kRounding;
        const float y = fmaf(q, y_scale, y_offset);
        sums[0][j] = fmaf(y, fmaf(d, x_scale, x_offset), sums[0][j]);
        sums[1][j] = fmaf(y, y, sums[1][j]);
      }
    }
    reduce_cols<Shape, 2>(at, memory.partial, sums);
  }
  __syncthreads();
  float own_weight = 0.f;
  float moved = 0.f;
  if (has_col) {
    Line& line = memory.own_line();
    const float products = col_total<Shape>(memory.partial, 0);
    const float squares = col_total<Shape>(memory.partial, 1);
    const float before = line.col_scale;
    if (line.counts_as_col && squares > 0.f) {
      line.col_scale = half_rounded(before * clip(divide(products, squares), 0.5f, 2.f));
      own_weight = fminf(line.col_scale * line.col_scale, 16.f);
    } else if (line.counts_as_col) {
      own_weight = fminf(before * before, 16.f);
    }
    const float ratio = divide(before, line.col_scale);
    memory.col[0][n] = ratio;
    memory.col[1][n] = own_weight;
    moved = own_weight * ratio;
  }
  put_warp_sum(own_weight, memory.stat[2]);
  put_warp_sum(moved, memory.stat[3]);
  __syncthreads();

  // The rows again. A row's mean moves with the columns: the new one is that of the old one, up to
  // a small rest.
  inverse_weight = inverse_or_0(sum_of_warps<Shape>(memory.stat[2]));
  if (has_row) {
    Line& line = memory.own_line();
    const float before = line.mean;
    line.mean = before * (sum_of_warps<Shape>(memory.stat[3]) * inverse_weight);
    line.fit.offset += before - line.mean;
    memory.row[2][n] = before;
    memory.row[3][n] = line.mean;
    put_fit(memory, line.fit);
  }
  __syncthreads();
  {
    float ratio[kSide];
    load_8(memory.col[0] + TilePlace<Shape>().col, ratio);
    take_codes<Shape, true, true, false>(x, memory, [&](int row) {
      const float before = memory.row[2][row];
      const float after = memory.row[3][row];
      return [before, after, &ratio](float d, int j) { return fmaf(d + before, ratio[j], -after); };
    });
  }
  if (has_row) {
    Line& line = memory.own_line();
    line.rest = sum(0) * inverse_weight;
    line.variance = sum(1) * inverse_weight - line.rest * line.rest;
    const float middle = middle_code(memory.row[1][n], memory.levels) - kRounding;
    refit(code_moments(sum(2), sum(3), sum(4), middle, line.rest, inverse_weight), line.rest,
          line.fit);
    put_fit(memory, line.fit);
  }
  __syncthreads();
  take_codes<Shape, false, false, false>(x, memory, unmoved);
  const auto finish = [&] {
    Line& line = memory.own_line();
    const float middle = middle_code(memory.row[1][n], memory.levels) - kRounding;
    line.out = line.fit;
    restore_gain(code_moments(sum(0), 0.f, sum(1), middle, line.rest, inverse_weight), line.rest,
                 line.variance, line.out);
  };
  if (has_row) finish();

  if (!tokens.are_cols) {
    // V: the codes once more, such that the error of each channel has no mean. A row that does not
    // count adds 1/2 to a column's sum, as one without error does.
    bool counted = false;
    if (has_row) {
      const Line& line = memory.own_line();
      counted = line.counts_as_row && line.out.scale > 0.f;
      const float half_inverse = counted ? 0.5f * inverse_or_0(line.out.scale) : 0.f;
      memory.row[2][n] = half_inverse;
      memory.row[3][n] = fmaf(-line.out.offset, half_inverse, 0.5f);
      memory.row[4][n] = counted ? -0.5f : 0.f;
    }
    const int count = __syncthreads_count(counted);
    const TilePlace<Shape> at;
    const float levels = memory.levels;
    float sums[1][kSide] = {};
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const float slope = memory.row[0][at.row + i];
      const float start = memory.row[1][at.row + i];
      const float half_inverse = memory.row[2][at.row + i];
      const float offset = memory.row[3][at.row + i];
      const float minus_half = memory.row[4][at.row + i];
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const float d = x[element(i, j)];
        const float q = rounded_code(d, slope, start, levels) - kRounding;
        // The error in codes, -1 .. 1, as 0 .. 1.
        sums[0][j] += __saturatef(fmaf(q, minus_half, fmaf(d, half_inverse, offset)));
      }
    }
    reduce_cols<Shape, 1>(at, memory.partial, sums);
    __syncthreads();
    if (has_col) {
      const float error = 2.f * (col_total<Shape>(memory.partial, 0) - 0.5f * Shape::kRows);
      memory.col[2][n] = count > 0 ? divide(error, static_cast<float>(count) * memory.levels) : 0.f;
    }
    if (has_row) memory.row[2][n] = memory.own_line().fit.scale >= kSmallest ? 1.f : 0.f;
    __syncthreads();
    take_codes<Shape, false, false, true>(x, memory, unmoved);
    if (has_row) finish();
  } else {
    if (has_row) memory.row[2][n] = 0.f;
    if (has_col) memory.col[2][n] = 0.f;
  }
  if (has_row && !memory.own_line().counts_as_row)
    memory.row[0][n] = memory.row[1][n] = memory.row[2][n] = 0.f;
}

// ---- fit = minmax -------------------------------------------------------------------------------

/// Line threads: codes over the whole range of each row.
template <class Shape>
__device__ __forceinline__ void fit_minmax(TileMemory<Shape>& memory) {
  const int n = threadIdx.x;
  if (n < Shape::kRows) {
    Line& line = memory.own_line();
    line.fit = {0.f, 0.f};
    if (line.counts_as_row) {
      line.fit = {divide(line.range.hi - line.range.lo, memory.levels), line.range.lo};
    }
    line.out = line.fit;
    put_fit(memory, line.fit);
    memory.row[2][n] = 0.f;
  }
  if (n < Shape::kCols) memory.col[2][n] = 0.f;
}

/// Line threads, both fits: a scale that is tiny against its row's mean would need a zero point
/// beyond the precision of fp16: it is raised, and the codes are others.
template <class Shape>
__device__ __forceinline__ void raise_scale(TileMemory<Shape>& memory, bool minmax) {
  if (threadIdx.x >= Shape::kRows) return;
  Line& line = memory.own_line();
  const float mean =
      minmax ? (line.range.lo + line.range.hi) / 2 : line.mean + line.rest;  // of x / column scale
  const float least = kMeanFloor * fabsf(mean);
  if (!line.counts_as_row || line.out.scale >= least) return;
  const float centre = line.out.offset + line.out.scale * memory.levels / 2;
  line.out = {least, centre - least * static_cast<float>(1 << (memory.bits - 1))};
  put_fit(memory, line.out);
  memory.row[2][threadIdx.x] = 0.f;
}

}  // namespace kvarn::device
