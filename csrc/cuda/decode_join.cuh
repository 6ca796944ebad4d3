// Items that lie in several shares are put together here: inside a block through shared memory;
// between blocks through the workspace, by the block that comes last. Always in the same order.
#pragma once

#include <cstdint>

#include "cuda/decode_rows.cuh"
#include "cuda/decode_shared.cuh"

namespace kvarn::cuda {

/// States of the same rows in memory, to be added up in this order: one, and others that are
/// `stride` vectors apart.
struct Pieces {
  const float4* first;
  const float4* rest;
  int64_t stride;
  int count;  ///< of all
};

/// One float4 column of a sum of states, with the rows' tops and sums.
struct JoinedColumn {
  float4 out;
  float top[2];
  float sum[2];
};

/// What any thread of the device wrote and made known, in shared memory or global. Every use is
/// behind a barrier or a flag; between them the loads may be moved, so that many are under way.
__device__ __forceinline__ float4 load_piece(const float4* at) {
  float4 v;
  asm volatile("ld.relaxed.gpu.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(at));
  return v;
}

/// Adds up one column; the loads of kAtOnce states are under way together.
template <int kAtOnce, int kDim, int kBlocks>
__device__ __forceinline__ JoinedColumn join_column(const Pieces& pieces, int column, int lane) {
  using State = device::SoftmaxState<kDim, kBlocks>;
  const int row_column = kBlocks * State::kTiles + column / State::kTiles;
  const int rows = row_column * kWarpLanes + lane;
  const int outs = column * kWarpLanes + lane;
  const float none = device::negative_infinity();
  JoinedColumn to{{0.f, 0.f, 0.f, 0.f}, {none, none}, {0.f, 0.f}};
  const float4* first = pieces.first;
  const float4* rest = pieces.rest;
  int left = pieces.count;
#pragma unroll 1
  for (;;) {
    float4 v[kAtOnce], row[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      row[i] = {none, none, 0.f, 0.f};
      v[i] = {0.f, 0.f, 0.f, 0.f};
      if (i < left) {
        const float4* const at = i == 0 ? first : rest + (i - 1) * pieces.stride;
        row[i] = load_piece(at + rows);
        v[i] = load_piece(at + outs);
      }
    }
    float most[2] = {to.top[0], to.top[1]};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      most[0] = fmaxf(most[0], row[i].x);
      most[1] = fmaxf(most[1], row[i].y);
    }
    float reference[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reference[i] = most[i] == none ? 0.f : most[i];
      const float factor = device::exp2_fast(to.top[i] - reference[i]);
      to.sum[i] *= factor;
      (i == 0 ? to.out.x : to.out.y) *= factor;
      (i == 0 ? to.out.z : to.out.w) *= factor;
      to.top[i] = most[i];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float a = device::exp2_fast(row[i].x - reference[0]);
      const float b = device::exp2_fast(row[i].y - reference[1]);
      to.sum[0] = fmaf(row[i].z, a, to.sum[0]);  // the same in all kernels
      to.sum[1] = fmaf(row[i].w, b, to.sum[1]);
      to.out.x = fmaf(v[i].x, a, to.out.x);
      to.out.y = fmaf(v[i].y, b, to.out.y);
      to.out.z = fmaf(v[i].z, a, to.out.z);
      to.out.w = fmaf(v[i].w, b, to.out.w);
    }
    left -= kAtOnce;
    if (left <= 0) return to;
    first = rest + (kAtOnce - 1) * pieces.stride;
    rest = first + pieces.stride;
  }
}

/// Makes known to the device that a piece is in memory, which the threads before a barrier wrote.
/// The number of the launch is drawn at random: whatever was in the workspace, it is not a flag.
__device__ __forceinline__ void raise_flag(const DecodePlan& plan, uint64_t* flag) {
  __threadfence();
  asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(flag), "l"(plan.launch) : "memory");
}

