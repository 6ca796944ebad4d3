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

// Each lane holds 8 x 8 elements, each warp 64 rows x 32 columns: 4 x 4 accumulators of
// mma.m16n8k16. Which row and column of the tile stand for those of an accumulator is chosen such
// that the bits of the channel that the accumulator's number gives meet those of k that the step
// gives: signs are then known at compile time, but for a lane's own, which stay in registers.
// Columns come in two fours of neighbours.

inline constexpr int kSide = 8;                  ///< rows and columns of a lane
inline constexpr int kElements = kSide * kSide;  ///< of a lane

/// Number of element (row i, column j) of a lane; four by four, they are mma accumulators: i is 2 *
/// row tile + 1 for the lower half, j is 2 * column tile + 1 for the odd column.
constexpr KVARN_HD int element(int i, int j) {
  return 4 * (4 * (i / 2) + j / 2) + 2 * (i % 2) + j % 2;
}

/// Where a thread is in the product.
template <class Shape>
struct SquarePlace {
  int lane;
  int warp_row;
  int warp_col;

  __device__ __forceinline__ SquarePlace() {
    const unsigned thread = own_thread();
    lane = thread % kWarpLanes;
    const int warp = thread / kWarpLanes;
    warp_row = warp / (Shape::kCols / 32);
    warp_col = warp % (Shape::kCols / 32);
  }

