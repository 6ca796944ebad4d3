// dequantize_tiles: records -> keys and values, rotated back.
//
// Roofline. A record of k4v2, D = G = 128, is 13.8 KB to read and 64 KB (fp16) to write: 18 ns at
// the copy rate of an H200, in which its 132 SMs have 18.8 instruction slots an element. Scaling a
// code and seven butterfly stages of shuffles and additions would take most of them. Instead:
//
// - The tensor core does the part of the transform that crosses lanes. Codes are exact in fp16 and
//   so are channel scales with a sign, so with A = codes of 16 tokens x 16 channels and
//   B = +-channel_scale, four of the log2(D) stages are two mma in fp32 that lose nothing. The
//   channels of a fragment differ in four bits; B transforms those.
// - The other stages but those above bit 6 are additions between accumulators (three an element
//   at D = 128). Above bit 6 the fragments accumulate into the same registers with signs.
// - The zero points never meet a code: transformed on their own (K), or as zero_point[token] times
//   the transformed channel scales (V), they are where the accumulators start.
// - The token scale multiplies the finished row.
// - V fragments have channels for rows; movmatrix makes tokens of them, the rest is as with K.
//
// About 8 instructions an element. A lane ends with 8 neighbouring channels of a token: 16-byte
// stores, 64 bytes of a row side by side.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/format.h"
#include "cuda/launch.h"
#include "device/codes.cuh"
#include "device/copy.cuh"
#include "device/hadamard.cuh"
#include "device/mma.cuh"
#include "device/numeric.cuh"

namespace kvarn::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTokens = 16;   // of a fragment
constexpr int kMaxTiles = 8;  // fragments that have accumulators of their own: 128 channels
constexpr uint32_t kSigns = 0x80008000u;  // of a half2
constexpr uint32_t kHighSign = 0x80000000u;

/// K or V of one record, in shared memory.
struct Part {
  const uint8_t* codes;
  const __half* channel_scale;
  const __half* zero_point;  // K: of channels, V: of tokens
  const __half* token_scale;
  float* start;  // [D]: what the accumulators start from
  uint4* b;      // [D / 16, 32]: B operands of a lane, n-tiles 0 and 1
};

/// Where its rows go.
struct Rows {
  char* out;  // token 0, channel 0
  int64_t token_stride;
};

/// start[channel]: the zero points (K) or ones (V) times the channel scale, transformed over the
/// channel bits of a fragment (K: 0, 1, 3, 4; V: 0, 3, 4, 5) and those above bit 6.
template <int kDim, bool kKey>
__device__ __forceinline__ void make_start(const Part& part, bool rotated) {
  constexpr int kCount = kDim <= kThreads ? 1 : kDim / kThreads;
  const int i = threadIdx.x;
  if (i >= kDim) return;
  // The bits of the fragment are lane bits.
  const int channel =
      kKey ? i : (i & 1) | (i >> 1 & 7) << 3 | (i >> 4 & 1) << 1 | (i >> 5 & 1) << 2 | i >> 6 << 6;
  float v[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int c = channel + k * kThreads;
    v[k] = __half2float(part.channel_scale[c]) * (kKey ? __half2float(part.zero_point[c]) : 1.f);
  }
  if (!rotated) {
    if constexpr (kKey) {
      device::butterfly_lanes<1, 4>(v, i);
      device::butterfly_lanes<8, 32>(v, i);
    } else {
      device::butterfly_lanes<1, 16>(v, i);
    }
    device::butterfly_registers<1, kCount>(v);
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) part.start[channel + k * kThreads] = v[k];
}

