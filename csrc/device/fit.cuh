// From a rotated tile in shared memory to codes and scales: both fits of docs/format.md.
//
// What a pass needs of a row is two numbers, `slope` and `start`: the code of x is
//
//   q = round(levels * saturate(x * slope + start)),   slope = 1 / (scale * levels),
//                                                      start = -offset * slope,
//
// two multiply-adds: saturation is free, and the rounding is that of an addition to 1, of codes
// that are multiples of 2^-23, the last place of numbers from 1 to 2. What follows from one row
// alone is done in one step: its range, codes, and least squares, twice.
//
// Of 1 + q, a weight's product with q is one more multiply-add, w (1 + q) - w, and exact until it
// is rounded. Sums over weights w are those over products with their roots: sqrt(w) q, once there,
// gives the sums of w q, w q^2 and, with sqrt(w) x, of w q x by a multiply-add each.
#pragma once

#include <cstdint>

#include "device/numeric.cuh"
#include "device/sinkhorn.cuh"
#include "device/tile.cuh"

namespace kvarn::device {

inline constexpr float kUnit = 0x1p-23f;         ///< what codes are multiples of, in sums
inline constexpr float kMeanFloor = 1.f / 1024;  ///< of a scale against the mean of its row
inline constexpr float kGuardShare = 0.75f;      ///< of the loss, that an alternative must undercut
inline constexpr float kSmallest = 1.17549435e-38f;  ///< normal number
inline constexpr float kMaxHalf = 65504.f;

__device__ __forceinline__ float half_rounded(float x) {
  return __half2float(__float2half_rn(clip(x, -kMaxHalf, kMaxHalf)));
}

__device__ __forceinline__ float inverse_or_0(float x) { return x >= kSmallest ? inverse(x) : 0.f; }

// ---- Column scales ------------------------------------------------------------------------------

/// K in closed form: the token's root mean square, over one power of two. Contains a barrier.
template <class Shape>
__device__ __forceinline__ float token_rms(TileMemory<Shape>& memory) {
  const int n = own_thread();
  const float rms = n < Shape::kCols ? square_root(memory.energy[n] * (1.f / Shape::kRows)) : 0.f;
  const bool counts = rms > 0.f && memory.live[n];
  put_warp_sum(counts ? log2_fast(rms) : 0.f, memory.stat[6]);
  const int count = __syncthreads_count(counts);
  const float log_sum = sum_of_warps<Shape>(memory.stat[6]);
  return count > 0 ? rms * exp2_fast(-rintf(log_sum / static_cast<float>(count))) : rms;
}

/// V in closed form: of the tokens divided by their deviations, the channel's geometric mean of
/// deviation and root mean square, where the former counts at least an eighth of the latter.
/// Contains a barrier.
template <class Shape>
__device__ __forceinline__ float channel_spread(TileMemory<Shape>& memory,
                                                const Tokens<Shape>& tokens) {
  const Strip<Shape> at;
  const StripPlaces<Shape> places(at);
  const int first = first_place(at, 0);
  const Length length(Shape::kCols);
  float sums[2][kStrip] = {};
  float counted = 0.f;
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    const int row = at.row(step);
    float x[kStrip];
    load_strip(memory.tile, places, step, x);
    const float spread_of_row =
        row_deviation<Shape>(x, number_of_step<Shape, float>(memory.tile, first, step), length);
    const bool counts = tokens.row_counts(row) && spread_of_row > 0.f;
    const float inverse_of = counts ? inverse(spread_of_row) : 0.f;
    if (counts && at.first_of_row()) counted += 1.f;
#pragma unroll
    for (int j = 0; j < kStrip; ++j) {
      const float z = x[j] * inverse_of;
      sums[0][j] += z;
      sums[1][j] = fmaf(z, z, sums[1][j]);
    }
  }
  put_col_sums<Shape>(at, sums, memory.partial);
  put_warp_sum(counted, memory.stat[6]);
  __syncthreads();
  const int n = own_thread();
  if (n >= Shape::kCols) return 0.f;
  const float share = inverse_or_0(sum_of_warps<Shape>(memory.stat[6]));
  const float mean = col_total<Shape>(memory.partial, 0, n) * share;
  const float mean_square = col_total<Shape>(memory.partial, 1, n) * share;
  const float variance = fmaxf(mean_square - mean * mean, mean_square * (1.f / 64));
  return square_root(square_root(variance * mean_square));
}

/// Line threads: their column's scale divided by the geometric mean of all that count: the factor
/// of Sinkhorn's is not determined, and weights and rounding depend on it. `stat` is for this call
/// alone. Contains a barrier.
template <class Shape>
__device__ __forceinline__ float without_factor(const Tokens<Shape>& tokens, float scale,
                                                float* stat) {
  const int n = own_thread();
  put_warp_sum(n < Shape::kCols && tokens.col_counts(n) ? log2_fast(scale) : 0.f, stat);
  __syncthreads();
  return scale * exp2_fast(-divide(sum_of_warps<Shape>(stat), fmaxf(tokens.row_length(), 1.f)));
}

__device__ __forceinline__ float limited_col_scale(float scale) {
  return scale == 0.f ? 1.f : clip(scale, 0x1p-12f, 0x1p14f);
}

/// A lane's numbers of a row, by the column scales, less the row's mean.
template <class Shape>
__device__ __forceinline__ void load_centred(const TileMemory<Shape>& memory,
                                             const Strip<Shape>& at,
                                             const StripPlaces<Shape>& places, int step, float mean,
                                             float (&x)[kStrip]) {
  float inverse_of[kStrip];
  load_cols(memory.inverse, at, inverse_of);
  load_strip(memory.tile, places, step, x);
#pragma unroll
  for (int j = 0; j < kStrip; ++j) x[j] = fmaf(x[j], inverse_of[j], -mean);
}

/// Row number `step` of a lane, of x / column scale, less `about`, which is one of its numbers:
/// that of the last column, whose first one of the lane is at `last`.
template <class Shape>
__device__ __forceinline__ float scaled_row(const TileMemory<Shape>& memory,
                                            const StripPlaces<Shape>& places, int step, int last,
                                            float inverse_last, const float (&inverse)[kStrip],
                                            float (&y)[kStrip]) {
  load_strip(memory.tile, places, step, y);
  const float about = number_of_step<Shape, float>(memory.tile, last, step) * inverse_last;
#pragma unroll
  for (int j = 0; j < kStrip; ++j) y[j] = fmaf(y[j], inverse[j], -about);
  return about;
}

