"""Virtual blocks: ids after those of the cache name staging slots that have no block of their own.
One sequence reads a tile in 16 bits, another one its record, and both are in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import Case, offsets
from torch import Tensor

from kvarn import Format, ops

FMT = Format("kvarn_k4v2_g128", head_dim=64)
BLOCKS, SLOTS, HEADS, GROUP = 5, 4, 2, FMT.group
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def pages(dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(SLOTS, 2, HEADS, GROUP, FMT.head_dim).to(dtype)


def records(staging: Tensor) -> Tensor:
    """Blocks 0 to 3 are the records of the staging slots, block 4 is poison."""
    key, value = (staging[:, i].transpose(1, 2).float() for i in range(2))
    cache = torch.full(FMT.cache_shape(BLOCKS, HEADS), 0xFF, dtype=torch.uint8)
    cache[:SLOTS] = ops.quantize_tiles(key, value, FMT)
    return cache


def paged(table: list[list[int]], lengths: list[int], slots: list[int], device: str) -> Any:
    staging = pages()
    given = {
        "cache": records(staging),
        "block_table": torch.tensor(table, dtype=torch.int32),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "staging": staging,
        "block_slot": torch.tensor(slots, dtype=torch.int32),
    }
    return {k: v.to(device) for k, v in given.items()} | {"fmt": FMT}


def attend(given: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    rows = len(given["seq_lens"])
    q = torch.randn(rows, 2 * HEADS, FMT.head_dim, generator=torch.Generator().manual_seed(1))
    return ops.decode_attention(
        q.half().to(given["cache"].device), **given, return_lse=True, split_tokens=GROUP, **options
    )


def gather(given: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    lengths = given["seq_lens"].tolist()
    starts = offsets(lengths).to(given["cache"].device)
    return ops.gather_kv(**given, cu_seq_lens=starts, total_tokens=sum(lengths), **options)


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


#: Virtual block ``BLOCKS + i`` is staging slot i; the real blocks are records.
ALL_VIRTUAL = [-1] * BLOCKS + list(range(SLOTS))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", [attend, gather])
def test_virtual_ids_read_what_real_ids_read(device: str, run: Any) -> None:
    """The same pages under real ids, where a block has one place for all."""
    lengths = [3 * GROUP + 17]
    torch.manual_seed(0)
    virtual = run(paged([[5, 1, 7, 8]], lengths, ALL_VIRTUAL, device))
    torch.manual_seed(0)
    real = run(paged([[0, 1, 2, 3]], lengths, [0, -1, 2, 3, -1], device))
    assert same(virtual, real)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", [attend, gather])
def test_the_window_of_one_sequence_is_not_that_of_another(device: str, run: Any) -> None:
    """Both share block 1; the first reads its page, the second its record."""
    table = [[0, 6, 8], [0, 1, 7]]
    lengths = [2 * GROUP + 9, 2 * GROUP + 70]
    torch.manual_seed(0)
    together = run(paged(table, lengths, ALL_VIRTUAL, device))
    parts = []
    for b, slots in enumerate(([-1, 1, -1, 3, -1], [-1, -1, 2, -1, -1])):
        torch.manual_seed(0)
        ids = [[0, 1, 3]] if b == 0 else [[0, 1, 2]]
        given = paged(ids, lengths[b : b + 1], slots, device)
        if run is attend:
            rows = torch.randn(2, 2 * HEADS, 64, generator=torch.Generator().manual_seed(1))
            q = rows.half()[b : b + 1].to(device)
            parts.append(ops.decode_attention(q, **given, return_lse=True, split_tokens=GROUP))
        else:
            parts.append(gather(given))
    alone = tuple(torch.cat(x) for x in zip(*parts, strict=True))
    assert same(together, alone)
    # The tile differs in the two, by what quantization changes.
    if run is gather:
        key = together[0].split(lengths)
        assert torch.equal(key[0][:GROUP], key[1][:GROUP])
        assert not torch.equal(key[0][GROUP : 2 * GROUP], key[1][GROUP : 2 * GROUP])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_tokens_are_appended_to_virtual_blocks(device: str, kind: torch.dtype) -> None:
    staging = torch.zeros(SLOTS, 2, HEADS, GROUP, FMT.head_dim, dtype=torch.float16, device=device)
    key, value = torch.randn(2, 2, HEADS, FMT.head_dim).half().to(device)
    slots = torch.tensor([6 * GROUP + 3, 8 * GROUP], dtype=kind, device=device)
    block_slot = torch.tensor(ALL_VIRTUAL, dtype=kind, device=device)
    ops.append_kv(key, value, slots, staging, block_slot, FMT)
    for i, (page, row) in enumerate(((1, 3), (3, 0))):
        assert torch.equal(staging[page, 0, :, row], key[i])
        assert torch.equal(staging[page, 1, :, row], value[i])
    assert staging.count_nonzero() == key.count_nonzero() + value.count_nonzero()


BAD = [
    ({"table": [[0, 9]]}, "block_table must be block numbers below 9, got 9 at [0, 1]"),
    ({"table": [[0, -1]]}, "block_table must be block numbers below 9, got -1 at [0, 1]"),
    (
        {"slots": [*ALL_VIRTUAL[:-1], -1]},
        "block_slot must be -1 or a staging slot below 4, got -1 of block 8 "
        "(block_table at [0, 1])",
    ),
    (
        {"slots": [*ALL_VIRTUAL[:-1], 4]},
        "block_slot must be -1 or a staging slot below 4, got 4 of block 8 (block_table at [0, 1])",
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", [attend, gather])
@pytest.mark.parametrize(("change", "message"), BAD)
def test_fault19_what_is_no_block_is_named(
    device: str, run: Any, change: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVARN_CHECKED", "1")  # on CUDA only then
    given = {"table": [[0, 8]], "slots": ALL_VIRTUAL} | change
    with pytest.raises(RuntimeError) as error:
        run(paged(given["table"], [GROUP + 3], given["slots"], device))
    name = "decode_attention" if run is attend else "gather_kv"
    assert str(error.value) == f"kvarn::{name}: {message}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", [attend, gather])
def test_block_slot_must_cover_the_cache(device: str, run: Any) -> None:
    name = "decode_attention" if run is attend else "gather_kv"
    with pytest.raises(ValueError) as error:
        run(paged([[0]], [3], [-1] * (BLOCKS - 1), device))
    assert str(error.value) == f"kvarn::{name}: block_slot must be of at least 5 blocks, got 4"


@pytest.mark.parametrize("run", [attend, gather])
def test_shapes_without_data(run: Any) -> None:
    """Fake kernels take the longer map, and know its rule."""
    given = paged([[5, 1]], [GROUP + 3], ALL_VIRTUAL, "cpu")
    meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in given.items()}
    short = meta | {"block_slot": meta["block_slot"][:4]}
    if run is attend:
        q = torch.empty(1, 2 * HEADS, FMT.head_dim, dtype=torch.float16, device="meta")
        assert ops.decode_attention(q, **meta).shape == q.shape
        with pytest.raises(ValueError, match="block_slot must be of at least 5 blocks, got 4"):
            ops.decode_attention(q, **short)
    else:
        starts = torch.empty(2, dtype=torch.int32, device="meta")
        key, _ = ops.gather_kv(**meta, cu_seq_lens=starts, total_tokens=GROUP + 3)
        assert key.shape == (GROUP + 3, HEADS, FMT.head_dim)
        with pytest.raises(ValueError, match="block_slot must be of at least 5 blocks, got 4"):
            ops.gather_kv(**short, cu_seq_lens=starts, total_tokens=GROUP + 3)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    given = paged([[5, 1]], [GROUP + 3], ALL_VIRTUAL, device)
    q = torch.randn(1, 2 * HEADS, FMT.head_dim).half().to(device)
    seen = []

    class Note(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.namespace == "kvarn":
                seen.append((func, args))
            return func(*args, **kwargs or {})

    with Note():
        ops.decode_attention(q, **given)
        gather(given)
    assert len(seen) == 2
    for func, args in seen:
        results = torch.library.opcheck(func, args)
        assert set(results.values()) == {"SUCCESS"}


def test_a_case_of_the_other_tests_under_virtual_ids() -> None:
    """Every page of a ragged batch moved to ids after those of the cache."""
    case = Case(FMT, [300, 64, 1000, 0], kv_heads=2, dtype=torch.float16, staged=(2,))
    q = torch.randn(4, 4, 64).half()
    plain = ops.decode_attention(q, **case.paged, return_lse=True)
    blocks = len(case.cache)
    virtual = torch.cat([torch.full((blocks,), -1), torch.arange(len(case.staging))]).to(
        torch.int32
    )
    table = case.block_table.clone()
    inside = table < blocks
    slots = case.block_slot[table[inside].long()]
    table[inside] = torch.where(slots >= 0, blocks + slots, table[inside])
    moved = case.paged | {"block_table": table, "block_slot": virtual}
    assert same(ops.decode_attention(q, **moved, return_lse=True), plain)
