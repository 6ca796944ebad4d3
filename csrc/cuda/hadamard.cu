// hadamard_transform: out = scale * (x @ W) over the last dimension, 16..1024.
//
// Roofline. Each element is read once and written once: 4 bytes for the 16-bit types, 8 for fp32.
// Per element the work is log2(D) additions, one multiplication, two conversions and log2(lanes of
// a row) shuffles: two at D = 64, three at 128 and 256, five at 1024. On an H200 (132 SMs, 1.98
// GHz, 128 additions and 32 shuffled words a clock and SM) the worst case, fp16 [64k, 1024], takes
// 40 us of shuffles and 35 us of instructions, side by side, and 67 us for its 268 MB at the rate
// of a device-to-device copy. Memory bounds every case.
//
// So the kernel is a copy with arithmetic on the way: 16 bytes a load and store; all loads of a
// thread in flight before its first butterfly; at least 64 neighbouring bytes of a row in one
// access of a warp; past L1; and no division to find a row where rows are one dimension.
//
// Measured, fp16, of the copy rate (3.9-4.1 TB/s), out of place / in place: [1M, 128] .98 / .96,
// [256k, 256] .97 / .97, [2M, 64] .97 / .95, [64k, 1024] .99 / .97. Tried and dropped: 32 bytes of
// a row in one access (.77 at D = 64), accesses through L1 (-.01 to -.04), 512 threads a block
// (-.04 to -.1), half the shuffles by exchanging registers for lanes (.35-.75: its stores scatter).
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "device/hadamard.cuh"
#include "device/numeric.cuh"
#include "kvarn/ops.h"

namespace kvarn::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kElements = 32;  // of a thread

/// The three dimensions of rows; strides in elements.
struct Rows {
  int64_t size[3];
  int64_t x_stride[3];
  int64_t out_stride[3];
  int64_t count;
};

/// How a kernel finds its rows and how much it moves at once.
enum class Path {
  kFlat,     ///< one dimension of rows, accesses of 16 bytes
  kStrided,  ///< three dimensions of rows, accesses of 16 bytes
  kNarrow,   ///< three dimensions of rows, accesses of one element
};

struct Offsets {
  int64_t x;
  int64_t out;
};

template <Path kPath>
__device__ __forceinline__ Offsets row_offsets(const Rows& rows, int64_t row) {
  if constexpr (kPath == Path::kFlat) {
    return {row * rows.x_stride[2], row * rows.out_stride[2]};
  } else {
    const int64_t outer = row / rows.size[2];
    const int64_t i2 = row - outer * rows.size[2];
    const int64_t i0 = outer / rows.size[1];
    const int64_t i1 = outer - i0 * rows.size[1];
    return {i0 * rows.x_stride[0] + i1 * rows.x_stride[1] + i2 * rows.x_stride[2],
            i0 * rows.out_stride[0] + i1 * rows.out_stride[1] + i2 * rows.out_stride[2]};
  }
}

/// Elements of a row that one thread holds: an eighth, but 16 to 32 and at most half of the row.
constexpr KVARN_HD int row_elements(int dim) { return dim <= 32 ? dim / 2 : dim <= 128 ? 16 : 32; }

/// A row belongs to kLanes lanes; lane `part` of them holds its pieces part, part + kLanes, ...
/// of kAccess elements each.
template <class T, int kDim, Path kPath>
__global__ void __launch_bounds__(kThreads)
    hadamard_kernel(const __grid_constant__ Rows rows, const T* x, T* out, float scale) {
  constexpr int kAccess =
      kPath == Path::kNarrow ? 1 : device::kAccessBytes / static_cast<int>(sizeof(T));
  constexpr int kRowElements = row_elements(kDim);
  constexpr int kLanes = kDim / kRowElements;
  constexpr int kRows = kElements / kRowElements;  // of a thread
  constexpr int kPieces = kRowElements / kAccess;  // of a thread in a row
  constexpr int kRowStep = kWarpLanes / kLanes;    // rows that the lanes of a warp hold at once

  const int lane = threadIdx.x % kWarpLanes;
  const int part = lane % kLanes;
  const int64_t warp =
      static_cast<int64_t>(blockIdx.x) * (kThreads / kWarpLanes) + threadIdx.x / kWarpLanes;
  const int64_t first = warp * (kRows * kRowStep) + lane / kLanes;

  device::Vector<T, kAccess> pieces[kRows * kPieces] = {};
  Offsets offset[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first + r * kRowStep;
    if (row >= rows.count) break;
    offset[r] = row_offsets<kPath>(rows, row);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      pieces[r * kPieces + i] =
          device::load_once<T, kAccess>(x + offset[r].x + (i * kLanes + part) * kAccess);
    }
  }

  float v[kElements];
