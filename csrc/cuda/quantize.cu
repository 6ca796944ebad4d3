// quantize_tiles and seal_blocks: raw keys and values -> finished records, in one launch.
//
// Roofline. A record of k4v2, D = G = 128, is 64 KB of fp16 to read and 13.8 KB to write: 18 ns at
// the copy rate of an H200. Its SMs have 1 instruction slot an element and nanosecond, and the fits
// take 70 (closed form) to 100 (4 rounds) at least: the kernel is bound by instructions, not bytes.
// So the tile stays in registers, in fp32, from the rotation to the codes; the tensor core does the
// rotation; and codes are packed where they are.
//
// Measured there: 252 ns a record in closed form, 311 with 4 rounds, 244 for minmax with 8. It
// takes 168 instructions an element (4 rounds) and issues on 55 % of the cycles: fetching its
// straight-line code is what it waits for most (docs/design.md).
//
// A block makes one part (K or V) of one record. device/tile.cuh says who holds what, rotate.cuh
// how it gets there, sinkhorn.cuh and fit.cuh what is computed, pack.cuh how it leaves.
#include <cuda_runtime.h>

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

using device::element;
using device::kElements;
using device::kSide;

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

/// Which tile of which head a block is about.
struct Job {
  int64_t source;
  int64_t target;
  int64_t head;
  bool skipped;
};

__device__ __forceinline__ Job job_of(const Jobs& jobs) {
  const unsigned heads = static_cast<unsigned>(jobs.heads);
  const int64_t i = blockIdx.x / 2 / heads;
  Job job = {i, i, blockIdx.x / 2 % heads, false};
  if (jobs.source.data != nullptr) job.source = jobs.source[i];
  if (jobs.target.data != nullptr) job.target = jobs.target[i];
  // Padding; what is out of range is reported where it is looked for.
  job.skipped = (jobs.count != nullptr && i >= *jobs.count) || job.source < 0 ||
                job.source >= jobs.sources || job.target < 0 || job.target >= jobs.targets;
  return job;
}

__device__ __forceinline__ device::TokenRows tokens_of(const Jobs& jobs, const Job& job, bool key) {
  const int64_t* const stride = jobs.in_stride[key ? 0 : 1];
  return {static_cast<const char*>(jobs.in[key ? 0 : 1]) +
              (job.source * stride[0] + job.head * stride[2]) * size_of(jobs.dtype),
          stride[1], jobs.dtype, jobs.rotated, jobs.aligned};
}

/// Sums of squares of x * boost over each token, for line threads. Ends with a barrier.
template <class Shape>
__device__ __forceinline__ float token_energy(const float (&x)[kElements],
                                              device::TileMemory<Shape>& memory, bool are_cols,
                                              float boost) {
  const device::TilePlace<Shape> at;
  if (are_cols) {
    float sums[1][kSide] = {};
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const float y = x[element(i, j)] * boost;
        sums[0][j] = fmaf(y, y, sums[0][j]);
      }
    }
    device::reduce_cols<Shape, 1>(at, memory.partial, sums);
  } else {
    device::reduce_rows<Shape, 1, 0>(at, memory.partial, [&](int i, float* out) {
      out[0] = 0.f;
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const float y = x[element(i, j)] * boost;
        out[0] = fmaf(y, y, out[0]);
      }
    });
  }
  __syncthreads();
  const int n = threadIdx.x;
  float energy = 0.f;
  if (are_cols) {
    if (n < Shape::kCols) energy = device::col_total<Shape>(memory.partial, 0);
  } else {
    if (n < Shape::kRows) energy = device::row_total<Shape>(memory.partial, 0);
  }
  __syncthreads();
  return energy;
}

