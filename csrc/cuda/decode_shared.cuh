// What the warps of a block tell each other.
#pragma once

#include <cstdint>

#include "cuda/decode_plan.cuh"
#include "device/ring.cuh"

namespace kvarn::cuda {

/// What a stage of a ring holds: the record of a tile, or 16 of its tokens.
struct alignas(16) StageTile {
  int tile;   ///< of the sequence
  int token;  ///< of the tile, the first of 16 staged ones; -1: it is the record
  int flags;
};

enum StageFlags : int {
  kEnd = 1,         ///< the last tile of what the team does in one go
  kFirstTile = 2,   ///< of a piece (its first 16 tokens, if it is staged)
  kLastTile = 4,    ///< (its last)
  kBeginsItem = 8,  ///< the piece has the first unit of its item
  kEndsItem = 16,   ///< and the last
  kNoTile = 32,     ///< the piece has no tiles
  kLastPiece = 64,  ///< of the stretch
  // For the feeder alone; what others find of them means nothing.
  kPartOfTile = 128,  ///< what it looked at are staged tokens, and others of the tile follow
  kPending = 256,     ///< their values have not been asked for
  kFirstOfStretch = 512,
};

/// Whose tile it is.
struct alignas(16) StagePiece {
  int seq;
  int head;
  int row_block;
  int unit;        ///< with splits, of the item
  int units;       ///< of the item
  int first_unit;  ///< with splits, number of the item's first unit in the batch
  int stretch;     ///< with tails, its number of all: block * 2 teams + number in its block
};

/// An item that a share has a part of.
struct ItemPlace {
  int64_t start;  ///< number of its first unit
  int seq;
  int head;
  int row_block;
};

/// What a stretch has of items that others have parts of too.
struct StretchEnds {
  ItemPlace first;    ///< that it begins in
  bool cut_at_begin;  ///< it began before
  bool cut_at_end;    ///< the item that the stretch ends in goes on behind it
  bool middle;        ///< both, and they are the same item

  /// cursor: at the begin.
  __device__ __forceinline__ void begin(const DecodePlan& plan, const Cursor& c) {
    first = {c.item_start, c.seq, c.head, c.row_block};
    cut_at_begin = plan.split_tiles == 0 && !c.begins_item();
  }
  /// cursor: at the last piece.
  __device__ __forceinline__ void end(const DecodePlan& plan, const Cursor& c) {
    cut_at_end = plan.split_tiles == 0 && !c.ends_item();
    middle = cut_at_end && cut_at_begin && first.start == c.item_start;
  }
};

enum HandState : int {
  kShare,          ///< the team's share, which it has not begun
  kTailMayFollow,  ///< the share without its tail, which follows if it is still to be taken
  kTailFollows,    ///< the same; it follows
  kLast,           ///< the tail, or a share whose tail another team has taken, or nothing
  kOfOther,        ///< the tail of another team
};

/// The stretch that a team does.
struct TeamHand {
  int block;
  int number;  ///< in the block
  HandState state;
};

struct DecodeShared {
  SequenceScan scan;
  Division division;
  device::Barrier told[kMaxStages];         ///< tile (and piece) say what the stage will hold
  device::Barrier full[kMaxStages];         ///< it does
  device::Barrier full_values[kMaxStages];  ///< its values, if they are asked for later
  device::Barrier empty[kMaxStages];        ///< all lanes of all warps have read it
  StageTile tile[kMaxStages];
  StagePiece piece[kMaxStages];           ///< of first tiles
  StagePiece current[kMaxDecodeWarps];    ///< of each warp
  Cursor cursor[kMaxDecodeWarps];         ///< of each team
  StretchEnds ends[2 * kMaxDecodeWarps];  ///< of the block's stretches
  TeamHand hand[kMaxDecodeWarps];
  bool lost_tail[kMaxDecodeWarps];  ///< another block has taken it
  int front_block;                  ///< where the block's first item begins
};
static_assert(sizeof(DecodeShared) <= kDecodeStaticBytes);
static_assert(2 * kMaxDecodeWarps <= kMaxStages);

}  // namespace kvarn::cuda
