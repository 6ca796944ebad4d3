// Element types in registers: conversion to and from fp32, and global memory in pieces of up to
// 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kvarn::device {

inline constexpr int kAccessBytes = 16;  ///< the widest load and store of a thread

/// N elements that one load or store moves.
template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  static_assert(sizeof(T) * N <= kAccessBytes && (N & (N - 1)) == 0);
  T element[N];
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/// Rounds to nearest even; what is above the range becomes infinite, NaN stays NaN.
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

/// 1 / x, a / b and sqrt(x) within 2 ulp, of normal numbers and 0; without the branches that the
/// exact ones take for denormal and huge ones.
__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float divide(float a, float b) { return a * inverse(b); }

__device__ __forceinline__ float square_root(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float inverse_square_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 2^x within 2 ulp, exact of an integer; 0 for -infinity.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// log2(x) within 2^-22, of what is not subnormal; exact of a power of two.
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// For bytes that a kernel uses once: pieces of 16 bytes are not kept in L1.
template <class T, int N>
__device__ __forceinline__ Vector<T, N> load_once(const T* p) {
  if constexpr (sizeof(T) * N == kAccessBytes) {
    const uint4 bits = __ldcg(reinterpret_cast<const uint4*>(p));
    return reinterpret_cast<const Vector<T, N>&>(bits);
  } else {
    return *reinterpret_cast<const Vector<T, N>*>(p);
  }
}

template <class T, int N>
__device__ __forceinline__ void store_once(T* p, const Vector<T, N>& v) {
  if constexpr (sizeof(T) * N == kAccessBytes) {
    __stcg(reinterpret_cast<uint4*>(p), reinterpret_cast<const uint4&>(v));
  } else {
    *reinterpret_cast<Vector<T, N>*>(p) = v;
  }
}

/// Two numbers in one register; the first is in the low half.
template <bool kBFloat16>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (kBFloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

/// Two neighbours in one register; the first is in the low half.
template <class T>
__device__ __forceinline__ float2 pair_to_float(uint32_t bits) {
  static_assert(sizeof(T) == 2);
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(reinterpret_cast<const __half2&>(bits));
  } else {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
}

template <class T, int N>
__device__ __forceinline__ void to_float(const Vector<T, N>& in, float* out) {
  if constexpr (sizeof(T) == 2 && N > 1) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 pair = pair_to_float<T>(reinterpret_cast<const uint32_t*>(in.element)[i / 2]);
      out[i] = pair.x;
      out[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(in.element[i]);
  }
}

/// in[i] * scale, rounded once.
template <class T, int N>
__device__ __forceinline__ Vector<T, N> from_float(const float* in, float scale) {
  Vector<T, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.element[i] = from_float<T>(in[i] * scale);
  return out;
}

}  // namespace kvarn::device
