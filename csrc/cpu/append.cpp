// append_kv: find and check every row first, then copy.
#include <cstring>
#include <string>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/tiles_check.h"

namespace kvarn::cpu {
namespace {

constexpr int64_t kPadding = -1;

/// rows[i]: where token i goes in the pool, in elements from K of head 0 of slot 0, or kPadding.
Status find_rows(const AppendParams& p, std::vector<int64_t>& rows) {
  if (Status status = check_format(p.format); !status.ok()) return status;
  const int64_t group = p.format.group;
  rows.assign(static_cast<size_t>(p.tokens), kPadding);
  for (int64_t i = 0; i < p.tokens; ++i) {
    const int64_t slot = p.slot_mapping[i];
    if (slot < 0) continue;
    const int64_t block = slot / group;
    if (block >= p.blocks) {
      return Status::invalid("slot_mapping must be less than " + std::to_string(p.blocks * group) +
                             " (" + std::to_string(p.blocks) + " blocks of " +
                             std::to_string(group) + "), got " + std::to_string(slot) +
                             " at index " + std::to_string(i));
    }
    const int64_t page = p.block_slot[block];
    if (page < 0 || page >= p.staging.slots) {
      return Status::invalid(
          "block_slot must be a staging slot below " + std::to_string(p.staging.slots) +
          " for every block that tokens are appended to, got " + std::to_string(page) +
          " at block " + std::to_string(block) + " (slot_mapping " + std::to_string(slot) +
          " at index " + std::to_string(i) + ")");
    }
    rows[static_cast<size_t>(i)] = page * p.staging.stride[0] + slot % group * p.staging.stride[3];
  }
  return {};
}

}  // namespace

Status append_kv(const AppendParams& p, const Executor& executor) {
  std::vector<int64_t> rows;
  if (Status status = find_rows(p, rows); !status.ok()) return status;
  const int64_t element = size_of(p.staging.dtype);
  // A job is a head of K or V: of two tokens with one slot the later stays, whatever the threads.
  parallel_for(executor, 2 * int64_t{p.heads}, [&](int64_t job) {
    const int64_t head = job / 2;
    const int64_t kv = job % 2;
    const auto* in = static_cast<const char*>(kv == 0 ? p.key : p.value);
    const auto& stride = kv == 0 ? p.key_stride : p.value_stride;
    const int64_t page_offset = kv * p.staging.stride[1] + head * p.staging.stride[2];
    auto* pool = static_cast<char*>(p.staging.data);
    for (int64_t i = 0; i < p.tokens; ++i) {
      const int64_t row = rows[static_cast<size_t>(i)];
      if (row == kPadding) continue;
      std::memcpy(pool + (row + page_offset) * element,
                  in + (i * stride[0] + head * stride[1]) * element,
                  static_cast<size_t>(p.format.head_dim * element));
    }
  });
  return {};
}

}  // namespace kvarn::cpu
