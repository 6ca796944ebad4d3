// Every CUDA kernel on small shapes: the results are those of the CPU functions up to the order of
// additions. Quick enough for compute-sanitizer. Skipped (exit code 77) where there is no device.
//
//   cuda_test [-v] [op ...]     -v: print how close each case of quantize, seal and normalize is
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "kvarn/ops.h"

namespace {

constexpr int kSkipped = 77;
bool verbose = false;

/// Device memory of exactly as many bytes as a test needs: what is beyond is not allocated.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(const std::vector<uint8_t>& bytes) : size_(bytes.size()) {
    ok_ = cudaMalloc(&data_, size_) == cudaSuccess &&
          cudaMemcpy(data_, bytes.data(), size_, cudaMemcpyHostToDevice) == cudaSuccess;
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  uint8_t* data() const { return ok_ ? static_cast<uint8_t*>(data_) : nullptr; }
  std::vector<uint8_t> read() const {
    std::vector<uint8_t> bytes(size_);
    const cudaError_t error = cudaMemcpy(bytes.data(), data_, size_, cudaMemcpyDeviceToHost);
    if (error != cudaSuccess) std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    return bytes;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
  bool ok_ = false;
};

float to_float(const uint8_t* p, kvarn::DType dtype) {
  if (dtype == kvarn::DType::kFloat32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  uint16_t half;
  std::memcpy(&half, p, 2);
  if (dtype == kvarn::DType::kBFloat16) {
    const uint32_t wide = static_cast<uint32_t>(half) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  }
  const int exponent = half >> 10 & 31;
  const int mantissa = half & 1023;
  const float magnitude = exponent == 0    ? std::ldexp(static_cast<float>(mantissa), -24)
                          : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                           : std::ldexp(1024.f + mantissa, exponent - 25);
  return half >> 15 ? -magnitude : magnitude;
}

/// x, of at most 8 bits of significand, in any of the types: exact.
void put_number(float x, kvarn::DType dtype, uint8_t* to) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  if (dtype == kvarn::DType::kFloat16) {
    const uint32_t half =
        x == 0 ? 0
               : (wide >> 16 & 0x8000) | (((wide >> 23 & 255) - 112) << 10 | (wide >> 13 & 1023));
    std::memcpy(to, &half, 2);
  } else if (dtype == kvarn::DType::kBFloat16) {
    wide >>= 16;
    std::memcpy(to, &wide, 2);
  } else {
    std::memcpy(to, &wide, 4);
  }
}

/// Bell-shaped numbers of variance 1, rounded to 8 bits of significand, the tiniest to 0.
std::vector<uint8_t> random_numbers(size_t count, kvarn::DType dtype, uint32_t seed) {
  std::mt19937 random(seed);
  const size_t size = static_cast<size_t>(kvarn::size_of(dtype));
  std::vector<uint8_t> bytes(count * size);
  for (size_t i = 0; i < count; ++i) {
    float x = 0;
    for (int k = 0; k < 3; ++k) x += static_cast<float>(random()) * 0x1p-31f - 1.f;
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    wide &= 0xffff0000u;
    std::memcpy(&x, &wide, 4);
    put_number(std::fabs(x) < 0x1p-14f ? 0.f : x, dtype, &bytes[i * size]);
  }
  return bytes;
}

/// ||a - b|| / ||b|| of two arrays of numbers; NaN counts as infinite.
double relative_error(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b,
                      kvarn::DType dtype) {
  double error = 0, norm = 0;
  const size_t size = static_cast<size_t>(kvarn::size_of(dtype));
  for (size_t i = 0; i + size <= a.size(); i += size) {
    const double x = to_float(&a[i], dtype), y = to_float(&b[i], dtype);
    error += (x - y) * (x - y);
    norm += y * y;
  }
  return std::isnan(error) ? INFINITY : std::sqrt(error / norm);
}

int check_hadamard(kvarn::DType dtype, int dim, int64_t offset) {
  constexpr int64_t kOuter = 3, kMiddle = 2, kInner = 7;
  const int64_t size = kvarn::size_of(dtype);
  const size_t elements = static_cast<size_t>(offset + kOuter * kMiddle * kInner * dim);
  const std::vector<uint8_t> x = random_numbers(elements, dtype, 1);
  std::vector<uint8_t> want(x.size(), 0xAA);

  kvarn::HadamardParams p;
  p.dtype = dtype;
  p.dim = dim;
  p.scale = 0.125f;
  // The two outer dimensions swapped in memory, so that rows are found by division.
  const int64_t rows[] = {kMiddle, kOuter, kInner};
  const int64_t strides[] = {kInner * dim, kMiddle * kInner * dim, dim};
  for (int i = 0; i < 3; ++i) {
    p.rows[i] = rows[i];
    p.x_stride[i] = p.out_stride[i] = strides[i];
  }
  p.x = x.data() + offset * size;
  p.out = want.data() + offset * size;
  CHECK(kvarn::cpu::hadamard_transform(p).ok());

  const DeviceBuffer device_x(x), device_out(std::vector<uint8_t>(x.size(), 0xAA));
  CHECK(device_x.data() && device_out.data());
  p.x = device_x.data() + offset * size;
  p.out = device_out.data() + offset * size;
  CHECK(kvarn::cuda::hadamard_transform(p).ok());
  const std::vector<uint8_t> got = device_out.read();
  CHECK(relative_error(got, want, dtype) < (dtype == kvarn::DType::kBFloat16 ? 2e-3 : 3e-4));
  CHECK(std::memcmp(got.data(), want.data(), static_cast<size_t>(offset * size)) == 0);

  // In place, rows one after the other.
  for (int i = 0; i < 3; ++i) p.rows[i] = i < 2 ? 1 : kOuter * kMiddle * kInner;
  p.x_stride[2] = p.out_stride[2] = dim;
  p.out = device_x.data() + offset * size;
  CHECK(kvarn::cuda::hadamard_transform(p).ok());
  const std::vector<uint8_t> in_place = device_x.read();
  CHECK(std::equal(got.begin() + offset * size, got.end(), in_place.begin() + offset * size));
  return 0;
}

int check_hadamard_errors() {
  kvarn::HadamardParams p;
  p.dim = 128;
  p.rows[1] = 0;
  CHECK(kvarn::cuda::hadamard_transform(p).ok());  // nothing to do
  p.dim = 96;
  const kvarn::Status status = kvarn::cuda::hadamard_transform(p);
  CHECK(status.code() == kvarn::StatusCode::kInvalidArgument);
  CHECK(status.message() ==
        "x must be a power of two from 16 to 1024 in its last dimension on CUDA, got 96");
  return 0;
}

int check_pack(int bits, int64_t count, int64_t offset) {
  constexpr int64_t kRows = 3;
  const int64_t packed_bytes = (count * bits + 7) / 8;
  kvarn::PackParams p;
  p.rows = kRows;
  p.count = count;
  p.codes_stride = count + 1;
  p.packed_stride = packed_bytes + 1;
  p.bits = bits;
  std::vector<uint8_t> codes(static_cast<size_t>(offset + kRows * p.codes_stride));
  std::vector<uint8_t> packed(static_cast<size_t>(offset + kRows * p.packed_stride), 0xAA);
  std::mt19937 random(7);
  for (uint8_t& c : codes) c = static_cast<uint8_t>(random() & ((1u << bits) - 1));
  const DeviceBuffer device_codes(codes), device_packed(packed);
  const DeviceBuffer device_back(std::vector<uint8_t>(codes.size(), 0xAA));
  std::vector<uint8_t> back(codes.size(), 0xAA);

  p.codes = codes.data() + offset;
  p.packed = packed.data() + offset;
  CHECK(kvarn::cpu::pack_bits(p).ok());
  p.codes = back.data() + offset;
  CHECK(kvarn::cpu::unpack_bits(p).ok());
  p.codes = device_codes.data() + offset;
  p.packed = device_packed.data() + offset;
  CHECK(kvarn::cuda::pack_bits(p).ok());
  CHECK(device_packed.read() == packed);
  p.codes = device_back.data() + offset;
  CHECK(kvarn::cuda::unpack_bits(p).ok());
  CHECK(device_back.read() == back);
  return 0;
}

/// Every number of bits of keys and of values with every group and head dimension.
std::vector<kvarn::Format> formats() {
  std::vector<kvarn::Format> all;
  for (int head_dim : {64, 128, 256}) {
    for (int group : {64, 128}) {
      for (const auto& [key_bits, value_bits] :
           {std::pair{2, 3}, std::pair{3, 4}, std::pair{4, 8}, std::pair{8, 2}}) {
        all.push_back({key_bits, value_bits, group, head_dim});
      }
    }
  }
  return all;
}

constexpr int64_t kTiles = 2;
constexpr int32_t kHeads = 3;

/// Records [kTiles, kHeads, bytes + kPadding], the first at `offset`.
constexpr int64_t kPadding = 16;

/// Records of random keys and values, and what quantize_tiles was called with.
struct Records {
  std::vector<uint8_t> bytes;
  int64_t stride[2];  ///< tile, head

