// The schemas of torch.ops.kvarn.*, for every backend.
//
// These are the ops under kvarn.ops, which documents shapes and meaning: each writes into tensors
// that its caller owns (the arguments marked `(a!)`) and returns nothing, so that
// functionalization, torch.compile and CUDA graphs know all of its effects. The one functional
// overload is there for autograd.
//
// A kvarn.Format crosses as four integers. `fit` is "minmax" or "unbiased". Where kvarn.ops has an
// argument of None: `iterations` and `split_tokens` are 0 by default, optional tensors stay so.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(kvarn, m) {
  m.def("hadamard_transform(Tensor x, float? scale=None) -> Tensor");
  m.def("hadamard_transform.out(Tensor x, float? scale, Tensor(a!) out) -> ()");

  m.def(
      "variance_normalize(Tensor tiles, int iterations, Tensor(a!) balanced, Tensor(b!) row_scale,"
      " Tensor(c!) col_scale) -> ()");

  m.def("pack_bits(Tensor codes, int bits, Tensor(a!) packed) -> ()");
  m.def("unpack_bits(Tensor packed, int bits, Tensor(a!) codes) -> ()");

  m.def(
      "quantize_tiles(Tensor key, Tensor value, int key_bits, int value_bits, int group,"
      " int head_dim, str fit, int iterations, bool rotated, Tensor(a!) records) -> ()");
  m.def(
      "dequantize_tiles(Tensor records, int key_bits, int value_bits, int group, int head_dim,"
      " bool rotated, Tensor(a!) key, Tensor(b!) value) -> ()");

  m.def(
      "unpack_records(Tensor records, int key_bits, int value_bits, int group, int head_dim,"
      " Tensor(a!) key_codes, Tensor(b!) key_channel_scale, Tensor(c!) key_zero_point,"
      " Tensor(d!) key_token_scale, Tensor(e!) value_codes, Tensor(f!) value_token_scale,"
      " Tensor(g!) value_zero_point, Tensor(h!) value_channel_scale) -> ()");
  m.def(
      "pack_records(Tensor key_codes, Tensor key_channel_scale, Tensor key_zero_point,"
      " Tensor key_token_scale, Tensor value_codes, Tensor value_token_scale,"
      " Tensor value_zero_point, Tensor value_channel_scale, int key_bits, int value_bits,"
      " int group, int head_dim, Tensor(a!) records) -> ()");

  m.def(
      "append_kv(Tensor key, Tensor value, Tensor slot_mapping, Tensor(a!) staging,"
      " Tensor block_slot, int key_bits, int value_bits, int group, int head_dim) -> ()");
  m.def(
      "seal_blocks(Tensor staging, Tensor slots, Tensor blocks, Tensor(a!) cache, int key_bits,"
      " int value_bits, int group, int head_dim, str fit, int iterations, Tensor? count) -> ()");

  // Without a workspace the op takes its scratch memory from torch's allocator.
  m.def(
      "decode_attention(Tensor q, Tensor cache, Tensor block_table, Tensor seq_lens, int key_bits,"
      " int value_bits, int group, int head_dim, Tensor? staging, Tensor? block_slot,"
      " Tensor? cu_query_lens, bool causal, float sm_scale, float logits_soft_cap,"
      " int window_left, Tensor? sinks, SymInt max_seq_len, int split_tokens,"
      " Tensor(a!)? workspace, Tensor(b!) out, Tensor(c!)? lse) -> ()");
  // `like` says on which device: a tensor of any shape and dtype.
  m.def(
      "decode_workspace_bytes(Tensor like, int key_bits, int value_bits, int group, int head_dim,"
      " SymInt num_seqs, SymInt num_tokens, int num_q_heads, int num_kv_heads, SymInt max_seq_len,"
      " int split_tokens) -> SymInt");

  m.def(
      "gather_kv(Tensor cache, Tensor block_table, Tensor seq_lens, int key_bits, int value_bits,"
      " int group, int head_dim, Tensor? staging, Tensor? block_slot, Tensor cu_seq_lens,"
      " bool rotated, Tensor(a!) key, Tensor(b!) value) -> ()");

  m.def(
      "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out,"
      " Tensor(b!) lse) -> ()");
}