/// B: rows are the channels of a fragment, row 2t + p + 8h: of K, p is channel bit 0, h bit 1, t
/// bits 3-4; of V, h is bit 0, p bit 3, t bits 4-5. Columns are channels too, column r of n-tile m:
/// of K, r is the bits 0, 3, 4 and m bit 1; of V, r is the bits 0, 3, 4 and m bit 5. An element is
/// the scale of its row, its sign the parity of the bits that row and column have in common (in the
/// rotated basis: 0 unless row and column are the same channel).
template <int kDim, bool kKey>
__device__ __forceinline__ void make_b(const Part& part, bool rotated, int lane) {
  const int r = lane / 4;
  const int t = lane % 4;
  uint32_t keep[2][2];  // of the pair p = 0, 1; by m and h
  uint32_t flip[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int p = kKey ? r & 1 : r >> 1 & 1;  // of the column
      bool odd;                                 // sign of p = 0
      bool same;                                // whether all bits but p agree
      if constexpr (kKey) {
        odd = (__popc(t & r >> 1) + h * m) & 1;
        same = t == r >> 1 && h == m;
      } else {
        odd = ((t & r >> 2) + (t >> 1) * m + h * (r & 1)) & 1;
        same = (t & 1) == r >> 2 && t >> 1 == m && h == (r & 1);
      }
      if (rotated) {
        keep[m][h] = !same ? 0 : p == 0 ? 0x0000ffffu : 0xffff0000u;
        flip[m][h] = 0;
      } else {
        keep[m][h] = ~0u;
        flip[m][h] = (odd ? kSigns : 0) ^ (p == 0 ? 0 : kHighSign);
      }
    }
  }
  for (int f = threadIdx.x / kWarpLanes; f < kDim / kFragmentDim; f += kThreads / kWarpLanes) {
    uint32_t pair[2];  // p = 0, 1; by h
    if constexpr (kKey) {
      const uint2 scales =
          *reinterpret_cast<const uint2*>(part.channel_scale + f / 2 * 32 + 8 * t + f % 2 * 4);
      pair[0] = scales.x;
      pair[1] = scales.y;
    } else {
      const __half* const at = part.channel_scale + f / 4 * 64 + 16 * t + f % 4 * 2;
      const uint32_t p0 = *reinterpret_cast<const uint32_t*>(at);
      const uint32_t p1 = *reinterpret_cast<const uint32_t*>(at + 8);
      pair[0] = __byte_perm(p0, p1, 0x5410);
      pair[1] = __byte_perm(p0, p1, 0x7632);
    }
    part.b[f * kWarpLanes + lane] = {
        pair[0] & keep[0][0] ^ flip[0][0], pair[1] & keep[0][1] ^ flip[0][1],
        pair[0] & keep[1][0] ^ flip[1][0], pair[1] & keep[1][1] ^ flip[1][1]};
  }
}

/// Where element (row, channel 32j + 8t + channel) stands among a lane's accumulators
/// [fragment][n-tile][2 * row + column]: of K, the 8 channels are column, n-tile and fragment % 2,
/// of V column and fragment % 4.
template <bool kKey>
__device__ __forceinline__ constexpr int accumulator(int row, int j, int channel) {
  const int fragment = kKey ? 2 * j + channel / 4 : j / 2 * 4 + channel / 2;
  const int tile = kKey ? channel / 2 % 2 : j % 2;
  return 8 * fragment + 4 * tile + 2 * row + channel % 2;
}

/// The lane's two tokens, 8 neighbouring channels at a time.
template <class T, bool kKey, int kCount>
__device__ __forceinline__ void store_rows(char* out, int64_t token_stride, bool aligned,
                                           const float (&d)[kCount], const float (&scale)[2]) {
  constexpr int kVector = device::kAccessBytes / static_cast<int>(sizeof(T));
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int j = 0; j < kCount / 16; ++j) {
      T* const to = reinterpret_cast<T*>(out) + row * token_stride + 32 * j;
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = d[accumulator<kKey>(row, j, i)];
#pragma unroll
      for (int i = 0; i < 8; i += kVector) {
        const auto piece = device::from_float<T, kVector>(v + i, scale[row]);
        if (aligned) {
          device::store_once(to + i, piece);
        } else {
#pragma unroll
          for (int k = 0; k < kVector; ++k) to[i + k] = piece.element[k];
        }
      }
    }
  }
}

