// dequantize_tiles: records -> keys and values, rotated back.
//
// Roofline. A record of k4v2, D = G = 128, is 13.8 KB to read and 64 KB (fp16) to write: 19 ns at
// the copy rate of an H200, in which its 132 SMs have 19 instruction slots an element; 21.6 ns in a
// kernel that does nothing but read and write as much, because four of five bytes are written.
// Scaling a code and seven butterfly stages of shuffles and additions would take most of the slots.
// Instead:
//
// - The tensor core does the part of the transform that crosses lanes. Codes are exact in fp16 and
//   so are channel scales with a sign, so with A = codes of 16 tokens x 16 channels and
//   B = +-channel_scale, four of the log2(D) stages are two mma in fp32. The channels of a fragment
//   differ in four bits; B transforms those.
// - The other stages but those above bit 6 are additions between accumulators (three an element
//   at D = 128). Above bit 6 the fragments accumulate into the same registers with signs.
// - The zero points never meet a code: transformed on their own (K), or as zero_point[token] times
//   the transformed channel scales (V), they are where the accumulators start.
// - The token scale multiplies the finished row.
// - V fragments have channels for rows; movmatrix makes tokens of them, before the words are taken
//   apart: one moves the 16 / bits matrices of a word at once. The rest is as with K.
// - For 16-bit results a code enters the product as the subnormal number that its bits are, which
//   takes a shift (often shared) and a mask. Their power of two is the same for all codes of a
//   token and goes into its scale.
//
// About 9 instructions an element, with the operands. A lane ends with 8 neighbouring channels of a
// token: 16-byte stores, 64 bytes of a row side by side.
//
// Measured, k4v2, of the rate of a kernel that copies as many bytes (of cudaMemcpyAsync), 4096
// records of 128 tokens at D = 128: .87 (.84); D = 64: .80 (.77), D = 256: .77 (.74); tiles of 64
// tokens: .87, .80, .73. docs/design.md has what was tried.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/dtype.h"
#include "cuda/format.h"
#include "cuda/launch.h"
#include "device/copy.cuh"
#include "device/dequantize.cuh"

namespace kvarn::cuda {
namespace {

using namespace device::dequantize;

__device__ __forceinline__ const uint8_t* record_at(const DequantizeParams& p, unsigned record) {
  const unsigned tile = record / static_cast<unsigned>(p.heads);
  const unsigned head = record - tile * static_cast<unsigned>(p.heads);
  return p.records + tile * p.record_stride[0] + head * p.record_stride[1];
}

/// Token 0, channel 0 of a record's keys or values.
template <class T>
__device__ __forceinline__ T* rows_at(const DequantizeParams& p, void* out,
                                      const int64_t (&stride)[3], unsigned record) {
  const unsigned tile = record / static_cast<unsigned>(p.heads);
  const unsigned head = record - tile * static_cast<unsigned>(p.heads);
  return static_cast<T*>(out) + tile * stride[0] + head * stride[2];
}

/// Starts to copy `bytes`, a multiple of 16. The loops run a few times: unrolled they would only be
/// more instructions to fetch.
__device__ __forceinline__ void fetch_bytes(uint8_t* shared, const uint8_t* global, int bytes) {
  if (reinterpret_cast<uintptr_t>(global) % 16 == 0) {
#pragma unroll 1
    for (int i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) {
      device::copy_async_16(shared + i, global + i);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) shared[i] = global[i];
  }
}

/// Blocks of a multiprocessor that registers are kept for.
template <class T>
constexpr int min_blocks(int dim) {
  return dim == 64 ? 3 : dim == 128 ? 4 : sizeof(T) == 4 ? 1 : 2;
}

/// A block takes record after record (two at a time if they are small); the next comes in
/// meanwhile. kAligned: rows of T start at multiples of 16 bytes.
template <class T, int kDim, bool kAligned>
__global__ void __launch_bounds__(kThreads<kDim>, min_blocks<T>(kDim))
    dequantize_kernel(const __grid_constant__ DequantizeParams p,
                      const __grid_constant__ RecordLayout layout) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto& scratch = *reinterpret_cast<Scratch<kDim>*>(shared);
  const int slots = slots_of<kDim>(p.format);
  constexpr int kWarpTokens = kWarpUnits<kDim> * kTokens;
  const int warps = p.format.group == 64 ? 64 / kWarpTokens : 128 / kWarpTokens;  // of a record
  const int lane = threadIdx.x % kWarpLanes;
  const int number = threadIdx.x / kWarpLanes;
  const int slot =
      p.format.group == 64 ? number / (64 / kWarpTokens) : number / (128 / kWarpTokens);
  const int warp = number & (warps - 1);
  const unsigned records = static_cast<unsigned>(p.tiles * p.heads);
  uint8_t* buffer = shared + sizeof(scratch);  // the records of now, and of next time
  uint8_t* next = buffer + slots * layout.bytes;

