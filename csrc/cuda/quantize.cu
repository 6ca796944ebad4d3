// quantize_tiles and seal_blocks: raw keys and values -> finished records, in one launch.
//
// Roofline. A record of k4v2, D = G = 128, is 64 KB of fp16 to read and 13.8 KB to write: 18 ns at
// the copy rate of an H200. In 80 ns its SMs have 82 instruction slots an element, and the fits
// take about as many: the kernel is bound by instructions, not bytes. So the tile stays in
// registers, in fp32, from the rotation to the codes, and the tensor core does the rotation.
//
// A block makes one part (K or V) of one record. device/tile.cuh says who holds what, rotate.cuh
// how it gets there, sinkhorn.cuh and fit.cuh what is computed.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cuda/format.h"
#include "cuda/launch.h"
#include "device/codes.cuh"
#include "device/fit.cuh"
#include "device/rotate.cuh"
#include "device/tile.cuh"
#include "kvarn/ops.h"

namespace kvarn::cuda {
namespace {

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

template <class Shape>
struct Shared {
  static constexpr int kScratch =
      4 * (Shape::kSplit == 1 ? Shape::kWarps : Shape::kSplit * Shape::kRows);
  static_assert(kScratch >= 4 * Shape::kWarps);
  static constexpr int kUnionBytes = 2 * Shape::kPartialFloats * static_cast<int>(sizeof(float));
  static_assert(kUnionBytes >= 2 * Shape::kTokens * Shape::kDim);
  static_assert(kUnionBytes >= Shape::kRows * Shape::kCodePitch);
  static constexpr int kFloats =
      6 * Shape::kCols + 8 + 2 * Shape::kTokens + 2 * Shape::kRows + kScratch;
  static constexpr int kBytes = kUnionBytes + kFloats * static_cast<int>(sizeof(float));
};

/// fp16 at any address.
__device__ __forceinline__ void store_half(uint8_t* p, float x, bool aligned) {
  const uint16_t bits = __half_as_ushort(__float2half_rn(x));
  if (aligned) {
    *reinterpret_cast<uint16_t*>(p) = bits;
  } else {
    p[0] = static_cast<uint8_t>(bits);
    p[1] = static_cast<uint8_t>(bits >> 8);
  }
}

/// Which tile of which head a block is about; not kept while it works.
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

template <class Shape>
__device__ __forceinline__ device::TokenRows tokens_of(const Jobs& jobs, const Job& job) {
  constexpr int kPart = Shape::kKey ? 0 : 1;
  const int64_t* const stride = jobs.in_stride[kPart];
  return {static_cast<const char*>(jobs.in[kPart]) +
              (job.source * stride[0] + job.head * stride[2]) * size_of(jobs.dtype),
          stride[1], jobs.dtype, jobs.rotated, jobs.aligned};
}

/// The fields of a part of a record.
struct PartFields {
  uint8_t* codes;
  uint8_t* row_scale;
  uint8_t* zero_point;
  uint8_t* col_scale;
};

template <class Shape>
__device__ __forceinline__ PartFields fields_of(const Jobs& jobs, const Job& job) {
  uint8_t* const record =
      jobs.records + job.target * jobs.record_stride[0] + job.head * jobs.record_stride[1];
  const RecordLayout at = record_layout(jobs.format);
  if constexpr (Shape::kKey) {
    return {record + at.key_codes, record + at.key_channel_scale, record + at.key_zero_point,
            record + at.key_token_scale};
  } else {
    return {record + at.value_codes, record + at.value_token_scale, record + at.value_zero_point,
            record + at.value_channel_scale};
  }
}

/// energy: the summed squares of each token; tokens: as in device::Live. A token is dead if it has
/// NaN or infinity or nothing but zeros: its sum tells. Dead ones become 0 in x.
template <class Shape>
__device__ __forceinline__ void find_live(const device::TileThread<Shape>& place,
                                          float (&x)[Shape::kElements], float* energy,
                                          float* tokens) {
  const device::TileThread<Shape> at = place.again();
  const auto alive = [](float sum) { return sum > 0.f && sum < __int_as_float(0x7f800000); };
  int count = 0;
  float first = device::Min::kNeutral;
  if constexpr (Shape::kKey) {
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      float squares[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float x0 = x[device::tile_element(g, 0, c)];
        const float x1 = x[device::tile_element(g, 1, c)];
        squares[c] = fmaf(x0, x0, x1 * x1);
      }
      device::put_partial(at, 0, g, {squares[0], squares[1], squares[2], squares[3]});
    }
    __syncthreads();
    const float sum = device::column_sum(at, 0);
    if (at.first_of_col()) {
      energy[at.own_col()] = sum;
      tokens[at.own_col()] = alive(sum) ? 1.f : 0.f;
    }
    if (alive(sum)) first = static_cast<float>(at.own_col());
    count = __syncthreads_count(alive(sum) && at.first_of_col());
  } else {
    float sums[1][2] = {};
#pragma unroll
    for (int i = 0; i < Shape::kElements; ++i) {
      sums[0][i / 2 % 2] = fmaf(x[i], x[i], sums[0][i / 2 % 2]);
    }
    device::reduce_rows<device::Sum>(at, sums);
#pragma unroll
    for (int row = 1; row >= 0; --row) {
      const float sum = sums[0][row];
      if (at.first_of_row()) {
        energy[at.row + 8 * row] = sum;
        tokens[at.row + 8 * row] = alive(sum) ? 1.f : 0.f;
      }
      if (alive(sum)) first = static_cast<float>(at.row + 8 * row);
      count += __syncthreads_count(alive(sum) && at.first_of_row());
    }
  }
  float firsts[1] = {0.f};
  if (count < Shape::kTokens) {
    firsts[0] = first;
    device::reduce_block<device::Min>(at, firsts);
    if (count == 0) firsts[0] = 0.f;
  }
  if (threadIdx.x == 0) {
    tokens[Shape::kTokens] = static_cast<float>(count);
    tokens[Shape::kTokens + 1] = firsts[0];
  }
  __syncthreads();
  if (count == Shape::kTokens) return;
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    float keep[4];
    if constexpr (Shape::kKey) device::unpack(at.columns(tokens, g), keep);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float one = Shape::kKey ? keep[c] : tokens[at.row + 8 * row];
        if (one == 0.f) x[device::tile_element(g, row, c)] = 0.f;
      }
    }
  }
}

