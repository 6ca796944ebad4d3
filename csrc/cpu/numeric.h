// fp16, bf16 and fp32 numbers in memory <-> fp32 numbers in registers.
//
// Part of every kernel family: include it only where code is compiled once per instruction set
// (isa.h). Like the headers of the families it keeps what it defines to the translation unit, so
// that the linker never takes a copy made for another instruction set.
#pragma once

#ifndef KVARN_ISA
#error "define KVARN_ISA: numeric.h is compiled once per instruction set (isa.h)"
#endif

#include <cstdint>

#include "kvarn/ops.h"

#if defined(KVARN_ISA_AVX2)
#include <immintrin.h>
#endif

namespace kvarn::cpu::KVARN_ISA {
namespace {

inline uint32_t float_bits(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
}

inline float bits_float(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
}

/// condition ? a : b without a branch, so that loops of it vectorize.
inline uint32_t choose(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

inline float half_to_float(uint16_t h) {
#if defined(KVARN_ISA_AVX2)
  return _cvtsh_ss(h);
#else
  constexpr uint32_t kRebias = (127 - 15) << 23;
  const uint32_t magnitude = h & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + kRebias + choose(magnitude >= 0x7c00u, kRebias, 0);
  const uint32_t subnormal =
      float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return bits_float(choose(magnitude < 0x0400u, subnormal, normal) |
                    static_cast<uint32_t>(h & 0x8000u) << 16);
#endif
}

/// Rounds to nearest even; beyond 65504 + half a unit infinity; NaN stays NaN.
inline uint16_t float_to_half(float x) {
#if defined(KVARN_ISA_AVX2)
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  constexpr uint32_t kRebias = (127 - 15) << 23;
  const uint32_t u = float_bits(x);
  const uint32_t magnitude = u & 0x7fffffffu;
  // A sum with 0.5 has units of 2^-24, those of a subnormal half: the addition rounds.
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
  const uint32_t normal = (magnitude - kRebias + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  uint32_t h = choose(magnitude < 0x38800000u, subnormal, normal);
  h = choose(magnitude >= 0x477ff000u, 0x7c00u, h);
  h = choose(magnitude > 0x7f800000u, 0x7e00u | (magnitude >> 13 & 0x3ffu), h);
  return static_cast<uint16_t>(h | (u >> 16 & 0x8000u));
#endif
}

inline float bfloat16_to_float(uint16_t b) { return bits_float(static_cast<uint32_t>(b) << 16); }

/// Rounds to nearest even; NaN stays NaN.
inline uint16_t float_to_bfloat16(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  const uint32_t quiet_nan = u >> 16 | 0x40u;
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

inline void load_halves(const uint16_t* in, float* out, int n) {
  int i = 0;
#if defined(KVARN_ISA_AVX512)
  for (; i + 16 <= n; i += 16) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(h));
  }
#elif defined(KVARN_ISA_AVX2)
  for (; i + 8 <= n; i += 8) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(h));
  }
#endif
#pragma omp simd
  for (int k = i; k < n; ++k) out[k] = half_to_float(in[k]);
}

inline void store_halves(const float* in, uint16_t* out, int n) {
  int i = 0;
#if defined(KVARN_ISA_AVX512)
  for (; i + 16 <= n; i += 16) {
    const __m256i h =
        _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), h);
  }
#elif defined(KVARN_ISA_AVX2)
  for (; i + 8 <= n; i += 8) {
    const __m128i h =
        _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), h);
  }
#endif
#pragma omp simd
  for (int k = i; k < n; ++k) out[k] = float_to_half(in[k]);
}

inline void load_bfloat16s(const uint16_t* in, float* out, int n) {
#pragma omp simd
  for (int i = 0; i < n; ++i) out[i] = bfloat16_to_float(in[i]);
}

inline void store_bfloat16s(const float* in, uint16_t* out, int n) {
#pragma omp simd
  for (int i = 0; i < n; ++i) out[i] = float_to_bfloat16(in[i]);
}

/// out[i] = base[element_offset + i], i < n.
inline void load_row(const void* base, DType dtype, int64_t element_offset, float* out, int n) {
  switch (dtype) {
    case DType::kFloat16:
      return load_halves(static_cast<const uint16_t*>(base) + element_offset, out, n);
    case DType::kBFloat16:
      return load_bfloat16s(static_cast<const uint16_t*>(base) + element_offset, out, n);
    case DType::kFloat32:
      __builtin_memcpy(out, static_cast<const float*>(base) + element_offset,
                       static_cast<uint64_t>(n) * sizeof(float));
  }
}

/// base[element_offset + i] = in[i], i < n, rounded to nearest even.
inline void store_row(const float* in, void* base, DType dtype, int64_t element_offset, int n) {
  switch (dtype) {
    case DType::kFloat16:
      return store_halves(in, static_cast<uint16_t*>(base) + element_offset, n);
    case DType::kBFloat16:
      return store_bfloat16s(in, static_cast<uint16_t*>(base) + element_offset, n);
    case DType::kFloat32:
      __builtin_memcpy(static_cast<float*>(base) + element_offset, in,
                       static_cast<uint64_t>(n) * sizeof(float));
  }
}

}  // namespace
}  // namespace kvarn::cpu::KVARN_ISA
