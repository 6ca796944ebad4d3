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

/// How many numbers a row or a column has that count, to divide by.
struct Length {
  float inverse_of;
  float inverse_less_one;  ///< 0 of one number, which has no deviation

  __device__ __forceinline__ explicit Length(float n)
      : inverse_of(inverse(n)), inverse_less_one(n < 2.f ? 0.f : inverse(n - 1.f)) {}
};

/// The deviation (n - 1) of numbers from their sum and their sum of squares.
__device__ __forceinline__ float deviation(float sum, float squares, const Length& length) {
  const float central = squares - sum * (sum * length.inverse_of);
  return square_root(fmaxf(central, 0.f) * length.inverse_less_one);
}

/// Deviation of a row of the strip's numbers.
template <class Shape>
__device__ __forceinline__ float row_deviation(const float (&x)[kStrip], float about,
                                               const Length& length) {
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

/// The least and the largest deviation of the active rows, and of the active columns. Deviations
/// are >= 0, so that their order is that of their bits.
struct DeviationEnds {
  float row_least;
  float row_most;
  float col_least;
  float col_most;
};

/// A warp's deviations among those of all.
__device__ __forceinline__ void join_ends(float least, float most, float* all_least,
                                          float* all_most) {
  const unsigned of_warp[2] = {__reduce_min_sync(0xffffffffu, __float_as_uint(least)),
                               __reduce_max_sync(0xffffffffu, __float_as_uint(most))};
  if (own_thread() % kWarpLanes != 0) return;
  atomicMin(reinterpret_cast<unsigned*>(all_least), of_warp[0]);
  atomicMax(reinterpret_cast<unsigned*>(all_most), of_warp[1]);
}

/// max / min of the deviations of the active rows or columns; 0 if there are none.
__device__ __forceinline__ float spread(float least, float most) {
  return most == 0.f ? 0.f : divide(most, fmaxf(least, 1e-8f));
}

/// Line threads: the column scale of column threadIdx.x, of the tile times `factor`; and the lane's
/// numbers of the tile, which is in registers for all rounds: to load it twice a round kept shared
/// memory as busy as the schedulers. Dead tokens must hold the numbers of the last live one. They
/// then have its scale, and add nothing to a deviation, which is taken about it. Starts after a
/// barrier, ends with one.
template <class Shape>
__device__ __forceinline__ float sinkhorn_col_scale(TileMemory<Shape>& memory,
                                                    const Tokens<Shape>& tokens, float factor,
                                                    int iterations, float (&x)[kSteps][kStrip]) {
  const int n = own_thread();
  const bool has_col = n < Shape::kCols;
  // Of even and of odd rounds.
  static_assert(sizeof(memory.stat) >= 2 * sizeof(DeviationEnds));
  auto* const ends = reinterpret_cast<DeviationEnds*>(memory.stat);
  const auto forget = [&](int round) { ends[round & 1] = {kInfinity, 0.f, kInfinity, 0.f}; };
  if (n < 2) forget(n);
  float row_scale = 1.f;  // of the row that the lane has the totals of
  bool row_active = true;
  float col_scale = 1.f;
  float col_deviation = 0.f;
  bool col_active = true;
  float best = 0.f;
  const auto add = [](float a, float b) { return a + b; };
  const Strip<Shape> at;
  const StripPlaces<Shape> places(at);
  const Length row_length(tokens.row_length());
  const Length col_length(tokens.col_length());
  const int last_col = tokens.last_col();
  const int last_row = tokens.last_row();
  const int last_of_row = place<Shape>(at.row(0), last_col);
  // Then its sums may be rounded otherwise than those of the row that it is a copy of.
  const bool is_copy = !tokens.row_counts(at.own_row());
#pragma unroll
  for (int step = 0; step < kSteps; ++step) load_strip(memory.tile, places, step, x[step]);

#pragma unroll 1
  for (int round = 0;; ++round) {
    if (has_col) {
      if (round > 0 && col_active) {
        memory.shift[n] = col_scale;  // waits here
        col_scale = next_scale(col_scale, col_deviation);
      }
      memory.inverse[n] = divide(factor, col_scale);
    }
    __syncthreads();
    if (round > 0 && has_col) {
      // The previous round can be judged now; its column scales are those before the last change.
      const DeviationEnds of = ends[(round & 1) ^ 1];
      const float imbalance = spread(of.row_least, of.row_most) + spread(of.col_least, of.col_most);
      if (round == 1 || imbalance <= best * kEqual) {
        best = imbalance;
        memory.col_scale[n] = col_active ? memory.shift[n] : 1.f;  // and here
      }
    }
    if (round > iterations) break;

    float inverse_row;
    {
      float w[kStrip];
      load_cols(memory.inverse, at, w);
      const float inverse_last_col = memory.inverse[last_col];
      float sums[2][kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const float about = memory.tile[last_of_row + step * Shape::kStepPlaces] * inverse_last_col;
#pragma unroll
        for (int j = 0; j < kStrip; ++j) {
          const float d = fmaf(x[step][j], w[j], -about);
          add_to(sums[0][step], j == 0, d);
          add_product(sums[1][step], j == 0, d, d);
        }
      }
      float now =
          divide(deviation(row_total(at, sums[0], add), row_total(at, sums[1], add), row_length),
                 row_scale);
      if (round == 0) {
        row_active = now != 0.f;
      } else if (row_active) {
        const float before = row_scale;
        row_scale = next_scale(before, now);
        now *= divide(before, row_scale);
      }
      inverse_row = divide(factor, row_scale);
      if (at.in_row < kSteps && at.own_row() == last_row) {
        memory.inverse_last_row = inverse_row;
      }
      DeviationEnds& all = ends[round & 1];
      join_ends(row_active ? now : kInfinity, row_active ? now : 0.f, &all.row_least,
                &all.row_most);
    }
    __syncthreads();
    {
      const float inverse_last_row = memory.inverse_last_row;
      if (is_copy) inverse_row = inverse_last_row;
      float inverse_of[kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        inverse_of[step] = __shfl_sync(0xffffffffu, inverse_row, step, kSteps);
      }
      float about[kStrip];
      load_strip(memory.tile, at, last_row, about);
      float sums[2][kStrip];
#pragma unroll
      for (int j = 0; j < kStrip; ++j) {
        const float less = -about[j] * inverse_last_row;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const float d = fmaf(x[step][j], inverse_of[step], less);
          add_to(sums[0][j], step == 0, d);
          add_product(sums[1][j], step == 0, d, d);
        }
      }
      put_col_sums<Shape>(at, sums, memory.partial);
    }
    __syncthreads();

    if (has_col) {
      // The sums are of x / row scale.
      col_deviation = divide(deviation(col_total<Shape>(memory.partial, 0),
                                       col_total<Shape>(memory.partial, 1), col_length),
                             col_scale);
      if (round == 0) col_active = col_deviation != 0.f;
      DeviationEnds& all = ends[round & 1];
      join_ends(col_active ? col_deviation : kInfinity, col_active ? col_deviation : 0.f,
                &all.col_least, &all.col_most);
    }
    if (n == 0) forget(round + 1);
  }
  __syncthreads();
  return has_col ? memory.col_scale[n] : 1.f;
}

}  // namespace kvarn::device
