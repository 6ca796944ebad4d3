// A tile in the registers of a thread block: who holds which element, and sums along both ways.
//
// Each lane holds 4 rows x 8 columns of neighbouring elements, each warp 32 x 32: lane (r, t) =
// (lane / 4, lane % 4) the rows 4r .. 4r + 3 and the columns 8t .. 8t + 7 of its warp's part. This
// is what 2 x 4 accumulators of mma.m16n8k16 give, with matrix row r + 8h of row tile a standing
// for row 4r + 2a + h and matrix column 2t + p of column tile b for column 8t + 2b + p. It is also,
// both for K and V, part of what one lane holds of a record (layout.h), so codes are packed where
// they are.
//
// With 32 elements a lane needs 64 registers: 32 warps a multiprocessor, and each pass is half as
// long as with squares of 8 x 8. Most sums are along rows, so a lane has more columns than rows: it
// adds its 8 elements, and the lanes that share a row (4) or a column (8) exchange halves of what
// they have, once for rows and three times for columns. What is left is added up in shared memory
// by the line thread of the row or column: thread n looks after row n and column n.
#pragma once

#include <cstdint>

#include "kvarn/layout.h"
#include "kvarn/ops.h"

namespace kvarn::device {

/// kKeys, kValues: what a tile of this shape may be.
template <int kTileRows, int kTileCols, bool kKeys, bool kValues>
struct TileShape {
  static constexpr int kRows = kTileRows;
  static constexpr int kCols = kTileCols;
  static constexpr bool kMayBeKey = kKeys;
  static constexpr bool kMayBeValue = kValues;
  static constexpr int kHeadDim = kKeys ? kRows : kCols;
  static constexpr int kTokens = kKeys ? kCols : kRows;
  static constexpr int kRowWarps = kRows / 32;  ///< warps one above the other
  static constexpr int kColWarps = kCols / 32;  ///< warps side by side
  static constexpr int kWarps = kRowWarps * kColWarps;
  static constexpr int kThreads = kWarps * kWarpLanes;
  static constexpr int kLines = kRows > kCols ? kRows : kCols;  ///< line threads
  static constexpr int kLineWarps = kLines / kWarpLanes;
  static_assert(kThreads >= kLines);
};

inline constexpr int kLaneRows = 4;
inline constexpr int kLaneCols = 8;
inline constexpr int kElements = kLaneRows * kLaneCols;  ///< of a lane

/// Element (row i, column j) of a lane; four by four, they are mma accumulators.
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

/// Whether this thread looks after a row, a column, either.
template <class Shape>
__device__ __forceinline__ bool has_row() {
  return own_thread() < Shape::kRows;
}

template <class Shape>
__device__ __forceinline__ bool has_col() {
  return own_thread() < Shape::kCols;
}

template <class Shape>
__device__ __forceinline__ bool has_line() {
  return own_thread() < Shape::kLines;
}

/// Where a thread is in the tile. Every pass makes its own.
template <class Shape>
struct TilePlace {
  int lane;
  int warp_row;
  int warp_col;
  int row;  ///< first of its own
  int col;  ///< first of its own

