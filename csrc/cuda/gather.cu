// gather_kv: records as dequantize_tiles takes them, but found through the block table; staged
// tiles are copied.
//
// Roofline: as dequantize_tiles (cuda/dequantize.cu); staged tiles are bytes alone. All tiles of
// all sequences and heads, one after the other, are dealt out to a fixed number of blocks, which
// find them from the lengths: nothing of it is known on the host.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/format.h"
#include "cuda/launch.h"
#include "cuda/paged_check.cuh"
#include "device/copy.cuh"
#include "device/dequantize.cuh"

namespace kvarn::cuda {
namespace {

using namespace device::dequantize;

constexpr int kScanThreads = 64;

__device__ __forceinline__ int64_t tiles_of(const PagedKV& kv, int64_t seq) {
  const int64_t length = kv.seq_lens[seq];
  return length <= 0 ? 0 : (length + kv.format.group - 1) / kv.format.group;
}

/// Tiles of the sequences before each scanning thread's.
struct TileScan {
  int64_t before[kScanThreads + 1];
  int64_t warp_total[kScanThreads / kWarpLanes];
};

/// All threads of the block; sequences [i * chunk, (i + 1) * chunk) are thread i's.
__device__ __forceinline__ void scan_tiles(const PagedKV& kv, int64_t chunk, TileScan& scan) {
  const int thread = threadIdx.x;
  const int lane = thread % kWarpLanes;
  int64_t mine = 0;
  int64_t upto = 0;
  if (thread < kScanThreads) {
    for (int64_t seq = thread * chunk; seq < min((thread + 1) * chunk, kv.seqs); ++seq) {
      mine += tiles_of(kv, seq);
    }
    upto = mine;
#pragma unroll
    for (int distance = 1; distance < kWarpLanes; distance *= 2) {
      const int64_t other = __shfl_up_sync(~0u, upto, distance);
      if (lane >= distance) upto += other;
    }
    if (lane == kWarpLanes - 1) scan.warp_total[thread / kWarpLanes] = upto;
  }
  __syncthreads();
  if (thread < kScanThreads) {
    for (int w = 0; w < thread / kWarpLanes; ++w) upto += scan.warp_total[w];
    scan.before[thread] = upto - mine;
    if (thread == kScanThreads - 1) scan.before[kScanThreads] = upto;
  }
  __syncthreads();
}

/// A tile of one head, and where its tokens go.
struct GatherTile {
  const uint8_t* record;  ///< null: staged
  int64_t slot;
  int64_t row;
  int head;
  int tokens;
};

__device__ __forceinline__ GatherTile find_tile(const GatherParams& p, int64_t chunk,
                                                const TileScan& scan, int64_t index) {
  const PagedKV& kv = p.kv;
  GatherTile found;
  int64_t tile = index / kv.kv_heads;
  found.head = static_cast<int>(index - tile * kv.kv_heads);
  int owner = 0;
#pragma unroll 1
  for (int step = kScanThreads / 2; step > 0; step /= 2) {
    if (scan.before[owner + step] <= tile) owner += step;
  }
  tile -= scan.before[owner];
  int64_t seq = owner * chunk;
  for (int64_t tiles = tiles_of(kv, seq); tile >= tiles; tiles = tiles_of(kv, ++seq)) tile -= tiles;
  const int64_t token = tile * kv.format.group;
  found.tokens = static_cast<int>(min(kv.seq_lens[seq] - token, int64_t{kv.format.group}));
  found.row = p.cu_seq_lens[seq] + token;
  const int64_t block = kv.block_table.at(seq, tile);
  found.slot = kv.block_slot.data != nullptr ? kv.block_slot[block] : -1;
  found.record = found.slot >= 0
                     ? nullptr
                     : kv.cache.data + block * kv.cache.stride[0] + found.head * kv.cache.stride[1];
  return found;
}

/// Rows of a staged tile: a warp for each token.
template <class From, class T, int kDim>
__device__ __forceinline__ void copy_rows(const From* from, int64_t from_stride, T* to,
                                          int64_t to_stride, int tokens, bool rotate) {
  constexpr int kPieces = kDim / kWarpLanes;
  const int lane = threadIdx.x % kWarpLanes;
#pragma unroll 1
  for (int token = threadIdx.x / kWarpLanes; token < tokens; token += kWarps<kDim>) {
    // Element kPieces * lane + i.
    float v[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      v[i] = device::to_float(from[token * from_stride + kPieces * lane + i]);
    }
    if (rotate) {
      device::butterfly_registers<1, kPieces>(v);
      device::butterfly_lanes<1, kWarpLanes>(v, lane);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float scaled = rotate ? v[i] * device::orthonormal_scale(kDim) : v[i];
      to[token * to_stride + kPieces * lane + i] = device::from_float<T>(scaled);
    }
  }
}

template <class T, int kDim>
__device__ __forceinline__ void copy_staged(const GatherParams& p, const GatherTile& tile, T* key,
                                            T* value) {
  const Staging& pool = p.kv.staging;
  const int64_t base = tile.slot * pool.stride[0] + tile.head * pool.stride[2];
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    T* const to = part == 0 ? key : value;
    const int64_t stride = part == 0 ? p.key_stride[0] : p.value_stride[0];
    const int64_t at = base + part * pool.stride[1];
    if (pool.dtype == DType::kFloat16) {
      copy_rows<__half, T, kDim>(static_cast<const __half*>(pool.data) + at, pool.stride[3], to,
                                 stride, tile.tokens, p.rotated);
    } else {
      copy_rows<__nv_bfloat16, T, kDim>(static_cast<const __nv_bfloat16*>(pool.data) + at,
                                        pool.stride[3], to, stride, tile.tokens, p.rotated);
    }
  }
}

/// kAligned: rows of T start at multiples of 16 bytes.
template <class T, int kDim, bool kAligned>
__global__ void __launch_bounds__(kThreads<kDim>, kDim == 256 ? 2 : 3)
    gather_kernel(const __grid_constant__ GatherParams p,
                  const __grid_constant__ RecordLayout layout) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ TileScan scan;
  auto& scratch = *reinterpret_cast<Scratch<kDim>*>(shared);
  uint8_t* const record = shared + sizeof(scratch);
  constexpr int kWarpTokens = kWarpUnits<kDim> * kTokens;
  const int warps = p.kv.format.group / kWarpTokens;  // of a record
  const int lane = threadIdx.x % kWarpLanes;
  const int warp = threadIdx.x / kWarpLanes;
  const int64_t chunk = (p.kv.seqs + kScanThreads - 1) / kScanThreads;
  scan_tiles(p.kv, chunk, scan);
  const int64_t count = scan.before[kScanThreads] * p.kv.kv_heads;
  if (threadIdx.x < kWarpLanes) {
    make_masks<true>(scratch.keep[0][lane], scratch.flip[0][lane], p.rotated, lane);
    make_masks<false>(scratch.keep[1][lane], scratch.flip[1][lane], p.rotated, lane);
  }
#pragma unroll 1
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const GatherTile tile = find_tile(p, chunk, scan, i);
    T* const key =
        static_cast<T*>(p.key) + tile.row * p.key_stride[0] + tile.head * p.key_stride[1];
    T* const value =
        static_cast<T*>(p.value) + tile.row * p.value_stride[0] + tile.head * p.value_stride[1];
    if (tile.record == nullptr) {
      copy_staged<T, kDim>(p, tile, key, value);
      continue;
    }
    __syncthreads();  // nobody needs the record before it any more
    device::copy_to_shared<kThreads<kDim>>(record, tile.record, layout.bytes);
    device::copy_async_commit();
    device::copy_async_wait<0>();
    __syncthreads();
    if (warp < warps) {
      make_operands<kDim, is_exact<T>>(record, layout, p.kv.format.key_bits, scratch, 0, p.rotated,
                                       warp, warps, lane);
    }
    __syncthreads();
    if (warp < warps) {
      dequantize_part<T, kDim, kAligned, true, true>(
          p.kv.format.key_bits, part_of<true>(record, layout), scratch.slot[0].key, key,
          p.key_stride[0], warp, warps, p.rotated, tile.tokens);
      dequantize_part<T, kDim, kAligned, true, false>(
          p.kv.format.value_bits, part_of<false>(record, layout), scratch.slot[0].value, value,
          p.value_stride[0], warp, warps, p.rotated, tile.tokens);
    }
  }
}

