"""Paired comparisons of per-token errors, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ratio:
    """Geometric mean over segments of mean(a) / mean(b), and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    *,
    block: int = 64,
    resamples: int = 2000,
    seed: int = 0,
) -> Ratio:
    """How large the errors ``a`` are relative to ``b`` on the same tokens.

    The interval is a block bootstrap: neighbouring tokens have errors in common, so blocks of
    tokens are drawn, the same for a and b, within each segment.

    Args:
        a, b: for each segment of text, [tokens] errors such as KL divergences.
        block: tokens of a block; a shorter rest is left out.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn, whole = [], []
    for own, other in zip(a, b, strict=True):
        sums = torch.stack([own, other]).double()
        blocks = sums[:, : sums.shape[1] // block * block].unflatten(1, (-1, block)).sum(2)
        count = blocks.shape[1]
        pick = torch.randint(count, (resamples, count), generator=generator)
        totals = blocks[:, pick].sum(2)
        drawn.append((totals[0] / totals[1]).log())
        whole.append((blocks[0].sum() / blocks[1].sum()).log())
    logs = torch.stack(drawn).mean(0)
    low, high = logs.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).exp().tolist()
    return Ratio(float(torch.stack(whole).mean().exp()), low, high)
