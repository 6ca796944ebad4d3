// Attention of a few query rows over the tiles of one sequence and KV head, and what goes with it.
//
// Records are read as they are: no scale is ever applied to a code. With q the codes,
//
//   score[g] = s_tok[g] * sum_d Q'[d] * (q[d,g] + zp[d])       Q' = Q * s_chan, once a tile
//   out[d]  += s_chan[d] * sum_g P'[g] * (q[g,d] + zp[g])      P' = P * s_tok
//
// where the zero points contribute one number a row and tile. Their part of the output stays in the
// rotated basis until the end; staged tiles have sums of their own in the original one.
#pragma once

#include "cpu/attention.h"
#include "cpu/attention_codes.h"
#include "cpu/attention_math.h"
#include "cpu/encode_hadamard.h"

extern "C" {
float expf(float);
float logf(float);
float sqrtf(float);
}

namespace kvarn::cpu::KVARN_ISA {
namespace {

inline constexpr float kInfinity = __builtin_inff();
inline constexpr int kStrip = 16;  ///< staged tokens that are converted at once

template <int kCount>
struct Rows {
  static constexpr int value = kCount;
};

/// fn(Rows<n>{}, first) for the first n = min(count, kMost) rows.
template <int kMost, class Fn>
inline void for_rows(int first, int count, Fn& fn) {
  if constexpr (kMost > 1) {
    if (count < kMost) return for_rows<kMost - 1>(first, count, fn);
  }
  fn(Rows<kMost>{}, first);
}

/// fn(Rows<n>{}, first) for blocks of at most kRowBlock of `count` rows.
template <class Fn>
inline void for_row_blocks(int count, Fn&& fn) {
  for (int first = 0; first < count; first += kRowBlock) {
    for_rows<kRowBlock>(first, count - first, fn);
  }
}

inline float dot(const float* a, const float* b, int n) {
  float s = 0;
#pragma omp simd reduction(+ : s)
  for (int i = 0; i < n; ++i) s += a[i] * b[i];
  return s;
}

inline void multiply(float* x, float by, int n) {
#pragma omp simd
  for (int i = 0; i < n; ++i) x[i] *= by;
}

/// exp(a - b) of log weights a <= b; 0 of an empty one.
inline float weight(float a, float b) { return a == -kInfinity ? 0.f : a == b ? 1.f : expf(a - b); }

/// Memory of an attend() call.
struct Scratch {
  float* query;        ///< [rows, D], times sm_scale
  float* rotated;      ///< [rows, D], query in the rotated basis
  float* out_rotated;  ///< [rows, D] sums of P V over records, channels in the order of the plan
  float* out;          ///< [rows, D] sums over staged tiles
  float* scores;       ///< [rows, G]
  float* scaled;       ///< [kRowBlock, D] Q'; also a row to rotate
  float* strip;        ///< [kStrip, D]
  float* columns;      ///< [D, kStrip]
  uint32_t* codes;
  float* channel_scale;  ///< [D]
  float* channel_zero;   ///< [D]
  float* key_scale;      ///< [G] per token, in the order of the scores, like the next two
  float* value_scale;    ///< [G]
  float* value_zero;     ///< [G]
  float* row;            ///< [max(D, G)]
  uint16_t* halves;      ///< [max(D, G)]
  int64_t bytes;

