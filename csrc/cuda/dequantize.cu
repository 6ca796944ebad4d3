// dequantize_tiles: records -> keys and values, rotated back.
//
// Roofline. A record of k4v2, D = G = 128, is 13.8 KB to read and 64 KB (fp16) to write: 19 ns at
// the copy rate of an H200, in which its 132 SMs have 19 instruction slots an element; 21.6 ns in a
// kernel that does nothing but read and write as much, because four of five bytes are written.
// Scaling a code and seven butterfly stages of shuffles and additions would take most of the slots.
// Instead:
//
// - The tensor core does the part of the transform that crosses lanes. Codes are exact in fp16 and
//   so are channel scales with a sign, so with A = codes of 16 tokens x 16 channels and
//   B = +-channel_scale, four of the log2(D) stages are two mma in fp32. The channels of a fragment
//   differ in four bits; B transforms those.
// - The other stages but those above bit 6 are additions between accumulators (three an element
//   at D = 128). Above bit 6 the fragments accumulate into the same registers with signs.
// - The zero points never meet a code: transformed on their own (K), or as zero_point[token] times
//   the transformed channel scales (V), they are where the accumulators start.
// - The token scale multiplies the finished row.
// - V fragments have channels for rows; movmatrix makes tokens of them, before the words are taken
//   apart: one moves the 16 / bits matrices of a word at once. The rest is as with K.
// - For 16-bit results a code enters the product as the subnormal number that its bits are, which
//   takes a shift (often shared) and a mask. Their power of two is the same for all codes of a
//   token and goes into its scale.
//
// About 9 instructions an element, with the operands. A lane ends with 8 neighbouring channels of a
// token: 16-byte stores, 64 bytes of a row side by side.
//
// Measured, k4v2, of the rate of a kernel that copies as many bytes (of cudaMemcpyAsync), 4096
// records of 128 tokens at D = 128: .87 (.84); D = 64: .80 (.77), D = 256: .77 (.74); tiles of 64
// tokens: .87, .80, .73. docs/design.md has what was tried.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/dtype.h"
#include "cuda/format.h"
#include "cuda/launch.h"
#include "device/codes.cuh"
#include "device/copy.cuh"
#include "device/hadamard.cuh"
#include "device/mma.cuh"
#include "device/numeric.cuh"

