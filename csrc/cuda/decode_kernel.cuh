// The kernel of decode_attention.
//
// Roofline. Records are read once: 13.8 KB for k4v2, D = G = 128, in 800 clocks of an SM at the
// memory bandwidth of an H200, in which its four schedulers issue 3200 instructions: three for each
// of the 1024 codes of a lane. attention_records.cuh has the arithmetic that needs only about one.
// Measured there: 218 us for 64 x 16384, 8 KV heads of 4 query heads, a plain read takes 199.
//
// A *team* of warps works through its share of all units (decode_plan.cuh), tile after tile; with
// more query rows than one warp holds, the warps of a team share the bytes and divide the rows.
// A ring of whole records in shared memory stands before each team; its first warp keeps it full
// (decode_feeder.cuh). Staged tiles pass it 16 tokens at a time (attention_staged.cuh). Items that
// lie in several shares are put together in the same launch (decode_join.cuh); partial results are
// in the basis of records, whole ones in the original one.
//
// Where the registers suffice there are twelve warps a block instead of eight (decode_warps()). For
// some steps the ring of each warp is one record (kOneRecord): twelve with D = G = 128, or eight
// with D = 256, have no room for two. Its keys are replaced when the scores are made, its values
// when the sums are.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_feeder.cuh"
#include "cuda/decode_inputs.cuh"
#include "cuda/decode_join.cuh"
#include "cuda/decode_tile.cuh"
#include "device/dependent_launch.cuh"

