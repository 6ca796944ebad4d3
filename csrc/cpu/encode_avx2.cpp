#include "cpu/isa.h"
#ifdef KVARN_CPU_X86
#pragma GCC target("avx2,fma,f16c")
#define KVARN_ISA avx2
#define KVARN_ISA_AVX2 1
#include "cpu/encode_kernels.h"
#endif
