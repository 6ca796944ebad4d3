// Attention of a warp's rows over a record, or over 16 staged tokens, in shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/decode_feeder.cuh"
#include "cuda/decode_rows.cuh"
#include "device/rotate_query.cuh"

namespace kvarn::cuda {

/// The first of the lane's two tokens of a tile of 16.
__device__ __forceinline__ int token_of(int tile, int lane) {
  using device::kHalfTiles;
  return tile / kHalfTiles * device::kHalfTokens + lane / 4 * 8 + tile % kHalfTiles * 2;
}

/// Logits beyond it are rounded as the references are before these are subtracted: products that
/// are not rounded differ from those by up to 2^-24 of them, so that from 2^24 on probabilities
/// could be beyond fp16.
inline constexpr float kLargeLogit = 1 << 22;

/// Scores [block][j][2*i + parity] of the tokens i of tiles j -> probabilities relative to
/// state.top, whose sum is added to the state. unit: of the scores. kPlain: no soft cap, and all
/// rows see all tokens.
template <bool kPlain, int kDim, int kBlocks, int kRowTiles>
__device__ __forceinline__ void probabilities(const WarpRows<kBlocks>& rows,
                                              const RowsVisible<kBlocks>& visible, float unit,
                                              float soft_cap, int first_token, int lane,
                                              float (&scores)[kBlocks][kRowTiles][4],
                                              device::SoftmaxState<kDim, kBlocks>& state) {
  constexpr float kGrowth = 8.f;  // of the sum's reference, so that few tiles change it
  float scale[kBlocks][2];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    scale[b][0] = rows.scale[b][0] * unit;
    scale[b][1] = rows.scale[b][1] * unit;
  }
  if (!kPlain && soft_cap != 0.f) {
    const float to_cap = 2.f / soft_cap;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& s = scores[b][j][i];
          s = soft_capped(s * scale[b][i % 2], soft_cap, to_cap);
        }
      }
      scale[b][0] = scale[b][1] = 1.f;
    }
  }
  if constexpr (!kPlain) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = first_token + token_of(j, lane) + i / 2;
          const Visible& seen = visible.row[b][i % 2];
          if (token < seen.begin || token >= seen.end)
            scores[b][j][i] = device::negative_infinity();
        }
      }
    }
  }
  float most[kBlocks][2];
  bool grow = false;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = fmaxf(scores[b][0][i], scores[b][0][2 + i]);
#pragma unroll
      for (int j = 1; j < kRowTiles; ++j) {
        m = fmaxf(m, fmaxf(scores[b][j][i], scores[b][j][2 + i]));
      }
      most[b][i] = m * scale[b][i];
      grow |= most[b][i] > state.top[b][i] + kGrowth || fabsf(most[b][i]) > kLargeLogit;
    }
  }
  if (__any_sync(device::kAllLanes, grow)) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Each row for itself: which rows share a warp must not show in the result.
        const float m = device::max_over_tokens(most[b][i]);
        if (m > state.top[b][i] + kGrowth) {
          state.scale_row(b, i, device::exp2_fast(state.top[b][i] - m));
          state.top[b][i] = m;
        }
        if (fabsf(m) > kLargeLogit) {
#pragma unroll
          for (int j = 0; j < kRowTiles; ++j) {
            // Not to be fused with what comes next.
            scores[b][j][i] = __fmul_rn(scores[b][j][i], scale[b][i]);
            scores[b][j][2 + i] = __fmul_rn(scores[b][j][2 + i], scale[b][i]);
          }
          scale[b][i] = 1.f;
        }
      }
    }
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float top = state.top[b][i];
      const float reference = top == device::negative_infinity() ? 0.f : top;
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
          float& s = scores[b][j][k + i];
          s = device::exp2_fast(fmaf(s, scale[b][i], -reference));
          sum += s;
        }
      }
      state.sum[b][i] += sum;
    }
  }
}

