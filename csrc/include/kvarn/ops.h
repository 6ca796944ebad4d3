// The operations, without torch: one params struct each, and functions that run it on the CPU
// (namespace kvarn::cpu) or launch it on a CUDA device (namespace kvarn::cuda).
//
// Common to all of them:
// - the caller owns every buffer; nothing is allocated that outlives a call;
// - strides count elements (bytes for uint8), the last dimension of a tensor is contiguous;
// - a function checks its whole argument, metadata included where it can see it, before it writes
//   anything, and says what is wrong in the Status;
// - the CUDA functions are asynchronous on `stream` (a cudaStream_t) and can be captured in a
// graph.
#pragma once

#include <cstdint>

#include "kvarn/layout.h"
#include "kvarn/status.h"

namespace kvarn {

enum class DType : int32_t { kFloat16, kBFloat16, kFloat32 };

constexpr KVARN_HD int64_t size_of(DType t) { return t == DType::kFloat32 ? 4 : 2; }

/// How codes and scales are chosen (docs/format.md; the record does not tell which was used).
enum class Fit : int32_t {
  kMinMax,    ///< the paper: Sinkhorn scales, min-max range
  kUnbiased,  ///< narrower range, least-squares refits, gain correction
};

/// One-dimensional int32 or int64 metadata in memory that the backend can read.
struct IndexArray {
  const void* data = nullptr;
  int64_t stride = 1;  ///< elements
  bool is_int64 = false;

  KVARN_HD int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i * stride]
                    : static_cast<const int32_t*>(data)[i * stride];
  }
  explicit constexpr operator bool() const { return data != nullptr; }
};

/// Two-dimensional metadata: the block table [rows, columns].
struct IndexMatrix {
  const void* data = nullptr;
  int64_t row_stride = 0;  ///< elements
  int64_t col_stride = 1;  ///< elements
  bool is_int64 = false;

