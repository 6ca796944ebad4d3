// The CPU kernels of everything but attention on every instruction set of this machine: codes lie
// where layout.h says, and all instruction sets give the same results, up to the order of
// additions.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "kvarn/ops.h"

namespace {

#define KVARN_ITEM(n) n,
constexpr int kBits[] = {KVARN_FOR_EACH_BITS(KVARN_ITEM)};
constexpr int kGroups[] = {KVARN_FOR_EACH_GROUP(KVARN_ITEM)};
constexpr int kHeadDims[] = {KVARN_FOR_EACH_HEAD_DIM(KVARN_ITEM)};
#undef KVARN_ITEM

using kvarn::Format;
namespace cpu = kvarn::cpu;

/// fn(name) with every instruction set chosen that there is; then the widest again.
template <class Fn>
int for_each_isa(Fn&& fn) {
  const std::string widest = cpu::isa();
  int failures = 0;
  for (const char* name : {"generic", "avx2", "avx512"}) {
    if (cpu::set_isa(name)) failures += fn(name);
  }
  CHECK(cpu::set_isa(widest.c_str()));
  return failures;
}

std::vector<float> gaussian(int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& value : x) value = normal(random);
  return x;
}

double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(error / norm);
}

/// A record in canonical order.
struct Canonical {
  std::vector<uint8_t> key_codes, value_codes;
  std::vector<uint16_t> scales[6];

  explicit Canonical(const Format& f) {
    const auto size = static_cast<size_t>(f.group) * f.head_dim;
    key_codes.resize(size);
    value_codes.resize(size);
    for (int i = 0; i < 6; ++i) {
      scales[i].resize(static_cast<size_t>(i < 2 || i == 5 ? f.head_dim : f.group));
    }
  }
  bool operator==(const Canonical& other) const {
    return key_codes == other.key_codes && value_codes == other.value_codes &&
           std::equal(scales, scales + 6, other.scales);
  }
};

kvarn::CanonicalParams params(const Format& f, Canonical& c, uint8_t* record) {
  kvarn::CanonicalParams p;
  p.format = f;
  p.records = record;
  p.key_codes = c.key_codes.data();
  p.key_channel_scale = c.scales[0].data();
  p.key_zero_point = c.scales[1].data();
  p.key_token_scale = c.scales[2].data();
  p.value_codes = c.value_codes.data();
  p.value_token_scale = c.scales[3].data();
  p.value_zero_point = c.scales[4].data();
  p.value_channel_scale = c.scales[5].data();
  p.tiles = 1;
  p.heads = 1;
  return p;
}

/// The code of `bits` bits at `position`, bit by bit.
int code_at(const uint8_t* codes, const kvarn::FragmentPosition& position, int bits) {
  const kvarn::FieldPosition field =
      kvarn::field_position(kvarn::kFragmentRegisters * position.fragment + position.reg, bits);
  int code = 0;
  for (int k = 0; k < bits; ++k) {
    const bool spread = bits == 3 && field.shift == 15;
    const int bit = field.shift + (spread ? 0 : k) + 16 * position.hi;
    const int byte = kvarn::word_offset(field.word + (spread ? k : 0), position.lane) + bit / 8;
    code |= (codes[byte] >> bit % 8 & 1) << k;
  }
  return code;
}

int check_layout(const Format& f) {
  std::mt19937 random(static_cast<unsigned>(f.key_bits * 1000 + f.value_bits));
  const kvarn::RecordLayout at = kvarn::record_layout(f);
  Canonical canonical(f);
  for (uint8_t& q : canonical.key_codes) q = static_cast<uint8_t>(random() % (1u << f.key_bits));
  for (uint8_t& q : canonical.value_codes) {
    q = static_cast<uint8_t>(random() % (1u << f.value_bits));
  }
  for (auto& field : canonical.scales) {
    for (uint16_t& scale : field) scale = static_cast<uint16_t>(random());
  }
  // At an odd address, between bytes that must stay.
  std::vector<uint8_t> memory(static_cast<size_t>(at.bytes) + 32, 0xA5);
  uint8_t* const record = memory.data() + 17;
  CHECK(cpu::pack_records(params(f, canonical, record)).ok());
  CHECK(std::all_of(memory.begin(), memory.begin() + 17, [](uint8_t b) { return b == 0xA5; }));
  CHECK(std::all_of(memory.end() - 15, memory.end(), [](uint8_t b) { return b == 0xA5; }));

  for (int g = 0; g < f.group; ++g) {
    for (int d = 0; d < f.head_dim; ++d) {
      CHECK(code_at(record + at.key_codes, kvarn::key_position(g, d, f.head_dim), f.key_bits) ==
            canonical.key_codes[static_cast<size_t>(d) * f.group + g]);
      CHECK(
          code_at(record + at.value_codes, kvarn::value_position(g, d, f.head_dim), f.value_bits) ==
          canonical.value_codes[static_cast<size_t>(g) * f.head_dim + d]);
    }
  }
  const int offsets[] = {at.key_channel_scale, at.key_zero_point,   at.key_token_scale,
                         at.value_token_scale, at.value_zero_point, at.value_channel_scale};
  for (int i = 0; i < 6; ++i) {
    CHECK(std::memcmp(record + offsets[i], canonical.scales[i].data(),
                      2 * canonical.scales[i].size()) == 0);
  }
  Canonical back(f);
  CHECK(cpu::unpack_records(params(f, back, record)).ok());
  CHECK(back == canonical);
  return 0;
}

