"""Attention of requests with several new tokens.

The new tokens attend to each other with the engine's flash attention, over the model's own keys and
values, and to what is in the cache as a record or 16-bit page:

- few new tokens: with `ops.decode_attention`, all such requests in one call;
- many: the cache is written out in 16 bits, piece after piece (`ops.gather_kv`), and flash
  attention reads the pieces; the scratch memory is that of one piece;
- in a layer with a sliding window: the tokens that the window can reach, written out before the new
  ones, and one call of flash attention.

The parts are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvarn import ops
from kvarn.integrations.vllm import _versions

if TYPE_CHECKING:
    from kvarn.integrations.vllm.backend import KVarNImpl
    from kvarn.integrations.vllm.metadata import Batch, KVarNMetadata, Places

#: Requests with at most this many new tokens read the packed cache as it is.
FEW_TOKENS = 32
#: Tokens of a piece of the cache that is written out; a multiple of every group.
PIECE_TOKENS = 8192


@dataclass
class Chunk:
    """The new tokens of a request, rows ``begin`` to ``end`` of the step's tokens."""

    request: int
    begin: int
    end: int
    past: int
    bounds: Tensor  #: int32 [2]: 0, end - begin
    pieces: list[Piece]


@dataclass
class Piece:
    """Tokens ``begin`` to ``end`` of the past of a request, from a border of a tile on."""

    begin: int
    end: int
    bounds: Tensor  #: int32 [2]: 0, end - begin


@dataclass
class Prefill:
    """The requests of a step that have several new tokens."""

    begin: int  #: the first of their tokens
    longest: int  #: new tokens of one of them
    bounds: Tensor  #: int32 [requests + 1], of their tokens, from 0
    few: tuple[int, int] | None  #: first and last + 1 of those with few, if they have a past
    few_tokens: tuple[int, int]  #: their tokens
    few_bounds: Tensor  #: int32 [few + 1], of their tokens, from 0
    few_past: Tensor  #: int32 [few]
    many: list[Chunk]  #: those with many new tokens and a past
    with_past: list[Chunk]  #: all with a past: what layers with a window need
    tile_blocks: Tensor  #: int64 [n]: the blocks of the whole tiles
    tile_tokens: Tensor  #: int32 [n * G]: their tokens
    rest: Tensor  #: int32 [tokens], see `metadata.Places`