/// Waits until a flag is raised. Who waits has the last piece of an item: blocks start in their
/// order, so that those who have the others run or have ended.
__device__ __forceinline__ void wait_for_flag(const DecodePlan& plan, const uint64_t* flag) {
  uint64_t value;
  do {
    asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  } while (value != plan.launch);
}

/// With splits: the warps of a block add up the items that end in it. cursor: at the begin of its
/// shares. The units of an item are in the workspace, in the basis of records; those of blocks
/// before this one are there when these have raised their flags. states: of so many warps, in
/// shared memory.
template <int kDim, int kBlocks, int kWarps>
__device__ __forceinline__ void join_units(const DecodeParams& p, const DecodePlan& plan,
                                           DecodeShared& shared, Cursor cursor, int teams,
                                           float4* states, int lane) {
  using State = device::SoftmaxState<kDim, kBlocks>;
  constexpr int kStateVectors = State::kVectors * kWarpLanes;
  constexpr int kColumns = kBlocks * State::kTiles;
  constexpr int kAtOnce = kDim < 256 && kBlocks == 1 ? 8 : 4;
  const int warp = own_warp();
  const int parts = plan.row_parts;
  int most = 0;  // units of an item
#pragma unroll
  for (int w = 0; w < kWarps; ++w) most = max(most, shared.scan.most_of_warp[w]);
  if (most <= 1) return;
  __syncthreads();  // what this block has is in memory, and the rings are free
  if (threadIdx.x == 0 && shared.share[teams - 1].cut_at_end) {
    raise_flag(plan, plan.flags + blockIdx.x);
  }
  const int64_t begin = cursor.item_start + cursor.unit;
  int from = static_cast<int>(blockIdx.x);  // where the first item begins, if it ends here
  int count = 0;                            // of states
  int task = warp;
  ItemPlace own{};  // whose state this warp finishes
  int own_part = 0;
#pragma unroll 1
  for (;;) {
    if (cursor.work.units > 1 && cursor.ends_item()) {
      if (cursor.item_start < begin) {
        from = shared.division[warp].block_of(cursor.item_start);
        for (int i = from + lane; i < static_cast<int>(blockIdx.x); i += kWarpLanes) {
          wait_for_flag(plan, plan.flags + i);
        }
        __syncwarp();
      }
      if (warp >= count && warp < count + parts) {
        own = {cursor.item_start, cursor.seq, cursor.head, cursor.row_block};
        own_part = warp - count;
      }
      const int64_t stride = int64_t{parts} * kStateVectors;
#pragma unroll 1
      for (; task < parts * kColumns; task += kWarps) {
        const int part = task / kColumns;
        const int column = task % kColumns;
        const float4* const at = plan.pieces + (cursor.item_start * parts + part) * kStateVectors;
        const JoinedColumn joined = join_column<kAtOnce, kDim, kBlocks>(
            Pieces{at, at + stride, stride, cursor.work.units}, column, lane);
        float4* const to = states + (count + part) * kStateVectors + lane;
        to[column * kWarpLanes] = joined.out;
        if (column % State::kTiles == 0) {
          to[(kColumns + column / State::kTiles) * kWarpLanes] = {joined.top[0], joined.top[1],
                                                                  joined.sum[0], joined.sum[1]};
        }
      }
      task -= parts * kColumns;
      count += parts;
    }
    const bool is_last = cursor.count == cursor.left;
    if (count > 0 && (is_last || count + parts > kWarps)) {
      __syncthreads();
      if (warp < count) {
        State state;
        state.load(states + warp * kStateVectors, lane);
        state.rotate(lane);
        write_rows(p, plan,
                   RowPlace(p, plan, own.seq, own.head, own.row_block, own_part,
                            kBlocks * device::kBlockRows),
                   lane, state);
      }
      __syncthreads();
      count = 0;
    }
    if (is_last) break;
    cursor.next(p, plan, shared.division[warp]);
  }
  // All have seen the flags. The same launch may be played again.
  for (int i = from + static_cast<int>(threadIdx.x); i < static_cast<int>(blockIdx.x);
       i += kWarps * kWarpLanes) {
    plan.flags[i] = 0;
  }
}

