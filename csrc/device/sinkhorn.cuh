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

/// The ends of the deviations of the active rows, and of the active columns. Deviations are >= 0,
/// so that their order is that of their bits. All 0 to begin with.
struct DeviationEnds {
  unsigned not_least;  ///< complement of the bits of the least one
  unsigned most;
};

/// A warp's deviations among those of all.
__device__ __forceinline__ void join_ends(bool active, float deviation, DeviationEnds& all) {
  const unsigned bits = __float_as_uint(deviation);
  const unsigned not_least = __reduce_max_sync(0xffffffffu, active ? ~bits : 0u);
  const unsigned most = __reduce_max_sync(0xffffffffu, active ? bits : 0u);
  const unsigned lane = own_thread() % kWarpLanes;
  if (lane < 2) atomicMax(&all.not_least + lane, lane == 0 ? not_least : most);
}

/// max / min of the deviations of the active rows or columns; 0 if there are none.
__device__ __forceinline__ float spread(unsigned not_least, unsigned most) {
  const float least = __uint_as_float(~not_least);
  return most == 0 ? 0.f : divide(__uint_as_float(most), fmaxf(least, 1e-8f));
}

/// What is minimized: how far apart the deviations of rows and of columns are.
__device__ __forceinline__ float imbalance(const DeviationEnds (&of)[2]) {
  const uint4 ends = reinterpret_cast<const uint4&>(of);
  return spread(ends.x, ends.y) + spread(ends.z, ends.w);
}

/// Where the number of column n is among those that load_cols_apart loads.
__device__ __forceinline__ int apart(int n) { return n ^ 1; }

/// The numbers of a lane's columns, which lie with every two exchanged. They come into registers of
/// the other bank than the numbers of the tile that they are multiplied by: three operands of one
/// bank take a cycle more.
template <class Shape>
__device__ __forceinline__ void load_cols_apart(const float* from, const Strip<Shape>& at,
                                                float (&to)[kStrip]) {
  float exchanged[kStrip];
  load_cols(from, at, exchanged);
#pragma unroll
  for (int j = 0; j < kStrip; ++j) to[j] = exchanged[apart(j)];
}

/// Line threads: the column scale of column threadIdx.x, of the tile times `factor`; and the lane's
/// numbers of the tile, which is in registers for all rounds: to load it twice a round kept shared
/// memory as busy as the schedulers. Rows are in the order of step_of. Dead tokens must hold the
/// numbers of the last live one. They then have its scale, and add nothing to a deviation, which is
/// taken about it. Starts after a barrier, ends with one.
///
/// A round has three barriers, and what is between a pass and the next one is a chain of a few
/// threads, for which the others wait: all that need not be in it comes later. The ends of
/// deviations are joined during the pass after, and a round is judged after the next one.
template <class Shape>
__device__ __forceinline__ float sinkhorn_col_scale(TileMemory<Shape>& memory,
                                                    const Tokens<Shape>& tokens, float factor,
                                                    int iterations, float (&x)[kSteps][kStrip]) {
  const auto has_col = [] { return own_thread() < Shape::kCols; };
  // Those who judge are not line threads, where there are others.
  constexpr int kFirstJudge = Shape::kThreads - Shape::kCols;
  // Of even and of odd rounds, of rows and of columns.
  using Ends = DeviationEnds[2];
  static_assert(sizeof(memory.stat) >= 2 * sizeof(Ends) && sizeof(Ends) == sizeof(uint4));
  auto* const ends = reinterpret_cast<Ends*>(memory.stat);
  const auto scales = [&](int round) { return round & 1 ? memory.root : memory.shift; };
  float row_scale = 1.f;  // of the row that the lane has the totals of
  bool row_active = true;
  float col_scale = 1.f;
  float col_deviation = 0.f;
  bool col_active = true;
  const auto add = [](float a, float b) { return a + b; };
  const Strip<Shape> at;
  const StripPlaces<Shape> places(at);
  if (own_thread() == 0) {
    memory.of_rows = {Length(tokens.row_length()), factor};
    memory.of_cols = {Length(tokens.col_length()), factor};
    memory.best[0] = kInfinity;
  }
  const int last_col = tokens.last_col();
  const int last_row = tokens.last_row();
  // Sums of copies may be rounded otherwise than those of what they are copies of.
  const bool is_copy = !tokens.row_counts(at.own_row());
  const int n = own_thread();
  const int own_col = has_col() && !tokens.col_counts(n) ? last_col : n;
  const float last_of_row = memory.tile[place<Shape>(at.own_row(), last_col)];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) load_strip(memory.tile, places, step_of(at, k), x[k]);
  if (has_col()) memory.inverse[apart(n)] = factor;

