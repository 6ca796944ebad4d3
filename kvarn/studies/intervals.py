"""Block-bootstrap intervals of per-token errors.

Neighbouring tokens have errors in common, so whole blocks of tokens are drawn, within each segment
of text; two runs that are compared on the same tokens are drawn together. An interval tells what
other tokens of these texts would give, not what other texts or models would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64  # tokens
_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return self.text(".3f")

    def text(self, spec: str) -> str:
        """``value [low, high]``, each formatted by ``spec``."""
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    def map(self, function: Callable[[float], float]) -> Estimate:
        """An increasing function of the number."""
        return Estimate(function(self.value), function(self.low), function(self.high))


def mean(a: Sequence[Tensor], *, block: int = BLOCK, seed: int = 0) -> Estimate:
    """Mean over all tokens of ``a``: for each segment of text, [tokens] errors. ``block``: tokens
    of a block; a shorter rest is left out (1: the entries are means of blocks already)."""
    drawn, whole = _draw([list(a)], block, seed)
    return _interval(whole.mean(0)[0], drawn.mean(0)[0])


def difference(
    a: Sequence[Tensor], b: Sequence[Tensor], *, block: int = BLOCK, seed: int = 0
) -> Estimate:
    """Mean of a minus mean of b on the same tokens; arguments as in `mean`."""
    return mean([x - y for x, y in zip(a, b, strict=True)], block=block, seed=seed)


def paired_ratio(
    a: Sequence[Tensor], b: Sequence[Tensor], *, block: int = BLOCK, seed: int = 0
) -> Estimate:
    """How large the errors ``a`` are relative to ``b`` on the same tokens: the geometric mean over
    segments of mean(a) / mean(b). Arguments as in `mean`."""
    drawn, whole = _draw([list(a), list(b)], block, seed)
    logs = (drawn[:, 0] / drawn[:, 1]).log().mean(0)
    return _interval((whole[:, 0] / whole[:, 1]).log().mean(), logs).map(math.exp)


def _draw(runs: Sequence[Sequence[Tensor]], block: int, seed: int) -> tuple[Tensor, Tensor]:
    """Means of each segment and run, resampled [segments, runs, resamples] and as measured
    [segments, runs]."""
    generator = torch.Generator().manual_seed(seed)
    drawn, whole = [], []
    for segment in zip(*runs, strict=True):
        errors = torch.stack(segment).double()
        blocks = errors[:, : errors.shape[1] // block * block].unflatten(1, (-1, block)).mean(2)
        count = blocks.shape[1]
        pick = torch.randint(count, (_RESAMPLES, count), generator=generator)
        drawn.append(blocks[:, pick].mean(2))
        whole.append(blocks.mean(1))
    return torch.stack(drawn), torch.stack(whole)


def _interval(value: Tensor, drawn: Tensor) -> Estimate:
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(float(value), low, high)
