"""Tensors that are views: with gaps between rows, at odd offsets, far apart in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

FAR = 2**31 + 16  #: elements; more than an int32 can count


def scattered(x: Tensor, gap: int = 3, offset: int = 5) -> Tensor:
    """A copy of x whose rows have ``gap`` foreign elements between them (every dimension but the
    last is larger in memory) and which starts ``offset`` elements into its storage. The foreign
    elements are poison: 0xFF bytes, which is NaN in floating point."""
    stride = 1
    strides = []
    for size in reversed(x.shape):
        strides.append(stride)
        stride = stride * size + gap
    strides.reverse()
    storage = torch.empty(offset + stride + gap, dtype=x.dtype, device=x.device)
    storage.view(torch.uint8).fill_(0xFF)
    view = storage.as_strided(x.shape, strides, offset)
    return view.copy_(x)


def foreign_bytes_untouched(view: Tensor) -> bool:
    """Whether all bytes of the storage of `scattered` outside the view are still poison."""
    storage = view.new_empty(0).set_(view.untyped_storage()).clone()
    inside = storage.as_strided(view.shape, view.stride(), view.storage_offset())
    inside.copy_(torch.empty_like(inside).view(torch.uint8).fill_(0xFF).view(view.dtype))
    return bool((storage.view(torch.uint8) == 0xFF).all())


def views_of(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """x, a tensor of 3 or 4 dimensions, again and again as views of other memory."""
    yield "scattered", scattered(x)
    swapped = list(range(x.dim()))
    swapped[0], swapped[1] = 1, 0
    yield "transposed", x.permute(swapped).contiguous().permute(swapped)
    if x.dim() == 4:
        swapped = [2, 0, 1, 3]
        yield "heads first", x.permute(swapped).contiguous().permute(1, 2, 0, 3)
    fused = torch.cat([x + 1, x, x * 2], dim=-1)
    yield "slice of a fused buffer", fused[..., x.shape[-1] : 2 * x.shape[-1]]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )
