"""How the ops run on CUDA: in graphs, on any stream, without waiting, without memory of their own,
the same way every time; and what torch must know of them."""

from __future__ import annotations

from typing import Any

import cuda_helpers as gpu
import op_calls
import pytest
import torch
from cuda_helpers import DEVICE, OPS, format_of
from test_compile import compiled, split
from test_ops_devices import same_bits
from torch import Tensor

from kvarn import ops

pytestmark = pytest.mark.cuda

#: Ops whose results are new tensors: how many.
ALLOCATING = {"variance_normalize": 3, "unpack_records": 8}


def inputs(op: str, arguments: op_calls.Call) -> dict[str, Tensor]:
    """The tensors that an op reads; a cache or a pool that it also writes is none of them."""
    written = {"out", *op_calls.WRITTEN.get(op, ())}
    return op_calls.tensors({k: v for k, v in arguments.items() if k not in written})


def outputs(op: str, arguments: op_calls.Call) -> dict[str, Tensor]:
    written = {"out", *op_calls.WRITTEN.get(op, ())}
    return op_calls.tensors({k: v for k, v in arguments.items() if k in written})


def change(op: str, arguments: op_calls.Call) -> None:
    """Other valid inputs, in place: floats get a new sign and place, codes and metadata a place."""
    for name, t in inputs(op, arguments).items():
        if name == "count":
            t -= 1
        elif name != "block_slot":
            t.copy_(t.roll(1, 0) * (-1.5 if t.is_floating_point() else 1))


