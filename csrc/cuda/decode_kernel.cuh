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

namespace kvarn::cuda {

/// A number that is the same in all lanes, told to the compiler: it branches on it without
/// provisions for lanes that part.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(device::kAllLanes, x, 0); }

/// What a stage of a ring holds.
struct alignas(16) StageTile {
  int tile;  ///< of the sequence
  int slot;  ///< staging slot, -1: the record is in the stage
  int flags;
};

/// Whose tile it is.
struct alignas(16) StagePiece {
  int seq;
  int head;
  int row_block;
  int unit;        ///< with splits, of the item
  int units;       ///< of the item
  int first_unit;  ///< with splits, number of the item's first unit in the batch
};

enum StageFlags : int {
  kEnd = 1,        ///< nothing more
  kFirstTile = 2,  ///< of a piece
  kLastTile = 4,
  kBeginsItem = 8,  ///< the piece has the first unit of its item
  kEndsItem = 16,   ///< and the last
  kNoTile = 32,     ///< the piece has no tiles
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

/// Where a team is in its share: needed once a tile, so not in registers.
struct alignas(16) TeamProgress {
  Cursor cursor;
  StagePiece piece;
};

/// A tile that was looked up.
struct alignas(16) TilePlace {
  const uint8_t* record;  ///< null: there is none
  int slot;
};

struct DecodeShared {
  SequenceScan scan;
  TeamProgress progress[kDecodeWarps];
  TilePlace place[kDecodeWarps][kWarpLanes];
  StagePiece piece[kMaxStages];
  Division division;
  device::Barrier full[kMaxStages];
  device::Barrier empty[kMaxStages];
  StageTile tile[kMaxStages];
  StagePiece current[kDecodeWarps];  ///< of each warp
  TeamShare share[kDecodeWarps];
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
  __device__ __forceinline__ RowsVisible<kBlocks> rows_visible(const DecodeParams& p,
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
  const int length = sequence_work(p, plan, place.seq).length;
  const int last = min(place.first + kBlocks * device::kBlockRows, place.count) - 1;
  rows.seen = {{0, 0}, {0, 0}};
  if (place.first < place.count) {
    rows.seen = visible_range(p, plan, length, place.queries, place.query_of(plan, place.first),
                              place.query_of(plan, last));
  }
}

/// The first of the lane's two tokens of a tile of 16.
__device__ __forceinline__ int token_of(int tile, int lane) {
  using device::kHalfTiles;
  return tile / kHalfTiles * device::kHalfTokens + lane / 4 * 8 + tile % kHalfTiles * 2;
}

/// Scores [block][j][2*i + parity] of the tokens i of tiles j -> probabilities relative to
/// state.top, whose sum is added to the state. unit: of the scores. kPlain: no soft cap, and all
/// rows see all tokens.
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
          if (token < seen.begin || token >= seen.end)
            scores[b][j][i] = device::negative_infinity();
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

/// The first warp of a team finds the tiles of its share, up to 32 of a piece at a time, a lane
/// each, and fills the ring. All numbers are the same in all lanes.
class Producer {
 public:
  __device__ __forceinline__ void start(const DecodeParams& p, const DecodePlan& plan,
                                        DecodeShared& shared, int chunk, unsigned share, int team,
                                        int lane) {
    Cursor cursor;
    cursor.start(p, plan, shared.division, shared.scan, chunk, share, lane);
    if (lane == 0) {
      shared.share[team].first = item_of(cursor);
      shared.share[team].cut_at_begin = plan.split_tiles == 0 && !cursor.begins_item();
    }
    open(p, shared, cursor, team, lane);
  }

