// A tile in shared memory, in fp32, and how a thread block goes over it: in steps of a few rows.
//
// A lane looks after 16 columns, in four chunks of 4 neighbours, of one row at a time; the lanes of
// a row are neighbours, so that what a row needs (ranges, moments, codes, least squares) takes a
// few shuffles and no barrier. Sums along columns stay in the lane's registers from step to step,
// and only meet those of other rows at the end of a pass. Passes that do much to each element are
// loops over kSteps rows of 16 elements: their code is small enough for the instruction cache,
// which straight-line code over a whole tile in registers is not.
//
// Thread n is also the line thread of column n: it makes scales of the sums of its column.
#pragma once

#include <cstdint>

#include "device/numeric.cuh"
#include "kvarn/layout.h"

namespace kvarn::device {

inline constexpr int kChunk = 4;                 ///< neighbouring columns, 16 bytes
inline constexpr int kChunks = 4;                ///< of a lane
inline constexpr int kStrip = kChunk * kChunks;  ///< elements that a lane has of a row
inline constexpr int kSteps = 4;                 ///< rows that a lane works on, one by one
inline constexpr float kInfinity = __builtin_huge_valf();

template <int kTileRows, int kTileCols>
struct TileShape {
  static constexpr int kRows = kTileRows;
  static constexpr int kCols = kTileCols;
  static constexpr int kLanes = kCols / kStrip;        ///< of a row
  static constexpr int kGroups = kWarpLanes / kLanes;  ///< rows that a warp works on at once
  static constexpr int kWarps = kRows / (kGroups * kSteps);
  static constexpr int kThreads = kWarps * kWarpLanes;
  static constexpr int kStepRows = kWarps * kGroups;  ///< from a lane's row to its next
  static constexpr int kStepPlaces = kStepRows * kCols;
  /// Sums of a column that are kept; 16 warps share 8, or D = 256, G = 128 would need more shared
  /// memory than sm_80 has.
  static constexpr int kPartials = kWarps < 8 ? kWarps : 8;
  static_assert(kThreads >= kRows && kThreads >= kCols && kLanes >= kSteps);
  static_assert(kStepRows % 2 == 0, "place() of odd rows is another");
};

/// threadIdx.x; volatile, so that what follows from it is computed anew wherever it is wanted, and
/// need not be kept in a register.
__device__ __forceinline__ unsigned own_thread() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// Where a lane is; every pass makes its own. Lanes of different rows have their chunks in
/// different orders: chunk k of group g is chunk k ^ (g / kMates % 4) of the row. So each register
/// meets another one of its column at the same place of the lane that it is added to, without a
/// selection.
template <class Shape>
struct Strip {
  /// Neighbouring groups that have their chunks in the same order: where a row is half as long as
  /// there are banks, place() puts the chunks of two into different ones.
  static constexpr int kMates = Shape::kGroups / kChunks > 1 ? 2 : 1;

  int warp;
  int in_row;  ///< number of the lane among those of its row
  int group;
  int first_row;
  int first_col;

  __device__ __forceinline__ Strip() {
    const unsigned thread = own_thread();
    warp = thread / kWarpLanes;
    in_row = thread % Shape::kLanes;
    group = thread % kWarpLanes / Shape::kLanes;
    first_row = thread / Shape::kLanes;
    first_col =
        thread / Shape::kLanes / kMates % kChunks * (Shape::kCols / kChunks) + in_row * kChunk;
  }

  __device__ __forceinline__ int row(int step) const { return step * Shape::kStepRows + first_row; }
  /// First column of chunk k.
  __device__ __forceinline__ int col(int k) const {
    return first_col ^ k * (Shape::kCols / kChunks);
  }
  /// Of the rows of a lane, the one whose totals it gets from row_total.
  __device__ __forceinline__ int own_row() const { return row(in_row % kSteps); }
  /// Whether this lane is the one that writes what is known of its row.
  __device__ __forceinline__ bool first_of_row() const { return in_row == 0; }
};

/// Place of element (row, col); odd rows have every two sixteens of columns exchanged, for what the
/// rotation makes to be stored without bank conflicts. Chunks stay whole.
template <class Shape>
__device__ __forceinline__ int place(int row, int col) {
  return row * Shape::kCols + (col ^ (row & 1) * 16);
}

/// Where the code of element (row, col) is among all: in the first half of what its row takes, and
/// such that packing reads those of K by columns, and those of V by every sixteenth row, without
/// bank conflicts.
template <class Shape>
__device__ __forceinline__ int code_place(bool key, int row, int col) {
  return row * (4 * Shape::kCols) + (row & 16) * 4 + (col ^ (key ? (row & 8) / 2 : row & 32));
}

/// Where a number of a lane's first row is in the tile, in bytes: one instruction makes of it where
/// that of another row is, kStepRows rows on.
template <class Shape>
__device__ __forceinline__ int first_place(const Strip<Shape>& at, int col) {
  return place<Shape>(at.row(0), col) * static_cast<int>(sizeof(float));
}

template <class Shape, class T>
__device__ __forceinline__ const T& number_of_step(const float* tile, int first_place, int step) {
  constexpr int kStepBytes = Shape::kStepPlaces * static_cast<int>(sizeof(float));
  return *reinterpret_cast<const T*>(reinterpret_cast<const char*>(tile) +
                                     (first_place + step * kStepBytes));
}

/// The same of a lane's chunks.
template <class Shape>
struct StripPlaces {
  int of[kChunks];

