// decode_attention: every thread does its share of the work (attention_work.h), then the pieces of
// items that lie in several shares are put together.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "cpu/attention.h"
#include "cpu/attention_metadata.h"
#include "cpu/attention_work.h"
#include "cpu/workers.h"

namespace kvarn::cpu {
namespace {

constexpr int64_t kWorkspaceAlignment = 16;
constexpr int64_t kLocalStates = 3;  // of a thread

/// Output and LSE of the rows of an item.
struct State {
  float* out;
  float* lse;
};

/// States side by side: all outputs, then all LSEs.
class States {
 public:
  static int64_t bytes(int64_t count, int64_t rows, int64_t dim) {
    return count * rows * (dim + 1) * static_cast<int64_t>(sizeof(float));
  }

  States(void* memory, int64_t count, int64_t rows, int64_t dim)
      : memory_(static_cast<float*>(memory)), count_(count), rows_(rows), dim_(dim) {}

  State operator[](int64_t i) const {
    return {memory_ + i * rows_ * dim_, memory_ + count_ * rows_ * dim_ + i * rows_};
  }

 private:
  float* memory_;
  int64_t count_;
  int64_t rows_;
  int64_t dim_;
};

int64_t max_rows(int64_t tokens, int64_t q_heads, int64_t kv_heads) {
  return std::clamp<int64_t>(tokens * (q_heads / kv_heads), 1, kMaxQueryRows);
}

int64_t max_units(const DecodeWorkspaceParams& p) {
  const int64_t tokens = p.split_tokens > 0 ? p.split_tokens : p.format.group;
  return (p.max_seq_len + tokens - 1) / tokens;
}

/// Pieces in the workspace: two at each border between shares, or all splits of the item there.
int64_t max_pieces(const DecodeWorkspaceParams& p, int64_t shares) {
  if (max_units(p) <= 1) return 0;
  return (shares - 1) * (p.split_tokens > 0 ? max_units(p) : 2);
}

DecodeWorkspaceParams workspace_params(const DecodeParams& p) {
  return {p.kv.format,   p.kv.seqs,     p.tokens,      p.q_heads,
          p.kv.kv_heads, p.max_seq_len, p.split_tokens};
}

Status check_numbers(const DecodeParams& p, int num_threads) {
  if (p.q_heads < 1 || p.q_heads % p.kv.kv_heads != 0) {
    return Status::invalid("q_heads must be a multiple of " + std::to_string(p.kv.kv_heads) +
                           ", got " + std::to_string(p.q_heads));
  }
  if (!std::isfinite(p.sm_scale)) {
    return Status::invalid("sm_scale must be finite, got " + std::to_string(p.sm_scale));
  }
  if (!(std::isfinite(p.logits_soft_cap) && p.logits_soft_cap >= 0)) {
    return Status::invalid("logits_soft_cap must be finite and at least 0, got " +
                           std::to_string(p.logits_soft_cap));
  }
  if (p.window_left < -1) {
    return Status::invalid("window_left must be at least -1, got " + std::to_string(p.window_left));
  }
  if (p.max_seq_len < 0) {
    return Status::invalid("max_seq_len must be at least 0, got " + std::to_string(p.max_seq_len));
  }
  if (p.split_tokens < 0 || p.split_tokens % p.kv.format.group != 0) {
    return Status::invalid("split_tokens must be a multiple of " +
                           std::to_string(p.kv.format.group) + ", got " +
                           std::to_string(p.split_tokens));
  }
  const int64_t bytes = decode_workspace_bytes(workspace_params(p), num_threads);
  if (p.workspace_bytes < bytes) {
    return Status::invalid("workspace must be of at least " + std::to_string(bytes) +
                           " bytes, got " + std::to_string(p.workspace_bytes));
  }
  const int64_t misaligned =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.workspace) % kWorkspaceAlignment);
  if (bytes > 0 && misaligned != 0) {
    return Status::invalid("workspace must be aligned to 16 bytes, got an address " +
                           std::to_string(misaligned) + " bytes past");
  }
  return {};
}

Status check_metadata(const DecodeParams& p) {
  if (p.cu_query_lens) {
    if (Status status = check_offsets("cu_query_lens", p.cu_query_lens, p.kv.seqs); !status.ok()) {
      return status;
    }
    const int64_t first = p.cu_query_lens[0];
    const int64_t last = p.cu_query_lens[p.kv.seqs];
    if (first != 0 || last != p.tokens) {
      return Status::invalid("cu_query_lens must be from 0 to " + std::to_string(p.tokens) +
                             " (the tokens of q), got " + std::to_string(first) + " to " +
                             std::to_string(last));
    }
  } else if (p.tokens != p.kv.seqs) {
    return Status::invalid("q must be of one token per sequence without cu_query_lens, " +
                           std::to_string(p.kv.seqs) + " in all, got " + std::to_string(p.tokens));
  }
  const int64_t table_tokens = p.kv.table_width * p.kv.format.group;
  for (int64_t seq = 0; seq < p.kv.seqs; ++seq) {
    Status status = check_seq_len(p.kv, seq, p.max_seq_len, "max_seq_len");
    if (status.ok()) status = check_seq_len(p.kv, seq, table_tokens, "the tokens of block_table");
    if (!status.ok()) return status;
  }
  return {};
}

class Decode {
 public:
  Decode(const DecodeParams& p, int64_t shares)
      : p_(p),
        shares_(shares),
        rows_(max_rows(p.tokens, p.q_heads, p.kv.kv_heads)),
        work_(p, shares),
        plan_(make_tile_plan(p.kv.format)),
        kernels_(attention_kernels()),
        max_units_(max_units(workspace_params(p))),
        pieces_(p.workspace, max_pieces(workspace_params(p), shares), rows_, p.kv.format.head_dim) {
  }

