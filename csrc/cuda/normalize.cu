// variance_normalize: log-space Sinkhorn scales of whole tiles (KVarN, arXiv 2606.03458), best
// round.
//
// Roofline. A round measures every row and every column of the tile once: a product with a
// difference, two sums and two loads from shared memory an element each way. The 9 rounds (8
// iterations) of a 128 x 128 tile are 50,000 warp instructions, 54 ns at one a clock on each of an
// H200's 528 schedulers; its bytes (fp16 in, fp32 out) take 24 ns at the copy rate. Instructions
// bound it.
//
// One block has one tile, in shared memory as fp32 where that fits (up to about 240 x 240), or else
// read again from the input in every pass; what it needs besides then lies in `balanced` until the
// end. A thread measures a row, or a part of it, and then a column. As on the CPU, scales are
// factors instead of logarithms, moments are taken about the first element (a constant row has a
// deviation of exactly 0), and the row deviations after a row's scale changed are the old ones
// divided by the change.
//
// Measured, 4096 tiles, 8 iterations: 128 x 128 165 ns a tile, 64 x 128 111, 64 x 64 62.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "cuda/dtype.h"
#include "cuda/format.h"
#include "cuda/launch.h"
#include "device/factors.cuh"
#include "device/numeric.cuh"

namespace kvarn::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kVectorLimit =
    1024;  // longer vectors of a tile that is not resident are in `balanced`

using device::next_scale;

/// Of a resident tile: neither rows nor columns side by side meet in a bank.
KVARN_HD constexpr int odd_pitch(int cols) { return cols | 1; }

/// Sums over n numbers about one of them.
struct Moments {
  float sum = 0.f;
  float squares = 0.f;

  __device__ __forceinline__ void add(float difference) {
    sum += difference;
    squares = fmaf(difference, difference, squares);
  }
  __device__ __forceinline__ float deviation(int n) const {
    const float central = squares - sum * (sum / static_cast<float>(n));
    return sqrtf((central < 0.f ? 0.f : central) / static_cast<float>(n - 1));
  }
};

/// max / min of deviations, as bits: those of numbers >= 0 are ordered like the numbers, infinity
/// and NaN come last.
struct Spread {
  static constexpr unsigned kInfinity = 0x7f800000u;
  unsigned least = kInfinity;
  unsigned most = 0;

  __device__ __forceinline__ void add(float deviation) {
    const unsigned bits = __float_as_uint(fabsf(deviation));
    least = min(least, bits);
    most = max(most, bits);
  }
  /// Of a warp.
  __device__ __forceinline__ Spread reduced() const {
    return {__reduce_min_sync(~0u, least), __reduce_max_sync(~0u, most)};
  }
  /// 0 when there were none, NaN when one was no finite number.
  __device__ __forceinline__ float ratio() const {
    if (most >= kInfinity) return NAN;
    return most == 0 ? 0.f : __uint_as_float(most) / fmaxf(__uint_as_float(least), 1e-8f);
  }
};

/// Fixed shared memory of a block.
struct Scratch {
  float sums[2][kMaxThreads];                  // of parts of lines
  Spread spread[2][kMaxThreads / kWarpLanes];  // rows, columns; by warp
};

/// Vectors of a tile. Scales of rows and columns that are constant in x are -1: they stay as they
/// are and out of the imbalance.
struct Vectors {
  float* row;
  float* inverse_row;
  float* col;
  float*
      work;  // of columns: the inverse of the scale until a round measures it, then the deviation
};

/// Elements, `pitch` from row to row.
template <class T>
struct Tile {
  const T* data;
  int64_t pitch;
  int rows;
  int cols;
};

