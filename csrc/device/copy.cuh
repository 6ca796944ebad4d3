// Asynchronous copies from global to shared memory (sm_80 and later).
#pragma once

#include <cstdint>

namespace kvarn::device {

__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}

/// Closes the group of this thread's copies since the last one.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Copies `bytes`, a multiple of 16, to shared memory: asynchronously, unless `global` starts at an
/// odd address. `shared` starts at a multiple of 16 bytes.
template <int kThreads>
__device__ __forceinline__ void copy_to_shared(uint8_t* shared, const uint8_t* global, int bytes) {
  if (reinterpret_cast<uintptr_t>(global) % 16 == 0) {
    for (int i = 16 * threadIdx.x; i < bytes; i += 16 * kThreads) {
      copy_async_16(shared + i, global + i);
    }
  } else {
    for (int i = threadIdx.x; i < bytes; i += kThreads) shared[i] = global[i];
  }
}

}  // namespace kvarn::device
