// What the decode kernels do before anything else.
#pragma once

#include <cstdint>

#include "cuda/decode_plan.cuh"

namespace kvarn::cuda {

/// Asks for lines of an array that will be read when more is known: a line a thread of the grid,
/// and by each block the first one, so that its SM has the address translated.
template <int kThreads>
__device__ __forceinline__ void ask_for(const void* data, int bytes) {
  constexpr int kLine = 128;
  const int at = (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) * kLine;
  const char* const start = static_cast<const char*>(data);
  if (at < bytes) asm volatile("prefetch.global.L2 [%0];" ::"l"(start + at));
  if (threadIdx.x == 0 && bytes > 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(start));
}

/// The work cannot be known before the lengths are; their latency hides that of the rest.
template <int kThreads>
__device__ __forceinline__ void ask_for_inputs(const DecodeParams& p, const DecodePlan& plan) {
  ask_for<kThreads>(p.q, plan.query_bytes);
  ask_for<kThreads>(p.kv.block_table.data, plan.table_bytes);
  ask_for<kThreads>(p.kv.block_slot.data, plan.slot_bytes);
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

/// Teams of the block that have a share. (From memory each time: no register holds it meanwhile.)
__device__ __forceinline__ int teams_of_block(const volatile Division& d) {
  const int left = static_cast<int>(d.shares - blockIdx.x * static_cast<unsigned>(d.teams));
  return uniform(max(min(left, d.teams), 0));
}

}  // namespace kvarn::cuda
