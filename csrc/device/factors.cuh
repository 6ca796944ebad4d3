// How the scales of the normalization move (KVarN, arXiv 2606.03458), as factors: adding a
// logarithm is multiplying, the clips are the same.
#pragma once

namespace kvarn::device {

inline constexpr float kMinFactor = 0.74081822f;  // exp(-0.3)
inline constexpr float kMaxFactor = 22026.466f;   // exp(10)
/// Imbalances that differ by less are equal: a later round is taken, whatever the rounding errors.
inline constexpr float kEqual = 1.000001f;

/// lo for NaN.
__device__ __forceinline__ float clip(float x, float lo, float hi) {
  return fminf(fmaxf(x, lo), hi);
}

/// The scale after a round that saw this deviation.
__device__ __forceinline__ float next_scale(float scale, float deviation) {
  return clip(scale * clip(deviation, 1e-3f, 1e3f), kMinFactor, kMaxFactor);
}

}  // namespace kvarn::device
