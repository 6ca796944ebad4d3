// From a type at run time to one that a template takes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

#include "kvarn/ops.h"

namespace kvarn::cuda {

/// run(T()) with the element type T of `dtype`.
template <class Run>
Status with_element_type(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kFloat16:
      return run(__half());
    case DType::kBFloat16:
      return run(__nv_bfloat16());
    case DType::kFloat32:
      return run(float());
  }
  return Status::invalid("dtype must be fp16, bf16 or fp32, got " +
                         std::to_string(static_cast<int>(dtype)));
}

}  // namespace kvarn::cuda
