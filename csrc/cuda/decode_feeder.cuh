// Brings the tiles of a team's share into its ring.
#pragma once

#include <cstdint>

#include "cuda/decode_shared.cuh"

namespace kvarn::cuda {

/// A feeder in shared memory, for a warp that needs its registers meanwhile.
struct alignas(16) ParkedFeeder {
  int4 words[3];
  const uint8_t* record[kWarpLanes];
  int slot[kWarpLanes];
};

/// What the first warp of a team needs of a parked feeder while tiles are like each other: records
/// of one piece that have been looked up, none of them its first or last. A stage is filled again
/// when the team is known to have used it up, while it works on the next.
struct FeederRun {
  const uint8_t* record;  ///< as in Feeder
  int next;
  int index;  ///< lane that knows where the next one is
  int stage;
  int flags;
  int bytes;
  int left = 0;          ///< records to be brought
  bool is_none = true;   ///< nothing has been brought
  bool waiting = false;  ///< a stage has been used up and not been filled again

  /// The team has used up a stage; whether it will be filled without the feeder.
  __device__ __forceinline__ bool use_up() {
    if (left == 0 || waiting) return false;
    waiting = true;
    return true;
  }

  __device__ __forceinline__ void replace(DecodeShared& shared, uint8_t* rings, int stage_bytes,
                                          int team, int stages, int lane) {
    if (!waiting) return;
    waiting = false;
    const int at = team * stages + stage;
    if (lane == index) {
      shared.tile[at] = {next, -1, flags | (left - 1) << kRunShift};
      device::barrier_arrive(&shared.told[at]);
      device::RingCopy::copy(rings + at * stage_bytes, record, bytes, &shared.full[at], 0);
    }
    __syncwarp();
    ++next;
    ++index;
    --left;
    if (++stage == stages) stage = 0;
  }
};

/// Of the first warp of a team, all lanes together. Tiles are looked up as many of a piece at a
/// time as there are lanes: lane i knows where tile first_ + i lies, and copies it.
///
/// kOneRecord: the ring has the bytes of one record. They are replaced as they are used up, first
/// its keys and then its values, which have a barrier of their own; all else is double, as for two
/// stages.
template <bool kOneRecord>
class Feeder {
 public:
  __device__ __forceinline__ Feeder(const DecodeParams& p, const DecodePlan& plan,
                                    DecodeShared& shared, uint8_t* ring, int stage_bytes,
                                    const RecordLayout& layout, int team, int lane)
      : p_(p),
        plan_(plan),
        shared_(shared),
        ring_(ring),
        stage_bytes_(stage_bytes),
        record_bytes_(layout.bytes),
        key_bytes_(layout.value_codes),
        team_(team),
        lane_(lane) {}

  /// cursor: at the begin of the share.
  __device__ __forceinline__ void start(const Cursor& cursor) {
    if (lane_ == 0) {
      TeamShare& share = shared_.share[team_];
      share.first = item(cursor);
      share.cut_at_begin = !cursor.begins_item();
    }
    open(cursor);
  }

  /// Fills all stages that are free. The warp itself goes on to the next stage it has not used up,
  /// which will have been filled. kOneRecord: and looks ahead for the tile behind.
  __device__ __forceinline__ void fill() {
    if constexpr (kOneRecord) {
      while ((flags_ & (kEnd | kPending)) == 0) {
        look();
        if (ahead_ == 0) {
          wait_for_turn();
          ask_for_keys();
          ask_for_values();
          ++ahead_;
        }
      }
    } else {
      while ((flags_ & kEnd) == 0 && ahead_ < plan_.stages) {
        // What a team of one warp has used up is free.
        if (plan_.row_parts > 1 && lap_ > 0) {
          device::Barrier* const empty = &shared_.empty[team_ * plan_.stages + stage_];
          const unsigned parity = (lap_ - 1) & 1;
          if (ahead_ == 0) {
            device::barrier_wait(empty, parity);
          } else if (!__all_sync(device::kAllLanes, device::barrier_passed(empty, parity))) {
            return;
          }
        }
        look();
        ask_for_keys();
        ask_for_values();
        ++ahead_;
      }
    }
  }

