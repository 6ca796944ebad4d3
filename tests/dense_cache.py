"""A `PagedCache` beside a dense model of it, every unowned byte poisoned before each read.

The model keeps, for each sequence, a list of `Tile` objects: its tokens as they were appended and,
once sealed, as they are read back. It knows the rules of the cache by scanning everything:
a tile is sealed when it is full and no sequence has it among its sinks, recent or open tiles.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cuda_helpers
import torch
from torch import Tensor

from kvarn import Format, ops
from kvarn.cache import CacheFull, PagedCache, SequenceState, Step

Q_HEADS_PER_KV = 3
#: Of attention, rtol and atol. What is read back differs by no more than a tenth.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(eq=False)
class Tile:
    rows: Tensor  # [layers, 2, Hkv, G, D], NaN where nothing was appended
    record: Tensor | None = None  # the same as read back, when sealed

    def read(self) -> Tensor:
        return self.rows if self.record is None else self.record


@dataclass
class DenseSequence:
    length: int = 0
    tiles: list[Tile] = field(default_factory=list)


class Replayed:
    """A decode step of a cache as a CUDA graph; on the CPU it is just called again."""

    def __init__(self, cache: PagedCache, room: int, max_seq_len: int, **options: Any) -> None:
        self.step = cache.graph_step(room, max_seq_len)
        heads, dim = cache.num_kv_heads, cache.fmt.head_dim
        self.q, self.key, self.value = (
            torch.full((cache.num_layers, room, n, dim), torch.nan, dtype=cache.dtype).to(
                cache.device
            )
            for n in (heads * Q_HEADS_PER_KV, heads, heads)
        )
        self.out = torch.empty_like(self.q)

        def forward() -> None:
            tensors = zip(self.q, self.key, self.value, self.out, strict=True)
            for layer, (q, key, value, out) in enumerate(tensors):
                cache.attend(self.step, layer, q, key, value, out=out, **options)

        if cache.device.type == "cuda":
            self._replay, _ = cuda_helpers.captured(forward)
        else:
            forward()
            self._replay = forward

    def __call__(self, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[layers, T, heads, D] each -> [layers, T, Hq, D]. Rows of padding are NaN, and give 0."""
        for rows, given in ((self.q, q), (self.key, key), (self.value, value)):
            rows.fill_(torch.nan)
            rows[:, : given.shape[1]] = given
        self.out.fill_(torch.nan)
        self._replay()
        assert self.out[:, q.shape[1] :].count_nonzero() == 0
        return self.out[:, : q.shape[1]].clone()