  KVARN_HD int64_t at(int64_t row, int64_t col) const {
    const int64_t i = row * row_stride + col * col_stride;
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

/// out[..., :] = scale * (x[..., :] @ W), W the Walsh-Hadamard matrix in Sylvester order.
struct HadamardParams {
  const void* x = nullptr;  ///< [rows[0], rows[1], rows[2], dim]
  void* out = nullptr;      ///< same shape; may be x itself (in place), must not overlap otherwise
  DType dtype = DType::kFloat16;
  int64_t rows[3] = {1, 1, 1};
  int64_t x_stride[3] = {};
  int64_t out_stride[3] = {};
  int32_t dim = 0;  ///< power of two; 16..1024 on CUDA
  float scale = 1.f;
  void* stream = nullptr;
};

/// x = balanced * row_scale[r] * col_scale[c] with the log-space Sinkhorn scales of the best round.
struct NormalizeParams {
  const void* x = nullptr;  ///< [tiles, rows, cols]
  DType dtype = DType::kFloat32;
  int64_t x_stride[2] = {};    ///< tile, row
  float* balanced = nullptr;   ///< [tiles, rows, cols], contiguous
  float* row_scale = nullptr;  ///< [tiles, rows], contiguous
  float* col_scale = nullptr;  ///< [tiles, cols], contiguous
  int64_t tiles = 0;
  int32_t rows = 0;
  int32_t cols = 0;
  int32_t iterations = 8;
  void* stream = nullptr;
};

/// Element i of a row at bits i*bits .. i*bits+bits-1 of the packed row, low bits first.
/// The same struct serves pack (codes -> packed) and unpack (packed -> codes).
struct PackParams {
  uint8_t* codes = nullptr;  ///< [rows, count], one code a byte (read by pack: high bits must be 0)
  uint8_t* packed = nullptr;  ///< [rows, ceil(count*bits/8)]; pack zeroes the spare bits of the end
  int64_t rows = 0;
  int64_t count = 0;
  int64_t codes_stride = 0;
  int64_t packed_stride = 0;
  int32_t bits = 0;
  void* stream = nullptr;
};

/// Records of whole tiles, from raw keys and values.
struct QuantizeParams {
  Format format{};
  const void* key = nullptr;    ///< [tiles, G, heads, D]
  const void* value = nullptr;  ///< [tiles, G, heads, D]
  DType dtype = DType::kFloat16;
  int64_t tiles = 0;
  int32_t heads = 0;
  int64_t key_stride[3] = {};     ///< tile, token, head
  int64_t value_stride[3] = {};   ///< tile, token, head
  uint8_t* records = nullptr;     ///< [tiles, heads, record_bytes]
  int64_t record_stride[2] = {};  ///< tile, head
  Fit fit = Fit::kUnbiased;
  int32_t iterations = 4;  ///< Sinkhorn rounds; unbiased with 0: column scales in closed form
  bool rotated = false;    ///< key and value are in the rotated basis already
  void* stream = nullptr;
};

/// Keys and values of whole tiles, from records.
struct DequantizeParams {
  Format format{};
  const uint8_t* records = nullptr;  ///< [tiles, heads, record_bytes]
  int64_t record_stride[2] = {};     ///< tile, head
  void* key = nullptr;               ///< [tiles, G, heads, D]
  void* value = nullptr;             ///< [tiles, G, heads, D]
  DType dtype = DType::kFloat16;
  int64_t tiles = 0;
  int32_t heads = 0;
  int64_t key_stride[3] = {};    ///< tile, token, head
  int64_t value_stride[3] = {};  ///< tile, token, head
  bool rotated = false;          ///< leave the rotated basis as it is
  void* stream = nullptr;
};

/// Between records and canonical codes and scales (all canonical buffers contiguous, scales fp16).
/// The same struct serves unpack_records and pack_records.
struct CanonicalParams {
  Format format{};
  uint8_t* records = nullptr;               ///< [tiles, heads, record_bytes]
  int64_t record_stride[2] = {};            ///< tile, head
  uint8_t* key_codes = nullptr;             ///< [tiles, heads, D, G], one code a byte
  uint16_t* key_channel_scale = nullptr;    ///< [tiles, heads, D]
  uint16_t* key_zero_point = nullptr;       ///< [tiles, heads, D]
  uint16_t* key_token_scale = nullptr;      ///< [tiles, heads, G]
  uint8_t* value_codes = nullptr;           ///< [tiles, heads, G, D], one code a byte
  uint16_t* value_token_scale = nullptr;    ///< [tiles, heads, G]
  uint16_t* value_zero_point = nullptr;     ///< [tiles, heads, G]
  uint16_t* value_channel_scale = nullptr;  ///< [tiles, heads, D]
  int64_t tiles = 0;
  int32_t heads = 0;
  void* stream = nullptr;
};

/// The pool of 16-bit pages (fp32 too on the CPU): tokens as the model made them, not rotated.
struct Staging {
  void* data = nullptr;  ///< [slots, 2 (K, V), heads, G, D]
  DType dtype = DType::kFloat16;
  int64_t slots = 0;
  int64_t stride[4] = {};  ///< slot, K/V, head, token
};

/// The packed cache.
struct Cache {
  uint8_t* data = nullptr;  ///< [blocks, heads, record_bytes]
  int64_t blocks = 0;
  int64_t stride[2] = {};  ///< block, head
};

/// staging[block_slot[slot_mapping[i] / G], :, :, slot_mapping[i] % G] = key[i], value[i].
struct AppendParams {
  Format format{};
  const void* key = nullptr;    ///< [tokens, heads, D], dtype of the pool
  const void* value = nullptr;  ///< [tokens, heads, D]
  int64_t tokens = 0;
  int32_t heads = 0;
  int64_t key_stride[2] = {};    ///< token, head
  int64_t value_stride[2] = {};  ///< token, head
  IndexArray slot_mapping;       ///< [tokens]: block*G + row, negative = padding, skipped
  Staging staging;
  IndexArray block_slot;  ///< [blocks]: staging slot, -1 = the block is a record
  int64_t blocks = 0;
  bool checked = false;  ///< CUDA: report invalid slots, see KVARN_CHECKED; the CPU always does
  void* stream = nullptr;
};

/// cache[blocks[i]] = records of staging[slots[i]], for i < count.
struct SealParams {
  Format format{};
  Staging staging;
  IndexArray slots;   ///< [tiles]: negative = padding, skipped
  IndexArray blocks;  ///< [tiles]: negative = padding, skipped
  int64_t tiles = 0;
  const int32_t* count = nullptr;  ///< [1], on the device; null = all
  Cache cache;
  int32_t heads = 0;
  Fit fit = Fit::kUnbiased;
  int32_t iterations = 4;
  bool checked = false;
  void* stream = nullptr;
};

/// What decode_attention and gather_kv read: the blocks of `seqs` sequences.
struct PagedKV {
  Format format{};
  Cache cache;
  Staging staging;          ///< data null: every block is a record
  IndexArray block_slot;    ///< [blocks + virtual_blocks]; null with a null staging pool
  IndexMatrix block_table;  ///< [seqs, table_width]
  int64_t table_width = 0;
  IndexArray seq_lens;  ///< [seqs], tokens
  int64_t seqs = 0;
  int32_t kv_heads = 0;
  int32_t virtual_blocks = 0;  ///< ids after those of the cache: blocks that are only staged
};

/// Attention of the last tokens of each sequence over its whole block table.
struct DecodeParams {
  PagedKV kv;
  const void* q = nullptr;  ///< [tokens, q_heads, D]
  DType dtype = DType::kFloat16;
  int64_t tokens = 0;
  int32_t q_heads = 0;
  int64_t q_stride[2] = {};    ///< token, head
  void* out = nullptr;         ///< [tokens, q_heads, D], dtype of q
  int64_t out_stride[2] = {};  ///< token, head
  float* lse = nullptr;        ///< [tokens, q_heads], natural log; null: not wanted
  int64_t lse_stride[2] = {};  ///< token, head
  IndexArray cu_query_lens;    ///< [seqs + 1]; null: one query token a sequence
  bool causal = true;          ///< query i of n sees seq_len - n + i + 1 tokens
  float sm_scale = 1.f;
  float logits_soft_cap = 0.f;  ///< s -> cap * tanh(s / cap); 0: none
  int64_t window_left = -1;     ///< tokens before its own that a query sees; -1: all
  const void* sinks = nullptr;  ///< [q_heads] logits that only the denominator sees; null: none
  DType sinks_dtype = DType::kFloat32;
  int64_t sinks_stride = 1;
  int64_t max_seq_len = 0;   ///< upper bound of seq_lens
  int64_t split_tokens = 0;  ///< > 0: fixed split length (a multiple of G); 0: fastest division
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  bool checked = false;
  void* stream = nullptr;
};

/// What decode_workspace_bytes depends on.
struct DecodeWorkspaceParams {
  Format format{};
  int64_t seqs = 0;
  int64_t tokens = 0;
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int64_t max_seq_len = 0;
  int64_t split_tokens = 0;
};

/// Paged records and staged rows -> contiguous K and V, sequences one after the other.
struct GatherParams {
  PagedKV kv;
  IndexArray cu_seq_lens;    ///< [seqs + 1]: tokens of sequence b go to rows cu[b] .. cu[b] +
                             ///< seq_lens[b] - 1
  int64_t total_tokens = 0;  ///< rows of key and value
  void* key = nullptr;       ///< [total_tokens, kv_heads, D]
  void* value = nullptr;     ///< [total_tokens, kv_heads, D]
  DType dtype = DType::kFloat16;
  int64_t key_stride[2] = {};    ///< token, head
  int64_t value_stride[2] = {};  ///< token, head
  bool rotated = false;          ///< write the rotated basis (staged rows are rotated then)
  bool checked = false;
  void* stream = nullptr;
};

/// Two partial attentions of the same queries over disjoint keys -> one.
struct MergeParams {
  const void* out_a = nullptr;   ///< [tokens, heads, D]
  const void* out_b = nullptr;   ///< [tokens, heads, D]
  void* out = nullptr;           ///< [tokens, heads, D]; may be out_a or out_b
  const float* lse_a = nullptr;  ///< [tokens, heads], natural log, -inf = empty
  const float* lse_b = nullptr;  ///< [tokens, heads]
  float* lse = nullptr;          ///< [tokens, heads]; may be lse_a or lse_b
  DType dtype = DType::kFloat16;
  int64_t tokens = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;
  int64_t out_a_stride[2] = {};  ///< token, head
  int64_t out_b_stride[2] = {};
  int64_t out_stride[2] = {};
  int64_t lse_a_stride[2] = {};
  int64_t lse_b_stride[2] = {};
  int64_t lse_stride[2] = {};
  void* stream = nullptr;
};

/// Who runs the CPU kernels: `run` calls fn(ctx, i) for every i in [0, n), in parallel if it can,
/// and returns when all are done. An exception must not leave fn. Results do not depend on which
/// thread runs which i; the default division of attention depends on `num_threads`.
struct Executor {
  int num_threads = 1;
  void* impl = nullptr;
  void (*run)(void* impl, int64_t n, void (*fn)(void* ctx, int64_t i), void* ctx) = nullptr;
};

namespace cpu {

/// std::thread for every hardware thread; for callers that bring no pool of their own.
const Executor& default_executor();

/// The instruction set the kernels run on here: "avx512", "avx2" or "generic".
const char* isa();
/// Forces one of them, for tests; false when this machine does not have it.
bool set_isa(const char* name);

Status hadamard_transform(const HadamardParams&, const Executor& = default_executor());
Status variance_normalize(const NormalizeParams&, const Executor& = default_executor());
Status pack_bits(const PackParams&, const Executor& = default_executor());
Status unpack_bits(const PackParams&, const Executor& = default_executor());
Status quantize_tiles(const QuantizeParams&, const Executor& = default_executor());
Status dequantize_tiles(const DequantizeParams&, const Executor& = default_executor());
Status unpack_records(const CanonicalParams&, const Executor& = default_executor());
Status pack_records(const CanonicalParams&, const Executor& = default_executor());
Status append_kv(const AppendParams&, const Executor& = default_executor());
Status seal_blocks(const SealParams&, const Executor& = default_executor());
Status decode_attention(const DecodeParams&, const Executor& = default_executor());
int64_t decode_workspace_bytes(const DecodeWorkspaceParams&, int num_threads);
Status gather_kv(const GatherParams&, const Executor& = default_executor());
Status merge_states(const MergeParams&, const Executor& = default_executor());

}  // namespace cpu

namespace cuda {

Status hadamard_transform(const HadamardParams&);
Status variance_normalize(const NormalizeParams&);
Status pack_bits(const PackParams&);
Status unpack_bits(const PackParams&);
Status quantize_tiles(const QuantizeParams&);
Status dequantize_tiles(const DequantizeParams&);
Status unpack_records(const CanonicalParams&);
Status pack_records(const CanonicalParams&);
Status append_kv(const AppendParams&);
Status seal_blocks(const SealParams&);
Status decode_attention(const DecodeParams&);
/// On the current device.
int64_t decode_workspace_bytes(const DecodeWorkspaceParams&);
Status gather_kv(const GatherParams&);
Status merge_states(const MergeParams&);

}  // namespace cuda

}  // namespace kvarn
