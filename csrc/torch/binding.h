// The ops as functions of tensors: check the arguments, fill the params struct of kvarn/ops.h, run.
//
// Every function is a template over the backend, which is made for the device of the op's tensors
// and has one method per function of kvarn/ops.h, of the same name, that takes the params and
// returns the Status. `Backend::kFloat32` says whether keys, values, queries and staged pages may
// be float32.
#pragma once

#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "torch/checks.h"

namespace kvarn::binding {

using OptionalTensor = std::optional<Tensor>;

inline DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      return DType::kFloat32;
  }
}

constexpr Arguments::DTypes kFloats = {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float};
constexpr Arguments::DTypes kIndices = {ScalarType::Int, ScalarType::Long};

/// What a backend lets keys and values be.
template <class Backend>
Arguments::DTypes model_dtypes() {
  static constexpr Arguments::DTypes kHalves = {ScalarType::Half, ScalarType::BFloat16};
  return Backend::kFloat32 ? kFloats : kHalves;
}

/// The tensor, if there is one, for Arguments::apart.
inline const Tensor* given(const OptionalTensor& t) { return t ? &*t : nullptr; }

/// Never null, not even of an empty tensor: in a params struct null means "not given".
inline const void* data_of(const Tensor& t) {
  static const std::max_align_t nothing{};
  return t.numel() == 0 ? &nothing : t.const_data_ptr();
}

template <class T>
T* output_of(const Tensor& t) {
  return static_cast<T*>(t.numel() == 0 ? const_cast<void*>(data_of(t)) : t.mutable_data_ptr());
}

/// The strides of the first dimensions.
template <size_t kCount>
void copy_strides(const Tensor& t, int64_t (&strides)[kCount]) {
  for (size_t i = 0; i < kCount; ++i) strides[i] = t.stride(static_cast<int64_t>(i));
}

inline IndexArray index_array(const Arguments& args, const char* name, const Tensor& t, Dim size) {
  args.input(name, t, kIndices, {size}, Layout::kStrided);
  return {data_of(t), t.stride(0), t.scalar_type() == ScalarType::Long};
}

inline Format format_of(const Arguments& args, int64_t key_bits, int64_t value_bits, int64_t group,
                        int64_t head_dim) {
  const auto small = [](int64_t n) { return n < 0 || n > 1024 ? 0 : static_cast<int>(n); };
  const Format f{small(key_bits), small(value_bits), small(group), small(head_dim)};
  args.require(valid(f), "format",
               "bits 2, 3, 4 or 8, group 64 or 128, head_dim 64, 128, 256 or 512",
               bracketed(std::array<int64_t, 4>{key_bits, value_bits, group, head_dim}));
  return f;
}

inline Fit fit_of(const Arguments& args, const std::string& fit) {
  args.require(fit == "minmax" || fit == "unbiased", "fit", "'minmax' or 'unbiased'",
               "'" + fit + "'");
  return fit == "minmax" ? Fit::kMinMax : Fit::kUnbiased;
}

/// The leading dimensions (all but the last) of two tensors of the same leading shape.
struct LeadingDims {
  std::vector<int64_t> size;
  std::vector<int64_t> a_stride;
  std::vector<int64_t> b_stride;

  /// Neighbours that are one dimension to both tensors are merged.
  LeadingDims(const Tensor& a, const Tensor& b) {
    for (int64_t i = 0; i + 1 < a.dim(); ++i) {
      const int64_t n = a.size(i);
      if (n == 1) continue;
      if (!size.empty() && a_stride.back() == n * a.stride(i) &&
          b_stride.back() == n * b.stride(i)) {
        size.back() *= n;
        a_stride.back() = a.stride(i);
        b_stride.back() = b.stride(i);
      } else {
        size.push_back(n);
        a_stride.push_back(a.stride(i));
        b_stride.push_back(b.stride(i));
      }
    }
  }

  /// Makes them at least `count`.
  void pad(size_t count) {
    while (size.size() < count) {
      size.insert(size.begin(), 1);
      a_stride.insert(a_stride.begin(), 0);
      b_stride.insert(b_stride.begin(), 0);
    }
  }

  /// Calls fn(offset in a, offset in b) for every index of all but the last `inner` dimensions.
  template <class Fn>
  void for_each_outer(size_t inner, Fn&& fn) const {
    int64_t count = 1;
    for (size_t i = 0; i + inner < size.size(); ++i) count *= size[i];
    for (int64_t n = 0; n < count; ++n) {
      int64_t a = 0;
      int64_t b = 0;
      int64_t rest = n;
      for (size_t i = size.size() - inner; i-- > 0; rest /= size[i]) {
        a += rest % size[i] * a_stride[i];
        b += rest % size[i] * b_stride[i];
      }
      fn(a, b);
    }
  }
};