  Records(const kvarn::Format& format, int64_t offset, uint8_t poison) {
    stride[1] = kvarn::record_layout(format).bytes + kPadding;
    stride[0] = kHeads * stride[1];
    bytes.assign(static_cast<size_t>(offset + kTiles * stride[0]), poison);
  }
};

/// [tiles, G, heads, D], contiguous.
void set_tile_strides(const kvarn::Format& format, int64_t (&stride)[3]) {
  stride[2] = format.head_dim;
  stride[1] = kHeads * stride[2];
  stride[0] = format.group * stride[1];
}

size_t elements_of(const kvarn::Format& format) {
  return static_cast<size_t>(kTiles * kHeads * format.group * format.head_dim);
}

Records make_records(const kvarn::Format& format, int64_t offset) {
  Records records(format, offset, 0xFF);
  const std::vector<uint8_t> key = random_numbers(elements_of(format), kvarn::DType::kFloat16, 3);
  const std::vector<uint8_t> value = random_numbers(elements_of(format), kvarn::DType::kFloat16, 4);
  kvarn::QuantizeParams p;
  p.format = format;
  p.key = key.data();
  p.value = value.data();
  p.tiles = kTiles;
  p.heads = kHeads;
  set_tile_strides(format, p.key_stride);
  set_tile_strides(format, p.value_stride);
  p.records = records.bytes.data() + offset;
  std::copy_n(records.stride, 2, p.record_stride);
  if (!kvarn::cpu::quantize_tiles(p).ok()) records.bytes.clear();
  return records;
}

int check_records(const kvarn::Format& format, int64_t offset) {
  const Records records = make_records(format, offset);
  CHECK(!records.bytes.empty());
  const size_t count = static_cast<size_t>(kTiles * kHeads);
  const size_t codes = elements_of(format);
  const size_t d = 2 * count * static_cast<size_t>(format.head_dim);
  const size_t g = 2 * count * static_cast<size_t>(format.group);
  const size_t sizes[] = {codes, d, d, g, codes, g, g, d};
  const DeviceBuffer device_records(records.bytes);
  const DeviceBuffer device_back(std::vector<uint8_t>(records.bytes.size(), 0xFF));

  kvarn::CanonicalParams p;
  p.format = format;
  p.tiles = kTiles;
  p.heads = kHeads;
  std::copy_n(records.stride, 2, p.record_stride);
  const auto set = [&](uint8_t* const(&buffer)[8]) {
    p.key_codes = buffer[0];
    p.key_channel_scale = reinterpret_cast<uint16_t*>(buffer[1]);
    p.key_zero_point = reinterpret_cast<uint16_t*>(buffer[2]);
    p.key_token_scale = reinterpret_cast<uint16_t*>(buffer[3]);
    p.value_codes = buffer[4];
    p.value_token_scale = reinterpret_cast<uint16_t*>(buffer[5]);
    p.value_zero_point = reinterpret_cast<uint16_t*>(buffer[6]);
    p.value_channel_scale = reinterpret_cast<uint16_t*>(buffer[7]);
  };
  std::vector<uint8_t> host[8];
  std::vector<std::unique_ptr<DeviceBuffer>> device;
  uint8_t* host_data[8];
  uint8_t* device_data[8];
  for (int i = 0; i < 8; ++i) {
    host[i].assign(sizes[i], 0xAA);
    device.push_back(std::make_unique<DeviceBuffer>(host[i]));
    host_data[i] = host[i].data();
    device_data[i] = device[static_cast<size_t>(i)]->data();
  }
  set(host_data);
  p.records = const_cast<uint8_t*>(records.bytes.data()) + offset;
  CHECK(kvarn::cpu::unpack_records(p).ok());
  set(device_data);
  p.records = device_records.data() + offset;
  CHECK(kvarn::cuda::unpack_records(p).ok());
  for (int i = 0; i < 8; ++i) CHECK(device[static_cast<size_t>(i)]->read() == host[i]);
  p.records = device_back.data() + offset;
  CHECK(kvarn::cuda::pack_records(p).ok());
  CHECK(device_back.read() == records.bytes);
  return 0;
}

int check_dequantize(const kvarn::Format& format, kvarn::DType dtype, bool rotated,
                     const Records& records, int64_t offset) {
  const int64_t start = offset * kvarn::size_of(dtype);
  const size_t bytes =
      static_cast<size_t>(start) + elements_of(format) * static_cast<size_t>(kvarn::size_of(dtype));
  std::vector<uint8_t> key(bytes, 0xAA), value(bytes, 0xAA);
  const DeviceBuffer device_records(records.bytes), device_key(key), device_value(value);

  kvarn::DequantizeParams p;
  p.format = format;
  p.dtype = dtype;
  p.tiles = kTiles;
  p.heads = kHeads;
  p.rotated = rotated;
  std::copy_n(records.stride, 2, p.record_stride);
  // Heads outside, tokens inside.
  const int64_t stride[] = {kHeads * int64_t{format.group} * format.head_dim, format.head_dim,
                            int64_t{format.group} * format.head_dim};
  std::copy_n(stride, 3, p.key_stride);
  std::copy_n(stride, 3, p.value_stride);
  p.records = records.bytes.data() + offset;
  p.key = key.data() + start;
  p.value = value.data() + start;
  CHECK(kvarn::cpu::dequantize_tiles(p).ok());
  p.records = device_records.data() + offset;
  p.key = device_key.data() + start;
  p.value = device_value.data() + start;
  CHECK(kvarn::cuda::dequantize_tiles(p).ok());
  const double limit = dtype == kvarn::DType::kFloat32   ? 1e-6
                       : dtype == kvarn::DType::kFloat16 ? 1e-4
                                                         : 5e-4;
  const double key_error = relative_error(device_key.read(), key, dtype);
  const double value_error = relative_error(device_value.read(), value, dtype);
  if (!(key_error < limit) || !(value_error < limit)) {
    std::fprintf(stderr, "k%dv%d_g%d D %d dtype %d rotated %d offset %d: %g %g\n", format.key_bits,
                 format.value_bits, format.group, format.head_dim, static_cast<int>(dtype), rotated,
                 static_cast<int>(offset), key_error, value_error);
  }
  CHECK(key_error < limit);
  CHECK(value_error < limit);
  return 0;
}

/// Records as codes (K, then V) and as keys and values in the rotated basis.
struct Unpacked {
  std::vector<uint8_t> codes[2];
  std::vector<uint8_t> numbers[2];
};

bool unpack(const kvarn::Format& format, const Records& records, int64_t offset, Unpacked& out) {
  const size_t count = static_cast<size_t>(kTiles * kHeads);
  std::vector<uint16_t> scales(count * static_cast<size_t>(format.group + format.head_dim));
  for (int i = 0; i < 2; ++i) {
    out.codes[i].resize(elements_of(format));
    out.numbers[i].resize(4 * elements_of(format));
  }
  kvarn::CanonicalParams c;
  c.format = format;
  c.records = const_cast<uint8_t*>(records.bytes.data()) + offset;
  std::copy_n(records.stride, 2, c.record_stride);
  c.key_codes = out.codes[0].data();
  c.value_codes = out.codes[1].data();
  c.key_channel_scale = c.key_zero_point = c.key_token_scale = scales.data();
  c.value_channel_scale = c.value_zero_point = c.value_token_scale = scales.data();
  c.tiles = kTiles;
  c.heads = kHeads;
  kvarn::DequantizeParams d;
  d.format = format;
  d.records = c.records;
  std::copy_n(records.stride, 2, d.record_stride);
  d.key = out.numbers[0].data();
  d.value = out.numbers[1].data();
  d.dtype = kvarn::DType::kFloat32;
  d.tiles = kTiles;
  d.heads = kHeads;
  d.rotated = true;
  set_tile_strides(format, d.key_stride);
  set_tile_strides(format, d.value_stride);
  return kvarn::cpu::unpack_records(c).ok() && kvarn::cpu::dequantize_tiles(d).ok();
}

/// How far records are from those of the CPU.
struct Distance {
  double codes[2];    ///< share that differs, K and V
  double numbers[2];  ///< relative error of the dequantized tiles; infinite if NaN meets a number
};

bool compare_records(const kvarn::Format& format, const Records& got, const Records& want,
                     int64_t offset, Distance& distance) {
  Unpacked a, b;
  if (!unpack(format, got, offset, a) || !unpack(format, want, offset, b)) return false;
  for (int i = 0; i < 2; ++i) {
    size_t differing = 0;
    for (size_t k = 0; k < a.codes[i].size(); ++k) differing += a.codes[i][k] != b.codes[i][k];
    distance.codes[i] = static_cast<double>(differing) / static_cast<double>(a.codes[i].size());
    for (size_t k = 0; k < a.numbers[i].size(); k += 4) {
      uint8_t* const x = &a.numbers[i][k];
      uint8_t* const y = &b.numbers[i][k];
      if (std::isnan(to_float(x, kvarn::DType::kFloat32)) &&
          std::isnan(to_float(y, kvarn::DType::kFloat32))) {
        std::memset(x, 0, 4);
        std::memset(y, 0, 4);
      }
    }
    distance.numbers[i] = relative_error(a.numbers[i], b.numbers[i], kvarn::DType::kFloat32);
  }
  return true;
}

/// A code that differs is one step off, up to 8 * 2^-bits of its element's size; without, the
/// numbers agree. A column scale that rounds to the other fp16 neighbour changes, with 8 bits, a
/// sixteenth of the codes of its column; the fits that follow from it, with 4 bits, 39 codes of one
/// tile here. The cases are small: a tile of the worst one may have six times what
/// tests/test_cuda_quantize.py allows of many together.
bool close(const kvarn::Format& format, const Distance& distance) {
  const auto part_is_close = [&](int i) {
    const int bits = i == 0 ? format.key_bits : format.value_bits;
    return distance.codes[i] <= (bits == 8 ? 6e-3 : 6e-4) &&
           distance.numbers[i] <= 1e-3 + std::sqrt(distance.codes[i]) * std::ldexp(8., -bits);
  };
  return part_is_close(0) && part_is_close(1);
}

/// Of head 1 in tile 0, tokens 0 and 7 become zeros and token 13 gets a NaN.
void kill_tokens(uint8_t* tile, int64_t token_stride, int64_t head_stride, int64_t head_dim,
                 kvarn::DType dtype) {
  const int64_t size = kvarn::size_of(dtype);
  for (int64_t token : {0, 7}) {
    std::memset(tile + (token * token_stride + head_stride) * size, 0,
                static_cast<size_t>(head_dim * size));
  }
  std::memset(tile + (13 * token_stride + head_stride + 5) * size, 0xFF, static_cast<size_t>(size));
}

struct Encoder {
  kvarn::Fit fit;
  int iterations;
};
constexpr Encoder kEncoders[] = {
    {kvarn::Fit::kMinMax, 8}, {kvarn::Fit::kUnbiased, 0}, {kvarn::Fit::kUnbiased, 4}};

int check_distance(const char* op, const kvarn::Format& format, kvarn::DType dtype,
                   const Encoder& encoder, const char* what, const Records& got,
                   const Records& want, int64_t offset) {
  Distance distance{};
  CHECK(compare_records(format, got, want, offset, distance));
  const bool good = close(format, distance);
  if (!good || verbose) {
    std::fprintf(stderr,
                 "%s k%dv%d_g%d D %d dtype %d fit %d iterations %d %s: codes %.1e %.1e, "
                 "numbers %.1e %.1e\n",
                 op, format.key_bits, format.value_bits, format.group, format.head_dim,
                 static_cast<int>(dtype), static_cast<int>(encoder.fit), encoder.iterations, what,
                 distance.codes[0], distance.codes[1], distance.numbers[0], distance.numbers[1]);
  }
  CHECK(good);
  // What lies between records is left alone.
  for (int64_t i = 0; i < kTiles * kHeads; ++i) {
    const auto end = static_cast<size_t>(offset + (i + 1) * got.stride[1]);
    for (size_t k = end - kPadding; k < end; ++k) CHECK(got.bytes[k] == want.bytes[k]);
  }
  return 0;
}

int check_quantize(const kvarn::Format& format, kvarn::DType dtype, const Encoder& encoder,
                   bool rotated, bool dead, int64_t offset) {
  const int64_t start = offset * kvarn::size_of(dtype);
  kvarn::QuantizeParams p;
  p.format = format;
  p.dtype = dtype;
  p.tiles = kTiles;
  p.heads = kHeads;
  p.fit = encoder.fit;
  p.iterations = encoder.iterations;
  p.rotated = rotated;
  set_tile_strides(format, p.key_stride);
  set_tile_strides(format, p.value_stride);
  std::vector<uint8_t> in[2];
  for (uint32_t i = 0; i < 2; ++i) {
    in[i] = random_numbers(static_cast<size_t>(offset) + elements_of(format), dtype, 11 + i);
    if (dead) {
      kill_tokens(in[i].data() + start, p.key_stride[1], p.key_stride[2], format.head_dim, dtype);
    }
  }
  Records want(format, offset, 0xAA);
  Records got = want;
  std::copy_n(want.stride, 2, p.record_stride);
  p.key = in[0].data() + start;
  p.value = in[1].data() + start;
  p.records = want.bytes.data() + offset;
  CHECK(kvarn::cpu::quantize_tiles(p).ok());
  const DeviceBuffer device_key(in[0]), device_value(in[1]), device_records(got.bytes);
  p.key = device_key.data() + start;
  p.value = device_value.data() + start;
  p.records = device_records.data() + offset;
  CHECK(kvarn::cuda::quantize_tiles(p).ok());
  got.bytes = device_records.read();
  return check_distance(
      "quantize", format, dtype, encoder,
      rotated ? (dead ? "rotated, dead tokens" : "rotated") : (dead ? "dead tokens" : ""), got,
      want, offset);
}

/// The bytes of an array.
template <class T>
std::vector<uint8_t> bytes_of(const std::vector<T>& v) {
  const auto* const first = reinterpret_cast<const uint8_t*>(v.data());
  return {first, first + v.size() * sizeof(T)};
}

/// A pool [slots, 2, heads, G, D].
void set_pool_strides(const kvarn::Format& format, int64_t (&stride)[4]) {
  stride[3] = format.head_dim;
  stride[2] = format.group * stride[3];
  stride[1] = kHeads * stride[2];
  stride[0] = 2 * stride[1];
}

/// Slots 2 and 0 become blocks 0 and 1, among padding and beyond the count.
int check_seal(const kvarn::Format& format, kvarn::DType dtype, const Encoder& encoder, bool dead,
               int64_t offset) {
  constexpr int64_t kSlots = 3;
  const int64_t start = offset * kvarn::size_of(dtype);
  kvarn::SealParams p;
  p.format = format;
  p.heads = kHeads;
  p.fit = encoder.fit;
  p.iterations = encoder.iterations;
  p.staging.dtype = dtype;
  p.staging.slots = kSlots;
  set_pool_strides(format, p.staging.stride);
  std::vector<uint8_t> pool =
      random_numbers(static_cast<size_t>(offset + kSlots * p.staging.stride[0]), dtype, 21);
  if (dead) {
    kill_tokens(pool.data() + start + 2 * p.staging.stride[0] * kvarn::size_of(dtype),
                p.staging.stride[3], p.staging.stride[2], format.head_dim, dtype);
  }
  const std::vector<int64_t> slots = {2, -1, 1, 0, 1};
  const std::vector<int32_t> blocks = {0, 1, -1, 1, 1};
  const std::vector<int32_t> count = {4};
  Records want(format, offset, 0xAA);
  Records got = want;
  p.tiles = static_cast<int64_t>(slots.size());
  p.cache.blocks = kTiles;
  std::copy_n(want.stride, 2, p.cache.stride);

  p.staging.data = pool.data() + start;
  p.cache.data = want.bytes.data() + offset;
  p.slots = {slots.data(), 1, true};
  p.blocks = {blocks.data(), 1, false};
  p.count = count.data();
  CHECK(kvarn::cpu::seal_blocks(p).ok());
  const DeviceBuffer device_pool(pool), device_cache(got.bytes);
  const DeviceBuffer device_slots(bytes_of(slots)), device_blocks(bytes_of(blocks));
  const DeviceBuffer device_count(bytes_of(count));
  p.staging.data = device_pool.data() + start;
  p.cache.data = device_cache.data() + offset;
  p.slots.data = device_slots.data();
  p.blocks.data = device_blocks.data();
  p.count = reinterpret_cast<const int32_t*>(device_count.data());
  CHECK(kvarn::cuda::seal_blocks(p).ok());
  got.bytes = device_cache.read();
  return check_distance("seal", format, dtype, encoder, dead ? "dead tokens" : "", got, want,
                        offset);
}

int check_normalize(int rows, int cols, kvarn::DType dtype, int iterations, int64_t offset) {
  constexpr int64_t kCount = 3;
  const int64_t size = kvarn::size_of(dtype);
  kvarn::NormalizeParams p;
  p.dtype = dtype;
  p.tiles = kCount;
  p.rows = rows;
  p.cols = cols;
  p.iterations = iterations;
  p.x_stride[1] = cols + offset;
  p.x_stride[0] = rows * p.x_stride[1];
  std::vector<uint8_t> x =
      random_numbers(static_cast<size_t>(offset + kCount * p.x_stride[0]), dtype, 31);
  // Rows and columns of the first two tiles differ in size; the second has a constant row and a
  // constant column, the third a NaN.
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      uint8_t* const at = &x[static_cast<size_t>((offset + i * p.x_stride[1] + j) * size)];
      uint8_t* const next = at + p.x_stride[0] * size;
      const float factor = std::ldexp(1.f, static_cast<int>(i % 5 + j % 4));
      put_number(to_float(at, dtype) * factor, dtype, at);
      const bool constant = i == rows / 2 || j == cols / 2;
      put_number(constant ? 1.5f : to_float(next, dtype) * factor, dtype, next);
    }
  }
  std::memset(&x[static_cast<size_t>((offset + 2 * p.x_stride[0] + cols / 2) * size)], 0xFF,
              static_cast<size_t>(size));
  const size_t sizes[] = {static_cast<size_t>(kCount * rows * cols),
                          static_cast<size_t>(kCount * rows), static_cast<size_t>(kCount * cols)};
  std::vector<float> want[3];
  for (int i = 0; i < 3; ++i) want[i].assign(sizes[i], -7.f);
  const DeviceBuffer device_x(x), balanced(bytes_of(want[0])), row_scale(bytes_of(want[1])),
      col_scale(bytes_of(want[2]));
  p.x = x.data() + offset * size;
  p.balanced = want[0].data();
  p.row_scale = want[1].data();
  p.col_scale = want[2].data();
  CHECK(kvarn::cpu::variance_normalize(p).ok());
  p.x = device_x.data() + offset * size;
  p.balanced = reinterpret_cast<float*>(balanced.data());
  p.row_scale = reinterpret_cast<float*>(row_scale.data());
  p.col_scale = reinterpret_cast<float*>(col_scale.data());
  CHECK(kvarn::cuda::variance_normalize(p).ok());
  double error[3];
  const DeviceBuffer* const got[] = {&balanced, &row_scale, &col_scale};
  for (int i = 0; i < 3; ++i) {
    std::vector<uint8_t> a = got[i]->read(), b = bytes_of(want[i]);
    for (size_t k = 0; k < a.size(); k += 4) {
      if (std::isnan(to_float(&a[k], kvarn::DType::kFloat32)) &&
          std::isnan(to_float(&b[k], kvarn::DType::kFloat32))) {
        std::memset(&a[k], 0, 4);
        std::memset(&b[k], 0, 4);
      }
    }
    error[i] = relative_error(a, b, kvarn::DType::kFloat32);
  }
  const bool good = error[0] < 1e-5 && error[1] < 1e-5 && error[2] < 1e-5;
  if (!good || verbose) {
    std::fprintf(stderr, "normalize %d x %d dtype %d iterations %d: %.1e, rows %.1e, cols %.1e\n",
                 rows, cols, static_cast<int>(dtype), iterations, error[0], error[1], error[2]);
  }
  CHECK(good);
  return 0;
}