  __device__ __forceinline__ int row(int i) const { return warp_row * 64 + i * 8 + lane / 4; }
  __device__ __forceinline__ int col(int j) const {
    return warp_col * 32 + j / 4 * 16 + lane % 4 * 4 + j % 4;
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
/// reads at once fall into different banks, for V (eight neighbours) as for K (two neighbours of
/// every four).
template <int kDim>
__device__ __forceinline__ int chunk_place(int token, int chunk) {
  const int swizzle = (token & 1) | (token >> 1 & 2) | ((token << 1 ^ token >> 1) & 4);
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

/// All tokens to shared memory: 16-bit numbers, aligned. All loads of a thread are in flight at
/// once.
template <int kDim, int kTokens, int kThreads>
__device__ __forceinline__ void load_tokens(const TokenRows& in, uint4* shared) {
  constexpr int kChunks = kDim / 8;
  constexpr int kStep = kThreads / kChunks;  // tokens
  constexpr int kLoads = kTokens / kStep;
  static_assert(kTokens % kStep == 0 && kLoads <= 8);
  const int thread = own_thread();
  const int chunk = thread % kChunks;
  const int token = thread / kChunks;
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

/// The same for unaligned tokens, and for one of the three planes of fp32.
template <int kDim, int kTokens, int kThreads>
__device__ __forceinline__ void load_plane(const TokenRows& in, int plane, uint4* shared) {
  auto* const numbers = reinterpret_cast<uint16_t*>(shared);
#pragma unroll 1
  for (int i = own_thread(); i < kTokens * kDim; i += kThreads) {
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

/// The parity of a & b, at compile time where they are known.
constexpr KVARN_HD int sign_of(int a, int b) {
  const int both = a & b;
  return (both ^ both >> 1 ^ both >> 2 ^ both >> 3) & 1;
}

/// x += signs times tokens (K). The sign of (channel, k) is the parity of channel & k, where
/// channel = 64 * warp_row + 16 * a + 8 * h + lane / 4 for row tile a and its lower half h = 1, and
/// k = 32 * pair + 16 * odd + 8 * high + 2 * (lane % 4) + 0 or 1.
template <class Shape, bool kBFloat16>
__device__ __forceinline__ void multiply_keys(const uint4* shared, float (&x)[kElements]) {
  constexpr int kDim = Shape::kRows;
  constexpr uint32_t kOnes = kBFloat16 ? 0x3f803f80u : 0x3c003c00u;
  const SquarePlace<Shape> at;
  const int r = at.lane / 4;
  const uint32_t own_signs =
      kOnes ^ turned(__popc(r >> 1 & at.lane % 4)) ^ (r % 2 == 1 ? 0x80000000u : 0);
  const int matrix = at.lane / 8;  // whose row this lane addresses for ldmatrix
  const int n = at.lane % 8;
  const int token = at.warp_col * 32 + n / 2 * 4 + matrix / 2 * 2 + n % 2;  // of column tiles 0, 1
  const auto from = static_cast<uint32_t>(
      __cvta_generic_to_shared(shared + chunk_place<kDim>(token, matrix % 2)));
#pragma unroll 1
  for (int pair = 0; pair < kDim / 32; ++pair) {
    const uint32_t plus = own_signs ^ turned(sign_of(at.warp_row, pair / 2));
    const uint32_t rows[4] = {plus, plus, plus, plus ^ kBothSigns};
    const uint32_t turn = turned(pair);  // of row tiles 2 and 3
    const uint32_t turned_rows[4] = {rows[0] ^ turn, rows[1] ^ turn, rows[2] ^ turn,
                                     rows[3] ^ turn};
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      uint32_t b[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_matrix_x4(b[half], (from ^ 32 * (2 * pair + odd)) + half * 16 * (2 * kDim));
      }
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const uint32_t flip = turned(a & odd);
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
          const uint32_t* const col = b[tile / 2] + tile % 2 * 2;
          mma_m16n8k16<kBFloat16>(x + 4 * (4 * a + tile), a < 2 ? rows : turned_rows, col[0] ^ flip,
                                  col[1] ^ flip);
        }
      }
    }
  }
}

/// x += tokens times signs (V), where channel = 32 * warp_col + 16 * (tile / 2) + 4 * (n / 2) +
/// 2 * (tile % 2) + n % 2 with n = lane / 4, and k is as for K.
template <class Shape, bool kBFloat16>
__device__ __forceinline__ void multiply_values(const uint4* shared, float (&x)[kElements]) {
  constexpr int kDim = Shape::kCols;
  constexpr uint32_t kOnes = kBFloat16 ? 0x3f803f80u : 0x3c003c00u;
  const SquarePlace<Shape> at;
  const int n = at.lane / 4;
  const int t = at.lane % 4;
  uint32_t signs[2][2];  // by tile % 2, chunk % 2
#pragma unroll
  for (int f = 0; f < 4; ++f) {
    const int low = 4 * (n / 2 % 2) + 2 * (f / 2) + n % 2;  // bits of the channel
    signs[f / 2][f % 2] = kOnes ^ turned(sign_of(low, 2 * t)) ^ turned(sign_of(n / 4, f % 2)) ^
                          (n % 2 == 1 ? 0x80000000u : 0);
  }
  const int matrix = at.lane / 8;
  const int token = at.warp_row * 64 + matrix % 2 * 8 + at.lane % 8;  // of row tile 0
  const auto from = static_cast<uint32_t>(
      __cvta_generic_to_shared(shared + chunk_place<kDim>(token, matrix / 2)));
#pragma unroll 1
  for (int pair = 0; pair < kDim / 32; ++pair) {
    const uint32_t turn = turned(sign_of(at.warp_col, pair));
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        uint32_t rows[4];
        load_matrix_x4(rows, (from ^ 32 * (2 * pair + odd)) + a * 16 * (2 * kDim));
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
          const uint32_t flip = turn ^ turned(odd & tile / 2);
          mma_m16n8k16<kBFloat16>(x + 4 * (4 * a + tile), rows, signs[tile % 2][0] ^ flip,
                                  signs[tile % 2][1] ^ flip);
        }
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
      const int token = key ? at.col(j) : at.row(i);
      const int channel = key ? at.row(i) : at.col(j);
      const uint16_t bits = numbers[8 * chunk_place<kDim>(token, channel / 8) + channel % 8];
      x[element(i, j)] +=
          half ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t{bits} << 16);
    }
  }
}