/// A token is dead if it has NaN or infinity or nothing but zeros. Dead ones get the numbers of the
/// first live one in x, or 0 where there is none.
template <class Shape>
__device__ __forceinline__ void find_live(float (&x)[kElements], device::TileMemory<Shape>& memory,
                                          const device::Tokens<Shape>& tokens) {
  const int n = threadIdx.x;
  const bool has_token = n < tokens.count();
  const auto alive = [](float sum) { return sum > 0.f && sum < device::kInfinity; };
  float energy = token_energy(x, memory, tokens.are_cols, 1.f);
  bool own_live = has_token && alive(energy);
  // Squares of numbers this small may have been lost.
  constexpr float kTiny = 1e-30f;
  if (__syncthreads_or(has_token && energy < kTiny)) {
    const float boosted = token_energy(x, memory, tokens.are_cols, 0x1p100f);
    if (has_token && energy < kTiny) own_live = alive(boosted);
  }
  device::Line& line = memory.line[n];
  line.energy = energy;
  line.live = own_live;
  line.counts_as_row = n < Shape::kRows && (tokens.are_cols || own_live);
  line.counts_as_col = n < Shape::kCols && (!tokens.are_cols || own_live);
  line.mean = line.rest = 0.f;
  if (n == 0) memory.first_live = 0;
  const int live = __syncthreads_count(own_live);
  if (n == 0) memory.live_tokens = live;
  __syncthreads();
  if (live == tokens.count()) return;

  const unsigned ballot = __ballot_sync(0xffffffffu, own_live);
  const int lane = n % kWarpLanes;
  if (lane < 4 && n - lane < tokens.count()) {
    memory.dead[n / kWarpLanes * 4 + lane] = static_cast<int>(~ballot >> (8 * lane) & 0xff);
  }
  __syncthreads();
  if (n == 0) {
    for (int k = tokens.count() / 8 - 1; k >= 0; --k) {
      const int of_8 = ~memory.dead[k] & 0xff;
      if (of_8 != 0) memory.first_live = 8 * k + __ffs(of_8) - 1;
    }
  }
  __syncthreads();
  float* const first = tokens.are_cols ? memory.row[0] : memory.col[0];
  if (tokens.are_cols) {
    device::put_col<Shape>(x, tokens.first(), first);
  } else {
    device::put_row<Shape>(x, tokens.first(), first);
  }
  __syncthreads();
  const device::TilePlace<Shape> at;
  const int dead = tokens.dead(at);
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      if (device::is_dead(dead, tokens.are_cols ? j : i)) {
        x[element(i, j)] = live == 0 ? 0.f : first[tokens.are_cols ? at.row + i : at.col + j];
      }
    }
  }
  __syncthreads();
}

/// The power of two that brings the root mean square of the tile to about 64. The clips of the
/// normalization are absolute: the lower one would keep a small tile as it is.
template <class Shape>
__device__ __forceinline__ float size_factor(device::TileMemory<Shape>& memory,
                                             const device::Tokens<Shape>& tokens) {
  const device::Line& line = memory.line[threadIdx.x];
  device::put_warp_sum(line.live ? line.energy : 0.f, memory.stat[6]);
  __syncthreads();
  const float sum = device::sum_of_warps<Shape>(memory.stat[6]);
  __syncthreads();
  if (!(sum > 0.f)) return 1.f;
  const float mean = sum / (tokens.row_length() * tokens.col_length());
  return 64.f * exp2f(-rintf(log2f(mean) / 2));
}

/// What stands for the scale of a token: of a dead one 0, or NaN if it has NaN or infinity.
__device__ __forceinline__ float token_scale(float scale, const device::Line& line) {
  return line.live ? scale : line.energy == 0.f ? 0.f : __int_as_float(0x7fffffff);
}

/// Line threads: scales and zero points into the record in shared memory.
template <class Shape>
__device__ __forceinline__ void put_scales(device::TileMemory<Shape>& memory, bool key, int bits) {
  const int n = threadIdx.x;
  const device::Line& line = memory.line[n];
  const bool has_row = n < Shape::kRows;
  const bool has_col = n < Shape::kCols;
  // A power of two moves from one side's scales to the other's, so that both are in range.
  device::put_warp_max(has_row && line.counts_as_row ? line.out.scale : 0.f, memory.stat[0]);
  device::put_warp_max(has_col && line.counts_as_col ? line.col_scale : 0.f, memory.stat[1]);
  __syncthreads();
  const float most_row = device::max_of_warps<Shape>(memory.stat[0]);
  const float most_col = device::max_of_warps<Shape>(memory.stat[1]);
  const float factor = most_row > 0.f && most_col > 0.f
                           ? exp2f(rintf((log2f(most_row) - log2f(most_col)) / 2))
                           : 1.f;
  auto* const fields = reinterpret_cast<__half*>(reinterpret_cast<uint8_t*>(memory.record) +
                                                 Shape::kRows * Shape::kCols / 8 * bits);
  if (has_row) {
    __half stored =
        __float2half_rn(device::clip(line.out.scale / factor, -device::kMaxHalf, device::kMaxHalf));
    const float scale = __half2float(stored) * factor;
    float zero_point = scale == 0.f ? 0.f
                                    : device::clip((line.out.offset + line.mean) / scale,
                                                   -device::kMaxHalf, device::kMaxHalf);
    if (!key && !line.live) {
      stored = __float2half_rn(token_scale(0.f, line));
      zero_point = 0.f;
    }
    fields[n] = stored;
    fields[Shape::kRows + n] = __float2half_rn(zero_point);
  }
  if (has_col) {
    float scale = device::clip(line.col_scale * factor, -device::kMaxHalf, device::kMaxHalf);
    if (key) scale = token_scale(scale, line);
    fields[2 * Shape::kRows + n] = __float2half_rn(scale);
  }
}

