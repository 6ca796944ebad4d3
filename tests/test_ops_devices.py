"""Where tensors may lie: every argument of every op as every kind of view gives the same result as
a tensor of its own, and what is between the elements of an output is left alone."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import op_calls
import pytest
import torch
from torch import Tensor

from kvarn import ops

CANARY = 171


def as_view(t: Tensor, strides: list[int], offset: int) -> tuple[Tensor, Tensor]:
    """A copy of t with these strides, at this offset of a buffer of canaries: (view, buffer)."""
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True) if n > 1)
    buffer = torch.empty(offset + extent + 7, dtype=t.dtype, device=t.device)
    buffer.view(torch.uint8).fill_(CANARY)
    view = buffer.as_strided(t.shape, strides, offset)
    view.copy_(t)
    return view, buffer


def packed_strides(shape: list[int], order: list[int], gap: dict[int, int]) -> list[int]:
    """Strides of dimensions that lie in memory in this order (outermost first), with gaps after
    the elements of some."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * shape[dim] + gap.get(dim, 0)
    return strides


def offset_view(t: Tensor) -> tuple[Tensor, Tensor]:
    return as_view(t, packed_strides(list(t.shape), list(range(t.dim())), {}), 3)


def padded_view(t: Tensor) -> tuple[Tensor, Tensor]:
    """Gaps of odd sizes after every dimension: rows, heads and blocks are apart."""
    gaps = {dim: 2 * dim + 3 for dim in range(t.dim())}
    return as_view(t, packed_strides(list(t.shape), list(range(t.dim())), gaps), 0)


def transposed_view(t: Tensor) -> tuple[Tensor, Tensor]:
    """All dimensions but the last in reverse order."""
    order = [*reversed(range(t.dim() - 1)), t.dim() - 1]
    return as_view(t, packed_strides(list(t.shape), order, {}), 1)


def fused_view(t: Tensor) -> tuple[Tensor, Tensor]:
    """The middle third of a buffer fused along the last dimension but one, as k in qkv."""
    shape = list(t.shape)
    dim = max(t.dim() - 2, 0)
    strides = packed_strides(shape, list(range(t.dim())), {dim: 2 * shape[dim]})
    for outer in range(dim):
        strides[outer] = strides[dim] * shape[dim] * 3 * math.prod(shape[outer + 1 : dim])
    return as_view(t, strides, shape[dim] * strides[dim])


def spread_view(t: Tensor) -> tuple[Tensor, Tensor]:
    """No dimension is contiguous: for metadata and LSEs only."""
    gaps = dict.fromkeys(range(t.dim()), 2)
    strides = [2 * s for s in packed_strides(list(t.shape), list(range(t.dim())), gaps)]
    return as_view(t, strides, 5)


VIEWS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "offset": offset_view,
    "padded": padded_view,
    "transposed": transposed_view,
    "fused": fused_view,
}
#: Arguments that need no contiguous last dimension.
STRIDED = {
    "slot_mapping", "block_slot", "slots", "blocks", "block_table", "seq_lens", "cu_query_lens",
    "cu_seq_lens", "sinks", "lse_a", "lse_b",
}  # fmt: skip


@functools.cache
def expected(op: str, ones: bool = False) -> tuple[object, ...]:
    return op_calls.run(op, op_calls.call(op, ones=ones))


def names(op: str) -> list[str]:
    """All tensor arguments but the workspace, which is one contiguous piece of memory."""
    return [name for name in op_calls.tensors(op_calls.call(op)) if name != "workspace"]


def is_output(op: str, name: str) -> bool:
    return name.split("[")[0] in ("out", *op_calls.WRITTEN.get(op, ()))


def is_strided(op: str, name: str) -> bool:
    return (
        name in STRIDED
        or (op in ("decode_attention", "merge_states") and name == "out[1]")
        or name.startswith("canonical")
    )


