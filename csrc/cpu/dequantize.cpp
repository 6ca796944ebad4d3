// dequantize_tiles: every record is two jobs, K and V.
#include "cpu/encode.h"
#include "cpu/tiles_check.h"
#include "cpu/workers.h"

namespace kvarn::cpu {

Status dequantize_tiles(const DequantizeParams& p, const Executor& executor) {
  if (Status status = check_format(p.format); !status.ok()) return status;
  const EncodeKernels& kernels = encode_kernels();
  return parallel_for_scratch(
      executor, 2 * p.tiles * p.heads, kernels.scratch_bytes, [&](int64_t job, void* scratch) {
        const int64_t tile = job / 2 / p.heads;
        const int64_t head = job / 2 % p.heads;
        const bool is_key = job % 2 == 0;
        const uint8_t* const record =
            p.records + tile * p.record_stride[0] + head * p.record_stride[1];
        const auto& stride = is_key ? p.key_stride : p.value_stride;
        const TokenRows<void*> rows = {is_key ? p.key : p.value, p.dtype,
                                       tile * stride[0] + head * stride[2], stride[1], p.rotated};
        kernels.dequantize(is_key ? key_part(p.format, record) : value_part(p.format, record), rows,
                           scratch);
      });
}

}  // namespace kvarn::cpu
