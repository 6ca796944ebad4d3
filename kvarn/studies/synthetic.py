"""Made-up tiles of head dimension 128, for what one small model does not show: outlier channels and
tokens, massive tokens, biased and rotary keys. Their statistics are those of the functions in
`kvarn.studies.column_scale`; no real keys or values are in them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvarn.studies import cases
from kvarn.studies.cases import Case
from kvarn.studies.column_scale import KINDS, errors

HEAD_DIM = 128
MEASURES = ("K", "V", "attention", "massive K")
_TILES = 64


def compared() -> list[Case]:
    """Encoders of 4-bit keys and 2-bit values; the first is what the others are set against."""
    unbiased = [cases.ours("k4v2", HEAD_DIM, "unbiased", n) for n in (0, 1, 2, 8)]
    peers = ("naive", "naive, rotated", "KIVI-like", "TurboQuant-like")
    return [
        cases.ours("k4v2", HEAD_DIM, "unbiased"),
        *unbiased,
        cases.ours("k4v2", HEAD_DIM, "minmax"),
        *(cases.peer(family, "k4v2", HEAD_DIM) for family in peers),
    ]


def measure(seed: int) -> dict[str, Any]:
    """``{kind: {case: {measure: [ratio, low, high]}}}``: the error of each case over that of the
    first one, geometric mean over tiles with its 95 % interval. Errors as in
    `kvarn.studies.column_scale.errors`; a measure that a kind of tile does not have (NaN), or that
    is exactly 0, is absent."""
    table: dict[str, Any] = {}
    for number, kind in enumerate(KINDS):
        generator = torch.Generator().manual_seed(seed + number)
        shape = (_TILES, cases.GROUP, 1, HEAD_DIM)
        key, value = (kind(torch.randn(shape, generator=generator), generator) for _ in range(2))
        first, *others = compared()
        assert first.encoder is not None
        base = errors(key, value, first.encoder)
        rows = {}
        for case in others:
            assert case.encoder is not None
            own = errors(key, value, case.encoder)
            rows[case.name] = {
                name: _ratio(a, b) for name, a, b in zip(MEASURES, own, base, strict=True)
                if (a > 0).all() and (b > 0).all()
            }  # fmt: skip
        table[kind.__name__.replace("_", " ")] = rows
    return table


def _ratio(a: Tensor, b: Tensor) -> list[float]:
    logs = (a.double() / b.double()).log()
    half = 1.96 * float(logs.std()) / math.sqrt(len(logs))
    middle = float(logs.mean())
    return [float(f"{math.exp(middle + x):.4g}") for x in (0.0, -half, half)]
