// A tile in the registers of a thread block: who holds which element, and sums along both ways.
//
// A warp holds a strip of 16 rows and kWarpCols columns. Lane (r, t) = (lane / 4, lane % 4) has of
// the strip's rows r and r + 8, and in each group of 16 columns the four neighbours 4t .. 4t + 3.
// That is the accumulator of mma.m16n8k16 whose column n of the n-tiles 2g, 2g + 1 stands for
// column 16g + 4 * (n / 2) + n % 2, + 2 of the tile.
//
// Along a row: within the lane, then two shuffles over t (and shared memory where several warps
// share a strip). Along a column: over the two rows of the lane, then through shared memory, where
// each column has kColThreads neighbouring threads of its own, its column threads.
#pragma once

#include <cstdint>

#include "kvarn/layout.h"

namespace kvarn::device {

template <int kHeadDim, int kGroupTokens, bool kKeyTile>
struct TileShape {
  static constexpr bool kKey = kKeyTile;  ///< rows: channels of K, or tokens of V
  static constexpr int kDim = kHeadDim;
  static constexpr int kTokens = kGroupTokens;
  static constexpr int kRows = kKey ? kDim : kTokens;
  static constexpr int kCols = kKey ? kTokens : kDim;
  static constexpr int kStripRows = 16;
  static constexpr int kWarpCols = kTokens == 128 && kDim >= 128 ? 128 : 64;
  static constexpr int kSplit = kCols / kWarpCols;  ///< warps that share a strip
  static constexpr int kWarps = kRows / kStripRows * kSplit;
  static constexpr int kThreads = kWarps * kWarpLanes;
  static constexpr int kGroups = kWarpCols / 16;  ///< of 16 columns, of a warp
  static constexpr int kElements = kGroups * 8;   ///< of a thread
  static constexpr int kColThreads = kThreads / kCols;
  static constexpr int kSlots = kRows / 2;   ///< partial sums of a column
  static constexpr int kPitch = kCols + 16;  ///< floats from slot to slot: no bank conflicts
  static constexpr int kPartialFloats = kSlots * kPitch;
  static constexpr int kCodePitch = kCols + 16;  ///< bytes from row to row of codes
};

/// Element (row 0 or 1, column 0..3 of group g) of a thread.
constexpr KVARN_HD int tile_element(int g, int row, int column) {
  return 8 * g + 4 * (column / 2) + 2 * row + column % 2;
}

/// A thread's place in the tile, and shared memory for its sums.
template <class Shape>
struct TileThread {
  int row;         ///< the first of the thread's two; the other is row + 8
  int col;         ///< of group 0; the others are 16 further each
  int slot;        ///< of its partial sums of columns
  float* partial;  ///< [2][kPartialFloats]
  float* scratch;  ///< [4 * max(kWarps, kSplit * kRows)]

  __device__ __forceinline__ TileThread(float* partial_sums, float* scratch_floats)
      : partial(partial_sums), scratch(scratch_floats) {
    const unsigned t = thread();
    const unsigned strip = t / kWarpLanes / Shape::kSplit;
    row = strip * Shape::kStripRows + t % kWarpLanes / 4;
    col = t / kWarpLanes % Shape::kSplit * Shape::kWarpCols + t % 4 * 4;
    slot = strip * 8 + t % kWarpLanes / 4;
  }

  /// The same, computed anew: a place that is kept from one pass to the next costs registers.
  __device__ __forceinline__ TileThread again() const { return {partial, scratch}; }

  __device__ __forceinline__ int lane() const { return threadIdx.x % kWarpLanes; }
  /// Whose column thread this is.
  __device__ __forceinline__ int own_col() const { return thread() / Shape::kColThreads; }
  /// One thread for each column, one for each row.
  __device__ __forceinline__ bool first_of_col() const {
    return thread() % Shape::kColThreads == 0;
  }
  __device__ __forceinline__ bool first_of_row() const { return col == 0; }

  /// threadIdx.x; opaque, so that what follows from it is computed where it is wanted. Registers
  /// are scarcer than instructions.
  __device__ __forceinline__ static unsigned thread() {
    unsigned thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
  }