namespace kvarn::cuda {

template <class F, int kBlocks>
__global__ void __launch_bounds__(F::kWarps* kWarpLanes, 1)
    decode_kernel(const __grid_constant__ DecodeParams params,
                  const __grid_constant__ DecodePlan any_plan) {
  constexpr int kDim = F::kDim_;
  constexpr int kThreads = F::kWarps * kWarpLanes;
  constexpr bool kQueryAhead = F::kQueryAhead && kBlocks == 1;
  constexpr bool kRuns = F::kRuns && (kBlocks * kDim <= 128 || kCopiesAreSmall);
  constexpr int kStateVectors = device::SoftmaxState<kDim, kBlocks>::kVectors * kWarpLanes;
  using Piece = RowPiece<kDim, kBlocks>;
  constexpr bool kParks = TileWorker<F, kBlocks>::kHasMemory;
  if (F::kOneRecord && !kCopiesAreSmall) {
    __trap();  // nobody launches it there, see is_compiled_for_sm_90()
    return;
  }
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ DecodeShared shared;
  const int lane = threadIdx.x % kWarpLanes;
  touch(params);
  touch(any_plan);
  const DecodeParams p = F::kUsual ? usual(params) : params;
  const DecodePlan plan = F::kUsual       ? usual<F::kSplits>(any_plan)
                          : kBlocks == 1  ? any_plan
                          : F::kOneRecord ? of_one_record(any_plan)
                                          : without_splits(any_plan);
  const int stage_bytes = F::stage_bytes(plan);
  const int ring_bytes = (F::kOneRecord ? 1 : plan.stages) * stage_bytes;

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
  // The next kernel may start once all blocks of this one run: none of these, which wait for each
  // other's parts, waits for room.
  device::let_next_start();
  const bool few = F::kUsual && !F::kSplits && plan.few_sequences;
  // First of all, what all else waits for.
  const int length = few ? sequence_length(p, min(lane, static_cast<int>(p.kv.seqs) - 1)) : 0;
  ask_for_inputs<kThreads>(p, plan);
  const int chunk = static_cast<int>((p.kv.seqs + kThreads - 1) / kThreads);
  SequenceWork work;  // of a lane, if there are few
  unsigned before;
  if (few) {
    const Division d = divide_few(p, plan, length, lane, work, before);
    Division& own = shared.division[own_warp()];
    if (lane == 0) own = d;
    __syncwarp();  // and the warp's barriers are made
  } else {
    divide<F::kWarps>(p, plan, chunk, shared.scan, shared.division);
  }
  TileWorker<F, kBlocks> worker{p, plan, lane};
  if constexpr (kParks) {
    using Memory = typename TileWorker<F, kBlocks>::Memory;
    worker.memory = reinterpret_cast<Memory*>(rings + plan.teams * ring_bytes) + own_warp();
  }
  if (team < teams_of_block(shared.division[own_warp()])) {
    uint8_t* const ring = rings + team * ring_bytes;
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
      const Division& d = shared.division[own_warp()];
      Cursor cursor;
      if (few) {
        cursor.start_few(p, plan, d, work, before, d.share_of(team));
      } else {
        cursor.template start<F::kWarps>(p, plan, d, shared.scan, chunk, d.share_of(team));
      }
      if (kQueryAhead) {
        words.load(p, plan,
                   RowPlace(p, plan, cursor.seq, cursor.head, cursor.row_block, part,
                            kBlocks * device::kBlockRows),
                   lane);
      }
      if (part == 0) feeder.start(cursor);
    }
    if constexpr (kParks) feeder.park_rest(worker.memory->feeder);
    int run = 0;         // tiles that need nothing but to be used up and replaced
    int turn = 0;        // stage, and stages more on every second lap: one register for both
    int tiles_left = 0;  // with splits, of the present one
#pragma unroll 1
    for (;;) {
      const unsigned parity = turn >= plan.stages ? 1 : 0;
      const int stage = turn - (parity ? plan.stages : 0);
      const int at = team * plan.stages + stage;
      StageTile tile{0, -1, 0};
      const auto place = [&] { return rows_of(piece()); };
      if (run == 0) {
        if constexpr (kParks) feeder.unpark_rest(worker.memory->feeder);
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
          worker.open(place());
          if (plan.split_tiles > 0) tiles_left = uniform(current.tiles_left);
        }
        bool changes_basis = worker.rotated != is_record;
        if (plan.row_parts > 1) {
          // Not for what other warps of the team see alone: a change of the basis rounds, and with
          // splits it must not show in the result how many rows a team has.
          const int first_token = (tile.tile << plan.group_shift) + max(tile.token, 0);
          changes_basis =
              changes_basis &&
              worker.sees(first_token, is_record ? F::format(p).group : device::kStagedTokens);
        }
        if ((tile.flags & kFirstTile) || changes_basis) {
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
        if (kRuns && p.logits_soft_cap == 0.f) {
          run = uniform(feeder.run_length(worker.seen().all));
        }
        if constexpr (kParks) feeder.park_rest(worker.memory->feeder);
      }
      const bool in_run = run > 0;
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
      device::barrier_wait(&shared.full[at], parity);
      const uint8_t* const data = ring + (F::kOneRecord ? 0 : stage * stage_bytes);
      const bool is_half = p.kv.staging.dtype == DType::kFloat16;  // or bfloat16
      const auto want_values = [&] {
        if (F::kOneRecord) device::barrier_wait(&shared.full_values[at], parity);
      };
      const auto have_used_keys = [&] {
        if constexpr (F::kOneRecord) {
          __syncwarp();
          if (in_run) {
            feeder.replace();
          } else {
            if constexpr (kParks) feeder.unpark_rest(worker.memory->feeder);
            feeder.use_up_keys();
            if constexpr (kParks) feeder.park_rest(worker.memory->feeder);
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
          if constexpr (kParks) feeder.unpark_rest(worker.memory->feeder);
          feeder.use_up_values();
          if constexpr (kParks) feeder.park_rest(worker.memory->feeder);
        } else if (part == 0) {
          feeder.use_up();
        }
      }
      if (++turn == 2 * plan.stages) turn = 0;

      if (plan.split_tiles > 0 &&
          (tile.token < 0 || tile.token + device::kStagedTokens >= F::format(p).group)) {
        --tiles_left;
      }
      const bool is_last = (tile.flags & kLastTile) != 0;
      if (!is_last && (plan.split_tiles == 0 || tiles_left > 0)) continue;
      constexpr int kWhole = kBeginsItem | kEndsItem;
      const bool is_whole =
          (tile.flags & kWhole) == kWhole && (plan.split_tiles == 0 || uniform(piece().units) == 1);
      // What is joined within this launch is in the basis of records, in which most of it ends.
      if (worker.rotated == is_whole) worker.state.rotate(lane);
      if (is_whole) {
        write_rows(p, plan, place(), lane, worker.state);
      } else if (plan.split_tiles > 0) {
        StagePiece& current = piece();
        int number = 0;  // lane 0 counts
        if (lane == 0) number = current.unit++;
        const int64_t unit = int64_t{uniform(number)} * plan.row_parts + part;
        worker.state.store(plan.pieces + unit * kStateVectors, lane);
        if (!is_last) {
          worker.state.clear();
          tiles_left = uniform(current.unit_tiles);
        }
      } else if (!(tile.flags & kBeginsItem) && (tile.flags & kEndsItem)) {
        Piece::store(
            worker.state, Piece::rows(p, plan),
            plan.warp_pieces +
                (static_cast<int64_t>(blockIdx.x) * F::kWarps + own_warp()) * Piece::kVectors,
            lane);
      }
      if (tile.flags & kEnd) break;
    }
  }
  const int teams = teams_of_block(shared.division[own_warp()]);
  if (teams == 0) return;
  if (plan.split_tiles > 0) {
    const Division& d = shared.division[own_warp()];
    Cursor cursor;
    cursor.template start<F::kWarps>(p, plan, d, shared.scan, chunk, d.share_of(0),
                                     static_cast<unsigned>(teams));
    join_units<kDim, kBlocks, F::kWarps>(p, plan, shared, cursor, teams,
                                         reinterpret_cast<float4*>(rings), lane);
    return;
  }
  // A team's ring is free when all its warps are here.
  if (plan.row_parts > 1) __syncthreads();
  const int piece_stride =
      plan.row_parts > 1 ? Piece::kVectors : ring_bytes / static_cast<int>(sizeof(float4));
  auto* const last_pieces = reinterpret_cast<float4*>(rings);
  const int own_team = own_warp() >> plan.parts_shift;
  if (own_team < teams && shared.share[own_team].cut_at_end) {
    Piece::store(worker.state, Piece::rows(p, plan), last_pieces + own_warp() * piece_stride, lane);
  }
  __syncthreads();
  join_shares<kDim, kBlocks, F::kWarps>(p, plan, shared, teams, last_pieces, piece_stride, lane);
}

}  // namespace kvarn::cuda
