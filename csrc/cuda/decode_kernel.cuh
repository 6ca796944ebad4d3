// The kernel of decode_attention.
//
// Roofline. Records are read once: 13.8 KB for k4v2, D = G = 128, in 800 clocks of an SM at the
// memory bandwidth of an H200, in which its four schedulers issue 3200 instructions: three for each
// of the 1024 codes of a lane. attention_records.cuh has the arithmetic that needs only about one.
//
// A *team* of warps works through its share of all units (decode_plan.cuh), tile after tile; with
// more query rows than one warp holds, the warps of a team share the bytes and divide the rows.
// A ring of whole records in shared memory stands before each team; its first warp keeps it full.
// Staged tiles are read straight from global memory (attention_staged.cuh).
//
// Items that lie in several shares are put together in the same launch: inside a block through
// shared memory; between blocks through the workspace, by the block that comes last, always in the
// same order. Partial results are in the original basis.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/decode_plan.cuh"
#include "device/attention_staged.cuh"
#include "device/numeric.cuh"
#include "device/ring.cuh"

#ifdef KVARN_TRACE  // TRACE
static __device__ long long trace_data[132 * 2][16];  // TRACE
#define TRACE(i) if (threadIdx.x == 0) trace_data[blockIdx.x][i] = clock64();  // TRACE
#else  // TRACE
#define TRACE(i)  // TRACE
#endif  // TRACE
namespace kvarn::cuda {

/// A number that is the same in all lanes, told to the compiler: it branches on it without
/// provisions for lanes that part.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(device::kAllLanes, x, 0); }


/// A tile that a team is about to read.
struct alignas(16) NextTile {
  const uint8_t* record;  ///< null: staged, or none
  int tile;               ///< of the sequence
  int slot;               ///< staging slot, -1: a record
  int flags;
};

/// Whose tiles they are.
struct Piece {
  int seq;
  int head;
  int row_block;
  int unit;        ///< with splits, of the item
  int units;       ///< of the item
  int first_unit;  ///< with splits, number of the item's first unit in the batch
};

enum TileFlags : int {
  kEnd = 1,          ///< nothing more
  kFirstTile = 2,    ///< of a piece
  kLastTile = 4,
  kBeginsItem = 8,   ///< the piece has the first unit of its item
  kEndsItem = 16,    ///< and the last
  kNoTile = 32,      ///< the piece has no tiles
};

/// An item that a share has a part of.
struct ItemPlace {
  int64_t start;  ///< number of its first unit
  int units;
  int seq;
  int head;
  int row_block;
};

/// What a team tells its block.
struct TeamShare {
  ItemPlace first;
  ItemPlace last;
  bool cut_at_begin;  ///< `first` began in the share before
  bool cut_at_end;    ///< `last` goes on in the share behind
  bool middle;        ///< both, and they are the same item
};

/// Where a team is in its share: what is not needed with every tile is not in registers.
struct TeamProgress {
  Cursor cursor;  ///< of the tiles that are looked up next
  int ahead;      ///< the first of them
  int ahead_flags;
  Piece piece;  ///< of the tiles that are next
  int begin;    ///< its tiles
  int end;
  int flags;
  int first;  ///< the first tile of those that were looked up last
};

struct BlockPlace {
  int block;
  int slot;  ///< staging slot, -1: a record
};

/// The ring of a team: places for K and V parts, and what is known of the tiles ahead.
inline constexpr int kMaxPlaces = 4;
inline constexpr int kMaxAhead = 8;     ///< tiles; a power of two
inline constexpr int kMaxTiles = 48;    ///< ahead, of all teams
inline constexpr int kMaxRings = 12;
inline constexpr int kLookup = 16;  ///< tiles whose blocks are looked up together

struct DecodeShared {
  SequenceScan scan;
  Division division;
  device::Barrier full[kMaxRings][2 * kMaxPlaces];   ///< K parts, then V parts
  device::Barrier empty[kMaxRings][kMaxPlaces];      ///< with several warps in a team
  NextTile tile[kMaxTiles];
  Piece piece[kMaxTiles];
  TeamProgress progress[kMaxRings];
  BlockPlace place[kMaxRings][kLookup];
  Piece current[kDecodeWarps];  ///< of each warp
  TeamShare share[kMaxRings];
  bool join[2];
};
static_assert(sizeof(DecodeShared) <= kDecodeStaticBytes);

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
  __device__ __forceinline__ RowsVisible<kBlocks> visible_of(const DecodeParams& p,
                                                             const DecodePlan& plan,
                                                             int lane) const {
    const int length = sequence_work(p, plan, seq).length;
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

/// 8 channels from each 32 of a row of q: v[8j + i] is channel 32j + 8t + i.
template <int kDim>
__device__ __forceinline__ void load_query(const DecodeParams& p, const DecodePlan& plan,
                                           int64_t offset, float (&v)[kDim / 4]) {
#pragma unroll
  for (int j = 0; j < kDim / 32; ++j) {
    const uint16_t* const at = static_cast<const uint16_t*>(p.q) + offset + 32 * j;
    uint32_t w[4];
    if (plan.q_aligned) {
      const uint4 bits = *reinterpret_cast<const uint4*>(at);
      w[0] = bits.x;
      w[1] = bits.y;
      w[2] = bits.z;
      w[3] = bits.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = at[2 * i] | static_cast<uint32_t>(at[2 * i + 1]) << 16;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = p.dtype == DType::kFloat16 ? device::pair_to_float<__half>(w[i])
                                                     : device::pair_to_float<__nv_bfloat16>(w[i]);
      v[8 * j + 2 * i] = pair.x;
      v[8 * j + 2 * i + 1] = pair.y;
    }
  }
}

/// The lane's part of row n = lane / 4 of a block of rows, 0 if there is none.
template <int kDim>
__device__ __forceinline__ void load_query_row(const DecodeParams& p, const DecodePlan& plan,
                                               const RowPlace& place, int block, int lane,
                                               float (&v)[kDim / 4]) {
  const int row = place.first + block * device::kBlockRows + lane / 4;
  if (row < place.count) {
    const int query = place.query_of(plan, row);
    const int head = place.head * plan.heads_per_kv + row - query * plan.heads_per_kv;
    const int64_t token = query_begin(p, place.seq) + int64_t{query};
    load_query<kDim>(p, plan, token * p.q_stride[0] + head * p.q_stride[1] + lane % 4 * 8, v);
  } else {
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) v[i] = 0.f;
  }
}

/// A power of two brings the largest element of a row to 8..16, so that its rotation (up to sqrt(D)
/// as large) is below 2^8. v: a lane's elements of the row.
template <int kCount>
__device__ __forceinline__ int row_exponent(const float (&v)[kCount]) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) most = fmaxf(most, fabsf(v[i]));
  most = fmaxf(most, __shfl_xor_sync(device::kAllLanes, most, 1));
  most = fmaxf(most, __shfl_xor_sync(device::kAllLanes, most, 2));
  return max(__float_as_int(most) >> 23, 64);
}

