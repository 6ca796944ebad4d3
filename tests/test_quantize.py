"""quantize_tiles and dequantize_tiles on the CPU.

Accuracy (golden tiles, tables of bounds) is in test_golden.py and test_encoder.py. Here: agreement
with the reference for every format, degenerate input, and memory of every shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from encoders import by_ops, gaussian, relative_error, relative_mse, token_mse
from torch import Tensor
from views import FAR, foreign_bytes_untouched, same_bits, scattered, views_of

from kvarn import CanonicalRecords, Format, ops, reference

BITS = [2, 3, 4, 8]
GROUPS = [64, 128]
HEAD_DIMS = [64, 128, 256, 512]
FITS = ["unbiased", "minmax"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The reference is many small torch operations, which more threads only slow down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def named(bits: tuple[int, int], group: int = 64, head_dim: int = 64) -> Format:
    return Format(f"kvarn_k{bits[0]}v{bits[1]}_g{group}", head_dim=head_dim)


def uneven(fmt: Format, tiles: int = 2, heads: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values whose tokens and channels differ in size."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, tiles, fmt.group, heads, fmt.head_dim)
    x = torch.randn(shape, generator=generator)
    x *= (0.5 * torch.randn(2, tiles, fmt.group, heads, 1, generator=generator)).exp()
    x *= (0.5 * torch.randn(2, 1, 1, heads, fmt.head_dim, generator=generator)).exp()
    return x[0], x[1]


def differing(a: Tensor, b: Tensor) -> float:
    return float((a != b).float().mean())


# ---- Agreement with the reference ------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("fit", FITS)
def test_codes_of_the_reference(fit: str, bits: int, group: int, head_dim: int) -> None:
    """K and V are independent, so both with the same bits is every case."""
    fmt = named((bits, bits), group, head_dim)
    key, value = uneven(fmt, tiles=2 if head_dim < 256 else 1)
    want = reference.quantize(key, value, fmt, fit=fit, dtype=torch.float64)
    records = ops.quantize_tiles(key, value, fmt, fit=fit)
    got = ops.unpack_records(records, fmt)
    # Where rounding puts one code on the other side of a tie, the scale of its row and then those
    # of the columns move a little, and more codes follow. So a single tile may differ in more than
    # the .03 % of many, and most with 8 bits, where ties are close.
    assert differing(got.key_codes, want.key_codes) < (6e-3 if bits == 8 else 3e-3)
    assert differing(got.value_codes, want.value_codes) < (6e-3 if bits == 8 else 3e-3)
    exact = reference.dequantize(want, fmt)
    approx = ops.dequantize_tiles(records, fmt, dtype=torch.float32)
    assert relative_error(approx[0], exact[0]) < 0.03
    assert relative_error(approx[1], exact[1]) < 0.03


@pytest.mark.parametrize(("fit", "iterations"), [("unbiased", 0), ("unbiased", 4), ("minmax", 8)])
@pytest.mark.parametrize("bits", [(4, 2), (3, 3)])
def test_few_codes_differ_over_many_tiles(bits: tuple[int, int], fit: str, iterations: int) -> None:
    fmt = named(bits, 64, 128)
    key, value = uneven(fmt, tiles=12)
    want = reference.quantize(key, value, fmt, fit=fit, iterations=iterations, dtype=torch.float64)
    got = by_ops(key, value, fmt, fit, iterations)
    assert differing(got.canonical.key_codes, want.key_codes) < 3e-4
    assert differing(got.canonical.value_codes, want.value_codes) < 3e-4
    # A tile whose fit meets a tie (the reference in float32 meets the same ones) may differ as a
    # single tile may; all others have the same numbers. Which tiles meet one is a matter of the
    # last bits of the input, so of the CPU that torch runs on.
    exact = reference.dequantize(want, fmt)
    for approx, tiles in ((got.key, exact[0]), (got.value, exact[1])):
        errors = [relative_error(approx[i], tiles[i]) for i in range(len(tiles))]
        assert max(errors) < 0.05
        assert sorted(errors)[-3] < 1e-3


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("iterations", [0, 1, 2, 16])
def test_iterations(fit: str, iterations: int) -> None:
    fmt = named((3, 4), 64, 128)
    key, value = uneven(fmt, seed=1)
    want = reference.quantize(key, value, fmt, fit=fit, iterations=iterations)
    got = ops.unpack_records(
        ops.quantize_tiles(key, value, fmt, fit=fit, iterations=iterations), fmt
    )
    assert differing(got.key_codes, want.key_codes) < 2e-3
    assert differing(got.value_codes, want.value_codes) < 2e-3


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("bits", list(itertools.product(BITS, BITS)))
def test_fault13_key_and_value_bits_are_independent(bits: tuple[int, int], fit: str) -> None:
    fmt = named(bits, 64, 128)
    key, value = uneven(fmt)
    got = ops.unpack_records(ops.quantize_tiles(key, value, fmt, fit=fit), fmt)
    for side, own in enumerate(bits):
        same = named((own, own), 64, 128)
        want = ops.unpack_records(ops.quantize_tiles(key, value, same, fit=fit), same)
        fields = slice(4 * side, 4 * side + 4)
        assert all(same_bits(a, b) for a, b in zip(got[fields], want[fields], strict=True))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", list(itertools.product(BITS, BITS)))
def test_fault13_dequantize_every_format(bits: tuple[int, int], group: int, head_dim: int) -> None:
    """Any codes, scales of any sign; the bytes around the record are poison."""
    fmt = named(bits, group, head_dim)
    codes = torch.randint(0, 256, (1, 2, fmt.record_bytes), dtype=torch.uint8)
    canonical = CanonicalRecords(
        *(f if f.dtype == torch.uint8 else torch.randn(f.shape).half()
          for f in ops.unpack_records(codes, fmt))
    )  # fmt: skip
    records = scattered(ops.pack_records(canonical, fmt))
    for rotated in (False, True):
        got = ops.dequantize_tiles(records, fmt, dtype=torch.float32, rotated=rotated)
        want = reference.dequantize(canonical, fmt, rotated=rotated, dtype=torch.float64)
        assert relative_error(got[0], want[0]) < 1e-6
        assert relative_error(got[1], want[1]) < 1e-6


def test_fault14_dequantize_by_hand() -> None:
    """One element, straight from the formula, of a tile that is not square."""
    fmt = named((4, 2), 64, 128)
    canonical = ops.unpack_records(ops.quantize_tiles(*uneven(fmt), fmt), fmt)
    key, value = ops.dequantize_tiles(
        ops.pack_records(canonical, fmt), fmt, dtype=torch.float32, rotated=True
    )
    g, d = 37, 101
    c = CanonicalRecords(*(f.float()[1, 0] for f in canonical))
    want = (c.key_codes[d, g] + c.key_zero_point[d]) * c.key_channel_scale[d] * c.key_token_scale[g]
    assert torch.allclose(key[1, g, 0, d], want, rtol=1e-6)
    want = c.value_codes[g, d] + c.value_zero_point[g]
    want = want * c.value_token_scale[g] * c.value_channel_scale[d]
    assert torch.allclose(value[1, g, 0, d], want, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_16_bit_results_are_rounded_once(dtype: torch.dtype) -> None:
    fmt = named((4, 3), 128, 64)
    records = ops.quantize_tiles(*uneven(fmt), fmt)
    for rotated in (False, True):
        got = ops.dequantize_tiles(records, fmt, dtype=dtype, rotated=rotated)
        want = ops.dequantize_tiles(records, fmt, dtype=torch.float32, rotated=rotated)
        assert all(same_bits(a, b.to(dtype)) for a, b in zip(got, want, strict=True))


# ---- Numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_fault01_16_bit_input_is_widened_not_rounded(dtype: torch.dtype, fit: str) -> None:
    fmt = named((4, 2), 64, 128)
    key, value = (x.to(dtype) for x in uneven(fmt))
    wide = ops.quantize_tiles(key.float(), value.float(), fmt, fit=fit)
    assert torch.equal(ops.quantize_tiles(key, value, fmt, fit=fit), wide)
    rotated = [ops.hadamard_transform(x.float()) for x in (key, value)]
    assert torch.equal(ops.quantize_tiles(*rotated, fmt, fit=fit, rotated=True), wide)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.float16, 65504.0), (torch.bfloat16, 1e6), (torch.float32, 3e7), (torch.float32, 3e38)],
)
def test_fault01_large_values(dtype: torch.dtype, largest: float, bits: int, fit: str) -> None:
    """Rotated values beyond 65504 included. Values beyond 2^26 are limited to it."""
    fmt = named((bits, bits), 64, 256)
    signs = torch.randint(0, 2, (2, 1, 64, 1, 256)) * 2.0 - 1
    key, value = (signs * largest).to(dtype)
    got = by_ops(key, value, fmt, fit)
    for scale in (got.canonical[i] for i in (1, 2, 3, 5, 6, 7)):
        assert scale.isfinite().all()
    for approx, x in ((got.key, key), (got.value, value)):
        exact = x.float().clamp(-(2.0**26), 2.0**26)
        assert relative_error(approx, exact) < {2: 0.6, 3: 0.3, 4: 0.15, 8: 0.01}[bits]


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [65504.0, -6e4, 1.0, 1e-6, 1e6])
def test_fault01_fault02_constant_tiles(value: float, bits: int, fit: str) -> None:
    """All elements the same: one channel after the rotation; comes back within 16-bit rounding."""
    fmt = named((bits, bits), 128, 64)
    x = torch.full((1, 128, 2, 64), value)
    got = by_ops(x, x, fmt, fit)
    assert relative_error(got.key, x) < 2e-3
    # One channel spans the whole range of a value token, the others are at its end: the rounding of
    # the zero point shows in all of them.
    assert relative_error(got.value, x) < 6e-3
    assert got.key.isfinite().all() and got.value.isfinite().all()
    for scale in (got.canonical[i] for i in (1, 2, 3, 5, 6, 7)):
        assert scale.isfinite().all()


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("bits", BITS)
def test_fault02_zeros(bits: int, fit: str) -> None:
    fmt = named((bits, bits), 64, 128)
    zero = torch.zeros(2, 64, 1, 128)
    got = by_ops(zero, zero, fmt, fit)
    assert (got.key == 0).all() and (got.value == 0).all()
    assert all(f.isfinite().all() for f in got.canonical)
    # Zero tokens among others, negative zero too.
    key, value = uneven(fmt)
    key[0, 3] = value[0, 3] = 0.0
    key[1, 60] = value[1, 60] = -0.0
    got = by_ops(key, value, fmt, fit)
    for approx in (got.key, got.value):
        assert (approx[0, 3] == 0).all() and (approx[1, 60] == 0).all()
        assert (approx[0, 4].abs() > 0).all()


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("factor", [1e-6, 1e-4, 1e4])
def test_fault02_tiny_and_large_tiles(factor: float, bits: int, fit: str) -> None:
    """The relative error is that of a tile of size 1; with fit="minmax" not to the last digit, as
    the clips of the paper's normalization are absolute."""
    fmt = named((bits, bits), 128, 128)
    key, value = gaussian(4, 128, 128), gaussian(4, 128, 128, seed=1)
    usual = by_ops(key, value, fmt, fit)
    got = by_ops(key * factor, value * factor, fmt, fit)
    for approx, exact, unit in ((got.key, key, usual.key), (got.value, value, usual.value)):
        ratio = relative_mse(approx / factor, exact) / relative_mse(unit, exact)
        assert abs(ratio - 1) < (0.01 if fit == "unbiased" else 0.05)


