// The work of decode_attention and its division, computed on the device from the lengths.
//
// An *item* is a block of query rows of one sequence and KV head, with the tiles they see; a *unit*
// the least of it that is computed on its own: a tile or, with split_tokens, a split. All units of
// all items (sequence, head, row block, unit: the last runs fastest) are cut into equal *shares*,
// one for each team of warps. Most items of a large batch lie inside a share; a share has at most
// two others, the one it begins in and the one it ends in:
//
//   shares   |------ 0 ------|------ 1 ------|------ 2 ------|
//   items    |a  |b     |c                           |d      |
//
// So every block scans the lengths, finds its shares, and needs nothing from any other.
#pragma once

#include <cstdint>

#include "device/attention_staged.cuh"
#include "kvarn/layout.h"
#include "kvarn/ops.h"

namespace kvarn::cuda {

inline constexpr int kMaxDecodeWarps = 12;  ///< of a block, see decode_warps()
inline constexpr int kMaxSplits = 128;      ///< of an item: longer sequences have longer splits
inline constexpr int kDecodeStaticBytes = 10240;  ///< room for DecodeShared
inline constexpr int kMaxStages = 32;             ///< of all rings of a block

/// The warps of a block. Twelve hide more of each other's latencies, if the registers suffice.
/// one_record: the ring of each is one record.
constexpr KVARN_HD int decode_warps(const Format& format, bool usual, bool one_record) {
  return usual && (one_record ? format.head_dim < 256 : format.group == 64 || format.head_dim == 64)
             ? 12
             : 8;
}

/// Whether there is a kernel of the format alone that takes all options.
constexpr KVARN_HD bool decode_options_are_static(const Format& format) {
  return format == Format{4, 2, 128, 128};
}

/// A number that is the same in all lanes, told to the compiler: it branches on it without
/// provisions for lanes that part. All lanes take part, so also in what calls this: own_warp().
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(device::kAllLanes, x, 0); }

/// The number of the warp in its block; found anew where it is wanted, so that it is in no register
/// between.
__device__ __forceinline__ int own_warp() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return uniform(static_cast<int>(thread / kWarpLanes));
}

/// What a warp of 16 rows has in shared memory besides its ring of one record.
inline constexpr int kTwoBlocksBytes = 4608;

/// A stage of a ring holds a record or 16 staged tokens.
constexpr KVARN_HD int decode_stage_bytes(const Format& format) {
  const int staged = device::staged_bytes(format.head_dim);
  const int record = record_layout(format).bytes;
  return record > staged ? record : staged;
}

/// Whether 16 staged keys fit where a record has its keys, and values where it has its values.
constexpr KVARN_HD bool staged_part_fits(const Format& format) {
  const int part = device::staged_bytes(format.head_dim) / 2;
  const RecordLayout layout = record_layout(format);
  return part <= layout.value_codes && part <= layout.bytes - layout.value_codes;
}

/// The shape of decode_group_kernel.cuh, for so many blocks of 8 rows (4 or 8): teams of a block,
/// as many as the registers allow; stages of their rings; log2 of the rows of a row block.
constexpr KVARN_HD int group_teams(int row_blocks) { return row_blocks < 8 ? 3 : 2; }
inline constexpr int kGroupStages = 3;
constexpr KVARN_HD int group_rows_shift(int row_blocks) { return row_blocks < 8 ? 5 : 6; }

/// What the host adds to the params.
struct DecodePlan {
  int heads_per_kv;
  int parts_shift;
  int row_parts;   ///< warps of a team (2^parts_shift); each has its own rows of the item
  int rows_shift;  ///< log2 of the rows of a row block
  int group_shift;
  int teams;   ///< of a block
  int stages;  ///< of a team's ring
  int stage_bytes;
  uint64_t inverse_shares;   ///< see Division
  unsigned aligned_shares;   ///< whose blocks end where items do, if all items are equal; 0: none
  uint64_t inverse_aligned;  ///< see Division
  int window;                ///< window_left; -1: none
  int split_tiles;           ///< 0: units are tiles
  unsigned staged_units;     ///< 2^16 units a token of an open tile; 0: each tile is one unit
  int item_units;            ///< what an item's begin and end count, in a ragged batch
  bool few_sequences;        ///< see divide_few(): at most 32, and all numbers of units are small
  int query_bytes;           ///< of arrays that are asked for ahead, from their first element on
  int table_bytes;
  int slot_bytes;
  bool records_aligned;
  bool staging_aligned;
  bool q_aligned;
  bool out_aligned;
  RecordLayout layout;
  uint64_t launch;      ///< a number that no flag or word has by chance
  uint64_t* flags;      ///< with splits, of blocks: [grid]
  float4* pieces;       ///< with splits: [units][row_parts]; of blocks: [grid][2][row_parts], words
  float4* warp_pieces;  ///< [grid][warps], or teams of warpgroups
};