/// Calls finish(line, deviation) for every row or column of the tile after element k of it was
/// multiplied by weight[k]. Threads side by side have lines side by side; where there are more
/// threads than lines, a line is cut into parts.
template <bool kRows, class T, class Finish>
__device__ __forceinline__ void measure(const Tile<T>& tile, const float* weight, Scratch& scratch,
                                        Finish&& finish) {
  const int lines = kRows ? tile.rows : tile.cols;
  const int length = kRows ? tile.cols : tile.rows;
  const int64_t line_step = kRows ? tile.pitch : 1;
  const int64_t step = kRows ? 1 : tile.pitch;
  const int threads = blockDim.x;
  const int parts = max(1, threads / lines);
  const int part = parts == 1 ? 0 : threadIdx.x / lines;
  const int part_length = (length + parts - 1) / parts;
  if (part < parts) {
    for (int line = threadIdx.x - part * lines; line < lines; line += threads) {
      const T* x = tile.data + line * line_step;
      const float pivot = device::to_float(x[0]) * weight[0];
      const int begin = part * part_length;
      const int end = min(begin + part_length, length);
      x += begin * step;
      Moments m;
#pragma unroll 8
      for (int k = begin; k < end; ++k, x += step) {
        m.add(fmaf(device::to_float(*x), weight[k], -pivot));
      }
      if (parts == 1) {
        finish(line, m.deviation(length));
      } else {
        scratch.sums[0][threadIdx.x] = m.sum;
        scratch.sums[1][threadIdx.x] = m.squares;
      }
    }
  }
  if (parts > 1) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < lines) {
      Moments m;
      for (int k = threadIdx.x; k < parts * lines; k += lines) {
        m.sum += scratch.sums[0][k];
        m.squares += scratch.sums[1][k];
      }
      finish(threadIdx.x, m.deviation(length));
    }
  }
}

/// Deviations of the rows after division by the column scales; updates the row scales, but not in
/// round 0.
template <class T>
__device__ __forceinline__ Spread measure_rows(const Tile<T>& tile, const Vectors& v,
                                               Scratch& scratch, int round) {
  Spread spread;
  measure<true>(tile, v.work, scratch, [&](int i, float deviation) {
    const float before = v.row[i];
    deviation /= fabsf(before);
    if (round == 0) {
      v.row[i] = deviation == 0.f ? -1.f : 1.f;
    } else if (before > 0.f) {
      const float scale = next_scale(before, deviation);
      v.row[i] = scale;
      v.inverse_row[i] = 1.f / scale;
      deviation *= before / scale;
    }
    if (v.row[i] > 0.f) spread.add(deviation);
  });
  return spread;
}

/// Deviations of the columns after division by both scales, into v.work.
template <class T>
__device__ __forceinline__ Spread measure_cols(const Tile<T>& tile, const Vectors& v,
                                               Scratch& scratch, int round) {
  Spread spread;
  measure<false>(tile, v.inverse_row, scratch, [&](int j, float deviation) {
    deviation *= v.work[j];
    v.work[j] = deviation;
    if (round == 0 && deviation == 0.f) v.col[j] = -1.f;
    if (v.col[j] > 0.f) spread.add(deviation);
  });
  return spread;
}

/// The same in all threads.
__device__ __forceinline__ float imbalance(const Spread& rows, const Spread& cols,
                                           Scratch& scratch) {
  const int warps = blockDim.x / kWarpLanes;
  const int lane = threadIdx.x % kWarpLanes;
  const Spread of_rows = rows.reduced();
  const Spread of_cols = cols.reduced();
  if (lane == 0) {
    scratch.spread[0][threadIdx.x / kWarpLanes] = of_rows;
    scratch.spread[1][threadIdx.x / kWarpLanes] = of_cols;
  }
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    sum += (lane < warps ? scratch.spread[k][lane] : Spread()).reduced().ratio();
  }
  return sum;
}

