"""variance_normalize: fp32 tiles in and out; arithmetic bounds it, the copy is a floor."""

from __future__ import annotations

import torch

from bench.harness import input_sets
from bench.problems import Function
from bench.routine import Case, Prepared, relative_error
from kvarn import Format, ops, reference

SIDE = 128


class _Routine:
    op = "variance_normalize"
    packed = False

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        counts = [64] if device.type == "cpu" else [1024, 4096]
        return [
            {"shape": [n, SIDE, SIDE], "iterations": iterations}
            for n in (counts[:1] if quick else counts)
            for iterations in ([8] if quick else [8, 16])
        ]

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        shape, iterations = case["shape"], case["iterations"]
        num_bytes = 2 * 4 * shape[0] * SIDE * (SIDE + 1)
        # Rows and columns of very different size.
        inputs = [
            torch.randn(shape, device=device)
            * torch.randn(shape[0], SIDE, 1, device=device).exp()
            * torch.randn(shape[0], 1, SIDE, device=device).exp()
            for _ in range(input_sets(num_bytes, device))
        ]

        def error() -> float:
            tiles = inputs[0][:4]
            got, rows, cols = ops.variance_normalize(tiles, iterations=iterations)
            product = relative_error(got * rows[..., None] * cols[..., None, :], tiles)
            want, _, _ = reference.variance_normalize(tiles.double().cpu(), iterations=iterations)
            # Rounds that balance equally well differ in their scales.
            return max(product, relative_error(_imbalance(got.cpu()), _imbalance(want)))

        def peer_error(result: tuple[torch.Tensor, ...]) -> float:
            balanced, _, _ = ops.variance_normalize(inputs[0], iterations=iterations)
            return relative_error(_imbalance(result[0]), _imbalance(balanced))

        return Prepared(
            calls=[lambda x=x: ops.variance_normalize(x, iterations=iterations) for x in inputs],
            error=error,
            max_error=1e-3,
            bytes=num_bytes,
            ceiling="copy",
            problem=Function(
                reference.variance_normalize, [(x,) for x in inputs], {"iterations": iterations}
            ),
            peer_error=peer_error,
        )


def _imbalance(x: torch.Tensor) -> torch.Tensor:
    rows, cols = x.std(-1), x.std(-2)
    return rows.amax(-1) / rows.amin(-1) + cols.amax(-1) / cols.amin(-1)


ROUTINE = _Routine()