  Scratch(void* memory, const Format& f, int rows) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
    uintptr_t next = begin;
    const auto take = [&](int64_t floats) {
      float* const p = reinterpret_cast<float*>(next);
      next += (floats * 4 + 63) / 64 * 64;
      return p;
    };
    const int64_t dim = f.head_dim;
    const int64_t group = f.group;
    query = take(rows * dim);
    rotated = take(rows * dim);
    out_rotated = take(rows * dim);
    out = take(rows * dim);
    scores = take(rows * group);
    scaled = take(kRowBlock * dim);
    strip = take(kStrip * dim);
    columns = take(kStrip * dim);
    const int bits = f.key_bits > f.value_bits ? f.key_bits : f.value_bits;
    codes = reinterpret_cast<uint32_t*>(take(group * dim * bits / 32));
    channel_scale = take(dim);
    channel_zero = take(dim);
    key_scale = take(group);
    value_scale = take(group);
    value_zero = take(group);
    row = take(dim > group ? dim : group);
    halves = reinterpret_cast<uint16_t*>(take((dim > group ? dim : group) / 2));
    bytes = static_cast<int64_t>(next - begin);
  }
};

inline int64_t attend_scratch_bytes(const Format& f, int rows) {
  return Scratch(nullptr, f, rows).bytes;
}

/// 8 x 8 blocks: element 64i + 8r + t of `in` -> out[to[8i + t] + r].
inline void reorder(const float* in, const int32_t* to, int n, float* out) {
  for (int i = 0; i < n / 64; ++i) {
    void* rows[8];
    for (int t = 0; t < 8; ++t) rows[t] = out + to[8 * i + t];
    transpose8(in + 64 * i, 8, rows);
  }
}

class Attention {
 public:
  Attention(const DecodeParams& p, const TilePlan& plan, const QueryRows& rows, void* scratch)
      : p_(p),
        plan_(plan),
        rows_(rows),
        group_(p.kv.format.group),
        dim_(p.kv.format.head_dim),
        layout_(record_layout(p.kv.format)),
        s_(scratch, p.kv.format, rows.count) {
    const float scale = 1.f / sqrtf(static_cast<float>(dim_));
    for (int row = 0; row < rows_.count; ++row) {
      float* const q = s_.query + row * dim_;
      load_row(p_.q, p_.dtype, rows_.token[row] * p_.q_stride[0] + rows_.head[row] * p_.q_stride[1],
               q, dim_);
      multiply(q, p_.sm_scale, dim_);
      rotate(q, scale, s_.rotated + row * dim_);
      max_[row] = -kInfinity;
      sum_[row] = 0;
    }
    const uint64_t bytes = sizeof(float) * static_cast<uint64_t>(rows_.count) * dim_;
    __builtin_memset(s_.out, 0, bytes);
    __builtin_memset(s_.out_rotated, 0, bytes);
  }

  void tiles(int64_t begin, int64_t end) {
    const Format& f = p_.kv.format;
    const auto score = score_function(f.key_bits);
    const auto accumulate = accumulate_function(f.value_bits);
    const uint8_t* record = begin < end ? find(begin) : nullptr;
    for (int64_t tile = begin; tile < end; ++tile) {
      const uint8_t* const next = tile + 1 < end ? find(tile + 1) : nullptr;
      see(tile);
      if (record != nullptr) {
        if (next != nullptr) prefetch(next);
        (this->*score)(record);
        prepare_values(record);
        for (int row = 0; row < rows_.count; ++row)
          probabilities(row, plan_.token, 0, group_, true);
        (this->*accumulate)(record);
      } else {
        staged_tile(tile);
      }
      record = next;
    }
  }

  void result(float* out, float* lse) {
    const float scale = 1.f / sqrtf(static_cast<float>(dim_));
    for (int row = 0; row < rows_.count; ++row) {
      float* const o = out + row * dim_;
      if (sum_[row] == 0) {
        __builtin_memset(o, 0, sizeof(float) * static_cast<uint64_t>(dim_));
        lse[row] = -kInfinity;
        continue;
      }
      const float* const ordered = s_.out_rotated + row * dim_;
      for (int i = 0; i < dim_ / 8; ++i) {
        const float* const from = ordered + plan_.channel_to[i];
        for (int c = 0; c < 8; ++c) s_.strip[i / 8 * 64 + 8 * c + i % 8] = from[c];
      }
      rotate(s_.strip, scale, o);
      const float* const staged = s_.out + row * dim_;
      const float by = 1.f / sum_[row];
#pragma omp simd
      for (int d = 0; d < dim_; ++d) o[d] = (o[d] + staged[d]) * by;
      lse[row] = max_[row] + logf(sum_[row]);
    }
  }

 private:
  using Function = void (Attention::*)(const uint8_t* record);

