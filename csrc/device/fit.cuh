// Codes and scales of a tile in registers: both fits of docs/format.md.
//
// The fit is x ~ (q * scale[row] + offset[row]) * col_scale[column], rows being what shares a scale
// and an offset (K: channels, V: tokens). Scales, offsets and moments of rows are in the registers
// of their lanes, numbers of columns in shared memory. Codes are left in shared memory, one a byte.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/sinkhorn.cuh"
#include "device/tile.cuh"

namespace kvarn::device {

inline constexpr float kRounding = 12582912.f;  ///< x + it - it = x rounded to even, |x| < 2^22
inline constexpr float kMaxHalf = 65504.f;
inline constexpr float kSmallest = 1.17549435e-38f;  ///< normal fp32
inline constexpr float kMeanFloor = 9.765625e-4f;    ///< 2^-10, of a row's scale to its mean

/// What a fit leaves in the threads.
struct RowFit {
  float scale[2];
  float offset[2];
  float mean[2];  ///< of x / col_scale
};

/// Numbers of columns, and what else is put by, in shared memory.
template <class Shape>
struct ColumnArrays {
  float* scale;    ///< [kCols]
  float* inverse;  ///< [kCols]
  float* weight;   ///< [kCols]
  float* change;   ///< [kCols]: ratio of scales, then (V) the mean error
  float2* rows;    ///< [kRows]: scale and offset
  uint8_t* codes;  ///< [kRows, kCodePitch]
};

__device__ __forceinline__ float inverse_or_0(float x) {
  return x >= kSmallest ? divide(1.f, x) : 0.f;
}

__device__ __forceinline__ float half_rounded(float x) {
  return __half2float(__float2half_rn(clip(x, -kMaxHalf, kMaxHalf)));
}

/// To the nearest integer in 0..levels, ties to even; a0 and a1 such that a0 * x + a1 is the place
/// divided by levels. The result is kRounding + code.
__device__ __forceinline__ float rounded_code(float x, float a0, float a1, float levels) {
  return fmaf(__saturatef(fmaf(x, a0, a1)), levels, kRounding);
}

/// Four codes of neighbouring columns, given as kRounding + code: the lowest byte is the code.
__device__ __forceinline__ uint32_t code_bytes_of(const float (&q)[4]) {
  const uint32_t low = __byte_perm(__float_as_uint(q[0]), __float_as_uint(q[1]), 0x0040);
  const uint32_t high = __byte_perm(__float_as_uint(q[2]), __float_as_uint(q[3]), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

template <class Shape>
__device__ __forceinline__ void put_codes(const TileThread<Shape>& at, uint8_t* codes, int g,
                                          int row, uint32_t bytes) {
  *reinterpret_cast<uint32_t*>(codes + (at.row + 8 * row) * Shape::kCodePitch + at.col + 16 * g) =
      bytes;
}

// ---- Column scales ----------------------------------------------------------------------------

/// K in closed form: the token's root mean square, all of them divided by one power of two so that
/// their mean logarithm is about 0. energy: summed squares of each token.
template <class Shape>
__device__ __forceinline__ float token_rms(const TileThread<Shape>& at, const Live& live,
                                           const float* energy) {
  const bool counted = live.tokens[at.own_col()] != 0.f;
  const float rms = square_root(energy[at.own_col()] * (1.f / Shape::kDim));
  float sums[2] = {counted && at.first_of_col() ? log2f(rms) : 0.f,
                   counted && at.first_of_col() ? 1.f : 0.f};
  reduce_block<Sum>(at, sums);
  return counted ? rms * exp2f(-rintf(divide(sums[0], sums[1]))) : 1.f;
}

/// V in closed form: of the tokens divided by their deviations, the channel's geometric mean of
/// deviation and root mean square, where the former counts at least an eighth of the latter.
template <class Shape>
__device__ __forceinline__ float channel_spread(const TileThread<Shape>& place,
                                                const float (&x)[Shape::kElements]) {
  const TileThread<Shape> at = place.again();
  float mean[1][2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    // As a tree: equal numbers have their exact mean, and a constant row a deviation of 0.
    float sums[Shape::kGroups];
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      sums[g] = (x[tile_element(g, row, 0)] + x[tile_element(g, row, 1)]) +
                (x[tile_element(g, row, 2)] + x[tile_element(g, row, 3)]);
    }
#pragma unroll
    for (int step = 1; step < Shape::kGroups; step *= 2) {
#pragma unroll
      for (int g = 0; g < Shape::kGroups; g += 2 * step) sums[g] += sums[g + step];
    }
    mean[0][row] = sums[0];
  }
  reduce_rows<Sum>(at, mean);
  float squares[1][2] = {};
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    mean[0][row] *= 1.f / Shape::kCols;
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float d = x[tile_element(g, row, c)] - mean[0][row];
        squares[0][row] = fmaf(d, d, squares[0][row]);
      }
    }
  }
  reduce_rows<Sum>(at, squares);
  float inverse[2];
  float counted = 0.f;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float deviation = square_root(squares[0][row] * (1.f / (Shape::kCols - 1)));
    inverse[row] = deviation > 0.f ? divide(1.f, deviation) : 0.f;
    if (at.first_of_row() && deviation > 0.f) counted += 1.f;
  }
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    float sums[4];
    float squares_of[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float y0 = x[tile_element(g, 0, c)] * inverse[0];
      const float y1 = x[tile_element(g, 1, c)] * inverse[1];
      sums[c] = y0 + y1;
      squares_of[c] = fmaf(y0, y0, y1 * y1);
    }
    put_partial(at, 0, g, {sums[0], sums[1], sums[2], sums[3]});
    put_partial(at, 1, g, {squares_of[0], squares_of[1], squares_of[2], squares_of[3]});
  }
  float count[1] = {counted};
  reduce_block<Sum>(at, count);  // its barriers also serve the partial sums
  const float share = count[0] > 0.f ? divide(1.f, count[0]) : 0.f;
  const float column_mean = column_sum(at, 0) * share;
  const float mean_square = column_sum(at, 1) * share;
  const float variance = fmaxf(mean_square - column_mean * column_mean, mean_square * (1.f / 64));
  return square_root(square_root(variance * mean_square));
}

