// Every CUDA kernel on small shapes: the results are those of the CPU functions up to the order of
// additions. Quick enough for compute-sanitizer. Skipped (exit code 77) where there is no device.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "kvarn/ops.h"

namespace {

constexpr int kSkipped = 77;

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

/// Numbers of magnitude 1/16..16 in any of the types: exponents and mantissas are drawn.
std::vector<uint8_t> random_numbers(size_t count, kvarn::DType dtype, uint32_t seed) {
  std::mt19937 random(seed);
  const size_t size = static_cast<size_t>(kvarn::size_of(dtype));
  std::vector<uint8_t> bytes(count * size);
  for (size_t i = 0; i < count; ++i) {
    const float x = std::ldexp(static_cast<float>(static_cast<int>(random() % 511) - 255), -4);
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    if (dtype == kvarn::DType::kFloat16) {
      // x is an integer below 256 times 2^-4: exact in 11 bits of significand.
      const uint32_t half =
          x == 0 ? 0
                 : (wide >> 16 & 0x8000) | (((wide >> 23 & 255) - 112) << 10 | (wide >> 13 & 1023));
      std::memcpy(&bytes[i * size], &half, size);
    } else {
      const uint32_t shifted = dtype == kvarn::DType::kBFloat16 ? wide >> 16 : wide;
      std::memcpy(&bytes[i * size], &shifted, size);
    }
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

std::vector<kvarn::Format> formats() {
  std::vector<kvarn::Format> all;
  for (int head_dim : {64, 128, 256}) {
    for (int group : {64, 128}) {
      // Every number of bits of keys and of values.
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

/// Records [kTiles, kHeads, bytes + kPadding], the first at `offset`; of random keys and values.
constexpr int64_t kPadding = 16;

std::vector<uint8_t> make_records(const kvarn::Format& format, int64_t offset) {
  const int64_t bytes = kvarn::record_layout(format).bytes + kPadding;
  std::vector<uint8_t> records(static_cast<size_t>(offset + kTiles * kHeads * bytes), 0xFF);
  const size_t elements = static_cast<size_t>(kTiles * kHeads * format.group * format.head_dim);
  const std::vector<uint8_t> key = random_numbers(elements, kvarn::DType::kFloat16, 3);
  const std::vector<uint8_t> value = random_numbers(elements, kvarn::DType::kFloat16, 4);
  kvarn::QuantizeParams p;
  p.format = format;
  p.key = key.data();
  p.value = value.data();
  p.tiles = kTiles;
  p.heads = kHeads;
  const int64_t stride[] = {int64_t{format.group} * kHeads * format.head_dim,
                            int64_t{kHeads} * format.head_dim, format.head_dim};
  std::copy_n(stride, 3, p.key_stride);
  std::copy_n(stride, 3, p.value_stride);
  p.records = records.data() + offset;
  p.record_stride[0] = kHeads * bytes;
  p.record_stride[1] = bytes;
  if (!kvarn::cpu::quantize_tiles(p).ok()) records.clear();
  return records;
}

int check_records(const kvarn::Format& format, int64_t offset) {
  const std::vector<uint8_t> records = make_records(format, offset);
  CHECK(!records.empty());
  const size_t count = static_cast<size_t>(kTiles * kHeads);
  const size_t codes = count * static_cast<size_t>(format.group * format.head_dim);
  const size_t d = 2 * count * static_cast<size_t>(format.head_dim);
  const size_t g = 2 * count * static_cast<size_t>(format.group);
  const size_t sizes[] = {codes, d, d, g, codes, g, g, d};
  const DeviceBuffer device_records(records);
  const DeviceBuffer device_back(std::vector<uint8_t>(records.size(), 0xFF));

  kvarn::CanonicalParams p;
  p.format = format;
  p.tiles = kTiles;
  p.heads = kHeads;
  p.record_stride[1] = kvarn::record_layout(format).bytes + kPadding;
  p.record_stride[0] = kHeads * p.record_stride[1];
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
  p.records = const_cast<uint8_t*>(records.data()) + offset;
  CHECK(kvarn::cpu::unpack_records(p).ok());
  set(device_data);
  p.records = device_records.data() + offset;
  CHECK(kvarn::cuda::unpack_records(p).ok());
  for (int i = 0; i < 8; ++i) CHECK(device[static_cast<size_t>(i)]->read() == host[i]);
  p.records = device_back.data() + offset;
  CHECK(kvarn::cuda::pack_records(p).ok());
  CHECK(device_back.read() == records);
  return 0;
}

int check_dequantize(const kvarn::Format& format, kvarn::DType dtype, bool rotated,
                     int64_t offset) {
  const std::vector<uint8_t> records = make_records(format, offset);
  CHECK(!records.empty());
  const int64_t elements = kTiles * kHeads * format.group * format.head_dim;
  const size_t bytes = static_cast<size_t>((offset + elements) * kvarn::size_of(dtype));
  std::vector<uint8_t> key(bytes, 0xAA), value(bytes, 0xAA);
  const DeviceBuffer device_records(records), device_key(key), device_value(value);

  kvarn::DequantizeParams p;
  p.format = format;
  p.dtype = dtype;
  p.tiles = kTiles;
  p.heads = kHeads;
  p.rotated = rotated;
  p.record_stride[1] = kvarn::record_layout(format).bytes + kPadding;
  p.record_stride[0] = kHeads * p.record_stride[1];
  // Heads outside, tokens inside.
  const int64_t stride[] = {kHeads * int64_t{format.group} * format.head_dim, format.head_dim,
                            int64_t{format.group} * format.head_dim};
  std::copy_n(stride, 3, p.key_stride);
  std::copy_n(stride, 3, p.value_stride);
  const int64_t start = offset * kvarn::size_of(dtype);
  p.records = records.data() + offset;
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

/// Both records as codes (K, then V) and as keys and values in the rotated basis.
struct Unpacked {
  std::vector<uint8_t> codes[2];
  std::vector<uint8_t> numbers[2];
};

bool unpack(const kvarn::Format& format, const std::vector<uint8_t>& records, int64_t offset,
            const kvarn::QuantizeParams& q, Unpacked& out) {
  const size_t count = static_cast<size_t>(kTiles * kHeads);
  const size_t elements = count * static_cast<size_t>(format.group * format.head_dim);
  std::vector<uint16_t> scales(count * static_cast<size_t>(6 * (format.group + format.head_dim)));
  for (int i = 0; i < 2; ++i) {
    out.codes[i].resize(elements);
    out.numbers[i].resize(4 * elements);
  }
  kvarn::CanonicalParams c;
  c.format = format;
  c.records = const_cast<uint8_t*>(records.data()) + offset;
  std::copy_n(q.record_stride, 2, c.record_stride);
  c.key_codes = out.codes[0].data();
  c.value_codes = out.codes[1].data();
  c.key_channel_scale = c.key_zero_point = c.key_token_scale = scales.data();
  c.value_channel_scale = c.value_zero_point = c.value_token_scale = scales.data();
  c.tiles = kTiles;
  c.heads = kHeads;
  kvarn::DequantizeParams d;
  d.format = format;
  d.records = c.records;
  std::copy_n(q.record_stride, 2, d.record_stride);
  d.key = out.numbers[0].data();
  d.value = out.numbers[1].data();
  d.dtype = kvarn::DType::kFloat32;
  d.tiles = kTiles;
  d.heads = kHeads;
  d.rotated = true;
  std::copy_n(q.key_stride, 3, d.key_stride);
  std::copy_n(q.key_stride, 3, d.value_stride);
  return kvarn::cpu::unpack_records(c).ok() && kvarn::cpu::dequantize_tiles(d).ok();
}

int check_quantize(const kvarn::Format& format, kvarn::DType dtype, kvarn::Fit fit, int iterations,
                   bool rotated, bool dead, int64_t offset) {
  const int64_t size = kvarn::size_of(dtype);
  const int64_t record_bytes = kvarn::record_layout(format).bytes + kPadding;
  const size_t elements = static_cast<size_t>(kTiles * kHeads * format.group * format.head_dim);
  const size_t start = static_cast<size_t>(offset * size);
  std::vector<uint8_t> in[2];
  for (uint32_t i = 0; i < 2; ++i) {
    in[i] = random_numbers(static_cast<size_t>(offset) + elements, dtype, 11 + i);
    if (!dead) continue;
    // The first token and another are zeros, one has a NaN; all of them of head 1.
    const size_t token = static_cast<size_t>(kHeads * format.head_dim * size);
    const size_t row = static_cast<size_t>(format.head_dim * size);
    for (size_t t : {size_t{0}, size_t{7}}) std::memset(&in[i][start + t * token + row], 0, row);
    std::memset(&in[i][start + 13 * token + row + static_cast<size_t>(5 * size)], 0xFF,
                static_cast<size_t>(size));
  }
  const std::vector<uint8_t> empty(static_cast<size_t>(offset + kTiles * kHeads * record_bytes),
                                   0xAA);
  std::vector<uint8_t> want = empty;
  const DeviceBuffer device_key(in[0]), device_value(in[1]), device_records(empty);

  kvarn::QuantizeParams p;
  p.format = format;
  p.dtype = dtype;
  p.tiles = kTiles;
  p.heads = kHeads;
  p.fit = fit;
  p.iterations = iterations;
  p.rotated = rotated;
  const int64_t stride[] = {int64_t{format.group} * kHeads * format.head_dim,
                            int64_t{kHeads} * format.head_dim, format.head_dim};
  std::copy_n(stride, 3, p.key_stride);
  std::copy_n(stride, 3, p.value_stride);
  p.record_stride[0] = kHeads * record_bytes;
  p.record_stride[1] = record_bytes;
  p.key = in[0].data() + start;
  p.value = in[1].data() + start;
  p.records = want.data() + offset;
  CHECK(kvarn::cpu::quantize_tiles(p).ok());
  p.key = device_key.data() + start;
  p.value = device_value.data() + start;
  p.records = device_records.data() + offset;
  CHECK(kvarn::cuda::quantize_tiles(p).ok());
  const std::vector<uint8_t> got = device_records.read();

  Unpacked a, b;
  CHECK(unpack(format, got, offset, p, a));
  CHECK(unpack(format, want, offset, p, b));
  double differing[2], error[2];
  for (int i = 0; i < 2; ++i) {
    size_t count = 0;
    for (size_t k = 0; k < elements; ++k) count += a.codes[i][k] != b.codes[i][k];
    differing[i] = static_cast<double>(count) / static_cast<double>(elements);
    for (size_t k = 0; k < elements; ++k) {
      // NaN must meet NaN.
      const float x = to_float(&a.numbers[i][4 * k], kvarn::DType::kFloat32);
      const float y = to_float(&b.numbers[i][4 * k], kvarn::DType::kFloat32);
      if (std::isnan(x) && std::isnan(y)) {
        std::memset(&a.numbers[i][4 * k], 0, 4);
        std::memset(&b.numbers[i][4 * k], 0, 4);
      }
    }
    error[i] = relative_error(a.numbers[i], b.numbers[i], kvarn::DType::kFloat32);
  }
  // A code that differs is one step off; otherwise the numbers agree.
  const auto close = [&](int i) {
    return differing[i] < 3e-4 && error[i] < 1e-3 + 2 * std::sqrt(differing[i]);
  };
  const bool good = close(0) && close(1);
  if (!good || std::getenv("KVARN_TEST_PRINT") != nullptr) {
    std::fprintf(stderr,
                 "k%dv%d_g%d D %d dtype %d fit %d iterations %d rotated %d dead %d offset %d: "
                 "codes %.1e %.1e, error %.1e %.1e\n",
                 format.key_bits, format.value_bits, format.group, format.head_dim,
                 static_cast<int>(dtype), static_cast<int>(fit), iterations, rotated, dead,
                 static_cast<int>(offset), differing[0], differing[1], error[0], error[1]);
  }
  CHECK(good);
  // Padding between records is left alone.
  for (int64_t i = 0; i < kTiles * kHeads; ++i) {
    const auto end = static_cast<size_t>(offset + (i + 1) * record_bytes);
    for (size_t k = end - kPadding; k < end; ++k) CHECK(got[k] == 0xAA);
  }
  return 0;
}

int check_append(int head_dim, int64_t offset, bool checked) {
  constexpr int64_t kTokens = 37, kSlots = 3, kBlocks = 9;
  const kvarn::Format format{4, 2, 64, head_dim};
  const int64_t row = int64_t{kHeads} * head_dim;
  const int64_t pool = kSlots * 2 * kHeads * format.group * head_dim;
  const auto bytes = [&](int64_t n) { return static_cast<size_t>(2 * (offset + n)); };
  const std::vector<uint8_t> key =
      random_numbers(bytes(kTokens * row) / 2, kvarn::DType::kFloat16, 5);
  const std::vector<uint8_t> value =
      random_numbers(bytes(kTokens * row) / 2, kvarn::DType::kFloat16, 6);
  std::vector<uint8_t> staging(bytes(pool), 0xAA);
  std::vector<int64_t> mapping(kTokens);
  std::vector<int32_t> pages = {-1, 2, -1, -1, 0, -1, 1, -1, -1};
  const int64_t targets[] = {1, 4, 6};
  for (int64_t i = 0; i < kTokens; ++i) {
    mapping[static_cast<size_t>(i)] = i % 5 == 4 ? -1 : targets[i % 3] * 64 + i;
  }
  const auto to_device = [](const auto& v) {
    const auto* const first = reinterpret_cast<const uint8_t*>(v.data());
    return std::vector<uint8_t>(first, first + v.size() * sizeof(v[0]));
  };
  const DeviceBuffer device_key(key), device_value(value), device_staging(staging);
  const DeviceBuffer device_mapping(to_device(mapping)), device_pages(to_device(pages));

  kvarn::AppendParams p;
  p.format = format;
  p.tokens = kTokens;
  p.heads = kHeads;
  p.key_stride[0] = p.value_stride[0] = row;
  p.key_stride[1] = p.value_stride[1] = head_dim;
  p.staging.slots = kSlots;
  const int64_t stride[] = {2 * kHeads * int64_t{format.group} * head_dim,
                            kHeads * int64_t{format.group} * head_dim,
                            int64_t{format.group} * head_dim, head_dim};
  std::copy_n(stride, 4, p.staging.stride);
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
  p.slot_mapping = {device_mapping.data(), 1, true};
  p.block_slot = {device_pages.data(), 1, false};
  CHECK(kvarn::cuda::append_kv(p).ok());
  CHECK(device_staging.read() == staging);

  // Entries that are out of range write nothing; checked, the first of them is named.
  mapping[3] = 2 * 64;        // a record
  mapping[8] = kBlocks * 64;  // no block
  const DeviceBuffer device_bad(to_device(mapping));
  p.slot_mapping = {device_bad.data(), 1, true};
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

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no CUDA device\n");
    return kSkipped;
  }
  constexpr kvarn::DType kDTypes[] = {kvarn::DType::kFloat16, kvarn::DType::kBFloat16,
                                      kvarn::DType::kFloat32};
  if (check_hadamard_errors()) return 1;
  for (const kvarn::DType dtype : kDTypes) {
    for (int dim = 16; dim <= 1024; dim *= 2) {
      for (int64_t offset : {0, 1}) {
        if (check_hadamard(dtype, dim, offset)) return 1;
      }
    }
  }
  for (int bits = 1; bits <= 8; ++bits) {
    for (int64_t count : {1, 7, 8, 64, 71}) {
      for (int64_t offset : {0, 3}) {
        if (check_pack(bits, count, offset)) return 1;
      }
    }
  }
  for (const kvarn::Format& format : formats()) {
    for (int64_t offset : {0, 1}) {
      if (check_records(format, offset)) return 1;
      for (const kvarn::DType dtype : kDTypes) {
        for (bool rotated : {false, true}) {
          if (check_dequantize(format, dtype, rotated, offset)) return 1;
        }
      }
    }
  }
  for (const kvarn::Format& format : formats()) {
    for (const auto& [fit, iterations] :
         {std::pair{kvarn::Fit::kMinMax, 8}, std::pair{kvarn::Fit::kUnbiased, 0},
          std::pair{kvarn::Fit::kUnbiased, 4}}) {
      for (const kvarn::DType dtype : kDTypes) {
        for (bool dead : {false, true}) {
          const int64_t offset = dead ? 1 : 0;
          if (check_quantize(format, dtype, fit, iterations, dtype == kvarn::DType::kBFloat16, dead,
                             offset)) {
            return 1;
          }
        }
      }
    }
  }
  for (int head_dim : {64, 128, 256}) {
    for (int64_t offset : {0, 1}) {
      for (bool checked : {false, true}) {
        if (check_append(head_dim, offset, checked)) return 1;
      }
    }
  }
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  return kvarn::test::failures();
}
