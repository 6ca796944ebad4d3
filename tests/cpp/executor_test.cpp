// The default executor and parallel_for run every index exactly once.
#include <atomic>
#include <cstdint>
#include <vector>

#include "check.h"
#include "cpu/parallel.h"
#include "kvarn/ops.h"

namespace {

int check_every_index_once(const kvarn::Executor& executor) {
  for (int64_t n : {0, 1, 2, 3, 7, 64, 1000}) {
    std::vector<std::atomic<int>> calls(static_cast<size_t>(n));
    kvarn::cpu::parallel_for(executor, n, [&](int64_t i) { calls[static_cast<size_t>(i)]++; });
    for (const std::atomic<int>& count : calls) CHECK(count == 1);
  }
  return 0;
}

int check_nested() {
  std::atomic<int> sum{0};
  kvarn::cpu::parallel_for(kvarn::cpu::default_executor(), 4, [&](int64_t) {
    kvarn::cpu::parallel_for(kvarn::cpu::default_executor(), 5,
                             [&](int64_t j) { sum += static_cast<int>(j); });
  });
  CHECK(sum == 4 * (0 + 1 + 2 + 3 + 4));
  return 0;
}

}  // namespace

int main() {
  CHECK(kvarn::cpu::default_executor().num_threads >= 1);
  if (check_every_index_once(kvarn::cpu::default_executor())) return 1;
  if (check_every_index_once(kvarn::Executor{})) return 1;  // no pool: the caller's thread
  if (check_nested()) return 1;
  return kvarn::test::failures();
}