  __device__ __forceinline__ explicit TilePlace(unsigned thread = own_thread()) {
    lane = thread % kWarpLanes;
    const int warp = thread / kWarpLanes;
    warp_row = warp / Shape::kColWarps;
    warp_col = warp % Shape::kColWarps;
    row = warp_row * 32 + lane / 4 * kLaneRows;
    col = warp_col * 32 + lane % 4 * kLaneCols;
  }
};

/// The numbers of a lane's columns.
__device__ __forceinline__ void load_8(const float* from, float (&to)[kLaneCols]) {
  const float4 low = *reinterpret_cast<const float4*>(from);
  const float4 high = *reinterpret_cast<const float4*>(from + 4);
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

/// The numbers of a lane's rows.
__device__ __forceinline__ void load_4(const float* from, float (&to)[kLaneRows]) {
  const float4 all = *reinterpret_cast<const float4*>(from);
  to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
}

inline constexpr float kInfinity = __builtin_huge_valf();
inline constexpr float kMaxHalf = 65504.f;

/// sum + x, of which `first` is the first: one operation less than from 0.
__device__ __forceinline__ float plus(bool first, float sum, float x) {
  return first ? x : sum + x;
}

/// Two lanes `distance` apart hold two numbers each; afterwards one (`upper`) has the sum of the
/// second ones, the other that of the first. kMin: the smaller one instead of the sum.
template <bool kMin>
__device__ __forceinline__ float exchange(float first, float second, bool upper, int distance) {
  const float keep = upper ? second : first;
  const float send = upper ? first : second;
  const float other = __shfl_xor_sync(0xffffffffu, send, distance);
  return kMin ? fminf(keep, other) : keep + other;
}

/// Where the sums of a row lie in shared memory: part by part, at distances for which the lanes
/// that write every second row of two parts meet in no bank.
template <class Shape>
struct RowPartials {
  static constexpr int kPart = Shape::kRows + 17;      ///< from part to part of a row
  static constexpr int kParts = 2 * Shape::kColWarps;  ///< of a row
  static constexpr int kStride = kParts * kPart;       ///< from sum to sum
};

/// Takes kSums sums and then kMins minima along the rows. row(i, out): what the lane's row i adds
/// to each. Afterwards (and after a barrier) row_total has them.
template <class Shape, int kSums, int kMins, class Row>
__device__ __forceinline__ void reduce_rows(const TilePlace<Shape>& at, float* partial,
                                            const Row& row) {
  using To = RowPartials<Shape>;
  constexpr int kCount = kSums + kMins;
  constexpr int kHalf = kLaneRows / 2;
  const bool upper = (at.lane & 2) != 0;
  float* const to =
      partial + (at.warp_col * 2 + at.lane % 2) * To::kPart + at.row + (upper ? kHalf : 0);
#pragma unroll
  for (int k = 0; k < kHalf; ++k) {
    float low[kCount];
    float high[kCount];
    row(k, low);
    row(k + kHalf, high);
#pragma unroll
    for (int q = 0; q < kCount; ++q) {
      to[q * To::kStride + k] = q < kSums ? exchange<false>(low[q], high[q], upper, 2)
                                          : exchange<true>(low[q], high[q], upper, 2);
    }
  }
}

/// Number `k` of the four columns of a lane in one of the two halves that reduce_cols takes.
constexpr KVARN_HD int col_of_half(int half, int k) { return 2 * half + k % 2 + k / 2 * 4; }

/// Takes kSums sums along the columns. add(half, sums): sums[q][k] is what the lane adds to its
/// column col_of_half(half, k). Half of the columns at a time need half of the registers.
template <class Shape, int kSums, class Add>
__device__ __forceinline__ void reduce_cols(const TilePlace<Shape>& at, float* partial,
                                            const Add& add) {
  float of_4[kSums][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sums[kSums][4];
    add(half, sums);
#pragma unroll
    for (int q = 0; q < kSums; ++q) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        of_4[q][2 * half + k] =
            exchange<false>(sums[q][k], sums[q][k + 2], (at.lane & 16) != 0, 16);
      }
    }
  }
#pragma unroll
  for (int q = 0; q < kSums; ++q) {
    const float first = exchange<false>(of_4[q][0], of_4[q][2], (at.lane & 8) != 0, 8);
    const float second = exchange<false>(of_4[q][1], of_4[q][3], (at.lane & 8) != 0, 8);
    partial[(q * Shape::kRowWarps + at.warp_row) * Shape::kCols + at.col + at.lane / 4] =
        exchange<false>(first, second, (at.lane & 4) != 0, 4);
  }
}

