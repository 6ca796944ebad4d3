// quantize_tiles and seal_blocks: raw keys and values -> finished records, in one launch.
//
// Roofline. A record of k4v2, D = G = 128, is 64 KB of fp16 to read and 13.8 KB to write: 18 ns at
// the copy rate of an H200. Its SMs have 1 instruction slot an element and nanosecond, and the fits
// take 70 (closed form) to 100 (4 rounds) at least: the kernel is bound by instructions, not bytes.
// The tile is in shared memory, in fp32, from the rotation to the codes, and most passes over it
// are short loops: straight-line code over a tile in registers waits for its own instructions. The
// rounds of the normalization have it in registers: they are one short loop all the same, and two
// loads of the tile a round kept shared memory as busy as the schedulers.
//
// Measured there: 144 ns a record in closed form, 229 with 4 rounds, 195 for minmax with 8. A form
// a little before took 94 (closed form) and 150 instructions (4 rounds) an element and issued on
// 66 and 65 % of the cycles; the row fits, more than half of the time in closed form, on 87 %
// (docs/design.md).
//
// A block makes one part (K or V) of one record. device/tile.cuh says who holds what, rotate.cuh
// how it gets there, sinkhorn.cuh and fit.cuh what is computed, pack.cuh how it leaves.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/checked.cuh"
#include "cuda/format.h"
#include "cuda/launch.h"
#include "device/dependent_launch.cuh"
#include "device/fit.cuh"
#include "device/pack.cuh"
#include "device/rotate.cuh"
#include "device/sinkhorn.cuh"
#include "device/tile.cuh"
#include "kvarn/ops.h"

