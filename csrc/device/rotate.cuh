// From keys or values in memory to a rotated tile in shared memory.
//
// The rotation is a product with the signs of the Walsh-Hadamard matrix on the tensor core: signs
// and 16-bit inputs are exact, products are summed in fp32. An fp32 input is the sum of three bf16
// numbers, exactly, and is multiplied in three passes. K comes out as [channel][token] (A = signs,
// B = tokens), V as [token][channel] (A = tokens, B = signs).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/hadamard.cuh"
#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/tile.cuh"
#include "kvarn/ops.h"

namespace kvarn::device {

inline constexpr float kMaxInput = 67108864.f;  ///< 2^26: beyond, sums of squares leave fp32

// Each lane holds a square of 8 x 8 neighbouring elements, each warp 64 rows x 32 columns: lane
// (r, t) = (lane / 4, lane % 4) the rows 8r .. 8r + 7 and the columns 8t .. 8t + 7 of its warp's
// part. This is what 4 x 4 accumulators of mma.m16n8k16 give, with matrix row r + 8h of row tile a
// standing for row 8r + 2a + h and matrix column 2t + p of column tile b for column 8t + 2b + p.

inline constexpr int kSide = 8;                  ///< of a lane's square
inline constexpr int kElements = kSide * kSide;  ///< of a lane

/// Element (row i, column j) of a lane's square; four by four, they are mma accumulators.
constexpr KVARN_HD int element(int i, int j) {
  return 4 * (4 * (i / 2) + j / 2) + 2 * (i % 2) + j % 2;
}

/// Where a thread is in the product.
template <class Shape>
struct SquarePlace {
  int lane;
  int warp_row;
  int warp_col;
  int row;  ///< first of its square
  int col;  ///< first of its square

  __device__ __forceinline__ SquarePlace() {
    const unsigned thread = own_thread();
    lane = thread % kWarpLanes;
    const int warp = thread / kWarpLanes;
    warp_row = warp / (Shape::kCols / 32);
    warp_col = warp % (Shape::kCols / 32);
    row = warp_row * 64 + lane / 4 * kSide;
    col = warp_col * 32 + lane % 4 * kSide;
  }
};

/// One head's keys or values of one tile: token g at data + g * token_stride.
struct TokenRows {
  const void* data;
  int64_t token_stride;  ///< elements
  DType dtype;
  bool rotated;  ///< already
  bool aligned;  ///< every token starts at a multiple of 16 bytes
};

/// Where a 16-byte chunk of a token lies in shared memory, in chunks: the eight rows that ldmatrix
/// reads at once fall into different banks, for V (every eighth token) as for K (two neighbours of
/// every eight).
template <int kDim>
__device__ __forceinline__ int chunk_place(int token, int chunk) {
  const int swizzle = (token >> 3 & 3) | ((token >> 5 ^ token) & 1) << 2;
  return token * (kDim / 8) + (chunk ^ swizzle);
}

__device__ __forceinline__ float limit_input(float x) {
  // Not fminf, which would make a number of NaN; infinity stays too.
  const float magnitude = fabsf(x);
  return magnitude > kMaxInput && magnitude < kInfinity ? copysignf(kMaxInput, x) : x;
}

/// Part `plane` of the three bf16 numbers that sum up to x.
__device__ __forceinline__ __nv_bfloat16 bf16_part(float x, int plane) {
  __nv_bfloat16 part = __float2bfloat16_rn(x);
  for (int i = 0; i < plane; ++i) {
    x -= __bfloat162float(part);
    part = __float2bfloat16_rn(x);
  }
  return part;
}

/// bf16 numbers beyond 2^26 are limited; there are hardly ever any.
__device__ __forceinline__ void limit_bf16(uint4& chunk) {
  constexpr uint32_t kMagnitude = 0x7fff7fffu;
  constexpr uint32_t kMost = 0x4c80;  // 2^26
  const uint32_t largest = __vmaxu2(__vmaxu2(chunk.x & kMagnitude, chunk.y & kMagnitude),
                                    __vmaxu2(chunk.z & kMagnitude, chunk.w & kMagnitude));
  if ((largest & 0xffff) <= kMost && largest >> 16 <= kMost) return;
  const auto limit = [](uint32_t pair) {
    const auto one = [](uint32_t half) {
      return (half & 0x7fff) > kMost && (half & 0x7fff) < 0x7f80 ? (half & 0x8000) | kMost : half;
    };
    return one(pair & 0xffff) | one(pair >> 16) << 16;
  };
  chunk = {limit(chunk.x), limit(chunk.y), limit(chunk.z), limit(chunk.w)};
}

/// All tokens to shared memory, as 16-bit numbers. Ordinary 16-bit input takes the first branch.
template <int kDim, int kTokens, int kThreads>
__device__ __forceinline__ void load_tokens(const TokenRows& in, int plane, uint4* shared) {
  constexpr int kChunks = kDim / 8;
  constexpr int kLoads = 4;                  // in flight
  constexpr int kStep = kThreads / kChunks;  // tokens
  static_assert(kTokens % (kLoads * kStep) == 0);
  if (in.aligned && in.dtype != DType::kFloat32) {
    const int chunk = threadIdx.x % kChunks;
#pragma unroll 1
    for (int token = threadIdx.x / kChunks; token < kTokens; token += kLoads * kStep) {
      const auto* const from =
          static_cast<const uint16_t*>(in.data) + token * in.token_stride + chunk * 8;
      uint4 chunks[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        chunks[k] = __ldcg(reinterpret_cast<const uint4*>(from + k * kStep * in.token_stride));
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        if (in.dtype == DType::kBFloat16) limit_bf16(chunks[k]);
        shared[chunk_place<kDim>(token + k * kStep, chunk)] = chunks[k];
      }
    }
    return;
  }
  auto* const numbers = reinterpret_cast<uint16_t*>(shared);
#pragma unroll 1
  for (int i = threadIdx.x; i < kTokens * kDim; i += kThreads) {
    const int token = i / kDim;
    const int channel = i % kDim;
    const int64_t from = token * in.token_stride + channel;
    uint16_t bits;
    if (in.dtype == DType::kFloat32) {
      bits = __bfloat16_as_ushort(
          bf16_part(limit_input(static_cast<const float*>(in.data)[from]), plane));
    } else {
      bits = static_cast<const uint16_t*>(in.data)[from];
      if (in.dtype == DType::kBFloat16) {
        bits = __bfloat16_as_ushort(
            __float2bfloat16_rn(limit_input(__uint_as_float(uint32_t{bits} << 16))));
      }
    }
    numbers[8 * chunk_place<kDim>(token, channel / 8) + channel % 8] = bits;
  }
}

__device__ __forceinline__ void load_matrix_x4(uint32_t (&x)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address)
               : "memory");
}