@pytest.mark.parametrize("iterations", [0, 4])
@pytest.mark.parametrize("bits", BITS)
def test_fault02_scale_equivariance(bits: int, iterations: int) -> None:
    """Q(c*x) = c*Q(x), exactly for powers of two."""
    fmt = named((bits, bits), 64, 64)
    key, value = uneven(fmt)
    one = by_ops(key, value, fmt, "unbiased", iterations)
    for exponent in range(-12, 13):
        c = 2.0**exponent
        scaled = by_ops(key * c, value * c, fmt, "unbiased", iterations)
        assert torch.equal(scaled.canonical.key_codes, one.canonical.key_codes)
        assert torch.equal(scaled.canonical.value_codes, one.canonical.value_codes)
        assert torch.equal(scaled.key, c * one.key)
        assert torch.equal(scaled.value, c * one.value)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_fault03_a_bad_token_touches_no_other(bad: float, bits: int, fit: str) -> None:
    fmt = named((bits, bits), 64, 128)
    key, value = uneven(fmt, tiles=2, heads=3)
    clean = by_ops(key, value, fmt, fit)
    key[0, 17, 1, 5] = bad
    value[0, 17, 1, 90] = bad
    got = by_ops(key, value, fmt, fit)
    live = [g for g in range(64) if g != 17]
    for approx, exact, was in ((got.key, key, clean.key), (got.value, value, clean.value)):
        assert approx[0, 17, 1].isnan().all()
        assert torch.equal(approx[1], was[1])
        assert torch.equal(approx[0][:, [0, 2]], was[0][:, [0, 2]])
        now = token_mse(approx[0, live, 1], exact[0, live, 1]).mean()
        assert now < 1.05 * token_mse(was[0, live, 1], exact[0, live, 1]).mean()


