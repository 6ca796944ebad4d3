// The two products of attention over a record, by a warpgroup: four warps whose products are wgmma
// (sm_90a). For more query rows than a warp has registers for.
//
// As in attention_records.cuh tokens (K) and channels (V) are the M side, query rows the N side.
// The warps divide M: each dequantizes its own codes, once for all rows, straight into the
// registers of the A operand. Zero points, and the scales of the channels of K, are put on with an
// instruction each a pair of codes:
//
//   scores[token][row] = K'[token][channel] * Q[channel][row]
//   sums[channel][row] = V'[channel][token] * P'[token][row]
//
// K' = (code + zero point) * channel scale, V' = code + zero point. So Q is the same for all
// records of an item. The other scales are left to the scores, to P', which passes from warp to
// warp through shared memory, and to the sums. All is scaled by powers of two, so that nothing
// overflows in fp16; channels of K whose scale is 2^20 times smaller than the largest begin to
// vanish.
//
// An operand in shared memory is 8 x 8 matrices of 128 bytes, a row (8 fp16 numbers of one query
// row) after the other: [step of 16 columns of A][half of them][block of 8 rows]. Both ldmatrix and
// the descriptors of wgmma read that without bank conflicts.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/attention_records.cuh"
#include "device/ring.cuh"

namespace kvarn::device {

inline constexpr int kGroupWarps = 4;
inline constexpr int kGroupThreads = kGroupWarps * kWarpLanes;
inline constexpr int kGroupSteps = 8;  ///< of 16 columns: D = G = 128
inline constexpr int kGroupTiles = 2;  ///< row tiles of a warp
inline constexpr int kMatrixBytes = 128;

constexpr KVARN_HD int operand_bytes(int row_blocks) {
  return kGroupSteps * 2 * row_blocks * kMatrixBytes;
}

/// Stores a matrix of which lane (r, t) has row r, columns 2t and 2t + 1.
__device__ __forceinline__ void store_matrix(uint8_t* to, uint32_t x, int lane) {
  *reinterpret_cast<uint32_t*>(to + lane * 4) = x;
}

/// The B operands of a step of 16 columns, for mma.
template <int kRowBlocks>
__device__ __forceinline__ void load_operands(const uint8_t* operands, int step, int lane,
                                              uint32_t (&b)[kRowBlocks][2]) {
  static_assert(kRowBlocks % 2 == 0);
  const uint8_t* const at = operands + step * 2 * kRowBlocks * kMatrixBytes + lane * 16;
#pragma unroll
  for (int first = 0; first < 2 * kRowBlocks; first += 4) {
    uint32_t w[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(shared_address(at + first * kMatrixBytes))
                 : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i) b[(first + i) % kRowBlocks][(first + i) / kRowBlocks] = w[i];
  }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Stores four matrices, transposed, one after the other.
__device__ __forceinline__ void store_transposed(uint8_t* to, const uint32_t (&x)[4], int lane) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(to + lane * 16)),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

/// d[64 x 8 * kRowBlocks] = a[64 x 16] * b (+ d), of a warpgroup. Asynchronous.
template <bool kAdd, int kRowBlocks>
__device__ __forceinline__ void wgmma(float (&d)[kRowBlocks][4], const uint32_t (&a)[4],
                                      uint64_t b) {
#define KVARN_D(d, i) d(i, 0), d(i, 1), d(i, 2), d(i, 3)
#define KVARN_SET(i, j) "=f"(d[i][j])
#define KVARN_ADD(i, j) "+f"(d[i][j])
#define KVARN_32(access)                                                               \
  asm volatile(                                                                        \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "                            \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "       \
      "{%16, %17, %18, %19}, %20, %21, 1, 1, 0;"                                       \
      : KVARN_D(access, 0), KVARN_D(access, 1), KVARN_D(access, 2), KVARN_D(access, 3) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0))
#define KVARN_64(access)                                                                  \
  asm volatile(                                                                           \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "                               \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
      "{%32, %33, %34, %35}, %36, %37, 1, 1, 0;"                                          \
      : KVARN_D(access, 0), KVARN_D(access, 1), KVARN_D(access, 2), KVARN_D(access, 3),   \
        KVARN_D(access, 4), KVARN_D(access, 5), KVARN_D(access, 6), KVARN_D(access, 7)    \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0))
  static_assert(kRowBlocks == 4 || kRowBlocks == 8);
  if constexpr (kRowBlocks == 4) {
    if constexpr (kAdd) {
      KVARN_32(KVARN_ADD);
    } else {
      KVARN_32(KVARN_SET);
    }
  } else {
    if constexpr (kAdd) {
      KVARN_64(KVARN_ADD);
    } else {
      KVARN_64(KVARN_SET);
    }
  }
