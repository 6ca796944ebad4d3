// What all launchers share: CUDA errors as Status.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <utility>

#include "kvarn/status.h"

namespace kvarn::cuda {

/// The runtime's error state is left clean, so that the next op does not report the error again.
inline Status runtime_error(const char* what, cudaError_t error) {
  cudaGetLastError();
  return Status::runtime(std::string(what) + " failed with " + cudaGetErrorName(error) + " (" +
                         cudaGetErrorString(error) + ")");
}

/// Launches `kernel` on `stream` and reports the error of this launch.
template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
              Args&&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  return error == cudaSuccess ? Status() : runtime_error("launch", error);
}

/// Lets blocks of `kernel` have more shared memory than the 48 KB that every kernel may have.
template <class... Params>
Status allow_shared_memory(void (*kernel)(Params...), size_t bytes) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  return error == cudaSuccess ? Status() : runtime_error("raising the shared memory limit", error);
}

/// How many blocks of `kernel` the current device runs at once.
template <class... Params>
Status resident_blocks(void (*kernel)(Params...), int threads, size_t shared_bytes, int& blocks) {
  int device = 0;
  int multiprocessors = 0;
  int per_multiprocessor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads,
                                                          shared_bytes);
  }
  if (error != cudaSuccess) return runtime_error("preparing a launch", error);
  blocks = multiprocessors * per_multiprocessor;
  if (blocks > 0) return {};
  return Status::unsupported("this device has too little shared memory for the kernel: " +
                             std::to_string(shared_bytes) + " bytes");
}

}  // namespace kvarn::cuda