inline std::vector<Dim> shape_of(const Tensor& t) { return {t.sizes().begin(), t.sizes().end()}; }

template <class Backend>
void hadamard_transform_out(const Tensor& x, std::optional<double> scale, const Tensor& out) {
  const Arguments args("hadamard_transform", x);
  args.input_rows("x", x, kFloats, "D");
  const int64_t dim = x.size(x.dim() - 1);
  args.require(dim > 0 && (dim & (dim - 1)) == 0, "x", "a power of two in its last dimension", dim);
  args.output("out", out, x.scalar_type(), shape_of(x));
  args.same_or_apart("out", out, "x", x);
  if (x.numel() == 0) return;

  constexpr size_t kInner = std::extent_v<decltype(HadamardParams::rows)>;
  LeadingDims rows(x, out);
  rows.pad(kInner);
  HadamardParams p;
  p.dtype = dtype_of(x);
  p.dim = args.narrow("x", dim);
  p.scale = static_cast<float>(scale ? *scale : 1 / std::sqrt(static_cast<double>(dim)));
  std::copy(rows.size.end() - kInner, rows.size.end(), p.rows);
  std::copy(rows.a_stride.end() - kInner, rows.a_stride.end(), p.x_stride);
  std::copy(rows.b_stride.end() - kInner, rows.b_stride.end(), p.out_stride);
  Backend backend(args.device());
  rows.for_each_outer(kInner, [&](int64_t x_offset, int64_t out_offset) {
    p.x = static_cast<const char*>(data_of(x)) + x_offset * size_of(p.dtype);
    p.out = output_of<char>(out) + out_offset * size_of(p.dtype);
    args.ok(backend.hadamard_transform(p));
  });
}

template <class Backend>
Tensor hadamard_transform(const Tensor& x, std::optional<double> scale) {
  const Tensor out = torch::stable::new_empty(x, x.sizes());
  hadamard_transform_out<Backend>(x, scale, out);
  return out;
}

template <class Backend>
void variance_normalize(const Tensor& tiles, int64_t iterations, const Tensor& balanced,
                        const Tensor& row_scale, const Tensor& col_scale) {
  const Arguments args("variance_normalize", tiles);
  args.input("tiles", tiles, kFloats, {"N", "R", "C"});
  const int64_t n = tiles.size(0), rows = tiles.size(1), cols = tiles.size(2);
  args.require(rows >= 2 && cols >= 2, "tiles", "at least 2 in its last two dimensions",
               bracketed(tiles.sizes()));
  args.output("balanced", balanced, ScalarType::Float, {n, rows, cols}, Layout::kContiguous);
  args.output("row_scale", row_scale, ScalarType::Float, {n, rows}, Layout::kContiguous);
  args.output("col_scale", col_scale, ScalarType::Float, {n, cols}, Layout::kContiguous);
  args.apart("balanced", balanced, "tiles", tiles);
  args.apart("row_scale", row_scale, {{"tiles", &tiles}, {"balanced", &balanced}});
  args.apart("col_scale", col_scale,
             {{"tiles", &tiles}, {"balanced", &balanced}, {"row_scale", &row_scale}});

  NormalizeParams p;
  p.x = data_of(tiles);
  p.dtype = dtype_of(tiles);
  copy_strides(tiles, p.x_stride);
  p.balanced = output_of<float>(balanced);
  p.row_scale = output_of<float>(row_scale);
  p.col_scale = output_of<float>(col_scale);
  p.tiles = n;
  p.rows = args.narrow("tiles", rows);
  p.cols = args.narrow("tiles", cols);
  p.iterations = args.narrow("iterations", iterations);
  args.ok(Backend(args.device()).variance_normalize(p));
}

/// The params of pack_bits and unpack_bits on tensors whose leading dimensions merge into one.
inline PackParams pack_params(const Tensor& codes, const Tensor& packed, int64_t bits) {
  LeadingDims rows(codes, packed);
  rows.pad(1);
  PackParams p;
  p.codes = static_cast<uint8_t*>(const_cast<void*>(data_of(codes)));
  p.packed = static_cast<uint8_t*>(const_cast<void*>(data_of(packed)));
  p.rows = rows.size[0];
  p.count = codes.size(codes.dim() - 1);
  p.codes_stride = rows.a_stride[0];
  p.packed_stride = rows.b_stride[0];
  p.bits = static_cast<int32_t>(bits);
  return p;
}