  void rotate(const float* x, float scale, float* out) {
    float* const a = s_.scaled;
#pragma omp simd
    for (int d = 0; d < dim_; ++d) a[d] = x[d] * scale;
    __builtin_memcpy(out, walsh_hadamard(a, s_.row, dim_),
                     sizeof(float) * static_cast<uint64_t>(dim_));
  }

  /// Records may begin at any byte.
  void load_scales(const uint8_t* record, int offset, float* out, int n) {
    __builtin_memcpy(s_.halves, record + offset, sizeof(uint16_t) * static_cast<uint64_t>(n));
    load_row(s_.halves, DType::kFloat16, 0, out, n);
  }

  int64_t block(int64_t tile) const { return p_.kv.block_table.at(rows_.seq, tile); }

  int64_t slot(int64_t tile) const { return p_.kv.block_slot ? p_.kv.block_slot[block(tile)] : -1; }

  /// The record of a tile; null if it is staged.
  const uint8_t* find(int64_t tile) const {
    if (slot(tile) >= 0) return nullptr;
    return p_.kv.cache.data + block(tile) * p_.kv.cache.stride[0] +
           rows_.kv_head * p_.kv.cache.stride[1];
  }

  void prefetch(const uint8_t* record) const {
    for (int i = 0; i < layout_.bytes; i += 64) __builtin_prefetch(record + i, 0, 2);
  }

  /// What the rows see of the tile.
  void see(int64_t tile) {
    const int64_t first = tile * group_;
    const auto clamp = [this](int64_t x) {
      return static_cast<int>(x < 0 ? 0 : x > group_ ? group_ : x);
    };
    seen_begin_ = group_;
    seen_end_ = 0;
    for (int row = 0; row < rows_.count; ++row) {
      begin_[row] = clamp(rows_.begin[row] - first);
      end_[row] = clamp(rows_.end[row] - first);
      if (begin_[row] >= end_[row]) {
        begin_[row] = end_[row] = 0;
        continue;
      }
      if (begin_[row] < seen_begin_) seen_begin_ = begin_[row];
      if (end_[row] > seen_end_) seen_end_ = end_[row];
    }
  }

  bool any_sees(int first, int count) const {
    for (int row = first; row < first + count; ++row) {
      if (end_[row] > 0) return true;
    }
    return false;
  }

  template <int kBits>
  void score(const uint8_t* record) {
    load_scales(record, layout_.key_channel_scale, s_.channel_scale, dim_);
    load_scales(record, layout_.key_zero_point, s_.channel_zero, dim_);
    for (int d = 0; d < dim_; ++d) s_.channel_zero[d] += code_center(kBits);
    load_scales(record, layout_.key_token_scale, s_.row, group_);
    reorder(s_.row, plan_.token_to, group_, s_.key_scale);
    transpose_codes(record + layout_.key_codes, plan_.key, s_.codes);

    for_row_blocks(rows_.count, [&](auto block, int first) {
      constexpr int kRows = decltype(block)::value;
      if (!any_sees(first, kRows)) return;
      for (int row = 0; row < kRows; ++row) {
        const float* const q = s_.rotated + (first + row) * dim_;
        float* const scaled = s_.scaled + row * dim_;
#pragma omp simd
        for (int d = 0; d < dim_; ++d) scaled[d] = q[d] * s_.channel_scale[d];
        zero_[first + row] = dot(scaled, s_.channel_zero, dim_);
      }
      const CodePlan& plan = plan_.key;
      const int pass_words = plan.steps * unit_words(kBits) * plan.lanes;
      for (int pass = 0; pass < plan.passes; ++pass) {
        for (int lane = 0; lane < plan.lanes; lane += kLanes) {
          Float sums[2][kRows];
          multiply_codes<kBits, 0, unit_fragments(kBits)>(plan, s_.codes + pass * pass_words + lane,
                                                          s_.scaled, dim_, 2, sums);
          for (int row = 0; row < kRows; ++row) {
            float* const to = s_.scores + (first + row) * group_ + 2 * pass * plan.lanes + lane;
            store(to, sums[0][row]);
            store(to + plan.lanes, sums[1][row]);
          }
        }
      }
    });
  }

