// From keys or values in memory to a rotated tile in shared memory.
//
// The rotation by a Walsh-Hadamard matrix of D channels is one by 16 channels, a product with signs
// on the tensor core, and then sums and differences of what a lane has of different sixteens. Signs
// and 16-bit inputs are exact, products are summed in fp32. An fp32 input is the sum of three bf16
// numbers, exactly, and is multiplied in three passes. K comes out as [channel][token] (A = signs,
// B = tokens), V as [token][channel] (A = tokens, B = signs).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/copy.cuh"
#include "device/hadamard.cuh"
#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/tile.cuh"
#include "kvarn/ops.h"

namespace kvarn::device {

inline constexpr float kMaxInput = 67108864.f;  ///< 2^26: beyond, sums of squares leave fp32

inline constexpr int kUnits = 8;       ///< of 16 tokens x 16 channels, that a warp has
inline constexpr int kElements = 64;   ///< of a lane
inline constexpr int kMostSpan = 128;  ///< channels of a warp

/// Element of unit u, of a lane: 2 x 4 of each unit are two accumulators of mma.m16n8k16. `half` is
/// that of the accumulators' rows; the columns of both stand for four neighbours.
constexpr KVARN_HD int element(int u, int half, int e) {
  return 8 * u + 4 * (e / 2) + 2 * half + e % 2;
}

/// Where a lane's elements are. A warp has all channels of some tokens; of 256, a half.
template <int kDim>
struct ProductPlace {
  static constexpr int kSpan = kDim < kMostSpan ? kDim : kMostSpan;
  static constexpr int kSpans = kDim / kSpan;
  static constexpr int kSixteens = kSpan / 16;
  static constexpr int kSets = kUnits / kSixteens;  ///< sixteens of tokens of a warp

  unsigned lane;
  unsigned span;
  unsigned first_token;

  __device__ __forceinline__ ProductPlace() {
    const unsigned thread = own_thread();
    lane = thread % kWarpLanes;
    span = thread / kWarpLanes % kSpans;
    first_token = thread / kWarpLanes / kSpans * (16 * kSets);
  }

  __device__ __forceinline__ unsigned token(bool key, int u, int half, int e) const {
    return first_token + u / kSixteens * 16 + (key ? lane % 4 * 4 + e : half * 8 + lane / 4);
  }
  __device__ __forceinline__ unsigned channel(bool key, int u, int half, int e) const {
    return span * kSpan + u % kSixteens * 16 + (key ? half * 8 + lane / 4 : lane % 4 * 4 + e);
  }
};

/// What the keys or values of all tiles are like.
struct TokenFormat {
  DType dtype;
  bool rotated;  ///< already
  bool aligned;  ///< every token starts at a multiple of 16 bytes