def plan_prefill(
    batch: Batch,
    first: int,
    places: Places,
    group: int,
    block_table: Tensor,
    upload: Callable[[np.ndarray], Tensor],
) -> tuple[Prefill, Tensor]:
    """Plans the requests from ``first`` on; also returns `Places.head` on the device.

    Args:
        group: tokens of a tile.
        block_table: int32 ``[requests, max_blocks]`` on the device.
        upload: brings an array to the device. It is called once.
    """
    starts, lens, new, past = batch.starts, batch.lens, batch.new, batch.past
    count = len(lens)
    few_end = first
    while few_end < count and new[few_end] <= FEW_TOKENS:
        few_end += 1
    lengths: list[int] = []  # of every chunk and piece

    def bounds_of(length: int) -> int:
        lengths.append(length)
        return len(lengths) - 1

    chunks = []
    for r in range(first, count):
        if past[r] > 0:
            borders = [*range(0, int(past[r]), PIECE_TOKENS), int(past[r])]
            pieces = [(b, e, bounds_of(e - b)) for b, e in pairwise(borders)]
            chunks.append((r, bounds_of(int(new[r])), pieces))
    tiles = [np.zeros((2, 0), np.int32)]
    for r in range(first, count):
        if batch.rows[r] >= 0:
            whole = np.arange(past[r] // group + 1, lens[r] // group)
            tiles.append(np.stack([np.full_like(whole, r), whole]))
    request, number = np.concatenate(tiles, axis=1)
    tile_begin = starts[request] + number * group - past[request]
    parts = [
        starts[first:] - starts[first],
        np.array([(0, length) for length in lengths]),
        past[first:few_end],
        request,
        number,
        tile_begin[:, None] + np.arange(group),
        places.head,
        places.rest,
    ]
    flat = upload(np.concatenate([part.ravel() for part in parts]).astype(np.int32))
    bounds, pairs, few_past, owners, numbers, tile_tokens, head, rest = flat.split(
        [part.size for part in parts]
    )
    pairs = pairs.view(-1, 2)
    with_past = [
        Chunk(
            r,
            int(starts[r]),
            int(starts[r + 1]),
            int(past[r]),
            pairs[own],
            [Piece(b, e, pairs[i]) for b, e, i in pieces],
        )
        for r, own, pieces in chunks
    ]
    prefill = Prefill(
        begin=int(starts[first]),
        longest=int(new[first:].max()),
        bounds=bounds,
        few=(first, few_end) if (past[first:few_end] > 0).any() else None,
        few_tokens=(int(starts[first]), int(starts[few_end])),
        few_bounds=bounds[: few_end - first + 1],
        few_past=few_past,
        many=[chunk for chunk in with_past if chunk.request >= few_end],
        with_past=with_past,
        tile_blocks=block_table[owners, numbers].long(),
        tile_tokens=tile_tokens,
        rest=rest,
    )
    return prefill, head


def attend(
    impl: KVarNImpl,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    m: KVarNMetadata,
    out: Tensor,
) -> None:
    """Writes the rows of ``out`` that belong to ``m.prefill``.

    Args:
        query, key, value: ``[tokens, heads, D]`` of the whole step, as are the rows of ``out``.
        cache: uint8 ``[num_blocks, Hkv, record_bytes]``.
    """
    p = m.prefill
    assert p is not None
    begin, end = p.begin, m.num_tokens
    own, lse = _versions.flash_attention(
        impl, query[begin:end], key[begin:end], value[begin:end], p.bounds, p.longest, p.bounds,
        p.longest, causal=True, out=out[begin:end],
    )  # fmt: skip
    if impl.window_left >= 0:
        for chunk in p.with_past:
            _attend_in_window(impl, query, key, value, cache, m, chunk, out)
        return
    state = (own, lse.t())
    if p.few is not None:
        (a, b), (t0, t1) = p.few, p.few_tokens
        few = ops.decode_attention(
            query[t0:t1],
            cache,
            m.table[a:b],
            p.few_past,
            impl.fmt,
            staging=impl.staging,
            block_slot=m.geometry.block_slot,
            cu_query_lens=p.few_bounds,
            causal=False,
            sm_scale=impl.scale,
            logits_soft_cap=impl.logits_soft_cap,
            return_lse=True,
        )
        _merge(state, few, t0 - begin, t1 - begin)
    if p.many:
        key_piece, value_piece = scratch(impl, query, max(c.past for c in p.many))
    for chunk in p.many:
        for piece in chunk.pieces:
            size = piece.end - piece.begin
            k, v = key_piece[:size], value_piece[:size]
            _write_out(impl, cache, m, chunk.request, piece, k, v)
            part, part_lse = _versions.flash_attention(
                impl, query[chunk.begin : chunk.end], k, v, chunk.bounds, chunk.end - chunk.begin,
                piece.bounds, size, causal=False,
            )  # fmt: skip
            _merge(state, (part, part_lse.t()), chunk.begin - begin, chunk.end - begin)


def scratch(impl: KVarNImpl, like: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Room for the keys and the values of a piece of ``tokens`` tokens at most."""
    shape = (min(tokens, PIECE_TOKENS), impl.num_kv_heads, impl.head_size)
    return like.new_empty(shape), like.new_empty(shape)


def _merge(state: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor], begin: int, end: int) -> None:
    rows = (state[0][begin:end], state[1][begin:end])
    ops.merge_states(*rows, *part, out=rows)


def _write_out(
    impl: KVarNImpl,
    cache: Tensor,
    m: KVarNMetadata,
    request: int,
    piece: Piece,
    key: Tensor,
    value: Tensor,
) -> None:
    group = impl.fmt.group
    table = m.table[request : request + 1, piece.begin // group : -(-piece.end // group)]
    ops.gather_kv(
        cache,
        table,
        piece.bounds[1:],
        impl.fmt,
        staging=impl.staging,
        block_slot=m.geometry.block_slot,
        cu_seq_lens=piece.bounds,
        out=(key, value),
    )


def _attend_in_window(
    impl: KVarNImpl,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    m: KVarNMetadata,
    chunk: Chunk,
    out: Tensor,
) -> None:
    """The request anew: the past that its first new token sees, then the new tokens."""
    group = impl.fmt.group
    new = chunk.end - chunk.begin
    begin = max(0, chunk.past - impl.window_left) // group * group
    seen = chunk.past - begin
    k, v = (key.new_empty(seen + new, *key.shape[1:]) for _ in range(2))
    k[seen:].copy_(key[chunk.begin : chunk.end])
    v[seen:].copy_(value[chunk.begin : chunk.end])
    if seen:
        bounds = torch.arange(2, dtype=torch.int32, device=key.device) * seen
        _write_out(
            impl, cache, m, chunk.request, Piece(begin, chunk.past, bounds), k[:seen], v[:seen]
        )
    all_bounds = torch.arange(2, dtype=torch.int32, device=key.device) * (seen + new)
    _versions.flash_attention(
        impl, query[chunk.begin : chunk.end], k, v, chunk.bounds, new, all_bounds, seen + new,
        causal=True, out=out[chunk.begin : chunk.end],
    )  # fmt: skip