  /// Puts the next tile into a stage that is free. at: number of the stage in the block.
  __device__ __forceinline__ StageTile fill(const DecodeParams& p, const DecodePlan& plan,
                                            DecodeShared& shared, uint8_t* stage, int at, int team,
                                            int bytes, int lane) {
    if (next_ == found_) more(p, plan, shared, team, lane);
    const TilePlace place = shared.place[team][(next_ - first_) % kWarpLanes];
    StageTile tile{next_, place.slot, flags_};
    if (next_ == begin_) {
      tile.flags |= kFirstTile;
      if (lane == 0) shared.piece[at] = shared.progress[team].piece;
    }
    if (++next_ >= end_) tile.flags |= kLastTile;
    if (lane == 0) shared.tile[at] = tile;
    device::Barrier* const barrier = &shared.full[at];
    if (place.record == nullptr) {
      device::RingCopy::arrive(barrier, lane);
    } else if (plan.records_aligned) {
      device::RingCopy::copy(stage, place.record, bytes, barrier, lane);
    } else {
      device::copy_bytes(stage, place.record, bytes, lane);
      __syncwarp();
      device::RingCopy::arrive(barrier, lane);
    }
    return tile;
  }

 private:
  /// The next tiles of the piece, or the next piece.
  __device__ __forceinline__ void more(const DecodeParams& p, const DecodePlan& plan,
                                       DecodeShared& shared, int team, int lane) {
    __syncwarp();
    if (flags_ == kEnd) {  // again: places that nobody will look at stay empty
      first_ = next_;
      found_ = next_ + 1;
      return;
    }
    Cursor cursor = shared.progress[team].cursor;
    __syncwarp();
    if (next_ < end_) {
      find(p, shared, cursor, team, lane);
      return;
    }
    const bool cut = plan.split_tiles == 0 && !cursor.ends_item();
    const ItemPlace item = item_of(cursor);
    if (cursor.next(p, plan)) {
      open(p, shared, cursor, team, lane);
      return;
    }
    flags_ = kEnd;
    begin_ = -1;
    first_ = next_;
    found_ = next_ + 1;
    if (lane == 0) {
      shared.place[team][0] = {nullptr, -1};
      TeamShare& share = shared.share[team];
      share.last = item;
      share.cut_at_end = cut;
      share.middle = cut && share.cut_at_begin && share.first.start == item.start;
    }
    __syncwarp();
  }

  __device__ __forceinline__ void open(const DecodeParams& p, DecodeShared& shared,
                                       const Cursor& cursor, int team, int lane) {
    begin_ = next_ = cursor.tile;
    end_ = cursor.tile_end;
    flags_ = (cursor.begins_item() ? kBeginsItem : 0) | (cursor.ends_item() ? kEndsItem : 0) |
             (begin_ == end_ ? kNoTile : 0);
    if (lane == 0) {
      shared.progress[team] = {cursor,
                               {cursor.seq, cursor.head, cursor.row_block, cursor.unit,
                                cursor.work.units, static_cast<int>(cursor.item_start)}};
    }
    find(p, shared, cursor, team, lane);
  }

  __device__ __forceinline__ void find(const DecodeParams& p, DecodeShared& shared,
                                       const Cursor& cursor, int team, int lane) {
    first_ = next_;
    found_ = max(min(next_ + kWarpLanes, end_), next_ + 1);  // a piece without tiles has one stage
    TilePlace place{nullptr, -1};
    const int tile = next_ + lane;
    if (tile < end_) {
      const int64_t block = p.kv.block_table.at(cursor.seq, tile);
      if (p.kv.block_slot.data != nullptr) place.slot = static_cast<int>(p.kv.block_slot[block]);
      if (place.slot < 0) {
        place.record =
            p.kv.cache.data + block * p.kv.cache.stride[0] + cursor.head * p.kv.cache.stride[1];
      }
    }
    shared.place[team][lane] = place;
    __syncwarp();
  }

  int next_;   ///< tile
  int first_;  ///< tiles first_ .. found_ - 1 have been looked up
  int found_;
  int begin_;  ///< of the piece
  int end_;
  int flags_;
};

/// A format that the compiler knows; how many tiles of 16 tokens are computed at once (kRowTiles:
/// all of a record), and how many of 16 channels are summed up at once.
template <int kKeyBits, int kValueBits, int kGroup, int kDim>
struct StaticFormat {
  static constexpr int kDim_ = kDim;
  static constexpr int kRowTiles = kGroup / kFragmentDim;
  static constexpr int kSumTiles = kDim < 256 ? kDim / kFragmentDim : 8;
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
  static constexpr int kRowTiles = device::kHalfTiles;
  static constexpr int kSumTiles = device::kHalfTiles;

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
  using Probabilities = device::ProbabilityOperand<kRowTiles, kBlocks>;