/// weight(j, i): of token i of tile j. What a row does not see is 0 whatever its weight.
template <bool kPlain, bool kBFloat16, int kBlocks, int kRowTiles, class Weight>
__device__ __forceinline__ void pack_probabilities(
    const float (&p)[kBlocks][kRowTiles][4], const RowsVisible<kBlocks>& visible, int first_token,
    int lane, const Weight& weight, device::ProbabilityOperand<kRowTiles, kBlocks>& to) {
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float w = weight(j, i);
      const int token = first_token + token_of(j, lane) + i;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        float pair[2] = {p[b][j][2 * i] * w, p[b][j][2 * i + 1] * w};
        if constexpr (!kPlain) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const Visible& seen = visible.row[b][k];
            if (token < seen.begin || token >= seen.end) pair[k] = 0.f;
          }
        }
        to.b[b][j][i] = device::transpose_8x8(device::pack_pair<kBFloat16>(pair[0], pair[1]));
      }
    }
  }
}

/// Whether copying leaves registers for runs beside a large state, and for rings of one record:
/// sm_80's takes more.
#if __CUDA_ARCH__ >= 900
inline constexpr bool kCopiesAreSmall = true;
#else
inline constexpr bool kCopiesAreSmall = false;
#endif

/// A format that the compiler knows, in the usual case (is_usual()) or any. Else told of it: how
/// many tiles of 16 tokens are computed at once (kRowTiles: all of a record, unless D = 256), how
/// many of 16 channels are summed up at once, and whether there are registers for the next query
/// while one is worked on (kQueryAhead) and for runs of tiles that are like each other (kRuns).
/// kOneRecord: see Feeder.
template <int kKeyBits, int kValueBits, int kGroup, int kDim, bool kIsUsual,
          bool kHasOneRecord = false>
struct StaticFormat {
  static constexpr int kDim_ = kDim;
  static constexpr bool kOneRecord = kHasOneRecord;
  static constexpr bool kSplits = false;
  static constexpr int kRowTiles = (kDim < 256 ? kGroup : device::kHalfTokens) / kFragmentDim;
  // Chains of mma that run side by side; with D = 256 more would not fit the registers.
  static constexpr int kScoreTiles = kDim == 256 ? 2 : kRowTiles;
  static constexpr int kSumTiles = kDim < 256 ? kDim / kFragmentDim : device::kHalfTiles;
  static constexpr bool kQueryAhead = kDim < 256 && !kOneRecord;
  static constexpr bool kRuns = true;
  static constexpr bool kUsual = kIsUsual;
  static constexpr int kWarps =
      decode_warps({kKeyBits, kValueBits, kGroup, kDim}, kIsUsual, kHasOneRecord);
  static constexpr Format kFormat{kKeyBits, kValueBits, kGroup, kDim};
  static_assert(!kOneRecord || staged_part_fits(kFormat),
                "staged keys lie where those of a record do, and values likewise");

  __device__ __forceinline__ static constexpr Format format(const DecodeParams&) { return kFormat; }
  __device__ __forceinline__ static constexpr RecordLayout layout(const DecodePlan&) {
    return record_layout(kFormat);
  }
  __device__ __forceinline__ static constexpr int stage_bytes(const DecodePlan&) {
    return decode_stage_bytes(kFormat);
  }
};

/// Calls fn with bits as a std::integral_constant.
template <class Fn>
__device__ __forceinline__ void with_bits(int bits, const Fn& fn) {
  switch (bits) {
    case 2:
      return fn(std::integral_constant<int, 2>());
    case 3:
      return fn(std::integral_constant<int, 3>());
    case 4:
      return fn(std::integral_constant<int, 4>());
    case 8:
      return fn(std::integral_constant<int, 8>());
  }
}

/// Any format: half a record at once.
template <int kDim>
struct AnyFormat {
  static constexpr int kDim_ = kDim;
  static constexpr bool kOneRecord = false;
  static constexpr bool kSplits = false;  // in the usual case
  static constexpr int kRowTiles = device::kHalfTiles;
  static constexpr int kScoreTiles = kDim == 256 ? 2 : kRowTiles;
  static constexpr int kSumTiles = device::kHalfTiles;
  static constexpr bool kQueryAhead = false;
  static constexpr bool kRuns = kDim < 256;
  static constexpr bool kUsual = false;
  static constexpr int kWarps = decode_warps({}, false, false);

  __device__ __forceinline__ static Format format(const DecodeParams& p) { return p.kv.format; }
  __device__ __forceinline__ static RecordLayout layout(const DecodePlan& plan) {
    return plan.layout;
  }
  __device__ __forceinline__ static int stage_bytes(const DecodePlan& plan) {
    return plan.stage_bytes;
  }
};

