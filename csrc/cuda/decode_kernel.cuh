// The kernel of decode_attention.
//
// Roofline. Records are read once: 13.8 KB for k4v2, D = G = 128, in 800 clocks of an SM at the
// memory bandwidth of an H200, in which its four schedulers issue 3200 instructions: three for each
// of the 1024 codes of a lane. attention_records.cuh has the arithmetic that needs only about one.
// Measured there: 224 us for 64 x 16384, 8 KV heads of 4 query heads, a plain read takes 203.
//
// A *team* of warps works through its share of all units (decode_plan.cuh), tile after tile; with
// more query rows than one warp holds, the warps of a team share the bytes and divide the rows.
// A ring of whole records in shared memory stands before each team; its first warp keeps it full
// (decode_feeder.cuh). Staged tiles pass it 16 tokens at a time (attention_staged.cuh). Items that
// lie in several shares are put together in the same launch (decode_join.cuh); partial results are
// in the original basis.
//
// Where the registers suffice there are twelve warps a block instead of eight (decode_warps()). For
// some steps the ring of each warp is one record (kOneRecord): twelve with D = G = 128, or eight
// with D = 256, have no room for two. Its keys are replaced when the scores are made, its values
// when the sums are.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_feeder.cuh"
#include "cuda/decode_join.cuh"
#include "cuda/decode_tile.cuh"
#include "device/dependent_launch.cuh"

namespace kvarn::cuda {

/// Asks for lines of an array that will be read when more is known: a line a thread of the grid,
/// and by each block the first one, so that its SM has the address translated.
template <int kThreads>
__device__ __forceinline__ void ask_for(const void* data, int64_t bytes) {
  constexpr int kLine = 128;
  constexpr int64_t kMost = 512 << 10;
  const int64_t at = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kLine;
  const char* const start = static_cast<const char*>(data);
  if (at < min(bytes, kMost)) asm volatile("prefetch.global.L2 [%0];" ::"l"(start + at));
  if (threadIdx.x == 0 && bytes > 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(start));
}

/// The work cannot be known before the lengths are; their latency hides that of the rest.
template <int kThreads>
__device__ __forceinline__ void ask_for_inputs(const DecodeParams& p) {
  // Of two-dimensional arrays, from the first element to the last.
  const auto elements = [](int64_t rows, int64_t row_stride, int64_t cols, int64_t col_stride) {
    return cols == 0 ? 0 : (rows - 1) * row_stride + (cols - 1) * col_stride + 1;
  };
  ask_for<kThreads>(p.q, 2 * (elements(p.tokens, p.q_stride[0], p.q_heads, p.q_stride[1]) +
                              p.kv.format.head_dim - 1));
  const IndexMatrix& table = p.kv.block_table;
  ask_for<kThreads>(table.data,
                    (table.is_int64 ? 8 : 4) *
                        elements(p.kv.seqs, table.row_stride, p.kv.table_width, table.col_stride));
  const IndexArray& slot = p.kv.block_slot;
  if (slot) {
    ask_for<kThreads>(slot.data,
                      (slot.is_int64 ? 8 : 4) * elements(1, 0, p.kv.cache.blocks, slot.stride));
  }
}

/// Reads a line of the parameters a warp: they come from memory, and each first use of a line would
/// wait for it alone.
template <class Params>
__device__ __forceinline__ void touch(const Params& params) {
  constexpr int kLine = 64;
  constexpr int kWords = kLine / static_cast<int>(sizeof(int));
  constexpr int kLines = (static_cast<int>(sizeof(Params)) - 1) / kLine + 1;
  const int line = static_cast<int>(threadIdx.x) / kWarpLanes;
  if (line < kLines) asm volatile("" ::"r"(reinterpret_cast<const int*>(&params)[line * kWords]));
}

/// Brings the rows of the query to the SM's cache: they would wait long behind the records that are
/// about to be asked for. A lane has a quarter of a row, which is a line or a part of it.
__device__ __forceinline__ void touch_query(const DecodeParams& p, const RowPlace& place,
                                            const DecodePlan& plan, int lane) {
  const int row = min(place.first + lane / 4, place.count - 1);
  const auto* const at = static_cast<const uint16_t*>(p.q) + int64_t{place.seq} * p.q_stride[0] +
                         (place.head * plan.heads_per_kv + row) * p.q_stride[1] +
                         lane % 4 * (p.kv.format.head_dim / 4);
  uint32_t unused;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(unused) : "l"(at));
}

/// Teams of the block that have a share. (From memory each time: no register holds it meanwhile.)
__device__ __forceinline__ int teams_of_block(const volatile Division& d) {
  const int left = static_cast<int>(d.shares - blockIdx.x * static_cast<unsigned>(d.teams));
  return uniform(max(min(left, d.teams), 0));
}

constexpr int kWalk = -1;
constexpr int kWalkers = 4;

