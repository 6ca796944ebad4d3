"""Greedy generation with each cache, several prompts at once: when does it first differ from the
exact cache's, and how much of it is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvarn.studies.divergence import cache_argument


@torch.inference_mode()
def greedy(
    model: Any,
    prompts: Tensor,
    cache: Any,
    steps: int,
    *,
    tile: int = 128,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Tensor:
    """What a model writes after prompts int64 [B, tokens] of equal length, which enter tile by
    tile: int64 [B, steps]. It does not stop at an end-of-text token."""
    argument, written = cache_argument(model), []
    next_ids = torch.empty(0)
    for chunk in prompts.to(model.device).split(tile, 1):
        next_ids = _next(model, chunk, {argument: cache})
        progress(chunk.shape[1])
    for _ in range(steps - 1):
        written.append(next_ids)
        next_ids = _next(model, next_ids[:, None], {argument: cache})
        progress(1)
    return torch.stack([*written, next_ids], 1).cpu()


def _next(model: Any, ids: Tensor, cache: dict[str, Any]) -> Tensor:
    return model(ids, **cache, logits_to_keep=1).logits[:, -1].argmax(-1)  # type: ignore[no-any-return]


def first_differences(exact: Tensor, other: Tensor) -> list[int]:
    """For each prompt the first step [0, steps) at which they differ; steps if they do not."""
    differ = exact != other
    steps = exact.shape[1]
    return torch.where(differ.any(1), differ.to(torch.uint8).argmax(1), steps).tolist()
