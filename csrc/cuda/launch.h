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

inline cudaLaunchConfig_t launch_config(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return config;
}

/// Launches `kernel` on `stream` and reports the error of this launch.
template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
              Args&&... args) {
  const cudaLaunchConfig_t config = launch_config(grid, block, shared_bytes, stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  return error == cudaSuccess ? Status() : runtime_error("launch", error);
}

/// The same for a kernel that begins with device::wait_for_previous: where the device can, it is
/// started while the kernel before it still runs (device/dependent_launch.cuh).
template <class... Params, class... Args>
Status launch_early(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                    void* stream, Args&&... args) {
  int device = 0;
  int major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error != cudaSuccess) return runtime_error("preparing a launch", error);
  cudaLaunchConfig_t config = launch_config(grid, block, shared_bytes, stream);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = major >= 9 ? 1 : 0;
  error = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  return error == cudaSuccess ? Status() : runtime_error("launch", error);
}

inline Status too_little_shared_memory(size_t bytes) {
  return Status::unsupported("this device has too little shared memory for the kernel: " +
                             std::to_string(bytes) + " bytes");
}

/// Lets blocks of `kernel` have `bytes` of dynamic shared memory, also beyond the 48 KB that every
/// kernel may have. The limit is always raised as far as it goes: threads that launch the kernel
/// with different sizes do not lower it for each other.
template <class... Params>
Status allow_shared_memory(void (*kernel)(Params...), size_t bytes) {
  constexpr size_t kAlways = size_t{48} << 10;
  int device = 0;
  int most = 0;
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return runtime_error("preparing a launch", error);
  const size_t limit = static_cast<size_t>(most) - attributes.sharedSizeBytes;
  if (bytes > limit) return too_little_shared_memory(bytes);
  if (bytes + attributes.sharedSizeBytes <= kAlways) return {};
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(limit));
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
  return too_little_shared_memory(shared_bytes);
}

}  // namespace kvarn::cuda
