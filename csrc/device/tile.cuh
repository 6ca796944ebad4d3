// A tile in the registers of a thread block: who holds which element, and sums along both ways.
//
// Each lane holds a square of 8 x 8 neighbouring elements, each warp 64 rows x 32 columns: lane
// (r, t) = (lane / 4, lane % 4) the rows 8r .. 8r + 7 and the columns 8t .. 8t + 7 of its warp's
// part. This is what 4 x 4 accumulators of mma.m16n8k16 give, with matrix row r + 8h of row tile a
// standing for row 8r + 2a + h and matrix column 2t + p of column tile b for column 8t + 2b + p. It
// is also, both for K and V, what one lane holds of a record (layout.h), so codes are packed where
// they are.
//
// A square makes both ways of summing cheap: a lane adds its 8 elements, and the lanes that share a
// row (4) or a column (8) exchange halves of what they have, once for rows and three times for
// columns. What is left is added up in shared memory by the line thread of the row or column:
// thread n looks after row n and column n.
#pragma once

#include <cstdint>

#include "kvarn/layout.h"

namespace kvarn::device {

template <int kTileRows, int kTileCols>
struct TileShape {
  static constexpr int kRows = kTileRows;
  static constexpr int kCols = kTileCols;
  static constexpr int kRowWarps = kRows / 64;  ///< warps one above the other
  static constexpr int kColWarps = kCols / 32;  ///< warps side by side
  static constexpr int kWarps = kRowWarps * kColWarps;
  static constexpr int kThreads = kWarps * kWarpLanes;
  static_assert(kThreads >= kRows && kThreads >= kCols);
};

inline constexpr int kSide = 8;                  ///< of a lane's square
inline constexpr int kElements = kSide * kSide;  ///< of a lane

/// Element (row i, column j) of a lane's square; four by four, they are mma accumulators.
constexpr KVARN_HD int element(int i, int j) {
  return 4 * (4 * (i / 2) + j / 2) + 2 * (i % 2) + j % 2;
}

/// threadIdx.x; volatile, so that what follows from it is computed anew wherever it is wanted, and
/// need not be kept in a register.
__device__ __forceinline__ unsigned own_thread() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// Where a thread is in the tile. Every pass makes its own.
template <class Shape>
struct TilePlace {
  int lane;
  int warp_row;
  int warp_col;
  int row;  ///< first of its square
  int col;  ///< first of its square

