"""What torch.compile and autograd know about the operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvarn import _backends


def _writes_only(*_args: Any, **_kwargs: Any) -> None:
    """The fake of an op that returns nothing: its schema names all that it writes."""


def _hadamard_transform(x: Tensor, scale: float | None = None) -> Tensor:
    return x.new_empty(x.shape)


def _decode_workspace_bytes(like: Tensor, *_numbers: int) -> torch.SymInt:
    # It depends on the number of threads at run time.
    return torch.library.get_ctx().new_dynamic_size()


def _save_scale(ctx: Any, inputs: tuple[Tensor, float | None], output: Tensor) -> None:
    ctx.scale = inputs[1]


def _hadamard_transform_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    # The matrix is symmetric, so the transform is its own transpose.
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    return torch.ops.kvarn.hadamard_transform(grad, ctx.scale), None


_FAKES = {
    "hadamard_transform": _hadamard_transform,
    "hadamard_transform.out": _writes_only,
    "decode_workspace_bytes": _decode_workspace_bytes,
}
for _op in {*_backends.OPS, *_FAKES}:
    torch.library.register_fake(f"kvarn::{_op}", _FAKES.get(_op, _writes_only))

torch.library.register_autograd(
    "kvarn::hadamard_transform", _hadamard_transform_backward, setup_context=_save_scale
)
