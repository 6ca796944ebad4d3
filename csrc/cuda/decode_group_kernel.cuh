// The kernel of decode_attention for more than 16 query rows a KV head, with warpgroups (sm_90a).
//
// Roofline. The rows share the bytes of a record, 800 clocks of an SM (decode_kernel.cuh), but the
// products grow with them: for 64 rows, two of 128 x 128 x 64, 512 clocks of an SM's tensor cores.
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
  plan.stages = group_stages(kRowBlocks);
  plan.split_tiles = 0;
  return plan;
}

template <int kRowBlocks>
inline constexpr int kGroupBytes =
    group_teams(kRowBlocks) * (group_stages(kRowBlocks) * decode_stage_bytes({4, 2, 128, 128}) +
                               static_cast<int>(sizeof(GroupMemory<kRowBlocks>)));
static_assert(kGroupBytes<4> + kDecodeStaticBytes <= kGroupRoom);
static_assert(kGroupBytes<8> + kDecodeStaticBytes <= kGroupRoom);

template <int kKeyBits, int kValueBits, int kRowBlocks>
__global__ void __launch_bounds__(group_teams(kRowBlocks) * device::kGroupThreads, 1)
    decode_group_kernel(const __grid_constant__ DecodeParams p,
                        const __grid_constant__ DecodePlan any_plan) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Worker = GroupWorker<kKeyBits, kValueBits, kRowBlocks>;
  using Memory = GroupMemory<kRowBlocks>;
  constexpr int kStageBytes = decode_stage_bytes(Worker::kFormat);
  constexpr int kStateVectors =
      device::SoftmaxState<Worker::kDim, kRowBlocks>::kVectors * kWarpLanes;
  static_assert(kStateVectors * sizeof(float4) <= group_stages(kRowBlocks) * kStageBytes,
                "last pieces take the place of the rings alone");
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ DecodeShared shared;
  const int lane = threadIdx.x % kWarpLanes;
  touch(p);
  touch(any_plan);
  const DecodePlan plan = group_plan<kRowBlocks>(any_plan);
  const int team = own_warp() / device::kGroupWarps;
  // Asked anew each time: no register holds it meanwhile.
  const auto is_first = [] { return own_warp() % device::kGroupWarps == 0; };
  if (is_first() && lane == 0 && team < plan.teams) {
    for (int i = team * plan.stages; i < (team + 1) * plan.stages; ++i) {
      device::barrier_init(&shared.full[i], device::RingCopy::kArrivals);
      device::barrier_init(&shared.told[i], 1);
      device::barrier_init(&shared.empty[i], device::kGroupThreads);
    }
    device::barrier_init_fence();
  }
  device::wait_for_previous();
  ask_for_inputs(p);
  const int chunk = static_cast<int>((p.kv.seqs + kDecodeThreads - 1) / kDecodeThreads);
  divide(p, plan, chunk, shared.scan, shared.division);
  // To the join a team has one state.
  DecodePlan joined = plan;
  joined.row_parts = 1;
  joined.parts_shift = 0;
  // All rings, then what else the groups have.
  auto& memory = reinterpret_cast<Memory*>(rings + plan.teams * plan.stages * kStageBytes)[team];
  Worker worker(p, plan, memory, team, lane);
  if (team < teams_of_block(shared.division)) {
    const auto make_feeder = [&] {
      return Feeder(p, plan, shared, rings + team * plan.stages * kStageBytes, kStageBytes,
                    record_layout(Worker::kFormat).bytes, team, lane);
    };
    if (is_first()) {
      Cursor cursor;
      cursor.start(p, plan, shared.division, shared.scan, chunk, shared.division.share_of(team));
      Feeder feeder = make_feeder();
      feeder.start(cursor);
      feeder.fill();
      feeder.park(memory.feeder);
    }
    int turn = 0;  // stage, and stages more on every second lap
#pragma unroll 1
    for (;;) {
      const unsigned parity = turn >= plan.stages ? 1 : 0;
      const int stage = turn - (parity ? plan.stages : 0);
      const int at = team * plan.stages + stage;
      device::barrier_wait(&shared.told[at], parity);
      __syncwarp();
      const int flags = uniform(shared.tile[at].flags);
      const int token = uniform(shared.tile[at].token);
      const bool is_record = token < 0;
      StagePiece& piece = shared.current[own_warp()];
      const auto place = [&] {
        return RowPlace(p, plan, piece.seq, piece.head, piece.row_block, 0, 0);
      };
      if (flags & kFirstTile) {
        if (lane == 0) piece = shared.piece[at];
        __syncwarp();
        worker.open(place());
      }
      if ((flags & kFirstTile) || worker.rotated != is_record) {
        if (!(flags & kFirstTile)) worker.rotate();
        worker.rotated = is_record;
        worker.take_query(place());
      }
      // At the begin (later, now and then, it is the same).
      if (threadIdx.x == 0 && turn == 0 && (flags & kFirstTile)) {
        shared.front_block = shared.division.block_of(shared.share[0].first.start);
      }
      const int first_token = (shared.tile[at].tile << plan.group_shift) + max(token, 0);
      const int tokens = is_record ? Worker::kFormat.group : device::kStagedTokens;
      const bool seen = !(flags & kNoTile) && worker.sees(first_token, tokens);
      device::barrier_wait(&shared.full[at], parity);
      const uint8_t* const data = rings + at * kStageBytes;
      if (seen) {
        const bool all_see = worker.all_see(first_token, tokens);
        if (is_record) {
          worker.record(data, first_token, all_see);
        } else if (p.kv.staging.dtype == DType::kFloat16) {
          worker.template staged<false>(data, first_token, all_see);
        } else {
          worker.template staged<true>(data, first_token, all_see);
        }
      }
      device::barrier_arrive(&shared.empty[at]);
      if (is_first()) {
        Feeder feeder = make_feeder();
        feeder.unpark(memory.feeder);
        feeder.use_up();
        feeder.fill();
        feeder.park(memory.feeder);
      }
      if (++turn == 2 * plan.stages) turn = 0;
      if (!(flags & kLastTile)) continue;
      worker.finish();
      constexpr int kWhole = kBeginsItem | kEndsItem;
      if ((flags & kWhole) == kWhole) {
        worker.write(place());
      } else if (!(flags & kBeginsItem) && (flags & kEndsItem)) {
        worker.store(plan.warp_pieces + (int64_t{blockIdx.x} * plan.teams + team) * kStateVectors);
      }
      if (flags & kEnd) break;
    }
  }
  const int teams = teams_of_block(shared.division);
  if (teams == 0) return;
  __syncthreads();  // the rings are free
  auto* const last_pieces = reinterpret_cast<float4*>(rings);
  if (team < teams && shared.share[team].cut_at_end) {
    worker.store(last_pieces + team * kStateVectors);
  }
  __syncthreads();
  join_shares<group_teams(kRowBlocks) * device::kGroupWarps, group_teams(kRowBlocks), Worker::kDim,
              kRowBlocks>(p, joined, shared, teams, last_pieces, lane, [] { __syncthreads(); });
#endif
}

/// The shared memory of a block; 0: the kernel is not there for this device.
template <int kRowBlocks>
int decode_group_bytes() {
  static const bool has_code = [] {
    cudaFuncAttributes attributes{};
    const auto kernel = decode_group_kernel<4, 2, kRowBlocks>;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    return error == cudaSuccess && attributes.ptxVersion == 90;
  }();
  return has_code ? kGroupBytes<kRowBlocks> : 0;
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
