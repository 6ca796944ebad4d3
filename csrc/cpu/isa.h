// Which instruction set the CPU kernels run on.
//
// A kernel family keeps its code in one header (encode_kernels.h, attention_kernels.h) inside
// namespace kvarn::cpu::KVARN_ISA, and has one short .cpp per instruction set that includes it
// after the matching `#pragma GCC target`. Each defines a table of function pointers; the entry
// points of ops.h pick the table by current_isa(). Intrinsics stand behind KVARN_ISA_AVX2 and
// KVARN_ISA_AVX512, which the .cpp files define: after the pragma, g++ does not define __AVX2__.
#pragma once

namespace kvarn::cpu {

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)  // Clang lacks the pragma
#define KVARN_CPU_X86 1
#endif

enum class Isa { kGeneric, kAvx2, kAvx512 };

/// The widest one that this machine has, or what set_isa() chose.
Isa current_isa();

}  // namespace kvarn::cpu
