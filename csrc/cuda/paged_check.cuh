// What decode_attention and gather_kv demand of their numbers and, with KVARN_CHECKED, of lengths,
// tables and slots: the rules and words of the CPU backend.
#pragma once

#include <string>

#include "cuda/checked.cuh"
#include "cuda/format.h"
#include "kvarn/ops.h"

namespace kvarn::cuda {

inline Status check_paged_kv(const PagedKV& kv) {
  if (Status status = check_format(kv.format); !status.ok()) return status;
  if (kv.kv_heads < 1) {
    return Status::invalid("kv_heads must be at least 1, got " + std::to_string(kv.kv_heads));
  }
  if ((kv.staging.data != nullptr) != static_cast<bool>(kv.block_slot)) {
    return Status::invalid(std::string("staging and block_slot must be given together, got ") +
                           (kv.block_slot ? "block_slot alone" : "staging alone"));
  }
  if (kv.staging.data != nullptr && kv.staging.dtype == DType::kFloat32) {
    return Status::unsupported("staging must be fp16 or bf16 on CUDA, got fp32");
  }
  return {};
}

enum PagedRule : int { kLengthRule = 1, kTableRule, kBlockRule, kSlotRule };

/// Entry (sequence, tile) i: the block of a tile that a query sees.
struct CheckPaged {
  PagedKV kv;
  int64_t max_seq_len;
  int64_t tiles;             ///< of a sequence, at most
  IndexArray cu_query_lens;  ///< null: one query a sequence
  int64_t window_left;       ///< -1: queries see all

  __device__ Offence operator()(int64_t i) const {
    const int64_t seq = i / tiles;
    const int64_t tile = i - seq * tiles;
    const int64_t length = kv.seq_lens[seq];
    const int64_t room = kv.table_width * kv.format.group;
    if (length < 0 || length > max_seq_len) return {kLengthRule, length, max_seq_len};
    if (length > room) return {kTableRule, length, room};
    const int64_t queries =
        cu_query_lens.data == nullptr ? 1 : cu_query_lens[seq + 1] - cu_query_lens[seq];
    if (queries == 0) return {};
    const bool sees_all = window_left < 0 || window_left >= length;
    const int64_t oldest = sees_all ? 0 : length - queries - window_left;
    if (tile * kv.format.group >= length || (tile + 1) * kv.format.group <= oldest) return {};
    const int64_t block = kv.block_table.at(seq, tile);
    if (block < 0 || block >= kv.cache.blocks + kv.virtual_blocks) return {kBlockRule, block, 0};
    if (kv.block_slot.data == nullptr) return {};
    const int64_t slot = kv.block_slot[block];
    if (slot < -1 || slot >= kv.staging.slots || (slot < 0 && block >= kv.cache.blocks)) {
      return {kSlotRule, slot, block};
    }
    return {};
  }
};

/// Lengths and the blocks that are seen.
inline Status check_paged_metadata(const PagedKV& kv, int64_t max_seq_len,
                                   const IndexArray& cu_query_lens, int64_t window_left,
                                   const char* length_reason, void* stream) {
  const int64_t tiles = max_seq_len > 0 ? (max_seq_len + kv.format.group - 1) / kv.format.group : 1;
  const CheckPaged check{kv, max_seq_len, tiles, cu_query_lens, window_left};
  Offence offence;
  int64_t index = 0;
  Status status = find_offence(check, kv.seqs * tiles, stream, offence, index);
  if (!status.ok() || offence.rule == 0) return status;
  const int64_t seq = index / tiles;
  const std::string place =
      " at [" + std::to_string(seq) + ", " + std::to_string(index - seq * tiles) + "]";
  switch (offence.rule) {
    case kLengthRule:
    case kTableRule:
      return Status::invalid(
          "seq_lens must be from 0 to " + std::to_string(offence.other) + " (" +
          (offence.rule == kLengthRule ? length_reason : "the tokens of block_table") + "), got " +
          std::to_string(offence.value) + " at index " + std::to_string(seq));
    case kBlockRule:
      return Status::invalid("block_table must be block numbers below " +
                             std::to_string(kv.cache.blocks + kv.virtual_blocks) + ", got " +
                             std::to_string(offence.value) + place);
    default:
      return Status::invalid("block_slot must be -1 or a staging slot below " +
                             std::to_string(kv.staging.slots) + ", got " +
                             std::to_string(offence.value) + " of block " +
                             std::to_string(offence.other) + " (block_table" + place + ")");
  }
}

/// offsets [seqs + 1] starts at or above 0 and does not decrease; rule 1.
struct CheckOffsets {
  IndexArray offsets;

  __device__ Offence operator()(int64_t i) const {
    const int64_t before = i == 0 ? 0 : offsets[i - 1];
    return offsets[i] < before ? Offence{1, offsets[i], before} : Offence{};
  }
};

inline Status check_offsets(const char* name, const IndexArray& offsets, int64_t seqs,
                            void* stream) {
  Offence offence;
  int64_t index = 0;
  Status status = find_offence(CheckOffsets{offsets}, seqs + 1, stream, offence, index);
  if (!status.ok() || offence.rule == 0) return status;
  return Status::invalid(std::string(name) + " must be at least " + std::to_string(offence.other) +
                         " at index " + std::to_string(index) + ", got " +
                         std::to_string(offence.value));
}

}  // namespace kvarn::cuda
