// Brings the tiles of a team's share into its ring.
#pragma once

#include <cstdint>

#include "cuda/decode_shared.cuh"

namespace kvarn::cuda {

/// Of the first warp of a team, all lanes together. Tiles are looked up as many of a piece at a time
/// as there are lanes: lane i knows where tile first_ + i lies, and copies it.
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

  /// cursor: at the begin of the share.
  __device__ __forceinline__ void start(const Cursor& cursor) {
    if (lane_ == 0) {
      TeamShare& share = shared_.share[team_];
      share.first = item(cursor);
      share.cut_at_begin = plan_.split_tiles == 0 && !cursor.begins_item();
    }
    open(cursor);
  }

  /// Fills all stages that are free. `used`: how many the warp itself has used up; it goes on to the
  /// next, which will have been filled.
  __device__ __forceinline__ void fill(int used) {
    while (!ended_ && filled_ < used + plan_.stages) {
      device::Barrier* const empty = &shared_.empty[team_ * plan_.stages + stage_];
      // What a team of one warp has used up is free.
      if (plan_.row_parts > 1 && filled_ >= plan_.stages) {
        if (filled_ > used) {
          if (!uniform(device::barrier_passed(empty, parity_))) return;
        } else {
          device::barrier_wait(empty, parity_);
        }
      }
      fill_stage(team_ * plan_.stages + stage_, ring_ + stage_ * bytes_);
      ++filled_;
      if (++stage_ == plan_.stages) {
        stage_ = 0;
        if (filled_ > plan_.stages) parity_ ^= 1;
      }
    }
  }

 private:
  __device__ __forceinline__ static ItemPlace item(const Cursor& c) {
    return {c.item_start, c.work.units, c.seq, c.head, c.row_block};
  }

  __device__ __forceinline__ void open(const Cursor& cursor) {
    next_ = cursor.tile;
    end_ = cursor.tile_end;
    flags_ = kFirstTile | (cursor.begins_item() ? kBeginsItem : 0) |
             (cursor.ends_item() ? kEndsItem : 0) | (next_ == end_ ? kNoTile : 0);
    if (lane_ == 0) shared_.cursor[team_] = cursor;
    find(cursor);
  }

  /// The next tiles of the piece.
  __device__ __forceinline__ void find(const Cursor& cursor) {
    first_ = next_;
    found_ = max(min(next_ + kWarpLanes, end_), next_ + 1);  // a piece without tiles has one stage
    record_ = nullptr;
    slot_ = -1;
    const int tile = next_ + lane_;
    if (tile < end_) {
      const int64_t block = p_.kv.block_table.at(cursor.seq, tile);
      if (p_.kv.block_slot.data != nullptr) slot_ = static_cast<int>(p_.kv.block_slot[block]);
      if (slot_ < 0) {
        record_ =
            p_.kv.cache.data + block * p_.kv.cache.stride[0] + cursor.head * p_.kv.cache.stride[1];
      }
    }
  }

  /// More tiles of the piece, or the next piece; or that there is none.
  __device__ __forceinline__ void more() {
    __syncwarp();
    Cursor cursor = shared_.cursor[team_];
    __syncwarp();
    if (next_ < end_) {
      find(cursor);
      return;
    }
    const bool cut = plan_.split_tiles == 0 && !cursor.ends_item();
    const ItemPlace last = item(cursor);
    if (cursor.next(p_, plan_)) {
      open(cursor);
      return;
    }
    ended_ = true;
    if (lane_ == 0) {
      TeamShare& share = shared_.share[team_];
      share.last = last;
      share.cut_at_end = cut;
      share.middle = cut && share.cut_at_begin && share.first.start == last.start;
      if (team_ == 0) shared_.front_block = shared_.division.block_of(share.first.start);
    }
  }

  __device__ __forceinline__ void fill_stage(int at, uint8_t* stage) {
    if (next_ == found_) more();
    const int owner = ended_ ? 0 : next_ - first_;
    if (lane_ == owner) {
      if (ended_) {
        shared_.tile[at].flags = kEnd;
      } else {
        if (flags_ & kFirstTile) {
          const Cursor& c = shared_.cursor[team_];
          shared_.piece[at] = {c.seq,  c.head,       c.row_block,
                               c.unit, c.work.units, static_cast<int>(c.item_start)};
        }
        shared_.tile[at] = {next_, slot_, flags_ | (next_ + 1 >= end_ ? kLastTile : 0)};
      }
      device::barrier_arrive(&shared_.told[at]);
    }
    copy(ended_ ? nullptr : record_, owner, stage, &shared_.full[at]);
    ++next_;
    flags_ &= ~kFirstTile;
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
    const auto* const from = reinterpret_cast<const uint8_t*>(__shfl_sync(
        device::kAllLanes, reinterpret_cast<unsigned long long>(record), owner));
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
  int filled_ = 0;  ///< stages so far
  int stage_ = 0;   ///< to be filled next
  unsigned parity_ = 0;
  int next_;   ///< tile
  int first_;  ///< tiles first_ .. found_ - 1 have been looked up
  int found_;
  int end_;
  int flags_;
  bool ended_ = false;
  const uint8_t* record_;  ///< of tile first_ + lane; null: there is none
  int slot_;
};

}  // namespace kvarn::cuda
