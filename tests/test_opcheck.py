"""torch.library.opcheck: schemas tell the truth, fakes agree with kernels, functionalization and
autograd see what they must."""

from __future__ import annotations

import op_calls
import pytest
import torch

OPTIONAL = {
    "seal_blocks": ("count",),
    "decode_attention": ("staging", "block_slot", "cu_query_lens", "sinks", "workspace", "lse"),
    "gather_kv": ("staging", "block_slot"),
}


def check(op: str, arguments: op_calls.Call) -> None:
    overload = getattr(torch.ops.kvarn, op).default
    results = torch.library.opcheck(overload, tuple(arguments.values()))
    assert set(results.values()) == {"SUCCESS"}


def prepared(op: str) -> op_calls.Call:
    arguments = op_calls.raw(op)
    if "workspace" in arguments:
        # What is left in it depends on the threads, and opcheck would compare it.
        arguments["workspace"] = None
    return arguments


@pytest.mark.parametrize("op", op_calls.OPS)
def test_opcheck(op: str) -> None:
    check(op, prepared(op))


@pytest.mark.parametrize("op", OPTIONAL)
def test_opcheck_without_optional_tensors(op: str) -> None:
    check(op, prepared(op) | dict.fromkeys(OPTIONAL[op]))


def test_opcheck_differentiable() -> None:
    check("hadamard_transform", {"x": torch.randn(3, 64, requires_grad=True), "scale": None})


def test_opcheck_out_variant() -> None:
    arguments = (torch.randn(3, 64), 0.5, torch.empty(3, 64))
    results = torch.library.opcheck(torch.ops.kvarn.hadamard_transform.out, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", op_calls.OPS)
def test_every_written_tensor_is_in_the_schema(op: str) -> None:
    """Tensors that the schema does not mark stay as they are, bit for bit."""
    arguments = op_calls.raw(op)
    schema = getattr(torch.ops.kvarn, op).default._schema
    read = {
        a.name: arguments[a.name]
        for a in schema.arguments
        if isinstance(arguments[a.name], torch.Tensor)
        and not (a.alias_info is not None and a.alias_info.is_write)
    }
    before = {name: t.clone() for name, t in read.items()}
    getattr(torch.ops.kvarn, op)(*arguments.values())
    for name, t in read.items():
        assert torch.equal(t.view(torch.uint8), before[name].view(torch.uint8)), name
