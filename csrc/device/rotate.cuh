// From keys or values in memory to a rotated tile in registers.
//
// The rotation is a product with the signs of the Walsh-Hadamard matrix on the tensor core: signs
// and 16-bit inputs are exact, products are summed in fp32. An fp32 input is the sum of three bf16
// numbers, exactly, and is multiplied in three passes. K comes out as [channel][token] (A = signs,
// B = tokens), V as [token][channel] (A = tokens, B = signs), both as TileShape has them.
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

/// One head's keys or values of one tile: token g at data + g * token_stride.
struct TokenRows {
  const void* data;
  int64_t token_stride;  ///< elements
  DType dtype;
  bool rotated;  ///< already
  bool aligned;  ///< every token starts at a multiple of 16 bytes
};

/// Where a 16-byte chunk of a token lies in shared memory, in chunks: the eight rows that ldmatrix
/// reads at once fall into different banks, for V (neighbouring tokens) as for K (two neighbours of
/// every four).
template <int kDim>
__device__ __forceinline__ int chunk_place(int token, int chunk) {
  const int swizzle = (token & 1) | (token >> 1 & 2) | ((token >> 3 ^ token >> 1) & 1) << 2;
  return token * (kDim / 8) + (chunk ^ swizzle);
}

__device__ __forceinline__ float limit_input(float x) {
  // Not fminf, which would make a number of NaN; infinity stays too.
  const float magnitude = fabsf(x);
  return magnitude > kMaxInput && magnitude < __int_as_float(0x7f800000) ? copysignf(kMaxInput, x)
                                                                         : x;
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

/// Chunk (8 elements) of a token as 16-bit numbers.
__device__ __forceinline__ uint4 load_chunk(const TokenRows& in, int64_t element, int plane) {
  union {
    uint4 bits;
    uint16_t half[8];
    __nv_bfloat16 bf16[8];
  } chunk;
  if (in.dtype == DType::kFloat32) {
    const float* const x = static_cast<const float*>(in.data) + element;
#pragma unroll
    for (int i = 0; i < 8; ++i) chunk.bf16[i] = bf16_part(limit_input(x[i]), plane);
    return chunk.bits;
  }
  const uint16_t* const x = static_cast<const uint16_t*>(in.data) + element;
  if (in.aligned) {
    chunk.bits = __ldg(reinterpret_cast<const uint4*>(x));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) chunk.half[i] = x[i];
  }
  if (in.dtype == DType::kBFloat16) {
    constexpr uint32_t kMagnitude = 0x7fff7fffu;
    const uint32_t largest =
        __vmaxu2(__vmaxu2(chunk.bits.x & kMagnitude, chunk.bits.y & kMagnitude),
                 __vmaxu2(chunk.bits.z & kMagnitude, chunk.bits.w & kMagnitude));
    if ((largest & 0xffff) > 0x4c80 || largest >> 16 > 0x4c80) {  // 2^26
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        chunk.bf16[i] = __float2bfloat16_rn(limit_input(__bfloat162float(chunk.bf16[i])));
      }
    }
  }
  return chunk.bits;
}

template <class Shape>
__device__ __forceinline__ void load_tokens(const TokenRows& in, int plane, uint4* shared) {
  constexpr int kChunks = Shape::kDim / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < Shape::kTokens * kChunks; i += Shape::kThreads) {
    const int token = i / kChunks;
    const int chunk = i % kChunks;
    shared[chunk_place<Shape::kDim>(token, chunk)] =
        load_chunk(in, token * in.token_stride + 8 * chunk, plane);
  }
}

__device__ __forceinline__ void load_matrix_x4(uint32_t (&x)[4], const uint4* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared)))
               : "memory");
}

/// Two neighbouring elements of the sign matrix, at columns (or rows) k and k + 1 with k even:
/// (-1)^popcount(n & k); of the unit matrix if `rotated`.
template <bool kBFloat16>
__device__ __forceinline__ uint32_t sign_pair(int n, int k, bool rotated) {
  constexpr uint32_t kOne = kBFloat16 ? 0x3f80 : 0x3c00;
  if (rotated) return n == k ? kOne : n == k + 1 ? kOne << 16 : 0;
  const uint32_t low = kOne | static_cast<uint32_t>(__popc(n & k) & 1) << 15;
  const uint32_t high = kOne | static_cast<uint32_t>(__popc(n & (k + 1)) & 1) << 15;
  return low | high << 16;
}