/// Calls run(input, output) once, on contiguous copies if the leading dimensions do not merge:
/// codes that are too large must be found before anything is written.
template <class Run>
void run_on_rows(const Tensor& input, const Tensor& output, Run&& run) {
  if (output.numel() == 0) return;
  if (LeadingDims(input, output).size.size() <= 1) return run(input, output);
  Tensor target = output;
  const Tensor result = torch::stable::new_empty(output, output.sizes());
  run(torch::stable::contiguous(input), result);
  torch::stable::copy_(target, result);
}

inline int64_t packed_bytes(const Arguments& args, const Tensor& codes, int64_t bits) {
  args.require(bits >= 1 && bits <= 8, "bits", "1 to 8", bits);
  return (codes.size(codes.dim() - 1) * bits + 7) / 8;
}

template <class Backend>
void pack_bits(const Tensor& codes, int64_t bits, const Tensor& packed) {
  const Arguments args("pack_bits", codes);
  args.input_rows("codes", codes, {ScalarType::Byte}, "n");
  std::vector<Dim> shape = shape_of(codes);
  shape.back() = packed_bytes(args, codes, bits);
  args.output("packed", packed, ScalarType::Byte, shape);
  args.apart("packed", packed, "codes", codes);
  run_on_rows(codes, packed, [&](const Tensor& input, const Tensor& output) {
    args.ok(Backend(args.device()).pack_bits(pack_params(input, output, bits)));
  });
}

template <class Backend>
void unpack_bits(const Tensor& packed, int64_t bits, const Tensor& codes) {
  const Arguments args("unpack_bits", packed);
  args.input_rows("packed", packed, {ScalarType::Byte}, "bytes");
  args.require(codes.dim() > 0, "codes", "of at least one dimension", codes.dim());
  std::vector<Dim> shape = shape_of(packed);
  shape.back() = codes.size(codes.dim() - 1);
  args.output("codes", codes, ScalarType::Byte, shape);
  shape.back() = packed_bytes(args, codes, bits);
  args.input("packed", packed, {ScalarType::Byte}, shape);
  args.apart("codes", codes, "packed", packed);
  run_on_rows(packed, codes, [&](const Tensor& input, const Tensor& output) {
    args.ok(Backend(args.device()).unpack_bits(pack_params(output, input, bits)));
  });
}

template <class Backend>
void quantize_tiles(const Tensor& key, const Tensor& value, int64_t key_bits, int64_t value_bits,
                    int64_t group, int64_t head_dim, const std::string& fit, int64_t iterations,
                    bool rotated, const Tensor& records) {
  const Arguments args("quantize_tiles", key);
  QuantizeParams p;
  p.format = format_of(args, key_bits, value_bits, group, head_dim);
  args.input("key", key, kFloats, {"N", group, "Hkv", head_dim});
  args.input("value", value, {key.scalar_type()}, shape_of(key));
  args.output("records", records, ScalarType::Byte,
              {key.size(0), key.size(2), record_layout(p.format).bytes});
  args.apart("records", records, "key", key);
  args.apart("records", records, "value", value);
  p.key = data_of(key);
  p.value = data_of(value);
  p.dtype = dtype_of(key);
  p.tiles = key.size(0);
  p.heads = args.narrow("key", key.size(2));
  copy_strides(key, p.key_stride);
  copy_strides(value, p.value_stride);
  p.records = output_of<uint8_t>(records);
  copy_strides(records, p.record_stride);
  p.fit = fit_of(args, fit);
  p.iterations = args.narrow("iterations", iterations);
  p.rotated = rotated;
  args.ok(Backend(args.device()).quantize_tiles(p));
}

