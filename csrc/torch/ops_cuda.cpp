// torch.ops.kvarn.* for CUDA tensors, on the current stream of their device.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "kvarn/ops.h"
#include "torch/binding.h"

namespace kvarn::binding {
namespace {

class Cuda {
 public:
  static constexpr bool kFloat32 = false;

  explicit Cuda(const torch::stable::Device& device) : guard_(device.index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index(), &stream_));
  }

  Status hadamard_transform(const HadamardParams& p) {
    return cuda::hadamard_transform(on_stream(p));
  }

 private:
  template <class Params>
  Params on_stream(Params p) const {
    p.stream = stream_;
    return p;
  }

  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvarn, CUDA, m) {
  m.impl("hadamard_transform", TORCH_BOX(&hadamard_transform<Cuda>));
  m.impl("hadamard_transform.out", TORCH_BOX(&hadamard_transform_out<Cuda>));
}

}  // namespace kvarn::binding
