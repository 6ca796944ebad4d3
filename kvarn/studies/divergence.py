"""How far a model's predictions move when its KV cache is packed.

Teacher-forced and decode-like: the text enters a tile at a time, a tile that is full is packed, and
all later tokens read the packed one in every layer, so that an error feeds the following ones. (A
prefill that quantizes once at the end would not show that.) All configurations run in lockstep with
the exact one, so no logits are kept.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """One configuration: ``make_cache()`` returns a fresh transformers cache, which is read through
    the attention implementation of that name."""

    make_cache: Callable[[], Any]
    attention: str = "sdpa"


@dataclass(frozen=True)
class Trace:
    """What one run did, for each token of the text.

    Attributes:
        kl: fp32 [tokens], KL(exact || run) of the next-token distribution, in nats.
        agree: bool [tokens], whether the most likely next token is the exact run's.
        nll: fp32 [tokens - 1], -log of the probability of the token that follows, in nats.
        seconds: spent in the model.
    """

    kl: Tensor
    agree: Tensor
    nll: Tensor
    seconds: float

    def mean_kl(self, start: int = 0, stop: int | None = None) -> float:
        return float(self.kl[start:stop].mean())

    def top1(self, start: int = 0, stop: int | None = None) -> float:
        return float(self.agree[start:stop].float().mean())

    def perplexity(self, start: int = 0, stop: int | None = None) -> float:
        return float(self.nll[start:stop].mean().exp())

    @property
    def tokens_per_second(self) -> float:
        return len(self.kl) / self.seconds


@torch.inference_mode()
def teacher_forced(
    model: Any,
    tokens: Tensor,
    exact: Run,
    runs: Mapping[str, Run],
    *,
    tile: int = 128,
    progress: Callable[[int], object] = lambda tokens: None,
) -> tuple[Trace, dict[str, Trace]]:
    """Runs a text through every configuration.

    Args:
        model: a causal language model of transformers; its attention implementation is set back at
            the end.
        tokens: int64 [tokens].
        exact: what the others are compared with.
        runs: the configurations, by name.
        tile: tokens that enter at once; the group of the caches.
        progress: called with the number of tokens done since the last call, over all runs.

    Returns:
        The traces of ``exact`` and of ``runs``.
    """
    device, argument = model.device, cache_argument(model)
    own_attention = model.config._attn_implementation
    everything = [exact, *runs.values()]
    caches = [run.make_cache() for run in everything]
    columns: list[list[Tensor]] = [[] for _ in everything]
    seconds = [0.0] * len(everything)
    try:
        for start in range(0, len(tokens), tile):
            chunk = tokens[start : start + tile].to(device)
            following = tokens[start + 1 : start + tile + 1].to(device)
            exact_log_p = None
            for i, (run, cache) in enumerate(zip(everything, caches, strict=True)):
                begin = time.perf_counter()
                if model.config._attn_implementation != run.attention:
                    model.set_attn_implementation(run.attention)
                log_p = model(chunk[None], **{argument: cache}).logits[0].float().log_softmax(-1)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds[i] += time.perf_counter() - begin
                if exact_log_p is None:
                    exact_log_p = log_p
                columns[i].append(_compare(exact_log_p, log_p, following))
                progress(len(chunk))
    finally:
        model.set_attn_implementation(own_attention)
    traces = [
        _trace(torch.cat(column, 1).cpu(), elapsed)
        for column, elapsed in zip(columns, seconds, strict=True)
    ]
    return traces[0], dict(zip(runs, traces[1:], strict=True))


@torch.inference_mode()
def exact_predictions(model: Any, tokens: Tensor, cache: Any, *, tile: int = 128) -> Tensor:
    """Log probabilities fp32 [tokens, vocabulary] of the next token, for `against`; ``cache`` is
    filled. They stay on the model's device: 4 bytes each."""
    argument, parts = cache_argument(model), []
    for chunk in tokens.to(model.device).split(tile):
        logits = model(chunk[None], **{argument: cache}).logits[0]
        parts.append(logits.float().log_softmax(-1))
    return torch.cat(parts)


@torch.inference_mode()
def against(
    model: Any,
    tokens: Tensor,
    exact_log_p: Tensor,
    cache: Any,
    *,
    first_chunk: int = 128,
    tile: int = 128,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Trace:
    """One cache on a text, through the model's own attention, against stored predictions.

    Args:
        model, tokens, tile, progress: as in `teacher_forced`.
        exact_log_p: of `exact_predictions`.
        cache: a fresh one.
        first_chunk: tokens that enter first (the sinks and the first tile, so that tiles fill at
            the end of a chunk), before chunks of ``tile``.
    """
    argument, device = cache_argument(model), model.device
    starts = [0, *range(first_chunk, len(tokens), tile), len(tokens)]
    columns, begin = [], time.perf_counter()
    for start, stop in itertools.pairwise(starts):
        chunk = tokens[start:stop].to(device)
        following = tokens[start + 1 : stop + 1].to(device)
        log_p = model(chunk[None], **{argument: cache}).logits[0].float().log_softmax(-1)
        columns.append(_compare(exact_log_p[start:stop], log_p, following))
        progress(len(chunk))
    return _trace(torch.cat(columns, 1).cpu(), time.perf_counter() - begin)


def cache_argument(model: Any) -> str:
    """What the forward method of a model calls its cache: transformers renamed it during v5."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _compare(exact_log_p: Tensor, log_p: Tensor, following: Tensor) -> Tensor:
    """KL, agreement and negative log-likelihood [3, tokens]; the last token's is NaN."""
    kl = (exact_log_p.exp() * (exact_log_p - log_p)).sum(-1)
    agree = (exact_log_p.argmax(-1) == log_p.argmax(-1)).float()
    nll = torch.full_like(kl, torch.nan)
    nll[: len(following)] = -log_p[: len(following)].gather(1, following[:, None])[:, 0]
    return torch.stack([kl, agree, nll])


def _trace(columns: Tensor, seconds: float) -> Trace:
    kl, agree, nll = columns
    return Trace(kl, agree.bool(), nll[:-1], seconds)
