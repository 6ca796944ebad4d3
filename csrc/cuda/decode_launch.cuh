// One instance of the decode kernel a file: they compile slowly.
#pragma once

#include "cuda/decode_kernel.cuh"
#include "cuda/launch.h"

namespace kvarn::cuda {

template <class F, int kBlocks>
Status launch_decode(const DecodeParams& p, const DecodePlan& plan, int grid, int shared_bytes) {
  const auto kernel = decode_kernel<F, kBlocks>;
  const auto bytes = static_cast<size_t>(shared_bytes);
  if (Status status = allow_shared_memory(kernel, bytes); !status.ok()) return status;
  return launch_early(kernel, dim3(static_cast<unsigned>(grid)), dim3(F::kWarps * kWarpLanes),
                      bytes, p.stream, p, plan);
}

}  // namespace kvarn::cuda