template <class Shape, bool kKey, int kBits>
__device__ __forceinline__ void put_codes(const float (&x)[kElements],
                                          device::TileMemory<Shape>& memory) {
  constexpr float kLevels = (1 << kBits) - 1;
  const device::TilePlace<Shape> at;
  float shift[kSide];
  if constexpr (!kKey) device::load_8(memory.col[2] + at.col, shift);
  const auto code = [&](int i, int j) {
    const float slope = memory.row[0][at.row + i];
    float start = memory.row[1][at.row + i];
    if constexpr (!kKey) start = fmaf(shift[j], memory.row[2][at.row + i], start);
    return __float_as_uint(device::rounded_code(x[element(i, j)], slope, start, kLevels));
  };
  auto* const out = reinterpret_cast<uint8_t*>(memory.record);
  if constexpr (kKey) {
    device::pack_keys<Shape, kBits>(at, code, out);
  } else {
    device::pack_values<Shape, kBits>(at, code, out);
  }
}

/// Copies the finished part to its record, which may start at any address.
template <class Shape>
__device__ __forceinline__ void store_part(const device::TileMemory<Shape>& memory, int bytes,
                                           uint8_t* out) {
  if (reinterpret_cast<uintptr_t>(out) % device::kAccessBytes == 0) {
    for (int i = threadIdx.x; i < bytes / device::kAccessBytes; i += Shape::kThreads) {
      __stcg(reinterpret_cast<uint4*>(out) + i, memory.record[i]);
    }
  } else {
    const auto* const part = reinterpret_cast<const uint8_t*>(memory.record);
    for (int i = threadIdx.x; i < bytes; i += Shape::kThreads) out[i] = part[i];
  }
}

