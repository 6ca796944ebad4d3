"""`kvarn.PagedCache` on CUDA: the life of blocks, graphs, streams; against dense_cache.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import cuda_helpers
import pytest
import torch
from dense_cache import Q_HEADS_PER_KV, CheckedCache, Replayed
from hypothesis import HealthCheck, settings
from test_cache_fuzz import CacheMachine
from torch import Tensor

from kvarn import Format, PagedCache
from kvarn.cache import CacheFull, SequenceState

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
FMT = Format("kvarn_k4v2_g64", head_dim=64)
G = FMT.group
FORMATS = [
    FMT,
    Format("kvarn_k4v2_g128", head_dim=128),
    Format("kvarn_k2v2_g128", head_dim=64),
    Format("kvarn_k8v3_g64", head_dim=256),
]
DTYPES = [torch.float16, torch.bfloat16]


def checked(fmt: Format = FMT, dtype: torch.dtype = torch.float16, **options) -> CheckedCache:
    return CheckedCache(fmt, dtype=dtype, device=DEVICE, **options)


def paged(fmt: Format = FMT, **options) -> PagedCache:
    sizes = {"num_layers": 2, "num_kv_heads": 2, "num_blocks": 64, "num_slots": 32}
    return PagedCache(fmt, **{"device": DEVICE, "dtype": torch.float16, **sizes, **options})


def rows_of(cache: PagedCache, num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, key, value [layers, T, heads, D]."""
    generator = torch.Generator().manual_seed(seed)
    heads = cache.num_kv_heads
    return tuple(
        torch.randn(cache.num_layers, num_tokens, n, cache.fmt.head_dim, generator=generator).to(
            DEVICE, cache.dtype
        )
        for n in (heads * Q_HEADS_PER_KV, heads, heads)
    )


def step(
    cache: PagedCache,
    requests: list[tuple[int, int]],
    rows: tuple[Tensor, Tensor, Tensor],
    accepted: list[int] | None = None,
    **options,
) -> Tensor:
    """plan, attend in every layer and commit: [layers, T, Hq, D]."""
    planned = cache.plan(requests, **options)
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


# The life of blocks ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{f}-{f.head_dim}")
def test_the_life_of_sequences(fmt, dtype):
    """Chunks, decode steps, drafts, forks, reuse, export; all that nobody owns is NaN."""
    group = fmt.group
    c = checked(fmt, dtype, num_blocks=20)
    a, b = c.new(), c.new()
    c.step([(a, 3 * group + 5), (b, group - 2)])
    c.step([(a, group), (b, 1)])
    for _ in range(4):
        c.step([(a, 1), (b, 1)])
    c.step([(a, 9), (b, 5)], [8, 2], [2, 5])
    c.check()
    child, half = c.fork(a), c.fork(a, 2 * group + 3)
    c.step([(child, 2), (a, 1), (half, group)])
    c.check()
    c.truncate(child, group + 1)
    c.free(a)
    c.step([(child, group), (b, 70)], window_left=90)
    c.check()
    exported = c.export(half)
    c.free(half)
    reuser = c.new()
    c.step([(reuser, 2 * group + 1)])
    restored = c.restore(exported)
    c.step([(seq, 3) for seq in (b, child, reuser, restored)], [1, 2, 3, 0], [2, 3, 0, 3])
    c.check()


@pytest.mark.parametrize("recent_blocks", [0, 1, 2])
def test_fault15_drafts_never_reach_a_record(recent_blocks):
    c = checked(num_kv_heads=1, sink_blocks=0, recent_blocks=recent_blocks)
    prompt = c.new()
    c.step([(prompt, 3 * G - 3)])
    for draft, accepted in ((1, 0), (3, 3), (4, 2), (6, 1), (6, 6)):
        seq = c.fork(prompt)
        c.step([(seq, draft)], [draft], [accepted])
        c.step([(seq, G)])
        c.check()
        c.free(seq)


