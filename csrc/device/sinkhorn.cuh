// Variance normalization of a tile in shared memory: log-space Sinkhorn scales (KVarN, arXiv
// 2606.03458), best round.
//
// Scales are kept as factors: adding a logarithm is multiplying, the clips are the same. A pass
// takes sum and sum of squares of x / scale about one element of the row or column: three
// operations an element. So a large mean costs no precision, and in the first round, which decides
// who takes part, the deviation of a constant row or column is exactly 0. The element is the last
// one: of tokens, the first ones of a sequence may be massive. Row deviations after a row's scale
// changed are the old ones divided by the change: a round looks at every element twice, once along
// rows and once along columns.
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

/// Deviation of a row of the strip's numbers.
template <class Shape>
__device__ __forceinline__ float row_deviation(const float (&x)[kStrip], float about,
                                               float length) {
  float sums[2];
  row_sums<Shape>(
      [&](int j, bool first, float (&sum)[2]) {
        const float d = x[j] - about;
        add_to(sum[0], first, d);
        add_product(sum[1], first, d, d);
      },
      sums);
  return deviation(sums[0], sums[1], length);
}

/// Line threads: the column scale of column threadIdx.x, of the tile times `factor`. Dead tokens
/// must hold the numbers of the last live one. They then have its scale, and add nothing to a
/// deviation, which is taken about it. Starts after a barrier, ends with one.
template <class Shape>
__device__ __forceinline__ float sinkhorn_col_scale(TileMemory<Shape>& memory,
                                                    const Tokens<Shape>& tokens, float factor,
                                                    int iterations) {
  const int n = threadIdx.x;
  const bool has_col = n < Shape::kCols;
  float (*const stat)[(Shape::kWarps + 3) / 4 * 4] = memory.stat;
  float row_scale = 1.f;  // of the row that the lane has the totals of
  bool row_active = true;
  float col_scale = 1.f;
  float col_scale_before = 1.f;
  float best_col_scale = 1.f;
  float col_deviation = 0.f;
  bool col_active = true;
  float best = 0.f;
  const auto add = [](float a, float b) { return a + b; };

#pragma unroll 1
  for (int round = 0;; ++round) {
    if (has_col) {
      if (round > 0 && col_active) {
        col_scale_before = col_scale;
        col_scale = next_scale(col_scale, col_deviation);
      }
      memory.inverse[n] = divide(factor, col_scale);
    }
    __syncthreads();
    if (round > 0 && has_col) {
      // The previous round can be judged now; its column scales are those before the last change.
      const int k = (round - 1) % 2 * 4;
      const float imbalance =
          spread(min_of_warps<Shape>(stat[k]), max_of_warps<Shape>(stat[k + 1])) +
          spread(min_of_warps<Shape>(stat[k + 2]), max_of_warps<Shape>(stat[k + 3]));
      if (round == 1 || imbalance <= best * kEqual) {
        best = imbalance;
        best_col_scale = col_active ? col_scale_before : 1.f;
      }
    }
    if (round > iterations) break;

    const Strip<Shape> at;
    const StripPlaces<Shape> places(at);
    float inverse_row;
    {
      float w[kStrip];
      load_cols(memory.inverse, at, w);
      const int last_col = tokens.last_col();
      const float inverse_last_col = memory.inverse[last_col];
      const float* const last = memory.tile + place_of<Shape>(at.row(0), last_col);
      float sums[2][kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        float x[kStrip];
        load_strip(memory.tile, places, step, x);
        const float about = last[step * Shape::kStepPlaces] * inverse_last_col;
        float of_strip[2];
        strip_sums(
            [&](int j, bool is_first, float (&sum)[2]) {
              const float d = fmaf(x[j], w[j], -about);
              add_to(sum[0], is_first, d);
              add_product(sum[1], is_first, d, d);
            },
            of_strip);
        sums[0][step] = of_strip[0];
        sums[1][step] = of_strip[1];
      }
      float now = divide(
          deviation(row_total(at, sums[0], add), row_total(at, sums[1], add), tokens.row_length()),
          row_scale);
      if (round == 0) {
        row_active = now != 0.f;
      } else if (row_active) {
        const float before = row_scale;
        row_scale = next_scale(before, now);
        now *= divide(before, row_scale);
      }
      inverse_row = divide(factor, row_scale);
      if (at.in_row < kSteps && at.own_row() == tokens.last_row()) {
        memory.inverse_last_row = inverse_row;
      }
      put_warp_min(row_active ? now : kInfinity, stat[round % 2 * 4]);
      put_warp_max(row_active ? now : 0.f, stat[round % 2 * 4 + 1]);
    }
    __syncthreads();
    {
      float about[kStrip];
      load_strip(memory.tile, at, tokens.last_row(), about);
      const float inverse_last_row = memory.inverse_last_row;
#pragma unroll
      for (float& last : about) last *= -inverse_last_row;
      float sums[2][kStrip];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const float inverse_of = __shfl_sync(0xffffffffu, inverse_row, step, kSteps);
        float x[kStrip];
        load_strip(memory.tile, places, step, x);
#pragma unroll
        for (int j = 0; j < kStrip; ++j) {
          const float d = fmaf(x[j], inverse_of, about[j]);
          add_to(sums[0][j], step == 0, d);
          add_product(sums[1][j], step == 0, d, d);
        }
      }
      put_col_sums<Shape>(at, sums, memory.partial);
    }
    __syncthreads();

    float least = kInfinity;
    float most = 0.f;
    if (has_col) {
      // The sums are of x / row scale.
      col_deviation = divide(deviation(col_total<Shape>(memory.partial, 0),
                                       col_total<Shape>(memory.partial, 1), tokens.col_length()),
                             col_scale);
      if (round == 0) col_active = col_deviation != 0.f;
      if (col_active) least = most = col_deviation;
    }
    put_warp_min(least, stat[round % 2 * 4 + 2]);
    put_warp_max(most, stat[round % 2 * 4 + 3]);
  }
  __syncthreads();
  return best_col_scale;
}

}  // namespace kvarn::device
