"""append_kv and seal_blocks on CUDA: byte for byte what the CPU, or quantize_tiles, writes."""

from __future__ import annotations

import itertools

import cuda_helpers as gpu
import pytest
import torch
from cuda_helpers import BITS, DEVICE, DTYPES, FITS, GROUPS, HEAD_DIMS, format_of
from torch import Tensor
from views import FAR, foreign_bytes_untouched, same_bits, scattered

from kvarn import Format, ops

pytestmark = pytest.mark.cuda

HALVES = DTYPES[:2]
INDICES = (torch.int32, torch.int64)
FMT = format_of((4, 2))


def pool(slots: int, heads: int, fmt: Format = FMT, dtype: torch.dtype = torch.float16) -> Tensor:
    """NaN, which no test may meet in what it wrote."""
    shape = (slots, 2, heads, fmt.group, fmt.head_dim)
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def tokens(
    count: int, heads: int, fmt: Format = FMT, dtype: torch.dtype = torch.float16, seed: int = 0
) -> tuple[Tensor, Tensor]:
    x = gpu.normal(2, count, heads, fmt.head_dim, dtype=dtype, seed=seed)
    return x[0], x[1]


def index(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.as_tensor(values, dtype=dtype).to(DEVICE)


# ---- append_kv ---------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 3, 5])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", HALVES)
def test_append_equals_the_cpu(dtype: torch.dtype, group: int, head_dim: int, heads: int) -> None:
    """Any order of rows, NaN and infinities bit for bit, padding skipped, the rest untouched."""
    fmt = format_of((2, 4), group, head_dim)
    count = group + 7
    key, value = tokens(count, heads, fmt, dtype)
    key[3, heads - 1, 5] = float("nan")
    value[9, 0, 2] = float("inf")
    rows = torch.randperm(3 * group)[:count]
    rows[[0, 33, count - 1]] = torch.tensor([-1, -7, -(2**31)])
    for where, slots in itertools.product(INDICES, INDICES):
        slot_mapping, block_slot = index(rows, where), index([2, 0, 3, -1, 1], slots)
        got, want = pool(4, heads, fmt, dtype), pool(4, heads, fmt, dtype).cpu()
        ops.append_kv(key, value, slot_mapping, got, block_slot, fmt)
        ops.append_kv(key.cpu(), value.cpu(), rows, want, block_slot.cpu(), fmt)
        assert same_bits(got.cpu(), want)


def test_fault08_every_number_of_tokens() -> None:
    """1 to 300 tokens in one call, every second slot of a permutation, every seventh padding."""
    fmt = format_of((4, 2), 128, 128)
    key, value = tokens(300, 3, fmt)
    order = torch.randperm(5 * 128)[:300]
    order[::7] = -1
    block_slot = torch.tensor([4, 1, 0, 3, 2], dtype=torch.int32)
    slot_mapping, on_device = index(order), index(block_slot, torch.int32)
    want = pool(5, 3, fmt).cpu()
    got = pool(5, 3, fmt)
    host_key, host_value = key.cpu(), value.cpu()
    for count in range(1, 301):
        gpu.poison(got)
        ops.append_kv(key[:count], value[:count], slot_mapping[:count], got, on_device, fmt)
        last = slice(count - 1, count)  # the CPU adds one token at a time
        ops.append_kv(host_key[last], host_value[last], order[last], want, block_slot, fmt)
        assert same_bits(got, want.to(DEVICE)), count


@pytest.mark.parametrize("chunk", [1, 64, 127, 128, 129, 300])
def test_fault17_chunks(chunk: int) -> None:
    key, value = tokens(300, 2)
    block_slot, slots = index([4, 1, 0, 3, 2], torch.int32), index(torch.arange(300))
    want, got = pool(5, 2), pool(5, 2)
    ops.append_kv(key, value, slots, want, block_slot, FMT)
    for i in range(0, 300, chunk):
        part = slice(i, i + chunk)
        ops.append_kv(key[part], value[part], slots[part], got, block_slot, FMT)
    assert same_bits(got, want)


def test_fault10_70000_tokens() -> None:
    key, value = tokens(70_000, 1)
    blocks = -(-70_000 // 64)
    rows = torch.randperm(blocks * 64)[:70_000]
    slots = torch.randperm(blocks)
    got, want = pool(blocks, 1), pool(blocks, 1).cpu()
    ops.append_kv(key, value, index(rows), got, index(slots, torch.int32), FMT)
    ops.append_kv(key.cpu(), value.cpu(), rows, want, slots, FMT)
    assert same_bits(got.cpu(), want)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_fault12_append_views(head_dim: int) -> None:
    """Slices of a fused qkv buffer, pools with gaps, at any alignment, in any order in memory."""
    fmt = format_of((4, 2), 64, head_dim)
    key, value = tokens(50, 2, fmt)
    slots, block_slot = index(torch.arange(50).flip(0)), index([1], torch.int32)
    want = pool(3, 2, fmt)
    ops.append_kv(key, value, slots, want, block_slot, fmt)

    fused = torch.cat([key, value, key], -1)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value)]
    inputs = [
        (fused[..., :head_dim], fused[..., head_dim : 2 * head_dim]),
        heads_first,
        [scattered(x, gap=3, offset=1) for x in (key, value)],
        [scattered(x, gap=8, offset=8) for x in (key, value)],
        (key, scattered(value, gap=2, offset=4)),
    ]
    doubled = torch.stack([slots, slots + 1000], 1)  # an index tensor with stride 2
    for one_key, one_value in inputs:
        for gap, offset in ((3, 5), (8, 0), (4, 8), (0, 1)):
            got = scattered(pool(3, 2, fmt), gap, offset)
            ops.append_kv(one_key, one_value, doubled[:, 0], got, block_slot, fmt)
            assert same_bits(got, want)
            assert foreign_bytes_untouched(got)
    tokens_outer = pool(3, 2, fmt).permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    ops.append_kv(key, value, slots, tokens_outer, block_slot, fmt)
    assert same_bits(tokens_outer, want)
    one = pool(3, 2, fmt)
    ops.append_kv(key[:1].expand(50, 2, head_dim), value, slots, one, block_slot.expand(1), fmt)
    assert torch.equal(one[1, 0, :, :50], key[0][:, None].expand(2, 50, head_dim))