/// The usual case with splits. What else is in the batch decides whether it is one, and must not
/// show in the result: so as many tokens at once as in the other kernels of the format.
template <class F>
struct WithSplits : F {
  static constexpr bool kSplits = true;
  static constexpr int kRowTiles =
      decode_options_are_static(F::kFormat) ? F::kRowTiles : AnyFormat<F::kDim_>::kRowTiles;
};

/// Attention over one tile by one warp.
template <class F, int kBlocks>
struct TileWorker {
  static constexpr int kDim = F::kDim_;
  // With two blocks of rows the registers hold half as much of everything else; or, with a ring of
  // one record, all of a record, but not what lies in shared memory then (Memory).
  static constexpr bool kHasMemory = kBlocks == 2 && F::kOneRecord;
  static constexpr bool kHalves = kBlocks == 2 && !kHasMemory;
  static constexpr int kRowTiles = kHalves ? device::kHalfTiles : F::kRowTiles;
  static constexpr int kMostScoreTiles = kHasMemory ? 2 : F::kScoreTiles;
  static constexpr int kScoreTiles = kMostScoreTiles < kRowTiles ? kMostScoreTiles : kRowTiles;
  static constexpr int kSumTiles = kHalves ? device::kHalfTiles : F::kSumTiles;
  using Query = device::QueryOperand<kDim, kBlocks>;
  using State = device::SoftmaxState<kDim, kBlocks>;
  using Scores = float[kBlocks][kRowTiles][4];
  using Probabilities = device::ProbabilityOperand<kRowTiles, kBlocks>;

  const DecodeParams& p;
  const DecodePlan& plan;
  const int lane;
  WarpRows<kBlocks> rows;
  Query own_query;
  State state;
  /// The basis of the query and the state, that of records or that of staged tokens. The query is
  /// of fp16 or of the type of the staging pool.
  bool rotated;

  struct Memory {
    uint4 query[kBlocks * kDim / 32][kWarpLanes];
    VisibleRange seen;
    ParkedFeeder feeder;
  };
  static_assert(!kHasMemory || sizeof(Memory) <= kTwoBlocksBytes);
  Memory* memory;  ///< of the warp, with kHasMemory

  __device__ __forceinline__ VisibleRange seen() const {
    if constexpr (kHasMemory) {
      return memory->seen;
    } else {
      return rows.seen;
    }
  }

  __device__ __forceinline__ Query query() const {
    if constexpr (kHasMemory) {
      Query q;
#pragma unroll
      for (int i = 0; i < kBlocks * kDim / 32; ++i) {
        const uint4 w = memory->query[i][lane];
        uint32_t (&to)[4] = q.b[i / (kDim / 32)][i % (kDim / 32)];
        to[0] = w.x;
        to[1] = w.y;
        to[2] = w.z;
        to[3] = w.w;
      }
      return q;
    } else {
      return own_query;
    }
  }

  /// A new item.
  __device__ __forceinline__ void open(const RowPlace& place) {
    open_item(p, plan, place, rows);
    if constexpr (kHasMemory) {
      __syncwarp();
      if (lane == 0) memory->seen = rows.seen;
      __syncwarp();
    }
    state.clear();
  }

  /// Whether any row sees any of so many tokens.
  __device__ __forceinline__ bool sees(int first_token, int count) const {
    return first_token < seen().any.end && first_token + count > seen().any.begin;
  }

  /// Whether all rows see all of them, and nothing bends the scores.
  __device__ __forceinline__ bool all_see(int first_token, int count) const {
    return first_token >= seen().all.begin && first_token + count <= seen().all.end &&
           p.logits_soft_cap == 0.f;
  }

  /// 16-bit scales of the tokens of a record.
  __device__ __forceinline__ void load_token_scales(
      const uint8_t* at, float (&scale)[kRowTiles / device::kHalfTiles][8]) const {
#pragma unroll
    for (int i = 0; i < kRowTiles / device::kHalfTiles; ++i) {
      device::unpack_half8(device::load_16(at + 2 * (i * device::kHalfTokens + lane / 4 * 8)),
                           scale[i]);
    }
  }

