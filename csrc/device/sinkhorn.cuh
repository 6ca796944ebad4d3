// Variance normalization of a tile in registers: log-space Sinkhorn scales (KVarN, arXiv
// 2606.03458), best round.
//
// Scales are kept as factors: adding a logarithm is multiplying, the clips are the same. A pass
// takes sum and sum of squares of x / scale about one element of the row or column, so that the
// deviation of a constant one is exactly 0 and a large mean costs no precision: three operations an
// element. Row deviations after a row's scale changed are the old ones divided by the change, so a
// round is two passes, not four.
#pragma once

#include <cstdint>

#include "device/factors.cuh"
#include "device/numeric.cuh"
#include "device/tile.cuh"

namespace kvarn::device {

/// The deviation (n - 1) of n numbers from their sum and their sum of squares.
__device__ __forceinline__ float deviation(float sum, float squares, float n) {
  if (n < 2.f) return 0.f;
  const float central = squares - sum * divide(sum, n);
  return square_root(divide(fmaxf(central, 0.f), n - 1.f));
}

/// max / min of the deviations of the active rows or columns; 0 if there are none.
__device__ __forceinline__ float spread(float least, float most) {
  return most == 0.f ? 0.f : divide(most, fmaxf(least, 1e-8f));
}

/// Column `col` and row `row` of the tile to shared memory.
template <class Shape>
__device__ __forceinline__ void put_col(const float (&x)[kElements], int col, float* out) {
  const TilePlace<Shape> at;
#pragma unroll
  for (int j = 0; j < kSide; ++j) {
    if (at.col + j != col) continue;
#pragma unroll
    for (int i = 0; i < kSide; ++i) out[at.row + i] = x[element(i, j)];
  }
}

template <class Shape>
__device__ __forceinline__ void put_row(const float (&x)[kElements], int row, float* out) {
  const TilePlace<Shape> at;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    if (at.row + i != row) continue;
#pragma unroll
    for (int j = 0; j < kSide; ++j) out[at.col + j] = x[element(i, j)];
  }
}

/// Line threads: the column scale of column threadIdx.x, of the tile times `factor`. Dead tokens
/// must hold the numbers of the first live one: they are about what the others are taken about, and
/// add nothing. Starts and ends with a barrier.
template <class Shape>
__device__ __forceinline__ float sinkhorn_col_scale(const float (&x)[kElements],
                                                    TileMemory<Shape>& memory,
                                                    const Tokens<Shape>& tokens, float factor,
                                                    int iterations) {
  float* const first_col = memory.row[0];  // x of each row in the first live column
  float* const inv_row = memory.row[1];
  float* const first_row = memory.col[0];
  float* const inv_col = memory.col[1];
  // Least and most deviation by warp, for rows and columns; those of two rounds.
  float (*const stat)[(Shape::kWarps + 3) / 4 * 4] = memory.stat;
  const int n = threadIdx.x;
  put_col<Shape>(x, tokens.first_col(), first_col);
  put_row<Shape>(x, tokens.first_row(), first_row);
  float row_scale = 1.f;
  float col_scale = 1.f;
  float col_scale_before = 1.f;
  float best_col_scale = 1.f;
  float col_deviation = 0.f;
  bool row_active = memory.line[n].counts_as_row;
  bool col_active = memory.line[n].counts_as_col;
  float best = 0.f;
  const auto decide = [&](int round, float candidate) {
    const int k = round % 2 * 4;
    const float imbalance =
        spread(min_of_warps<Shape>(stat[k]), max_of_warps<Shape>(stat[k + 1])) +
        spread(min_of_warps<Shape>(stat[k + 2]), max_of_warps<Shape>(stat[k + 3]));
    if (round == 0 || imbalance <= best * kEqual) {
      best = imbalance;
      best_col_scale = candidate;
    }
  };

#pragma unroll 1
  for (int round = 0; round <= iterations; ++round) {
    if (n < Shape::kCols) {
      if (round > 0 && col_active) {
        col_scale_before = col_scale;
        col_scale = next_scale(col_scale, col_deviation);
      }
      inv_col[n] = divide(factor, col_scale);
    }
    __syncthreads();

    {
      const TilePlace<Shape> at;
      float inverse_of[kSide];
      load_8(inv_col + at.col, inverse_of);
      const float inverse_of_first = inv_col[tokens.first_col()];
      if (tokens.are_cols && !tokens.all_live()) {
        const int dead = tokens.dead(at);
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
          if (is_dead(dead, j)) inverse_of[j] = inverse_of_first;
        }
      }
      reduce_rows<Shape, 2, 0>(at, memory.partial, [&](int i, float* out) {
        const float about = first_col[at.row + i] * inverse_of_first;
        float sum = 0.f;
        float squares = 0.f;
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
          const float d = fmaf(x[element(i, j)], inverse_of[j], -about);
          sum += d;
          squares = fmaf(d, d, squares);
        }
        out[0] = sum;
        out[1] = squares;
      });
    }
    __syncthreads();

    float least = kInfinity;
    float most = 0.f;
    if (n < Shape::kRows) {
      float now = divide(deviation(row_total<Shape>(memory.partial, 0),
                                   row_total<Shape>(memory.partial, 1), tokens.row_length()),
                         row_scale);
      if (round == 0) {
        row_active = row_active && now != 0.f;
      } else if (row_active) {
        const float before = row_scale;
        row_scale = next_scale(before, now);
        now *= divide(before, row_scale);
      }
      inv_row[n] = divide(factor, row_scale);
      if (row_active) least = most = now;
    }
    put_warp_min(least, stat[round % 2 * 4]);
    put_warp_max(most, stat[round % 2 * 4 + 1]);
    // The previous round can be judged now; its column scales are those before the last change.
    if (round > 0) decide(round - 1, col_active ? col_scale_before : 1.f);
    __syncthreads();

    {
      const TilePlace<Shape> at;
      float inverse_of[kSide];
      load_8(inv_row + at.row, inverse_of);
      const float inverse_of_first = inv_row[tokens.first_row()];
      if (!tokens.are_cols && !tokens.all_live()) {
        const int dead = tokens.dead(at);
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
          if (is_dead(dead, i)) inverse_of[i] = inverse_of_first;
        }
      }
      float about[kSide];
      load_8(first_row + at.col, about);
      float sums[2][kSide];
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        about[j] *= -inverse_of_first;
        sums[0][j] = sums[1][j] = 0.f;
      }
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
          const float d = fmaf(x[element(i, j)], inverse_of[i], about[j]);
          sums[0][j] += d;
          sums[1][j] = fmaf(d, d, sums[1][j]);
        }
      }
      reduce_cols<Shape, 2>(at, memory.partial, sums);
    }
    __syncthreads();

    least = kInfinity;
    most = 0.f;
    if (n < Shape::kCols) {
      // The sums are of x / row scale.
      col_deviation = divide(deviation(col_total<Shape>(memory.partial, 0),
                                       col_total<Shape>(memory.partial, 1), tokens.col_length()),
                             col_scale);
      if (round == 0) col_active = col_active && col_deviation != 0.f;
      if (col_active) least = most = col_deviation;
    }
    put_warp_min(least, stat[round % 2 * 4 + 2]);
    put_warp_max(most, stat[round % 2 * 4 + 3]);
  }
  __syncthreads();
  decide(iterations, col_scale);
  __syncthreads();
  return best_col_scale;
}

}  // namespace kvarn::device
