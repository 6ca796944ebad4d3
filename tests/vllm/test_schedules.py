"""Whole schedules through the engine's scheduler and cache manager. `engine.Engine` compares every
row of every step with attention in fp64 over what it should see, and every full block with the
record that it should be."""

from __future__ import annotations

import engine
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvarn import ops
from kvarn.integrations.vllm import _versions, backend, metadata, prefill
from kvarn.integrations.vllm.options import Options
from kvarn.integrations.vllm.rows import RequestRows

NUM_BLOCKS = 24


def new_engine(model, *, blocks=NUM_BLOCKS, options=None, window=None, soft_cap=None, **arguments):
    config = engine.engine_config(model, additional_config={"kvarn": options or {}}, **arguments)
    return engine.Engine(config, blocks, window=window, soft_cap=soft_cap)


def play(small: engine.Engine, few_blocks: bool = True) -> dict:
    """A schedule with all that can happen; returns what did."""
    rng = np.random.default_rng(0)

    def words(count):
        return rng.integers(0, engine.VOCABULARY, count).tolist()

    base = words(300)
    small.add("a", base[:200], 12)
    small.step()
    small.step()
    small.add("b", base[:150] + words(100), 12)
    small.add("c", base, 70)  # a, b and c share blocks; c reads what b fills in the same step
    for _ in range(4):
        small.step()
    small.add("d", base[:190] + [1, 2, 3], 70)
    small.add("e", words(600), 6)
    if few_blocks:
        for name in "fgh":
            small.add(name, words(188), 10)
    small.run()
    assert small.seen["hit_tokens"] >= 3 * 128 and small.seen["mixed"] > 0
    if few_blocks:
        assert small.seen["preempted"] > 0
    return small.seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recent_blocks": 1},
        {"sink_blocks": 0},
        {"sink_blocks": 2, "recent_blocks": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_all_together(model, options, ahead):
    play(new_engine(model, blocks=12, options=options, async_scheduling=ahead))


@pytest.mark.parametrize(
    ("few", "options", "layer"),
    [
        (0, {"recent_blocks": 1}, {}),  # every past is written out
        (300, {}, {"soft_cap": 5.0}),  # every past is read as it is
        (32, {}, {"window": 100}),
        (32, {"recent_blocks": 1}, {"window": 300, "soft_cap": 5.0}),
    ],
    ids=str,
)
def test_every_way_to_attend(model, monkeypatch, few, options, layer):
    monkeypatch.setattr(prefill, "FEW_TOKENS", few)
    monkeypatch.setattr(prefill, "PIECE_TOKENS", 128)
    play(new_engine(model, options=options, **layer), few_blocks=False)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("name", ["kvarn_k4v2_g128", "kvarn_k8v4_g64"])
def test_other_formats(model_of, name, head_dim):
    small = new_engine(model_of(head_dim), blocks=30, cache=name)
    prompt = list(range(40)) * 8
    small.add("a", prompt, 3)
    small.step()
    small.add("b", prompt, 3)
    small.run()
    assert small.seen["hit_tokens"] == 256


def test_a_prefix_of_the_same_step(model):
    """A block is promised to others when the step that fills it is planned."""
    small = new_engine(model, max_num_batched_tokens=512)
    prompt = list(range(50)) * 4
    for name in "abcd":
        small.add(name, prompt[:190] + [ord(name) % 50] * 20, 3)
    small.step()
    assert len(small.rows) > 1 and small.seen["hit_tokens"] > 0
    assert small.seen["steps"] == 1
    small.run()


def test_abort_and_reuse(model):
    """Rows and blocks of what was aborted go to others, with what they held."""
    small = new_engine(model, blocks=12)
    rng = np.random.default_rng(1)
    for i in range(6):
        small.add(f"a{i}", rng.integers(0, 50, 150 + 20 * i).tolist(), 5)
        small.step()
        if i % 2:
            small.step()
            small.abort(f"a{i}")
    small.run()


def test_batches_that_stand_in_for_others(model):
    """Warm-up and capture come first, idle ranks run them at any time."""
    small = new_engine(model)
    for requests, tokens in ((4, 4), (1, 256), (3, 100)):
        small.stand_in_step(requests, tokens)
    for name in "abc":
        small.add(name, [ord(name) % 50, 7] * 50, 8)
        small.step()
        small.stand_in_step(4, 4)
        small.stand_in_step(2, 130)
    small.run()


@pytest.mark.parametrize(
    "arguments",
    [
        {"enable_prefix_caching": False},
        {"enable_prefix_caching": False, "async_scheduling": True},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024},
        {"enable_lora": True, "max_lora_rank": 8},
    ],
    ids=str,
)
def test_other_ways_to_schedule(model, arguments):
    small = new_engine(model, **arguments)
    for name in "ab":
        small.add(name, [1, 2, 3] * 60, 4)
    small.run()
    caching = arguments.get("enable_prefix_caching", True)
    assert small.seen["hit_tokens"] == (128 if caching else 0)
    assert small.config.scheduler_config.async_scheduling == ("async_scheduling" in arguments)


# Any schedule -------------------------------------------------------------------------------------

requests = st.tuples(
    st.integers(0, 2),  # which text it begins with
    st.integers(0, 400),  # how many tokens of it
    st.integers(1, 100),  # tokens of its own
    st.integers(1, 40),  # to generate
)
arrivals = st.lists(requests, min_size=1, max_size=3)  # in the same step
actions = st.lists(
    st.one_of(
        arrivals,
        st.integers(1, 6),  # steps
        st.just("abort"),
        st.just("stand-in"),
    ),
    min_size=1,
    max_size=6,
)


