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

__device__ __forceinline__ float inverse_or_0(float x) { return x >= kSmallest ? inverse(x) : 0.f; }

__device__ __forceinline__ float half_rounded(float x) {
  return __half2float(__float2half_rn(clip(x, -kMaxHalf, kMaxHalf)));
}

/// 2^23 plus the code of x.
__device__ __forceinline__ float rounded_code(float x, float slope, float start, float levels) {
  return fmaf(__saturatef(fmaf(x, slope, start)), levels, kRounding);
}

// ---- Column scales ------------------------------------------------------------------------------

__device__ __forceinline__ float limited_col_scale(float scale) {
  return scale == 0.f ? 1.f : clip(scale, 0x1p-12f, 0x1p14f);
}

/// K in closed form, line.alternative: the token's root mean square, over one power of two.
/// Contains a barrier.
template <class Shape>
__device__ __forceinline__ void token_rms(TileMemory<Shape>& memory) {
  const auto rms = [&] { return square_root(memory.own_line().energy * (1.f / Shape::kRows)); };
  if (has_line<Shape>()) {
    const bool counts = memory.own_line().live && rms() > 0.f;
    put_warp_sum(counts ? log2f(rms()) : 0.f, memory.stat[6]);
    put_warp_sum(counts ? 1.f : 0.f, memory.stat[7]);
  }
  __syncthreads();
  if (has_line<Shape>()) {
    const float log_sum = sum_of_warps<Shape>(memory.stat[6]);
    const float count = sum_of_warps<Shape>(memory.stat[7]);
    Line& line = memory.own_line();
    if (line.counts_as_col) {
      line.alternative =
          limited_col_scale(count > 0.f ? rms() * exp2f(-rintf(log_sum / count)) : rms());
    }
  }
}

/// V in closed form, line.col_scale: of the tokens divided by their deviations, the channel's
/// geometric mean of deviation and root mean square, where the former counts at least an eighth of
/// the latter. Starts with a barrier.
template <class Shape>
__device__ __forceinline__ void channel_spread(const float (&x)[kElements],
                                               TileMemory<Shape>& memory) {
  __syncthreads();
  {
    const TilePlace<Shape> at = memory.place();
    reduce_rows<Shape, 2, 0>(at, memory.partial, [&](int i, float* out) {
      const float about = memory.first_col[at.row + i];
#pragma unroll
      for (int j = 0; j < kLaneCols; ++j) {
        const float d = x[element(i, j)] - about;
        out[0] = plus(j == 0, out[0], d);
        out[1] = j == 0 ? d * d : fmaf(d, d, out[1]);
      }
    });
  }
  __syncthreads();
  if (has_line<Shape>()) {
    bool counted = false;
    if (has_row<Shape>()) {
      const float spread_of_row = deviation(row_total<Shape>(memory.partial, 0),
                                            row_total<Shape>(memory.partial, 1), Shape::kCols);
      counted = memory.own_line().counts_as_row && spread_of_row > 0.f;
      memory.inverse_row[own_thread()] = counted ? inverse(spread_of_row) : 0.f;
    }
    put_warp_sum(counted ? 1.f : 0.f, memory.stat[6]);
  }
  __syncthreads();
  {
    const TilePlace<Shape> at = memory.place();
    float inverse_of[kLaneRows];
    load_4(memory.inverse_row + at.row, inverse_of);
    reduce_cols<Shape, 2>(at, memory.partial, [&](int half, float (&sums)[2][4]) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
          const float z = x[element(i, col_of_half(half, k))] * inverse_of[i];
          sums[0][k] = plus(i == 0, sums[0][k], z);
          sums[1][k] = i == 0 ? z * z : fmaf(z, z, sums[1][k]);
        }
      }
    });
  }
  __syncthreads();
  if (has_col<Shape>()) {
    const float count = sum_of_warps<Shape>(memory.stat[6]);
    const float share = count > 0.f ? inverse(count) : 0.f;
    const float mean = col_total<Shape>(memory.partial, 0) * share;
    const float mean_square = col_total<Shape>(memory.partial, 1) * share;
    const float variance = fmaxf(mean_square - mean * mean, mean_square * (1.f / 64));
    memory.own_line().col_scale = square_root(square_root(variance * mean_square));
  }
}

