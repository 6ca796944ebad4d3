"""What the layers need to know about a step, computed once for all of them.

A step has new tokens of some requests, one or several each. ``past`` is what a request had before.
Of its new tokens those of the tile ``past // G`` are its *head*: they go to a page of the pool that
may hold tokens of earlier steps. What follows is whole tiles, quantized from the layer's own keys
and values, and the rest.

All of it is known on the host but the block tables. So it is computed there, outside of CUDA
graphs, and brought in one copy to tensors that stay where they are; the graphs read those.
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
from kvarn.integrations.vllm.rows import RequestRows


@dataclass
class Geometry:
    """Blocks and pages: the same in all layers of a group.

    Attributes:
        fmt: the format.
        options: which blocks keep a copy.
        num_blocks: of the cache; the id of the first virtual block.
        block_slot: int32 ``[num_blocks + pages]``, see `pool.block_slot`.
    """

    fmt: Format
    options: Options
    num_blocks: int
    block_slot: Tensor


@dataclass
class Batch:
    """The requests of a step, on the host.

    Attributes:
        rows: int32 ``[requests]``: the row of a request, -1 for padding.
        first_token: int32 ``[requests]``: the first token that it computed itself.
        starts: int32 ``[requests + 1]``: of its new tokens among those of the step.
        lens: int32 ``[requests]``: its tokens, new ones included; 0 for padding.
    """

    rows: np.ndarray
    first_token: np.ndarray
    starts: np.ndarray
    lens: np.ndarray

    @property
    def new(self) -> np.ndarray:
        return np.diff(self.starts)

    @property
    def past(self) -> np.ndarray:
        past: np.ndarray = self.lens - self.new
        return past


@dataclass
class Places:
    """Where the tokens of a step go and which tiles are read in 16 bits.

    Attributes:
        staged: ``[requests, pages]``: the tiles that a request reads in 16 bits, -1: none.
        blocks: likewise: their virtual blocks.
        seal_pages: ``[requests]``: the page of the head if it is full now, or -1.
        seal_tiles: ``[requests]``: the tile that it is, or 0.
        head: ``[tokens]``: the place of a token of a head, or -1.
        rest: ``[tokens]``: the place of a token after it that a later step reads in 16 bits,
            or -1.
    """

    staged: np.ndarray
    blocks: np.ndarray
    seal_pages: np.ndarray
    seal_tiles: np.ndarray
    head: np.ndarray
    rest: np.ndarray


def find_places(batch: Batch, tokens: int, geometry: Geometry) -> Places:
    """The places of a step of ``tokens`` tokens, padding included."""
    g, options, group = geometry, geometry.options, geometry.fmt.group
    past, new = batch.past, batch.new
    head = past // group
    real = (batch.rows >= 0) & (new > 0)
    first_page = np.where(real, batch.rows, 0) * options.pages

    sinks = np.broadcast_to(np.arange(options.sink_blocks), (len(head), options.sink_blocks))
    ring = head[:, None] - np.arange(options.recent_blocks + 1)
    ring = np.where(ring >= options.sink_blocks, ring, -1)
    staged = np.concatenate([sinks, ring], axis=1)
    seen = real[:, None] & (staged >= 0) & (staged <= head[:, None])
    seen &= staged * group >= batch.first_token[:, None]
    blocks = g.num_blocks + first_page[:, None] + pool.page_of_tile(staged, options)

    full = real & (batch.lens >= (head + 1) * group)
    head_page = first_page + pool.page_of_tile(head, options)
    seal = (np.where(full, head_page, -1), np.where(full, head, 0))

    if tokens == len(new):  # one token a request
        place = (g.num_blocks + head_page) * group + past % group
        nothing = np.full(tokens, -1)
        return Places(np.where(seen, staged, -1), blocks, *seal, np.where(real, place, -1), nothing)
    request = np.repeat(np.arange(len(new)), new)
    position = np.arange(len(request)) - batch.starts[request] + past[request]
    tile = position // group
    page = g.num_blocks + first_page[request] + pool.page_of_tile(tile, options)
    place = page * group + position % group
    is_head = tile == head[request]
    kept = tile < options.sink_blocks
    kept |= tile >= (batch.lens // group - options.recent_blocks)[request]
    places = np.full((2, tokens), -1)
    places[0, : len(request)] = np.where(real[request] & is_head, place, -1)
    places[1, : len(request)] = np.where(real[request] & ~is_head & kept, place, -1)
    return Places(np.where(seen, staged, -1), blocks, *seal, *places)


class Buffers:
    """Tensors that stay where they are, for the largest batch; a step uses their first entries.

    Attributes:
        table: int32 ``[requests, max_blocks]``: the block table with virtual blocks.
        head: int32 ``[requests]``: `Places.head` of a step with one token a request.
        seal_pages, seal_blocks: int32 ``[requests]``: what is to be sealed.
        seal_count: int32 ``[1]``: how many of these it is. The others are left over.
    """

    def __init__(
        self, requests: int, max_blocks: int, options: Options, device: torch.device
    ) -> None:
        self._pages = options.pages
        # Tiles that do not exist are written to the last column.
        self._table = torch.zeros(requests, max_blocks + 1, dtype=torch.int32, device=device)
        self._numbers = torch.full(
            (2 * options.pages + 5, requests), -1, dtype=torch.int32, device=device
        )
        self.table = self._table[:, :-1]
        self.head, self._seal_requests, self._seal_tiles, self.seal_pages, last = self._numbers[-5:]
        self.seal_count = last[:1]
        self.seal_blocks = torch.zeros(requests, dtype=torch.int32, device=device)

    def fill(self, places: Places, block_table: Tensor) -> None:
        """Fills in the entries of the requests of a step, ``block_table`` ``[n, max_blocks]``."""
        n, width = block_table.shape
        pages = self._pages
        full = np.flatnonzero(places.seal_pages >= 0)
        count = len(full)
        numbers = np.full(self._numbers.shape, -1, np.int32)
        numbers[:pages, :n] = np.where(places.staged >= 0, places.staged, width).T
        numbers[pages : 2 * pages, :n] = places.blocks.T
        if len(places.head) == n:
            numbers[-5, :n] = places.head
        numbers[-4:-1, :count] = full, places.seal_tiles[full], places.seal_pages[full]
        numbers[-1, 0] = count
        self._numbers.copy_(_pinned(numbers, self._numbers.device), non_blocking=True)
        tiles, blocks = (part[:, :n].t() for part in self._numbers[: 2 * pages].split(pages))
        self.table[:n].copy_(block_table)
        self._table[:n].scatter_(1, tiles.long(), blocks)
        if count > 0:
            owners, numbers_of = self._seal_requests[:count], self._seal_tiles[:count]
            self.seal_blocks[:count] = block_table[owners.long(), numbers_of.long()]


def _pinned(array: np.ndarray, device: torch.device) -> Tensor:
    """Memory from which the host need not wait for copies."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


