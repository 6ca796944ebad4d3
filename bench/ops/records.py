"""unpack_records and pack_records: records to codes of one byte and back; the ceiling is a copy."""

from __future__ import annotations

import torch

from bench.harness import input_sets
from bench.problems import Packed
from bench.routine import Case, Prepared
from kvarn import Format, ops, reference

HEADS = 8


class _Routine:
    packed = True

    def __init__(self, op: str) -> None:
        self.op = op

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        return [{"records": 64 if device.type == "cpu" or quick else 4096, "head_dim": 128}]

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        assert fmt is not None
        codes = 2 * fmt.group * fmt.head_dim
        scales = fmt.record_bytes - codes * (fmt.key_bits + fmt.value_bits) // 16
        num_bytes = case["records"] * (fmt.record_bytes + codes + scales)
        tokens = case["records"] // HEADS * fmt.group
        packed = Packed(fmt, [tokens], HEADS, input_sets(num_bytes, device), device)
        records = list(packed.cache.chunk(packed.sets))
        canonical = [ops.unpack_records(r, fmt) for r in records]
        outputs = [torch.full_like(r, 0xFF) for r in records]
        if self.op == "unpack_records":
            calls = [lambda r=r: ops.unpack_records(r, fmt) for r in records]
        else:
            calls = [
                lambda c=c, out=out: ops.pack_records(c, fmt, out=out)
                for c, out in zip(canonical, outputs, strict=True)
            ]

        def error() -> float:
            """Share of elements that differ, of the last tiles."""
            calls[0]()
            last = records[0][-8:].cpu()
            if self.op == "pack_records":
                return float((outputs[0][-8:].cpu() != last).float().mean())
            got, want = ops.unpack_records(records[0], fmt), reference.unpack_records(last, fmt)
            return max(
                float((g[-8:].cpu() != w).float().mean()) for g, w in zip(got, want, strict=True)
            )

        return Prepared(calls=calls, error=error, max_error=0.0, bytes=num_bytes, ceiling="copy")


UNPACK = _Routine("unpack_records")
PACK = _Routine("pack_records")