def bits(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_bits(got: tuple[object, ...], want: tuple[object, ...]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(bits(a), bits(b))


TENSOR_OPS = [op for op in op_calls.OPS if op != "decode_workspace_bytes"]
ARGUMENTS = [(op, name) for op in TENSOR_OPS for name in names(op)]


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_fault12_every_argument_as_a_view(op: str, name: str, kind: str) -> None:
    arguments = op_calls.call(op)
    view, buffer = VIEWS[kind](op_calls.tensors(arguments)[name])
    if view.shape[-1] > 1 and view.stride(-1) != 1 and not is_strided(op, name):
        pytest.fail("the view is none that the op accepts")
    same_bits(op_calls.run(op, op_calls.replace(arguments, name, view)), expected(op))
    if is_output(op, name):
        view.copy_(view.new_empty(view.shape).view(torch.uint8).fill_(CANARY).view(view.dtype))
        assert (buffer.view(torch.uint8) == CANARY).all()


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, name in ARGUMENTS if is_strided(op, name)]
)
def test_fault12_metadata_of_any_strides(op: str, name: str) -> None:
    arguments = op_calls.call(op)
    view, _ = spread_view(op_calls.tensors(arguments)[name])
    assert view.stride(-1) > 1
    same_bits(op_calls.run(op, op_calls.replace(arguments, name, view)), expected(op))


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (op, name)
        for op, name in ARGUMENTS
        if op_calls.tensors(op_calls.call(op))[name].dtype in (torch.int32, torch.int64)
        and name != "count"
    ],
)
def test_fault12_int32_and_int64(op: str, name: str) -> None:
    arguments = op_calls.call(op)
    index = op_calls.tensors(arguments)[name]
    for dtype in (torch.int32, torch.int64):
        other = op_calls.replace(op_calls.call(op), name, index.to(dtype))
        same_bits(op_calls.run(op, other), expected(op))


#: What metadata may be throughout; offsets (cu_...) cannot all be the same.
SAME_EVERYWHERE = {
    "block_slot": 3, "seq_lens": 5, "slot_mapping": 69, "slots": 3, "blocks": -1, "block_table": 0,
    "count": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "name"),
    [(op, name) for op, name in ARGUMENTS if not (is_output(op, name) or name.startswith("cu_"))],
)
def test_fault12_expanded_inputs(op: str, name: str) -> None:
    """Stride 0 in the first dimension: all its entries are the first one."""
    t = op_calls.tensors(op_calls.call(op))[name]
    if name in SAME_EVERYWHERE:
        t.fill_(SAME_EVERYWHERE[name])
    expanded = t[:1].expand(t.shape)
    own = torch.empty(t.shape, dtype=t.dtype).copy_(expanded)
    assert t.shape[0] == 1 or (expanded.stride(0) == 0 and own.is_contiguous())
    got = op_calls.run(op, op_calls.replace(op_calls.call(op), name, expanded))
    want = op_calls.run(op, op_calls.replace(op_calls.call(op), name, own))
    same_bits(got, want)


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, name in ARGUMENTS if is_output(op, name)]
)
def test_expanded_outputs_are_refused(op: str, name: str) -> None:
    arguments = op_calls.call(op)
    t = op_calls.tensors(arguments)[name]
    before = t.clone()
    bad = t[:1].expand(t.shape)
    with pytest.raises(ValueError, match=rf"{op}: .* must not overlap itself, got strides \[0"):
        op_calls.run(op, op_calls.replace(arguments, name, bad))
    assert torch.equal(t.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("op", TENSOR_OPS)
def test_fault12_dimensions_of_size_one(op: str) -> None:
    """The stride of a dimension of size 1 means nothing."""
    for name, t in op_calls.tensors(op_calls.call(op, ones=True)).items():
        strides = [
            7919 + 2 * i if n == 1 else s
            for i, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True))
        ]
        if name == "workspace" or strides == list(t.stride()):
            continue
        arguments = op_calls.call(op, ones=True)
        odd = op_calls.tensors(arguments)[name].as_strided(t.shape, strides)
        same_bits(op_calls.run(op, op_calls.replace(arguments, name, odd)), expected(op, True))


