"""quantize_tiles and dequantize_tiles on CUDA: what the CPU makes of the same input.

The bounds of the method (golden tiles, errors, degenerate tiles) are those of test_golden.py and
test_encoder.py, which run on the GPU too.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator

import cuda_helpers as gpu
import pytest
import torch
from cuda_helpers import BITS, DEVICE, DTYPES, FITS, GROUPS, HEAD_DIMS, format_of, uneven
from encoders import by_ops, gaussian, relative_error, token_mse
from torch import Tensor
from views import foreign_bytes_untouched, same_bits, scattered

from kvarn import CanonicalRecords, Format, ops

pytestmark = pytest.mark.cuda

PAIRS = list(itertools.product(BITS, BITS))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The CPU's results are what these tests wait for."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(8, os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)


class Agreement:
    """Of records of the GPU with the CPU's, of the same tiles, over many cases.

    Sums in another order put a value near a rounding tie, now and then, on its other side; then the
    scales of its row and its column move. So the bounds are for millions of codes: at most one in
    10,000 differs (8 bits: ten), by one, and elements of the same code are within 1e-3. One whose
    code differs is off by a whole step: their number bounds these (with 2 bits, one code in 10,000
    is an error of 1e-2). With 8 bits a column scale that rounds to the other fp16 neighbour, 1/2048
    away, moves the codes of its column by up to 1/8: 5e-7 of difference in the scale before that
    costs one code in 3,000.
    """

    def __init__(self, most_steps: int = 1) -> None:
        self.most_steps = most_steps
        self.differing: dict[str, int] = {}
        self.codes: dict[str, int] = {}
        self.error = self.energy = 0.0

    def add(self, got: Tensor, want: Tensor, fmt: Format) -> None:
        ours, theirs = (ops.unpack_records(r.cpu(), fmt) for r in (got, want))
        approx, exact = (
            ops.dequantize_tiles(r.cpu(), fmt, dtype=torch.float32, rotated=True)
            for r in (got, want)
        )
        for side, bits in enumerate((fmt.key_bits, fmt.value_bits)):
            steps = (ours[4 * side].int() - theirs[4 * side].int()).abs()
            name = f"{'KV'[side]}{bits} g{fmt.group} D{fmt.head_dim}"
            assert steps.max() <= self.most_steps, name
            self.differing[name] = self.differing.get(name, 0) + int((steps > 0).sum())
            self.codes[name] = self.codes.get(name, 0) + steps.numel()
            # [N, Hkv, D, G] or [N, Hkv, G, D] -> [N, G, Hkv, D]
            same = (steps == 0).permute(0, 3, 1, 2) if side == 0 else (steps == 0).transpose(1, 2)
            difference = (approx[side] - exact[side])[same]
            self.error += float(difference.double().square().sum())
            self.energy += float(exact[side].double().square().sum())

    def check(self, limit: float = 1e-4) -> None:
        for eight_bits, most in ((False, limit), (True, max(limit, 1e-3))):
            names = [name for name in self.codes if (name[1] == "8") == eight_bits]
            codes = sum(self.codes[name] for name in names)
            share = {name: self.differing[name] / self.codes[name] for name in names}
            assert sum(self.differing[name] for name in names) <= most * codes, share
            assert max(share.values(), default=0) < 6 * most, share
        assert self.error <= 1e-6 * self.energy


# ---- quantize_tiles against the CPU ------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("fit", "iterations"), FITS)
def test_quantize_equals_the_cpu(fit: str, iterations: int, bits: int, dtype: torch.dtype) -> None:
    agreement = Agreement()
    how = {"fit": fit, "iterations": iterations}
    for group, head_dim in itertools.product(GROUPS, HEAD_DIMS):
        fmt = format_of((bits, bits), group, head_dim)
        key, value = (x.to(dtype) for x in uneven(fmt, 7, 5))
        want = ops.quantize_tiles(key, value, fmt, **how)
        agreement.add(ops.quantize_tiles(key.to(DEVICE), value.to(DEVICE), fmt, **how), want, fmt)
    agreement.check()


@pytest.mark.parametrize("bits", [(2, 2), (4, 2), (4, 4), (8, 8)])
@pytest.mark.parametrize("fit", ["unbiased", "minmax"])
def test_quantize_equals_the_cpu_with_massive_tokens(fit: str, bits: tuple[int, int]) -> None:
    """Where the guard takes another column scale than the normalization's.

    With 8 bits, a token scale and a zero point that round to other fp16 numbers, both for the
    column scales' sake, move a code by two now and then.
    """
    agreement = Agreement(most_steps=2)
    for group, head_dim in itertools.product(GROUPS, HEAD_DIMS):
        fmt = format_of(bits, group, head_dim)
        key, value = uneven(fmt, 12, 2, seed=3)
        cases = itertools.product((1, 3, 16), (10.0, 100.0, 1e4, 6e4))
        for tile, (count, massive) in enumerate(cases):
            key[tile, :count] = value[tile, :count] = massive
        want = ops.quantize_tiles(key, value, fmt, fit=fit)
        agreement.add(ops.quantize_tiles(key.to(DEVICE), value.to(DEVICE), fmt, fit=fit), want, fmt)
    agreement.check(limit=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fit", ["unbiased", "minmax"])
def test_quantize_rotated_input(fit: str, dtype: torch.dtype) -> None:
    agreement = Agreement()
    how = {"fit": fit, "rotated": True}
    for bits, group, head_dim in itertools.product([(4, 2), (3, 4)], GROUPS, HEAD_DIMS):
        fmt = format_of(bits, group, head_dim)
        key, value = (x.to(dtype) for x in uneven(fmt, 7, 5, seed=1))
        want = ops.quantize_tiles(key, value, fmt, **how)
        agreement.add(ops.quantize_tiles(key.to(DEVICE), value.to(DEVICE), fmt, **how), want, fmt)
    agreement.check()


def test_presets_with_their_defaults() -> None:
    agreement = Agreement()
    for name, head_dim in itertools.product(Format.presets(), HEAD_DIMS):
        fmt = Format(name, head_dim=head_dim)
        key, value = (x.to(torch.bfloat16) for x in uneven(fmt, 7, 5, seed=2))
        want = ops.quantize_tiles(key, value, fmt)
        agreement.add(ops.quantize_tiles(key.to(DEVICE), value.to(DEVICE), fmt), want, fmt)
    agreement.check()


@pytest.mark.parametrize("fit", ["unbiased", "minmax"])
@pytest.mark.parametrize(("group", "head_dim"), [(128, 128), (64, 64), (64, 256)])
def test_fault13_quantize_every_pair_of_bits(group: int, head_dim: int, fit: str) -> None:
    """A side's codes and scales are those of the format with its bits on both sides."""
    agreement = Agreement()
    alone = {}
    for bits in sorted(PAIRS, key=lambda pair: pair[0] != pair[1]):
        fmt = format_of(bits, group, head_dim)
        key, value = (x.half() for x in uneven(fmt, 7, 5))
        records = ops.quantize_tiles(key.to(DEVICE), value.to(DEVICE), fmt, fit=fit)
        agreement.add(records, ops.quantize_tiles(key, value, fmt, fit=fit), fmt)
        canonical = ops.unpack_records(records.cpu(), fmt)
        if bits[0] == bits[1]:
            alone[bits[0]] = canonical
        for side, own in enumerate(bits):
            fields = slice(4 * side, 4 * side + 4)
            want = alone[own][fields]
            assert all(same_bits(a, b) for a, b in zip(canonical[fields], want, strict=True))
    agreement.check()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (1, 5), (2, 3), (133, 1), (67, 4)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_fault06_grids_of_every_size(shape: tuple[int, int], head_dim: int) -> None:
    """A tile's record does not depend on the tiles and heads beside it."""
    fmt = format_of((4, 2), 64, head_dim)
    tiles, heads = shape
    key, value = (x.half().to(DEVICE) for x in uneven(fmt, 7, 5))
    index = torch.arange(tiles * heads, device=DEVICE) % 35
    flat = [x.transpose(1, 2).flatten(0, 1)[index] for x in (key, value)]
    batch = [x.view(tiles, heads, 64, head_dim).transpose(1, 2) for x in flat]
    records = ops.quantize_tiles(*batch, fmt)
    assert records.shape == (tiles, heads, fmt.record_bytes)
    once = ops.quantize_tiles(key, value, fmt).flatten(0, 1)[index]
    assert torch.equal(records.flatten(0, 1), once)
    for approx, exact in zip(
        ops.dequantize_tiles(records, fmt), ops.dequantize_tiles(once[:, None], fmt), strict=True
    ):
        assert approx.shape == (tiles, 64, heads, head_dim)
        assert same_bits(approx.transpose(1, 2).flatten(0, 1), exact[:, :, 0])