template <int kDim, int kBits, bool kKey>
__device__ __forceinline__ void dequantize_part(const Part& part, const Rows& rows,
                                                const DequantizeParams& p, bool aligned) {
  constexpr int kFragments = kDim / kFragmentDim;
  constexpr int kTiles = kFragments < kMaxTiles ? kFragments : kMaxTiles;
  constexpr float kNorm = device::orthonormal_scale(kDim);
  const int lane = threadIdx.x % kWarpLanes;
  const int r = lane / 4;
  const int t = lane % 4;

  make_start<kDim, kKey>(part, p.rotated);
  make_b<kDim, kKey>(part, p.rotated, lane);
  __syncthreads();

#pragma unroll 1
  for (int unit = threadIdx.x / kWarpLanes; unit < p.format.group / kTokens;
       unit += kThreads / kWarpLanes) {
    // The lane's rows of the accumulators: two neighbouring tokens.
    const int token = unit / 4 * 64 + r * 8 + unit % 4 * 2;
    const float2 token_scale =
        __half22float2(*reinterpret_cast<const __half2*>(part.token_scale + token));
    const float norm = p.rotated ? 1.f : kNorm;
    const float row_scale[2] = {token_scale.x * norm, token_scale.y * norm};
    float2 zero = {1.f, 1.f};
    if constexpr (!kKey) {
      zero = __half22float2(*reinterpret_cast<const __half2*>(part.zero_point + token));
    }
    // Each pass makes 128 channels; `pass` is their bits 7 and up.
#pragma unroll 1
    for (int pass = 0; pass < kFragments / kTiles; ++pass) {
      const int first_channel = pass * kMaxTiles * kFragmentDim;
      float d[kTiles * 8];
#pragma unroll
      for (int j = 0; j < kTiles / 2; ++j) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          const float4 start =
              *reinterpret_cast<const float4*>(part.start + first_channel + 32 * j + 8 * t + i);
          const float channel[] = {start.x, start.y, start.z, start.w};
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            d[accumulator<kKey>(0, j, i + k)] = channel[k] * zero.x;
            d[accumulator<kKey>(1, j, i + k)] = channel[k] * zero.y;
          }
        }
      }
#pragma unroll
      for (int f = 0; f < kFragments; f += device::kFragmentsAtOnce) {
        const int above = f / kTiles;  // bits 7 and up of its channels
        if (p.rotated && above != pass) continue;
        const uint32_t sign = __popc(above & pass) % 2 == 1 && !p.rotated ? kSigns : 0;
        uint32_t words[kBits];
        device::load_words<kBits>(part.codes, (unit * kFragments + f) / device::kFragmentsAtOnce,
                                  lane, words);
#pragma unroll
        for (int k = 0; k < device::kFragmentsAtOnce; ++k) {
          uint32_t a[kFragmentRegisters];
#pragma unroll
          for (int i = 0; i < kFragmentRegisters; ++i) {
            const uint32_t codes = device::code_pair<kBits>(words, k * kFragmentRegisters + i);
            // Transposed, rows and columns change places, and so do registers 1 and 2.
            if constexpr (kKey) {
              a[i] = codes;
            } else {
              a[i % 2 * 2 + i / 2] = device::transpose_8x8(codes);
            }
          }
          uint4 b = part.b[(f + k) * kWarpLanes + lane];
          if constexpr (kFragments > kTiles) {
            b = {b.x ^ sign, b.y ^ sign, b.z ^ sign, b.w ^ sign};
          }
          float* const tile = d + 8 * ((f + k) % kTiles);
          device::mma_m16n8k16(tile, a, b.x, b.y);
          device::mma_m16n8k16(tile + 4, a, b.z, b.w);
        }
      }
      if (!p.rotated) device::butterfly_registers<8, kTiles * 8>(d);

      char* const out =
          rows.out + (token * rows.token_stride + first_channel + 8 * t) * size_of(p.dtype);
      switch (p.dtype) {
        case DType::kFloat16:
          store_rows<__half, kKey>(out, rows.token_stride, aligned, d, row_scale);
          break;
        case DType::kBFloat16:
          store_rows<__nv_bfloat16, kKey>(out, rows.token_stride, aligned, d, row_scale);
          break;
        case DType::kFloat32:
          store_rows<float, kKey>(out, rows.token_stride, aligned, d, row_scale);
          break;
      }
    }
  }
}

/// bits -> template argument.
template <int kDim, bool kKey>
__device__ __forceinline__ void dequantize_part(const Part& part, const Rows& rows,
                                                const DequantizeParams& p, bool aligned) {
  switch (kKey ? p.format.key_bits : p.format.value_bits) {
    case 2:
      return dequantize_part<kDim, 2, kKey>(part, rows, p, aligned);
    case 3:
      return dequantize_part<kDim, 3, kKey>(part, rows, p, aligned);
    case 4:
      return dequantize_part<kDim, 4, kKey>(part, rows, p, aligned);
    case 8:
      return dequantize_part<kDim, 8, kKey>(part, rows, p, aligned);
  }
}

