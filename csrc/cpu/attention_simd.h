// Vectors of floats and of 32-bit words: GCC's and Clang's vector types, with the few instructions
// that those do not express.
#pragma once

#include "cpu/numeric.h"

namespace kvarn::cpu::KVARN_ISA {
namespace {

template <int kLanes>
struct Vectors;

#define KVARN_VECTORS(lanes)                                       \
  template <>                                                      \
  struct Vectors<lanes> {                                          \
    typedef float Float __attribute__((vector_size(4 * lanes)));   \
    typedef int32_t Int __attribute__((vector_size(4 * lanes)));   \
    typedef uint32_t Word __attribute__((vector_size(4 * lanes))); \
  }
KVARN_VECTORS(4);
KVARN_VECTORS(8);
KVARN_VECTORS(16);
#undef KVARN_VECTORS

#if defined(KVARN_ISA_AVX512)
inline constexpr int kLanes = 16;
inline constexpr int kRegisters = 32;
#elif defined(KVARN_ISA_AVX2)
inline constexpr int kLanes = 8;
inline constexpr int kRegisters = 16;
#else
inline constexpr int kLanes = 4;
inline constexpr int kRegisters = 16;
#endif

using Float = Vectors<kLanes>::Float;
using Int = Vectors<kLanes>::Int;

template <class V>
inline constexpr int kLanesOf = static_cast<int>(sizeof(V) / 4);

template <class V, class T>
inline V load(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class V, class T>
inline void store(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

/// x - 0 is x for every x, -0 and NaN included.
template <class V>
inline V splat(float x) {
  return x - V{};
}

template <class V>
inline V fma(V a, V b, V c) {
#if defined(KVARN_ISA_AVX512)
  if constexpr (sizeof(V) == 64) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(KVARN_ISA_AVX2)
  if constexpr (sizeof(V) == 32) return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
  return a * b + c;
}

template <class V>
inline float sum(V v) {
  float a[kLanesOf<V>];
  store(a, v);
  for (int n = kLanesOf<V> / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) a[i] += a[i + n];
  }
  return a[0];
}

/// Of the lanes that are not NaN.
template <class V>
inline float max(V v) {
  float a[kLanesOf<V>];
  store(a, v);
  for (int n = kLanesOf<V> / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) a[i] = a[i + n] > a[i] ? a[i + n] : a[i];
  }
  return a[0];
}

/// 8 rows of 8 words, `stride` words apart -> row j at out[j], lane i of it from row i.
inline void transpose8(const void* in, int64_t stride, void* const (&out)[8]) {
#if defined(KVARN_ISA_AVX2)
  const float* const p = static_cast<const float*>(in);
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(p + i * stride);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(static_cast<float*>(out[i]), _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(static_cast<float*>(out[i + 4]), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
#else
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) {
      __builtin_memcpy(static_cast<uint8_t*>(out[j]) + 4 * i,
                       static_cast<const uint8_t*>(in) + 4 * (i * stride + j), 4);
    }
  }
#endif
}

}  // namespace
}  // namespace kvarn::cpu::KVARN_ISA
