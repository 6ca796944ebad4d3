// torch.ops.kvarn.* for CPU tensors, on torch's own threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>

#include "kvarn/ops.h"
#include "torch/binding.h"

namespace kvarn::binding {
namespace {

/// Hands out indices in pieces, since tasks differ in length (sequences, for one).
void run_on_torch_threads(void* /*impl*/, int64_t n, void (*fn)(void*, int64_t), void* ctx) {
  constexpr int64_t kPiecesPerThread = 8;
  const int64_t workers = std::min<int64_t>(torch::stable::get_num_threads(), n);
  const int64_t piece = std::max<int64_t>(1, n / (workers * kPiecesPerThread));
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t /*begin*/, int64_t /*end*/) {
    for (int64_t begin = next.fetch_add(piece); begin < n; begin = next.fetch_add(piece)) {
      for (int64_t i = begin; i < std::min(begin + piece, n); ++i) fn(ctx, i);
    }
  };
  torch::stable::parallel_for(0, workers, 1, work);
}

class Cpu {
 public:
  static constexpr bool kFloat32 = true;

  explicit Cpu(const torch::stable::Device& /*device*/) {}

  Status hadamard_transform(const HadamardParams& p) {
    return cpu::hadamard_transform(p, executor_);
  }
  Status variance_normalize(const NormalizeParams& p) {
    return cpu::variance_normalize(p, executor_);
  }
  Status pack_bits(const PackParams& p) { return cpu::pack_bits(p, executor_); }
  Status unpack_bits(const PackParams& p) { return cpu::unpack_bits(p, executor_); }
  Status quantize_tiles(const QuantizeParams& p) { return cpu::quantize_tiles(p, executor_); }
  Status dequantize_tiles(const DequantizeParams& p) { return cpu::dequantize_tiles(p, executor_); }
  Status unpack_records(const CanonicalParams& p) { return cpu::unpack_records(p, executor_); }
  Status pack_records(const CanonicalParams& p) { return cpu::pack_records(p, executor_); }
  Status append_kv(const AppendParams& p) { return cpu::append_kv(p, executor_); }
  Status seal_blocks(const SealParams& p) { return cpu::seal_blocks(p, executor_); }
  Status decode_attention(const DecodeParams& p) { return cpu::decode_attention(p, executor_); }
  int64_t decode_workspace_bytes(const DecodeWorkspaceParams& p) {
    return cpu::decode_workspace_bytes(p, executor_.num_threads);
  }
  Status gather_kv(const GatherParams& p) { return cpu::gather_kv(p, executor_); }
  Status merge_states(const MergeParams& p) { return cpu::merge_states(p, executor_); }

 private:
  Executor executor_ = {static_cast<int>(torch::stable::get_num_threads()), nullptr,
                        run_on_torch_threads};
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvarn, CPU, m) {
  m.impl("hadamard_transform", TORCH_BOX(&hadamard_transform<Cpu>));
  m.impl("hadamard_transform.out", TORCH_BOX(&hadamard_transform_out<Cpu>));
  m.impl("variance_normalize", TORCH_BOX(&variance_normalize<Cpu>));
  m.impl("pack_bits", TORCH_BOX(&pack_bits<Cpu>));
  m.impl("unpack_bits", TORCH_BOX(&unpack_bits<Cpu>));
  m.impl("quantize_tiles", TORCH_BOX(&quantize_tiles<Cpu>));
  m.impl("dequantize_tiles", TORCH_BOX(&dequantize_tiles<Cpu>));
  m.impl("unpack_records", TORCH_BOX(&unpack_records<Cpu>));
  m.impl("pack_records", TORCH_BOX(&pack_records<Cpu>));
  m.impl("append_kv", TORCH_BOX(&append_kv<Cpu>));
  m.impl("seal_blocks", TORCH_BOX(&seal_blocks<Cpu>));
  m.impl("decode_attention", TORCH_BOX(&decode_attention<Cpu>));
  m.impl("decode_workspace_bytes", TORCH_BOX(&decode_workspace_bytes<Cpu>));
  m.impl("gather_kv", TORCH_BOX(&gather_kv<Cpu>));
  m.impl("merge_states", TORCH_BOX(&merge_states<Cpu>));
}

}  // namespace kvarn::binding