__device__ __forceinline__ float limited_col_scale(float scale) {
  return scale == 0.f ? 1.f : clip(scale, 1.f / 4096, 16384.f);
}

// ---- fit = minmax -----------------------------------------------------------------------------

/// Codes over the whole range of each row; also into fit what scale and offset that makes.
/// Returns the sum over tokens of squared error / energy.
template <class Shape, bool kPutCodes>
__device__ __forceinline__ float minmax_codes(const TileThread<Shape>& place,
                                              const float (&x)[Shape::kElements], const Live& live,
                                              const ColumnArrays<Shape>& columns, float levels,
                                              const float* energy, RowFit& fit) {
  const TileThread<Shape> at = place.again();
  const bool all = live.all<Shape>();
  float ends[2][2] = {{Min::kNeutral, Min::kNeutral}, {Min::kNeutral, Min::kNeutral}};
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    float inverse[4];
    float mask[4] = {1.f, 1.f, 1.f, 1.f};
    unpack(at.columns(columns.inverse, g), inverse);
    if (Shape::kKey && !all) unpack(at.columns(live.tokens, g), mask);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float y = x[tile_element(g, row, c)] * inverse[c];
        if (Shape::kKey && !all && mask[c] == 0.f) continue;
        ends[0][row] = fminf(ends[0][row], y);
        ends[1][row] = fminf(ends[1][row], -y);
      }
    }
  }
  reduce_rows<Min>(at, ends);
  float per_level[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if (live.count<Shape>() == 0) ends[0][row] = ends[1][row] = 0.f;
    const float range = -ends[1][row] - ends[0][row];
    fit.offset[row] = ends[0][row];
    fit.scale[row] = divide(range, levels);
    fit.mean[row] = (ends[0][row] - ends[1][row]) / 2;
    per_level[row] = inverse_or_0(range);
  }
  float row_errors[1][2] = {};
  forget_loads();
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    float inverse[4];
    float scale[4];
    float errors[4];
    float q[2][4];
    unpack(at.columns(columns.inverse, g), inverse);
    unpack(at.columns(columns.scale, g), scale);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float e[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float element = x[tile_element(g, row, c)];
        // The difference first: exact for a row with a large mean.
        const float place =
            __saturatef(fmaf(element, inverse[c], -fit.offset[row]) * per_level[row]);
        q[row][c] = fmaf(place, levels, kRounding);
        const float back = fmaf(q[row][c] - kRounding, fit.scale[row], fit.offset[row]) * scale[c];
        e[row] = element - back;
        if constexpr (!Shape::kKey) row_errors[0][row] = fmaf(e[row], e[row], row_errors[0][row]);
      }
      errors[c] = fmaf(e[0], e[0], e[1] * e[1]);
    }
    if constexpr (Shape::kKey && !kPutCodes) {
      put_partial(at, 0, g, {errors[0], errors[1], errors[2], errors[3]});
    }
    if constexpr (kPutCodes) {
      put_codes(at, columns.codes, g, 0, code_bytes_of(q[0]));
      put_codes(at, columns.codes, g, 1, code_bytes_of(q[1]));
    }
  }
  if constexpr (kPutCodes) return 0.f;
  float loss[1] = {0.f};
  if constexpr (Shape::kKey) {
    __syncthreads();
    const float error = column_sum(at, 0);
    if (at.first_of_col() && live.tokens[at.own_col()] != 0.f)
      loss[0] = divide(error, energy[at.own_col()]);
  } else {
    reduce_rows<Sum>(at, row_errors);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int token = at.row + 8 * row;
      if (at.first_of_row() && live.tokens[token] != 0.f) {
        loss[0] += divide(row_errors[0][row], energy[token]);
      }
    }
  }
  reduce_block<Sum>(at, loss);
  return loss[0];
}