int check_append(int head_dim, kvarn::DType dtype, int64_t offset, bool checked) {
  constexpr int64_t kTokens = 37, kSlots = 3, kBlocks = 9;
  const kvarn::Format format{4, 2, 64, head_dim};
  const int64_t row = int64_t{kHeads} * head_dim;
  kvarn::AppendParams p;
  p.format = format;
  p.tokens = kTokens;
  p.heads = kHeads;
  p.key_stride[0] = row;
  p.value_stride[0] = row + 1;  // an odd stride makes narrow accesses of the 16-byte ones
  p.key_stride[1] = p.value_stride[1] = head_dim;
  if (offset == 0) p.value_stride[0] = row + 8;
  p.staging.dtype = dtype;
  p.staging.slots = kSlots;
  set_pool_strides(format, p.staging.stride);
  const auto numbers = [&](int64_t count, uint32_t seed) {
    return random_numbers(static_cast<size_t>(offset + count), dtype, seed);
  };
  const std::vector<uint8_t> key = numbers(kTokens * p.key_stride[0], 5);
  const std::vector<uint8_t> value = numbers(kTokens * p.value_stride[0], 6);
  std::vector<uint8_t> staging(static_cast<size_t>(2 * (offset + kSlots * p.staging.stride[0])),
                               0xAA);
  std::vector<int64_t> mapping(kTokens);
  const std::vector<int32_t> pages = {-1, 2, -1, -1, 0, -1, 1, -1, -1};
  const int64_t targets[] = {1, 4, 6};
  for (int64_t i = 0; i < kTokens; ++i) {
    mapping[static_cast<size_t>(i)] = i % 5 == 4 ? -1 - i : targets[i % 3] * 64 + i;
  }
  const DeviceBuffer device_key(key), device_value(value), device_staging(staging);
  const DeviceBuffer device_mapping(bytes_of(mapping)), device_pages(bytes_of(pages));
  p.blocks = kBlocks;
  p.checked = checked;
  p.key = key.data() + 2 * offset;
  p.value = value.data() + 2 * offset;
  p.staging.data = staging.data() + 2 * offset;
  p.slot_mapping = {mapping.data(), 1, true};
  p.block_slot = {pages.data(), 1, false};
  CHECK(kvarn::cpu::append_kv(p).ok());
  p.key = device_key.data() + 2 * offset;
  p.value = device_value.data() + 2 * offset;
  p.staging.data = device_staging.data() + 2 * offset;
  p.slot_mapping.data = device_mapping.data();
  p.block_slot.data = device_pages.data();
  CHECK(kvarn::cuda::append_kv(p).ok());
  CHECK(device_staging.read() == staging);

  // Entries that are out of range write nothing; checked, the first of them is named.
  mapping[3] = 2 * 64;        // a record
  mapping[8] = kBlocks * 64;  // no block
  const DeviceBuffer device_bad(bytes_of(mapping));
  p.slot_mapping.data = device_bad.data();
  const kvarn::Status status = kvarn::cuda::append_kv(p);
  CHECK(status.ok() != checked);
  if (checked) {
    CHECK(status.message() ==
          "block_slot must be a staging slot below 3 for every block that tokens are appended to, "
          "got -1 at block 2 (slot_mapping 128 at index 3)");
  }
  CHECK(device_staging.read() == staging);
  return 0;
}