template <class Backend>
void dequantize_tiles(const Tensor& records, int64_t key_bits, int64_t value_bits, int64_t group,
                      int64_t head_dim, bool rotated, const Tensor& key, const Tensor& value) {
  const Arguments args("dequantize_tiles", records);
  DequantizeParams p;
  p.format = format_of(args, key_bits, value_bits, group, head_dim);
  args.input("records", records, {ScalarType::Byte}, {"N", "Hkv", record_layout(p.format).bytes});
  const std::vector<Dim> shape = {records.size(0), group, records.size(1), head_dim};
  args.input("key", key, kFloats, shape);
  args.output("key", key, key.scalar_type(), shape);
  args.output("value", value, key.scalar_type(), shape);
  args.apart("key", key, "value", value);
  args.apart("key", key, "records", records);
  args.apart("value", value, "records", records);
  p.records = static_cast<const uint8_t*>(data_of(records));
  copy_strides(records, p.record_stride);
  p.key = output_of<void>(key);
  p.value = output_of<void>(value);
  p.dtype = dtype_of(key);
  p.tiles = records.size(0);
  p.heads = args.narrow("records", records.size(1));
  copy_strides(key, p.key_stride);
  copy_strides(value, p.value_stride);
  p.rotated = rotated;
  args.ok(Backend(args.device()).dequantize_tiles(p));
}

/// Canonical codes and scales in the order of kvarn.CanonicalRecords.
using CanonicalTensors = std::array<Tensor, 8>;

inline CanonicalParams canonical_params(const Arguments& args, const Format& format,
                                        const Tensor& records, const CanonicalTensors& canonical) {
  CanonicalParams p;
  p.format = format;
  p.records = static_cast<uint8_t*>(const_cast<void*>(data_of(records)));
  copy_strides(records, p.record_stride);
  p.tiles = records.size(0);
  p.heads = args.narrow("records", records.size(1));
  const auto codes = [&](int i) {
    return static_cast<uint8_t*>(const_cast<void*>(data_of(canonical[i])));
  };
  const auto scale = [&](int i) {
    return static_cast<uint16_t*>(const_cast<void*>(data_of(canonical[i])));
  };
  p.key_codes = codes(0);
  p.key_channel_scale = scale(1);
  p.key_zero_point = scale(2);
  p.key_token_scale = scale(3);
  p.value_codes = codes(4);
  p.value_token_scale = scale(5);
  p.value_zero_point = scale(6);
  p.value_channel_scale = scale(7);
  return p;
}

/// Calls fn(name, tensor, dtype, shape) for each canonical tensor of `tiles` x `heads` records.
template <class Fn>
void for_each_canonical(const CanonicalTensors& canonical, const Format& f, const Dim& tiles,
                        const Dim& heads, Fn&& fn) {
  const Dim group = f.group, dim = f.head_dim;
  fn("key_codes", canonical[0], ScalarType::Byte, std::vector<Dim>{tiles, heads, dim, group});
  fn("key_channel_scale", canonical[1], ScalarType::Half, std::vector<Dim>{tiles, heads, dim});
  fn("key_zero_point", canonical[2], ScalarType::Half, std::vector<Dim>{tiles, heads, dim});
  fn("key_token_scale", canonical[3], ScalarType::Half, std::vector<Dim>{tiles, heads, group});
  fn("value_codes", canonical[4], ScalarType::Byte, std::vector<Dim>{tiles, heads, group, dim});
  fn("value_token_scale", canonical[5], ScalarType::Half, std::vector<Dim>{tiles, heads, group});
  fn("value_zero_point", canonical[6], ScalarType::Half, std::vector<Dim>{tiles, heads, group});
  fn("value_channel_scale", canonical[7], ScalarType::Half, std::vector<Dim>{tiles, heads, dim});
}

template <class Backend>
void unpack_records(const Tensor& records, int64_t key_bits, int64_t value_bits, int64_t group,
                    int64_t head_dim, const Tensor& key_codes, const Tensor& key_channel_scale,
                    const Tensor& key_zero_point, const Tensor& key_token_scale,
                    const Tensor& value_codes, const Tensor& value_token_scale,
                    const Tensor& value_zero_point, const Tensor& value_channel_scale) {
  const Arguments args("unpack_records", records);
  const Format format = format_of(args, key_bits, value_bits, group, head_dim);
  args.input("records", records, {ScalarType::Byte}, {"N", "Hkv", record_layout(format).bytes});
  const CanonicalTensors canonical = {key_codes,        key_channel_scale,  key_zero_point,
                                      key_token_scale,  value_codes,        value_token_scale,
                                      value_zero_point, value_channel_scale};
  for_each_canonical(
      canonical, format, records.size(0), records.size(1),
      [&](const char* name, const Tensor& t, ScalarType dtype, const std::vector<Dim>& shape) {
        args.output(name, t, dtype, shape, Layout::kContiguous);
      });
  for (size_t i = 0; i < canonical.size(); ++i) {
    for (size_t j = 0; j < i; ++j) args.apart("an output", canonical[i], "another", canonical[j]);
    args.apart("an output", canonical[i], "records", records);
  }
  args.ok(
      Backend(args.device()).unpack_records(canonical_params(args, format, records, canonical)));
}