/// Column threads: writes their column's scale and inverse. Ends with a barrier.
template <class Shape>
__device__ __forceinline__ void put_col_scale(const TileThread<Shape>& at, float scale,
                                              const ColumnArrays<Shape>& columns) {
  __syncthreads();
  if (at.first_of_col()) {
    columns.scale[at.own_col()] = scale;
    columns.inverse[at.own_col()] = divide(1.f, scale);
  }
  __syncthreads();
}

/// Sinkhorn's column scale, unless one massive token has driven it so far that the others are lost:
/// then V does without and K takes the closed form.
template <class Shape>
__device__ __forceinline__ float guarded_col_scale(const TileThread<Shape>& at,
                                                   const float (&x)[Shape::kElements],
                                                   const Live& live, int iterations, float levels,
                                                   const float* energy,
                                                   const ColumnArrays<Shape>& columns,
                                                   float* shared) {
  const float scale = sinkhorn_col_scale(at, x, live, iterations, shared);
  float alternative = 1.f;
  if constexpr (Shape::kKey) alternative = limited_col_scale(token_rms(at, live, energy));
  float losses[2];
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    RowFit unused;
    put_col_scale(at, i == 0 ? scale : alternative, columns);
    const float loss = minmax_codes<Shape, false>(at, x, live, columns, levels, energy, unused);
    losses[0] = i == 0 ? loss : losses[0];
    losses[1] = loss;
  }
  return losses[1] < 0.75f * losses[0] ? alternative : scale;
}

// ---- fit = unbiased ---------------------------------------------------------------------------

/// What part of the range min..max the codes span at the start.
__device__ __forceinline__ float start_range(int bits, int row_length) {
  const float share2 = row_length == 64 ? .65f : row_length == 128 ? .62f : .58f;
  const float share3 = row_length == 64 ? .86f : row_length == 128 ? .80f : .76f;
  const float share4 = row_length == 64 ? .955f : row_length == 128 ? .925f : .90f;
  return bits == 2 ? share2 : bits == 3 ? share3 : bits == 4 ? share4 : 1.f;
}

/// Columns count by the square of their scale, as their errors do; large ones no further.
/// Column threads bring the scale of their column. Ends with a barrier.
template <class Shape>
__device__ __forceinline__ void put_weights(const TileThread<Shape>& at, const Live& live,
                                            float scale, const ColumnArrays<Shape>& columns) {
  const bool counted = !Shape::kKey || live.tokens[at.own_col()] != 0.f;
  const float weight = counted ? fminf(scale * scale, 16.f) : 0.f;
  float sum[1] = {at.first_of_col() ? weight : 0.f};
  reduce_block<Sum>(at, sum);
  if (at.first_of_col()) {
    columns.scale[at.own_col()] = scale;
    columns.inverse[at.own_col()] = divide(1.f, scale);
    columns.weight[at.own_col()] = sum[0] > 0.f ? divide(weight, sum[0]) : 0.f;
  }
  __syncthreads();
}

