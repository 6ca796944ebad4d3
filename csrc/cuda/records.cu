// unpack_records and pack_records: fragment order <-> canonical order.
//
// Roofline. A record of k4v4, D = G = 128, is 17.9 KB packed and 34 KB canonical: 13 ns at the copy
// rate of an H200. For tests, tools and other engines, so the simplest kernel: a record is two
// blocks, K and V. Unpacking, a thread makes one canonical code at a time; packing, one word of
// fragment order, which it alone writes. Finding the places bounds it: 153 to 172 ns to unpack a
// record and 84 to 112 to pack one, as measured.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "cuda/format.h"
#include "cuda/launch.h"
#include "device/codes.cuh"

namespace kvarn::cuda {
namespace {

constexpr int kThreads = 256;

/// Numbers at any address: records may start at odd ones.
template <class T>
__device__ __forceinline__ T load_at(const uint8_t* p) {
  T x;
  memcpy(&x, p, sizeof(T));
  return x;
}

template <class T>
__device__ __forceinline__ void store_at(uint8_t* p, T x) {
  memcpy(p, &x, sizeof(T));
}

/// The codes and scales of one part (K or V) of one record.
struct Part {
  uint8_t* packed;
  uint8_t* codes;       ///< K: [D, G], V: [G, D]
  uint16_t* scales[3];  ///< in the order of the record
  int counts[3];        ///< of scales
  int bits;
};

template <bool kKey>
__device__ __forceinline__ Part part_of(const CanonicalParams& p, int64_t record) {
  const int64_t tile = record / p.heads;
  uint8_t* const start =
      p.records + tile * p.record_stride[0] + (record - tile * p.heads) * p.record_stride[1];
  const int d = p.format.head_dim;
  const int g = p.format.group;
  const int64_t codes = record * d * g;
  if constexpr (kKey) {
    return {start,
            p.key_codes + codes,
            {p.key_channel_scale + record * d, p.key_zero_point + record * d,
             p.key_token_scale + record * g},
            {d, d, g},
            p.format.key_bits};
  } else {
    return {start + record_layout(p.format).value_codes,
            p.value_codes + codes,
            {p.value_token_scale + record * g, p.value_zero_point + record * g,
             p.value_channel_scale + record * d},
            {g, g, d},
            p.format.value_bits};
  }
}

/// Calls move(scale in the record, canonical scale) for each scale of this thread.
template <class Move>
__device__ __forceinline__ void for_each_scale(const Part& part, uint8_t* scales, Move&& move) {
#pragma unroll
  for (int s = 0; s < 3; ++s) {
    for (int i = threadIdx.x; i < part.counts[s]; i += kThreads) {
      move(scales + 2 * i, part.scales[s][i]);
    }
    scales += 2 * part.counts[s];
  }
}

template <bool kKey>
__device__ __forceinline__ void unpack_part(const CanonicalParams& p) {
  const Part part = part_of<kKey>(p, blockIdx.x / 2);
  const int d = p.format.head_dim;
  const int g = p.format.group;
  const int columns = kKey ? g : d;  // a power of two
  const int columns_log2 = __ffs(columns) - 1;
  for (int i = threadIdx.x; i < d * g; i += kThreads) {
    const int row = i >> columns_log2;
    const int column = i & (columns - 1);
    const int token = kKey ? column : row;
    const int channel = kKey ? row : column;
    const FragmentPosition at =
        kKey ? key_position(token, channel, d) : value_position(token, channel, d);
    const FieldPosition f = field_position(4 * at.fragment + at.reg, part.bits);
    const auto word = [&](int k) {
      return load_at<uint32_t>(part.packed + word_offset(f.word + k, at.lane)) >> 16 * at.hi;
    };
    uint32_t code = word(0) >> f.shift;
    if (part.bits == 3 && f.shift == 15) {
      code = (code & 1) | (word(1) >> 14 & 2) | (word(2) >> 13 & 4);
    }
    part.codes[i] = static_cast<uint8_t>(code & ((1u << part.bits) - 1));
  }
  for_each_scale(
      part, part.packed + code_bytes(g, d, part.bits),
      [](const uint8_t* packed, uint16_t& canonical) { canonical = load_at<uint16_t>(packed); });
}

template <bool kKey>
__device__ __forceinline__ void pack_part(const CanonicalParams& p) {
  const Part part = part_of<kKey>(p, blockIdx.x / 2);
  const int d = p.format.head_dim;
  const int g = p.format.group;
  const uint32_t mask = (1u << part.bits) - 1;
  for (int i = threadIdx.x; i < code_bytes(g, d, part.bits) / 4; i += kThreads) {
    const int lane = i % kWarpLanes;
    const int word = i / kWarpLanes;
    const auto code = [&](int index, int hi) -> uint32_t {
      const FragmentPosition at = {index / kFragmentRegisters, lane, index % kFragmentRegisters,
                                   hi};
      const device::CodeIndex c = kKey ? device::key_code_at(at, d) : device::value_code_at(at, d);
      return part.codes[kKey ? c.channel * g + c.token : c.token * d + c.channel] & mask;
    };
    // With 3 bits, three words hold 16 half2: five fields each, and a bit each of the last.
    const int fields = 16 / part.bits;
    const int first = part.bits == 3 ? word / 3 * 16 + word % 3 * 5 : word * fields;
    uint32_t bits = 0;
    for (int hi = 0; hi < 2; ++hi) {
      for (int k = 0; k < fields; ++k) bits |= code(first + k, hi) << (k * part.bits + 16 * hi);
      if (part.bits == 3) {
        bits |= (code(word / 3 * 16 + 15, hi) >> word % 3 & 1) << (15 + 16 * hi);
      }
    }
    store_at(part.packed + word_offset(word, lane), bits);
  }
  for_each_scale(part, part.packed + code_bytes(g, d, part.bits),
                 [](uint8_t* packed, uint16_t canonical) { store_at(packed, canonical); });
}

__global__ void __launch_bounds__(kThreads)
    unpack_records_kernel(const __grid_constant__ CanonicalParams p) {
  blockIdx.x % 2 == 0 ? unpack_part<true>(p) : unpack_part<false>(p);
}

__global__ void __launch_bounds__(kThreads)
    pack_records_kernel(const __grid_constant__ CanonicalParams p) {
  blockIdx.x % 2 == 0 ? pack_part<true>(p) : pack_part<false>(p);
}

Status run(void (*kernel)(CanonicalParams), const CanonicalParams& p) {
  if (Status status = check_format(p.format); !status.ok()) return status;
  const int64_t blocks = 2 * p.tiles * p.heads;
  if (blocks == 0) return {};
  if (Status status = check_grid("records", blocks); !status.ok()) return status;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, p.stream, p);
}

}  // namespace

Status unpack_records(const CanonicalParams& p) { return run(unpack_records_kernel, p); }

Status pack_records(const CanonicalParams& p) { return run(pack_records_kernel, p); }

}  // namespace kvarn::cuda
