"""Encoders to try in a `SimulatedCache`: each maps key and value tiles [N, G, Hkv, D] to what a
reader of their packed form sees."""

from __future__ import annotations

import torch
from torch import Tensor

import kvarn.reference
from kvarn.format import Format
from kvarn.studies.simulated_cache import Encoder


def round_tokens(x: Tensor, bits: int) -> Tensor:
    """Naive rounding: each row of the last dimension over its own range [min, max]."""
    largest = 2**bits - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / largest).clamp(min=torch.finfo(x.dtype).tiny)
    codes = ((x - low) / scale).round().clamp(0, largest)
    return torch.addcmul(low, codes, scale)


def naive(key_bits: int, value_bits: int) -> Encoder:
    """Per-token, per-head round-to-nearest without rotation or normalization: what the method has
    to beat."""
    return lambda key, value: (round_tokens(key, key_bits), round_tokens(value, value_bits))


def naive_bytes_per_token(key_bits: int, value_bits: int, head_dim: int) -> float:
    """Stored for a token and KV head: codes, and a 16-bit scale and minimum for key and value."""
    return (key_bits + value_bits) * head_dim / 8 + 8


def reference(fmt: Format, *, fit: str = "unbiased", iterations: int | None = None) -> Encoder:
    """kvarn's own encoder as :mod:`kvarn.reference` defines it."""

    def encode(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        canonical = kvarn.reference.quantize(key, value, fmt, fit=fit, iterations=iterations)
        return kvarn.reference.dequantize(canonical, fmt)

    return encode
