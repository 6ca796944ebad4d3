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

/// Orders what the thread stored in shared memory before what others have done with it from then on
/// by the copy engine (copies to the same place) or by wgmma.
__device__ __forceinline__ void fence_for_async_proxy() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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

/// Rows of keys and of values that lie apart, to be put side by side; or of one of them.
struct RowsCopy {
  const uint8_t* keys;
  int64_t to_values;  ///< bytes
  int64_t stride;     ///< of rows
  int row_bytes;
  int rows;

  /// For addresses that are not multiples of 16; done when it returns.
  __device__ __forceinline__ void by_elements(uint8_t* key, uint8_t* value, int lane) const {
    const int row_elements = row_bytes / 2;
#pragma unroll 1
    for (int i = lane; i < rows * row_elements; i += kWarpLanes) {
      const uint8_t* const from = keys + i / row_elements * stride + i % row_elements * 2;
      reinterpret_cast<uint16_t*>(key)[i] = *reinterpret_cast<const uint16_t*>(from);
      reinterpret_cast<uint16_t*>(value)[i] = *reinterpret_cast<const uint16_t*>(from + to_values);
    }
  }
};

/// The copy engine: one lane copies.
struct BulkCopy {
  static constexpr bool kOneLane = true;
  static constexpr int kArrivals = 1;  ///< on the barrier of a copy

  __device__ __forceinline__ static void copy(uint8_t* shared, const uint8_t* global, int bytes,
                                              Barrier* barrier, int lane) {
    if (lane != 0) return;
    expect(bytes, barrier);
    start(shared, global, bytes, barrier);
  }

  /// All lanes: one copies all rows of keys or of values that lie side by side, or each lane one.
  /// kMatrices: 2 both, 1 only the first.
  template <int kMatrices>
  __device__ __forceinline__ static void copy_rows(const RowsCopy& from, uint8_t* keys,
                                                   uint8_t* values, Barrier* barrier, int lane) {
    if (lane == 0) expect(kMatrices * from.rows * from.row_bytes, barrier);
    __syncwarp();
    const bool together = from.stride == from.row_bytes;
    const int row = lane / kMatrices;
    if (row >= (together ? 1 : from.rows)) return;
    const bool is_value = lane % kMatrices != 0;
    start((is_value ? values : keys) + row * from.row_bytes,
          from.keys + (is_value ? from.to_values : 0) + row * from.stride,
          together ? from.rows * from.row_bytes : from.row_bytes, barrier);
  }

  /// In place of a copy: one lane.
  __device__ __forceinline__ static void arrive_alone(Barrier* barrier) { barrier_arrive(barrier); }

 private:
  __device__ __forceinline__ static void expect(int bytes, Barrier* barrier) {
    asm volatile(
        "{\n"
        ".reg .b64 state;\n"
        "mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
  }

  __device__ __forceinline__ static void start(uint8_t* shared, const uint8_t* global, int bytes,
                                               Barrier* barrier) {
    // Read once: what else is in L2, the code of this kernel before all, is worth more. The number
    // is what createpolicy.fractional.L2::evict_first makes for all lines; as a constant it takes
    // no register.
    constexpr uint64_t kEvictFirst = 0x12f0000000000000;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(kEvictFirst)
        : "memory");
  }
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
    arrive(barrier, lane);
  }

  template <int kMatrices>
  __device__ __forceinline__ static void copy_rows(const RowsCopy& from, uint8_t* keys,
                                                   uint8_t* values, Barrier* barrier, int lane) {
    for (int i = 16 * lane; i < from.rows * from.row_bytes; i += 16 * kWarpLanes) {
      const uint8_t* const key = from.keys + i / from.row_bytes * from.stride + i % from.row_bytes;
      copy_async_16(keys + i, key);
      if (kMatrices == 2) copy_async_16(values + i, key + from.to_values);
    }
    arrive(barrier, lane);
  }

  __device__ __forceinline__ static void arrive_alone(Barrier* barrier) {
    for (int i = 0; i < kArrivals; ++i) barrier_arrive(barrier);
  }

 private:
  __device__ __forceinline__ static void arrive(Barrier* barrier, int lane) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
                 : "memory");
    if (lane == 0) barrier_arrive(barrier);
  }
};

#if __CUDA_ARCH__ >= 900
using RingCopy = BulkCopy;
#else
using RingCopy = LaneCopy;
#endif

/// A copy for addresses that are not multiples of 16; done when it returns.
__device__ __forceinline__ void copy_bytes(uint8_t* shared, const uint8_t* global, int bytes,
                                           int lane) {
  for (int i = lane; i < bytes; i += kWarpLanes) shared[i] = global[i];
}

}  // namespace kvarn::device