def clones(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.clone()
    if isinstance(x, dict):
        return {name: clones(value) for name, value in x.items()}
    if isinstance(x, tuple):
        parts = [clones(part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


@pytest.mark.parametrize("op", OPS)
def test_fault21_replay_is_eager_after_changes_in_place(op: str) -> None:
    arguments = gpu.call(op)
    replay, result = gpu.captured(lambda: op_calls.run(op, arguments))
    seen = []
    for _ in range(3):
        change(op, arguments)
        for t in outputs(op, arguments).values():
            gpu.poison(t)
        eager = clones(arguments)
        replay()
        same_bits(result, op_calls.run(op, eager))
        seen.append(clones(result[0]).view(torch.uint8))
    # The changes did change something.
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("op", OPS)
def test_fault24_one_call_is_one_launch(op: str) -> None:
    arguments = gpu.call(op)
    assert gpu.graph_nodes(lambda: op_calls.run(op, arguments)) == [0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("how", [("unbiased", 0), ("unbiased", 4), ("minmax", 8)])
def test_fault24_many_tiles_are_one_launch(how: tuple[str, int], dtype: torch.dtype) -> None:
    fit, iterations = how
    fmt = format_of((4, 2), 128, 128)
    x = torch.randn(256, 128, 8, 128, device=DEVICE).to(dtype)
    out = torch.empty(256, 8, fmt.record_bytes, dtype=torch.uint8, device=DEVICE)
    assert gpu.graph_nodes(
        lambda: ops.quantize_tiles(x, x, fmt, fit=fit, iterations=iterations, out=out)
    ) == [0]
    result = (torch.empty_like(x), torch.empty_like(x))
    assert gpu.graph_nodes(lambda: ops.dequantize_tiles(out, fmt, out=result)) == [0]


@pytest.mark.parametrize("op", OPS)
def test_runs_on_the_current_stream(op: str) -> None:
    """Inputs that come late on a stream of their own: until then they are zeros and padding."""
    late = gpu.call(op)
    want = op_calls.run(op, clones(late))
    arguments = clones(late)
    for t in inputs(op, arguments).values():
        t.fill_(-1 if t.dtype in (torch.int32, torch.int64) and t.numel() > 1 else 0)
    (stream,) = gpu.other_streams(1)
    with torch.cuda.stream(stream):
        gpu.keep_busy()
        for name, t in inputs(op, arguments).items():
            t.copy_(inputs(op, late)[name])
        got = op_calls.run(op, arguments)
    stream.synchronize()
    same_bits(got, want)


@pytest.mark.parametrize("op", OPS)
def test_fault21_does_not_wait_for_the_device(op: str) -> None:
    """The call returns while the stream is still busy with earlier work; torch sees no wait."""
    arguments = gpu.call(op)
    op_calls.run(op, arguments)
    gpu.synchronize()
    done = gpu.keep_busy()
    torch.cuda.set_sync_debug_mode("error")
    try:
        op_calls.run(op, arguments)
        returned_early = not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gpu.synchronize()
    assert returned_early


@pytest.mark.parametrize("op", OPS)
def test_fault21_takes_no_memory(op: str) -> None:
    """Neither from torch nor from the driver; only results that are new tensors."""
    arguments = gpu.call(op)
    op_calls.run(op, arguments)
    gpu.synchronize()
    taken = []
    for _ in range(
        4
    ):  # another process may take memory of the device meanwhile; a leak never rests
        free, _ = torch.cuda.mem_get_info()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(3):
            op_calls.run(op, arguments)
        gpu.synchronize()
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
        assert after - before == 3 * ALLOCATING.get(op, 0)
        taken.append(free - torch.cuda.mem_get_info()[0])
    assert 0 in taken, taken


@pytest.mark.parametrize("op", OPS)
def test_fault07_repeats_are_bit_identical(op: str) -> None:
    first = op_calls.run(op, gpu.call(op))
    for _ in range(10):
        same_bits(op_calls.run(op, gpu.call(op)), first)


@pytest.mark.parametrize("how", [("unbiased", 0), ("unbiased", 4), ("minmax", 8)])
@pytest.mark.parametrize("bits", [(4, 2), (3, 3), (8, 4)])
def test_fault07_full_grids_are_bit_identical(bits: tuple[int, int], how: tuple[str, int]) -> None:
    """More tiles than the GPU holds at once, so that their order and neighbours vary."""
    fit, iterations = how
    for group, head_dim in ((128, 128), (64, 64), (128, 256)):
        fmt = format_of(bits, group, head_dim)
        x = torch.randn(131, group, 8, head_dim, device=DEVICE).half()
        first = ops.quantize_tiles(x, x, fmt, fit=fit, iterations=iterations)
        tiles = ops.dequantize_tiles(first, fmt)
        for _ in range(10):
            again = ops.quantize_tiles(x, x, fmt, fit=fit, iterations=iterations)
            assert torch.equal(again, first)
            same_bits(ops.dequantize_tiles(again, fmt), tiles)


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: str) -> None:
    """Schemas tell the truth, fakes agree with kernels, functionalization sees what it must."""
    arguments = gpu.on_device(op_calls.raw(op))
    overload = getattr(torch.ops.kvarn, op).default
    results = torch.library.opcheck(overload, tuple(arguments.values()))
    assert set(results.values()) == {"SUCCESS"}


def test_opcheck_seal_without_count() -> None:
    arguments = gpu.on_device(op_calls.raw("seal_blocks")) | {"count": None}
    results = torch.library.opcheck(torch.ops.kvarn.seal_blocks.default, tuple(arguments.values()))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", OPS)
def test_compile(op: str) -> None:
    """fullgraph=True: the same numbers as without."""
    want = clones(op_calls.run(op, gpu.call(op)))
    tensors, rest = split(gpu.call(op))
    torch._dynamo.reset()
    run = compiled(lambda tensors: op_calls.run(op, tensors | rest), False, "aot_eager")
    same_bits(run(tensors), want)
    torch._dynamo.reset()


@pytest.mark.parametrize("op", OPS)
def test_every_written_tensor_is_in_the_schema(op: str) -> None:
    """Tensors that the schema does not mark stay as they are, bit for bit."""
    arguments = gpu.on_device(op_calls.raw(op))
    schema = getattr(torch.ops.kvarn, op).default._schema
    read = tuple(
        arguments[a.name]
        for a in schema.arguments
        if isinstance(arguments[a.name], Tensor)
        and not (a.alias_info is not None and a.alias_info.is_write)
    )
    before = clones(read)
    getattr(torch.ops.kvarn, op)(*arguments.values())
    same_bits(read, before)


@pytest.mark.parametrize("op", [op for op in OPS if op not in op_calls.WRITTEN])
def test_outputs_are_written_whole(op: str) -> None:
    """Whatever was in the memory of a result is gone."""
    overload = getattr(torch.ops.kvarn, op)
    overload = overload.out if op == "hadamard_transform" else overload.default
    arguments = gpu.on_device(op_calls.raw(op))
    if op == "hadamard_transform":
        arguments["out"] = torch.empty_like(arguments["x"])
    schema = overload._schema.arguments
    written = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
    results = []
    for byte in (0, 255):
        for name in written:
            arguments[name].view(torch.uint8).fill_(byte)
        overload(*arguments.values())
        results.append(tuple(arguments[name].clone() for name in written))
    same_bits(*results)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("checked", ["0", "1"])
@pytest.mark.parametrize("op", op_calls.OPS)
def test_runs_on_the_gpu_of_its_tensors(op: str, checked: str, monkeypatch: Any) -> None:
    """Whichever is the current one; two GPUs take part in no op."""
    monkeypatch.setenv("KVARN_CHECKED", checked)
    arguments = gpu.call(op)
    other = {
        name: value if value is None else _to(value, "cuda:1") for name, value in arguments.items()
    }
    if op == "decode_workspace_bytes":
        arguments["device"], other["device"] = "cuda:0", "cuda:1"
    expected, results = op_calls.run(op, arguments), op_calls.run(op, other)
    assert torch.cuda.current_device() == 0
    if op == "decode_workspace_bytes":
        assert results == expected
        return
    assert {result.device for result in results} == {torch.device("cuda:1")}
    same_bits(*(tuple(t.cpu() for t in tensors) for tensors in (results, expected)))
    names = op_calls.tensors(other)
    for name in names if len(names) > 1 else ():
        mixed = op_calls.replace(other, name, op_calls.tensors(arguments)[name])
        with pytest.raises(ValueError, match="on cuda:[01]"):
            op_calls.run(op, mixed)


def _to(x: Any, device: str) -> Any:
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, tuple):
        parts = [_to(part, device) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x