  /// Probabilities times the token scales of V; where the sums start. at: the record; token: the
  /// first of those that are computed at once.
  template <bool kPlain>
  __device__ __forceinline__ void weigh(const uint8_t* at, const RowsVisible<kBlocks>& visible,
                                        int first_token, int token, float unit, Scores& scores,
                                        device::Normalizer& norm, Probabilities& operand,
                                        float (&start)[kBlocks][4]) {
    const RecordLayout layout = F::layout(plan);
    const Format format = F::format(p);
    constexpr int kCount = kRowTiles / device::kHalfTiles;
    probabilities<kPlain>(rows, visible, unit, p.logits_soft_cap, first_token + token, lane, scores,
                          state);
    if (token == 0) {
      const Visible any = seen().any;
      norm = device::normalizer(device::largest_half(
          at + layout.value_token_scale, format.group, lane, [&](int pair, uint32_t bits) {
            if constexpr (!kPlain) {
              // Scales of tokens that nobody sees may be anything.
              const int t = first_token + 2 * pair;
              if (t < any.begin || t >= any.end || !device::is_finite_half(bits)) {
                bits &= 0xffff0000u;
              }
              if (t + 1 < any.begin || t + 1 >= any.end || !device::is_finite_half(bits >> 16)) {
                bits &= 0xffffu;
              }
            }
            return bits;
          }));
    }
    float weight[kCount][8];
    load_token_scales(at + layout.value_token_scale + 2 * token, weight);
    if constexpr (!kPlain) {
      // A zero point that is not finite must not meet the 0 of a row that does not see it: such
      // tokens make their rows NaN through the weight alone.
      float zero[kCount][8];
      load_token_scales(at + layout.value_zero_point + 2 * token, zero);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int k = 0; k < 8; ++k) weight[i][k] += zero[i][k] - zero[i][k];
      }
    }
    const device::CodeBits code(format.value_bits);
    const float factor[] = {norm.factor, norm.factor * code.column_factor()};
    pack_probabilities<kPlain, false>(
        scores, visible, first_token + token, lane,
        [&](int j, int i) {
          return weight[j / device::kHalfTiles][j % device::kHalfTiles * 2 + i] * factor[i];
        },
        operand);
    device::start_sums<!kPlain>(at + layout.value_zero_point + 2 * token, operand,
                                format.value_bits, lane, start);
  }

  /// A record in shared memory; place(): a RowPlace. plain: all_see(). have_used_keys() is called
  /// once its keys have been read, want_values() before its values are.
  template <class Place, class HaveUsedKeys, class WantValues>
  __device__ __forceinline__ void record(const Place& place, const uint8_t* at, int first_token,
                                         bool plain, const HaveUsedKeys& have_used_keys,
                                         const WantValues& want_values) {
    constexpr int kTokens = kRowTiles * kFragmentDim;
    device::ScaledQuery<kDim, kBlocks> scaled;
    device::Normalizer norm;
#pragma unroll 1
    for (int token = 0; token < F::format(p).group; token += kTokens) {
      Scores scores;
      const float unit = record_scores(at, token, scaled, scores);
      if (token + kTokens == F::format(p).group) have_used_keys();
      if (token == 0) want_values();
      record_sums(place, at, first_token, token, plain, unit, scores, norm);
    }
  }

  /// Scores of the tokens from `token` on, which the keys of the record make; returns their unit.
  __device__ __forceinline__ float record_scores(const uint8_t* at, int token,
                                                 device::ScaledQuery<kDim, kBlocks>& scaled,
                                                 Scores& scores) {
    const RecordLayout layout = F::layout(plan);
    const Format format = F::format(p);
    // The scaled query is made anew for each half where both would not fit the registers.
    if (kDim == 256 || kHalves || token == 0) {
      device::scale_query(query(), at + layout.key_channel_scale, at + layout.key_zero_point,
                          format.key_bits, lane, scaled);
    }
    with_bits(format.key_bits, [&](auto bits) {
      constexpr int kBits = decltype(bits)::value;
      device::score_tiles<kBits, kScoreTiles>(at + token * (kDim * kBits / 8), scaled, lane,
                                              scores);
    });
    float scale[kRowTiles / device::kHalfTiles][8];
    load_token_scales(at + layout.key_token_scale + 2 * token, scale);
    const device::CodeBits code(format.key_bits);
#pragma unroll
    for (int i = 0; i < kRowTiles / device::kHalfTiles; ++i) {
#pragma unroll
      for (int k = 1; k < 8; k += 2) scale[i][k] *= code.row_factor(1) / code.row_factor(0);
    }
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          scores[b][j][i] *= scale[j / device::kHalfTiles][j % device::kHalfTiles * 2 + i / 2];
        }
      }
    }
    return scaled.inverse * code.row_factor(0);
  }

  /// The rest, for which its values are needed.
  template <class Place>
  __device__ __forceinline__ void record_sums(const Place& place, const uint8_t* at,
                                              int first_token, int token, bool plain, float unit,
                                              Scores& scores, device::Normalizer& norm) {
    const RecordLayout layout = F::layout(plan);
    Probabilities operand;
    float start[kBlocks][4];
    RowsVisible<kBlocks> visible;
    if (!plain) visible = place().template rows_visible<kBlocks>(p, plan, lane);
    if (__builtin_expect(plain, 1)) {
      weigh<true>(at, visible, first_token, token, unit, scores, norm, operand, start);
    } else {
      weigh<false>(at, visible, first_token, token, unit, scores, norm, operand, start);
    }
    unsigned skip = 0;
    if (!plain) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Visible& seen = visible.row[b][i];
          const int begin = first_token + token;
          const int end = begin + kRowTiles * kFragmentDim;
          if (seen.end <= begin || seen.begin >= end) skip |= 1u << (2 * b + i);
        }
      }
    }
    const uint8_t* const scales = at + layout.value_channel_scale;
    constexpr int kTiles = kDim / kFragmentDim;
    with_bits(F::format(p).value_bits, [&](auto bits) {
      constexpr int kBits = decltype(bits)::value;
      constexpr device::CodeBits code(kBits);
      const uint8_t* const codes = at + layout.value_codes + token * (kDim * kBits / 8);
#pragma unroll
      for (int first = 0; first < kTiles; first += kSumTiles) {
        float sums[kBlocks][kSumTiles][4];
        device::sum_tiles<kBits, kDim>(codes, first, operand, start, lane, sums);
        if (__builtin_expect(plain, 1)) {
          device::add_sums<false>(scales, norm.inverse, code, 0, first, sums, lane, state);
        } else {
          device::add_sums<true>(scales, norm.inverse, code, skip, first, sums, lane, state);
        }
      }
    });
  }

  /// Takes the query, in the basis that is set.
  __device__ __forceinline__ void take_query(const QueryWords<kDim, kBlocks>& words, int part) {
    make_query(words, part);
    if constexpr (kHasMemory) {
      // Each lane reads what it wrote.
#pragma unroll
      for (int i = 0; i < kBlocks * kDim / 32; ++i) {
        const uint32_t (&w)[4] = own_query.b[i / (kDim / 32)][i % (kDim / 32)];
        memory->query[i][lane] = {w[0], w[1], w[2], w[3]};
      }
    }
  }

  /// A power of two brings the largest element of a row to 8..16, so that its rotation (up to
  /// sqrt(D) as large) is below 2^8. Rows of fp16 would lose bits as bf16: part 1 is the remainder.
  __device__ __forceinline__ void make_query(const QueryWords<kDim, kBlocks>& words, int part) {
    const bool bfloat16 = !rotated && p.kv.staging.dtype == DType::kBFloat16;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float most = words.largest(p.dtype, b);
      most = fmaxf(most, __shfl_xor_sync(device::kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(device::kAllLanes, most, 2));
      const int exponent = max(__float_as_int(most) >> 23, 64);
      const float normalizer = query_factor(p, exponent);
      const float scale = score_scale(p, exponent);
      float of_row[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int from = 4 * (2 * (lane % 4) + i);
        rows.scale[b][i] = __shfl_sync(device::kAllLanes, scale, from);
        of_row[i] = __shfl_sync(device::kAllLanes, normalizer, from);
      }
      constexpr bool kByProduct = kDim < 256;  // beyond, its operands do not fit the registers
      if (kByProduct && rotated) {
        if (p.dtype == DType::kFloat16) {
          device::rotate_query<false, kDim>(words.w[b], of_row, lane, own_query.b[b]);
        } else {
          device::rotate_query<true, kDim>(words.w[b], of_row, lane, own_query.b[b]);
        }
        continue;
      }
      float v[kDim / 4];
      words.to_float(p.dtype, b, v);
      float factor = normalizer;
      if (!kByProduct && rotated) {
        device::butterfly_registers<1, kDim / 4>(v);
        device::butterfly_lanes<1, 4>(v, lane);
        factor *= device::orthonormal_scale(kDim);
      }
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) {
        v[i] *= factor;
        if (part == 1) v[i] -= __bfloat162float(__float2bfloat16_rn(v[i]));
      }
      if (bfloat16) {
        pack_query<true, kDim>(v, own_query.b[b]);
      } else {
        pack_query<false, kDim>(v, own_query.b[b]);
      }
    }
  }

  using StagedScores = float[kBlocks][1][4];

  /// 16 staged tokens in shared memory; otherwise as record().
  template <bool kBFloat16, class Place, class HaveUsedKeys, class WantValues>
  __device__ __forceinline__ void staged(const Place& place, const uint8_t* at, int first_token,
                                         bool plain, const HaveUsedKeys& have_used_keys,
                                         const WantValues& want_values) {
    StagedScores scores;
    staged_scores<kBFloat16>(place, at, scores);
    have_used_keys();
    want_values();
    const int to_values =
        F::kOneRecord ? F::layout(plan).value_codes : device::staged_bytes(kDim) / 2;
    staged_sums<kBFloat16>(place, at + to_values, first_token, plain, scores);
  }

  /// Scores of 16 staged tokens, whose keys are in shared memory.
  template <bool kBFloat16, class Place>
  __device__ __forceinline__ void staged_scores(const Place& place, const uint8_t* keys,
                                                StagedScores& scores) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[b][0][i] = 0.f;
    }
    // Two parts of the query, see take_query(); with D = 256 there are no registers for that.
    const int parts = kBFloat16 && kDim < 256 && p.dtype == DType::kFloat16 ? 2 : 1;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      if (kBFloat16 && kDim < 256 && parts > 1) {
        QueryWords<kDim, kBlocks> words;
        words.load(p, plan, place(), lane);
        take_query(words, part);
      }
      device::score_staged<kBFloat16>(keys, query(), lane, scores);
    }
  }

  /// The rest; their values are in shared memory.
  template <bool kBFloat16, class Place>
  __device__ __forceinline__ void staged_sums(const Place& place, const uint8_t* values,
                                              int first_token, bool plain, StagedScores& scores) {
    using device::kStagedTokens;
    const auto tokens_of = [&](const Visible& seen) {
      const int begin = min(max(seen.begin - first_token, 0), kStagedTokens);
      const int end = min(max(seen.end - first_token, begin), kStagedTokens);
      return (1u << end) - (1u << begin);
    };
    unsigned kept = (1u << kStagedTokens) - 1;
    unsigned not_finite = 0;
    RowsVisible<kBlocks> visible;
    if (plain) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        visible.row[b][0] = visible.row[b][1] = {first_token, first_token + kStagedTokens};
      }
    } else {
      visible = place().template rows_visible<kBlocks>(p, plan, lane);
      // Tokens that some rows see and others do not: a value that is not finite must not meet the 0
      // of those that do not. It makes the others NaN, and is left out.
      kept = tokens_of(seen().any);
      const unsigned some = kept & ~tokens_of(seen().all);
      if (some != 0) not_finite = device::find_not_finite<kBFloat16, kDim>(values, some, lane);
      kept &= ~not_finite;
    }
    const int token = lane / 4 * 2;
    const int first = first_token + token - token_of(0, lane);  // as if it were that of a record
    probabilities<false>(rows, visible, 1.f, p.logits_soft_cap, first, lane, scores, state);
    device::ProbabilityOperand<1, kBlocks> operand;
    pack_probabilities<false, kBFloat16>(
        scores, visible, first, lane,
        [&](int, int i) {
          return (not_finite >> (token + i) & 1) != 0 ? __int_as_float(0x7fffffff) : 1.f;
        },
        operand);
    device::sum_staged<kBFloat16>(values, kept, operand, lane, state);
  }
};

}  // namespace kvarn::cuda