/// Weighted moments of rows: of x less its mean, and of codes.
struct RowMoments {
  float rest[2];  ///< weighted mean of x less mean: rounding errors
  float variance[2];
};

/// x -> x less its weighted mean, which is returned in `mean`; the sum is in sums on entry.
/// With kRange also the ends of the row.
template <class Shape, bool kRange>
__device__ __forceinline__ void centre(const TileThread<Shape>& place, float (&x)[Shape::kElements],
                                       const Live& live, const float* weight,
                                       const float (&mean)[2], RowMoments& moments,
                                       float (&ends)[2][2]) {
  const TileThread<Shape> at = place.again();
  forget_loads();
  const bool all = live.all<Shape>();
  float sums[2][2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) ends[i][0] = ends[i][1] = Min::kNeutral;
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    float w[4];
    unpack(at.columns(weight, g), w);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float d = x[tile_element(g, row, c)] - mean[row];
        // A dead token sits at the mean, where it changes no end of the row.
        if (Shape::kKey && !all && w[c] == 0.f) d = 0.f;
        x[tile_element(g, row, c)] = d;
        const float weighted = w[c] * d;
        sums[0][row] += weighted;
        sums[1][row] = fmaf(weighted, d, sums[1][row]);
        if constexpr (kRange) {
          ends[0][row] = fminf(ends[0][row], d);
          ends[1][row] = fminf(ends[1][row], -d);
        }
      }
    }
  }
  reduce_rows<Sum>(at, sums);
  if constexpr (kRange) reduce_rows<Min>(at, ends);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    moments.rest[row] = sums[0][row];
    moments.variance[row] = sums[1][row] - sums[0][row] * sums[0][row];
  }
}

/// x -> (x + shift) * ratio, and the weighted means of the rows of that.
template <class Shape>
__device__ __forceinline__ void rescale(const TileThread<Shape>& place,
                                        float (&x)[Shape::kElements], const float (&shift)[2],
                                        const float* ratio, const float* weight,
                                        float (&mean)[1][2]) {
  const TileThread<Shape> at = place.again();
  InOrder order;
  mean[0][0] = mean[0][1] = 0.f;
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    float factor[4];
    float w[4];
    unpack(order.columns(at, ratio, g), factor);
    unpack(order.columns(at, weight, g), w);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float& element = x[tile_element(g, row, c)];
        element = (element + shift[row]) * factor[c];
        mean[0][row] = fmaf(w[c], element, mean[0][row]);
      }
    }
  }
  reduce_rows<Sum>(at, mean);
}

/// Codes of a row of x and their weighted moments.
struct CodeMoments {
  float mean[2];
  float variance[2];
  float covariance[2];  ///< with x
};

template <class Shape, bool kShifted, bool kPutCodes>
__device__ __forceinline__ CodeMoments take_codes(const TileThread<Shape>& place,
                                                  const float (&x)[Shape::kElements],
                                                  const ColumnArrays<Shape>& columns,
                                                  const float (&scale)[2], const float (&offset)[2],
                                                  const float (&rest)[2], float levels) {
  const TileThread<Shape> at = place.again();
  forget_loads();
  const float per_level = divide(1.f, levels);
  float a0[2];
  float a1[2];
  float middle[2];  // kRounding + the code of the mean: moments about it lose little
  bool any[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float inverse = inverse_or_0(scale[row]) * per_level;
    any[row] = inverse > 0.f;
    a0[row] = inverse;
    a1[row] = -offset[row] * inverse;
    middle[row] = fmaf(__saturatef(a1[row]), levels, kRounding);
  }
  float sums[3][2] = {};
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    float w[4];
    float shift[4];
    float q[2][4];
    unpack(at.columns(columns.weight, g), w);
    if constexpr (kShifted) unpack(at.columns(columns.change, g), shift);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float element = x[tile_element(g, row, c)];
        float place = fmaf(element, a0[row], a1[row]);
        if constexpr (kShifted) place = fmaf(shift[c], any[row] ? per_level : 0.f, place);
        q[row][c] = fmaf(__saturatef(place), levels, kRounding);
        const float distance = q[row][c] - middle[row];
        const float weighted = w[c] * distance;
        sums[0][row] += weighted;
        sums[1][row] = fmaf(weighted, distance, sums[1][row]);
        sums[2][row] = fmaf(weighted, element, sums[2][row]);
      }
    }
    if constexpr (kPutCodes) {
      put_codes(at, columns.codes, g, 0, code_bytes_of(q[0]));
      put_codes(at, columns.codes, g, 1, code_bytes_of(q[1]));
    }
  }
  reduce_rows<Sum>(at, sums);
  CodeMoments m;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    m.mean[row] = middle[row] - kRounding + sums[0][row];
    m.variance[row] = sums[1][row] - sums[0][row] * sums[0][row];
    m.covariance[row] = sums[2][row] - sums[0][row] * rest[row];
  }
  return m;
}