#pragma unroll 1
  for (int round = 0;; ++round) {
    __syncthreads();
    if (round > 0 && has_col()) join_ends(col_active, col_deviation, ends[(round & 1) ^ 1][1]);
    if (round > iterations) break;
    if (own_thread() == Shape::kThreads - 1) reinterpret_cast<uint4&>(ends[round & 1]) = {};

    float row_deviation;
    float before;
    float inverse_row;
    {
      const Divisors by = memory.of_rows;
      float w[kStrip];
      load_cols_apart(memory.inverse, at, w);
      float about[kSteps];
      share_with_rows(last_of_row * memory.inverse[apart(last_col)], about);
      float sums[2][kSteps];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int j = 0; j < kStrip; ++j) {
          const float d = fmaf(x[k][j], w[j], -about[k]);
          add_to(sums[0][k], j == 0, d);
          add_product(sums[1][k], j == 0, d, d);
        }
      }
      row_deviation = divide(deviation(row_total(Shape::kLanes, sums[0], add),
                                       row_total(Shape::kLanes, sums[1], add), by.length),
                             row_scale);
      row_active = row_active && (round > 0 || row_deviation != 0.f);
      before = row_scale;
      row_scale = round > 0 && row_active ? next_scale(before, row_deviation) : before;
      inverse_row = divide(by.factor, row_scale);
      if (at.in_row < kSteps && at.own_row() == last_row) {
        memory.inverse_last_row = inverse_row;
      }
    }
    __syncthreads();
    {
      const float inverse_last_row = memory.inverse_last_row;
      if (is_copy) inverse_row = inverse_last_row;
      float inverse_of[kSteps];
      share_with_rows(inverse_row, inverse_of);
      float about[kStrip];
      load_strip(memory.tile, at, last_row, about);
      row_deviation *= divide(before, row_scale);
      join_ends(row_active, row_deviation, ends[round & 1][0]);
      float sums[2][kStrip];
#pragma unroll
      for (int j = 0; j < kStrip; ++j) {
        const float less = -about[j] * inverse_last_row;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          const float d = fmaf(x[k][j], inverse_of[k], less);
          add_to(sums[0][j], k == 0, d);
          add_product(sums[1][j], k == 0, d, d);
        }
      }
      put_col_sums<Shape>(at, sums, memory.partial);
    }
    __syncthreads();

    if (has_col()) {
      const int n = own_thread();
      const Divisors by = memory.of_cols;
      // The sums are of x / row scale.
      col_deviation = divide(deviation(col_total<Shape>(memory.partial, 0, own_col),
                                       col_total<Shape>(memory.partial, 1, own_col), by.length),
                             col_scale);
      col_active = col_active && (round > 0 || col_deviation != 0.f);
      scales(round)[n] = col_scale;
      col_scale = col_active ? next_scale(col_scale, col_deviation) : col_scale;
      memory.inverse[apart(n)] = divide(by.factor, col_scale);
    }
    if (const int n = own_thread(); round > 0 && n >= kFirstJudge) {
      const float found = imbalance(ends[(round & 1) ^ 1]);
      const float best = memory.best[(round & 1) ^ 1];
      const bool is_best = !(found > best * kEqual);
      if (is_best) memory.col_scale[n - kFirstJudge] = scales(round - 1)[n - kFirstJudge];
      if (n == kFirstJudge) memory.best[round & 1] = is_best ? found : best;
    }
  }
  __syncthreads();
  if (!has_col()) return 1.f;
  // Of no round before, `best` is infinite.
  const bool last_is_best =
      !(imbalance(ends[iterations & 1]) > memory.best[iterations & 1] * kEqual);
  return (last_is_best ? scales(iterations) : memory.col_scale)[own_thread()];
}

}  // namespace kvarn::device
