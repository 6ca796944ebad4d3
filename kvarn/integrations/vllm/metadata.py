"""What the layers need to know about a step, computed once for all of them.

A step has new tokens of some requests, one or several each. ``past`` is what a request had before.
Of its new tokens those of the tile ``past // G`` are its *head*: they go to a page of the pool that
may hold tokens of earlier steps. What follows is whole tiles, quantized from the layer's own keys
and values, and the rest.

Everything on the device is computed from tensors that stay where they are, by the first layer: in a
captured step it is a part of the graph, and is computed anew in every replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
)

from kvarn.format import Format
from kvarn.integrations.vllm import _versions, pool
from kvarn.integrations.vllm.options import WHERE, Options
from kvarn.integrations.vllm.prefill import Prefill, plan_prefill
from kvarn.integrations.vllm.rows import to_device


@dataclass
class Geometry:
    """Blocks and pages: the same in all layers of a group.

    Attributes:
        fmt: the format.
        options: which blocks keep a copy.
        num_blocks: of the cache; the id of the first virtual block.
        block_slot: int32 ``[num_blocks + pages]``, see `pool.block_slot`.
        page_of_tile: int32 ``[max_blocks]``.
    """

    fmt: Format
    options: Options
    num_blocks: int
    block_slot: Tensor
    page_of_tile: Tensor


@dataclass
class Buffers:
    """Tensors that stay where they are, for the largest batch; a step uses their first entries."""

    rows: Tensor  #: int32 [R]: the row of a request, -1 for padding
    table: Tensor  #: int32 [R, max_blocks]: the block table with virtual blocks
    append: Tensor  #: int64 [tokens]: where head tokens go; -1: nowhere
    seal_pages: Tensor  #: int32 [R]: page of the head if it is full now, or -1
    seal_blocks: Tensor  #: int32 [R]: and its block

    @staticmethod
    def make(requests: int, max_blocks: int, device: torch.device) -> Buffers:
        def full(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, -1, dtype=dtype, device=device)

        return Buffers(
            rows=full(requests),
            table=full(requests, max_blocks),
            append=full(requests, dtype=torch.int64),
            seal_pages=full(requests),
            seal_blocks=full(requests),
        )


@dataclass
class KVarNMetadata(AttentionMetadata):  # type: ignore[misc]
    """A step. The first ``num_decodes`` requests have one new token each; those after them, if
    there are any, are described by ``prefill``."""

    geometry: Geometry
    num_reqs: int
    num_tokens: int
    num_decodes: int
    max_seq_len: int
    query_start_loc: Tensor  #: int32 [num_reqs + 1]
    seq_lens: Tensor  #: int32 [num_reqs], new tokens included; 0 for padding
    block_table: Tensor  #: int32 [num_reqs, max_blocks]
    slot_mapping: Tensor  #: int64 [num_tokens]; -1 for padding
    first_token: Tensor  #: int32 [rows]
    rows: Tensor  #: the rest are views of the `Buffers`, or for steps with prefill new
    table: Tensor
    append: Tensor
    seal_pages: Tensor
    seal_blocks: Tensor
    prefill: Prefill | None = None
    prepared: bool | None = None  #: whether while a graph was captured; None: not yet

    def prepare(self) -> None:
        """To be called by every layer before anything else."""
        capturing = self.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.prepared != capturing:
            self.prepared = capturing
            self._prepare()

    def _prepare(self) -> None:
        g, group = self.geometry, self.geometry.fmt.group
        sink, recent = g.options.sink_blocks, g.options.recent_blocks
        starts, lens = self.query_start_loc, self.seq_lens
        past = lens - (starts[1:] - starts[:-1])
        head = past // group
        row = self.rows.clamp(min=0)
        first_page = row * g.options.pages

        # The tiles that the next token would read in 16 bits, and the open one.
        tiles = torch.arange(self.table.shape[1], dtype=torch.int32, device=lens.device)
        staged = (tiles < sink) | (tiles >= (head - recent)[:, None])
        staged &= tiles <= head[:, None]
        staged &= tiles * group >= self.first_token[row][:, None]
        staged &= self.rows[:, None] >= 0
        virtual = (g.num_blocks + first_page)[:, None] + g.page_of_tile
        torch.where(staged, virtual, self.block_table, out=self.table)

        # Sealing the heads that are full. A step of padding only has no slots: it writes nothing.
        column = head.clamp(max=self.table.shape[1] - 1).long()
        last = (starts[1:] - 1).clamp(min=0).long()
        real = (self.rows >= 0) & (lens > past) & (self.slot_mapping[last] >= 0)
        full = real & (lens >= (head + 1) * group)
        page = first_page + g.page_of_tile[column]
        self.seal_pages.copy_(page.masked_fill(~full, -1))
        block = self.block_table.gather(1, column[:, None]).squeeze(1)
        self.seal_blocks.copy_(block.masked_fill(~full, -1))

        if self.prefill is None:
            slot = (g.num_blocks + page).long() * group + past % group
            self.append.copy_(slot.masked_fill(~real, -1))
        else:
            self._prepare_prefill(self.prefill, past, head, first_page)

    def _prepare_prefill(
        self, prefill: Prefill, past: Tensor, head: Tensor, first_page: Tensor
    ) -> None:
        g, group = self.geometry, self.geometry.fmt.group
        starts, lens = self.query_start_loc, self.seq_lens
        tokens = torch.arange(self.num_tokens, dtype=torch.int32, device=lens.device)
        request = torch.searchsorted(starts[1:], tokens, right=True).clamp(max=self.num_reqs - 1)
        position = past[request] + tokens - starts[request]
        tile = (position // group).clamp(max=self.table.shape[1] - 1)
        page = first_page[request] + g.page_of_tile[tile]
        slot = (g.num_blocks + page).long() * group + position % group
        real = (self.rows[request] >= 0) & (self.slot_mapping >= 0)
        is_head = tile == head[request]
        self.append.copy_(slot.masked_fill(~(real & is_head), -1))
        # What the next step reads in 16 bits.
        kept = tile < g.options.sink_blocks
        kept |= tile >= (lens // group - g.options.recent_blocks)[request]
        prefill.append_rest = slot.masked_fill(~(real & ~is_head & kept), -1)
        prefill.past = past
        if prefill.tiles is not None:
            # The request of a tile, its number, its first token among those of the step.
            owner, number, first = prefill.tiles.long()
            prefill.tile_blocks = self.block_table[owner, number].long()
            prefill.tile_tokens = (first[:, None] + torch.arange(group, device=first.device)).view(
                -1
            )


class KVarNMetadataBuilder(AttentionMetadataBuilder[KVarNMetadata]):  # type: ignore[misc]
    """Full CUDA graphs for steps of one token a request; others are captured piecewise."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        self._fmt = Format(vllm_config.cache_config.cache_dtype, kv_cache_spec.head_size)
        self._options = Options.of(vllm_config)
        self._max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self._geometry: Geometry | None = None
        self._buffers: Buffers | None = None

    def _make_geometry(self, max_blocks: int) -> Geometry:
        layers = self.vllm_config.compilation_config.static_forward_context
        num_blocks = layers[self.layer_names[0]].kv_cache.shape[0]
        tiles = torch.arange(max_blocks, dtype=torch.int32, device=self.device)
        return Geometry(
            self._fmt,
            self._options,
            num_blocks,
            pool.block_slot(num_blocks, self._max_num_seqs * self._options.pages, self.device),
            pool.page_of_tile(tiles, self._options).int(),
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> KVarNMetadata:
        m = common_attn_metadata
        if m.causal is not True:
            raise ValueError(f"{WHERE}attention must be causal")
        n, tokens = m.num_reqs, m.num_actual_tokens
        if self._buffers is None or self._geometry is None:
            max_blocks = m.block_table_tensor.shape[1]
            self._geometry = self._make_geometry(max_blocks)
            self._buffers = Buffers.make(self._max_num_seqs, max_blocks, self.device)
        rows = _versions.request_rows(m)
        if rows is None or rows.batch is None:
            raise RuntimeError(
                f"{WHERE}the model runner did not say which requests are in the step"
            )
        b = self._buffers
        live = min(n, rows.batch.shape[0])
        b.rows[:live].copy_(rows.batch[:live])
        b.rows[live:n].fill_(-1)
        query_lens = np.diff(m.query_start_loc_cpu[: n + 1].numpy())
        prefill, append, num_decodes = None, b.append[:tokens], n
        if m.max_query_len > 1:
            num_decodes = int((np.append(query_lens, 2) > 1).argmax())
            prefill = plan_prefill(
                m.query_start_loc_cpu[: n + 1].numpy(),
                m.seq_lens_cpu_upper_bound[:n].numpy(),
                num_decodes,
                self._fmt.group,
                lambda array: to_device(array, self.device),
            )
            append = torch.empty(tokens, dtype=torch.int64, device=self.device)
        return KVarNMetadata(
            geometry=self._geometry,
            num_reqs=n,
            num_tokens=tokens,
            num_decodes=num_decodes,
            max_seq_len=m.max_seq_len,
            query_start_loc=m.query_start_loc[: n + 1],
            seq_lens=m.seq_lens[:n],
            block_table=m.block_table_tensor[:n],
            slot_mapping=m.slot_mapping[:tokens],
            first_token=rows.first_token,
            rows=b.rows[:n],
            table=b.table[:n],
            append=append,
            seal_pages=b.seal_pages[:n],
            seal_blocks=b.seal_blocks[:n],
            prefill=prefill,
        )