@dataclass
class KVarNMetadata(AttentionMetadata):  # type: ignore[misc]
    """A step. The first ``num_decodes`` requests have one new token each; those after them, if
    there are any, are described by ``prefill``."""

    geometry: Geometry
    batch: Batch
    num_tokens: int
    num_decodes: int
    seq_lens: Tensor  #: int32 [requests], new tokens included; 0 for padding
    table: Tensor  #: int32 [requests, max_blocks], with virtual blocks
    head: Tensor  #: int32 [num_tokens], see `Places`
    seal_pages: Tensor  #: int32 [requests], see `Buffers`
    seal_blocks: Tensor  #: int32 [requests]
    seal_count: Tensor  #: int32 [1]
    prefill: Prefill | None = None


class KVarNMetadataBuilder(AttentionMetadataBuilder[KVarNMetadata]):  # type: ignore[misc]
    """Full CUDA graphs for steps of one token a request; others are captured piecewise."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        if not _versions.is_of_records(kv_cache_spec):
            raise NotImplementedError(
                f"{WHERE}layers with a {type(kv_cache_spec).__name__} are not supported"
            )
        self._fmt = Format(vllm_config.cache_config.cache_dtype, kv_cache_spec.head_size)
        self._options = Options.of(vllm_config)
        self._max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self._geometry: Geometry | None = None
        self._buffers: Buffers | None = None
        self._rows: RequestRows | None = None

    def _set_up(self, max_blocks: int) -> None:
        """When the cache is there."""
        layers = self.vllm_config.compilation_config.static_forward_context
        layer = layers[self.layer_names[0]]
        num_blocks = layer.kv_cache.shape[0]
        pages = self._max_num_seqs * self._options.pages
        block_slot = pool.block_slot(num_blocks, pages, self.device)
        self._geometry = Geometry(self._fmt, self._options, num_blocks, block_slot)
        self._buffers = Buffers(self._max_num_seqs, max_blocks, self._options, self.device)
        self._rows = layer.impl.rows

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> KVarNMetadata:
        m = common_attn_metadata
        if m.causal is not True:
            raise ValueError(f"{WHERE}attention must be causal")
        n, tokens = m.num_reqs, m.num_actual_tokens
        table = m.block_table_tensor[:n]
        if self._geometry is None or self._buffers is None or self._rows is None:
            self._set_up(table.shape[1])
        assert self._geometry is not None and self._buffers is not None and self._rows is not None
        found = _versions.rows_of_step(m)
        if found is None:
            raise RuntimeError(
                f"{WHERE}the model runner did not say which requests are in the step"
            )
        rows = np.full(n, -1, np.int32)
        rows[: len(found)] = found[:n]
        first_token = self._rows.first_token[rows]
        if (first_token[rows >= 0] < 0).any():
            raise RuntimeError(f"{WHERE}the model runner did not say where a request starts")
        batch = Batch(
            rows,
            first_token,
            m.query_start_loc_cpu[: n + 1].numpy(),
            m.seq_lens_cpu_upper_bound[:n].numpy(),
        )
        places = find_places(batch, tokens, self._geometry)
        b = self._buffers
        b.fill(places, table)
        prefill, head, num_decodes = None, b.head[:tokens], n
        if m.max_query_len > 1:
            num_decodes = int((np.append(batch.new, 2) > 1).argmax())
            prefill, head = plan_prefill(
                batch, num_decodes, places, self._fmt.group, table, self._upload
            )
        return KVarNMetadata(
            geometry=self._geometry,
            batch=batch,
            num_tokens=tokens,
            num_decodes=num_decodes,
            seq_lens=m.seq_lens[:n],
            table=b.table[:n],
            head=head,
            seal_pages=b.seal_pages[:n],
            seal_blocks=b.seal_blocks[:n],
            seal_count=b.seal_count,
            prefill=prefill,
        )

    def _upload(self, array: np.ndarray) -> Tensor:
        return _pinned(array, self.device).to(self.device, non_blocking=True)
