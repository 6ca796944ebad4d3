// hadamard_transform: blocks of rows, each by the kernel of the instruction set.
#include <algorithm>
#include <string>

#include "cpu/encode.h"
#include "cpu/workers.h"

namespace kvarn::cpu {

Status hadamard_transform(const HadamardParams& p, const Executor& executor) {
  if (p.dim <= 0 || (p.dim & (p.dim - 1)) != 0) {
    return Status::invalid("x must be a power of two in its last dimension, got " +
                           std::to_string(p.dim));
  }
  const int64_t rows = p.rows[0] * p.rows[1] * p.rows[2];
  const int64_t in_block = std::max<int64_t>(1, 4096 / p.dim);
  const EncodeKernels& kernels = encode_kernels();
  return parallel_for_scratch(
      executor, (rows + in_block - 1) / in_block, 2 * int64_t{p.dim} * sizeof(float),
      [&](int64_t block, void* scratch) {
        const int64_t end = std::min(rows, (block + 1) * in_block);
        for (int64_t row = block * in_block; row < end; ++row) {
          const int64_t at[3] = {row / p.rows[2] / p.rows[1], row / p.rows[2] % p.rows[1],
                                 row % p.rows[2]};
          int64_t x_offset = 0;
          int64_t out_offset = 0;
          for (int i = 0; i < 3; ++i) {
            x_offset += at[i] * p.x_stride[i];
            out_offset += at[i] * p.out_stride[i];
          }
          kernels.hadamard(p.x, x_offset, p.out, out_offset, p.dtype, p.dim, p.scale,
                           static_cast<float*>(scratch));
        }
      });
}

}  // namespace kvarn::cpu
