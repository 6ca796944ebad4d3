// quantize_tiles: every tile of every head is a job.
#include "cpu/encode.h"
#include "cpu/tiles_check.h"
#include "cpu/workers.h"

namespace kvarn::cpu {

Status quantize_tiles(const QuantizeParams& p, const Executor& executor) {
  if (Status status = check_format(p.format); !status.ok()) return status;
  if (Status status = check_iterations(p.iterations); !status.ok()) return status;
  const EncodeKernels& kernels = encode_kernels();
  // K and V are separate jobs.
  return parallel_for_scratch(
      executor, 2 * p.tiles * p.heads, kernels.scratch_bytes, [&](int64_t job, void* scratch) {
        const int64_t tile = job / 2 / p.heads;
        const int64_t head = job / 2 % p.heads;
        const bool is_key = job % 2 == 0;
        uint8_t* const record = p.records + tile * p.record_stride[0] + head * p.record_stride[1];
        const auto& stride = is_key ? p.key_stride : p.value_stride;
        const TokenRows<const void*> rows = {is_key ? p.key : p.value, p.dtype,
                                             tile * stride[0] + head * stride[2], stride[1],
                                             p.rotated};
        kernels.quantize(rows, p.fit, p.iterations,
                         is_key ? key_part(p.format, record) : value_part(p.format, record),
                         scratch);
      });
}

}  // namespace kvarn::cpu
