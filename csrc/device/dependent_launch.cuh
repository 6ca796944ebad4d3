// Programmatic dependent launch: a kernel is started while the one before it still runs, and waits
// for its results in its own code. That hides the time from one launch to the next.
//
// A kernel that was launched by cuda::launch_early waits before it reads or writes anything that
// another kernel may have written, its inputs included: whoever wrote them may have let it start.
#pragma once

namespace kvarn::device {

/// Lets the next kernel of the stream start, if it was launched so, as soon as all blocks of this
/// one have come here.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Waits until all kernels before this one are complete and what they wrote is visible.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace kvarn::device
