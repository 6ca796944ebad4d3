// How the attention kernels walk over the codes of a tile.
//
// In a record a 32-bit word belongs to one lane of a warp (layout.h) and holds codes of a few
// tokens and channels: for K those of lane (r, t), for V those of lane (c, r2). The kernels first
// transpose the words of a tile such that 16 words stand side by side that differ only in what
// vector lanes are to stand for:
//
//   K: tokens,   16 = 2 halves of the row tiles x 8 r;   the products run over the channels
//   V: channels, 16 = 2 halves of the row tiles x 8 c;   the products run over the tokens
//
// So a word vector, shifted and masked, is a vector of codes that one broadcast factor (a query's
// channel, a token's probability) multiplies: no shuffles, no horizontal sums. Scores and outputs
// then stand in the order of these lanes; the plan says which token or channel each of them is.
#pragma once

#include <cstdint>

#include "kvarn/layout.h"

namespace kvarn::cpu {

inline constexpr int kPlanWords = 512;     ///< of a lane: 128 * 512 * 8 bits / 32 lanes
inline constexpr int kPlanFactors = 128;   ///< K: D/4; V: G/4 times the fragments of a unit
inline constexpr int kPlanTokens = 128;    ///< G, at most
inline constexpr int kPlanChannels = 512;  ///< D, at most
inline constexpr int kTokenStride = 16;    ///< between the scores of neighbouring tokens

#define KVARN_GROUP_FITS(n) &&n <= kPlanTokens
#define KVARN_HEAD_DIM_FITS(n) &&n <= kPlanChannels
static_assert(true KVARN_FOR_EACH_GROUP(KVARN_GROUP_FITS)
                  KVARN_FOR_EACH_HEAD_DIM(KVARN_HEAD_DIM_FITS),
              "a new group or head dimension: these four and docs/variants.md");
#undef KVARN_GROUP_FITS
#undef KVARN_HEAD_DIM_FITS

/// A unit is the fewest words that hold whole fragments: 1 word for 4 bits (one fragment) and 2
/// bits (two), 2 words for 8 bits (one), 3 for 3 bits (four).
constexpr int unit_words(int bits) { return bits == 8 ? 2 : bits == 3 ? 3 : 1; }
constexpr int unit_fragments(int bits) { return bits == 3 ? 4 : bits == 2 ? 2 : 1; }

/// Transposed codes: [passes][steps][unit words][lanes].
/// A pass makes one set of sums: K: the tokens of a row tile; V: the channels of a unit.
struct CodePlan {
  int words;  ///< of a lane in the record
  int lanes;  ///< 16; 8 for V with 3 bits and D = 64, which has no two halves
  int passes;
  int steps;
  int lane_step;                 ///< the words of lane 4r + t+1 go this much behind those of 4r + t
  int32_t word_to[kPlanWords];   ///< where the words of lanes 4r + 0, all r, go
  int32_t factor[kPlanFactors];  ///< [steps][fragments of a unit]: the first of its 4 factors
};

struct TilePlan {
  Format format;
  CodePlan key;
  CodePlan value;
  int32_t token[kPlanTokens];         ///< [G]: token that stands at place i of the scores
  int32_t token_to[kPlanTokens / 8];  ///< [G/8]: where the tokens 64i + 8r + t of (i, t) go, all r
  int32_t channel_to[kPlanChannels / 8];  ///< [D/8]: where the channels 64b + 8c + e of (b, e) go
};

TilePlan make_tile_plan(const Format& format);

}  // namespace kvarn::cpu
