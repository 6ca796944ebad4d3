"""seal_blocks: full pages of the staging pool to records of the cache, as quantize_tiles packs
them; 256 records are 32 sequences of 8 KV heads whose tiles fill in the same step."""

from __future__ import annotations

import torch

from bench.harness import input_sets
from bench.ops.quantize_tiles import FITS, HEADS
from bench.routine import Case, Prepared, records_error
from kvarn import Format, ops


class _Routine:
    op = "seal_blocks"
    packed = True

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        records = [64] if device.type == "cpu" else [8, 256, 2048]
        return [
            {"records": n, "head_dim": 128, "fit": fit, "iterations": iterations}
            for n in (records[:1] if quick else records)
            for fit, iterations in (FITS[:1] if quick else FITS[:2])
        ]

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        assert fmt is not None
        tiles = max(case["records"] // HEADS, 1)
        num_bytes = tiles * HEADS * (4 * fmt.group * fmt.head_dim + fmt.record_bytes)
        sets = input_sets(num_bytes, device)
        shape = (sets * tiles, 2, HEADS, fmt.group, fmt.head_dim)
        staging = torch.empty(shape, dtype=torch.float16, device=device).normal_()
        cache = torch.full(
            fmt.cache_shape(sets * tiles, HEADS), 0xFF, dtype=torch.uint8, device=device
        )
        slots, blocks = (
            torch.randperm(sets * tiles, device=device).to(torch.int32).view(sets, tiles)
            for _ in range(2)
        )
        how = {"fit": case["fit"], "iterations": case["iterations"]}
        calls = [
            lambda s=s, b=b: ops.seal_blocks(staging, s, b, cache, fmt, **how)
            for s, b in zip(slots, blocks, strict=True)
        ]

        def error() -> float:
            calls[0]()
            return max(
                records_error(cache[block], *staging[slot].transpose(1, 2), fmt, **how)
                for slot, block in ((slots[0][i], blocks[0][i]) for i in (0, tiles - 1))
            )

        return Prepared(calls=calls, error=error, max_error=3e-2, bytes=num_bytes, ceiling="copy")


ROUTINE = _Routine()
