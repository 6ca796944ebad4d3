// A row of codes <-> a row of packed bits, low bits first.
#pragma once

#include "cpu/numeric.h"

namespace kvarn::cpu::KVARN_ISA {
namespace {

/// Eight codes, one a byte -> 8 * bits bits: neighbours move together, then pairs, then fours.
inline uint64_t pack8(uint64_t x, int bits) {
  x = (x & 0x00ff00ff00ff00ffull) | (x & 0xff00ff00ff00ff00ull) >> (8 - bits);
  x = (x & 0x0000ffff0000ffffull) | (x & 0xffff0000ffff0000ull) >> (16 - 2 * bits);
  return (x & 0x00000000ffffffffull) | (x & 0xffffffff00000000ull) >> (32 - 4 * bits);
}

inline uint64_t unpack8(uint64_t x, int bits) {
  const uint64_t fours = (1ull << 4 * bits) - 1;
  const uint64_t pairs = ((1ull << 2 * bits) - 1) * 0x0000000100000001ull;
  const uint64_t ones = ((1ull << bits) - 1) * 0x0001000100010001ull;
  x = (x & fours) | (x << (32 - 4 * bits) & fours << 32);
  x = (x & pairs) | (x << (16 - 2 * bits) & pairs << 16);
  return (x & ones) | (x << (8 - bits) & ones << 8);
}

// Groups of 8 codes take `bits` bytes. Where 8 bytes lie within the row they are moved at once: the
// next group overwrites what is too much.
inline void pack(const uint8_t* codes, int64_t count, int bits, uint8_t* packed) {
  const int64_t bytes = (count * bits + 7) / 8;
  int64_t i = 0;
  int64_t at = 0;
  for (; i + 8 <= count && at + 8 <= bytes; i += 8, at += bits) {
    uint64_t x;
    __builtin_memcpy(&x, codes + i, 8);
    x = pack8(x, bits);
    __builtin_memcpy(packed + at, &x, 8);
  }
  for (; i < count; i += 8, at += bits) {
    uint64_t x = 0;
    for (int64_t j = i; j < count && j < i + 8; ++j) x |= uint64_t{codes[j]} << 8 * (j - i);
    x = pack8(x, bits);
    for (int64_t j = at; j < bytes && j < at + bits; ++j, x >>= 8) {
      packed[j] = static_cast<uint8_t>(x);
    }
  }
}

inline void unpack(const uint8_t* packed, int64_t count, int bits, uint8_t* codes) {
  const int64_t bytes = (count * bits + 7) / 8;
  int64_t i = 0;
  int64_t at = 0;
  for (; i + 8 <= count && at + 8 <= bytes; i += 8, at += bits) {
    uint64_t x;
    __builtin_memcpy(&x, packed + at, 8);
    x = unpack8(x, bits);
    __builtin_memcpy(codes + i, &x, 8);
  }
  for (; i < count; i += 8, at += bits) {
    uint64_t x = 0;
    for (int64_t j = at; j < bytes && j < at + bits; ++j) x |= uint64_t{packed[j]} << 8 * (j - at);
    x = unpack8(x, bits);
    for (int64_t j = i; j < count && j < i + 8; ++j, x >>= 8) codes[j] = static_cast<uint8_t>(x);
  }
}

}  // namespace
}  // namespace kvarn::cpu::KVARN_ISA
