"""pack_bits, unpack_bits, pack_records and unpack_records on CUDA: byte for byte the CPU's."""

from __future__ import annotations

import itertools

import cuda_helpers as gpu
import pytest
import torch
from cuda_helpers import BITS, DEVICE, GROUPS, HEAD_DIMS, format_of
from torch import Tensor
from views import foreign_bytes_untouched, same_bits, scattered

from kvarn import CanonicalRecords, ops

pytestmark = pytest.mark.cuda

ALL_BITS = range(1, 9)


def codes(shape: tuple[int, ...], bits: int) -> Tensor:
    """On the CPU."""
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)


def equal(a: CanonicalRecords, b: CanonicalRecords) -> bool:
    return all(same_bits(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


# ---- pack_bits and unpack_bits -----------------------------------------------------------------


@pytest.mark.parametrize("bits", ALL_BITS)
def test_fault08_every_length(bits: int) -> None:
    for count in (*range(131), 1000, 2**16 - 1, 2**16 + 1):
        x = codes((3, count), bits)
        packed = ops.pack_bits(x, bits)
        got = ops.pack_bits(x.to(DEVICE), bits)
        assert torch.equal(got.cpu(), packed), count
        assert torch.equal(ops.unpack_bits(got, bits, count).cpu(), x), count


@pytest.mark.parametrize("bits", ALL_BITS)
def test_unpack_ignores_spare_bits(bits: int) -> None:
    x = codes((5, 3), bits)
    packed = ops.pack_bits(x, bits)
    spare = 8 * packed.shape[1] - 3 * bits
    packed[:, -1] |= (0xFF << (8 - spare)) & 0xFF
    assert torch.equal(ops.unpack_bits(packed.to(DEVICE), bits, 3).cpu(), x)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_fault12_every_address_and_nothing_else_written(bits: int) -> None:
    """Rows that start at any byte, with any gap between them."""
    for count, gap, offset in itertools.product((7, 8, 64, 129), (0, 1, 3, 8), (0, 1, 2, 4, 5)):
        x = codes((3, count), bits)
        packed = ops.pack_bits(x, bits)
        view = scattered(x.to(DEVICE), gap, offset)
        out = scattered(torch.zeros_like(packed).to(DEVICE), gap, offset)
        ops.pack_bits(view, bits, out=out)
        assert torch.equal(out.cpu(), packed)
        assert foreign_bytes_untouched(out)
        back = scattered(torch.zeros_like(x).to(DEVICE), gap, offset)
        ops.unpack_bits(out, bits, count, out=back)
        assert torch.equal(back.cpu(), x)
        assert foreign_bytes_untouched(back)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (70_000, 3), (2, 3, 2, 9), (9,), (1, 1, 1)])
def test_fault10_shapes(shape: tuple[int, ...]) -> None:
    x = codes(shape, 3)
    packed = ops.pack_bits(x, 3)
    got = ops.pack_bits(x.to(DEVICE), 3)
    assert torch.equal(got.cpu(), packed)
    assert torch.equal(ops.unpack_bits(got, 3, shape[-1]).cpu(), x)


@pytest.mark.parametrize("rows", [1, 2**13 + 1])
def test_fault10_more_than_2_to_the_31_codes(rows: int) -> None:
    """In one row and in many."""
    pattern = codes((1024 * 1031,), 2).to(DEVICE)
    repeats = 2**31 // pattern.numel() + 2
    if rows > 1:
        pattern, repeats = pattern[: 2**18], rows
    x = pattern.repeat(repeats)
    assert x.numel() > 2**31
    packed = ops.pack_bits(x.view(rows, -1), 2)
    want = ops.pack_bits(pattern, 2)
    assert (packed.view(repeats, -1) == want).all()
    x.zero_()
    ops.unpack_bits(packed, 2, x.numel() // rows, out=x.view(rows, -1))
    assert (x.view(repeats, -1) == pattern).all()


# ---- pack_records and unpack_records -----------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", list(itertools.product(BITS, BITS)))
def test_fault13_every_format(bits: tuple[int, int], group: int, head_dim: int) -> None:
    fmt = format_of(bits, group, head_dim)
    records = gpu.random_records(fmt, 3, 5)
    want = ops.unpack_records(records.cpu(), fmt)
    assert equal(ops.unpack_records(records, fmt), want)
    assert torch.equal(ops.pack_records(gpu.on_device(want), fmt), records)


@pytest.mark.parametrize("bits", list(itertools.product(BITS, BITS)))
def test_fault12_records_at_any_address(bits: tuple[int, int]) -> None:
    """Padding between blocks and heads, odd storage offsets; only the records change."""
    fmt = format_of(bits)
    records = gpu.random_records(fmt, 2, 3)
    want = ops.unpack_records(records, fmt)
    for offset in range(4):
        view = scattered(records, gap=3, offset=offset)
        assert equal(ops.unpack_records(view, fmt), want)
        out = scattered(torch.zeros_like(records), gap=5, offset=offset)
        ops.pack_records(want, fmt, out=out)
        assert torch.equal(out, records)
        assert foreign_bytes_untouched(out)
    swapped = records.transpose(0, 1).contiguous().transpose(0, 1)
    assert equal(ops.unpack_records(swapped, fmt), want)


def test_fault14_every_scale_field_is_in_its_place() -> None:
    """Non-square tiles, each field of a value of its own."""
    for group, dim in ((64, 128), (128, 64), (64, 256)):
        fmt = format_of((4, 2), group, dim)
        canonical = CanonicalRecords(
            torch.full((1, 1, dim, group), 9, dtype=torch.uint8),
            *(torch.full((1, 1, n), x).half() for n, x in ((dim, 1.0), (dim, 2.0), (group, 3.0))),
            torch.full((1, 1, group, dim), 2, dtype=torch.uint8),
            *(torch.full((1, 1, n), x).half() for n, x in ((group, 4.0), (group, 5.0), (dim, 6.0))),
        )
        records = ops.pack_records(gpu.on_device(canonical), fmt)
        assert equal(ops.unpack_records(records, fmt), canonical)
        record = records[0, 0].cpu()
        at = 0
        for codes_bytes, byte, scales in (
            (group * dim // 2, 0x99, ((dim, 1.0), (dim, 2.0), (group, 3.0))),
            (group * dim // 4, 0xAA, ((group, 4.0), (group, 5.0), (dim, 6.0))),
        ):
            assert (record[at : at + codes_bytes] == byte).all()
            at += codes_bytes
            for n, x in scales:
                assert (record[at : at + 2 * n].view(torch.float16) == x).all()
                at += 2 * n
        assert at == fmt.record_bytes


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (70_000, 1), (1, 70_000)])
def test_fault10_any_number_of_records(shape: tuple[int, int]) -> None:
    fmt = format_of((2, 2))
    tiles, heads = shape
    some = gpu.random_records(fmt, 101, 1)
    index = torch.arange(tiles * heads, device=DEVICE) % 101
    records = some[index].view(tiles, heads, fmt.record_bytes)
    canonical = ops.unpack_records(records, fmt)
    first = ops.unpack_records(some, fmt)
    for got, want in zip(canonical, first, strict=True):
        assert got.shape[:2] == shape
        assert same_bits(got.flatten(0, 1), want[:, 0][index])
    assert torch.equal(ops.pack_records(canonical, fmt), records)