@pytest.mark.parametrize("chunk", [1, 63, 64, 65, 200])
def test_fault17_chunks_do_not_matter(chunk):
    """Bit for bit, where the attention of a token is divided in the same way."""
    total = 330
    states, outs = [], []
    for sizes in ([total], [chunk] * (total // chunk) + [total % chunk]):
        cache = paged()
        rows = rows_of(cache, total)
        seq, at, out = cache.new_sequence(), 0, []
        for n in sizes:
            out.append(step(cache, [(seq, n)], tuple(x[:, at : at + n] for x in rows)))
            at += n
        outs.append(torch.cat(out, 1))
        states.append(cache.export_sequence(seq))
    assert same_state(*states)
    assert (outs[0] - outs[1]).abs().max() < 1e-2


def test_pools_grow():
    c = checked(num_blocks=4, num_slots=4)
    seq = c.new()
    c.step([(seq, 4 * G)])
    assert c.step([(seq, 1)]) is None
    c.cache.grow(9, 6)
    c.check()
    c.step([(seq, 2 * G)])
    c.check()


class CudaMachine(CacheMachine):
    dtype, device = torch.float16, DEVICE


TestFuzz = CudaMachine.TestCase
TestFuzz.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


# Graphs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sink_blocks", "recent_blocks"), [(0, 0), (1, 1), (0, 2)])
def test_fault25_a_replayed_step_equals_an_eager_one(sink_blocks, recent_blocks):
    """Bit for bit, over three borders of a block, with sequences that come and go."""
    options = {"sink_blocks": sink_blocks, "recent_blocks": recent_blocks}
    caches = [paged(**options), paged(**options)]
    eager, replayed = caches
    graph = Replayed(replayed, 5, 12 * G, split_tokens=2 * G)
    seqs: list[int] = []
    lengths = [5, G - 2, 3 * G + 1, 2 * G - 1]
    for seed in range(3 * G + 7):
        if seed % 40 == 0 and lengths:  # a prompt, between replays
            n = lengths.pop()
            pair = [cache.new_sequence() for cache in caches]
            assert pair[0] == pair[1]
            outs = [step(cache, [(pair[0], n)], rows_of(cache, n, seed)) for cache in caches]
            assert torch.equal(*outs)
            seqs.append(pair[0])
        if seed == 150:
            gone = seqs.pop(1)
            for cache in caches:
                cache.free(gone)
        requests = [(seq, 1) for seq in seqs]
        rows = rows_of(eager, len(seqs), seed)
        draft = seed % 3 == 0
        accepted = [int(not draft)] * len(seqs)
        expected = step(eager, requests, rows, accepted, draft=int(draft))
        replayed.plan(requests, draft=int(draft), into=graph.step)
        assert torch.equal(graph(*rows), expected)
        replayed.commit(graph.step, accepted)
    replayed.free(replayed.new_sequence())  # seals what the last replay left
    for seq in seqs:
        assert same_state(*(cache.export_sequence(seq) for cache in caches))


def test_a_graph_copies_shared_blocks_after_it_has_sealed():
    """The copy of a shared block may go to the slot of a tile that the last replay filled."""
    c = checked(num_blocks=20, num_slots=3, num_kv_heads=1, sink_blocks=0, recent_blocks=0)
    graph = Replayed(c.cache, 4, 20 * G)
    a, b = c.new(), c.new()
    c.step([(a, G - 1), (b, 5)])
    c.step([(a, 1)], graph=graph)
    child = c.fork(b)
    assert c.cache.num_free_slots == 1
    c.step([(b, 1), (child, 1)], graph=graph)
    c.step([(a, 1), (b, 1)], graph=graph)
    c.check()


def test_graphs_of_several_sizes_share_a_cache():
    """What one leaves to be sealed may be more than the next has room for."""
    c = checked(num_blocks=30, num_slots=12, num_kv_heads=1, sink_blocks=0, recent_blocks=0)
    large, small = (Replayed(c.cache, room, 20 * G) for room in (6, 2))
    seqs = [c.new() for _ in range(6)]
    c.step([(seq, G - 1) for seq in seqs])
    c.step([(seq, 1) for seq in seqs], graph=large)
    assert c.cache.num_free_slots == 6
    c.step([(seq, 1) for seq in seqs[:2]], graph=small)
    assert c.cache.num_free_slots == 10
    c.check()
    c.step([(seq, 1) for seq in seqs], graph=large)
    c.check()


def test_what_a_graph_has_no_room_for_is_refused():
    c = checked(num_kv_heads=1)
    graph = Replayed(c.cache, 2, 2 * G)
    a, b, d = (c.new() for _ in range(3))
    c.step([(a, 2 * G), (b, 3)])
    before = c.state()
    for requests, words in (
        ([(a, 1)], f"length of sequence {a} must be at most 128 in this graph step, got 129"),
        ([(b, 2)], f"count of sequence {b} must be 1 in a graph step, got 2"),
        ([(a, 0), (b, 1)], f"count of sequence {a} must be 1 in a graph step, got 0"),
        ([(a, 1), (b, 1), (d, 1)], "requests must be at most 2, got 3"),
    ):
        with pytest.raises(ValueError, match=f"^kvarn.PagedCache.plan: {words}"):
            c.cache.plan(requests, into=graph.step)
        assert c.state() == before
    c.step([(b, 1)], graph=graph)
    with pytest.raises(ValueError, match="step must be the one that plan returned last"):
        c.cache.attend(graph.step, 0, graph.q[0], graph.key[0], graph.value[0])
    eager = c.cache.plan([(b, 1)])
    c.cache.abort(eager)
    for step in (eager, None):
        if step is not None:
            with pytest.raises(ValueError, match="into must be a step from graph_step"):
                c.cache.plan([(a, 1)], into=step)
    c.cache.grow(50, 20)
    with pytest.raises(ValueError, match="into must be a step from graph_step, made since"):
        c.cache.plan([(d, 1)], into=graph.step)


def test_a_planned_graph_that_is_not_replayed_can_be_aborted():
    """What the last replay left is sealed nevertheless."""
    c = checked(num_kv_heads=1, sink_blocks=0, recent_blocks=0)
    graph = Replayed(c.cache, 2, 9 * G)
    a, b = c.new(), c.new()
    c.step([(a, G - 1), (b, 2 * G - 1)])
    holder = c.fork(a)
    c.step([(holder, 1)])
    c.step([(a, 1), (b, 1)], graph=graph)
    c.cache.abort(c.cache.plan([(a, 1)], into=graph.step))
    del c.model[a]
    c._seal_due()
    c.check()
    c.step([(b, 1), (holder, 1)], graph=graph)
    c.check()


@pytest.mark.skipif(DEVICE != "cuda", reason="captures")
def test_bookkeeping_is_not_captured():
    cache = paged()
    seq = cache.new_sequence()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="only attend can be captured"):
        cache.plan([(seq, 1)])
    rows = rows_of(cache, 3)
    step(cache, [(seq, 3)], rows)
    assert cache.length(seq) == 3


# Streams and syncs -----------------------------------------------------------------------------


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """Whatever waits for the device raises."""
    if DEVICE != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_waits_for_the_device():
    cache = paged(sink_blocks=0, recent_blocks=0)
    graph = cache.graph_step(4, 20 * G)
    prompt, few, one = (rows_of(cache, n) for n in (3 * G + 5, 9, 1))
    with nothing_waits():
        a, b = cache.new_sequence(), cache.new_sequence()
        step(cache, [(a, 3 * G + 5)], prompt)
        step(cache, [(b, 9)], few)
        step(cache, [(a, 9)], few, [3], draft=8)
        child = cache.fork(a)
        step(cache, [(child, 1)], one)  # copies a shared block
        cache.truncate(a, G + 3)
        step(cache, [(a, 1)], one)  # copies a record
        state = cache.export_sequence(a, non_blocking=True)
        cache.free(a)
        a = cache.import_sequence(state)
        cache.plan([(a, 1), (b, 1)], into=graph)
        cache.abort(graph)
        cache.grow(70, 40)
        step(cache, [(child, 1)], one)


def on_side_stream():
    return torch.cuda.Stream() if DEVICE == "cuda" else None


@contextlib.contextmanager
def after(first, then) -> Iterator[None]:
    """On the stream ``then``, behind what ``first`` has to do; None is the main stream."""
    if DEVICE != "cuda":
        yield
        return
    main = torch.cuda.current_stream()
    stream = then or main
    stream.wait_stream(first or main)
    with torch.cuda.stream(stream):
        yield


def test_fault18_half_of_the_sequences_move_while_the_rest_decode():
    """Out to pinned memory and in again on a stream of its own. A twin of the cache moves nothing:
    bit for bit the same."""
    count = 1000 if DEVICE == "cuda" else 24
    rounds = 4
    size = {"num_layers": 2, "num_kv_heads": 1, "num_blocks": 5 * count, "num_slots": 4 * count}
    caches = [paged(**size, sink_blocks=0), paged(**size, sink_blocks=0)]
    still, moving = caches
    seqs = []
    for cache in caches:
        seqs = [cache.new_sequence() for _ in range(count)]
        requests = [(seq, 30 + 37 * i % 170) for i, seq in enumerate(seqs)]
        step(cache, requests, rows_of(cache, sum(n for _, n in requests)))
    name = {seq: seq for seq in seqs}  # in `moving`, which restores under new ids
    leaving, rest = seqs[::2], seqs[1::2]
    side = on_side_stream()

    def decode(chosen: list[int], seed: int) -> None:
        rows = rows_of(still, len(chosen), seed)
        expected = step(still, [(seq, 1) for seq in chosen], rows)
        assert torch.equal(step(moving, [(name[seq], 1) for seq in chosen], rows), expected)

    for seed in range(rounds):
        with after(None, side):
            states = {seq: moving.export_sequence(name[seq], non_blocking=True) for seq in leaving}
        decode(rest, seed)
        with after(side, None):
            old_blocks = {seq: moving.blocks(name[seq]) for seq in leaving}
            for seq in leaving:
                moving.free(name[seq])
        decode(rest, seed + 100)  # may take the blocks that are free now
        with after(None, side):
            for seq, state in states.items():
                name[seq] = moving.import_sequence(state)
        assert any(moving.blocks(name[seq]) != old for seq, old in old_blocks.items())
        decode(rest, seed + 200)
        with after(side, None):
            decode(seqs, seed + 300)
        if DEVICE == "cuda":
            assert all(s.records.is_pinned() and s.pages.is_pinned() for s in states.values())
    for seq in seqs:
        assert same_state(still.export_sequence(seq), moving.export_sequence(name[seq]))


def test_a_copy_in_pinned_memory_equals_one_that_waits():
    cache = paged()
    seq = cache.new_sequence()
    step(cache, [(seq, 4 * G + 9)], rows_of(cache, 4 * G + 9))
    pinned = cache.export_sequence(seq, non_blocking=True)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert same_state(pinned, cache.export_sequence(seq))


# What is refused -------------------------------------------------------------------------------


def test_fp32_has_no_kernels_on_cuda():
    if DEVICE == "cuda":
        with pytest.raises(ValueError, match="^kvarn.PagedCache: .*float32"):
            paged(dtype=torch.float32)


def test_tensors_of_another_device_are_refused():
    cache = paged()
    seq = cache.new_sequence()
    planned = cache.plan([(seq, 2)])
    q, key, value = (x[0] for x in rows_of(cache, 2))
    with pytest.raises(ValueError, match="attend: key must be float16 .* on .*, got float16"):
        cache.attend(planned, 0, q, key.to("meta"), value)
    for layer in range(2):
        cache.attend(planned, layer, q, key, value)
    cache.commit(planned)


def test_a_full_cache_changes_nothing():
    c = checked(num_blocks=4, num_slots=4)
    a, b = c.new(), c.new()
    c.step([(a, 3 * G), (b, 1)])
    before = c.state()
    with pytest.raises(CacheFull, match=r"free blocks must be at least 2, got 0 \(of 4\)"):
        c.cache.plan([(a, 1), (b, G)])
    assert c.state() == before
    c.check()
    c.step([(b, 1)])
    c.check()