namespace kvarn::cuda {
namespace {

// Of a block. Two sizes, as measured.
template <int kDim>
constexpr int kThreads = kDim == 128 ? 128 : 256;
template <int kDim>
constexpr int kWarps = kThreads<kDim> / kWarpLanes;
constexpr int kTokens = 16;  // of a fragment: what a warp has at once
template <int kDim>
constexpr int kWarpUnits = kDim == 128 ? 2 : 1;  // how often it has so many of a record
template <int kDim>
constexpr int kBlockTokens = kWarps<kDim> * kWarpUnits<kDim> * kTokens;
constexpr int kMaxTiles = 8;  // fragments that have accumulators of their own: 128 channels
constexpr uint32_t kSigns = 0x80008000u;  // of a half2
constexpr uint32_t kHighSign = 0x80000000u;

/// K or V of one record, in shared memory.
struct Part {
  const uint8_t* codes;
  const __half* channel_scale;
  const __half* zero_point;  // K: of channels, V: of tokens
  const __half* token_scale;
};

template <bool kKey>
__device__ __forceinline__ Part part_of(const uint8_t* record, const RecordLayout& at) {
  const auto field = [&](int offset) { return reinterpret_cast<const __half*>(record + offset); };
  if constexpr (kKey) {
    return {record + at.key_codes, field(at.key_channel_scale), field(at.key_zero_point),
            field(at.key_token_scale)};
  } else {
    return {record + at.value_codes, field(at.value_channel_scale), field(at.value_zero_point),
            field(at.value_token_scale)};
  }
}

/// Of 16 tokens.
template <int kDim>
struct Fragments {
  static constexpr int kCount = kDim / kFragmentDim;
  static constexpr int kTiles = kCount < kMaxTiles ? kCount : kMaxTiles;
  static constexpr int kPasses = kCount / kTiles;  ///< each makes 128 channels; pass is their bit 7
  static_assert(kPasses <= 2);
  /// B of them all, then once more and negated of those that have channel bit 7.
  static constexpr int kOperands = kCount + (kPasses - 1) * kTiles;
};

/// What the warps of a record need of K or V besides it.
template <int kDim, bool kKey>
struct Operands {
  float start[kKey ? 2 * kDim : kDim];              // see make_start
  uint4 b[Fragments<kDim>::kOperands][kWarpLanes];  // B operands of a lane, n-tiles 0 and 1
};

/// Shared memory of a block, but for the records.
template <int kDim>
struct Scratch {
  uint4 keep[2][kWarpLanes];  // see make_masks; K, V
  uint4 flip[2][kWarpLanes];
  struct {
    Operands<kDim, true> key;
    Operands<kDim, false> value;
  } slot[kBlockTokens<kDim> / 64];
};

/// Records that a block takes at once, so that every warp has tokens; a choice between constants.
template <int kDim>
KVARN_HD constexpr int slots_of(const Format& f) {
  return f.group == 64 ? kBlockTokens<kDim> / 64 : kBlockTokens<kDim> / 128;
}

/// Whether codes enter the product as they are and not as subnormal numbers, of which tensor cores
/// keep fewer bits: 1e-5 of a row, far below the rounding to 16 bits. (Where channel scales are
/// subnormal too it is more, but always about 2^-7 of the rounding of those scales.)
template <class T>
constexpr bool is_exact = sizeof(T) == 4;

/// Mantissa bit at which the codes of a lane's first or second token stand: where most fields need
/// no shift of their own.
KVARN_HD constexpr int code_bit(int bits, bool key, int second) {
  return bits == 4 ? 4 * second : bits == 2 ? (key ? 2 : 4) * second : 0;
}

/// The number that a code 1 of that token is.
template <bool kExact>
__device__ __forceinline__ float code_unit(int bits, bool key, int second) {
  constexpr int kBias = 127 - 24;
  return kExact ? 1.f : __uint_as_float((kBias + code_bit(bits, key, second)) << 23);
}

/// start: the zero points (K) or ones (V) times the channel scale, transformed over the channel
/// bits of a fragment (K: 0, 1, 3, 4; V: 0, 3, 4, 5) and those above bit 6. V: [channel], K: in the
/// order of the accumulators, [channel / 2][first or second token][channel % 2]. Thread i of kDim
/// or 128.
template <int kDim, bool kKey>
__device__ __forceinline__ void make_start(const Part& part, float* start, bool rotated, int i,
                                           float first_unit, float second_unit) {
  constexpr int kWidth = kDim < 128 ? kDim : 128;
  constexpr int kCount = kDim / kWidth;
  // The bits of the fragment are lane bits.
  const int channel =
      kKey ? i : (i & 1) | (i >> 1 & 7) << 3 | (i >> 4 & 1) << 1 | (i >> 5 & 1) << 2 | i >> 6 << 6;
  float v[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int c = channel + k * kWidth;
    v[k] = __half2float(part.channel_scale[c]) * (kKey ? __half2float(part.zero_point[c]) : 1.f);
  }
  if (!rotated) {
    if constexpr (kKey) {
      device::butterfly_lanes<1, 4>(v, i);
      device::butterfly_lanes<8, 32>(v, i);
    } else {
      device::butterfly_lanes<1, 16>(v, i);
    }
    device::butterfly_registers<1, kCount>(v);
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const int c = channel + k * kWidth;
    if constexpr (kKey) {
      start[c / 2 * 4 + c % 2] = v[k] * first_unit;
      start[c / 2 * 4 + c % 2 + 2] = v[k] * second_unit;
    } else {
      start[c] = v[k];
    }
  }
}

/// How a lane makes B of the channel scales: b = scales & keep ^ flip.
///
/// B: rows are the channels of a fragment, row 2t + p + 8h: of K, p is channel bit 0, h bit 1, t
/// bits 3-4; of V, h is bit 0, p bit 3, t bits 4-5. Columns are channels too, column r of n-tile m:
/// of K, r is the bits 0, 3, 4 and m bit 1; of V, r is the bits 0, 3, 4 and m bit 5. An element is
/// the scale of its row, its sign the parity of the bits that row and column have in common (in the
/// rotated basis: 0 unless row and column are the same channel).
template <bool kKey>
__device__ __forceinline__ void make_masks(uint4& keep, uint4& flip, bool rotated, int lane) {
  const int r = lane / 4;
  const int t = lane % 4;
  uint32_t keeps[4];  // 2 * m + h, of the pair p = 0, 1
  uint32_t flips[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int m = i / 2;
    const int h = i % 2;
    const int p = kKey ? r & 1 : r >> 1 & 1;  // of the column
    bool odd;                                 // sign of p = 0
    bool same;                                // whether all bits but p agree
    if constexpr (kKey) {
      odd = (__popc(t & r >> 1) + h * m) & 1;
      same = t == r >> 1 && h == m;
    } else {
      odd = ((t & r >> 2) + (t >> 1) * m + h * (r & 1)) & 1;
      same = (t & 1) == r >> 2 && t >> 1 == m && h == (r & 1);
    }
    keeps[i] = !rotated ? ~0u : !same ? 0 : p == 0 ? 0x0000ffffu : 0xffff0000u;
    flips[i] = rotated ? 0 : (odd ? kSigns : 0) ^ (p == 0 ? 0 : kHighSign);
  }
  keep = {keeps[0], keeps[1], keeps[2], keeps[3]};
  flip = {flips[0], flips[1], flips[2], flips[3]};
}

/// B of fragment f.
template <bool kKey>
__device__ __forceinline__ uint4 make_b(const Part& part, const uint4& keep, const uint4& flip,
                                        int f, int lane) {
  const int t = lane % 4;
  uint32_t pair[2];  // p = 0, 1; by h
  if constexpr (kKey) {
    const uint2 scales =
        *reinterpret_cast<const uint2*>(part.channel_scale + f / 2 * 32 + 8 * t + f % 2 * 4);
    pair[0] = scales.x;
    pair[1] = scales.y;
  } else {
    const __half* const at = part.channel_scale + f / 4 * 64 + 16 * t + f % 4 * 2;
    const uint32_t p0 = *reinterpret_cast<const uint32_t*>(at);
    const uint32_t p1 = *reinterpret_cast<const uint32_t*>(at + 8);
    pair[0] = __byte_perm(p0, p1, 0x5410);
    pair[1] = __byte_perm(p0, p1, 0x7632);
  }
  return {pair[0] & keep.x ^ flip.x, pair[1] & keep.y ^ flip.y, pair[0] & keep.z ^ flip.z,
          pair[1] & keep.w ^ flip.w};
}

/// Both for K and V of a record: a warp of them makes pieces warp, warp + warps, ...
template <int kDim, bool kExact>
__device__ __forceinline__ void make_operands(const uint8_t* record, const RecordLayout& layout,
                                              int key_bits, Scratch<kDim>& scratch, int slot,
                                              bool rotated, int warp, int warps, int lane) {
  using F = Fragments<kDim>;
  constexpr int kStarts = (kDim < 128 ? kDim : 128) / kWarpLanes;
  const Part key = part_of<true>(record, layout);
  const Part value = part_of<false>(record, layout);
  auto& out = scratch.slot[slot];
#pragma unroll 1
  for (int i = warp; i < 2 * kStarts; i += warps) {
    if (i < kStarts) {
      make_start<kDim, true>(key, out.key.start, rotated, i * kWarpLanes + lane,
                             code_unit<kExact>(key_bits, true, 0),
                             code_unit<kExact>(key_bits, true, 1));
    } else {
      make_start<kDim, false>(value, out.value.start, rotated, (i - kStarts) * kWarpLanes + lane,
                              1.f, 1.f);
    }
  }
#pragma unroll 1
  for (int f = warp; f < F::kCount; f += warps) {
    const uint4 k = make_b<true>(key, scratch.keep[0][lane], scratch.flip[0][lane], f, lane);
    const uint4 v = make_b<false>(value, scratch.keep[1][lane], scratch.flip[1][lane], f, lane);
    out.key.b[f][lane] = k;
    out.value.b[f][lane] = v;
    if (F::kPasses > 1 && f >= F::kTiles) {
      out.key.b[f + F::kTiles][lane] = {k.x ^ kSigns, k.y ^ kSigns, k.z ^ kSigns, k.w ^ kSigns};
      out.value.b[f + F::kTiles][lane] = {v.x ^ kSigns, v.y ^ kSigns, v.z ^ kSigns, v.w ^ kSigns};
    }
  }
}

/// Where element (row, channel 32j + 8t + channel) stands among a lane's accumulators
/// [fragment][n-tile][2 * row + column]: of K, the 8 channels are column, n-tile and fragment % 2,
/// of V column and fragment % 4.
template <bool kKey>
__device__ __forceinline__ constexpr int accumulator(int row, int j, int channel) {
  const int fragment = kKey ? 2 * j + channel / 4 : j / 2 * 4 + channel / 2;
  const int tile = kKey ? channel / 2 % 2 : j % 2;
  return 8 * fragment + 4 * tile + 2 * row + channel % 2;
}

/// The lane's two tokens, 8 neighbouring channels at a time.
template <class T, bool kKey, bool kAligned, int kCount>
__device__ __forceinline__ void store_rows(T* out, int64_t token_stride, const float (&d)[kCount],
                                           const float (&scale)[2]) {
  constexpr int kVector = device::kAccessBytes / static_cast<int>(sizeof(T));
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int j = 0; j < kCount / 16; ++j) {
      T* const to = out + row * token_stride + 32 * j;
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = d[accumulator<kKey>(row, j, i)];
#pragma unroll
      for (int i = 0; i < 8; i += kVector) {
        const auto piece = device::from_float<T, kVector>(v + i, scale[row]);
        if constexpr (kAligned) {
          *reinterpret_cast<device::Vector<T, kVector>*>(to + i) = piece;
        } else {
#pragma unroll
          for (int k = 0; k < kVector; ++k) to[i + k] = piece.element[k];
        }
      }
    }
  }
}

