// append_kv: new tokens -> rows of the staging pool.
//
// Roofline. 8 bytes an element pair (read, write): 256 tokens of 8 heads, D = 128, are 2 MB, half a
// microsecond; the launch and three dependent loads (slot, staging slot, row) are what it takes. A
// thread moves 16 bytes, and the row is loaded while the two indices are.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cuda/checked.cuh"
#include "cuda/format.h"
#include "cuda/launch.h"
#include "device/numeric.cuh"

namespace kvarn::cuda {
namespace {

constexpr int kThreads = 256;

template <int kAccess>  // 16-bit elements that a load or store moves
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendParams p) {
  const int pieces = p.format.head_dim / kAccess;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int piece = static_cast<int>(i % pieces);
  i /= pieces;
  const int head = static_cast<int>(i % p.heads);
  i /= p.heads;
  const int kv = static_cast<int>(i & 1);
  const int64_t token = i >> 1;
  if (token >= p.tokens) return;

  const auto* const in = static_cast<const uint16_t*>(kv == 0 ? p.key : p.value);
  const int64_t* const stride = kv == 0 ? p.key_stride : p.value_stride;
  const auto row = device::load_once<uint16_t, kAccess>(in + token * stride[0] + head * stride[1] +
                                                        piece * kAccess);
  const int64_t slot = p.slot_mapping[token];
  const int64_t block = slot / p.format.group;
  // Padding; what is out of range has no row to go to (and is reported where it is looked for).
  if (slot < 0 || block >= p.blocks) return;
  const int64_t page = p.block_slot[block];
  if (page < 0 || page >= p.staging.slots) return;
  const int64_t offset = page * p.staging.stride[0] + kv * p.staging.stride[1] +
                         head * p.staging.stride[2] + slot % p.format.group * p.staging.stride[3];
  device::store_once(static_cast<uint16_t*>(p.staging.data) + offset + piece * kAccess, row);
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
  const int64_t threads = 2 * p.tokens * p.heads * (p.format.head_dim / access);
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  if (blocks == 0) return {};
  if (Status status = check_grid("key", blocks); !status.ok()) return status;
  if (p.checked) {
    if (Status status = check_slots(p); !status.ok()) return status;
  }
  return launch(access == 1 ? append_kernel<1> : append_kernel<device::kAccessBytes / 2>,
                dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, p.stream, p);
}

}  // namespace kvarn::cuda