/// What the row is multiplied by; it takes the sign of the scale of the scores.
__device__ __forceinline__ float row_normalizer(int exponent, float sm_scale) {
  return copysignf(__int_as_float((257 - exponent) << 23), sm_scale);
}

/// And the inverse of it.
__device__ __forceinline__ float row_unit(int exponent) {
  return __int_as_float((exponent - 3) << 23);
}

template <bool kBFloat16, int kDim>
__device__ __forceinline__ void pack_query(const float (&v)[kDim / 4], float scale,
                                           uint32_t (&b)[kDim / 32][4]) {
#pragma unroll
  for (int j = 0; j < kDim / 32; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b[j][i] = device::pack_pair<kBFloat16>(v[8 * j + 2 * i] * scale,
                                             v[8 * j + 2 * i + 1] * scale);
    }
  }
}

/// What the rows see, and the query in the rotated basis.
template <int kDim, int kBlocks>
__device__ __forceinline__ void open_item(const DecodeParams& p, const DecodePlan& plan,
                                          const RowPlace& place, int lane, WarpRows<kBlocks>& rows,
                                          device::QueryOperand<kDim, kBlocks>& rotated) {
  const int length = sequence_work(p, plan, place.seq).length;
  const int last = min(place.first + kBlocks * device::kBlockRows, place.count) - 1;
  rows.seen = {{0, 0}, {0, 0}};
  if (place.first < place.count) {
    rows.seen = visible_range(p, plan, length, place.queries, place.query_of(plan, place.first),
                              place.query_of(plan, last));
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    float v[kDim / 4];
    load_query_row<kDim>(p, plan, place, b, lane, v);
    const int exponent = row_exponent(v);
    const float scale = fmaxf(fabsf(p.sm_scale) * row_unit(exponent) * device::kLog2e,
                              1.17549435e-38f);  // never -infinity * 0
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.scale[b][i] = __shfl_sync(device::kAllLanes, scale, 4 * (2 * (lane % 4) + i));
    }
    device::butterfly_registers<1, kDim / 4>(v);
    device::butterfly_lanes<1, 4>(v, lane);
    pack_query<false, kDim>(
        v, row_normalizer(exponent, p.sm_scale) * device::orthonormal_scale(kDim), rotated.b[b]);
  }
}

/// The first of the lane's two tokens of a tile of 16.
__device__ __forceinline__ int token_of(int tile, int lane) {
  using device::kHalfTiles;
  return tile / kHalfTiles * device::kHalfTokens + lane / 4 * 8 + tile % kHalfTiles * 2;
}

/// Scores [block][j][2*i + parity] of the tokens i of tiles j -> probabilities relative to
/// state.top, whose sum is added to the state. unit: of the scores. kPlain: no soft cap, and all rows see all tokens.
template <bool kPlain, int kDim, int kBlocks, int kRowTiles>
__device__ __forceinline__ void probabilities(const WarpRows<kBlocks>& rows,
                                              const RowsVisible<kBlocks>& visible, float unit,
                                              float soft_cap, int first_token, int lane,
                                              float (&scores)[kBlocks][kRowTiles][4],
                                              device::SoftmaxState<kDim, kBlocks>& state) {
  constexpr float kGrowth = 8.f;  // of the sum's reference, so that few tiles change it
  float scale[kBlocks][2];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    scale[b][0] = rows.scale[b][0] * unit;
    scale[b][1] = rows.scale[b][1] * unit;
  }
  if (!kPlain && soft_cap != 0.f) {
    const float to_cap = 2.f / soft_cap;  // tanh(x) = 1 - 2 / (2^(2 x log2(e)) + 1)
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& s = scores[b][j][i];
          const float e = device::exp2_fast(s * scale[b][i % 2] * to_cap);
          s = soft_cap * device::kLog2e * (1.f - __fdividef(2.f, e + 1.f));
        }
      }
      scale[b][0] = scale[b][1] = 1.f;
    }
  }
  if constexpr (!kPlain) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = first_token + token_of(j, lane) + i / 2;
          const Visible& seen = visible.row[b][i % 2];
          if (token < seen.begin || token >= seen.end) scores[b][j][i] = device::negative_infinity();
        }
      }
    }
  }
  float most[kBlocks][2];
  bool grow = false;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = fmaxf(scores[b][0][i], scores[b][0][2 + i]);
#pragma unroll
      for (int j = 1; j < kRowTiles; ++j) {
        m = fmaxf(m, fmaxf(scores[b][j][i], scores[b][j][2 + i]));
      }
      most[b][i] = m * scale[b][i];
      grow |= most[b][i] > state.top[b][i] + kGrowth;
    }
  }
  if (__any_sync(device::kAllLanes, grow)) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Each row for itself: which rows share a warp must not show in the result.
        const float m = device::max_over_tokens(most[b][i]);
        if (m > state.top[b][i] + kGrowth) {
          state.scale_row(b, i, device::exp2_fast(state.top[b][i] - m));
          state.top[b][i] = m;
        }
      }
    }
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float top = state.top[b][i];
      const float reference = top == device::negative_infinity() ? 0.f : top;
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
          float& s = scores[b][j][k + i];
          s = device::exp2_fast(fmaf(s, scale[b][i], -reference));
          sum += s;
        }
      }
      state.sum[b][i] += sum;
    }
  }
}

