// Attention of up to 64 query rows over a record, or over 16 staged tokens, by a warpgroup.
//
// The state of all rows is divided by channels: warp w of four has 32 of the 128 channels,
// 64 * (w / 2) + 8r + 4 * (w % 2) + 0..3 in lane (r, t), and every row. Over a record, the warps
// divide the tokens in the first product and the channels in the second; probabilities pass between
// them through shared memory, where the query is too. Staged tokens are few, so every warp makes
// all their probabilities for itself.
#pragma once

#include <cstdint>

#include "cuda/decode_feeder.cuh"
#include "cuda/decode_join.cuh"
#include "cuda/decode_rows.cuh"
#include "device/attention_group.cuh"

namespace kvarn::cuda {

/// What a group has in shared memory besides its ring.
template <int kRowBlocks>
struct GroupMemory {
  static constexpr int kRows = kRowBlocks * device::kBlockRows;
  static constexpr int kOperandBytes = device::operand_bytes(kRowBlocks);

  ParkedFeeder feeder;
  device::Barrier barrier;  ///< of all threads of the group, turn after turn
  int grew_at[2];           ///< the last even and odd turn at which a warp's logits had grown
  alignas(128) uint8_t query[kOperandBytes];
  uint8_t probability[2][kOperandBytes];  ///< P' of a record, and of the one before
  Visible visible[kRows];                 ///< what the rows see
  VisibleRange seen[device::kGroupWarps];
  float scale[kRows];  ///< score -> logit, base 2
  bool is_even;        ///< it is the same for all rows
  /// The references of the exponentials of rows 8b + 2t + {0, 1}, of each warp; the same in all.
  float2 top[device::kGroupWarps][kRowBlocks][4];
  float2 sum[kRowBlocks][device::kGroupThreads];    ///< of those rows, each thread's own tokens
  float2 most[device::kGroupWarps][kRowBlocks][4];  ///< largest logits of each warp's tokens
  int2 exponents[device::kGroupWarps];              ///< of the query: largest and least
};

/// By one thread, before others use it.
template <int kRowBlocks>
__device__ __forceinline__ void init(GroupMemory<kRowBlocks>& memory) {
  device::barrier_init(&memory.barrier, device::kGroupThreads);
  memory.grew_at[0] = memory.grew_at[1] = -1;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <int kKeyBits, int kValueBits, int kRowBlocks>
class GroupWorker {
 public:
  static constexpr int kDim = 128;
  static constexpr Format kFormat{kKeyBits, kValueBits, 128, kDim};
  using Memory = GroupMemory<kRowBlocks>;
  using Operand = float[device::kGroupTiles][kRowBlocks][4];

  __device__ __forceinline__ GroupWorker(const DecodeParams& p, const DecodePlan& plan,
                                         Memory& memory, int lane)
      : p_(p),
        plan_(plan),
        memory_(memory),
        warp_(own_warp() & (device::kGroupWarps - 1)),
        lane_(lane) {}

  /// The basis of the query and the state, that of records or that of staged tokens.
  bool rotated = false;

  /// A new item.
  __device__ __forceinline__ void open(const RowPlace& place) {
    const int length = sequence_length(p_, place.seq);
    const int last = min(place.first + Memory::kRows, place.count) - 1;
    const VisibleRange seen =
        visible_range(p_, plan_, length, place.queries, place.query_of(plan_, place.first),
                      place.query_of(plan_, last));
    // Of each warp: nobody has to wait for another.
    if (lane_ == 0) memory_.seen[warp_] = seen;
    if (lane_ < 4 * kRowBlocks) memory_.top[warp_][lane_ / 4][lane_ % 4] = {kNoTop, kNoTop};
    __syncwarp();
    const int row = warp_ * kWarpLanes + lane_;
    if (row < Memory::kRows) {
      const int query = place.query_of(plan_, min(place.first + row, place.count - 1));
      memory_.visible[row] = visible(p_, plan_, length, place.queries, query);
    }
    sync();  // nobody reads the sums of the last item any more
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      own_sum(b) = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int m = 0; m < device::kGroupTiles; ++m) out_[m][b][i] = out_[m][b][2 + i] = 0.f;
      }
    }
  }

  __device__ __forceinline__ bool sees(int first_token, int count) const {
    const Visible any = seen().any;
    return first_token < any.end && first_token + count > any.begin;
  }
  /// Whether all rows see all of them, and nothing bends the scores or tells rows apart.
  __device__ __forceinline__ bool is_plain(int first_token, int count) const {
    const Visible all = seen().all;
    return first_token >= all.begin && first_token + count <= all.end && nothing_bends();
  }
  /// Of `count` records behind one: how many, until one comes of which that is not true.
  __device__ __forceinline__ int plain_behind(int first_token, int count) const {
    const Visible all = seen().all;
    if (count == 0 || first_token < all.begin || !nothing_bends()) return 0;
    return max(min(count, (all.end - first_token) / kFormat.group - 1), 0);
  }

  __device__ __forceinline__ bool is_first_warp() const { return warp_ == 0; }

  /// Takes the query, in the basis that is set: as fp16 in the rotated one, in its own type in the
  /// original one. See TileWorker::take_query; but the largest element of all rows is brought to
  /// 8..16, unless they differ too much.
  __device__ __forceinline__ void take_query(const RowPlace& place) {
    constexpr int kOwn = (kRowBlocks + device::kGroupWarps - 1) / device::kGroupWarps;
    constexpr int kMostSpread = 10;
    QueryWords<kDim, 1> words[kOwn];
    int exponent[kOwn];
    int most = kLeastExponent;
    int least = 255;
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      const int block = warp_ + o * device::kGroupWarps;
      exponent[o] = kLeastExponent;
      if (block < kRowBlocks) {
        RowPlace at = place;
        at.first += block * device::kBlockRows;
        words[o].load(p_, plan_, at, lane_);
        float v[kDim / 4];
        words[o].to_float(p_.dtype, 0, v);
        float largest = 0.f;
#pragma unroll
        for (int i = 0; i < kDim / 4; ++i) largest = fmaxf(largest, fabsf(v[i]));
        largest = fmaxf(largest, __shfl_xor_sync(device::kAllLanes, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(device::kAllLanes, largest, 2));
        exponent[o] = max(__float_as_int(largest) >> 23, kLeastExponent);
        most = max(most, exponent[o]);
        if (largest != 0.f) least = min(least, exponent[o]);
      }
    }
    most = __reduce_max_sync(device::kAllLanes, most);
    least = __reduce_min_sync(device::kAllLanes, least);
    if (lane_ == 0) memory_.exponents[warp_] = {most, least};
    sync();
#pragma unroll
    for (int w = 0; w < device::kGroupWarps; ++w) {
      const int2 other = memory_.exponents[w];
      most = max(most, other.x);
      least = min(least, other.y);
    }
    const bool is_even = most - least <= kMostSpread;
    if (warp_ == 0 && lane_ == 0) memory_.is_even = is_even;
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      const int block = warp_ + o * device::kGroupWarps;
      if (block >= kRowBlocks) continue;
      float v[kDim / 4];
      words[o].to_float(p_.dtype, 0, v);
      const int e = is_even ? most : exponent[o];
      float normalizer = query_factor(p_, e);
      if (rotated) {
        device::butterfly_registers<1, kDim / 4>(v);
        device::butterfly_lanes<1, 4>(v, lane_);
        normalizer *= device::orthonormal_scale(kDim);
      }
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) v[i] *= normalizer;
      uint32_t packed[kDim / 32][4];
      if (!rotated && p_.dtype == DType::kBFloat16) {
        pack_query<true, kDim>(v, packed);
      } else {
        pack_query<false, kDim>(v, packed);
      }