/// What stands for the scale of a token: of a dead one 0, or NaN if it has NaN or infinity.
__device__ __forceinline__ float token_scale(float scale, float energy, float live) {
  return live != 0.f ? scale : energy == 0.f ? 0.f : __int_as_float(0x7fffffff);
}

template <class Shape>
__device__ __forceinline__ void quantize_part(const Jobs& jobs, uint8_t* shared) {
  using device::clip;
  float* const arrays = reinterpret_cast<float*>(shared + Shared<Shape>::kUnionBytes);
  float* const sinkhorn = arrays + 4 * Shape::kCols;
  float* const energy = arrays + 6 * Shape::kCols + 4;
  float* const tokens = energy + Shape::kTokens;
  const device::ColumnArrays<Shape> columns = {
      arrays,
      arrays + Shape::kCols,
      arrays + 2 * Shape::kCols,
      arrays + 3 * Shape::kCols,
      reinterpret_cast<float2*>(tokens + Shape::kTokens + 4),
      shared};
  float x[Shape::kElements];
  {
    const Job job = job_of(jobs);
    if (job.skipped) return;
    device::load_rotated<Shape>(tokens_of<Shape>(jobs, job), reinterpret_cast<uint4*>(shared), x);
    __syncthreads();
  }
  const device::TileThread<Shape> place(reinterpret_cast<float*>(shared),
                                        tokens + Shape::kTokens + 4 + 2 * Shape::kRows);
  const int bits = Shape::kKey ? jobs.format.key_bits : jobs.format.value_bits;
  const float levels = static_cast<float>((1 << bits) - 1);
  find_live(place, x, energy, tokens);
  const device::Live live = {tokens};

  float col_scale;
  if (jobs.fit == Fit::kMinMax || jobs.iterations > 0) {
    col_scale = device::guarded_col_scale(place, x, live, jobs.iterations, levels, energy, columns,
                                          sinkhorn);
  } else if constexpr (Shape::kKey) {
    col_scale = device::token_rms(place, live, energy);
  } else {
    col_scale = device::channel_spread(place, x);
  }
  device::RowFit rows;
  if (jobs.fit == Fit::kMinMax) {
    device::put_col_scale(place, col_scale, columns);
    device::minmax_codes<Shape, true>(place, x, live, columns, levels, energy, rows);
    if (rows.scale[0] < device::kMeanFloor * fabsf(rows.mean[0]) ||
        rows.scale[1] < device::kMeanFloor * fabsf(rows.mean[1])) {
      const device::TileThread<Shape> at = place.again();
#pragma unroll
      for (int g = 0; g < Shape::kGroups; ++g) {
        float inverse[4];
        device::unpack(at.columns(columns.inverse, g), inverse);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            float& element = x[device::tile_element(g, row, c)];
            element = element * inverse[c] - rows.mean[row];
          }
        }
      }
    }
  } else {
    const bool own_live = !Shape::kKey || tokens[place.own_col()] != 0.f;
    if (jobs.iterations > 0) {
      // Sinkhorn's scales are determined up to a factor; weights and rounding depend on it.
      float log_sum[1] = {place.first_of_col() && own_live ? log2f(col_scale) : 0.f};
      device::reduce_block<device::Sum>(place, log_sum);
      const int counted = Shape::kKey ? live.count<Shape>() : Shape::kCols;
      if (own_live) col_scale *= exp2f(-device::divide(log_sum[0], static_cast<float>(counted)));
    }
    col_scale = device::half_rounded(device::limited_col_scale(col_scale));
    if (!own_live) col_scale = 1.f;
    device::unbiased_codes(place, x, live, col_scale, bits, columns, rows);
  }
  device::raise_scales(place, x, bits, columns, rows);

  const device::TileThread<Shape> at = place.again();
  // A power of two moves from one side's scales to the other's, so that both are in range.
  const bool own_live = !Shape::kKey || tokens[at.own_col()] != 0.f;
  col_scale = columns.scale[at.own_col()];
  float most[2] = {fmaxf(rows.scale[0], rows.scale[1]), own_live ? col_scale : 0.f};
  device::reduce_block<device::Max>(at, most);  // its barriers also serve the codes
  float factor = 1.f;
  if (most[0] > 0.f && most[1] > 0.f) {
    factor = exp2f(rintf((log2f(most[0]) - log2f(most[1])) / 2));
  }
  const PartFields out = fields_of<Shape>(jobs, job_of(jobs));
  const bool aligned = reinterpret_cast<uintptr_t>(out.codes) % 16 == 0;
  if (at.first_of_col()) {
    float scale = clip(col_scale * factor, -device::kMaxHalf, device::kMaxHalf);
    if (Shape::kKey) scale = token_scale(scale, energy[at.own_col()], tokens[at.own_col()]);
    store_half(out.col_scale + 2 * at.own_col(), scale, aligned);
  }
  if (at.first_of_row()) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int index = at.row + 8 * row;
      float scale = device::half_rounded(device::divide(rows.scale[row], factor));
      const float stored = scale * factor;
      float zero_point = stored == 0.f ? 0.f
                                       : clip(device::divide(rows.offset[row], stored),
                                              -device::kMaxHalf, device::kMaxHalf);
      if (!Shape::kKey) {
        scale = token_scale(scale, energy[index], tokens[index]);
        if (tokens[index] == 0.f) zero_point = 0.f;
      }
      store_half(out.row_scale + 2 * index, scale, aligned);
      store_half(out.zero_point + 2 * index, zero_point, aligned);
    }
  }
  if (Shape::kKey && !live.all<Shape>()) {
    if (!own_live) {
      for (int row = threadIdx.x % Shape::kColThreads; row < Shape::kRows;
           row += Shape::kColThreads) {
        columns.codes[row * Shape::kCodePitch + at.own_col()] = 0;
      }
    }
    __syncthreads();
  }
  switch (bits) {
    case 2:
      return device::pack_tile<Shape, 2>(columns.codes, out.codes, aligned);
    case 3:
      return device::pack_tile<Shape, 3>(columns.codes, out.codes, aligned);
    case 4:
      return device::pack_tile<Shape, 4>(columns.codes, out.codes, aligned);
    case 8:
      return device::pack_tile<Shape, 8>(columns.codes, out.codes, aligned);
  }
}

