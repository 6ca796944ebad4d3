// The query rows of a warp: where they are, what they see, where their results go.
#pragma once

#include <cstdint>

#include "cuda/decode_plan.cuh"
#include "device/attention_staged.cuh"
#include "device/numeric.cuh"

namespace kvarn::cuda {

/// What all and any rows of a warp see, and the scales of their scores.
template <int kBlocks>
struct WarpRows {
  VisibleRange seen;
  float scale[kBlocks][2];  ///< score -> logit, base 2
};

/// What each row of a lane sees.
template <int kBlocks>
struct RowsVisible {
  Visible row[kBlocks][2];
};

/// The (query token, head of the group) rows of a sequence and KV head that a warp has.
struct RowPlace {
  int seq;
  int head;
  int first;
  int count;  ///< of the sequence
  int queries;

  __device__ __forceinline__ RowPlace(const DecodeParams& p, const DecodePlan& plan, int seq,
                                      int head, int row_block, int part, int part_rows)
      : seq(seq), head(head), first((row_block << plan.rows_shift) + part * part_rows) {
    queries = query_begin(p, seq + 1) - query_begin(p, seq);
    count = queries * plan.heads_per_kv;
  }

  __device__ __forceinline__ int query_of(const DecodePlan& plan, int row) const {
    return queries == 1 ? 0 : row / plan.heads_per_kv;
  }

  template <int kBlocks>
  __device__ __forceinline__ RowsVisible<kBlocks> rows_visible(const DecodeParams& p,
                                                               const DecodePlan& plan,
                                                               int lane) const {
    const int length = sequence_length(p, seq);
    RowsVisible<kBlocks> v;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = min(first + b * device::kBlockRows + 2 * (lane % 4) + i, count - 1);
        v.row[b][i] = visible(p, plan, length, queries, query_of(plan, row));
      }
    }
    return v;
  }
};

/// A lane's part of the query rows, as they are in memory: of row lane / 4 of each block of rows
/// the 8 channels 32j + 8t + i.
template <int kDim, int kBlocks>
struct QueryWords {
  uint32_t w[kBlocks][kDim / 32][4];

  /// Rows that are not there are 0.
  __device__ __forceinline__ void load(const DecodeParams& p, const DecodePlan& plan,
                                       const RowPlace& place, int lane) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int row = place.first + b * device::kBlockRows + lane / 4;
      const bool is_row = row < place.count;
      const int query = place.query_of(plan, row);
      const int head = place.head * plan.heads_per_kv + row - query * plan.heads_per_kv;
      const int64_t token = query_begin(p, place.seq) + int64_t{query};
      const uint16_t* const at = static_cast<const uint16_t*>(p.q) + token * p.q_stride[0] +
                                 head * p.q_stride[1] + lane % 4 * 8;
#pragma unroll
      for (int j = 0; j < kDim / 32; ++j) {
        uint4 bits{};
        if (is_row && plan.q_aligned) bits = *reinterpret_cast<const uint4*>(at + 32 * j);
        w[b][j][0] = bits.x;
        w[b][j][1] = bits.y;
        w[b][j][2] = bits.z;
        w[b][j][3] = bits.w;
        if (is_row && !plan.q_aligned) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            w[b][j][i] = at[32 * j + 2 * i] | static_cast<uint32_t>(at[32 * j + 2 * i + 1]) << 16;
          }
        }
      }
    }
  }

  /// The largest magnitude; NaN if there is one.
  __device__ __forceinline__ float largest(DType dtype, int block) const {
    uint32_t pair = 0;
#pragma unroll
    for (int j = 0; j < kDim / 32; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) pair = __vmaxu2(pair, w[block][j][i] & 0x7fff7fffu);
    }
    const uint32_t most = max(pair & 0xffffu, pair >> 16);
    return dtype == DType::kFloat16
               ? __half2float(__ushort_as_half(static_cast<unsigned short>(most)))
               : __int_as_float(static_cast<int>(most << 16));
  }

  /// Channel 32j + 8t + i as v[8j + i].
  __device__ __forceinline__ void to_float(DType dtype, int block, float (&v)[kDim / 4]) const {
#pragma unroll
    for (int j = 0; j < kDim / 32; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t bits = w[block][j][i];
        const float2 pair = dtype == DType::kFloat16 ? device::pair_to_float<__half>(bits)
                                                     : device::pair_to_float<__nv_bfloat16>(bits);
        v[8 * j + 2 * i] = pair.x;
        v[8 * j + 2 * i + 1] = pair.y;
      }
    }
  }
};

/// A query row is multiplied by a power of two that brings its largest element, of this exponent of
/// fp32, to 8..16, and by the sign of sm_scale; the scores are multiplied by the rest.
__device__ __forceinline__ float query_factor(const DecodeParams& p, int exponent) {
  return copysignf(__int_as_float((257 - exponent) << 23), p.sm_scale);
}
__device__ __forceinline__ float score_scale(const DecodeParams& p, int exponent) {
  const float inverse = __int_as_float((exponent - 3) << 23);
  return fmaxf(fabsf(p.sm_scale) * inverse * device::kLog2e,
               1.17549435e-38f);  // never -infinity * 0
}

