"""The gradient of hadamard_transform."""

from __future__ import annotations

import pytest
import torch

from kvarn import ops


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double precision")
@pytest.mark.parametrize("scale", [None, 1.0, -0.3])
def test_gradcheck(scale: float | None) -> None:
    # The op is linear, so a large step costs nothing and float32 is precise enough.
    x = torch.randn(3, 16, requires_grad=True)
    function = lambda x: ops.hadamard_transform(x, scale=scale)  # noqa: E731
    assert torch.autograd.gradcheck(function, x, eps=0.5, atol=1e-4)
    assert torch.autograd.gradgradcheck(lambda x: function(x) ** 2, x, eps=0.5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradient_is_the_transform_with_the_same_scale(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
    grad = torch.randn(2, 5, 64).to(dtype)
    ops.hadamard_transform(x, scale=0.7).backward(grad)
    assert torch.equal(x.grad, ops.hadamard_transform(grad, scale=0.7))


def test_expanded_gradient() -> None:
    x = torch.randn(5, 64, requires_grad=True)
    ops.hadamard_transform(x).sum().backward()
    assert torch.equal(x.grad, ops.hadamard_transform(torch.ones(5, 64)))


def test_no_gradient_is_tracked_without_need() -> None:
    x = torch.randn(5, 64, requires_grad=True)
    with torch.no_grad():
        assert not ops.hadamard_transform(x).requires_grad
    assert not ops.hadamard_transform(x.detach()).requires_grad
