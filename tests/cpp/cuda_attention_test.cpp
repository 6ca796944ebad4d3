// The reading side on CUDA against that on the CPU, over the same bytes; without torch, and small
// enough for compute-sanitizer.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "kvarn/ops.h"

namespace {

constexpr int kSkipped = 77;

using kvarn::DType;

/// Rounds to nearest even.
uint16_t to_bits(float x, DType dtype) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if (dtype == DType::kBFloat16) {
    return static_cast<uint16_t>((u + 0x7FFF + (u >> 16 & 1)) >> 16);
  }
  const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000);
  if (std::isnan(x)) return sign | 0x7E00;
  const float magnitude = std::fabs(x);
  if (magnitude < 6.1035156e-5f) {
    return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 16777216.f));
  }
  u = (u & 0x7FFFFFFF) + 0xFFF + (u >> 13 & 1);
  return sign | static_cast<uint16_t>(std::min<uint32_t>((u - (112u << 23)) >> 13, 0x7C00));
}

float from_bits(uint16_t bits, DType dtype) {
  if (dtype == DType::kBFloat16) {
    const uint32_t u = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
  }
  const int exponent = bits >> 10 & 31;
  const float fraction = static_cast<float>(bits & 1023);
  float x = exponent == 0    ? std::ldexp(fraction, -24)
            : exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                             : std::ldexp(1024.f + fraction, exponent - 25);
  return bits & 0x8000 ? -x : x;
}