template <class Backend>
void pack_records(const Tensor& key_codes, const Tensor& key_channel_scale,
                  const Tensor& key_zero_point, const Tensor& key_token_scale,
                  const Tensor& value_codes, const Tensor& value_token_scale,
                  const Tensor& value_zero_point, const Tensor& value_channel_scale,
                  int64_t key_bits, int64_t value_bits, int64_t group, int64_t head_dim,
                  const Tensor& records) {
  const Arguments args("pack_records", key_codes);
  const Format format = format_of(args, key_bits, value_bits, group, head_dim);
  args.input("key_codes", key_codes, {ScalarType::Byte}, {"N", "Hkv", head_dim, group},
             Layout::kContiguous);
  const int64_t tiles = key_codes.size(0), heads = key_codes.size(1);
  const CanonicalTensors canonical = {key_codes,        key_channel_scale,  key_zero_point,
                                      key_token_scale,  value_codes,        value_token_scale,
                                      value_zero_point, value_channel_scale};
  for_each_canonical(
      canonical, format, tiles, heads,
      [&](const char* name, const Tensor& t, ScalarType dtype, const std::vector<Dim>& shape) {
        args.input(name, t, {dtype}, shape, Layout::kContiguous);
      });
  args.output("records", records, ScalarType::Byte, {tiles, heads, record_layout(format).bytes});
  for (const Tensor& t : canonical) args.apart("records", records, "an input", t);
  args.ok(Backend(args.device()).pack_records(canonical_params(args, format, records, canonical)));
}

template <class Backend>
Staging staging_of(const Arguments& args, const Tensor& t, const Format& format, const Dim& heads) {
  args.input("staging", t, model_dtypes<Backend>(),
             {"slots", 2, heads, format.group, format.head_dim});
  Staging staging;
  staging.data = const_cast<void*>(data_of(t));
  staging.dtype = dtype_of(t);
  staging.slots = t.size(0);
  copy_strides(t, staging.stride);
  return staging;
}

inline Cache cache_of(const Arguments& args, const Tensor& t, const Format& format,
                      const Dim& heads) {
  args.input("cache", t, {ScalarType::Byte}, {"num_blocks", heads, record_layout(format).bytes});
  Cache cache;
  cache.data = static_cast<uint8_t*>(const_cast<void*>(data_of(t)));
  cache.blocks = t.size(0);
  copy_strides(t, cache.stride);
  return cache;
}

template <class Backend>
void append_kv(const Tensor& key, const Tensor& value, const Tensor& slot_mapping,
               const Tensor& staging, const Tensor& block_slot, int64_t key_bits,
               int64_t value_bits, int64_t group, int64_t head_dim) {
  const Arguments args("append_kv", key);
  AppendParams p;
  p.format = format_of(args, key_bits, value_bits, group, head_dim);
  args.input("key", key, model_dtypes<Backend>(), {"T", "Hkv", head_dim});
  args.input("value", value, {key.scalar_type()}, shape_of(key));
  p.tokens = key.size(0);
  p.heads = args.narrow("key", key.size(1));
  p.slot_mapping = index_array(args, "slot_mapping", slot_mapping, p.tokens);
  p.staging = staging_of<Backend>(args, staging, p.format, key.size(1));
  args.output("staging", staging, key.scalar_type(), shape_of(staging));
  p.block_slot = index_array(args, "block_slot", block_slot, "num_blocks");
  p.blocks = block_slot.size(0);
  args.apart("staging", staging,
             {{"key", &key},
              {"value", &value},
              {"slot_mapping", &slot_mapping},
              {"block_slot", &block_slot}});
  p.key = data_of(key);
  p.value = data_of(value);
  copy_strides(key, p.key_stride);
  copy_strides(value, p.value_stride);
  args.ok(Backend(args.device()).append_kv(p));
}

