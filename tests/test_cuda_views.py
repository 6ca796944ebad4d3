"""Where tensors may lie on CUDA: every argument of every op as every kind of view, as in
test_ops_devices.py, and what is refused, in words, before anything is written."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import cuda_helpers as gpu
import op_calls
import pytest
import test_ops_devices as views
import torch
from cuda_helpers import DEVICE, OPS
from test_ops_devices import CANARY, SAME_EVERYWHERE, is_output, is_strided, names, same_bits
from torch import Tensor
from views import FAR

from kvarn import Format, _backends, ops

pytestmark = pytest.mark.cuda

ARGUMENTS = [(op, name) for op in OPS for name in names(op)]
INPUTS = [(op, name) for op, name in ARGUMENTS if not is_output(op, name)]
OUTPUTS = [(op, name) for op, name in ARGUMENTS if is_output(op, name)]


@functools.cache
def expected(op: str, ones: bool = False) -> tuple[Any, ...]:
    return op_calls.run(op, gpu.call(op, ones=ones))


@pytest.mark.parametrize("op", OPS)
def test_is_in_the_list_of_cuda_ops(op: str) -> None:
    assert op in _backends.CUDA_OPS


@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_fault12_every_argument_as_a_view(op: str, name: str) -> None:
    for kind, make in views.VIEWS.items():
        arguments = gpu.call(op)
        view, buffer = make(op_calls.tensors(arguments)[name])
        same_bits(op_calls.run(op, op_calls.replace(arguments, name, view)), expected(op))
        if is_output(op, name):
            view.view(torch.uint8).fill_(CANARY)
            assert (buffer.view(torch.uint8) == CANARY).all(), kind


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, name in ARGUMENTS if is_strided(op, name)]
)
def test_fault12_metadata_of_any_strides(op: str, name: str) -> None:
    arguments = gpu.call(op)
    view, _ = views.spread_view(op_calls.tensors(arguments)[name])
    assert view.stride(-1) > 1
    same_bits(op_calls.run(op, op_calls.replace(arguments, name, view)), expected(op))


@pytest.mark.parametrize("op", ["append_kv", "seal_blocks"])
def test_fault12_int32_and_int64(op: str) -> None:
    indices = [
        name
        for name, t in op_calls.tensors(op_calls.call(op)).items()
        if t.dtype in (torch.int32, torch.int64) and name != "count"
    ]
    for dtypes in itertools.product((torch.int32, torch.int64), repeat=len(indices)):
        arguments = gpu.call(op)
        for name, dtype in zip(indices, dtypes, strict=True):
            arguments[name] = arguments[name].to(dtype)
        same_bits(op_calls.run(op, arguments), expected(op))


# Several tokens for one row: which one it gets is not defined.
EXPANDED = [i for i in INPUTS if i != ("append_kv", "slot_mapping")]


@pytest.mark.parametrize(("op", "name"), EXPANDED)
def test_fault12_expanded_inputs(op: str, name: str) -> None:
    """Stride 0 in the first dimension: all its entries are the first one."""
    arguments = gpu.call(op)
    t = op_calls.tensors(arguments)[name]
    if name in SAME_EVERYWHERE:
        t.fill_(SAME_EVERYWHERE[name])
    expanded = t[:1].expand(t.shape)
    own = expanded.clone(memory_format=torch.contiguous_format)
    got = op_calls.run(op, op_calls.replace(gpu.call(op), name, expanded))
    same_bits(got, op_calls.run(op, op_calls.replace(gpu.call(op), name, own)))


@pytest.mark.parametrize("op", OPS)
def test_fault12_dimensions_of_size_one(op: str) -> None:
    """The stride of a dimension of size 1 means nothing."""
    for name, t in op_calls.tensors(op_calls.call(op, ones=True)).items():
        strides = [
            7919 + 2 * i if n == 1 else s
            for i, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True))
        ]
        if strides == list(t.stride()):
            continue
        arguments = gpu.call(op, ones=True)
        odd = op_calls.tensors(arguments)[name].as_strided(t.shape, strides)
        same_bits(op_calls.run(op, op_calls.replace(arguments, name, odd)), expected(op, True))


@pytest.mark.parametrize("op", OPS)
def test_fault12_all_arguments_as_views_at_once(op: str) -> None:
    arguments = gpu.call(op)
    for kind, name in zip(itertools.cycle(views.VIEWS), names(op), strict=False):
        view, _ = views.VIEWS[kind](op_calls.tensors(arguments)[name])
        arguments = op_calls.replace(arguments, name, view)
    same_bits(op_calls.run(op, arguments), expected(op))


@pytest.mark.parametrize("op", OPS)
def test_fault12_slices_of_one_buffer(op: str) -> None:
    """All arguments of one dtype next to each other, at odd distances."""
    arguments = gpu.call(op)
    tensors = op_calls.tensors(arguments)
    for dtype in {t.dtype for t in tensors.values()}:
        mine = {name: t for name, t in tensors.items() if t.dtype == dtype}
        buffer = torch.empty(sum(t.numel() + 1 for t in mine.values()), dtype=dtype, device=DEVICE)
        at = 1
        for name, t in mine.items():
            piece = buffer[at : at + t.numel()].view(t.shape)
            piece.copy_(t)
            arguments = op_calls.replace(arguments, name, piece)
            at += t.numel() + 1
    same_bits(op_calls.run(op, arguments), expected(op))


ARENA_BYTES = 3 * 2 * FAR + 2**20


@pytest.fixture(scope="module")
def arena() -> Tensor:
    """Enough memory for four 16-bit pieces that are more than 2^31 elements apart."""
    return torch.empty(ARENA_BYTES, dtype=torch.uint8, device=DEVICE)


def far_view(t: Tensor, dim: int, arena: Tensor) -> Tensor | None:
    """t in the arena with a stride beyond 32 bits in one dimension; None if that does not fit."""
    memory = arena[: arena.numel() // t.element_size() * t.element_size()].view(t.dtype)
    order = [dim, *(i for i in range(t.dim()) if i != dim)]
    strides = views.packed_strides(list(t.shape), order, {})
    strides[dim] = FAR
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True))
    if t.shape[dim] == 1 or extent > memory.numel():
        return None
    return memory.as_strided(t.shape, strides).copy_(t)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (op, name)
        for op, name in ARGUMENTS
        if op_calls.tensors(op_calls.call(op))[name].dim() > 1 and name != "tiles"
    ],
)
def test_fault10_strides_beyond_int32(op: str, name: str, arena: Tensor) -> None:
    found = 0
    for dim in range(op_calls.tensors(op_calls.call(op))[name].dim() - 1):
        arguments = gpu.call(op)
        far = far_view(op_calls.tensors(arguments)[name], dim, arena)
        if far is not None:
            same_bits(op_calls.run(op, op_calls.replace(arguments, name, far)), expected(op))
            found += 1
    assert found > 0


def test_fault10_normalize_beyond_int32(arena: Tensor) -> None:
    x = gpu.normal(2, 8, 16, seed=1)
    want = ops.variance_normalize(x)
    for strides in ((FAR, 16, 1), (16, FAR // 3, 1)):
        far = arena.view(torch.float16).as_strided(x.shape, strides)
        far.copy_(x)
        same_bits(ops.variance_normalize(far), want)


@pytest.mark.parametrize("op", OPS)
def test_empty(op: str) -> None:
    """No tiles, tokens or rows: results of the right shape, nothing written."""
    arguments = gpu.call(op)
    before = {name: arguments[name].clone() for name in op_calls.WRITTEN.get(op, ())}
    keep = {*before, "block_slot", "staging", "count"}
    for name, t in op_calls.tensors(arguments).items():
        if name not in keep:
            arguments = op_calls.replace(arguments, name, t[:0])
    if op == "seal_blocks":
        arguments["count"].zero_()
    if op == "pack_records":
        arguments["canonical"] = type(arguments["canonical"])(
            *(t[:0] for t in gpu.call(op)["canonical"])
        )
    results = op_calls.run(op, arguments)
    if before:
        same_bits(results, tuple(before.values()))
    else:
        assert all(t.shape[0] == 0 for t in results)


# ---- Refused before anything is written --------------------------------------------------------


def refused(op: str, arguments: op_calls.Call, kind: type[Exception], message: str) -> None:
    """The call raises, and nothing that it could have written has changed."""
    outputs = [
        t
        for name, t in op_calls.tensors(arguments).items()
        if is_output(op, name) and t.device.type == DEVICE.type
    ]
    before = [t.clone() for t in outputs]
    with pytest.raises(kind, match=message):
        op_calls.run(op, arguments)
    gpu.synchronize()
    same_bits(tuple(outputs), tuple(before))


@pytest.mark.parametrize(("op", "name"), OUTPUTS)
def test_expanded_outputs_are_refused(op: str, name: str) -> None:
    arguments = gpu.call(op)
    t = op_calls.tensors(arguments)[name]
    bad = op_calls.replace(arguments, name, t[:1].expand(t.shape))
    refused(op, bad, ValueError, rf"kvarn::{op}: .* must not overlap itself, got strides \[0")


@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_another_dtype_or_shape_is_refused(op: str, name: str) -> None:
    t = op_calls.tensors(gpu.call(op))[name]
    # These may have any leading dimensions.
    shapes = [] if name in ("x", "tiles", "codes", "packed") else [t[None]]
    if shapes and name != "block_slot":
        shapes.append(t[..., :-1])
    for bad in (t.double(), *shapes):
        arguments = op_calls.replace(gpu.call(op), name, bad)
        refused(op, arguments, ValueError, rf"^kvarn::{op}: \S+ must be .* on {DEVICE.type}")


@pytest.mark.parametrize(("op", "name"), [a for a in ARGUMENTS if len(names(a[0])) > 1])
def test_tensors_of_two_devices_are_refused(op: str, name: str) -> None:
    """Nothing is ever moved silently."""
    elsewhere = op_calls.tensors(gpu.call(op))[name].to(gpu.ANOTHER_DEVICE)
    arguments = op_calls.replace(gpu.call(op), name, elsewhere)
    refused(op, arguments, ValueError, rf"^kvarn::{op}: \S+ must be .* got .* on ")


@pytest.mark.parametrize("op", [op for op in OPS if op != "hadamard_transform"])
def test_tensors_of_two_devices_are_refused_by_the_op_itself(op: str) -> None:
    """torch.ops.kvarn, called without the checks of kvarn.ops."""
    schema = getattr(torch.ops.kvarn, op).default._schema
    tensors = [name for name, t in op_calls.raw(op).items() if isinstance(t, Tensor)]
    for name in tensors:
        arguments = gpu.on_device(op_calls.raw(op))
        written = [
            arguments[a.name]
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and a.name != name
        ]
        before = [t.clone() for t in written]
        arguments[name] = arguments[name].to(gpu.ANOTHER_DEVICE)
        with pytest.raises(RuntimeError, match=f"kvarn::{op}: "):
            getattr(torch.ops.kvarn, op)(*arguments.values())
        same_bits(tuple(written), tuple(before))


@pytest.mark.parametrize("op", ["append_kv", "seal_blocks"])
def test_float32_pools_are_refused(op: str) -> None:
    """Staged pages have 16 bits on the GPU."""
    arguments = {
        name: x.float() if isinstance(x, Tensor) and x.dtype == torch.float16 else x
        for name, x in gpu.call(op).items()
    }
    refused(op, arguments, ValueError, rf"^kvarn::{op}: \S+ must be float16 or bfloat16 \[")
    raw = [
        x.float() if isinstance(x, Tensor) and x.dtype == torch.float16 else x
        for x in gpu.on_device(op_calls.raw(op)).values()
    ]
    with pytest.raises(RuntimeError, match=f"kvarn::{op}: "):
        getattr(torch.ops.kvarn, op)(*raw)


def test_head_dimension_512_is_refused() -> None:
    fmt = Format("kvarn_k4v2_g64", head_dim=512)
    x = gpu.normal(1, 64, 2, 512)
    out = torch.full((1, 2, fmt.record_bytes), 171, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"quantize_tiles: fmt must be .* at most 256 on CUDA"):
        ops.quantize_tiles(x, x, fmt, out=out)
    with pytest.raises(RuntimeError, match="kvarn::quantize_tiles: .*512"):
        torch.ops.kvarn.quantize_tiles(x, x, 4, 2, 64, 512, "unbiased", 4, False, out)
    gpu.synchronize()
    assert (out == 171).all()


@pytest.mark.parametrize("op", op_calls.WRITING)
def test_fault12_nothing_written_lies_over_any_other_argument(op: str) -> None:
    refused = 0
    for written, other, memory, arguments in op_calls.overlapping(op, DEVICE):
        before = memory.clone()
        with pytest.raises(RuntimeError, match="must not overlap"):
            op_calls.call_raw(op, arguments)
        gpu.synchronize()
        assert torch.equal(memory, before), (written, other)
        refused += 1
    assert refused
