"""merge_states on CUDA against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvarn import ops

pytestmark = pytest.mark.cuda

DEVICE = "cuda"


def states(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    out_a, out_b = torch.randn(2, tokens, heads, dim, device=DEVICE).to(dtype).unbind()
    lse_a, lse_b = (10 * torch.randn(2, tokens, heads, device=DEVICE)).unbind()
    return [out_a, lse_a, out_b, lse_b]


def exact(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    a = (lse_a.double() - lse).exp()[..., None]
    b = (lse_b.double() - lse).exp()[..., None]
    return a * out_a.double() + b * out_b.double(), lse


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 64, 100, 128, 256, 513])
def test_equals_float64(dim: int, dtype: torch.dtype) -> None:
    parts = states(7, 5, dim, dtype)
    out, lse = ops.merge_states(*parts)
    expected, expected_lse = exact(*parts)
    bound = torch.finfo(dtype).eps * (expected.abs() + 1e-3)
    assert ((out.double() - expected).abs() <= bound).all()
    assert (lse.double() - expected_lse).abs().max() < 1e-5


def test_fault04_empty_parts() -> None:
    out_a, lse_a, out_b, lse_b = states(4, 2, 64, torch.float16)
    out_a[1], lse_a[1] = math.nan, -math.inf  # what an empty part holds is not read
    out_b[2], lse_b[2] = math.nan, -math.inf
    out_a[3], lse_a[3] = math.nan, -math.inf
    out_b[3], lse_b[3] = math.nan, -math.inf
    out, lse = ops.merge_states(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[1], out_b[1]) and torch.equal(lse[1], lse_b[1])
    assert torch.equal(out[2], out_a[2]) and torch.equal(lse[2], lse_a[2])
    assert (out[3] == 0).all() and lse[3].isneginf().all()


def test_fault12_views_and_in_place() -> None:
    parts = states(6, 4, 64, torch.bfloat16)
    expected = ops.merge_states(*parts)
    wide = torch.zeros(6, 9, 64, dtype=torch.bfloat16, device=DEVICE)
    a = wide[:, 1:5]
    a.copy_(parts[0])
    lse_a = torch.empty(4, 6, device=DEVICE).t()
    lse_a.copy_(parts[1])
    out, lse = ops.merge_states(a, lse_a, parts[2], parts[3], out=(a, lse_a))
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert (wide[:, 0] == 0).all() and (wide[:, 5:] == 0).all()


def test_fault21_graph_equals_eager() -> None:
    parts = states(6, 4, 128, torch.float16)
    ops.merge_states(*parts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.merge_states(*parts)
    for old, new in zip(parts, states(6, 4, 128, torch.float16), strict=True):
        old.copy_(new)
    graph.replay()
    for x, y in zip(captured, ops.merge_states(*parts), strict=True):
        assert torch.equal(x, y)
