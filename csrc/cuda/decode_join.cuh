// Items that lie in several shares are put together here: inside a block through shared memory;
// between blocks through the workspace, by the block that comes last. Always in the same order.
#pragma once

#include <cstdint>

#include "cuda/decode_rows.cuh"
#include "cuda/decode_shared.cuh"

namespace kvarn::cuda {

/// States of the same rows in memory, to be added up in this order: one, and others that are
/// `stride` vectors apart.
struct Pieces {
  const float4* first;
  const float4* rest;
  int64_t stride;
  int count;  ///< of all
};

/// One float4 column of a sum of states, with the rows' tops and sums.
struct JoinedColumn {
  float4 out;
  float top[2];
  float sum[2];
};

/// What any thread of the device wrote and made known, in shared memory or global. Every use is
/// behind a barrier or a flag; between them the loads may be moved, so that many are under way.
__device__ __forceinline__ float4 load_piece(const float4* at) {
  float4 v;
  asm volatile("ld.relaxed.gpu.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(at));
  return v;
}

/// Adds up one column; the loads of kAtOnce states are under way together.
template <int kAtOnce, int kDim, int kBlocks>
__device__ __forceinline__ JoinedColumn join_column(const Pieces& pieces, int column, int lane) {
  using State = device::SoftmaxState<kDim, kBlocks>;
  const int row_column = kBlocks * State::kTiles + column / State::kTiles;
  const int rows = row_column * kWarpLanes + lane;
  const int outs = column * kWarpLanes + lane;
  const float none = device::negative_infinity();
  JoinedColumn to{{0.f, 0.f, 0.f, 0.f}, {none, none}, {0.f, 0.f}};
  const float4* first = pieces.first;
  const float4* rest = pieces.rest;
  int left = pieces.count;
#pragma unroll 1
  for (;;) {
    float4 v[kAtOnce], row[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      row[i] = {none, none, 0.f, 0.f};
      v[i] = {0.f, 0.f, 0.f, 0.f};
      if (i < left) {
        const float4* const at = i == 0 ? first : rest + (i - 1) * pieces.stride;
        row[i] = load_piece(at + rows);
        v[i] = load_piece(at + outs);
      }
    }
    float most[2] = {to.top[0], to.top[1]};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      most[0] = fmaxf(most[0], row[i].x);
      most[1] = fmaxf(most[1], row[i].y);
    }
    float reference[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reference[i] = most[i] == none ? 0.f : most[i];
      const float factor = device::exp2_fast(to.top[i] - reference[i]);
      to.sum[i] *= factor;
      (i == 0 ? to.out.x : to.out.y) *= factor;
      (i == 0 ? to.out.z : to.out.w) *= factor;
      to.top[i] = most[i];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float a = device::exp2_fast(row[i].x - reference[0]);
      const float b = device::exp2_fast(row[i].y - reference[1]);
      to.sum[0] = fmaf(row[i].z, a, to.sum[0]);  // the same in all kernels
      to.sum[1] = fmaf(row[i].w, b, to.sum[1]);
      to.out.x = fmaf(v[i].x, a, to.out.x);
      to.out.y = fmaf(v[i].y, b, to.out.y);
      to.out.z = fmaf(v[i].z, a, to.out.z);
      to.out.w = fmaf(v[i].w, b, to.out.w);
    }
    left -= kAtOnce;
    if (left <= 0) return to;
    first = rest + (kAtOnce - 1) * pieces.stride;
    rest = first + pieces.stride;
  }
}

/// Finishes and writes a column of the result.
template <int kDim, int kBlocks>
__device__ __forceinline__ void write_column(const DecodeParams& p, const DecodePlan& plan,
                                             const RowPlace& place, int column,
                                             const JoinedColumn& from, int lane) {
  using State = device::SoftmaxState<kDim, kBlocks>;
  const int block = column / State::kTiles;
  const int tile = column % State::kTiles;
#pragma unroll
  for (int parity = 0; parity < 2; ++parity) {
    const float all = device::sum_over_tokens(from.sum[parity]);
    const int row = place.first + block * device::kBlockRows + 2 * (lane % 4) + parity;
    if (row >= place.count) continue;
    const OutputRow to(p, plan, place, row, from.top[parity], all);
    const float v[2] = {(parity == 0 ? from.out.x : from.out.y) * to.result.factor,
                        (parity == 0 ? from.out.z : from.out.w) * to.result.factor};
    store_channels(p, plan, to.out + tile / 4 * 64 + lane / 4 * 8 + tile % 4 * 2, v);
    if (p.lse != nullptr && lane < 4 && tile == 0) p.lse[to.lse] = to.result.lse;
  }
}

/// Makes known to the device that a piece is in memory, which the threads before a barrier wrote.
/// The number of the launch is drawn at random: whatever was in the workspace, it is not a flag.
__device__ __forceinline__ void raise_flag(const DecodePlan& plan, uint64_t* flag) {
  __threadfence();
  asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(flag), "l"(plan.launch) : "memory");
}

