// exp and tanh of vectors, to about 1e-7 relative; NaN stays NaN.
#pragma once

#include "cpu/attention_simd.h"

namespace kvarn::cpu::KVARN_ISA {
namespace {

/// 0 below -87 (where the result would leave the normal range). Reduction and polynomial of Cephes'
/// expf.
template <class V>
inline V exp(V x) {
  using Word = typename Vectors<kLanesOf<V>>::Word;
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const V low = splat<V>(-87.f);
  const V high = splat<V>(88.f);
  V y = x < low ? low : x;
  y = y > high ? high : y;
  const V shifted = fma(y, splat<V>(1.44269504088896341f), splat<V>(kRound));
  const V n = shifted - kRound;
  V r = fma(n, splat<V>(-0.693359375f), y);
  r = fma(n, splat<V>(2.12194440e-4f), r);
  V p = splat<V>(1.9875691500e-4f);
  p = fma(p, r, splat<V>(1.3981999507e-3f));
  p = fma(p, r, splat<V>(8.3334519073e-3f));
  p = fma(p, r, splat<V>(4.1665795894e-2f));
  p = fma(p, r, splat<V>(1.6666665459e-1f));
  p = fma(p, r, splat<V>(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.f);
  // The low bits of `shifted` are n (of a NaN anything, but then p is NaN too).
  const Word exponent = ((Word)shifted + 127u) << 23;
  const V scaled = p * (V)exponent;
  return x < low ? V{} : scaled;
}

/// The polynomial of Cephes' tanhf below 0.625, exp beyond.
template <class V>
inline V tanh(V x) {
  const V magnitude = x < V{} ? -x : x;
  const V z = x * x;
  V p = splat<V>(-5.70498872745e-3f);
  p = fma(p, z, splat<V>(2.06390887954e-2f));
  p = fma(p, z, splat<V>(-5.37397155531e-2f));
  p = fma(p, z, splat<V>(1.33314422036e-1f));
  p = fma(p, z, splat<V>(-3.33332819422e-1f));
  const V small = fma(p * z, x, x);
  const V large = 1.f - 2.f / (exp(magnitude + magnitude) + 1.f);
  return magnitude < splat<V>(0.625f) ? small : x < V{} ? -large : large;
}

}  // namespace
}  // namespace kvarn::cpu::KVARN_ISA
