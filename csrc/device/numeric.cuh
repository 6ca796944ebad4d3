// Element types in registers: conversion to and from fp32, and global memory in pieces of up to
// 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

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
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
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

template <class T, int N>
__device__ __forceinline__ void to_float(const Vector<T, N>& in, float* out) {
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = to_float(in.element[i]);
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
