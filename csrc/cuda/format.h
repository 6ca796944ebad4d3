// What all functions of tiles demand of their format and number of tiles.
#pragma once

#include <string>

#include "kvarn/ops.h"

namespace kvarn::cuda {

inline constexpr int kMaxHeadDim = 256;
inline constexpr int64_t kMaxBlocks = 2147483647;  ///< of a grid

inline Status check_format(const Format& f) {
  if (!valid(f)) {
    return Status::invalid(
        "format must be bits 2, 3, 4 or 8, group 64 or 128, head_dim 64, 128, 256 or 512, got k" +
        std::to_string(f.key_bits) + "v" + std::to_string(f.value_bits) + "_g" +
        std::to_string(f.group) + " head_dim " + std::to_string(f.head_dim));
  }
  if (f.head_dim > kMaxHeadDim) {
    return Status::unsupported("format must be of a head_dim of at most " +
                               std::to_string(kMaxHeadDim) + " on CUDA, got " +
                               std::to_string(f.head_dim));
  }
  return {};
}

inline Status check_grid(const char* argument, int64_t blocks) {
  if (blocks <= kMaxBlocks) return {};
  return Status::unsupported(std::string(argument) + " must be smaller on CUDA: at most " +
                             std::to_string(kMaxBlocks) + " thread blocks, got " +
                             std::to_string(blocks));
}

}  // namespace kvarn::cuda