  void prepare_values(const uint8_t* record) {
    load_scales(record, layout_.value_token_scale, s_.row, group_);
    reorder(s_.row, plan_.token_to, group_, s_.value_scale);
    load_scales(record, layout_.value_zero_point, s_.row, group_);
    for (int g = 0; g < group_; ++g) s_.row[g] += code_center(p_.kv.format.value_bits);
    reorder(s_.row, plan_.token_to, group_, s_.value_zero);
  }

  /// Scores -> P (staged) or P' (records), in place; the running maximum and sum; earlier outputs
  /// rescaled. Score i is of token[i]; scores begin .. end - 1 are there.
  void probabilities(int row, const int32_t* token, int begin, int end, bool record) {
    float* const s = s_.scores + row * group_;
    if (end_[row] == 0) {
      __builtin_memset(s, 0, sizeof(float) * static_cast<uint64_t>(group_));
      zero_[row] = 0;
      return;
    }
    const bool masked = begin_[row] > 0 || end_[row] < group_;
    if (masked) {
      softmax<true>(row, token, begin, end, record);
    } else {
      softmax<false>(row, token, begin, end, record);
    }
  }

  template <bool kMasked>
  void softmax(int row, const int32_t* token, int begin, int end, bool record) {
    float* const s = s_.scores + row * group_;
    const Int first = begin_[row] - Int{};
    const Int last = end_[row] - Int{};
    const auto hidden = [&](int i) {
      const Int t = load<Int>(token + i);
      return (t < first) | (t >= last);
    };
    const Float nothing = splat<Float>(-kInfinity);
    const Float zero = splat<Float>(zero_[row]);
    const float cap = p_.logits_soft_cap;
    Float most = nothing;
    for (int i = begin; i < end; i += kLanes) {
      Float x = load<Float>(s + i);
      if (record) x = (x + zero) * load<Float>(s_.key_scale + i);
      if (cap > 0) x = cap * tanh(x / cap);
      if constexpr (kMasked) x = hidden(i) ? nothing : x;
      most = x > most ? x : most;
      store(s + i, x);
    }

    const float old = max_[row];
    const float top = max(most);
    if (top > old) {
      max_[row] = top;
      rescale(row, weight(old, top));
    }
    const Float shift = splat<Float>(max_[row] == -kInfinity ? 0.f : max_[row]);
    Float total{};
    Float zeros{};
    for (int i = begin; i < end; i += kLanes) {
      Float x = exp(load<Float>(s + i) - shift);
      total += x;
      if (record) {
        x *= load<Float>(s_.value_scale + i);
        if constexpr (kMasked) x = hidden(i) ? Float{} : x;
        Float z = x * load<Float>(s_.value_zero + i);
        if constexpr (kMasked) z = hidden(i) ? Float{} : z;
        zeros += z;
      }
      store(s + i, x);
    }
    sum_[row] += sum(total);
    zero_[row] = sum(zeros);
  }

  void rescale(int row, float by) {
    sum_[row] *= by;
    multiply(s_.out_rotated + row * dim_, by, dim_);
    multiply(s_.out + row * dim_, by, dim_);
  }

  template <int kBits>
  void accumulate(const uint8_t* record) {
    load_scales(record, layout_.value_channel_scale, s_.row, dim_);
    reorder(s_.row, plan_.channel_to, dim_, s_.channel_scale);
    transpose_codes(record + layout_.value_codes, plan_.value, s_.codes);
    for_row_blocks(rows_.count, [&](auto block, int first) {
      constexpr int kRows = decltype(block)::value;
      if (!any_sees(first, kRows)) return;
      for (int pass = 0; pass < plan_.value.passes; ++pass) {
        if constexpr (kBits == 3 && kLanes == 16) {
          if (plan_.value.lanes == 8) {
            accumulate_unit<kBits, 0, kRows, Vectors<8>::Float>(pass, first);
            continue;
          }
        }
        accumulate_unit<kBits, 0, kRows, Float>(pass, first);
      }
    });
  }