def test_fault19_padding_only() -> None:
    key, value = tokens(3, 2)
    got = pool(4, 2)
    nothing = index([-1, -1, -(2**40)])
    ops.append_kv(key, value, nothing, got, index([], torch.int32), FMT)
    ops.append_kv(key[:0], value[:0], nothing[:0], got, index([-1], torch.int32), FMT)
    ops.append_kv(key[:, :0], value[:, :0], nothing, got[:, :, :0], index([0]), FMT)
    assert got.isnan().all()


@pytest.mark.parametrize("where", INDICES)
def test_fault19_slots_out_of_range_are_skipped(where: torch.dtype) -> None:
    """Without KVARN_CHECKED: no row of theirs exists, and every other token is written."""
    key, value = tokens(9, 2)
    rows = [0, 5 * 64, 65, 3 * 64 + 9, 4 * 64, 63, 2**31 - 1, 2**31 - 64, 70]
    if where is torch.int64:
        rows[6], rows[7] = 2**40, 2**63 - 1
    block_slot = index([2, 0, 3, -1, 4], torch.int32)
    got, want = pool(4, 2), pool(4, 2)
    ops.append_kv(key, value, index(rows, where), got, block_slot, FMT)
    valid = [0, 2, 5, 8]
    ops.append_kv(key[valid], value[valid], index(rows, where)[valid], want, block_slot, FMT)
    assert same_bits(got, want)
    assert not want.isnan().all()


def test_fault10_append_beyond_int32() -> None:
    """A page more than 2^31 elements into the pool, a token and a head as far into the input."""
    page = 2 * 2 * 64 * 64
    far = torch.empty(FAR + page, dtype=torch.float16, device=DEVICE)
    staging = far.as_strided((2, 2, 2, 64, 64), (FAR, 2 * 64 * 64, 64 * 64, 64, 1))
    key, value = tokens(2, 2)
    ops.append_kv(key, value, index([64, 127]), staging, index([0, 1]), FMT)
    assert torch.equal(staging[1, 0, :, [0, 63]].transpose(0, 1), key)
    assert torch.equal(staging[1, 1, :, [0, 63]].transpose(0, 1), value)
    for strides in ((FAR, 64, 1), (64, FAR, 1)):
        source = far.as_strided((2, 2, 64), strides)
        source.copy_(key)
        got = pool(4, 2)
        ops.append_kv(source, value, index([0, 1]), got, index([0]), FMT)
        assert torch.equal(got[0, 0, :, :2].transpose(0, 1), key)
        assert torch.equal(got[0, 1, :, :2].transpose(0, 1), value)