@pytest.mark.parametrize("fit", FITS)
def test_fault03_dead_tokens_anywhere(fit: str) -> None:
    """The live tokens' codes and scales do not depend on where the dead ones stand, on which kind
    they are, or on what else they hold; any number of dead tokens will do."""
    fmt = named((4, 2), 64, 64)
    key, value = uneven(fmt, tiles=1)
    for count in (0, 1, 2, 15, 16, 17, 48, 62, 63, 64):
        results = []
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            live = torch.randperm(64, generator=generator)[: 64 - count].sort().values
            dead = torch.ones(64, dtype=torch.bool)
            dead[live] = False
            tile = torch.zeros(2, 1, 64, 1, 64)
            tile[:, :, live] = torch.stack([key, value])[:, :, : 64 - count]
            is_nan = dead & (torch.rand(64, generator=generator) < 0.5)
            tile[:, :, is_nan] = torch.randn(64, generator=generator) * 1e30
            tile[:, :, is_nan, :, 3] = float("nan")
            got = by_ops(tile[0], tile[1], fmt, fit)
            for approx in (got.key, got.value):
                assert approx[0, is_nan].isnan().all()
                assert (approx[0, dead & ~is_nan] == 0).all()
                assert approx[0, live].isfinite().all()
            c = got.canonical
            assert (c.key_codes[..., dead] == 0).all() and (c.value_codes[:, :, dead] == 0).all()
            results.append((
                c.key_codes[..., live], c.key_channel_scale, c.key_zero_point,
                c.key_token_scale[..., live], c.value_codes[:, :, live],
                c.value_token_scale[..., live], c.value_zero_point[..., live],
                c.value_channel_scale,
            ))  # fmt: skip
        for other in results[1:]:
            assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("bits", [(4, 2), (2, 2), (8, 8)])
