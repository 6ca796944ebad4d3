"""`kvarn.PagedCache`: the life of blocks, against the dense model of dense_cache.py."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch
from dense_cache import Q_HEADS_PER_KV, CheckedCache
from torch import Tensor

from kvarn import Format, PagedCache, ops
from kvarn.cache import CacheFull, Step

FMT = Format("kvarn_k4v2_g64", head_dim=64)
G = FMT.group


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The tensors are tiny: on a busy machine threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def checked(**options) -> CheckedCache:
    options.setdefault("num_kv_heads", 1)
    return CheckedCache(options.pop("fmt", FMT), **options)


def staged_blocks(checked: CheckedCache, seq: int) -> list[bool]:
    slots = checked.cache.block_slot[checked.cache.blocks(seq)]
    return (slots >= 0).tolist()


# What is sealed, and when ----------------------------------------------------------------------


@pytest.mark.parametrize("sink_blocks", [0, 1, 2])
@pytest.mark.parametrize("recent_blocks", [0, 1, 2])
def test_what_stays_in_16_bits(sink_blocks, recent_blocks):
    c = checked(sink_blocks=sink_blocks, recent_blocks=recent_blocks)
    seq = c.new()
    for length in range(G - 1, 6 * G, G // 2):
        c.step([(seq, length - c.cache.length(seq))])
        full = length // G
        expected = [i < sink_blocks or i >= full - recent_blocks for i in range(-(-length // G))]
        assert staged_blocks(c, seq) == expected
        used = c.cache.num_slots - c.cache.num_free_slots
        assert used <= sink_blocks + recent_blocks + 1
    c.check()


def test_a_tile_is_sealed_after_the_step_that_fills_it():
    """The token that completes a tile still reads it in 16 bits, the next one reads the record."""
    c = checked(sink_blocks=0, recent_blocks=0)
    seq = c.new()
    c.step([(seq, G - 1)])
    step = c.step([(seq, 1)])  # compares attention with the 16-bit tile
    assert step.waves[0].seals is None
    assert staged_blocks(c, seq) == [False]
    c.step([(seq, 1)])  # and now with the record
    assert staged_blocks(c, seq) == [False, True]


def test_fault24_tiles_of_many_sequences_are_sealed_in_one_call_per_layer(monkeypatch):
    c = checked(num_blocks=64, num_slots=64, num_layers=3, sink_blocks=0, recent_blocks=0)
    seqs = [c.new() for _ in range(32)]
    c.step([(seq, G - 1) for seq in seqs])
    calls = []
    seal = ops.seal_blocks
    monkeypatch.setattr(
        ops, "seal_blocks", lambda *a, **k: calls.append(len(a[1])) or seal(*a, **k)
    )
    c.step([(seq, 1) for seq in seqs])
    assert calls == [32, 32, 32]
    c.check()


def test_fault24_a_decode_step_is_one_call_of_each_op_per_layer(monkeypatch):
    c = checked(num_layers=3)
    seqs = [c.new() for _ in range(5)]
    c.step([(seq, 10 + 30 * i) for i, seq in enumerate(seqs)])
    calls = []
    for name in ("append_kv", "decode_attention", "seal_blocks", "gather_kv", "dequantize_tiles"):
        op = getattr(ops, name)
        monkeypatch.setattr(
            ops, name, lambda *a, op=op, name=name, **k: calls.append(name) or op(*a, **k)
        )
    c.step([(seq, 1) for seq in seqs])
    assert calls == ["append_kv", "decode_attention"] * 3


# Drafts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recent_blocks", [0, 1, 2])
def test_fault15_drafts_never_reach_a_record(recent_blocks, monkeypatch):
    """Every number of drafts and of accepted ones, over the border of a tile.

    The model compares every record with what it accepted; rejected rows are NaN before each read.
    """
    c = checked(sink_blocks=0, recent_blocks=recent_blocks)
    prompt = c.new()
    c.step([(prompt, 3 * G - 3)])
    for draft in range(1, 7):
        for accepted in range(draft + 1):
            seq = c.fork(prompt)
            c.step([(seq, draft)], [draft], [accepted])
            c.step([(seq, 2)], [1], [1])
            c.step([(seq, G)])
            c.check()
            c.free(seq)


def test_fault15_rejecting_all_leaves_the_sequence_as_it_was():
    c = checked(sink_blocks=0)
    seq = c.new()
    c.step([(seq, 2 * G)])
    blocks, free = c.cache.blocks(seq), c.cache.num_free_blocks
    c.step([(seq, 5)], [5], [0])
    assert c.cache.blocks(seq) == blocks
    assert c.cache.num_free_blocks == free
    c.check()


def test_fault15_number_of_query_tokens_alternates():
    """Several query tokens attend to all that came before, not to the new ones alone."""
    c = checked(num_kv_heads=2)
    a, b = c.new(), c.new()
    for i, n in enumerate([1, 7, 2, 16, 1, 1, 64, 3, 130, 1, 5, 128, 127, 2]):
        c.step([(a, n), (b, (3 * i) % 5)], [n // 2, 0], [n - n // 3, (3 * i) % 5])
    c.check()


@pytest.mark.parametrize("recent_blocks", [1, 2])
def test_fault15_with_drafts_records_equal_those_without(recent_blocks):
    """A draft into a new block reads an old tile as a record; if rejected, it stays staged."""
    c = checked(sink_blocks=0, recent_blocks=recent_blocks)
    seq = c.new()
    c.step([(seq, 3 * G - 2)])
    before = staged_blocks(c, seq)
    step = c.step([(seq, 6)], [6], [1])
    assert len(step.waves) == 2
    assert step.waves[1].seals is not None
    assert staged_blocks(c, seq) == before
    c.check()
    c.step([(seq, 6)], [6], [6])
    assert staged_blocks(c, seq) == [*[False] * (3 - recent_blocks), *[True] * (recent_blocks + 1)]
    c.check()


def test_fault15_a_tile_read_early_is_16_bit_for_a_sharer_that_needs_it():
    c = checked(sink_blocks=0, recent_blocks=2)
    drafter = c.new()
    c.step([(drafter, 4 * G - 2)])
    sharer = c.fork(drafter, 3 * G - 2)
    for order in (1, -1):
        requests = [(drafter, 6), (sharer, 5)][::order]
        c.step(requests, [6, 0][::order], [0, 5][::order])
        c.truncate(sharer, 3 * G - 2)
    c.check()


def test_window_is_passed_on():
    c = checked()
    seq = c.new()
    for n in (G + 5, 1, 2 * G, 3):
        c.step([(seq, n)], window_left=70)


# Prefix sharing, fork, truncate, free ----------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, G - 1, G, G + 1, 3 * G - 1, 3 * G, 3 * G + 17])
@pytest.mark.parametrize("writer", ["parent", "child", "both"])
def test_fault16_sequences_that_share_a_prefix(length, writer):
    """Two sequences with the same first block: neither sees what the other appends."""
    c = checked(sink_blocks=1, recent_blocks=0)
    parent = c.new()
    c.step([(parent, 3 * G + 17)])
    child = c.fork(parent, length)
    full = length // G
    assert c.cache.blocks(child)[:full] == c.cache.blocks(parent)[:full]
    writers = {"parent": [parent], "child": [child], "both": [child, parent]}[writer]
    for n in (1, G, 3):
        c.step([(seq, n) for seq in writers])
        c.check()
    c.free(parent)
    c.check()
    c.step([(child, 2 * G)])
    c.check()


def test_fault16_the_greatest_need_of_the_sharers_decides():
    c = checked(sink_blocks=0, recent_blocks=1)
    holder = c.new()
    c.step([(holder, 2 * G)])
    runner = c.fork(holder)
    c.step([(runner, 3 * G)])
    assert staged_blocks(c, runner) == [False, True, False, False, True]
    c.check()
    c.free(holder)
    assert staged_blocks(c, runner) == [False, False, False, False, True]
    c.check()


def test_fault16_a_freed_block_comes_back_without_slot_or_seal():
    """Every block of the pool is a record first, then staged for somebody else, and back."""
    c = checked(num_blocks=6, num_slots=6, sink_blocks=0, recent_blocks=0)
    for _ in range(4):
        old = c.new()
        c.step([(old, 5 * G + 1)])
        blocks = c.cache.blocks(old)
        c.free(old)
        assert c.cache.block_slot.tolist() == [-1] * 6
        seqs = [c.new() for _ in range(6)]
        c.step([(seq, 1 + i) for i, seq in enumerate(seqs)])
        assert {c.cache.blocks(seq)[0] for seq in seqs} == set(range(6)) > set(blocks[:-1]) - {None}
        c.check()
        for seq in seqs:
            c.free(seq)


def test_fault16_a_sequence_is_gone_after_free():
    c = checked()
    seq = c.new()
    c.step([(seq, 5)])
    c.free(seq)
    for call in (
        c.cache.free,
        c.cache.fork,
        c.cache.blocks,
        c.cache.length,
        c.cache.export_sequence,
    ):
        with pytest.raises(ValueError, match=rf"seq must be a sequence of this cache, got {seq}"):
            call(seq)
    with pytest.raises(ValueError, match="seq must be a sequence of this cache"):
        c.cache.plan([(seq, 1)])
    assert c.new() != seq
    assert c.cache.num_free_blocks == c.cache.num_blocks


def test_fork_shares_memory():
    c = checked(num_blocks=10, num_slots=8)
    seq = c.new()
    c.step([(seq, 5 * G + 3)])
    children = [c.fork(seq) for _ in range(20)]
    assert c.cache.num_free_blocks == 4
    c.step([(children[0], 1), (seq, 1)])
    assert c.cache.num_free_blocks == 2
    c.check()


def test_two_sharers_of_an_open_block_make_one_copy():
    c = checked()
    a = c.new()
    c.step([(a, 10)])
    b = c.fork(a)
    block = c.cache.blocks(a)
    c.step([(b, 1), (a, 1)])
    assert c.cache.blocks(a) == block != c.cache.blocks(b)
    assert c.cache.num_blocks - c.cache.num_free_blocks == 2
    c.check()


@pytest.mark.parametrize("length", [0, 1, G - 1, G, G + 30, 2 * G, 3 * G + 1, 5 * G])
@pytest.mark.parametrize("shared", [False, True])
def test_truncate_into_staged_tiles_and_records(length, shared):
    c = checked(sink_blocks=1, recent_blocks=1)
    seq = c.new()
    c.step([(seq, 5 * G)])
    other = c.fork(seq) if shared else None
    c.truncate(seq, length)
    assert c.cache.length(seq) == length
    c.check()
    c.step([(seq, 1)])
    c.check()
    c.step([(seq, 3 * G)])
    c.check()
    if other is not None:
        c.step([(other, 1)])
        c.check()


def test_truncating_a_record_keeps_it_until_something_is_appended():
    c = checked(sink_blocks=0, recent_blocks=0)
    seq = c.new()
    c.step([(seq, 2 * G)])
    c.truncate(seq, G + 10)
    assert staged_blocks(c, seq) == [False, False]
    assert c.cache.num_free_slots == c.cache.num_slots
    c.step([(seq, 1)])
    assert staged_blocks(c, seq) == [False, True]
    c.step([(seq, G - 11)])
    assert staged_blocks(c, seq) == [False, False]
    c.check()


# Chunks, formats, dtypes -----------------------------------------------------------------------


@pytest.mark.parametrize("recent_blocks", [0, 1])
@pytest.mark.parametrize("chunk", [1, 64, 127, 128, 129, 512])
def test_fault17_chunks_do_not_matter(chunk, recent_blocks):
    """Bit for bit the same records, the same attention: q, key and value are given here."""
    fmt = Format("kvarn_k4v2_g128", head_dim=64)
    generator = torch.Generator().manual_seed(0)
    total = 530
    q = torch.randn(total, 3, 64, generator=generator)
    key, value = torch.randn(2, total, 1, 64, generator=generator)

    def run(sizes):
        cache = PagedCache(
            fmt,
            num_layers=1,
            num_kv_heads=1,
            num_blocks=5,
            num_slots=3,
            dtype=torch.float32,
            recent_blocks=recent_blocks,
        )
        seq, out, at = cache.new_sequence(), [], 0
        for n in sizes:
            rows = slice(at, at + n)
            step = cache.plan([(seq, n)])
            out.append(cache.attend(step, 0, q[rows], key[rows], value[rows], split_tokens=128))
            cache.commit(step)
            at += n
        return torch.cat(out), cache.export_sequence(seq)

    expected, state = run([total])
    out, chunked = run([chunk] * (total // chunk) + [total % chunk] * (total % chunk > 0))
    assert chunked.staged == state.staged
    assert torch.equal(chunked.records, state.records)
    assert torch.equal(chunked.pages, state.pages)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_fault20_two_caches_of_different_formats_in_one_process():
    a = checked(fmt=Format("kvarn_k2v2_g128", head_dim=128), num_kv_heads=2, seed=1)
    b = checked(fmt=Format("kvarn_k8v3_g64", head_dim=64), dtype=torch.bfloat16, seed=2)
    seq_a, seq_b = a.new(), b.new()
    for n in (100, 1, 200, 7):
        a.step([(seq_a, n)])
        b.step([(seq_b, n)])
        a.check()
        b.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_staging(dtype):
    c = checked(dtype=dtype, num_kv_heads=2)
    seq = c.new()
    for n in (70, 1, 130, 2):
        c.step([(seq, n)])
    c.check()


def test_fused_projections_are_taken_as_views():
    """q, key, value as slices of one buffer."""
    fmt = FMT
    cache = PagedCache(
        fmt, num_layers=1, num_kv_heads=2, num_blocks=4, num_slots=4, dtype=torch.float32
    )
    fused = torch.randn(150, 10, 64)
    q, key, value = fused.split([6, 2, 2], dim=1)
    outs = []
    for views in ((q, key, value), (q.contiguous(), key.contiguous(), value.contiguous())):
        seq = cache.new_sequence()
        step = cache.plan([(seq, 150)])
        outs.append(cache.attend(step, 0, *views, out=torch.empty(150, 6, 64)))
        cache.commit(step)
        cache.free(seq)
    assert torch.equal(*outs)


# Modes of torch that a caller may be in ---------------------------------------------------------


def life(cache: PagedCache, around: Callable[[], AbstractContextManager[object]]) -> list[Tensor]:
    """Outputs of steps, each call within `around()`; captured steps where a graph would be."""
    random = torch.Generator(cache.device).manual_seed(0)
    outs = []

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=cache.device, dtype=torch.float32).to(
            cache.dtype
        )

    def run(count: int, seq: int, into: Step | None = None) -> None:
        q, (key, value) = normal(count, 4, FMT.head_dim), normal(2, count, 2, FMT.head_dim)
        with around():
            step = cache.plan([(seq, count)], into=into)
            for layer in range(cache.num_layers):
                outs.append(cache.attend(step, layer, q, key, value))
            cache.commit(step)

    with around():
        seq = cache.new_sequence()
    run(3 * G - 1, seq)
    with around():
        decode = cache.graph_step(1, 8 * G)
    for _ in range(2):
        run(1, seq, decode)
    with around():
        child = cache.fork(seq)
        cache.truncate(seq, 2 * G + 5)
        cache.grow(cache.num_blocks + 4, cache.num_slots + 1)
        state = cache.export_sequence(child)
        cache.free(child)
        child = cache.import_sequence(state)
        cache.export_sequence(child, non_blocking=True)
        decode = cache.graph_step(1, 8 * G)
    run(1, child, decode)
    run(G, seq)
    return outs


def paged(device: str = "cpu", dtype: torch.dtype = torch.float32) -> PagedCache:
    return PagedCache(
        FMT, num_layers=2, num_kv_heads=2, num_blocks=16, num_slots=8, dtype=dtype, device=device
    )


@pytest.mark.parametrize("default", ["meta", "cpu"])
def test_any_default_device_of_torch(default):
    expected = life(paged(), nullcontext)
    with torch.device(default):
        outs = life(paged(), nullcontext)
    assert all(map(torch.equal, outs, expected))


def alternating(*modes: Callable[[], AbstractContextManager[object]]):
    turns = itertools.cycle(modes)
    return lambda: next(turns)()


@pytest.mark.parametrize("first", [0, 1])
def test_in_inference_mode_and_out_of_it_in_turn(first):
    expected = life(paged(), nullcontext)
    modes = [torch.inference_mode, torch.no_grad]
    around = alternating(modes[first], modes[1 - first])
    with around():
        cache = paged()
    assert all(map(torch.equal, life(cache, around), expected))


# Export and import -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, G, 2 * G + 5, 5 * G])
@pytest.mark.parametrize("pickled", [False, True])
def test_fault18_a_restored_sequence_has_its_16_bit_rows(length, pickled):
    c = checked(num_kv_heads=2)
    seq = c.new()
    c.step([(seq, length)])
    blocks = c.cache.blocks(seq)
    state, model = c.export(seq)
    if pickled:
        state = pickle.loads(pickle.dumps(state))
    c.free(seq)
    squatter = c.new()
    c.step([(squatter, 3)])  # takes a block, so that the ids differ
    seq = c.restore((state, model))
    assert not length or c.cache.blocks(seq) != blocks
    c.check()
    c.step([(seq, G + 1), (squatter, 1)])
    c.check()


def test_fault18_exported_rows_hold_nothing_of_others():
    c = checked()
    old = c.new()
    c.step([(old, G)])
    c.free(old)
    seq = c.new()
    c.step([(seq, 5)])
    state = c.cache.export_sequence(seq)
    assert state.pages[:, :, :, :, :5].count_nonzero() == state.pages[:, :, :, :, :5].numel()
    assert state.pages[:, :, :, :, 5:].count_nonzero() == 0


def test_fault18_into_a_cache_with_another_window():
    """What the new cache does not keep in 16 bits it seals; a record stays one."""
    a = checked(sink_blocks=1, recent_blocks=2)
    seq = a.new()
    a.step([(seq, 5 * G + 5)])
    b = checked(sink_blocks=0, recent_blocks=0, num_slots=5)
    restored = b.restore(a.export(seq))
    assert staged_blocks(b, restored) == staged_blocks(a, seq)
    b.check()
    b.seal()
    assert staged_blocks(b, restored) == [False] * 5 + [True]
    b.check()
    a2 = a.restore(b.export(restored))
    assert staged_blocks(a, a2) == [False] * 5 + [True]
    a.check()


def test_fault18_what_does_not_fit_is_refused():
    a = checked()
    seq = a.new()
    a.step([(seq, 2 * G)])
    state = a.cache.export_sequence(seq)
    for options, words in (
        ({"fmt": Format("kvarn_k4v4_g64", 64)}, "fmt must be kvarn_k4v4_g64, got kvarn_k4v2_g64"),
        ({"num_layers": 3}, r"records must be \(3, 0, 1, 3840\), got \(2, 0, 1, 3840\)"),
        ({"dtype": torch.float16}, "dtype must be torch.float16, got torch.float32"),
    ):
        options.setdefault("num_kv_heads", 1)
        b = checked(**options)
        with pytest.raises(ValueError, match=f"^kvarn.PagedCache.import_sequence: {words}"):
            b.cache.import_sequence(state)
        assert b.cache.num_free_blocks == b.cache.num_blocks
    small = checked(num_blocks=1)
    with pytest.raises(CacheFull, match="import_sequence: free blocks must be at least 2, got 1"):
        small.cache.import_sequence(state)


# Out of memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (None, "state must be a SequenceState, got dict"),
        ({"staged": None}, "staged must be a bool for each block, got None"),
        ({"staged": 3}, "staged must be a bool for each block, got 3"),
        ({"records": None}, "records must be a tensor, got NoneType"),
        ({"pages": [1.0]}, "pages must be a tensor, got list"),
    ],
)
def test_fault18_what_is_no_state_is_refused(changes, words):
    c = checked()
    seq = c.new()
    c.step([(seq, 3 * G + 5)])
    state = c.cache.export_sequence(seq)
    bad = {} if changes is None else dataclasses.replace(state, **changes)
    free = c.cache.num_free_blocks, c.cache.num_free_slots
    with pytest.raises(ValueError, match=f"^kvarn.PagedCache.import_sequence: {words}"):
        c.cache.import_sequence(bad)
    assert (c.cache.num_free_blocks, c.cache.num_free_slots) == free


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_fault18_flags_and_gradients_of_a_state(kind):
    """Flags of any kind; and pages that want a gradient do not draw the pool into their graph."""
    c = checked()
    seq = c.new()
    c.step([(seq, 3 * G + 5)])
    state, model = c.export(seq)
    pages = state.pages.clone().requires_grad_()
    state = dataclasses.replace(state, staged=kind(state.staged), pages=pages)
    with torch.enable_grad():
        restored = c.restore((state, model))
        assert not any(pool.requires_grad for pool in c.cache.staging)
        c.step([(restored, 2)])
    c.check()


@pytest.mark.parametrize("requests", [None, [1], [(1,)], [(1, 2, 3)], 7])
def test_requests_are_pairs(requests):
    c = checked()
    c.new()
    words = "requests must be pairs of a sequence and a count, got"
    with pytest.raises(ValueError, match=f"^kvarn.PagedCache.plan: {words}"):
        c.cache.plan(requests)
    c.cache.abort(c.cache.plan(pair for pair in [(1, 2)]))


def test_out_of_blocks_says_how_many_and_changes_nothing():
    c = checked(num_blocks=4, num_slots=8)
    a, b = c.new(), c.new()
    c.step([(a, 2 * G), (b, 1)])
    before = c.state()
    words = r"^kvarn.PagedCache.plan: free blocks must be at least 3, got 1 \(of 4\)$"
    with pytest.raises(CacheFull, match=words) as full:
        c.cache.plan([(a, 2 * G), (b, G)])
    assert (full.value.missing_blocks, full.value.missing_slots) == (2, 0)
    assert c.state() == before
    c.check()
    c.step([(a, 1)])


def test_out_of_blocks_for_the_copy_of_a_shared_block():
    c = checked(num_blocks=2, num_slots=8)
    a = c.new()
    c.step([(a, 5)])
    b, d = c.fork(a), c.fork(a)
    before = c.state()
    with pytest.raises(CacheFull, match="free blocks must be at least 2, got 1"):
        c.cache.plan([(a, 1), (b, 1), (d, 1)])
    assert c.state() == before
    c.step([(a, 1), (b, 1)])
    c.check()


def test_out_of_slots_says_how_many_and_changes_nothing():
    c = checked(num_blocks=20, num_slots=3, sink_blocks=1, recent_blocks=1)
    a, b = c.new(), c.new()
    c.step([(a, 2 * G - 1)])
    before = c.state()
    words = r"^kvarn.PagedCache.plan: free staging slots must be at least 3, got 1 \(of 3\)$"
    with pytest.raises(CacheFull, match=words) as full:
        c.cache.plan([(a, 3 * G), (b, G + 1)])
    assert (full.value.missing_blocks, full.value.missing_slots) == (0, 2)
    assert c.state() == before
    c.check()
    c.step([(a, 6 * G)])
    c.check()


def test_a_long_prompt_needs_no_more_slots_than_a_short_one():
    c = checked(num_blocks=20, num_slots=3, sink_blocks=1, recent_blocks=1)
    seq = c.new()
    c.step([(seq, 20 * G)])
    c.check()


@pytest.mark.parametrize("draft", [1, 5, G])
def test_drafts_need_one_slot_more(draft):
    c = checked(num_blocks=20, num_slots=4, sink_blocks=1, recent_blocks=1)
    seq = c.new()
    c.step([(seq, 5 * G - 1)])
    for accepted in (0, draft // 2, draft):
        c.step([(seq, draft)], [draft], [accepted])
        c.check()


def test_grow_keeps_everything():
    c = checked(num_blocks=3, num_slots=3)
    seq = c.new()
    c.step([(seq, 3 * G)])
    assert c.step([(seq, 1)]) is None
    c.cache.grow(5, 4)
    assert (c.cache.num_blocks, c.cache.num_slots) == (5, 4)
    c.check()
    c.step([(seq, G + 1)])
    c.check()
    with pytest.raises(
        ValueError, match="num_blocks and num_slots must be at least 5 and 4, got 4 and"
    ):
        c.cache.grow(4, 4)


# The order of calls ----------------------------------------------------------------------------


def test_abort_frees_the_sequences_of_the_step_and_keeps_others():
    """A block that the failed step seals and another sequence holds is sealed in every layer."""
    for attended in range(4):
        c = checked(sink_blocks=0, recent_blocks=1, num_layers=3)
        runner = c.new()
        c.step([(runner, 2 * G)])
        holder = c.fork(runner, G)
        c.step([(holder, G)])
        step = c.cache.plan([(runner, 2 * G)])
        for layer in range(attended):
            q = torch.randn(2 * G, Q_HEADS_PER_KV, 64)
            key, value = torch.randn(2, 2 * G, 1, 64)
            c.cache.attend(step, layer, q, key, value)
        c.cache.abort(step)
        del c.model[runner]
        c._seal_due()
        c.check()
        c.step([(holder, G)])
        c.check()


def test_calls_out_of_order_are_refused():
    c = checked()
    cache, seq = c.cache, c.new()
    step = cache.plan([(seq, 2)])
    for call in (
        lambda: cache.plan([(seq, 1)]),
        lambda: cache.fork(seq),
        lambda: cache.free(seq),
        lambda: cache.truncate(seq, 0),
        lambda: cache.export_sequence(seq),
        lambda: cache.seal(),
        lambda: cache.grow(100, 100),
    ):
        with pytest.raises(RuntimeError, match="the step from plan must be committed or aborted"):
            call()
    q, kv = torch.zeros(2, 3, 64), torch.zeros(2, 1, 64)
    cache.attend(step, 0, q, kv, kv)
    with pytest.raises(ValueError, match="attend: layer 0 has attended in this step"):
        cache.attend(step, 0, q, kv, kv)
    with pytest.raises(RuntimeError, match=r"commit: layers \[1\] have not attended"):
        cache.commit(step)
    cache.attend(step, 1, q, kv, kv)
    cache.commit(step)
    for call in (cache.commit, cache.abort, lambda s: cache.attend(s, 0, q, kv, kv)):
        with pytest.raises(ValueError, match="step must be the one that plan returned last"):
            call(step)


def test_arguments_are_checked():
    c = checked()
    cache, seq = c.cache, c.new()
    for call, words in (
        (lambda: cache.plan([(seq, 1), (seq, 1)]), r"plan: requests must name each sequence once"),
        (lambda: cache.plan([(seq, -1)]), "plan: count and draft of sequence 1 must satisfy"),
        (lambda: cache.plan([(seq, 1)], draft=2), "0 <= draft <= count, got draft 2, count 1"),
        (
            lambda: cache.plan([(seq, 1)], draft=[0, 0]),
            "draft must be a number or 1 numbers, got 2",
        ),
        (lambda: cache.plan([(99, 1)]), "plan: seq must be a sequence of this cache, got 99"),
        (
            lambda: cache.plan([(float(seq), 1)]),
            "plan: seq must be a sequence of this cache, got 1.0",
        ),
        (lambda: cache.plan([(True, 1)]), "plan: seq must be a sequence of this cache, got True"),
        (lambda: cache.fork([seq]), "fork: seq must be a sequence of this cache"),
        (lambda: cache.truncate(seq, 1), r"truncate: length must be in \[0, 0\], got 1"),
        (lambda: cache.fork(seq, -1), r"fork: length must be in \[0, 0\], got -1"),
    ):
        before = c.state()
        with pytest.raises(ValueError, match=words):
            call()
        assert c.state() == before
    step = cache.plan([(seq, 3)], draft=2)
    q, kv = torch.zeros(3, 3, 64), torch.zeros(3, 1, 64)
    for call, words in (
        (lambda: cache.attend(step, 2, q, kv, kv), r"attend: layer must be in \[0, 2\), got 2"),
        (
            lambda: cache.attend(step, 0, q[:2], kv, kv),
            r"q must be .* \[3, Hq, 64\] on cpu, got float32 \[2, 3, 64\] on cpu",
        ),
        (
            lambda: cache.attend(step, 0, q, kv[:, 0], kv),
            r"key must be float32 \[3, 1, 64\] on cpu, got float32 \[3, 64\] on cpu",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    for layer in range(2):
        cache.attend(step, layer, q, kv, kv)
    for accepted in ([0], [4], [1, 1]):
        with pytest.raises(ValueError, match=r"accepted must be within \[\(1, 3\)\], got"):
            cache.commit(step, accepted)
    cache.commit(step, [1])
    assert cache.length(seq) == 1


def test_constructor_arguments_are_checked():
    good = {"num_layers": 1, "num_kv_heads": 1, "num_blocks": 1, "num_slots": 1}
    for name, value in itertools.product(good, [0, -1]):
        with pytest.raises(ValueError, match=f"PagedCache: {name} must be at least 1, got {value}"):
            PagedCache(FMT, **{**good, name: value})
    for name in ("sink_blocks", "recent_blocks"):
        with pytest.raises(ValueError, match=f"PagedCache: {name} must be at least 0, got -1"):
            PagedCache(FMT, **good, **{name: -1})
    with pytest.raises(ValueError, match="PagedCache: fmt must be a kvarn.Format, got 'kvarn"):
        PagedCache("kvarn_k4v2_g64", **good)
    with pytest.raises(ValueError, match="PagedCache: .*float64"):
        PagedCache(FMT, **good, dtype=torch.float64)


def test_an_attend_that_was_refused_writes_nothing_and_can_be_made_again():
    """Each in its turn on a step that seals; then the records are those of an untroubled cache."""
    states = []
    for troubled in (False, True):
        c = checked(sink_blocks=0, recent_blocks=0, num_kv_heads=2, num_layers=1)
        seq = c.new()
        c.step([(seq, G)])
        q, kv = c._random(2 * G, 6), c._random(2 * G, 2)
        step = c.cache.plan([(seq, 2 * G)])
        if troubled:
            before = [t.clone() for t in (*c.cache.cache, *c.cache.staging)]
            good = {"q": q, "key": kv, "value": kv, "out": torch.empty_like(q)}
            for name, bad in (
                ("key", kv.half()),
                ("value", kv.half()),
                ("key", kv[:, :1]),
                ("value", kv[..., :32]),
                ("key", kv.to("meta")),
                ("key", None),
                ("q", q[:, :3]),
                ("q", q[:, :0]),
                ("q", q.double()),
                ("q", q.to("meta")),
                ("out", torch.empty(2 * G + 1, 6, 64)),
                ("out", torch.empty(2 * G, 2, 64)),
                ("out", torch.empty_like(q, dtype=torch.float16)),
            ):
                with pytest.raises(ValueError, match=f"^kvarn.PagedCache.attend: {name} must be"):
                    c.cache.attend(step, 0, **{**good, name: bad})
            for tensor, copy in zip((*c.cache.cache, *c.cache.staging), before, strict=True):
                assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))
            with pytest.raises(ValueError, match="sm_scale must be"):
                c.cache.attend(step, 0, q, kv, kv, sm_scale=float("nan"))
            with pytest.raises(RuntimeError, match=r"commit: layers \[0\] have not attended"):
                c.cache.commit(step)
        out = c.cache.attend(step, 0, q, kv, kv)
        c.cache.commit(step)
        states.append((out, c.cache.export_sequence(seq)))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1].records, states[1][1].records)


def test_fault16_an_attend_that_failed_halfway_can_only_be_aborted(monkeypatch):
    """The second wave's op fails after its seal: the slot may be someone else's by then."""
    c = checked(sink_blocks=0, recent_blocks=0, num_layers=1)
    seq, other = c.new(), c.new()
    c.step([(seq, G - 1), (other, 5)])
    step = c.cache.plan([(seq, G)])
    q, kv = torch.zeros(G, 3, 64), torch.zeros(G, 1, 64)
    append, calls = ops.append_kv, []

    def fail_second(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        append(*args)

    monkeypatch.setattr(ops, "append_kv", fail_second)
    with pytest.raises(RuntimeError, match="out of memory"):
        c.cache.attend(step, 0, q, kv, kv)
    with pytest.raises(RuntimeError, match="layer 0 failed halfway, the step must be aborted"):
        c.cache.attend(step, 0, q, kv, kv)
    with pytest.raises(RuntimeError, match=r"commit: layers \[0\] have not attended"):
        c.cache.commit(step)
    c.cache.abort(step)
    del c.model[seq]
    c.check()


def test_fault16_a_seal_that_failed_leaves_its_block_staged(monkeypatch):
    """It is due again at the next step, unless somebody truncates into it first."""

    def fail(*args, **kwargs):
        raise RuntimeError("no device")

    for truncated in (False, True):
        c = checked(sink_blocks=0, recent_blocks=0)
        seq = c.new()
        c.step([(seq, G - 1)])
        with monkeypatch.context() as patch:
            patch.setattr(ops, "seal_blocks", fail)
            with pytest.raises(RuntimeError, match="no device"):
                c.step([(seq, 1)])
        c.model[seq].length = G
        assert staged_blocks(c, seq) == [True]
        assert c.cache.length(seq) == G
        if truncated:
            c.truncate(seq, G - 2)
            assert staged_blocks(c, seq) == [True]
            c.step([(seq, 2)])
        else:
            c.seal()
        assert staged_blocks(c, seq) == [False]
        c.check()


def test_a_pool_that_cannot_grow_stays_as_it_was(monkeypatch):
    c = checked(num_blocks=3, num_slots=3)
    seq = c.new()
    c.step([(seq, 2 * G)])
    new_empty, calls = torch.Tensor.new_empty, []

    def fail_fourth(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        return new_empty(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", fail_fourth)
        with pytest.raises(RuntimeError, match="out of memory"):
            c.cache.grow(9, 9)
    assert (c.cache.num_blocks, c.cache.num_slots) == (3, 3)
    assert [len(t) for t in (*c.cache.cache, *c.cache.staging)] == [3] * 4
    c.check()
    c.step([(seq, 1)])


def test_fault18_a_bad_state_or_a_failed_copy_leaves_no_sequence(monkeypatch):
    c = checked(sink_blocks=0)
    seq = c.new()
    c.step([(seq, 2 * G + 5)])
    state, model = c.export(seq)
    for changes, words in (
        (
            {"records": state.records.short()},
            "dtype of records must be torch.uint8, got torch.int16",
        ),
        ({"length": float(state.length)}, "length must be an integer, got 133.0"),
        ({"length": -5, "staged": ()}, "length must be at least 0, got -5"),
    ):
        with pytest.raises(ValueError, match=f"^kvarn.PagedCache.import_sequence: {words}"):
            c.cache.import_sequence(dataclasses.replace(state, **changes))
        c.check()
    to = torch.Tensor.to

    def fail(tensor, *args, **kwargs):
        if tensor is state.pages:
            raise RuntimeError("out of memory")
        return to(tensor, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            c.cache.import_sequence(state)
    c.check()
    assert c.restore((state, model)) is not None
    c.check()


@pytest.mark.parametrize("bad", [1.0, True, "1", None, torch.tensor(1.0)], ids=repr)
def test_numbers_must_be_integers(bad):
    c = checked()
    cache, seq = c.cache, c.new()
    c.step([(seq, 3)])
    before = c.state()
    calls = [
        ("plan: count of sequence 1", lambda: cache.plan([(seq, bad)])),
        ("plan: draft of sequence 1", lambda: cache.plan([(seq, 1)], draft=[bad])),
        ("grow: num_blocks", lambda: cache.grow(bad, 99)),
        ("grow: num_slots", lambda: cache.grow(99, bad)),
    ]
    if bad is not None:  # fork(seq, None): all tokens
        calls += [
            ("truncate: length", lambda: cache.truncate(seq, bad)),
            ("fork: length", lambda: cache.fork(seq, bad)),
        ]
    for name, call in calls:
        with pytest.raises(ValueError, match=f"^kvarn.PagedCache.{name} must be an integer, got"):
            call()
        assert c.state() == before
    good = {"num_layers": 1, "num_kv_heads": 1, "num_blocks": 1, "num_slots": 1}
    names = [*good, "sink_blocks", "recent_blocks"]
    for name in names if bad is None else [*names, "iterations"]:
        with pytest.raises(ValueError, match=f"^kvarn.PagedCache: {name} must be an integer, got"):
            PagedCache(FMT, **{**good, name: bad})
    step = cache.plan([(seq, 1)], draft=1)
    kv = torch.zeros(1, 1, 64)
    with pytest.raises(ValueError, match="attend: layer must be an integer"):
        cache.attend(step, bad, kv, kv, kv)
    for layer in range(2):
        cache.attend(step, layer, kv, kv, kv)
    before = c.state()
    with pytest.raises(ValueError, match="commit: accepted must be an integer, got"):
        cache.commit(step, [bad])
    with pytest.raises(ValueError, match="commit: accepted must be a number for each of 1 seq"):
        cache.commit(step, 1)
    assert c.state() == before
    cache.commit(step, np.array([1]))
    cache.truncate(seq, np.int64(2))
    assert cache.length(seq) == 2


def test_no_open_step_is_no_step():
    cache = checked().cache
    kv = torch.zeros(1, 1, 64)
    for call in (cache.commit, cache.abort, lambda step: cache.attend(step, 0, kv, kv, kv)):
        with pytest.raises(ValueError, match="step must be the one that plan returned last"):
            call(None)


def test_how_tiles_are_quantized_is_checked_at_once():
    good = {"num_layers": 1, "num_kv_heads": 1, "num_blocks": 1, "num_slots": 1}
    for options, words in (
        ({"fit": "best"}, "fit must be 'unbiased' or 'minmax', got 'best'"),
        ({"fit": None}, "fit must be 'unbiased' or 'minmax', got None"),
        ({"iterations": -1}, "iterations must be at least 0, got -1"),
        ({"iterations": 2**31}, r"iterations must be less than 2\*\*31, got 2147483648"),
    ):
        with pytest.raises(ValueError, match=f"^kvarn.PagedCache: {words}"):
            PagedCache(FMT, **good, **options)


def test_the_transformers_cache_checks_numbers_and_rows():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from kvarn.integrations.transformers import KVarNCache

    config = transformers.LlamaConfig(
        hidden_size=64, head_dim=64, num_attention_heads=1, num_hidden_layers=1
    )
    for name, value in (("max_tokens", 200.5), ("sink_blocks", 1.5), ("recent_blocks", True)):
        with pytest.raises(ValueError, match=f"transformers: {name} must be an integer, got"):
            KVarNCache(config, FMT, **{name: value})
    c = checked()
    cache = KVarNCache(config, FMT)
    cache.paged, cache._seqs = c.cache, [c.new(), c.new()]
    before = c.state()
    for call, rows in (
        (cache.reorder_cache, [0, 5]),
        (cache.reorder_cache, [-1, 0]),
        (cache.reorder_cache, [0.0, 1.0]),
        (cache.batch_select_indices, [2]),
    ):
        with pytest.raises(
            ValueError, match=r"rows of the batch must be integers in \[0, 2\), got"
        ):
            call(torch.tensor(rows))
        assert c.state() == before
    with pytest.raises(ValueError, match=r"indices must be \[2\], got \[3\]"):
        cache.batch_select_indices(torch.tensor([True, False, True]))
    with pytest.raises(ValueError, match="repeats must be an integer, got 1.0"):
        cache.batch_repeat_interleave(1.0)
    assert c.state() == before


def test_empty_steps():
    c = checked()
    a, b = c.new(), c.new()
    c.step([])
    c.step([(a, 0)])
    c.step([(a, 0), (b, 3)])
    c.step([(a, 2), (b, 0)], [2, 0], [0, 0])
    c.check()


def test_fault07_a_sequence_does_not_depend_on_its_batch():
    """With split_tokens, the same sequence alone and among others: bit for bit."""
    generator = torch.Generator().manual_seed(0)
    outs = []
    for others in (0, 3):
        cache = PagedCache(
            FMT,
            num_layers=1,
            num_kv_heads=1,
            num_blocks=40,
            num_slots=20,
            dtype=torch.float32,
        )
        generator.manual_seed(0)
        seqs = [cache.new_sequence() for _ in range(1 + others)]
        out = []
        for n in (200, 1, 70):
            mine = torch.randn(n, 5, 64, generator=generator)
            rest = torch.ones(n * others, 5, 64)
            x = torch.cat([mine, rest])
            step = cache.plan([(seq, n) for seq in seqs])
            out.append(cache.attend(step, 0, x[:, :3], x[:, 3:4], x[:, 4:], split_tokens=64)[:n])
            cache.commit(step)
        outs.append(torch.cat(out))
    assert torch.equal(*outs)