#pragma unroll
  for (int i = 0; i < kRows * kPieces; ++i) device::to_float(pieces[i], v + i * kAccess);
  device::butterfly_registers<1, kAccess>(v);
  device::butterfly_lanes<1, kLanes>(v, lane);
  device::butterfly_registers<kAccess, kRowElements>(v);

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r * kRowStep >= rows.count) break;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      device::store_once(out + offset[r].out + (i * kLanes + part) * kAccess,
                         device::from_float<T, kAccess>(v + (r * kPieces + i) * kAccess, scale));
    }
  }
}

/// Whether every row of both tensors starts at a multiple of 16 bytes.
bool aligned(const HadamardParams& p) {
  const auto is_multiple = [](int64_t bytes) { return bytes % device::kAccessBytes == 0; };
  bool ok = is_multiple(reinterpret_cast<intptr_t>(p.x)) &&
            is_multiple(reinterpret_cast<intptr_t>(p.out));
  for (int i = 0; i < 3; ++i) {
    if (p.rows[i] == 1) continue;
    ok = ok && is_multiple(p.x_stride[i] * size_of(p.dtype)) &&
         is_multiple(p.out_stride[i] * size_of(p.dtype));
  }
  return ok;
}

template <class T, int kDim>
Status run(const HadamardParams& p) {
  constexpr int64_t kRowsPerBlock = int64_t{kThreads} * kElements / kDim;
  constexpr int64_t kMaxBlocks = 2147483647;
  Rows rows{};
  std::copy_n(p.rows, 3, rows.size);
  std::copy_n(p.x_stride, 3, rows.x_stride);
  std::copy_n(p.out_stride, 3, rows.out_stride);
  rows.count = p.rows[0] * p.rows[1] * p.rows[2];
  if (rows.count == 0) return {};
  const int64_t blocks = (rows.count + kRowsPerBlock - 1) / kRowsPerBlock;
  if (blocks > kMaxBlocks) {
    return Status::invalid("x must have at most " + std::to_string(kMaxBlocks * kRowsPerBlock) +
                           " rows on CUDA, got " + std::to_string(rows.count));
  }
  const auto kernel = !aligned(p)                  ? hadamard_kernel<T, kDim, Path::kNarrow>
                      : rows.size[2] == rows.count ? hadamard_kernel<T, kDim, Path::kFlat>
                                                   : hadamard_kernel<T, kDim, Path::kStrided>;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, p.stream, rows,
                static_cast<const T*>(p.x), static_cast<T*>(p.out), p.scale);
}

template <class T>
Status run(const HadamardParams& p) {
  switch (p.dim) {
    case 16:
      return run<T, 16>(p);
    case 32:
      return run<T, 32>(p);
    case 64:
      return run<T, 64>(p);
    case 128:
      return run<T, 128>(p);
    case 256:
      return run<T, 256>(p);
    case 512:
      return run<T, 512>(p);
    case 1024:
      return run<T, 1024>(p);
    default:
      return Status::invalid(
          "x must be a power of two from 16 to 1024 in its last dimension on CUDA, got " +
          std::to_string(p.dim));
  }
}

}  // namespace

Status hadamard_transform(const HadamardParams& p) {
  for (int64_t n : p.rows) {
    if (n < 0) return Status::invalid("rows must be at least 0, got " + std::to_string(n));
  }
  return with_element_type(p.dtype, [&](auto element) { return run<decltype(element)>(p); });
}

}  // namespace kvarn::cuda
