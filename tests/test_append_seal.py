"""append_kv and seal_blocks on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from views import FAR, foreign_bytes_untouched, same_bits, scattered

from kvarn import Format, ops, reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
INDICES = [torch.int32, torch.int64]
FMT = Format("kvarn_k4v2_g64", head_dim=64)
HEADS = 2


def pool(slots: int = 4, fmt: Format = FMT, dtype: torch.dtype = torch.float16) -> Tensor:
    """NaN, which no test may meet in what it wrote."""
    shape = (slots, 2, HEADS, fmt.group, fmt.head_dim)
    return torch.full(shape, float("nan"), dtype=dtype)


def tokens(
    count: int, fmt: Format = FMT, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, count, HEADS, fmt.head_dim).to(dtype)
    return x[0], x[1]


# ---- append_kv ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", INDICES)
def test_append_is_a_copy(dtype: torch.dtype, index: torch.dtype) -> None:
    """Bit for bit, NaN and infinities too; into any order of rows; padding is skipped."""
    key, value = tokens(70, dtype=dtype)
    key[3, 1, 5] = float("nan")
    value[9, 0, 2] = float("inf")
    slot_mapping = torch.randperm(3 * 64)[:70]
    slot_mapping[[0, 33, 69]] = torch.tensor([-1, -7, -(2**31)])
    block_slot = torch.tensor([2, 0, 3, -1, 1], dtype=index)
    got, want = pool(dtype=dtype), pool(dtype=dtype)
    ops.append_kv(key, value, slot_mapping.to(index), got, block_slot, FMT)
    reference.append_kv(key, value, slot_mapping, want, block_slot, FMT)
    assert same_bits(got, want)
    written = got.isnan().all(-1).logical_not().sum()
    assert written == 67 * 2 * HEADS


@pytest.mark.parametrize("chunk", [1, 64, 127, 128, 129, 300])
def test_fault17_chunks(chunk: int) -> None:
    key, value = tokens(300)
    block_slot = torch.tensor([4, 1, 0, 3, 2], dtype=torch.int32)
    slots = torch.arange(300)
    want, got = pool(5), pool(5)
    ops.append_kv(key, value, slots, want, block_slot, FMT)
    for i in range(0, 300, chunk):
        part = slice(i, i + chunk)
        ops.append_kv(key[part], value[part], slots[part], got, block_slot, FMT)
    assert same_bits(got, want)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("group", [64, 128])
def test_append_every_shape(group: int, head_dim: int) -> None:
    fmt = Format(f"kvarn_k2v4_g{group}", head_dim=head_dim)
    key, value = tokens(group + 1, fmt)
    got = pool(2, fmt)
    ops.append_kv(key, value, torch.arange(group + 1), got, torch.tensor([1, 0]), fmt)
    assert torch.equal(got[1, 0], key[:group].transpose(0, 1))
    assert torch.equal(got[1, 1], value[:group].transpose(0, 1))
    assert torch.equal(got[0, :, :, 0], torch.stack([key[group], value[group]]))
    assert got[0, :, :, 1:].isnan().all()


def test_fault12_append_views() -> None:
    key, value = tokens(50)
    slots = torch.arange(50).flip(0)
    block_slot = torch.tensor([1], dtype=torch.int32)
    want = pool()
    ops.append_kv(key, value, slots, want, block_slot, FMT)

    fused = torch.cat([key, value, key], -1)
    got = scattered(pool())
    doubled = torch.stack([slots, slots + 1000], 1)  # an index tensor with stride 2
    ops.append_kv(fused[..., :64], fused[..., 64:128], doubled[:, 0], got, block_slot, FMT)
    assert same_bits(got, want)
    assert foreign_bytes_untouched(got)

    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value)]
    tokens_outer = pool().permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    ops.append_kv(*heads_first, slots, tokens_outer, block_slot, FMT)
    assert same_bits(tokens_outer, want)
    one = pool()
    ops.append_kv(key[:1].expand(50, HEADS, 64), value, slots, one, block_slot.expand(1), FMT)
    assert torch.equal(one[1, 0, :, :50], key[0][:, None].expand(HEADS, 50, 64))


def test_append_later_token_of_a_slot_stays() -> None:
    key, value = tokens(200)
    slots = torch.full((200,), 5)
    got = pool()
    ops.append_kv(key, value, slots, got, torch.tensor([0]), FMT)
    assert torch.equal(got[0, 0, :, 5], key[-1]) and torch.equal(got[0, 1, :, 5], value[-1])


BAD_SLOTS = [
    (
        {"slot_mapping": [0, 320]},
        r"slot_mapping must be less than 320 \(5 blocks of 64\), got 320 at index 1",
    ),
    (
        {"slot_mapping": [0, 2**40]},
        r"slot_mapping must be less than 320 \(5 blocks of 64\), got 1099511627776 at index 1",
    ),
    (
        {"slot_mapping": [0, 3 * 64 + 9]},
        r"block_slot must be a staging slot below 4 for every block that tokens are appended to,"
        r" got -1 at block 3 \(slot_mapping 201 at index 1\)",
    ),
    (
        {"slot_mapping": [0, 4 * 64]},
        r"block_slot must be a staging slot below 4 for every block that tokens are appended to,"
        r" got 4 at block 4 \(slot_mapping 256 at index 1\)",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_SLOTS)
def test_fault19_invalid_slot_is_named_and_nothing_written(
    change: dict[str, list[int]], message: str
) -> None:
    key, value = tokens(2)
    got = pool()
    with pytest.raises(RuntimeError, match=f"^kvarn::append_kv: {message}$"):
        ops.append_kv(
            key, value, torch.tensor(change["slot_mapping"]), got,
            torch.tensor([2, 0, 3, -1, 4], dtype=torch.int32), FMT,
        )  # fmt: skip
    assert got.isnan().all()


def test_fault19_padding_only() -> None:
    """Padding may stand beside a block table that has no valid block at all."""
    key, value = tokens(3)
    got = pool()
    nothing = torch.full((3,), -1)
    ops.append_kv(key, value, nothing, got, torch.empty(0, dtype=torch.int32), FMT)
    ops.append_kv(key[:0], value[:0], nothing[:0], got, torch.tensor([-1]), FMT)
    assert got.isnan().all()


def test_fault10_append_beyond_int32() -> None:
    """A page more than 2^31 elements into the pool, a token as far into the input."""
    page = 2 * HEADS * 64 * 64
    far = torch.empty(FAR + page, dtype=torch.float16)
    staging = far.as_strided((2, 2, HEADS, 64, 64), (FAR, HEADS * 64 * 64, 64 * 64, 64, 1))
    key, value = tokens(2)
    ops.append_kv(key, value, torch.tensor([64, 127]), staging, torch.tensor([0, 1]), FMT)
    assert torch.equal(staging[1, 0, :, [0, 63]].transpose(0, 1), key)
    assert torch.equal(staging[1, 1, :, [0, 63]].transpose(0, 1), value)
    source = far.as_strided((2, HEADS, 64), (FAR, 64, 1))
    source.copy_(key)
    got = pool()
    ops.append_kv(source, value, torch.tensor([0, 1]), got, torch.tensor([0]), FMT)
    assert torch.equal(got[0, 0, :, :2].transpose(0, 1), key)


# ---- seal_blocks -------------------------------------------------------------------------------


def packed(staging: Tensor, slots: list[int], fmt: Format = FMT, **how: object) -> Tensor:
    """What the records of these slots must be."""
    pages = staging[slots].transpose(2, 3)  # [n, 2, G, heads, D]
    return ops.quantize_tiles(pages[:, 0], pages[:, 1], fmt, **how)  # type: ignore[arg-type]


def empty_cache(blocks: int = 9, fmt: Format = FMT) -> Tensor:
    return torch.full((blocks, HEADS, fmt.record_bytes), 0xFF, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize(
    "how", [{}, {"fit": "minmax"}, {"iterations": 2}, {"fit": "minmax", "iterations": 0}]
)
def test_seal_is_quantize_tiles(
    dtype: torch.dtype, index: torch.dtype, how: dict[str, object]
) -> None:
    staging = torch.randn(4, 2, HEADS, 64, 64).to(dtype)
    cache = empty_cache()
    slots = torch.tensor([3, -1, 0, 2, 3, 1], dtype=index)
    blocks = torch.tensor([8, 4, 0, 5, 2, -1], dtype=index)
    ops.seal_blocks(staging, slots, blocks, cache, FMT, **how)  # type: ignore[arg-type]
    assert torch.equal(cache[[8, 0, 5, 2]], packed(staging, [3, 0, 2, 3], **how))
    assert (cache[[1, 3, 4, 6, 7]] == 0xFF).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("bits", ["k2v3", "k3v8", "k4v2", "k8v4"])
def test_fault13_seal_every_format(bits: str, group: int, head_dim: int) -> None:
    fmt = Format(f"kvarn_{bits}_g{group}", head_dim=head_dim)
    staging = torch.randn(1, 2, HEADS, group, head_dim)
    cache = scattered(empty_cache(2, fmt))
    cache.fill_(0)
    ops.seal_blocks(staging, torch.tensor([0]), torch.tensor([1]), cache, fmt)
    assert torch.equal(cache[1:], packed(staging, [0], fmt))
    assert (cache[0] == 0).all()
    assert foreign_bytes_untouched(cache)


def test_count() -> None:
    staging = torch.randn(4, 2, HEADS, 64, 64)
    slots, blocks = torch.tensor([0, 1, 9]), torch.tensor([1, 2, 999])  # the third is invalid
    for count in range(3):
        cache = empty_cache()
        ops.seal_blocks(
            staging, slots, blocks, cache, FMT, count=torch.tensor([count], dtype=torch.int32)
        )
        assert torch.equal(cache[1 : 1 + count], packed(staging, [0, 1][:count]))
        assert (cache[1 + count :] == 0xFF).all()


def test_fault12_seal_views() -> None:
    staging = torch.randn(3, 2, HEADS, 64, 64)
    want = packed(staging, [2, 0])
    slots, blocks = torch.tensor([[2, 0], [0, 1]])
    both = torch.stack([slots, blocks], 1)  # stride 2
    views = [
        scattered(staging),
        staging.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4),
        staging.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([staging, staging + 1], -1)[..., :64],
    ]
    for view in views:
        cache = scattered(empty_cache(2), offset=3)
        ops.seal_blocks(view, both[:, 0], both[:, 1], cache, FMT)
        assert torch.equal(cache, want)
        assert foreign_bytes_untouched(cache)
    heads_outer = empty_cache(2).transpose(0, 1).contiguous().transpose(0, 1)
    ops.seal_blocks(staging, slots, blocks, heads_outer, FMT)
    assert torch.equal(heads_outer, want)


def test_fault15_overwritten_drafts_are_not_in_the_record() -> None:
    """Rejected tokens are overwritten in the staging pool; the record is as if they never were."""
    key, value = tokens(64)
    clean, dirty = pool(), pool()
    block_slot = torch.tensor([2])
    ops.append_kv(key, value, torch.arange(64), clean, block_slot, FMT)
    drafts = tokens(64)
    ops.append_kv(*(x * 100 for x in drafts), torch.arange(64), dirty, block_slot, FMT)
    for start in range(0, 64, 5):
        part = slice(start, start + 5)
        ops.append_kv(key[part], value[part], torch.arange(64)[part], dirty, block_slot, FMT)
        rest = slice(min(start + 5, 64), min(start + 8, 64))
        ops.append_kv(*(x[rest] for x in drafts), torch.arange(64)[rest], dirty, block_slot, FMT)
    caches = [empty_cache(1), empty_cache(1)]
    for staging, cache in zip((clean, dirty), caches, strict=True):
        ops.seal_blocks(staging, torch.tensor([2]), torch.tensor([0]), cache, FMT)
    assert torch.equal(*caches)
    assert not (caches[0] == 0xFF).all()


def test_fault03_nan_in_other_slots_and_rows() -> None:
    """Unused slots full of NaN reach nothing; a page with unwritten (NaN) rows reads back NaN there
    and numbers elsewhere."""
    staging = pool()
    key, value = tokens(40)
    ops.append_kv(key, value, torch.arange(40), staging, torch.tensor([1]), FMT)
    cache = empty_cache(1)
    ops.seal_blocks(staging, torch.tensor([1]), torch.tensor([0]), cache, FMT)
    got_key, got_value = ops.dequantize_tiles(cache, FMT, dtype=torch.float32)
    for got, x in ((got_key, key), (got_value, value)):
        assert got[0, 40:].isnan().all()
        assert (got[0, :40] - x.float()).norm() < 0.5 * x.float().norm()


def test_fault20_two_formats_in_one_process() -> None:
    small, large = FMT, Format("kvarn_k2v8_g128", head_dim=128)
    stagings = [torch.randn(2, 2, HEADS, f.group, f.head_dim) for f in (small, large)]
    want = [packed(s, [0, 1], f) for s, f in zip(stagings, (small, large), strict=True)]
    caches = [empty_cache(2, f) for f in (small, large)]
    for i in range(2):
        for staging, cache, fmt in zip(stagings, caches, (small, large), strict=True):
            ops.seal_blocks(staging, torch.tensor([i]), torch.tensor([i]), cache, fmt)
    assert all(torch.equal(a, b) for a, b in zip(caches, want, strict=True))


BAD_TILES = [
    ([0, 4], [0, 1], None, r"slots must be less than 4 \(the staging slots\), got 4 at index 1"),
    (
        [0, 2**40],
        [0, 1],
        None,
        r"slots must be less than 4 \(the staging slots\), got 1099511627776 at index 1",
    ),
    (
        [0, 1],
        [8, 9],
        None,
        r"blocks must be less than 9 \(the blocks of the cache\), got 9 at index 1",
    ),
    ([0, -1, 1], [5, 5, 5], None, r"blocks must be different, got 5 at index 0 and at index 2"),
    ([0, 1], [0, 1], 3, r"count must be between 0 and 2, got 3"),
    ([0, 1], [0, 1], -1, r"count must be between 0 and 2, got -1"),
]


@pytest.mark.parametrize(("slots", "blocks", "count", "message"), BAD_TILES)
def test_fault19_invalid_tile_is_named_and_nothing_written(
    slots: list[int], blocks: list[int], count: int | None, message: str
) -> None:
    staging = torch.randn(4, 2, HEADS, 64, 64)
    cache = empty_cache()
    limit = None if count is None else torch.tensor([count], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=f"^kvarn::seal_blocks: {message}$"):
        ops.seal_blocks(staging, torch.tensor(slots), torch.tensor(blocks), cache, FMT, count=limit)
    assert (cache == 0xFF).all()


def test_fault10_seal_beyond_int32() -> None:
    """Block id x block stride beyond 2^31 bytes, a staging page beyond 2^31 elements."""
    cache = torch.empty(FAR + HEADS * FMT.record_bytes, dtype=torch.uint8).as_strided(
        (2, HEADS, FMT.record_bytes), (FAR, FMT.record_bytes, 1)
    )
    far = torch.empty(FAR + 2 * HEADS * 64 * 64, dtype=torch.float16)
    staging = far.as_strided((2, 2, HEADS, 64, 64), (FAR, HEADS * 64 * 64, 64 * 64, 64, 1))
    staging[1] = torch.randn(2, HEADS, 64, 64)
    ops.seal_blocks(staging, torch.tensor([1]), torch.tensor([1]), cache, FMT)
    assert torch.equal(cache[1:], packed(staging, [1]))


def test_fault24_many_tiles_in_one_call() -> None:
    staging = torch.randn(3, 2, HEADS, 64, 64)
    slots = torch.arange(300) % 3
    blocks = torch.randperm(300)
    cache = empty_cache(300)
    ops.seal_blocks(staging, slots, blocks, cache, FMT)
    assert torch.equal(cache[blocks], packed(staging, [0, 1, 2])[slots])
