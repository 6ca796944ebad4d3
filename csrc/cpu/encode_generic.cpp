#define KVARN_ISA generic
#include "cpu/encode_kernels.h"