#pragma unroll
      for (int i = 0; i < 2 * device::kGroupSteps; ++i) {
        device::store_matrix(memory_.query + (i * kRowBlocks + block) * device::kMatrixBytes,
                             packed[i / 4][i % 4], lane_);
      }
      if (lane_ % 4 == 0) {
        memory_.scale[block * device::kBlockRows + lane_ / 4] = score_scale(p_, e);
      }
    }
    device::fence_for_async_proxy();
    sync();
  }

  /// Changes the basis of the state.
  __device__ __forceinline__ void rotate() {
    auto* const vectors = reinterpret_cast<float4*>(memory_.probability);
    int warp = warp_;
    device::pin(warp);  // or the signs take registers for the whole share
    constexpr int kStride = 2 * device::kGroupThreads;  // from block to block
    static_assert(sizeof(float4) * kStride * kRowBlocks <= 2 * Memory::kOperandBytes);
    sync();
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float v[4] = {out_[0][b][k], out_[0][b][2 + k], out_[1][b][k], out_[1][b][2 + k]};
        device::butterfly_registers<1, 4>(v);
        device::butterfly_lanes<4, kWarpLanes>(v, lane_);
        vectors[b * kStride + k * device::kGroupThreads + warp_ * kWarpLanes + lane_] = {
            v[0], v[1], v[2], v[3]};
      }
    }
    sync();
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float v[4] = {};
#pragma unroll
        for (int w = 0; w < device::kGroupWarps; ++w) {
          const float sign = (__popc(w & warp) & 1) == 0 ? device::orthonormal_scale(kDim)
                                                         : -device::orthonormal_scale(kDim);
          const float4 x =
              vectors[b * kStride + k * device::kGroupThreads + w * kWarpLanes + lane_];
          v[0] = fmaf(x.x, sign, v[0]);
          v[1] = fmaf(x.y, sign, v[1]);
          v[2] = fmaf(x.z, sign, v[2]);
          v[3] = fmaf(x.w, sign, v[3]);
        }
        out_[0][b][k] = v[0];
        out_[0][b][2 + k] = v[1];
        out_[1][b][k] = v[2];
        out_[1][b][2 + k] = v[3];
      }
    }
    sync();
  }

  /// A record in shared memory. plain: is_plain(). have_probabilities() is called when all warps
  /// have used up the record before it.
  template <class HaveProbabilities>
  __device__ __forceinline__ void record(const uint8_t* at, int first_token, bool plain,
                                         const HaveProbabilities& have_probabilities) {
    if (__builtin_expect(plain, 1)) {
      record_as<true>(at, first_token, have_probabilities);
    } else {
      record_as<false>(at, first_token, have_probabilities);
    }
  }

  /// 16 staged tokens in shared memory; plain: is_plain().
  template <bool kBFloat16>
  __device__ __forceinline__ void staged(const uint8_t* at, int first_token, bool plain) {
    using device::kStagedTokens;
    const uint8_t* const values = at + device::staged_bytes(kDim) / 2;
    unsigned kept = (1u << kStagedTokens) - 1;
    unsigned not_finite = 0;
    if (!plain) {
      const auto tokens_of = [&](const Visible& seen) {
        const int begin = min(max(seen.begin - first_token, 0), kStagedTokens);
        const int end = min(max(seen.end - first_token, begin), kStagedTokens);
        return (1u << end) - (1u << begin);
      };
      // See TileWorker::staged_sums.
      kept = tokens_of(seen().any);
      const unsigned some = kept & ~tokens_of(seen().all);
      if (some != 0) not_finite = device::find_not_finite<kBFloat16, kDim>(values, some, lane_);
      kept &= ~not_finite;
    }
    float scores[1][kRowBlocks][4] = {};
#pragma unroll
    for (int j = 0; j < kDim / 32; ++j) {
      const uint8_t* const key = at + 2 * (lane_ / 4 * 2 * kDim + 32 * j + lane_ % 4 * 8);
      const uint4 even = device::load_16(key);
      const uint4 odd = device::load_16(key + 2 * kDim);
      const uint32_t a[2][4] = {{even.x, odd.x, even.y, odd.y}, {even.z, odd.z, even.w, odd.w}};
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t b[kRowBlocks][2];
        device::load_operands<kRowBlocks>(memory_.query, 2 * j + s, lane_, b);
#pragma unroll
        for (int k = 0; k < kRowBlocks; ++k) {
          device::mma_m16n8k16<kBFloat16>(scores[0][k], a[s], b[k][0], b[k][1]);
        }
      }
    }
    const int token = lane_ / 4 * 2;
    float to_logit[1][2] = {{1.f, 1.f}};
    bend<1>(scores, to_logit, plain, [&](int, int i) { return first_token + token + i; });
    bool grows = false;
    float2 most[kRowBlocks];
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      const float2 top = top_of(b);
      most[b] = {fmaxf(scores[0][b][0], scores[0][b][2]), fmaxf(scores[0][b][1], scores[0][b][3])};
      grows |= most[b].x - top.x > kGrowth || most[b].y - top.y > kGrowth;
    }
    if (__any_sync(device::kAllLanes, grows)) {
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) {
        raise_top(b, {device::max_over_tokens(most[b].x), device::max_over_tokens(most[b].y)});
      }
    }
    uint32_t operand[kRowBlocks][2];
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      const float2 top = top_of(b);
      float sum[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float pair[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float s = scores[0][b][2 * i + k];
          pair[k] = device::exp2_fast(s - (k == 0 ? top.x : top.y));
          sum[k] += pair[k];
          // Of a row that does not see the token it stays 0.
          if ((not_finite >> (token + i) & 1) != 0 && s != device::negative_infinity()) {
            pair[k] = __int_as_float(0x7fffffff);
          }
        }
        operand[b][i] = device::transpose_8x8(device::pack_pair<kBFloat16>(pair[0], pair[1]));
      }
      if (warp_ == 0) add(own_sum(b), sum);
    }
    // Lane (k, t) reads of tokens 2k and 2k + 1 the channels 64 * (warp / 2) + 16t + 8h +
    // 4 * (warp % 2) + 0..3.
    uint32_t v[2][4];  // [token][channel % 4]
    int lane = lane_;
    device::pin(lane);  // or the lane's part of the address takes a register for the whole share
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint2 half[2] = {};
      if ((kept >> (token + i) & 1) != 0) {
        const uint8_t* const from = values + 2 * ((lane / 4 * 2 + i) * kDim + 64 * (warp_ / 2) +
                                                  lane % 4 * 16 + 4 * (warp_ % 2));
        half[0] = *reinterpret_cast<const uint2*>(from);
        half[1] = *reinterpret_cast<const uint2*>(from + 16);
      }
      v[i][0] = device::transpose_8x8(__byte_perm(half[0].x, half[1].x, 0x5410));
      v[i][1] = device::transpose_8x8(__byte_perm(half[0].x, half[1].x, 0x7632));
      v[i][2] = device::transpose_8x8(__byte_perm(half[0].y, half[1].y, 0x5410));
      v[i][3] = device::transpose_8x8(__byte_perm(half[0].y, half[1].y, 0x7632));
    }