def test_fault10_a_pool_of_more_than_2_to_the_31_bytes() -> None:
    """Ordinary strides, slots and blocks near the end."""
    fmt = format_of((2, 2), 128, 256)
    slots = 2**31 // (2 * 8 * 128 * 256 * 2) + 3
    staging = torch.empty(slots, 2, 8, 128, 256, dtype=torch.float16, device=DEVICE)
    assert staging.nbytes > 2**31
    key, value = tokens(5, 8, fmt)
    block_slot = torch.full((2**25,), -1, dtype=torch.int32, device=DEVICE)
    block_slot[[2**25 - 1, 17]] = index([slots - 1, slots - 2], torch.int32)
    edge = (2**25 - 1) * 128  # a slot_mapping past 2^31
    rows = index([edge, edge + 127, 17 * 128 + 3, 17 * 128, edge + 64])
    ops.append_kv(key, value, rows, staging, block_slot, fmt)
    for i, (slot, row) in enumerate([(-1, 0), (-1, 127), (-2, 3), (-2, 0), (-1, 64)]):
        assert torch.equal(staging[slot, 0, :, row], key[i])
        assert torch.equal(staging[slot, 1, :, row], value[i])


# ---- seal_blocks -------------------------------------------------------------------------------


def packed(staging: Tensor, slots: list[int], fmt: Format = FMT, **how: object) -> Tensor:
    """What the records of these slots must be: quantize_tiles has tests of its own."""
    pages = staging[slots].transpose(2, 3)  # [n, 2, G, heads, D]
    return ops.quantize_tiles(pages[:, 0], pages[:, 1], fmt, **how)  # type: ignore[arg-type]


def empty_cache(blocks: int, heads: int, fmt: Format = FMT) -> Tensor:
    shape = fmt.cache_shape(blocks, heads)
    return torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("heads", [1, 3, 5])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("fit", "iterations"), FITS)
def test_seal_is_quantize_tiles(fit: str, iterations: int, dtype: torch.dtype, heads: int) -> None:
    """Padding in either list is skipped; blocks that are not sealed stay as they are."""
    how = {"fit": fit, "iterations": iterations}
    for group, head_dim in itertools.product(GROUPS, HEAD_DIMS):
        fmt = format_of((4, 2), group, head_dim)
        staging = gpu.normal(4, 2, heads, group, head_dim, dtype=dtype)
        want = packed(staging, [3, 0, 2, 3], fmt, **how)
        for kind in INDICES:
            cache = empty_cache(9, heads, fmt)
            slots = index([3, -1, 0, 2, 3, 1], kind)
            blocks = index([8, 4, 0, 5, 2, -1], kind)
            ops.seal_blocks(staging, slots, blocks, cache, fmt, **how)
            assert torch.equal(cache[[8, 0, 5, 2]], want)
            assert (cache[[1, 3, 4, 6, 7]] == 0xFF).all()


@pytest.mark.parametrize("bits", list(itertools.product(BITS, BITS)))
def test_fault13_seal_every_format(bits: tuple[int, int]) -> None:
    for group, head_dim in itertools.product(GROUPS, HEAD_DIMS):
        fmt = format_of(bits, group, head_dim)
        staging = gpu.normal(1, 2, 3, group, head_dim)
        cache = scattered(torch.zeros_like(empty_cache(2, 3, fmt)))
        ops.seal_blocks(staging, index([0]), index([1]), cache, fmt)
        assert torch.equal(cache[1:], packed(staging, [0], fmt))
        assert (cache[0] == 0).all()
        assert foreign_bytes_untouched(cache)


def test_count() -> None:
    staging = gpu.normal(4, 2, 2, 64, 64)
    slots, blocks = index([0, 1, -1, 3]), index([1, 2, 5, -1])
    for count in range(5):
        cache = empty_cache(9, 2)
        ops.seal_blocks(staging, slots, blocks, cache, FMT, count=index([count], torch.int32))
        sealed = min(count, 2)
        assert torch.equal(cache[1 : 1 + sealed], packed(staging, [0, 1][:sealed]))
        assert (cache[1 + sealed :] == 0xFF).all()