  /// Of a team of several warps, when at most one stage has not been filled.
  __device__ __forceinline__ FeederRun begin_run() const {
    FeederRun run;
    // Copies of every lane, or by elements, are not for runs.
    if (!device::RingCopy::kOneLane || !plan_.records_aligned || ahead_ < plan_.stages - 1 ||
        (flags_ & (kEnd | kFirstTile | kPartOfTile)) != 0 || next_ == found_) {
      return run;
    }
    const int records = records_ahead();
    run.left = max(min(min(found_ - next_, end_of_piece() - 1 - next_), records), 0);
    run.record = record_;
    run.next = next_;
    run.index = next_ - first_;
    run.stage = stage_;
    run.flags = flags_;
    run.bytes = record_bytes_;
    run.is_none = run.left == 0;
    run.waiting = ahead_ < plan_.stages;
    return run;
  }

  /// When a stage has been used up that the run does not fill again.
  __device__ __forceinline__ void end_run(const FeederRun& run) {
    if (run.is_none) {
      --ahead_;
      return;
    }
    lap_ += static_cast<unsigned>((stage_ + run.next - next_) / plan_.stages);
    next_ = run.next;
    stage_ = run.stage;
    ahead_ = plan_.stages - (run.waiting ? 2 : 1);
  }

  __device__ __forceinline__ void park(ParkedFeeder& to) const {
    __syncwarp();
    if (lane_ == 0) {
      to.words[0] = {ahead_, stage_, static_cast<int>(lap_), next_};
      to.words[1] = {token_, first_, found_, flags_};
      to.words[2] = {static_cast<int>(staged_ahead_), run_from_, 0, 0};
    }
    to.record[lane_] = record_;
    to.slot[lane_] = slot_;
    __syncwarp();
  }
  __device__ __forceinline__ void unpark(const ParkedFeeder& from) {
    const int4 a = from.words[0];
    const int4 b = from.words[1];
    const int4 c = from.words[2];
    ahead_ = a.x;
    stage_ = a.y;
    lap_ = static_cast<unsigned>(a.z);
    next_ = a.w;
    token_ = b.x;
    first_ = b.y;
    found_ = b.z;
    flags_ = b.w;
    staged_ahead_ = static_cast<unsigned>(c.x);
    run_from_ = c.y;
    record_ = from.record[lane_];
    slot_ = from.slot[lane_];
  }

  /// What only other tiles than those of a run need, so that no register holds it meanwhile.
  __device__ __forceinline__ void park_rest(ParkedFeeder& to) const {
    __syncwarp();
    if (lane_ == 0) to.words[0] = {token_, found_, run_from_, static_cast<int>(staged_ahead_)};
    to.slot[lane_] = slot_;
    __syncwarp();
  }
  __device__ __forceinline__ void unpark_rest(const ParkedFeeder& from) {
    const int4 a = from.words[0];
    token_ = a.x;
    found_ = a.y;
    run_from_ = a.z;
    staged_ahead_ = static_cast<unsigned>(a.w);
    slot_ = from.slot[lane_];
  }

  /// The warp has used up a stage.
  __device__ __forceinline__ void use_up() { --ahead_; }

  /// kOneRecord: it has used up the keys, or then the values, and asks for the next ones.
  __device__ __forceinline__ void use_up_keys() {
    if (flags_ & kPending) ask_for_keys();
  }
  __device__ __forceinline__ void use_up_values() {
    if (flags_ & kPending) ask_for_values();
  }