def test_fault05_channel_bias(bits: tuple[int, int], fit: str) -> None:
    """Constant biases of 100 deviations in a few channels cost next to nothing with keys: a bias is
    constant over a row. Values share the range of a token, so there it is bounded only."""
    fmt = named(bits, 128, 128)
    key, value = gaussian(4, 128, 128), gaussian(4, 128, 128, seed=1)
    plain = by_ops(key, value, fmt, fit)
    bias = torch.zeros(128)
    bias[torch.tensor([3, 50, 77])] = torch.tensor([100.0, -100.0, 60.0])
    got = by_ops(key + bias, value + bias, fmt, fit)
    error = (got.key - (key + bias)).square().mean()
    assert error < 1.5 * (plain.key - key).square().mean() + 1e-4
    assert relative_mse(got.value, value + bias) < 1.1 * relative_mse(plain.value, value)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("bits", [(4, 2), (2, 2), (4, 4)])
@pytest.mark.parametrize("massive", [10.0, 1e2, 1e4, 6e4])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_massive_tokens(count: int, massive: float, bits: tuple[int, int], fit: str) -> None:
    """Tokens along one Walsh row do not destroy the others."""
    fmt = named(bits, 128, 128)
    key, value = gaussian(2, 128, 128), gaussian(2, 128, 128, seed=1)
    clean = by_ops(key, value, fmt, fit)
    loud_key, loud_value = key.clone(), value.clone()
    loud_key[:, :count] = loud_value[:, :count] = massive
    got = by_ops(loud_key, loud_value, fmt, fit)
    for approx, was, exact in ((got.key, clean.key, key), (got.value, clean.value, value)):
        assert relative_error(approx[:, 0], torch.tensor(massive).expand_as(approx[:, 0])) < 0.5
        now = token_mse(approx[:, count:], exact[:, count:]).mean()
        assert now < 2 * token_mse(was[:, count:], exact[:, count:]).mean()


@pytest.mark.parametrize("fit", FITS)
def test_fault07_same_in_any_batch_and_on_any_thread(fit: str) -> None:
    fmt = named((4, 2), 64, 64)
    key, value = uneven(fmt, tiles=9, heads=2)
    whole = ops.quantize_tiles(key, value, fmt, fit=fit)
    for i in (0, 4, 8):
        alone = ops.quantize_tiles(key[i : i + 1, :, 1:], value[i : i + 1, :, 1:], fmt, fit=fit)
        assert torch.equal(alone[0, 0], whole[i, 1])
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert torch.equal(ops.quantize_tiles(key, value, fmt, fit=fit), whole)


