// append_kv: new tokens -> rows of the staging pool.
//
// Roofline. 8 bytes an element pair (read, write): 256 tokens of 8 heads, D = 128, are 2 MB, half a
// microsecond; the launch and three dependent loads (slot, staging slot, row) are what it takes. A
// thread moves 16 bytes, the row is loaded while the two indices are, and a block has a share of
// one token, so that no division stands before the loads.
//
// Measured, those 256 tokens, cold: 2.3 us each in a graph of 50, 4.3 us in a graph of one; rows at
// odd addresses, an element an access: 4.4 us each.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/checked.cuh"
#include "cuda/format.h"
#include "cuda/launch.h"
#include "device/dependent_launch.cuh"
#include "device/numeric.cuh"

namespace kvarn::cuda {
namespace {

constexpr int kThreads = 256;

/// What a token is cut into: K and V, heads, pieces of a row. A thread moves a piece.
struct Pieces {
  int row_bits;     ///< 2^row_bits pieces are a row
  int group_bits;   ///< 2^group_bits tokens are a block of the cache
  int count;        ///< of a token
  unsigned blocks;  ///< thread blocks of a token
};

template <int kAccess>  // 16-bit elements of a piece
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ AppendParams p, const __grid_constant__ Pieces pieces) {
  device::let_next_start();
  const unsigned token = pieces.blocks == 1 ? blockIdx.x : blockIdx.x / pieces.blocks;
  const int i =
      static_cast<int>(blockIdx.x - token * pieces.blocks) * static_cast<int>(blockDim.x) +
      static_cast<int>(threadIdx.x);
  if (i >= pieces.count) return;
  const int element = (i & ((1 << pieces.row_bits) - 1)) * kAccess;
  const int kv = i >> pieces.row_bits >= p.heads ? 1 : 0;
  const int head = (i >> pieces.row_bits) - kv * p.heads;

  const auto* const in = static_cast<const uint16_t*>(kv == 0 ? p.key : p.value);
  const int64_t* const stride = kv == 0 ? p.key_stride : p.value_stride;
  const auto row =
      device::load_once<uint16_t, kAccess>(in + token * stride[0] + head * stride[1] + element);
  const int64_t slot = p.slot_mapping[token];
  const int64_t block = slot >> pieces.group_bits;
  // Padding; what is out of range has no row to go to (and is reported where it is looked for).
  if (slot < 0 || block >= p.blocks) return;
  const int64_t page = p.block_slot[block];
  if (page < 0 || page >= p.staging.slots) return;
  const int64_t offset = page * p.staging.stride[0] + kv * p.staging.stride[1] +
                         head * p.staging.stride[2] +
                         (slot - (block << pieces.group_bits)) * p.staging.stride[3];
  device::store_once(static_cast<uint16_t*>(p.staging.data) + offset + element, row);
}

constexpr int kBadBlock = 1;
constexpr int kBadPage = 2;

struct CheckSlots {
  AppendParams p;

  __device__ Offence operator()(int64_t i) const {
    const int64_t slot = p.slot_mapping[i];
    if (slot < 0) return {};
    const int64_t block = slot / p.format.group;
    if (block >= p.blocks) return {kBadBlock, slot, 0};
    const int64_t page = p.block_slot[block];
    if (page < 0 || page >= p.staging.slots) return {kBadPage, slot, page};
    return {};
  }
};

Status check_slots(const AppendParams& p) {
  Offence found;
  int64_t index;
  if (Status status = find_offence(CheckSlots{p}, p.tokens, p.stream, found, index); !status.ok()) {
    return status;
  }
  const std::string at_index = " at index " + std::to_string(index);
  const int64_t group = p.format.group;
  switch (found.rule) {
    case kBadBlock:
      return Status::invalid("slot_mapping must be less than " + std::to_string(p.blocks * group) +
                             " (" + std::to_string(p.blocks) + " blocks of " +
                             std::to_string(group) + "), got " + std::to_string(found.value) +
                             at_index);
    case kBadPage:
      return Status::invalid(
          "block_slot must be a staging slot below " + std::to_string(p.staging.slots) +
          " for every block that tokens are appended to, got " + std::to_string(found.other) +
          " at block " + std::to_string(found.value / group) + " (slot_mapping " +
          std::to_string(found.value) + at_index + ")");
    default:
      return {};
  }
}

int log2_of(int power_of_two) {
  int bits = 0;
  while (1 << bits < power_of_two) ++bits;
  return bits;
}

bool aligned(const AppendParams& p) {
  const auto is_multiple = [](int64_t bytes) { return bytes % device::kAccessBytes == 0; };
  bool ok = is_multiple(reinterpret_cast<intptr_t>(p.key)) &&
            is_multiple(reinterpret_cast<intptr_t>(p.value)) &&
            is_multiple(reinterpret_cast<intptr_t>(p.staging.data));
  const int64_t sizes[] = {p.tokens, p.heads};
  for (int i = 0; i < 2; ++i) {
    if (sizes[i] > 1)
      ok = ok && is_multiple(2 * p.key_stride[i]) && is_multiple(2 * p.value_stride[i]);
  }
  for (int64_t stride : p.staging.stride) ok = ok && is_multiple(2 * stride);
  return ok;
}

}  // namespace

Status append_kv(const AppendParams& p) {
  if (Status status = check_format(p.format); !status.ok()) return status;
  if (p.staging.dtype == DType::kFloat32) {
    return Status::unsupported("staging must be float16 or bfloat16 on CUDA, got float32");
  }
  const int access = aligned(p) ? device::kAccessBytes / 2 : 1;
  const int64_t count = int64_t{2} * p.heads * (p.format.head_dim / access);
  const int threads = static_cast<int>(
      std::min<int64_t>(kThreads, (count + kWarpLanes - 1) / kWarpLanes * kWarpLanes));
  if (p.tokens == 0 || count == 0) return {};
  const int64_t token_blocks = (count + threads - 1) / threads;
  if (Status status = check_grid("key", p.tokens * token_blocks); !status.ok()) return status;
  const Pieces pieces = {log2_of(p.format.head_dim / access), log2_of(p.format.group),
                         static_cast<int>(count), static_cast<unsigned>(token_blocks)};
  if (p.checked) {
    if (Status status = check_slots(p); !status.ok()) return status;
  }
  return launch(access == 1 ? append_kernel<1> : append_kernel<device::kAccessBytes / 2>,
                dim3(static_cast<unsigned>(p.tokens * token_blocks)), dim3(threads), 0, p.stream, p,
                pieces);
}

}  // namespace kvarn::cuda
