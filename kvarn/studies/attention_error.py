"""The error of one attention layer's output that packed keys and values cause, layer by layer and
head by head: queries, keys and values are those of the exact run, so nothing accumulates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvarn.studies.divergence import cache_argument
from kvarn.studies.simulated_cache import Encoder

_NAME = "kvarn_study"
_seen: dict[int, tuple[Tensor, float]] = {}  # layer -> queries of the last call, scale of scores


def _remember(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Any:
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    _seen[module.layer_idx] = (query[0].float(), float(scale))
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


AttentionInterface.register(_NAME, _remember)
AttentionMaskInterface.register(_NAME, sdpa_mask)


@dataclass(frozen=True)
class Layer:
    """What one attention layer of the exact run saw last.

    Attributes:
        query: fp32 [Hq, queries, D], of the last tokens.
        key, value: fp32 [Hkv, tokens, D].
        scale: of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float


@torch.inference_mode()
def capture(model: Any, tokens: Tensor, cache: Any, queries: int = 128) -> list[Layer]:
    """Layers of a run over a text int64 [tokens] with the exact ``cache``; queries of the last
    ``queries`` tokens."""
    argument, own = cache_argument(model), model.config._attn_implementation
    ids = tokens.to(model.device)[None]
    model(ids[:, :-queries], **{argument: cache}, logits_to_keep=1)
    model.set_attn_implementation(_NAME)
    try:
        model(ids[:, -queries:], **{argument: cache}, logits_to_keep=1)
    finally:
        model.set_attn_implementation(own)
    layers = [
        Layer(query, layer.keys[0].float(), layer.values[0].float(), scale)
        for (query, scale), layer in zip(
            (_seen[i] for i in sorted(_seen)), cache.layers, strict=True
        )
    ]
    _seen.clear()
    return layers


@torch.inference_mode()
def output_errors(
    layers: Sequence[Layer], encoder: Encoder, *, sinks: int = 128, group: int = 128
) -> Tensor:
    """Squared error of the attention output over its energy, [layers, Hq, queries].

    Full tiles between the sinks and the tokens that ask are packed. Causal attention without
    window, soft cap or sink logits: models that have these are approximated.
    """
    return torch.stack([_layer_errors(layer, encoder, sinks, group) for layer in layers])


def _layer_errors(layer: Layer, encoder: Encoder, sinks: int, group: int) -> Tensor:
    tokens, asking = layer.key.shape[1], layer.query.shape[1]
    tiles = max(tokens - asking - sinks, 0) // group
    packed = slice(sinks, sinks + tiles * group)
    read = [x.half().float() for x in (layer.key, layer.value)]
    as_tiles = [x[:, packed].unflatten(1, (tiles, group)).permute(1, 2, 0, 3) for x in read]
    for x, new in zip(read, encoder(*as_tiles), strict=True):
        x[:, packed] = new.permute(2, 0, 1, 3).flatten(1, 2)
    exact = _attend(layer, layer.key, layer.value)
    error = _attend(layer, *read) - exact
    return error.square().sum(-1) / exact.square().sum(-1)


def _attend(layer: Layer, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of the last tokens: [Hq, queries, D]."""
    times = layer.query.shape[0] // key.shape[0]
    key, value = (x.repeat_interleave(times, 0) for x in (key, value))
    tokens, asking = key.shape[1], layer.query.shape[1]
    position = torch.arange(tokens, device=key.device)
    hidden = position[None, :] > position[-asking:, None]
    scores = (layer.query @ key.mT * layer.scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ value
