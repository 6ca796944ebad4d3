"""The inputs that an op and its peers share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvarn import Format, ops, reference

#: Distinct random tiles of a cache. They repeat: to quantize more is not what is timed.
MAX_TILES = 64


@functools.lru_cache(maxsize=4)
def _random_records(
    tiles: int, kv_heads: int, fmt: Format, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Records of random keys and values, and what they read as by the reference, in float64: the
    same for all cases of a format, because the reference is slow."""
    shape = (tiles, fmt.group, kv_heads, fmt.head_dim)
    key, value = (torch.randn(shape, device=device).to(torch.float16) for _ in range(2))
    records = ops.quantize_tiles(key, value, fmt)
    canonical = reference.unpack_records(records.cpu(), fmt)
    key, value = reference.dequantize(canonical, fmt, dtype=torch.float64)
    return records, key.to(device), value.to(device)


@dataclass
class Packed:
    """Sequences of the given lengths in a packed cache, in several sets that share no block.

    Attributes:
        records: uint8 ``[tiles, Hkv, record_bytes]``, the distinct records; block ``i`` of the
            cache is number ``i % tiles`` of them.
        cache: uint8 ``[blocks, Hkv, record_bytes]``.
        tables: int32 ``[sets, B, max_blocks]``, blocks in random order.
        seq_lens: int32 ``[B]``.
    """

    fmt: Format
    lengths: list[int]
    kv_heads: int
    sets: int
    device: torch.device
    records: Tensor = field(init=False)
    cache: Tensor = field(init=False)
    tables: Tensor = field(init=False)
    seq_lens: Tensor = field(init=False)
    _tiles: list[Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        fmt, device = self.fmt, self.device
        used = [-(-length // fmt.group) for length in self.lengths]
        blocks = sum(used) * self.sets
        tiles = min(blocks, MAX_TILES)
        self.records, *self._tiles = _random_records(tiles, self.kv_heads, fmt, device)
        self.cache = self.records[torch.arange(blocks, device=device) % tiles].contiguous()
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        order = torch.randperm(blocks, device=device).to(torch.int32).view(self.sets, -1)
        # Entries beyond a sequence are never read.
        self.tables = torch.full(
            (self.sets, len(used), max(used)), torch.iinfo(torch.int32).max,
            dtype=torch.int32, device=device,
        )  # fmt: skip
        start = 0
        for b, count in enumerate(used):
            self.tables[:, b, :count] = order[:, start : start + count]
            start += count

    @property
    def record_bytes(self) -> int:
        """Of one set: what a reader of the whole cache must read."""
        return self.cache.numel() // self.sets

    @property
    def bytes_16bit(self) -> int:
        """Of the same keys and values in 16 bits."""
        return sum(self.lengths) * self.kv_heads * self.fmt.head_dim * 2 * 2

    def tiles(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Key and value ``[tiles, G, Hkv, D]`` of the distinct records, by the reference."""
        key, value = self._tiles
        return key.to(dtype), value.to(dtype)

    def tile_numbers(self, sequence: int, set_number: int = 0) -> Tensor:
        """int64 ``[blocks of the sequence]``: which of the distinct tiles its blocks are."""
        used = -(-self.lengths[sequence] // self.fmt.group)
        return self.tables[set_number, sequence, :used].long() % self.records.shape[0]

    def stage(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
        """``count`` blocks of each sequence in 16 bits, as a cache has them: its last, its first,
        and those before its last. The staging pool ``[slots, 2, Hkv, G, D]``, with what the records
        read as, ``block_slot`` int32 ``[blocks]``, and the bytes that must be read of a set: the
        other records, and of these blocks the tokens there are."""
        fmt = self.fmt
        slot = torch.full((len(self.cache),), -1, dtype=torch.int32, device=self.device)
        num_bytes, staged = self.record_bytes, []
        for b, length in enumerate(self.lengths):
            blocks = -(-length // fmt.group)
            chosen = [blocks - 1, 0, *range(blocks - 2, 0, -1)][: min(count, blocks)]
            staged.append(self.tables[:, b, chosen].flatten())
            tokens = sum(min(length - i * fmt.group, fmt.group) for i in chosen)
            num_bytes += self.kv_heads * (
                4 * fmt.head_dim * tokens - len(chosen) * fmt.record_bytes
            )
        ids = torch.cat(staged).long()
        slot[ids] = torch.arange(len(ids), dtype=torch.int32, device=self.device)
        tiles = torch.stack(self.tiles(dtype), 1).movedim(3, 2)  # [tiles, 2, Hkv, G, D]
        return tiles[ids % len(self.records)], slot, num_bytes

    def pages(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Set 0 as a plain paged cache: key and value ``[pages, size, Hkv, D]`` in random order,
        and int64 page ids of each sequence. ``size`` divides G or is a multiple of it."""
        group = self.fmt.group
        blocks_per_page, pages_per_block = max(size // group, 1), max(group // size, 1)
        rows = []
        for b in range(len(self.lengths)):
            numbers = self.tile_numbers(b)
            padding = -len(numbers) % blocks_per_page
            numbers = torch.cat([numbers, numbers.new_zeros(padding)])
            parts = torch.arange(pages_per_block, device=self.device)
            rows.append((numbers[:, None] * pages_per_block + parts).view(-1, blocks_per_page))
        content = torch.cat(rows)
        order = torch.randperm(len(content), device=self.device)
        unit = (-1, min(size, group), self.kv_heads, self.fmt.head_dim)
        key, value = (
            tile.view(unit)[content[order].flatten()].view(-1, size, *unit[2:])
            for tile in self.tiles(dtype)
        )
        ids = order.argsort().split([len(row) for row in rows])
        return key, value, [i[: -(-n // size)] for i, n in zip(ids, self.lengths, strict=True)]

    def contiguous(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Set 0 of sequences of one length as key and value ``[B, length, Hkv, D]``."""
        numbers = torch.stack([self.tile_numbers(b) for b in range(len(self.lengths))])
        key, value = (
            tile[numbers].flatten(1, 2)[:, : self.lengths[0]].contiguous()
            for tile in self.tiles(dtype)
        )
        return key, value


@dataclass
class Attention:
    """Query rows ``q [B*n, Hq, D]``, the last ``n`` tokens of each sequence of ``packed``."""

    packed: Packed
    q: Tensor
    query_tokens: int = 1

    @property
    def equal_lengths(self) -> bool:
        return len(set(self.packed.lengths)) == 1

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each element of K and of V and query head."""
        heads, dim = self.q.shape[1:]
        return 4 * heads * dim * self.query_tokens * sum(self.packed.lengths)

    def exact(self) -> Tensor:
        """Attention over what the records read as, in float64: ``[B*n, Hq, D]``."""
        packed, n = self.packed, self.query_tokens
        out = torch.empty_like(self.q, dtype=torch.float64)
        tiles = packed.tiles(torch.float32)
        group = self.q.shape[1] // packed.kv_heads
        for b, length in enumerate(packed.lengths):
            numbers = packed.tile_numbers(b)
            token = torch.arange(length, device=packed.device)
            hidden = token > length - n + torch.arange(n, device=packed.device)[:, None]
            for h in range(packed.kv_heads):
                key, value = (
                    tile[:, :, h][numbers].flatten(0, 1)[:length].double() for tile in tiles
                )
                rows = (slice(b * n, b * n + n), slice(h * group, h * group + group))
                score = self.q[rows].double() @ key.T * packed.fmt.head_dim**-0.5
                weight = score.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
                out[rows] = weight @ value
        return out


@dataclass
class Function:
    """A function of tensors, ``reference(*inputs[i], **options)``, for each input set i."""

    reference: Callable[..., Any]
    inputs: list[tuple[Any, ...]]
    options: dict[str, Any] = field(default_factory=dict)