bool aligned(const GatherParams& p) {
  const auto is_multiple = [](int64_t bytes) { return bytes % device::kAccessBytes == 0; };
  bool ok = is_multiple(reinterpret_cast<intptr_t>(p.key)) &&
            is_multiple(reinterpret_cast<intptr_t>(p.value));
  for (int i = 0; i < 2; ++i) {
    ok = ok && is_multiple(p.key_stride[i] * size_of(p.dtype)) &&
         is_multiple(p.value_stride[i] * size_of(p.dtype));
  }
  return ok;
}

template <class T, int kDim>
Status run(const GatherParams& p) {
  const auto kernel = aligned(p) ? gather_kernel<T, kDim, true> : gather_kernel<T, kDim, false>;
  const RecordLayout layout = record_layout(p.kv.format);
  const size_t shared_bytes = sizeof(Scratch<kDim>) + static_cast<size_t>(layout.bytes);
  if (Status status = allow_shared_memory(kernel, shared_bytes); !status.ok()) return status;
  int resident = 0;
  if (Status status = resident_blocks(kernel, kThreads<kDim>, shared_bytes, resident);
      !status.ok()) {
    return status;
  }
  return launch(kernel, dim3(static_cast<unsigned>(resident)), dim3(kThreads<kDim>), shared_bytes,
                p.stream, p, layout);
}