  const DecodeParams& p;
  const DecodePlan& plan;
  const int lane;
  WarpRows<kBlocks> rows;
  device::QueryOperand<kDim, kBlocks> query;
  State state;
  bool query_rotated;  ///< the basis of the query: fp16; if not, of the type of the staging pool
  bool rotated;        ///< the basis of the state

  __device__ __forceinline__ void set_basis(bool to_rotated) {
    if (rotated == to_rotated) return;
    state.rotate(lane);
    rotated = to_rotated;
  }

  /// Whether all rows see all of a tile and nothing bends the scores.
  __device__ __forceinline__ bool is_plain(int first_token) const {
    return first_token >= rows.seen.all.begin &&
           first_token + F::format(p).group <= rows.seen.all.end && p.logits_soft_cap == 0.f;
  }

  /// 16-bit scales of the tokens of a record.
  __device__ __forceinline__ void load_token_scales(
      const uint8_t* at, float (&scale)[kRowTiles / device::kHalfTiles][8]) const {
#pragma unroll
    for (int i = 0; i < kRowTiles / device::kHalfTiles; ++i) {
      device::unpack_half8(device::load_16(at + 2 * (i * device::kHalfTokens + lane / 4 * 8)),
                           scale[i]);
    }
  }

  /// Probabilities times the token scales of V; where the sums start. at: the record; token: the
  /// first of those that are computed at once.
  template <bool kPlain>
  __device__ __forceinline__ void weigh(const uint8_t* at, const RowsVisible<kBlocks>& visible,
                                        int first_token, int token, float unit, Scores& scores,
                                        device::Normalizer& norm, Probabilities& operand,
                                        float (&start)[kBlocks][4]) {
    const RecordLayout layout = F::layout(plan);
    const Format format = F::format(p);
    constexpr int kHalves = kRowTiles / device::kHalfTiles;
    probabilities<kPlain>(rows, visible, unit, p.logits_soft_cap, first_token + token, lane, scores,
                          state);
    if (token == 0) {
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

  /// A record in shared memory; place(): a RowPlace.
  template <class Place>
  __device__ __forceinline__ void record(const Place& place, const uint8_t* at, int first_token) {
    set_basis(true);
    constexpr int kTokens = kRowTiles * kFragmentDim;
    const RecordLayout layout = F::layout(plan);
    const Format format = F::format(p);
    const bool plain = is_plain(first_token);
    device::ScaledQuery<kDim, kBlocks> scaled;
    device::Normalizer norm;
#pragma unroll 1
    for (int token = 0; token < format.group; token += kTokens) {
      // With D = 256, the scaled query is made anew for each half: both would not fit the
      // registers.
      if (kDim == 256 || token == 0) {
        device::scale_query(query, at + layout.key_channel_scale, at + layout.key_zero_point,
                            device::bias_of(format.key_bits), lane, scaled);
      }
      Scores scores;
      with_bits(format.key_bits, [&](auto bits) {
        constexpr int kBits = decltype(bits)::value;
        device::score_tiles<kBits>(at + token * (kDim * kBits / 8), scaled, lane, scores);
      });
      float scale[kRowTiles / device::kHalfTiles][8];
      load_token_scales(at + layout.key_token_scale + 2 * token, scale);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
            scores[b][j][i] *= scale[j / device::kHalfTiles][j % device::kHalfTiles * 2 + i / 2];
          }
        }
      }
      Probabilities operand;
      float start[kBlocks][4];
      RowsVisible<kBlocks> visible;
      if (!plain) visible = place().template rows_visible<kBlocks>(p, plan, lane);
      if (plain) {
        weigh<true>(at, visible, first_token, token, scaled.inverse, scores, norm, operand, start);
      } else {
        weigh<false>(at, visible, first_token, token, scaled.inverse, scores, norm, operand, start);
      }
      unsigned skip = 0;
      if (!plain) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const Visible& seen = visible.row[b][i];
            const int begin = first_token + token;
            if (seen.end <= begin || seen.begin >= begin + kTokens) skip |= 1u << (2 * b + i);
          }
        }
      }
      const uint8_t* const scales = at + layout.value_channel_scale;
      constexpr int kTiles = kDim / kFragmentDim;
      with_bits(format.value_bits, [&](auto bits) {
        constexpr int kBits = decltype(bits)::value;
        const uint8_t* const codes = at + layout.value_codes + token * (kDim * kBits / 8);
#pragma unroll
        for (int first = 0; first < kTiles; first += F::kSumTiles) {
          float sums[kBlocks][F::kSumTiles][4];
          device::sum_tiles<kBits, kDim>(codes, first, operand, start, lane, sums);
          if (plain) {
            device::add_sums<false>(scales, norm.inverse, 0, first, sums, lane, state);
          } else {
            device::add_sums<true>(scales, norm.inverse, skip, first, sums, lane, state);
          }
        }
      });
    }
  }

  /// Loads the query. A power of two brings the largest element of a row to 8..16, so that its
  /// rotation (up to sqrt(D) as large) is below 2^8. Rows of fp16 would lose bits as bf16: part 1
  /// is the remainder.
  __device__ __forceinline__ void load_query(const RowPlace& place, bool to_rotated, int part) {
    query_rotated = to_rotated;
    const bool bfloat16 = !to_rotated && p.kv.staging.dtype == DType::kBFloat16;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float v[kDim / 4];
      load_query_row<kDim>(p, plan, place, b, lane, v);
      float most = 0.f;
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) most = fmaxf(most, fabsf(v[i]));
      most = fmaxf(most, __shfl_xor_sync(device::kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(device::kAllLanes, most, 2));
      const int exponent = max(__float_as_int(most) >> 23, 64);
      float normalizer = copysignf(__int_as_float((257 - exponent) << 23), p.sm_scale);
      const float inverse = __int_as_float((exponent - 3) << 23);
      const float scale = fmaxf(fabsf(p.sm_scale) * inverse * device::kLog2e,
                                1.17549435e-38f);  // never -infinity * 0
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        rows.scale[b][i] = __shfl_sync(device::kAllLanes, scale, 4 * (2 * (lane % 4) + i));
      }
      if (to_rotated) {
        device::butterfly_registers<1, kDim / 4>(v);
        device::butterfly_lanes<1, 4>(v, lane);
        normalizer *= device::orthonormal_scale(kDim);
      }
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) {
        v[i] *= normalizer;
        if (part == 1) v[i] -= __bfloat162float(__float2bfloat16_rn(v[i]));
      }
      if (bfloat16) {
        pack_query<true, kDim>(v, query.b[b]);
      } else {
        pack_query<false, kDim>(v, query.b[b]);
      }
    }
  }

  /// A staged tile in global memory.
  template <bool kBFloat16>
  __device__ __forceinline__ void staged(const RowPlace& place, int slot, int first_token) {
    set_basis(false);
    const Staging& pool = p.kv.staging;
    const int group = p.kv.format.group;
    const int64_t base = slot * pool.stride[0] + place.head * pool.stride[2];
    const Visible any = {max(rows.seen.any.begin - first_token, 0),
                         min(rows.seen.any.end - first_token, group)};
    const device::StagedRows keys = {static_cast<const uint16_t*>(pool.data) + base, pool.stride[3],
                                     any.begin, any.end, plan.staging_aligned};
    device::StagedRows values = keys;
    values.data += pool.stride[1];
    const RowsVisible<kBlocks> visible = place.template rows_visible<kBlocks>(p, plan, lane);
    uint64_t not_finite = 0;
    // Two parts of the query, see load_query(); with D = 256 there are no registers for that.
    const int parts = kBFloat16 && kDim < 256 && p.dtype == DType::kFloat16 ? 2 : 1;
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
        not_finite = device::find_not_finite<kBFloat16, kDim>(values, half, from, all_from, lane) |
                     device::find_not_finite<kBFloat16, kDim>(values, half, all_to, to, lane);
        values.left_out = not_finite;
        values.left_out_from = half;
      }
      float scores[kBlocks][1][4] = {};
