"""`PagedCache`: the life of blocks on top of `kvarn.ops`, as an example of how an engine uses them.

The tensors, per layer: ``cache[layer]`` uint8 [num_blocks, Hkv, record_bytes], ``staging[layer]``
[num_slots, 2, Hkv, G, D] in the model's type. For all layers: ``block_slot`` int32 [num_blocks].
A sequence has the same block ids and staging slots in every layer. The bookkeeping is done on the
host (`kvarn._blocks`), which knows all lengths; nothing waits for the device but an export that is
asked to.

    step = cache.plan([(seq, num_new_tokens), ...])
    for layer in range(num_layers):
        out = cache.attend(step, layer, q, key, value)
    cache.commit(step)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvarn import _backends, _host, ops
from kvarn._blocks import BlockPool, CacheFull, Copy, HeldSequence, Request, Schedule, Seal
from kvarn.format import FITS, Format, is_supported

_ALIGN = 16  # bytes
_TORCH_DTYPES = {np.int32: torch.int32, np.int64: torch.int64}

__all__ = ["CacheFull", "PagedCache", "SequenceState", "Step", "Wave"]


@dataclass(frozen=True)
class Wave:
    """Tokens of a step that see the same state of every block: the arguments of the ops.

    Attributes:
        rows: which tokens of the step: a slice, or int64 [T'].
        slot_mapping: int64 [T'], block * G + row of each token.
        block_table: int32 [B', max_blocks], of the sequences that have tokens in this wave.
        seq_lens: int32 [B'], their lengths, the tokens of this wave included.
        cu_query_lens: int32 [B' + 1], or None when every sequence has one token.
        max_seq_len: the greatest of seq_lens, on the host.
        block_slot: int32 [num_blocks], as it is for this wave.
        seals: int64 [2, n], slots and the blocks they are sealed into, before the wave's tokens are
            appended; or None.
    """

    rows: slice | Tensor
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_query_lens: Tensor | None
    max_seq_len: int
    block_slot: Tensor
    seals: Tensor | None


@dataclass
class Step:
    """What `PagedCache.plan` returns: new tokens of some sequences, with blocks and slots assigned.

    Attributes:
        num_tokens: T, the tokens of all sequences, one sequence after the other; for a graph step
            its rows, those of padding included.
        requests: (seq, num_tokens, draft) of each sequence.
        waves: one for a decode step; one for every block a prompt runs through.
    """

    num_tokens: int
    requests: list[Request]
    waves: list[Wave]
    _attended: list[bool] = field(default_factory=list)  # per layer
    _waves_sealed: list[int] = field(default_factory=list)  # per layer: whose seals are written
    _memory: Tensor | None = None  # of a graph step: what its tensors are views of
    _planned: bool = True  # False: a graph step whose rows are all padding still


@dataclass(frozen=True)
class SequenceState:
    """A sequence outside of a cache (`PagedCache.export_sequence`); it can be pickled.

    Attributes:
        fmt: the format of the records.
        layout_version: of the records.
        length: tokens.
        staged: for each block, whether it is in `pages` (else in `records`).
        records: uint8 [layers, records, Hkv, record_bytes].
        pages: [layers, staged blocks, 2, Hkv, G, D], dtype of the staging pool.
    """

    fmt: Format
    layout_version: int
    length: int
    staged: tuple[bool, ...]
    records: Tensor
    pages: Tensor


class PagedCache:
    """Keys and values of many sequences in blocks of G tokens, packed once they are old enough.

    Args:
        fmt: format of the records.
        num_layers: attention layers; all have the same number and dimension of heads.
        num_kv_heads: KV heads here (with tensor parallelism: those of this rank).
        num_blocks: blocks of the cache, shared by all sequences.
        num_slots: 16-bit pages of the staging pool. A sequence uses at most
            ``sink_blocks + recent_blocks + 1``, one more while drafts reach into a new block.
        dtype: of keys and values: float16 or bfloat16, on the CPU float32 too.
        device: of all tensors.
        sink_blocks: first blocks of a sequence that stay in 16 bits.
        recent_blocks: newest full blocks of a sequence that stay in 16 bits.
        fit, iterations: how tiles are quantized, see `kvarn.ops.seal_blocks`.

    Attributes:
        cache: per layer, uint8 [num_blocks, Hkv, record_bytes].
        staging: per layer, [num_slots, 2, Hkv, G, D].
        block_slot: int32 [num_blocks], the staging slot of a block or -1.

    Raises:
        ValueError: for an argument out of range, or a format that cannot run here.
    """

    def __init__(
        self,
        fmt: Format,
        *,
        num_layers: int,
        num_kv_heads: int,
        num_blocks: int,
        num_slots: int,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
        sink_blocks: int = 1,
        recent_blocks: int = 1,
        fit: str = "unbiased",
        iterations: int | None = None,
    ) -> None:
        where = "kvarn.PagedCache: "
        num_layers = require_integer(f"{where}num_layers", num_layers, 1)
        num_kv_heads = require_integer(f"{where}num_kv_heads", num_kv_heads, 1)
        num_blocks = require_integer(f"{where}num_blocks", num_blocks, 1)
        num_slots = require_integer(f"{where}num_slots", num_slots, 1)
        sink_blocks = require_integer(f"{where}sink_blocks", sink_blocks, 0)
        recent_blocks = require_integer(f"{where}recent_blocks", recent_blocks, 0)
        if fit not in FITS:
            raise ValueError(f"{where}fit must be {' or '.join(map(repr, FITS))}, got {fit!r}")
        if iterations is not None:
            iterations = require_integer(f"{where}iterations", iterations, 0)
            if iterations >= 2**31:
                raise ValueError(f"{where}iterations must be less than 2**31, got {iterations}")
        if not isinstance(fmt, Format):
            raise ValueError(f"kvarn.PagedCache: fmt must be a kvarn.Format, got {fmt!r}")
        if reasons := is_supported(fmt, dtype=dtype, device=device):
            raise ValueError(f"kvarn.PagedCache: {'; '.join(reasons)}")
        self.fmt = fmt
        self.dtype = dtype
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.fit = fit
        self.iterations = iterations
        self._pool = BlockPool(num_blocks, num_slots, fmt.group, sink_blocks, recent_blocks)
        self._step: Step | None = None

        page = (2, num_kv_heads, fmt.group, fmt.head_dim)
        records = fmt.cache_shape(num_blocks, num_kv_heads)
        with outlives_inference_mode():
            self.cache = [
                torch.empty(records, dtype=torch.uint8, device=device) for _ in range(num_layers)
            ]
            self.staging = [
                torch.empty((num_slots, *page), dtype=dtype, device=device)
                for _ in range(num_layers)
            ]
            self.block_slot = torch.full((num_blocks,), -1, dtype=torch.int32, device=device)
        self.device = self.block_slot.device

    # Sequences ---------------------------------------------------------------------------------

    def new_sequence(self) -> int:
        """An empty sequence; the number returned is never used again."""
        return self._pool.add()

    def fork(self, seq: int, length: int | None = None) -> int:
        """A new sequence with the first ``length`` tokens of ``seq`` (all of them by default).

        Nothing is copied: the two share blocks until one of them writes into a shared one. This is
        prefix sharing, and beam search.
        """
        self._require_no_step("fork")
        held = self._pool.get(seq, "fork")
        return self._pool.fork(held, self._prefix(held, length, "fork"))

    def truncate(self, seq: int, length: int) -> None:
        """Forgets all tokens but the first ``length``.

        If the last block kept is a record, it stays one until the next token is appended; then its
        tokens go back to a staging slot (dequantized: what was rounded stays rounded) and the tile
        is sealed again when it is full and old enough.
        """
        self._require_no_step("truncate")
        held = self._pool.get(seq, "truncate")
        self._pool.truncate(held, self._prefix(held, length, "truncate"))
        self._seal_due()

    def free(self, seq: int) -> None:
        """Ends a sequence. Blocks that nobody else holds are free at once."""
        self._require_no_step("free")
        self._pool.get(seq, "free")
        self._pool.free(seq)
        self._seal_due()

    def length(self, seq: int) -> int:
        """Accepted tokens of a sequence."""
        return self._pool.get(seq, "length").length

    def blocks(self, seq: int) -> list[int]:
        """Block ids of a sequence, ceil(length / G) of them; the open step's included."""
        return list(self._pool.get(seq, "blocks").blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._pool.num_blocks

    @property
    def num_slots(self) -> int:
        """Pages of the staging pool."""
        return self._pool.num_slots

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._pool.free_blocks)

    @property
    def num_free_slots(self) -> int:
        """Staging pages that hold no block."""
        return len(self._pool.free_slots)

    def memory_bytes(self) -> int:
        """Bytes of the cache and the staging pool, all layers."""
        return sum(t.numel() * t.element_size() for t in (*self.cache, *self.staging))

    # A step ------------------------------------------------------------------------------------

    def plan(
        self,
        requests: Sequence[tuple[int, int]],
        *,
        draft: int | Sequence[int] = 0,
        into: Step | None = None,
    ) -> Step:
        """Assigns blocks and slots to new tokens.

        Args:
            requests: (seq, count) pairs, each sequence once: its ``count`` next tokens.
            draft: how many of a sequence's tokens, its last ones, may be rejected at `commit`; one
                number for all or one each. Nothing of a draft ever reaches a record.
            into: a step from `graph_step`, to be used again; every count must be 1.

        Returns:
            The step; one at a time, until `commit` or `abort`.

        Raises:
            CacheFull: too few free blocks or slots; nothing was changed.
            ValueError: an unknown sequence, one given twice, a negative count, draft > count, a
                number that is no integer; more than ``into`` has room for.
        """
        self._require_no_step("plan")
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "kvarn.PagedCache.plan: only attend can be captured in a CUDA graph, see graph_step"
            )
        try:
            pairs = [(seq, count) for seq, count in requests]
        except (TypeError, ValueError):
            raise ValueError(
                "kvarn.PagedCache.plan: requests must be pairs of a sequence and a count, "
                f"got {requests!r}"
            ) from None
        drafts = list(draft) if isinstance(draft, Iterable) else [draft] * len(pairs)
        if len(drafts) != len(pairs):
            raise ValueError(
                f"kvarn.PagedCache.plan: draft must be a number or {len(pairs)} numbers, "
                f"got {len(drafts)}"
            )
        wanted = []
        for (seq, count), tail in zip(pairs, drafts, strict=True):
            self._pool.get(seq, "plan")
            count = require_integer(f"kvarn.PagedCache.plan: count of sequence {seq}", count)
            tail = require_integer(f"kvarn.PagedCache.plan: draft of sequence {seq}", tail)
            if not 0 <= tail <= count:
                raise ValueError(
                    f"kvarn.PagedCache.plan: count and draft of sequence {seq} must satisfy "
                    f"0 <= draft <= count, got draft {tail}, count {count}"
                )
            wanted.append(Request(seq, count, tail))
        if len({request.seq for request in wanted}) < len(wanted):
            raise ValueError(
                "kvarn.PagedCache.plan: requests must name each sequence once, "
                f"got {[request.seq for request in wanted]}"
            )
        if into is None:
            self._seal_due()  # what a graph step or an import has left
        else:
            self._check_into(into, wanted)
        schedule = self._pool.schedule(wanted)
        if into is not None and schedule.waves:
            first = schedule.waves[0]
            # A copy may go where a tile lies that is to be sealed.
            if schedule.copies or len(first.seals) > into.num_tokens:
                self._seal_now(first.seals)
                first.seals = []
        self._copy(schedule.copies)
        self._tell_slots()
        hosts = self._host_waves(wanted, schedule)
        if into is None:
            layers = self.num_layers
            step = Step(
                sum(request.num_tokens for request in wanted),
                wanted,
                self._waves(hosts),
                [False] * layers,
                [0] * layers,
            )
        else:
            step = into
            step.requests = wanted
            self._fill(step, hosts[0] if hosts else None)
        self._step = step
        return step

    def graph_step(self, num_seqs: int, max_seq_len: int) -> Step:
        """A decode step whose tensors stay where they are, so that it can be captured.

            step = cache.graph_step(64, 16384)
            ...  # a warm-up, then the capture: attend with it in every layer
            cache.plan([(seq, 1), ...], into=step)
            graph.replay()
            cache.commit(step)

        Before the first `plan` all rows are padding: what is captured writes nothing. Each layer
        seals what the last step has left, appends and attends. A graph is replayed exactly once
        between `plan` and `commit`. `abort` is for a step that was not replayed.

        Args:
            num_seqs: rows: the most sequences of a step. Rows beyond those planned give 0.
            max_seq_len: the most tokens of a sequence.

        Returns:
            A step for ``plan(..., into=step)``, valid until the cache grows.
        """
        where = "kvarn.PagedCache.graph_step: "
        room = require_integer(f"{where}num_seqs", num_seqs, 1)
        width = -(-require_integer(f"{where}max_seq_len", max_seq_len, 1) // self.fmt.group)
        padding = _graph_arrays(room, width)
        with outlives_inference_mode():
            memory = _bundle(padding.values(), pin_memory=False).to(self.device)
        tensors: dict[str, Any] = dict(
            zip(padding, _unbundle(memory, padding.values()), strict=True)
        )
        wave = Wave(
            rows=slice(0, room),
            cu_query_lens=None,
            max_seq_len=width * self.fmt.group,
            block_slot=self.block_slot,
            **tensors,
        )
        layers = self.num_layers
        return Step(room, [], [wave], [True] * layers, [0] * layers, _memory=memory, _planned=False)

    def attend(
        self,
        step: Step,
        layer: int,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        window_left: int = -1,
        sinks: Tensor | None = None,
        split_tokens: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Appends a layer's new keys and values, and attends to all tokens so far. Once per layer.

        A prompt runs through in waves, block by block, so that every query reads exactly what it
        would have read token by token, whatever the chunks.

        A call that was refused can be made again, rightly. If the device failed after a tile was
        sealed, its slot may hold other rows by now: then the step can only be aborted.

        Args:
            step: from `plan`.
            layer: which.
            q: [T, Hq, D], rows as in ``step.requests``, Hq a multiple of Hkv, strided views
                welcome.
            key, value: [T, Hkv, D], not rotated, in the cache's dtype.
            sm_scale, logits_soft_cap, window_left, sinks, split_tokens: see
                `kvarn.ops.decode_attention`.
            out: [T, Hq, D], dtype of ``q``.

        Returns:
            [T, Hq, D], causal attention.

        Raises:
            ValueError: an argument of the wrong shape, dtype or device; a layer that has attended.
            RuntimeError: an earlier call failed halfway.
        """
        replayed = isinstance(step, Step) and step._memory is not None
        if not replayed or step._planned:
            self._require_step(step, "attend")
        layer = require_integer("kvarn.PagedCache.attend: layer", layer)
        if not 0 <= layer < self.num_layers:
            raise ValueError(
                f"kvarn.PagedCache.attend: layer must be in [0, {self.num_layers}), got {layer}"
            )
        self._check_attend(step, q, key, value, out)
        if step._attended[layer] and not replayed:
            raise ValueError(f"kvarn.PagedCache.attend: layer {layer} has attended in this step")
        if any(wave.seals is not None for wave in step.waves[: step._waves_sealed[layer]]):
            raise RuntimeError(
                f"kvarn.PagedCache.attend: layer {layer} failed halfway, the step must be aborted"
            )
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for w, wave in enumerate(step.waves):
            self._seal(layer, wave.seals)
            step._waves_sealed[layer] = 0 if replayed else w + 1
            ops.append_kv(
                key[wave.rows],
                value[wave.rows],
                wave.slot_mapping,
                self.staging[layer],
                wave.block_slot,
                self.fmt,
            )
            in_place = isinstance(wave.rows, slice)
            attended = ops.decode_attention(
                q[wave.rows],
                self.cache[layer],
                wave.block_table,
                wave.seq_lens,
                self.fmt,
                staging=self.staging[layer],
                block_slot=wave.block_slot,
                cu_query_lens=wave.cu_query_lens,
                sm_scale=sm_scale,
                logits_soft_cap=logits_soft_cap,
                window_left=window_left,
                sinks=sinks,
                max_seq_len=wave.max_seq_len,
                split_tokens=split_tokens,
                out=out[wave.rows] if in_place else None,
            )
            if not in_place:
                out[wave.rows] = attended
        step._attended[layer] = True
        return out

    def commit(self, step: Step, accepted: Sequence[int] | None = None) -> None:
        """Ends a step: its tokens count from now on, and tiles that are old enough are sealed.

        All sequences' tiles are sealed by one launch a layer; after a graph step, by the next one.

        Args:
            step: from `plan`, attended by every layer.
            accepted: how many of each sequence's tokens are kept, at least ``count - draft``; the
                rest is forgotten. All by default.
        """
        self._require_step(step, "commit")
        missing = [layer for layer, attended in enumerate(step._attended) if not attended]
        if step.waves and missing:
            raise RuntimeError(f"kvarn.PagedCache.commit: layers {missing} have not attended")
        if accepted is None:
            accepted = [request.num_tokens for request in step.requests]
        if not isinstance(accepted, Iterable):
            raise ValueError(
                "kvarn.PagedCache.commit: accepted must be a number for each of "
                f"{len(step.requests)} sequences, got {accepted!r}"
            )
        counts = [require_integer("kvarn.PagedCache.commit: accepted", n) for n in accepted]
        if len(counts) != len(step.requests) or not all(
            r.num_tokens - r.draft <= n <= r.num_tokens
            for r, n in zip(step.requests, counts, strict=True)
        ):
            limits = [(r.num_tokens - r.draft, r.num_tokens) for r in step.requests]
            raise ValueError(
                f"kvarn.PagedCache.commit: accepted must be within {limits}, got {counts}"
            )
        self._step = None
        for request, count in zip(step.requests, counts, strict=True):
            self._pool.accept(request, count)
        if step._memory is None:
            self._seal_due()
        else:
            self._tell_slots()

    def seal(self) -> None:
        """Seals now what the next step would seal: tiles that a graph step or an import has left.

        The slots that this frees are not written to before the next step.
        """
        self._require_no_step("seal")
        self._seal_due()

    def abort(self, step: Step) -> None:
        """Ends a step whose forward pass failed: its sequences are freed, others are as before."""
        self._require_step(step, "abort")
        for layer, sealed in enumerate(step._waves_sealed):
            for wave in step.waves[sealed:]:
                self._seal(layer, wave.seals)
        self._step = None
        for request in step.requests:
            self._pool.free(request.seq)
        self._seal_due()

    # In and out --------------------------------------------------------------------------------

    def export_sequence(self, seq: int, *, non_blocking: bool = False) -> SequenceState:
        """A copy of a sequence in host memory.

        Args:
            seq: the sequence; it stays as it is.
            non_blocking: copy to pinned memory on the current stream and return at once; the data
                is there when the stream has come so far. If that is a side stream, `seal` on the
                main one first.
        """
        self._require_no_step("export_sequence")
        held = self._pool.get(seq, "export_sequence")
        slots = [int(self._pool.slot[block]) for block in held.blocks]
        ids, pages_at = self._upload(
            np.array([b for b, slot in zip(held.blocks, slots, strict=True) if slot < 0], np.int64),
            np.array([slot for slot in slots if slot >= 0], np.int64),
        )
        records = torch.stack([layer[ids] for layer in self.cache])
        pages = torch.stack([layer[pages_at] for layer in self.staging])
        tail = held.length % self.fmt.group
        if tail and slots[-1] >= 0:
            pages[:, -1, :, :, tail:] = 0  # rows of whoever had the slot before
        return SequenceState(
            fmt=self.fmt,
            layout_version=_host.layout_version,
            length=held.length,
            staged=tuple(slot >= 0 for slot in slots),
            records=_to_host(records, non_blocking),
            pages=_to_host(pages, non_blocking),
        )

    def import_sequence(self, state: SequenceState) -> int:
        """Brings an exported sequence back, into blocks and slots that are free now.

        Tiles in 16 bits that this cache has no wish to keep so are sealed by the next step.

        Raises:
            ValueError: the state is of another format, layout version, shape or dtype.
            CacheFull: too few free blocks or slots; nothing was changed.
        """
        self._require_no_step("import_sequence")
        where = "kvarn.PagedCache.import_sequence: "
        if not isinstance(state, SequenceState):
            raise ValueError(f"{where}state must be a SequenceState, got {type(state).__name__}")
        length = require_integer(f"{where}length", state.length, 0)
        for part, tensor in (("records", state.records), ("pages", state.pages)):
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{where}{part} must be a tensor, got {type(tensor).__name__}")
        try:
            staged = tuple(map(bool, state.staged))
        except TypeError:
            raise ValueError(
                f"{where}staged must be a bool for each block, got {state.staged!r}"
            ) from None
        page = (2, self.num_kv_heads, self.fmt.group, self.fmt.head_dim)
        num_staged = sum(staged)
        num_records = len(staged) - num_staged
        for name, rule, value in (
            ("fmt", self.fmt, state.fmt),
            ("layout_version", _host.layout_version, state.layout_version),
            ("staged blocks", -(-length // self.fmt.group), len(staged)),
            (
                "records",
                (self.num_layers, *self.fmt.cache_shape(num_records, self.num_kv_heads)),
                tuple(state.records.shape),
            ),
            ("pages", (self.num_layers, num_staged, *page), tuple(state.pages.shape)),
            ("dtype", self.dtype, state.pages.dtype),
            ("dtype of records", torch.uint8, state.records.dtype),
        ):
            if rule != value:
                raise ValueError(f"{where}{name} must be {rule}, got {value}")
        seq = self._pool.restore(length, staged)
        try:
            self._restore(state, self._pool.sequences[seq].blocks)
        except BaseException:
            self._pool.free(seq)
            raise
        return seq

    def _restore(self, state: SequenceState, blocks: Sequence[int]) -> None:
        slots = [int(self._pool.slot[block]) for block in blocks]
        ids, pages_at = self._upload(
            np.array([b for b, slot in zip(blocks, slots, strict=True) if slot < 0], np.int64),
            np.array([slot for slot in slots if slot >= 0], np.int64),
        )
        records = state.records.to(self.device, non_blocking=True)
        # Of a tensor that wants a gradient the whole pool would become a part of its graph.
        pages = state.pages.to(self.device, non_blocking=True).detach()
        for layer in range(self.num_layers):
            self.cache[layer][ids] = records[layer]
            self.staging[layer][pages_at] = pages[layer]
        self._tell_slots()

    def grow(self, num_blocks: int, num_slots: int) -> None:
        """Larger pools, by copying them; block ids, slots and contents stay.

        The tensors are new ones: a captured CUDA graph would still read the old ones. Until all
        are filled the old ones are there too; if memory does not suffice, nothing has changed.
        """
        self._require_no_step("grow")
        num_blocks = require_integer("kvarn.PagedCache.grow: num_blocks", num_blocks)
        num_slots = require_integer("kvarn.PagedCache.grow: num_slots", num_slots)
        if num_blocks < self.num_blocks or num_slots < self.num_slots:
            raise ValueError(
                "kvarn.PagedCache.grow: num_blocks and num_slots must be at least "
                f"{self.num_blocks} and {self.num_slots}, got {num_blocks} and {num_slots}"
            )
        with outlives_inference_mode():
            cache = [_grown(pool, num_blocks) for pool in self.cache]
            staging = [_grown(pool, num_slots) for pool in self.staging]
            block_slot = _grown(self.block_slot, num_blocks)
        block_slot[self.num_blocks :] = -1
        self._pool.grow(num_blocks, num_slots)
        self.cache, self.staging, self.block_slot = cache, staging, block_slot

    # Between the bookkeeping and the ops -------------------------------------------------------

    def _seal_due(self) -> None:
        self._seal_now(self._pool.due_seals())
        self._pool.take_seals()
        self._tell_slots()

    def _seal_now(self, seals: list[Seal]) -> None:
        if seals:
            (both,) = self._upload(_seal_array(seals))
            for layer in range(self.num_layers):
                self._seal(layer, both)

    def _seal(self, layer: int, seals: Tensor | None) -> None:
        if seals is None:
            return
        slots, blocks = seals
        ops.seal_blocks(
            self.staging[layer],
            slots,
            blocks,
            self.cache[layer],
            self.fmt,
            fit=self.fit,
            iterations=self.iterations,
        )

    def _copy(self, copies: list[Copy]) -> None:
        """Rows of shared or sealed blocks go to the slots where their new owners will write."""
        staged = [c for c in copies if c.src_slot >= 0]
        if staged:
            src, dst = self._upload(
                np.array([c.src_slot for c in staged], np.int64),
                np.array([c.dst_slot for c in staged], np.int64),
            )
            for pool in self.staging:
                pool[dst] = pool[src]
        sealed = [c for c in copies if c.src_slot < 0]
        if sealed:
            src, dst = self._upload(
                np.array([c.src_block for c in sealed], np.int64),
                np.array([c.dst_slot for c in sealed], np.int64),
            )
            for records, pool in zip(self.cache, self.staging, strict=True):
                key, value = ops.dequantize_tiles(records[src], self.fmt, dtype=self.dtype)
                pool[dst] = torch.stack([key, value], dim=1).transpose(2, 3)

    def _tell_slots(self) -> None:
        """Brings the device's block_slot up to date with the host's."""
        if self._pool.moved:
            moved = np.fromiter(sorted(self._pool.moved), np.int64, len(self._pool.moved))
            at, slots = self._upload(moved, self._pool.slot[moved])
            self.block_slot[at] = slots
            self._pool.moved.clear()

    def _host_waves(self, requests: list[Request], schedule: Schedule) -> list[dict[str, Any]]:
        """For each wave the attributes of `Wave`, arrays in place of tensors."""
        group = self.fmt.group
        held = [self._pool.sequences[request.seq] for request in requests]
        first_row = np.cumsum([0, *(request.num_tokens for request in requests)])
        hosts = []
        for wave in schedule.waves:
            request, start, stop = np.array(wave.spans, np.int64).T
            blocks = np.array(
                [held[r].blocks[first // group] for r, first, _ in wave.spans], np.int64
            )
            lengths = np.array([held[r].length for r, _, _ in wave.spans], np.int64)
            counts = stop - start
            cu_query_lens = np.cumsum([0, *counts], dtype=np.int32)
            within = np.arange(cu_query_lens[-1]) - np.repeat(cu_query_lens[:-1], counts)
            rows = np.repeat(first_row[request] + start - lengths, counts) + within
            hosts.append(
                {
                    # A slice where the rows are contiguous: views instead of copies.
                    "rows": (
                        slice(int(rows[0]), int(rows[-1]) + 1)
                        if rows[-1] - rows[0] == len(rows) - 1
                        else rows
                    ),
                    "slot_mapping": np.repeat(blocks * group + start % group, counts) + within,
                    "block_table": _padded(
                        [_block_ids(held[r])[: -(-end // group)] for r, _, end in wave.spans]
                    ),
                    "seq_lens": stop.astype(np.int32),
                    "cu_query_lens": cu_query_lens if counts.max() > 1 else None,
                    "max_seq_len": int(stop.max()),
                    "block_slot": (self.block_slot if wave.block_slot is None else wave.block_slot),
                    "seals": _seal_array(wave.seals) if wave.seals else None,
                }
            )
        return hosts

    def _waves(self, hosts: list[dict[str, Any]]) -> list[Wave]:
        arrays = [x for host in hosts for x in host.values() if isinstance(x, np.ndarray)]
        tensors = iter(self._upload(*arrays))
        for host in hosts:
            for name, array in host.items():
                if isinstance(array, np.ndarray):
                    host[name] = next(tensors)
        return [Wave(**host) for host in hosts]

    def _fill(self, step: Step, host: dict[str, Any] | None) -> None:
        """The tensors of a graph step, in place; rows beyond those planned are padding."""
        assert step._memory is not None
        arrays = _graph_arrays(*step.waves[0].block_table.shape)
        if host is not None:
            for name, padded in arrays.items():
                if (given := host[name]) is not None:
                    padded[tuple(map(slice, given.shape))] = given
        pinned = _bundle(arrays.values(), pin_memory=self.device.type == "cuda")
        step._memory.copy_(pinned, non_blocking=True)
        step._planned = True

    def _check_into(self, step: Step, requests: list[Request]) -> None:
        where = "kvarn.PagedCache.plan: "
        if (
            not isinstance(step, Step)
            or step._memory is None
            or step.waves[0].block_slot is not self.block_slot
        ):
            raise ValueError(
                f"{where}into must be a step from graph_step, made since the cache has grown last"
            )
        room, limit = step.num_tokens, step.waves[0].max_seq_len
        if len(requests) > room:
            raise ValueError(f"{where}requests must be at most {room}, got {len(requests)}")
        for seq, count, _ in requests:
            if count != 1:
                raise ValueError(
                    f"{where}count of sequence {seq} must be 1 in a graph step, got {count}"
                )
            length = self._pool.sequences[seq].length + 1
            if length > limit:
                raise ValueError(
                    f"{where}length of sequence {seq} must be at most {limit} in this graph step, "
                    f"got {length}"
                )

    def _upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """The arrays on the device, by one copy that nothing waits for."""
        bundle = _bundle(arrays, pin_memory=self.device.type == "cuda")
        return _unbundle(bundle.to(self.device, non_blocking=True), arrays)

    def _prefix(self, held: HeldSequence, length: int | None, caller: str) -> int:
        if length is None:
            return held.length
        length = require_integer(f"kvarn.PagedCache.{caller}: length", length)
        if not 0 <= length <= held.length:
            raise ValueError(
                f"kvarn.PagedCache.{caller}: length must be in [0, {held.length}], got {length}"
            )
        return length

    def _check_attend(
        self, step: Step, q: Tensor, key: Tensor, value: Tensor, out: Tensor | None
    ) -> None:
        """Before anything is written: what `ops` would refuse only after the first append."""
        tokens, dim = step.num_tokens, self.fmt.head_dim
        kv = (tokens, self.num_kv_heads, dim)
        self._check_tensor("key", key, (self.dtype,), kv)
        self._check_tensor("value", value, (self.dtype,), kv)
        self._check_tensor("q", q, _backends.model_dtypes(self.device.type), (tokens, "Hq", dim))
        heads = q.shape[1]
        if heads == 0 or heads % self.num_kv_heads:
            raise ValueError(
                f"kvarn.PagedCache.attend: q must be of a multiple of {self.num_kv_heads} heads, "
                f"got {heads}"
            )
        if out is not None:
            self._check_tensor("out", out, (q.dtype,), (tokens, heads, dim))

    def _check_tensor(
        self,
        name: str,
        tensor: object,
        dtypes: tuple[torch.dtype, ...],
        shape: tuple[int | str, ...],
    ) -> None:
        if not isinstance(tensor, Tensor):
            got = type(tensor).__name__
        elif (
            tensor.dim() == len(shape)
            and all(n == m or m == "Hq" for n, m in zip(tensor.shape, shape, strict=True))
            and tensor.dtype in dtypes
            and tensor.device == self.device
        ):
            return
        else:
            names = _backends.dtype_names((tensor.dtype,))
            got = f"{names} {list(tensor.shape)} on {tensor.device}"
        raise ValueError(
            f"kvarn.PagedCache.attend: {name} must be {_backends.dtype_names(dtypes)} "
            f"[{', '.join(map(str, shape))}] on {self.device}, got {got}"
        )

    def _require_step(self, step: Step, caller: str) -> None:
        if step is None or step is not self._step:
            raise ValueError(
                f"kvarn.PagedCache.{caller}: step must be the one that plan returned last"
            )

    def _require_no_step(self, caller: str) -> None:
        if self._step is not None:
            raise RuntimeError(
                f"kvarn.PagedCache.{caller}: the step from plan must be committed or aborted first"
            )


def require_integer(what: str, value: object, least: int | None = None) -> int:
    """``value`` as an int; ValueError for a bool, a float, or less than ``least``."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{what} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:  # a tensor of floats
        raise ValueError(f"{what} must be an integer, got {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{what} must be at least {least}, got {number}")
    return number


def outlives_inference_mode() -> AbstractContextManager[object]:
    """For tensors that are kept: what is made in inference mode cannot be written to outside."""
    mode: AbstractContextManager[object] = torch.inference_mode(False)
    return mode


def _grown(pool: Tensor, size: int) -> Tensor:
    larger = pool.new_empty((size, *pool.shape[1:]))
    larger[: pool.shape[0]] = pool
    return larger


def _block_ids(held: HeldSequence) -> NDArray[np.int32]:
    return np.frombuffer(held.blocks, np.int32)


def _graph_arrays(room: int, width: int) -> dict[str, NDArray[Any]]:
    """Padding for the tensors of a graph step: no token, no length, nothing to seal."""
    return {
        "slot_mapping": np.full(room, -1, np.int64),
        "seals": np.full((2, room), -1, np.int64),
        "block_table": np.full((room, width), -1, np.int32),
        "seq_lens": np.zeros(room, np.int32),
    }


def _seal_array(seals: list[Seal]) -> NDArray[np.int64]:
    return np.array(seals, np.int64).T


def _bundle(arrays: Iterable[NDArray[Any]], pin_memory: bool) -> Tensor:
    """The bytes of all arrays, each from a multiple of `_ALIGN` on."""
    arrays = list(arrays)
    bundle = torch.empty(
        sum(map(_room, arrays)), dtype=torch.uint8, device="cpu", pin_memory=pin_memory
    )
    for part, array in zip(_unbundle(bundle, arrays), arrays, strict=True):
        part.numpy()[...] = array
    return bundle


def _unbundle(bundle: Tensor, arrays: Iterable[NDArray[Any]]) -> list[Tensor]:
    """Views of a `_bundle`, with the shapes and dtypes of its arrays."""
    tensors, at = [], 0
    for array in arrays:
        part = bundle[at : at + array.nbytes]
        tensors.append(part.view(_TORCH_DTYPES[array.dtype.type]).view(array.shape))
        at += _room(array)
    return tensors


def _room(array: NDArray[Any]) -> int:
    return -(-array.nbytes // _ALIGN) * _ALIGN


def _padded(rows: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    table = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def _to_host(tensor: Tensor, non_blocking: bool) -> Tensor:
    if tensor.device.type == "cpu" or not non_blocking:
        return tensor.cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