#undef KVARN_64
#undef KVARN_32
#undef KVARN_ADD
#undef KVARN_SET
#undef KVARN_D
}

/// Before the first of some wgmma; behind their last; until at most kPending such groups are
/// under way.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps what makes these registers in front of a fence, and what uses them behind a wait.
template <class T>
__device__ __forceinline__ void pin(T& x) {
  if constexpr (sizeof(T) != 4) {
#pragma unroll
    for (auto& part : x) pin(part);
  } else if constexpr (std::is_same_v<T, float>) {
    asm volatile("" : "+f"(x)::"memory");
  } else {
    asm volatile("" : "+r"(x)::"memory");
  }
}

/// The descriptor of the B operand of step 0: no swizzle; 8 columns of A on, 8 rows on.
template <int kRowBlocks>
__device__ __forceinline__ uint64_t operand_descriptor(const uint8_t* operands) {
  constexpr uint64_t kColumns = kRowBlocks * kMatrixBytes / 16;
  constexpr uint64_t kRows = kMatrixBytes / 16;
  return (shared_address(operands) >> 4 & 0x3fffu) | kColumns << 16 | kRows << 32;
}
/// What a step adds to it.
template <int kRowBlocks>
inline constexpr uint64_t kStepDescriptor = 2 * kRowBlocks * kMatrixBytes / 16;

/// A is (code + zero point) / 512, and of K times a scale. (In fp16 the sum is exact, unless it is
/// beyond the next power of two; scale * zero point would be rounded, alike for all tokens.)
inline constexpr float kGroupUnit = 512.f;
inline constexpr uint32_t kGroupUnitHalf = 0x18001800u;  ///< its inverse

/// (code + zero point) / 512 of fragment `index` of some words. zero: by half of the columns, times
/// kGroupUnitHalf.
template <int kBits>
__device__ __forceinline__ void group_fragment(const uint32_t* words, int index,
                                               const uint32_t (&zero)[2], uint32_t (&a)[4]) {
  constexpr CodeBits code(kBits);
#pragma unroll
  for (int i = 0; i < kFragmentRegisters; ++i) {
    const uint32_t field = code_field<kBits>(words, index * kFragmentRegisters + i, code.at(i));
    const uint32_t to_unit = 0x00010001u * static_cast<uint32_t>((30 - code.at(i)) << 10);
    a[i] = multiply_add_half2(field, to_unit, zero[i / 2]);
  }
}

/// A of some steps, which are made and multiplied together.
template <int kSteps>
using GroupChunk = uint32_t[kSteps][kGroupTiles][4];

/// Multiplies steps first .. first + kSteps - 1 of both row tiles; step 0 sets d. The products are
/// under way when it returns, a group of wgmma. operands: descriptor of step 0.
template <int kRowBlocks, int kSteps>
__device__ __forceinline__ void group_multiply(uint64_t operands, int first, GroupChunk<kSteps>& a,
                                               float (&d)[kGroupTiles][kRowBlocks][4]) {
  pin(a);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const uint64_t at = operands + static_cast<uint64_t>(first + s) * kStepDescriptor<kRowBlocks>;
#pragma unroll
    for (int m = 0; m < kGroupTiles; ++m) {
      if (first + s == 0) {
        wgmma<false>(d[m], a[s][m], at);
      } else {
        wgmma<true>(d[m], a[s][m], at);
      }
    }
  }
  wgmma_commit();
}