/// The tokens of a warp; `out`: token 0, channel 0.
template <class T, int kDim, bool kAligned, int kBits, bool kKey>
__device__ __forceinline__ void dequantize_part(const Part& part,
                                                const Operands<kDim, kKey>& operands, T* out,
                                                int64_t token_stride, int warp, int warps,
                                                bool rotated) {
  using F = Fragments<kDim>;
  constexpr bool kExact = is_exact<T>;
  int lane = threadIdx.x % kWarpLanes;
#pragma unroll 1
  for (int i = 0; i < kWarpUnits<kDim>; ++i) {
    // Hides from the compiler that addresses are the same for every record: it would keep them in
    // registers that the accumulators need.
    asm volatile("" : "+r"(lane), "+r"(warp));
    const int unit = warp + i * warps;
    const int r = lane / 4;
    const int t = lane % 4;
#pragma unroll 1
    for (int pass = 0; pass < F::kPasses; ++pass) {
      // The lane's rows of the accumulators: two neighbouring tokens.
      const int token = unit / 4 * 64 + r * 8 + unit % 4 * 2;
      const int first_channel = pass * kMaxTiles * kFragmentDim + 8 * t;
      float2 zero = {1.f, 1.f};
      if constexpr (!kKey) {
        zero = __half22float2(*reinterpret_cast<const __half2*>(part.zero_point + token));
        zero.x *= code_unit<kExact>(kBits, kKey, 0);
        zero.y *= code_unit<kExact>(kBits, kKey, 1);
      }
      float d[F::kTiles * 8];
#pragma unroll
      for (int j = 0; j < F::kTiles / 2; ++j) {
#pragma unroll
        for (int i = 0; i < 8; i += kKey ? 2 : 4) {
          const int channel = first_channel + 32 * j + i;
          const float4 start =
              *reinterpret_cast<const float4*>(operands.start + (kKey ? 2 : 1) * channel);
          if constexpr (kKey) {
            d[accumulator<kKey>(0, j, i)] = start.x;
            d[accumulator<kKey>(0, j, i + 1)] = start.y;
            d[accumulator<kKey>(1, j, i)] = start.z;
            d[accumulator<kKey>(1, j, i + 1)] = start.w;
          } else {
            const float channels[] = {start.x, start.y, start.z, start.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              d[accumulator<kKey>(0, j, i + k)] = channels[k] * zero.x;
              d[accumulator<kKey>(1, j, i + k)] = channels[k] * zero.y;
            }
          }
        }
      }
#pragma unroll
      for (int f = 0; f < F::kCount; f += device::kFragmentsAtOnce) {
        const int above = f / F::kTiles;  // bit 7 of its channels
        if (rotated && above != pass) continue;
        const auto* const b = operands.b + f + (rotated ? 0 : above * pass * F::kTiles);
        uint32_t words[kBits];
        device::load_words<kBits>(part.codes, (unit * F::kCount + f) / device::kFragmentsAtOnce,
                                  lane, words);
        if constexpr (!kKey) {
          // All the matrices of a word at once: its fields stay where they are.
#pragma unroll
          for (int i = 0; i < kBits; ++i) words[i] = device::transpose_8x8(words[i]);
        }
#pragma unroll
        for (int k = 0; k < device::kFragmentsAtOnce; ++k) {
          uint32_t a[kFragmentRegisters];
#pragma unroll
          for (int i = 0; i < kFragmentRegisters; ++i) {
            const int index = k * kFragmentRegisters + i;
            // Transposed, rows and columns change places, and so do registers 1 and 2.
            a[kKey ? i : i % 2 * 2 + i / 2] =
                kExact ? device::code_pair<kBits>(words, index)
                       : device::code_field<kBits>(words, index,
                                                   code_bit(kBits, kKey, kKey ? i % 2 : i / 2));
          }
          const uint4 scales = b[k][lane];
          float* const tile = d + 8 * ((f + k) % F::kTiles);
          device::mma_m16n8k16(tile, a, scales.x, scales.y);
          device::mma_m16n8k16(tile + 4, a, scales.z, scales.w);
        }
      }
      if (!rotated) device::butterfly_registers<8, F::kTiles * 8>(d);
      const float2 token_scale =
          __half22float2(*reinterpret_cast<const __half2*>(part.token_scale + token));
      const float norm = rotated ? 1.f : device::orthonormal_scale(kDim);
      const float row_scale[2] = {token_scale.x * (norm / code_unit<kExact>(kBits, kKey, 0)),
                                  token_scale.y * (norm / code_unit<kExact>(kBits, kKey, 1))};
      store_rows<T, kKey, kAligned>(out + token * token_stride + first_channel, token_stride, d,
                                    row_scale);
    }
  }
}