/// weight(j, i): of token i of tile j. What a row does not see is 0 whatever its weight.
template <bool kPlain, bool kBFloat16, int kBlocks, int kRowTiles, class Weight>
__device__ __forceinline__ void pack_probabilities(
    const float (&p)[kBlocks][kRowTiles][4], const RowsVisible<kBlocks>& visible, int first_token,
    int lane, const Weight& weight, device::ProbabilityOperand<kRowTiles, kBlocks>& to) {
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float w = weight(j, i);
      const int token = first_token + token_of(j, lane) + i;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        float pair[2] = {p[b][j][2 * i] * w, p[b][j][2 * i + 1] * w};
        if constexpr (!kPlain) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const Visible& seen = visible.row[b][k];
            if (token < seen.begin || token >= seen.end) pair[k] = 0.f;
          }
        }
        to.b[b][j][i] = device::transpose_8x8(device::pack_pair<kBFloat16>(pair[0], pair[1]));
      }
    }
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

/// Adds up one float4 column of `count` states, eight at a time. piece(i): where state i lies.
template <int kDim, int kBlocks, class Piece>
__device__ __forceinline__ void join_column(int column, int count, const Piece& piece, int lane,
                                            float4& out, float (&top)[2], float (&sum)[2]) {
  using State = device::SoftmaxState<kDim, kBlocks>;
  constexpr int kAtOnce = 8;
  const int row_column = kBlocks * State::kTiles + column / State::kTiles;
  const float none = device::negative_infinity();
  out = {0.f, 0.f, 0.f, 0.f};
  top[0] = top[1] = none;
  sum[0] = sum[1] = 0.f;
#pragma unroll 1
  for (int first = 0; first < count; first += kAtOnce) {
    float4 v[kAtOnce], row[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      row[i] = {none, none, 0.f, 0.f};
      v[i] = {0.f, 0.f, 0.f, 0.f};
      if (first + i < count) {
        const float4* const at = piece(first + i);
        row[i] = __ldcg(at + row_column * kWarpLanes + lane);
        v[i] = __ldcg(at + column * kWarpLanes + lane);
      }
    }
    float most[2] = {top[0], top[1]};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      most[0] = fmaxf(most[0], row[i].x);
      most[1] = fmaxf(most[1], row[i].y);
    }
    float reference[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reference[i] = most[i] == none ? 0.f : most[i];
      const float factor = device::exp2_fast(top[i] - reference[i]);
      sum[i] *= factor;
      (i == 0 ? out.x : out.y) *= factor;
      (i == 0 ? out.z : out.w) *= factor;
      top[i] = most[i];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float a = device::exp2_fast(row[i].x - reference[0]);
      const float b = device::exp2_fast(row[i].y - reference[1]);
      sum[0] += row[i].z * a;
      sum[1] += row[i].w * b;
      out.x += v[i].x * a;
      out.y += v[i].y * b;
      out.z += v[i].z * a;
      out.w += v[i].w * b;
    }
  }
}

/// Adds up `count` states of the same rows and writes the result, columns first, first + step, ...
template <int kDim, int kBlocks, class Piece>
__device__ __forceinline__ void join(const DecodeParams& p, const DecodePlan& plan,
                                     const RowPlace& place, int count, const Piece& piece,
                                     int first, int step, int lane) {
  using State = device::SoftmaxState<kDim, kBlocks>;
#pragma unroll 1
  for (int column = first; column < kBlocks * State::kTiles; column += step) {
    float4 out;
    float top[2], sum[2];
    join_column<kDim, kBlocks>(column, count, piece, lane, out, top, sum);
    const int block = column / State::kTiles;
    const int tile = column % State::kTiles;
#pragma unroll
    for (int parity = 0; parity < 2; ++parity) {
      const float all = device::sum_over_tokens(sum[parity]);
      const int row = place.first + block * device::kBlockRows + 2 * (lane % 4) + parity;
      if (row >= place.count) continue;
      const OutputRow to(p, plan, place, row, top[parity], all);
      const float v[2] = {(parity == 0 ? out.x : out.y) * to.result.factor,
                          (parity == 0 ? out.z : out.w) * to.result.factor};
      store_channels(p, plan, to.out + tile / 4 * 64 + lane / 4 * 8 + tile % 4 * 2, v);
      if (p.lse != nullptr && lane < 4 && tile == 0) p.lse[to.lse] = to.result.lse;
    }
  }
}

/// Makes what the warp wrote known to the device and counts it; true: the warp is the last of
/// `count`, and what the others wrote is known to it. The counter is then 0 again.
__device__ __forceinline__ bool arrive_last(unsigned* counter, unsigned count, int lane) {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();  // on the kernel that clears the counters
#endif
  __threadfence();
  __syncwarp();
  unsigned last = 0;
  if (lane == 0) {
    last = atomicAdd(counter, 1u) == count - 1;
    if (last) *counter = 0;
  }
  last = __shfl_sync(device::kAllLanes, last, 0);
  if (last) __threadfence();
  return last != 0;
}

__device__ __forceinline__ ItemPlace item_of(const Cursor& c) {
  return {c.item_start, c.work.units, c.seq, c.head, c.row_block};
}

/// The first warp of a team finds the tiles of its share, 16 of a piece at a time, a lane each, and
/// fills the ring. While the memory is busy with records, a look-up takes as long as several tiles:
/// the next 16 are looked up while these are read. All numbers are the same in all lanes.
class Producer {
 public:
  /// Finds the first piece and asks for the blocks of its first tiles.
  __device__ __forceinline__ void start(const DecodeParams& p, const DecodePlan& plan,
                                        DecodeShared& shared, int chunk, unsigned share, int team,
                                        int lane) {
    Cursor cursor;
    cursor.start(p, plan, shared.division, shared.scan, chunk, share, lane);
    if (lane == 0) {
      shared.share[team].first = item_of(cursor);
      shared.share[team].cut_at_begin = plan.split_tiles == 0 && !cursor.begins_item();
      shared.progress[team] = {cursor, cursor.tile, flags_of(cursor), piece_of(cursor), 0, 0, 0, 0};
    }
    next_ = found_ = 0;
    ask_blocks(p, cursor, cursor.tile, lane);
    __syncwarp();
  }