/// Sum (or minimum) of kCount numbers at distances kStride, eight at a time for want of registers.
template <int kCount, int kStride, bool kMin>
__device__ __forceinline__ float total(const float* numbers) {
  constexpr int kStep = kCount < 8 ? kCount : 8;
  static_assert(kCount % kStep == 0);
  float all = kMin ? kInfinity : 0.f;
#pragma unroll 1
  for (int w = 0; w < kCount; w += kStep) {
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      const float other = numbers[(w + k) * kStride];
      all = kMin ? fminf(all, other) : all + other;
    }
  }
  return all;
}

/// Sum `q` of row or column threadIdx.x, for its line thread.
template <class Shape, bool kMin = false>
__device__ __forceinline__ float row_total(const float* partial, int q) {
  using From = RowPartials<Shape>;
  return total<From::kParts, From::kPart, kMin>(partial + q * From::kStride + own_thread());
}

template <class Shape>
__device__ __forceinline__ float col_total(const float* partial, int q) {
  return total<Shape::kRowWarps, Shape::kCols, false>(
      partial + q * Shape::kRowWarps * Shape::kCols + own_thread());
}

/// One number of each line thread -> one of each of their warps, in shared memory. For whole warps.
__device__ __forceinline__ void put_warp_value(float value, float* of_warps) {
  const unsigned thread = own_thread();
  if (thread % kWarpLanes == 0) of_warps[thread / kWarpLanes] = value;
}

__device__ __forceinline__ void put_warp_sum(float value, float* of_warps) {
#pragma unroll
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  put_warp_value(value, of_warps);
}

/// The order of numbers >= 0 is that of their bits.
__device__ __forceinline__ void put_warp_min(float value, float* of_warps) {
  put_warp_value(__uint_as_float(__reduce_min_sync(0xffffffffu, __float_as_uint(value))), of_warps);
}

__device__ __forceinline__ void put_warp_max(float value, float* of_warps) {
  put_warp_value(__uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(value))), of_warps);
}

/// The numbers of the line threads' warps, put together, four at a time for want of registers.
template <class Shape, class Plus>
__device__ __forceinline__ float of_warps(const float* numbers, float start, const Plus& plus) {
  constexpr int kStep = Shape::kLineWarps < 4 ? Shape::kLineWarps : 4;
#pragma unroll 1
  for (int w = 0; w < Shape::kLineWarps; w += kStep) {
#pragma unroll
    for (int k = 0; k < kStep; ++k) start = plus(start, numbers[w + k]);
  }
  return start;
}

template <class Shape>
__device__ __forceinline__ float sum_of_warps(const float* numbers) {
  return of_warps<Shape>(numbers, 0.f, [](float a, float b) { return a + b; });
}

template <class Shape>
__device__ __forceinline__ float min_of_warps(const float* numbers) {
  return of_warps<Shape>(numbers, kInfinity, [](float a, float b) { return fminf(a, b); });
}

/// Of numbers >= 0.
template <class Shape>
__device__ __forceinline__ float max_of_warps(const float* numbers) {
  return of_warps<Shape>(numbers, 0.f, [](float a, float b) { return fmaxf(a, b); });
}

/// Scale and offset of a row: x ~ q * scale + offset.
struct Affine {
  float scale;
  float offset;
};

/// The ends of a row of x / column scale, about `mean` of its line.
struct RowRange {
  float lo;
  float hi;
};

/// What a line thread knows of its row, its column and its token. In shared memory: registers are
/// for the tile. Thirteen words: an odd number, so that the threads of a warp meet different banks.
struct Line {
  Affine fit;  ///< that the codes are of
  Affine out;  ///< that the reader gets
  float mean;  ///< what was taken off x
  float rest;  ///< weighted mean of what is left
  float variance;
  RowRange range;
  float col_scale;
  float alternative;   ///< to all column scales, if one token is massive
  float energy;        ///< of the token: the sum of its squares
  bool live;           ///< the token is
  bool counts_as_row;  ///< no dead token
  bool counts_as_col;
};