/// kKey: K of the record, with channels for rows; else V, with tokens for rows. A square tile has
/// one body for both, in which only loading and packing differ: instructions are what the kernel
/// waits for.
template <class Shape, bool kMayBeKey, bool kMayBeValue>
__device__ __forceinline__ void quantize_part(const Jobs& jobs, device::TileMemory<Shape>& memory,
                                              bool is_key) {
  const bool key = kMayBeKey && (!kMayBeValue || is_key);
  const Job job = job_of(jobs);
  if (job.skipped) return;
  const int n = threadIdx.x;
  float x[kElements];
  device::load_rotated<Shape, kMayBeKey, kMayBeValue>(tokens_of(jobs, job, key), key, memory.tokens,
                                                      x);

  const device::Tokens<Shape> tokens = {key, memory};
  if (n == 0) {
    memory.bits = key ? jobs.format.key_bits : jobs.format.value_bits;
    memory.levels = static_cast<float>((1 << memory.bits) - 1);
  }
  find_live(x, memory, tokens);
  device::Line& line = memory.line[n];

  const bool minmax = jobs.fit == Fit::kMinMax;
  const bool normalized = minmax || jobs.iterations > 0;
  float alternative = 1.f;
  if (normalized) {
    const float factor = minmax ? 1.f : size_factor(memory, tokens);
    line.col_scale = device::sinkhorn_col_scale(x, memory, tokens, factor, jobs.iterations);
  }
  if (key) {
    alternative = device::token_rms(memory, tokens, line);
    if (!normalized) line.col_scale = alternative;
    alternative = device::limited_col_scale(alternative);
  } else if (!normalized) {
    line.col_scale = device::channel_spread(x, memory, line.counts_as_row);
  }
  if (!minmax) {
    if (normalized) {
      line.col_scale =
          device::without_factor(tokens, line.col_scale, line.counts_as_col, memory.stat[4]);
      if (key) {
        alternative =
            device::without_factor(tokens, alternative, line.counts_as_col, memory.stat[5]);
      }
    }
    line.col_scale = device::half_rounded(device::limited_col_scale(line.col_scale));
    alternative = device::half_rounded(device::limited_col_scale(alternative));
  }
  if (!line.counts_as_col) line.col_scale = alternative = 1.f;

  // A massive token takes one channel of the other keys, less than the rounding error of 2 or 3
  // bits.
  const bool guarded = normalized && (!key || memory.bits >= 4);
  device::apply_col_scales(x, memory, tokens, line, guarded, alternative);
  {
    // x / column scale.
    const device::TilePlace<Shape> at;
    float inverse_of[kSide];
    device::load_8(memory.col[0] + at.col, inverse_of);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) x[element(i, j)] *= inverse_of[j];
    }
  }
  if (minmax) {
    device::fit_minmax(memory);
  } else {
    device::fit_unbiased(x, memory, tokens);
  }
  device::raise_scale(memory, minmax);
  if (key && !tokens.all_live()) {
    // The codes of a dead token are 0.
    const int dead = tokens.dead(device::TilePlace<Shape>());
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        if (device::is_dead(dead, j)) x[element(i, j)] = -device::kInfinity;
      }
    }
  }
  const int bits = memory.bits;
  put_scales(memory, key, bits);
  if constexpr (kMayBeKey) {
    if (key) {
      switch (bits) {
        case 2:
          put_codes<Shape, true, 2>(x, memory);
          break;
        case 3:
          put_codes<Shape, true, 3>(x, memory);
          break;
        case 4:
          put_codes<Shape, true, 4>(x, memory);
          break;
        default:
          put_codes<Shape, true, 8>(x, memory);
          break;
      }
    }
  }
  if constexpr (kMayBeValue) {
    if (!key) {
      switch (bits) {
        case 2:
          put_codes<Shape, false, 2>(x, memory);
          break;
        case 3:
          put_codes<Shape, false, 3>(x, memory);
          break;
        case 4:
          put_codes<Shape, false, 4>(x, memory);
          break;
        default:
          put_codes<Shape, false, 8>(x, memory);
          break;
      }
    }
  }
  __syncthreads();
  const Job target = job_of(jobs);
  uint8_t* const record =
      jobs.records + target.target * jobs.record_stride[0] + target.head * jobs.record_stride[1];
  const RecordLayout layout = record_layout(jobs.format);
  store_part<Shape>(memory, key ? layout.value_codes : layout.bytes - layout.value_codes,
                    record + (key ? 0 : layout.value_codes));
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
  extern __shared__ uint4 shared[];
  device::let_next_start();
  device::wait_for_previous();
  const bool key = blockIdx.x % 2 == 0;
  using KeyMemory = device::TileMemory<KeyShape<kDim, kGroup>>;
  using ValueMemory = device::TileMemory<ValueShape<kDim, kGroup>>;
  if constexpr (kDim == kGroup) {
    quantize_part<KeyShape<kDim, kGroup>, true, true>(jobs, *reinterpret_cast<KeyMemory*>(shared),
                                                      key);
  } else if (key) {
    quantize_part<KeyShape<kDim, kGroup>, true, false>(jobs, *reinterpret_cast<KeyMemory*>(shared),
                                                       true);
  } else {
    quantize_part<ValueShape<kDim, kGroup>, false, true>(
        jobs, *reinterpret_cast<ValueMemory*>(shared), false);
  }
}

template <int kDim, int kGroup>
Status run(const Jobs& jobs, void* stream) {
  constexpr size_t kKeyBytes = sizeof(device::TileMemory<KeyShape<kDim, kGroup>>);
  constexpr size_t kValueBytes = sizeof(device::TileMemory<ValueShape<kDim, kGroup>>);
  constexpr size_t kBytes = kKeyBytes > kValueBytes ? kKeyBytes : kValueBytes;
  const int64_t blocks = 2 * jobs.tiles * jobs.heads;
  if (blocks == 0) return {};
  if (Status status = check_grid("key", blocks); !status.ok()) return status;
  if (Status status = allow_shared_memory(quantize_kernel<kDim, kGroup>, kBytes); !status.ok()) {
    return status;
  }
  return launch_early(quantize_kernel<kDim, kGroup>, dim3(static_cast<unsigned>(blocks)),
                      dim3(kThreads<kDim, kGroup>), kBytes, stream, jobs);
}

Status run(const Jobs& jobs, void* stream) {
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
