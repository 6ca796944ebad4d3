// The kernels of the attention family: what the entry points call, one table per instruction set
// (isa.h).
#pragma once

#include <cstdint>

#include "cpu/attention_plan.h"
#include "kvarn/ops.h"

namespace kvarn::cpu {

/// Rows that are computed together: enough to pay for unpacking a tile, few enough for the caches.
inline constexpr int kMaxQueryRows = 32;

/// Rows of the attention matrix that read the same keys: the query heads of a KV head, one query
/// token after the other.
struct QueryRows {
  int64_t seq = 0;
  int32_t kv_head = 0;
  int32_t count = 0;
  int64_t token[kMaxQueryRows];  ///< row of q and out
  int32_t head[kMaxQueryRows];   ///< query head
  int64_t begin[kMaxQueryRows];  ///< the row sees tokens begin .. end - 1 of its sequence;
  int64_t end[kMaxQueryRows];    ///< begin == end == 0: none
};

struct AttentionKernels {
  /// Normalized output [count, D] and LSE [count] of the rows over tiles tile_begin .. tile_end -
  /// 1, in the original basis. A row that sees none of their tokens: 0, -inf.
  void (*attend)(const DecodeParams& p, const TilePlan& plan, const QueryRows& rows,
                 int64_t tile_begin, int64_t tile_end, void* scratch, float* out, float* lse);
  int64_t (*attend_scratch_bytes)(const Format& format, int rows);

  /// Applies the sinks to out [count, D] and lse [count] and writes them to p.out and p.lse.
  void (*finish)(const DecodeParams& p, const QueryRows& rows, float* out, float* lse);

  /// (out_a, lse_a) [rows, dim], [rows] becomes the state of both.
  void (*merge)(float* out_a, float* lse_a, const float* out_b, const float* lse_b, int rows,
                int dim);
  /// The same for row `head` of token `token` of the params; scratch: 2 * head_dim floats.
  void (*merge_row)(const MergeParams& p, int64_t token, int32_t head, float* scratch);

  /// `count` rows of `dim` elements, converted; with `rotate` transformed on the way.
  /// scratch: 2 * dim floats.
  void (*copy_rows)(const void* in, DType in_dtype, int64_t in_offset, int64_t in_stride, void* out,
                    DType out_dtype, int64_t out_offset, int64_t out_stride, int count, int dim,
                    bool rotate, float* scratch);
};

/// The table of current_isa().
const AttentionKernels& attention_kernels();

}  // namespace kvarn::cpu
