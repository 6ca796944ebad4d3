// KVARN_CHECKED: looks through metadata on the device and waits for the verdict.
//
// For debugging: every checked op synchronizes with the host. While a graph is being captured
// nothing can be waited for, and nothing is checked.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/launch.h"

namespace kvarn::cuda {

/// What is wrong with one entry; rule 0: nothing.
struct Offence {
  int64_t rule = 0;  // as wide as the rest: no padding is copied to the host
  int64_t value = 0;
  int64_t other = 0;
};

struct Verdict {
  Offence offence;
  int64_t index;
};

inline constexpr int kCheckThreads = 1024;

/// One block, so that the first offender is found whatever the timing.
template <class Check>
__global__ void __launch_bounds__(kCheckThreads)
    check_kernel(const __grid_constant__ Check check, int64_t count, Verdict* verdict) {
  __shared__ unsigned long long first;
  if (threadIdx.x == 0) first = ~0ull;
  __syncthreads();
  Offence mine;
  int64_t index = 0;
  for (int64_t i = threadIdx.x; i < count && mine.rule == 0; i += kCheckThreads) {
    mine = check(i);
    index = i;
  }
  if (mine.rule != 0) atomicMin(&first, static_cast<unsigned long long>(index));
  __syncthreads();
  if (first == ~0ull) {
    if (threadIdx.x == 0) *verdict = {};
  } else if (mine.rule != 0 && static_cast<unsigned long long>(index) == first) {
    *verdict = {mine, index};
  }
}

/// Calls check(i) on the device for i < count; the first offence is what comes back.
template <class Check>
Status find_offence(const Check& check, int64_t count, void* stream, Offence& offence,
                    int64_t& index) {
  offence = {};
  index = 0;
  const auto on = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(on, &capture);
  if (error == cudaSuccess && capture != cudaStreamCaptureStatusNone) return {};

  void* memory = nullptr;
  if (error == cudaSuccess) error = cudaMallocAsync(&memory, sizeof(Verdict), on);
  if (error == cudaSuccess) {
    auto* const verdict = static_cast<Verdict*>(memory);
    Status status =
        launch(check_kernel<Check>, dim3(1), dim3(kCheckThreads), 0, stream, check, count, verdict);
    Verdict result{};
    error = cudaMemcpyAsync(&result, memory, sizeof(Verdict), cudaMemcpyDeviceToHost, on);
    cudaFreeAsync(memory, on);
    if (error == cudaSuccess) error = cudaStreamSynchronize(on);
    if (!status.ok()) return status;
    offence = result.offence;
    index = result.index;
  }
  return error == cudaSuccess ? Status() : runtime_error("checking metadata", error);
}

}  // namespace kvarn::cuda