template <class T, bool kResident>
__global__ void __launch_bounds__(kMaxThreads, 1)
    normalize_kernel(const __grid_constant__ NormalizeParams p) {
  extern __shared__ float shared[];
  __shared__ Scratch scratch;
  const int rows = p.rows;
  const int cols = p.cols;
  const int64_t elements = static_cast<int64_t>(rows) * cols;
  const int threads = blockDim.x;
  const int warps = threads / kWarpLanes;
  const int warp = threadIdx.x / kWarpLanes;
  const int lane = threadIdx.x % kWarpLanes;
  const int64_t number = blockIdx.x;
  float* const balanced = p.balanced + number * elements;
  float* const row_scale = p.row_scale + number * rows;
  float* const col_scale = p.col_scale + number * cols;

  const T* const x = static_cast<const T*>(p.x) + number * p.x_stride[0];
  float* const resident = shared + 2 * (rows + cols);
  Tile<std::conditional_t<kResident, float, T>> tile;
  if constexpr (kResident) {
    tile = {resident, odd_pitch(cols), rows, cols};
  } else {
    tile = {x, p.x_stride[1], rows, cols};
  }
  const bool cols_shared = kResident || cols <= kVectorLimit;
  const bool rows_shared = kResident || rows <= kVectorLimit;
  float* const col = cols_shared ? shared : balanced;
  float* const row = rows_shared ? shared + (cols_shared ? 2 * cols : 0)
                                 : balanced + (cols_shared ? 0 : 2 * static_cast<int64_t>(cols));
  const Vectors v = {row, row + rows, col, col + cols};

  for (int i = threadIdx.x; i < rows; i += threads) {
    v.row[i] = v.inverse_row[i] = row_scale[i] = 1.f;
  }
  for (int j = threadIdx.x; j < cols; j += threads) v.col[j] = v.work[j] = col_scale[j] = 1.f;
  if constexpr (kResident) {
    for (int64_t i = warp; i < rows; i += warps) {
      const T* const from = x + i * p.x_stride[1];
      float* const to = resident + static_cast<int>(i) * odd_pitch(cols);
#pragma unroll 4
      for (int j = lane; j < cols; j += kWarpLanes) to[j] = device::to_float(from[j]);
    }
  }
  __syncthreads();

  float best = 0.f;
#pragma unroll 1
  for (int round = 0; round <= p.iterations; ++round) {
    if (round > 0) {
      for (int j = threadIdx.x; j < cols; j += threads) {
        if (v.col[j] > 0.f) v.col[j] = next_scale(v.col[j], v.work[j]);
        v.work[j] = 1.f / fabsf(v.col[j]);
      }
      __syncthreads();
    }
    const Spread row_spread = measure_rows(tile, v, scratch, round);
    __syncthreads();
    const Spread col_spread = measure_cols(tile, v, scratch, round);
    const float now = imbalance(row_spread, col_spread, scratch);
    if (round == 0) {
      best = now;
    } else if (now <= best * device::kEqual) {
      best = now;
      for (int i = threadIdx.x; i < rows; i += threads) row_scale[i] = fabsf(v.row[i]);
      for (int j = threadIdx.x; j < cols; j += threads) col_scale[j] = fabsf(v.col[j]);
    }
    __syncthreads();
  }

  for (int64_t i = warp; i < rows; i += warps) {
    const auto* const from = tile.data + i * tile.pitch;
    float* const to = balanced + i * cols;
    const float scale = row_scale[i];
#pragma unroll 4
    for (int j = lane; j < cols; j += kWarpLanes) {
      to[j] = device::to_float(from[j]) / col_scale[j] / scale;
    }
  }
}

template <class T>
Status run(const NormalizeParams& p) {
  int device = 0;
  int most = 0;  // bytes of shared memory that a block may have
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error != cudaSuccess) return runtime_error("preparing a launch", error);

  const int64_t elements = int64_t{p.rows} * p.cols;
  const int64_t resident_bytes =
      (int64_t{p.rows} * (int64_t{p.cols} | 1) + 2 * (int64_t{p.rows} + p.cols)) *
      int64_t{sizeof(float)};
  const bool resident = resident_bytes + int64_t{sizeof(Scratch)} <= most;
  const int64_t vectors =
      (p.rows <= kVectorLimit ? p.rows : 0) + (p.cols <= kVectorLimit ? p.cols : 0);
  const auto bytes =
      static_cast<size_t>(resident ? resident_bytes : 2 * vectors * int64_t{sizeof(float)});
  const auto kernel = resident ? normalize_kernel<T, true> : normalize_kernel<T, false>;
  if (Status status = allow_shared_memory(kernel, bytes); !status.ok()) return status;
  // Small tiles share a multiprocessor.
  const int threads = elements <= 64 * 64 ? 128 : elements <= 128 * 128 ? 256 : kMaxThreads;
  return launch(kernel, dim3(static_cast<unsigned>(p.tiles)), dim3(threads), bytes, p.stream, p);
}

}  // namespace

Status variance_normalize(const NormalizeParams& p) {
  if (p.iterations < 0) {
    return Status::invalid("iterations must be >= 0, got " + std::to_string(p.iterations));
  }
  if (p.tiles == 0 || p.rows == 0 || p.cols == 0) return {};
  if (p.rows < 2 || p.cols < 2) {
    return Status::invalid("tiles must be at least 2 in its last two dimensions, got [" +
                           std::to_string(p.rows) + ", " + std::to_string(p.cols) + "]");
  }
  if (Status status = check_grid("tiles", p.tiles); !status.ok()) return status;
  return with_element_type(p.dtype, [&](auto element) { return run<decltype(element)>(p); });
}

}  // namespace kvarn::cuda