constexpr kvarn::DType kHalves[] = {kvarn::DType::kFloat16, kvarn::DType::kBFloat16};
constexpr kvarn::DType kDTypes[] = {kvarn::DType::kFloat16, kvarn::DType::kBFloat16,
                                    kvarn::DType::kFloat32};

int all_hadamard() {
  if (check_hadamard_errors()) return 1;
  for (const kvarn::DType dtype : kDTypes) {
    for (int dim = 16; dim <= 1024; dim *= 2) {
      for (int64_t offset : {0, 1}) {
        if (check_hadamard(dtype, dim, offset)) return 1;
      }
    }
  }
  return 0;
}

int all_normalize() {
  // 300 x 200 is too large for shared memory, and so are the rest, by their rows, columns or both.
  constexpr int kShapes[][2] = {{2, 5},   {3, 2},     {5, 7},     {64, 128},  {128, 64},
                                {2, 700}, {300, 200}, {1500, 50}, {50, 1500}, {1030, 1040}};
  for (const auto& [rows, cols] : kShapes) {
    for (const kvarn::DType dtype : kDTypes) {
      if (check_normalize(rows, cols, dtype, 8, dtype == kvarn::DType::kBFloat16 ? 1 : 0)) return 1;
    }
    for (int iterations : {0, 1}) {
      if (check_normalize(rows, cols, kvarn::DType::kFloat16, iterations, 0)) return 1;
    }
  }
  return 0;
}