/// Without: what a warp has of the rows of an item, in memory, its values in the rotated basis:
/// [rows][kDim] values, four channels side by side, and a top and a sum of each row.
template <int kDim, int kBlocks>
struct RowPiece {
  static constexpr int kRows = kBlocks * device::kBlockRows;
  static constexpr int kVectors = kRows * (kDim + 2) / 4;  ///< float4

  /// Where four channels of a row stand, so that eight lanes that store theirs, or read a row, have
  /// all banks.
  __device__ __forceinline__ static int place_of(int row, int four) {
    const int t = row >> 1;
    return row * (kDim / 4) + (four ^ ((t & 1) | (t & 2) << 1));
  }

  /// Rows that are not there (`rows` or more) need not be written.
  __device__ __forceinline__ static void store(const device::SoftmaxState<kDim, kBlocks>& state,
                                               int rows, float4* memory, int lane) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const float sum[2] = {device::sum_over_tokens(state.sum[b][0]),
                            device::sum_over_tokens(state.sum[b][1])};
      const int row = b * device::kBlockRows + lane % 4 * 2;
      if (row >= rows) continue;
      const int place = place_of(row, lane / 4 * 2);
#pragma unroll
      for (int c = 0; c < kDim / kFragmentDim; c += 2) {
#pragma unroll
        for (int parity = 0; parity < 2; ++parity) {
          const float (&v)[4] = state.out[b][c];
          const float (&w)[4] = state.out[b][c + 1];
          memory[(place ^ (c % 4 / 2)) + c / 4 * 16 + parity * (kDim / 4)] = {
              v[parity], v[2 + parity], w[parity], w[2 + parity]};
        }
      }
      if (lane < 4) {
        memory[kRows * (kDim / 4) + row / 2] = {state.top[b][0], sum[0], state.top[b][1], sum[1]};
      }
    }
  }

  __device__ __forceinline__ static const float2* tops(const float4* memory) {
    return reinterpret_cast<const float2*>(memory + kRows * (kDim / 4));
  }

  /// Rows of a warp that there may be.
  __device__ __forceinline__ static int rows(const DecodeParams& p, const DecodePlan& plan) {
    return p.cu_query_lens.data != nullptr ? kRows : min(kRows, plan.heads_per_kv);
  }
};

/// A sum of pieces of a row, or of a strip of it: kChannels of a lane.
template <int kChannels>
struct JoinedRow {
  float top = device::negative_infinity();
  float sum = 0.f;
  float out[kChannels] = {};

  /// tops: top and sum of each piece; absent ones are -infinity and zeros.
  template <int kCount>
  __device__ __forceinline__ void add(const float2 (&tops)[kCount],
                                      const float (&values)[kCount][kChannels]) {
    float most = top;
#pragma unroll
    for (int k = 0; k < kCount; ++k) most = fmaxf(most, tops[k].x);
    const float reference = rescale(most);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float weight = device::exp2_fast(tops[k].x - reference);
      sum += tops[k].y * weight;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) out[c] += values[k][c] * weight;
    }
  }

  /// The same where lane k (and every kCount-th from there on) has the top and the sum of piece k.
  template <int kCount>
  __device__ __forceinline__ void add_of_lanes(float2 tops,
                                               const float (&values)[kCount][kChannels]) {
    float most = tops.x;
#pragma unroll
    for (int distance = 1; distance < kCount; distance *= 2) {
      most = fmaxf(most, __shfl_xor_sync(device::kAllLanes, most, distance));
    }
    const float reference = rescale(fmaxf(most, top));
    const float weight = device::exp2_fast(tops.x - reference);
    float all = tops.y * weight;
#pragma unroll
    for (int distance = 1; distance < kCount; distance *= 2) {
      all += __shfl_xor_sync(device::kAllLanes, all, distance);
    }
    sum += all;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float of_piece = __shfl_sync(device::kAllLanes, weight, k);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) out[c] += values[k][c] * of_piece;
    }
  }

 private:
  /// Returns the reference of the exponentials.
  __device__ __forceinline__ float rescale(float most) {
    const float reference = most == device::negative_infinity() ? 0.f : most;
    const float factor = device::exp2_fast(top - reference);
    sum *= factor;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) out[c] *= factor;
    top = most;
    return reference;
  }
};

