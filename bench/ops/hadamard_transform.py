"""hadamard_transform: reads and writes every element once; the ceiling is a copy."""

from __future__ import annotations

import math

import torch

from bench.harness import input_sets
from bench.problems import Function
from bench.routine import Case, Prepared, relative_error
from kvarn import Format, ops, reference


class _Routine:
    op = "hadamard_transform"
    packed = False

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        if device.type == "cpu":
            shapes = [(1 << 16, 128), (1 << 15, 256), (1 << 17, 64)]
        else:
            shapes = [(1 << 20, 128), (1 << 18, 256), (1 << 21, 64), (1 << 16, 1024)]
        return [
            {"shape": list(s), "dtype": "float16", "in_place": in_place}
            for s in (shapes[:1] if quick else shapes)
            for in_place in ([False] if quick else [False, True])
        ]

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        dtype = getattr(torch, case["dtype"])
        rows, dim = case["shape"]
        num_bytes = 2 * rows * dim * dtype.itemsize
        sets = input_sets(num_bytes, device)
        inputs = [torch.randn(rows, dim, device=device, dtype=dtype) for _ in range(sets)]
        # The transform is its own inverse: in place, any number of calls keeps the range.
        in_place = case["in_place"]
        outputs = [x if in_place else torch.full_like(x, math.nan) for x in inputs]

        def error() -> float:
            want = reference.hadamard_transform(inputs[0].double())
            ops.hadamard_transform(inputs[0], out=outputs[0])
            return relative_error(outputs[0], want)

        def peer_error(result: torch.Tensor) -> float:
            ops.hadamard_transform(inputs[0], out=outputs[0])
            return relative_error(result, outputs[0])

        return Prepared(
            calls=[
                lambda x=x, y=y: ops.hadamard_transform(x, out=y)
                for x, y in zip(inputs, outputs, strict=True)
            ],
            error=error,
            max_error=2e-3 if dtype is torch.bfloat16 else 4e-4,
            bytes=num_bytes,
            ceiling="copy",
            problem=None
            if in_place
            else Function(reference.hadamard_transform, [(x,) for x in inputs]),
            peer_error=peer_error,
        )


ROUTINE = _Routine()
