#define KVARN_ISA generic
#include "cpu/attention_kernels.h"
