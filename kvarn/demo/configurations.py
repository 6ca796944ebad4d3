"""The caches that the demo puts side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from kvarn.capacity import ModelShape, packed_capacity, plain_capacity
from kvarn.format import Format
from kvarn.integrations.transformers import KVarNCache
from kvarn.studies import encoders
from kvarn.studies.divergence import Run
from kvarn.studies.models import LoadedModel
from kvarn.studies.simulated_cache import SimulatedCache


@dataclass(frozen=True)
class Configuration:
    """A cache of the comparison.

    Attributes:
        name: for tables and figures.
        run: how the model is run with it.
        bytes_per_token: stored for a token, all layers, without what stays in 16 bits.
        longest_sequence: memory in bytes -> tokens of one sequence that fit.
        comparator: whether it is here to compare with only; it saves no memory when run.
    """

    name: str
    run: Run
    bytes_per_token: float
    longest_sequence: Callable[[int], int]
    comparator: bool = False


def exact(loaded: LoadedModel) -> Configuration:
    """The model's own cache and attention: what all others are compared with."""
    shape = _shape(loaded)
    return Configuration(
        "16-bit cache",
        Run(lambda: DynamicCache(config=loaded.model.config)),
        shape.values_per_token * 2,
        lambda memory: plain_capacity(shape, "", 2, memory=memory, context=1).longest_sequence,
    )


def packed(
    loaded: LoadedModel,
    name: str,
    *,
    fit: str = "unbiased",
    recent_blocks: int = 1,
    label: str | None = None,
) -> Configuration:
    """A kvarn cache, through the real kernels.

    Raises:
        ValueError: unknown format, or none for the model's head dimension.
    """
    fmt, shape = Format(name, head_dim=loaded.head_dim), _shape(loaded)

    def longest(memory: int) -> int:
        return packed_capacity(
            shape, fmt, memory=memory, context=1, recent_blocks=recent_blocks
        ).longest_sequence

    def make_cache() -> KVarNCache:
        return KVarNCache(loaded.model.config, fmt, recent_blocks=recent_blocks, fit=fit)

    return Configuration(
        label or name,
        Run(make_cache, attention="kvarn"),
        shape.values_per_token / (2 * fmt.head_dim) * fmt.bytes_per_token,
        longest,
    )


def naive(loaded: LoadedModel, key_bits: int, value_bits: int) -> Configuration:
    """Plain rounding of each token, simulated in torch."""
    shape = _shape(loaded)
    token = shape.layers * shape.kv_heads * encoders.naive_bytes_per_token(
        key_bits, value_bits, shape.head_dim
    )  # fmt: skip
    encoder = encoders.naive(key_bits, value_bits)
    dtype = torch.float16 if loaded.model.dtype == torch.float32 else loaded.model.dtype
    return Configuration(
        f"naive K{key_bits} V{value_bits}",
        Run(lambda: SimulatedCache(shape.layers, encoder, dtype=dtype)),
        token,
        lambda memory: int(memory / token),
        comparator=True,
    )


def _shape(loaded: LoadedModel) -> ModelShape:
    return ModelShape(loaded.num_layers, loaded.num_kv_heads, loaded.head_dim)
