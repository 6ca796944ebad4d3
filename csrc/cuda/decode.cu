// decode_attention: checks, the division of shared memory and workspace, and the launch.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>

#include "cuda/decode_formats.h"
#include "cuda/decode_plan.cuh"
#include "cuda/format.h"
#include "cuda/launch.h"
#include "cuda/paged_check.cuh"

namespace kvarn::cuda {

template <int kKeyBits, int kValueBits, int kGroup, int kDim, bool kIsUsual, bool kHasOneRecord>
struct StaticFormat;
template <class F>
struct WithSplits;
template <int kDim>
struct AnyFormat;
template <class F, int kBlocks>
Status launch_decode(const DecodeParams& p, const DecodePlan& plan, int grid, int shared_bytes);
template <int kKeyBits, int kValueBits, int kRowBlocks>
Status launch_decode_group(const DecodeParams& p, const DecodePlan& plan, int grid,
                           int shared_bytes);
template <int kRowBlocks>
int decode_group_bytes();

namespace {

constexpr int64_t kMaxInt = 2147483647;
constexpr int64_t kAlignment = 16;
/// Beginning and ending an item takes a warp as long as so many tiles: the code for it, unlike that
/// of tiles, is seldom in the instruction cache.
constexpr int kItemUnits = 4;
constexpr int kMaxGroup = 128;
constexpr int kMaxParts = 8;  ///< warps that share the bytes of a tile

/// A number that is different for every call, and that nothing in memory has by chance. (A graph
/// plays the same number again; so who has read it takes it away.)
uint64_t random_number() {
  thread_local std::mt19937_64 generator{(uint64_t{std::random_device{}()} << 32) ^
                                         std::random_device{}()};
  return generator() | 1;
}

/// Of the device on which a launch runs.
struct Device {
  int multiprocessors = 0;
  int shared_of_block = 0;

  cudaError_t read() {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    const auto get = [&](int& value, cudaDeviceAttr attribute) {
      if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
    };
    get(multiprocessors, cudaDevAttrMultiProcessorCount);
    get(shared_of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return error;
  }
};

/// Whether there is a kernel in which a warp has 16 rows (the registers do not hold that of all).
bool has_two_blocks(const Format& f) { return f.head_dim == 64 || decode_options_are_static(f); }

/// For usual decode steps.
bool has_own_kernel(const Format& f) {
#define KVARN_IS(k, v, g, d) f == Format{k, v, g, d} ||
  return KVARN_DECODE_FORMATS(KVARN_IS) false;
#undef KVARN_IS
}

/// The same with splits; one_record: whether warps have a ring of one record.
bool has_splits_kernel(const Format& f, bool one_record) {
#define KVARN_IS(k, v, g, d, one) (f == Format{k, v, g, d} && one == one_record) ||
  return KVARN_SPLITS_FORMATS(KVARN_IS) false;
#undef KVARN_IS
}

/// Never launched.
__global__ void probe() {}

/// Whether the code that runs on this device was compiled for sm_90 or later. (The device does not
/// tell: it runs what was compiled for sm_80, if there is nothing else.)
bool is_compiled_for_sm_90() {
  cudaFuncAttributes code;
  if (cudaFuncGetAttributes(&code, probe) == cudaSuccess) return code.ptxVersion >= 90;
  (void)cudaGetLastError();
  return false;
}

/// Whether a kernel is faster whose warps have a ring of one record each: where the work is so much
/// that twelve warps a block do it faster than eight, which share it in fewer parts; and with
/// D = 256, where only four of the eight have room for two records.
bool wants_one_record(const DecodeParams& p, const Device& device) {
  constexpr int kItemsOfSm = 3;
#define KVARN_IS(k, v, g, d) p.kv.format == Format{k, v, g, d} ||
  const bool has_kernel = KVARN_ONE_RECORD_FORMATS(KVARN_IS) false;
#undef KVARN_IS
  const int64_t items = int64_t{p.kv.seqs} * p.kv.kv_heads;
  const bool wants = p.split_tokens > 0
                         ? has_splits_kernel(p.kv.format, true)
                         : has_kernel && (p.kv.format.head_dim == 256 ||
                                          items >= int64_t{kItemsOfSm} * device.multiprocessors);
  return wants && is_compiled_for_sm_90();
}

/// How many query rows are worked on together, as many as a sequence of average length has: blocks
/// of 8 of a warp, and warps that share the bytes of a tile.
struct RowShape {
  int blocks = 1;
  int parts = 1;
  int parts_shift = 0;

