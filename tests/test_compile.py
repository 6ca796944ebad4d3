"""torch.compile(fullgraph=True): every operator of kvarn.ops, and the same numbers as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import op_calls
import pytest
import torch
from torch import Tensor

from kvarn import Format, ops

FMT = Format("kvarn_k4v2_g64", head_dim=64)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], dynamic: bool, backend: str) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)


def split(arguments: op_calls.Call) -> tuple[op_calls.Call, op_calls.Call]:
    """Tensors, and the rest: what a compiled function gets, and what it closes over."""
    tensors = {k: v for k, v in arguments.items() if isinstance(v, (Tensor, tuple))}
    return tensors, {k: v for k, v in arguments.items() if k not in tensors}


def same(got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        if isinstance(b, Tensor):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        else:
            assert a == b


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("op", "with_out"),
    [
        (op, with_out)
        for op in op_calls.OPS
        for with_out in ([False, True] if "out" in op_calls.parameters(op) else [True])
    ],
)
def test_op(op: str, with_out: bool, dynamic: bool) -> None:
    arguments = op_calls.call(op)
    if not with_out:
        arguments |= {k: None for k in ("out", "workspace") if k in arguments}
    want = tuple(
        t.clone() if isinstance(t, Tensor) else t for t in op_calls.run(op, dict(arguments))
    )
    tensors, rest = split(op_calls.call(op))
    if not with_out:
        tensors.pop("out", None)
        tensors.pop("workspace", None)

    def call(tensors: op_calls.Call) -> tuple[Any, ...]:
        return op_calls.run(op, tensors | rest)

    same(compiled(call, dynamic, "aot_eager")(tensors), want)


def test_dynamic_shapes_do_not_recompile() -> None:
    """One graph for every batch size and table width."""
    graphs = 0

    def counting(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def step(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        return ops.decode_attention(q, cache, table, lens, FMT, return_lse=True)

    function = torch.compile(step, fullgraph=True, dynamic=True, backend=counting)
    cache = op_calls.call("decode_attention")["cache"]
    for batch, width in [(3, 5), (5, 4), (7, 3), (2, 9)]:
        q = torch.randn(batch, 6, 64)
        table = torch.randint(0, 6, (batch, width), dtype=torch.int32)
        lens = torch.randint(0, width * 64 + 1, (batch,), dtype=torch.int32)
        same(function(q, cache, table, lens), step(q, cache, table, lens))
    assert graphs == 1


def decode_step(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, staging: Tensor, block_slot: Tensor,
    records_only: Tensor, cache: Tensor, table: Tensor, lens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What an engine compiles: append, seal, attend, each seeing what the last one wrote."""
    ops.append_kv(k, v, slots, staging, block_slot, FMT)
    ops.seal_blocks(staging, block_slot[:1], table[0], cache, FMT)
    out = ops.decode_attention(q, cache, table, lens, FMT, staging=staging, block_slot=records_only)
    return ops.hadamard_transform(out), staging, cache


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_mutation_is_ordered(backend: str) -> None:
    def inputs() -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        return (
            torch.randn(2, 6, 64), torch.randn(2, 2, 64), torch.randn(2, 2, 64),
            torch.tensor([5, 64 + 7]), torch.randn(3, 2, 2, 64, 64),
            torch.tensor([2, 0], dtype=torch.int32), torch.tensor([-1, 0], dtype=torch.int32),
            torch.zeros(FMT.cache_shape(2, 2)).byte(),
            torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([64, 8], dtype=torch.int32),
        )  # fmt: skip

    eager_inputs, compiled_inputs = inputs(), inputs()
    want = decode_step(*eager_inputs)
    got = compiled(decode_step, False, backend)(*compiled_inputs)
    same(got, want)
    same(compiled_inputs, eager_inputs)


def test_compiled_gradient() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    weight = torch.randn(4, 64)
    function = compiled(lambda x: ops.hadamard_transform(x, scale=0.5) * weight, True, "aot_eager")
    function(x).sum().backward()
    assert torch.equal(x.grad, ops.hadamard_transform(weight, scale=0.5))


def test_workspace_is_sized_inside_the_graph() -> None:
    def attend(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        size = ops.decode_workspace_bytes(
            FMT, num_seqs=q.shape[0], num_q_heads=6, num_kv_heads=2,
            max_seq_len=table.shape[1] * FMT.group,
        )  # fmt: skip
        workspace = torch.empty(size, dtype=torch.uint8)
        return ops.decode_attention(q, cache, table, lens, FMT, workspace=workspace)

    arguments = op_calls.call("decode_attention")
    inputs = [arguments[name] for name in ("q", "cache", "block_table", "seq_lens")]
    same((compiled(attend, False, "aot_eager")(*inputs),), (attend(*inputs),))
