// Barriers in shared memory, and copies from global memory that complete on them: one bulk copy of
// the copy engine (sm_90), or 16-byte copies of every lane (sm_80).
#pragma once

#include <cstdint>

#include "device/copy.cuh"
#include "kvarn/layout.h"

namespace kvarn::device {

using Barrier = uint64_t;

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

/// Makes barriers that were just initialized known to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 state;\n"
      "mbarrier.arrive.shared.b64 state, [%0];\n"
      "}" ::"r"(shared_address(barrier))
      : "memory");
}

/// Whether the phase of this parity (0 first, then alternating) has ended.
__device__ __forceinline__ bool barrier_passed(Barrier* barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

/// Waits for it.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  unsigned done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (done == 0);
#else
  while (!barrier_passed(barrier, parity)) {
  }
#endif
}

/// The copy engine: one lane copies.
struct BulkCopy {
  static constexpr bool kOneLane = true;
  static constexpr int kArrivals = 1;  ///< on the barrier of a copy

  __device__ __forceinline__ static void copy(uint8_t* shared, const uint8_t* global, int bytes,
                                              Barrier* barrier, int lane) {
    if (lane != 0) return;
    const uint32_t address = shared_address(barrier);
    asm volatile(
        "{\n"
        ".reg .b64 state;\n"
        "mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n"
        "}" ::"r"(address),
        "r"(bytes)
        : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(address)
        : "memory");
  }

  /// In place of a copy: one lane.
  __device__ __forceinline__ static void arrive_alone(Barrier* barrier) { barrier_arrive(barrier); }
};

/// Every lane copies its pieces of 16 bytes.
struct LaneCopy {
  static constexpr bool kOneLane = false;
  /// One more than lanes: the copies' own arrivals do not make known what lane 0 wrote before.
  static constexpr int kArrivals = kWarpLanes + 1;

  __device__ __forceinline__ static void copy(uint8_t* shared, const uint8_t* global, int bytes,
                                              Barrier* barrier, int lane) {
    for (int i = 16 * lane; i < bytes; i += 16 * kWarpLanes) {
      copy_async_16(shared + i, global + i);
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
                 : "memory");
    if (lane == 0) barrier_arrive(barrier);
  }

  __device__ __forceinline__ static void arrive_alone(Barrier* barrier) {
    for (int i = 0; i < kArrivals; ++i) barrier_arrive(barrier);
  }
};

#if __CUDA_ARCH__ >= 900
using RingCopy = BulkCopy;
#else
using RingCopy = LaneCopy;
#endif

/// Asks for lines in L2; an address and a number of bytes that are multiples of 16.
__device__ __forceinline__ void prefetch(const void* global, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

/// A copy for addresses that are not multiples of 16; done when it returns.
__device__ __forceinline__ void copy_bytes(uint8_t* shared, const uint8_t* global, int bytes,
                                           int lane) {
  for (int i = lane; i < bytes; i += kWarpLanes) shared[i] = global[i];
}

}  // namespace kvarn::device