/// The guard: `scale`, or `alternative` where it loses less than 0.75 as much: one massive token
/// can drive the column scales of the normalization so far that the others are lost. Compared is
/// the sum over tokens of squared step / energy, up to a common factor. A row's step is its range;
/// an element's that times the scale of its column. So it is a product of a sum over rows and a sum
/// over columns. The ranges of the rows under the scale that is taken lie in memory.fit after the
/// barrier that must follow. Starts with a barrier.
template <class Shape>
__device__ __forceinline__ float guarded_col_scale(TileMemory<Shape>& memory,
                                                   const Tokens<Shape>& tokens,
                                                   const float (&x)[kSteps][kStrip], float scale,
                                                   float alternative) {
  const int n = own_thread();
  const auto share = [&](int token) {
    const float energy = memory.energy[token];
    return memory.live[token] && energy > 0.f ? inverse(energy) : 0.f;
  };
  // The inverses of `scale`, and those of `alternative` where the roots of weights will be.
  const auto inverse_of = [&](int which) { return which == 0 ? memory.inverse : memory.root; };
  __syncthreads();
  {
    float of_col[2] = {0.f, 0.f};
    if (n < Shape::kCols) {
      inverse_of(0)[apart(n)] = divide(1.f, scale);
      inverse_of(1)[apart(n)] = divide(1.f, alternative);
      const float counted = tokens.are_cols ? share(n) : 1.f;
      of_col[0] = scale * scale * counted;
      of_col[1] = alternative * alternative * counted;
    }
    put_warp_sum(of_col[0], memory.stat[0]);
    put_warp_sum(of_col[1], memory.stat[1]);
  }
  __syncthreads();
  const Strip<Shape> at;
  const float last_of_row = memory.tile[place<Shape>(at.own_row(), tokens.last_col())];
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    float w[kStrip];
    load_cols_apart(inverse_of(which), at, w);
    float about[kSteps];
    share_with_rows(last_of_row * inverse_of(which)[apart(tokens.last_col())], about);
    int most[kSteps];
    unsigned least[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      float y[kStrip];
#pragma unroll
      for (int j = 0; j < kStrip; ++j) y[j] = fmaf(x[k][j], w[j], -about[k]);
      strip_range(y, most[k], least[k]);
    }
    const RowRange range =
        ends(row_total(Shape::kLanes, most, [](int a, int b) { return max(a, b); }),
             row_total(Shape::kLanes, least, [](unsigned a, unsigned b) { return max(a, b); }));
    if (at.in_row < kSteps) {
      (which == 0 ? memory.fit : memory.out)[at.own_row()] = {range.lo, range.hi};
    }
    const float length = range.hi - range.lo;
    const float counted = at.in_row < kSteps ? tokens.are_cols ? 1.f : share(at.own_row()) : 0.f;
    put_warp_sum(length * length * counted, memory.stat[2 + which]);
  }
  __syncthreads();
  const float loss = sum_of_warps<Shape>(memory.stat[0]) * sum_of_warps<Shape>(memory.stat[2]);
  const float alternative_loss =
      sum_of_warps<Shape>(memory.stat[1]) * sum_of_warps<Shape>(memory.stat[3]);
  if (!(alternative_loss < kGuardShare * loss)) return scale;
  if (n < Shape::kRows) memory.fit[n] = memory.out[n];
  return alternative;
}

/// The range of a row that the guard found.
template <class Shape>
__device__ __forceinline__ RowRange range_of(const TileMemory<Shape>& memory, int row) {
  return {memory.fit[row].scale, memory.fit[row].offset};
}

/// Line threads: their column's scale takes effect. The sum of the weights lies in memory.stat[2],
/// the largest scale that counts in memory.stat[1], after the barrier that must follow.
template <class Shape>
__device__ __forceinline__ void put_col_scale(TileMemory<Shape>& memory,
                                              const Tokens<Shape>& tokens, float scale) {
  const int n = own_thread();
  const bool counts = n < Shape::kCols && tokens.col_counts(n);
  float root = 0.f;
  if (counts) root = fminf(scale, 4.f);
  if (n < Shape::kCols) {
    memory.inverse[n] = divide(1.f, scale);
    memory.root[n] = root;
    memory.col_scale[n] = scale;
  }
  put_warp_sum(root * root, memory.stat[2]);
  put_warp_max(counts ? scale : 0.f, memory.stat[1]);
}

// ---- Codes --------------------------------------------------------------------------------------

/// From numbers of a row to codes.
struct Coding {
  float slope;
  float start;
};

__device__ __forceinline__ Coding coding_of(const Affine& fit, float levels) {
  const float slope = fit.scale >= kSmallest ? inverse(fit.scale * levels) : 0.f;
  return {slope, -fit.offset * slope};
}

/// 1 plus the code of x in units; `levels` are in units, too.
__device__ __forceinline__ float rounded_code(float x, float slope, float start, float levels) {
  return fmaf(__saturatef(fmaf(x, slope, start)), levels, 1.f);
}

/// The code in units, times y.
__device__ __forceinline__ float code_times(float y, float rounded) { return fmaf(y, rounded, -y); }

