"""merge_states: reads two partial attentions, writes one; the ceiling is a copy of those bytes."""

from __future__ import annotations

import math
from typing import Any

import torch

from bench.harness import input_sets
from bench.problems import Function
from bench.routine import Case, Prepared, relative_error
from kvarn import Format, ops, reference

HEADS = 32


class _Routine:
    op = "merge_states"
    packed = False

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        tokens = [256, 2048] if device.type == "cpu" else [64, 1024, 16384]
        return [{"tokens": n, "head_dim": 128} for n in (tokens[:1] if quick else tokens)]

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        shape = (case["tokens"], HEADS, case["head_dim"])
        num_bytes = 3 * math.prod(shape[:2]) * (2 * case["head_dim"] + 4)

        def part() -> tuple[torch.Tensor, torch.Tensor]:
            lse = torch.randn(shape[:2], device=device)
            return torch.randn(shape, device=device).to(torch.float16), lse

        inputs = [(*part(), *part()) for _ in range(input_sets(num_bytes, device))]
        outputs = [tuple(torch.full_like(x, math.nan) for x in four[:2]) for four in inputs]
        calls = [
            lambda four=four, out=out: ops.merge_states(*four, out=out)
            for four, out in zip(inputs, outputs, strict=True)
        ]

        def error() -> float:
            calls[0]()
            want = reference.merge_states(*(x.double().cpu() for x in inputs[0]))
            return max(relative_error(g.cpu(), w) for g, w in zip(outputs[0], want, strict=True))

        def peer_error(result: Any) -> float:
            calls[0]()
            return relative_error(result[0], outputs[0][0])

        return Prepared(
            calls=calls,
            error=error,
            max_error=5e-4,
            bytes=num_bytes,
            ceiling="copy",
            problem=Function(reference.merge_states, inputs),
            peer_error=peer_error,
        )


ROUTINE = _Routine()
