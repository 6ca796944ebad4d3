"""`kvarn.PagedCache` on CUDA: the life of blocks, streams, nothing that waits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from dense_cache import CheckedCache, Replayed, rows_of, run_step, same_state
from hypothesis import HealthCheck, settings
from test_cache import alternating, life
from test_cache_fuzz import CacheMachine

from kvarn import Format, PagedCache
from kvarn.cache import CacheFull

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


@pytest.mark.parametrize("default", ["cuda", "meta"])
def test_any_default_device_of_torch(default):
    expected = life(paged(), contextlib.nullcontext)
    with torch.device(default):
        outs = life(paged(), contextlib.nullcontext)
    assert all(map(torch.equal, outs, expected))


def test_in_inference_mode_and_out_of_it_in_turn():
    expected = life(paged(), contextlib.nullcontext)
    with torch.inference_mode():
        cache = paged()
    outs = life(cache, alternating(torch.no_grad, torch.inference_mode))
    assert all(map(torch.equal, outs, expected))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one():
    expected = life(paged(), contextlib.nullcontext)
    outs = life(paged(device="cuda:1"), contextlib.nullcontext)
    assert {out.device for out in outs} == {torch.device("cuda:1")}
    for out, want in zip(outs, expected, strict=True):  # the inputs are other random numbers
        assert out.shape == want.shape and not out.isnan().any()
    with torch.cuda.device(1):
        again = life(paged(device="cuda:1"), contextlib.nullcontext)
    assert all(map(torch.equal, outs, again))


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
            out.append(run_step(cache, [(seq, n)], tuple(x[:, at : at + n] for x in rows)))
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
        run_step(cache, [(a, 3 * G + 5)], prompt)
        run_step(cache, [(b, 9)], few)
        run_step(cache, [(a, 9)], few, [3], draft=8)
        child = cache.fork(a)
        run_step(cache, [(child, 1)], one)  # copies a shared block
        cache.truncate(a, G + 3)
        run_step(cache, [(a, 1)], one)  # copies a record
        state = cache.export_sequence(a, non_blocking=True)
        cache.free(a)
        a = cache.import_sequence(state)
        cache.plan([(a, 1), (b, 1)], into=graph)
        cache.abort(graph)
        cache.grow(70, 40)
        run_step(cache, [(child, 1)], one)


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
    """Out to pinned memory and in again on a stream of its own, while graphs are replayed. A twin
    of the cache moves nothing: bit for bit the same."""
    count = 1000 if DEVICE == "cuda" else 24
    rounds = 4
    size = {"num_layers": 2, "num_kv_heads": 1, "num_blocks": 5 * count, "num_slots": 4 * count}
    caches = [paged(**size, sink_blocks=0), paged(**size, sink_blocks=0)]
    still, moving = caches
    seqs = []
    for cache in caches:
        seqs = [cache.new_sequence() for _ in range(count)]
        requests = [(seq, 30 + 37 * i % 170) for i, seq in enumerate(seqs)]
        run_step(cache, requests, rows_of(cache, sum(n for _, n in requests)))
    name = {seq: seq for seq in seqs}  # in `moving`, which restores under new ids
    leaving, rest = seqs[::2], seqs[1::2]
    side = on_side_stream()
    graph = Replayed(moving, count, 5 * G, split_tokens=2 * G)

    def decode(chosen: list[int], seed: int) -> None:
        rows = rows_of(still, len(chosen), seed)
        expected = run_step(still, [(seq, 1) for seq in chosen], rows)
        moving.plan([(name[seq], 1) for seq in chosen], into=graph.step)
        assert torch.equal(graph(*rows), expected)
        moving.commit(graph.step)

    for seed in range(rounds):
        moving.seal()
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
            # What is empty is never pinned.
            copies = [x for s in states.values() for x in (s.records, s.pages) if x.numel()]
            assert copies and all(x.is_pinned() for x in copies)
    moving.seal()
    for seq in seqs:
        assert same_state(still.export_sequence(seq), moving.export_sequence(name[seq]))


def test_a_copy_in_pinned_memory_equals_one_that_waits():
    cache = paged()
    seq = cache.new_sequence()
    run_step(cache, [(seq, 4 * G + 9)], rows_of(cache, 4 * G + 9))
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
