"""pack_records and unpack_records on the CPU, against the layout spelled out in the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from views import FAR, foreign_bytes_untouched, same_bits, scattered

from kvarn import CanonicalRecords, Format, ops, reference

BITS = [2, 3, 4, 8]
GROUPS = [64, 128]
HEAD_DIMS = [64, 128, 256, 512]


def random_records(fmt: Format, tiles: int = 2, heads: int = 3) -> Tensor:
    """Any bytes make a record."""
    return torch.randint(0, 256, (tiles, heads, fmt.record_bytes), dtype=torch.uint8)


def equal(a: CanonicalRecords, b: CanonicalRecords) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("key_bits", "value_bits"), list(itertools.product(BITS, BITS)))
def test_fault13_every_format(key_bits: int, value_bits: int, group: int, head_dim: int) -> None:
    fmt = Format(f"kvarn_k{key_bits}v{value_bits}_g{group}", head_dim=head_dim)
    records = random_records(fmt, tiles=1, heads=2)
    canonical = ops.unpack_records(records, fmt)
    assert equal(canonical, reference.unpack_records(records, fmt))
    assert torch.equal(ops.pack_records(canonical, fmt), records)


def test_fault14_every_scale_field_is_in_its_place() -> None:
    """Non-square tiles, each field of a value of its own."""
    for group, dim in ((64, 128), (128, 64), (64, 512)):
        fmt = Format(f"kvarn_k4v2_g{group}", head_dim=dim)
        canonical = CanonicalRecords(
            torch.full((1, 1, dim, group), 9, dtype=torch.uint8),
            *(torch.full((1, 1, n), x).half() for n, x in ((dim, 1.0), (dim, 2.0), (group, 3.0))),
            torch.full((1, 1, group, dim), 2, dtype=torch.uint8),
            *(torch.full((1, 1, n), x).half() for n, x in ((group, 4.0), (group, 5.0), (dim, 6.0))),
        )
        record = ops.pack_records(canonical, fmt)[0, 0]
        key_codes, value_codes = group * dim // 2, group * dim // 4
        assert (record[:key_codes] == 0x99).all()
        at = key_codes
        for n, x in ((dim, 1.0), (dim, 2.0), (group, 3.0)):
            assert (record[at : at + 2 * n].view(torch.float16) == x).all()
            at += 2 * n
        assert (record[at : at + value_codes] == 0xAA).all()
        at += value_codes
        for n, x in ((group, 4.0), (group, 5.0), (dim, 6.0)):
            assert (record[at : at + 2 * n].view(torch.float16) == x).all()
            at += 2 * n
        assert at == fmt.record_bytes


def test_fault12_records_at_any_address() -> None:
    """Padding between blocks and heads, odd storage offsets; only the records change."""
    fmt = Format("kvarn_k3v2_g64", head_dim=64)
    records = random_records(fmt)
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


def test_fault10_block_stride_beyond_int32() -> None:
    fmt = Format("kvarn_k2v2_g64", head_dim=64)
    memory = torch.empty(FAR + fmt.record_bytes, dtype=torch.uint8)
    far = memory.as_strided((2, 1, fmt.record_bytes), (FAR, FAR, 1))
    records = random_records(fmt, 2, 1)
    canonical = ops.unpack_records(records, fmt)
    ops.pack_records(canonical, fmt, out=far)
    assert torch.equal(far, records)
    assert equal(ops.unpack_records(far, fmt), canonical)


@pytest.mark.parametrize("field", ["key_codes", "value_codes"])
def test_a_code_that_is_too_large(field: str) -> None:
    fmt = Format("kvarn_k4v2_g64", head_dim=64)
    canonical = ops.unpack_records(random_records(fmt), fmt)
    limit = 2 ** (fmt.key_bits if field == "key_codes" else fmt.value_bits)
    getattr(canonical, field)[1, 2, 63, 63] = limit
    out = torch.full((2, 3, fmt.record_bytes), 0xAB, dtype=torch.uint8)
    message = rf"^kvarn::pack_records: {field} must be less than {limit}, got {limit}$"
    with pytest.raises(RuntimeError, match=message):
        ops.pack_records(canonical, fmt, out=out)
    assert (out == 0xAB).all()


def test_no_records() -> None:
    fmt = Format("kvarn_k4v2_g64", head_dim=64)
    for shape in ((0, 3), (2, 0)):
        records = torch.empty(*shape, fmt.record_bytes, dtype=torch.uint8)
        canonical = ops.unpack_records(records, fmt)
        assert canonical.key_codes.shape == (*shape, 64, 64)
        assert ops.pack_records(canonical, fmt).shape == records.shape