  /// Of a team of one warp whose ring is full: how many tiles it can use up and replace one after
  /// the other without anything but copies: records of one piece, none of them its first or last,
  /// that have been looked up. seen: tokens that all its rows see.
  __device__ __forceinline__ int run_length(const Visible& seen) const {
    if ((flags_ & kEnd) != 0 || plan_.row_parts > 1 || next_ == found_) return 0;
    const int tile = next_ - (kOneRecord ? 1 : plan_.stages);  // to be used up next
    const int group = 1 << plan_.group_shift;
    const int from = max(run_from_, (seen.begin + group - 1) >> plan_.group_shift);
    if (tile < from) return 0;
    const int records = records_ahead();
    return max(min(min(found_ - next_, end_of_piece() - 1 - next_),
                   min(records, (seen.end >> plan_.group_shift) - tile)),
               0);
  }

  /// Replaces one of them, which was just used up; with kOneRecord, its keys.
  __device__ __forceinline__ void replace() {
    const int at = team_ * plan_.stages + stage_;
    if (lane_ == next_ - first_) shared_.tile[at] = {next_, -1, flags_};
    copy(next_ - first_, stage(), &shared_.full[at]);
    if (!kOneRecord) advance();
  }
  __device__ __forceinline__ void replace_values() {
    flags_ &= ~kPending;
    copy_values(next_ - first_);
    advance();
  }

 private:
  /// The first records of all warps at once take longer than the latency of memory, and what the
  /// warps still have to fetch, instructions and queries, would wait behind them.
  __device__ __forceinline__ static void wait_for_turn() {
    constexpr int kClocks = 500;  // a multiprocessor gets a record of k4v2 in 800
    const unsigned start = clock();
    const int turn = own_warp() * kClocks;
    while (uniform(static_cast<int>(clock() - start)) < turn) {
    }
  }

  __device__ __forceinline__ static ItemPlace item(const Cursor& c) {
    return {c.item_start, c.seq, c.head, c.row_block};
  }

  __device__ __forceinline__ void open(const Cursor& cursor) {
    next_ = cursor.tile;
    run_from_ = next_ + 1;
    flags_ = kFirstTile | (cursor.begins_item() ? kBeginsItem : 0) |
             (cursor.ends_item() ? kEndsItem : 0) | (next_ == cursor.tile_end ? kNoTile : 0) |
             (cursor.count == cursor.left ? kLastPiece : 0);
    if (lane_ == 0) {
      shared_.cursor[team_] = cursor;
      if (flags_ & kLastPiece) {
        TeamShare& share = shared_.share[team_];
        share.cut_at_end = !cursor.ends_item();
        share.middle =
            share.cut_at_end && share.cut_at_begin && share.first.start == cursor.item_start;
      }
    }
    find(cursor);
  }

  /// The next tiles of the piece.
  __device__ __forceinline__ void find(const Cursor& cursor) {
    first_ = next_;
    // A piece without tiles has one stage.
    found_ = max(min(next_ + kWarpLanes, cursor.tile_end), next_ + 1);
    record_ = nullptr;
    slot_ = -1;
    const int tile = next_ + lane_;
    if (tile < cursor.tile_end) {
      const int64_t block = p_.kv.block_table.at(cursor.seq, tile);
      if (p_.kv.block_slot.data != nullptr) slot_ = static_cast<int>(p_.kv.block_slot[block]);
      if (slot_ < 0) {
        record_ =
            p_.kv.cache.data + block * p_.kv.cache.stride[0] + cursor.head * p_.kv.cache.stride[1];
      }
    }
    staged_ahead_ = __ballot_sync(device::kAllLanes, slot_ >= 0);
  }

  /// More tiles of the piece, or the next piece.
  __device__ __forceinline__ void more() {
    __syncwarp();
    Cursor cursor = shared_.cursor[team_];
    __syncwarp();
    if (next_ < cursor.tile_end) {
      find(cursor);
    } else {
      cursor.next(p_, plan_, shared_.division[own_warp()]);
      open(cursor);
    }
  }