@pytest.mark.parametrize("op", TENSOR_OPS)
def test_fault12_all_arguments_as_views_at_once(op: str) -> None:
    arguments = op_calls.call(op)
    for kind, name in zip(itertools.cycle(VIEWS), names(op), strict=False):
        view, _ = VIEWS[kind](op_calls.tensors(arguments)[name])
        arguments = op_calls.replace(arguments, name, view)
    same_bits(op_calls.run(op, arguments), expected(op))


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 3, 2), (2, 1, 3, 2), (2, 2, 2, 2, 3)])
def test_any_number_of_leading_dimensions(leading: tuple[int, ...]) -> None:
    shape = (*leading, 32)
    flat = torch.randn(math.prod(leading), 32)
    want = ops.hadamard_transform(flat).view(shape)
    codes = torch.randint(0, 8, shape, dtype=torch.uint8)
    packed = ops.pack_bits(codes.view(-1, 32), 3).view(*leading, 12)
    for view in (*VIEWS.values(), lambda t: (t, t)):
        x, _ = view(flat.view(shape))
        out, _ = view(torch.empty(shape))
        assert torch.equal(ops.hadamard_transform(x), want)
        assert torch.equal(ops.hadamard_transform(x, out=out), want)
        assert torch.equal(ops.hadamard_transform(x, out=x), want)
        bits, _ = view(codes)
        assert torch.equal(ops.pack_bits(bits, 3), packed)
        bits_out, _ = view(torch.empty_like(packed))
        assert torch.equal(ops.pack_bits(bits, 3, out=bits_out), packed)
        assert torch.equal(ops.unpack_bits(bits_out, 3, 32), codes)
        codes_out, _ = view(torch.empty_like(codes))
        assert torch.equal(ops.unpack_bits(bits_out, 3, 32, out=codes_out), codes)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)])
def test_normalize_any_number_of_leading_dimensions(leading: tuple[int, ...]) -> None:
    tiles = torch.randn(*leading, 6, 10)
    flat = ops.variance_normalize(tiles.view(-1, 6, 10))
    balanced, rows, cols = ops.variance_normalize(tiles)
    assert balanced.shape == tiles.shape
    assert rows.shape == (*leading, 6)
    assert cols.shape == (*leading, 10)
    for got, want in zip((balanced, rows, cols), flat, strict=True):
        assert torch.equal(got.reshape(want.shape), want)


@pytest.mark.parametrize("op", TENSOR_OPS)
def test_empty(op: str) -> None:
    """No tiles, tokens or sequences: results of the right shape, nothing written."""
    if op == "hadamard_transform":
        assert ops.hadamard_transform(torch.empty(0, 3, 64)).shape == (0, 3, 64)
        return
    arguments = op_calls.call(op)
    outputs = [arguments[name].clone() for name in op_calls.WRITTEN.get(op, ())]
    first = {"append_kv", "seal_blocks"}
    keep = {
        "append_kv": ("staging", "block_slot"),
        "seal_blocks": ("staging", "cache", "count"),
        "decode_attention": ("cache", "staging", "block_slot", "sinks", "workspace"),
        "gather_kv": ("cache", "staging", "block_slot"),
    }.get(op, ())
    for name, t in op_calls.tensors(arguments).items():
        if name in keep:
            continue
        starts = name.startswith("cu_")
        arguments = op_calls.replace(arguments, name, t[:1] if starts else t[:0])
    if op == "seal_blocks":
        arguments["count"] = torch.zeros(1, dtype=torch.int32)
    if op == "gather_kv":
        arguments["total_tokens"] = 0
    if op == "pack_records":
        arguments["canonical"] = type(arguments["canonical"])(
            *(t[:0] for t in op_calls.call(op)["canonical"])
        )
    results = op_calls.run(op, arguments)
    if op in first:
        for got, want in zip(results, outputs, strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    else:
        assert all(isinstance(t, Tensor) and t.shape[0] == 0 for t in results)
