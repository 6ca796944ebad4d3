// What all launchers share: CUDA errors as Status.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <utility>

#include "kvarn/status.h"

namespace kvarn::cuda {

/// Launches `kernel` on `stream` and reports the error of this launch. The runtime's error state is
/// left clean, so that the next op does not report it again.
template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
              Args&&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  return Status::runtime(std::string("launch failed with ") + cudaGetErrorName(error) + " (" +
                         cudaGetErrorString(error) + ")");
}

}  // namespace kvarn::cuda