  /// Whether tokens are copied as they are.
  __device__ __forceinline__ bool whole() const { return aligned && dtype != DType::kFloat32; }
};

/// One head's keys or values of one tile: token g at data + g * token_stride.
struct TokenRows {
  TokenFormat like;
  const void* data;
  int64_t token_stride;  ///< elements
};

/// Tokens, of 16-bit numbers, lie in the gaps of a tile's shared memory: the second kGap bytes of
/// every two, which is where none of its codes are. So they can be brought while the codes of
/// another part are packed. What is this far apart among all tokens is so far apart there:
template <int kGap>
constexpr KVARN_HD unsigned spread_over_gaps(unsigned bytes) {
  return bytes / kGap * (2 * kGap) + bytes % kGap;
}

/// Where a 16-byte chunk of a token lies, in chunks: the eight rows that ldmatrix reads at once
/// fall into different banks, for V (eight neighbours) as for K (two neighbours of every four).
/// Every sixteenth token is alike.
template <int kDim, int kGap>
__device__ __forceinline__ unsigned chunk_place(unsigned token, unsigned chunk) {
  const unsigned swizzle = (token & 1) | (token >> 1 & 2) | ((token << 1 ^ token >> 1) & 4);
  constexpr int kGapChunks = kGap / 16;
  return spread_over_gaps<kGapChunks>(token * (kDim / 8) + (chunk ^ swizzle)) + kGapChunks;
}

__device__ __forceinline__ float limit_input(float x) {
  // Not fminf, which would make a number of NaN; infinity stays too.
  const float magnitude = fabsf(x);
  return magnitude > kMaxInput && magnitude < kInfinity ? copysignf(kMaxInput, x) : x;
}

/// Part `plane` of the three bf16 numbers that sum up to x.
__device__ __forceinline__ __nv_bfloat16 bf16_part(float x, int plane) {
  __nv_bfloat16 part = __float2bfloat16_rn(x);
  for (int i = 0; i < plane; ++i) {
    x -= __bfloat162float(part);
    part = __float2bfloat16_rn(x);
  }
  return part;
}

/// bf16 numbers beyond 2^26 are limited; there are hardly ever any.
__device__ __forceinline__ void limit_bf16(uint4& stored) {
  const uint4 chunk = stored;
  constexpr uint32_t kMagnitude = 0x7fff7fffu;
  constexpr uint32_t kMost = 0x4c80;  // 2^26
  const uint32_t largest = __vmaxu2(__vmaxu2(chunk.x & kMagnitude, chunk.y & kMagnitude),
                                    __vmaxu2(chunk.z & kMagnitude, chunk.w & kMagnitude));
  if ((largest & 0xffff) <= kMost && largest >> 16 <= kMost) return;
  const auto limit = [](uint32_t pair) {
    const auto one = [](uint32_t half) {
      return (half & 0x7fff) > kMost && (half & 0x7fff) < 0x7f80 ? (half & 0x8000) | kMost : half;
    };
    return one(pair & 0xffff) | one(pair >> 16) << 16;
  };
  stored = {limit(chunk.x), limit(chunk.y), limit(chunk.z), limit(chunk.w)};
}

/// Calls each(place among the chunks of shared memory, distance from the first token) for a
/// thread's share of the chunks of whole tokens.
template <int kDim, int kGap, int kTokens, int kThreads, class Each>
__device__ __forceinline__ void for_chunks(int64_t token_stride, const Each& each) {
  constexpr int kChunks = kDim / 8;
  constexpr int kStep = kThreads / kChunks;  // tokens
  constexpr int kUnlike = kStep < 16 ? 16 / kStep : 1;
  static_assert(kTokens % kStep == 0 && kStep % 8 == 0);
  const unsigned thread = own_thread();
  const unsigned chunk = thread % kChunks;
  const unsigned token = thread / kChunks;
  const int64_t from = token * token_stride + chunk * 8;
  unsigned places[kUnlike];
#pragma unroll
  for (int k = 0; k < kUnlike; ++k) places[k] = chunk_place<kDim, kGap>(token + k * kStep, chunk);
#pragma unroll
  for (int k = 0; k < kTokens / kStep; ++k) {
    each(places[k % kUnlike] +
             spread_over_gaps<kGap>(k / kUnlike * (kUnlike * kStep * 2 * kDim)) / 16,
         from + k * kStep * token_stride);
  }
}

/// Starts to bring whole tokens.
template <int kDim, int kGap, int kTokens, int kThreads>
__device__ __forceinline__ void bring_tokens(const TokenRows& in, uint4* shared) {
  for_chunks<kDim, kGap, kTokens, kThreads>(in.token_stride, [&](unsigned place, int64_t from) {
    copy_async_16(shared + place, static_cast<const uint16_t*>(in.data) + from);
  });
  copy_async_commit();
}

/// Those that this thread brought are there.
template <int kDim, int kGap, int kTokens, int kThreads>
__device__ __forceinline__ void receive_tokens(const TokenFormat& like, uint4* shared) {
  copy_async_wait<0>();
  if (like.dtype != DType::kBFloat16) return;
  for_chunks<kDim, kGap, kTokens, kThreads>(
      0, [&](unsigned place, int64_t) { limit_bf16(shared[place]); });
}

/// The same for unaligned tokens, and for one of the three planes of fp32.
template <int kDim, int kGap, int kTokens, int kThreads>
__device__ __forceinline__ void load_plane(const TokenRows& in, int plane, uint4* shared) {
  auto* const numbers = reinterpret_cast<uint16_t*>(shared);
#pragma unroll 1
  for (int i = own_thread(); i < kTokens * kDim; i += kThreads) {
    const int token = i / kDim;
    const int channel = i % kDim;
    const int64_t from = token * in.token_stride + channel;
    uint16_t bits;
    if (in.like.dtype == DType::kFloat32) {
      bits = __bfloat16_as_ushort(
          bf16_part(limit_input(static_cast<const float*>(in.data)[from]), plane));
    } else {
      bits = static_cast<const uint16_t*>(in.data)[from];
      if (in.like.dtype == DType::kBFloat16) {
        bits = __bfloat16_as_ushort(
            __float2bfloat16_rn(limit_input(__uint_as_float(uint32_t{bits} << 16))));
      }
    }
    numbers[8 * chunk_place<kDim, kGap>(token, channel / 8) + channel % 8] = bits;
  }
}

__device__ __forceinline__ void load_matrix_x4(uint32_t (&x)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address)
               : "memory");
}