template <class F, int kBlocks>
__global__ void __launch_bounds__(F::kWarps* kWarpLanes, 1)
    decode_kernel(const __grid_constant__ DecodeParams params,
                  const __grid_constant__ DecodePlan any_plan) {
  constexpr int kDim = F::kDim_;
  constexpr int kThreads = F::kWarps * kWarpLanes;
  constexpr bool kQueryAhead = F::kQueryAhead && kBlocks == 1;
  constexpr bool kRuns = F::kRuns && (kBlocks * kDim <= 128 || kCopiesAreSmall);
  constexpr int kStateVectors = device::SoftmaxState<kDim, kBlocks>::kVectors * kWarpLanes;
  if (F::kOneRecord && !kCopiesAreSmall) {
    __trap();  // nobody launches it there, see wants_one_record()
    return;
  }
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ DecodeShared shared;
  const int lane = threadIdx.x % kWarpLanes;
  touch(params);
  touch(any_plan);
  const DecodeParams p = F::kUsual ? usual(params) : params;
  const DecodePlan plan = F::kUsual ? usual<F::kOneRecord>(any_plan) : any_plan;
  const int stage_bytes = F::stage_bytes(plan);

  const int team = own_warp() >> plan.parts_shift;
  const int part = own_warp() & (plan.row_parts - 1);
  if (part == 0 && lane == 0 && team < plan.teams) {
    for (int i = team * plan.stages; i < (team + 1) * plan.stages; ++i) {
      device::barrier_init(&shared.full[i], device::RingCopy::kArrivals);
      if (F::kOneRecord) device::barrier_init(&shared.full_values[i], device::RingCopy::kArrivals);
      if (plan.row_parts > 1) {
        device::barrier_init(&shared.told[i], 1);
        device::barrier_init(&shared.empty[i], plan.row_parts * kWarpLanes);
      }
    }
    device::barrier_init_fence();
  }
  device::wait_for_previous();
  ask_for_inputs<kThreads>(p);
  const int chunk = static_cast<int>((p.kv.seqs + kThreads - 1) / kThreads);
  divide<F::kWarps>(p, plan, chunk, shared.scan, shared.division);
  TileWorker<F, kBlocks> worker{p, plan, lane};
  if (team < teams_of_block(shared.division)) {
    uint8_t* const ring = rings + team * (F::kOneRecord ? 1 : plan.stages) * stage_bytes;
    Feeder<F::kOneRecord> feeder(p, plan, shared, ring, stage_bytes, F::layout(plan), team, lane);
    const auto piece = [&]() -> StagePiece& { return shared.current[own_warp()]; };
    const auto rows_of = [&](const StagePiece& of) {
      return RowPlace(p, plan, of.seq, of.head, of.row_block, part, kBlocks * device::kBlockRows);
    };
    // The query is asked for as early as it can be: behind the records that are under way it would
    // wait long.
    QueryWords<kDim, kBlocks> words;
    bool has_words = kQueryAhead;
    {
      Cursor cursor;
      cursor.template start<F::kWarps>(p, plan, shared.division, shared.scan, chunk,
                                       shared.division.share_of(team));
      if (kQueryAhead) {
        words.load(p, plan,
                   RowPlace(p, plan, cursor.seq, cursor.head, cursor.row_block, part,
                            kBlocks * device::kBlockRows),
                   lane);
      }
      if (F::kOneRecord) {
        touch_query(p,
                    RowPlace(p, plan, cursor.seq, cursor.head, cursor.row_block, part,
                             kBlocks * device::kBlockRows),
                    plan, lane);
      }
      if (part == 0) feeder.start(cursor);
    }
    // Tiles that need nothing but to be used up and replaced.
    int run = 0;
    if (F::kOneRecord && own_warp() >= kWalkers) {
      run = kWalk;
      worker.walk_only();
    }
    int turn = 0;  // stage, and stages more on every second lap: one register for both
#pragma unroll 1
    for (;;) {
      const unsigned parity = turn >= plan.stages ? 1 : 0;
      const int stage = turn - (parity ? plan.stages : 0);
      const int at = team * plan.stages + stage;
      StageTile tile{0, -1, 0};
      const auto place = [&] { return rows_of(piece()); };
      if (run == 0) {
        if (part == 0) feeder.fill();
        if (plan.row_parts > 1) device::barrier_wait(&shared.told[at], parity);
        __syncwarp();
        tile = shared.tile[at];
        tile.flags = uniform(tile.flags);
        tile.token = uniform(tile.token);
        const bool is_record = tile.token < 0;
        if (tile.flags & kFirstTile) {
          StagePiece& current = piece();
          if (lane == 0) current = shared.piece[at];
          __syncwarp();
          open_item(p, plan, place(), worker.rows);
          worker.state.clear();
        }
        if ((tile.flags & kFirstTile) || worker.rotated != is_record) {
          if (!(tile.flags & kFirstTile)) worker.state.rotate(lane);
          if (!has_words) words.load(p, plan, place(), lane);
          has_words = false;
          worker.rotated = is_record;
          worker.take_query(words, 0);
        }
        if (kQueryAhead && (tile.flags & (kLastTile | kEnd)) == kLastTile) {
          const bool wraps = stage + 1 == plan.stages;
          const int next = wraps ? at - stage : at + 1;
          const bool told =
              plan.row_parts == 1 ||
              __all_sync(device::kAllLanes,
                         device::barrier_passed(&shared.told[next], wraps ? parity ^ 1 : parity));
          if (told) {
            words.load(p, plan, rows_of(shared.piece[next]), lane);
            has_words = true;
          }
        }
        // At the begin (later, now and then, it is the same).
        if (threadIdx.x == 0 && turn == 0 && (tile.flags & kFirstTile)) {
          shared.front_block = shared.division.block_of(shared.share[0].first.start);
        }
        if (kRuns && p.logits_soft_cap == 0.f) {
          run = uniform(feeder.run_length(worker.rows.seen.all));
        }
      }
      const bool in_run = run != 0;
      const bool is_record = tile.token < 0;
      const int first_token = (tile.tile << plan.group_shift) + max(tile.token, 0);
      const int tokens = is_record ? F::format(p).group : device::kStagedTokens;
      bool seen = in_run;
      bool all_see = in_run;
      if (!in_run) {
        // Other warps of the team may see of it what this one does not.
        seen = !(tile.flags & kNoTile) && worker.sees(first_token, tokens);
        all_see = worker.all_see(first_token, tokens);
      }
      if (!F::kOneRecord || run != kWalk) device::barrier_wait(&shared.full[at], parity);
      const uint8_t* const data = ring + (F::kOneRecord ? 0 : stage * stage_bytes);
      const bool is_half = p.kv.staging.dtype == DType::kFloat16;  // or bfloat16
      const auto want_values = [&] {
        if (F::kOneRecord && run != kWalk) {
          device::barrier_wait(&shared.full_values[at], parity);
        }
      };
      const auto have_used_keys = [&] {
        if constexpr (F::kOneRecord) {
          __syncwarp();
          if (run > 0) {
            feeder.replace();
          } else if (run == 0) {
            feeder.use_up_keys();
          }
        }
      };
      if (seen && is_record) {
        worker.record(place, data, first_token, all_see, have_used_keys, want_values);
      } else if (seen && is_half) {
        worker.template staged<false>(place, data, first_token, all_see, have_used_keys,
                                      want_values);
      } else if (seen) {
        worker.template staged<true>(place, data, first_token, all_see, have_used_keys,
                                     want_values);
      } else {
        have_used_keys();
        want_values();
      }
      __syncwarp();
      if (F::kOneRecord && run == kWalk) {
        run = 0;
        continue;
      }
      if (in_run) {
        if constexpr (F::kOneRecord) {
          feeder.replace_values();
        } else {
          feeder.replace();
        }
        --run;
      } else {
        if (plan.row_parts > 1) device::barrier_arrive(&shared.empty[at]);
        if (F::kOneRecord) {
          feeder.use_up_values();
        } else if (part == 0) {
          feeder.use_up();
        }
      }
      if (++turn == 2 * plan.stages) turn = 0;

      if (!(tile.flags & kLastTile)) continue;
      if (worker.rotated) worker.state.rotate(lane);
      constexpr int kWhole = kBeginsItem | kEndsItem;
      if ((tile.flags & kWhole) == kWhole) {
        write_rows(p, plan, place(), lane, worker.state);
      } else if (plan.split_tiles > 0) {
        const int64_t unit = (int64_t{piece().first_unit} + piece().unit) * plan.row_parts + part;
        worker.state.store(plan.pieces + unit * kStateVectors, lane);
        __syncwarp();
        if (!(tile.flags & kEndsItem) && lane == 0) raise_flag(plan, plan.flags + unit);
      } else if (!(tile.flags & kBeginsItem) && (tile.flags & kEndsItem)) {
        worker.state.store(
            plan.warp_pieces +
                (static_cast<int64_t>(blockIdx.x) * F::kWarps + own_warp()) * kStateVectors,
            lane);
      }
      if (tile.flags & kEnd) break;
    }
  }
  const int teams = teams_of_block(shared.division);
  if (teams == 0) return;
  if (plan.split_tiles > 0) {
    if (team >= teams) return;
    Cursor cursor;
    cursor.template start<F::kWarps>(p, plan, shared.division, shared.scan, chunk,
                                     shared.division.share_of(team));
    join_units<kDim, kBlocks>(p, plan, shared.division, cursor, part, lane);
    return;
  }
  __syncthreads();  // the rings are free
  auto* const last_pieces = reinterpret_cast<float4*>(rings);
  const int own_team = own_warp() >> plan.parts_shift;
  if (own_team < teams && shared.share[own_team].cut_at_end) {
    worker.state.store(last_pieces + own_warp() * kStateVectors, lane);
  }
  __syncthreads();
  join_shares<kDim, kBlocks, F::kWarps>(p, plan, shared, teams, last_pieces, lane);
}

}  // namespace kvarn::cuda