  /// The fragments kFragment and up of a unit.
  template <int kBits, int kFragment, int kRows, class V>
  void accumulate_unit(int pass, int first) {
    const CodePlan& plan = plan_.value;
    const uint32_t* const words = s_.codes + pass * plan.steps * unit_words(kBits) * plan.lanes;
    const int channel = 2 * (pass * unit_fragments(kBits) + kFragment) * plan.lanes;
    for (int lane = 0; lane < plan.lanes; lane += kLanesOf<V>) {
      V sums[2][kRows];
      multiply_codes<kBits, kFragment, kFragment + 1>(
          plan, words + lane, s_.scores + first * group_, group_, kTokenStride, sums);
      for (int i = 0; i < 2; ++i) {
        const V scale = load<V>(s_.channel_scale + channel + i * plan.lanes + lane);
        for (int row = 0; row < kRows; ++row) {
          float* const to = s_.out_rotated + (first + row) * dim_ + channel + i * plan.lanes + lane;
          store(to, fma(sums[i][row] + splat<V>(zero_[first + row]), scale, load<V>(to)));
        }
      }
    }
    if constexpr (kFragment + 1 < unit_fragments(kBits)) {
      accumulate_unit<kBits, kFragment + 1, kRows, V>(pass, first);
    }
  }

  void staged_tile(int64_t tile) {
    if (seen_begin_ >= seen_end_) return;
    const Staging& staging = p_.kv.staging;
    const int64_t key = slot(tile) * staging.stride[0] + rows_.kv_head * staging.stride[2];
    const int64_t value = key + staging.stride[1];
    const int begin = seen_begin_ / kStrip * kStrip;
    for (int first = begin; first < seen_end_; first += kStrip) score_strip(key, first);
    const int end = (seen_end_ + kStrip - 1) / kStrip * kStrip;
    for (int row = 0; row < rows_.count; ++row) {
      probabilities(row, natural_order(), begin, end, false);
    }
    for (int first = begin; first < seen_end_; first += kStrip) accumulate_strip(value, first);
  }

  static const int32_t* natural_order() {
    struct Order {
      int32_t token[kPlanTokens];
      constexpr Order() : token() {
        for (int i = 0; i < kPlanTokens; ++i) token[i] = i;
      }
    };
    static constexpr Order order;
    return order.token;
  }

  /// Tokens first .. first + kStrip - 1 of a staged tile, as far as a row sees them; others are 0.
  void load_strip(int64_t base, int first) {
    const Staging& staging = p_.kv.staging;
    for (int i = 0; i < kStrip; ++i) {
      const int token = first + i;
      float* const to = s_.strip + i * dim_;
      if (token >= seen_begin_ && token < seen_end_) {
        load_row(staging.data, staging.dtype, base + token * staging.stride[3], to, dim_);
      } else {
        __builtin_memset(to, 0, sizeof(float) * static_cast<uint64_t>(dim_));
      }
    }
  }