def test_fault10_70000_tiles() -> None:
    fmt = format_of((4, 2))
    key, value = (x.half() for x in uneven(fmt, 101, 1))
    agreement = Agreement()
    index = torch.arange(70_000, device=DEVICE) % 101
    records = ops.quantize_tiles(key.to(DEVICE)[index], value.to(DEVICE)[index], fmt)
    agreement.add(records[:101], ops.quantize_tiles(key, value, fmt), fmt)
    agreement.check()
    assert (records == records[:101][index]).all()
    first = ops.dequantize_tiles(records[:101], fmt)
    for got, tile in zip(ops.dequantize_tiles(records, fmt), first, strict=True):
        assert torch.equal(got, tile[index])


def test_fault10_70000_heads() -> None:
    fmt = format_of((2, 4))
    key, value = (x[:1].half().to(DEVICE) for x in uneven(fmt, 1, 101))
    index = torch.arange(70_000, device=DEVICE) % 101
    records = ops.quantize_tiles(key[:, :, index], value[:, :, index], fmt)
    assert torch.equal(records, ops.quantize_tiles(key, value, fmt)[:, index])
    first = ops.dequantize_tiles(records[:, :101], fmt)
    for got, tile in zip(ops.dequantize_tiles(records, fmt), first, strict=True):
        assert torch.equal(got, tile[:, :, index])