def test_nothing_to_seal() -> None:
    staging, cache = gpu.normal(4, 2, 2, 64, 64), empty_cache(9, 2)
    nothing = index([])
    ops.seal_blocks(staging, nothing, nothing, cache, FMT)
    ops.seal_blocks(staging, nothing, nothing, cache, FMT, count=index([0], torch.int32))
    ops.seal_blocks(staging[:, :, :0], index([0]), index([0]), cache[:, :0], FMT)
    ops.seal_blocks(staging[:0], index([-1]), index([0]), cache, FMT)
    ops.seal_blocks(staging, index([0]), index([-1]), cache[:0], FMT)
    assert (cache == 0xFF).all()


@pytest.mark.parametrize("kind", INDICES)
def test_fault19_tiles_out_of_range_are_skipped(kind: torch.dtype) -> None:
    """Without KVARN_CHECKED; a count beyond the lists means all of them, a negative one none."""
    staging, cache = gpu.normal(4, 2, 2, 64, 64), empty_cache(9, 2)
    far = 2**40 if kind is torch.int64 else 2**31 - 1
    slots = index([0, 4, 1, far, 2, -5], kind)
    blocks = index([3, 0, 9, 1, far, 2], kind)
    ops.seal_blocks(staging, slots, blocks, cache, FMT)
    assert torch.equal(cache[3:4], packed(staging, [0]))
    assert (cache[[0, 1, 2, 4, 5, 6, 7, 8]] == 0xFF).all()
    for count in (7, 2**31 - 1, -1, -(2**31)):
        cache = empty_cache(9, 2)
        ops.seal_blocks(staging, slots, blocks, cache, FMT, count=index([count], torch.int32))
        sealed = count > 0
        assert torch.equal(cache[3:4], packed(staging, [0])) == sealed
        assert ((cache == 0xFF).all(-1).all(-1).sum() == 9 - sealed).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_fault12_seal_views(head_dim: int) -> None:
    fmt = format_of((3, 2), 64, head_dim)
    staging = gpu.normal(3, 2, 2, 64, head_dim)
    want = packed(staging, [2, 0], fmt)
    slots, blocks = index([2, 0]), index([0, 1])
    both = torch.stack([slots, blocks], 1)  # stride 2
    stagings = [
        scattered(staging),
        scattered(staging, gap=8, offset=8),
        staging.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4),
        staging.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([staging, staging + 1], -1)[..., :head_dim],
    ]
    for view, offset in itertools.product(stagings, range(4)):
        cache = scattered(empty_cache(2, 2, fmt), offset=offset)
        ops.seal_blocks(view, both[:, 0], both[:, 1], cache, fmt)
        assert torch.equal(cache, want)
        assert foreign_bytes_untouched(cache)
    heads_outer = empty_cache(2, 2, fmt).transpose(0, 1).contiguous().transpose(0, 1)
    ops.seal_blocks(staging, slots, blocks, heads_outer, fmt)
    assert torch.equal(heads_outer, want)


def test_fault03_nan_in_other_slots_and_rows() -> None:
    """Unused slots full of NaN reach nothing; a page with unwritten (NaN) rows reads back NaN there
    and numbers elsewhere, and a NaN token stays alone."""
    for group, head_dim in itertools.product(GROUPS, HEAD_DIMS):
        fmt = format_of((4, 2), group, head_dim)
        staging = pool(4, 2, fmt)
        key, value = tokens(40, 2, fmt)
        clean = staging.clone()
        slots, block_slot = index(torch.arange(40)), index([1])
        ops.append_kv(key, value, slots, clean, block_slot, fmt)
        bad_key, bad_value = key.clone(), value.clone()
        bad_key[11, 1, 3] = bad_value[11, 1, 3] = float("nan")
        ops.append_kv(bad_key, bad_value, slots, staging, block_slot, fmt)
        caches = [empty_cache(1, 2, fmt) for _ in range(2)]
        for pages, cache in zip((staging, clean), caches, strict=True):
            ops.seal_blocks(pages, index([1]), index([0]), cache, fmt)
        bad, good = (ops.dequantize_tiles(c, fmt, dtype=torch.float32) for c in caches)
        for got, was, x in zip(bad, good, (key, value), strict=True):
            expected = torch.zeros(group, 2, dtype=torch.bool, device=DEVICE)
            expected[40:] = True
            expected[11, 1] = True
            assert torch.equal(got[0].isnan().all(-1), expected)
            assert torch.equal(got[0].isnan().any(-1), expected)
            assert torch.equal(got[0, :40, 0], was[0, :40, 0])
            live = [i for i in range(40) if i != 11]
            for read in (got, was):
                error = read[0, live] - x[live].float()
                assert error.norm() < 0.5 * x[live].float().norm()