  /// Describes the next tile.
  __device__ __forceinline__ void describe(const DecodeParams& p, const DecodePlan& plan,
                                           DecodeShared& shared, NextTile& tile, Piece& piece,
                                           int team, int lane) {
    if (next_ == found_) turn(p, plan, shared, team, lane);
    if (next_ == ask_slots_at_) ask_slots(p);
    if (lane == 0) {
      const TeamProgress& progress = shared.progress[team];
      const int flags = progress.flags;
      const BlockPlace place = shared.place[team][(next_ - progress.first) % kLookup];
      NextTile t{nullptr, next_, place.slot, flags};
      if (place.slot < 0 && !(flags & (kEnd | kNoTile))) {
        t.record = p.kv.cache.data + place.block * p.kv.cache.stride[0] +
                   progress.piece.head * p.kv.cache.stride[1];
      }
      if (next_ == progress.begin) {
        t.flags |= kFirstTile;
        piece = progress.piece;
      }
      if (next_ + 1 >= progress.end) t.flags |= kLastTile;
      tile = t;
    }
    ++next_;
    __syncwarp();
  }

 private:
  __device__ __forceinline__ static Piece piece_of(const Cursor& c) {
    return {c.seq, c.head, c.row_block, c.unit, c.work.units, static_cast<int>(c.item_start)};
  }
  __device__ __forceinline__ static int flags_of(const Cursor& c) {
    return (c.begins_item() ? kBeginsItem : 0) | (c.ends_item() ? kEndsItem : 0) |
           (c.tile >= c.tile_end ? kNoTile : 0) | kFirstTile;
  }

  /// For the tiles from `first` on.
  __device__ __forceinline__ void ask_blocks(const DecodeParams& p, const Cursor& cursor, int first,
                                             int lane) {
    block_ = -1;
    slot_ = -1;
    ask_slots_at_ = 0;
    if (lane < kLookup && first + lane < cursor.tile_end) {
      block_ = static_cast<int>(p.kv.block_table.at(cursor.seq, first + lane));
    }
  }

  __device__ __forceinline__ void ask_slots(const DecodeParams& p) {
    if (p.kv.block_slot.data != nullptr && block_ >= 0) {
      slot_ = static_cast<int>(p.kv.block_slot[block_]);
    }
    ask_slots_at_ = -1;
  }

  /// What was looked up is next, and what follows it is asked for.
  __device__ __forceinline__ void turn(const DecodeParams& p, const DecodePlan& plan,
                                       DecodeShared& shared, int team, int lane) {
    TeamProgress& progress = shared.progress[team];
    Cursor cursor = progress.cursor;
    int ahead_flags = progress.ahead_flags;
    if (ahead_flags & kEnd) {
      __syncwarp();
      if (lane == 0) {
        progress.flags = kEnd;
        progress.begin = -1;
      }
      __syncwarp();
      found_ = next_ + 1;
      return;
    }
    if (ask_slots_at_ >= 0) ask_slots(p);
    if (lane < kLookup) shared.place[team][lane] = {block_, slot_};
    next_ = progress.ahead;
    __syncwarp();
    found_ = max(min(next_ + kLookup, cursor.tile_end), next_ + 1);  // one without tiles
    if (lane == 0) {
      progress.first = next_;
      if (ahead_flags & kFirstTile) {
        progress.begin = next_;
        progress.end = cursor.tile_end;
        progress.flags = ahead_flags & ~kFirstTile;
        progress.piece = piece_of(cursor);
      }
    }
    int ahead = found_;
    ahead_flags = 0;
    if (ahead >= cursor.tile_end) {
      const bool cut = plan.split_tiles == 0 && !cursor.ends_item();
      const ItemPlace item = item_of(cursor);
      if (cursor.next(p, plan)) {
        ahead = cursor.tile;
        ahead_flags = flags_of(cursor);
        prefetch_query(p, plan, cursor, lane);
        if (lane == 0) progress.cursor = cursor;
      } else {
        ahead_flags = kEnd;
        ahead = cursor.tile_end;
        if (lane == 0) {
          TeamShare& share = shared.share[team];
          share.last = item;
          share.cut_at_end = cut;
          share.middle = cut && share.cut_at_begin && share.first.start == item.start;
        }
      }
    }
    ask_blocks(p, cursor, ahead, lane);
    ask_slots_at_ = min(next_ + kLookup / 4, found_ - 1);
    if (lane == 0) {
      progress.ahead = ahead;
      progress.ahead_flags = ahead_flags;
    }
    __syncwarp();
  }

  /// The first rows of a piece: of one query token.
  __device__ __forceinline__ static void prefetch_query(const DecodeParams& p,
                                                        const DecodePlan& plan, const Cursor& c,
                                                        int lane) {
    const int row = (c.row_block << plan.rows_shift) + lane / 4;
    const int query = c.work.queries == 1 ? 0 : row / plan.heads_per_kv;
    if (query >= c.work.queries || row >= c.work.queries * plan.heads_per_kv) return;
    const int64_t token = query_begin(p, c.seq) + int64_t{query};
    const int head = (c.head - query) * plan.heads_per_kv + row;
    const int64_t at = token * p.q_stride[0] + head * p.q_stride[1] +
                       lane % 4 * (p.kv.format.head_dim / 4);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint16_t*>(p.q) + at));
  }

  int next_;  ///< tile
  int found_;  ///< the tiles before it have been looked up
  int ask_slots_at_;  ///< tile; -1: already asked
  int block_;  ///< of the lane's tile of those that are looked up next
  int slot_;
};

/// Starts the copy of a part of a record.
__device__ __forceinline__ void copy_part(const DecodePlan& plan, const NextTile& tile,
                                          uint8_t* place, int begin, int end,
                                          device::Barrier* barrier, int lane) {
  if (tile.record == nullptr) {
    device::RingCopy::arrive(barrier, lane);
  } else if (plan.records_aligned) {
    device::RingCopy::copy(place, tile.record + begin, end - begin, barrier, lane);
  } else {
    device::copy_bytes(place, tile.record + begin, end - begin, lane);
    __syncwarp();
    device::RingCopy::arrive(barrier, lane);
  }
}