# ---- dequantize_tiles against the CPU ----------------------------------------------------------


def records_with_any_scales(fmt: Format, tiles: int, heads: int) -> Tensor:
    """On the CPU: random codes, scales of any sign."""
    canonical = ops.unpack_records(gpu.random_records(fmt, tiles, heads).cpu(), fmt)
    generator = torch.Generator().manual_seed(1)
    return ops.pack_records(
        CanonicalRecords(
            *(f if f.dtype == torch.uint8 else torch.randn(f.shape, generator=generator).half()
              for f in canonical)
        ),
        fmt,
    )  # fmt: skip


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", PAIRS)
def test_fault13_dequantize_every_format(bits: tuple[int, int], group: int, head_dim: int) -> None:
    """Into every dtype, in both bases; records and results lie among poison at odd addresses."""
    fmt = format_of(bits, group, head_dim)
    records = records_with_any_scales(fmt, 3, 3)
    at_odd_address = scattered(records.to(DEVICE))
    for rotated in (False, True):
        exact = ops.dequantize_tiles(records, fmt, dtype=torch.float32, rotated=rotated)
        for dtype, bound in ((torch.float32, 1e-6), (torch.float16, 1e-4), (torch.bfloat16, 5e-4)):
            want = [x.to(dtype) for x in exact]
            got = ops.dequantize_tiles(records.to(DEVICE), fmt, dtype=dtype, rotated=rotated)
            for a, b in zip(got, want, strict=True):
                assert a.dtype == dtype
                assert relative_error(a.cpu(), b) < bound
            out = tuple(scattered(torch.zeros_like(x)) for x in got)
            ops.dequantize_tiles(at_odd_address, fmt, rotated=rotated, out=out)
            for a, b in zip(out, got, strict=True):
                assert same_bits(a, b)
                assert foreign_bytes_untouched(a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fault14_dequantize_by_hand(dtype: torch.dtype) -> None:
    """Straight from the formula, tiles that are not square, every scale field on its own."""
    for group, head_dim in ((64, 128), (128, 64), (64, 256)):
        fmt = format_of((4, 2), group, head_dim)
        shapes = [f.shape for f in ops.unpack_records(gpu.random_records(fmt, 1, 1).cpu(), fmt)]
        for field in range(8):
            parts = [
                torch.ones(s, dtype=torch.uint8) if i in (0, 4) else torch.ones(s).half()
                for i, s in enumerate(shapes)
            ]
            line = torch.arange(parts[field].shape[-1])
            parts[field][..., :] = (line % 4 if field in (0, 4) else line / 64 - 1).half()
            made = CanonicalRecords(*parts)
            c = CanonicalRecords(*(f.double()[0, 0] for f in made))
            key = (c.key_codes.T + c.key_zero_point) * c.key_channel_scale
            key = key * c.key_token_scale[:, None]
            value = (c.value_codes + c.value_zero_point[:, None]) * c.value_token_scale[:, None]
            value = value * c.value_channel_scale
            got = ops.dequantize_tiles(
                ops.pack_records(made, fmt).to(DEVICE), fmt, dtype=dtype, rotated=True
            )
            # Small numbers of few bits: exact but for the last rounding.
            for a, b in zip(got, (key, value), strict=True):
                assert same_bits(a[0, :, 0].cpu(), b.float().to(dtype)), (group, head_dim, field)


# ---- Degenerate input --------------------------------------------------------------------------


@pytest.mark.parametrize("fit", ["unbiased", "minmax"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.float16, 65504.0), (torch.bfloat16, 1e6), (torch.float32, 3e7), (torch.float32, 3e38)],
)
def test_fault01_large_values(dtype: torch.dtype, largest: float, bits: int, fit: str) -> None:
    """Rotated values beyond 65504 included. Values beyond 2^26 are limited to it."""
    for head_dim in HEAD_DIMS:
        fmt = format_of((bits, bits), 64, head_dim)
        signs = torch.randint(0, 2, (2, 1, 64, 1, head_dim)) * 2.0 - 1
        key, value = (signs * largest).to(dtype).to(DEVICE)
        got = by_ops(key, value, fmt, fit)
        for scale in (got.canonical[i] for i in (1, 2, 3, 5, 6, 7)):
            assert scale.isfinite().all()
        for approx, x in ((got.key, key), (got.value, value)):
            exact = x.float().clamp(-(2.0**26), 2.0**26)
            assert relative_error(approx, exact) < {2: 0.6, 3: 0.3, 4: 0.15, 8: 0.01}[bits]