#pragma unroll
    for (int m = 0; m < device::kGroupTiles; ++m) {
      const uint32_t a[] = {v[0][2 * m], v[0][2 * m + 1], v[1][2 * m], v[1][2 * m + 1]};
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) {
        device::mma_m16n8k16<kBFloat16>(out_[m][b], a, operand[b][0], operand[b][1]);
      }
    }
  }

  /// The end of a piece: the state in the original basis or that of records, the sums known to all.
  __device__ __forceinline__ void finish(bool in_records_basis) {
    if (rotated != in_records_basis) {
      rotate();
      rotated = in_records_basis;
    }
    sync();
  }

  /// The whole of an item.
  __device__ __forceinline__ void write(const RowPlace& place) const {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      const float2 top = top_of(b);
      const float2 total = total_of(b);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float sum = device::sum_over_tokens(k == 0 ? total.x : total.y);
        const int row = place.first + b * device::kBlockRows + 2 * (lane_ % 4) + k;
        if (row >= place.count) continue;
        const OutputRow to(p_, plan_, place, row, k == 0 ? top.x : top.y, sum);
        const float factor = to.result.factor;
        const float v[4] = {out_[0][b][k] * factor, out_[0][b][2 + k] * factor,
                            out_[1][b][k] * factor, out_[1][b][2 + k] * factor};
        store_channels(p_, plan_, to.out + first_channel(), v);
        if (p_.lse != nullptr && warp_ == 0 && lane_ < 4) p_.lse[to.lse] = to.result.lse;
      }
    }
  }

  /// As a RowPiece.
  __device__ __forceinline__ void store(float4* memory) const {
    using Piece = RowPiece<kDim, kRowBlocks>;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      const int row = b * device::kBlockRows + lane_ % 4 * 2;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        memory[Piece::place_of(row + k, first_channel() / 4)] = {out_[0][b][k], out_[0][b][2 + k],
                                                                 out_[1][b][k], out_[1][b][2 + k]};
      }
      if (warp_ != 0) continue;
      const float2 top = top_of(b);
      const float2 total = total_of(b);
      const float sum[] = {device::sum_over_tokens(total.x), device::sum_over_tokens(total.y)};
      if (lane_ < 4) memory[Piece::kRows * (kDim / 4) + row / 2] = {top.x, sum[0], top.y, sum[1]};
    }
  }

 private:
  /// Of a chunk of A: as many as there are registers for.
  static constexpr int kSteps = 2;
  static constexpr int kLeastExponent = 64;
  static constexpr float kNoTop = -3e38f;  ///< below all logits: whatever comes is growth
  /// Of a lane's four probabilities of a row: below it, they times a weight below 2^7 are fp16.
  static constexpr float kMostSum = 256.f;
  /// How far logits may be above a row's reference, so that few tiles change it: with some room for
  /// rounding, what keeps sums below kMostSum.
  static constexpr float kGrowth = 5.5f;

  /// Waits for all warps of the group. (Not a named barrier: racecheck takes teams that have waited
  /// at different numbers of them for racing, whatever __syncthreads() is between.)
  __device__ __forceinline__ void sync() {
    device::barrier_arrive(&memory_.barrier);
    device::barrier_wait(&memory_.barrier, turn_ & 1);
    __syncwarp();
    ++turn_;
  }

  /// The same; whether any thread says so.
  __device__ __forceinline__ bool sync_any(bool mine) {
    int& grew_at = memory_.grew_at[turn_ & 1];
    const int turn = turn_;
    if (__any_sync(device::kAllLanes, mine) && lane_ == 0) grew_at = turn;
    sync();
    return grew_at == turn;
  }

  __device__ __forceinline__ const VisibleRange& seen() const { return memory_.seen[warp_]; }
  __device__ __forceinline__ bool nothing_bends() const {
    return p_.logits_soft_cap == 0.f && memory_.is_even;
  }

  __device__ __forceinline__ float2 top_of(int b) const { return memory_.top[warp_][b][lane_ % 4]; }

  __device__ __forceinline__ float2& own_sum(int b) const {
    return memory_.sum[b][warp_ * kWarpLanes + lane_];
  }
  /// Of the lane in all warps.
  __device__ __forceinline__ float2 total_of(int b) const {
    float total[2] = {};
#pragma unroll
    for (int w = 0; w < device::kGroupWarps; ++w) {
      const float2 part = memory_.sum[b][w * kWarpLanes + lane_];
      total[0] += part.x;
      total[1] += part.y;
    }
    return {total[0], total[1]};
  }
  __device__ __forceinline__ static void add(float2& to, const float (&v)[2]) {
    const float2 old = to;
    to = {old.x + v[0], old.y + v[1]};
  }

  __device__ __forceinline__ int first_channel() const {
    int lane = lane_;
    device::pin(lane);  // or it takes a register for the whole share
    return 64 * (warp_ / 2) + lane / 4 * 8 + 4 * (warp_ % 2);
  }

  /// Pairs of 16-bit numbers, `stride` bytes apart, times `factor`.
  __device__ __forceinline__ static void load_pairs(const uint8_t* at, int stride, float factor,
                                                    float (&v)[device::kGroupTiles][2]) {
#pragma unroll
    for (int m = 0; m < device::kGroupTiles; ++m) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(at + m * stride));
      v[m][0] = pair.x * factor;
      v[m][1] = pair.y * factor;
    }
  }

  template <bool kPlain, class HaveProbabilities>
  __device__ __forceinline__ void record_as(const uint8_t* at, int first_token,
                                            const HaveProbabilities& have_probabilities) {
    constexpr RecordLayout layout = record_layout(kFormat);
    constexpr int kChunks = device::kGroupSteps / kSteps;
    static_assert(kChunks % 2 == 0);
    device::KeyChunk<kKeyBits> keys;
    const auto load_keys = [&](int chunk) {
      keys.load(at, at + layout.key_channel_scale, at + layout.key_zero_point, chunk * kSteps,
                warp_, lane_);
    };
    device::ValueChunk<kValueBits> values;
    const auto load_values = [&](int chunk) {
      values.load(at + layout.value_codes, at + layout.value_zero_point, chunk * kSteps, warp_,
                  lane_);
    };
    // What a chunk is made of is asked for before the products of the chunk before it begin, and
    // the first one of values made before the probabilities, if there are registers for it.
    constexpr bool kValuesAhead = kRowBlocks < 8;
    load_keys(0);
    const device::Normalizer key_norm = device::normalizer(device::largest_half(
        at + layout.key_channel_scale, kDim, lane_, [](int, uint32_t pair) { return pair; }));
    Operand scores;
    device::GroupChunk<kSteps> a[2];
    const uint64_t query = device::operand_descriptor<kRowBlocks>(memory_.query);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c > 1) device::wgmma_wait<1>();
      keys.make(key_norm.half2, a[c % 2]);
      if (c + 1 < kChunks) load_keys(c + 1);
      if (kValuesAhead && c + 1 == kChunks) load_values(0);
      device::group_multiply<kRowBlocks>(query, c * kSteps, a[c % 2], scores);
    }
    const int token = lane_ / 4 * 8 + 2 * warp_;  // first of its two of 64
    const float unit = key_norm.inverse * device::kGroupUnit;
    float to_logit[device::kGroupTiles][2];
    load_pairs(at + layout.key_token_scale + 2 * token, 2 * device::kHalfTokens,
               kPlain ? unit * memory_.scale[0] : unit, to_logit);
    const Visible any = seen().any;
    const device::Normalizer token_norm = device::normalizer(device::largest_half(
        at + layout.value_token_scale, kFormat.group, lane_, [&](int pair, uint32_t bits) {
          if constexpr (!kPlain) {
            // Scales of tokens that nobody sees may be anything.
            const int t = first_token + 2 * pair;
            bits = device::finite_halves(bits);
            if (t < any.begin || t >= any.end) bits &= 0xffff0000u;
            if (t + 1 < any.begin || t + 1 >= any.end) bits &= 0xffffu;
          }
          return bits;
        }));
    float weight[device::kGroupTiles][2];
    load_pairs(at + layout.value_token_scale + 2 * token, 2 * device::kHalfTokens,
               token_norm.factor, weight);
    if (kValuesAhead) {
      device::wgmma_wait<1>();
      values.template make<!kPlain>(a[0]);
      load_values(1);
    }
    device::wgmma_wait<0>();
    device::pin(scores);
    buffer_ ^= 1;
    if constexpr (!kPlain) {
      bend<device::kGroupTiles>(scores, to_logit, false, [&](int m, int i) {
        return first_token + m * device::kHalfTokens + token + i;
      });
      // A zero point that is not finite must not meet the 0 of a row that does not see it: such
      // tokens make their rows NaN through the weight alone.
      float zero[device::kGroupTiles][2];
      load_pairs(at + layout.value_zero_point + 2 * token, 2 * device::kHalfTokens, 1.f, zero);
#pragma unroll
      for (int m = 0; m < device::kGroupTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) weight[m][i] += zero[m][i] - zero[m][i];
      }
    }
    float sum[kRowBlocks][2];
    probabilities<kPlain>(scores, to_logit, weight, sum);
    const uint64_t operands = device::operand_descriptor<kRowBlocks>(memory_.probability[buffer_]);
    Operand sums;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c > 1) device::wgmma_wait<1>();
      if (c == 0 && !kValuesAhead) load_values(0);
      if (c > 0 || !kValuesAhead) values.template make<!kPlain>(a[c % 2]);
      if ((c > 0 || !kValuesAhead) && c + 1 < kChunks) load_values(c + 1);
      device::group_multiply<kRowBlocks>(operands, c * kSteps, a[c % 2], sums);
    }
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) add(own_sum(b), sum[b]);
    // All have used up the record before this one. Not sooner: the products of all four warps wait
    // for the one that has more to do.
    have_probabilities();
    float scale[device::kGroupTiles][2];
    load_pairs(at + layout.value_channel_scale + 2 * first_channel(), 4,
               token_norm.inverse * device::kGroupUnit, scale);
    device::wgmma_wait<0>();
    device::pin(sums);
    add_values<kPlain>(first_token, scale, sums);
  }

  /// Scores -> logits, with the soft cap, and -infinity where a row does not see a token.
  template <int kTiles, class Token>
  __device__ __forceinline__ void bend(float (&scores)[kTiles][kRowBlocks][4],
                                       float (&to_logit)[kTiles][2], bool all_seen,
                                       const Token& token) {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      const int row = b * device::kBlockRows + lane_ % 4 * 2;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float scale = memory_.scale[row + k];
        const Visible seen = memory_.visible[row + k];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& s = scores[m][b][2 * i + k];
            s *= to_logit[m][i] * scale;
            if (p_.logits_soft_cap != 0.f) {
              s = soft_capped(s, p_.logits_soft_cap, __fdividef(2.f, p_.logits_soft_cap));
            }
            const int t = token(m, i);
            if (!all_seen && (t < seen.begin || t >= seen.end)) s = device::negative_infinity();
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) to_logit[m][0] = to_logit[m][1] = 1.f;
  }

  /// The references of two rows' exponentials, if `most` is too far above them.
  __device__ __forceinline__ void raise_top(int b, float2 most) {
    const float2 old = top_of(b);
    const float2 top = {most.x - old.x > kGrowth ? most.x : old.x,
                        most.y - old.y > kGrowth ? most.y : old.y};
    __syncwarp();
    if (lane_ < 4) memory_.top[warp_][b][lane_] = top;
    __syncwarp();
    const float factor[] = {device::exp2_fast(old.x - top.x),  // 1, if it stays
                            device::exp2_fast(old.y - top.y)};
    const float2 sum = own_sum(b);
    own_sum(b) = {sum.x * factor[0], sum.y * factor[1]};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int m = 0; m < device::kGroupTiles; ++m) {
        out_[m][b][k] *= factor[k];
        out_[m][b][2 + k] *= factor[k];
      }
    }
  }

  /// P' of a record, and the sums of the lane's probabilities. Whether a row's logits have outgrown
  /// its reference shows in the sums: if any have, it is made once more, of logits that are rounded
  /// as the references are (those of 2^27 and more differ by more than kGrowth from products that
  /// are not).
  template <bool kPlain>
  __device__ __forceinline__ void probabilities(Operand& scores,
                                                float (&to_logit)[device::kGroupTiles][2],
                                                const float (&weight)[device::kGroupTiles][2],
                                                float (&sum)[kRowBlocks][2]) {
    for (bool again = false;; again = true) {
      bool grows = false;
      float2 top[kRowBlocks];
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) top[b] = top_of(b);
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) sum[b][0] = sum[b][1] = 0.f;
#pragma unroll
      for (int m = 0; m < device::kGroupTiles; ++m) {
        uint32_t packed[2 * kRowBlocks];  // [i][block]
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float pair[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const float s = scores[m][b][2 * i + k];
              const float e =
                  device::exp2_fast(fmaf(s, to_logit[m][i], k == 0 ? -top[b].x : -top[b].y));
              sum[b][k] += e;
              pair[k] = e * weight[m][i];
              if (!kPlain && s == device::negative_infinity()) pair[k] = 0.f;
            }
            packed[i * kRowBlocks + b] = device::pack_pair<false>(pair[0], pair[1]);
          }
        }
        const int tile = device::kGroupWarps * m + warp_;