template <int kDim>
constexpr int kScratchBytes = kDim * static_cast<int>(sizeof(float)) +
                              kDim / kFragmentDim * kWarpLanes * static_cast<int>(sizeof(uint4));

/// A block takes record after record, K and V in turn; while it works on one part the next comes
/// in.
template <int kDim>
__global__ void __launch_bounds__(kThreads, kDim == 64    ? 5
                                            : kDim == 128 ? 4
                                                          : 3)
    dequantize_kernel(const __grid_constant__ DequantizeParams p, bool aligned) {
  extern __shared__ __align__(16) uint8_t shared[];
  uint8_t* const buffer = shared + kScratchBytes<kDim>;
  const RecordLayout layout = record_layout(p.format);
  const unsigned records = static_cast<unsigned>(p.tiles * p.heads);
  const auto fetch = [&](unsigned record, int begin, int end) {
    if (record < records) {
      const int64_t tile = record / static_cast<unsigned>(p.heads);
      const int64_t head = record % static_cast<unsigned>(p.heads);
      device::copy_to_shared<kThreads>(
          buffer + begin, p.records + tile * p.record_stride[0] + head * p.record_stride[1] + begin,
          end - begin);
    }
    device::copy_async_commit();
  };
  const auto field = [&](int offset) { return reinterpret_cast<const __half*>(buffer + offset); };
  const auto rows_of = [&](void* out, const int64_t (&stride)[3], unsigned record) {
    const int64_t tile = record / static_cast<unsigned>(p.heads);
    const int64_t head = record % static_cast<unsigned>(p.heads);
    return Rows{static_cast<char*>(out) + (tile * stride[0] + head * stride[2]) * size_of(p.dtype),
                stride[1]};
  };
  float* const start = reinterpret_cast<float*>(shared);
  uint4* const b = reinterpret_cast<uint4*>(shared + kDim * sizeof(float));

  fetch(blockIdx.x, 0, layout.value_codes);
#pragma unroll 1
  for (unsigned record = blockIdx.x; record < records; record += gridDim.x) {
    // After the barrier K is there, and nobody needs the V before it any more.
    device::copy_async_wait<0>();
    __syncthreads();
    fetch(record, layout.value_codes, layout.bytes);
    dequantize_part<kDim, true>(
        {buffer, field(layout.key_channel_scale), field(layout.key_zero_point),
         field(layout.key_token_scale), start, b},
        rows_of(p.key, p.key_stride, record), p, aligned);

    device::copy_async_wait<0>();
    __syncthreads();
    fetch(record + gridDim.x, 0, layout.value_codes);
    dequantize_part<kDim, false>(
        {buffer + layout.value_codes, field(layout.value_channel_scale),
         field(layout.value_zero_point), field(layout.value_token_scale), start, b},
        rows_of(p.value, p.value_stride, record), p, aligned);
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

template <int kDim>
Status run(const DequantizeParams& p) {
  const int64_t records = p.tiles * p.heads;
  if (records == 0) return {};
  if (Status status = check_grid("records", records); !status.ok()) return status;
  const size_t shared_bytes = kScratchBytes<kDim> + record_layout(p.format).bytes;
  if (Status status = allow_shared_memory(dequantize_kernel<kDim>, shared_bytes); !status.ok()) {
    return status;
  }
  int resident = 0;
  if (Status status = resident_blocks(dequantize_kernel<kDim>, kThreads, shared_bytes, resident);
      !status.ok()) {
    return status;
  }
  const int64_t blocks = std::min<int64_t>(records, resident);
  return launch(dequantize_kernel<kDim>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                shared_bytes, p.stream, p, aligned(p));
}

}  // namespace

Status dequantize_tiles(const DequantizeParams& p) {
  if (Status status = check_format(p.format); !status.ok()) return status;
  switch (p.format.head_dim) {
    case 64:
      return run<64>(p);
    case 128:
      return run<128>(p);
    default:
      return run<256>(p);
  }
}

}  // namespace kvarn::cuda
