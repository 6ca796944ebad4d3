"""hadamard_transform on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from views import FAR, foreign_bytes_untouched, same_bits, scattered, views_of

from kvarn import ops, reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
DIMS = [2**k for k in range(13)]


def exact(x: Tensor, scale: float) -> Tensor:
    return reference.hadamard_transform(x.double(), scale=scale)


@pytest.mark.parametrize("dim", DIMS)
def test_against_fp64(dim: int) -> None:
    x = torch.randn(7, dim)
    for scale in (1 / math.sqrt(dim), 0.3):
        want = exact(x, scale)
        got = ops.hadamard_transform(x, scale=scale)
        assert (got - want).norm() <= 5e-7 * want.norm()
    assert torch.equal(ops.hadamard_transform(x), ops.hadamard_transform(x, scale=dim**-0.5))


@pytest.mark.parametrize("dim", DIMS)
def test_sylvester_order(dim: int) -> None:
    """Unit vectors give the rows of the matrix, to the last bit."""
    picked = torch.arange(0, dim, max(1, dim // 16))
    units = torch.nn.functional.one_hot(picked, dim).float()
    assert torch.equal(
        ops.hadamard_transform(units, scale=1.0),
        reference.hadamard_matrix(dim, torch.float32)[picked],
    )


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("dim", [1, 8, 64, 128, 512])
def test_16_bit_is_rounded_once(dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(33, dim).to(dtype)
    assert same_bits(ops.hadamard_transform(x), ops.hadamard_transform(x.float()).to(dtype))


def test_large_dim() -> None:
    x = torch.randn(1, 2**17)
    assert torch.allclose(
        ops.hadamard_transform(ops.hadamard_transform(x)), x, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 70_000])
def test_row_counts(rows: int) -> None:
    x = torch.randn(rows, 16)
    assert torch.allclose(ops.hadamard_transform(x), exact(x, 0.25).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fault12_views(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 4, 64).to(dtype)
    want = ops.hadamard_transform(x)
    for name, view in views_of(x):
        assert same_bits(ops.hadamard_transform(view), want), name
    out = scattered(torch.zeros_like(x))
    assert ops.hadamard_transform(x, out=out) is out
    assert same_bits(out, want)
    assert foreign_bytes_untouched(out)


def test_fault12_many_dimensions() -> None:
    """More dimensions than the kernel has, no two of which can be merged."""
    x = scattered(torch.randn(2, 3, 2, 3, 2, 8))
    want = ops.hadamard_transform(x.contiguous())
    assert torch.equal(ops.hadamard_transform(x), want)
    out = torch.empty_like(want)
    assert torch.equal(
        ops.hadamard_transform(x.transpose(0, 4), out=out.transpose(0, 4)).transpose(0, 4), want
    )
    assert torch.equal(out, want)


def test_fault12_expanded_and_size_1() -> None:
    x = torch.randn(1, 64)
    want = ops.hadamard_transform(x)
    assert torch.equal(ops.hadamard_transform(x.expand(9, 64)), want.expand(9, 64))
    odd = torch.as_strided(x, (1, 1, 64), (7, 12345, 1))
    assert torch.equal(ops.hadamard_transform(odd)[0], want)
    assert ops.hadamard_transform(torch.randn(64)).shape == (64,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(dtype: torch.dtype) -> None:
    x = torch.randn(130, 128).to(dtype)
    want = ops.hadamard_transform(x)
    assert ops.hadamard_transform(x, out=x) is x
    assert same_bits(x, want)


def test_fault01_large_values() -> None:
    """What fits into the dtype of the result does not overflow on the way."""
    x = torch.zeros(4, 256)
    x[:, ::2] = 3e38
    got = ops.hadamard_transform(x, scale=1 / 256)
    assert torch.allclose(got[:, 0], torch.tensor(1.5e38)) and got.isfinite().all()
    half = torch.full((2, 64), 60000.0, dtype=torch.float16)
    assert torch.equal(ops.hadamard_transform(half, scale=1 / 64)[:, 0].float(), half[:, 0].float())
    wide = torch.full((2, 64), 1e6, dtype=torch.bfloat16)
    assert ops.hadamard_transform(wide)[0, 0] == (wide[0, 0].float() * 8).to(torch.bfloat16)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_fault03_a_row_with_nan_touches_no_other(bad: float) -> None:
    x = torch.randn(40, 64)
    want = ops.hadamard_transform(x)
    x[17, 3] = bad
    got = ops.hadamard_transform(x)
    assert not got[17].isfinite().any()
    assert torch.equal(got[:17], want[:17]) and torch.equal(got[18:], want[18:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_fault10_offsets_beyond_int32(dtype: torch.dtype) -> None:
    memory = torch.empty(FAR + 64, dtype=dtype)
    x = memory.as_strided((2, 64), (FAR, 1))
    x.copy_(torch.randn(2, 64))
    want = ops.hadamard_transform(x.contiguous())
    assert same_bits(ops.hadamard_transform(x), want)
    ops.hadamard_transform(x, out=x)
    assert same_bits(x, want)


def test_fault07_same_in_any_batch() -> None:
    x = torch.randn(300, 128)
    whole = ops.hadamard_transform(x)
    assert all(
        torch.equal(ops.hadamard_transform(x[i : i + 7]), whole[i : i + 7])
        for i in range(0, 300, 7)
    )