# ---- Memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_fault12_views(dtype: torch.dtype) -> None:
    fmt = named((3, 2), 64, 64)
    key, value = (x.to(dtype) for x in uneven(fmt, tiles=3, heads=2))
    want = ops.quantize_tiles(key, value, fmt)
    views = zip(views_of(key), views_of(value), strict=True)
    for (name, key_view), (_, value_view) in views:
        assert torch.equal(ops.quantize_tiles(key_view, value_view, fmt), want), name
        # K and V may lie differently.
        assert torch.equal(ops.quantize_tiles(key_view, value, fmt), want), name
    one = ops.quantize_tiles(key[:1, :, :1], value[:1, :, :1], fmt)
    expanded = ops.quantize_tiles(
        key[:1, :, :1].expand(3, 64, 2, 64), value[:1, :, :1].expand(3, 64, 2, 64), fmt
    )
    assert torch.equal(expanded, one.expand(3, 2, -1))


@pytest.mark.parametrize("bits", BITS)
def test_fault12_fault13_nothing_but_the_records_is_written(bits: int) -> None:
    fmt = named((bits, bits), 64, 64)
    key, value = uneven(fmt, tiles=2, heads=2)
    want = ops.quantize_tiles(key, value, fmt)
    for offset in range(4):
        out = scattered(torch.zeros_like(want), gap=7, offset=offset)
        assert ops.quantize_tiles(key, value, fmt, out=out) is out
        assert torch.equal(out, want)
        assert foreign_bytes_untouched(out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fault12_dequantize_into_views(dtype: torch.dtype) -> None:
    fmt = named((4, 2), 64, 64)
    records = ops.quantize_tiles(*uneven(fmt, tiles=2, heads=2), fmt)
    want = ops.dequantize_tiles(records, fmt, dtype=dtype)
    heads_first = torch.empty(2, 2, 64, 64, dtype=dtype).transpose(1, 2)
    for out in (scattered(torch.zeros_like(want[0])), heads_first):
        other = torch.zeros_like(want[1])
        ops.dequantize_tiles(records, fmt, out=(out, other))
        assert same_bits(out, want[0]) and same_bits(other, want[1])
        ops.dequantize_tiles(records, fmt, out=(other, out))
        assert same_bits(out, want[1]) and same_bits(other, want[0])
    into = scattered(torch.zeros_like(want[0]))
    ops.dequantize_tiles(records, fmt, out=(into, other))
    assert foreign_bytes_untouched(into)


def test_fault10_offsets_beyond_int32() -> None:
    fmt = named((2, 2))
    far = torch.empty(FAR + 64 * 64, dtype=torch.float16)
    for strides in ((FAR, 64, 64, 1), (64 * 64, 64, FAR, 1)):
        shape = (2, 64, 1, 64) if strides[0] == FAR else (1, 64, 2, 64)
        key = far.as_strided(shape, strides)
        key.copy_(torch.randn(shape))
        want = ops.quantize_tiles(key.contiguous(), key.contiguous(), fmt)
        assert torch.equal(ops.quantize_tiles(key, key, fmt), want)
        back = ops.dequantize_tiles(want, fmt)
        ops.dequantize_tiles(want, fmt, out=(key, torch.empty_like(back[1])))
        assert torch.equal(key, back[0])
    out = torch.empty(FAR + fmt.record_bytes, dtype=torch.uint8).as_strided(
        (2, 1, fmt.record_bytes), (FAR, FAR, 1)
    )
    x = torch.randn(2, 64, 1, 64)
    want = ops.quantize_tiles(x, x, fmt)
    ops.quantize_tiles(x, x, fmt, out=out)
    assert torch.equal(out, want)
    assert same_bits(ops.dequantize_tiles(out, fmt)[0], ops.dequantize_tiles(want, fmt)[0])


def test_no_tiles() -> None:
    fmt = named((4, 2))
    for shape in ((0, 64, 2, 64), (2, 64, 0, 64)):
        x = torch.empty(shape)
        records = ops.quantize_tiles(x, x, fmt)
        assert records.shape == (shape[0], shape[2], fmt.record_bytes)
        assert ops.dequantize_tiles(records, fmt)[0].shape == shape
