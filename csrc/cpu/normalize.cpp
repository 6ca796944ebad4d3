// variance_normalize: tile by tile.
#include <string>

#include "cpu/encode.h"
#include "cpu/workers.h"

namespace kvarn::cpu {

Status variance_normalize(const NormalizeParams& p, const Executor& executor) {
  if (p.iterations < 0) {
    return Status::invalid("iterations must be >= 0, got " + std::to_string(p.iterations));
  }
  if (p.rows <= 0 || p.cols <= 0) return {};
  const EncodeKernels& kernels = encode_kernels();
  return parallel_for_scratch(
      executor, p.tiles, normalize_scratch_floats(p.rows, p.cols) * int64_t{sizeof(float)},
      [&](int64_t tile, void* scratch) {
        float* const x = p.balanced + tile * p.rows * p.cols;
        for (int64_t row = 0; row < p.rows; ++row) {
          kernels.load_row(p.x, p.dtype, tile * p.x_stride[0] + row * p.x_stride[1],
                           x + row * p.cols, p.cols);
        }
        kernels.normalize(x, p.rows, p.cols, p.iterations, p.row_scale + tile * p.rows,
                          p.col_scale + tile * p.cols, static_cast<float*>(scratch));
      });
}

}  // namespace kvarn::cpu