int all_pack() {
  for (int bits = 1; bits <= 8; ++bits) {
    for (int64_t count : {1, 7, 8, 64, 71}) {
      for (int64_t offset : {0, 3}) {
        if (check_pack(bits, count, offset)) return 1;
      }
    }
  }
  return 0;
}

int all_records() {
  for (const kvarn::Format& format : formats()) {
    for (int64_t offset : {0, 1}) {
      if (check_records(format, offset)) return 1;
    }
  }
  return 0;
}

int all_dequantize() {
  for (const kvarn::Format& format : formats()) {
    for (int64_t offset : {0, 1}) {
      const Records records = make_records(format, offset);
      CHECK(!records.bytes.empty());
      for (const kvarn::DType dtype : kDTypes) {
        for (bool rotated : {false, true}) {
          if (check_dequantize(format, dtype, rotated, records, offset)) return 1;
        }
      }
    }
  }
  return 0;
}

int all_quantize() {
  for (const kvarn::Format& format : formats()) {
    for (const Encoder& encoder : kEncoders) {
      for (const kvarn::DType dtype : kDTypes) {
        const bool rotated = dtype == kvarn::DType::kBFloat16;
        for (bool dead : {false, true}) {
          if (check_quantize(format, dtype, encoder, rotated, dead, dead ? 1 : 0)) return 1;
        }
      }
    }
  }
  return 0;
}