inline constexpr uint32_t kBothSigns = 0x80008000u;

/// Both signs of a pair turned if `odd`.
__device__ __forceinline__ uint32_t turned(unsigned odd) { return odd & 1 ? kBothSigns : 0; }

/// The pair (channel, k), (channel, k + 1) of the signs, which are the parities of channel & k; of
/// tokens that are rotated already, of the unit matrix. k is even.
template <bool kBFloat16>
__device__ __forceinline__ uint32_t matrix_pair(unsigned channel, unsigned k, bool rotated) {
  constexpr uint32_t kOne = kBFloat16 ? 0x3f80u : 0x3c00u;
  if (rotated) return (channel ^ k) / 2 != 0 ? 0 : channel % 2 == 0 ? kOne : kOne << 16;
  return (kOne << 16 | kOne) ^ turned(__popc(channel & k)) ^ (channel % 2 == 0 ? 0 : 0x80000000u);
}

/// The same as a factor of the channels of one half, of 256, in those of the other.
__device__ __forceinline__ uint32_t of_span(uint32_t pair, unsigned to, unsigned from,
                                            bool rotated) {
  if (rotated) return to == from ? pair : 0;
  return pair ^ turned(to & from);
}

/// x = a * b, or is added to.
template <bool kBFloat16>
__device__ __forceinline__ void multiply(bool add, float* x, const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if (add) {
    mma_m16n8k16<kBFloat16>(x, a, b0, b1);
  } else {
    constexpr float kZero[4] = {};
    mma_m16n8k16<kBFloat16>(x, a, b0, b1, kZero);
  }
}