/// bits -> template argument.
template <class T, int kDim, bool kAligned, bool kKey, class... Args>
__device__ __forceinline__ void dequantize_part(int bits, Args&&... args) {
  switch (bits) {
    case 2:
      return dequantize_part<T, kDim, kAligned, 2, kKey>(args...);
    case 3:
      return dequantize_part<T, kDim, kAligned, 3, kKey>(args...);
    case 4:
      return dequantize_part<T, kDim, kAligned, 4, kKey>(args...);
    case 8:
      return dequantize_part<T, kDim, kAligned, 8, kKey>(args...);
  }
}

__device__ __forceinline__ const uint8_t* record_at(const DequantizeParams& p, unsigned record) {
  const unsigned tile = record / static_cast<unsigned>(p.heads);
  const unsigned head = record - tile * static_cast<unsigned>(p.heads);
  return p.records + tile * p.record_stride[0] + head * p.record_stride[1];
}

/// Token 0, channel 0 of a record's keys or values.
template <class T>
__device__ __forceinline__ T* rows_at(const DequantizeParams& p, void* out,
                                      const int64_t (&stride)[3], unsigned record) {
  const unsigned tile = record / static_cast<unsigned>(p.heads);
  const unsigned head = record - tile * static_cast<unsigned>(p.heads);
  return static_cast<T*>(out) + tile * stride[0] + head * stride[2];
}