#pragma unroll 1
      for (int part = 0; part < parts; ++part) {
        if (kBFloat16 && kDim < 256 && parts > 1) load_query(place, false, part);
        device::score_staged<kBFloat16>(keys, token, query, lane, scores);
      }
      probabilities<false>(rows, visible, 1.f, p.logits_soft_cap, first_token + first, lane, scores,
                           state);
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
template <int kDim, int kBlocks>
__device__ __forceinline__ void join_shares(const DecodeParams& p, const DecodePlan& plan,
                                            DecodeShared& shared, int teams,
                                            const float4* last_pieces, int lane) {
  using State = device::SoftmaxState<kDim, kBlocks>;
  const int warp = threadIdx.x / kWarpLanes;
  const int part = warp % plan.row_parts;
  const int part_rows = kBlocks * device::kBlockRows;
  const Division& division = shared.division;
  const float4* const first_pieces = plan.warp_pieces + static_cast<int64_t>(blockIdx.x) *
                                                            kDecodeWarps * State::kVectors *
                                                            kWarpLanes;
  const auto block_piece = [&](int64_t block, int which, int row_part) {
    return plan.pieces +
           ((block * 2 + which) * plan.row_parts + row_part) * (State::kVectors * kWarpLanes);
  };
  const auto rows_of = [&](const ItemPlace& item, int row_part) {
    return RowPlace(p, plan, item.seq, item.head, item.row_block, row_part, part_rows);
  };

  // Border b is that before team b. A run of borders cuts the same item; the warps of the team
  // behind its last border put the item together (team 0 also for the border behind all).
  for (int b = warp / plan.row_parts; b <= teams; b += kDecodeWarps / plan.row_parts) {
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
  __syncthreads();
  for (int which = 0; which < 2; ++which) {
    if (!shared.join[which]) continue;
    const ItemPlace& item = which == 0 ? shared.share[0].first : shared.share[teams - 1].last;
    const int from = division.block_of(item.start);
    const int to = division.block_of(item.start + item.units - 1);
    for (int row_part = 0; row_part < plan.row_parts; ++row_part) {
      join<kDim, kBlocks>(
          p, plan, rows_of(item, row_part), to - from + 1,
          [&](int i) { return block_piece(from + i, i == 0 ? 1 : 0, row_part); }, warp,
          kDecodeWarps, lane);
    }
  }
}

/// kAlone: a warp is a team.
template <class F, int kBlocks, bool kAlone>
__global__ void __launch_bounds__(kDecodeThreads, 1)
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

  if (threadIdx.x < plan.teams * plan.stages) {
    device::barrier_init(&shared.full[threadIdx.x], device::RingCopy::kArrivals);
    device::barrier_init(&shared.empty[threadIdx.x], plan.row_parts);
    device::barrier_init_fence();
  }
  if (threadIdx.x < 2) shared.join[threadIdx.x] = false;
  const int chunk = static_cast<int>((p.kv.seqs + kDecodeThreads - 1) / kDecodeThreads);
  divide(p, plan, chunk, shared.scan, shared.division);
  const int first_share = static_cast<int>(blockIdx.x) * shared.division.teams;
  const int teams = uniform(
      max(min(static_cast<int>(shared.division.shares) - first_share, shared.division.teams), 0));

  TileWorker<F, kBlocks> worker{p, plan, lane};
  worker.query_rotated = true;
  if (team < teams) {
    const int record_bytes = F::layout(plan).bytes;
    uint8_t* const ring = rings + team * plan.stages * record_bytes;
    const int first_stage = team * plan.stages;
    Producer producer;
    if (part == 0) {
      producer.start(p, plan, shared, chunk, static_cast<unsigned>(first_share + team), team, lane);
#pragma unroll 1
      for (int i = 0; i < plan.stages; ++i) {
        producer.fill(p, plan, shared, ring + i * record_bytes, first_stage + i, team, record_bytes,
                      lane);
      }
      __syncwarp();
    }
    int stage = 0;
    unsigned parity = 0;
    int behind = -1;  // the stage before
    const StagePiece& piece = shared.current[warp];
#pragma unroll 1
    for (;;) {
      const int at = first_stage + stage;
      // What it has written itself a warp need not wait for.
      if (!kAlone) device::barrier_wait(&shared.full[at], parity);
      const StageTile tile = shared.tile[at];
      if (tile.flags & kEnd) break;
      const auto place = [&] {
        return RowPlace(p, plan, piece.seq, piece.head, piece.row_block, part,
                        kBlocks * device::kBlockRows);
      };
      if (tile.flags & kFirstTile) {
        __syncwarp();
        if (lane == 0) shared.current[warp] = shared.piece[at];
        __syncwarp();
        open_item(p, plan, place(), worker.rows);
        worker.state.clear();
        worker.rotated = tile.slot < 0;
      }
      if ((tile.flags & kFirstTile) || worker.query_rotated != (tile.slot < 0)) {
        worker.load_query(place(), tile.slot < 0, 0);
      }
      if (kAlone) device::barrier_wait(&shared.full[at], parity);
      const int first_token = tile.tile << plan.group_shift;
      const bool seen = kAlone || (first_token < worker.rows.seen.any.end &&
                                   first_token + F::format(p).group > worker.rows.seen.any.begin);
      if (seen && !(tile.flags & kNoTile)) {
        if (tile.slot < 0) {
          worker.record(place, ring + stage * record_bytes, first_token);
        } else if (p.kv.staging.dtype == DType::kFloat16) {
          worker.template staged<false>(place(), tile.slot, first_token);
        } else {
          worker.template staged<true>(place(), tile.slot, first_token);
        }
      }
      __syncwarp();
      if constexpr (kAlone) {
        producer.fill(p, plan, shared, ring + stage * record_bytes, at, team, record_bytes, lane);
        __syncwarp();
      } else {
        if (lane == 0) device::barrier_arrive(&shared.empty[at]);
        if (part == 0 && behind >= 0) {
          // Not this place but the one before it, which the others seldom still need.
          device::barrier_wait(&shared.empty[first_stage + behind],
                               behind < stage ? parity : parity ^ 1);
          producer.fill(p, plan, shared, ring + behind * record_bytes, first_stage + behind, team,
                        record_bytes, lane);
        }
        behind = stage;
      }
      if (++stage == plan.stages) {
        stage = 0;
        parity ^= 1;
      }

      if (!(tile.flags & kLastTile)) continue;
      worker.set_basis(false);
      constexpr int kWhole = kBeginsItem | kEndsItem;
      if ((tile.flags & kWhole) == kWhole) {
        write_rows(p, plan, place(), lane, worker.state);
      } else if (plan.split_tiles > 0) {
        const int64_t item = int64_t{piece.first_unit} * row_parts + part;
        const auto memory = [&](int unit) {
          return plan.pieces + (item + int64_t{unit} * row_parts) * (State::kVectors * kWarpLanes);
        };
        worker.state.store(memory(piece.unit), lane);
        if (arrive_last(plan.counters + item, static_cast<unsigned>(piece.units), lane)) {
          join<kDim, kBlocks>(p, plan, place(), piece.units, memory, 0, 1, lane);
        }
      } else if (!(tile.flags & kBeginsItem) && (tile.flags & kEndsItem)) {
        worker.state.store(plan.warp_pieces + (static_cast<int64_t>(blockIdx.x) * kDecodeWarps +
                                               team * row_parts + part) *
                                                  (State::kVectors * kWarpLanes),
                           lane);
      }
    }
  }
  if (plan.split_tiles > 0) return;
  __syncthreads();  // the rings are free
  float4* const last_pieces = reinterpret_cast<float4*>(rings);
  if (team < teams && shared.share[team].cut_at_end) {
    worker.state.store(last_pieces + warp * (State::kVectors * kWarpLanes), lane);
  }
  __syncthreads();
  if (teams > 0) join_shares<kDim, kBlocks>(p, plan, shared, teams, last_pieces, lane);
}

}  // namespace kvarn::cuda
