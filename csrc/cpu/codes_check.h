// Are all codes of an argument below 2^bits? Larger ones would spill into their neighbours.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "kvarn/status.h"

namespace kvarn::cpu {

class CodesCheck {
 public:
  CodesCheck(const char* argument, int bits) : argument_(argument), bits_(bits) {}

  /// May run in several threads at once.
  void add(const uint8_t* codes, int64_t count) {
    uint8_t largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, codes[i]);
    uint8_t known = largest_.load(std::memory_order_relaxed);
    while (known < largest && !largest_.compare_exchange_weak(known, largest)) {
    }
  }

  Status status() const {
    const int largest = largest_.load();
    const int limit = 1 << bits_;
    if (largest < limit) return {};
    return Status::invalid(std::string(argument_) + " must be less than " + std::to_string(limit) +
                           ", got " + std::to_string(largest));
  }

 private:
  const char* argument_;
  int bits_;
  std::atomic<uint8_t> largest_{0};
};

}  // namespace kvarn::cpu