template <class Backend>
void seal_blocks(const Tensor& staging, const Tensor& slots, const Tensor& blocks,
                 const Tensor& cache, int64_t key_bits, int64_t value_bits, int64_t group,
                 int64_t head_dim, const std::string& fit, int64_t iterations,
                 const OptionalTensor& count) {
  const Arguments args("seal_blocks", staging);
  SealParams p;
  p.format = format_of(args, key_bits, value_bits, group, head_dim);
  p.staging = staging_of<Backend>(args, staging, p.format, "Hkv");
  p.heads = args.narrow("staging", staging.size(2));
  p.slots = index_array(args, "slots", slots, "n");
  p.tiles = slots.size(0);
  p.blocks = index_array(args, "blocks", blocks, p.tiles);
  p.cache = cache_of(args, cache, p.format, staging.size(2));
  args.output("cache", cache, ScalarType::Byte, shape_of(cache));
  p.fit = fit_of(args, fit);
  p.iterations = args.narrow("iterations", iterations);
  if (count) {
    args.input("count", *count, {ScalarType::Int}, {1});
    p.count = static_cast<const int32_t*>(data_of(*count));
  }
  args.apart(
      "cache", cache,
      {{"staging", &staging}, {"slots", &slots}, {"blocks", &blocks}, {"count", given(count)}});
  args.ok(Backend(args.device()).seal_blocks(p));
}

template <class Backend>
PagedKV paged_kv(const Arguments& args, const Format& format, const Tensor& cache,
                 const Tensor& block_table, const Tensor& seq_lens, const OptionalTensor& staging,
                 const OptionalTensor& block_slot) {
  PagedKV kv;
  kv.format = format;
  kv.cache = cache_of(args, cache, format, "Hkv");
  kv.kv_heads = args.narrow("cache", cache.size(1));
  args.require(kv.kv_heads > 0, "cache", "of at least one KV head", kv.kv_heads);
  args.input("block_table", block_table, kIndices, {"B", "max_blocks"}, Layout::kStrided);
  kv.block_table = {data_of(block_table), block_table.stride(0), block_table.stride(1),
                    block_table.scalar_type() == ScalarType::Long};
  kv.seqs = block_table.size(0);
  kv.table_width = block_table.size(1);
  kv.seq_lens = index_array(args, "seq_lens", seq_lens, kv.seqs);
  args.require(staging.has_value() == block_slot.has_value(), "staging and block_slot",
               "given together", staging ? "staging alone" : "block_slot alone");
  if (staging) {
    kv.staging = staging_of<Backend>(args, *staging, format, cache.size(1));
    kv.block_slot = index_array(args, "block_slot", *block_slot, "blocks");
    const int64_t virtual_blocks = block_slot->size(0) - kv.cache.blocks;
    args.require(virtual_blocks >= 0, "block_slot",
                 "of at least " + std::to_string(kv.cache.blocks) + " blocks", block_slot->size(0));
    kv.virtual_blocks = args.narrow("block_slot", virtual_blocks);
  }
  return kv;
}

inline void check_workspace_arguments(const Arguments& args, int64_t group, int64_t max_seq_len,
                                      int64_t split_tokens) {
  // Far above any context, and low enough that no size overflows.
  constexpr int64_t kLongest = int64_t{1} << 40;
  args.require(max_seq_len >= 0 && max_seq_len <= kLongest, "max_seq_len",
               "between 0 and " + std::to_string(kLongest), max_seq_len);
  args.require(split_tokens >= 0 && split_tokens % group == 0, "split_tokens",
               "a multiple of " + std::to_string(group), split_tokens);
}

