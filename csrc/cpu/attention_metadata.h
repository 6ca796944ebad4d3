// What decode_attention and gather_kv demand of lengths, tables and slots before they follow them.
#pragma once

#include <string>

#include "cpu/tiles_check.h"
#include "kvarn/ops.h"

namespace kvarn::cpu {

inline Status check_paged_kv(const PagedKV& kv) {
  if (Status status = check_format(kv.format); !status.ok()) return status;
  if (kv.kv_heads < 1) {
    return Status::invalid("kv_heads must be at least 1, got " + std::to_string(kv.kv_heads));
  }
  if ((kv.staging.data != nullptr) != static_cast<bool>(kv.block_slot)) {
    return Status::invalid(std::string("staging and block_slot must be given together, got ") +
                           (kv.block_slot ? "block_slot alone" : "staging alone"));
  }
  return {};
}

/// `limit` tokens is what `reason` allows.
inline Status check_seq_len(const PagedKV& kv, int64_t seq, int64_t limit, const char* reason) {
  const int64_t length = kv.seq_lens[seq];
  if (length >= 0 && length <= limit) return {};
  return Status::invalid("seq_lens must be from 0 to " + std::to_string(limit) + " (" + reason +
                         "), got " + std::to_string(length) + " at index " + std::to_string(seq));
}

/// The blocks of tiles begin .. end - 1 of a sequence.
inline Status check_blocks(const PagedKV& kv, int64_t seq, int64_t begin, int64_t end) {
  const auto place = [=](int64_t tile) {
    return " at [" + std::to_string(seq) + ", " + std::to_string(tile) + "]";
  };
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t block = kv.block_table.at(seq, tile);
    const int64_t blocks = kv.cache.blocks + kv.virtual_blocks;
    if (block < 0 || block >= blocks) {
      return Status::invalid("block_table must be block numbers below " + std::to_string(blocks) +
                             ", got " + std::to_string(block) + place(tile));
    }
    if (!kv.block_slot) continue;
    const int64_t slot = kv.block_slot[block];
    if (slot < -1 || slot >= kv.staging.slots || (slot < 0 && block >= kv.cache.blocks)) {
      return Status::invalid("block_slot must be -1 or a staging slot below " +
                             std::to_string(kv.staging.slots) + ", got " + std::to_string(slot) +
                             " of block " + std::to_string(block) + " (block_table" + place(tile) +
                             ")");
    }
  }
  return {};
}

/// `offsets` [seqs + 1] starts at or above 0 and does not decrease.
inline Status check_offsets(const char* name, const IndexArray& offsets, int64_t seqs) {
  int64_t last = 0;
  for (int64_t i = 0; i <= seqs; ++i) {
    const int64_t offset = offsets[i];
    if (offset < last) {
      return Status::invalid(std::string(name) + " must be at least " + std::to_string(last) +
                             " at index " + std::to_string(i) + ", got " + std::to_string(offset));
    }
    last = offset;
  }
  return {};
}

}  // namespace kvarn::cpu