  __device__ __forceinline__ explicit StripPlaces(const Strip<Shape>& at) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) of[k] = first_place(at, at.col(k));
  }
};

template <class Shape>
__device__ __forceinline__ void load_strip(const float* tile, const StripPlaces<Shape>& places,
                                           int step, float (&x)[kStrip]) {
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const float4 four = number_of_step<Shape, float4>(tile, places.of[k], step);
    x[4 * k] = four.x, x[4 * k + 1] = four.y, x[4 * k + 2] = four.z, x[4 * k + 3] = four.w;
  }
}

template <class Shape>
__device__ __forceinline__ void load_strip(const float* tile, const Strip<Shape>& at, int row,
                                           float (&x)[kStrip]) {
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const float4 four = *reinterpret_cast<const float4*>(tile + place<Shape>(row, at.col(k)));
    x[4 * k] = four.x, x[4 * k + 1] = four.y, x[4 * k + 2] = four.z, x[4 * k + 3] = four.w;
  }
}

/// The numbers of a lane's columns.
template <class Shape>
__device__ __forceinline__ void load_cols(const float* from, const Strip<Shape>& at,
                                          float (&to)[kStrip]) {
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const float4 four = *reinterpret_cast<const float4*>(from + at.col(k));
    to[4 * k] = four.x, to[4 * k + 1] = four.y, to[4 * k + 2] = four.z, to[4 * k + 3] = four.w;
  }
}

/// Which of a lane's steps is number k where all of its rows are in registers: in lanes of other
/// numbers another one, so that row_total adds up the same registers in all of them.
template <class Shape>
__device__ __forceinline__ int step_of(const Strip<Shape>& at, int k) {
  return k ^ at.in_row % kSteps;
}

/// What the lanes of a row have of each of their kSteps rows, in the order of step_of -> all of row
/// own_row(). `join` must not depend on the order. Half the rows go at each of two steps, so that a
/// lane is left with one.
template <class T, class Join>
__device__ __forceinline__ T row_total(int lanes, const T (&part)[kSteps], const Join& join) {
  static_assert(kSteps == 4);
  const T even = join(part[0], __shfl_xor_sync(0xffffffffu, part[2], 2));
  const T odd = join(part[1], __shfl_xor_sync(0xffffffffu, part[3], 2));
  T total = join(even, __shfl_xor_sync(0xffffffffu, odd, 1));
#pragma unroll
  for (int distance = 4; distance < lanes; distance *= 2) {
    total = join(total, __shfl_xor_sync(0xffffffffu, total, distance));
  }
  return total;
}

/// A number of row own_row() -> that of each row of the lane, in the order of step_of.
__device__ __forceinline__ void share_with_rows(float of_own, float (&of)[kSteps]) {
  of[0] = of_own;
#pragma unroll
  for (int k = 1; k < kSteps; ++k) of[k] = __shfl_xor_sync(0xffffffffu, of_own, k);
}

/// Sums along a row, of which add(j, first, sums) adds element j; the first one sets them. All its
/// lanes get the totals.
template <class Shape, int kSums, class Add>
__device__ __forceinline__ void row_sums(const Add& add, float (&sums)[kSums]) {
#pragma unroll
  for (int j = 0; j < kStrip; ++j) add(j, j == 0, sums);
#pragma unroll
  for (int distance = 1; distance < Shape::kLanes; distance *= 2) {
#pragma unroll
    for (int q = 0; q < kSums; ++q) sums[q] += __shfl_xor_sync(0xffffffffu, sums[q], distance);
  }
}

__device__ __forceinline__ void add_to(float& sum, bool first, float x) {
  sum = first ? x : sum + x;
}

__device__ __forceinline__ void add_product(float& sum, bool first, float x, float y) {
  sum = first ? x * y : fmaf(x, y, sum);
}

/// The ends of a row.
struct RowRange {
  float lo;
  float hi;
};

