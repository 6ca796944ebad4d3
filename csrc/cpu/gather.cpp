// gather_kv: the tiles of all sequences, one after the other, in equal shares.
#include <algorithm>
#include <cstdint>
#include <string>

#include "cpu/attention.h"
#include "cpu/attention_metadata.h"
#include "cpu/encode.h"
#include "cpu/workers.h"

namespace kvarn::cpu {
namespace {

int64_t tiles_of(const PagedKV& kv, int64_t seq) {
  return (kv.seq_lens[seq] + kv.format.group - 1) / kv.format.group;
}

Status check(const GatherParams& p) {
  const PagedKV& kv = p.kv;
  if (Status status = check_paged_kv(kv); !status.ok()) return status;
  if (Status status = check_offsets("cu_seq_lens", p.cu_seq_lens, kv.seqs); !status.ok()) {
    return status;
  }
  if (p.cu_seq_lens[kv.seqs] > p.total_tokens) {
    return Status::invalid("cu_seq_lens must be at most " + std::to_string(p.total_tokens) +
                           " (the rows of key), got " + std::to_string(p.cu_seq_lens[kv.seqs]) +
                           " at index " + std::to_string(kv.seqs));
  }
  for (int64_t seq = 0; seq < kv.seqs; ++seq) {
    const int64_t room = p.cu_seq_lens[seq + 1] - p.cu_seq_lens[seq];
    Status status =
        check_seq_len(kv, seq, kv.table_width * kv.format.group, "the tokens of block_table");
    if (status.ok()) status = check_seq_len(kv, seq, room, "the room that cu_seq_lens gives");
    if (status.ok()) status = check_blocks(kv, seq, 0, tiles_of(kv, seq));
    if (!status.ok()) return status;
  }
  return {};
}

/// Memory of a worker.
struct Scratch {
  std::byte* unpack;  ///< of the dequantizer
  float* rows;        ///< [2, D]
  float* tile;        ///< [G, D]

  static int64_t bytes(const Format& f) {
    return round_up(encode_kernels().scratch_bytes) +
           int64_t{2 + f.group} * f.head_dim * static_cast<int64_t>(sizeof(float));
  }

  Scratch(std::byte* memory, const Format& f)
      : unpack(memory),
        rows(reinterpret_cast<float*>(memory + round_up(encode_kernels().scratch_bytes))),
        tile(rows + 2 * f.head_dim) {}

 private:
  static int64_t round_up(int64_t bytes) {
    return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
  }
};

/// Where the keys or values of one head go.
struct Destination {
  void* data;
  const int64_t* stride;
};

/// `count` tokens of a tile, of one head; `value`: 0 keys, 1 values.
void gather(const GatherParams& p, int64_t block, int32_t head, int value, int64_t first_row,
            int count, const Scratch& scratch) {
  const Format& f = p.kv.format;
  const Destination to =
      value == 0 ? Destination{p.key, p.key_stride} : Destination{p.value, p.value_stride};
  const int64_t offset = first_row * to.stride[0] + head * to.stride[1];
  const int64_t slot = p.kv.block_slot ? p.kv.block_slot[block] : -1;
  if (slot >= 0) {
    const Staging& from = p.kv.staging;
    attention_kernels().copy_rows(
        from.data, from.dtype,
        slot * from.stride[0] + value * from.stride[1] + head * from.stride[2], from.stride[3],
        to.data, p.dtype, offset, to.stride[0], count, f.head_dim, p.rotated, scratch.rows);
    return;
  }
  const uint8_t* const record =
      p.kv.cache.data + block * p.kv.cache.stride[0] + head * p.kv.cache.stride[1];
  const auto part = value == 0 ? key_part(f, record) : value_part(f, record);
  if (count == f.group) {
    encode_kernels().dequantize(part, {to.data, p.dtype, offset, to.stride[0], p.rotated},
                                scratch.unpack);
    return;
  }
  encode_kernels().dequantize(part, {scratch.tile, DType::kFloat32, 0, f.head_dim, p.rotated},
                              scratch.unpack);
  attention_kernels().copy_rows(scratch.tile, DType::kFloat32, 0, f.head_dim, to.data, p.dtype,
                                offset, to.stride[0], count, f.head_dim, false, scratch.rows);
}

}  // namespace

Status gather_kv(const GatherParams& p, const Executor& executor) {
  if (Status status = check(p); !status.ok()) return status;
  const PagedKV& kv = p.kv;
  int64_t tiles = 0;
  for (int64_t seq = 0; seq < kv.seqs; ++seq) tiles += tiles_of(kv, seq);
  const int64_t shares = std::max(executor.num_threads, 1);
  return parallel_for_scratch(
      executor, shares, Scratch::bytes(kv.format), [&](int64_t share, std::byte* memory) {
        const Scratch scratch(memory, kv.format);
        const int64_t begin = tiles * share / shares;
        const int64_t end = tiles * (share + 1) / shares;
        int64_t before = 0;
        for (int64_t seq = 0; seq < kv.seqs && before < end; before += tiles_of(kv, seq++)) {
          const int64_t last = std::min(tiles_of(kv, seq), end - before);
          for (int64_t tile = std::max<int64_t>(begin - before, 0); tile < last; ++tile) {
            const int64_t token = tile * kv.format.group;
            const int count =
                static_cast<int>(std::min<int64_t>(kv.format.group, kv.seq_lens[seq] - token));
            for (int32_t head = 0; head < kv.kv_heads; ++head) {
              for (int value = 0; value < 2; ++value) {
                gather(p, kv.block_table.at(seq, tile), head, value, p.cu_seq_lens[seq] + token,
                       count, scratch);
              }
            }
          }
        }
      });
}

}  // namespace kvarn::cpu