/// Starts to copy `bytes`, a multiple of 16. The loops run a few times: unrolled they would only be
/// more instructions to fetch.
__device__ __forceinline__ void fetch_bytes(uint8_t* shared, const uint8_t* global, int bytes) {
  if (reinterpret_cast<uintptr_t>(global) % 16 == 0) {
#pragma unroll 1
    for (int i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) {
      device::copy_async_16(shared + i, global + i);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) shared[i] = global[i];
  }
}

/// Blocks of a multiprocessor that registers are kept for.
template <class T>
constexpr int min_blocks(int dim) {
  return dim == 64 ? 3 : dim == 128 ? 4 : sizeof(T) == 4 ? 1 : 2;
}

/// A block takes record after record (two at a time if they are small); the next comes in
/// meanwhile. kAligned: rows of T start at multiples of 16 bytes.
template <class T, int kDim, bool kAligned>
__global__ void __launch_bounds__(kThreads<kDim>, min_blocks<T>(kDim))
    dequantize_kernel(const __grid_constant__ DequantizeParams p,
                      const __grid_constant__ RecordLayout layout) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto& scratch = *reinterpret_cast<Scratch<kDim>*>(shared);
  const int slots = slots_of<kDim>(p.format);
  constexpr int kWarpTokens = kWarpUnits<kDim> * kTokens;
  const int warps = p.format.group == 64 ? 64 / kWarpTokens : 128 / kWarpTokens;  // of a record
  const int lane = threadIdx.x % kWarpLanes;
  const int number = threadIdx.x / kWarpLanes;
  const int slot =
      p.format.group == 64 ? number / (64 / kWarpTokens) : number / (128 / kWarpTokens);
  const int warp = number & (warps - 1);
  const unsigned records = static_cast<unsigned>(p.tiles * p.heads);
  uint8_t* buffer = shared + sizeof(scratch);  // the records of now, and of next time
  uint8_t* next = buffer + slots * layout.bytes;

  const auto fetch = [&](unsigned first, uint8_t* to) {
#pragma unroll 1
    for (int i = 0; i < slots && first + i < records; ++i) {
      fetch_bytes(to + i * layout.bytes, record_at(p, first + i), layout.bytes);
    }
    device::copy_async_commit();
  };

  fetch(blockIdx.x * slots, buffer);
  if (threadIdx.x < kWarpLanes) {
    make_masks<true>(scratch.keep[0][lane], scratch.flip[0][lane], p.rotated, lane);
    make_masks<false>(scratch.keep[1][lane], scratch.flip[1][lane], p.rotated, lane);
  }
