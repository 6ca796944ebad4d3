"""merge_states on the CPU: two partial attentions -> one."""

from __future__ import annotations

import math

import pytest
import torch
from paged_cases import attention64, row_errors
from torch import Tensor

from kvarn import ops, reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def states(
    tokens: int, heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out_a, out_b = torch.randn(2, tokens, heads, dim).to(dtype).unbind()
    lse_a, lse_b = (5 * torch.randn(2, tokens, heads)).unbind()
    return out_a, lse_a, out_b, lse_b


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 64, 80, 128, 512])
def test_against_the_reference(dtype: torch.dtype, dim: int) -> None:
    parts = states(33, 5, dim, dtype)
    out, lse = ops.merge_states(*parts)
    doubles = [p.double() for p in parts]
    exact, exact_lse = reference.merge_states(*doubles)
    assert out.dtype == dtype and lse.dtype == torch.float32
    if dtype == torch.float32:
        assert row_errors(out, exact).max() < 2e-6
    else:
        assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-7).all()
    assert (lse - exact_lse).abs().max() < 2e-6


def test_halves_of_an_attention() -> None:
    q, (key, value) = torch.randn(7, 4, 64), torch.randn(2, 90, 2, 64).unbind()
    seen = torch.rand(7, 90) < 0.5
    exact = attention64(q, key, value, seen)
    halves = [attention64(q, key[s], value[s], seen[:, s]) for s in (slice(0, 40), slice(40, 90))]
    out, lse = ops.merge_states(*(t.float() for half in halves for t in half))
    assert row_errors(out, exact[0]).max() < 2e-6
    assert (lse - exact[1]).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_fault04_empty_parts(dtype: torch.dtype) -> None:
    # An empty part is not read: here it is NaN.
    out_a, lse_a, out_b, lse_b = states(4, 2, 64, dtype)
    lse_a[:2], lse_b[1:3] = -math.inf, -math.inf
    out_a[:2], out_b[1:3] = math.nan, math.nan
    out, lse = ops.merge_states(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[0], out_b[0]) and torch.equal(lse[0], lse_b[0])
    assert (out[1] == 0).all() and lse[1].isneginf().all()
    assert torch.equal(out[2], out_a[2]) and torch.equal(lse[2], lse_a[2])
    assert out[3].isfinite().all()


def test_fault04_large_and_infinite_lse() -> None:
    lse_a = torch.tensor([[1e5, -1e5, 1e5, math.inf, -1e5]])
    lse_b = torch.tensor([[-1e5, 1e5, 1e5, 3.0, -math.inf]])
    out_a, out_b = torch.full((1, 5, 64), 2.0), torch.full((1, 5, 64), 4.0)
    out, lse = ops.merge_states(out_a, lse_a, out_b, lse_b)
    assert out[0, :, 0].tolist() == [2, 4, 3, 2, 2]
    assert lse[0].tolist() == pytest.approx([1e5, 1e5, 1e5 + math.log(2), math.inf, -1e5])


def test_fault03_nan_stays_in_its_row() -> None:
    out_a, lse_a, out_b, lse_b = states(3, 2, 64, torch.float32)
    out_a[1, 0, 5] = math.nan
    lse_b[2, 1] = math.nan
    out, lse = ops.merge_states(out_a, lse_a, out_b, lse_b)
    assert out.isnan().nonzero()[0].tolist() == [1, 0, 5]
    assert out.isnan().any(-1).nonzero().tolist() == [[1, 0], [2, 1]]
    assert out[2, 1].isnan().all() and lse.isnan().nonzero().tolist() == [[2, 1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("into", ["a", "b"])
def test_in_place(dtype: torch.dtype, into: str) -> None:
    out_a, lse_a, out_b, lse_b = states(70, 3, 64, dtype)
    out, lse = ops.merge_states(out_a, lse_a, out_b, lse_b)
    target = (out_a, lse_a) if into == "a" else (out_b, lse_b)
    merged = ops.merge_states(out_a, lse_a, out_b, lse_b, out=target)
    assert merged[0] is target[0] and merged[1] is target[1]
    assert torch.equal(target[0], out) and torch.equal(target[1], lse)


def test_fault12_views() -> None:
    parts = states(9, 4, 64, torch.bfloat16)
    plain = ops.merge_states(*parts)
    fused = torch.zeros(9, 9, 64, dtype=torch.bfloat16)
    fused[:, 1:5], fused[:, 5:] = parts[0], parts[2]
    out = torch.full((9, 2, 4, 64), 7.0, dtype=torch.bfloat16)
    lse = torch.full((4, 9), 7.0).t()
    ops.merge_states(
        fused[:, 1:5], parts[1].t().contiguous().t(), fused[:, 5:], parts[3].repeat(1, 2)[:, :4],
        out=(out[:, 1], lse),
    )  # fmt: skip
    assert torch.equal(out[:, 1], plain[0]) and torch.equal(lse, plain[1])
    assert (out[:, 0] == 7).all()


def test_fault10_many_tokens() -> None:
    parts = states(70_000, 1, 4, torch.float32)
    out, lse = ops.merge_states(*parts)
    exact, exact_lse = reference.merge_states(*parts)
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-6, atol=1e-6)


def test_nothing() -> None:
    out, lse = ops.merge_states(*states(0, 4, 64, torch.float16))
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)
