// The encode family: the table of encode.h for one instruction set.
#pragma once

#include "cpu/encode_bits.h"
#include "cpu/encode_tile.h"

namespace kvarn::cpu::KVARN_ISA {

extern const EncodeKernels kEncodeKernels;
const EncodeKernels kEncodeKernels = {
    load_row,   hadamard,     normalize, pack,       unpack,
    pack_codes, unpack_codes, quantize,  dequantize, sizeof(EncodeScratch),
};

}  // namespace kvarn::cpu::KVARN_ISA