/// The case of most decode steps: one query token a sequence, a warp for its rows, 32-bit indices
/// side by side, all aligned, nothing that bends or hides scores.
inline bool is_usual(const DecodeParams& p, const DecodePlan& plan) {
  const auto plain = [](const IndexArray& a) { return !a.is_int64 && a.stride == 1; };
  return !p.cu_query_lens && p.causal && p.logits_soft_cap == 0.f && p.sinks == nullptr &&
         plan.window < 0 && plan.row_parts == 1 && plain(p.kv.seq_lens) && plain(p.kv.block_slot) &&
         !p.kv.block_table.is_int64 && p.kv.block_table.col_stride == 1 && plan.records_aligned &&
         plan.staging_aligned && plan.q_aligned && plan.out_aligned &&
         (p.kv.staging.data == nullptr || p.kv.staging.dtype == p.dtype);
}

/// The same as constants, so that what does not occur costs no instructions.
__device__ __forceinline__ DecodeParams usual(DecodeParams p) {
  p.cu_query_lens = {};
  p.causal = true;
  p.logits_soft_cap = 0.f;
  p.sinks = nullptr;
  p.kv.seq_lens.is_int64 = p.kv.block_slot.is_int64 = p.kv.block_table.is_int64 = false;
  p.kv.seq_lens.stride = p.kv.block_slot.stride = p.kv.block_table.col_stride = 1;
  p.kv.staging.dtype = p.dtype;
  return p;
}

template <bool kHasSplits>
__device__ __forceinline__ DecodePlan usual(DecodePlan plan) {
  if (!kHasSplits) plan.split_tiles = 0;
  __builtin_assume((plan.split_tiles > 0) == kHasSplits);
  plan.stages = 2;
  plan.parts_shift = 0;
  plan.row_parts = 1;
  plan.window = -1;
  plan.records_aligned = plan.staging_aligned = plan.q_aligned = plan.out_aligned = true;
  return plan;
}

/// With two blocks of rows a warp there are none (RowShape in decode.cu).
__device__ __forceinline__ DecodePlan without_splits(DecodePlan plan) {
  plan.split_tiles = 0;
  return plan;
}

/// And in rings of one record teams are of one warp, and all that is copied is aligned.
__device__ __forceinline__ DecodePlan of_one_record(DecodePlan plan) {
  plan.split_tiles = 0;
  plan.row_parts = 1;
  plan.parts_shift = 0;
  plan.stages = 2;
  plan.records_aligned = plan.staging_aligned = true;
  return plan;
}

/// Which full tiles are staged, as far as the division of the work is concerned.
enum StagedEnds : int {
  kFirstIsStaged = 1,   ///< the first one of the item
  kNewestIsStaged = 2,  ///< the last one, if it is not the first
};

/// The units of a sequence.
struct SequenceWork {
  int length;
  int queries;
  int first_tile;  ///< that any query sees
  int end_tile;
  int unit_tiles;
  int units;  ///< of an item: at least one, or its output would not be written; a staged tile may
              ///< count as several, and is done with the first of them
  int staged_ends;  ///< kFirstIsStaged, kNewestIsStaged
  int row_blocks;

  __device__ __forceinline__ int64_t items(int kv_heads) const {
    return static_cast<int64_t>(row_blocks) * kv_heads;
  }
  __device__ __forceinline__ int newest_full(const DecodePlan& plan) const {
    return (length >> plan.group_shift) - 1;
  }
};

__device__ __forceinline__ int query_begin(const DecodeParams& p, int64_t seq) {
  return static_cast<int>(p.cu_query_lens.data != nullptr ? p.cu_query_lens[seq] : seq);
}