/// The largest of a strip's numbers, as an integer, and the largest as an unsigned one: the
/// smallest, if it is negative.
__device__ __forceinline__ void strip_range(const float (&y)[kStrip], int& most, unsigned& least) {
  most = __float_as_int(y[0]);
  least = __float_as_uint(y[0]);
#pragma unroll
  for (int j = 1; j + 1 < kStrip; j += 2) {
    most = __vimax3_s32(most, __float_as_int(y[j]), __float_as_int(y[j + 1]));
    least = __vimax3_u32(least, __float_as_uint(y[j]), __float_as_uint(y[j + 1]));
  }
  most = max(most, __float_as_int(y[kStrip - 1]));
  least = max(least, __float_as_uint(y[kStrip - 1]));
}

__device__ __forceinline__ RowRange ends(int most, unsigned least) {
  return {fminf(__uint_as_float(least), 0.f), fmaxf(__int_as_float(most), 0.f)};
}

/// The smallest and the largest of the numbers of a row, one of which must be about 0: at most and
/// at least 0.
template <class Shape>
__device__ __forceinline__ RowRange row_range(const float (&y)[kStrip]) {
  int most;
  unsigned least;
  strip_range(y, most, least);
#pragma unroll
  for (int distance = 1; distance < Shape::kLanes; distance *= 2) {
    most = max(most, __shfl_xor_sync(0xffffffffu, most, distance));
    least = max(least, __shfl_xor_sync(0xffffffffu, least, distance));
  }
  return ends(most, least);
}

/// Sums along columns that the lanes of a warp hold, over its rows; to shared memory, for
/// col_total. All threads take part: it may contain a barrier.
template <class Shape, int kSums>
__device__ __forceinline__ void put_col_sums(const Strip<Shape>& at, float (&sums)[kSums][kStrip],
                                             float* partial) {
  constexpr int kGroups = Shape::kGroups;
  constexpr int kLanes = Shape::kLanes;
  constexpr int kMates = Strip<Shape>::kMates;
  constexpr int kLeft = kGroups >= 4 ? 1 : 2;  // chunks
  constexpr int kStride = kGroups >= 4 ? 1 : 2;
#pragma unroll
  for (int q = 0; q < kSums; ++q) {
    const auto add = [&](int to, int from, int distance) {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        sums[q][kChunk * to + e] +=
            __shfl_xor_sync(0xffffffffu, sums[q][kChunk * from + e], distance);
      }
    };
    if constexpr (kGroups >= 4) {
      add(0, 2, 2 * kMates * kLanes);
      add(1, 3, 2 * kMates * kLanes);
    } else {
      add(2, 3, kLanes);
    }
    add(0, 1, kMates * kLanes);
    if constexpr (kMates == 2) add(0, 0, kLanes);
  }
  const auto put = [&](bool add) {
#pragma unroll
    for (int q = 0; q < kSums; ++q) {
#pragma unroll
      for (int left = 0; left < kLeft; ++left) {
        const float* const of = sums[q] + kChunk * kStride * left;
        auto* const to = reinterpret_cast<float4*>(
            partial + (q * Shape::kPartials + at.warp % Shape::kPartials) * Shape::kCols +
            at.col(kStride * left));
        float4 sum = {of[0], of[1], of[2], of[3]};
        if (add) sum = {to->x + sum.x, to->y + sum.y, to->z + sum.z, to->w + sum.w};
        *to = sum;
      }
    }
  };
  if constexpr (Shape::kWarps == Shape::kPartials) {
    if (at.group % kMates == 0) put(false);
  } else {
    static_assert(Shape::kWarps == 2 * Shape::kPartials && kGroups <= 4);
    if (at.warp >= Shape::kPartials) put(false);
    __syncthreads();
    if (at.warp < Shape::kPartials) put(true);
  }
}

/// Sum `q` of a column.
template <class Shape>
__device__ __forceinline__ float col_total(const float* partial, int q, int col) {
  const float* const first = partial + q * Shape::kPartials * Shape::kCols + col;
  float total = first[0];
#pragma unroll
  for (int i = 1; i < Shape::kPartials; ++i) total += first[i * Shape::kCols];
  return total;
}

/// One number of each thread -> one of each warp, in shared memory.
__device__ __forceinline__ void put_warp_sum(float value, float* of_warps) {
#pragma unroll
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  if (const unsigned n = own_thread(); n % kWarpLanes == 0) of_warps[n / kWarpLanes] = value;
}

/// Of numbers >= 0, whose order is that of their bits.
__device__ __forceinline__ float warp_max(float value) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(value)));
}

__device__ __forceinline__ void put_warp_max(float value, float* of_warps) {
  const float most = warp_max(value);
  if (const unsigned n = own_thread(); n % kWarpLanes == 0) of_warps[n / kWarpLanes] = most;
}