/// A format that the compiler knows, and how many tiles of 16 tokens are computed at once: all of a
/// record.
template <int kKeyBits, int kValueBits, int kGroup, int kDim>
struct StaticFormat {
  static constexpr int kDim_ = kDim;
  static constexpr int kWarps = decode_warps(kDim);
  static constexpr int kRowTiles = kGroup / kFragmentDim;
  static constexpr Format kFormat{kKeyBits, kValueBits, kGroup, kDim};

  __device__ __forceinline__ static constexpr Format format(const DecodeParams&) { return kFormat; }
  __device__ __forceinline__ static constexpr RecordLayout layout(const DecodePlan&) {
    return record_layout(kFormat);
  }
};

/// Calls fn with bits as a std::integral_constant.
template <class Fn>
__device__ __forceinline__ void with_bits(int bits, const Fn& fn) {
  switch (bits) {
    case 2:
      return fn(std::integral_constant<int, 2>());
    case 3:
      return fn(std::integral_constant<int, 3>());
    case 4:
      return fn(std::integral_constant<int, 4>());
    case 8:
      return fn(std::integral_constant<int, 8>());
  }
}

/// Any format: half a record at once.
template <int kDim>
struct AnyFormat {
  static constexpr int kDim_ = kDim;
  static constexpr int kWarps = decode_warps(kDim);
  static constexpr int kRowTiles = device::kHalfTiles;

  __device__ __forceinline__ static Format format(const DecodeParams& p) { return p.kv.format; }
  __device__ __forceinline__ static RecordLayout layout(const DecodePlan& plan) {
    return plan.layout;
  }
};

/// Attention over one tile by one warp.
template <class F, int kBlocks>
struct TileWorker {
  static constexpr int kDim = F::kDim_;
  static constexpr int kRowTiles = F::kRowTiles;
  using State = device::SoftmaxState<kDim, kBlocks>;
  using Scores = float[kBlocks][kRowTiles][4];
  using Sums = float[kBlocks][kDim / kFragmentDim][4];
  using Probabilities = device::ProbabilityOperand<kRowTiles, kBlocks>;

  const DecodeParams& p;
  const DecodePlan& plan;
  const int lane;
  WarpRows<kBlocks> rows;
  device::QueryOperand<kDim, kBlocks> query;  ///< rotated
  State state;
  int rotated;  ///< the basis of the state: 1 rotated, 0 original, -1 either, all is 0

  __device__ __forceinline__ void set_basis(int to_rotated) {
    if (rotated + to_rotated == 1) state.rotate(lane);
    rotated = to_rotated;
  }

  /// Whether all rows see all of a tile and nothing bends the scores.
  __device__ __forceinline__ bool is_plain(int first_token) const {
    return first_token >= rows.seen.all.begin &&
           first_token + F::format(p).group <= rows.seen.all.end && p.logits_soft_cap == 0.f;
  }

  /// 16-bit scales of the tokens of a record.
  __device__ __forceinline__ void load_token_scales(const uint8_t* at,
                                                    float (&scale)[kRowTiles / device::kHalfTiles][8]) const {
#pragma unroll
    for (int i = 0; i < kRowTiles / device::kHalfTiles; ++i) {
      device::unpack_half8(device::load_16(at + 2 * (i * device::kHalfTokens + lane / 4 * 8)),
                           scale[i]);
    }
  }

  /// Probabilities times the token scales of V; where the sums start. token: the first of those that
  /// are computed at once.
  template <bool kPlain, class WaitValues>
  __device__ __forceinline__ void weigh(const uint8_t* values, const WaitValues& wait_values,
                                        int first_token, int token, float unit, Scores& scores, device::Normalizer& norm,
                                        Probabilities& operand, float (&start)[kBlocks][4]) {
    const RecordLayout layout = F::layout(plan);
    const uint8_t* const at = values - layout.value_codes;  // as if the record began there
    const Format format = F::format(p);
    constexpr int kHalves = kRowTiles / device::kHalfTiles;
    probabilities<kPlain>(rows, visible, unit, p.logits_soft_cap, first_token + token, lane, scores, state);
    if (token == 0) {
      wait_values();
      const Visible any = rows.seen.any;
      norm = device::normalizer(device::largest_half(
          at + layout.value_token_scale, format.group, lane, [&](int pair, uint32_t bits) {
            if constexpr (!kPlain) {
              // Scales of tokens that nobody sees may be anything.
              const int t = first_token + 2 * pair;
              if (t < any.begin || t >= any.end || !device::is_finite_half(bits)) {
                bits &= 0xffff0000u;
              }
              if (t + 1 < any.begin || t + 1 >= any.end || !device::is_finite_half(bits >> 16)) {
                bits &= 0xffffu;
              }
            }
            return bits;
          }));
    }
    float weight[kHalves][8];
    load_token_scales(at + layout.value_token_scale + 2 * token, weight);
    if constexpr (!kPlain) {
      // A zero point that is not finite must not meet the 0 of a row that does not see it: such
      // tokens make their rows NaN through the weight alone.
      float zero[kHalves][8];
      load_token_scales(at + layout.value_zero_point + 2 * token, zero);
#pragma unroll
      for (int i = 0; i < kHalves; ++i) {
#pragma unroll
        for (int k = 0; k < 8; ++k) weight[i][k] += zero[i][k] - zero[i][k];
      }
    }
    pack_probabilities<kPlain, false>(
        scores, visible, first_token + token, lane,
        [&](int j, int i) {
          return weight[j / device::kHalfTiles][j % device::kHalfTiles * 2 + i] * norm.factor;
        },
        operand);
    device::start_sums<!kPlain>(at + layout.value_zero_point + 2 * token, operand,
                                device::bias_of(format.value_bits), lane, start);
  }

