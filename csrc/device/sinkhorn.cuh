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
__device__ __forceinline__ void put_col(const float (&x)[kElements],
                                        const TileMemory<Shape>& memory, int col, float* out) {
  const TilePlace<Shape> at = memory.place();
  if (at.col != col / kLaneCols * kLaneCols) return;
#pragma unroll
  for (int j = 0; j < kLaneCols; ++j) {
    if (at.col + j != col) continue;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) out[at.row + i] = x[element(i, j)];
  }
}

template <class Shape>
__device__ __forceinline__ void put_row(const float (&x)[kElements],
                                        const TileMemory<Shape>& memory, int row, float* out) {
  const TilePlace<Shape> at = memory.place();
  if (at.row != row / kLaneRows * kLaneRows) return;
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    if (at.row + i != row) continue;
#pragma unroll
    for (int j = 0; j < kLaneCols; ++j) out[at.col + j] = x[element(i, j)];
  }
}

/// line.col_scale of each column, of the tile times memory.factor, after `iterations` rounds, from
/// memory.first_col and first_row. Dead tokens must hold the numbers of the first live one: they
/// are about what the others are taken about, and add nothing. Starts and ends with a barrier.
template <class Shape>
__device__ __forceinline__ void sinkhorn_col_scale(const float (&x)[kElements],
                                                   TileMemory<Shape>& memory,
                                                   const Tokens<Shape>& tokens, int iterations) {
  float* const inverse_col = memory.col[0];
  float* const inverse_row = memory.inverse_row;
  // Least and most deviation by warp, for rows and columns; those of two rounds.
  auto* const stat = memory.stat;
  const auto decide = [&](Balance& line, int round, float candidate) {
    const int k = round % 2 * 4;
    const float imbalance =
        spread(min_of_warps<Shape>(stat[k]), max_of_warps<Shape>(stat[k + 1])) +
        spread(min_of_warps<Shape>(stat[k + 2]), max_of_warps<Shape>(stat[k + 3]));
    if (round == 0 || imbalance <= line.best * kEqual) {
      line.best = imbalance;
      line.best_col_scale = candidate;
    }
  };
  if (has_line<Shape>()) {
    const Line& line = memory.own_line();
    memory.own_balance() = {1.f, 1.f, 1.f, 1.f, 0.f, 0.f, line.counts_as_row, line.counts_as_col};
  }

#pragma unroll 1
  for (int round = 0; round <= iterations; ++round) {
    if (has_col<Shape>()) {
      Balance& line = memory.own_balance();
      if (round > 0 && line.col_active) {
        line.col_scale_before = line.col_scale;
        line.col_scale = next_scale(line.col_scale, line.col_deviation);
      }
      inverse_col[own_thread()] = divide(memory.factor, line.col_scale);
    }
    __syncthreads();

    {
      const TilePlace<Shape> at = memory.place();
      float inverse_of[kLaneCols];
      load_8(inverse_col + at.col, inverse_of);
      const float inverse_of_first = inverse_col[tokens.first_col()];
      if (tokens.are_cols() && !tokens.all_live()) {
        const int dead = tokens.dead(at);
#pragma unroll
        for (int j = 0; j < kLaneCols; ++j) {
          if (is_dead(dead, j)) inverse_of[j] = inverse_of_first;
        }
      }
      reduce_rows<Shape, 2, 0>(at, memory.partial, [&](int i, float* out) {
        const float about = memory.first_col[at.row + i] * inverse_of_first;
#pragma unroll
        for (int j = 0; j < kLaneCols; ++j) {
          const float d = fmaf(x[element(i, j)], inverse_of[j], -about);
          out[0] = plus(j == 0, out[0], d);
          out[1] = j == 0 ? d * d : fmaf(d, d, out[1]);
        }
      });
    }
    __syncthreads();

    if (has_line<Shape>()) {
      Balance& line = memory.own_balance();
      float least = kInfinity;
      float most = 0.f;
      if (has_row<Shape>()) {
        float now = divide(deviation(row_total<Shape>(memory.partial, 0),
                                     row_total<Shape>(memory.partial, 1), tokens.row_length()),
                           line.row_scale);
        if (round == 0) {
          line.row_active = line.row_active && now != 0.f;
        } else if (line.row_active) {
          const float before = line.row_scale;
          line.row_scale = next_scale(before, now);
          now *= divide(before, line.row_scale);
        }
        inverse_row[own_thread()] = divide(memory.factor, line.row_scale);
        if (line.row_active) least = most = now;
      }
      put_warp_min(least, stat[round % 2 * 4]);
      put_warp_max(most, stat[round % 2 * 4 + 1]);
      // The previous round can be judged now; its column scales are those before the last change.
      if (round > 0) decide(line, round - 1, line.col_active ? line.col_scale_before : 1.f);
    }
    __syncthreads();

    {
      const TilePlace<Shape> at = memory.place();
      float inverse_of[kLaneRows];
      load_4(inverse_row + at.row, inverse_of);
      const float inverse_of_first = inverse_row[tokens.first_row()];
      if (!tokens.are_cols() && !tokens.all_live()) {
        const int dead = tokens.dead(at);
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
          if (is_dead(dead, i)) inverse_of[i] = inverse_of_first;
        }
      }
      reduce_cols<Shape, 2>(at, memory.partial, [&](int half, float (&sums)[2][4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int j = col_of_half(half, k);
          const float about = memory.first_row[at.col + j] * inverse_of_first;
#pragma unroll
          for (int i = 0; i < kLaneRows; ++i) {
            const float d = fmaf(x[element(i, j)], inverse_of[i], -about);
            sums[0][k] = plus(i == 0, sums[0][k], d);
            sums[1][k] = i == 0 ? d * d : fmaf(d, d, sums[1][k]);
          }
        }
      });
    }
    __syncthreads();

    if (has_line<Shape>()) {
      Balance& line = memory.own_balance();
      float least = kInfinity;
      float most = 0.f;
      if (has_col<Shape>()) {
        // The sums are of x / row scale.
        line.col_deviation =
            divide(deviation(col_total<Shape>(memory.partial, 0),
                             col_total<Shape>(memory.partial, 1), tokens.col_length()),
                   line.col_scale);
        if (round == 0) line.col_active = line.col_active && line.col_deviation != 0.f;
        if (line.col_active) least = most = line.col_deviation;
      }
      put_warp_min(least, stat[round % 2 * 4 + 2]);
      put_warp_max(most, stat[round % 2 * 4 + 3]);
    }
  }
  __syncthreads();
  if (has_line<Shape>()) {
    Balance& line = memory.own_balance();
    decide(line, iterations, line.col_scale);
    memory.own_line().col_scale = line.best_col_scale;
  }
  __syncthreads();
}

}  // namespace kvarn::device
