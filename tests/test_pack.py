"""pack_bits and unpack_bits on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from views import FAR, foreign_bytes_untouched, scattered

from kvarn import ops, reference

BITS = [2, 3, 4, 8]


def codes(shape: tuple[int, ...], bits: int) -> Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8)


@pytest.mark.parametrize("bits", BITS)
def test_fault08_every_length(bits: int) -> None:
    for count in range(131):
        x = codes((3, count), bits)
        packed = ops.pack_bits(x, bits)
        assert torch.equal(packed, reference.pack_bits(x, bits))
        assert torch.equal(ops.unpack_bits(packed, bits, count), x)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [2**16 - 1, 2**16, 2**16 + 1, 3 * 2**16 + 5])
def test_long_rows_are_cut_at_bytes(bits: int, count: int) -> None:
    x = codes((2, count), bits)
    packed = ops.pack_bits(x, bits)
    assert torch.equal(packed, reference.pack_bits(x, bits))
    assert torch.equal(ops.unpack_bits(packed, bits, count), x)


@pytest.mark.parametrize("bits", BITS)
def test_unpack_ignores_spare_bits(bits: int) -> None:
    x = codes((5, 3), bits)
    packed = ops.pack_bits(x, bits)
    spare = 8 * packed.shape[1] - 3 * bits
    assert ((packed[:, -1].int() >> (8 - spare)) == 0).all()
    packed[:, -1] |= (0xFF << (8 - spare)) & 0xFF
    assert torch.equal(ops.unpack_bits(packed, bits, 3), x)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [7, 64, 129])
def test_fault12_views_and_nothing_else_written(bits: int, count: int) -> None:
    x = codes((3, 2, count), bits)
    want = ops.pack_bits(x, bits)
    out = scattered(torch.zeros_like(want))
    ops.pack_bits(scattered(x), bits, out=out)
    assert torch.equal(out, want)
    assert foreign_bytes_untouched(out)
    back = scattered(torch.zeros_like(x))
    ops.unpack_bits(out, bits, count, out=back)
    assert torch.equal(back, x)
    assert foreign_bytes_untouched(back)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_code_that_is_too_large(bits: int) -> None:
    x = codes((4, 70_000), bits)
    out = torch.full((4, (70_000 * bits + 7) // 8), 0xAB, dtype=torch.uint8)
    x[3, 69_999] = 2**bits
    message = rf"^kvarn::pack_bits: codes must be less than {2**bits}, got {2**bits}$"
    with pytest.raises(RuntimeError, match=message):
        ops.pack_bits(x, bits, out=out)
    assert (out == 0xAB).all()


@pytest.mark.parametrize("bits", BITS)
def test_fault10_offsets_beyond_int32(bits: int) -> None:
    x = torch.empty(FAR + 40, dtype=torch.uint8).as_strided((2, 40), (FAR, 1))
    x.copy_(codes((2, 40), bits))
    packed = torch.empty(FAR + 40, dtype=torch.uint8).as_strided((2, 5 * bits), (FAR, 1))
    ops.pack_bits(x, bits, out=packed)
    assert torch.equal(packed, reference.pack_bits(x.contiguous(), bits))
    back = torch.empty_like(x.contiguous())
    assert torch.equal(ops.unpack_bits(packed, bits, 40, out=back), x)