namespace kvarn::cuda {
namespace {

using device::kStrip;

/// Records out[target(i)] from tiles in[source(i)], for every head.
struct Jobs {
  Format format;
  const void* in[2];        ///< K, V
  int64_t in_stride[2][3];  ///< tile, token, head
  DType dtype;
  uint8_t* records;
  int64_t record_stride[2];  ///< tile, head
  int64_t tiles;
  int32_t heads;
  uint32_t heads_factor;  ///< n / heads = n * heads_factor >> heads_shift, for n < 2^31
  int32_t heads_shift;
  uint32_t parts;     ///< 2 * tiles * heads
  IndexArray source;  ///< null: i
  IndexArray target;
  int64_t sources;
  int64_t targets;
  const int32_t* count;  ///< null: all
  Fit fit;
  int32_t iterations;
  bool rotated;
  bool aligned;  ///< tokens start at multiples of 16 bytes
};

/// The same number; what follows from it is computed anew and need not be kept in registers.
__device__ __forceinline__ unsigned again(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// Which tile of which head part number `i` of all is about. Parts are pairs of K and V.
struct Job {
  int64_t source;
  int64_t target;
  int64_t head;
  bool skipped;
};

__device__ __forceinline__ Job job_of(const Jobs& jobs, unsigned part) {
  const unsigned record = part / 2;
  const auto i = static_cast<unsigned>(uint64_t{record} * jobs.heads_factor >> jobs.heads_shift);
  Job job = {i, i, record - i * jobs.heads, false};
  if (jobs.source.data == nullptr) return job;
  job.source = jobs.source[i];
  job.target = jobs.target[i];
  // Padding; what is out of range is reported where it is looked for.
  job.skipped =
      job.source < 0 || job.source >= jobs.sources || job.target < 0 || job.target >= jobs.targets;
  return job;
}

/// The parts to be made, of `jobs.parts`: what comes after them is not even read.
__device__ __forceinline__ unsigned counted_parts(const Jobs& jobs) {
  if (jobs.count == nullptr) return jobs.parts;
  const int64_t tiles = min(max(static_cast<int64_t>(*jobs.count), int64_t{0}), jobs.tiles);
  return static_cast<unsigned>(2 * tiles * jobs.heads);
}

__device__ __forceinline__ device::TokenRows tokens_of(const Jobs& jobs, const Job& job, bool key) {
  const int64_t* const stride = jobs.in_stride[key ? 0 : 1];
  return {{jobs.dtype, jobs.rotated, jobs.aligned},
          static_cast<const char*>(jobs.in[key ? 0 : 1]) +
              (job.source * stride[0] + job.head * stride[2]) * size_of(jobs.dtype),
          stride[1]};
}

/// Whether token n has anything but zeros, where its squares may have been lost: from numbers
/// 2^100 times as large. Of one thread, for what hardly ever is.
template <class Shape>
__device__ __forceinline__ bool has_tiny_numbers(const float* tile, bool are_cols, int n) {
  const int length = are_cols ? Shape::kRows : Shape::kCols;
  float energy = 0.f;
#pragma unroll 1
  for (int i = 0; i < length; ++i) {
    const float x =
        0x1p100f * tile[are_cols ? device::place<Shape>(i, n) : device::place<Shape>(n, i)];
    energy = fmaf(x, x, energy);
  }
  return energy > 0.f;
}

/// A token is dead if it has NaN or infinity or nothing but zeros. Dead ones get the numbers of the
/// last live one, or 0 where there is none. Starts after a barrier; what it finds is known after
/// another one.
template <class Shape>
__device__ __forceinline__ void find_live(device::TileMemory<Shape>& memory,
                                          const device::Tokens<Shape>& tokens) {
  constexpr float kTiny = 1e-30f;  // squares of numbers this small may have been lost
  const int n = device::own_thread();
  const bool has_token = n < tokens.count();
  if (n == 0) memory.last_live = 0;
  float energy = 1.f;
  bool own_live = false;
  if (has_token) {
    energy = device::token_energy<Shape>(memory.partial, tokens.are_cols, n);
    own_live = energy < kTiny ? has_tiny_numbers<Shape>(memory.tile, tokens.are_cols, n)
                              : energy < device::kInfinity;
  }
  if (has_token) {
    memory.energy[n] = memory.found[n] = energy;
    memory.live[n] = own_live;
  }
  const int live = __syncthreads_count(own_live);
  if (n == 0) memory.live_tokens = live;
  if (live == tokens.count()) {
    if (n == 0) memory.last_live = live - 1;
    return;
  }
  if (own_live) atomicMax(&memory.last_live, n);
  __syncthreads();
  const int last = memory.last_live;
  if (has_token && !own_live) memory.energy[n] = live == 0 ? 0.f : memory.found[last];
#pragma unroll 1
  for (int i = n; i < Shape::kRows * Shape::kCols; i += Shape::kThreads) {
    const int row = i / Shape::kCols;
    const int col = i % Shape::kCols;
    if (memory.live[tokens.are_cols ? col : row]) continue;
    memory.tile[device::place<Shape>(row, col)] =
        live == 0 ? 0.f
                  : memory.tile[tokens.are_cols ? device::place<Shape>(row, last)
                                                : device::place<Shape>(last, col)];
  }
  __syncthreads();
}

/// The power of two that brings the root mean square of the tile to about 64. The clips of the
/// normalization are absolute: the lower one would keep a small tile as it is. Contains a barrier.
template <class Shape>
__device__ __forceinline__ float size_factor(device::TileMemory<Shape>& memory,
                                             const device::Tokens<Shape>& tokens) {
  const int n = device::own_thread();
  device::put_warp_sum(n < tokens.count() && memory.live[n] ? memory.energy[n] : 0.f,
                       memory.stat[6]);
  __syncthreads();
  const float sum = device::sum_of_warps<Shape>(memory.stat[6]);
  if (!(sum > 0.f)) return 1.f;
  const float mean =
      fmaxf(device::divide(sum, tokens.row_length() * tokens.col_length()), device::kSmallest);
  return 64.f * device::exp2_fast(-rintf(device::log2_fast(mean) / 2));
}

/// Whether scales of the normalization are taken only if they pass the guard. A massive token takes
/// one channel of the other keys, less than the rounding error of 2 or 3 bits.
template <class Shape>
__device__ __forceinline__ bool is_guarded(const device::Tokens<Shape>& tokens, Fit fit,
                                           int iterations) {
  return (fit == Fit::kMinMax || iterations > 0) && (!tokens.are_cols || tokens.bits >= 4);
}

/// Line threads: the scale of column threadIdx.x. Contains barriers, the last of them such that
/// put_col_scale may follow.
template <class Shape>
__device__ __forceinline__ float find_col_scale(device::TileMemory<Shape>& memory,
                                                const device::Tokens<Shape>& tokens, Fit fit,
                                                int iterations, bool guarded) {
  if (fit != Fit::kMinMax && iterations == 0) {
    // What is read here of find_live has had its barrier.
    return device::half_rounded(device::limited_col_scale(
        tokens.are_cols ? device::token_rms(memory) : device::channel_spread(memory, tokens)));
  }
  float factor = 1.f;
  if (fit == Fit::kMinMax) {
    __syncthreads();
  } else {
    factor = size_factor(memory, tokens);
  }
  float x[device::kSteps][kStrip];
  float scale = device::sinkhorn_col_scale(memory, tokens, factor, iterations, x);
  const bool minmax = again(static_cast<unsigned>(fit)) == static_cast<unsigned>(Fit::kMinMax);
  if (!minmax) scale = device::without_factor<Shape>(tokens, scale, memory.stat[4]);
  float alternative = 1.f;
  if (guarded && tokens.are_cols) {
    alternative = device::limited_col_scale(device::token_rms(memory));
    if (!minmax) {
      alternative = device::without_factor<Shape>(tokens, alternative, memory.stat[5]);
    }
  }
  if (!minmax) {
    scale = device::half_rounded(device::limited_col_scale(scale));
    alternative = device::half_rounded(device::limited_col_scale(alternative));
  }
  if (guarded) scale = device::guarded_col_scale(memory, tokens, x, scale, alternative);
  __syncthreads();
  return scale;
}

__device__ __forceinline__ void store_half(uint8_t* fields, int n, __half value) {
  const uint16_t bits = __half_as_ushort(value);
  uint8_t* const out = fields + 2 * n;
  if (reinterpret_cast<uintptr_t>(fields) % 2 == 0) {
    *reinterpret_cast<uint16_t*>(out) = bits;
  } else {
    out[0] = static_cast<uint8_t>(bits);
    out[1] = static_cast<uint8_t>(bits >> 8);
  }
}

/// Scales and zero points into the record. Starts after a barrier.
template <class Shape>
__device__ __forceinline__ void store_scales(device::TileMemory<Shape>& memory,
                                             const device::Tokens<Shape>& tokens, uint8_t* fields) {
  const int n = device::own_thread();
  const bool has_row = n < Shape::kRows;
  const bool has_col = n < Shape::kCols;
  const device::Affine row = has_row ? memory.out[n] : device::Affine{0.f, 0.f};
  const float col = has_col ? memory.col_scale[n] : 0.f;
  const bool row_counts = has_row && tokens.row_counts(n);
  const bool col_counts = has_col && tokens.col_counts(n);
  // A power of two moves from one side's scales to the other's, so that both are in range.
  const float most_row = device::max_of_warps<Shape>(memory.stat[0]);
  const float most_col = device::max_of_warps<Shape>(memory.stat[1]);
  const float factor = most_row >= device::kSmallest && most_col >= device::kSmallest
                           ? device::exp2_fast(rintf(
                                 (device::log2_fast(most_row) - device::log2_fast(most_col)) / 2))
                           : 1.f;
  // What stands for the scale of a dead token: 0, or NaN if it has NaN or infinity.
  const auto of_dead = [&] { return memory.found[n] == 0.f ? 0.f : __int_as_float(0x7fffffff); };
  if (has_row) {
    __half stored =
        __float2half_rn(device::clip(row.scale / factor, -device::kMaxHalf, device::kMaxHalf));
    const float scale = __half2float(stored) * factor;
    float zero_point =
        scale == 0.f ? 0.f : device::clip(row.offset / scale, -device::kMaxHalf, device::kMaxHalf);
    if (!row_counts) {
      stored = __float2half_rn(of_dead());
      zero_point = 0.f;
    }
    store_half(fields, n, stored);
    store_half(fields, Shape::kRows + n, __float2half_rn(zero_point));
  }
  if (has_col) {
    const float scale =
        col_counts ? device::clip(col * factor, -device::kMaxHalf, device::kMaxHalf) : of_dead();
    store_half(fields, 2 * Shape::kRows + n, __float2half_rn(scale));
  }
}

/// The codes of a dead token are 0; those of V are so already. Ends with a barrier.
template <class Shape>
__device__ __forceinline__ void clear_dead_keys(device::TileMemory<Shape>& memory) {
#pragma unroll 1
  for (int i = device::own_thread(); i < Shape::kRows * Shape::kCols; i += Shape::kThreads) {
    const int col = i % Shape::kCols;
    if (!memory.live[col]) memory.codes[device::code_place<Shape>(true, i / Shape::kCols, col)] = 0;
  }
  __syncthreads();
}

/// Codes and scales of a part of a record, in shared memory. Its tokens have been asked for.
template <class Shape, int kGap, bool kMayBeKey, bool kMayBeValue>
__device__ __forceinline__ void make_part(const Jobs& jobs, unsigned part, bool key,
                                          device::TileMemory<Shape>& memory) {
  if (device::own_thread() == 0) memory.part = part;  // registers are scarce
  const auto find = [&] { return tokens_of(jobs, job_of(jobs, again(part)), key); };
  device::load_rotated<Shape, kGap, kMayBeKey, kMayBeValue>(
      {jobs.dtype, jobs.rotated, jobs.aligned}, find, key, memory.tokens, memory.tile,
      memory.partial);
  const int bits = key ? jobs.format.key_bits : jobs.format.value_bits;
  const device::Tokens<Shape> tokens = {key, bits, memory};
  find_live(memory, tokens);
  const bool guarded = is_guarded(tokens, jobs.fit, jobs.iterations);
  device::put_col_scale(memory, tokens,
                        find_col_scale(memory, tokens, jobs.fit, jobs.iterations, guarded));
  __syncthreads();
  if (jobs.fit == Fit::kMinMax) {
    device::fit_minmax(memory, tokens, guarded);
  } else {
    device::fit_unbiased(memory, tokens, guarded);
  }
  __syncthreads();
  if (key && !tokens.all_live()) clear_dead_keys(memory);
}

/// What make_part made, to its place in the record.
template <class Shape>
__device__ __forceinline__ void store_part(const Jobs& jobs, uint8_t* part, bool key,
                                           device::TileMemory<Shape>& memory) {
  const int bits = key ? jobs.format.key_bits : jobs.format.value_bits;
  const device::Tokens<Shape> tokens = {key, bits, memory};
  store_scales(memory, tokens, part + Shape::kRows * Shape::kCols / 8 * bits);
  switch (bits) {
    case 2:
      device::store_codes<Shape, 2>(memory.codes, key, part);
      break;
    case 3:
      device::store_codes<Shape, 3>(memory.codes, key, part);
      break;
    case 4:
      device::store_codes<Shape, 4>(memory.codes, key, part);
      break;
    default:
      device::store_codes<Shape, 8>(memory.codes, key, part);
      break;
  }
}

template <int kDim, int kGroup>
using KeyShape = device::TileShape<kDim, kGroup>;
template <int kDim, int kGroup>
using ValueShape = device::TileShape<kGroup, kDim>;

template <int kDim, int kGroup>
constexpr int kThreads = KeyShape<kDim, kGroup>::kThreads;

template <int kDim, int kGroup>
__global__ void __launch_bounds__(kThreads<kDim, kGroup>, 512 / kThreads<kDim, kGroup>)
    quantize_kernel(const __grid_constant__ Jobs jobs) {
  static_assert(kThreads<kDim, kGroup> == ValueShape<kDim, kGroup>::kThreads);
  extern __shared__ __align__(1024) uint4 shared[];  // multiply_keys turns bits of addresses
  device::let_next_start();
  device::wait_for_previous();
  using Key = KeyShape<kDim, kGroup>;
  using Value = ValueShape<kDim, kGroup>;
  // Each takes K and V in turn, so that all have as much to do. So the tokens of K are brought
  // while a V is packed, into the gaps between its codes, and those of V between those of K.
  constexpr int kKeyGap = 2 * Value::kCols;
  constexpr int kValueGap = 2 * Key::kCols;
  constexpr bool kSquare = kDim == kGroup;  // has one body for both
  auto& key_memory = *reinterpret_cast<device::TileMemory<Key>*>(shared);
  auto& value_memory = *reinterpret_cast<device::TileMemory<Value>*>(shared);
  static_assert(offsetof(device::TileMemory<Key>, part) ==
                    offsetof(device::TileMemory<Value>, part) &&
                offsetof(device::TileMemory<Key>, to) == offsetof(device::TileMemory<Value>, to));
  // Starts to bring a part's tokens, and says where the part goes. Whether there is one.
  const auto bring = [&](unsigned part) {
    if (part >= counted_parts(jobs)) return false;
    const Job job = job_of(jobs, part);
    const bool key = part % 2 == 0;
    if (device::own_thread() == 0) {
      key_memory.to[part % 2] = job.skipped
                                    ? nullptr
                                    : jobs.records + job.target * jobs.record_stride[0] +
                                          job.head * jobs.record_stride[1] +
                                          (key ? 0 : record_layout(jobs.format).value_codes);
    }
    if (job.skipped) return false;
    const device::TokenRows in = tokens_of(jobs, job, key);
    if (!in.like.whole()) return true;
    if (kSquare || key) {
      device::bring_tokens<kDim, kKeyGap, kGroup, kThreads<kDim, kGroup>>(in, shared);
    } else {
      device::bring_tokens<kDim, kValueGap, kGroup, kThreads<kDim, kGroup>>(in, shared);
    }
    return true;
  };
  bool wanted = bring(blockIdx.x);
#pragma unroll 1
  for (unsigned part = blockIdx.x; part < counted_parts(jobs); part = (part ^ 1) + gridDim.x) {
    if (wanted) {
      const bool key = part % 2 == 0;
      if (kSquare || key) {
        make_part<Key, kKeyGap, true, kSquare>(jobs, part, key, key_memory);
      } else {
        make_part<Value, kValueGap, false, true>(jobs, part, false, value_memory);
      }
      part = key_memory.part;
    } else {
      __syncthreads();  // for key_memory.to
    }
    wanted = bring(again((part ^ 1) + gridDim.x));
    if (uint8_t* const to = key_memory.to[part % 2]; to == nullptr) {
    } else if (kSquare || part % 2 == 0) {
      store_part(jobs, to, part % 2 == 0, key_memory);
    } else {
      store_part(jobs, to, false, value_memory);
    }
    __syncthreads();  // the next tile takes the place of this one's codes
  }
}

/// Shared memory of each of `blocks` blocks that need `bytes`. Where every one can have a
/// multiprocessor of its own, it is so much that two do not fit on one: while blocks of the launch
/// before still run, others were put two to a multiprocessor.
Status spread_blocks(unsigned blocks, size_t& bytes) {
  int device = 0;
  int multiprocessors = 0;
  int shared = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  }
  if (error != cudaSuccess) return runtime_error("preparing a launch", error);
  if (blocks <= static_cast<unsigned>(multiprocessors)) {
    bytes = std::max(bytes, static_cast<size_t>(shared) / 2);
  }
  return {};
}

template <int kDim, int kGroup>
Status run(Jobs& jobs, void* stream) {
  constexpr size_t kKeyBytes = sizeof(device::TileMemory<KeyShape<kDim, kGroup>>);
  constexpr size_t kValueBytes = sizeof(device::TileMemory<ValueShape<kDim, kGroup>>);
  constexpr size_t kBytes = kKeyBytes > kValueBytes ? kKeyBytes : kValueBytes;
  static_assert(kBytes <= 163 << 10, "more than a block may have on sm_80");
  constexpr auto kernel = quantize_kernel<kDim, kGroup>;
  const int64_t parts = 2 * jobs.tiles * jobs.heads;
  if (parts == 0) return {};
  const bool sealing = jobs.target.data != nullptr;
  if (Status status = check_grid(sealing ? "slots" : "key", parts); !status.ok()) return status;
  if (Status status = allow_shared_memory(kernel, kBytes); !status.ok()) return status;
  jobs.parts = static_cast<unsigned>(parts);
  jobs.heads_shift = 31;
  while (1u << (jobs.heads_shift - 31) < static_cast<unsigned>(jobs.heads)) ++jobs.heads_shift;
  jobs.heads_factor = static_cast<uint32_t>(((uint64_t{1} << jobs.heads_shift) + jobs.heads - 1) /
                                            static_cast<unsigned>(jobs.heads));
  int most = 0;
  if (Status status = resident_blocks(kernel, kThreads<kDim, kGroup>, kBytes, most); !status.ok()) {
    return status;
  }
  unsigned blocks = std::min(jobs.parts, std::max(2u, static_cast<unsigned>(most) / 2 * 2));
  // Two blocks to a multiprocessor: one for each record leaves less of it idle in the end.
  if (!sealing && kThreads<kDim, kGroup> == 256) {
    blocks = std::max(blocks, (jobs.parts / 2 + 1) / 2 * 2);
  }
  size_t bytes = kBytes;
  if (Status status = spread_blocks(blocks, bytes); !status.ok()) return status;
  if (Status status = allow_shared_memory(kernel, bytes); !status.ok()) return status;
  return launch_early(kernel, dim3(blocks), dim3(kThreads<kDim, kGroup>), bytes, stream, jobs);
}

Status run(Jobs& jobs, void* stream) {
  const bool long_group = jobs.format.group == 128;
  switch (jobs.format.head_dim) {
    case 64:
      return long_group ? run<64, 128>(jobs, stream) : run<64, 64>(jobs, stream);
    case 128:
      return long_group ? run<128, 128>(jobs, stream) : run<128, 64>(jobs, stream);
    default:
      return long_group ? run<256, 128>(jobs, stream) : run<256, 64>(jobs, stream);
  }
}

/// Whether every token of both starts at a multiple of 16 bytes.
bool aligned(const Jobs& jobs) {
  bool ok = true;
  for (int kv = 0; kv < 2; ++kv) {
    ok = ok && reinterpret_cast<uintptr_t>(jobs.in[kv]) % device::kAccessBytes == 0;
    for (int64_t stride : jobs.in_stride[kv]) {
      ok = ok && stride * size_of(jobs.dtype) % device::kAccessBytes == 0;
    }
  }
  return ok;
}

Status check(const Format& format, int32_t iterations) {
  if (Status status = check_format(format); !status.ok()) return status;
  if (iterations >= 0) return {};
  return Status::invalid("iterations must be >= 0, got " + std::to_string(iterations));
}

constexpr int kBadSlot = 1;
constexpr int kBadBlock = 2;
constexpr int kSameBlock = 3;
constexpr int kBadCount = 4;

struct CheckTiles {
  SealParams p;