/// Column scales as the unbiased fit uses them. Those of the normalization are divided by the
/// geometric mean of all that count: the factor of Sinkhorn's is not determined, and weights and
/// rounding depend on it. Contains a barrier.
template <class Shape>
__device__ __forceinline__ void round_col_scales(TileMemory<Shape>& memory,
                                                 const Tokens<Shape>& tokens) {
  const bool counts = has_line<Shape>() && memory.own_line().counts_as_col;
  if (memory.normalized && has_line<Shape>()) {
    const Line& line = memory.own_line();
    put_warp_sum(counts ? log2f(line.col_scale) : 0.f, memory.stat[4]);
    put_warp_sum(counts ? log2f(line.alternative) : 0.f, memory.stat[5]);
  }
  __syncthreads();
  if (!counts) return;
  Line& line = memory.own_line();
  if (memory.normalized) {
    const float share = divide(1.f, tokens.row_length());
    line.col_scale *= exp2f(-sum_of_warps<Shape>(memory.stat[4]) * share);
    line.alternative *= exp2f(-sum_of_warps<Shape>(memory.stat[5]) * share);
  }
  line.col_scale = half_rounded(limited_col_scale(line.col_scale));
  line.alternative = half_rounded(limited_col_scale(line.alternative));
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

/// Line threads: inverse, weight and line.col_scale itself to memory.col, the sum of the
/// weights to memory.stat[2]. A dead token has the inverse of the first live one, whose numbers it
/// holds.
template <class Shape>
__device__ __forceinline__ void put_col_scales(TileMemory<Shape>& memory,
                                               const Tokens<Shape>& tokens) {
  if (!has_line<Shape>()) return;
  const Line& line = memory.own_line();
  const float weight = line.counts_as_col ? fminf(line.col_scale * line.col_scale, 16.f) : 0.f;
  if (has_col<Shape>()) {
    const Line& of = line.counts_as_col ? line : memory.line[tokens.first_col()];
    memory.col[0][own_thread()] = divide(1.f, of.col_scale);
    memory.col[1][own_thread()] = weight;
    memory.col[2][own_thread()] = of.col_scale;
  }
  put_warp_sum(weight, memory.stat[2]);
}

/// Line threads: the terms of what the guard compares, for line.col_scale. Contains a barrier.
template <class Shape>
__device__ __forceinline__ float guard_loss(TileMemory<Shape>& memory,
                                            const Tokens<Shape>& tokens) {
  if (has_line<Shape>()) {
    const Line& line = memory.own_line();
    put_warp_sum(loss_of_row(line.range.hi - line.range.lo, line.energy, tokens.are_cols(),
                             line.counts_as_row),
                 memory.stat[0]);
    put_warp_sum(loss_of_col(line.col_scale, line.energy, tokens.are_cols(), line.counts_as_col),
                 memory.stat[1]);
  }
  __syncthreads();
  return sum_of_warps<Shape>(memory.stat[0]) * sum_of_warps<Shape>(memory.stat[1]);
}

/// Line threads: line.range, from sums number kFirst and the one after it.
template <class Shape, int kFirst>
__device__ __forceinline__ void take_range(TileMemory<Shape>& memory) {
  if (!has_row<Shape>()) return;
  memory.own_line().range = {row_total<Shape, true>(memory.partial, kFirst),
                             -row_total<Shape, true>(memory.partial, kFirst + 1)};
}

/// x = x / column scale, about the row's number in the first live column, which makes line.mean;
/// weights in memory.col[1]; the ends of the rows in line.range; row_total has the weighted sums of
/// x (0) and its square (1).
///
/// With `guarded`, line.alternative takes the place of all column scales where it loses less than
/// 0.75 as much: one massive token can drive those of the normalization so far that the others are
/// lost. Starts with a barrier.
template <class Shape>
__device__ __forceinline__ void apply_col_scales(float (&x)[kElements], TileMemory<Shape>& memory,
                                                 const Tokens<Shape>& tokens, bool guarded) {
  const auto swap_scales = [&] {
    if (!has_line<Shape>()) return;
    Line& line = memory.own_line();
    const float scale = line.col_scale;
    line.col_scale = line.alternative;
    line.alternative = scale;
  };
  // Of the alternative; infinite where there is none (any more).
  float& alternative_loss = memory.alternative_loss;
  if (own_thread() == 0) alternative_loss = kInfinity;
  if (guarded) {
    swap_scales();
    __syncthreads();
    put_col_scales(memory, tokens);
    __syncthreads();
    {
      const TilePlace<Shape> at = memory.place();
      float inverse_of[kLaneCols];
      load_8(memory.col[0] + at.col, inverse_of);
      reduce_rows<Shape, 0, 2>(at, memory.partial, [&](int i, float* out) {
#pragma unroll
        for (int j = 0; j < kLaneCols; ++j) {
          const float y = x[element(i, j)] * inverse_of[j];
          out[0] = j == 0 ? y : fminf(out[0], y);
          out[1] = j == 0 ? -y : fminf(out[1], -y);
        }
      });
    }
    __syncthreads();
    take_range<Shape, 0>(memory);
    const float loss = guard_loss(memory, tokens);
    if (own_thread() == 0) alternative_loss = loss;
    swap_scales();
  }
  __syncthreads();
#pragma unroll 1
  while (true) {
    put_col_scales(memory, tokens);
    __syncthreads();
    {
      const TilePlace<Shape> at = memory.place();
      float inverse_of[kLaneCols];
      load_8(memory.col[0] + at.col, inverse_of);
      const float inverse_of_first = memory.col[0][tokens.first_col()];
      float about[kLaneRows];
      load_4(memory.first_col + at.row, about);
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        about[i] *= -inverse_of_first;
#pragma unroll
        for (int j = 0; j < kLaneCols; ++j) {
          x[element(i, j)] = fmaf(x[element(i, j)], inverse_of[j], about[i]);
        }
      }
    }
    {
      const TilePlace<Shape> at = memory.place();
      float w[kLaneCols];
      load_8(memory.col[1] + at.col, w);
      reduce_rows<Shape, 2, 0>(at, memory.partial, [&](int i, float* out) {
#pragma unroll
        for (int j = 0; j < kLaneCols; ++j) {
          const float d = x[element(i, j)];
          const float weighted = w[j] * d;
          out[0] = plus(j == 0, out[0], weighted);
          out[1] = j == 0 ? weighted * d : fmaf(weighted, d, out[1]);
        }
      });
    }
    {
      const TilePlace<Shape> at = memory.place();
      reduce_rows<Shape, 0, 2>(at, memory.partial + 2 * RowPartials<Shape>::kStride,
                               [&](int i, float* out) {
#pragma unroll
                                 for (int j = 0; j < kLaneCols; ++j) {
                                   const float d = x[element(i, j)];
                                   out[0] = j == 0 ? d : fminf(out[0], d);
                                   out[1] = j == 0 ? -d : fminf(out[1], -d);
                                 }
                               });
    }
    __syncthreads();
    take_range<Shape, 2>(memory);
    if (has_row<Shape>()) {
      memory.own_line().mean = memory.first_col[own_thread()] * memory.col[0][tokens.first_col()];
    }
    if (alternative_loss == kInfinity) return;
    const float loss = guard_loss(memory, tokens);
    if (!(alternative_loss < kGuardShare * loss)) return;
    {
      const TilePlace<Shape> at = memory.place();
      float scale[kLaneCols];
      load_8(memory.col[2] + at.col, scale);
      const float inverse_of_first = memory.col[0][tokens.first_col()];
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        const float about = memory.first_col[at.row + i] * inverse_of_first;
#pragma unroll
        for (int j = 0; j < kLaneCols; ++j) {
          x[element(i, j)] = (x[element(i, j)] + about) * scale[j];
        }
      }
    }
    swap_scales();
    __syncthreads();
    if (own_thread() == 0) alternative_loss = kInfinity;
  }
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

