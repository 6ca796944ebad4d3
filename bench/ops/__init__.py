"""The routines, by op name: every op of kvarn.ops that does work on a device."""

from __future__ import annotations

from bench.ops import (
    append_kv,
    decode_attention,
    dequantize_tiles,
    gather_kv,
    hadamard_transform,
    merge_states,
    pack_bits,
    quantize_tiles,
    records,
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
        records.PACK,
        records.UNPACK,
        quantize_tiles.ROUTINE,
        dequantize_tiles.ROUTINE,
        append_kv.ROUTINE,
        seal_blocks.ROUTINE,
        gather_kv.ROUTINE,
        decode_attention.ROUTINE,
        merge_states.ROUTINE,
    )
}
