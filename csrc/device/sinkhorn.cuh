// Variance normalization of a tile in registers: log-space Sinkhorn scales (KVarN, arXiv
// 2606.03458), best round.
//
// Scales are kept as factors: adding a logarithm is multiplying, the clips are the same. A pass
// takes sum and sum of squares of x / scale about one element of the row or column, so that the
// deviation of a constant one is exactly 0 and a large mean costs no precision. Row deviations
// after a row's scale changed are the old ones divided by the change, so a round is two passes, not
// four.
#pragma once

#include <cstdint>

#include "device/numeric.cuh"
#include "device/tile.cuh"

namespace kvarn::device {

inline constexpr float kMinScale = 0.74081822f;  ///< exp(-0.3)
inline constexpr float kMaxScale = 22026.466f;   ///< exp(10)

__device__ __forceinline__ float clip(float x, float lo, float hi) {
  return fminf(fmaxf(x, lo), hi);
}

/// Which tokens of a tile take part; in x the others are 0. In shared memory, not in registers.
struct Live {
  float* tokens;  ///< [kTokens + 2]: 1 or 0 for each token, how many, the first

  template <class Shape>
  __device__ __forceinline__ int count() const {
    return static_cast<int>(tokens[Shape::kTokens]);
  }
  template <class Shape>
  __device__ __forceinline__ int first() const {
    return static_cast<int>(tokens[Shape::kTokens + 1]);
  }
  template <class Shape>
  __device__ __forceinline__ bool all() const {
    return tokens[Shape::kTokens] == static_cast<float>(Shape::kTokens);
  }
};

__device__ __forceinline__ void unpack(const float4& v, float (&out)[4]) {
  out[0] = v.x;
  out[1] = v.y;
  out[2] = v.z;
  out[3] = v.w;
}

/// The deviation (n - 1) of `count` numbers from their sums about one of them.
__device__ __forceinline__ float deviation(float sum, float squares, float count) {
  if (count < 2.f) return 0.f;
  return square_root(divide(fmaxf(squares - divide(sum * sum, count), 0.f), count - 1.f));
}

/// max / min of deviations, 0 where none took part.
__device__ __forceinline__ float spread(float lo, float hi) {
  return hi > 0.f ? divide(hi, fmaxf(lo, 1e-8f)) : 0.f;
}

/// The column scale of the best round, for the column threads. shared: 2 * kCols + 1 floats.
template <class Shape>
__device__ __forceinline__ float sinkhorn_col_scale(const TileThread<Shape>& place,
                                                    const float (&x)[Shape::kElements],
                                                    const Live& live, int iterations,
                                                    float* shared) {
  const TileThread<Shape> at = place.again();
  float* const inv_col = shared;
  float* const first_row = shared + Shape::kCols;  // of x
  float* const first_row_inverse = shared + 2 * Shape::kCols;
  const bool all = live.all<Shape>();
  const float in_row = Shape::kKey ? live.count<Shape>() : Shape::kCols;
  const float in_col = Shape::kKey ? Shape::kRows : live.count<Shape>();
  const int first_row_index = Shape::kKey ? 0 : live.first<Shape>();
  const int first_col_index = Shape::kKey ? live.first<Shape>() : 0;

  // The elements about which sums are taken.
  float first_col[1][2] = {};
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (at.col + 16 * g + c == first_col_index) {
          first_col[0][row] = x[tile_element(g, row, c)];
        }
      }
      if (at.row + 8 * row == first_row_index) {
        *reinterpret_cast<float4*>(first_row + at.col + 16 * g) = {
            x[tile_element(g, row, 0)], x[tile_element(g, row, 1)], x[tile_element(g, row, 2)],
            x[tile_element(g, row, 3)]};
      }
    }
  }
  reduce_rows<Sum>(at, first_col);

  float row_scale[2] = {1.f, 1.f};
  bool row_active[2] = {true, true};
  float col_scale = 1.f;
  float best_col_scale = 1.f;
  float col_deviation = 0.f;
  bool col_active = !Shape::kKey || live.tokens[at.own_col()] != 0.f;
  float best = 0.f;

#pragma unroll 1
  for (int round = 0; round <= iterations; ++round) {
    if (round > 0 && col_active) {
      col_scale = clip(col_scale * clip(col_deviation, 1e-3f, 1e3f), kMinScale, kMaxScale);
    }
    if (at.first_of_col()) inv_col[at.own_col()] = divide(1.f, col_scale);
    __syncthreads();

    float row_sums[2][2] = {};  // sum, squares; by row
    const float inverse_of_first = inv_col[first_col_index];
    const float about[2] = {first_col[0][0] * inverse_of_first, first_col[0][1] * inverse_of_first};
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      float inverse[4];
      float mask[4];
      unpack(at.columns(inv_col, g), inverse);
      if (Shape::kKey && !all) unpack(at.columns(live.tokens, g), mask);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          float d = fmaf(x[tile_element(g, row, c)], inverse[c], -about[row]);
          if (Shape::kKey && !all) d *= mask[c];
          row_sums[0][row] += d;
          row_sums[1][row] = fmaf(d, d, row_sums[1][row]);
        }
      }
    }
    reduce_rows<Sum>(at, row_sums);
    float lo = Min::kNeutral;
    float hi = 0.f;
    float inv_row[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float now = divide(deviation(row_sums[0][row], row_sums[1][row], in_row), row_scale[row]);
      if (round == 0) {
        row_active[row] = now != 0.f;
      } else if (row_active[row]) {
        const float before = row_scale[row];
        row_scale[row] = clip(before * clip(now, 1e-3f, 1e3f), kMinScale, kMaxScale);
        now *= divide(before, row_scale[row]);
      }
      if (row_active[row]) {
        lo = fminf(lo, now);
        hi = fmaxf(hi, now);
      }
      inv_row[row] = divide(1.f, row_scale[row]);
      if (at.row + 8 * row == first_row_index && at.col == 0) *first_row_inverse = inv_row[row];
    }
    __syncthreads();

    const float first_inverse = *first_row_inverse;
    float row_mask[2] = {1.f, 1.f};
    if (!Shape::kKey && !all) {
      row_mask[0] = live.tokens[at.row];
      row_mask[1] = live.tokens[at.row + 8];
    }
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      float first[4];
      float sums[4];
      float squares[4];
      unpack(at.columns(first_row, g), first);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float shift = -first[c] * first_inverse;
        float d0 = fmaf(x[tile_element(g, 0, c)], inv_row[0], shift);
        float d1 = fmaf(x[tile_element(g, 1, c)], inv_row[1], shift);
        if (!Shape::kKey && !all) {
          d0 *= row_mask[0];
          d1 *= row_mask[1];
        }
        sums[c] = d0 + d1;
        squares[c] = fmaf(d0, d0, d1 * d1);
      }
      put_partial(at, 0, g, {sums[0], sums[1], sums[2], sums[3]});
      put_partial(at, 1, g, {squares[0], squares[1], squares[2], squares[3]});
    }
    __syncthreads();
    col_deviation = deviation(column_sum(at, 0), column_sum(at, 1), in_col);
    if (round == 0) col_active = col_active && col_deviation != 0.f;
    float ends[4] = {lo, -hi, col_active ? col_deviation : Min::kNeutral,
                     col_active ? -col_deviation : 0.f};
    reduce_block<Min>(at, ends);
    const float imbalance = spread(ends[0], -ends[1]) + spread(ends[2], -ends[3]);
    if (round == 0 || imbalance <= best) {
      best = imbalance;
      best_col_scale = col_scale;
    }
  }
  return best_col_scale;
}

}  // namespace kvarn::device