/// Units that a staged tile of so many tokens counts beyond one.
__device__ __forceinline__ int more_units(const DecodePlan& plan, int tokens) {
  const unsigned units = static_cast<unsigned>(tokens) * plan.staged_units + (1u << 15);
  return max(static_cast<int>(units >> 16) - 1, 0);
}

__device__ __forceinline__ int sequence_length(const DecodeParams& p, int64_t seq) {
  const int64_t length = p.kv.seq_lens[seq];
  return static_cast<int>(length < 0 ? 0 : length > p.max_seq_len ? p.max_seq_len : length);
}

/// An item counts `more` units beyond its tiles, and at least `least`.
__device__ __forceinline__ SequenceWork work_of_length(const DecodeParams& p,
                                                       const DecodePlan& plan, int64_t seq,
                                                       int length, int more, int least) {
  SequenceWork w;
  w.length = length;
  w.queries = query_begin(p, seq + 1) - query_begin(p, seq);
  const int oldest = max(w.length - w.queries, 0);
  const int begin = plan.window < 0 ? 0 : max(oldest - plan.window, 0);
  const int group = 1 << plan.group_shift;
  w.first_tile = w.length > 0 ? begin >> plan.group_shift : 0;
  w.end_tile = (w.length + group - 1) >> plan.group_shift;
  w.unit_tiles = 1;
  w.units = w.end_tile - w.first_tile;
  w.staged_ends = 0;
  if (plan.split_tiles > 0) {
    const int splits = (w.end_tile + plan.split_tiles - 1) / plan.split_tiles;
    w.unit_tiles = plan.split_tiles * max((splits + kMaxSplits - 1) / kMaxSplits, 1);
    w.units = (w.end_tile + w.unit_tiles - 1) / w.unit_tiles - w.first_tile / w.unit_tiles;
  } else if (plan.staged_units > 0 && w.units > 0 && w.queries > 0) {
    // Where there is a pool the open tile is in it, and perhaps the oldest and the newest full one.
    // They take the time of several records.
    const auto is_staged = [&](int tile) {
      return p.kv.block_slot[p.kv.block_table.at(seq, tile)] >= 0;
    };
    const int newest = w.newest_full(plan);
    if (newest >= w.first_tile && is_staged(w.first_tile)) w.staged_ends |= kFirstIsStaged;
    if (newest > w.first_tile && is_staged(newest)) w.staged_ends |= kNewestIsStaged;
    w.units += more_units(plan, w.length & (group - 1)) +
               more_units(plan, group) * __popc(static_cast<unsigned>(w.staged_ends));
  }
  w.units = max(max(w.units, 1) + more, least);
  const int rows = 1 << plan.rows_shift;
  w.row_blocks = (w.queries * plan.heads_per_kv + rows - 1) >> plan.rows_shift;
  return w;
}

__device__ __forceinline__ SequenceWork sequence_work(const DecodeParams& p, const DecodePlan& plan,
                                                      int64_t seq, int more, int least) {
  return work_of_length(p, plan, seq, sequence_length(p, seq), more, least);
}

/// Tokens begin .. end - 1 that a query token sees; 0, 0: none.
struct Visible {
  int begin;
  int end;
};

__device__ __forceinline__ Visible visible(const DecodeParams& p, const DecodePlan& plan,
                                           int length, int queries, int query) {
  const int position = length - queries + query;
  Visible v;
  v.end = p.causal ? max(position + 1, 0) : length;
  v.begin = plan.window < 0 ? 0 : max(position - plan.window, 0);
  if (v.begin >= v.end) v = {0, 0};
  return v;
}

/// What all query tokens first .. last see, and (a bound of) what any of them sees.
struct VisibleRange {
  Visible all;
  Visible any;
};

__device__ __forceinline__ VisibleRange visible_range(const DecodeParams& p, const DecodePlan& plan,
                                                      int length, int queries, int first,
                                                      int last) {
  const Visible a = visible(p, plan, length, queries, first);
  const Visible b = visible(p, plan, length, queries, last);
  return {{b.begin, a.end}, {a.begin, b.end}};
}

/// The units of the whole batch and their division.
struct Division {
  int64_t units;
  unsigned shares;
  int teams;  ///< of a block that have a share (those of the last one with shares may be fewer)
  uint64_t inverse;  ///< 2^64 / shares, rounded up; 0: a share is a unit
  int item_units;    ///< of plan, or 0
  int least_units;   ///< of an item, where nearly all have as many

