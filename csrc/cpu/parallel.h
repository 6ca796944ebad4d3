// parallel_for over an Executor for any callable.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "kvarn/ops.h"

namespace kvarn::cpu {

/// fn(i) for every i in [0, n). fn must not throw.
template <class Fn>
void parallel_for(const Executor& executor, int64_t n, Fn&& fn) {
  using F = std::remove_reference_t<Fn>;
  if (n <= 0) return;
  if (n == 1 || executor.num_threads <= 1 || executor.run == nullptr) {
    for (int64_t i = 0; i < n; ++i) fn(i);
    return;
  }
  executor.run(
      executor.impl, n, [](void* ctx, int64_t i) { (*static_cast<F*>(ctx))(i); },
      const_cast<void*>(static_cast<const void*>(std::addressof(fn))));
}

}  // namespace kvarn::cpu