template <class Backend>
void decode_attention(const Tensor& q, const Tensor& cache, const Tensor& block_table,
                      const Tensor& seq_lens, int64_t key_bits, int64_t value_bits, int64_t group,
                      int64_t head_dim, const OptionalTensor& staging,
                      const OptionalTensor& block_slot, const OptionalTensor& cu_query_lens,
                      bool causal, double sm_scale, double logits_soft_cap, int64_t window_left,
                      const OptionalTensor& sinks, int64_t max_seq_len, int64_t split_tokens,
                      const OptionalTensor& workspace, const Tensor& out,
                      const OptionalTensor& lse) {
  const Arguments args("decode_attention", q);
  const Format format = format_of(args, key_bits, value_bits, group, head_dim);
  args.input("q", q, model_dtypes<Backend>(), {"T", "Hq", head_dim});
  DecodeParams p;
  p.kv = paged_kv<Backend>(args, format, cache, block_table, seq_lens, staging, block_slot);
  p.q = data_of(q);
  p.dtype = dtype_of(q);
  p.tokens = q.size(0);
  p.q_heads = args.narrow("q", q.size(1));
  args.require(p.q_heads > 0 && p.q_heads % p.kv.kv_heads == 0, "q",
               "of a multiple of " + std::to_string(p.kv.kv_heads) + " heads", p.q_heads);
  copy_strides(q, p.q_stride);
  if (cu_query_lens) {
    p.cu_query_lens = index_array(args, "cu_query_lens", *cu_query_lens, p.kv.seqs + 1);
  } else {
    args.require(
        p.tokens == p.kv.seqs, "q",
        "of one token per sequence without cu_query_lens, " + std::to_string(p.kv.seqs) + " in all",
        p.tokens);
  }
  p.causal = causal;
  args.require(std::isfinite(static_cast<float>(sm_scale)), "sm_scale", "a finite float32 number",
               sm_scale);
  args.require(std::isfinite(static_cast<float>(logits_soft_cap)) &&
                   (logits_soft_cap == 0 || static_cast<float>(logits_soft_cap) > 0),
               "logits_soft_cap", "a finite float32 number and at least 0", logits_soft_cap);
  args.require(window_left >= -1, "window_left", "at least -1", window_left);
  p.sm_scale = static_cast<float>(sm_scale);
  p.logits_soft_cap = static_cast<float>(logits_soft_cap);
  p.window_left = window_left;
  if (sinks) {
    args.input("sinks", *sinks, kFloats, {p.q_heads}, Layout::kStrided);
    p.sinks = data_of(*sinks);
    p.sinks_dtype = dtype_of(*sinks);
    p.sinks_stride = sinks->stride(0);
  }
  check_workspace_arguments(args, group, max_seq_len, split_tokens);
  args.require(max_seq_len <= p.kv.table_width * group, "max_seq_len",
               "at most " + std::to_string(p.kv.table_width * group) + ", the tokens of the table",
               max_seq_len);
  p.max_seq_len = max_seq_len;
  p.split_tokens = split_tokens;

  const std::initializer_list<Arguments::Named> inputs = {{"q", &q},
                                                          {"cache", &cache},
                                                          {"block_table", &block_table},
                                                          {"seq_lens", &seq_lens},
                                                          {"staging", given(staging)},
                                                          {"block_slot", given(block_slot)},
                                                          {"cu_query_lens", given(cu_query_lens)},
                                                          {"sinks", given(sinks)}};
  args.output("out", out, q.scalar_type(), shape_of(q));
  args.apart("out", out, inputs);
  p.out = output_of<void>(out);
  copy_strides(out, p.out_stride);
  if (lse) {
    args.output("lse", *lse, ScalarType::Float, {p.tokens, p.q_heads}, Layout::kStrided);
    args.apart("lse", *lse, "out", out);
    args.apart("lse", *lse, inputs);
    p.lse = output_of<float>(*lse);
    copy_strides(*lse, p.lse_stride);
  }

  Backend backend(args.device());
  const int64_t bytes = backend.decode_workspace_bytes(
      {format, p.kv.seqs, p.tokens, p.q_heads, p.kv.kv_heads, max_seq_len, split_tokens});
  if (workspace) {
    args.output("workspace", *workspace, ScalarType::Byte, {"bytes"});
    args.apart("workspace", *workspace, {{"out", &out}, {"lse", given(lse)}});
    args.apart("workspace", *workspace, inputs);
    args.require(workspace->size(0) >= bytes, "workspace",
                 "of at least " + std::to_string(bytes) + " bytes", workspace->size(0));
    constexpr size_t kAlignment = 16;
    const size_t misaligned = reinterpret_cast<uintptr_t>(data_of(*workspace)) % kAlignment;
    args.require(misaligned == 0, "workspace", "aligned to 16 bytes",
                 "an address " + std::to_string(misaligned) + " bytes past");
  }
  const Tensor scratch =
      workspace ? *workspace : torch::stable::new_empty(q, {bytes}, ScalarType::Byte);
  p.workspace = output_of<void>(scratch);
  p.workspace_bytes = scratch.numel();
  args.ok(backend.decode_attention(p));
}

template <class Backend>
int64_t decode_workspace_bytes(const Tensor& like, int64_t key_bits, int64_t value_bits,
                               int64_t group, int64_t head_dim, int64_t num_seqs,
                               int64_t num_tokens, int64_t num_q_heads, int64_t num_kv_heads,
                               int64_t max_seq_len, int64_t split_tokens) {
  const Arguments args("decode_workspace_bytes", like);
  const Format format = format_of(args, key_bits, value_bits, group, head_dim);
  check_workspace_arguments(args, group, max_seq_len, split_tokens);
  const int32_t q_heads = args.narrow("num_q_heads", num_q_heads);
  const int32_t kv_heads = args.narrow("num_kv_heads", num_kv_heads);
  args.require(kv_heads > 0, "num_kv_heads", "at least 1", kv_heads);
  args.require(q_heads > 0 && q_heads % kv_heads == 0, "num_q_heads",
               "a multiple of " + std::to_string(kv_heads), q_heads);
  args.narrow("num_seqs", num_seqs);
  args.narrow("num_tokens", num_tokens);
  return Backend(args.device())
      .decode_workspace_bytes(
          {format, num_seqs, num_tokens, q_heads, kv_heads, max_seq_len, split_tokens});
}

