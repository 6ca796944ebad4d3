// The work of decode_attention, and its division over threads.
//
// An *item* is a block of query rows with the tiles they see; a *unit* the least of it that is
// computed on its own: one tile, or with split_tokens one split, whose borders are multiples of
// split_tokens from the start of the sequence whatever else there is. All units of all items, one
// after the other, are cut into as many shares of equal cost as there are threads. Most items lie
// inside a share. The others are computed in *pieces* that meet in the workspace:
//
//   shares   |------ 0 ------|------ 1 ------|------ 2 ------|
//   items    |a  |b     |c                           |d      |
//   pieces               |c0 |c1             |c2     |
//
// Default: a piece is what a share has of an item; it depends on the number of threads.
// split_tokens: a piece is a split, the same ones always, and added up in the same order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/attention.h"

namespace kvarn::cpu {

struct WorkItem {
  int64_t seq;
  int32_t kv_head;
  int64_t first_query;  ///< row of q
  int64_t first_row;    ///< of the (query token, head of the group) rows of the sequence
  int32_t rows;
  int64_t tile_begin;  ///< tiles that a row sees
  int64_t tile_end;
  int64_t units;
  int64_t unit_cost;
  int64_t start;  ///< cost of everything before it
};

class Work {
 public:
  Work(const DecodeParams& p, int64_t shares)
      : p_(p),
        shares_(shares),
        heads_per_kv_(p.q_heads / p.kv.kv_heads),
        unit_tiles_(unit_tiles(p)) {
    for (int64_t seq = 0; seq < p.kv.seqs; ++seq) total_ += seq_cost(seq) * p.kv.kv_heads;
  }

  int64_t queries(int64_t seq) const {
    return p_.cu_query_lens ? p_.cu_query_lens[seq + 1] - p_.cu_query_lens[seq] : 1;
  }

  /// Tokens begin .. end - 1 that a query token of a sequence sees; 0, 0: none.
  void seen(int64_t seq, int64_t query, int64_t* begin, int64_t* end) const {
    const int64_t length = p_.kv.seq_lens[seq];
    const int64_t position = length - queries(seq) + query;
    *end = p_.causal ? std::max<int64_t>(position + 1, 0) : length;
    const bool sees_all = p_.window_left < 0 || position <= p_.window_left;
    *begin = sees_all ? 0 : position - p_.window_left;
    if (*begin >= *end) *begin = *end = 0;
  }

  /// The tiles that query tokens first .. last - 1 see.
  void seen_tiles(int64_t seq, int64_t first, int64_t last, int64_t* begin, int64_t* end) const {
    const int64_t group = p_.kv.format.group;
    *begin = *end = 0;
    for (int64_t query = first; query < last; ++query) {
      int64_t token_begin, token_end;
      seen(seq, query, &token_begin, &token_end);
      if (token_end == 0) continue;
      const int64_t tile = token_begin / group;
      *begin = *end == 0 ? tile : std::min(*begin, tile);
      *end = std::max(*end, (token_end + group - 1) / group);
    }
  }

  /// The costs of share k are share_begin(k) .. share_begin(k + 1) - 1.
  int64_t share_begin(int64_t share) const {
    return total_ / shares_ * share + total_ % shares_ * share / shares_;
  }

  /// The first unit of the item that begins at or after a cost.
  static int64_t unit_at(const WorkItem& item, int64_t cost) {
    if (cost <= item.start) return 0;
    return std::min(item.units, (cost - item.start + item.unit_cost - 1) / item.unit_cost);
  }

  /// Tiles of units first .. last - 1 of an item.
  void tiles_of(const WorkItem& item, int64_t first, int64_t last, int64_t* begin,
                int64_t* end) const {
    const int64_t origin = item.tile_begin / unit_tiles_;
    *begin = std::max(item.tile_begin, (origin + first) * unit_tiles_);
    *end = std::min(item.tile_end, (origin + last) * unit_tiles_);
  }

  /// The share with the first unit of an item that share `share` has a part of.
  int64_t owner_of(const WorkItem& item, int64_t share) const {
    while (share > 0 && unit_at(item, share_begin(share)) > 0) --share;
    return share;
  }

  /// Calls fn(item) for the items that have costs of begin .. end - 1.
  template <class Fn>
  void for_each_item(int64_t begin, int64_t end, Fn&& fn) const {
    int64_t cost = 0;
    int64_t first_query = 0;
    for (int64_t seq = 0; seq < p_.kv.seqs && cost < end; ++seq) {
      const int64_t head_cost = seq_cost(seq);
      for (int32_t head = 0; head < p_.kv.kv_heads && cost < end; ++head) {
        if (cost + head_cost <= begin) {
          cost += head_cost;
          continue;
        }
        const int64_t rows = queries(seq) * heads_per_kv_;
        for (int64_t row = 0; row < rows && cost < end; row += kMaxQueryRows) {
          WorkItem item = item_at(seq, row);
          item.kv_head = head;
          item.first_query = first_query;
          item.start = cost;
          cost += item.units * item.unit_cost;
          if (cost > begin) fn(item);
        }
      }
      first_query += queries(seq);
    }
  }

  QueryRows rows_of(const WorkItem& item) const {
    QueryRows rows;
    rows.seq = item.seq;
    rows.kv_head = item.kv_head;
    rows.count = item.rows;
    for (int32_t i = 0; i < item.rows; ++i) {
      const int64_t row = item.first_row + i;
      rows.token[i] = item.first_query + row / heads_per_kv_;
      rows.head[i] = item.kv_head * heads_per_kv_ + static_cast<int32_t>(row % heads_per_kv_);
      seen(item.seq, row / heads_per_kv_, &rows.begin[i], &rows.end[i]);
    }
    return rows;
  }

 private:
  /// A split longer than any sequence is as good as one of max_seq_len, and its costs cannot
  /// overflow.
  static int64_t unit_tiles(const DecodeParams& p) {
    if (p.split_tokens <= 0) return 1;
    const int64_t group = p.kv.format.group;
    const int64_t most = std::max<int64_t>((p.max_seq_len + group - 1) / group, 1);
    return std::min(p.split_tokens / group, most);
  }

  WorkItem item_at(int64_t seq, int64_t row) const {
    WorkItem item{};
    item.seq = seq;
    item.first_row = row;
    item.rows =
        static_cast<int32_t>(std::min<int64_t>(kMaxQueryRows, queries(seq) * heads_per_kv_ - row));
    seen_tiles(seq, row / heads_per_kv_, (row + item.rows - 1) / heads_per_kv_ + 1,
               &item.tile_begin, &item.tile_end);
    const int64_t end = (item.tile_end + unit_tiles_ - 1) / unit_tiles_;
    // An item without tiles has a unit too: its output is to be written.
    item.units = std::max<int64_t>(end - item.tile_begin / unit_tiles_, 1);
    item.unit_cost = unit_tiles_ * (item.rows + kTileCost);
    return item;
  }

  /// Of one KV head.
  int64_t seq_cost(int64_t seq) const {
    int64_t cost = 0;
    for (int64_t row = 0; row < queries(seq) * heads_per_kv_; row += kMaxQueryRows) {
      const WorkItem item = item_at(seq, row);
      cost += item.units * item.unit_cost;
    }
    return cost;
  }

  static constexpr int64_t kTileCost = 2;  ///< of unpacking a tile, in rows

  const DecodeParams& p_;
  const int64_t shares_;
  const int32_t heads_per_kv_;
  const int64_t unit_tiles_;
  int64_t total_ = 0;
};

}  // namespace kvarn::cpu
