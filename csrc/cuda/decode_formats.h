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

// Those of them that have another one whose warps have a ring of one record (wants_one_record()):
// decode_k*_one_record.cu.
#define KVARN_ONE_RECORD_FORMATS(X) \
  X(4, 2, 128, 128)                 \
  X(4, 4, 128, 128)                 \
  X(2, 2, 128, 128)                 \
  X(3, 3, 128, 128)                 \
  X(4, 2, 128, 256)