  void score_strip(int64_t base, int first_token) {
    load_strip(base, first_token);
    for (int half = 0; half < kStrip; half += 8) {
      for (int d = 0; d < dim_; d += 8) {
        void* to[8];
        for (int i = 0; i < 8; ++i) to[i] = s_.columns + (d + i) * kStrip + half;
        transpose8(s_.strip + half * dim_ + d, dim_, to);
      }
    }
    for_row_blocks(rows_.count, [&](auto block, int first) {
      constexpr int kRows = decltype(block)::value;
      constexpr int kVectors = kLanes == 8 ? 2 : 1;
      constexpr int kSets = kRows >= 4 ? 1 : 2;
      if (!any_sees(first, kRows)) return;
      const float* const q = s_.query + first * dim_;
      for (int lane = 0; lane < kStrip; lane += kVectors * kLanes) {
        Float sums[kSets][kVectors][kRows] = {};
        for (int d = 0; d < dim_; d += 2) {
#pragma GCC unroll 2
          for (int i = 0; i < 2; ++i) {
            const float* const column = s_.columns + (d + i) * kStrip + lane;
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) {
              const Float factor = splat<Float>(q[row * dim_ + d + i]);
#pragma GCC unroll 2
              for (int v = 0; v < kVectors; ++v) {
                Float& to = sums[i % kSets][v][row];
                to = fma(load<Float>(column + v * kLanes), factor, to);
              }
            }
          }
        }
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          float* const to = s_.scores + (first + row) * group_ + first_token + lane;
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            Float x = sums[0][v][row];
            for (int i = 1; i < kSets; ++i) x += sums[i][v][row];
            store(to + v * kLanes, x);
          }
        }
      }
    });
  }

  void accumulate_strip(int64_t base, int first_token) {
    load_strip(base, first_token);
    const auto clamp = [=](int token) {
      const int i = token - first_token;
      return i < 0 ? 0 : i > kStrip ? kStrip : i;
    };
    for_row_blocks(rows_.count, [&](auto block, int first) {
      constexpr int kRows = decltype(block)::value;
      // What all rows of the block see, then of each row what only it and others see: a value that
      // a row does not see may be NaN, so that a probability of 0 would not hide it.
      int begin = 0;
      int end = kStrip;
      for (int row = first; row < first + kRows; ++row) {
        if (clamp(begin_[row]) > begin) begin = clamp(begin_[row]);
        if (clamp(end_[row]) < end) end = clamp(end_[row]);
      }
      if (begin >= end) begin = end = kStrip;
      accumulate_tokens<kRows>(first, first_token, begin, end);
      for (int row = first; row < first + kRows; ++row) {
        const int row_end = clamp(end_[row]);
        accumulate_tokens<1>(row, first_token, clamp(begin_[row]),
                             row_end < begin ? row_end : begin);
        accumulate_tokens<1>(row, first_token, end, row_end);
      }
    });
  }

  template <int kRows>
  void accumulate_tokens(int first, int first_token, int begin, int end) {
    if (begin >= end) return;
    for (int d = 0; d < dim_; d += 2 * kLanes) {
      Float sums[2][kRows];
      float* const out = s_.out + first * dim_ + d;
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < 2; ++i) sums[i][row] = load<Float>(out + row * dim_ + i * kLanes);
      }
      for (int t = begin; t < end; ++t) {
        const Float a = load<Float>(s_.strip + t * dim_ + d);
        const Float b = load<Float>(s_.strip + t * dim_ + d + kLanes);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const Float factor = splat<Float>(s_.scores[(first + row) * group_ + first_token + t]);
          sums[0][row] = fma(a, factor, sums[0][row]);
          sums[1][row] = fma(b, factor, sums[1][row]);
        }
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < 2; ++i) store(out + row * dim_ + i * kLanes, sums[i][row]);
      }
    }
  }

  static Function score_function(int bits) {
    switch (bits) {
      case 2:
        return &Attention::score<2>;
      case 3:
        return &Attention::score<3>;
      case 4:
        return &Attention::score<4>;
      default:
        return &Attention::score<8>;
    }
  }

  static Function accumulate_function(int bits) {
    switch (bits) {
      case 2:
        return &Attention::accumulate<2>;
      case 3:
        return &Attention::accumulate<3>;
      case 4:
        return &Attention::accumulate<4>;
      default:
        return &Attention::accumulate<8>;
    }
  }

  const DecodeParams& p_;
  const TilePlan& plan_;
  const QueryRows& rows_;
  const int group_;
  const int dim_;
  const RecordLayout layout_;
  const Scratch s_;
  float max_[kMaxQueryRows];
  float sum_[kMaxQueryRows];
  float zero_[kMaxQueryRows];  ///< zero points' part of the scores, then of the outputs
  int begin_[kMaxQueryRows];   ///< what a row sees of the current tile; 0, 0: nothing
  int end_[kMaxQueryRows];
  int seen_begin_ = 0;  ///< what any row sees
  int seen_end_ = 0;
};

inline void attend(const DecodeParams& p, const TilePlan& plan, const QueryRows& rows,
                   int64_t tile_begin, int64_t tile_end, void* scratch, float* out, float* lse) {
  Attention attention(p, plan, rows, scratch);
  attention.tiles(tile_begin, tile_end);
  attention.result(out, lse);
}

