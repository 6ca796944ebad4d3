"""Where the tokens of a step go: the index work of the metadata against a plain loop."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn import Format
from kvarn.integrations.vllm import pool
from kvarn.integrations.vllm.metadata import Batch, Buffers, Geometry, find_places
from kvarn.integrations.vllm.options import Options
from kvarn.integrations.vllm.prefill import FEW_TOKENS, PIECE_TOKENS, plan_prefill

FMT = Format("kvarn_k4v2_g64", head_dim=64)
G = FMT.group
NUM_BLOCKS, ROWS = 100, 6


@st.composite
def steps(draw):
    """(options, batch, tokens with padding)"""
    options = Options(draw(st.integers(0, 3)), draw(st.integers(0, 3)))
    live = draw(st.integers(1, ROWS))
    decodes = draw(st.booleans())
    rows = draw(st.permutations(range(ROWS)))[:live]
    new = np.array([1 if decodes else draw(st.integers(1, 4 * G)) for _ in range(live)])
    new.sort()
    first = np.array([G * draw(st.integers(0, 4)) for _ in range(live)])
    past = first + [draw(st.integers(0, 3 * G)) for _ in range(live)]
    if draw(st.booleans()):
        rows[draw(st.integers(0, live - 1))] = -1  # stands in for others
    padding = draw(st.integers(0, ROWS - live)) if decodes else 0
    batch = Batch(
        np.array([*rows, *[-1] * padding], np.int32),
        np.array([*first, *[0] * padding], np.int32),
        np.array([0, *np.cumsum(new), *[new.sum()] * padding], np.int32),
        np.array([*(past + new), *[0] * padding], np.int32),
    )
    tokens = live + padding if decodes else int(new.sum()) + draw(st.integers(0, 3))
    return options, batch, tokens


def page(row: int, tile: int, options: Options) -> int:
    """The virtual block of a tile."""
    within = tile
    if tile >= options.sink_blocks:
        within = options.sink_blocks + tile % (options.recent_blocks + 1)
    return NUM_BLOCKS + row * options.pages + within


@given(steps())
@settings(max_examples=300, deadline=None)
def test_places(step):
    options, batch, tokens = step
    geometry = Geometry(FMT, options, NUM_BLOCKS, torch.zeros(0))
    places = find_places(batch, tokens, geometry)
    head, rest = np.full(tokens, -1), np.full(tokens, -1)
    for b, row in enumerate(batch.rows):
        begin, end = batch.starts[b : b + 2]
        new, length = int(end - begin), int(batch.lens[b])
        past, open_tile = length - new, (length - new) // G
        if row < 0 or new == 0:
            assert (places.staged[b] == -1).all() and places.seal_pages[b] == -1
            continue
        # Read in 16 bits: the tile that is being filled, and what is kept beside it.
        kept = set(range(options.sink_blocks)) | set(
            range(max(0, open_tile - options.recent_blocks), open_tile)
        )
        wanted = {t for t in kept | {open_tile} if t <= open_tile and t * G >= batch.first_token[b]}
        found = {int(t): int(v) for t, v in zip(places.staged[b], places.blocks[b], strict=True)
                 if t >= 0}  # fmt: skip
        assert found == {t: page(row, t, options) for t in wanted}
        full = length // G > open_tile
        assert places.seal_tiles[b] == (open_tile if full else 0)
        assert places.seal_pages[b] == (page(row, open_tile, options) - NUM_BLOCKS if full else -1)
        for i in range(new):
            tile = (past + i) // G
            place = page(row, tile, options) * G + (past + i) % G
            if tile == open_tile:
                head[begin + i] = place
            elif tile < options.sink_blocks or tile >= length // G - options.recent_blocks:
                rest[begin + i] = place
    assert np.array_equal(places.head, head) and np.array_equal(places.rest, rest)
    # No two tokens in one place, and the two appends of a layer are apart in time only.
    for slots in (head, rest):
        used = slots[slots >= 0]
        assert len(np.unique(used)) == len(used)


@given(steps())
@settings(max_examples=100, deadline=None)
def test_buffers(step):
    """A request's own table has its virtual blocks, the engine's is left as it is."""
    options, batch, tokens = step
    n, width = len(batch.rows), 16
    places = find_places(batch, tokens, Geometry(FMT, options, NUM_BLOCKS, torch.zeros(0)))
    buffers = Buffers(ROWS, width, options, torch.device("cpu"))
    buffers.head.fill_(7)  # what earlier steps left
    buffers.seal_pages.fill_(7)
    buffers.seal_blocks.fill_(7)
    buffers.seal_count.fill_(7)
    table = torch.randint(NUM_BLOCKS, (n, width), dtype=torch.int32)
    before = table.clone()
    buffers.fill(places, table)
    assert torch.equal(table, before)
    for b in range(n):
        wanted = before[b].tolist()
        for tile, block in zip(places.staged[b], places.blocks[b], strict=True):
            if 0 <= tile < width:
                wanted[tile] = int(block)
        assert buffers.table[b].tolist() == wanted
    full = np.flatnonzero(places.seal_pages >= 0)
    assert buffers.seal_count.tolist() == [len(full)]
    assert buffers.seal_pages[: len(full)].tolist() == places.seal_pages[full].tolist()
    sealed = before[full, places.seal_tiles[full]]
    assert buffers.seal_blocks[: len(full)].tolist() == sealed.tolist()
    if tokens == n:
        assert buffers.head[:n].tolist() == places.head.tolist()
        assert (buffers.head[n:] == -1).all()


def test_plan_of_a_mixed_step():
    new = np.array([1, 5, 32, 33, 200])
    past = np.array([70, 0, 100, PIECE_TOKENS + 10, 64])
    starts = np.array([0, *np.cumsum(new)])
    batch = Batch(np.arange(5), np.zeros(5, np.int32), starts, past + new)
    options = Options()
    geometry = Geometry(FMT, options, NUM_BLOCKS, torch.zeros(0))
    places = find_places(batch, int(new.sum()), geometry)
    table = torch.arange(5 * 140, dtype=torch.int32).view(5, 140)
    copies = []

    def upload(array):
        copies.append(array)
        return torch.from_numpy(array)

    plan, head = plan_prefill(batch, 1, places, G, table, upload)
    assert len(copies) == 1
    assert FEW_TOKENS == 32
    assert plan.begin == 1 and plan.longest == 200
    assert plan.bounds.tolist() == [0, 5, 37, 70, 270]
    assert plan.few == (1, 3) and plan.few_tokens == (1, 38)
    assert plan.few_bounds.tolist() == [0, 5, 37] and plan.few_past.tolist() == [0, 100]
    assert [c.request for c in plan.many] == [3, 4]
    assert [c.request for c in plan.with_past] == [2, 3, 4]
    long = plan.many[0]
    assert [(p.begin, p.end) for p in long.pieces] == [
        (0, PIECE_TOKENS), (PIECE_TOKENS, PIECE_TOKENS + 10)
    ]  # fmt: skip
    assert long.bounds.tolist() == [0, 33] and long.pieces[1].bounds.tolist() == [0, 10]
    # Whole tiles of the step: of the last request, from token 128 on, two of them.
    assert plan.tile_blocks.tolist() == [4 * 140 + 2, 4 * 140 + 3]
    first = starts[4] + 64
    assert plan.tile_tokens.tolist() == list(range(first, first + 2 * G))
    assert head.tolist() == places.head.tolist()
    assert plan.rest.tolist() == places.rest.tolist()
    assert pool.page_of_tile(np.array([1, 2]), options).tolist() == [1, 1]
