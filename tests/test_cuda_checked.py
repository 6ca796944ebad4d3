"""KVARN_CHECKED=1 on CUDA: metadata that points nowhere is named, and nothing is written.

The variable belongs to the process, so these tests run in one of their own, which the last test
starts.
"""

from __future__ import annotations

import os
import subprocess
import sys

import cuda_helpers as gpu
import op_calls
import pytest
import torch
from cuda_helpers import DEVICE
from test_append_seal import BAD_SLOTS, BAD_TILES
from test_ops_devices import same_bits

from kvarn import ops

CHECKED = os.environ.get("KVARN_CHECKED") == "1"

pytestmark = pytest.mark.cuda
checked = pytest.mark.skipif(not CHECKED, reason="needs KVARN_CHECKED=1: see the last test")

FMT = op_calls.FMT


@checked
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize(("change", "message"), BAD_SLOTS)
def test_fault19_invalid_slot_is_named_and_nothing_written(
    change: dict[str, list[int]], message: str, kind: torch.dtype
) -> None:
    slots = change["slot_mapping"]
    if kind is torch.int32 and max(slots) > 2**31 - 1:
        return
    key, value = gpu.normal(2, 2, 2, 64)
    staging = gpu.poison(gpu.normal(4, 2, 2, 64, 64))
    block_slot = torch.tensor([2, 0, 3, -1, 4], dtype=torch.int32).to(DEVICE)
    with pytest.raises(RuntimeError, match=f"^kvarn::append_kv: {message}$"):
        ops.append_kv(
            key, value, torch.tensor(slots, dtype=kind).to(DEVICE), staging, block_slot, FMT
        )
    assert staging.isnan().all()


@checked
def test_fault19_the_first_of_many_offenders_is_named() -> None:
    key, value = gpu.normal(2, 70_000, 1, 64)
    staging = gpu.poison(gpu.normal(4, 2, 1, 64, 64))
    slots = torch.arange(70_000) % 256
    slots[40_003:] = 999
    block_slot = torch.arange(4, dtype=torch.int32).to(DEVICE)
    with pytest.raises(RuntimeError, match=r"got 999 at index 40003$"):
        ops.append_kv(key, value, slots.to(DEVICE), staging, block_slot, FMT)
    assert staging.isnan().all()


@checked
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize(("slots", "blocks", "count", "message"), BAD_TILES)
def test_fault19_invalid_tile_is_named_and_nothing_written(
    slots: list[int], blocks: list[int], count: int | None, message: str, kind: torch.dtype
) -> None:
    if kind is torch.int32 and max(slots) > 2**31 - 1:
        return
    staging = gpu.normal(4, 2, 2, 64, 64)
    cache = gpu.poison(torch.zeros(9, 2, FMT.record_bytes, dtype=torch.uint8).to(DEVICE))
    limit = None if count is None else torch.tensor([count], dtype=torch.int32).to(DEVICE)
    where = (torch.tensor(x, dtype=kind).to(DEVICE) for x in (slots, blocks))
    with pytest.raises(RuntimeError, match=f"^kvarn::seal_blocks: {message}$"):
        ops.seal_blocks(staging, *where, cache, FMT, count=limit)
    assert (cache == 0xFF).all()


@checked
@pytest.mark.parametrize("op", ["append_kv", "seal_blocks"])
def test_valid_calls_are_as_without(op: str) -> None:
    """Padding, tiles beyond the count and int64 too; and a graph can still be captured."""
    on_cpu = op_calls.call(op)
    if op == "seal_blocks":
        on_cpu["slots"][3] = 999  # beyond the count
    else:
        on_cpu["slot_mapping"][1] = -(2**40)
    arguments = gpu.on_device(on_cpu)
    replay, result = gpu.captured(lambda: op_calls.run(op, arguments))
    replay()
    want = op_calls.run(op, on_cpu)
    if op == "append_kv":
        same_bits(tuple(t.cpu() for t in result), want)
    else:
        # Records are those of quantize_tiles on the GPU, which has tests of its own.
        untouched = [1, 2, 3, 4]
        assert torch.equal(result[0][untouched].cpu(), want[0][untouched])
        pages = arguments["staging"][[3, 1]].transpose(2, 3)
        records = ops.quantize_tiles(pages[:, 0], pages[:, 1], FMT, fit="minmax", iterations=1)
        assert torch.equal(result[0][[5, 0]], records)


@pytest.mark.skipif(CHECKED, reason="this is that process")
def test_fault19_in_a_process_with_kvarn_checked() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"KVARN_CHECKED": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed, 1 skipped" in done.stdout
