"""The encoders that the tests of the method run: the readable reference and the kernels."""

from __future__ import annotations

from typing import NamedTuple

import cuda_helpers
import pytest
import torch
from torch import Tensor

from kvarn import CanonicalRecords, Format, ops, reference


class Encoded(NamedTuple):
    canonical: CanonicalRecords
    key: Tensor  # fp32 [N, G, Hkv, D], dequantized
    value: Tensor


def by_reference(
    key: Tensor,
    value: Tensor,
    fmt: Format,
    fit: str,
    iterations: int | None = None,
    rotated: bool = False,
) -> Encoded:
    canonical = reference.quantize(key, value, fmt, fit=fit, iterations=iterations)
    return Encoded(canonical, *reference.dequantize(canonical, fmt, rotated=rotated))


def by_ops(
    key: Tensor,
    value: Tensor,
    fmt: Format,
    fit: str,
    iterations: int | None = None,
    rotated: bool = False,
) -> Encoded:
    records = ops.quantize_tiles(key, value, fmt, fit=fit, iterations=iterations)
    dequantized = ops.dequantize_tiles(records, fmt, dtype=torch.float32, rotated=rotated)
    return Encoded(ops.unpack_records(records, fmt), *dequantized)


def by_cuda(
    key: Tensor,
    value: Tensor,
    fmt: Format,
    fit: str,
    iterations: int | None = None,
    rotated: bool = False,
) -> Encoded:
    """The kernels of the GPU; what they make comes back to the CPU."""
    on_device = (x.to(cuda_helpers.DEVICE) for x in (key, value))
    made = by_ops(*on_device, fmt, fit, iterations, rotated)
    return Encoded(
        CanonicalRecords(*(field.cpu() for field in made.canonical)),
        made.key.cpu(),
        made.value.cpu(),
    )


ENCODERS = {"reference": by_reference, "ops": by_ops, "cuda": by_cuda}

#: The names of the encoders, to parametrize tests with; that of the GPU carries its mark.
CUDA = pytest.mark.cuda
NAMES = ["reference", "ops", pytest.param("cuda", marks=CUDA)]


def relative_error(approx: Tensor, exact: Tensor) -> float:
    """||approx - exact|| / ||exact||."""
    return float((approx.double() - exact.double()).norm() / exact.double().norm())


def relative_mse(approx: Tensor, exact: Tensor) -> float:
    """|approx - exact|^2 / |exact|^2 over everything."""
    return relative_error(approx, exact) ** 2


def token_mse(approx: Tensor, exact: Tensor) -> Tensor:
    """|x_hat - x|^2 / |x|^2 of each token: [N, G, Hkv, D] -> [N, G, Hkv]."""
    return (approx - exact).square().sum(-1) / exact.square().sum(-1)


def gaussian(tiles: int, group: int, head_dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tiles, group, 1, head_dim, generator=generator)


def log_normal(tiles: int, group: int, head_dim: int, seed: int = 0) -> Tensor:
    """Gaussian tokens whose norms are log-normal: exp(.7 N)."""
    generator = torch.Generator().manual_seed(seed + 1000)
    norm = (0.7 * torch.randn(tiles, group, 1, 1, generator=generator)).exp()
    return gaussian(tiles, group, head_dim, seed) * norm
