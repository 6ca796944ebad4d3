"""Ops one behind the other on a stream: kernels that start while the one before them still runs
(programmatic dependent launch) see what it writes, and it sees nothing of them."""

from __future__ import annotations

from collections.abc import Callable

import cuda_helpers as gpu
import pytest
import torch
from cuda_helpers import DEVICE
from torch import Tensor

from kvarn import Format, ops

pytestmark = pytest.mark.cuda

FMT = Format("kvarn_k4v2_g128", head_dim=128)
SEQS, HEADS, GROUP_SIZE, BLOCKS = 40, 2, 4, 3
STEPS = 2 * FMT.group + 9


class Loop:
    """Decode steps of sequences of one length whose newest block is staged. Every input of an op
    is made by the kernel right before it."""

    def __init__(self) -> None:
        g = FMT.group
        self.cache = torch.zeros(SEQS * BLOCKS, HEADS, FMT.record_bytes, dtype=torch.uint8)
        self.cache = self.cache.to(DEVICE)
        self.staging = gpu.poison(gpu.normal(SEQS, 2, HEADS, g, FMT.head_dim))
        self.table = torch.arange(SEQS * BLOCKS, dtype=torch.int32, device=DEVICE)
        self.table = self.table.view(SEQS, BLOCKS)
        self.rows = torch.arange(SEQS, dtype=torch.int32, device=DEVICE)
        self.lengths = torch.zeros(SEQS, dtype=torch.int32, device=DEVICE)
        self.block_slot = torch.full((SEQS * BLOCKS,), -1, dtype=torch.int32, device=DEVICE)
        self.noise = gpu.normal(3, 4, SEQS, HEADS * GROUP_SIZE, FMT.head_dim, seed=7)
        self.step_number = torch.zeros((), dtype=torch.int64, device=DEVICE)
        self.out = torch.zeros(SEQS, HEADS * GROUP_SIZE, FMT.head_dim, device=DEVICE).half()

    def step(self, between: Callable[[], None]) -> Tensor:
        """between: called after each op of the library."""
        g, cells = FMT.group, self.block_slot.view(SEQS, BLOCKS)
        index = self.step_number % self.noise.shape[1]
        q, k, v = self.noise.index_select(1, index[None])[:, 0].unbind()
        block = self.step_number // g
        cells.fill_(-1)
        cells.index_copy_(1, block[None], self.rows[:, None])
        slots = self.table[:, 0].long() * g + self.step_number
        ops.append_kv(k[:, :HEADS] + block, v[:, :HEADS], slots, self.staging, self.block_slot, FMT)
        between()
        fills = (self.step_number + 1) % g == 0
        blocks = torch.where(fills, self.table[:, 0] + block, -1).int()
        ops.seal_blocks(self.staging, self.rows, blocks, self.cache, FMT)
        between()
        cells.masked_fill_(fills, -1)  # read as a record at once
        self.step_number += 1
        self.lengths.copy_(self.step_number.int().expand(SEQS))
        ops.decode_attention(
            q.contiguous(), self.cache, self.table, self.lengths, FMT, staging=self.staging,
            block_slot=self.block_slot, out=self.out,
        )  # fmt: skip
        between()
        return self.out.clone()


def test_ops_in_a_row_wait_for_each_other() -> None:
    waiting, racing, replayed = Loop(), Loop(), Loop()
    want = torch.stack([waiting.step(gpu.synchronize) for _ in range(STEPS)])
    got = torch.stack([racing.step(lambda: None) for _ in range(STEPS)])
    assert want.isfinite().all() and want.abs().amax((1, 2, 3)).min() > 0
    assert torch.equal(got, want)
    assert torch.equal(racing.cache, waiting.cache)
    first = replayed.step(lambda: None)  # a graph's capture runs nothing
    assert torch.equal(first, want[0])
    replay, result = gpu.captured(lambda: replayed.step(lambda: None))
    # `captured` may have run it to warm up.
    done = int(replayed.step_number)
    for i in range(done, STEPS):
        replay()
        assert torch.equal(result, want[i]), i
    assert torch.equal(replayed.cache, waiting.cache)


def test_decodes_in_a_row_share_a_workspace() -> None:
    """Each takes the words of its own launch, while the one before may not have ended."""
    lengths = [1, 300, 5 * FMT.group, 2]
    tiles = 5
    key, value = (x.to(DEVICE) for x in gpu.uneven(FMT, 4 * tiles, HEADS))
    cache = ops.quantize_tiles(key, value, FMT)
    table = torch.arange(4 * tiles, dtype=torch.int32, device=DEVICE).view(4, tiles)
    q = gpu.normal(64, 4, HEADS * GROUP_SIZE, FMT.head_dim)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    size = ops.decode_workspace_bytes(
        FMT, num_seqs=4, num_q_heads=HEADS * GROUP_SIZE, num_kv_heads=HEADS,
        max_seq_len=tiles * FMT.group, device=DEVICE,
    )  # fmt: skip
    workspace = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    outs = torch.empty_like(q)
    want = torch.empty_like(q)
    for i in range(len(q)):
        ops.decode_attention(q[i], cache, table, seq_lens, FMT, workspace=workspace, out=want[i])
        gpu.synchronize()
    for _ in range(5):
        outs.fill_(float("nan"))
        for i in range(len(q)):
            ops.decode_attention(
                q[i], cache, table, seq_lens, FMT, workspace=workspace, out=outs[i]
            )
        assert torch.equal(outs, want)
