#include "cpu/isa.h"
#ifdef KVARN_CPU_X86
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms of avx512fintrin.h
#define KVARN_ISA avx512
#define KVARN_ISA_AVX2 1
#define KVARN_ISA_AVX512 1
#include "cpu/attention_kernels.h"
#endif
