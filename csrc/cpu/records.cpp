// unpack_records and pack_records: fragment order <-> canonical order.
#include <cstring>

#include "cpu/codes_check.h"
#include "cpu/encode.h"
#include "cpu/parallel.h"
#include "cpu/tiles_check.h"

namespace kvarn::cpu {
namespace {

/// The canonical buffers of record number `i`.
struct Canonical {
  uint8_t* key_codes;
  uint8_t* value_codes;
  struct Scales {
    uint16_t* canonical;
    int offset;  ///< in the record, bytes
    int count;
  } scales[6];

  Canonical(const CanonicalParams& p, int64_t i) {
    const int64_t d = p.format.head_dim;
    const int64_t g = p.format.group;
    const RecordLayout at = record_layout(p.format);
    const int dim = p.format.head_dim;
    const int group = p.format.group;
    key_codes = p.key_codes + i * g * d;
    value_codes = p.value_codes + i * g * d;
    scales[0] = {p.key_channel_scale + i * d, at.key_channel_scale, dim};
    scales[1] = {p.key_zero_point + i * d, at.key_zero_point, dim};
    scales[2] = {p.key_token_scale + i * g, at.key_token_scale, group};
    scales[3] = {p.value_token_scale + i * g, at.value_token_scale, group};
    scales[4] = {p.value_zero_point + i * g, at.value_zero_point, group};
    scales[5] = {p.value_channel_scale + i * d, at.value_channel_scale, dim};
  }
};

uint8_t* record_of(const CanonicalParams& p, int64_t i) {
  return p.records + i / p.heads * p.record_stride[0] + i % p.heads * p.record_stride[1];
}

}  // namespace

Status unpack_records(const CanonicalParams& p, const Executor& executor) {
  if (Status status = check_format(p.format); !status.ok()) return status;
  const EncodeKernels& kernels = encode_kernels();
  parallel_for(executor, p.tiles * p.heads, [&](int64_t i) {
    const uint8_t* const record = record_of(p, i);
    const Canonical canonical(p, i);
    kernels.unpack_codes(key_part(p.format, record), canonical.key_codes);
    kernels.unpack_codes(value_part(p.format, record), canonical.value_codes);
    for (const Canonical::Scales& s : canonical.scales) {
      std::memcpy(s.canonical, record + s.offset, size_t{2} * s.count);
    }
  });
  return {};
}

Status pack_records(const CanonicalParams& p, const Executor& executor) {
  if (Status status = check_format(p.format); !status.ok()) return status;
  const int64_t records = p.tiles * p.heads;
  const int64_t codes = int64_t{p.format.group} * p.format.head_dim;
  CodesCheck key_codes("key_codes", p.format.key_bits);
  CodesCheck value_codes("value_codes", p.format.value_bits);
  parallel_for(executor, records, [&](int64_t i) {
    key_codes.add(p.key_codes + i * codes, codes);
    value_codes.add(p.value_codes + i * codes, codes);
  });
  if (Status status = key_codes.status(); !status.ok()) return status;
  if (Status status = value_codes.status(); !status.ok()) return status;
  const EncodeKernels& kernels = encode_kernels();
  parallel_for(executor, records, [&](int64_t i) {
    uint8_t* const record = record_of(p, i);
    const Canonical canonical(p, i);
    kernels.pack_codes(canonical.key_codes, key_part(p.format, record));
    kernels.pack_codes(canonical.value_codes, value_part(p.format, record));
    for (const Canonical::Scales& s : canonical.scales) {
      std::memcpy(record + s.offset, s.canonical, size_t{2} * s.count);
    }
  });
  return {};
}

}  // namespace kvarn::cpu
