// merge_states: one job for a few rows.
#include <algorithm>
#include <cstdint>

#include "cpu/attention.h"
#include "cpu/workers.h"

namespace kvarn::cpu {

Status merge_states(const MergeParams& p, const Executor& executor) {
  constexpr int64_t kRowsPerJob = 64;
  const int64_t rows = p.tokens * p.heads;
  const AttentionKernels& kernels = attention_kernels();
  return parallel_for_scratch(
      executor, (rows + kRowsPerJob - 1) / kRowsPerJob,
      2 * p.head_dim * static_cast<int64_t>(sizeof(float)), [&](int64_t job, void* scratch) {
        const int64_t end = std::min(rows, (job + 1) * kRowsPerJob);
        for (int64_t row = job * kRowsPerJob; row < end; ++row) {
          kernels.merge_row(p, row / p.heads, static_cast<int32_t>(row % p.heads),
                            static_cast<float*>(scratch));
        }
      });
}

}  // namespace kvarn::cpu