/// x = matrix times tokens (K), over the channels of each sixteen; if kAdd, added to x. Of an
/// accumulator, channel = 8 * half + lane / 4 and k = 8 * high + 2 * (lane % 4). Of 256 channels,
/// those of both halves with the same number in theirs add up.
template <int kDim, int kGap, bool kBFloat16, bool kAdd>
__device__ __forceinline__ void multiply_keys(const uint4* shared, bool rotated,
                                              float (&x)[kElements]) {
  using Place = ProductPlace<kDim>;
  const Place at;
  uint32_t pairs[4];
#pragma unroll
  for (int f = 0; f < 4; ++f) {
    pairs[f] =
        matrix_pair<kBFloat16>(f % 2 * 8 + at.lane / 4, f / 2 * 8 + at.lane % 4 * 2, rotated);
  }
  const unsigned matrix = at.lane / 8;  // whose row this lane addresses for ldmatrix
  const unsigned n = at.lane % 8;
  const unsigned token = at.first_token + n / 2 * 4 + matrix / 2 * 2 + n % 2;
  const auto from = static_cast<uint32_t>(
      __cvta_generic_to_shared(shared + chunk_place<kDim, kGap>(token, matrix % 2)));
#pragma unroll
  for (int span = 0; span < Place::kSpans; ++span) {
    uint32_t a[4];
#pragma unroll
    for (int f = 0; f < 4; ++f) a[f] = of_span(pairs[f], at.span, span, rotated);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int sixteen = span * Place::kSixteens + u % Place::kSixteens;
      uint32_t b[4];
      load_matrix_x4(b, (from ^ spread_over_gaps<kGap>(32 * sixteen)) +
                            spread_over_gaps<kGap>(u / Place::kSixteens * 16 * (2 * kDim)));
      multiply<kBFloat16>(kAdd || span > 0, x + element(u, 0, 0), a, b[0], b[1]);
      multiply<kBFloat16>(kAdd || span > 0, x + element(u, 0, 2), a, b[2], b[3]);
    }
  }
}

/// x = tokens times matrix (V); if kAdd, added to x: channel = 4 * (n / 2) + e with e = 2 *
/// (accumulator) + n % 2 and n = lane / 4; k is as for K.
template <int kDim, int kGap, bool kBFloat16, bool kAdd>
__device__ __forceinline__ void multiply_values(const uint4* shared, bool rotated,
                                                float (&x)[kElements]) {
  using Place = ProductPlace<kDim>;
  const Place at;
  const unsigned n = at.lane / 4;
  uint32_t pairs[4];
#pragma unroll
  for (int f = 0; f < 4; ++f) {
    pairs[f] =
        matrix_pair<kBFloat16>(n / 2 * 4 + f / 2 * 2 + n % 2, f % 2 * 8 + at.lane % 4 * 2, rotated);
  }
  const unsigned matrix = at.lane / 8;
  const unsigned token = at.first_token + matrix % 2 * 8 + at.lane % 8;
  const auto from = static_cast<uint32_t>(
      __cvta_generic_to_shared(shared + chunk_place<kDim, kGap>(token, matrix / 2)));
#pragma unroll
  for (int span = 0; span < Place::kSpans; ++span) {
    uint32_t b[4];
#pragma unroll
    for (int f = 0; f < 4; ++f) b[f] = of_span(pairs[f], at.span, span, rotated);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int sixteen = span * Place::kSixteens + u % Place::kSixteens;
      uint32_t a[4];
      load_matrix_x4(a, (from ^ spread_over_gaps<kGap>(32 * sixteen)) +
                            spread_over_gaps<kGap>(u / Place::kSixteens * 16 * (2 * kDim)));
      multiply<kBFloat16>(kAdd || span > 0, x + element(u, 0, 0), a, b[0], b[1]);
      multiply<kBFloat16>(kAdd || span > 0, x + element(u, 0, 2), a, b[2], b[3]);
    }
  }
}

template <int kDim, int kGap, bool kMayBeKey, bool kMayBeValue, bool kBFloat16, bool kAdd>
__device__ __forceinline__ void multiply_tokens(bool key, const uint4* shared, bool rotated,
                                                float (&x)[kElements]) {
  if (kMayBeKey && (!kMayBeValue || key)) {
    multiply_keys<kDim, kGap, kBFloat16, kAdd>(shared, rotated, x);
  } else {
    multiply_values<kDim, kGap, kBFloat16, kAdd>(shared, rotated, x);
  }
}

