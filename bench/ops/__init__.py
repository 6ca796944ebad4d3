"""The routines, by op name."""

from __future__ import annotations

from bench.ops import (
    decode_attention,
    dequantize_tiles,
    hadamard_transform,
    quantize_tiles,
)
from bench.routine import Routine

ROUTINES: dict[str, Routine] = {
    routine.op: routine
    for routine in (
        hadamard_transform.ROUTINE,
        quantize_tiles.ROUTINE,
        dequantize_tiles.ROUTINE,
        decode_attention.ROUTINE,
    )
}
