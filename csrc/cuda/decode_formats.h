// The formats whose usual decode step (is_usual()) has a kernel of its own, each in its own file
// (decode_k*.cu): key bits, value bits, group, head dimension. All else takes decode_any_d*.cu.
#pragma once

#define KVARN_DECODE_FORMATS(X) \
  X(4, 2, 128, 128)             \
  X(4, 4, 128, 128)             \
  X(2, 2, 128, 128)             \
  X(3, 3, 128, 128)             \
  X(8, 4, 128, 128)             \
  X(4, 2, 64, 128)              \
  X(4, 2, 128, 64)              \
  X(4, 2, 128, 256)

// Those of them that have another one, of twelve warps, for large batches (is_wide()):
// decode_k*_wide.cu.
#define KVARN_WIDE_DECODE_FORMATS(X) \
  X(4, 2, 128, 128)                  \
  X(4, 4, 128, 128)