class DeviceBuffer {
 public:
  template <class T>
  explicit DeviceBuffer(const std::vector<T>& host, size_t offset = 0)
      : bytes_(host.size() * sizeof(T)), offset_(offset) {
    if (cudaMalloc(&data_, bytes_ + offset + 1) != cudaSuccess) std::abort();
    cudaMemcpy(data(), host.data(), bytes_, cudaMemcpyHostToDevice);
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;

  char* data() const { return static_cast<char*>(data_) + offset_; }
  template <class T>
  std::vector<T> read() const {
    std::vector<T> host(bytes_ / sizeof(T));
    if (cudaMemcpy(host.data(), data(), bytes_, cudaMemcpyDeviceToHost) != cudaSuccess) {
      std::fprintf(stderr, "%s\n", cudaGetErrorString(cudaGetLastError()));
    }
    return host;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
  size_t offset_;
};

struct Case {
  kvarn::Format format{4, 2, 128, 128};
  std::vector<int> lengths = {300};
  std::vector<int> queries;  // empty: one each, without cu_query_lens
  int kv_heads = 2;
  int heads_per_kv = 8;
  DType dtype = DType::kFloat16;
  DType staging_dtype = DType::kFloat16;
  int staged = 2;  // 0: no staging pool; n: one block in n is staged, the last of a sequence always
  bool causal = true;
  float soft_cap = 0;
  int window = -1;
  bool sinks = false;
  int split_tokens = 0;
  bool index64 = false;
  int padding = 0;  // bytes behind each record, elements behind each row of q and out
};

/// A pool of blocks in both forms.
struct Pool {
  kvarn::Format format;
  int heads;
  int blocks;
  int64_t record_stride;
  std::vector<uint8_t> cache;
  std::vector<uint16_t> staging;
  DType staging_dtype;
};

Pool make_pool(const Case& c, int blocks) {
  Pool pool{c.format, c.kv_heads, blocks,         kvarn::record_layout(c.format).bytes + c.padding,
            {},       {},         c.staging_dtype};
  const int64_t tile = int64_t{c.format.group} * c.format.head_dim;
  std::mt19937 random(1234);
  std::normal_distribution<float> normal;
  pool.cache.assign(static_cast<size_t>(blocks * c.kv_heads * pool.record_stride), 0xFF);
  pool.staging.resize(static_cast<size_t>(blocks * 2 * c.kv_heads * tile));
  std::vector<float> kv(pool.staging.size());
  for (float& x : kv) x = normal(random);
  for (size_t i = 0; i < kv.size(); ++i) {
    pool.staging[i] = to_bits(kv[i], c.staging_dtype);
  }
  kvarn::QuantizeParams q;
  q.format = c.format;
  q.dtype = DType::kFloat32;
  q.key = kv.data();
  q.value = kv.data() + c.kv_heads * tile;
  q.tiles = blocks;
  q.heads = c.kv_heads;
  const int64_t stride[] = {2 * c.kv_heads * tile, c.format.head_dim, tile};
  std::copy_n(stride, 3, q.key_stride);
  std::copy_n(stride, 3, q.value_stride);
  q.records = pool.cache.data();
  q.record_stride[0] = c.kv_heads * pool.record_stride;
  q.record_stride[1] = pool.record_stride;
  q.iterations = 0;
  if (!kvarn::cpu::quantize_tiles(q).ok()) std::abort();
  return pool;
}

std::string name_of(const Case& c) {
  std::string s = "k" + std::to_string(c.format.key_bits) + "v" +
                  std::to_string(c.format.value_bits) + "_g" + std::to_string(c.format.group) +
                  " D " + std::to_string(c.format.head_dim) + " ratio " +
                  std::to_string(c.heads_per_kv) + " lengths";
  for (size_t i = 0; i < std::min<size_t>(c.lengths.size(), 6); ++i) {
    s += " " + std::to_string(c.lengths[i]);
    if (!c.queries.empty()) s += "/" + std::to_string(c.queries[i]);
  }
  s += " dtype " + std::to_string(static_cast<int>(c.dtype)) +
       std::to_string(static_cast<int>(c.staging_dtype)) + " staged " + std::to_string(c.staged) +
       " causal " + std::to_string(c.causal) + " cap " + std::to_string(c.soft_cap) + " window " +
       std::to_string(c.window) + " sinks " + std::to_string(c.sinks) + " split " +
       std::to_string(c.split_tokens) + " padding " + std::to_string(c.padding);
  return s;
}

template <class T>
std::vector<uint8_t> bytes_of(const std::vector<T>& v) {
  const auto* const first = reinterpret_cast<const uint8_t*>(v.data());
  return std::vector<uint8_t>(first, first + v.size() * sizeof(T));
}

std::vector<uint8_t> index_bytes(const std::vector<int64_t>& v, bool index64) {
  return index64 ? bytes_of(v) : bytes_of(std::vector<int32_t>(v.begin(), v.end()));
}

int check(const Case& c, const Pool& pool) {
  const int seqs = static_cast<int>(c.lengths.size());
  const int q_heads = c.kv_heads * c.heads_per_kv;
  const int dim = c.format.head_dim;
  std::vector<int64_t> lengths(c.lengths.begin(), c.lengths.end());
  std::vector<int64_t> cu(1, 0);
  for (int i = 0; i < seqs; ++i) {
    cu.push_back(cu.back() + (c.queries.empty() ? 1 : c.queries[static_cast<size_t>(i)]));
  }
  const int64_t tokens = cu.back();
  const int width = *std::max_element(c.lengths.begin(), c.lengths.end()) / c.format.group + 2;
  std::mt19937 random(99);
  // Table entries behind the end are out of range.
  std::vector<int64_t> table(static_cast<size_t>(seqs * width), int64_t{1} << 28);
  std::vector<int64_t> slots(static_cast<size_t>(pool.blocks), -1);
  for (int b = 0; b < pool.blocks; ++b) {
    if (c.staged > 0 && b % c.staged == 0) slots[static_cast<size_t>(b)] = pool.blocks - 1 - b;
  }
  for (int s = 0; s < seqs; ++s) {
    for (int t = 0; t * c.format.group < c.lengths[static_cast<size_t>(s)]; ++t) {
      int block = static_cast<int>(random() % static_cast<unsigned>(pool.blocks));
      table[static_cast<size_t>(s * width + t)] = block;
    }
  }
  const int64_t row = dim + c.padding;
  std::normal_distribution<float> normal;
  std::vector<uint16_t> q(static_cast<size_t>(tokens * q_heads * row));
  std::vector<float> q32(q.size());
  for (size_t i = 0; i < q.size(); ++i) {
    q[i] = to_bits(2 * normal(random), c.dtype);
    q32[i] = from_bits(q[i], c.dtype);
  }
  std::vector<float> sinks(static_cast<size_t>(q_heads));
  for (float& x : sinks) x = 3 * normal(random);

  kvarn::DecodeParams p;
  p.kv.format = c.format;
  p.kv.cache.blocks = pool.blocks;
  p.kv.cache.stride[0] = c.kv_heads * pool.record_stride;
  p.kv.cache.stride[1] = pool.record_stride;
  p.kv.table_width = width;
  p.kv.seqs = seqs;
  p.kv.kv_heads = c.kv_heads;
  p.kv.staging.dtype = c.staging_dtype;
  p.kv.staging.slots = c.staged > 0 ? pool.blocks : 0;
  const int64_t tile = int64_t{c.format.group} * dim;
  const int64_t stride[] = {2 * c.kv_heads * tile, c.kv_heads * tile, tile, dim};
  std::copy_n(stride, 4, p.kv.staging.stride);
  p.tokens = tokens;
  p.q_heads = q_heads;
  p.q_stride[0] = p.out_stride[0] = q_heads * row;
  p.q_stride[1] = p.out_stride[1] = row;
  p.lse_stride[0] = q_heads;
  p.lse_stride[1] = 1;
  p.causal = c.causal;
  p.sm_scale = 1.f / std::sqrt(static_cast<float>(dim));
  p.logits_soft_cap = c.soft_cap;
  p.window_left = c.window;
  p.max_seq_len = int64_t{width} * c.format.group;
  p.split_tokens = c.split_tokens;

  kvarn::DecodeParams r = p;
  std::vector<float> want(q.size());
  std::vector<float> want_lse(static_cast<size_t>(tokens * q_heads));
  r.kv.cache.data = const_cast<uint8_t*>(pool.cache.data());
  if (c.staged > 0) {
    r.kv.staging.data = const_cast<uint16_t*>(pool.staging.data());
    r.kv.block_slot = {slots.data(), 1, true};
  }
  r.kv.block_table = {table.data(), width, 1, true};
  r.kv.seq_lens = {lengths.data(), 1, true};
  if (!c.queries.empty()) r.cu_query_lens = {cu.data(), 1, true};
  r.q = q32.data();
  r.dtype = DType::kFloat32;
  r.out = want.data();
  r.lse = want_lse.data();
  if (c.sinks) r.sinks = sinks.data();
  r.split_tokens = 0;
  std::vector<float> scratch(
      static_cast<size_t>(kvarn::cpu::decode_workspace_bytes(
                              {c.format, seqs, tokens, q_heads, c.kv_heads, p.max_seq_len, 0},
                              kvarn::cpu::default_executor().num_threads) /
                              4 +
                          4));
  r.workspace = scratch.data();
  r.workspace_bytes = static_cast<int64_t>(scratch.size() * 4);
  const kvarn::Status cpu_status = kvarn::cpu::decode_attention(r);
  if (!cpu_status.ok()) std::fprintf(stderr, "%s\n", cpu_status.message().c_str());
  CHECK(cpu_status.ok());

  const size_t offset = c.padding % 16 == 0 ? 0 : 2;
  const DeviceBuffer d_cache(pool.cache, offset), d_staging(pool.staging, offset);
  const DeviceBuffer d_slots(index_bytes(slots, c.index64)), d_table(index_bytes(table, c.index64)),
      d_lengths(index_bytes(lengths, c.index64)), d_cu(index_bytes(cu, c.index64)), d_q(q, offset),
      d_sinks(sinks);
  const std::vector<uint16_t> poison(q.size(), 0x7FFF);
  const DeviceBuffer d_out(poison, offset), d_lse(std::vector<float>(want_lse.size(), NAN));
  const int64_t bytes = kvarn::cuda::decode_workspace_bytes(
      {c.format, seqs, tokens, q_heads, c.kv_heads, p.max_seq_len, c.split_tokens});
  const DeviceBuffer d_workspace(std::vector<uint8_t>(static_cast<size_t>(bytes), 0xFF));
  p.kv.cache.data = reinterpret_cast<uint8_t*>(d_cache.data());
  if (c.staged > 0) {
    p.kv.staging.data = d_staging.data();
    p.kv.block_slot = {d_slots.data(), 1, c.index64};
  }
  p.kv.block_table = {d_table.data(), width, 1, c.index64};
  p.kv.seq_lens = {d_lengths.data(), 1, c.index64};
  if (!c.queries.empty()) p.cu_query_lens = {d_cu.data(), 1, c.index64};
  p.q = d_q.data();
  p.dtype = c.dtype;
  p.out = d_out.data();
  p.lse = reinterpret_cast<float*>(d_lse.data());
  if (c.sinks) p.sinks = d_sinks.data();
  p.workspace = d_workspace.data();
  p.workspace_bytes = bytes;
  for (int run = 0; run < 2; ++run) {  // the second finds what the first left in the workspace
    const kvarn::Status status = kvarn::cuda::decode_attention(p);
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
    CHECK(status.ok());
  }
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", name_of(c).c_str(), cudaGetErrorString(error));
    return 1;
  }
  const std::vector<uint16_t> got = d_out.read<uint16_t>();
  const std::vector<float> got_lse = d_lse.read<float>();
  double off = 0, norm = 0, worst_lse = 0;
  for (int64_t i = 0; i < tokens * q_heads; ++i) {
    for (int64_t k = i * row; k < i * row + dim; ++k) {
      const double x = from_bits(got[static_cast<size_t>(k)], c.dtype);
      const double y = want[static_cast<size_t>(k)];
      off += (x - y) * (x - y);
      norm += y * y;
    }
    const float a = got_lse[static_cast<size_t>(i)], b = want_lse[static_cast<size_t>(i)];
    const double d = a == b ? 0 : std::fabs(double(a) - b);
    if (!(d <= worst_lse)) worst_lse = d;
  }
  const double relative = norm > 0 ? std::sqrt(off / norm) : std::sqrt(off);
  const double limit =
      c.dtype == DType::kBFloat16 || c.staging_dtype == DType::kBFloat16 ? 4e-3 : 8e-4;
  const bool good = relative < limit && worst_lse < 4e-3;
  if (!good || std::getenv("KVARN_TEST_PRINT") != nullptr) {
    std::fprintf(stderr, "%s %s: error %.2e, lse %.2e\n", good ? "ok" : "BAD", name_of(c).c_str(),
                 relative, worst_lse);
  }
  CHECK(good);
  return 0;
}

int check(const Case& c) { return check(c, make_pool(c, 12)); }

int check_gather(const Case& c, bool rotated) {
  const Pool pool = make_pool(c, 7);
  const int seqs = static_cast<int>(c.lengths.size());
  const int dim = c.format.head_dim;
  const int64_t row = dim + c.padding;
  std::vector<int64_t> lengths(c.lengths.begin(), c.lengths.end()), starts(1, 0), table;
  const int width = *std::max_element(c.lengths.begin(), c.lengths.end()) / c.format.group + 1;
  std::vector<int64_t> slots(static_cast<size_t>(pool.blocks), -1);
  for (int b = 0; b < pool.blocks; ++b) {
    if (c.staged > 0 && b % c.staged == 0) slots[static_cast<size_t>(b)] = pool.blocks - 1 - b;
  }
  for (int s = 0; s < seqs; ++s) {
    starts.push_back(starts.back() + c.lengths[static_cast<size_t>(s)] + s % 2);  // a row between
    for (int t = 0; t < width; ++t) {
      const bool used = t * c.format.group < c.lengths[static_cast<size_t>(s)];
      table.push_back(used ? (3 * t + s) % pool.blocks : int64_t{1} << 28);
    }
  }
  kvarn::GatherParams p;
  p.kv.format = c.format;
  p.kv.cache.blocks = pool.blocks;
  p.kv.cache.stride[0] = c.kv_heads * pool.record_stride;
  p.kv.cache.stride[1] = pool.record_stride;
  p.kv.table_width = width;
  p.kv.seqs = seqs;
  p.kv.kv_heads = c.kv_heads;
  p.kv.staging.dtype = c.staging_dtype;
  p.kv.staging.slots = c.staged > 0 ? pool.blocks : 0;
  const int64_t tile = int64_t{c.format.group} * dim;
  const int64_t stride[] = {2 * c.kv_heads * tile, c.kv_heads * tile, tile, dim};
  std::copy_n(stride, 4, p.kv.staging.stride);
  p.total_tokens = starts.back();
  p.dtype = c.dtype;
  p.rotated = rotated;
  p.key_stride[0] = p.value_stride[0] = c.kv_heads * row;
  p.key_stride[1] = p.value_stride[1] = row;
  const std::vector<uint16_t> poison(static_cast<size_t>(starts.back() * c.kv_heads * row), 0x1234);
  std::vector<uint16_t> want[2] = {poison, poison};

  kvarn::GatherParams r = p;
  r.kv.cache.data = const_cast<uint8_t*>(pool.cache.data());
  if (c.staged > 0) {
    r.kv.staging.data = const_cast<uint16_t*>(pool.staging.data());
    r.kv.block_slot = {slots.data(), 1, true};
  }
  r.kv.block_table = {table.data(), width, 1, true};
  r.kv.seq_lens = {lengths.data(), 1, true};
  r.cu_seq_lens = {starts.data(), 1, true};
  r.key = want[0].data();
  r.value = want[1].data();
  CHECK(kvarn::cpu::gather_kv(r).ok());

  const size_t offset = c.padding % 16 == 0 ? 0 : 2;
  const DeviceBuffer d_cache(pool.cache, offset), d_staging(pool.staging, offset);
  const DeviceBuffer d_slots(index_bytes(slots, c.index64)), d_table(index_bytes(table, c.index64)),
      d_lengths(index_bytes(lengths, c.index64)), d_starts(index_bytes(starts, c.index64));
  const DeviceBuffer d_key(poison, offset), d_value(poison, offset);
  p.kv.cache.data = reinterpret_cast<uint8_t*>(d_cache.data());
  if (c.staged > 0) {
    p.kv.staging.data = d_staging.data();
    p.kv.block_slot = {d_slots.data(), 1, c.index64};
  }
  p.kv.block_table = {d_table.data(), width, 1, c.index64};
  p.kv.seq_lens = {d_lengths.data(), 1, c.index64};
  p.cu_seq_lens = {d_starts.data(), 1, c.index64};
  p.key = d_key.data();
  p.value = d_value.data();
  const kvarn::Status status = kvarn::cuda::gather_kv(p);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  CHECK(status.ok());
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  const std::vector<uint16_t> got[2] = {d_key.read<uint16_t>(), d_value.read<uint16_t>()};
  for (int k = 0; k < 2; ++k) {
    double off = 0, norm = 0;
    for (size_t i = 0; i < poison.size(); ++i) {
      // What belongs to no token is left alone.
      if (want[k][i] == 0x1234) CHECK(got[k][i] == 0x1234);
      const double x = from_bits(got[k][i], c.dtype), y = from_bits(want[k][i], c.dtype);
      off += (x - y) * (x - y);
      norm += y * y;
    }
    const bool good = std::sqrt(off / norm) < (c.dtype == DType::kFloat16 ? 1e-4 : 5e-4);
    if (!good) {
      std::fprintf(stderr, "gather %s rotated %d %d: error %.2e\n", name_of(c).c_str(), rotated, k,
                   std::sqrt(off / norm));
    }
    CHECK(good);
  }
  return 0;
}

int check_merge(DType dtype, int dim, int padding) {
  constexpr int64_t kTokens = 5, kHeads = 3;
  const int64_t row = dim + padding;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> a(static_cast<size_t>(kTokens * kHeads * row)), b(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = to_bits(normal(random), dtype);
    b[i] = to_bits(normal(random), dtype);
  }
  std::vector<float> lse_a(kTokens * kHeads), lse_b(kTokens * kHeads);
  for (size_t i = 0; i < lse_a.size(); ++i) {
    lse_a[i] = i % 4 == 1 ? -INFINITY : 5 * normal(random);
    lse_b[i] = i % 3 == 1 ? -INFINITY : 5 * normal(random);
  }
  kvarn::MergeParams p;
  p.dtype = dtype;
  p.tokens = kTokens;
  p.heads = kHeads;
  p.head_dim = dim;
  for (auto* const stride : {p.out_a_stride, p.out_b_stride, p.out_stride}) {
    stride[0] = kHeads * row;
    stride[1] = row;
  }
  for (auto* const stride : {p.lse_a_stride, p.lse_b_stride, p.lse_stride}) {
    stride[0] = kHeads;
    stride[1] = 1;
  }
  std::vector<uint16_t> want(a.size(), 0x1234);
  std::vector<float> want_lse(lse_a.size());
  const DeviceBuffer d_a(a), d_b(b), d_lse_a(lse_a), d_lse_b(lse_b), d_out(want), d_lse(want_lse);
  p.out_a = a.data();
  p.out_b = b.data();
  p.lse_a = lse_a.data();
  p.lse_b = lse_b.data();
  p.out = want.data();
  p.lse = want_lse.data();
  CHECK(kvarn::cpu::merge_states(p).ok());
  p.out_a = d_a.data();
  p.out_b = d_b.data();
  p.lse_a = reinterpret_cast<const float*>(d_lse_a.data());
  p.lse_b = reinterpret_cast<const float*>(d_lse_b.data());
  p.out = d_out.data();
  p.lse = reinterpret_cast<float*>(d_lse.data());
  CHECK(kvarn::cuda::merge_states(p).ok());
  const std::vector<uint16_t> got = d_out.read<uint16_t>();
  const std::vector<float> got_lse = d_lse.read<float>();
  for (size_t i = 0; i < want.size(); ++i) {
    const float x = from_bits(got[i], dtype), y = from_bits(want[i], dtype);
    CHECK(std::fabs(x - y) <= 0.01f * std::fabs(y) + 1e-3f);
  }
  for (size_t i = 0; i < want_lse.size(); ++i) {
    CHECK(got_lse[i] == want_lse[i] || std::fabs(got_lse[i] - want_lse[i]) < 1e-5f);
  }
  return 0;
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no CUDA device\n");
    return kSkipped;
  }
  {
    Case c;
    c.staged = 0;
    c.lengths = {128};
    if (check(c)) return 1;
    c.lengths = {256, 128, 0, 1024};
    if (check(c)) return 1;
    c.staged = 1;
    c.lengths = {128};
    if (check(c)) return 1;
    c.lengths = {1, 64, 300, 0, 129};
    if (check(c)) return 1;
    c.staged = 2;
    c.lengths = {1, 64, 300, 0, 129, 5000, 77};
    if (check(c)) return 1;
  }
  for (const int bits : {2, 3, 4, 8}) {
    for (const int dim : {64, 128, 256}) {
      for (const int group : {64, 128}) {
        Case c;
        c.format = {bits, bits == 8 ? 3 : bits == 3 ? 8 : bits == 4 ? 2 : 4, group, dim};
        c.lengths = {300, 1000, 0, 17};
        for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
          c.dtype = c.staging_dtype = dtype;
          if (check(c)) return 1;
        }
      }
    }
  }
  {
    Case c;
    c.lengths = {300, 700, 0, 17, 1500, 3};
    const Pool pool = make_pool(c, 12);
    for (const int ratio : {1, 2, 3, 5, 6, 7, 12, 16, 71}) {
      c.heads_per_kv = ratio;
      if (check(c, pool)) return 1;
    }
    c.heads_per_kv = 3;
    // In the mean 18 rows a sequence, and 9.
    for (const std::vector<int>& queries :
         {std::vector<int>{1, 5, 2, 16, 0, 7}, {1, 7, 2, 0, 1, 4}}) {
      c.queries = queries;
      for (const bool causal : {true, false}) {
        for (const float cap : {0.f, 5.f}) {
          for (const int window : {-1, 0, 100}) {
            for (const bool sinks : {false, true}) {
              for (const int split : {0, 256}) {
                c.causal = causal;
                c.soft_cap = cap;
                c.window = window;
                c.sinks = sinks;
                c.split_tokens = split;
                if (check(c, pool)) return 1;
              }
            }
          }
        }
      }
    }
    c = Case();
    c.lengths = {300, 700, 0, 17, 1500, 3};
    for (const int n : {2, 4, 8, 16, 40}) {
      c.queries = {n, n, n, n, n, n};
      if (check(c, pool)) return 1;
    }
  }
  for (const int padding : {16, 32, 1}) {
    Case c;
    c.padding = padding;
    c.index64 = true;
    c.lengths = {300, 700, 0, 17};
    c.dtype = DType::kBFloat16;
    if (check(c)) return 1;
    c.dtype = DType::kFloat16;
    c.staging_dtype = DType::kBFloat16;
    if (check(c)) return 1;
  }
  {
    Case c;  // many sequences
    c.heads_per_kv = 1;
    c.kv_heads = 1;
    c.lengths.assign(700, 0);
    for (size_t i = 0; i < 700; ++i) c.lengths[i] = static_cast<int>(i * 37 % 300);
    if (check(c)) return 1;
    c.format.value_bits = 4;
    c.dtype = c.staging_dtype = DType::kBFloat16;
    if (check(c)) return 1;
    c = Case();
    c.heads_per_kv = 1;
    c.kv_heads = 1;
    // Many tiles a warp, most of them records.
    c.staged = 7;
    c.lengths.assign(420, 0);
    for (size_t i = 0; i < 420; ++i) c.lengths[i] = static_cast<int>(i * 631 % 4200);
    {
      const Pool pool = make_pool(c, 12);
      for (const int window : {-1, 1500}) {
        c.window = window;
        for (const int heads : {1, 12, 32, 64}) {
          c.heads_per_kv = heads;
          if (check(c, pool)) return 1;
        }
        c.queries.assign(420, 7);  // causal ends in the last tiles of runs
        for (const int heads : {2, 5}) {
          c.heads_per_kv = heads;
          if (check(c, pool)) return 1;
        }
        c.queries.clear();
      }
      c.window = -1;
      c.heads_per_kv = 1;
    }
    c.format.head_dim = 256;
    c.lengths.assign(14, 50000);
    if (check(c, make_pool(c, 12))) return 1;
    c = Case();
    c.heads_per_kv = 1;
    c.kv_heads = 1;
    c.lengths.assign(3, 60000);
    if (check(c)) return 1;
    c.split_tokens = 1024;
    if (check(c)) return 1;
    c = Case();
    c.kv_heads = 3;
    c.lengths = {5000, 300, 0, 1024, 1025, 8000};
    for (const int staged : {0, 1, 5}) {
      c.staged = staged;
      if (staged == 0) c.lengths = {1024, 256, 0, 128, 2304};
      for (const int split : {128, 384, 1024}) {
        c.split_tokens = split;
        c.dtype = c.staging_dtype = split == 384 ? DType::kBFloat16 : DType::kFloat16;
        if (check(c)) return 1;
      }
    }
  }
  for (const int bits : {2, 3, 4, 8}) {
    for (const int dim : {64, 128, 256}) {
      Case c;
      c.format = {bits,
                  bits == 8   ? 3
                  : bits == 3 ? 8
                  : bits == 4 ? 2
                              : 4,
                  bits < 4 ? 64 : 128, dim};
      c.lengths = {130, 0, 300, 1};
      for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        c.dtype = dtype;
        c.index64 = dtype == DType::kBFloat16;
        c.padding = c.index64 ? 1 : 16;
        for (const bool rotated : {false, true}) {
          if (check_gather(c, rotated)) return 1;
        }
      }
    }
  }
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int dim : {64, 100, 128}) {
      for (const int padding : {0, 1, 8}) {
        if (check_merge(dtype, dim, padding)) return 1;
      }
    }
  }
  return kvarn::test::failures();
}