template <class T>
Status run(const GatherParams& p) {
  switch (p.kv.format.head_dim) {
    case 64:
      return run<T, 64>(p);
    case 128:
      return run<T, 128>(p);
    default:
      return run<T, 256>(p);
  }
}

/// Room of a sequence, and of all of them.
struct CheckRoom {
  PagedKV kv;
  IndexArray cu_seq_lens;
  int64_t total_tokens;

  __device__ Offence operator()(int64_t seq) const {
    if (seq == kv.seqs) {
      const int64_t end = cu_seq_lens[kv.seqs];
      return end > total_tokens ? Offence{1, end, total_tokens} : Offence{};
    }
    const int64_t room = cu_seq_lens[seq + 1] - cu_seq_lens[seq];
    const int64_t length = kv.seq_lens[seq];
    return length > room ? Offence{2, length, room} : Offence{};
  }
};

Status check_metadata(const GatherParams& p) {
  Status ordered = check_offsets("cu_seq_lens", p.cu_seq_lens, p.kv.seqs, p.stream);
  if (!ordered.ok()) return ordered;
  Status paged = check_paged_metadata(p.kv, p.kv.table_width * p.kv.format.group, {}, -1,
                                      "the tokens of block_table", p.stream);
  if (!paged.ok()) return paged;
  Offence offence;
  int64_t index = 0;
  Status status = find_offence(CheckRoom{p.kv, p.cu_seq_lens, p.total_tokens}, p.kv.seqs + 1,
                               p.stream, offence, index);
  if (!status.ok() || offence.rule == 0) return status;
  if (offence.rule == 1) {
    return Status::invalid("cu_seq_lens must be at most " + std::to_string(offence.other) +
                           " (the rows of key), got " + std::to_string(offence.value) +
                           " at index " + std::to_string(index));
  }
  return Status::invalid("seq_lens must be from 0 to " + std::to_string(offence.other) +
                         " (the room that cu_seq_lens gives), got " +
                         std::to_string(offence.value) + " at index " + std::to_string(index));
}

}  // namespace

Status gather_kv(const GatherParams& p) {
  if (Status status = check_paged_kv(p.kv); !status.ok()) return status;
  if (p.kv.seqs == 0 || p.total_tokens == 0) return {};
  if (p.checked) {
    if (Status status = check_metadata(p); !status.ok()) return status;
  }
  switch (p.dtype) {
    case DType::kFloat16:
      return run<__half>(p);
    case DType::kBFloat16:
      return run<__nv_bfloat16>(p);
    case DType::kFloat32:
      break;
  }
  return Status::unsupported("key must be fp16 or bf16 on CUDA, got fp32");
}

}  // namespace kvarn::cuda
