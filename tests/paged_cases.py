"""Paged caches for tests, what they hold in float64, and attention over that in float64.

Everything that no op may read is poison: 0xFF in caches, NaN in staging pools, table entries far
out of range.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvarn import Format, ops, reference

POISON_BLOCK = 2**31 - 1

#: Every head dimension, group and width of codes; every preset at the usual head dimensions. (K and
#: V are read by code of their own, which sees the width of the other only as an offset.)
FORMATS = [
    Format(f"kvarn_k{k}v{v}_g{g}", head_dim=d)
    for d in (64, 128, 256, 512)
    for g in (64, 128)
    for k in (2, 3, 4, 8)
    for v in (2, 3, 4, 8)
    if d <= 128 or (k, v) in ((2, 8), (3, 2), (4, 3), (8, 4))
]


@dataclass
class Case:
    """Sequences of the given lengths: first block, last block and ``staged`` others (position from
    the end) in the staging pool, everything else in records."""

    fmt: Format
    lengths: list[int]
    kv_heads: int = 1
    dtype: torch.dtype = torch.float32  # of the staging pool
    staged: tuple[int, ...] = ()
    first_staged: bool = True
    seed: int = 0
    cache: Tensor = field(init=False)
    staging: Tensor = field(init=False)
    block_slot: Tensor = field(init=False)
    block_table: Tensor = field(init=False)
    seq_lens: Tensor = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        fmt, group = self.fmt, self.fmt.group
        places = []  # (sequence, tile)
        for b, length in enumerate(self.lengths):
            places += [(b, i) for i in range(-(-length // group))]
        blocks = len(places) + 3  # three that nobody uses
        numbers = torch.randperm(blocks, generator=random)[: len(places)].tolist()
        width = max([1, *(-(-n // group) for n in self.lengths)]) + 1
        self.block_table = torch.full((len(self.lengths), width), POISON_BLOCK, dtype=torch.int32)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32)
        self.block_slot = torch.full((blocks,), -1, dtype=torch.int32)
        self.cache = torch.full(fmt.cache_shape(blocks, self.kv_heads), 0xFF, dtype=torch.uint8)

        records, pages = [], []
        for number, (b, tile) in zip(numbers, places, strict=True):
            self.block_table[b, tile] = number
            last = -(-self.lengths[b] // group) - 1
            rows = min(group, self.lengths[b] - tile * group)
            raw = rows < group or (tile == 0 and self.first_staged) or last - tile in self.staged
            (pages if raw else records).append((number, rows))
        slots = torch.randperm(len(pages) + 2, generator=random)[: len(pages)].tolist()
        self.staging = torch.full(
            (len(pages) + 2, 2, self.kv_heads, group, fmt.head_dim), math.nan, dtype=self.dtype
        )
        for slot, (number, rows) in zip(slots, pages, strict=True):
            self.block_slot[number] = slot
            page = torch.randn(2, self.kv_heads, rows, fmt.head_dim, generator=random)
            self.staging[slot, :, :, :rows] = page.to(self.dtype)
        if records:
            shape = (len(records), group, self.kv_heads, fmt.head_dim)
            key, value = (torch.randn(shape, generator=random) for _ in range(2))
            which = torch.tensor([number for number, _ in records])
            self.cache[which] = ops.quantize_tiles(key, value, fmt)

    @property
    def paged(self) -> dict[str, Any]:
        """The arguments of decode_attention and gather_kv that describe the cache."""
        return {
            "cache": self.cache,
            "block_table": self.block_table,
            "seq_lens": self.seq_lens,
            "fmt": self.fmt,
            "staging": self.staging,
            "block_slot": self.block_slot,
        }

    @property
    def cu_seq_lens(self) -> Tensor:
        return offsets(self.lengths)

    @functools.cached_property
    def contents(self) -> list[tuple[Tensor, Tensor]]:
        """Key and value [length, Hkv, D] of each sequence, float64, not rotated."""
        key, value = reference.gather_kv(**self.paged, cu_seq_lens=self.cu_seq_lens)
        return list(zip(key.split(self.lengths), value.split(self.lengths), strict=True))


def offsets(counts: list[int]) -> Tensor:
    """[0, c0, c0 + c1, ...]"""
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def visible(length: int, queries: int, causal: bool = True, window_left: int = -1) -> Tensor:
    """bool [queries, length]: what the last ``queries`` tokens of a sequence see."""
    position = length - queries + torch.arange(queries)[:, None]
    token = torch.arange(length)[None, :]
    seen = torch.ones(queries, length, dtype=torch.bool)
    if causal:
        seen &= token <= position
    if window_left >= 0:
        seen &= token >= position - window_left
    return seen


def attention64(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [n, Hq, D] over key, value [L, Hkv, D] with the mask seen [n, L] -> (out, lse), float64."""
    n, q_heads, dim = q.shape
    kv_heads = key.shape[1]
    grouped = q.double().view(n, kv_heads, q_heads // kv_heads, dim)
    score = torch.einsum("nhrd,lhd->nhrl", grouped, key.double())
    score *= dim**-0.5 if sm_scale is None else sm_scale
    if logits_soft_cap > 0:
        score = logits_soft_cap * (score / logits_soft_cap).tanh()
    score = score.masked_fill(~seen[:, None, None, :], -math.inf)
    lse = score.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double().view(1, kv_heads, -1))
    weight = (score - lse[..., None]).exp().masked_fill(~seen[:, None, None, :], 0.0)
    out = torch.einsum("nhrl,lhd->nhrd", weight, value.double())
    return out.reshape(n, q_heads, dim), lse.reshape(n, q_heads)


def expected(
    case: Case,
    q: Tensor,
    queries: list[int] | None = None,
    *,
    causal: bool = True,
    window_left: int = -1,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """What decode_attention is to return, in float64."""
    queries = [1] * len(case.lengths) if queries is None else queries
    parts = []
    for rows, (key, value) in zip(q.split(queries), case.contents, strict=True):
        seen = visible(len(key), len(rows), causal, window_left)
        out, lse = attention64(rows, key, value, seen, **options)
        if len(key) == 0:
            lse = torch.full_like(lse, -math.inf)  # also with sinks
        parts.append((out, lse))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def row_errors(out: Tensor, exact: Tensor) -> Tensor:
    """||out - exact|| / ||exact|| of each row (last dimension); of zero rows 0 or infinity."""
    difference = (out.double() - exact).norm(dim=-1)
    return torch.where(difference == 0, 0.0, difference / exact.norm(dim=-1))


def assert_close(
    out: Tensor, lse: Tensor, exact: tuple[Tensor, Tensor], tolerance: float = 2e-5
) -> None:
    """Every row of out within ``tolerance`` of the exact one, every LSE within as much."""
    worst = row_errors(out, exact[0])
    assert worst.max() < tolerance, f"row {worst.argmax()}: {worst.max():.2e}"
    empty = exact[1].isneginf()
    assert torch.equal(lse.isneginf(), empty)
    difference = (lse.double() - exact[1])[~empty] / exact[1][~empty].abs().clamp(min=1)
    assert difference.numel() == 0 or difference.abs().max() < tolerance