/// One more code for every element, from memory.code, and the sums of code_moments, numbers kFirst
/// and following: codes, products, squares of codes (kSquares). kShifted: a column's shift
/// (memory.col[2]) is added to `start`. Ends with a barrier.
///
/// Moments of codes are about `middle` where squares are taken, else about 0.
template <class Shape, int kFirst, bool kSquares, bool kShifted>
__device__ __forceinline__ void take_codes(const float (&x)[kElements], TileMemory<Shape>& memory) {
  const float levels = memory.levels;
  const float origin = kRounding + (kSquares ? memory.middle : 0.f);
  const TilePlace<Shape> at = memory.place();
  float w[kLaneCols];
  load_8(memory.col[1] + at.col, w);
  float* const partial = memory.partial + kFirst * RowPartials<Shape>::kStride;
  reduce_rows<Shape, 2 + kSquares, 0>(at, partial, [&](int i, float* out) {
    const float2 code = memory.code[at.row + i];
    float2 shift;
#pragma unroll
    for (int j = 0; j < kLaneCols; ++j) {
      if (kShifted && j % 2 == 0) {
        __syncwarp();  // lest they be kept in registers for the other rows
        shift = reinterpret_cast<const float2&>(memory.col[2][at.col + j]);
      }
      const float d = x[element(i, j)];
      const float start = kShifted ? (j % 2 == 0 ? shift.x : shift.y) + code.y : code.y;
      const float q = rounded_code(d, code.x, start, levels);
      // One operation where registers allow it: w * 2^23 is exact.
      const float weighted =
          kSquares || kShifted ? w[j] * (q - origin) : fmaf(w[j], q, w[j] * -kRounding);
      out[0] = plus(j == 0, out[0], weighted);
      out[1] = j == 0 ? weighted * d : fmaf(weighted, d, out[1]);
      if constexpr (kSquares) {
        out[2] = j == 0 ? weighted * (q - origin) : fmaf(weighted, q - origin, out[2]);
      }
    }
  });
  __syncthreads();
}