  __device__ __forceinline__ TilePlace() {
    const unsigned thread = own_thread();
    lane = thread % kWarpLanes;
    const int warp = thread / kWarpLanes;
    warp_row = warp / Shape::kColWarps;
    warp_col = warp % Shape::kColWarps;
    row = warp_row * 64 + lane / 4 * kSide;
    col = warp_col * 32 + lane % 4 * kSide;
  }
};

/// The numbers of the eight rows or columns of a square.
__device__ __forceinline__ void load_8(const float* from, float (&to)[kSide]) {
  const float4 low = *reinterpret_cast<const float4*>(from);
  const float4 high = *reinterpret_cast<const float4*>(from + 4);
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

inline constexpr float kInfinity = __builtin_huge_valf();

/// Two lanes `distance` apart hold two numbers each; afterwards one (`upper`) has the sum of the
/// second ones, the other that of the first. kMin: the smaller one instead of the sum.
template <bool kMin>
__device__ __forceinline__ float exchange(float first, float second, bool upper, int distance) {
  const float keep = upper ? second : first;
  const float send = upper ? first : second;
  const float other = __shfl_xor_sync(0xffffffffu, send, distance);
  return kMin ? fminf(keep, other) : keep + other;
}

/// Where the sums of a row lie in shared memory: those of every eighth row side by side, so that
/// neither the lanes that write them nor the line threads that read them meet in a bank.
template <class Shape>
struct RowPartials {
  static constexpr int kPitch = Shape::kRows / kSide + 4;  ///< from row to next row
  static constexpr int kPart = kSide * kPitch + 8;         ///< from part to part of a row
  static constexpr int kParts = 2 * Shape::kColWarps;      ///< of a row
  static constexpr int kStride = kParts * kPart;           ///< from sum to sum

  __device__ __forceinline__ static int place(int row) {
    return row % kSide * kPitch + row / kSide;
  }
};

/// Takes kSums sums and then kMins minima along the rows. row(i, out): what the lane's row i adds
/// to each. Afterwards (and after a barrier) row_total has them.
template <class Shape, int kSums, int kMins, class Row>
__device__ __forceinline__ void reduce_rows(const TilePlace<Shape>& at, float* partial,
                                            const Row& row) {
  using To = RowPartials<Shape>;
  constexpr int kCount = kSums + kMins;
  const bool upper = (at.lane & 2) != 0;
  float* const to = partial + (at.warp_col * 2 + at.lane % 2) * To::kPart + To::place(at.row) +
                    (upper ? 4 * To::kPitch : 0);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float low[kCount];
    float high[kCount];
    row(k, low);
    row(k + 4, high);
#pragma unroll
    for (int q = 0; q < kCount; ++q) {
      to[q * To::kStride + k * To::kPitch] = q < kSums ? exchange<false>(low[q], high[q], upper, 2)
                                                       : exchange<true>(low[q], high[q], upper, 2);
    }
  }
}

/// Takes kSums sums along the columns: sums[q][j] is what the lane adds to its column j.
template <class Shape, int kSums>
__device__ __forceinline__ void reduce_cols(const TilePlace<Shape>& at, float* partial,
                                            const float (&sums)[kSums][kSide]) {
#pragma unroll
  for (int q = 0; q < kSums; ++q) {
    float of_4[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      of_4[j] = exchange<false>(sums[q][j], sums[q][j + 4], (at.lane & 16) != 0, 16);
    }
    const float first = exchange<false>(of_4[0], of_4[2], (at.lane & 8) != 0, 8);
    const float second = exchange<false>(of_4[1], of_4[3], (at.lane & 8) != 0, 8);
    partial[(q * Shape::kRowWarps + at.warp_row) * Shape::kCols + at.col + at.lane / 4] =
        exchange<false>(first, second, (at.lane & 4) != 0, 4);
  }
}

/// Sum `q` of row or column threadIdx.x, for its line thread.
template <class Shape, bool kMin = false>
__device__ __forceinline__ float row_total(const float* partial, int q) {
  using From = RowPartials<Shape>;
  const float* const first = partial + q * From::kStride + From::place(threadIdx.x);
  float total = first[0];
#pragma unroll
  for (int w = 1; w < From::kParts; ++w) {
    const float other = first[w * From::kPart];
    total = kMin ? fminf(total, other) : total + other;
  }
  return total;
}

template <class Shape>
__device__ __forceinline__ float col_total(const float* partial, int q) {
  const float* const first = partial + q * Shape::kRowWarps * Shape::kCols + threadIdx.x;
  float total = first[0];
#pragma unroll
  for (int w = 1; w < Shape::kRowWarps; ++w) total += first[w * Shape::kCols];
  return total;
}

/// One number of each thread -> one of each warp, in shared memory.
__device__ __forceinline__ void put_warp_sum(float value, float* of_warps) {
#pragma unroll
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  if (threadIdx.x % kWarpLanes == 0) of_warps[threadIdx.x / kWarpLanes] = value;
}

/// The order of numbers >= 0 is that of their bits.
__device__ __forceinline__ void put_warp_min(float value, float* of_warps) {
  const unsigned least = __reduce_min_sync(0xffffffffu, __float_as_uint(value));
  if (threadIdx.x % kWarpLanes == 0) of_warps[threadIdx.x / kWarpLanes] = __uint_as_float(least);
}

__device__ __forceinline__ void put_warp_max(float value, float* of_warps) {
  const unsigned most = __reduce_max_sync(0xffffffffu, __float_as_uint(value));
  if (threadIdx.x % kWarpLanes == 0) of_warps[threadIdx.x / kWarpLanes] = __uint_as_float(most);
}

/// Every lane takes a warp's number; all lanes get the result. For whole warps.
template <class Shape>
__device__ __forceinline__ float sum_of_warps(const float* of_warps) {
  const int lane = threadIdx.x % kWarpLanes;
  float value = lane < Shape::kWarps ? of_warps[lane] : 0.f;
#pragma unroll
  for (int distance = 1; distance < Shape::kWarps; distance *= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return __shfl_sync(0xffffffffu, value, 0);
}

template <class Shape>
__device__ __forceinline__ float min_of_warps(const float* of_warps) {
  const int lane = threadIdx.x % kWarpLanes;
  return __uint_as_float(__reduce_min_sync(
      0xffffffffu, __float_as_uint(lane < Shape::kWarps ? of_warps[lane] : kInfinity)));
}

template <class Shape>
__device__ __forceinline__ float max_of_warps(const float* of_warps) {
  const int lane = threadIdx.x % kWarpLanes;
  return __uint_as_float(
      __reduce_max_sync(0xffffffffu, __float_as_uint(lane < Shape::kWarps ? of_warps[lane] : 0.f)));
}

/// Scale and offset of a row: x ~ q * scale + offset.
struct Affine {
  float scale;
  float offset;
};

/// The ends of a row of x / column scale, and its weighted mean.
struct RowRange {
  float lo;
  float hi;
  float mean;
};

/// What a line thread knows of its row, its column and its token. In shared memory: registers are
/// for the tile. Thirteen words: an odd number, so that the threads of a warp meet different banks.
struct Line {
  Affine fit;  ///< that the codes are of
  Affine out;  ///< that the reader gets
  float mean;  ///< what was taken off x
  float rest;  ///< weighted mean of what is left
  float variance;
  float col_scale;
  float energy;        ///< of the token: the sum of its squares
  bool live;           ///< the token is
  bool counts_as_row;  ///< no dead token
  bool counts_as_col;
  RowRange range;
};

/// Shared memory of a block that works on a tile.
template <class Shape>
struct TileMemory {
  static constexpr int kRowSums = 5;
  static constexpr int kColSums = 2;
  static constexpr int kRowArrays = 6;
  static constexpr int kColArrays = 3;
  static constexpr int kStats = 8;
  static constexpr int kOfRows = kRowSums * RowPartials<Shape>::kStride;
  static constexpr int kOfCols = kColSums * Shape::kRowWarps * Shape::kCols;
  static constexpr int kPartials = kOfRows > kOfCols ? kOfRows : kOfCols;

  union {
    uint4 tokens[Shape::kRows * Shape::kCols / 8];  ///< 16-bit numbers, as they come
    float partial[kPartials];                       ///< of sums, by warp
    /// The part of a record: codes of 8 bits, two fields of rows, one of columns.
    uint4 record[(Shape::kRows * Shape::kCols + 4 * Shape::kRows + 2 * Shape::kCols) / 16];
  };
  float row[kRowArrays][Shape::kRows];
  float col[kColArrays][Shape::kCols];
  float stat[kStats][(Shape::kWarps + 3) / 4 * 4];
  Line line[Shape::kThreads];
  __device__ __forceinline__ Line& own_line() { return line[own_thread()]; }

  int bits;
  float levels;  ///< 2^bits - 1
  int live_tokens;
  int first_live;                                                             ///< 0 if none is
  int dead[(Shape::kRows > Shape::kCols ? Shape::kRows : Shape::kCols) / 8];  ///< a bit a token
};

/// Which tokens take part; the same for all threads.
template <class Shape>
struct Tokens {
  bool are_cols;  ///< K: tokens are columns; V: rows
  const TileMemory<Shape>& memory;

  __device__ __forceinline__ int live() const { return memory.live_tokens; }
  __device__ __forceinline__ int first() const { return memory.first_live; }
  __device__ __forceinline__ int count() const { return are_cols ? Shape::kCols : Shape::kRows; }
  __device__ __forceinline__ bool all_live() const { return live() == count(); }
  __device__ __forceinline__ int first_row() const { return are_cols ? 0 : first(); }
  __device__ __forceinline__ int first_col() const { return are_cols ? first() : 0; }
  /// Entries of a row and of a column that count.
  __device__ __forceinline__ float row_length() const {
    return static_cast<float>(are_cols ? live() : Shape::kCols);
  }
  __device__ __forceinline__ float col_length() const {
    return static_cast<float>(are_cols ? Shape::kRows : live());
  }
  /// The dead ones among those of a lane's square, a bit each.
  __device__ __forceinline__ int dead(const TilePlace<Shape>& at) const {
    return all_live() ? 0 : memory.dead[(are_cols ? at.col : at.row) / kSide];
  }
};

/// Whether token `token` of a square is dead.
__device__ __forceinline__ bool is_dead(int bits, int token) { return (bits >> token & 1) != 0; }

}  // namespace kvarn::device
