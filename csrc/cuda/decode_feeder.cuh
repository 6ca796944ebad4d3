// Brings the tiles of a team's share into its ring.
#pragma once

#include <cstdint>

#include "cuda/decode_shared.cuh"

namespace kvarn::cuda {

/// Of the first warp of a team, all lanes together. Tiles are looked up a *window* at a time: as
/// many of a piece as there are lanes; lane i knows where tile first_ + i lies, and copies it. Of
/// the window to come the entries of the block table are asked for when a window is opened and
/// their staging slots a tile later, so that nobody waits for them.
class Feeder {
 public:
  __device__ __forceinline__ Feeder(const DecodeParams& p, const DecodePlan& plan,
                                    DecodeShared& shared, uint8_t* ring, int stage_bytes, int team,
                                    int lane)
      : p_(p),
        plan_(plan),
        shared_(shared),
        ring_(ring),
        bytes_(stage_bytes),
        team_(team),
        lane_(lane) {}

  /// cursor: at the begin of the share. Fills the ring.
  __device__ __forceinline__ void start(const Cursor& cursor) {
    if (lane_ == 0) {
      TeamShare& share = shared_.share[team_];
      share.first = item(cursor);
      share.cut_at_begin = plan_.split_tiles == 0 && !cursor.begins_item();
      shared_.cursor[team_] = cursor;
    }
    __syncwarp();
    ask(cursor, cursor.tile);
    open_window(cursor, true);
    for (int i = 0; i < plan_.stages && !ended_; ++i) fill_stage();
  }

  /// Of a team of one warp: replaces a tile that was just used up.
  __device__ __forceinline__ void refill() {
    if (quick_ > 0) {
      // Nothing but a copy, of a tile that is neither the first nor the last of its piece.
      const int at = team_ * plan_.stages + stage_;
      if (lane_ == next_ - first_) shared_.tile[at] = {next_, -1, flags_};
      copy(record_, next_ - first_, ring_ + stage_ * bytes_, &shared_.full[at]);
      ++next_;
      if (++stage_ == plan_.stages) stage_ = 0;
      --quick_;
      if (asked_) ask_slots();
    } else if (!ended_) {
      fill_stage();
    }
  }

  /// Of a team of several: fills all stages that are free. used: how many the warp itself has used
  /// up; it goes on to the next, which will have been filled.
  __device__ __forceinline__ void fill(int used) {
    while (!ended_ && filled_ < used + plan_.stages) {
      device::Barrier* const empty = &shared_.empty[team_ * plan_.stages + stage_];
      const unsigned parity = (filled_ / plan_.stages - 1) & 1;
      if (filled_ == used) {
        device::barrier_wait(empty, parity);
      } else if (!uniform(device::barrier_passed(empty, parity))) {
        return;
      }
      fill_stage();
    }
  }

  /// How many tiles behind `tile`, which a team of one warp is about to use, are like each other:
  /// records of the same piece, not its last one, all of which all rows see (`seen`).
  __device__ __forceinline__ int like_tiles(int tile, const Visible& seen) const {
    if (plan_.row_parts > 1 || ended_ || tile != next_ - plan_.stages || tile < begin_ ||
        staged_ >= tile) {
      return 0;
    }
    const int group_bits = plan_.group_shift;
    if ((tile + 1) << group_bits < seen.begin) return 0;
    const unsigned staged = next_ < found_ ? staged_ahead_ >> (next_ - first_) : 0;
    const int records = staged == 0 ? found_ : next_ + __ffs(static_cast<int>(staged)) - 1;
    return max(min(min(records, end_ - 1), seen.end >> group_bits) - (tile + 1), 0);
  }

 private:
  __device__ __forceinline__ static ItemPlace item(const Cursor& c) {
    return {c.item_start, c.work.units, c.seq, c.head, c.row_block};
  }

  /// For the blocks of a window, the lane's tile being `tile` + lane.
  __device__ __forceinline__ void ask(const Cursor& cursor, int tile) {
    coming_block_ = -1;
    if (tile + lane_ < cursor.tile_end) {
      coming_block_ = p_.kv.block_table.at(cursor.seq, tile + lane_);
    }
    asked_ = true;
  }

  __device__ __forceinline__ void ask_slots() {
    coming_slot_ = -1;
    if (p_.kv.block_slot.data != nullptr && coming_block_ >= 0) {
      coming_slot_ = static_cast<int>(p_.kv.block_slot[coming_block_]);
    }
    asked_ = false;
  }