def test_fault01_fault02_pages_that_are_tiny_huge_or_zero() -> None:
    """bf16 pages beyond the range of fp16, subnormal ones, empty ones."""
    for bits, head_dim in itertools.product(BITS, HEAD_DIMS):
        fmt = format_of((bits, bits), 64, head_dim)
        x = gpu.normal(1, 2, 1, 64, head_dim, dtype=torch.bfloat16)
        size = torch.tensor([1.0, 2.0**20, 2.0**-20, 0.0], dtype=torch.bfloat16, device=DEVICE)
        staging = x * size.view(4, 1, 1, 1, 1)
        cache = empty_cache(4, 1, fmt)
        ops.seal_blocks(staging, index(range(4)), index(range(4)), cache, fmt)
        for side, got in enumerate(ops.dequantize_tiles(cache, fmt, dtype=torch.float32)):
            pages = staging[:, side, 0].float()
            error = (got[:, :, 0] - pages).square().sum((1, 2)) / pages.square().sum((1, 2))
            assert (got[3] == 0).all()
            assert torch.allclose(error[1:3], error[0], rtol=1e-3)


def test_fault10_seal_beyond_int32() -> None:
    """Block id x block stride beyond 2^31 bytes, a staging page beyond 2^31 elements."""
    cache = torch.empty(FAR + 2 * FMT.record_bytes, dtype=torch.uint8, device=DEVICE).as_strided(
        (2, 2, FMT.record_bytes), (FAR, FMT.record_bytes, 1)
    )
    far = torch.empty(FAR + 2 * 2 * 64 * 64, dtype=torch.float16, device=DEVICE)
    staging = far.as_strided((2, 2, 2, 64, 64), (FAR, 2 * 64 * 64, 64 * 64, 64, 1))
    staging[1] = gpu.normal(2, 2, 64, 64)
    ops.seal_blocks(staging, index([1]), index([1]), cache, FMT)
    assert torch.equal(cache[1:], packed(staging, [1]))


