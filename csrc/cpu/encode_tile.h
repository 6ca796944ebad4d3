// One tile of one head: tokens in memory <-> the K or V part of a record.
#pragma once

#include "cpu/encode_codes.h"
#include "cpu/encode_fit.h"
#include "cpu/encode_hadamard.h"

namespace kvarn::cpu::KVARN_ISA {
namespace {

inline constexpr int kTokenBlock = 16;  ///< tokens that are transposed together

/// Everything that quantizing or dequantizing a tile needs; whatever its size, the pages it does
/// not use are never touched.
struct EncodeScratch {
  alignas(64) float tile[kMaxGroup * kMaxHeadDim];
  alignas(64) float block[kTokenBlock * kMaxHeadDim];
  alignas(64) float row[2 * kMaxHeadDim];
  alignas(64) float col_scale[kMaxLine];
  alignas(64) float token_scale[kMaxGroup];
  alignas(64) float zero_point[kMaxLine];
  int live[kMaxGroup];          ///< the tokens that take part
  float dead_scale[kMaxGroup];  ///< 0 for a zero token, NaN for one with NaN or infinity
  alignas(64) uint16_t halves[kMaxLine];
  TileFit result;
  FitScratch fit;
};

inline void load_scales(const uint8_t* scales, int n, float* out, uint16_t* halves) {
  __builtin_memcpy(halves, scales, static_cast<uint64_t>(n) * 2);
  load_halves(halves, out, n);
}

inline void store_scales(const float* in, int n, uint8_t* scales, uint16_t* halves) {
  store_halves(in, halves, n);
  __builtin_memcpy(scales, halves, static_cast<uint64_t>(n) * 2);
}

/// to[j][i] = from[i][j], i < rows, j < cols. Never inlined: GCC then forgets that `to` and `from`
/// do not overlap and leaves the loops scalar, which costs the whole encoder a quarter.
__attribute__((noinline)) void transpose(const float* __restrict from, int rows, int cols,
                                         int64_t from_stride, float* __restrict to,
                                         int64_t to_stride) {
  for (int j = 0; j < cols; ++j) {
    for (int i = 0; i < rows; ++i) to[j * to_stride + i] = from[i * from_stride + j];
  }
}

/// Beyond, sums of squares would leave the range of fp32.
inline constexpr float kMaxInput = 0x1p26f;

/// Whether a token takes part; if not, *dead_scale is what its scale must be. Limits its values.
inline bool is_live(float* __restrict x, int dim, float* dead_scale) {
  int32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int i = 0; i < dim; ++i) {
    const int32_t magnitude = static_cast<int32_t>(float_bits(x[i]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  constexpr int32_t kInfinity = 0x7f800000;
  *dead_scale = largest >= kInfinity ? __builtin_nanf("") : 0.f;
  if (largest > static_cast<int32_t>(float_bits(kMaxInput))) {
    for (int i = 0; i < dim; ++i) x[i] = clip(x[i], -kMaxInput, kMaxInput);
  }
  return largest > 0 && largest < kInfinity;
}

/// The live tokens, rotated, into scratch.tile: V row by row, K column by column. Returns how many.
inline int load_tile(const TokenRows<const void*>& in, int group, int dim, bool rows_are_tokens,
                     EncodeScratch& scratch) {
  const float scale = 1 / __builtin_sqrtf(static_cast<float>(dim));
  int count = 0;
  for (int g = 0; g < group; ++g) {
    float* x = scratch.row;
    load_row(in.data, in.dtype, in.offset + g * in.token_stride, x, dim);
    if (!is_live(x, dim, &scratch.dead_scale[g])) continue;
    if (!in.rotated) {
#pragma omp simd
      for (int d = 0; d < dim; ++d) x[d] *= scale;
      x = walsh_hadamard(x, x + dim, dim);
    }
    const int in_block = count % kTokenBlock;
    float* const place = rows_are_tokens ? scratch.tile + static_cast<int64_t>(count) * dim
                                         : scratch.block + static_cast<int64_t>(in_block) * dim;
    __builtin_memcpy(place, x, static_cast<uint64_t>(dim) * sizeof(float));
    scratch.live[count++] = g;
    if (!rows_are_tokens && in_block == kTokenBlock - 1) {
      transpose(scratch.block, kTokenBlock, dim, dim, scratch.tile + count - kTokenBlock, group);
    }
  }
  if (!rows_are_tokens && count % kTokenBlock != 0) {
    const int in_block = count % kTokenBlock;
    transpose(scratch.block, in_block, dim, dim, scratch.tile + count - in_block, group);
  }
  return count;
}

/// A row whose scale is tiny against its mean would need a zero point beyond the precision of fp16:
/// its scale is raised and its codes are taken again. `tile` holds T / col_scale less fit.mean.
inline void raise_scale(const Tile& tile, int i, TileFit& fit, FitScratch& scratch) {
  const float levels = tile.levels();
  const float scale = 0x1p-10f * __builtin_fabsf(fit.mean[i]);
  const float centre = fit.offset[i] + fit.scale[i] * levels / 2;
  fit.scale[i] = scale;
  fit.offset[i] = centre - scale * static_cast<float>(1 << (tile.bits - 1));
  const float* const __restrict x = tile.row(i);
  float* const __restrict q = scratch.q;
  const float offset = fit.offset[i] - fit.mean[i];
  const float inverse = inverse_or_0(scale);
  for (int j = 0; j < tile.cols; ++j) {
    q[j] = round_even(clip((x[j] - offset) * inverse, 0.f, levels));
  }
  store_codes(q, tile.cols, fit.codes + i * tile.stride);
}

inline bool scale_too_small(const TileFit& fit, int i) {
  return fit.scale[i] < 0x1p-10f * __builtin_fabsf(fit.mean[i]);
}

inline float largest(const float* x, int n) {
  float most = 0;
  for (int i = 0; i < n; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

/// Chooses codes and scales for the live part of a tile.
inline void fit_tile(const Tile& tile, Fit fit, int iterations, float* col_scale, TileFit& result,
                     FitScratch& scratch) {
  if (fit == Fit::kMinMax) {
    guarded_sinkhorn(tile, iterations, false, col_scale, scratch);
    minmax_codes(tile, col_scale, result, scratch);
    for (int i = 0; i < tile.rows; ++i) {
      if (!scale_too_small(result, i)) continue;
      float* const t = tile.row(i);
      for (int j = 0; j < tile.cols; ++j) t[j] = t[j] / col_scale[j] - result.mean[i];
    }
  } else {
    if (iterations > 0) {
      guarded_sinkhorn(tile, iterations, true, col_scale, scratch);
      fix_factor(col_scale, tile.cols);
    } else {
      closed_form(tile, col_scale, scratch);
    }
    limit_col_scale(col_scale, tile.cols);
    round_to_halves(col_scale, tile.cols, scratch.halves);
    unbiased_codes(tile, col_scale, result, scratch);
  }
  for (int i = 0; i < tile.rows; ++i) {
    if (scale_too_small(result, i)) raise_scale(tile, i, result, scratch);
  }
}

/// Row and column scales in the range of fp16: a power of two moves from the ones to the others.
inline void finish_scales(const Tile& tile, TileFit& fit, float* __restrict col_scale,
                          EncodeScratch& scratch) {
  constexpr float kMaxHalf = 65504;
  const float most = largest(fit.scale, tile.rows);
  float factor = 1;
  if (most > 0 && tile.cols > 0) {
    const float ratio = __builtin_log2f(most) - __builtin_log2f(largest(col_scale, tile.cols));
    factor = __builtin_ldexpf(1.f, static_cast<int>(round_even(ratio / 2)));
  }
  const float inverse = 1 / factor;
  for (int j = 0; j < tile.cols; ++j) {
    col_scale[j] = clip(col_scale[j] * factor, -kMaxHalf, kMaxHalf);
  }
  for (int i = 0; i < tile.rows; ++i) {
    fit.scale[i] = clip(fit.scale[i] * inverse, -kMaxHalf, kMaxHalf);
  }
  round_to_halves(fit.scale, tile.rows, scratch.halves);
  for (int i = 0; i < tile.rows; ++i) {
    const float scale = fit.scale[i] * factor;
    scratch.zero_point[i] = scale == 0 ? 0.f : clip(fit.offset[i] / scale, -kMaxHalf, kMaxHalf);
  }
}

/// From live tokens to all: dead ones get `dead` or, where that is null, 0.
inline void spread_tokens(const float* values, int count, const int* live, int group,
                          const float* dead, float* out) {
  for (int g = 0, k = 0; g < group; ++g) {
    out[g] = k < count && live[k] == g ? values[k++] : dead == nullptr ? 0.f : dead[g];
  }
}

inline void spread_codes(uint8_t* codes, int count, const int* live, int group, int dim,
                         bool rows_are_tokens) {
  if (count == group) return;
  // Tokens only move up, so going down none is overwritten before it has moved.
  if (rows_are_tokens) {
    for (int g = group - 1, k = count - 1; g >= 0; --g) {
      uint8_t* const row = codes + static_cast<int64_t>(g) * dim;
      if (k >= 0 && live[k] == g) {
        __builtin_memmove(row, codes + static_cast<int64_t>(k--) * dim, static_cast<uint64_t>(dim));
      } else {
        __builtin_memset(row, 0, static_cast<uint64_t>(dim));
      }
    }
  } else {
    for (int d = 0; d < dim; ++d) {
      uint8_t* const row = codes + static_cast<int64_t>(d) * group;
      for (int g = group - 1, k = count - 1; g >= 0; --g) {
        row[g] = k >= 0 && live[k] == g ? row[k--] : uint8_t{0};
      }
    }
  }
}

inline void quantize(const TokenRows<const void*>& in, Fit fit, int iterations,
                     const TilePart<uint8_t>& out, void* memory) {
  EncodeScratch& scratch = *static_cast<EncodeScratch*>(memory);
  const bool rows_are_tokens = out.rows_are_tokens;
  const int group = rows_are_tokens ? out.rows : out.cols;
  const int dim = rows_are_tokens ? out.cols : out.rows;
  const int count = load_tile(in, group, dim, rows_are_tokens, scratch);
  const Tile tile = {scratch.tile,
                     rows_are_tokens ? count : dim,
                     rows_are_tokens ? dim : count,
                     out.cols,
                     rows_are_tokens,
                     out.bits};
  float* const col_scale = scratch.col_scale;
  TileFit& result = scratch.result;
  if (count > 0) {
    fit_tile(tile, fit, iterations, col_scale, result, scratch.fit);
  } else {
    for (int j = 0; j < tile.cols; ++j) col_scale[j] = 1;
    for (int i = 0; i < tile.rows; ++i) result.scale[i] = result.offset[i] = 0;
    __builtin_memset(result.codes, 0, static_cast<uint64_t>(group) * dim);
  }
  finish_scales(tile, result, col_scale, scratch);
  spread_codes(result.codes, count, scratch.live, group, dim, rows_are_tokens);
  pack_codes(result.codes, out);
  spread_tokens(rows_are_tokens ? result.scale : col_scale, count, scratch.live, group,
                scratch.dead_scale, scratch.token_scale);
  if (rows_are_tokens) {
    store_scales(scratch.token_scale, group, out.row_scale, scratch.halves);
    spread_tokens(scratch.zero_point, count, scratch.live, group, nullptr, scratch.token_scale);
    store_scales(scratch.token_scale, group, out.zero_point, scratch.halves);
    store_scales(col_scale, dim, out.col_scale, scratch.halves);
  } else {
    store_scales(result.scale, dim, out.row_scale, scratch.halves);
    store_scales(scratch.zero_point, dim, out.zero_point, scratch.halves);
    store_scales(scratch.token_scale, group, out.col_scale, scratch.halves);
  }
}

inline void dequantize(const TilePart<const uint8_t>& in, const TokenRows<void*>& out,
                       void* memory) {
  EncodeScratch& scratch = *static_cast<EncodeScratch*>(memory);
  const int rows = in.rows;
  const int cols = in.cols;
  const int group = in.rows_are_tokens ? rows : cols;
  const int dim = in.rows_are_tokens ? cols : rows;
  uint8_t* const codes = scratch.result.codes;
  float* const __restrict row_scale = scratch.result.scale;
  float* const __restrict zero_point = scratch.zero_point;
  float* const __restrict col_scale = scratch.col_scale;
  unpack_codes(in, codes);
  load_scales(in.row_scale, rows, row_scale, scratch.halves);
  load_scales(in.zero_point, rows, zero_point, scratch.halves);
  load_scales(in.col_scale, cols, col_scale, scratch.halves);
  for (int i = 0; i < rows; ++i) {
    const uint8_t* const __restrict q = codes + static_cast<int64_t>(i) * cols;
    float* const __restrict x = scratch.tile + static_cast<int64_t>(i) * cols;
    const float scale = row_scale[i];
    const float zero = zero_point[i];
#pragma omp simd
    for (int j = 0; j < cols; ++j) {
      x[j] = (static_cast<float>(static_cast<int32_t>(q[j])) + zero) * scale * col_scale[j];
    }
  }
  const float scale = 1 / __builtin_sqrtf(static_cast<float>(dim));
  for (int g = 0; g < group; ++g) {
    float* x = scratch.row;
    if (in.rows_are_tokens) {
      __builtin_memcpy(x, scratch.tile + static_cast<int64_t>(g) * dim,
                       static_cast<uint64_t>(dim) * sizeof(float));
    } else {
      if (g % kTokenBlock == 0) {
        transpose(scratch.tile + g, dim, kTokenBlock, group, scratch.block, dim);
      }
      __builtin_memcpy(x, scratch.block + static_cast<int64_t>(g % kTokenBlock) * dim,
                       static_cast<uint64_t>(dim) * sizeof(float));
    }
    if (!out.rotated) {
#pragma omp simd
      for (int d = 0; d < dim; ++d) x[d] *= scale;
      x = walsh_hadamard(x, x + dim, dim);
    }
    store_row(x, out.data, out.dtype, out.offset + g * out.token_stride, dim);
  }
}

}  // namespace
}  // namespace kvarn::cpu::KVARN_ISA