  /// A record in shared memory: its K part and its V part. keys_read: called when the K part is not
  /// needed any more; wait_values: when the V part is needed; place(): a RowPlace.
  template <class Place, class KeysRead, class WaitValues>
  __device__ __forceinline__ void record(const uint8_t* keys, const uint8_t* values,
                                         int first_token, const Place& place,
                                         const KeysRead& keys_read,
                                         const WaitValues& wait_values) {
    set_basis(1);
    constexpr int kTokens = kRowTiles * kFragmentDim;
    const RecordLayout layout = F::layout(plan);
    const Format format = F::format(p);
    const bool plain = is_plain(first_token);
    device::ScaledQuery<kDim, kBlocks> scaled;
    device::scale_query(query, keys + layout.key_channel_scale, keys + layout.key_zero_point,
                        device::bias_of(format.key_bits), lane, scaled);
    device::Normalizer norm;
#pragma unroll 1
    for (int token = 0; token < format.group; token += kTokens) {
      Scores scores;
      with_bits(format.key_bits, [&](auto bits) {
        constexpr int kBits = decltype(bits)::value;
        device::score_tiles<kBits>(keys + token * (kDim * kBits / 8), scaled, lane, scores);
      });
      float scale[kRowTiles / device::kHalfTiles][8];
      load_token_scales(keys + layout.key_token_scale + 2 * token, scale);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
            scores[b][j][i] *=
                scale[j / device::kHalfTiles][j % device::kHalfTiles * 2 + i / 2];
          }
        }
      }
      if (token + kTokens == format.group) keys_read();
      Probabilities operand;
      float start[kBlocks][4];
      RowsVisible<kBlocks> visible;
      if (!plain) visible = place().template visible_of<kBlocks>(p, plan, lane);
      if (plain) {
        weigh<true>(values, wait_values, first_token, token, scaled.inverse, scores, visible, norm, operand, start);
      } else {
        weigh<false>(values, wait_values, first_token, token, scaled.inverse, scores, visible, norm, operand, start);
      }
      Sums sums;
      with_bits(format.value_bits, [&](auto bits) {
        constexpr int kBits = decltype(bits)::value;
        device::sum_tiles<kBits, kDim>(values + token * (kDim * kBits / 8),
                                       operand, start, lane, sums);
      });
      if (plain) {
        device::add_sums<false>(values + layout.value_channel_scale - layout.value_codes, norm.inverse, 0, sums, lane,
                                state);
      } else {
        unsigned skip = 0;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const Visible& seen = visible.row[b][i];
            const int begin = first_token + token;
            if (seen.end <= begin || seen.begin >= begin + kTokens) skip |= 1u << (2 * b + i);
          }
        }
        device::add_sums<true>(values + layout.value_channel_scale - layout.value_codes, norm.inverse, skip, sums, lane,
                               state);
      }
    }
  }

  /// The query as it is, as operands of the staging pool's type. Rows of fp16 would lose bits as
  /// bf16: part 1 is the remainder.
  template <bool kBFloat16>
  __device__ __forceinline__ void load_raw_query(const RowPlace& place, int part,
                                                 device::QueryOperand<kDim, kBlocks>& raw) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float v[kDim / 4];
      load_query_row<kDim>(p, plan, place, b, lane, v);
      const float normalizer = row_normalizer(row_exponent(v), p.sm_scale);
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) {
        v[i] *= normalizer;
        if (kBFloat16 && part == 1) v[i] -= __bfloat162float(__float2bfloat16_rn(v[i]));
      }
      pack_query<kBFloat16, kDim>(v, 1.f, raw.b[b]);
    }
  }

  /// A staged tile in global memory.
  template <bool kBFloat16>
  __device__ __forceinline__ void staged(const RowPlace& place, int slot, int first_token) {
    set_basis(0);
    const Staging& pool = p.kv.staging;
    const int group = p.kv.format.group;
    const int64_t base = slot * pool.stride[0] + place.head * pool.stride[2];
    const Visible any = {max(rows.seen.any.begin - first_token, 0),
                         min(rows.seen.any.end - first_token, group)};
    const device::StagedRows keys = {static_cast<const uint16_t*>(pool.data) + base,
                                     pool.stride[3], any.begin, any.end, plan.staging_aligned};
    device::StagedRows values = keys;
    values.data += pool.stride[1];
    uint64_t not_finite = 0;
    const RowsVisible<kBlocks> visible = place.template visible_of<kBlocks>(p, plan, lane);
    const int parts = kBFloat16 && p.dtype == DType::kFloat16 ? 2 : 1;
    device::QueryOperand<kDim, kBlocks> raw;
    load_raw_query<kBFloat16>(place, 0, raw);
#pragma unroll 1
    for (int step = 0; step < group / kFragmentDim; ++step) {
      // Tokens first + 8r and first + 8r + 1.
      const int half = step / device::kHalfTiles * device::kHalfTokens;
      const int token = token_of(step, lane);
      const int first = token - lane / 4 * 8;
      if (step % device::kHalfTiles == 0) {
        // Tokens that some rows see and others do not: a value that is not finite must not meet the
        // 0 of those that do not. It makes the others NaN, and is left out.
        const int from = min(max(any.begin, half), half + device::kHalfTokens);
        const int to = max(min(any.end, half + device::kHalfTokens), from);
        const int all_from = min(max(rows.seen.all.begin - first_token, from), to);
        const int all_to = max(min(rows.seen.all.end - first_token, to), all_from);
        values.left_out = 0;
        not_finite =
            device::find_not_finite<kBFloat16, kDim>(values, half, from, all_from, lane) |
            device::find_not_finite<kBFloat16, kDim>(values, half, all_to, to, lane);
        values.left_out = not_finite;
        values.left_out_from = half;
      }
      float scores[kBlocks][1][4] = {};
#pragma unroll 1
      for (int part = 0; part < parts; ++part) {
        if (parts > 1) load_raw_query<kBFloat16>(place, part, raw);
        device::score_staged<kBFloat16>(keys, token, raw, lane, scores);
      }
      probabilities<false>(rows, visible, 1.f, p.logits_soft_cap, first_token + first, lane, scores, state);
      device::ProbabilityOperand<1, kBlocks> operand;
      pack_probabilities<false, kBFloat16>(
          scores, visible, first_token + first, lane,
          [&](int, int i) {
            return (not_finite >> (token + i - half) & 1) != 0 ? __int_as_float(0x7fffffff) : 1.f;
          },
          operand);
      device::sum_staged<kBFloat16>(values, token, operand, lane, state);
    }
  }
};