  explicit RowShape(const DecodeWorkspaceParams& p) {
    const int64_t queries = p.seqs > 0 ? (p.tokens + p.seqs - 1) / p.seqs : 1;
    const int64_t count = queries * (p.q_heads / p.kv_heads);
    // A row of two blocks is not rounded as one of a single block, and with splits a result must
    // not depend on what else is in the batch.
    if (count > device::kBlockRows && has_two_blocks(p.format) && p.split_tokens == 0) blocks = 2;
    for (; parts < kMaxParts && rows() < count; parts *= 2) ++parts_shift;
  }
  int rows() const { return blocks * parts * device::kBlockRows; }
};

/// Whether warpgroups work on the rows (decode_group_kernel.cuh), and how many 8-row blocks a team
/// has; up to 16 rows, warps are faster. It needs no more workspace than warps do.
struct GroupShape {
  int row_blocks = 0;    ///< 0: no warpgroups
  int shared_bytes = 0;  ///< of a block

  GroupShape(const DecodeParams& p, const RowShape& shape, const Device& device) {
    // With splits kernels must agree bit for bit.
    if (shape.rows() <= 2 * device::kBlockRows || p.split_tokens != 0 ||
        !(p.kv.format == Format{4, 2, 128, 128}) ||
        (p.kv.staging.data != nullptr && p.kv.staging.dtype != p.dtype)) {
      return;
    }
    const int blocks = std::min(shape.rows() / device::kBlockRows, 8);
    shared_bytes = blocks == 4 ? decode_group_bytes<4>() : decode_group_bytes<8>();
    if (shared_bytes > 0 && shared_bytes + kDecodeStaticBytes <= device.shared_of_block) {
      row_blocks = blocks;
    }
  }
};

/// Of the rows of a warp.
int64_t state_bytes(const Format& f, const RowShape& shape) {
  return int64_t{kWarpLanes} * shape.blocks * (f.head_dim / kFragmentDim + 1) *
         static_cast<int64_t>(sizeof(float4));
}

/// Of those rows where they are joined (RowPiece in decode_join.cuh).
int64_t row_piece_bytes(const Format& f, const RowShape& shape) {
  return int64_t{shape.blocks} * device::kBlockRows * (f.head_dim + 2) *
         static_cast<int64_t>(sizeof(float));
}

/// And as words that go from block to block (Word there): one for two channels, and two for each
/// strip of four (two, if D = 64) channels a lane.
int64_t word_bytes(const Format& f, const RowShape& shape) {
  constexpr int64_t kWordBytes = 16;
  const int64_t strips = std::max(f.head_dim / (4 * kWarpLanes), 1);
  return int64_t{shape.blocks} * device::kBlockRows * (f.head_dim / 2 + 2 * strips) * kWordBytes;
}

int64_t tiles_of(const Format& f, int64_t tokens) { return (tokens + f.group - 1) / f.group; }

/// Units of the whole batch, at most.
int64_t max_split_units(const DecodeWorkspaceParams& p, const RowShape& shape,
                        int64_t units_of_item) {
  const int64_t row_blocks =
      std::min(p.seqs, p.tokens) + p.tokens * (p.q_heads / p.kv_heads) / shape.rows();
  return row_blocks * p.kv_heads * units_of_item;
}

/// 2^64 / shares, rounded up (see Division).
uint64_t inverse_of(int shares) {
  return shares == 1 ? UINT64_MAX : UINT64_MAX / static_cast<uint64_t>(shares) + 1;
}

/// The largest number of blocks whose equal shares begin and end with items, or that divide each
/// item among as many blocks, if all items are equal; 0 if that leaves too many blocks idle.
int aligned_blocks(const DecodeWorkspaceParams& p, int item_rows, int grid) {
  const int64_t rows = (p.tokens + p.seqs - 1) / p.seqs * (p.q_heads / p.kv_heads);
  const int64_t items = p.seqs * p.kv_heads * ((rows + item_rows - 1) / item_rows);
  const int64_t of_block = (items + grid - 1) / grid;
  const int64_t blocks = items < grid ? grid / items * items : items / of_block;
  const bool exact = items < grid || items % of_block == 0;
  constexpr int64_t kIdle = 16;  // at most one block of so many
  return exact && (grid - blocks) * kIdle <= grid ? static_cast<int>(blocks) : 0;
}

/// The parts of the workspace, each a multiple of 16 bytes.
struct Workspace {
  int64_t flag_bytes = 0;
  int64_t piece_bytes = 0;
  int64_t warp_piece_bytes = 0;

