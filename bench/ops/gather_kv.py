"""gather_kv: packed pages to contiguous 16-bit K and V; the ceiling is a copy of those bytes."""

from __future__ import annotations

import math

import torch

from bench.harness import Call, input_sets
from bench.problems import Packed
from bench.routine import Case, Prepared, relative_error
from kvarn import Format, ops

KV_HEADS = 8


class _Routine:
    op = "gather_kv"
    packed = True

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        shapes = [(1, 4096)] if device.type == "cpu" else [(1, 8192), (8, 16384), (64, 2048)]
        return [
            {"batch": b, "context": n, "head_dim": 128}
            for b, n in (shapes[:1] if quick else shapes)
        ]

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        assert fmt is not None
        batch, context = case["batch"], case["context"]
        blocks = batch * -(-context // fmt.group)
        shape = (batch * context, KV_HEADS, fmt.head_dim)
        num_bytes = blocks * KV_HEADS * fmt.record_bytes + 2 * 2 * math.prod(shape)
        packed = Packed(fmt, [context] * batch, KV_HEADS, input_sets(num_bytes, device), device)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * context
        outputs = [
            tuple(torch.full(shape, math.nan, dtype=torch.float16, device=device) for _ in range(2))
            for _ in packed.tables
        ]

        def gather(table: torch.Tensor, out: tuple[torch.Tensor, ...]) -> Call:
            return lambda: ops.gather_kv(
                packed.cache, table, packed.seq_lens, fmt, cu_seq_lens=starts, out=out
            )

        calls = [gather(*pair) for pair in zip(packed.tables, outputs, strict=True)]

        def error() -> float:
            calls[0]()
            exact = packed.contiguous(torch.float32)
            return max(
                relative_error(got, want.view(shape))
                for got, want in zip(outputs[0], exact, strict=True)
            )

        return Prepared(
            calls=calls, error=error, max_error=5e-4, bytes=num_bytes, ceiling="copy",
            bytes_16bit=packed.bytes_16bit,
        )  # fmt: skip


ROUTINE = _Routine()