@given(
    options=st.builds(dict, sink_blocks=st.integers(0, 2), recent_blocks=st.integers(0, 2)),
    layer=st.sampled_from([{}, {}, {"window": 90}, {"window": 200, "soft_cap": 5.0}]),
    budget=st.sampled_from([64, 150, 512]),
    few=st.sampled_from([0, 32, 100]),
    ahead=st.booleans(),
    blocks=st.integers(11, 16),
    first=st.lists(requests, min_size=3, max_size=4),
    todo=actions,
)
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_any_schedule(model, monkeypatch, options, layer, budget, few, ahead, blocks, first, todo):
    monkeypatch.setattr(prefill, "FEW_TOKENS", few)
    monkeypatch.setattr(prefill, "PIECE_TOKENS", 128)
    small = new_engine(
        model, blocks=blocks, options=options, max_num_batched_tokens=budget, max_model_len=600,
        async_scheduling=ahead, **layer,
    )  # fmt: skip
    texts = np.random.default_rng(5).integers(0, engine.VOCABULARY, (3, 400)).tolist()
    count = 0
    for action in [first, *todo]:
        if isinstance(action, list):
            for text, shared, own, new in action:
                prompt = texts[text][:shared] + [(count + i) % 50 for i in range(own)]
                small.add(str(count), prompt, new)
                count += 1
        elif action == "abort":
            if running := small.running():
                small.abort(running[-1])
        elif action == "stand-in":
            small.stand_in_step(2, 2)
            small.stand_in_step(3, 40)
        else:
            for _ in range(action):
                if small.scheduler.has_requests():
                    small.step()
    small.run()
    for name in ("preempted", "hit_tokens", "mixed"):
        if small.seen[name]:
            event(name)


# The tests find what is wrong ---------------------------------------------------------------------


def hits_are_forgotten(monkeypatch):
    """Reads the first blocks of a request in 16 bits although others filled them."""
    add = RequestRows.add
    monkeypatch.setattr(RequestRows, "add", lambda self, row, _: add(self, row, 0))


def sealed_one_step_late(monkeypatch):
    """Whole tiles of a chunk are not records yet when others read them."""

    def quantize(*args):
        return ops.quantize_tiles(*args).fill_(0xFF)

    monkeypatch.setattr(backend, "ops", Replaced(ops, quantize_tiles=quantize))


def seals_of_no_count(monkeypatch):
    """A step is told that no tile became full."""
    fill = metadata.Buffers.fill

    def uncounted(self, places, table):
        fill(self, places, table)
        self.seal_count.zero_()

    monkeypatch.setattr(metadata.Buffers, "fill", uncounted)


def rest_before_attention(monkeypatch):
    """The newest tokens overwrite pages that attention has yet to read."""
    attend = prefill.attend

    def early(impl, query, key, value, cache, m, out):
        impl._append(key[: m.num_tokens], value[: m.num_tokens], m.prefill.rest, m)
        attend(impl, query, key, value, cache, m, out)

    monkeypatch.setattr(prefill, "attend", early)


def pages_of_others(monkeypatch):
    """All requests share the pages of row 0."""
    rows, add = _versions.rows_of_step, RequestRows.add

    def add_first(self, row, num_computed_tokens):
        add(self, row, num_computed_tokens)
        add(self, 0, num_computed_tokens)

    monkeypatch.setattr(RequestRows, "add", add_first)
    monkeypatch.setattr(_versions, "rows_of_step", lambda m: np.where(rows(m) >= 0, 0, -1))


def window_of_a_neighbour(monkeypatch):
    """Virtual blocks stand in the engine's own table: who shares a block shares the window."""
    fill = metadata.Buffers.fill

    def shared(self, places, table):
        fill(self, places, table)
        both = self.table[: len(table)]
        for real, own in zip(table.flatten().tolist(), both.flatten().tolist(), strict=True):
            if real != own:
                both[table == real] = own

    monkeypatch.setattr(metadata.Buffers, "fill", shared)


def ring_too_short(monkeypatch):
    """The tile that is being filled takes the page of the newest full one."""
    page = metadata.pool.page_of_tile

    def wrong(tiles, options):
        if options.recent_blocks == 0:
            return page(tiles, options)
        return page(tiles, Options(options.sink_blocks, options.recent_blocks - 1))

    monkeypatch.setattr(metadata.pool, "page_of_tile", wrong)


class Replaced:
    """A module with other functions."""

    def __init__(self, module, **functions):
        self._module = module
        self.__dict__.update(functions)

    def __getattr__(self, name):
        return getattr(self._module, name)


@pytest.mark.parametrize(
    "break_rule",
    [
        hits_are_forgotten,
        sealed_one_step_late,
        seals_of_no_count,
        rest_before_attention,
        pages_of_others,
        window_of_a_neighbour,
        ring_too_short,
    ],
)
def test_a_broken_rule_is_found(model, monkeypatch, break_rule):
    break_rule(monkeypatch)
    small = new_engine(model, options={"recent_blocks": 1})
    with pytest.raises(AssertionError, match=r"^[a-e]: "):
        play(small, few_blocks=False)


def test_a_stand_in_that_writes_is_found(model, monkeypatch):
    rows = _versions.rows_of_step
    monkeypatch.setattr(_versions, "rows_of_step", lambda m: np.arange(len(rows(m))))
    small = new_engine(model)
    small.layer.impl.rows.first_token.fill(0)
    with pytest.raises(AssertionError, match="something was written"):
        small.stand_in_step(3, 40)
