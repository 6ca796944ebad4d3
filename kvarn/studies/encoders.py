"""Encoders to try in a `SimulatedCache`: each maps key and value tiles [N, G, Hkv, D] to what a
reader of their packed form sees. `kvarn.studies.methods` gives them names and stored bits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

import kvarn.reference
from kvarn import ops
from kvarn.format import Format
from kvarn.studies.simulated_cache import Encoder

_FP8_MAX = 448.0  # of e4m3


# --------------------------------------------------------------------------------------------------
# Comparators


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


def rotated(encoder: Encoder) -> Encoder:
    """The same encoder on keys and values that went through the Walsh-Hadamard transform."""
    turn = kvarn.reference.hadamard_transform

    def encode(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        new_key, new_value = encoder(turn(key), turn(value))
        return turn(new_key), turn(new_value)

    return encode


def kivi_like(key_bits: int, value_bits: int, group: int = 32) -> Encoder:
    """Min-max groups as in KIVI (arXiv 2402.02750): keys along ``group`` tokens of a channel,
    values along ``group`` channels of a token."""

    def encode(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        by_channel = key.transpose(1, 3).unflatten(-1, (-1, group))  # [N, D, Hkv, G/g, g]
        new_key = round_tokens(by_channel, key_bits).flatten(-2).transpose(1, 3)
        new_value = round_tokens(value.unflatten(-1, (-1, group)), value_bits).flatten(-2)
        return new_key, new_value

    return encode


@functools.cache
def lloyd_max(bits: int, rounds: int = 1000) -> Tensor:
    """Levels fp32 [2^bits], ascending, of the scalar quantizer with the least squared error of a
    standard normal variable: each level is the mean of what is nearest to it."""
    normal = torch.distributions.Normal(0.0, 1.0)
    count = 2**bits
    levels: Tensor = normal.icdf((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    infinity = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(rounds):
        edges = torch.cat([-infinity, (levels[1:] + levels[:-1]) / 2, infinity])
        density, below = normal.log_prob(edges).exp(), normal.cdf(edges)
        levels = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
    return levels.float()


def codebook_tokens(x: Tensor, bits: int, signs: Tensor) -> Tensor:
    """Each row of the last dimension: its norm in fp16, and of its direction, after random signs
    and the Walsh-Hadamard transform, the nearest level of the normal distribution's codebook."""
    levels = lloyd_max(bits).to(x.device)
    norm = x.norm(dim=-1, keepdim=True)
    turned = kvarn.reference.hadamard_transform(x * signs)
    unit = turned / norm.clamp(min=torch.finfo(x.dtype).tiny) * math.sqrt(x.shape[-1])
    nearest = levels[torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2)]
    norm = norm.to(torch.float16).to(x.dtype)
    back = kvarn.reference.hadamard_transform(nearest * norm / math.sqrt(x.shape[-1]))
    return back * signs


def turboquant_like(key_bits: int, value_bits: int, seed: int = 0) -> Encoder:
    """Norm, random rotation and Lloyd-Max codebook, as the variant of TurboQuant (arXiv 2504.19874)
    that minimizes squared error; the rotation here is a Walsh-Hadamard transform with random
    signs."""

    def encode(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(2, (key.shape[-1],), generator=generator).to(key) * 2 - 1
        return codebook_tokens(key, key_bits, signs), codebook_tokens(value, value_bits, signs)

    return encode


def fp8(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A cast to float8 e4m3 without scales, as engines do it by default."""

    def cast(x: Tensor) -> Tensor:
        return x.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype)

    return cast(key), cast(value)


# --------------------------------------------------------------------------------------------------
# Ours


def packed(fmt: Format, *, fit: str = "unbiased", iterations: int | None = None) -> Encoder:
    """kvarn's own encoder through the kernels of the tensors' device.

    On a GPU the tiles go in as fp16, which they were rounded to, or as bf16 where they overflow it.
    """

    def encode(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if key.device.type == "cpu":
            given = torch.float32
        else:
            largest = max(float(x.abs().amax()) for x in (key, value))
            given = torch.float16 if largest < 65504 else torch.bfloat16
        records = ops.quantize_tiles(
            key.to(given), value.to(given), fmt, fit=fit, iterations=iterations
        )
        return ops.dequantize_tiles(records, fmt, dtype=key.dtype)

    return encode


def reference(fmt: Format, *, fit: str = "unbiased", iterations: int | None = None) -> Encoder:
    """kvarn's own encoder as :mod:`kvarn.reference` defines it."""

    def encode(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        canonical = kvarn.reference.quantize(key, value, fmt, fit=fit, iterations=iterations)
        return kvarn.reference.dequantize(canonical, fmt)

    return encode


def by_steps(encode_tile: Callable[[Tensor, int, bool], Tensor], fmt: Format) -> Encoder:
    """An encoder of tiles [N, R, C] (keys [D, G], values [G, D]), given bits and whether it is a
    key, applied to keys and values [N, G, Hkv, D]."""

    def encode(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys = key.permute(0, 2, 3, 1).flatten(0, 1)
        values = value.permute(0, 2, 1, 3).flatten(0, 1)
        new_key = encode_tile(keys, fmt.key_bits, True).unflatten(0, (len(key), -1))
        new_value = encode_tile(values, fmt.value_bits, False).unflatten(0, (len(key), -1))
        return new_key.permute(0, 3, 1, 2), new_value.permute(0, 2, 1, 3)

    return encode