/// Puts together what the teams of a block, and the blocks, have of the same items.
template <int kDim, int kBlocks, int kWarps>
__device__ __forceinline__ void join_shares(const DecodeParams& p, const DecodePlan& plan,
                                            DecodeShared& shared, int teams, const float4* last_pieces, int lane) {
  using State = device::SoftmaxState<kDim, kBlocks>;
  const int warp = threadIdx.x / kWarpLanes;
  const int part = warp % plan.row_parts;
  const int part_rows = kBlocks * device::kBlockRows;
  const Division& division = shared.division;
  const float4* const first_pieces =
      plan.warp_pieces + static_cast<int64_t>(blockIdx.x) * kDecodeWarps * State::kVectors * kWarpLanes;
  const auto block_piece = [&](int64_t block, int which, int row_part) {
    return plan.pieces + ((block * 2 + which) * plan.row_parts + row_part) *
                             (State::kVectors * kWarpLanes);
  };
  const auto rows_of = [&](const ItemPlace& item, int row_part) {
    return RowPlace(p, plan, item.seq, item.head, item.row_block, row_part, part_rows);
  };

  // Border b is that before team b. A run of borders cuts the same item; the warps of the team
  // behind its last border put the item together (team 0 also for the border behind all).
  const int chains = kWarps / plan.row_parts;
  for (int b = warp / plan.row_parts; b <= teams && warp < chains * plan.row_parts; b += chains) {
    const bool cut = b < teams ? shared.share[b].cut_at_begin : shared.share[b - 1].cut_at_end;
    if (!cut || (b < teams && shared.share[b].middle)) continue;
    int a = b;
    while (a > 0 && shared.share[a - 1].middle) --a;
    State state;
    state.clear();
    for (int team = max(a - 1, 0); team < b; ++team) {
      state.merge(last_pieces + (team * plan.row_parts + part) * (State::kVectors * kWarpLanes),
                  lane);
    }
    if (b < teams) {
      state.merge(first_pieces + (b * plan.row_parts + part) * (State::kVectors * kWarpLanes),
                  lane);
    }
    const ItemPlace& item = b < teams ? shared.share[b].first : shared.share[b - 1].last;
    if (a > 0 && b < teams) {
      write_rows(p, plan, rows_of(item, part), lane, state);
      continue;
    }
    const int which = a == 0 ? 0 : 1;
    state.store(const_cast<float4*>(block_piece(blockIdx.x, which, part)), lane);
    const int from = division.block_of(item.start);
    const int to = division.block_of(item.start + item.units - 1);
    const auto all = static_cast<unsigned>((to - from + 1) * plan.row_parts);
    if (arrive_last(plan.counters + from, all, lane) && lane == 0) shared.join[which] = true;
  }
  TRACE(9)
  __syncthreads();
  TRACE(10)
  for (int which = 0; which < 2; ++which) {
    if (!shared.join[which]) continue;
    const ItemPlace& item =
        which == 0 ? shared.share[0].first : shared.share[teams - 1].last;
    const int from = division.block_of(item.start);
    const int to = division.block_of(item.start + item.units - 1);
    for (int row_part = 0; row_part < plan.row_parts; ++row_part) {
      join<kDim, kBlocks>(
          p, plan, rows_of(item, row_part), to - from + 1,
          [&](int i) { return block_piece(from + i, i == 0 ? 1 : 0, row_part); }, warp,
          kWarps, lane);
    }
  }
}