  /// units is set, and the units of all items if they were as many as those of the longest:
  /// `most`; equal_rows: sequences have equally many items. all_items(): their number, asked for
  /// where items count more than their units, or not at all.
  template <class AllItems>
  __device__ __forceinline__ void settle(const DecodePlan& plan, bool equal_rows, int64_t padded,
                                         int most, const AllItems& all_items) {
    constexpr int kWholes = 16;  // of what padding may add one
    teams = plan.teams;
    shares = gridDim.x * static_cast<unsigned>(plan.teams);
    inverse = plan.inverse_shares;
    item_units = least_units = 0;
    bool equal = equal_rows && padded == units;
    if (!equal && units >= shares && plan.item_units > 0) {
      if (equal_rows && padded * kWholes <= units * (kWholes + 1)) {
        // Lengths of a batch that decodes together: equal but for a few tiles.
        equal = true;
        least_units = most;
        units = padded;
      } else {
        item_units = plan.item_units;
        units += item_units * all_items();
      }
    }
    if (units < shares) {
      // Few units: over as many blocks as possible.
      shares = static_cast<unsigned>(units);
      inverse = 0;
      teams = static_cast<int>(max((shares + gridDim.x - 1) / gridDim.x, 1u));
    } else if (equal && plan.aligned_shares > 0) {
      // Some blocks less, but none waits for another's part of an item.
      shares = plan.aligned_shares;
      inverse = plan.inverse_aligned;
    }
  }

  /// Of a team of the block.
  __device__ __forceinline__ unsigned share_of(int team) const {
    return blockIdx.x * static_cast<unsigned>(teams) + static_cast<unsigned>(team);
  }
  /// units * share / shares.
  __device__ __forceinline__ int64_t share_begin(unsigned share) const {
    if (inverse == 0) return share;
    return share == shares ? units : static_cast<int64_t>(__umul64hi(units * share, inverse));
  }
  /// The block with a unit.
  __device__ __forceinline__ int block_of(int64_t unit) const {
    auto share =
        static_cast<unsigned>(__fdividef(static_cast<float>(unit), static_cast<float>(units)) *
                              static_cast<float>(shares));
    share = min(share, shares - 1);
#pragma unroll 1
    while (share_begin(share) > unit) --share;
#pragma unroll 1
    while (share + 1 < shares && share_begin(share + 1) <= unit) ++share;
    return static_cast<int>(share / static_cast<unsigned>(teams));
  }
};

struct SequenceScan {
  /// Units of the sequences before those of each thread.
  int64_t before[kMaxDecodeWarps * kWarpLanes];
  int64_t units_of_warp[kMaxDecodeWarps];
  int64_t items_of_warp[kMaxDecodeWarps];
  int most_of_warp[kMaxDecodeWarps];
};

__device__ __forceinline__ int64_t inclusive_scan(int64_t x, int lane) {
#pragma unroll
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const int64_t other = __shfl_up_sync(device::kAllLanes, x, distance);
    if (lane >= distance) x += other;
  }
  return x;
}

/// All threads of a block; sequences [i * chunk, (i + 1) * chunk) are thread i's.
template <int kWarps>
__device__ __forceinline__ void divide(const DecodeParams& p, const DecodePlan& plan, int chunk,
                                       SequenceScan& scan, Division (&division)[kMaxDecodeWarps]) {
  const int warp = threadIdx.x / kWarpLanes;
  const int lane = threadIdx.x % kWarpLanes;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * chunk;
  const int64_t end = min(first + chunk, p.kv.seqs);
  const SequenceWork front = sequence_work(p, plan, 0, 0, 0);
  bool same_rows = true;
  int64_t units = 0;
  int64_t items = 0;
  int most = 0;  // units of an item
#pragma unroll 1
  for (int64_t seq = first; seq < end; ++seq) {
    const SequenceWork w = sequence_work(p, plan, seq, 0, 0);
    units += w.items(p.kv.kv_heads) * w.units;
    items += w.items(p.kv.kv_heads);
    same_rows = same_rows && w.row_blocks == front.row_blocks;
    most = max(most, w.units);
  }
  most = __reduce_max_sync(device::kAllLanes, most);
  if (lane == 0) scan.most_of_warp[warp] = most;
  same_rows = __syncthreads_and(same_rows);
  const auto scanned = [&](int64_t own, int64_t (&of_warp)[kMaxDecodeWarps], int64_t& all) {
    const int64_t upto = inclusive_scan(own, lane);
    if (lane == kWarpLanes - 1) of_warp[warp] = upto;
    __syncthreads();
    int64_t before = upto - own;
    all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) before += all;
      all += of_warp[w];
    }
    return before;
  };
  Division d;
  int64_t before = scanned(units, scan.units_of_warp, d.units);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) most = max(most, scan.most_of_warp[w]);
  const int64_t items_of_seq = front.items(p.kv.kv_heads);
  d.settle(plan, same_rows, p.kv.seqs * items_of_seq * most, most, [&] {
    int64_t all_items;
    before += plan.item_units * scanned(items, scan.items_of_warp, all_items);
    return all_items;
  });
  if (d.least_units > 0) before = min(first, p.kv.seqs) * items_of_seq * most;
  scan.before[threadIdx.x] = before;
  if (lane == 0) division[warp] = d;
  __syncthreads();
}