template <class Backend>
void gather_kv(const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens,
               int64_t key_bits, int64_t value_bits, int64_t group, int64_t head_dim,
               const OptionalTensor& staging, const OptionalTensor& block_slot,
               const Tensor& cu_seq_lens, bool rotated, const Tensor& key, const Tensor& value) {
  const Arguments args("gather_kv", cache);
  const Format format = format_of(args, key_bits, value_bits, group, head_dim);
  GatherParams p;
  p.kv = paged_kv<Backend>(args, format, cache, block_table, seq_lens, staging, block_slot);
  p.cu_seq_lens = index_array(args, "cu_seq_lens", cu_seq_lens, p.kv.seqs + 1);
  args.input("key", key, model_dtypes<Backend>(), {"total_tokens", p.kv.kv_heads, head_dim});
  args.output("key", key, key.scalar_type(), shape_of(key));
  args.output("value", value, key.scalar_type(), shape_of(key));
  args.apart("key", key, "value", value);
  for (const auto& [name, t] : {std::pair("key", &key), std::pair("value", &value)}) {
    args.apart(name, *t,
               {{"cache", &cache},
                {"block_table", &block_table},
                {"seq_lens", &seq_lens},
                {"staging", given(staging)},
                {"block_slot", given(block_slot)},
                {"cu_seq_lens", &cu_seq_lens}});
  }
  p.total_tokens = key.size(0);
  p.key = output_of<void>(key);
  p.value = output_of<void>(value);
  p.dtype = dtype_of(key);
  copy_strides(key, p.key_stride);
  copy_strides(value, p.value_stride);
  p.rotated = rotated;
  args.ok(Backend(args.device()).gather_kv(p));
}

template <class Backend>
void merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                  const Tensor& lse_b, const Tensor& out, const Tensor& lse) {
  const Arguments args("merge_states", out_a);
  args.input("out_a", out_a, model_dtypes<Backend>(), {"T", "Hq", "D"});
  const std::vector<Dim> lse_shape = {out_a.size(0), out_a.size(1)};
  args.input("lse_a", lse_a, {ScalarType::Float}, lse_shape, Layout::kStrided);
  args.input("out_b", out_b, {out_a.scalar_type()}, shape_of(out_a));
  args.input("lse_b", lse_b, {ScalarType::Float}, lse_shape, Layout::kStrided);
  args.output("out", out, out_a.scalar_type(), shape_of(out_a));
  args.output("lse", lse, ScalarType::Float, lse_shape, Layout::kStrided);
  args.same_or_apart("out", out, "out_a", out_a);
  args.same_or_apart("out", out, "out_b", out_b);
  args.same_or_apart("lse", lse, "lse_a", lse_a);
  args.same_or_apart("lse", lse, "lse_b", lse_b);
  args.apart("out", out, "lse", lse);
  args.apart("out", out, "lse_a", lse_a);
  args.apart("out", out, "lse_b", lse_b);
  args.apart("lse", lse, "out_a", out_a);
  args.apart("lse", lse, "out_b", out_b);
  MergeParams p;
  p.out_a = data_of(out_a);
  p.out_b = data_of(out_b);
  p.out = output_of<void>(out);
  p.lse_a = static_cast<const float*>(data_of(lse_a));
  p.lse_b = static_cast<const float*>(data_of(lse_b));
  p.lse = output_of<float>(lse);
  p.dtype = dtype_of(out_a);
  p.tokens = out_a.size(0);
  p.heads = args.narrow("out_a", out_a.size(1));
  p.head_dim = args.narrow("out_a", out_a.size(2));
  copy_strides(out_a, p.out_a_stride);
  copy_strides(out_b, p.out_b_stride);
  copy_strides(out, p.out_stride);
  copy_strides(lse_a, p.lse_a_stride);
  copy_strides(lse_b, p.lse_b_stride);
  copy_strides(lse, p.lse_stride);
  args.ok(Backend(args.device()).merge_states(p));
}

}  // namespace kvarn::binding