/// x += the tokens in shared memory times the signs.
template <class Shape, bool kBFloat16>
__device__ __forceinline__ void multiply_signs(const uint4* shared, bool rotated,
                                               float (&x)[Shape::kElements]) {
  constexpr uint32_t kSigns = 0x80008000u;
  // Opaque, lest the addresses that the fp16 and the bf16 version share be kept in registers.
  const unsigned thread = TileThread<Shape>::thread();
  const int lane = thread % kWarpLanes;
  const int strip = thread / kWarpLanes / Shape::kSplit;
  const int first_col = thread / kWarpLanes % Shape::kSplit * Shape::kWarpCols;
  const int r = lane / 4;
  const int t = lane % 4;
  const int matrix = lane / 8;  // whose row this lane addresses for ldmatrix
  const int matrix_row = lane % 8;
  // The 16 channels that a warp of K, or a group of columns of V, is about: k / 16 of the diagonal.
  const int block = Shape::kKey ? strip : first_col / 16;

  uint32_t signs[4];  // K: the A operand; V: the B operands of even and odd n-tiles
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (Shape::kKey) {
      signs[i] = sign_pair<kBFloat16>(r + 8 * (i % 2), 2 * t + 8 * (i / 2), rotated);
    } else {
      signs[i] = sign_pair<kBFloat16>(r / 2 * 4 + i / 2 * 2 + r % 2, 2 * t + 8 * (i % 2), rotated);
    }
  }
#pragma unroll
  for (int k = 0; k < Shape::kDim / 16; ++k) {
    if (rotated && (k < block || k >= block + (Shape::kKey ? 1 : Shape::kGroups))) continue;
    const uint32_t flip = !rotated && (__popc(block & k) & 1) ? kSigns : 0;
    uint32_t a[4];
    if constexpr (Shape::kKey) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = signs[i] ^ flip;
    } else {
      const int token = strip * Shape::kStripRows + matrix % 2 * 8 + matrix_row;
      load_matrix_x4(a, shared + chunk_place<Shape::kDim>(token, 2 * k + matrix / 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] ^= flip;
    }
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      uint32_t b[4];
      if constexpr (Shape::kKey) {
        const int token = first_col + 16 * g + matrix_row / 2 * 4 + matrix / 2 * 2 + matrix_row % 2;
        load_matrix_x4(b, shared + chunk_place<Shape::kDim>(token, 2 * k + matrix % 2));
      } else {
        if (rotated && k != block + g) continue;
        // `block` has no bits below those of g.
        const uint32_t odd = !rotated && (__popc(k & g) & 1) ? kSigns : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = signs[i] ^ odd;
      }
      mma_m16n8k16<kBFloat16>(x + 8 * g, a, b[0], b[1]);
      mma_m16n8k16<kBFloat16>(x + 8 * g + 4, a, b[2], b[3]);
    }
  }
}

/// x = the rotated tile. `shared`: kTokens * kDim 16-bit numbers; free again after a barrier.
template <class Shape>
__device__ __forceinline__ void load_rotated(const TokenRows& in, uint4* shared,
                                             float (&x)[Shape::kElements]) {
#pragma unroll
  for (int i = 0; i < Shape::kElements; ++i) x[i] = 0;
  const int planes = in.dtype == DType::kFloat32 ? 3 : 1;
#pragma unroll 1
  for (int plane = 0; plane < planes; ++plane) {
    if (plane > 0) __syncthreads();
    load_tokens<Shape>(in, plane, shared);
    __syncthreads();
    if (in.dtype == DType::kFloat16) {
      multiply_signs<Shape, false>(shared, in.rotated, x);
    } else {
      multiply_signs<Shape, true>(shared, in.rotated, x);
    }
  }
  constexpr float kNorm = orthonormal_scale(Shape::kDim);
  const float norm = in.rotated ? 1.f : kNorm;
#pragma unroll
  for (int i = 0; i < Shape::kElements; ++i) x[i] *= norm;
}

}  // namespace kvarn::device
