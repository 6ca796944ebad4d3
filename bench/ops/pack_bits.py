"""pack_bits and unpack_bits: one byte a code to bits and back; the ceiling is a copy."""

from __future__ import annotations

import torch

from bench.harness import input_sets
from bench.problems import Function
from bench.routine import Case, Prepared
from kvarn import Format, ops, reference

COUNT = 128


class _Routine:
    packed = False

    def __init__(self, op: str) -> None:
        self.op = op

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        rows = 1 << 14 if device.type == "cpu" else 1 << 20
        return [{"shape": [rows, COUNT], "bits": bits} for bits in ([2] if quick else [2, 3, 4, 8])]

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        (rows, count), bits = case["shape"], case["bits"]
        num_bytes = rows * count + rows * count * bits // 8
        sets = [
            (
                torch.randint(0, 2**bits, (rows, count), dtype=torch.uint8, device=device),
                torch.randint(0, 256, (rows, count * bits // 8), dtype=torch.uint8, device=device),
            )
            for _ in range(input_sets(num_bytes, device))
        ]
        pack = self.op == "pack_bits"
        calls = [
            (lambda c=c, p=p: ops.pack_bits(c, bits, out=p))
            if pack
            else (lambda c=c, p=p: ops.unpack_bits(p, bits, count, out=c))
            for c, p in sets
        ]

        def error() -> float:
            calls[0]()
            codes, packed = (t[-1000:].cpu() for t in sets[0])
            if pack:
                wrong = packed != reference.pack_bits(codes, bits)
            else:
                wrong = codes != reference.unpack_bits(packed, bits, count)
            return float(wrong.float().mean())

        def peer_error(result: torch.Tensor) -> float:
            return float((result != calls[0]()).float().mean())

        if pack:
            problem = Function(lambda c: reference.pack_bits(c, bits), [(c,) for c, _ in sets])
        else:
            packed = [(p,) for _, p in sets]
            problem = Function(lambda p: reference.unpack_bits(p, bits, count), packed)
        return Prepared(
            calls=calls, error=error, max_error=0.0, bytes=num_bytes, ceiling="copy",
            problem=problem, peer_error=peer_error,
        )  # fmt: skip


PACK = _Routine("pack_bits")
UNPACK = _Routine("unpack_bits")