#pragma unroll
        for (int first = 0; first < 2 * kRowBlocks; first += 4) {
          const uint32_t four[] = {packed[first], packed[first + 1], packed[first + 2],
                                   packed[first + 3]};
          device::store_transposed(
              memory_.probability[buffer_] + (tile * 2 * kRowBlocks + first) * device::kMatrixBytes,
              four, lane_);
        }
      }
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) grows |= fmaxf(sum[b][0], sum[b][1]) > kMostSum;
      device::fence_for_async_proxy();
      if (__builtin_expect(!sync_any(grows && !again), 1)) break;
#pragma unroll
      for (int m = 0; m < device::kGroupTiles; ++m) {
#pragma unroll
        for (auto& block : scores[m]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) block[i] *= to_logit[m][i / 2];
        }
        to_logit[m][0] = to_logit[m][1] = 1.f;
      }
      raise_tops(scores);
    }
  }

  /// By the logits of a record.
  __device__ __forceinline__ void raise_tops(const Operand& logits) {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      float most[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float m = device::negative_infinity();
#pragma unroll
        for (int i = 0; i < 2 * device::kGroupTiles; ++i) {
          m = fmaxf(m, logits[i / 2][b][i % 2 * 2 + k]);
        }
        most[k] = device::max_over_tokens(m);
      }
      if (lane_ < 4) memory_.most[warp_][b][lane_] = {most[0], most[1]};
    }
    sync();
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      float2 most = memory_.most[0][b][lane_ % 4];
#pragma unroll
      for (int w = 1; w < device::kGroupWarps; ++w) {
        const float2 other = memory_.most[w][b][lane_ % 4];
        most = {fmaxf(most.x, other.x), fmaxf(most.y, other.y)};
      }
      raise_top(b, most);
    }
  }

  /// Adds the second product to the state; not in rows that see nothing of the record.
  template <bool kPlain>
  __device__ __forceinline__ void add_values(int first_token,
                                             const float (&scale)[device::kGroupTiles][2],
                                             const Operand& sums) {
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (!kPlain) {
          const Visible seen = memory_.visible[b * device::kBlockRows + lane_ % 4 * 2 + k];
          if (seen.end <= first_token || seen.begin >= first_token + kFormat.group) continue;
        }
#pragma unroll
        for (int m = 0; m < device::kGroupTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& to = out_[m][b][2 * i + k];
            to = fmaf(sums[m][b][2 * i + k], scale[m][i], to);
          }
        }
      }
    }
  }

  const DecodeParams& p_;
  const DecodePlan& plan_;
  Memory& memory_;
  int turn_ = 0;  ///< of the group's barrier
  const int warp_;
  const int lane_;
  int buffer_ = 0;  ///< of memory_.probability
  Operand out_;     ///< [m][block][2*i + parity]: channel first_channel() + 2m + i
};

#endif

}  // namespace kvarn::cuda