/// Waits until a flag is raised. Who waits has the last piece of an item: blocks start in their
/// order, so that those who have the others run or have ended.
__device__ __forceinline__ void wait_for_flag(const DecodePlan& plan, const uint64_t* flag) {
  uint64_t value;
  do {
    asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  } while (value != plan.launch);
}

/// With splits: the warps of a block add up the items that end in it. cursor: at the begin of its
/// shares. The units of an item are in the workspace, in the basis of records; those of blocks
/// before this one are there when these have raised their flags. states: of so many warps, in
/// shared memory.
template <int kDim, int kBlocks, int kWarps>
__device__ __forceinline__ void join_units(const DecodeParams& p, const DecodePlan& plan,
                                           DecodeShared& shared, Cursor cursor, int teams,
                                           float4* states, int lane) {
  using State = device::SoftmaxState<kDim, kBlocks>;
  constexpr int kStateVectors = State::kVectors * kWarpLanes;
  constexpr int kColumns = kBlocks * State::kTiles;
  constexpr int kAtOnce = kDim < 256 && kBlocks == 1 ? 8 : 4;
  const int warp = own_warp();
  const int parts = plan.row_parts;
  int most = 0;  // units of an item
#pragma unroll
  for (int w = 0; w < kWarps; ++w) most = max(most, shared.scan.most_of_warp[w]);
  if (most <= 1) return;
  __syncthreads();  // what this block has is in memory, and the rings are free
  if (threadIdx.x == 0 && shared.share[teams - 1].cut_at_end) {
    raise_flag(plan, plan.flags + blockIdx.x);
  }
  const int64_t begin = cursor.item_start + cursor.unit;
  int from = static_cast<int>(blockIdx.x);  // where the first item begins, if it ends here
  int count = 0;                            // of states
  int task = warp;
  ItemPlace own{};  // whose state this warp finishes
  int own_part = 0;
#pragma unroll 1
  for (;;) {
    if (cursor.work.units > 1 && cursor.ends_item()) {
      if (cursor.item_start < begin) {
        from = shared.front_block;
        for (int i = from + lane; i < static_cast<int>(blockIdx.x); i += kWarpLanes) {
          wait_for_flag(plan, plan.flags + i);
        }
        __syncwarp();
      }
      if (warp >= count && warp < count + parts) {
        own = {cursor.item_start, cursor.seq, cursor.head, cursor.row_block};
        own_part = warp - count;
      }
      const int64_t stride = int64_t{parts} * kStateVectors;
#pragma unroll 1
      for (; task < parts * kColumns; task += kWarps) {
        const int part = task / kColumns;
        const int column = task % kColumns;
        const float4* const at = plan.pieces + (cursor.item_start * parts + part) * kStateVectors;
        const JoinedColumn joined = join_column<kAtOnce, kDim, kBlocks>(
            Pieces{at, at + stride, stride, cursor.work.units}, column, lane);
        float4* const to = states + (count + part) * kStateVectors + lane;
        to[column * kWarpLanes] = joined.out;
        if (column % State::kTiles == 0) {
          to[(kColumns + column / State::kTiles) * kWarpLanes] = {joined.top[0], joined.top[1],
                                                                  joined.sum[0], joined.sum[1]};
        }
      }
      task -= parts * kColumns;
      count += parts;
    }
    const bool is_last = cursor.count == cursor.left;
    if (count > 0 && (is_last || count + parts > kWarps)) {
      __syncthreads();
      if (warp < count) {
        State state;
        state.load(states + warp * kStateVectors, lane);
        state.rotate(lane);
        write_rows(p, plan,
                   RowPlace(p, plan, own.seq, own.head, own.row_block, own_part,
                            kBlocks * device::kBlockRows),
                   lane, state);
      }
      __syncthreads();
      count = 0;
    }
    if (is_last) break;
    cursor.next(p, plan, shared.division);
  }
  // All have seen the flags. The same launch may be played again.
  for (int i = from + static_cast<int>(threadIdx.x); i < static_cast<int>(blockIdx.x);
       i += kWarps * kWarpLanes) {
    plan.flags[i] = 0;
  }
}

