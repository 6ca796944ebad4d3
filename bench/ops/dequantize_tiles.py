"""dequantize_tiles: reads records, writes 16-bit K and V; the ceiling is a copy of those bytes."""

from __future__ import annotations

import math

import torch

from bench.harness import input_sets
from bench.problems import Function
from bench.routine import Case, Prepared, relative_error
from kvarn import Format, ops, reference

HEADS = 8


class _Routine:
    op = "dequantize_tiles"
    packed = True

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        records = [256] if device.type == "cpu" else [64, 1024, 4096, 16384]
        return [{"records": n, "head_dim": 128} for n in (records[:1] if quick else records)]

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        assert fmt is not None
        tiles = case["records"] // HEADS
        shape = (tiles, fmt.group, HEADS, fmt.head_dim)
        num_bytes = case["records"] * (fmt.record_bytes + 4 * fmt.group * fmt.head_dim)
        key, value = (torch.randn(shape, device=device).to(torch.float16) for _ in range(2))
        records = ops.quantize_tiles(key, value, fmt)
        sets = [
            (records.clone(), tuple(torch.full_like(key, math.nan) for _ in range(2)))
            for _ in range(input_sets(num_bytes, device))
        ]

        def error() -> float:
            ops.dequantize_tiles(sets[0][0], fmt, out=sets[0][1])
            got = [x[-1:].cpu() for x in sets[0][1]]
            want = reference.dequantize_tiles(records[-1:].cpu(), fmt, dtype=torch.float32)
            return max(relative_error(g, w) for g, w in zip(got, want, strict=True))

        def peer_error(result: tuple[torch.Tensor, torch.Tensor]) -> float:
            ours = ops.dequantize_tiles(sets[0][0], fmt)
            return max(relative_error(g, w) for g, w in zip(result, ours, strict=True))

        return Prepared(
            calls=[lambda r=r, out=out: ops.dequantize_tiles(r, fmt, out=out) for r, out in sets],
            error=error,
            max_error=5e-4,
            bytes=num_bytes,
            ceiling="copy",
            bytes_16bit=case["records"] * 4 * fmt.group * fmt.head_dim,
            problem=Function(lambda r: reference.dequantize_tiles(r, fmt), [(r,) for r, _ in sets]),
            peer_error=peer_error,
        )


ROUTINE = _Routine()