  /// The numbers of the thread's columns in group g.
  __device__ __forceinline__ float4 columns(const float* values, int g) const {
    return *reinterpret_cast<const float4*>(values + col + 16 * g);
  }
};

/// What was loaded from shared memory before is loaded again after, not kept in registers.
__device__ __forceinline__ void forget_loads() { __syncwarp(); }

/// Loads of numbers >= 0 of one group after the other: none starts before the last one is there.
/// Otherwise the compiler starts all of them at once and has no registers left for what it waits for.
struct InOrder {
  unsigned behind = 0;  ///< always; but the compiler cannot know that

  template <class Shape>
  __device__ __forceinline__ float4 columns(const TileThread<Shape>& at, const float* values,
                                            int g) {
    const float4 loaded = at.columns(values + behind, g);
    behind = __float_as_uint(loaded.w) >> 31;
    return loaded;
  }
};

struct Sum {
  static constexpr float kNeutral = 0.f;
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Min {
  static constexpr float kNeutral = 3.402823466e38f;
  __device__ __forceinline__ float operator()(float a, float b) const { return fminf(a, b); }
};
struct Max {
  static constexpr float kNeutral = -3.402823466e38f;
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// Combines values[i][row] over all threads of the row. All threads of the block take part.
template <class Op, class Shape, int N>
__device__ __forceinline__ void reduce_rows(const TileThread<Shape>& at, float (&values)[N][2]) {
  const Op op;
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        values[i][row] = op(values[i][row], __shfl_xor_sync(0xffffffffu, values[i][row], distance));
      }
    }
  }
  if constexpr (Shape::kSplit > 1) {
    static_assert(N <= 4);
    const int split = at.col / Shape::kWarpCols;
    __syncthreads();
    if (at.lane() % 4 == 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          at.scratch[(i * Shape::kSplit + split) * Shape::kRows + at.row + 8 * row] =
              values[i][row];
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float all = Op::kNeutral;
#pragma unroll
        for (int s = 0; s < Shape::kSplit; ++s) {
          all = op(all, at.scratch[(i * Shape::kSplit + s) * Shape::kRows + at.row + 8 * row]);
        }
        values[i][row] = all;
      }
    }
  }
}

/// Writes what the thread's rows add to the columns of group g.
template <class Shape>
__device__ __forceinline__ void put_partial(const TileThread<Shape>& at, int quantity, int g,
                                            float4 values) {
  *reinterpret_cast<float4*>(at.partial + quantity * Shape::kPartialFloats +
                             at.slot * Shape::kPitch + at.col + 16 * g) = values;
}

/// Column threads: the sum of their column (after a barrier that follows put_partial).
template <class Shape>
__device__ __forceinline__ float column_sum(const TileThread<Shape>& at, int quantity) {
  const float* const column = at.partial + quantity * Shape::kPartialFloats + at.own_col();
  constexpr int kCount = Shape::kSlots / Shape::kColThreads;
  static_assert(kCount % 4 == 0);
  float sums[4] = {};
#pragma unroll 1
  for (int i = 0; i < kCount; i += 4) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int slot = (i + k) * Shape::kColThreads + threadIdx.x % Shape::kColThreads;
      sums[k] += column[slot * Shape::kPitch];
    }
  }
  float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
  for (int distance = 1; distance < Shape::kColThreads; distance *= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  return sum;
}

/// Combines values[i] over all threads of the block.
template <class Op, class Shape, int N>
__device__ __forceinline__ void reduce_block(const TileThread<Shape>& at, float (&values)[N]) {
  static_assert(N <= 4);
  const Op op;
#pragma unroll
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values[i] = op(values[i], __shfl_xor_sync(0xffffffffu, values[i], distance));
    }
  }
  const unsigned thread = at.thread();
  const unsigned lane = thread % kWarpLanes;
  __syncthreads();
  if (lane < N) {
    float mine = values[0];
#pragma unroll
    for (int i = 1; i < N; ++i) mine = lane == i ? values[i] : mine;
    at.scratch[lane * Shape::kWarps + thread / kWarpLanes] = mine;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float4* const part = reinterpret_cast<const float4*>(at.scratch + i * Shape::kWarps);
    float all = Op::kNeutral;
#pragma unroll
    for (int w = 0; w < Shape::kWarps / 4; ++w) {
      const float4 four = part[w];
      all = op(all, op(op(four.x, four.y), op(four.z, four.w)));
    }
    values[i] = all;
  }
}

}  // namespace kvarn::device