def test_fault10_a_cache_of_more_than_2_to_the_32_bytes() -> None:
    """Ordinary strides, block ids near the end."""
    blocks = 2**32 // (3 * FMT.record_bytes) + 5
    cache = torch.empty(FMT.cache_shape(blocks, 3), dtype=torch.uint8, device=DEVICE)
    staging = gpu.normal(2, 2, 3, 64, 64)
    near = [blocks // 2, blocks - 3]
    cache[[b + 1 for b in near]] = 0xFF
    ops.seal_blocks(staging, index([1, 0]), index(near), cache, FMT)
    assert torch.equal(cache[near], packed(staging, [1, 0]))
    assert (cache[[b + 1 for b in near]] == 0xFF).all()
    # Records there are read and unpacked, too.
    for got, want in zip(
        ops.dequantize_tiles(cache[blocks // 2 :: blocks - 3 - blocks // 2], FMT),
        ops.dequantize_tiles(packed(staging, [1, 0]), FMT),
        strict=True,
    ):
        assert same_bits(got, want)


def test_fault10_70000_tiles() -> None:
    staging = gpu.normal(101, 2, 1, 64, 64)
    slots = torch.arange(70_000, device=DEVICE) % 101
    blocks = torch.randperm(70_000).to(DEVICE)
    cache = empty_cache(70_000, 1)
    ops.seal_blocks(staging, slots, blocks, cache, FMT)
    assert torch.equal(cache[blocks], packed(staging, list(range(101)))[slots])


@pytest.mark.parametrize(("fit", "iterations"), [("unbiased", 0), ("unbiased", 4), ("minmax", 4)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_fault10_more_tiles_than_run_at_once(
    group: int, head_dim: int, fit: str, iterations: int
) -> None:
    """A block then makes one part of a record after another: what it had before, dead and massive
    tokens or padding, leaves no trace. quantize_tiles gives each part a block of its own."""
    fmt = format_of((4, 2), group, head_dim)
    how = {"fit": fit, "iterations": iterations}
    heads, slots_of_pool = 3, 7
    # A multiprocessor runs at most 32 blocks at once; these have work for 66.
    tiles = 11 * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    count = tiles - 40
    generator = torch.Generator().manual_seed(0)
    slots = torch.randint(0, slots_of_pool, (tiles,), generator=generator)
    blocks = torch.randperm(tiles + 50, generator=generator)[:tiles]
    slots[torch.rand(tiles, generator=generator) < 0.2] = -1
    blocks[torch.rand(tiles, generator=generator) < 0.2] = -1
    slots[300:700] = -1  # whole rounds of all blocks
    sealed = (slots >= 0) & (blocks >= 0) & (torch.arange(tiles) < count)
    for dtype, kind in zip(HALVES, INDICES, strict=True):
        staging = gpu.normal(slots_of_pool, 2, heads, group, head_dim, dtype=dtype)
        staging[1, :, :, 5] = float("nan")
        staging[2] = 0
        staging[3, :, 1, 9] = 6e4
        staging[4, 0, :, ::2] = 0
        staging[5, 1, 2] = float("inf")
        want = packed(staging, list(range(slots_of_pool)), fmt, **how)
        cache = empty_cache(tiles + 50, heads, fmt)
        expected = cache.clone()
        expected[blocks[sealed].to(DEVICE)] = want[slots[sealed].to(DEVICE)]
        ops.seal_blocks(
            staging, index(slots, kind), index(blocks, kind), cache, fmt,
            count=index([count], torch.int32), **how,
        )  # fmt: skip
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("kind", INDICES)
def test_fault19_nothing_but_padding(kind: torch.dtype) -> None:
    """More of it than blocks run at once; some that is beyond `count`."""
    tiles, heads = 700, 2
    staging, cache = gpu.normal(4, 2, heads, 64, 64), empty_cache(tiles, heads)
    padding = index([-1] * tiles, kind)
    slots, blocks = index([i % 4 for i in range(tiles)], kind), index(range(tiles), kind)
    for pair in ((padding, blocks), (slots, padding), (padding, padding)):
        ops.seal_blocks(staging, *pair, cache, FMT)
        ops.seal_blocks(staging, *pair, cache, FMT, count=index([tiles], torch.int32))
    ops.seal_blocks(staging, slots, blocks, cache, FMT, count=index([0], torch.int32))
    assert (cache == 0xFF).all()
    ops.seal_blocks(staging, slots, blocks, cache, FMT, count=index([699], torch.int32))
    assert torch.equal(cache[:699], packed(staging, list(range(4)))[slots.long()[:699]])
    assert (cache[699:] == 0xFF).all()


def test_fault24_256_tiles_of_one_step_are_one_launch() -> None:
    fmt = format_of((4, 2), 128, 128)
    staging = gpu.normal(256, 2, 3, 128, 128)
    slots, blocks = index(torch.randperm(256)), index(torch.randperm(300)[:256], torch.int32)
    cache = empty_cache(300, 3, fmt)
    count = index([256], torch.int32)
    for how in ({}, {"fit": "minmax"}, {"iterations": 0}):
        nodes = gpu.graph_nodes(
            lambda how=how: ops.seal_blocks(staging, slots, blocks, cache, fmt, count=count, **how)
        )
        assert nodes == [0]
        ops.seal_blocks(staging, slots, blocks, cache, fmt, count=count, **how)
        assert torch.equal(cache[blocks.long()], packed(staging, slots.tolist(), fmt, **how))


# ---- A decode loop in a graph ------------------------------------------------------------------


class Loop:
    """Sequences that append tokens and seal the tiles that fill, as an engine captures it: all
    tensors stay where they are, their contents change from step to step."""

    def __init__(self, fmt: Format, sequences: int, blocks: int, dtype: torch.dtype) -> None:
        self.fmt, self.heads = fmt, 2
        self.key, self.value = (
            torch.zeros(sequences, self.heads, fmt.head_dim, dtype=dtype, device=DEVICE)
            for _ in range(2)
        )
        self.slot_mapping = index([-1] * sequences)
        self.staging = pool(2 * sequences, self.heads, fmt, dtype)
        self.block_slot = index([-1] * blocks, torch.int32)
        self.slots, self.blocks = (index([-1] * sequences, torch.int32) for _ in range(2))
        self.count = index([0], torch.int32)
        self.cache = empty_cache(blocks, self.heads, fmt)

    def step(self) -> None:
        ops.append_kv(
            self.key, self.value, self.slot_mapping, self.staging, self.block_slot, self.fmt
        )
        ops.seal_blocks(
            self.staging, self.slots, self.blocks, self.cache, self.fmt, count=self.count
        )

    def load(self, step: int, lengths: list[int], table: list[list[int]]) -> None:
        """The metadata and the tokens of a step; sequences that are done leave stale entries."""
        group = self.fmt.group
        rows, sealed = [], []
        for sequence, length in enumerate(lengths):
            token = step - 13 * sequence  # they enter one after the other
            if not 0 <= token < length:
                rows.append(-1)
                continue
            block = table[sequence][token // group]
            self.block_slot[block] = 2 * sequence + token // group % 2
            rows.append(block * group + token % group)
            if token % group == group - 1:
                sealed.append((2 * sequence + token // group % 2, block))
        self.slot_mapping.copy_(index(rows))
        for i, (slot, block) in enumerate(sealed):
            self.slots[i], self.blocks[i] = slot, block
        self.count.fill_(len(sealed))
        generator = torch.Generator().manual_seed(step)
        for x in (self.key, self.value):
            x.copy_(torch.randn(x.shape, generator=generator).to(x.dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bits", [(4, 2), (3, 8)])
def test_fault21_decode_loop_in_a_graph(bits: tuple[int, int], dtype: torch.dtype) -> None:
    """Replayed over tile boundaries, with block ids far larger than at capture, and with sequences
    that have ended: what was captured does what eager calls do, bit for bit."""
    fmt = format_of(bits, 64, 128)
    lengths = [200, 64, 130, 63]
    generator = torch.Generator().manual_seed(0)
    blocks = 5000
    order = torch.randperm(blocks, generator=generator).tolist()
    table = [order[4 * i : 4 * i + 4] for i in range(4)]
    table[0][0], table[0][2], table[0][3] = 0, 4999, 4998
    eager, graph = (Loop(fmt, len(lengths), blocks, dtype) for _ in range(2))
    replay, _ = gpu.captured(graph.step)
    for step in range(240):
        for loop in (eager, graph):
            loop.load(step, lengths, table)
        eager.step()
        replay()
    assert same_bits(graph.staging, eager.staging)
    assert torch.equal(graph.cache, eager.cache)
    sealed = [table[s][b] for s, n in enumerate(lengths) for b in range(n // 64)]
    others = torch.ones(blocks, dtype=torch.bool)
    others[sealed] = False
    assert (graph.cache[others.to(DEVICE)] == 0xFF).all()
    assert not (graph.cache[sealed] == 0xFF).all(-1).any()


def test_fault20_two_formats_on_two_streams() -> None:
    """Two caches that are filled at once are as if each had been alone."""

    class Work:
        """Rounds of append and seal, everything on the device from the start."""

        def __init__(self, fmt: Format, heads: int) -> None:
            self.fmt = fmt
            self.inputs = [tokens(4 * fmt.group, heads, fmt, seed=seed) for seed in range(10)]
            self.rows = index(torch.randperm(4 * fmt.group))
            self.block_slot = index([2, 0, 3, 1], torch.int32)
            self.slots = index([0, 1, 2, 3])
            self.blocks = [index(range(4 * i, 4 * i + 4)) for i in range(10)]
            self.staging = pool(4, heads, fmt)
            self.cache = empty_cache(40, heads, fmt)

        def round(self, i: int) -> None:
            key, value = self.inputs[i]
            ops.append_kv(key, value, self.rows, self.staging, self.block_slot, self.fmt)
            ops.seal_blocks(self.staging, self.slots, self.blocks[i], self.cache, self.fmt)

    def make() -> list[Work]:
        torch.manual_seed(0)
        return [Work(format_of((4, 2)), 7), Work(format_of((2, 8), 128, 256), 3)]

    alone, together = make(), make()
    for work in alone:
        for i in range(10):
            work.round(i)
    streams = list(gpu.other_streams(2))
    for stream in streams:
        with torch.cuda.stream(stream):
            gpu.keep_busy()
    for i in range(10):
        for stream, work in zip(streams, together, strict=True):
            with torch.cuda.stream(stream):
                work.round(i)
    for stream in streams:
        stream.synchronize()
    for a, b in zip(together, alone, strict=True):
        assert same_bits(a.staging, b.staging)
        assert torch.equal(a.cache, b.cache)
        assert not (a.cache == 0xFF).all(-1).any()