  __device__ __forceinline__ void advance() {
    ++next_;
    if (++stage_ == plan_.stages) stage_ = 0;
  }

  __device__ __forceinline__ uint8_t* stage() const {
    return ring_ + (kOneRecord ? 0 : stage_ * stage_bytes_);
  }

  /// Says what the next stage will hold.
  __device__ __forceinline__ void look() {
    if (next_ == found_) more();
    const int at = team_ * plan_.stages + stage_;
    const int owner = next_ - first_;
    __syncwarp();  // lane 0 has written the cursor
    const int rows = staged_rows();
    const bool is_whole = rows <= device::kStagedTokens;  // with this stage
    const bool is_last = is_whole && next_ + 1 >= end_of_piece();
    if (is_last && (flags_ & kLastPiece) != 0) flags_ |= kEnd;
    __syncwarp();
    if (lane_ == owner) {
      if (flags_ & kFirstTile) {
        const Cursor& c = shared_.cursor[team_];
        StagePiece piece{c.seq, c.head, c.row_block, c.work.units, 0, 0, 0};
        if (plan_.split_tiles > 0) {
          piece.unit = static_cast<int>(c.item_start) + c.unit;
          piece.unit_tiles = c.work.unit_tiles;
          piece.tiles_left = c.unit_end() - c.tile;
        }
        shared_.piece[at] = piece;
      }
      shared_.tile[at] = {next_, rows > 0 ? token_ : -1, flags_ | (is_last ? kLastTile : 0)};
      if (plan_.row_parts > 1) device::barrier_arrive(&shared_.told[at]);
    }
    if (rows > 0) run_from_ = next_ + 1;
    flags_ = (flags_ & ~(kFirstTile | kPartOfTile)) | kPending | (is_whole ? 0 : kPartOfTile);
  }

  /// Of the tiles from the next one on that have been looked up, those before a staged one.
  __device__ __forceinline__ int records_ahead() const {
    const unsigned staged = staged_ahead_ >> (next_ - first_);
    return staged == 0 ? kWarpLanes : __ffs(static_cast<int>(staged)) - 1;
  }

  __device__ __forceinline__ int end_of_piece() const { return shared_.cursor[team_].tile_end; }

  /// Of the next tile, if it is staged, from token_ on; else 0.
  __device__ __forceinline__ int staged_rows() const {
    if ((staged_ahead_ >> (next_ - first_) & 1) == 0) return 0;
    const int length = shared_.cursor[team_].work.length;
    return min(length - (next_ << plan_.group_shift), 1 << plan_.group_shift) - token_;
  }

  /// Of it: the keys or, unless kOneRecord, all.
  __device__ __forceinline__ void ask_for_keys() {
    device::Barrier* const full = &shared_.full[team_ * plan_.stages + stage_];
    if (const int rows = staged_rows(); rows > 0) {
      copy_staged(next_ - first_, rows, 0, stage(), full);
    } else {
      copy(next_ - first_, stage(), full);
    }
  }

  /// The rest, and on to the next.
  __device__ __forceinline__ void ask_for_values() {
    if constexpr (kOneRecord) {
      if (const int rows = staged_rows(); rows > 0) {
        copy_staged(next_ - first_, rows, p_.kv.staging.stride[1], stage() + key_bytes_,
                    &shared_.full_values[team_ * plan_.stages + stage_]);
      } else {
        copy_values(next_ - first_);
      }
    }
    if (flags_ & kPartOfTile) {
      token_ += device::kStagedTokens;
    } else {
      ++next_;
      token_ = 0;
    }
    flags_ &= ~kPending;
    if (++stage_ == plan_.stages) {
      stage_ = 0;
      ++lap_;
    }
  }