/// x = norm * the sums and differences over the sixteens of channels.
template <int kDim>
__device__ __forceinline__ void join_sixteens(float norm, float (&x)[kElements]) {
  constexpr int kLast = ProductPlace<kDim>::kSixteens / 2;
#pragma unroll
  for (int distance = 1; distance <= kLast; distance *= 2) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (u & distance) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& low = x[8 * u + i];
        float& high = x[8 * (u + distance) + i];
        const float a = distance == kLast ? low * norm : low;
        const float b = high;
        low = distance == kLast ? fmaf(b, norm, a) : a + b;
        high = distance == kLast ? fmaf(-b, norm, a) : a - b;
      }
    }
  }
}

/// The first kHalf of twice as many sums, added to those of the lane `distance` away, or, where the
/// lane's number has that bit, the last kHalf.
template <int kHalf, int kSums>
__device__ __forceinline__ void halve_sums(float (&sums)[kSums], int lane, int distance) {
  const bool high = lane & distance;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float kept = high ? sums[i + kHalf] : sums[i];
    sums[i] = kept + __shfl_xor_sync(0xffffffffu, high ? sums[i] : sums[i + kHalf], distance);
  }
}

/// Sums of squares of the tokens over a warp's channels, for token_energy.
template <int kDim>
__device__ __forceinline__ void put_energies(const ProductPlace<kDim>& at, bool key, int tokens,
                                             const float (&x)[kElements], float* partial) {
  using Place = ProductPlace<kDim>;
  constexpr int kSets = Place::kSets;
  float* const to = partial + at.span * tokens + at.first_token;
  if (key) {
    float sums[4 * kSets];
#pragma unroll
    for (int i = 0; i < 4 * kSets; ++i) {
#pragma unroll
      for (int k = 0; k < 2 * Place::kSixteens; ++k) {
        const float y = x[element(i / 4 * Place::kSixteens + k / 2, k % 2, i % 4)];
        add_product(sums[i], k == 0, y, y);
      }
    }
    int own = 0;
    if constexpr (kSets == 2) {
      halve_sums<4>(sums, at.lane, 16);
      halve_sums<2>(sums, at.lane, 8);
      halve_sums<1>(sums, at.lane, 4);
      own = (at.lane & 16) + (at.lane / 8 % 2 * 2 + at.lane / 4 % 2);
    } else {
      halve_sums<2>(sums, at.lane, 16);
      halve_sums<1>(sums, at.lane, 8);
      sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], 4);
      own = at.lane / 8;
    }
    if (kSets == 2 || at.lane / 4 % 2 == 0) to[at.lane % 4 * 4 + own] = sums[0];
  } else {
    float sums[2 * kSets];
#pragma unroll
    for (int i = 0; i < 2 * kSets; ++i) {
#pragma unroll
      for (int k = 0; k < 4 * Place::kSixteens; ++k) {
        const float y = x[element(i / 2 * Place::kSixteens + k / 4, i % 2, k % 4)];
        add_product(sums[i], k == 0, y, y);
      }
    }
    int own = 0;
    if constexpr (kSets == 2) {
      halve_sums<2>(sums, at.lane, 2);
      halve_sums<1>(sums, at.lane, 1);
      own = at.lane % 4;
    } else {
      halve_sums<1>(sums, at.lane, 2);
      sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], 1);
      own = at.lane / 2 % 2;
    }
    if (kSets == 2 || at.lane % 2 == 0) to[8 * own + at.lane / 4] = sums[0];
  }
}

/// Sum of squares of token n, after put_energies and a barrier.
template <class Shape>
__device__ __forceinline__ float token_energy(const float* partial, bool key, int n) {
  static_assert(2 * Shape::kPartials * Shape::kCols >= 2 * Shape::kRows);
  float energy = partial[n];
  if ((key ? Shape::kRows : Shape::kCols) > kMostSpan) {
    energy += partial[n + (key ? Shape::kCols : Shape::kRows)];
  }
  return energy;
}