/// Two numbers of a piece that goes from block to block, and one by which who reads it knows that
/// they are there: no flag and no fence is needed. It is one operation of the memory model (a
/// scalar of 128 bits, PTX ISA 8.3, sm_70).
struct alignas(16) Word {
  uint64_t pair;
  uint64_t number;

  __device__ __forceinline__ float x() const {
    return __uint_as_float(static_cast<uint32_t>(pair));
  }
  __device__ __forceinline__ float y() const {
    return __uint_as_float(static_cast<uint32_t>(pair >> 32));
  }

  __device__ __forceinline__ static uint64_t pair_of(float x, float y) {
    return uint64_t{__float_as_uint(y)} << 32 | __float_as_uint(x);
  }

  __device__ __forceinline__ static void store(Word* at, uint64_t pair, uint64_t number) {
    asm volatile(
        "{\n"
        ".reg .b128 word;\n"
        "mov.b128 word, {%1, %2};\n"
        "st.relaxed.gpu.global.b128 [%0], word;\n"
        "}" ::"l"(at),
        "l"(pair), "l"(number)
        : "memory");
  }
  /// Reads it anew from memory, if that is wanted.
  __device__ __forceinline__ void look(const Word* at, unsigned wanted) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        ".reg .b128 word;\n"
        "setp.ne.u32 wanted, %3, 0;\n"
        "mov.b128 word, {%0, %1};\n"
        "@wanted ld.relaxed.gpu.global.b128 word, [%2];\n"
        "mov.b128 {%0, %1}, word;\n"
        "}"
        : "+l"(pair), "+l"(number)
        : "l"(at), "r"(wanted));
  }
  /// Takes the number out of it.
  __device__ __forceinline__ void clear() {
    asm volatile("st.global.u64 [%0], %1;" ::"l"(&number), "l"(uint64_t{0}) : "memory");
  }
};

/// Words of a strip of a row, a vector of channels a lane: lane after lane the first two of them,
/// then the others; the row's top and sum; and the head.
///
/// The last two carry the number of the launch. It is drawn at random: whatever was in the
/// workspace, it is not this one; and who has read them takes it away, as a graph plays it again.
/// To take it out of all words would be up to 2 us of stores at the end of a launch. So the others
/// carry a number_now(), which the head tells.
constexpr KVARN_HD int strip_words(int vector) { return vector / 2 * kWarpLanes + 2; }

/// The number of the launch, and the time: what a graph left when it was played before had another.
/// How often the timer is set is not documented; while it stands still, the clock goes on.
__device__ __forceinline__ uint64_t number_now(uint64_t launch) {
  unsigned time;
  unsigned clock;
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(time));
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
  return launch + (uint64_t{time} << 32 | clock);
}

