// pack_bits and unpack_bits: rows, and pieces of long rows, in parallel.
#include <algorithm>
#include <string>

#include "cpu/codes_check.h"
#include "cpu/encode.h"
#include "cpu/parallel.h"

namespace kvarn::cpu {
namespace {

constexpr int64_t kPiece = 1 << 16;  ///< codes; a multiple of 8, so that a piece starts at a byte

Status check(const PackParams& p) {
  if (p.bits < 1 || p.bits > 8) {
    return Status::invalid("bits must be 1 to 8, got " + std::to_string(p.bits));
  }
  return {};
}

/// fn(first code, first byte, count) for every piece of every row.
template <class Fn>
void for_each_piece(const PackParams& p, const Executor& executor, Fn&& fn) {
  const int64_t pieces = (p.count + kPiece - 1) / kPiece;
  parallel_for(executor, p.rows * pieces, [&](int64_t i) {
    const int64_t row = i / pieces;
    const int64_t begin = i % pieces * kPiece;
    fn(p.codes + row * p.codes_stride + begin,
       p.packed + row * p.packed_stride + begin * p.bits / 8, std::min(kPiece, p.count - begin));
  });
}

}  // namespace

Status pack_bits(const PackParams& p, const Executor& executor) {
  if (Status status = check(p); !status.ok()) return status;
  CodesCheck codes("codes", p.bits);
  for_each_piece(p, executor,
                 [&](const uint8_t* in, const uint8_t*, int64_t count) { codes.add(in, count); });
  if (Status status = codes.status(); !status.ok()) return status;
  const EncodeKernels& kernels = encode_kernels();
  for_each_piece(p, executor, [&](const uint8_t* in, uint8_t* out, int64_t count) {
    kernels.pack(in, count, p.bits, out);
  });
  return {};
}

Status unpack_bits(const PackParams& p, const Executor& executor) {
  if (Status status = check(p); !status.ok()) return status;
  const EncodeKernels& kernels = encode_kernels();
  for_each_piece(p, executor, [&](uint8_t* out, const uint8_t* in, int64_t count) {
    kernels.unpack(in, count, p.bits, out);
  });
  return {};
}

}  // namespace kvarn::cpu