/// A lane's elements to their places in the tile, and energies. Sixteens of columns at odd places
/// among those of a lane are at some distance from `odd`, the others from `even`: place() exchanges
/// them.
template <class Shape, int kDim, bool kMayBeKey, bool kMayBeValue>
__device__ __forceinline__ void put_tile(bool key, int tokens, const float (&x)[kElements],
                                         float* tile, float* energies) {
  using Place = ProductPlace<kDim>;
  constexpr int kSixteens = Place::kSixteens;
  const Place at;
  const auto put = [&](float* even, float* odd, int u, int half, int rows, int sixteen) {
    *reinterpret_cast<float4*>((sixteen % 2 == 0 ? even : odd) + (rows + half * 8) * Shape::kCols +
                               sixteen / 2 * 32) = {x[element(u, half, 0)], x[element(u, half, 1)],
                                                    x[element(u, half, 2)], x[element(u, half, 3)]};
  };
  if (kMayBeKey && key) {
    const auto start = [&](int u) {
      return tile + place<Shape>(at.channel(true, 0, 0, 0), at.token(true, u, 0, 0));
    };
    float* const even = start(0);
    float* const odd = Place::kSets > 1 ? start(kSixteens) : even;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        put(even, odd, u, half, u % kSixteens * 16, u / kSixteens);
    }
  }
  if (kMayBeValue && !key) {
    const auto start = [&](int u) {
      return tile + place<Shape>(at.token(false, 0, 0, 0), at.channel(false, u, 0, 0));
    };
    float* const even = start(0);
    float* const odd = start(1);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        put(even, odd, u, half, u / kSixteens * 16, u % kSixteens);
    }
  }
  put_energies(at, key, tokens, x, energies);
}

/// The rotated tile of keys or values in shared memory, and the energies of its tokens, which are
/// as `like` says. Whole tokens have been asked for by bring_tokens, others are what find()
/// returns. They lie where the tile will be. Ends with a barrier.
template <class Shape, int kGap, bool kMayBeKey, bool kMayBeValue, class Find>
__device__ __forceinline__ void load_rotated(const TokenFormat& like, const Find& find, bool key,
                                             uint4* shared, float* tile, float* energies) {
  constexpr int kDim = kMayBeKey ? Shape::kRows : Shape::kCols;
  constexpr int kTokens = kMayBeKey ? Shape::kCols : Shape::kRows;
  const auto load = [&](int plane) {
    load_plane<kDim, kGap, kTokens, Shape::kThreads>(find(), plane, shared);
  };
  if (like.whole()) {
    receive_tokens<kDim, kGap, kTokens, Shape::kThreads>(like, shared);
  } else {
    load(0);
  }
  __syncthreads();
  float x[kElements];
  if (like.dtype == DType::kFloat16) {
    multiply_tokens<kDim, kGap, kMayBeKey, kMayBeValue, false, false>(key, shared, like.rotated, x);
  } else {
    multiply_tokens<kDim, kGap, kMayBeKey, kMayBeValue, true, false>(key, shared, like.rotated, x);
  }
  __syncthreads();
  if (like.dtype == DType::kFloat32) {
#pragma unroll 1
    for (int plane = 1; plane < 3; ++plane) {
      load(plane);
      __syncthreads();
      multiply_tokens<kDim, kGap, kMayBeKey, kMayBeValue, true, true>(key, shared, like.rotated, x);
      __syncthreads();
    }
  }
  // What becomes of x is there twice, so that it need not be in the same registers in both.
  if (like.rotated) {
    put_tile<Shape, kDim, kMayBeKey, kMayBeValue>(key, kTokens, x, tile, energies);
  } else {
    join_sixteens<kDim>(orthonormal_scale(kDim), x);
    put_tile<Shape, kDim, kMayBeKey, kMayBeValue>(key, kTokens, x, tile, energies);
  }
  __syncthreads();
}

}  // namespace kvarn::device