/// Writes what take_codes needs of the line thread's row.
template <class Shape>
__device__ __forceinline__ void put_fit(TileMemory<Shape>& memory, const Affine& fit) {
  const float slope = divide(inverse_or_0(fit.scale), memory.levels);
  memory.code[own_thread()] = {slope, -fit.offset * slope};
}

/// Codes and scales, from what apply_col_scales leaves. Afterwards x, memory.code,
/// of_row.w and col[2] say what the codes are.
template <class Shape>
__device__ __forceinline__ void fit_unbiased(float (&x)[kElements], TileMemory<Shape>& memory,
                                             const Tokens<Shape>& tokens) {
  const auto sum = [&](int q) { return row_total<Shape>(memory.partial, q); };
  const auto inverse_weight = [&] { return inverse_or_0(sum_of_warps<Shape>(memory.stat[2])); };
  const auto take_moments = [&](Line& line) {
    line.rest = sum(0) * inverse_weight();
    line.variance = sum(1) * inverse_weight() - line.rest * line.rest;
  };
  const auto take_refit = [&](Line& line, int first) {
    refit(code_moments(sum(first), sum(first + 2), sum(first + 1), memory.middle, line.rest,
                       inverse_weight()),
          line.rest, line.fit);
  };

  if (has_row<Shape>()) {
    Line& line = memory.own_line();
    take_moments(line);
    line.fit.scale = divide(
        start_range(memory.bits, Shape::kCols) * (line.range.hi - line.range.lo), memory.levels);
    line.fit.offset = (line.range.hi + line.range.lo) / 2 - line.fit.scale * memory.levels / 2;
    put_fit(memory, line.fit);
  }
  __syncthreads();

  // Codes and least squares, twice.
#pragma unroll 1
  for (int round = 0;; ++round) {
    take_codes<Shape, 0, true, false>(x, memory);
    if (has_row<Shape>()) {
      Line& line = memory.own_line();
      take_refit(line, 0);
      if (round == 0) put_fit(memory, line.fit);
    }
    if (round == 1) break;
    __syncthreads();
  }
  if (has_row<Shape>()) {
    const Line& line = memory.own_line();
    // Rows count by the inverse of their variance, lest one massive token decide. One that is
    // constant but for rounding errors must not either.
    const float mean = line.mean + line.rest;
    const float spread_of_row = fmaxf(line.variance, kMeanFloor * kMeanFloor * mean * mean);
    const float share = line.counts_as_row && spread_of_row >= kSmallest
                            ? square_root(inverse(spread_of_row))
                            : 0.f;
    memory.of_row[own_thread()] = {line.fit.scale * share, (line.fit.offset + line.mean) * share,
                                   share, line.mean * share};
  }
  __syncthreads();

  // The columns again, by the codes that the last least squares were taken from.
  {
    const TilePlace<Shape> at = memory.place();
    const float levels = memory.levels;
    reduce_cols<Shape, 2>(at, memory.partial, [&](int half, float (&sums)[2][4]) {
      __syncwarp();  // lest rows be kept in registers for the other half
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        const float2 code = memory.code[at.row + i];
        const float4 of_row = memory.of_row[at.row + i];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float d = x[element(i, col_of_half(half, k))];
          const float q = rounded_code(d, code.x, code.y, levels) - kRounding;
          const float y = fmaf(q, of_row.x, of_row.y);
          const float z = fmaf(d, of_row.z, of_row.w);
          sums[0][k] = i == 0 ? y * z : fmaf(y, z, sums[0][k]);
          sums[1][k] = i == 0 ? y * y : fmaf(y, y, sums[1][k]);
        }
      }
    });
  }
  __syncthreads();
  if (has_line<Shape>()) {
    float own_weight = 0.f;
    float moved = 0.f;
    if (has_col<Shape>()) {
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
      memory.col[0][own_thread()] = ratio;
      memory.col[1][own_thread()] = own_weight;
      moved = own_weight * ratio;
    }
    put_warp_sum(own_weight, memory.stat[2]);
    put_warp_sum(moved, memory.stat[3]);
  }
  __syncthreads();

  // The rows again. What was taken off a row moves with the columns.
  if (has_row<Shape>()) {
    Line& line = memory.own_line();
    const float before = line.mean;
    line.mean = before * (sum_of_warps<Shape>(memory.stat[3]) * inverse_weight());
    line.fit.offset += before - line.mean;
    memory.of_row[own_thread()] = {before, -line.mean, 0.f, 0.f};
    put_fit(memory, line.fit);
  }
  __syncthreads();
  {
    const TilePlace<Shape> at = memory.place();
    float ratio[kLaneCols];
    load_8(memory.col[0] + at.col, ratio);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const float4 of_row = memory.of_row[at.row + i];
#pragma unroll
      for (int j = 0; j < kLaneCols; ++j) {
        x[element(i, j)] = fmaf(x[element(i, j)] + of_row.x, ratio[j], of_row.y);
      }
    }
  }
  {
    const TilePlace<Shape> at = memory.place();
    float w[kLaneCols];
    load_8(memory.col[1] + at.col, w);
    reduce_rows<Shape, 2, 0>(at, memory.partial, [&](int i, float* out) {
#pragma unroll
      for (int j = 0; j < kLaneCols; ++j) {
        const float d = x[element(i, j)];
        const float weighted = w[j] * d;
        out[0] = plus(j == 0, out[0], weighted);
        out[1] = j == 0 ? weighted * d : fmaf(weighted, d, out[1]);
      }
    });
  }
  take_codes<Shape, 2, true, false>(x, memory);
  if (has_row<Shape>()) {
    Line& line = memory.own_line();
    take_moments(line);
    take_refit(line, 2);
    put_fit(memory, line.fit);
  }
  __syncthreads();
  take_codes<Shape, 0, false, false>(x, memory);
  const auto finish = [&] {
    Line& line = memory.own_line();
    line.out = line.fit;
    restore_gain(code_moments(sum(0), 0.f, sum(1), 0.f, line.rest, inverse_weight()), line.rest,
                 line.variance, line.out);
  };
  if (has_row<Shape>()) finish();

  if (!tokens.are_cols()) {
    // V: the codes once more, such that the error of each channel has no mean. A row that does not
    // count adds 1/2 to a column's sum, as one without error does.
    bool counted = false;
    if (has_row<Shape>()) {
      const Line& line = memory.own_line();
      counted = line.counts_as_row && line.out.scale > 0.f;
      const float half_inverse = counted ? 0.5f * inverse_or_0(line.out.scale) : 0.f;
      memory.of_row[own_thread()] = {half_inverse, fmaf(-line.out.offset, half_inverse, 0.5f),
                                     counted ? -0.5f : 0.f, 1.f};
      // Codes of a constant row stay 0, shifted or not.
      if (!(line.fit.scale >= kSmallest)) memory.code[own_thread()] = {0.f, -kInfinity};
    }
    const int count = __syncthreads_count(counted);
    {
      const TilePlace<Shape> at = memory.place();
      const float levels = memory.levels;
      reduce_cols<Shape, 1>(at, memory.partial, [&](int half, float (&sums)[1][4]) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
          const float2 code = memory.code[at.row + i];
          const float4 of_row = memory.of_row[at.row + i];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float d = x[element(i, col_of_half(half, k))];
            const float q = rounded_code(d, code.x, code.y, levels) - kRounding;
            // The error in codes, -1 .. 1, as 0 .. 1.
            const float error = __saturatef(fmaf(q, of_row.z, fmaf(d, of_row.x, of_row.y)));
            sums[0][k] = plus(i == 0, sums[0][k], error);
          }
        }
      });
    }
    __syncthreads();
    if (has_col<Shape>()) {
      const float error = 2.f * (col_total<Shape>(memory.partial, 0) - 0.5f * Shape::kRows);
      memory.col[2][own_thread()] =
          count > 0 ? divide(error, static_cast<float>(count) * memory.levels) : 0.f;
    }
    __syncthreads();
    take_codes<Shape, 0, false, true>(x, memory);
    if (has_row<Shape>()) finish();
  }
  if (has_row<Shape>() && !memory.own_line().counts_as_row) {
    memory.code[own_thread()] = {0.f, 0.f};
    memory.of_row[own_thread()].w = 0.f;
  }
}

