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
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvarn import ops
from kvarn.integrations.vllm import _versions

if TYPE_CHECKING:
    from kvarn.integrations.vllm.backend import KVarNImpl
    from kvarn.integrations.vllm.metadata import KVarNMetadata

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
    """The requests of a step that have several new tokens, from ``first`` on."""

    first: int
    begin: int  #: the first of their tokens
    longest: int  #: new tokens of one of them
    bounds: Tensor  #: int32 [requests + 1], of their tokens, from 0
    few: (
        tuple[int, int] | None
    )  #: first and last + 1 of those with few new tokens, if they have a past
    few_tokens: tuple[int, int]  #: their tokens
    few_bounds: Tensor | None  #: int32 [few + 1], of their tokens, from 0
    many: list[Chunk]  #: those with many new tokens and a past
    with_past: list[Chunk]  #: all with a past: what layers with a window need
    tiles: Tensor | None  #: int32 [3, n]: request, number, first token of the whole tiles
    # Computed on the device, see metadata.py:
    past: Tensor = field(default_factory=lambda: torch.empty(0))
    append_rest: Tensor = field(default_factory=lambda: torch.empty(0))
    tile_blocks: Tensor = field(default_factory=lambda: torch.empty(0))
    tile_tokens: Tensor = field(default_factory=lambda: torch.empty(0))


def plan_prefill(
    starts: np.ndarray,
    lens: np.ndarray,
    first: int,
    group: int,
    upload: Callable[[np.ndarray], Tensor],
) -> Prefill:
    """What can be known on the host.

    Args:
        starts: ``[requests + 1]``, of the new tokens.
        lens: ``[requests]``, new tokens included.
        first: the first request with several new tokens.
        group: tokens of a tile.
        upload: brings an array to the device.
    """
    count = len(lens)
    new = np.diff(starts)
    past = lens - new
    pairs: list[int] = []  # (0, length) of every chunk and piece, for one upload

    def bounds_at(length: int) -> int:
        pairs.append(length)
        return len(pairs) - 1

    few_end = first
    while few_end < count and new[few_end] <= FEW_TOKENS:
        few_end += 1
    chunks = []
    for r in range(first, count):
        if past[r] > 0:
            borders = [*range(0, int(past[r]), PIECE_TOKENS), int(past[r])]
            pieces = [(b, e, bounds_at(e - b)) for b, e in pairwise(borders)]
            chunks.append((r, bounds_at(int(new[r])), pieces))
    tiles = []
    for r in range(first, count):
        whole = np.arange(past[r] // group + 1, lens[r] // group)
        tiles.append(np.stack([np.full_like(whole, r), whole, starts[r] + whole * group - past[r]]))
    all_tiles = np.concatenate(tiles, axis=1).astype(np.int32)
    own = starts[first:] - starts[first]
    lengths = np.zeros((len(pairs), 2), np.int32)
    lengths[:, 1] = pairs
    flat = upload(np.concatenate([own, lengths.ravel(), all_tiles.ravel()]).astype(np.int32))
    at = len(own)
    pair_bounds = flat[at : at + lengths.size].view(-1, 2)
    tile_rows = flat[at + lengths.size :].view(3, -1)
    with_past = [
        Chunk(
            r,
            int(starts[r]),
            int(starts[r + 1]),
            int(past[r]),
            pair_bounds[own_bounds],
            [Piece(b, e, pair_bounds[i]) for b, e, i in pieces],
        )
        for r, own_bounds, pieces in chunks
    ]
    has_few = few_end > first and bool((past[first:few_end] > 0).any())
    return Prefill(
        first=first,
        begin=int(starts[first]),
        longest=int(new[first:].max()),
        bounds=flat[:at],
        few=(first, few_end) if has_few else None,
        few_tokens=(int(starts[first]), int(starts[few_end])),
        few_bounds=flat[: few_end - first + 1] if has_few else None,
        many=[c for c in with_past if c.request >= few_end],
        with_past=with_past,
        tiles=tile_rows if tile_rows.numel() else None,
    )


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
            p.past[a:b],
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