/// A logit, base 2, bent by the soft cap. to_cap: 2 / soft_cap.
__device__ __forceinline__ float soft_capped(float logit, float soft_cap, float to_cap) {
  // tanh(x) = 1 - 2 / (2^(2 x log2(e)) + 1)
  const float e = device::exp2_fast(logit * to_cap);
  return soft_cap * device::kLog2e * (1.f - __fdividef(2.f, e + 1.f));
}

template <bool kBFloat16, int kDim>
__device__ __forceinline__ void pack_query(const float (&v)[kDim / 4],
                                           uint32_t (&b)[kDim / 32][4]) {
#pragma unroll
  for (int j = 0; j < kDim / 32; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b[j][i] = device::pack_pair<kBFloat16>(v[8 * j + 2 * i], v[8 * j + 2 * i + 1]);
    }
  }
}

/// What the rows of a warp see.
template <int kBlocks>
__device__ __forceinline__ void open_item(const DecodeParams& p, const DecodePlan& plan,
                                          const RowPlace& place, WarpRows<kBlocks>& rows) {
  const int length = sequence_length(p, place.seq);
  const int last = min(place.first + kBlocks * device::kBlockRows, place.count) - 1;
  rows.seen = {{0, 0}, {0, 0}};
  if (place.first < place.count) {
    rows.seen = visible_range(p, plan, length, place.queries, place.query_of(plan, place.first),
                              place.query_of(plan, last));
  }
}

/// One row of the result. v[k]: channels first_channel + k.
template <int kCount>
__device__ __forceinline__ void store_channels(const DecodeParams& p, const DecodePlan& plan,
                                               int64_t offset, const float (&v)[kCount]) {
  uint16_t* const to = static_cast<uint16_t*>(p.out) + offset;
  uint32_t w[kCount / 2];
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    w[i] = p.dtype == DType::kFloat16 ? device::pack_pair<false>(v[2 * i], v[2 * i + 1])
                                      : device::pack_pair<true>(v[2 * i], v[2 * i + 1]);
  }
  if (plan.out_aligned) {
    if constexpr (kCount == 8) {
      *reinterpret_cast<uint4*>(to) = {w[0], w[1], w[2], w[3]};
    } else if constexpr (kCount == 4) {
      *reinterpret_cast<uint2*>(to) = {w[0], w[1]};
    } else {
      static_assert(kCount == 2);
      *reinterpret_cast<uint32_t*>(to) = w[0];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = static_cast<uint16_t>(w[i / 2] >> (i % 2 * 16));
  }
}

/// Row `row` of a sequence and KV head: where it goes and what finishes it.
struct OutputRow {
  int64_t out;
  int64_t lse;
  device::RowResult result;

  __device__ __forceinline__ OutputRow(const DecodeParams& p, const DecodePlan& plan,
                                       const RowPlace& place, int row, float top, float sum) {
    const int query = place.query_of(plan, row);
    const int head = (place.head - query) * plan.heads_per_kv + row;
    const int64_t token = query_begin(p, place.seq) + int64_t{query};
    out = token * p.out_stride[0] + head * p.out_stride[1];
    lse = token * p.lse_stride[0] + head * p.lse_stride[1];
    float sink = device::negative_infinity();
    if (p.sinks != nullptr && p.kv.seq_lens[place.seq] > 0) {
      const int64_t at = head * p.sinks_stride;
      sink = p.sinks_dtype == DType::kFloat32 ? static_cast<const float*>(p.sinks)[at]
             : p.sinks_dtype == DType::kFloat16
                 ? __half2float(static_cast<const __half*>(p.sinks)[at])
                 : __bfloat162float(static_cast<const __nv_bfloat16*>(p.sinks)[at]);
    }
    result = device::finish_row(top, sum, sink);
  }
};

template <int kDim, int kBlocks>
__device__ __forceinline__ void write_rows(const DecodeParams& p, const DecodePlan& plan,
                                           const RowPlace& place, int lane,
                                           const device::SoftmaxState<kDim, kBlocks>& state) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int parity = 0; parity < 2; ++parity) {
      const float sum = device::sum_over_tokens(state.sum[b][parity]);
      const int row = place.first + b * device::kBlockRows + 2 * (lane % 4) + parity;
      if (row >= place.count) continue;
      const OutputRow to(p, plan, place, row, state.top[b][parity], sum);
#pragma unroll
      for (int c = 0; c < kDim / 64; ++c) {
        float v[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          v[k] = state.out[b][4 * c + k / 2][k % 2 * 2 + parity] * to.result.factor;
        }
        store_channels(p, plan, to.out + 64 * c + lane / 4 * 8, v);
      }
      if (p.lse != nullptr && lane < 4) p.lse[to.lse] = to.result.lse;
    }
  }
}

}  // namespace kvarn::cuda
