// What all functions of tiles demand of their format.
#pragma once

#include <string>

#include "kvarn/ops.h"

namespace kvarn::cpu {

inline Status check_format(const Format& f) {
  if (valid(f)) return {};
  return Status::invalid(
      "format must be bits 2, 3, 4 or 8, group 64 or 128, head_dim 64, 128, 256 or 512, got k" +
      std::to_string(f.key_bits) + "v" + std::to_string(f.value_bits) + "_g" +
      std::to_string(f.group) + " head_dim " + std::to_string(f.head_dim));
}

inline Status check_iterations(int32_t iterations) {
  if (iterations >= 0) return {};
  return Status::invalid("iterations must be >= 0, got " + std::to_string(iterations));
}

}  // namespace kvarn::cpu
