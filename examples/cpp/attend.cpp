// Compresses the keys and values of one sequence into a paged cache, attends to it, and compares
// with attention over the uncompressed ones. CPU only; no torch.
#include <kvarn/layout.h>
#include <kvarn/ops.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr kvarn::Format kFormat{4, 4, 128, 128};  // key bits, value bits, group, head_dim
constexpr int64_t kDim = kFormat.head_dim;
constexpr int64_t kBlocks = 8;
constexpr int64_t kTokens = kBlocks * kFormat.group;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kQueryHeads = 8;
constexpr int64_t kRecordBytes = kvarn::record_layout(kFormat).bytes;

std::vector<float> random_normal(int64_t count, int seed) {
  std::mt19937 generator(static_cast<unsigned>(seed));
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(count));
  for (float& v : x) v = normal(generator);
  return x;
}

/// key, value [kBlocks, G, kKvHeads, D] -> cache [kBlocks, kKvHeads, record_bytes].
kvarn::Status compress(const std::vector<float>& key, const std::vector<float>& value,
                       std::vector<uint8_t>& cache) {
  kvarn::QuantizeParams p;
  p.format = kFormat;
  p.dtype = kvarn::DType::kFloat32;
  p.key = key.data();
  p.value = value.data();
  p.tiles = kBlocks;
  p.heads = kKvHeads;
  const int64_t stride[3] = {kFormat.group * kKvHeads * kDim, kKvHeads * kDim, kDim};
  std::copy(stride, stride + 3, p.key_stride);
  std::copy(stride, stride + 3, p.value_stride);
  p.records = cache.data();
  p.record_stride[0] = kKvHeads * kRecordBytes;
  p.record_stride[1] = kRecordBytes;
  return kvarn::cpu::quantize_tiles(p);
}

/// out [kQueryHeads, D] = attention of one query token q [kQueryHeads, D] to the whole cache.
kvarn::Status attend(const std::vector<float>& q, std::vector<uint8_t>& cache,
                     std::vector<float>& out) {
  std::vector<int32_t> block_table(kBlocks);  // [1, kBlocks]
  for (int32_t i = 0; i < kBlocks; ++i) block_table[static_cast<size_t>(i)] = i;
  const int32_t seq_len = kTokens;

  kvarn::DecodeParams p;
  p.kv.format = kFormat;
  p.kv.cache = {cache.data(), kBlocks, {kKvHeads * kRecordBytes, kRecordBytes}};
  p.kv.block_table = {block_table.data(), kBlocks, 1, false};
  p.kv.table_width = kBlocks;
  p.kv.seq_lens = {&seq_len, 1, false};
  p.kv.seqs = 1;
  p.kv.kv_heads = kKvHeads;
  p.q = q.data();
  p.out = out.data();
  p.dtype = kvarn::DType::kFloat32;
  p.tokens = 1;
  p.q_heads = kQueryHeads;
  p.q_stride[0] = p.out_stride[0] = kQueryHeads * kDim;
  p.q_stride[1] = p.out_stride[1] = kDim;
  p.sm_scale = 1.f / std::sqrt(static_cast<float>(kDim));
  p.max_seq_len = kTokens;

  const kvarn::DecodeWorkspaceParams sizes{kFormat,       p.kv.seqs,     p.tokens,      p.q_heads,
                                           p.kv.kv_heads, p.max_seq_len, p.split_tokens};
  std::vector<uint8_t> workspace(static_cast<size_t>(
      kvarn::cpu::decode_workspace_bytes(sizes, kvarn::cpu::default_executor().num_threads)));
  p.workspace = workspace.data();
  p.workspace_bytes = static_cast<int64_t>(workspace.size());
  return kvarn::cpu::decode_attention(p);
}

/// The same over the uncompressed keys and values.
std::vector<float> exact_attention(const std::vector<float>& q, const std::vector<float>& key,
                                   const std::vector<float>& value) {
  std::vector<float> out(q.size());
  for (int64_t head = 0; head < kQueryHeads; ++head) {
    const int64_t kv_offset = head / (kQueryHeads / kKvHeads) * kDim;
    std::vector<double> sum(kDim);
    double denominator = 0;
    for (int64_t token = 0; token < kTokens; ++token) {
      const int64_t row = token * kKvHeads * kDim + kv_offset;
      double score = 0;
      for (int64_t d = 0; d < kDim; ++d) score += q[head * kDim + d] * key[row + d];
      const double weight = std::exp(score / std::sqrt(static_cast<double>(kDim)));
      denominator += weight;
      for (int64_t d = 0; d < kDim; ++d) sum[d] += weight * value[row + d];
    }
    for (int64_t d = 0; d < kDim; ++d) {
      out[head * kDim + d] = static_cast<float>(sum[d] / denominator);
    }
  }
  return out;
}

}  // namespace

int main() {
  const std::vector<float> key = random_normal(kTokens * kKvHeads * kDim, 1);
  const std::vector<float> value = random_normal(kTokens * kKvHeads * kDim, 2);
  const std::vector<float> q = random_normal(kQueryHeads * kDim, 3);
  std::vector<uint8_t> cache(kBlocks * kKvHeads * kRecordBytes);
  std::vector<float> out(q.size());

  for (const kvarn::Status& status : {compress(key, value, cache), attend(q, cache, out)}) {
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.message().c_str());
      return 1;
    }
  }

  const std::vector<float> exact = exact_attention(q, key, value);
  double error = 0, norm = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    error += (out[i] - exact[i]) * (out[i] - exact[i]);
    norm += exact[i] * exact[i];
  }
  const double relative_error = std::sqrt(error / norm);
  std::printf("instruction set  %s\n", kvarn::cpu::isa());
  std::printf("16-bit cache     %lld bytes\n",
              static_cast<long long>(4 * kTokens * kKvHeads * kDim));
  std::printf("kvarn cache      %lld bytes\n", static_cast<long long>(cache.size()));
  std::printf("relative error   %.3f\n", relative_error);
  return relative_error < 0.2 ? 0 : 1;
}
