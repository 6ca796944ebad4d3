// torch.ops.kvarn.* for CUDA tensors, on the current stream of their device.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <string_view>

#include "kvarn/ops.h"
#include "torch/binding.h"

namespace kvarn::binding {
namespace {

/// KVARN_CHECKED=1: metadata is looked through on the device, and the host waits for the verdict.
bool checked() {
  const char* const value = std::getenv("KVARN_CHECKED");
  return value != nullptr && std::string_view(value) == "1";
}

class Cuda {
 public:
  static constexpr bool kFloat32 = false;

  explicit Cuda(const torch::stable::Device& device) : guard_(device.index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index(), &stream_));
  }

  Status hadamard_transform(const HadamardParams& p) {
    return cuda::hadamard_transform(on_stream(p));
  }
  Status variance_normalize(const NormalizeParams& p) {
    return cuda::variance_normalize(on_stream(p));
  }
  Status pack_bits(const PackParams& p) { return cuda::pack_bits(on_stream(p)); }
  Status unpack_bits(const PackParams& p) { return cuda::unpack_bits(on_stream(p)); }
  Status quantize_tiles(const QuantizeParams& p) { return cuda::quantize_tiles(on_stream(p)); }
  Status dequantize_tiles(const DequantizeParams& p) {
    return cuda::dequantize_tiles(on_stream(p));
  }
  Status unpack_records(const CanonicalParams& p) { return cuda::unpack_records(on_stream(p)); }
  Status pack_records(const CanonicalParams& p) { return cuda::pack_records(on_stream(p)); }
  Status append_kv(const AppendParams& p) { return cuda::append_kv(checked_on_stream(p)); }
  Status seal_blocks(const SealParams& p) { return cuda::seal_blocks(checked_on_stream(p)); }
  Status decode_attention(const DecodeParams& p) {
    return cuda::decode_attention(checked_on_stream(p));
  }
  int64_t decode_workspace_bytes(const DecodeWorkspaceParams& p) {
    return cuda::decode_workspace_bytes(p);
  }
  Status gather_kv(const GatherParams& p) { return cuda::gather_kv(checked_on_stream(p)); }
  Status merge_states(const MergeParams& p) { return cuda::merge_states(on_stream(p)); }

 private:
  template <class Params>
  Params on_stream(Params p) const {
    p.stream = stream_;
    return p;
  }

  template <class Params>
  Params checked_on_stream(Params p) const {
    p.checked = checked();
    return on_stream(p);
  }

  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvarn, CUDA, m) {
  m.impl("hadamard_transform", TORCH_BOX(&hadamard_transform<Cuda>));
  m.impl("hadamard_transform.out", TORCH_BOX(&hadamard_transform_out<Cuda>));
  m.impl("variance_normalize", TORCH_BOX(&variance_normalize<Cuda>));
  m.impl("pack_bits", TORCH_BOX(&pack_bits<Cuda>));
  m.impl("unpack_bits", TORCH_BOX(&unpack_bits<Cuda>));
  m.impl("quantize_tiles", TORCH_BOX(&quantize_tiles<Cuda>));
  m.impl("dequantize_tiles", TORCH_BOX(&dequantize_tiles<Cuda>));
  m.impl("unpack_records", TORCH_BOX(&unpack_records<Cuda>));
  m.impl("pack_records", TORCH_BOX(&pack_records<Cuda>));
  m.impl("append_kv", TORCH_BOX(&append_kv<Cuda>));
  m.impl("seal_blocks", TORCH_BOX(&seal_blocks<Cuda>));
  m.impl("decode_attention", TORCH_BOX(&decode_attention<Cuda>));
  m.impl("decode_workspace_bytes", TORCH_BOX(&decode_workspace_bytes<Cuda>));
  m.impl("gather_kv", TORCH_BOX(&gather_kv<Cuda>));
  m.impl("merge_states", TORCH_BOX(&merge_states<Cuda>));
}

}  // namespace kvarn::binding
