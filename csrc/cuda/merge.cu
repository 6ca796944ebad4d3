// merge_states: a warp for each row; what it moves is all there is to it.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cuda/dtype.h"
#include "cuda/format.h"
#include "cuda/launch.h"
#include "device/numeric.cuh"
#include "device/softmax.cuh"

namespace kvarn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = kThreads / kWarpLanes;

/// kVector: elements of an access; all rows start at multiples of it, and so does their end.
template <class T, int kVector>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeParams p) {
  using Piece = device::Vector<T, kVector>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kWarpLanes;
  const int lane = threadIdx.x % kWarpLanes;
  if (row >= p.tokens * p.heads) return;
  const int64_t token = row / p.heads;
  const int64_t head = row - token * p.heads;
  const auto at = [&](const int64_t (&stride)[2]) { return token * stride[0] + head * stride[1]; };
  const float none = device::negative_infinity();
  const float a = p.lse_a[at(p.lse_a_stride)];
  const float b = p.lse_b[at(p.lse_b_stride)];
  float by_a = 1.f;
  float by_b = 0.f;
  float lse = a;
  if (b != none) {
    const float top = a > b ? a : b;
    const float weight_a = a == none ? 0.f : a == top ? 1.f : expf(a - top);
    const float weight_b = b == top ? 1.f : expf(b - top);
    by_a = weight_a / (weight_a + weight_b);
    by_b = weight_b / (weight_a + weight_b);
    lse = top + logf(weight_a + weight_b);
  }
  const T* const from_a = static_cast<const T*>(p.out_a) + at(p.out_a_stride);
  const T* const from_b = static_cast<const T*>(p.out_b) + at(p.out_b_stride);
  T* const to = static_cast<T*>(p.out) + at(p.out_stride);
  for (int i = lane * kVector; i < p.head_dim; i += kWarpLanes * kVector) {
    // An empty part may hold anything.
    float v[kVector] = {};
    float w[kVector] = {};
    if (a != none) device::to_float(*reinterpret_cast<const Piece*>(from_a + i), v);
    if (b != none) device::to_float(*reinterpret_cast<const Piece*>(from_b + i), w);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      v[k] = a == none ? w[k] : b == none ? v[k] : v[k] * by_a + w[k] * by_b;
    }
    *reinterpret_cast<Piece*>(to + i) = device::from_float<T, kVector>(v, 1.f);
  }
  // A row's LSE may be written where it was read: by now all lanes have read it.
  __syncwarp();
  if (lane == 0) p.lse[at(p.lse_stride)] = a == none ? b : lse;
}

template <class T>
Status run(const MergeParams& p) {
  constexpr int kVector = device::kAccessBytes / static_cast<int>(sizeof(T));
  const auto is_multiple = [](int64_t elements) { return elements % kVector == 0; };
  const auto aligned = [&](const void* data, const int64_t (&stride)[2]) {
    return reinterpret_cast<uintptr_t>(data) % device::kAccessBytes == 0 &&
           (p.tokens == 1 || is_multiple(stride[0])) && (p.heads == 1 || is_multiple(stride[1]));
  };
  const bool wide = is_multiple(p.head_dim) && aligned(p.out_a, p.out_a_stride) &&
                    aligned(p.out_b, p.out_b_stride) && aligned(p.out, p.out_stride);
  const int64_t blocks = (p.tokens * p.heads + kRows - 1) / kRows;
  if (blocks == 0) return {};
  if (Status status = check_grid("out_a", blocks); !status.ok()) return status;
  return launch(wide ? merge_kernel<T, kVector> : merge_kernel<T, 1>,
                dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, p.stream, p);
}

}  // namespace

Status merge_states(const MergeParams& p) {
  return with_element_type(p.dtype, [&](auto element) { return run<decltype(element)>(p); });
}

}  // namespace kvarn::cuda
