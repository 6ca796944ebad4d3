// seal_blocks: staged tiles -> records; which ones is metadata, checked first.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cpu/encode.h"
#include "cpu/tiles_check.h"
#include "cpu/workers.h"

namespace kvarn::cpu {
namespace {

std::string at_index(int64_t i) { return " at index " + std::to_string(i); }

/// Fills `live` with the numbers of the tiles that are no padding.
Status check(const SealParams& p, std::vector<int64_t>& live) {
  if (Status status = check_format(p.format); !status.ok()) return status;
  if (Status status = check_iterations(p.iterations); !status.ok()) return status;
  const int64_t count = p.count == nullptr ? p.tiles : *p.count;
  if (count < 0 || count > p.tiles) {
    return Status::invalid("count must be between 0 and " + std::to_string(p.tiles) + ", got " +
                           std::to_string(count));
  }
  std::vector<std::pair<int64_t, int64_t>> targets;  // block, index
  for (int64_t i = 0; i < count; ++i) {
    const int64_t slot = p.slots[i];
    const int64_t block = p.blocks[i];
    if (slot < 0 || block < 0) continue;
    if (slot >= p.staging.slots) {
      return Status::invalid("slots must be less than " + std::to_string(p.staging.slots) +
                             " (the staging slots), got " + std::to_string(slot) + at_index(i));
    }
    if (block >= p.cache.blocks) {
      return Status::invalid("blocks must be less than " + std::to_string(p.cache.blocks) +
                             " (the blocks of the cache), got " + std::to_string(block) +
                             at_index(i));
    }
    live.push_back(i);
    targets.emplace_back(block, i);
  }
  std::sort(targets.begin(), targets.end());
  for (size_t i = 1; i < targets.size(); ++i) {
    if (targets[i].first == targets[i - 1].first) {
      return Status::invalid("blocks must be different, got " + std::to_string(targets[i].first) +
                             at_index(targets[i - 1].second) + " and" +
                             at_index(targets[i].second));
    }
  }
  return {};
}

}  // namespace

Status seal_blocks(const SealParams& p, const Executor& executor) {
  std::vector<int64_t> live;
  if (Status status = check(p, live); !status.ok()) return status;
  const EncodeKernels& kernels = encode_kernels();
  const int64_t jobs = 2 * static_cast<int64_t>(live.size()) * p.heads;
  return parallel_for_scratch(
      executor, jobs, kernels.scratch_bytes, [&](int64_t job, void* scratch) {
        const int64_t tile = live[static_cast<size_t>(job / 2 / p.heads)];
        const int64_t head = job / 2 % p.heads;
        const int64_t kv = job % 2;
        uint8_t* const record =
            p.cache.data + p.blocks[tile] * p.cache.stride[0] + head * p.cache.stride[1];
        const int64_t* const stride = p.staging.stride;
        const TokenRows<const void*> rows = {
            p.staging.data, p.staging.dtype,
            p.slots[tile] * stride[0] + kv * stride[1] + head * stride[2], stride[3], false};
        kernels.quantize(rows, p.fit, p.iterations,
                         kv == 0 ? key_part(p.format, record) : value_part(p.format, record),
                         scratch);
      });
}

}  // namespace kvarn::cpu