class CheckedCache:
    """Does everything twice, in `cache` and in `model`, and compares."""

    def __init__(
        self,
        fmt: Format,
        *,
        num_blocks: int = 40,
        num_slots: int = 20,
        num_layers: int = 2,
        num_kv_heads: int = 2,
        sink_blocks: int = 1,
        recent_blocks: int = 1,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.cache = PagedCache(
            fmt,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            num_blocks=num_blocks,
            num_slots=num_slots,
            sink_blocks=sink_blocks,
            recent_blocks=recent_blocks,
            dtype=dtype,
            device=device,
        )
        self.fmt = fmt
        self.sink_blocks = sink_blocks
        self.recent_blocks = recent_blocks
        self.model: dict[int, DenseSequence] = {}
        self.generator = torch.Generator().manual_seed(seed)

    # What an engine does -----------------------------------------------------------------------

    def new(self) -> int:
        seq = self.cache.new_sequence()
        self.model[seq] = DenseSequence()
        return seq

    def fork(self, seq: int, length: int | None = None) -> int:
        child = self.cache.fork(seq, length)
        length = self.model[seq].length if length is None else length
        tiles = self.model[seq].tiles[: -(-length // self.fmt.group)]
        self.model[child] = DenseSequence(length, list(tiles))
        return child

    def truncate(self, seq: int, length: int) -> None:
        self.cache.truncate(seq, length)
        self._truncate(self.model[seq], length)
        self._seal_due()

    def free(self, seq: int) -> None:
        self.cache.free(seq)
        del self.model[seq]
        self._seal_due()

    def export(self, seq: int) -> tuple[SequenceState, DenseSequence]:
        self.poison()
        return self.cache.export_sequence(seq), copy.deepcopy(self.model[seq])

    def restore(self, exported: tuple[SequenceState, DenseSequence]) -> int | None:
        """None if the cache was too full, and did not change."""
        state, sequence = exported
        before = self.state()
        try:
            seq = self.cache.import_sequence(state)
        except CacheFull:
            assert self.state() == before
            return None
        self.model[seq] = copy.deepcopy(sequence)
        return seq

    def seal(self) -> None:
        self.cache.seal()
        self._seal_due()

    def step(
        self,
        requests: Sequence[tuple[int, int]],
        draft: Sequence[int] | None = None,
        accepted: Sequence[int] | None = None,
        window_left: int = -1,
        graph: Replayed | None = None,
    ) -> Step | None:
        """plan, attend in every layer, commit. None if the cache was too full, and unchanged (but
        that an eager step seals what a graph or an import has left)."""
        draft = draft or [0] * len(requests)
        accepted = accepted or [count for _, count in requests]
        self.poison()
        before = self.state()
        left = graph is None and self.cache._pool.due_seals()
        try:
            step = self.cache.plan(requests, draft=draft, into=graph and graph.step)
        except CacheFull:
            if left:
                self._seal_due()
            else:
                assert self.state() == before
            return None
        if graph is None or requests:
            self._seal_due()
        start = {seq: self.model[seq].length for seq, _ in requests}
        sealed = {tile for s in self.model.values() for tile in s.tiles if tile.record is not None}
        pinned = {seq: set(self._pinned_tiles(s, s.length)) for seq, s in self.model.items()}
        num_tokens = sum(count for _, count in requests)
        kv = self._random(num_tokens, 2, self.cache.num_layers, self.cache.num_kv_heads)
        q_heads = self.cache.num_kv_heads * Q_HEADS_PER_KV
        q = self._random(num_tokens, self.cache.num_layers, q_heads)
        at = 0
        for seq, count in requests:
            self._append(self.model[seq], kv[at : at + count])
            at += count
        sealed = {tile for tile in sealed if tile.record is not None}  # some were written into
        if graph is not None:
            outs = graph(q.transpose(0, 1), *kv.permute(1, 2, 0, 3, 4))
        for layer in range(self.cache.num_layers):
            if graph is not None:
                out = outs[layer]
            else:
                out = self.cache.attend(
                    step,
                    layer,
                    q[:, layer],
                    kv[:, 0, layer],
                    kv[:, 1, layer],
                    window_left=window_left,
                )
            at = 0
            for (seq, count), tail in zip(requests, draft, strict=True):
                for wave, first, stop in self._waves(start[seq], count):
                    self._check_view(
                        seq, step, wave, first, start[seq] + count - tail, sealed, pinned
                    )
                    rows = slice(at + first - start[seq], at + stop - start[seq])
                    self._check_attention(
                        seq, step, wave, layer, q[rows, layer], out[rows], stop, window_left
                    )
                at += count
        self.cache.commit(step, accepted)
        for (seq, _), count in zip(requests, accepted, strict=True):
            self._truncate(self.model[seq], start[seq] + count)
        if graph is None:
            self._seal_due()
        return step

    # Comparing ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Reads every sequence back, in every layer."""
        cache, pool = self.cache, self.cache._pool
        self.poison()
        tile_of: dict[int, Tile] = {}
        for seq, sequence in self.model.items():
            assert cache.length(seq) == sequence.length
            assert len(cache.blocks(seq)) == len(sequence.tiles)
            for block, tile in zip(cache.blocks(seq), sequence.tiles, strict=True):
                assert tile_of.setdefault(block, tile) is tile
                assert (pool.slot[block] < 0) == (tile.record is not None)
        assert len(set(map(id, tile_of.values()))) == len(tile_of)
        staged = [int(pool.slot[block]) for block in tile_of if pool.slot[block] >= 0]
        assert len(set(staged)) == len(staged)
        assert sorted([*pool.free_blocks, *tile_of]) == list(range(cache.num_blocks))
        assert sorted([*pool.free_slots, *staged]) == list(range(cache.num_slots))
        assert all(pool.slot[block] == -1 for block in pool.free_blocks)
        assert cache.block_slot.tolist() == pool.slot.tolist()
        lengths = [s.length for s in self.model.values()]
        if not sum(lengths):
            return
        table = torch.full((len(lengths), max(len(s.tiles) for s in self.model.values())), -1)
        for row, seq in enumerate(self.model):
            table[row, : len(cache.blocks(seq))] = torch.tensor(cache.blocks(seq))
        cu_seq_lens = torch.tensor([0, *lengths]).cumsum(0)
        for layer in range(cache.num_layers):
            key, value = ops.gather_kv(
                cache.cache[layer],
                table.int().to(cache.device),
                torch.tensor(lengths, dtype=torch.int32, device=cache.device),
                self.fmt,
                staging=cache.staging[layer],
                block_slot=cache.block_slot,
                cu_seq_lens=cu_seq_lens.int().to(cache.device),
                total_tokens=sum(lengths),
            )
            expected = torch.cat(
                [self._tokens(s.tiles, s.length, layer) for s in self.model.values()], dim=2
            )
            for got, want in zip((key, value), expected, strict=True):
                tolerance = TOLERANCE[cache.dtype] / 10
                torch.testing.assert_close(
                    got.cpu().transpose(0, 1), want, rtol=tolerance, atol=tolerance
                )

    def poison(self) -> None:
        """Whatever no sequence owns becomes NaN (records: bytes of 0xFF)."""
        cache, pool = self.cache, self.cache._pool
        used: dict[int, int] = {}
        for seq, sequence in self.model.items():
            for i, block in enumerate(cache.blocks(seq)):
                rows = min(self.fmt.group, sequence.length - i * self.fmt.group)
                used[block] = max(used.get(block, 0), rows)
        slots = {block: int(pool.slot[block]) for block in used}
        dead = [block for block in range(cache.num_blocks) if slots.get(block, 0) >= 0]
        for records, pages in zip(cache.cache, cache.staging, strict=True):
            records[dead] = 0xFF
            pages[[s for s in range(cache.num_slots) if s not in slots.values()]] = torch.nan
            for block, rows in used.items():
                if slots[block] >= 0:
                    pages[slots[block], :, :, rows:] = torch.nan

    def state(self) -> tuple[object, ...]:
        """All that a failed call must leave alone."""
        pool = self.cache._pool
        sequences = {
            seq: (held.length, held.keep_from, list(held.blocks))
            for seq, held in pool.sequences.items()
        }
        return (
            sequences,
            list(pool.refs),
            list(pool.pins),
            pool.slot.tolist(),
            list(pool.free_blocks),
            list(pool.free_slots),
            self.cache.block_slot.tolist(),
            self.cache._step,
        )

    # The model ---------------------------------------------------------------------------------

    def _random(self, *shape: int) -> Tensor:
        x = torch.randn(*shape, self.fmt.head_dim, generator=self.generator)
        return x.to(self.cache.device, self.cache.dtype)

    def _append(self, sequence: DenseSequence, kv: Tensor) -> None:
        for token in kv.cpu():
            i, row = divmod(sequence.length, self.fmt.group)
            if row == 0:
                shape = (*token.transpose(0, 1).shape[:3], self.fmt.group, self.fmt.head_dim)
                sequence.tiles.append(Tile(torch.full(shape, torch.nan, dtype=kv.dtype)))
            tile = sequence.tiles[i]
            shared = sum(tile in s.tiles for s in self.model.values()) > 1
            if shared or tile.record is not None:
                rows = tile.read().clone()
                if shared:
                    sequence.tiles[i] = tile = Tile(rows)
                else:
                    tile.rows, tile.record = rows, None
            tile.rows[:, :, :, row] = token.transpose(0, 1)
            sequence.length += 1

    def _truncate(self, sequence: DenseSequence, length: int) -> None:
        sequence.length = length
        del sequence.tiles[-(-length // self.fmt.group) :]

    def _is_pinned(self, i: int, length: int) -> bool:
        return i < self.sink_blocks or i >= length // self.fmt.group - self.recent_blocks

    def _pinned_tiles(self, sequence: DenseSequence, length: int) -> list[Tile]:
        return [t for i, t in enumerate(sequence.tiles) if self._is_pinned(i, length)]

    def _seal_due(self) -> None:
        pinned = {t for s in self.model.values() for t in self._pinned_tiles(s, s.length)}
        for tile in {t for s in self.model.values() for t in s.tiles} - pinned:
            if tile.record is None:
                tile.record = self.read_back(tile.rows)

    def read_back(self, rows: Tensor) -> Tensor:
        """[layers, 2, Hkv, G, D] after quantizing and dequantizing."""
        key, value = rows.to(self.cache.device).transpose(2, 3).unbind(1)
        records = ops.quantize_tiles(key, value, self.fmt)
        back = ops.dequantize_tiles(records, self.fmt, dtype=rows.dtype)
        return torch.stack(back, 1).transpose(2, 3).cpu()

    def _tokens(self, tiles: list[Tile], length: int, layer: int) -> Tensor:
        """[2, Hkv, length, D]."""
        shape = (2, self.cache.num_kv_heads, 0, self.fmt.head_dim)
        empty = torch.empty(shape, dtype=self.cache.dtype)
        return torch.cat([empty, *(tile.read()[layer] for tile in tiles)], 2)[:, :, :length]

    def _waves(self, start: int, count: int) -> list[tuple[int, int, int]]:
        """(wave, first, stop) for the tokens start .. start + count - 1."""
        waves, first = [], start
        while first < start + count:
            stop = min(start + count, (first // self.fmt.group + 1) * self.fmt.group)
            waves.append((len(waves), first, stop))
            first = stop
        return waves

    def _is_record(self, seq: int, step: Step, wave: int, i: int) -> bool:
        return int(step.waves[wave].block_slot[self.cache.blocks(seq)[i]]) < 0

    def _check_view(
        self,
        seq: int,
        step: Step,
        wave: int,
        first: int,
        certain: int,
        sealed: set[Tile],
        pinned: dict[int, set[Tile]],
    ) -> None:
        """The blocks that a query at ``first`` reads as records are those of decoding alone."""
        tiles = self.model[seq].tiles
        for i in range(first // self.fmt.group + 1):
            record = self._is_record(seq, step, wave, i)
            accepted = (i + 1) * self.fmt.group <= certain
            needed_by_others = any(tiles[i] in p for other, p in pinned.items() if other != seq)
            if tiles[i] in sealed:
                assert record
            elif self._is_pinned(i, first) or not accepted:
                assert not record
            elif not needed_by_others:
                assert record

    def _check_attention(
        self,
        seq: int,
        step: Step,
        wave: int,
        layer: int,
        q: Tensor,
        out: Tensor,
        stop: int,
        window_left: int,
    ) -> None:
        tiles = []
        for i, tile in enumerate(self.model[seq].tiles[: -(-stop // self.fmt.group)]):
            if self._is_record(seq, step, wave, i) and tile.record is None:
                tile = Tile(self.read_back(tile.rows))
            tiles.append(tile)
        key, value = self._tokens(tiles, stop, layer).double()
        key, value = (t.repeat_interleave(Q_HEADS_PER_KV, 0) for t in (key, value))
        q = q.cpu().double().transpose(0, 1)
        scores = q @ key.transpose(1, 2) / self.fmt.head_dim**0.5
        query_at = torch.arange(stop - q.shape[1], stop)[:, None]
        distance = query_at - torch.arange(stop)
        hidden = distance < 0
        if window_left >= 0:
            hidden |= distance > window_left
        expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
        tolerance = TOLERANCE[self.cache.dtype]
        torch.testing.assert_close(
            out.cpu().double().transpose(0, 1), expected, rtol=tolerance, atol=tolerance
        )


def rows_of(cache: PagedCache, num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, key, value [layers, T, heads, D]."""
    generator = torch.Generator().manual_seed(seed)
    heads = cache.num_kv_heads
    q, key, value = (
        torch.randn(cache.num_layers, num_tokens, n, cache.fmt.head_dim, generator=generator).to(
            cache.device, cache.dtype
        )
        for n in (heads * Q_HEADS_PER_KV, heads, heads)
    )
    return q, key, value


def run_step(
    cache: PagedCache,
    requests: list[tuple[int, int]],
    rows: tuple[Tensor, Tensor, Tensor],
    accepted: list[int] | None = None,
    draft: int = 0,
) -> Tensor:
    """plan, attend in every layer and commit: [layers, T, Hq, D]. What a sequence gives does not
    depend on the others."""
    planned = cache.plan(requests, draft=draft)
    out = [
        cache.attend(planned, layer, *tensors, split_tokens=2 * cache.fmt.group)
        for layer, tensors in enumerate(zip(*rows, strict=True))
    ]
    cache.commit(planned, accepted)
    return torch.stack(out)


def same_state(a: SequenceState, b: SequenceState) -> bool:
    return (
        (a.length, a.staged) == (b.length, b.staged)
        and torch.equal(a.records, b.records)
        and torch.equal(a.pages, b.pages)
    )
