// Attention on every instruction set that this machine has, and on any number of threads: the same
// numbers. With a fixed split length the threads do not change a bit.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "kvarn/ops.h"

namespace {

using kvarn::DType;
using kvarn::Format;

std::vector<float> random_floats(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(random);
  return x;
}

/// Claims to have `threads` threads and runs everything in order on one.
kvarn::Executor in_order(int threads) {
  return {threads, nullptr, [](void*, int64_t n, void (*fn)(void*, int64_t), void* ctx) {
            for (int64_t i = 0; i < n; ++i) fn(ctx, i);
          }};
}

/// Ragged sequences over records and two staged pages, with several query tokens.
class Problem {
 public:
  static constexpr int32_t kKvHeads = 2;
  static constexpr int32_t kQHeads = 10;
  static constexpr int64_t kBlocks = 6;

  explicit Problem(const Format& f) : format_(f) {
    const int64_t d = f.head_dim, g = f.group;
    const int64_t tile = g * kKvHeads * d;
    record_bytes_ = kvarn::record_layout(f).bytes;
    cache_.resize(static_cast<size_t>(kBlocks * kKvHeads * record_bytes_));
    const std::vector<float> key = random_floats(kBlocks * tile, 1);
    const std::vector<float> value = random_floats(kBlocks * tile, 2);
    kvarn::QuantizeParams p;
    p.format = f;
    p.key = key.data();
    p.value = value.data();
    p.dtype = DType::kFloat32;
    p.tiles = kBlocks;
    p.heads = kKvHeads;
    for (auto* stride : {p.key_stride, p.value_stride}) {
      stride[0] = tile;
      stride[1] = kKvHeads * d;
      stride[2] = d;
    }
    p.records = cache_.data();
    p.record_stride[0] = kKvHeads * record_bytes_;
    p.record_stride[1] = record_bytes_;
    quantized_ = kvarn::cpu::quantize_tiles(p, in_order(1)).ok();
    staging_ = random_floats(2 * 2 * tile, 3);
    lens_ = {3 * f.group + 7, 0, 5, 2 * f.group, f.group + 1};
    table_ = {1, 0, 3, 4, -7, -7, -7, -7, 5, -7, -7, -7, 2, 1, -7, -7, 0, 4, -7, -7};
    slots_ = {1, -1, -1, -1, 0, -1};
    cu_ = {0, 7, 8, 10, 10, 11};
    q_ = random_floats(cu_.back() * kQHeads * d, 4);
    sinks_ = random_floats(kQHeads, 5);
  }

  bool quantized() const { return quantized_; }

  /// Output and LSE; empty if an op failed or wrote beyond its workspace.
  std::vector<float> attend(int threads, int64_t split, bool options) const {
    const int64_t d = format_.head_dim, g = format_.group;
    kvarn::DecodeParams p;
    p.kv.format = format_;
    p.kv.cache = {
        const_cast<uint8_t*>(cache_.data()), kBlocks, {kKvHeads * record_bytes_, record_bytes_}};
    p.kv.staging = {const_cast<float*>(staging_.data()),
                    DType::kFloat32,
                    2,
                    {2 * kKvHeads * g * d, kKvHeads * g * d, g * d, d}};
    p.kv.block_slot = {slots_.data()};
    p.kv.table_width = 4;
    p.kv.block_table = {table_.data(), p.kv.table_width};
    p.kv.seq_lens = {lens_.data()};
    p.kv.seqs = static_cast<int64_t>(lens_.size());
    p.kv.kv_heads = kKvHeads;
    p.q = q_.data();
    p.dtype = DType::kFloat32;
    p.tokens = cu_.back();
    p.q_heads = kQHeads;
    p.q_stride[0] = p.out_stride[0] = kQHeads * d;
    p.q_stride[1] = p.out_stride[1] = d;
    p.lse_stride[0] = kQHeads;
    p.lse_stride[1] = 1;
    p.cu_query_lens = {cu_.data()};
    p.sm_scale = 0.1f;
    if (options) {
      p.logits_soft_cap = 2.f;
      p.window_left = g + 3;
      p.sinks = sinks_.data();
    }
    p.max_seq_len = 4 * g;
    p.split_tokens = split;

    const int64_t bytes = kvarn::cpu::decode_workspace_bytes(
        {format_, p.kv.seqs, p.tokens, p.q_heads, p.kv.kv_heads, p.max_seq_len, split}, threads);
    std::vector<float> workspace(static_cast<size_t>(bytes / 4 + 16), kGuard);
    p.workspace = workspace.data();
    p.workspace_bytes = bytes;
    const int64_t rows = p.tokens * p.q_heads;
    std::vector<float> result(static_cast<size_t>(rows * (d + 1)), NAN);
    p.out = result.data();
    p.lse = result.data() + rows * d;
    if (!kvarn::cpu::decode_attention(p, in_order(threads)).ok()) return {};
    for (size_t i = static_cast<size_t>(bytes / 4); i < workspace.size(); ++i) {
      if (workspace[i] != kGuard) return {};
    }
    return result;
  }

 private:
  static constexpr float kGuard = 7.f;

  Format format_;
  int64_t record_bytes_;
  bool quantized_;
  std::vector<uint8_t> cache_;
  std::vector<float> staging_, q_, sinks_;
  std::vector<int32_t> lens_, table_, slots_, cu_;
};

/// ||a - b|| / ||b||; infinities must be the same.
double difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.empty() || a.size() != b.size()) return INFINITY;
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    error += std::pow(static_cast<double>(a[i]) - b[i], 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  return error == 0 ? 0 : std::sqrt(error / size);
}

int check_format(const Format& f, const char* widest) {
  constexpr double kRounding = 1e-5;
  const Problem problem(f);
  CHECK(problem.quantized());
  for (bool options : {false, true}) {
    CHECK(kvarn::cpu::set_isa("generic"));
    const std::vector<float> expected = problem.attend(1, 0, options);
    CHECK(!expected.empty());
    for (const char* isa : {"generic", "avx2", "avx512"}) {
      if (!kvarn::cpu::set_isa(isa)) continue;
      for (int64_t split : {0, f.group, 3 * f.group}) {
        const std::vector<float> alone = problem.attend(1, split, options);
        CHECK(difference(alone, expected) < kRounding);
        for (int threads : {2, 3, 5, 8, 29, 200}) {
          const std::vector<float> shared = problem.attend(threads, split, options);
          CHECK(difference(shared, alone) < kRounding);
          if (split > 0) {
            CHECK(shared.size() == alone.size() &&
                  std::memcmp(shared.data(), alone.data(), 4 * alone.size()) == 0);
          }
        }
      }
    }
  }
  CHECK(kvarn::cpu::set_isa(widest));
  return 0;
}

}  // namespace

int main() {
  const char* const widest = kvarn::cpu::isa();
  for (int dim : {64, 128, 256, 512}) {
    for (int group : {64, 128}) {
      for (int bits : {2, 3, 4, 8}) {
        const int value_bits = bits == 8 ? 2 : bits == 4 ? 8 : bits + 1;
        if (check_format({bits, value_bits, group, dim}, widest)) return 1;
      }
    }
  }
  return kvarn::test::failures();
}