/// The same for a usual step of at most as many sequences as a warp has lanes: each warp for
/// itself, without barriers. length: of the lane's sequence, or else of the last one. Leaves its
/// work in `work` and the units before it in `before` (of lanes without one, all).
__device__ __forceinline__ Division divide_few(const DecodeParams& p, const DecodePlan& plan,
                                               int length, int lane, SequenceWork& work,
                                               unsigned& before) {
  const int seqs = static_cast<int>(p.kv.seqs);
  const int heads = static_cast<int>(p.kv.kv_heads);
  const bool is_one = lane < seqs;
  work = work_of_length(p, plan, min(lane, seqs - 1), length, 0, 0);
  work.row_blocks = 1;
  Division d;
  d.units = uniform(__reduce_add_sync(device::kAllLanes, is_one ? heads * work.units : 0));
  const int most = uniform(__reduce_max_sync(device::kAllLanes, work.units));
  d.settle(plan, true, seqs * heads * most, most, [&] { return int64_t{seqs * heads}; });
  work.units = max(work.units + d.item_units, d.least_units);
  const unsigned own = is_one ? heads * work.units : 0;
  before = own;
#pragma unroll
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const unsigned other = __shfl_up_sync(device::kAllLanes, before, distance);
    if (lane >= distance) before += other;
  }
  before -= own;
  return d;
}

/// Walks through the units of a share, or of several, piece after piece: what they have of an item.
struct Cursor {
  int seq;
  int head;
  int row_block;
  int unit;   ///< first unit of the piece
  int count;  ///< units of the piece
  int left;   ///< units of the share from the piece on
  int tile;
  int tile_end;
  int64_t item_start;  ///< number of the item's first unit in the whole batch
  SequenceWork work;

  template <int kWarps>
  __device__ __forceinline__ void start(const DecodeParams& p, const DecodePlan& plan,
                                        const Division& d, const SequenceScan& scan, int chunk,
                                        unsigned share, unsigned shares = 1) {
    const int64_t begin = d.share_begin(share);
    left = static_cast<int>(d.share_begin(share + shares) - begin);
    // The last thread whose sequences begin at or before `begin`: first of every kWarps-th, then of
    // those behind it.
    const auto last_of = [&](bool is) {
      return 31 - __clz(static_cast<int>(__ballot_sync(device::kAllLanes, is)));
    };
    const int lane = static_cast<int>(threadIdx.x % kWarpLanes);
    int owner = kWarps * last_of(scan.before[kWarps * lane] <= begin);
    owner += last_of(lane < kWarps && scan.before[owner + lane] <= begin);
    int64_t before = scan.before[owner];
    for (seq = owner * chunk;; ++seq) {
      work = sequence_work(p, plan, seq, d.item_units, d.least_units);
      const int64_t units = work.items(p.kv.kv_heads) * work.units;
      if (before + units > begin) break;
      before += units;
    }
    begin_item(p, plan, begin, begin - before);
  }