/// Codes of a strip to shared memory, from 1 plus them, over the numbers of its row: all lanes of
/// the warp must have read those.
template <class Shape>
__device__ __forceinline__ void put_codes(TileMemory<Shape>& memory, const Tokens<Shape>& tokens,
                                          const Strip<Shape>& at, int row,
                                          const float (&q)[kStrip]) {
  __syncwarp();  // shuffles alone do not order memory
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const auto bits = [&](int e) { return __float_as_uint(q[kChunk * k + e]); };
    *reinterpret_cast<uint32_t*>(memory.codes +
                                 code_place<Shape>(tokens.are_cols, row, at.col(k))) =
        __byte_perm(__byte_perm(bits(0), bits(1), 0x0040), __byte_perm(bits(2), bits(3), 0x0040),
                    0x5410);
  }
}

/// A scale that is tiny against its row's mean would need a zero point beyond the precision of
/// fp16: it is raised, and the codes are others. Returns whether it was.
__device__ __forceinline__ bool raise_scale(bool counts, float mean, int bits, Affine& out) {
  const float least = kMeanFloor * fabsf(mean);
  if (!counts || out.scale >= least) return false;
  const float centre = out.offset + out.scale * static_cast<float>((1 << bits) - 1) / 2;
  out = {least, centre - least * static_cast<float>(1 << (bits - 1))};
  return true;
}

// ---- fit = minmax -------------------------------------------------------------------------------

/// Codes over the whole range of each row, which lies in memory.fit if it is `known`. Starts after
/// a barrier. The largest scale of a row that counts lies in memory.stat[0] after the barrier that
/// must follow.
template <class Shape>
__device__ __forceinline__ void fit_minmax(TileMemory<Shape>& memory, const Tokens<Shape>& tokens,
                                           bool known) {
  const float levels = tokens.levels();
  const Strip<Shape> at;
  const StripPlaces<Shape> places(at);
  const int last = first_place(at, tokens.last_col());
  const float inverse_last = memory.inverse[tokens.last_col()];
  float inverse_of[kStrip];
  load_cols(memory.inverse, at, inverse_of);
  float most = 0.f;
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    const int row = at.row(step);
    float y[kStrip];
    const float about = scaled_row(memory, places, step, last, inverse_last, inverse_of, y);
    const RowRange range = known ? range_of(memory, row) : row_range<Shape>(y);
    Affine fit = {divide(range.hi - range.lo, levels), range.lo + about};
    const bool counts = tokens.row_counts(row);
    const bool raised = raise_scale(counts, about + (range.lo + range.hi) / 2, tokens.bits, fit);
    Coding coding = coding_of({fit.scale, raised ? fit.offset - about : range.lo}, levels);
    if (!counts) coding = {0.f, 0.f}, fit = {0.f, 0.f};
#pragma unroll
    for (float& q : y) q = rounded_code(q, coding.slope, coding.start, levels * kUnit);
    put_codes(memory, tokens, at, row, y);
    if (at.first_of_row()) memory.out[row] = fit;
    most = fmaxf(most, fit.scale);
  }
  put_warp_max(most, memory.stat[0]);
}

// ---- fit = unbiased -----------------------------------------------------------------------------