/// What A of the first product is made of: two steps of 16 channels, rows 16 * m + .. of tokens
/// 64m + 8r + 2 * warp + i.
template <int kBits>
struct KeyChunk {
  static_assert(kBits == 4, "two words of two fragments");
  uint4 scales;
  uint4 zero_points;
  uint2 words[kGroupTiles];

  /// Of K, from step `first` on.
  __device__ __forceinline__ void load(const uint8_t* codes, const uint8_t* scales_of_k,
                                       const uint8_t* zero_points_of_k, int first, int warp,
                                       int lane) {
    const int channels = 2 * (16 * first + lane % 4 * 8);
    scales = load_16(scales_of_k + channels);
    zero_points = load_16(zero_points_of_k + channels);
#pragma unroll
    for (int m = 0; m < kGroupTiles; ++m) {
      const int group = 2 * (kGroupWarps * m + warp) + first / kFragmentsAtOnce;
      words[m] = *reinterpret_cast<const uint2*>(
          codes + word_offset(group * kBits + first % kFragmentsAtOnce, lane));
    }
  }

  /// norm: of the normalizer of K.
  __device__ __forceinline__ void make(uint32_t norm, GroupChunk<2>& a) const {
    const uint32_t s[] = {scales.x, scales.y, scales.z, scales.w};
    const uint32_t z[] = {zero_points.x, zero_points.y, zero_points.z, zero_points.w};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t scale[2], zero[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        scale[k] = multiply_half2(s[2 * step + k], norm);
        zero[k] = multiply_half2(z[2 * step + k], kGroupUnitHalf);
      }
#pragma unroll
      for (int m = 0; m < kGroupTiles; ++m) {
        const uint32_t own[] = {words[m].x, words[m].y};
        group_fragment<kBits>(own, step, zero, a[step][m]);
#pragma unroll
        for (int i = 0; i < kFragmentRegisters; ++i) {
          a[step][m][i] = multiply_half2(a[step][m][i], scale[i / 2]);
        }
      }
    }
  }
};

/// The two halves of a word that are not finite as 0.
__device__ __forceinline__ uint32_t finite_halves(uint32_t x) {
  if (!is_finite_half(x)) x &= 0xffff0000u;
  if (!is_finite_half(x >> 16)) x &= 0xffffu;
  return x;
}

/// What A of the second product is made of: two steps of 16 tokens, rows of channels
/// 64 * (warp / 2) + 8r + 4 * (warp % 2) + 2m + i.
template <int kBits>
struct ValueChunk {
  static_assert(kBits == 2, "a word of two fragments");
  uint2 zero_points[2];  ///< of tokens 2t and 2t + 1 of each step
  uint32_t words[2];

  /// Of V, from step `first` on.
  __device__ __forceinline__ void load(const uint8_t* codes, const uint8_t* zero_points_of_v,
                                       int first, int warp, int lane) {
    const uint8_t* const zeros = zero_points_of_v + 2 * (kHalfTokens * (first / kHalfTiles) +
                                                         lane % 4 * 16 + first % kHalfTiles * 2);
    zero_points[0] = *reinterpret_cast<const uint2*>(zeros);
    zero_points[1] = *reinterpret_cast<const uint2*>(zeros + 16);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      words[s] = *reinterpret_cast<const uint32_t*>(
          codes + word_offset((first + s) * kGroupWarps + warp, lane));
    }
  }

  /// kFiniteOnly: zero points that are not finite are 0.
  template <bool kFiniteOnly>
  __device__ __forceinline__ void make(GroupChunk<2>& a) const {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint32_t low = step == 0 ? zero_points[0].x : zero_points[0].y;
      const uint32_t high = step == 0 ? zero_points[1].x : zero_points[1].y;
      uint32_t zero[2] = {__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (kFiniteOnly) zero[i] = finite_halves(zero[i]);
        zero[i] = multiply_half2(zero[i], kGroupUnitHalf);
      }
#pragma unroll
      for (int m = 0; m < kGroupTiles; ++m) {
        group_fragment<kBits>(&words[step], m, zero, a[step][m]);
      }
    }
  }
};

#endif

}  // namespace kvarn::device