// ---- fit = minmax -------------------------------------------------------------------------------

/// Line threads: codes over the whole range of each row.
template <class Shape>
__device__ __forceinline__ void fit_minmax(TileMemory<Shape>& memory) {
  if (has_row<Shape>()) {
    Line& line = memory.own_line();
    line.fit = {0.f, 0.f};
    if (line.counts_as_row) {
      line.fit = {divide(line.range.hi - line.range.lo, memory.levels), line.range.lo};
    }
    line.out = line.fit;
    line.rest = (line.range.lo + line.range.hi) / 2;
    put_fit(memory, line.fit);
    memory.of_row[own_thread()].w = 0.f;
  }
  if (has_col<Shape>()) memory.col[2][own_thread()] = 0.f;
}

/// Line threads, both fits: a scale that is tiny against its row's mean would need a zero point
/// beyond the precision of fp16: it is raised, and the codes are others.
template <class Shape>
__device__ __forceinline__ void raise_scale(TileMemory<Shape>& memory) {
  if (!has_row<Shape>()) return;
  Line& line = memory.own_line();
  const float least = kMeanFloor * fabsf(line.mean + line.rest);  // of x / column scale
  if (!line.counts_as_row || line.out.scale >= least) return;
  const float centre = line.out.offset + line.out.scale * memory.levels / 2;
  line.out = {least, centre - least * memory.middle};
  put_fit(memory, line.out);
  memory.of_row[own_thread()].w = 0.f;
}

}  // namespace kvarn::device
