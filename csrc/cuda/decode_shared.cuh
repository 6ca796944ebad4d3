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
  kEnd = 1,         ///< the last tile of the share
  kFirstTile = 2,   ///< of a piece (its first 16 tokens, if it is staged)
  kLastTile = 4,    ///< (its last)
  kBeginsItem = 8,  ///< the piece has the first unit of its item
  kEndsItem = 16,   ///< and the last
  kNoTile = 32,     ///< the piece has no tiles
  kLastPiece = 64,  ///< of the share
  // For the feeder alone; what others find of them means nothing.
  kPartOfTile = 128,  ///< what it looked at are staged tokens, and others of the tile follow
  kPending = 256,     ///< their values have not been asked for
};
/// From this bit on: so many tiles behind it are records of the same piece, none of them its last.
inline constexpr int kRunShift = 16;

/// Whose tile it is.
struct alignas(16) StagePiece {
  int seq;
  int head;
  int row_block;
  int units;  ///< of the item
  // With splits, of the one that a warp works on:
  int unit;  ///< its number in the batch
  int unit_tiles;
  int tiles_left;  ///< of the first unit of the piece
};

/// An item that a share has a part of.
struct ItemPlace {
  int64_t start;  ///< number of its first unit
  int seq;
  int head;
  int row_block;
};

/// What a team has of items that others have parts of too.
struct TeamShare {
  ItemPlace first;    ///< that the share begins in
  bool cut_at_begin;  ///< it began in the share before
  bool cut_at_end;    ///< the item that the share ends in goes on in the share behind
  bool middle;        ///< both, and they are the same item
};

struct DecodeShared {
  SequenceScan scan;
  Division division[kMaxDecodeWarps];       ///< the same for all warps
  device::Barrier told[kMaxStages];         ///< tile (and piece) say what the stage will hold
  device::Barrier full[kMaxStages];         ///< it does
  device::Barrier full_values[kMaxStages];  ///< its values, if they are asked for later
  device::Barrier empty[kMaxStages];        ///< all lanes of all warps have read it
  StageTile tile[kMaxStages];
  StagePiece piece[kMaxStages];         ///< of first tiles
  StagePiece current[kMaxDecodeWarps];  ///< of each warp
  Cursor cursor[kMaxDecodeWarps];       ///< of each team
  TeamShare share[kMaxDecodeWarps];
};
static_assert(sizeof(DecodeShared) <= kDecodeStaticBytes);
static_assert(2 * kMaxDecodeWarps <= kMaxStages);

}  // namespace kvarn::cuda
