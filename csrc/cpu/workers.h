// parallel_for whose workers each own scratch memory for the length of a call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include "cpu/parallel.h"
#include "kvarn/ops.h"

namespace kvarn::cpu {

inline constexpr int64_t kScratchAlignment = 64;

/// fn(i, scratch) for every i in [0, n), `bytes` bytes of scratch, aligned to a cache line, for
/// each worker. An error when there is no memory; nothing has run then. fn must not throw.
template <class Fn>
Status parallel_for_scratch(const Executor& executor, int64_t n, int64_t bytes, Fn&& fn) {
  if (n <= 0) return {};
  const int64_t workers = std::clamp<int64_t>(executor.num_threads, 1, n);
  const int64_t stride = (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
  struct Free {
    void operator()(std::byte* p) const {
      ::operator delete[](p, std::align_val_t{kScratchAlignment});
    }
  };
  const std::unique_ptr<std::byte[], Free> memory(static_cast<std::byte*>(::operator new[](
      static_cast<size_t>(workers * stride), std::align_val_t{kScratchAlignment}, std::nothrow)));
  if (memory == nullptr) {
    return Status::runtime("no memory for " + std::to_string(workers * stride) +
                           " bytes of scratch");
  }
  std::atomic<int64_t> next{0};
  parallel_for(executor, workers, [&](int64_t worker) {
    std::byte* const scratch = memory.get() + worker * stride;
    for (int64_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) fn(i, scratch);
  });
  return {};
}

}  // namespace kvarn::cpu