/// Two states of one row -> the first. An empty one (LSE -inf) is not read.
inline void merge_rows(float* out_a, float* lse_a, const float* out_b, float lse_b, int dim) {
  if (lse_b == -kInfinity) return;
  if (*lse_a == -kInfinity) {
    __builtin_memcpy(out_a, out_b, sizeof(float) * static_cast<uint64_t>(dim));
    *lse_a = lse_b;
    return;
  }
  const float top = *lse_a > lse_b ? *lse_a : lse_b;
  const float a = weight(*lse_a, top);
  const float b = weight(lse_b, top);
  const float by_a = a / (a + b);
  const float by_b = b / (a + b);
#pragma omp simd
  for (int d = 0; d < dim; ++d) out_a[d] = out_a[d] * by_a + out_b[d] * by_b;
  *lse_a = top + logf(a + b);
}

inline void merge(float* out_a, float* lse_a, const float* out_b, const float* lse_b, int rows,
                  int dim) {
  for (int row = 0; row < rows; ++row) {
    merge_rows(out_a + row * dim, lse_a + row, out_b + row * dim, lse_b[row], dim);
  }
}

inline void merge_row(const MergeParams& p, int64_t token, int32_t head, float* scratch) {
  const auto at = [=](const int64_t (&stride)[2]) { return token * stride[0] + head * stride[1]; };
  float* const a = scratch;
  float* const b = scratch + p.head_dim;
  float lse = p.lse_a[at(p.lse_a_stride)];
  const float lse_b = p.lse_b[at(p.lse_b_stride)];
  if (lse == -kInfinity) {
    __builtin_memset(a, 0, sizeof(float) * static_cast<uint64_t>(p.head_dim));
  } else {
    load_row(p.out_a, p.dtype, at(p.out_a_stride), a, p.head_dim);
  }
  load_row(p.out_b, p.dtype, at(p.out_b_stride), b, p.head_dim);
  merge_rows(a, &lse, b, lse_b, p.head_dim);
  store_row(a, p.out, p.dtype, at(p.out_stride), p.head_dim);
  p.lse[at(p.lse_stride)] = lse;
}

inline void finish(const DecodeParams& p, const QueryRows& rows, float* out, float* lse) {
  const int dim = p.kv.format.head_dim;
  for (int row = 0; row < rows.count; ++row) {
    const int64_t token = rows.token[row];
    const int32_t head = rows.head[row];
    float* const o = out + row * dim;
    if (p.sinks != nullptr && p.kv.seq_lens[rows.seq] > 0) {
      // A sink is a key with value 0.
      float sink;
      load_row(p.sinks, p.sinks_dtype, head * p.sinks_stride, &sink, 1);
      if (sink != -kInfinity) {
        const float top = lse[row] > sink ? lse[row] : sink;
        const float own = weight(lse[row], top);
        const float all = own + weight(sink, top);
        multiply(o, own / all, dim);
        lse[row] = top + logf(all);
      }
    }
    store_row(o, p.out, p.dtype, token * p.out_stride[0] + head * p.out_stride[1], dim);
    if (p.lse != nullptr) p.lse[token * p.lse_stride[0] + head * p.lse_stride[1]] = lse[row];
  }
}

inline void copy_rows(const void* in, DType in_dtype, int64_t in_offset, int64_t in_stride,
                      void* out, DType out_dtype, int64_t out_offset, int64_t out_stride, int count,
                      int dim, bool rotate, float* scratch) {
  const float scale = 1.f / sqrtf(static_cast<float>(dim));
  for (int i = 0; i < count; ++i) {
    float* row = scratch;
    load_row(in, in_dtype, in_offset + i * in_stride, row, dim);
    if (rotate) {
      multiply(row, scale, dim);
      row = walsh_hadamard(row, scratch + dim, dim);
    }
    store_row(row, out, out_dtype, out_offset + i * out_stride, dim);
  }
}

}  // namespace

extern const AttentionKernels kAttentionKernels;
const AttentionKernels kAttentionKernels = {
    attend, attend_scratch_bytes, finish, merge, merge_row, copy_rows};

}  // namespace kvarn::cpu::KVARN_ISA
