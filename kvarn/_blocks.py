"""Who holds which block and where it lies: the bookkeeping of `kvarn.PagedCache`, without tensors.

A block is

- *free*: nobody holds it (``refs == 0``) and nothing of it is ever read;
- *staged*: held, its tokens lie in the 16-bit staging pool (``slot >= 0``);
- a *record*: held, its tokens lie packed in the cache (``slot == -1``).

A sequence of ``length`` accepted tokens needs 16 bits for its first ``sink_blocks`` blocks, its
``recent_blocks`` newest full blocks and its last, incomplete one: it *pins* them. All others, the
blocks ``sink_blocks <= i < keep_from``, it can read as records. A staged block is sealed as soon as
nobody pins it: of several sequences that share a block, the one with the greatest need decides.
State belongs to blocks and sequences, never to "the sequence that starts with this block".
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class CacheFull(RuntimeError):  # noqa: N818  (a state, as queue.Full is)
    """A step needs more blocks or staging slots than are free. Nothing was changed.

    Attributes:
        missing_blocks, missing_slots: how many more would have been enough. A shortage of slots is
            found only when there are blocks enough.
    """

    def __init__(self, message: str, missing_blocks: int, missing_slots: int) -> None:
        super().__init__(message)
        self.missing_blocks = missing_blocks
        self.missing_slots = missing_slots


@dataclass(slots=True)
class HeldSequence:
    """One sequence: ``blocks`` has ceil(length / group) entries, and those of the open step."""

    keep_from: int
    length: int = 0
    blocks: array[int] = field(default_factory=lambda: array("i"))


class Request(NamedTuple):
    """New tokens of a sequence; the last ``draft`` of them may be rejected later."""

    seq: int
    num_tokens: int
    draft: int


class Span(NamedTuple):
    """Tokens ``start <= t < stop`` of the sequence of ``requests[request]``, all of one block."""

    request: int
    start: int
    stop: int


class Seal(NamedTuple):
    """The staged tile of ``slot`` becomes the record of ``block``."""

    slot: int
    block: int


class Copy(NamedTuple):
    """Tokens of a block go to another staging slot; from the record when ``src_slot`` is -1."""

    src_block: int
    src_slot: int
    dst_slot: int


@dataclass(slots=True)
class Wave:
    """A part of a step in which no sequence crosses the border of a block (see `schedule`)."""

    spans: list[Span]
    seals: list[Seal]  #: to be done before the wave
    block_slot: NDArray[np.int32] | None  #: what the wave sees; None: the final state


@dataclass(slots=True)
class Schedule:
    copies: list[Copy]  #: to be done before the first wave
    waves: list[Wave]


class BlockPool:
    """Blocks, staging slots and sequences. Errors name the method of `PagedCache` that called."""

    def __init__(
        self, num_blocks: int, num_slots: int, group: int, sink_blocks: int, recent_blocks: int
    ) -> None:
        self.group = group
        self.sink_blocks = sink_blocks
        self.recent_blocks = recent_blocks
        self.num_slots = num_slots
        self.slot: NDArray[np.int32] = np.full(num_blocks, -1, np.int32)
        self.refs = [0] * num_blocks  #: sequences that hold the block
        self.pins = [0] * num_blocks  #: sequences that need it in 16 bits
        self.free_blocks = list(range(num_blocks - 1, -1, -1))
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.sequences: dict[int, HeldSequence] = {}
        self.moved: set[int] = set()  #: blocks whose slot changed since the device was told
        self._sealable: set[int] = set()
        self._ids = 0
        self._short = 0  #: slots promised beyond the pool while a schedule is drawn up
        self._undo: list[Callable[[], object]] | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.refs)

    def grow(self, num_blocks: int, num_slots: int) -> None:
        old_blocks, old_slots = self.num_blocks, self.num_slots
        self.slot = np.concatenate([self.slot, np.full(num_blocks - old_blocks, -1, np.int32)])
        self.refs += [0] * (num_blocks - old_blocks)
        self.pins += [0] * (num_blocks - old_blocks)
        self.free_blocks[:0] = range(num_blocks - 1, old_blocks - 1, -1)
        self.free_slots[:0] = range(num_slots - 1, old_slots - 1, -1)
        self.num_slots = num_slots

    # Sequences ---------------------------------------------------------------------------------

    def add(self) -> int:
        self._ids += 1
        self.sequences[self._ids] = HeldSequence(keep_from=self.sink_blocks)
        return self._ids

    def get(self, seq: int, caller: str) -> HeldSequence:
        # 1.0 and True are keys like 1, but no sequences.
        if isinstance(seq, bool) or not hasattr(seq, "__index__") or seq not in self.sequences:
            raise ValueError(
                f"kvarn.PagedCache.{caller}: seq must be a sequence of this cache, got {seq!r}"
            )
        return self.sequences[seq]

    def fork(self, parent: HeldSequence, length: int) -> int:
        seq = self.add()
        child = self.sequences[seq]
        child.length = length
        child.blocks = parent.blocks[: -(-length // self.group)]
        child.keep_from = self._keep_from(length)
        for i, block in enumerate(child.blocks):
            self.refs[block] += 1
            if self._pinned(child, i):
                self._pin(block)
        return seq

    def restore(self, length: int, staged: Sequence[bool]) -> int:
        """A sequence of new blocks, ``staged`` ones with a slot."""
        self._require("import_sequence", len(staged), sum(staged))
        seq = self.add()
        held = self.sequences[seq]
        held.length = length
        held.keep_from = self._keep_from(length)
        for i, in_slot in enumerate(staged):
            block = self._take_block()
            held.blocks.append(block)
            if in_slot:
                self._set_slot(block, self._take_slot())
            if self._pinned(held, i):
                self._pin(block)
            elif in_slot:
                self._set_sealable(block, True)
        return seq

    def truncate(self, held: HeldSequence, length: int) -> None:
        while len(held.blocks) > -(-length // self.group):
            i = len(held.blocks) - 1
            pinned = self._pinned(held, i)
            self._drop(held.blocks.pop(), pinned)
        held.length = length
        self._move_window(held, length)

    def free(self, seq: int) -> None:
        self.truncate(self.sequences[seq], 0)
        del self.sequences[seq]

    def accept(self, request: Request, accepted: int) -> None:
        held = self.sequences[request.seq]
        self.truncate(held, held.length + accepted)

    def due_seals(self) -> list[Seal]:
        """What is to be sealed now; it stays staged until `take_seals`."""
        return [Seal(int(self.slot[block]), block) for block in sorted(self._sealable)]

    def take_seals(self) -> list[Seal]:
        """`due_seals` become records; their slots are free: seal before anything is staged."""
        seals = self.due_seals()
        for slot, block in seals:
            self._set_sealable(block, False)
            self._append(self.free_slots, slot)
            self._set_slot(block, -1)
        return seals

    # Scheduling a step -------------------------------------------------------------------------

    def schedule(self, requests: Sequence[Request]) -> Schedule:
        """Blocks and slots for new tokens, in waves. Raises `CacheFull` with nothing changed.

        The query at position t reads block i as a record if ``sink_blocks <= i < t // group -
        recent_blocks``, the state that decoding token by token would have found. The state changes
        only where a sequence enters a block, so a step is cut there: wave w has the tokens that lie
        in the w-th block that their sequence touches, and is preceded by the seals due at that
        point: the first one by what was due before. Decode steps have one wave.

        A block that is entered by draft tokens only may be left again. Seals due there write the
        record (its tokens are accepted) and later waves read it, but the slot stays until `accept`.
        """
        self._require("plan", self._blocks_needed(requests), 0)
        self._undo, self._short = [], 0
        try:
            schedule = self._schedule(requests)
        finally:
            undo, self._undo = self._undo, None
        if self._short:
            for restore in reversed(undo):
                restore()
            self._require("plan", 0, len(self.free_slots) + self._short)
        return schedule

    def _schedule(self, requests: Sequence[Request]) -> Schedule:
        copies: list[Copy] = []
        waves: list[Wave] = []
        read_early: set[int] = set()
        num_waves = max((self._blocks_touched(request) for request in requests), default=0)
        for w in range(num_waves):
            wave = Wave([], self.take_seals() if w == 0 else [], None)
            for r, request in enumerate(requests):
                held = self.sequences[request.seq]
                end = held.length + request.num_tokens
                tile = held.length // self.group + w
                start, stop = max(held.length, tile * self.group), min(end, (tile + 1) * self.group)
                if start >= stop:
                    continue
                wave.spans.append(Span(r, start, stop))
                if w > 0:
                    certain = end - request.draft
                    self._move_window(held, min(start, certain))
                    wave.seals += self.take_seals()
                    if start > certain:
                        wave.seals += self._read_early(held, start, certain, read_early)
                self._open(held, tile, copies)
            if num_waves > 1:
                wave.block_slot = self.slot.copy()
                wave.block_slot[list(read_early)] = -1
            waves.append(wave)
        return Schedule(copies, waves)

    def _read_early(
        self, held: HeldSequence, start: int, certain: int, read_early: set[int]
    ) -> list[Seal]:
        due = range(held.keep_from, min(self._keep_from(start), certain // self.group))
        blocks = {held.blocks[i] for i in due} - read_early
        blocks = {b for b in blocks if self.pins[b] == 1 and self.slot[b] >= 0}
        read_early |= blocks
        return [Seal(int(self.slot[block]), block) for block in sorted(blocks)]

    def _blocks_touched(self, request: Request) -> int:
        length = self.sequences[request.seq].length
        first, end = length // self.group, -(-(length + request.num_tokens) // self.group)
        return end - first if request.num_tokens else 0

    def _blocks_needed(self, requests: Iterable[Request]) -> int:
        needed = 0
        writers: Counter[int] = Counter()
        for seq, count, _ in requests:
            held = self.sequences[seq]
            needed += -(-(held.length + count) // self.group) - len(held.blocks)
            if count and held.length % self.group:
                writers[held.blocks[-1]] += 1
        return needed + sum(min(n, self.refs[block] - 1) for block, n in writers.items())

    def _open(self, held: HeldSequence, tile: int, copies: list[Copy]) -> None:
        """Makes block ``tile`` of a sequence its own and staged, so that rows can be written."""
        if tile == len(held.blocks):
            block = self._take_block()
            self._append(held.blocks, block)
            self._pin(block)
            self._set_slot(block, self._take_slot())
            return
        block = held.blocks[tile]
        if self.refs[block] > 1:
            slot, own = self._take_slot(), self._take_block()
            copies.append(Copy(block, int(self.slot[block]), slot))
            self._pin(own)
            self._set_slot(own, slot)
            self._drop(block, pinned=True)
            self._set(held.blocks, tile, own)
        elif self.slot[block] < 0:
            slot = self._take_slot()
            copies.append(Copy(block, -1, slot))
            self._set_slot(block, slot)

    # The window of 16-bit blocks ---------------------------------------------------------------

    def _keep_from(self, length: int) -> int:
        return max(self.sink_blocks, length // self.group - self.recent_blocks)

    def _pinned(self, held: HeldSequence, i: int) -> bool:
        return i < self.sink_blocks or i >= held.keep_from

    def _move_window(self, held: HeldSequence, length: int) -> None:
        old, new = held.keep_from, self._keep_from(length)
        if new == old:
            return
        for i in range(old, new):
            self._unpin(held.blocks[i])
        for i in range(new, min(old, len(held.blocks))):
            self._pin(held.blocks[i])
        if self._undo is not None:
            self._undo.append(lambda: setattr(held, "keep_from", old))
        held.keep_from = new

    def _pin(self, block: int) -> None:
        self._set(self.pins, block, self.pins[block] + 1)
        self._set_sealable(block, False)  # it may be due still, if sealing it failed

    def _unpin(self, block: int) -> None:
        self._set(self.pins, block, self.pins[block] - 1)
        self._set_sealable(block, self.pins[block] == 0 and self.slot[block] >= 0)

    def _drop(self, block: int, pinned: bool) -> None:
        if pinned:
            self._unpin(block)
        self._set(self.refs, block, self.refs[block] - 1)
        if self.refs[block] == 0:
            self._set_sealable(block, False)
            if self.slot[block] >= 0:
                self._append(self.free_slots, int(self.slot[block]))
                self._set_slot(block, -1)
            self._append(self.free_blocks, block)

    # Primitive changes, each with its inverse while a schedule is drawn up ----------------------

    def _require(self, caller: str, blocks: int, slots: int) -> None:
        missing_blocks = max(0, blocks - len(self.free_blocks))
        missing_slots = max(0, slots - len(self.free_slots))
        if missing_blocks or missing_slots:
            what, need, free, size = (
                ("blocks", blocks, len(self.free_blocks), self.num_blocks)
                if missing_blocks
                else ("staging slots", slots, len(self.free_slots), self.num_slots)
            )
            raise CacheFull(
                f"kvarn.PagedCache.{caller}: free {what} must be at least {need}, "
                f"got {free} (of {size})",
                missing_blocks,
                missing_slots,
            )

    def _take_block(self) -> int:
        block = self.free_blocks.pop()
        self.refs[block] = 1
        if self._undo is not None:

            def restore() -> None:
                self.refs[block] = 0
                self.free_blocks.append(block)

            self._undo.append(restore)
        return block

    def _take_slot(self) -> int:
        if not self.free_slots:
            self._short += 1
            return self.num_slots + self._short - 1
        slot = self.free_slots.pop()
        if self._undo is not None:
            self._undo.append(lambda: self.free_slots.append(slot))
        return slot

    def _set(self, items: MutableSequence[int], i: int, value: int) -> None:
        if self._undo is not None:
            old = items[i]
            self._undo.append(lambda: items.__setitem__(i, old))
        items[i] = value

    def _append(self, items: MutableSequence[int], value: int) -> None:
        items.append(value)
        if self._undo is not None:
            self._undo.append(items.pop)

    def _set_slot(self, block: int, slot: int) -> None:
        if self._undo is not None:
            old = self.slot[block]
            self._undo.append(lambda: self.slot.__setitem__(block, old))
        self.slot[block] = slot
        self.moved.add(block)

    def _set_sealable(self, block: int, sealable: bool) -> None:
        if sealable == (block in self._sealable):
            return
        change, inverse = self._sealable.add, self._sealable.discard
        if not sealable:
            change, inverse = inverse, change
        change(block)
        if self._undo is not None:
            self._undo.append(lambda: inverse(block))