  /// The same for a usual step of few sequences, each in a lane: its work and the units before it.
  __device__ __forceinline__ void start_few(const DecodeParams& p, const DecodePlan& plan,
                                            const Division& d, const SequenceWork& of_lane,
                                            unsigned before, unsigned share) {
    const int64_t begin = d.share_begin(share);
    left = static_cast<int>(d.share_begin(share + 1) - begin);
    seq = 31 - __clz(static_cast<int>(
                   __ballot_sync(device::kAllLanes, before <= static_cast<unsigned>(begin))));
    const auto of_owner = [&](int x) { return uniform(__shfl_sync(device::kAllLanes, x, seq)); };
    work = of_lane;
    work.length = of_owner(of_lane.length);
    work.end_tile = (work.length + (1 << plan.group_shift) - 1) >> plan.group_shift;
    work.units = of_owner(of_lane.units);
    work.staged_ends = plan.staged_units > 0 ? of_owner(of_lane.staged_ends) : 0;
    begin_item(p, plan, begin, static_cast<unsigned>(begin) - of_owner(static_cast<int>(before)));
  }

  /// To the next piece; count == left: there is none.
  __device__ __forceinline__ void next(const DecodeParams& p, const DecodePlan& plan,
                                       const Division& d) {
    left -= count;
    unit += count;
    if (unit == work.units) {
      unit = 0;
      item_start += work.units;
      if (++row_block == work.row_blocks) {
        row_block = 0;
        if (++head == p.kv.kv_heads) {
          head = 0;
          do {
            work = sequence_work(p, plan, ++seq, d.item_units, d.least_units);
          } while (work.row_blocks == 0);
        }
      }
    }
    open(p, plan);
  }

  /// With splits: the tile behind the first unit of the piece.
  __device__ __forceinline__ int unit_end() const {
    return (work.first_tile / work.unit_tiles + unit + 1) * work.unit_tiles;
  }

  __device__ __forceinline__ bool begins_item() const { return unit == 0; }
  __device__ __forceinline__ bool ends_item() const { return unit + count == work.units; }

 private:
  /// At unit `begin`, which is the unit `rest` of the sequence.
  __device__ __forceinline__ void begin_item(const DecodeParams& p, const DecodePlan& plan,
                                             int64_t begin, int64_t rest) {
    unsigned item;
    if (rest >> 32 == 0) {  // a 64-bit division takes long
      item = static_cast<unsigned>(rest) / static_cast<unsigned>(work.units);
    } else {
      item = static_cast<unsigned>(rest / work.units);
    }
    unit = static_cast<int>(rest - int64_t{item} * work.units);
    head = static_cast<int>(item / static_cast<unsigned>(work.row_blocks));
    row_block = static_cast<int>(item % static_cast<unsigned>(work.row_blocks));
    item_start = begin - unit;
    open(p, plan);
  }

  /// The first tile that begins with the unit or behind it.
  __device__ __forceinline__ int tile_of(const DecodePlan& plan, int of_unit) const {
    if (plan.split_tiles > 0) {
      const int from = (work.first_tile / work.unit_tiles + of_unit) * work.unit_tiles;
      return min(max(from, work.first_tile), work.end_tile);
    }
    const int more = more_units(plan, 1 << plan.group_shift);
    const int newest = work.newest_full(plan);
    int at = of_unit;
    if (at > 0 && (work.staged_ends & kFirstIsStaged)) at = max(at - more, 1);
    at += work.first_tile;
    if (at > newest && (work.staged_ends & kNewestIsStaged)) at = max(at - more, newest + 1);
    return min(at, work.end_tile);
  }

  __device__ __forceinline__ void open(const DecodeParams& p, const DecodePlan& plan) {
    count = min(left, work.units - unit);
    // Of several row blocks some may see nothing of a split, which is then a piece without tiles.
    if (plan.split_tiles > 0 && work.row_blocks > 1) count = 1;
    tile = tile_of(plan, unit);
    tile_end = tile_of(plan, unit + count);
    if (work.row_blocks == 1) return;
    const int rows = 1 << plan.rows_shift;
    const int last_row = min((row_block + 1) * rows, work.queries * plan.heads_per_kv) - 1;
    const Visible any =
        visible_range(p, plan, work.length, work.queries, row_block * rows / plan.heads_per_kv,
                      last_row / plan.heads_per_kv)
            .any;
    tile = max(tile, any.begin >> plan.group_shift);
    tile_end = min(tile_end, (any.end + (1 << plan.group_shift) - 1) >> plan.group_shift);
    tile_end = max(tile_end, tile);
  }
};

}  // namespace kvarn::cuda