inline constexpr uint32_t kBothSigns = 0x80008000u;

/// Both signs of a pair turned if `odd`.
__device__ __forceinline__ uint32_t turned(int odd) { return odd & 1 ? kBothSigns : 0; }

/// x += signs times tokens (K). The sign of (channel, k) is the parity of channel & k. With
/// channel = 64 warp_row + 8r + 2a + h and k = 16 step + 8 high + 2t + p: h meets p, a meets t, r
/// meets high and the low bits of step, and warp_row the others.
template <class Shape, bool kBFloat16>
__device__ __forceinline__ void multiply_keys(const uint4* shared, float (&x)[kElements]) {
  constexpr int kDim = Shape::kRows;
  constexpr uint32_t kOnes = kBFloat16 ? 0x3f803f80u : 0x3c003c00u;
  const SquarePlace<Shape> at;
  const int r = at.lane / 4;
  const int t = at.lane % 4;
  uint32_t signs[4][2];  // by a, h
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    signs[a][0] = kOnes ^ turned(__popc(a & t));
    signs[a][1] = signs[a][0] ^ 0x80000000u;
  }
  const int matrix = at.lane / 8;  // whose row this lane addresses for ldmatrix
  const int matrix_row = at.lane % 8;
  const int token =
      at.warp_col * 32 + matrix_row / 2 * 8 + matrix / 2 * 2 + matrix_row % 2;  // of b = 0, 1
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
#pragma unroll 2
  for (int step = 0; step < kDim / 16; ++step) {
    const int parity = __popc(r >> 1 & step & 3) + __popc(at.warp_row & step >> 2);
    const uint32_t turn[2] = {turned(parity), turned(parity + r)};
    uint32_t b[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_matrix_x4(b[half], base + 16 * (chunk_place<kDim>(token, 2 * step + matrix % 2) +
                                           half * 4 * (kDim / 8)));
    }
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      const uint32_t rows[4] = {signs[a][0] ^ turn[0], signs[a][1] ^ turn[0], signs[a][0] ^ turn[1],
                                signs[a][1] ^ turn[1]};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        mma_m16n8k16<kBFloat16>(x + 4 * (4 * a + n), rows, b[n / 2][n % 2 * 2],
                                b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
}

/// x += tokens times signs (V). channel = 32 warp_col + 8 (n / 2) + 2b + n % 2 with n = lane / 4:
/// its bits meet those of k = 16 step + 8 high + 2t + p in this order: n % 2 p, b t, n / 2 % 2
/// high, n / 4 step % 2, warp_col the rest of step.
template <class Shape, bool kBFloat16>
__device__ __forceinline__ void multiply_values(const uint4* shared, float (&x)[kElements]) {
  constexpr int kDim = Shape::kCols;
  constexpr uint32_t kOnes = kBFloat16 ? 0x3f803f80u : 0x3c003c00u;
  const SquarePlace<Shape> at;
  const int n = at.lane / 4;
  const int t = at.lane % 4;
  uint32_t signs[4];  // by b
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    signs[b] = kOnes ^ turned(__popc(b & t)) ^ (n % 2 == 1 ? 0x80000000u : 0);
  }
  const int matrix = at.lane / 8;
  const int matrix_row = at.lane % 8;
  const int token = at.warp_row * 64 + matrix_row * 8 + matrix % 2;  // of a = 0
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
#pragma unroll 2
  for (int step = 0; step < kDim / 16; ++step) {
    const int parity = (n / 4 & step & 1) + __popc(at.warp_col & step >> 1);
    const uint32_t turn[2] = {turned(parity), turned(parity + n / 2)};
    uint32_t cols[4][2];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      cols[b][0] = signs[b] ^ turn[0];
      cols[b][1] = signs[b] ^ turn[1];
    }
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      uint32_t rows[4];
      load_matrix_x4(
          rows, base + 16 * (chunk_place<kDim>(token, 2 * step + matrix / 2) + a * 2 * (kDim / 8)));
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        mma_m16n8k16<kBFloat16>(x + 4 * (4 * a + b), rows, cols[b][0], cols[b][1]);
      }
    }
  }
}