  const auto fetch = [&](unsigned first, uint8_t* to) {
#pragma unroll 1
    for (int i = 0; i < slots && first + i < records; ++i) {
      fetch_bytes(to + i * layout.bytes, record_at(p, first + i), layout.bytes);
    }
    device::copy_async_commit();
  };

  fetch(blockIdx.x * slots, buffer);
  if (threadIdx.x < kWarpLanes) {
    make_masks<true>(scratch.keep[0][lane], scratch.flip[0][lane], p.rotated, lane);
    make_masks<false>(scratch.keep[1][lane], scratch.flip[1][lane], p.rotated, lane);
  }
#pragma unroll 1
  for (unsigned first = blockIdx.x * slots; first < records; first += gridDim.x * slots) {
    const unsigned record = first + slot;
    // After the barrier the records are there, and nobody needs those before them any more.
    device::copy_async_wait<0>();
    __syncthreads();
    fetch(first + gridDim.x * slots, next);
    const uint8_t* const mine = buffer + slot * layout.bytes;
    if (record < records) {
      make_operands<kDim, is_exact<T>>(mine, layout, p.format.key_bits, scratch, slot, p.rotated,
                                       warp, warps, lane);
    }
    __syncthreads();
    if (record < records) {
      dequantize_part<T, kDim, kAligned, false, true>(
          p.format.key_bits, part_of<true>(mine, layout), scratch.slot[slot].key,
          rows_at<T>(p, p.key, p.key_stride, record), p.key_stride[1], warp, warps, p.rotated, 0);
      dequantize_part<T, kDim, kAligned, false, false>(
          p.format.value_bits, part_of<false>(mine, layout), scratch.slot[slot].value,
          rows_at<T>(p, p.value, p.value_stride, record), p.value_stride[1], warp, warps, p.rotated,
          0);
    }
    uint8_t* const done = buffer;
    buffer = next;
    next = done;
  }
}

bool aligned(const DequantizeParams& p) {
  const auto is_multiple = [](int64_t bytes) { return bytes % device::kAccessBytes == 0; };
  bool ok = is_multiple(reinterpret_cast<intptr_t>(p.key)) &&
            is_multiple(reinterpret_cast<intptr_t>(p.value));
  const int64_t sizes[] = {p.tiles, p.format.group, p.heads};
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] == 1) continue;
    ok = ok && is_multiple(p.key_stride[i] * size_of(p.dtype)) &&
         is_multiple(p.value_stride[i] * size_of(p.dtype));
  }
  return ok;
}

template <class T, int kDim>
Status run(const DequantizeParams& p) {
  const int64_t records = p.tiles * p.heads;
  if (records == 0) return {};
  if (Status status = check_grid("records", records); !status.ok()) return status;
  const auto kernel =
      aligned(p) ? dequantize_kernel<T, kDim, true> : dequantize_kernel<T, kDim, false>;
  const int slots = slots_of<kDim>(p.format);
  const RecordLayout layout = record_layout(p.format);
  const size_t shared_bytes = sizeof(Scratch<kDim>) + 2 * slots * layout.bytes;
  if (Status status = allow_shared_memory(kernel, shared_bytes); !status.ok()) return status;
  int resident = 0;
  if (Status status = resident_blocks(kernel, kThreads<kDim>, shared_bytes, resident);
      !status.ok()) {
    return status;
  }
  const int64_t blocks = std::min<int64_t>((records + slots - 1) / slots, resident);
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads<kDim>), shared_bytes,
                p.stream, p, layout);
}

template <class T>
Status run(const DequantizeParams& p) {
  switch (p.format.head_dim) {
    case 64:
      return run<T, 64>(p);
    case 128:
      return run<T, 128>(p);
    default:
      return run<T, 256>(p);
  }
}

}  // namespace

Status dequantize_tiles(const DequantizeParams& p) {
  if (Status status = check_format(p.format); !status.ok()) return status;
  return with_element_type(p.dtype, [&](auto element) { return run<decltype(element)>(p); });
}

}  // namespace kvarn::cuda