  /// Blocks that no query sees are neither checked nor read.
  Status check_blocks_seen() const {
    for (int64_t seq = 0; seq < p_.kv.seqs; ++seq) {
      int64_t begin, end;
      work_.seen_tiles(seq, 0, work_.queries(seq), &begin, &end);
      if (Status status = check_blocks(p_.kv, seq, begin, end); !status.ok()) return status;
    }
    return {};
  }

  Status run(const Executor& executor) const {
    const int64_t states = round_up(States::bytes(kLocalStates, rows_, p_.kv.format.head_dim));
    const int64_t attend = kernels_.attend_scratch_bytes(p_.kv.format, static_cast<int>(rows_));
    Status status = parallel_for_scratch(
        executor, shares_, states + attend, [&](int64_t share, std::byte* scratch) {
          const States local(scratch, kLocalStates, rows_, p_.kv.format.head_dim);
          work_.for_each_item(
              work_.share_begin(share), work_.share_begin(share + 1),
              [&](const WorkItem& item) { do_item(item, share, local, scratch + states); });
        });
    if (!status.ok()) return status;
    if (max_units_ > 1) {
      parallel_for(executor, shares_ - 1, [&](int64_t share) { combine_last_item(share); });
    }
    return {};
  }

 private:
  static int64_t round_up(int64_t bytes) {
    return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
  }

  /// `local`: three states. The first two are for items that lie in this share.
  void do_item(const WorkItem& item, int64_t share, const States& local, void* scratch) const {
    const int64_t first = Work::unit_at(item, work_.share_begin(share));
    const int64_t last = Work::unit_at(item, work_.share_begin(share + 1));
    if (first == last) return;
    const QueryRows rows = work_.rows_of(item);
    const bool whole = first == 0 && last == item.units;
    const int64_t step = p_.split_tokens > 0 ? 1 : last - first;
    for (int64_t unit = first; unit < last; unit += step) {
      const State state =
          whole ? local[unit > 0] : pieces_[piece(work_.owner_of(item, share), share, unit)];
      int64_t begin, end;
      work_.tiles_of(item, unit, unit + step, &begin, &end);
      attend(item, rows, begin, end, state, local[2], scratch);
      if (whole && unit > 0) merge(item, local[0], state);
    }
    if (whole) kernels_.finish(p_, rows, local[0].out, local[0].lse);
  }

  /// In stretches: float32 sums over a million tokens would lose two digits.
  void attend(const WorkItem& item, const QueryRows& rows, int64_t begin, int64_t end,
              const State& to, const State& spare, void* scratch) const {
    constexpr int64_t kStretch = 64;  // tiles
    for (int64_t tile = begin; tile == begin || tile < end; tile += kStretch) {
      const State& state = tile == begin ? to : spare;
      kernels_.attend(p_, plan_, rows, tile, std::min(tile + kStretch, end), scratch, state.out,
                      state.lse);
      if (tile != begin) merge(item, to, state);
    }
  }

  /// The item that share `share` begins and does not end.
  void combine_last_item(int64_t share) const {
    const int64_t border = work_.share_begin(share + 1);
    work_.for_each_item(border, border + 1, [&](const WorkItem& item) {
      const int64_t cut = Work::unit_at(item, border);
      if (cut == 0 || cut == item.units || work_.owner_of(item, share) != share) return;
      const State state = pieces_[piece(share, share, 0)];
      if (p_.split_tokens > 0) {
        for (int64_t unit = 1; unit < item.units; ++unit) {
          merge(item, state, pieces_[piece(share, share, unit)]);
        }
      } else {
        int64_t first = cut;
        for (int64_t other = share + 1; first < item.units; ++other) {
          const int64_t last = Work::unit_at(item, work_.share_begin(other + 1));
          if (first < last) merge(item, state, pieces_[piece(share, other, first)]);
          first = last;
        }
      }
      kernels_.finish(p_, work_.rows_of(item), state.out, state.lse);
    });
  }

  /// Where a piece stands in the workspace that begins with unit `unit` and was made by `share`.
  int64_t piece(int64_t owner, int64_t share, int64_t unit) const {
    if (p_.split_tokens > 0) return owner * max_units_ + unit;
    return share == owner ? 2 * share : 2 * share - 1;
  }

  void merge(const WorkItem& item, const State& a, const State& b) const {
    kernels_.merge(a.out, a.lse, b.out, b.lse, item.rows, p_.kv.format.head_dim);
  }

  const DecodeParams& p_;
  const int64_t shares_;
  const int64_t rows_;
  const Work work_;
  const TilePlan plan_;
  const AttentionKernels& kernels_;
  const int64_t max_units_;
  const States pieces_;
};

}  // namespace

int64_t decode_workspace_bytes(const DecodeWorkspaceParams& p, int num_threads) {
  return States::bytes(max_pieces(p, std::max(num_threads, 1)),
                       max_rows(p.tokens, p.q_heads, p.kv_heads), p.format.head_dim);
}

Status decode_attention(const DecodeParams& p, const Executor& executor) {
  if (Status status = check_paged_kv(p.kv); !status.ok()) return status;
  if (Status status = check_numbers(p, executor.num_threads); !status.ok()) return status;
  if (Status status = check_metadata(p); !status.ok()) return status;
  const Decode decode(p, std::max(executor.num_threads, 1));
  if (Status status = decode.check_blocks_seen(); !status.ok()) return status;
  return decode.run(executor);
}

}  // namespace kvarn::cpu