@pytest.mark.parametrize("fit", ["unbiased", "minmax"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fault01_fault02_constant_tiles(dtype: torch.dtype, bits: int, fit: str) -> None:
    for head_dim, group in itertools.product(HEAD_DIMS, GROUPS):
        fmt = format_of((bits, bits), group, head_dim)
        levels = torch.tensor([65504.0, -6e4, 1.0, 2.0**-20, 0.0, -0.0])
        x = levels.to(dtype)[:, None, None, None].repeat(1, group, 1, head_dim).to(DEVICE)
        got = by_ops(x, x, fmt, fit)
        assert all(field.isfinite().all() for field in got.canonical)
        # The rounding of a value token's zero point shows in all channels but one.
        for approx, bound in ((got.key, 2e-3), (got.value, 6e-3 * (head_dim / 64) ** 0.5)):
            for tile in range(4):
                assert relative_error(approx[tile], x[tile]) < bound
            assert (approx[4:] == 0).all()


@pytest.mark.parametrize("iterations", [0, 4])
@pytest.mark.parametrize("bits", BITS)
def test_fault02_scale_equivariance(bits: int, iterations: int) -> None:
    """Q(c*x) = c*Q(x), bit for bit for powers of two, in the unbiased fit."""
    for head_dim in HEAD_DIMS:
        fmt = format_of((bits, bits), 64, head_dim)
        c = torch.tensor([2.0**n for n in range(-12, 13)]).to(DEVICE)[:, None, None, None]
        key, value = (x[:1].to(DEVICE) * c for x in uneven(fmt, 7, 5))
        got = by_ops(key, value, fmt, "unbiased", iterations)
        for codes in (got.canonical.key_codes, got.canonical.value_codes):
            assert (codes == codes[12]).all()
        for approx in (got.key, got.value):
            assert torch.equal(approx, c * approx[12])


@pytest.mark.parametrize("fit", ["unbiased", "minmax"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_fault03_a_bad_token_touches_no_other(
    bad: float, dtype: torch.dtype, bits: int, fit: str
) -> None:
    """Other heads and tiles do not notice, bit for bit; in its own tile the others' error is that
    of the tile without it."""
    for head_dim, group in itertools.product(HEAD_DIMS, GROUPS):
        fmt = format_of((bits, bits), group, head_dim)
        key, value = (x[:2, :, :3].to(dtype).to(DEVICE) for x in uneven(fmt, 7, 5))
        clean = by_ops(key, value, fmt, fit)
        loud_key, loud_value = key.clone(), value.clone()
        loud_key[0, 17, 1, 5] = bad
        loud_value[0, 17, 1, head_dim - 3] = bad
        got = by_ops(loud_key, loud_value, fmt, fit)
        live = torch.arange(group, device=DEVICE) != 17
        for approx, x, was in ((got.key, key, clean.key), (got.value, value, clean.value)):
            assert approx[0, 17, 1].isnan().all()
            assert torch.equal(approx[1], was[1])
            assert torch.equal(approx[0][:, [0, 2]], was[0][:, [0, 2]])
            now = token_mse(approx[0, live, 1], x[0, live, 1].float()).mean()
            # Of one tile; test_encoder.py holds the mean of many to 1.05.
            assert now < 1.08 * token_mse(was[0, live, 1], x[0, live, 1].float()).mean()


@pytest.mark.parametrize("fit", ["unbiased", "minmax"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_fault03_any_number_of_dead_tokens(group: int, head_dim: int, fit: str) -> None:
    """Dead tokens read back as what they are, none of them changes a live one, and it does not
    matter which kind of dead they are."""
    fmt = format_of((4, 2), group, head_dim)
    key, value = (x[:1, :, :1] for x in uneven(fmt, 7, 5))
    counts = [0, 1, 2, 15, 16, 17, 31, 32, 33, group - 2, group - 1, group]
    generator = torch.Generator().manual_seed(0)
    dead = torch.zeros(len(counts), group, dtype=torch.bool)
    for tile, count in enumerate(counts):
        dead[tile, torch.randperm(group, generator=generator)[:count]] = True
    results = []
    for share in (0.0, 0.5, 1.0):
        is_nan = dead & (torch.rand(dead.shape, generator=generator) < share)
        tiles = []
        for x in (key, value):
            t = x.repeat(len(counts), 1, 1, 1)
            t[dead] = 0.0
            t[is_nan] = 1e30
            t[..., 3][is_nan] = math.nan
            tiles.append(t.to(DEVICE))
        got = by_ops(*tiles, fmt, fit)
        c = got.canonical
        for approx in (got.key, got.value):
            approx = approx[:, :, 0].cpu()
            assert approx[is_nan].isnan().all()
            assert (approx[dead & ~is_nan] == 0).all()
            assert approx[~dead].isfinite().all()
        key_codes, value_codes = c.key_codes[:, 0].mT.cpu(), c.value_codes[:, 0].cpu()
        assert (key_codes[dead] == 0).all()
        assert (value_codes[dead] == 0).all()
        results.append((
            key_codes, c.key_channel_scale.cpu(), c.key_zero_point.cpu(),
            c.key_token_scale[:, 0].cpu()[~dead], value_codes,
            c.value_token_scale[:, 0].cpu()[~dead], c.value_zero_point[:, 0].cpu()[~dead],
            c.value_channel_scale.cpu(),
        ))  # fmt: skip
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("fit", ["unbiased", "minmax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fault05_channel_bias(dtype: torch.dtype, fit: str) -> None:
    """Constant biases of 100 deviations in a few key channels cost next to nothing."""
    for bits in BITS:
        fmt = format_of((bits, bits), 128, 128)
        bias = torch.zeros(128)
        bias[torch.tensor([3, 50, 77])] = torch.tensor([100.0, -100.0, 60.0])
        x = gaussian(4, 128, 128)
        biased = (x + bias).to(dtype)
        plain = by_ops(x.to(DEVICE), x.to(DEVICE), fmt, fit).key.cpu()
        got = by_ops(biased.to(DEVICE), biased.to(DEVICE), fmt, fit).key.cpu()
        error = (got - biased.float()).square().mean()
        assert error < 1.5 * (plain - x).square().mean() + 1e-4


@pytest.mark.parametrize("fit", ["unbiased", "minmax"])
@pytest.mark.parametrize("bits", [(4, 2), (2, 2), (8, 8)])
def test_dead_and_massive_tokens_agree_with_the_cpu(bits: tuple[int, int], fit: str) -> None:
    """The guard against massive tokens decides as the CPU's does."""
    for head_dim, group in itertools.product(HEAD_DIMS, GROUPS):
        fmt = format_of(bits, group, head_dim)
        key, value = (x.clone() for x in uneven(fmt, 7, 5, seed=3))
        for x in (key, value):
            x[0, 3] = math.nan
            x[1, 7:20] = 0
            x[2, 20] = 500.0
            x[3, 1:17] = 6e4
            x[4, 9] = 100 * ops.hadamard_transform(torch.eye(head_dim)[9] * 8)
            x[5] *= 1e-4
        want = ops.quantize_tiles(key, value, fmt, fit=fit)
        got = ops.quantize_tiles(key.to(DEVICE), value.to(DEVICE), fmt, fit=fit).cpu()
        ours, theirs = (by_records(r, fmt) for r in (got, want))
        for a, b, x in zip(ours, theirs, (key, value), strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            live = x.isfinite().all(-1) & (x != 0).any(-1)
            a, b, x = a[live], b[live], x[live]
            # Rounds about as good as the best differ by a third in the column scales.
            assert token_mse(a, x).mean() == pytest.approx(float(token_mse(b, x).mean()), rel=0.03)


def by_records(records: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    return ops.dequantize_tiles(records, fmt, dtype=torch.float32)
