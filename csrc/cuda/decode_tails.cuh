// The ends of shares, which are done by who is free.
//
// Some SMs get more of the memory than others: on an H200 a fifth of them, always the same ones,
// finish equal shares a tenth earlier. So the last fourteenth of each share is cut off, its *tail*.
// A team that comes to the end of its share takes its own tail, if nobody has done so, and then
// those of other blocks. Where shares and tails are cut does not depend on who does them: nor do
// results.
#pragma once

#include <cstdint>

#include "cuda/decode_join.cuh"
#include "cuda/decode_shared.cuh"

namespace kvarn::cuda {

/// All lanes of a warp: whether the tail was still to be taken; then it is the warp's.
__device__ __forceinline__ bool take_tail(const DecodePlan& plan, int block, int team, int lane) {
  uint64_t before = 0;
  // A predicate, not a branch: behind one the compiler provides for lanes that have parted, in all
  // of the kernel.
  asm volatile(
      "{\n\t.reg .pred first;\n\tsetp.eq.s32 first, %2, 0;\n\t"
      "@first atom.relaxed.gpu.and.b64 %0, [%1], %3;\n\t}"
      : "+l"(before)
      : "l"(plan.open_tails + block), "r"(lane), "l"(~(uint64_t{1} << team))
      : "memory");
  return uniform(static_cast<int>(before >> team & 1)) != 0;
}

/// All lanes of a warp: takes the tail of a share of the block that has most of them open, into the
/// hand. False: none is.
__device__ __forceinline__ bool find_tail(const DecodePlan& plan, const Division& division,
                                          TeamHand& hand, int team, int lane) {
  const auto grid = static_cast<int>(gridDim.x);
  const int from = (static_cast<int>(blockIdx.x) * kMaxDecodeWarps + team) * 37 % grid;
  int found = 0;
  unsigned most;
  do {
    unsigned best = 0;  // of a lane: how many are open, and how near the block is behind `from`
    unsigned bits = 0;
#pragma unroll 1
    for (int first = 0; first < grid; first += kWarpLanes) {
      const int i = first + lane;
      const int block = from + i < grid ? from + i : from + i - grid;
      uint64_t word = 0;
      if (i < grid) {
        asm volatile("ld.relaxed.gpu.u64 %0, [%1];"
                     : "=l"(word)
                     : "l"(plan.open_tails + block)
                     : "memory");
      }
      // A block that has not started has anything there.
      const auto open =
          static_cast<unsigned>((word ^ plan.launch) <= kTailBits ? word & kTailBits : 0);
      const unsigned rank =
          open == 0 ? 0
                    : static_cast<unsigned>(__popc(open)) << 16 | static_cast<unsigned>(0xffff - i);
      bits = rank > best ? open : bits;
      best = max(best, rank);
    }
    most = __reduce_max_sync(device::kAllLanes, best);
    if (most != 0) {
      const int owner = __ffs(static_cast<int>(__ballot_sync(device::kAllLanes, best == most))) - 1;
      const int block = (from + 0xffff - static_cast<int>(most & 0xffff)) % grid;
      const int other = 31 - __clz(static_cast<int>(__shfl_sync(device::kAllLanes, bits, owner)));
      found = take_tail(plan, block, other, lane) ? 1 : 0;
      if (lane == 0 && found != 0) {
        hand = {block, other * division.stretches_of_share() + 1, kOfOther};
      }
    }
  } while (uniform(most != 0 && found == 0 ? 1 : 0) != 0);
  __syncwarp();
  return uniform(found) != 0;
}

}  // namespace kvarn::cuda
