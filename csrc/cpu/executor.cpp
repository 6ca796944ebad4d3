// The executor for callers that bring none: threads made per call, indices handed out by a counter.
#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "kvarn/ops.h"

namespace kvarn::cpu {
namespace {

void run(void* /*impl*/, int64_t n, void (*fn)(void*, int64_t), void* ctx) {
  const int64_t workers = std::min<int64_t>(default_executor().num_threads, n);
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) fn(ctx, i);
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(workers));
  try {
    while (static_cast<int64_t>(threads.size()) + 1 < workers) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // Fewer threads than wanted: the ones there are, this one at least, do all of the work.
  }
  work();
  for (std::thread& t : threads) t.join();
}

}  // namespace

const Executor& default_executor() {
  static const Executor executor = {
      std::max(1, static_cast<int>(std::thread::hardware_concurrency())), nullptr, run};
  return executor;
}

}  // namespace kvarn::cpu