  /// 16 tokens of the owner's tile, which is staged, to a stage: keys, then values; with kOneRecord
  /// the keys, or what lies `part` elements behind them. Rows that the sequence does not have are
  /// not read.
  __device__ __forceinline__ void copy_staged(int owner, int rows, int64_t part, uint8_t* stage,
                                              device::Barrier* full) {
    const Staging& pool = p_.kv.staging;
    const int slot = __shfl_sync(device::kAllLanes, slot_, owner);
    const int head = shared_.cursor[team_].head;
    const int row_bytes = 2 * p_.kv.format.head_dim;
    const auto* const keys = reinterpret_cast<const uint8_t*>(
        static_cast<const uint16_t*>(pool.data) + slot * pool.stride[0] + part +
        head * pool.stride[2] + token_ * pool.stride[3]);
    const device::RowsCopy copy{keys, 2 * pool.stride[1], 2 * pool.stride[3], row_bytes,
                                min(rows, device::kStagedTokens)};
    uint8_t* const values = stage + device::kStagedTokens * row_bytes;
    if (kOneRecord || plan_.staging_aligned) {
      device::RingCopy::copy_rows<kOneRecord ? 1 : 2>(copy, stage, values, full, lane_);
      return;
    }
    copy.by_elements(stage, values, lane_);
    device::fence_for_async_proxy();
    __syncwarp();
    if (lane_ == 0) device::RingCopy::arrive_alone(full);
  }

  /// The record of the owner's tile, if it is one, to a stage; with kOneRecord its keys.
  __device__ __forceinline__ void copy(int owner, uint8_t* stage, device::Barrier* full) {
    copy_part(owner, 0, kOneRecord ? key_bytes_ : record_bytes_, stage, full);
  }
  __device__ __forceinline__ void copy_values(int owner) {
    copy_part(owner, key_bytes_, record_bytes_ - key_bytes_, stage() + key_bytes_,
              &shared_.full_values[team_ * plan_.stages + stage_]);
  }

  /// Bytes of the record from `begin` on.
  __device__ __forceinline__ void copy_part(int owner, int begin, int bytes, uint8_t* to,
                                            device::Barrier* full) {
    if (device::RingCopy::kOneLane && plan_.records_aligned) {
      if (lane_ != owner) return;
      if (record_ != nullptr) {
        device::RingCopy::copy(to, record_ + begin, bytes, full, 0);
      } else {
        device::RingCopy::arrive_alone(full);
      }
      return;
    }
    const auto* const from = reinterpret_cast<const uint8_t*>(
        __shfl_sync(device::kAllLanes, reinterpret_cast<unsigned long long>(record_), owner));
    if (from != nullptr && plan_.records_aligned) {
      device::RingCopy::copy(to, from + begin, bytes, full, lane_);
      return;
    }
    if (from != nullptr) device::copy_bytes(to, from + begin, bytes, lane_);
    device::fence_for_async_proxy();
    __syncwarp();
    if (lane_ == 0) device::RingCopy::arrive_alone(full);
  }

  const DecodeParams& p_;
  const DecodePlan& plan_;
  DecodeShared& shared_;
  uint8_t* const ring_;
  const int stage_bytes_;
  const int record_bytes_;
  const int key_bytes_;
  const int team_;
  const int lane_;
  int ahead_ = 0;     ///< stages that are filled and that the warp itself has not used up;
                      ///< kOneRecord: 0 before the first was asked for
  int stage_ = 0;     ///< to be filled next
  unsigned lap_ = 0;  ///< times round the ring
  int next_;          ///< tile
  int token_ = 0;     ///< of it, if it is staged
  int first_;         ///< tiles first_ .. found_ - 1 have been looked up
  int found_;
  int flags_;
  const uint8_t* record_;  ///< of tile first_ + lane; null: there is none
  int slot_;               ///< -1: it is a record
  unsigned staged_ahead_;  ///< bit i: tile first_ + i is staged
  int run_from_;           ///< behind the first tile of the piece and the last staged one
};

}  // namespace kvarn::cuda
