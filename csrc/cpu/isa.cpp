#include "cpu/isa.h"

#include <atomic>
#include <cstring>

#include "kvarn/ops.h"

namespace kvarn::cpu {
namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512"};

bool has(Isa isa) {
#ifdef KVARN_CPU_X86
  switch (isa) {
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             has(Isa::kAvx2);
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::kGeneric:
      return true;
  }
#endif
  return isa == Isa::kGeneric;
}

Isa widest() {
  if (has(Isa::kAvx512)) return Isa::kAvx512;
  return has(Isa::kAvx2) ? Isa::kAvx2 : Isa::kGeneric;
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{widest()};
  return isa;
}

}  // namespace

Isa current_isa() { return chosen().load(std::memory_order_relaxed); }

const char* isa() { return kNames[static_cast<int>(current_isa())]; }

bool set_isa(const char* name) {
  for (Isa isa : {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512}) {
    if (std::strcmp(name, kNames[static_cast<int>(isa)]) == 0 && has(isa)) {
      chosen().store(isa, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace kvarn::cpu
