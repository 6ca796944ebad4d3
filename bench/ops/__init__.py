"""The routines, by op name."""

from __future__ import annotations

from bench.ops import (
    append_kv,
    decode_attention,
    dequantize_tiles,
    hadamard_transform,
    pack_bits,
    quantize_tiles,
    seal_blocks,
    variance_normalize,
)
from bench.routine import Routine

ROUTINES: dict[str, Routine] = {
    routine.op: routine
    for routine in (
        hadamard_transform.ROUTINE,
        variance_normalize.ROUTINE,
        pack_bits.PACK,
        pack_bits.UNPACK,
        quantize_tiles.ROUTINE,
        dequantize_tiles.ROUTINE,
        append_kv.ROUTINE,
        seal_blocks.ROUTINE,
        decode_attention.ROUTINE,
    )
}