/// What it knows of them in the normalization. Seven words.
struct Balance {
  float row_scale;
  float col_scale;
  float col_scale_before;
  float best_col_scale;
  float best;  ///< imbalance
  float col_deviation;
  bool row_active;
  bool col_active;
};

/// One head's keys or values of one tile: token g at data + g * token_stride.
struct TokenRows {
  const void* data;
  int64_t token_stride;  ///< elements
  DType dtype;
  bool rotated;  ///< already
  bool aligned;  ///< every token starts at a multiple of 16 bytes
  int plane;     ///< which of three parts is read, of fp32 input
};

/// Shared memory of a block that works on a tile.
template <class Shape>
struct TileMemory {
  static constexpr int kRowSums = 5;
  static constexpr int kColSums = 2;
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
  float2 code[Shape::kRows];      ///< slope and start of a row's codes (fit.cuh)
  float4 of_row[Shape::kRows];    ///< what a pass needs of a row besides
  float first_col[Shape::kRows];  ///< x in the first live column
  float first_row[Shape::kCols];  ///< x in the first live row
  float inverse_row[Shape::kRows];
  float col[kColArrays][Shape::kCols];
  float stat[kStats][(Shape::kLineWarps + 3) / 4 * 4];
  float factor;  ///< that the normalization is to take the tile times
  Line line[Shape::kLines];
  Balance balance[Shape::kLines];
  /// Anew in every pass, as the compiler does not know that `zero` is: lest it keep addresses in
  /// registers from one to the next.
  __device__ __forceinline__ TilePlace<Shape> place() const {
    return TilePlace<Shape>(own_thread() + zero);
  }

  __device__ __forceinline__ Line& own_line() { return line[own_thread()]; }
  __device__ __forceinline__ Balance& own_balance() { return balance[own_thread()]; }

  // In shared memory for want of registers, or rather predicates.
  volatile unsigned zero;
  TokenRows in;
  bool key;         ///< read it as is_key()
  bool minmax;      ///< fit
  bool normalized;  ///< column scales are Sinkhorn's
  __device__ __forceinline__ bool is_key() const {
    return Shape::kMayBeKey && (!Shape::kMayBeValue || key);
  }

  int bits;
  float levels;  ///< 2^bits - 1
  float middle;  ///< 2^(bits - 1)
  float alternative_loss;
  int live_tokens;
  int first_live;               ///< 0 if none is
  int dead[Shape::kLines / 8];  ///< a bit a token
};

/// Which tokens take part; the same for all threads.
template <class Shape>
struct Tokens {
  const TileMemory<Shape>& memory;

  /// K: tokens are columns; V: rows.
  __device__ __forceinline__ bool are_cols() const { return memory.is_key(); }
  __device__ __forceinline__ int live() const { return memory.live_tokens; }
  __device__ __forceinline__ int first() const { return memory.first_live; }
  __device__ __forceinline__ static constexpr int count() { return Shape::kTokens; }
  __device__ __forceinline__ bool all_live() const { return live() == count(); }
  __device__ __forceinline__ int first_row() const { return are_cols() ? 0 : first(); }
  __device__ __forceinline__ int first_col() const { return are_cols() ? first() : 0; }
  /// Entries of a row and of a column that count.
  __device__ __forceinline__ float row_length() const {
    return static_cast<float>(are_cols() ? live() : Shape::kCols);
  }
  __device__ __forceinline__ float col_length() const {
    return static_cast<float>(are_cols() ? Shape::kRows : live());
  }
  /// The dead ones among those of a lane, a bit each.
  __device__ __forceinline__ int dead(const TilePlace<Shape>& at) const {
    if (all_live()) return 0;
    const int token = are_cols() ? at.col : at.row;
    return memory.dead[token / 8] >> token % 8;
  }
};

/// Whether token `token` of a lane is dead.
__device__ __forceinline__ bool is_dead(int bits, int token) { return (bits >> token & 1) != 0; }

}  // namespace kvarn::device
