// Asks for what a decode kernel reads first, before it is known what of it.
#pragma once

#include <cstdint>

#include "cuda/decode_plan.cuh"

namespace kvarn::cuda {

/// Asks for lines of an array that will be read when more is known: a line a thread of the grid,
/// and by each block the first one, so that its SM has the address translated.
__device__ __forceinline__ void ask_for(const void* data, int64_t bytes) {
  constexpr int kLine = 128;
  constexpr int64_t kMost = 512 << 10;
  const int64_t at = (int64_t{blockIdx.x} * kDecodeThreads + threadIdx.x) * kLine;
  const char* const start = static_cast<const char*>(data);
  if (at < min(bytes, kMost)) asm volatile("prefetch.global.L2 [%0];" ::"l"(start + at));
  if (threadIdx.x == 0 && bytes > 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(start));
}

/// The work cannot be known before the lengths are; their latency hides that of the rest.
__device__ __forceinline__ void ask_for_inputs(const DecodeParams& p) {
  // Of two-dimensional arrays, from the first element to the last.
  const auto elements = [](int64_t rows, int64_t row_stride, int64_t cols, int64_t col_stride) {
    return cols == 0 ? 0 : (rows - 1) * row_stride + (cols - 1) * col_stride + 1;
  };
  ask_for(p.q, 2 * (elements(p.tokens, p.q_stride[0], p.q_heads, p.q_stride[1]) +
                    p.kv.format.head_dim - 1));
  const IndexMatrix& table = p.kv.block_table;
  ask_for(table.data, (table.is_int64 ? 8 : 4) * elements(p.kv.seqs, table.row_stride,
                                                          p.kv.table_width, table.col_stride));
  const IndexArray& slot = p.kv.block_slot;
  if (slot) {
    ask_for(slot.data, (slot.is_int64 ? 8 : 4) * elements(1, 0, p.kv.cache.blocks, slot.stride));
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

}  // namespace kvarn::cuda
