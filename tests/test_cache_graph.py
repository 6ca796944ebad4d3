"""`PagedCache.graph_step`, captured on CUDA; the CPU has no graphs, there it is called again."""

from __future__ import annotations

import pytest
import torch
from dense_cache import CheckedCache, Replayed, rows_of, run_step, same_state

from kvarn import Format, PagedCache

FMT = Format("kvarn_k4v2_g64", head_dim=64)
G = FMT.group


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


def checked(device: str, **options) -> CheckedCache:
    return CheckedCache(FMT, dtype=torch.float16, device=device, num_kv_heads=1, **options)


def paged(device: str, **options) -> PagedCache:
    return PagedCache(
        FMT,
        num_layers=2,
        num_kv_heads=2,
        num_blocks=64,
        num_slots=32,
        dtype=torch.float16,
        device=device,
        **options,
    )


@pytest.mark.parametrize(("sink_blocks", "recent_blocks"), [(0, 0), (1, 1), (0, 2)])
def test_fault25_a_replayed_step_equals_an_eager_one(device, sink_blocks, recent_blocks):
    """Bit for bit, over borders of blocks, with sequences that come and go."""
    options = {"sink_blocks": sink_blocks, "recent_blocks": recent_blocks}
    caches = [paged(device, **options), paged(device, **options)]
    eager, replayed = caches
    graph = Replayed(replayed, 5, 12 * G, split_tokens=2 * G)
    seqs: list[int] = []
    lengths = [5, G - 2, 3 * G + 1, 2 * G - 1]
    for seed in range(3 * G + 7):
        if seed % 40 == 0 and lengths:  # a prompt, between replays
            n = lengths.pop()
            pair = [cache.new_sequence() for cache in caches]
            assert pair[0] == pair[1]
            outs = [run_step(cache, [(pair[0], n)], rows_of(cache, n, seed)) for cache in caches]
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
        expected = run_step(eager, requests, rows, accepted, draft=int(draft))
        replayed.plan(requests, draft=int(draft), into=graph.step)
        assert torch.equal(graph(*rows), expected)
        replayed.commit(graph.step, accepted)
    replayed.seal()
    for seq in seqs:
        assert same_state(*(cache.export_sequence(seq) for cache in caches))


def test_a_graph_copies_shared_blocks_after_it_has_sealed(device):
    """The copy of a shared block may go to the slot of a tile that the last replay filled."""
    c = checked(device, num_blocks=20, num_slots=3, sink_blocks=0, recent_blocks=0)
    graph = Replayed(c.cache, 4, 20 * G)
    a, b = c.new(), c.new()
    c.step([(a, G - 1), (b, 5)])
    c.step([(a, 1)], graph=graph)
    child = c.fork(b)
    assert c.cache.num_free_slots == 1
    c.step([(b, 1), (child, 1)], graph=graph)
    c.step([(a, 1), (b, 1)], graph=graph)
    c.check()


def test_graphs_of_several_sizes_share_a_cache(device):
    """What one leaves to be sealed may be more than the next has room for."""
    c = checked(device, num_blocks=30, num_slots=12, sink_blocks=0, recent_blocks=0)
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


def test_what_a_graph_has_no_room_for_is_refused(device):
    c = checked(device)
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
    with pytest.raises(ValueError, match="into must be a step from graph_step"):
        c.cache.plan([(a, 1)], into=eager)
    c.cache.grow(50, 20)
    with pytest.raises(ValueError, match="into must be a step from graph_step, made since"):
        c.cache.plan([(d, 1)], into=graph.step)
    for sizes, words in (((0, 5), "num_seqs must be at least 1"), ((1, 0), "max_seq_len must be")):
        with pytest.raises(ValueError, match=f"^kvarn.PagedCache.graph_step: {words}"):
            c.cache.graph_step(*sizes)


def test_a_planned_graph_that_is_not_replayed_can_be_aborted(device):
    """What the last replay left is sealed nevertheless."""
    c = checked(device, sink_blocks=0, recent_blocks=0)
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


@pytest.mark.cuda
def test_bookkeeping_is_not_captured():
    cache = paged("cuda")
    seq = cache.new_sequence()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="only attend can be captured"):
        cache.plan([(seq, 1)])
    rows = rows_of(cache, 3)
    run_step(cache, [(seq, 3)], rows)
    assert cache.length(seq) == 3