/// x += the tokens as they are.
template <class Shape, int kDim>
__device__ __forceinline__ void add_tokens(const uint4* shared, bool key, bool half,
                                           float (&x)[kElements]) {
  const SquarePlace<Shape> at;
  const auto* const numbers = reinterpret_cast<const uint16_t*>(shared);
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const int token = key ? at.col + j : at.row + i;
      const int channel = key ? at.row + i : at.col + j;
      const uint16_t bits = numbers[8 * chunk_place<kDim>(token, channel / 8) + channel % 8];
      x[element(i, j)] +=
          half ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t{bits} << 16);
    }
  }
}

/// The rotated tile of keys or values in shared memory. The tokens lie where it will be. Ends with
/// a barrier.
template <class Shape, bool kMayBeKey, bool kMayBeValue>
__device__ __forceinline__ void load_rotated(const TokenRows& in, bool key, uint4* shared,
                                             float* tile) {
  constexpr int kDim = kMayBeKey ? Shape::kRows : Shape::kCols;
  constexpr int kTokens = kMayBeKey ? Shape::kCols : Shape::kRows;
  const bool half = in.dtype == DType::kFloat16;
  const int planes = in.dtype == DType::kFloat32 ? 3 : 1;
  float x[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) x[i] = 0;
#pragma unroll 1
  for (int plane = 0; plane < planes; ++plane) {
    load_tokens<kDim, kTokens, Shape::kThreads>(in, plane, shared);
    __syncthreads();
    if (in.rotated) {
      add_tokens<Shape, kDim>(shared, key, half, x);
    } else {
      if constexpr (kMayBeKey) {
        if (key && half) multiply_keys<Shape, false>(shared, x);
        if (key && !half) multiply_keys<Shape, true>(shared, x);
      }
      if constexpr (kMayBeValue) {
        if (!key && half) multiply_values<Shape, false>(shared, x);
        if (!key && !half) multiply_values<Shape, true>(shared, x);
      }
    }
    __syncthreads();
  }
  constexpr float kNorm = orthonormal_scale(kDim);
  const float norm = in.rotated ? 1.f : kNorm;
  const SquarePlace<Shape> at;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; j += kChunk) {
      *reinterpret_cast<float4*>(tile + place<Shape>(at.row + i, at.col + j)) = {
          x[element(i, j)] * norm, x[element(i, j + 1)] * norm, x[element(i, j + 2)] * norm,
          x[element(i, j + 3)] * norm};
    }
  }
  __syncthreads();
}

}  // namespace kvarn::device