/// The first kHalf of twice as many sums, added to those of the lane `distance` away, or, where the
/// lane's number has that bit, the last kHalf.
template <int kHalf>
__device__ __forceinline__ void halve_sums(float (&sums)[kSide], int lane, int distance) {
  const bool high = lane & distance;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float kept = high ? sums[i + kHalf] : sums[i];
    sums[i] = kept + __shfl_xor_sync(0xffffffffu, high ? sums[i] : sums[i + kHalf], distance);
  }
}

/// Sums of squares of the tokens, over one warp's part of each, for token_energy.
template <class Shape>
__device__ __forceinline__ void put_energies(const SquarePlace<Shape>& at, bool key,
                                             const float (&x)[kElements], float* partial) {
  float sums[kSide];
  if (key) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        add_product(sums[j], i == 0, x[element(i, j)], x[element(i, j)]);
      }
    }
    halve_sums<4>(sums, at.lane, 16);
    halve_sums<2>(sums, at.lane, 8);
    halve_sums<1>(sums, at.lane, 4);
    const int own = (at.lane & 16 ? 4 : 0) + (at.lane & 8 ? 2 : 0) + (at.lane & 4 ? 1 : 0);
    partial[at.warp_row * Shape::kCols + at.col(own)] = sums[0];
  } else {
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        add_product(sums[i], j == 0, x[element(i, j)], x[element(i, j)]);
      }
    }
    halve_sums<4>(sums, at.lane, 2);
    halve_sums<2>(sums, at.lane, 1);
    const int own = (at.lane & 2 ? 4 : 0) + (at.lane & 1 ? 2 : 0);
    partial[at.warp_col * Shape::kRows + at.row(own)] = sums[0];
    partial[at.warp_col * Shape::kRows + at.row(own + 1)] = sums[1];
  }
}

/// Sum of squares of token n, after put_energies and a barrier.
template <class Shape>
__device__ __forceinline__ float token_energy(const float* partial, bool key, int n) {
  static_assert(Shape::kRows / 32 <= 2 * Shape::kPartials);
  const int parts = key ? Shape::kRows / 64 : Shape::kCols / 32;
  const int step = key ? Shape::kCols : Shape::kRows;
  float energy = partial[n];
#pragma unroll 1
  for (int i = 1; i < parts; ++i) energy += partial[i * step + n];
  return energy;
}

/// The rotated tile of keys or values in shared memory, and the energies of its tokens. The tokens
/// lie where it will be. Ends with a barrier.
template <class Shape, bool kMayBeKey, bool kMayBeValue>
__device__ __forceinline__ void load_rotated(const TokenRows& in, bool key, uint4* shared,
                                             float* tile, float* energies) {
  constexpr int kDim = kMayBeKey ? Shape::kRows : Shape::kCols;
  constexpr int kTokens = kMayBeKey ? Shape::kCols : Shape::kRows;
  const bool half = in.dtype == DType::kFloat16;
  const int planes = in.dtype == DType::kFloat32 ? 3 : 1;
  const bool whole = in.aligned && planes == 1;
  if (whole) load_tokens<kDim, kTokens, Shape::kThreads>(in, shared);
  float x[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) x[i] = 0;
#pragma unroll 1
  for (int plane = 0; plane < planes; ++plane) {
    if (!whole) load_plane<kDim, kTokens, Shape::kThreads>(in, plane, shared);
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
#pragma unroll
  for (float& element : x) element *= norm;
  const SquarePlace<Shape> at;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; j += kChunk) {
      *reinterpret_cast<float4*>(tile + place<Shape>(at.row(i), at.col(j))) = {
          x[element(i, j)], x[element(i, j + 1)], x[element(i, j + 2)], x[element(i, j + 3)]};
    }
  }
  put_energies(at, key, x, energies);
  __syncthreads();
}

}  // namespace kvarn::device
