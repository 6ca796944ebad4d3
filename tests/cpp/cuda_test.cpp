// Every CUDA kernel on small shapes: the results are those of the CPU functions up to the order of
// additions. Quick enough for compute-sanitizer. Skipped (exit code 77) where there is no device.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
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

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no CUDA device\n");
    return kSkipped;
  }
  if (check_hadamard_errors()) return 1;
  for (const kvarn::DType dtype :
       {kvarn::DType::kFloat16, kvarn::DType::kBFloat16, kvarn::DType::kFloat32}) {
    for (int dim = 16; dim <= 1024; dim *= 2) {
      for (int64_t offset : {0, 1}) {
        if (check_hadamard(dtype, dim, offset)) return 1;
      }
    }
  }
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  return kvarn::test::failures();
}
