"""quantize_tiles: raw K and V to records; bound by arithmetic, so no memory ceiling is shown."""

from __future__ import annotations

import torch

from bench.harness import input_sets
from bench.routine import Case, Prepared, relative_error
from kvarn import Format, ops, reference

HEADS = 8


class _Routine:
    op = "quantize_tiles"

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        records = [64] if device.type == "cpu" else [64, 1024, 4096, 16384]
        fits = [("unbiased", 4), ("unbiased", 0), ("minmax", 8), ("minmax", 16)]
        return [
            {"records": n, "head_dim": 128, "fit": fit, "iterations": iterations}
            for n in (records[:1] if quick else records)
            for fit, iterations in (fits[:1] if quick else fits)
        ]

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        assert fmt is not None
        tiles = max(case["records"] // HEADS, 1)
        shape = (tiles, fmt.group, HEADS, fmt.head_dim)
        num_bytes = 2 * 2 * tiles * fmt.group * HEADS * fmt.head_dim
        inputs = [
            tuple(torch.randn(shape, device=device).to(torch.float16) for _ in range(2))
            for _ in range(input_sets(num_bytes, device))
        ]
        outputs = [
            torch.full((tiles, HEADS, fmt.record_bytes), 0xFF, dtype=torch.uint8, device=device)
            for _ in inputs
        ]
        how = {"fit": case["fit"], "iterations": case["iterations"]}

        def error() -> float:
            key, value = (x[:1] for x in inputs[0])
            got = ops.dequantize_tiles(
                ops.quantize_tiles(key, value, fmt, **how),
                fmt,
                dtype=torch.float32,
                rotated=True,
            )
            want = reference.dequantize_tiles(
                reference.quantize_tiles(key, value, fmt, **how),
                fmt,
                dtype=torch.float32,
                rotated=True,
            )
            return max(relative_error(g, w) for g, w in zip(got, want, strict=True))

        return Prepared(
            calls=[
                lambda kv=kv, out=out: ops.quantize_tiles(*kv, fmt, out=out, **how)
                for kv, out in zip(inputs, outputs, strict=True)
            ],
            error=error,
            # A value near a rounding tie may get the other code; with 2 bits one in 10,000 is 1e-2.
            max_error=3e-2,
            bytes=num_bytes,
            ceiling="none",
        )


ROUTINE = _Routine()