  __device__ bool is_padding(int64_t i) const { return p.slots[i] < 0 || p.blocks[i] < 0; }

  __device__ Offence operator()(int64_t i) const {
    const int64_t count = p.count == nullptr ? p.tiles : *p.count;
    if (count < 0 || count > p.tiles) return {kBadCount, count, 0};
    if (i >= count || is_padding(i)) return {};
    if (p.slots[i] >= p.staging.slots) return {kBadSlot, p.slots[i], 0};
    if (p.blocks[i] >= p.cache.blocks) return {kBadBlock, p.blocks[i], 0};
    for (int64_t k = 0; k < i; ++k) {
      if (!is_padding(k) && p.blocks[k] == p.blocks[i]) return {kSameBlock, p.blocks[i], k};
    }
    return {};
  }
};

Status check_tiles(const SealParams& p) {
  Offence found;
  int64_t index;
  if (Status status = find_offence(CheckTiles{p}, p.tiles, p.stream, found, index); !status.ok()) {
    return status;
  }
  const std::string got = ", got " + std::to_string(found.value) + " at index ";
  switch (found.rule) {
    case kBadSlot:
      return Status::invalid("slots must be less than " + std::to_string(p.staging.slots) +
                             " (the staging slots)" + got + std::to_string(index));
    case kBadBlock:
      return Status::invalid("blocks must be less than " + std::to_string(p.cache.blocks) +
                             " (the blocks of the cache)" + got + std::to_string(index));
    case kSameBlock:
      return Status::invalid("blocks must be different" + got + std::to_string(found.other) +
                             " and at index " + std::to_string(index));
    case kBadCount:
      return Status::invalid("count must be between 0 and " + std::to_string(p.tiles) + ", got " +
                             std::to_string(found.value));
    default:
      return {};
  }
}

}  // namespace

Status quantize_tiles(const QuantizeParams& p) {
  if (Status status = check(p.format, p.iterations); !status.ok()) return status;
  Jobs jobs{};
  jobs.format = p.format;
  jobs.in[0] = p.key;
  jobs.in[1] = p.value;
  for (int i = 0; i < 3; ++i) {
    jobs.in_stride[0][i] = p.key_stride[i];
    jobs.in_stride[1][i] = p.value_stride[i];
  }
  jobs.dtype = p.dtype;
  jobs.records = p.records;
  jobs.record_stride[0] = p.record_stride[0];
  jobs.record_stride[1] = p.record_stride[1];
  jobs.tiles = jobs.sources = jobs.targets = p.tiles;
  jobs.heads = p.heads;
  jobs.fit = p.fit;
  jobs.iterations = p.iterations;
  jobs.rotated = p.rotated;
  jobs.aligned = aligned(jobs);
  return run(jobs, p.stream);
}

Status seal_blocks(const SealParams& p) {
  if (Status status = check(p.format, p.iterations); !status.ok()) return status;
  if (p.staging.dtype == DType::kFloat32) {
    return Status::unsupported("staging must be float16 or bfloat16 on CUDA, got float32");
  }
  if (p.checked) {
    if (Status status = check_tiles(p); !status.ok()) return status;
  }
  Jobs jobs{};
  jobs.format = p.format;
  for (int kv = 0; kv < 2; ++kv) {
    jobs.in[kv] = static_cast<const char*>(p.staging.data) +
                  kv * p.staging.stride[1] * size_of(p.staging.dtype);
    jobs.in_stride[kv][0] = p.staging.stride[0];
    jobs.in_stride[kv][1] = p.staging.stride[3];
    jobs.in_stride[kv][2] = p.staging.stride[2];
  }
  jobs.dtype = p.staging.dtype;
  jobs.records = p.cache.data;
  jobs.record_stride[0] = p.cache.stride[0];
  jobs.record_stride[1] = p.cache.stride[1];
  jobs.tiles = p.tiles;
  jobs.heads = p.heads;
  jobs.source = p.slots;
  jobs.target = p.blocks;
  jobs.sources = p.staging.slots;
  jobs.targets = p.cache.blocks;
  jobs.count = p.count;
  jobs.fit = p.fit;
  jobs.iterations = p.iterations;
  jobs.aligned = aligned(jobs);
  return run(jobs, p.stream);
}

}  // namespace kvarn::cuda