/// kAlone: a warp is a team.
template <class F, int kBlocks, bool kAlone>
__global__ void __launch_bounds__(F::kWarps* kWarpLanes, 1)
    decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ DecodePlan plan) {
  constexpr int kDim = F::kDim_;
  using State = device::SoftmaxState<kDim, kBlocks>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ DecodeShared shared;
  const int warp = uniform(threadIdx.x / kWarpLanes);
  const int lane = threadIdx.x % kWarpLanes;
  const int row_parts = kAlone ? 1 : plan.row_parts;
  const int team = warp / row_parts;
  const int part = warp % row_parts;

  TRACE(0)
  const int key_places = plan.key_places;
  const int value_places = plan.value_places;
  if (threadIdx.x < plan.teams) {
    for (int i = 0; i < key_places; ++i) {
      device::barrier_init(&shared.full[threadIdx.x][i], device::RingCopy::kArrivals);
      device::barrier_init(&shared.empty[threadIdx.x][i], row_parts);
    }
    for (int i = 0; i < value_places; ++i) {
      device::barrier_init(&shared.full[threadIdx.x][kMaxPlaces + i], device::RingCopy::kArrivals);
    }
    device::barrier_init_fence();
  }
  if (threadIdx.x < 2) shared.join[threadIdx.x] = false;
  const int chunk = static_cast<int>((p.kv.seqs + kScanThreads - 1) / kScanThreads);
  divide(p, plan, chunk, shared.scan, shared.division);
  TRACE(1)
  const int first_share = static_cast<int>(blockIdx.x) * shared.division.teams;
  const int teams = uniform(
      max(min(static_cast<int>(shared.division.shares) - first_share, shared.division.teams), 0));

  TileWorker<F, kBlocks> worker{p, plan, lane};
  if (team < teams) {
    const RecordLayout layout = F::layout(plan);
    const int key_bytes = layout.value_codes;
    const int value_bytes = layout.bytes - layout.value_codes;
    uint8_t* const keys = rings + team * (key_places * key_bytes + value_places * value_bytes);
    uint8_t* const values = keys + key_places * key_bytes;
    device::Barrier* const full = shared.full[team];
    // Tiles ahead of the one that is read: as many as a ring has places.
    constexpr int kAhead = kAlone ? 4 : kMaxAhead;
    NextTile* const tiles = shared.tile + team * kAhead;
    Piece* const pieces = shared.piece + team * kAhead;
    const auto copy_keys = [&](int n, int place) {
      copy_part(plan, tiles[n % kAhead], keys + place * key_bytes, 0, key_bytes, full + place,
                lane);
    };
    const auto copy_values = [&](int n, int place) {
      copy_part(plan, tiles[n % kAhead], values + place * value_bytes, key_bytes, layout.bytes,
                full + kMaxPlaces + place, lane);
    };
    Producer producer;
    const auto describe = [&](int n) {
      producer.describe(p, plan, shared, tiles[n % kAhead], pieces[n % kAhead], team, lane);
    };
    const auto begin = [&] {
      const int most = max(key_places, value_places);
#pragma unroll 1
      for (int i = 0; i <= most; ++i) {
        describe(i);
        if (i < key_places) copy_keys(i, i);
        if (i < value_places) copy_values(i, i);
      }
    };
    if (part == 0) {
      producer.start(p, plan, shared, chunk, static_cast<unsigned>(first_share + team), team, lane);
      if (!kAlone) begin();
    }
    int n = 0;  // tiles of the share so far
    int key_place = 0;
    int value_place = 0;
    unsigned key_parity = 0;
    unsigned value_parity = 0;
    for (;;) {  // pieces
      if (!kAlone) device::barrier_wait(full + key_place, key_parity);
      // Of what it has written itself a warp need not wait for; its first query is asked for before
      // the memory is busy with records.
      const bool first = kAlone && n == 0;
      if (!first && tiles[n % kAhead].flags & kEnd) break;
      const Piece& piece = shared.current[warp];
      __syncwarp();
      if (lane == 0) {
        shared.current[warp] = first ? shared.progress[team].piece : pieces[n % kAhead];
      }
      __syncwarp();
      const auto place = [&] {
        return RowPlace(p, plan, piece.seq, piece.head, piece.row_block, part,
                        kBlocks * device::kBlockRows);
      };
      open_item(p, plan, place(), lane, worker.rows, worker.query);
      worker.state.clear();
      worker.rotated = -1;
  TRACE(2)
      if (first) begin();
  TRACE(3)
      int flags;
#pragma unroll 1
      do {
        device::barrier_wait(full + key_place, key_parity);
#ifdef KVARN_TRACE  // TRACE
      if (n == 0) { TRACE(4) }  // TRACE
#endif  // TRACE
        const NextTile tile = tiles[n % kAhead];
        flags = tile.flags;
        const auto keys_read = [&] {
          if constexpr (kAlone) {
            __syncwarp();
            copy_keys(n + key_places, key_place);
          }
        };
        const auto wait_values = [&] {
          device::barrier_wait(full + kMaxPlaces + value_place, value_parity);
        };
        const int first_token = tile.tile << plan.group_shift;
        const bool seen = kAlone || (first_token < worker.rows.seen.any.end &&
                                     first_token + F::format(p).group > worker.rows.seen.any.begin);
        if (seen && tile.record != nullptr) {
          worker.record(keys + key_place * key_bytes, values + value_place * value_bytes,
                        first_token, place, keys_read, wait_values);
        } else {
          keys_read();
          if (seen && !(flags & kNoTile)) {
            if (p.kv.staging.dtype == DType::kFloat16) {
              worker.template staged<false>(place(), tile.slot, first_token);
            } else {
              worker.template staged<true>(place(), tile.slot, first_token);
            }
          }
          wait_values();
        }
#ifdef KVARN_TRACE  // TRACE
      if (n == 0) { TRACE(5) } else { TRACE(6) }  // TRACE
#endif  // TRACE
        __syncwarp();
        if constexpr (kAlone) {
          copy_values(n + value_places, value_place);
          describe(n + max(key_places, value_places) + 1);
        } else {
          if (lane == 0) device::barrier_arrive(&shared.empty[team][key_place]);
          if (part == 0 && n > 0) {
            // Not this place but the one before it, which the others seldom still need.
            const int before = (key_place > 0 ? key_place : key_places) - 1;
            device::barrier_wait(&shared.empty[team][before],
                                 key_place > 0 ? key_parity : key_parity ^ 1);
            copy_keys(n - 1 + key_places, before);
            copy_values(n - 1 + key_places, before);
            describe(n + key_places);
          }
        }
        ++n;
        if (++key_place == key_places) {
          key_place = 0;
          key_parity ^= 1;
        }
        if (++value_place == value_places) {
          value_place = 0;
          value_parity ^= 1;
        }
      } while (!(flags & kLastTile));

      worker.set_basis(0);
      constexpr int kWhole = kBeginsItem | kEndsItem;
      if ((flags & kWhole) == kWhole) {
        write_rows(p, plan, place(), lane, worker.state);
      } else if (plan.split_tiles > 0) {
        const int64_t item = int64_t{piece.first_unit} * row_parts + part;
        const auto memory = [&](int unit) {
          return plan.pieces +
                 (item + int64_t{unit} * row_parts) * (State::kVectors * kWarpLanes);
        };
        worker.state.store(memory(piece.unit), lane);
        if (arrive_last(plan.counters + item, static_cast<unsigned>(piece.units), lane)) {
          join<kDim, kBlocks>(p, plan, place(), piece.units, memory, 0, 1, lane);
        }
      } else if (!(flags & kBeginsItem) && (flags & kEndsItem)) {
        worker.state.store(plan.warp_pieces + (static_cast<int64_t>(blockIdx.x) * kDecodeWarps +
                                               team * row_parts + part) *
                                                  (State::kVectors * kWarpLanes),
                           lane);
      }
    }
  }
  if (plan.split_tiles > 0) return;
  TRACE(7)
  __syncthreads();  // the rings are free
  float4* const last_pieces = reinterpret_cast<float4*>(rings);
  if (team < teams && shared.share[team].cut_at_end) {
    worker.state.store(last_pieces + warp * (State::kVectors * kWarpLanes), lane);
  }
  __syncthreads();
  TRACE(8)
  if (teams > 0) join_shares<kDim, kBlocks, F::kWarps>(p, plan, shared, teams, last_pieces, lane);
  TRACE(11)
}

}  // namespace kvarn::cuda