/// Without: all that the teams of a block, and the blocks, have of the same items. last_pieces: of
/// the block's warps, in shared memory.
///
/// Border b is that before team b. A run of borders that cut the same item makes one piece of it.
/// If the item begins and ends in this block that is all of it, and a warp writes it. If not, all
/// warps together make the piece, for the block where the item ends, which adds up all of them.
template <int kDim, int kBlocks, int kWarps>
__device__ __forceinline__ void join_shares(const DecodeParams& p, const DecodePlan& plan,
                                            DecodeShared& shared, int teams,
                                            const float4* last_pieces, int lane) {
  using State = device::SoftmaxState<kDim, kBlocks>;
  constexpr int kStateVectors = State::kVectors * kWarpLanes;
  constexpr int kColumns = kBlocks * State::kTiles;
  // More at once is more code to fetch, which takes longer than the loads.
  constexpr int kOfBlocks = kDim < 256 && kBlocks == 1 ? 8 : 4;
  constexpr int kOfWarps = 4;  // from shared memory
  constexpr int kFront = 0;    // pieces of a block that others add up or add to: of its first item,
  constexpr int kBack = 1;     // and of its last, if that begins here
  const int warp = own_warp();
  const int parts = plan.row_parts;
  const auto block_piece = [&](int64_t block, int which) {
    return plan.pieces + (block * 2 + which) * parts * kStateVectors;
  };
  const auto rows_of = [&](const ItemPlace& item, int part) {
    return RowPlace(p, plan, item.seq, item.head, item.row_block, part,
                    kBlocks * device::kBlockRows);
  };

  // A bit a team.
  const TeamShare& own = shared.share[min(lane, kWarps - 1)];
  const unsigned all = (1u << teams) - 1;
  const unsigned begins = __ballot_sync(device::kAllLanes, own.cut_at_begin) & all;
  const unsigned middles = __ballot_sync(device::kAllLanes, own.middle) & all;
  // Borders at which runs end, and the first team of such a run: behind the last before it that is
  // no middle.
  unsigned runs = begins & ~middles;
  const auto teams_before = [&](int b) { return ~middles & ((1u << b) - 1); };
  const auto first_team = [&](int b) {
    return teams_before(b) == 0 ? 0 : 31 - __clz(teams_before(b));
  };
  // The part that ended an item is in the workspace.
  const auto pieces_of = [&](int b, int part) {
    const int from = first_team(b);
    const int stride = parts * kStateVectors;
    const float4* const cut = last_pieces + (from * parts + part) * kStateVectors;
    if (b == teams) return Pieces{cut, cut + stride, stride, b - from};
    return Pieces{
        plan.warp_pieces +
            (static_cast<int64_t>(blockIdx.x) * kWarps + b * parts + part) * kStateVectors,
        cut, stride, b - from + 1};
  };

  const bool back_is_cut = shared.share[teams - 1].cut_at_end;
  const bool one_item = back_is_cut && teams_before(teams) == 0;  // longer than the block
  const bool front_ends = (begins & 1) != 0 && !one_item;
  const int front_run = __ffs(runs) - 1;  // if the front ends here
  if (front_ends) runs &= runs - 1;
#pragma unroll 1
  for (int which = kFront; which <= kBack; ++which) {
    if (which == kFront ? !front_ends && !one_item : !back_is_cut || one_item) continue;
    const int border = which == kFront && front_ends ? front_run : teams;
#pragma unroll 1
    for (int i = warp; i < parts * kColumns; i += kWarps) {
      const int part = i / kColumns;
      const int column = i % kColumns;
      const JoinedColumn joined =
          join_column<kOfWarps, kDim, kBlocks>(pieces_of(border, part), column, lane);
      float4* const to = block_piece(blockIdx.x, which) + part * kStateVectors + lane;
      to[column * kWarpLanes] = joined.out;
      if (column % State::kTiles == 0) {
        to[(kColumns + column / State::kTiles) * kWarpLanes] = {joined.top[0], joined.top[1],
                                                                joined.sum[0], joined.sum[1]};
      }
    }
  }
  if (back_is_cut || front_ends) __syncthreads();
  if (back_is_cut && threadIdx.x == 0) {
    raise_flag(plan, plan.flags + int64_t{blockIdx.x} * 2 + (one_item ? kFront : kBack));
  }

  for (int task = 0; runs != 0; runs &= runs - 1) {
    const int b = __ffs(runs) - 1;
#pragma unroll 1
    for (int part = 0; part < parts; ++part, ++task) {
      if (task % kWarps != warp) continue;
      const Pieces pieces = pieces_of(b, part);
      State state;
      state.clear();
#pragma unroll 1
      for (int k = 0; k < pieces.count; ++k) {
        state.merge(k == 0 ? pieces.first : pieces.rest + (k - 1) * pieces.stride, lane);
      }
      write_rows(p, plan, rows_of(shared.share[b].first, part), lane, state);
    }
  }

  if (!front_ends) return;
  const int from = shared.front_block;
  const int count = static_cast<int>(blockIdx.x) - from + 1;
  // The first block has the item as its last.
  const auto flag_of = [&](int i) {
    return plan.flags + int64_t{from + i} * 2 + (i == 0 ? kBack : kFront);
  };
  for (int i = lane; i < count - 1; i += kWarpLanes) wait_for_flag(plan, flag_of(i));
  __syncwarp();
#pragma unroll 1
  for (int i = warp; i < parts * kColumns; i += kWarps) {
    const int part = i / kColumns;
    const int column = i % kColumns;
    const Pieces pieces{block_piece(from, kBack) + part * kStateVectors,
                        block_piece(from + 1, kFront) + part * kStateVectors,
                        int64_t{2} * parts * kStateVectors, count};
    write_column<kDim, kBlocks>(p, plan, rows_of(shared.share[0].first, part), column,
                                join_column<kOfBlocks, kDim, kBlocks>(pieces, column, lane), lane);
  }
  __syncthreads();  // all have seen the flags
  // The same launch may be played again.
  for (int i = static_cast<int>(threadIdx.x); i < count - 1; i += kWarps * kWarpLanes)
    *flag_of(i) = 0;
}

}  // namespace kvarn::cuda