template <int kDim, int kGroup>
using KeyShape = device::TileShape<kDim, kGroup, true>;
template <int kDim, int kGroup>
using ValueShape = device::TileShape<kDim, kGroup, false>;

template <int kDim, int kGroup>
__global__ void __launch_bounds__(KeyShape<kDim, kGroup>::kThreads,
                                  512 / KeyShape<kDim, kGroup>::kThreads)
    quantize_kernel(const __grid_constant__ Jobs jobs) {
  static_assert(KeyShape<kDim, kGroup>::kThreads == ValueShape<kDim, kGroup>::kThreads);
  extern __shared__ __align__(16) uint8_t shared[];
  if (blockIdx.x % 2 == 0) {
    quantize_part<KeyShape<kDim, kGroup>>(jobs, shared);
  } else {
    quantize_part<ValueShape<kDim, kGroup>>(jobs, shared);
  }
}

template <int kDim, int kGroup>
Status run(const Jobs& jobs, void* stream) {
  constexpr int kKeyBytes = Shared<KeyShape<kDim, kGroup>>::kBytes;
  constexpr int kValueBytes = Shared<ValueShape<kDim, kGroup>>::kBytes;
  constexpr int kBytes = kKeyBytes > kValueBytes ? kKeyBytes : kValueBytes;
  const int64_t blocks = 2 * jobs.tiles * jobs.heads;
  if (blocks == 0) return {};
  if (Status status = check_grid("key", blocks); !status.ok()) return status;
  if (Status status = allow_shared_memory(quantize_kernel<kDim, kGroup>, kBytes); !status.ok()) {
    return status;
  }
  return launch(quantize_kernel<kDim, kGroup>, dim3(static_cast<unsigned>(blocks)),
                dim3(KeyShape<kDim, kGroup>::kThreads), kBytes, stream, jobs);
}

Status run(const Jobs& jobs, void* stream) {
  if (Status status = check_format(jobs.format); !status.ok()) return status;
  if (jobs.iterations < 0) {
    return Status::invalid("iterations must be >= 0, got " + std::to_string(jobs.iterations));
  }
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

}  // namespace

Status quantize_tiles(const QuantizeParams& p) {
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

}  // namespace kvarn::cuda
