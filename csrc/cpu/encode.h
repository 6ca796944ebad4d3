// The kernels of the encode family (everything but attention): what the entry points call, one
// table per instruction set (isa.h).
#pragma once

#include <cstdint>

#include "kvarn/ops.h"
#include "kvarn/variants.h"

namespace kvarn::cpu {

inline constexpr int kMaxGroup = 128;
inline constexpr int kMaxHeadDim = 512;

// A row in variants.h alone would overrun the scratch memory, or take codes for those of 8 bits.
#define KVARN_IS_KNOWN(bits) &&(bits == 2 || bits == 3 || bits == 4 || bits == 8)
#define KVARN_GROUP_FITS(n) &&n <= kMaxGroup
#define KVARN_HEAD_DIM_FITS(n) &&n <= kMaxHeadDim
static_assert(true KVARN_FOR_EACH_BITS(KVARN_IS_KNOWN), "new bits: see docs/variants.md");
static_assert(true KVARN_FOR_EACH_GROUP(KVARN_GROUP_FITS), "a new group: see docs/variants.md");
static_assert(true KVARN_FOR_EACH_HEAD_DIM(KVARN_HEAD_DIM_FITS),
              "a new head dimension: see docs/variants.md");
#undef KVARN_IS_KNOWN
#undef KVARN_GROUP_FITS
#undef KVARN_HEAD_DIM_FITS

/// The keys or the values of a tile, of one head: token g at element `offset + g * token_stride`.
template <class Pointer>
struct TokenRows {
  Pointer data;
  DType dtype;
  int64_t offset;
  int64_t token_stride;
  bool rotated;  ///< already (input), to be left so (output)
};

/// The K or the V part of a record: rows are channels (K) or tokens (V), columns the others.
template <class Byte>
struct TilePart {
  int rows;
  int cols;
  bool rows_are_tokens;
  int bits;
  Byte* codes;       ///< fragment order
  Byte* row_scale;   ///< fp16 [rows], as all of these at any byte address
  Byte* zero_point;  ///< fp16 [rows]
  Byte* col_scale;   ///< fp16 [cols]
};

struct EncodeKernels {
  /// base[offset ..] as fp32.
  void (*load_row)(const void* base, DType dtype, int64_t offset, float* out, int n);

  /// out[out_offset + i] = scale * (x[x_offset ..] @ W)[i], i < dim; scratch: 2 * dim floats.
  void (*hadamard)(const void* x, int64_t x_offset, void* out, int64_t out_offset, DType dtype,
                   int dim, float scale, float* scratch);

  /// Balances x [rows, cols] in place; scratch: normalize_scratch_floats(rows, cols).
  void (*normalize)(float* x, int rows, int cols, int iterations, float* row_scale,
                    float* col_scale, float* scratch);

  /// A row of codes <-> ceil(count * bits / 8) bytes, 1 <= bits <= 8.
  void (*pack)(const uint8_t* codes, int64_t count, int bits, uint8_t* packed);
  void (*unpack)(const uint8_t* packed, int64_t count, int bits, uint8_t* codes);

  /// Codes [rows][cols], one a byte <-> fragment order.
  void (*pack_codes)(const uint8_t* codes, const TilePart<uint8_t>& part);
  void (*unpack_codes)(const TilePart<const uint8_t>& part, uint8_t* codes);

  /// Both with scratch_bytes of scratch.
  void (*quantize)(const TokenRows<const void*>& in, Fit fit, int iterations,
                   const TilePart<uint8_t>& out, void* scratch);
  void (*dequantize)(const TilePart<const uint8_t>& in, const TokenRows<void*>& out, void* scratch);
  int64_t scratch_bytes;
};

/// The table of current_isa().
const EncodeKernels& encode_kernels();

constexpr int64_t normalize_scratch_floats(int64_t rows, int64_t cols) {
  return 2 * rows + 7 * cols;
}

template <class Byte>
TilePart<Byte> key_part(const Format& f, Byte* record) {
  const RecordLayout at = record_layout(f);
  return {f.head_dim,
          f.group,
          false,
          f.key_bits,
          record + at.key_codes,
          record + at.key_channel_scale,
          record + at.key_zero_point,
          record + at.key_token_scale};
}

template <class Byte>
TilePart<Byte> value_part(const Format& f, Byte* record) {
  const RecordLayout at = record_layout(f);
  return {f.group,
          f.head_dim,
          true,
          f.value_bits,
          record + at.value_codes,
          record + at.value_token_scale,
          record + at.value_zero_point,
          record + at.value_channel_scale};
}

}  // namespace kvarn::cpu