  /// Goes on to the window that was asked for, of the cursor's piece, and asks for the next.
  __device__ __forceinline__ void open_window(Cursor cursor, bool is_new_piece) {
    if (is_new_piece) {
      begin_ = next_ = cursor.tile;
      staged_ = -1;
      end_ = cursor.tile_end;
      flags_ = kFirstTile | (cursor.begins_item() ? kBeginsItem : 0) |
               (cursor.ends_item() ? kEndsItem : 0) | (next_ == end_ ? kNoTile : 0);
      is_last_piece_ = cursor.count == cursor.left;
      if (lane_ == 0) {
        shared_.opened[team_] = {cursor.seq,        cursor.head,
                                 cursor.row_block,  cursor.unit,
                                 cursor.work.units, static_cast<int>(cursor.item_start)};
        if (is_last_piece_) {
          const ItemPlace last = item(cursor);
          TeamShare& share = shared_.share[team_];
          share.last = last;
          share.cut_at_end = plan_.split_tiles == 0 && !cursor.ends_item();
          share.middle = share.cut_at_end && share.cut_at_begin && share.first.start == last.start;
        }
      }
    }
    if (asked_) ask_slots();
    first_ = next_;
    found_ = max(min(next_ + kWarpLanes, end_), next_ + 1);  // a piece without tiles has one stage
    slot_ = coming_slot_;
    record_ = nullptr;
    if (coming_block_ >= 0 && slot_ < 0) {
      record_ = p_.kv.cache.data + coming_block_ * p_.kv.cache.stride[0] +
                cursor.head * p_.kv.cache.stride[1];
    }
    staged_ahead_ = __ballot_sync(device::kAllLanes, slot_ >= 0);
    if (found_ < end_) {
      ask(cursor, found_);
    } else if (!is_last_piece_) {
      cursor.next(p_, plan_);
      if (lane_ == 0) shared_.cursor[team_] = cursor;
      ask(cursor, cursor.tile);
    }
  }

  __device__ __forceinline__ void fill_stage() {
    __syncwarp();
    if (next_ == found_) open_window(shared_.cursor[team_], next_ >= end_);
    __syncwarp();
    const int at = team_ * plan_.stages + stage_;
    const int owner = next_ - first_;
    const bool is_last = next_ + 1 >= end_;
    ended_ = is_last && is_last_piece_;
    if (lane_ == owner) {
      if (flags_ & kFirstTile) shared_.piece[at] = shared_.opened[team_];
      shared_.tile[at] = {next_, slot_, flags_ | (is_last ? kLastTile : 0) | (ended_ ? kEnd : 0)};
      if (plan_.row_parts > 1) device::barrier_arrive(&shared_.told[at]);
    }
    if ((staged_ahead_ >> owner & 1) != 0) staged_ = next_;
    copy(record_, owner, ring_ + stage_ * bytes_, &shared_.full[at]);
    ++next_;
    ++filled_;
    if (++stage_ == plan_.stages) stage_ = 0;
    flags_ &= ~kFirstTile;
    const unsigned staged = next_ < found_ ? staged_ahead_ >> (next_ - first_) : 0;
    quick_ = max(
        min(staged == 0 ? found_ : next_ + __ffs(static_cast<int>(staged)) - 1, end_ - 1) - next_,
        0);
  }

  __device__ __forceinline__ void copy(const uint8_t* record, int owner, uint8_t* stage,
                                       device::Barrier* full) {
    if (device::RingCopy::kOneLane && plan_.records_aligned) {
      if (lane_ != owner) return;
      if (record != nullptr) {
        device::RingCopy::copy(stage, record, bytes_, full, 0);
      } else {
        device::RingCopy::arrive_alone(full);
      }
      return;
    }
    const auto* const from = reinterpret_cast<const uint8_t*>(
        __shfl_sync(device::kAllLanes, reinterpret_cast<unsigned long long>(record), owner));
    if (from != nullptr && plan_.records_aligned) {
      device::RingCopy::copy(stage, from, bytes_, full, lane_);
      return;
    }
    if (from != nullptr) device::copy_bytes(stage, from, bytes_, lane_);
    __syncwarp();
    if (lane_ == 0) device::RingCopy::arrive_alone(full);
  }

  const DecodeParams& p_;
  const DecodePlan& plan_;
  DecodeShared& shared_;
  uint8_t* const ring_;
  const int bytes_;
  const int team_;
  const int lane_;
  int stage_ = 0;   ///< to be filled next
  int filled_ = 0;  ///< stages so far, of a team of several warps
  int quick_ = 0;   ///< that many tiles to come need nothing but a copy
  int begin_;       ///< of the piece
  int next_;        ///< tile
  int first_;       ///< tiles first_ .. found_ - 1 are the window
  int found_;
  int end_;
  int flags_;
  bool is_last_piece_;  ///< of the share
  bool ended_ = false;
  const uint8_t* record_;  ///< of tile first_ + lane; null: there is none
  int slot_;
  unsigned staged_ahead_;  ///< bit i: tile first_ + i is staged
  int staged_;             ///< the last tile of the piece that was
  bool asked_;             ///< for the blocks of the window to come, not yet for their slots
  int64_t coming_block_;   ///< -1: none
  int coming_slot_;
};

}  // namespace kvarn::cuda