int all_seal() {
  for (const kvarn::Format& format : formats()) {
    for (const Encoder& encoder : kEncoders) {
      const kvarn::DType dtype = kHalves[format.key_bits % 2];
      for (bool dead : {false, true}) {
        if (check_seal(format, dtype, encoder, dead, dead ? 1 : 0)) return 1;
      }
    }
  }
  return 0;
}

int all_append() {
  for (int head_dim : {64, 128, 256}) {
    for (const kvarn::DType dtype : kHalves) {
      for (int64_t offset : {0, 1}) {
        for (bool checked : {false, true}) {
          if (check_append(head_dim, dtype, offset, checked)) return 1;
        }
      }
    }
  }
  return 0;
}

struct Op {
  const char* name;
  int (*check)();
};
constexpr Op kOps[] = {
    {"hadamard", all_hadamard},
    {"normalize", all_normalize},
    {"pack", all_pack},
    {"records", all_records},
    {"dequantize", all_dequantize},
    {"quantize", all_quantize},
    {"append", all_append},
    {"seal", all_seal},
};

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no CUDA device\n");
    return kSkipped;
  }
  bool all = true;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "-v") {
      verbose = true;
      continue;
    }
    all = false;
    const Op* const op =
        std::find_if(std::begin(kOps), std::end(kOps), [&](const Op& o) { return name == o.name; });
    if (op == std::end(kOps)) {
      std::fprintf(stderr, "no op %s\n", argv[i]);
      return 1;
    }
    op->check();
  }
  if (all) {
    for (const Op& op : kOps) op.check();
  }
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  return kvarn::test::failures();
}
