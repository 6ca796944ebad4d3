"""quantize_tiles: raw K and V to records; arithmetic bounds it, a copy is a floor."""

from __future__ import annotations

import torch

from bench.harness import input_sets
from bench.routine import Case, Prepared, records_error
from kvarn import Format, ops

HEADS = 8
#: The defaults first, then what shows the cost of a round.
FITS = [
    ("unbiased", 4), ("minmax", 8),
    ("unbiased", 0), ("unbiased", 2), ("unbiased", 8), ("unbiased", 16),
    ("minmax", 0), ("minmax", 4), ("minmax", 16),
]  # fmt: skip


class _Routine:
    op = "quantize_tiles"
    packed = True

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        if quick:
            return [_case(64, *FITS[0])]
        if device.type == "cpu":
            return [_case(64, *fit) for fit in FITS]
        # The cost of a round shows where the GPU is full.
        return [
            *(_case(n, *fit) for n in (64, 1024, 16384) for fit in FITS[:2]),
            *(_case(4096, *fit) for fit in FITS),
        ]

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        assert fmt is not None
        tiles = max(case["records"] // HEADS, 1)
        shape = (tiles, fmt.group, HEADS, fmt.head_dim)
        num_bytes = tiles * HEADS * (4 * fmt.group * fmt.head_dim + fmt.record_bytes)
        inputs = [
            tuple(torch.randn(shape, device=device).to(torch.float16) for _ in range(2))
            for _ in range(input_sets(num_bytes, device))
        ]
        outputs = [
            torch.full((tiles, HEADS, fmt.record_bytes), 0xFF, dtype=torch.uint8, device=device)
            for _ in inputs
        ]
        how = {"fit": case["fit"], "iterations": case["iterations"]}
        calls = [
            lambda kv=kv, out=out: ops.quantize_tiles(*kv, fmt, out=out, **how)
            for kv, out in zip(inputs, outputs, strict=True)
        ]

        def error() -> float:
            calls[0]()
            key, value = inputs[0]
            # The first and the last tile: what is between them is like them.
            return max(
                records_error(outputs[0][i], key[i], value[i], fmt, **how) for i in (0, tiles - 1)
            )

        return Prepared(
            calls=calls,
            error=error,
            # A value near a rounding tie may get the other code; with 2 bits one in 10,000 is 1e-2.
            max_error=3e-2,
            bytes=num_bytes,
            ceiling="copy",
            bytes_16bit=tiles * HEADS * 4 * fmt.group * fmt.head_dim,
        )


def _case(records: int, fit: str, iterations: int) -> Case:
    return {"records": records, "head_dim": 128, "fit": fit, "iterations": iterations}


ROUTINE = _Routine()