/// Least squares of x against the codes.
__device__ __forceinline__ void refit(const CodeMoments& m, const float (&rest)[2],
                                      float (&scale)[2], float (&offset)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if (m.covariance[row] > 0.f && m.variance[row] > 0.f) {
      scale[row] = divide(m.covariance[row], m.variance[row]);
      offset[row] = rest[row] - scale[row] * m.mean[row];
    }
  }
}

/// The scale whose products with x are those of x with itself (reverse regression): least squares
/// shrinks, and a shrinkage does not average out over tokens as other errors do.
__device__ __forceinline__ void restore_gain(const CodeMoments& m, const RowMoments& of,
                                             float (&scale)[2], float (&offset)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if (m.covariance[row] > 0.f && of.variance[row] > 0.f) {
      scale[row] = divide(of.variance[row], m.covariance[row]);
      offset[row] = of.rest[row] - scale[row] * m.mean[row];
    }
  }
}

/// On entry the column threads bring the column scale, fp16 already; on return they have the
/// refitted one, codes are in columns.codes, and x is x / col_scale less fit.mean.
template <class Shape>
__device__ __forceinline__ void unbiased_codes(const TileThread<Shape>& place,
                                               float (&x)[Shape::kElements], const Live& live,
                                               float col_scale, int bits,
                                               const ColumnArrays<Shape>& columns, RowFit& fit) {
  const float levels = static_cast<float>((1 << bits) - 1);
  const float per_level = divide(1.f, levels);
  RowMoments moments;
  float ends[2][2];
  float mean[1][2] = {};

  // A first fit of the rows.
  put_weights(place, live, col_scale, columns);
  const float none[2] = {0.f, 0.f};
  rescale(place, x, none, columns.inverse, columns.weight, mean);
  centre<Shape, true>(place, x, live, columns.weight, mean[0], moments, ends);
  const float range = start_range(bits, Shape::kCols);
  float scale[2];
  float offset[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    scale[row] = range * (-ends[1][row] - ends[0][row]) * per_level;
    offset[row] = (ends[0][row] - ends[1][row]) / 2 - scale[row] * levels / 2;
  }
  float a0[2];  // of the last codes
  float a1[2];
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      a0[row] = inverse_or_0(scale[row]) * per_level;
      a1[row] = -offset[row] * a0[row];
    }
    refit(take_codes<Shape, false, false>(place, x, columns, scale, offset, moments.rest, levels),
          moments.rest, scale, offset);
  }

  // The columns. Rows count by the inverse of their variance, lest one massive token decide; one
  // that is constant but for rounding errors must not either.
  {
    const TileThread<Shape> at = place.again();
    float share[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      offset[row] += mean[0][row];
      share[row] = inverse_or_0(
          fmaxf(moments.variance[row], kMeanFloor * kMeanFloor * mean[0][row] * mean[0][row]));
    }
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      float products[4];
      float squares[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        products[c] = squares[c] = 0.f;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const float element = x[tile_element(g, row, c)];
          const float q = rounded_code(element, a0[row], a1[row], levels) - kRounding;
          const float y = fmaf(q, scale[row], offset[row]);
          const float weighted = y * share[row];
          products[c] = fmaf(weighted, element + mean[0][row], products[c]);
          squares[c] = fmaf(weighted, y, squares[c]);
        }
      }
      put_partial(at, 0, g, {products[0], products[1], products[2], products[3]});
      put_partial(at, 1, g, {squares[0], squares[1], squares[2], squares[3]});
    }
    __syncthreads();
    const float products = column_sum(at, 0);
    const float squares = column_sum(at, 1);
    const bool counted = !Shape::kKey || live.tokens[at.own_col()] != 0.f;
    const float before = columns.scale[at.own_col()];
    float after = before;
    if (counted && squares > 0.f) after *= clip(divide(products, squares), 0.5f, 2.f);
    after = half_rounded(after);
    if (at.first_of_col()) columns.change[at.own_col()] = divide(before, after);
    // Out of the registers for a while.
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (at.first_of_row()) columns.rows[at.row + 8 * row] = {scale[row], offset[row]};
    }
    put_weights(at, live, after, columns);
  }

  // The rows again.
  float old_mean[2] = {mean[0][0], mean[0][1]};
  // Opaque, lest the sums of the pass before be kept in registers instead of x.
  asm volatile("" : "+f"(old_mean[0]), "+f"(old_mean[1]));
  rescale(place, x, old_mean, columns.change, columns.weight, mean);
  centre<Shape, false>(place, x, live, columns.weight, mean[0], moments, ends);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float2 kept = columns.rows[place.again().row + 8 * row];
    scale[row] = kept.x;
    offset[row] = kept.y - mean[0][row];
    fit.mean[row] = mean[0][row];
  }
  refit(take_codes<Shape, false, false>(place, x, columns, scale, offset, moments.rest, levels),
        moments.rest, scale, offset);
  const CodeMoments m =
      take_codes<Shape, false, Shape::kKey>(place, x, columns, scale, offset, moments.rest, levels);
  const float used_scale[2] = {scale[0], scale[1]};  // that made the last codes
  const float used_offset[2] = {offset[0], offset[1]};
  restore_gain(m, moments, scale, offset);

  // V: the codes once more, such that the error of each channel has no mean.
  if constexpr (!Shape::kKey) {
    const TileThread<Shape> at = place.again();
    float inverse[2];
    float limit[2];
    float counted[1] = {0.f};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      a0[row] = inverse_or_0(used_scale[row]) * per_level;
      a1[row] = -used_offset[row] * a0[row];
      const bool some = scale[row] > 0.f;
      inverse[row] = some ? divide(1.f, scale[row]) : 0.f;
      limit[row] = some ? 1.f : 0.f;
      if (some && at.first_of_row()) counted[0] += 1.f;
    }
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      float errors[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        errors[c] = 0.f;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const float element = x[tile_element(g, row, c)];
          const float q = rounded_code(element, a0[row], a1[row], levels) - kRounding;
          const float error = (element - offset[row]) * inverse[row] - q;
          errors[c] += clip(error, -limit[row], limit[row]);
        }
      }
      put_partial(at, 0, g, {errors[0], errors[1], errors[2], errors[3]});
    }
    reduce_block<Sum>(at, counted);  // its barriers also serve the partial sums
    const float error = column_sum(at, 0);
    if (at.first_of_col()) {
      columns.change[at.own_col()] = counted[0] > 0.f ? divide(error, counted[0]) : 0.f;
    }
    __syncthreads();
    const CodeMoments shifted = take_codes<Shape, true, true>(place, x, columns, used_scale,
                                                              used_offset, moments.rest, levels);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      scale[row] = used_scale[row];
      offset[row] = used_offset[row];
    }
    restore_gain(shifted, moments, scale, offset);
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    fit.scale[row] = scale[row];
    fit.offset[row] = offset[row] + fit.mean[row];
  }
}

/// A row whose scale is tiny against its mean would need a zero point beyond the precision of fp16:
/// its scale is raised, the centre of its range kept, and its codes are taken again. x: as x /
/// col_scale less fit.mean.
template <class Shape>
__device__ __forceinline__ void raise_scales(const TileThread<Shape>& place,
                                             const float (&x)[Shape::kElements], int bits,
                                             const ColumnArrays<Shape>& columns, RowFit& fit) {
  const TileThread<Shape> at = place.again();
  const float levels = static_cast<float>((1 << bits) - 1);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float least = kMeanFloor * fabsf(fit.mean[row]);
    if (!(fit.scale[row] < least)) continue;
    const float centre_of_range = fit.offset[row] + fit.scale[row] * levels / 2;
    fit.scale[row] = least;
    fit.offset[row] = centre_of_range - least * static_cast<float>(1 << (bits - 1));
    const float a0 = inverse_or_0(least) * divide(1.f, levels);
    const float a1 = -(fit.offset[row] - fit.mean[row]) * a0;
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      float q[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        q[c] = rounded_code(x[tile_element(g, row, c)], a0, a1, levels);
      }
      put_codes(at, columns.codes, g, row, code_bytes_of(q));
    }
  }
}

}  // namespace kvarn::device