#pragma unroll 1
  for (unsigned first = blockIdx.x * slots; first < records; first += gridDim.x * slots) {
    const unsigned record = first + slot;
    // After the barrier the records are there, and nobody needs those before them any more.
    device::copy_async_wait<0>();
    __syncthreads();
    fetch(first + gridDim.x * slots, next);
    const uint8_t* const mine = buffer + slot * layout.bytes;
    if (record < records) {
      make_operands<kDim, is_exact<T>>(mine, layout, p.format.key_bits, scratch, slot, p.rotated,
                                       warp, warps, lane);
    }
    __syncthreads();
    if (record < records) {
      dequantize_part<T, kDim, kAligned, true>(
          p.format.key_bits, part_of<true>(mine, layout), scratch.slot[slot].key,
          rows_at<T>(p, p.key, p.key_stride, record), p.key_stride[1], warp, warps, p.rotated);
      dequantize_part<T, kDim, kAligned, false>(p.format.value_bits, part_of<false>(mine, layout),
                                                scratch.slot[slot].value,
                                                rows_at<T>(p, p.value, p.value_stride, record),
                                                p.value_stride[1], warp, warps, p.rotated);
    }
    uint8_t* const done = buffer;
    buffer = next;
    next = done;
  }
}

bool aligned(const DequantizeParams& p) {
  const auto is_multiple = [](int64_t bytes) { return bytes % device::kAccessBytes == 0; };
  bool ok = is_multiple(reinterpret_cast<intptr_t>(p.key)) &&
            is_multiple(reinterpret_cast<intptr_t>(p.value));
  const int64_t sizes[] = {p.tiles, p.format.group, p.heads};
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] == 1) continue;
    ok = ok && is_multiple(p.key_stride[i] * size_of(p.dtype)) &&
         is_multiple(p.value_stride[i] * size_of(p.dtype));
  }
  return ok;
}

template <class T, int kDim>
Status run(const DequantizeParams& p) {
  const int64_t records = p.tiles * p.heads;
  if (records == 0) return {};
  if (Status status = check_grid("records", records); !status.ok()) return status;
  const auto kernel =
      aligned(p) ? dequantize_kernel<T, kDim, true> : dequantize_kernel<T, kDim, false>;
  const int slots = slots_of<kDim>(p.format);
  const RecordLayout layout = record_layout(p.format);
  const size_t shared_bytes = sizeof(Scratch<kDim>) + 2 * slots * layout.bytes;
  if (Status status = allow_shared_memory(kernel, shared_bytes); !status.ok()) return status;
  int resident = 0;
  if (Status status = resident_blocks(kernel, kThreads<kDim>, shared_bytes, resident);
      !status.ok()) {
    return status;
  }
  const int64_t blocks = std::min<int64_t>((records + slots - 1) / slots, resident);
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads<kDim>), shared_bytes,
                p.stream, p, layout);
}

template <class T>
Status run(const DequantizeParams& p) {
  switch (p.format.head_dim) {
    case 64:
      return run<T, 64>(p);
    case 128:
      return run<T, 128>(p);
    default:
      return run<T, 256>(p);
  }
}

}  // namespace

Status dequantize_tiles(const DequantizeParams& p) {
  if (Status status = check_format(p.format); !status.ok()) return status;
  return with_element_type(p.dtype, [&](auto element) { return run<decltype(element)>(p); });
}

}  // namespace kvarn::cuda
