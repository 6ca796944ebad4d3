// Products of the codes of a tile with factors, straight from the packed words (attention_plan.h).
//
// Codes are taken as signed numbers, centred: code - 2^(bits-1), which belongs to the zero point
// then. Sums stay small that way, and with them their rounding errors.
#pragma once

#include "cpu/attention_plan.h"
#include "cpu/attention_simd.h"

namespace kvarn::cpu::KVARN_ISA {
namespace {

/// Rows whose sums fit in registers beside the codes: two vectors of sums each.
inline constexpr int kRowBlock = kRegisters / 4;

constexpr float code_center(int bits) { return static_cast<float>(1 << (bits - 1)); }

/// Brings the codes of a tile into the order of the plan.
inline void transpose_codes(const uint8_t* codes, const CodePlan& plan, uint32_t* out) {
  constexpr int kRowWords = 4 * kLaneBytes / 4;  // four lanes
  for (int chunk = 0; chunk < plan.words / 4; ++chunk) {
    for (int half = 0; half < 2; ++half) {
      void* to[8];
      for (int i = 0; i < 8; ++i) {
        to[i] = out + plan.word_to[4 * chunk + i % 4] + (2 * half + i / 4) * plan.lane_step;
      }
      transpose8(codes + chunk * kChunkBytes + half * 32, kRowWords, to);
    }
  }
}

/// The codes of the unit whose words are given.
template <int kBits, class V>
class Codes {
  using Word = typename Vectors<kLanesOf<V>>::Word;
  using Int = typename Vectors<kLanesOf<V>>::Int;

 public:
  explicit Codes(const uint32_t* words, int64_t stride) {
    for (int i = 0; i < unit_words(kBits); ++i) words_[i] = load<Word>(words + i * stride);
  }

  /// Half `hi` of half2 number `index`.
  inline __attribute__((always_inline)) V get(int index, int hi) const {
    const FieldPosition at = field_position(index, kBits);
    if (kBits == 3 && at.shift == 15) {
      const Word spread = (words_[0] >> 15 & 0x00010001u) | (words_[1] >> 14 & 0x00020002u) |
                          (words_[2] >> 13 & 0x00040004u);
      return decode(spread, 16 * hi);
    }
    return decode(words_[at.word], at.shift + 16 * hi);
  }

 private:
  static inline __attribute__((always_inline)) V decode(Word w, int shift) {
#if defined(KVARN_ISA_AVX512)
    if constexpr (kBits <= 4 && sizeof(V) == 64) {
      return (V)_mm512_permutexvar_ps((__m512i)(w >> shift), (__m512)table());
    }
#endif
#if defined(KVARN_ISA_AVX2)
    if constexpr (kBits <= 3 && sizeof(V) == 32) {
      return (V)_mm256_permutevar8x32_ps((__m256)table(), (__m256i)(w >> shift));
    }
#endif
    // Flipping its top bit makes a field a signed number; the right shift spreads the sign.
    const Int field = (Int)((w ^ kTopBits) << (32 - kBits - shift));
    return __builtin_convertvector(field >> (32 - kBits), V);
  }

  /// Entry i is the code in the low bits of i: the higher ones need not be masked.
  static V table() {
    float t[kLanesOf<V>];
    for (int i = 0; i < kLanesOf<V>; ++i) {
      t[i] = static_cast<float>(i % (1 << kBits)) - code_center(kBits);
    }
    return load<V>(t);
  }

  static constexpr uint32_t kTopBits = kBits == 8   ? 0x80808080u
                                       : kBits == 4 ? 0x88888888u
                                       : kBits == 3 ? 0x49244924u
                                                    : 0xaaaaaaaau;

  Word words_[unit_words(kBits)];
};

/// Sums of one pass: sums[i][row] is a vector over the lanes; i the token (K) or channel (V) of the
/// pair that the fragments kFirst .. kLast - 1 of the units stand for.
/// factor(row, n) are the 4 factors at `factors + row * row_stride + plan.factor[n]`, the second
/// pair of them `pair_stride` behind the first.
template <int kBits, int kFirst, int kLast, int kRows, class V>
inline void multiply_codes(const CodePlan& plan, const uint32_t* words, const float* factors,
                           int64_t row_stride, int pair_stride, V (&sums)[2][kRows]) {
  // With few rows, more sums than these are kept, for the latency of the additions.
  constexpr int kSets = kRows >= 4 ? 1 : kRows >= 2 ? 2 : 4;
  V sets[kSets][2][kRows] = {};
  const int64_t unit = static_cast<int64_t>(unit_words(kBits)) * plan.lanes;
  for (int step = 0; step < plan.steps; ++step) {
    const Codes<kBits, V> codes(words + step * unit, plan.lanes);
#pragma GCC unroll 4
    for (int f = kFirst; f < kLast; ++f) {
      const float* const first = factors + plan.factor[step * unit_fragments(kBits) + f];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const V a = codes.get(4 * f + i / 2 * 2, i % 2);
        const V b = codes.get(4 * f + i / 2 * 2 + 1, i % 2);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const V factor = splat<V>(first[row * row_stride + i / 2 * pair_stride + i % 2]);
          sets[i % kSets][0][row] = fma(a, factor, sets[i % kSets][0][row]);
          sets[i % kSets][1][row] = fma(b, factor, sets[i % kSets][1][row]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < 2; ++i) {
      sums[i][row] = sets[0][i][row];
      for (int s = 1; s < kSets; ++s) sums[i][row] += sets[s][i][row];
    }
  }
}

}  // namespace
}  // namespace kvarn::cpu::KVARN_ISA