/// The same number, in a register of its own, lest it be computed anew wherever it is wanted.
__device__ __forceinline__ float kept(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

/// What part of the range min..max the codes span at the start.
__device__ __forceinline__ float start_range(int bits, int row_length) {
  const float share2 = row_length == 64 ? .65f : row_length == 128 ? .62f : .58f;
  const float share3 = row_length == 64 ? .86f : row_length == 128 ? .80f : .76f;
  const float share4 = row_length == 64 ? .955f : row_length == 128 ? .925f : .90f;
  return bits == 2 ? share2 : bits == 3 ? share3 : bits == 4 ? share4 : 1.f;
}

/// Weighted moments of the codes of a row.
struct CodeMoments {
  float mean;
  float variance;
  float covariance;  ///< with x
};

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

/// From sums of the codes' products with weights, with weights and codes, and with weighted
/// numbers.
__device__ __forceinline__ CodeMoments code_moments(float sum, float squares, float products,
                                                    float rest, float inverse_weight) {
  const float mean = sum * inverse_weight;
  return {mean, fmaf(squares, inverse_weight, -mean * mean),
          fmaf(products, inverse_weight, -mean * rest)};
}

/// The same of the codes of a row, without squares, from roots of weights and numbers times these.
/// The codes are left in q, plus 1.
template <class Shape>
__device__ __forceinline__ CodeMoments products_of_codes(
    const float (&x)[kStrip], const float (&root)[kStrip], const float (&rx)[kStrip],
    const Coding& coding, float levels, float rest, float inverse_weight, float (&q)[kStrip]) {
  float sums[2];
  row_sums<Shape>(
      [&](int j, bool first, float (&sum)[2]) {
        q[j] = rounded_code(x[j], coding.slope, coding.start, levels);
        const float rq = code_times(root[j], q[j]);
        add_product(sum[0], first, root[j], rq);
        add_product(sum[1], first, rx[j], rq);
      },
      sums);
  return code_moments(sums[0], 0.f, sums[1], rest, inverse_weight);
}

/// The codes of a row by `fit`, plus 1, and least squares against them, which `fit` becomes.
template <class Shape>
__device__ __forceinline__ void refit_codes(const float (&x)[kStrip], const float (&root)[kStrip],
                                            const float (&rx)[kStrip], float levels, float rest,
                                            float inverse_weight, Affine& fit, float (&q)[kStrip]) {
  const Coding coding = coding_of(fit, levels);
  float sums[3];
  row_sums<Shape>(
      [&](int j, bool first, float (&sum)[3]) {
        q[j] = rounded_code(x[j], coding.slope, coding.start, levels);
        const float rq = code_times(root[j], q[j]);
        add_product(sum[0], first, root[j], rq);
        add_product(sum[1], first, rq, rq);
        add_product(sum[2], first, rx[j], rq);
      },
      sums);
  refit(code_moments(sums[0], sums[1], sums[2], rest, inverse_weight), rest, fit);
}

/// Weighted mean and variance of a row of x.
struct RowMoments {
  float rest;
  float variance;
};

/// The numbers of a row times the roots of weights, and their weighted moments.
template <class Shape>
__device__ __forceinline__ RowMoments weigh(const float (&root)[kStrip], const float (&x)[kStrip],
                                            float inverse_weight, float (&rx)[kStrip]) {
  float sums[2];
  row_sums<Shape>(
      [&](int j, bool first, float (&sum)[2]) {
        rx[j] = root[j] * x[j];
        add_product(sum[0], first, root[j], rx[j]);
        add_product(sum[1], first, rx[j], rx[j]);
      },
      sums);
  const float rest = sums[0] * inverse_weight;
  return {rest, fmaf(sums[1], inverse_weight, -rest * rest)};
}

/// Codes and scales, from column scales that are in effect (put_col_scale); `known` and the largest
/// scale are as with fit_minmax. Starts after a barrier.
template <class Shape>
__device__ __forceinline__ void fit_unbiased(TileMemory<Shape>& memory, const Tokens<Shape>& tokens,
                                             bool known) {
  // Codes are in units, and so are the scales of memory.fit; those of memory.out are not.
  const float levels = tokens.levels() * kUnit;

  // Every row's codes and least squares, twice; and the columns, by the codes that the last least
  // squares were taken from.
  {
    const Strip<Shape> at;
    const StripPlaces<Shape> places(at);
    const int last = first_place(at, tokens.last_col());
    const float inverse_last = memory.inverse[tokens.last_col()];
    const float inverse_weight = inverse_or_0(sum_of_warps<Shape>(memory.stat[2]));
    const float first_scale = kept(divide(start_range(tokens.bits, Shape::kCols), levels));
    float root[kStrip];
    load_cols(memory.root, at, root);
    float sums[2][kStrip] = {};
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      const int row = at.row(step);
      float x[kStrip];
      float mean;
      Affine fit;
      {
        float inverse_of[kStrip];
        load_cols(memory.inverse, at, inverse_of);
        mean = scaled_row(memory, places, step, last, inverse_last, inverse_of, x);
        const RowRange range = known ? range_of(memory, row) : row_range<Shape>(x);
        fit.scale = first_scale * (range.hi - range.lo);
        fit.offset = (range.lo + range.hi - fit.scale * levels) / 2;
      }
      float rx[kStrip];
      float q[kStrip];
      const auto [rest, variance] = weigh<Shape>(root, x, inverse_weight, rx);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        refit_codes<Shape>(x, root, rx, levels, rest, inverse_weight, fit, q);
      }

      // Rows count by the inverse of their variance, lest one massive token decide. One that is
      // constant but for rounding errors must not either.
      const float true_mean = mean + rest;
      const float spread_of_row = fmaxf(variance, kMeanFloor * kMeanFloor * true_mean * true_mean);
      const float share = tokens.row_counts(row) && spread_of_row >= kSmallest
                              ? inverse_square_root(spread_of_row)
                              : 0.f;
      const float y_scale = fit.scale * share;
      const float y_offset = (fit.offset + mean) * share;
      const float x_offset = mean * share;
#pragma unroll
      for (int j = 0; j < kStrip; ++j) {
        const float y = fmaf(q[j] - 1.f, y_scale, y_offset);
        sums[0][j] = fmaf(y, fmaf(x[j], share, x_offset), sums[0][j]);
        sums[1][j] = fmaf(y, y, sums[1][j]);
      }
      __syncwarp();  // the range of the row has been read from memory.fit
      if (at.first_of_row()) {
        memory.mean[row] = true_mean;
        memory.fit[row] = {fit.scale, fit.offset - rest};
      }
    }
    put_col_sums<Shape>(at, sums, memory.partial);
  }
  __syncthreads();
  {
    const int n = own_thread();
    float scale = 1.f;
    float moved = 0.f;
    if (n < Shape::kCols) {
      const float products = col_total<Shape>(memory.partial, 0, n);
      const float squares = col_total<Shape>(memory.partial, 1, n);
      const float before = memory.col_scale[n];
      scale = before;
      if (squares > 0.f) {
        scale = half_rounded(before * clip(divide(products, squares), 0.5f, 2.f));
      }
      if (tokens.col_counts(n)) moved = fminf(scale * scale, 16.f) * divide(before, scale);
    }
    put_col_scale(memory, tokens, scale);
    put_warp_sum(moved, memory.stat[3]);
  }
  __syncthreads();

  // The rows again. A row's mean moves with the columns: the new one is that of the old one, up to
  // a small rest. K: that is all. V: the error of each column too. A row that does not count adds
  // 1/2 to a column's sum, as one without error does.
  const float inverse_weight = inverse_or_0(sum_of_warps<Shape>(memory.stat[2]));
  const Strip<Shape> at;
  const StripPlaces<Shape> places(at);
  {
    float root[kStrip];
    load_cols(memory.root, at, root);
    const float move = sum_of_warps<Shape>(memory.stat[3]) * inverse_weight;
    float sums[1][kStrip] = {};
    float counted = 0.f;
    float most = 0.f;
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      const int row = at.row(step);
      const float before = memory.mean[row];
      const float mean = before * move;
      Affine fit = memory.fit[row];
      fit.offset += before - mean;
      float x[kStrip];
      load_centred(memory, at, places, step, mean, x);
      float rx[kStrip];
      float q[kStrip];
      const auto [rest, variance] = weigh<Shape>(root, x, inverse_weight, rx);
      refit_codes<Shape>(x, root, rx, levels, rest, inverse_weight, fit, q);
      Affine out = fit;
      restore_gain(products_of_codes<Shape>(x, root, rx, coding_of(fit, levels), levels, rest,
                                            inverse_weight, q),
                   rest, variance, out);
      out.scale *= kUnit;
      if (tokens.are_cols) {
        const bool raised = raise_scale(true, mean + rest, tokens.bits, out);
        if (__any_sync(0xffffffffu, raised)) {
          const Affine coded = {raised ? out.scale / kUnit : fit.scale,
                                raised ? out.offset : fit.offset};
          const Coding coding = coding_of(coded, levels);
#pragma unroll
          for (int j = 0; j < kStrip; ++j) {
            q[j] = rounded_code(x[j], coding.slope, coding.start, levels);
          }
        }
        put_codes(memory, tokens, at, row, q);
        if (at.first_of_row()) memory.out[row] = {out.scale, out.offset + mean};
        most = fmaxf(most, out.scale);
      } else {
        const bool counts = tokens.row_counts(row) && out.scale > 0.f;
        if (counts && at.first_of_row()) counted += 1.f;
        const float half_inverse = counts ? 0.5f * inverse_or_0(out.scale) : 0.f;
        const float minus_half = counts ? -0.5f / kUnit : 0.f;
        const float offset = fmaf(-out.offset, half_inverse, 0.5f);
#pragma unroll
        for (int j = 0; j < kStrip; ++j) {
          // The error in codes, -1 .. 1, as 0 .. 1.
          sums[0][j] += __saturatef(fmaf(q[j] - 1.f, minus_half, fmaf(x[j], half_inverse, offset)));
        }
        __syncwarp();
        if (at.first_of_row()) {
          memory.mean[row] = mean;
          memory.fit[row] = fit;
          memory.rest[row] = rest;
          memory.variance[row] = variance;
        }
      }
    }
    if (tokens.are_cols) {
      put_warp_max(most, memory.stat[0]);
      return;
    }
    put_col_sums<Shape>(at, sums, memory.partial);
    put_warp_sum(counted, memory.stat[4]);
  }
  __syncthreads();

  // V: the codes once more, such that the error of each channel has no mean.
  if (const int n = own_thread(); n < Shape::kCols) {
    const float count = sum_of_warps<Shape>(memory.stat[4]);
    const float error = 2.f * (col_total<Shape>(memory.partial, 0, n) - 0.5f * Shape::kRows);
    memory.shift[n] = count > 0.f ? divide(error, count * tokens.levels()) : 0.f;
  }
  __syncthreads();
  float shift[kStrip];
  load_cols(memory.shift, at, shift);
  float w[kStrip];
  load_cols(memory.root, at, w);