int check_layouts() {
  for (int bits : kBits) {
    for (int group : kGroups) {
      for (int head_dim : kHeadDims) {
        // K and V do not know of each other, so these are all cases of either.
        const int other = kBits[(std::find(kBits, kBits + 4, bits) - kBits + 1) % 4];
        if (check_layout({bits, other, group, head_dim})) return 1;
      }
    }
  }
  return 0;
}

int check_hadamard() {
  for (int dim = 1; dim <= 4096; dim *= 2) {
    std::vector<float> first;
    const int failures = for_each_isa([&](const char*) {
      std::vector<float> x = gaussian(3 * dim, 1), out(x.size());
      kvarn::HadamardParams p;
      p.x = x.data();
      p.out = out.data();
      p.dtype = kvarn::DType::kFloat32;
      p.rows[2] = 3;
      p.x_stride[2] = p.out_stride[2] = dim;
      p.dim = dim;
      p.scale = 1 / std::sqrt(static_cast<float>(dim));
      CHECK(cpu::hadamard_transform(p).ok());
      if (first.empty()) first = out;
      CHECK(relative_error(out, first) < 1e-6);
      p.x = out.data();
      CHECK(cpu::hadamard_transform(p).ok());
      CHECK(relative_error(out, x) < 1e-6);
      return 0;
    });
    if (failures) return 1;
  }
  return 0;
}