/// All that the teams of a block, and the blocks, have of the same items. last_pieces: of the
/// block's warps, in shared memory, piece_stride vectors apart. kOfBlock: pieces of a block
/// in plan.warp_pieces.
///
/// Border b is that before team b. A run of borders that cut the same item makes one piece of it.
/// If the item begins and ends in this block that is all of it. If not, the piece goes to the block
/// where the item ends, which adds up all of them: it has started after the others.
template <int kDim, int kBlocks, int kWarps, int kOfBlock = kWarps>
__device__ __forceinline__ void join_shares(const DecodeParams& p, const DecodePlan& plan,
                                            const DecodeShared& shared, int teams,
                                            const float4* last_pieces, int piece_stride, int lane) {
  using Piece = RowPiece<kDim, kBlocks>;
  constexpr int kOfLane = kDim / kWarpLanes;          // channels of a row
  constexpr int kVector = kOfLane < 4 ? kOfLane : 4;  // of them side by side
  constexpr int kStrips = kOfLane / kVector;
  constexpr int kStripWords = strip_words(kVector);
  constexpr int kTops = kVector / 2 * kWarpLanes;  // words of a strip
  constexpr int kHead = kTops + 1;
  constexpr int kOfWarps = kDim < 256 ? 8 : 4;  // pieces at once
  // Twelve warps have registers for eight.
  constexpr int kOfBlocks = kWarps > 8 && kVector > 2 ? 8 : 16;
  constexpr int kFront = 0;  // pieces that others add up or add to: of the block's first item,
  constexpr int kBack = 1;   // and of its last, if that begins here
  const int warp = own_warp();
  const int parts = plan.row_parts;
  const int rows = Piece::rows(p, plan);
  // Pieces of blocks side by side are so many words apart.
  constexpr int kBlockWords = 2 * Piece::kRows * kStrips * kStripWords;
  const auto words_at = [&](int place) { return reinterpret_cast<Word*>(plan.pieces) + place; };
  const auto strip_of = [&](int block, int which, int part, int row, int strip) {
    return ((((part * static_cast<int>(gridDim.x) + block) * 2 + which) * Piece::kRows + row) *
                kStrips +
            strip) *
           kStripWords;
  };
  // Without cu_query_lens a warp that has all rows of its item has all of `rows`.
  const bool may_lack_rows =
      p.cu_query_lens.data != nullptr || parts > 1 || plan.heads_per_kv > Piece::kRows;
  const auto rows_of = [&](int seq, int head, int row_block, int part) {
    return RowPlace(p, plan, seq, head, row_block, part, Piece::kRows);
  };

  // A bit a team.
  const TeamShare& own = shared.share[min(lane, kWarps - 1)];
  const unsigned all = (1u << teams) - 1;
  const unsigned begins = __ballot_sync(device::kAllLanes, own.cut_at_begin) & all;
  const unsigned middles = __ballot_sync(device::kAllLanes, own.middle) & all;
  const bool back_is_cut = shared.share[teams - 1].cut_at_end;
  // Borders at which runs end, and the first team of such a run: behind the last before it that is
  // no middle.
  unsigned runs = begins & ~middles;
  const bool front_ends = (begins & 1) != 0 && runs != 0;
  if (back_is_cut) runs |= 1u << teams;
  bool is_front = (begins & 1) != 0;
  int next_warp = 0;
#pragma unroll 1
  for (; runs != 0; runs &= runs - 1) {
    const int b = __ffs(static_cast<int>(runs)) - 1;
    const unsigned before = ~middles & ((1u << b) - 1);
    const int from = before == 0 ? 0 : 31 - __clz(static_cast<int>(before));
    const bool is_whole = !is_front && b < teams;
    const int of_teams = b - from;  // their last pieces, before that which ended the item
    const bool is_back = b == teams;
    const auto place_of = [&](int part) {
      const Cursor& back = shared.cursor[teams - 1];
      const ItemPlace& ended = shared.share[min(b, teams - 1)].first;
      return is_back ? rows_of(back.seq, back.head, back.row_block, part)
                     : rows_of(ended.seq, ended.head, ended.row_block, part);
    };
    int i = warp - next_warp;
    if (i < 0) i += kWarps;
    next_warp = (next_warp + parts * rows) % kWarps;
#pragma unroll 1
    for (; i < parts * rows; i += kWarps) {
      const int part = parts == 1 ? 0 : i / rows;
      const int row = i - part * rows;
      if (may_lack_rows) {
        const RowPlace place = place_of(part);
        if (place.first + row >= place.count) break;
      }
      const float4* const cut = last_pieces + (from * parts + part) * piece_stride;
      const float4* const ended =
          plan.warp_pieces +
          (static_cast<int>(blockIdx.x) * kOfBlock + b * parts + part) * int64_t{Piece::kVectors};
      const int stride = parts * piece_stride;
      const uint64_t number =
          __shfl_sync(device::kAllLanes, number_now(plan.launch), 0);  // one for the whole row
      JoinedRow<kOfLane> joined;
      const auto load = [&](const float4* piece, float2& tops, float (&values)[kOfLane]) {
        tops = Piece::tops(piece)[row];
        if constexpr (kVector == 4) {
#pragma unroll
          for (int h = 0; h < kOfLane / 4; ++h) {
            const float4 four = piece[Piece::place_of(row, h * kWarpLanes + lane)];
            values[4 * h] = four.x;
            values[4 * h + 1] = four.y;
            values[4 * h + 2] = four.z;
            values[4 * h + 3] = four.w;
          }
        } else {
          const float2 two =
              reinterpret_cast<const float2*>(piece + Piece::place_of(row, lane / 2))[lane % 2];
          values[0] = two.x;
          values[1] = two.y;
        }
      };
#pragma unroll 1
      for (int k = 0; k < of_teams; k += kOfWarps) {
        float2 tops[kOfWarps];
        float values[kOfWarps][kOfLane];
#pragma unroll
        for (int j = 0; j < kOfWarps; ++j) {
          tops[j] = {device::negative_infinity(), 0.f};
#pragma unroll
          for (int c = 0; c < kOfLane; ++c) values[j][c] = 0.f;
          if (k + j < of_teams) load(cut + (k + j) * stride, tops[j], values[j]);
        }
        joined.add(tops, values);
      }
      if (!is_back) {
        float2 tops[1];
        float values[1][kOfLane];
        load(ended, tops[0], values[0]);
        joined.add(tops, values);
      }
      float (&v)[kOfLane] = joined.out;
      device::butterfly_registers<1, kOfLane>(v);
      device::butterfly_lanes<1, kWarpLanes>(v, lane);
#pragma unroll
      for (int c = 0; c < kOfLane; ++c) v[c] *= device::orthonormal_scale(kDim);
      if (is_whole) {
        const RowPlace place = place_of(part);
        const OutputRow to(p, plan, place, place.first + row, joined.top, joined.sum);
#pragma unroll
        for (int h = 0; h < kOfLane / kVector; ++h) {
          float result[kVector];
#pragma unroll
          for (int c = 0; c < kVector; ++c) result[c] = v[h * kVector + c] * to.result.factor;
          store_channels(p, plan, to.out + (h * kWarpLanes + lane) * kVector, result);
        }
        if (p.lse != nullptr && lane == 0) p.lse[to.lse] = to.result.lse;
      } else {
#pragma unroll
        for (int h = 0; h < kOfLane / kVector; ++h) {
          Word* const strip = words_at(
              strip_of(static_cast<int>(blockIdx.x), is_front ? kFront : kBack, part, row, h));
#pragma unroll
          for (int c = 0; c < kVector; c += 2) {
            Word::store(strip + c / 2 * kWarpLanes + lane,
                        Word::pair_of(v[h * kVector + c], v[h * kVector + c + 1]), number);
          }
          if (lane == 0) {
            Word::store(strip + kTops, Word::pair_of(joined.top, joined.sum), plan.launch);
          }
          if (lane == 1) Word::store(strip + kHead, number, plan.launch);
        }
      }
    }
    is_front = false;
  }

  if (!front_ends) return;
  const ItemPlace& item = shared.share[0].first;
  const int from = shared.division[warp].block_of(item.start);
  const int count = static_cast<int>(blockIdx.x) - from + 1;
#pragma unroll 1
  for (int i = warp; i < parts * rows * kStrips; i += kWarps) {
    const int strip = i % kStrips;
    const int part = parts == 1 ? 0 : i / kStrips / rows;
    const int row = i / kStrips - part * rows;
    if (may_lack_rows) {
      const RowPlace place = rows_of(item.seq, item.head, item.row_block, part);
      if (place.first + row >= place.count) break;
    }
    // The first block has the item as its last.
    const int back = strip_of(from, kBack, part, row, strip);
    const int front = strip_of(from, kFront, part, row, strip);
    JoinedRow<kVector> joined;
#pragma unroll 1
    for (int first = 0; first < count; first += kOfBlocks) {
      const int left = count - first;
      const int of_lane = lane % kOfBlocks;
      const int at = front + first * kBlockWords;
      const int first_at = first == 0 ? back : at;
      const Word* const of_first = words_at(first_at + lane);
      const Word* const of_others = words_at(at + lane);
      // As many lanes as pieces have tops and sums, as many others heads.
      Word* const own_at = words_at((of_lane == 0 ? first_at : at + of_lane * kBlockWords) +
                                    ((lane & kOfBlocks) == 0 ? kTops : kHead));
      const auto word_at = [&](int k, int c) {
        return (k == 0 ? of_first : of_others + k * kBlockWords) + c * kWarpLanes;
      };
      Word own{};
      Word words[kOfBlocks][kVector / 2] = {};
      // A bit a word that is not there; what is there is not read again.
      const auto bit = [](int k, int c) { return 1u << (c * kOfBlocks + k); };
      constexpr unsigned kPieces = (1u << kOfBlocks) - 1;
      unsigned missing = left < kOfBlocks ? (1u << left) - 1 : kPieces;
      if (kVector > 2) missing |= missing << kOfBlocks;
      bool own_missing = of_lane < left;
      const bool has_own = own_missing;
      do {
        own.look(own_at, own_missing);
#pragma unroll
        for (int k = 0; k < kOfBlocks; ++k) {
#pragma unroll
          for (int c = 0; c < kVector / 2; ++c) {
            words[k][c].look(word_at(k, c), missing & bit(k, c));
          }
        }
        if (own.number == plan.launch) own_missing = false;
        // No word has that of the launch: its time and clock would have to be 0.
        const uint64_t of_own = own_missing ? plan.launch : own.pair;
#pragma unroll
        for (int k = 0; k < kOfBlocks; ++k) {
          const uint64_t number = __shfl_sync(device::kAllLanes, of_own, kOfBlocks + k);
#pragma unroll
          for (int c = 0; c < kVector / 2; ++c) {
            if (words[k][c].number == number) missing &= ~bit(k, c);
          }
        }
      } while (__any_sync(device::kAllLanes, missing != 0 || own_missing));
      float values[kOfBlocks][kVector];
#pragma unroll
      for (int k = 0; k < kOfBlocks; ++k) {
#pragma unroll
        for (int c = 0; c < kVector / 2; ++c) {
          values[k][2 * c] = words[k][c].x();
          values[k][2 * c + 1] = words[k][c].y();
        }
      }
      float2 tops = {has_own ? own.x() : device::negative_infinity(), own.y()};
      tops.x = __shfl_sync(device::kAllLanes, tops.x, of_lane);
      tops.y = __shfl_sync(device::kAllLanes, tops.y, of_lane);
      joined.add_of_lanes(tops, values);
      if (has_own) own_at->clear();  // the same launch may be played again
    }
    const RowPlace place = rows_of(item.seq, item.head, item.row_block, part);
    const OutputRow to(p, plan, place, place.first + row, joined.top, joined.sum);
    float (&result)[kVector] = joined.out;
#pragma unroll
    for (int c = 0; c < kVector; ++c) result[c] *= to.result.factor;
    store_channels(p, plan, to.out + (strip * kWarpLanes + lane) * kVector, result);
    if (p.lse != nullptr && strip == 0 && lane == 0) p.lse[to.lse] = to.result.lse;
  }
}

}  // namespace kvarn::cuda