#pragma unroll
  for (float& root : w) root *= root;
  float most = 0.f;
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    const int row = at.row(step);
    const float mean = memory.mean[row];
    const float rest = memory.rest[row];
    const Affine fit = memory.fit[row];
    Coding coding = coding_of(fit, levels);
    float shifted = fit.scale >= kSmallest ? 1.f : 0.f;
    float x[kStrip];
    load_centred(memory, at, places, step, mean, x);
    float q[kStrip];
    float of_row[2];
    row_sums<Shape>(
        [&](int j, bool first, float (&sum)[2]) {
          q[j] = rounded_code(x[j], coding.slope, fmaf(shift[j], shifted, coding.start), levels);
          const float weighted = code_times(w[j], q[j]);
          add_to(sum[0], first, weighted);
          add_product(sum[1], first, weighted, x[j]);
        },
        of_row);
    Affine out = fit;
    restore_gain(code_moments(of_row[0], 0.f, of_row[1], rest, inverse_weight), rest,
                 memory.variance[row], out);
    out.scale *= kUnit;
    const bool counts = tokens.row_counts(row);
    const bool raised = raise_scale(counts, mean + rest, tokens.bits, out);
    if (__any_sync(0xffffffffu, raised || !counts)) {
      if (raised) coding = coding_of(out, tokens.levels());
      if (!counts) coding = {0.f, 0.f};
      if (raised || !counts) shifted = 0.f;
#pragma unroll
      for (int j = 0; j < kStrip; ++j) {
        q[j] = rounded_code(x[j], coding.slope, fmaf(shift[j], shifted, coding.start), levels);
      }
    }
    put_codes(memory, tokens, at, row, q);
    if (at.first_of_row()) memory.out[row] = {out.scale, out.offset + mean};
    if (counts) most = fmaxf(most, out.scale);
  }
  put_warp_max(most, memory.stat[0]);
}

}  // namespace kvarn::device
