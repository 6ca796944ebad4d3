// The kernel of decode_attention for more than 16 query rows a KV head, with warpgroups (sm_90a).
//
// Roofline. The rows share the bytes of a record, 800 clocks of an SM (decode_kernel.cuh), but the
// products grow with them: of 128 x 128 x 32 twice, 576 clocks of an SM's tensor cores as measured
// for wgmma. What bounds it is instructions, some 900 of each of four warps a record and 32 rows,
// and the latencies that two or three warps a scheduler leave between them. Measured on an H200,
// 64 x 16384, 8 KV heads: 485 us with 32 rows, 774 with 64; 218 with 8.
//
// As decode_kernel.cuh, but a team is a warpgroup whose warps work on the same rows
// (decode_group.cuh): a record is dequantized once for up to 64 of them. The state of a row lies in
// four warps; what else is kept from tile to tile is in shared memory, for registers are short.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/decode_feeder.cuh"
#include "cuda/decode_group.cuh"
#include "cuda/decode_inputs.cuh"
#include "cuda/decode_join.cuh"
#include "cuda/launch.h"
#include "device/dependent_launch.cuh"

namespace kvarn::cuda {

/// What is the same in every launch of the kernel, as constants.
template <int kRowBlocks>
__device__ __forceinline__ DecodePlan group_plan(DecodePlan plan) {
  plan.row_parts = device::kGroupWarps;
  plan.parts_shift = 2;
  plan.rows_shift = group_rows_shift(kRowBlocks);
  plan.group_shift = 7;
  plan.teams = group_teams(kRowBlocks);
  plan.stages = kGroupStages;
  plan.split_tiles = 0;
  return plan;
}

template <int kRowBlocks>
inline constexpr int kGroupBytes =
    group_teams(kRowBlocks) * (kGroupStages * decode_stage_bytes({4, 2, 128, 128}) +
                               static_cast<int>(sizeof(GroupMemory<kRowBlocks>)));

template <int kKeyBits, int kValueBits, int kRowBlocks>
__global__ void __launch_bounds__(group_teams(kRowBlocks) * device::kGroupThreads, 1)
    decode_group_kernel(const __grid_constant__ DecodeParams p,
                        const __grid_constant__ DecodePlan any_plan) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Worker = GroupWorker<kKeyBits, kValueBits, kRowBlocks>;
  using Memory = GroupMemory<kRowBlocks>;
  using Piece = RowPiece<Worker::kDim, kRowBlocks>;
  constexpr int kTeams = group_teams(kRowBlocks);
  constexpr int kWarps = kTeams * device::kGroupWarps;
  constexpr int kStageBytes = decode_stage_bytes(Worker::kFormat);
  static_assert(Piece::kVectors * sizeof(float4) <= kGroupStages * kStageBytes,
                "last pieces take the place of the rings alone");
  static_assert(kWarps <= kMaxDecodeWarps);
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ DecodeShared shared;
  const int lane = threadIdx.x % kWarpLanes;
  touch(p);
  touch(any_plan);
  const DecodePlan plan = group_plan<kRowBlocks>(any_plan);
  const int team = own_warp() / device::kGroupWarps;
  // Asked anew each time: no register holds it meanwhile.
  const auto is_first = [] { return own_warp() % device::kGroupWarps == 0; };
  // All rings, then what else the groups have.
  auto& memory = reinterpret_cast<Memory*>(rings + kTeams * plan.stages * kStageBytes)[team];
  if (is_first() && lane == 0) {
    init(memory);
    for (int i = team * plan.stages; i < (team + 1) * plan.stages; ++i) {
      device::barrier_init(&shared.full[i], device::RingCopy::kArrivals);
      device::barrier_init(&shared.told[i], 1);
      device::barrier_init(&shared.empty[i], device::kGroupThreads);
    }
    device::barrier_init_fence();
  }
  device::wait_for_previous();
  device::let_next_start();  // as in decode_kernel.cuh
  ask_for_inputs<kWarps * kWarpLanes>(p, plan);
  constexpr int kThreads = kWarps * kWarpLanes;
  const int chunk = static_cast<int>((p.kv.seqs + kThreads - 1) / kThreads);
  divide<kWarps>(p, plan, chunk, shared.scan, shared.division);
  Worker worker(p, plan, memory, lane);
  if (team < teams_of_block(shared.division[own_warp()])) {
    const auto make_feeder = [&] {
      return Feeder<false>(p, plan, shared, rings + team * plan.stages * kStageBytes, kStageBytes,
                           record_layout(Worker::kFormat), team, lane);
    };
    if (is_first()) {
      const Division& d = shared.division[own_warp()];
      Cursor cursor;
      cursor.template start<kWarps>(p, plan, d, shared.scan, chunk, d.share_of(team));
      Feeder<false> feeder = make_feeder();
      feeder.start(cursor);
      feeder.fill();
      feeder.park(memory.feeder);
    }
    FeederRun run{};     // of the first warp
    int turn = 0;        // stage, and stages more on every second lap
    int plain_left = 0;  // records to come at which nobody has to look
#pragma unroll 1
    for (;;) {
      const unsigned parity = turn >= plan.stages ? 1 : 0;
      const int stage = turn - (parity ? plan.stages : 0);
      const int at = team * plan.stages + stage;
      const auto place = [&] {
        const StagePiece& piece = shared.current[own_warp()];
        return RowPlace(p, plan, piece.seq, piece.head, piece.row_block, 0, 0);
      };
      int flags = 0;
      int first_token = 0;  // of plain records nobody asks for it
      bool is_record = true;
      bool seen = true;
      bool plain = true;
      if (plain_left > 0) {
        --plain_left;
      } else {
        device::barrier_wait(&shared.told[at], parity);
        __syncwarp();
        flags = uniform(shared.tile[at].flags);
        const int token = uniform(shared.tile[at].token);
        is_record = token < 0;
        if (flags & kFirstTile) {
          StagePiece& piece = shared.current[own_warp()];
          if (lane == 0) piece = shared.piece[at];
          __syncwarp();
          worker.open(place());
        }
        if ((flags & kFirstTile) || worker.rotated != is_record) {
          if (!(flags & kFirstTile)) worker.rotate();
          worker.rotated = is_record;
          worker.take_query(place());
        }
        first_token = (shared.tile[at].tile << plan.group_shift) + max(token, 0);
        const int tokens = is_record ? Worker::kFormat.group : device::kStagedTokens;
        seen = !(flags & kNoTile) && worker.sees(first_token, tokens);
        plain = worker.is_plain(first_token, tokens);
        if (is_record && seen) plain_left = worker.plain_behind(first_token, flags >> kRunShift);
      }
      device::barrier_wait(&shared.full[at], parity);
      const uint8_t* const data = rings + at * kStageBytes;
      if (seen) {
        if (is_record) {
          worker.record(data, first_token, plain, [&] {
            if (run.left > 0) run.replace(shared, rings, kStageBytes, team, plan.stages, lane);
          });
        } else if (p.kv.staging.dtype == DType::kFloat16) {
          worker.template staged<false>(data, first_token, plain);
        } else {
          worker.template staged<true>(data, first_token, plain);
        }
      }
      device::barrier_arrive(&shared.empty[at]);
      if (worker.is_first_warp() && !run.use_up()) {
        Feeder<false> feeder = make_feeder();
        feeder.unpark(memory.feeder);
        feeder.end_run(run);
        feeder.fill();
        run = feeder.begin_run();
        feeder.park(memory.feeder);
      }
      if (++turn == 2 * plan.stages) turn = 0;
      if (!(flags & kLastTile)) continue;
      constexpr int kWhole = kBeginsItem | kEndsItem;
      const bool is_whole = (flags & kWhole) == kWhole;
      // What is joined within this launch is in the basis of records, in which most of it ends.
      worker.finish(!is_whole);
      if (is_whole) {
        worker.write(place());
      } else if (!(flags & kBeginsItem) && (flags & kEndsItem)) {
        worker.store(plan.warp_pieces +
                     (static_cast<int64_t>(blockIdx.x) * kTeams + team) * Piece::kVectors);
      }
      if (flags & kEnd) break;
    }
  }
  const int teams = teams_of_block(shared.division[own_warp()]);
  if (teams == 0) return;
  __syncthreads();  // the rings are free
  auto* const last_pieces = reinterpret_cast<float4*>(rings);
  if (team < teams && shared.share[team].cut_at_end) {
    worker.store(last_pieces + team * Piece::kVectors);
  }
  __syncthreads();
  // To the join a team has one state.
  DecodePlan joined = plan;
  joined.row_parts = 1;
  joined.parts_shift = 0;
  join_shares<Worker::kDim, kRowBlocks, kWarps, kTeams>(p, joined, shared, teams, last_pieces,
                                                        Piece::kVectors, lane);
#endif
}

/// The shared memory of a block; 0: the kernel is not there for this device. (Compiled for others
/// than sm_90a it is empty, and has none of its own.)
template <int kRowBlocks>
int decode_group_bytes() {
  cudaFuncAttributes attributes{};
  const auto kernel = decode_group_kernel<4, 2, kRowBlocks>;
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return attributes.sharedSizeBytes > 0 ? kGroupBytes<kRowBlocks> : 0;
}

template <int kKeyBits, int kValueBits, int kRowBlocks>
Status launch_decode_group(const DecodeParams& p, const DecodePlan& plan, int grid,
                           int shared_bytes) {
  const auto kernel = decode_group_kernel<kKeyBits, kValueBits, kRowBlocks>;
  const auto bytes = static_cast<size_t>(shared_bytes);
  if (Status status = allow_shared_memory(kernel, bytes); !status.ok()) return status;
  return launch_early(kernel, dim3(static_cast<unsigned>(grid)),
                      dim3(static_cast<unsigned>(group_teams(kRowBlocks) * device::kGroupThreads)),
                      bytes, p.stream, p, plan);
}

}  // namespace kvarn::cuda