/// A transform of length 1 with scale 1 reads and writes every 16-bit number: as it was.
int check_conversions(kvarn::DType dtype, int exponent_bits) {
  return for_each_isa([&](const char*) {
    std::vector<uint16_t> x(1 << 16), out(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint16_t>(i);
    kvarn::HadamardParams p;
    p.x = x.data();
    p.out = out.data();
    p.dtype = dtype;
    p.dim = 1;
    p.rows[2] = static_cast<int64_t>(x.size());
    p.x_stride[2] = p.out_stride[2] = 1;
    CHECK(cpu::hadamard_transform(p).ok());
    const int infinity = ((1 << exponent_bits) - 1) << (15 - exponent_bits);
    for (size_t i = 0; i < x.size(); ++i) {
      const bool is_nan = (x[i] & 0x7fff) > infinity;
      CHECK(is_nan ? (out[i] & 0x7fff) > infinity : out[i] == x[i]);
    }
    return 0;
  });
}

int check_normalize() {
  constexpr int kRows = 37, kCols = 70;
  std::vector<float> first;
  return for_each_isa([&](const char*) {
    const std::vector<float> x = gaussian(kRows * kCols, 3);
    std::vector<float> balanced(x.size()), row(kRows), col(kCols);
    kvarn::NormalizeParams p;
    p.x = x.data();
    p.x_stride[1] = kCols;
    p.balanced = balanced.data();
    p.row_scale = row.data();
    p.col_scale = col.data();
    p.tiles = 1;
    p.rows = kRows;
    p.cols = kCols;
    CHECK(cpu::variance_normalize(p).ok());
    if (first.empty()) first = balanced;
    CHECK(relative_error(balanced, first) < 1e-4);
    return 0;
  });
}

int check_bits() {
  for (int bits = 1; bits <= 8; ++bits) {
    std::mt19937 random(static_cast<unsigned>(bits));
    std::vector<uint8_t> codes(1003), first;
    for (uint8_t& q : codes) q = static_cast<uint8_t>(random() % (1u << bits));
    const int failures = for_each_isa([&](const char*) {
      std::vector<uint8_t> packed((codes.size() * static_cast<size_t>(bits) + 7) / 8);
      std::vector<uint8_t> back(codes.size());
      kvarn::PackParams p;
      p.codes = codes.data();
      p.packed = packed.data();
      p.rows = 1;
      p.count = static_cast<int64_t>(codes.size());
      p.bits = bits;
      CHECK(cpu::pack_bits(p).ok());
      if (first.empty()) first = packed;
      CHECK(packed == first);
      p.codes = back.data();
      CHECK(cpu::unpack_bits(p).ok());
      CHECK(back == codes);
      return 0;
    });
    if (failures) return 1;
  }
  return 0;
}

/// Records and what they hold of `tiles` Gaussian tiles, by the chosen instruction set.
struct Encoded {
  std::vector<uint8_t> records;
  std::vector<float> key, value;

  Encoded(const Format& f, kvarn::Fit fit, int iterations, const kvarn::Executor& executor) {
    constexpr int64_t kTiles = 3;
    constexpr int kHeads = 2;
    const int64_t n = kTiles * f.group * kHeads * f.head_dim;
    const std::vector<float> in = gaussian(2 * n, 4);
    const int64_t bytes = kvarn::record_layout(f).bytes;
    records.resize(static_cast<size_t>(kTiles * kHeads * bytes));
    key.resize(static_cast<size_t>(n));
    value.resize(static_cast<size_t>(n));
    kvarn::QuantizeParams p;
    p.format = f;
    p.key = in.data();
    p.value = in.data() + n;
    p.dtype = kvarn::DType::kFloat32;
    p.tiles = kTiles;
    p.heads = kHeads;
    p.records = records.data();
    p.record_stride[0] = kHeads * bytes;
    p.record_stride[1] = bytes;
    p.fit = fit;
    p.iterations = iterations;
    kvarn::DequantizeParams q;
    q.format = f;
    q.records = records.data();
    q.key = key.data();
    q.value = value.data();
    q.dtype = kvarn::DType::kFloat32;
    q.tiles = kTiles;
    q.heads = kHeads;
    const int64_t stride[3] = {int64_t{f.group} * kHeads * f.head_dim, int64_t{kHeads} * f.head_dim,
                               f.head_dim};
    std::copy(stride, stride + 3, p.key_stride);
    std::copy(stride, stride + 3, p.value_stride);
    std::copy(stride, stride + 3, q.key_stride);
    std::copy(stride, stride + 3, q.value_stride);
    std::copy(p.record_stride, p.record_stride + 2, q.record_stride);
    ok = cpu::quantize_tiles(p, executor).ok() && cpu::dequantize_tiles(q, executor).ok();
  }
  bool ok;
};

int check_encoder() {
  struct Case {
    Format format;
    kvarn::Fit fit;
    int iterations;
  };
  const Case cases[] = {{{4, 2, 128, 128}, kvarn::Fit::kUnbiased, 4},
                        {{4, 2, 128, 128}, kvarn::Fit::kUnbiased, 0},
                        {{3, 4, 64, 256}, kvarn::Fit::kMinMax, 8},
                        {{8, 3, 128, 64}, kvarn::Fit::kUnbiased, 4}};
  for (const Case& c : cases) {
    std::vector<Encoded> first;
    const int failures = for_each_isa([&](const char*) {
      const Encoded got(c.format, c.fit, c.iterations, cpu::default_executor());
      CHECK(got.ok);
      if (first.empty()) first.push_back(got);
      CHECK(relative_error(got.key, first[0].key) < 0.02);
      CHECK(relative_error(got.value, first[0].value) < 0.02);
      // Threads change nothing.
      CHECK(Encoded(c.format, c.fit, c.iterations, kvarn::Executor{}).records == got.records);
      return 0;
    });
    if (failures) return 1;
  }
  return 0;
}

}  // namespace

int main() {
  if (for_each_isa([](const char*) { return check_layouts(); })) return 1;
  if (check_hadamard() || check_normalize() || check_bits() || check_encoder()) return 1;
  if (check_conversions(kvarn::DType::kFloat16, 5)) return 1;
  if (check_conversions(kvarn::DType::kBFloat16, 8)) return 1;
  return kvarn::test::failures();
}
