"""Arguments that are accepted have an effect, and threads have none."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import op_calls
import pytest
import torch
from torch import Tensor

from kvarn import ops

#: Another value for every argument that is no tensor of data, and for the optional tensors.
OTHER_VALUES: list[tuple[str, str, Any]] = [
    ("hadamard_transform", "scale", 0.25),
    ("hadamard_transform", "scale", None),
    ("variance_normalize", "iterations", 0),
    ("quantize_tiles", "fit", "minmax"),
    ("quantize_tiles", "iterations", 0),
    ("quantize_tiles", "rotated", True),
    ("dequantize_tiles", "rotated", True),
    ("seal_blocks", "fit", "unbiased"),
    ("seal_blocks", "iterations", 8),
    ("seal_blocks", "count", None),
    ("seal_blocks", "count", torch.tensor([1], dtype=torch.int32)),
    ("decode_attention", "cu_query_lens", torch.tensor([0, 0, 3, 3])),
    ("decode_attention", "sm_scale", 0.2),
    ("decode_attention", "sm_scale", None),
    ("decode_attention", "logits_soft_cap", 0.0),
    ("decode_attention", "logits_soft_cap", 1.0),
    ("decode_attention", "window_left", 3),
    ("decode_attention", "window_left", -1),
    ("decode_attention", "sinks", None),
    ("decode_attention", "block_slot", torch.full((6,), -1)),
    ("gather_kv", "block_slot", torch.full((6,), -1)),
    ("gather_kv", "rotated", True),
]


def different(got: tuple[Any, ...], want: tuple[Any, ...]) -> bool:
    pairs = zip(got, want, strict=True)
    return any(not torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize(("op", "name", "value"), OTHER_VALUES)
def test_fault26_every_argument_has_an_effect(op: str, name: str, value: Any) -> None:
    usual = op_calls.run(op, op_calls.call(op))
    assert different(op_calls.run(op, op_calls.call(op) | {name: value}), usual)


def test_fault26_causal() -> None:
    arguments = op_calls.call("decode_attention") | {"cu_query_lens": torch.tensor([0, 3, 3, 3])}
    causal = [t.clone() for t in op_calls.run("decode_attention", arguments)]
    full = op_calls.run("decode_attention", arguments | {"causal": False})
    assert different(tuple(full), tuple(causal))


def test_fault26_staging_is_read() -> None:
    for op in ("decode_attention", "gather_kv"):
        arguments = op_calls.call(op)
        usual = op_calls.run(op, op_calls.call(op))
        arguments["staging"] += 1
        assert different(op_calls.run(op, arguments), usual)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_of_new_results(dtype: torch.dtype) -> None:
    for op in ("dequantize_tiles", "gather_kv"):
        arguments = op_calls.call(op) | {"dtype": dtype, "out": None}
        assert [t.dtype for t in op_calls.run(op, arguments)] == [dtype, dtype]
    arguments = op_calls.call("gather_kv") | {"dtype": None, "out": None}
    arguments["staging"] = arguments["staging"].to(dtype)
    assert ops.gather_kv(**arguments)[0].dtype == dtype
    arguments |= {"staging": None, "block_slot": None, "total_tokens": None}
    key, value = ops.gather_kv(**arguments)
    assert key.dtype == value.dtype == torch.float16
    assert key.shape[0] == int(arguments["cu_seq_lens"][-1])


def test_default_iterations() -> None:
    arguments = op_calls.call("quantize_tiles") | {"out": None}
    for fit, rounds in (("minmax", 8), ("unbiased", 4)):
        arguments["fit"] = fit
        default = ops.quantize_tiles(**arguments | {"iterations": None})
        assert torch.equal(default, ops.quantize_tiles(**arguments | {"iterations": rounds}))


def test_out_is_returned() -> None:
    for op in op_calls.OPS:
        arguments = op_calls.call(op)
        if "out" in arguments:
            result = op_calls.function(op)(**arguments)
            want = arguments["out"]
            if isinstance(want, Tensor):
                assert result is want
            else:
                assert all(a is b for a, b in zip(result, want, strict=True))


def test_lone_out_with_lse() -> None:
    arguments = op_calls.call("decode_attention")
    want = [t.clone() for t in ops.decode_attention(**arguments)]
    out = torch.empty_like(want[0])
    got = ops.decode_attention(**arguments | {"out": out})
    assert got[0] is out
    assert not different(tuple(got), tuple(want))


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("op", [op for op in op_calls.OPS if op != "decode_workspace_bytes"])
def test_fault07_threads_change_nothing(op: str) -> None:
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(op_calls.run(op, op_calls.call(op)))
    assert not any(different(r, results[0]) for r in results)


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
def test_threads_are_those_of_torch() -> None:
    torch.set_num_threads(1)
    before = len(os.listdir("/proc/self/task"))
    seen = 0

    def watch(stop: threading.Event) -> None:
        nonlocal seen
        while not stop.is_set():
            seen = max(seen, len(os.listdir("/proc/self/task")))

    stop = threading.Event()
    watcher = threading.Thread(target=watch, args=(stop,))
    watcher.start()
    try:
        for op in op_calls.OPS:
            op_calls.run(op, op_calls.call(op))
    finally:
        stop.set()
        watcher.join()
    assert seen == before + 1  # the watcher


def test_fault20_calls_from_many_threads_at_once() -> None:
    tensor_ops = [op for op in op_calls.OPS if op != "decode_workspace_bytes"]
    want = {op: op_calls.run(op, op_calls.call(op)) for op in tensor_ops}
    failures: list[str] = []

    def work() -> None:
        failures.extend(
            op for op in want if different(op_calls.run(op, op_calls.call(op)), want[op])
        )

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