/// The sum of a number of each warp; shorter than shuffles take.
template <class Shape>
__device__ __forceinline__ float sum_of_warps(const float* of_warps) {
  float sum = of_warps[0];
#pragma unroll
  for (int i = 1; i < Shape::kWarps; ++i) sum += of_warps[i];
  return sum;
}

template <class Shape>
__device__ __forceinline__ float max_of_warps(const float* of_warps) {
  const unsigned lane = own_thread() % kWarpLanes;
  return warp_max(lane < Shape::kWarps ? of_warps[lane] : 0.f);
}

/// Scale and offset of a row: x ~ q * scale + offset.
struct Affine {
  float scale;
  float offset;
};

/// How many numbers a row or a column has that count, to divide by.
struct Length {
  float inverse_of;
  float inverse_less_one;  ///< 0 of one number, which has no deviation

  __device__ __forceinline__ explicit Length(float n)
      : inverse_of(inverse(n)), inverse_less_one(n < 2.f ? 0.f : inverse(n - 1.f)) {}
};

/// What the passes of the normalization along rows, or along columns, divide by.
struct alignas(16) Divisors {
  Length length;
  float factor;  ///< over the scale: what the tile is multiplied by
};

/// Shared memory of a block that works on a tile.
template <class Shape>
struct TileMemory {
  static constexpr int kStats = 8;
  static constexpr int kTokens =
      Shape::kRows > Shape::kCols ? Shape::kRows : Shape::kCols;  ///< at most

  union {
    float tile[Shape::kRows * Shape::kCols];
    uint4 tokens[Shape::kRows * Shape::kCols / 4];  ///< at chunk_place()
    uint8_t
        codes[4 * Shape::kRows * Shape::kCols];  ///< at code_place(), over the numbers of their row
  };
  unsigned part;   ///< which one the block works on
  uint8_t* to[2];  ///< where the K and the V part go that are being made; null: nowhere
  alignas(16) float partial[2 * Shape::kPartials *
                            Shape::kCols];  ///< sums of columns, of some rows each

  float inverse[Shape::kCols];  ///< 1 / column scale
  float root[Shape::kCols];     ///< of the weight of a column in the fit of a row
  float shift[Shape::kCols];    ///< of codes, of a column
  float col_scale[Shape::kCols];

  // Of rows.
  float mean[Shape::kRows];  ///< what is taken off x / column scale
  Affine fit[Shape::kRows];  ///< that the codes are of, of x / column scale - mean
  Affine out[Shape::kRows];  ///< that the reader gets, of x / column scale
  float rest[Shape::kRows];  ///< weighted mean of what is left
  float variance[Shape::kRows];

  // Of tokens.
  float energy[kTokens];  ///< sum of squares; of a dead one, that of the last live one
  float found[kTokens];   ///< sum of squares of what was found
  bool live[kTokens];

  alignas(16) float stat[kStats][(Shape::kWarps + 3) / 4 * 4];
  Divisors of_rows;  ///< in the normalization, as what follows
  Divisors of_cols;
  float inverse_last_row;  ///< factor / scale of the last row
  float best[2];           ///< imbalance of the best round, after even and odd ones
  int live_tokens;
  int last_live;  ///< 0 if none is
};

/// What the numbers of a tile are; the same for all threads.
template <class Shape>
struct Tokens {
  bool are_cols;  ///< K: tokens are columns; V: rows
  int bits;
  const TileMemory<Shape>& memory;

  __device__ __forceinline__ int live() const { return memory.live_tokens; }
  __device__ __forceinline__ int last() const { return memory.last_live; }
  __device__ __forceinline__ int count() const { return are_cols ? Shape::kCols : Shape::kRows; }
  __device__ __forceinline__ bool all_live() const { return live() == count(); }
  __device__ __forceinline__ int last_row() const { return are_cols ? Shape::kRows - 1 : last(); }
  __device__ __forceinline__ int last_col() const { return are_cols ? last() : Shape::kCols - 1; }
  /// Entries of a row and of a column that count.
  __device__ __forceinline__ float row_length() const {
    return static_cast<float>(are_cols ? live() : Shape::kCols);
  }
  __device__ __forceinline__ float col_length() const {
    return static_cast<float>(are_cols ? Shape::kRows : live());
  }
  __device__ __forceinline__ bool row_counts(int row) const { return are_cols | memory.live[row]; }
  __device__ __forceinline__ bool col_counts(int col) const {
    return !are_cols || memory.live[col];
  }
  __device__ __forceinline__ float levels() const { return static_cast<float>((1 << bits) - 1); }
};

}  // namespace kvarn::device