  int64_t bytes() const { return flag_bytes + piece_bytes + warp_piece_bytes; }
};

Workspace workspace_of(const DecodeWorkspaceParams& p, const Device& device) {
  Workspace w;
  const int64_t tiles = tiles_of(p.format, p.max_seq_len);
  const int64_t split_tiles = p.split_tokens / p.format.group;
  const int64_t units =
      split_tiles > 0
          ? std::min<int64_t>((tiles + split_tiles - 1) / std::max<int64_t>(split_tiles, 1),
                              kMaxSplits)
          : tiles;
  if (units <= 1 || p.seqs == 0 || p.tokens == 0) return w;  // no item in several pieces
  const RowShape shape(p);
  const int64_t parts = shape.parts;
  const int64_t grid = device.multiprocessors;
  if (split_tiles > 0) {
    w.flag_bytes = (grid * int64_t{sizeof(uint64_t)} + kAlignment - 1) / kAlignment * kAlignment;
    w.piece_bytes = max_split_units(p, shape, units) * parts * state_bytes(p.format, shape);
  } else {
    w.piece_bytes = grid * 2 * parts * word_bytes(p.format, shape);
    w.warp_piece_bytes = grid * kMaxDecodeWarps * row_piece_bytes(p.format, shape);
  }
  return w;
}

/// Bytes from the first element of an array to behind its last ones, `width` side by side; at most
/// as many as are asked for ahead.
int bytes_ahead(int64_t element_bytes, int64_t rows, int64_t row_stride, int64_t cols,
                int64_t col_stride, int64_t width = 1) {
  constexpr int64_t kMost = 512 << 10;
  if (rows == 0 || cols == 0) return 0;
  const int64_t elements = (rows - 1) * row_stride + (cols - 1) * col_stride + width;
  return static_cast<int>(std::clamp<int64_t>(element_bytes * elements, 0, kMost));
}

DecodeWorkspaceParams workspace_params(const DecodeParams& p) {
  return {p.kv.format,   p.kv.seqs,     p.tokens,      p.q_heads,
          p.kv.kv_heads, p.max_seq_len, p.split_tokens};
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAlignment == 0; }

template <size_t kCount>
bool are_aligned(const int64_t (&strides)[kCount], int64_t element_bytes) {
  return std::all_of(strides, strides + kCount,
                     [=](int64_t stride) { return stride * element_bytes % kAlignment == 0; });
}

Status check_numbers(const DecodeParams& p, int64_t workspace_bytes) {
  if (p.q_heads < 1 || p.q_heads % p.kv.kv_heads != 0) {
    return Status::invalid("q_heads must be a multiple of " + std::to_string(p.kv.kv_heads) +
                           ", got " + std::to_string(p.q_heads));
  }
  if (p.dtype == DType::kFloat32) {
    return Status::unsupported("q must be fp16 or bf16 on CUDA, got fp32");
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
  // Positions are 32-bit numbers in the kernel.
  if (p.max_seq_len > kMaxInt - kMaxGroup || p.tokens * p.q_heads > kMaxInt ||
      p.kv.seqs > kMaxInt) {
    return Status::unsupported("max_seq_len and the rows of q must be below 2^31 on CUDA, got " +
                               std::to_string(p.max_seq_len) + " and " +
                               std::to_string(p.tokens * p.q_heads));
  }
  if (p.split_tokens < 0 || p.split_tokens % p.kv.format.group != 0) {
    return Status::invalid("split_tokens must be a multiple of " +
                           std::to_string(p.kv.format.group) + ", got " +
                           std::to_string(p.split_tokens));
  }
  if (!p.cu_query_lens && p.tokens != p.kv.seqs) {
    return Status::invalid("q must be of one token per sequence without cu_query_lens, " +
                           std::to_string(p.kv.seqs) + " in all, got " + std::to_string(p.tokens));
  }
  if (p.workspace_bytes < workspace_bytes) {
    return Status::invalid("workspace must be of at least " + std::to_string(workspace_bytes) +
                           " bytes, got " + std::to_string(p.workspace_bytes));
  }
  const uintptr_t misaligned = reinterpret_cast<uintptr_t>(p.workspace) % kAlignment;
  if (workspace_bytes > 0 && misaligned != 0) {
    return Status::invalid("workspace must be aligned to 16 bytes, got an address " +
                           std::to_string(misaligned) + " bytes past");
  }
  return {};
}

/// The first and the last entry of cu_query_lens.
struct CheckQueries {
  IndexArray cu_query_lens;
  int64_t seqs;
  int64_t tokens;

  __device__ Offence operator()(int64_t) const {
    const int64_t first = cu_query_lens[0];
    const int64_t last = cu_query_lens[seqs];
    return first != 0 || last != tokens ? Offence{1, first, last} : Offence{};
  }
};

Status check_metadata(const DecodeParams& p) {
  if (p.cu_query_lens) {
    Status ordered = check_offsets("cu_query_lens", p.cu_query_lens, p.kv.seqs, p.stream);
    if (!ordered.ok()) return ordered;
    Offence offence;
    int64_t index = 0;
    Status status = find_offence(CheckQueries{p.cu_query_lens, p.kv.seqs, p.tokens}, 1, p.stream,
                                 offence, index);
    if (!status.ok()) return status;
    if (offence.rule != 0) {
      return Status::invalid("cu_query_lens must be from 0 to " + std::to_string(p.tokens) +
                             " (the tokens of q), got " + std::to_string(offence.value) + " to " +
                             std::to_string(offence.other));
    }
  }
  return check_paged_metadata(p.kv, p.max_seq_len, p.cu_query_lens, p.window_left, "max_seq_len",
                              p.stream);
}

}  // namespace

int64_t decode_workspace_bytes(const DecodeWorkspaceParams& p) {
  Device device;
  if (device.read() != cudaSuccess) return 0;  // decode_attention reports it
  return workspace_of(p, device).bytes();
}

Status decode_attention(const DecodeParams& p) {
  if (Status status = check_paged_kv(p.kv); !status.ok()) return status;
  Device device;
  if (const cudaError_t error = device.read(); error != cudaSuccess) {
    return runtime_error("reading the properties of the device", error);
  }
  const Format& f = p.kv.format;
  const DecodeWorkspaceParams sizes = workspace_params(p);
  const Workspace workspace = workspace_of(sizes, device);
  if (Status status = check_numbers(p, workspace.bytes()); !status.ok()) return status;
  if (p.kv.seqs == 0 || p.tokens == 0) return {};
  if (p.checked) {
    if (Status status = check_metadata(p); !status.ok()) return status;
  }

  DecodePlan plan{};
  plan.heads_per_kv = p.q_heads / p.kv.kv_heads;
  const RowShape shape(sizes);
  const GroupShape group(p, shape, device);
  plan.row_parts = shape.parts;
  plan.parts_shift = shape.parts_shift;
  plan.rows_shift = shape.parts_shift + device::kBlockRowsShift + (shape.blocks - 1);
  plan.group_shift = f.group == 64 ? 6 : 7;
  plan.layout = record_layout(f);
  plan.stage_bytes = decode_stage_bytes(f);
  // One that hides nothing is none: positions before the first token would overflow with it.
  plan.window = p.window_left >= p.max_seq_len ? -1 : static_cast<int>(p.window_left);
  plan.split_tiles = static_cast<int>(
      std::min(p.split_tokens, std::max<int64_t>(tiles_of(f, p.max_seq_len), 1) * f.group) /
      f.group);
  // By bytes. (Without a workspace an item must lie in one share.)
  if (p.kv.staging.data != nullptr && plan.split_tiles == 0 && workspace.bytes() > 0) {
    plan.staged_units =
        (4u * static_cast<unsigned>(f.head_dim) << 16) / static_cast<unsigned>(plan.layout.bytes);
  }
  if (plan.split_tiles == 0 && workspace.bytes() > 0) plan.item_units = kItemUnits;
  plan.records_aligned = is_aligned(p.kv.cache.data) && are_aligned(p.kv.cache.stride, 1);
  plan.staging_aligned = is_aligned(p.kv.staging.data) && are_aligned(p.kv.staging.stride, 2);
  plan.q_aligned = is_aligned(p.q) && are_aligned(p.q_stride, 2);
  plan.out_aligned = is_aligned(p.out) && are_aligned(p.out_stride, 2);
  const bool splits = plan.split_tiles > 0;
  const bool may = shape.blocks == 1 && is_usual(p, plan);
  // Sixteen rows a warp.
  const bool two_blocks = shape.blocks == 2 && shape.parts == 1 && decode_options_are_static(f) &&
                          plan.records_aligned && plan.staging_aligned && is_compiled_for_sm_90();
  const bool one_record = two_blocks || (may && wants_one_record(p, device));
  const bool usual = may && (splits ? has_splits_kernel(f, one_record) : has_own_kernel(f));
  const int room = device.shared_of_block - kDecodeStaticBytes;
  const int warps = decode_warps(f, usual, one_record);
  // The two stages of a ring of one record share its bytes. Kernels of usual steps have two.
  const int team_bytes =
      (one_record ? 1 : 2) * plan.stage_bytes + (two_blocks ? kTwoBlocksBytes : 0);
  plan.teams = std::min(warps / plan.row_parts, room / team_bytes);
  if (plan.teams < 1) {
    return Status::unsupported("this device has too little shared memory for two records of " +
                               std::to_string(plan.stage_bytes) + " bytes");
  }
  plan.stages = usual ? 2 : std::min(room / (plan.teams * plan.stage_bytes), kMaxStages / warps);
  if (group.row_blocks > 0) {  // the kernel has the rest as constants
    plan.teams = group_teams(group.row_blocks);
    plan.rows_shift = group_rows_shift(group.row_blocks);
  }
  // Units of the whole batch, at most: a staged tile is no more than eight.
  constexpr int64_t kMoreUnits = 3 * 8 + kItemUnits;
  const int64_t units = p.kv.seqs * p.kv.kv_heads * (tiles_of(f, p.max_seq_len) + kMoreUnits);
  plan.few_sequences = !splits && p.kv.seqs <= kWarpLanes && units <= kMaxInt;
  plan.query_bytes = bytes_ahead(2, p.tokens, p.q_stride[0], p.q_heads, p.q_stride[1], f.head_dim);
  const IndexMatrix& table = p.kv.block_table;
  plan.table_bytes = bytes_ahead(table.is_int64 ? 8 : 4, p.kv.seqs, table.row_stride,
                                 p.kv.table_width, table.col_stride);
  const IndexArray& slot = p.kv.block_slot;
  if (slot) {
    plan.slot_bytes = bytes_ahead(slot.is_int64 ? 8 : 4, 1, 0, p.kv.cache.blocks, slot.stride);
  }
  auto* const memory = static_cast<char*>(p.workspace);
  plan.launch = random_number();
  plan.flags = reinterpret_cast<uint64_t*>(memory);
  plan.pieces = reinterpret_cast<float4*>(memory + workspace.flag_bytes);
  plan.warp_pieces =
      reinterpret_cast<float4*>(memory + workspace.flag_bytes + workspace.piece_bytes);
  const int grid = device.multiprocessors;
  plan.inverse_shares = inverse_of(grid * plan.teams);
  plan.aligned_shares =
      static_cast<unsigned>(aligned_blocks(sizes, 1 << plan.rows_shift, grid) * plan.teams);
  if (plan.aligned_shares > 0) {
    plan.inverse_aligned = inverse_of(static_cast<int>(plan.aligned_shares));
  }
  const int ring_bytes = plan.teams * (one_record ? 1 : plan.stages) * plan.stage_bytes;
  // Where the rings were, the join has what each warp keeps.
  const int64_t kept_bytes = splits ? state_bytes(f, shape) : row_piece_bytes(f, shape);
  const int shared_bytes = std::max(ring_bytes + (two_blocks ? plan.teams * kTwoBlocksBytes : 0),
                                    static_cast<int>(warps * kept_bytes));
  if (group.row_blocks > 0) {
    const auto launch =
        group.row_blocks == 4 ? launch_decode_group<4, 2, 4> : launch_decode_group<4, 2, 8>;
    return launch(p, plan, grid, group.shared_bytes);
  }
  const auto go = [&](auto launch) { return launch(p, plan, grid, shared_bytes); };
  if (usual && splits) {
#define KVARN_LAUNCH(k, v, g, d, one) \
  if (f == Format{k, v, g, d})        \
    return go(launch_decode<WithSplits<StaticFormat<k, v, g, d, true, one>>, 1>);
    KVARN_SPLITS_FORMATS(KVARN_LAUNCH)
#undef KVARN_LAUNCH
  }
  if (two_blocks) return go(launch_decode<StaticFormat<4, 2, 128, 128, false, true>, 2>);
  if (one_record) {
#define KVARN_LAUNCH(k, v, g, d) \
  if (f == Format{k, v, g, d}) return go(launch_decode<StaticFormat<k, v, g, d, true, true>, 1>);
    KVARN_ONE_RECORD_FORMATS(KVARN_LAUNCH)
#undef KVARN_LAUNCH
  }
  if (usual) {
#define KVARN_LAUNCH(k, v, g, d) \
  if (f == Format{k, v, g, d}) return go(launch_decode<StaticFormat<k, v, g, d, true, false>, 1>);
    KVARN_DECODE_FORMATS(KVARN_LAUNCH)
#undef KVARN_LAUNCH
  }
  const bool one = shape.blocks == 1;
  if (decode_options_are_static(f)) {
    using Known = StaticFormat<4, 2, 128, 128, false, false>;
    return one ? go(launch_decode<Known, 1>) : go(launch_decode<Known, 2>);
  }
  switch (f.head_dim) {
    case 64:
      return one ? go(launch_decode<AnyFormat<64>, 1>) : go(launch_decode<AnyFormat<64>, 2>);
    case 128:
      return go(launch_decode<AnyFormat<128>, 1>);
    default:
      return go(launch_decode<AnyFormat<256>, 1>);
  }
}

}  // namespace kvarn::cuda
