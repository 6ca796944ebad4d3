"""variance_normalize on CUDA: against the CPU, and the best round in any batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from cuda_helpers import DEVICE, DTYPES
from test_encoder import last_round
from test_normalize import imbalance, tiles
from torch import Tensor
from views import same_bits, scattered

from kvarn import ops

pytestmark = pytest.mark.cuda

SHAPES = [
    (2, 2), (3, 5), (64, 64), (64, 128), (128, 64), (128, 128), (256, 64), (17, 130), (128, 256),
    # More than the shared memory of a block holds, long rows, long columns.
    (512, 128), (300, 301), (2, 3000), (3000, 2), (1100, 100), (100, 1100), (1100, 1100),
]  # fmt: skip
RESIDENT_AND_NOT = [(64, 16), (300, 260)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("iterations", [0, 1, 8, 16])
def test_against_the_cpu(shape: tuple[int, int], iterations: int) -> None:
    x = tiles(3, *shape)
    balanced, row_scale, col_scale = (
        t.cpu() for t in ops.variance_normalize(x.to(DEVICE), iterations=iterations)
    )
    want, want_row, want_col = ops.variance_normalize(x, iterations=iterations)
    product = balanced * row_scale[:, :, None] * col_scale[:, None, :]
    assert torch.allclose(product, x, rtol=1e-5)
    # The deviation of two nearly equal numbers is their rounding errors: no imbalance then.
    if min(shape) > 2:
        assert torch.allclose(imbalance(balanced), imbalance(want), rtol=1e-3)
    # Rounds that balance equally well differ in their scales: these are compared for one round.
    if iterations <= 1:
        rtol = 1e-5 if max(shape) < 1000 else 1e-4  # of fp32 sums in another order
        assert torch.allclose(row_scale, want_row, rtol=rtol)
        assert torch.allclose(col_scale, want_col, rtol=rtol)


def test_scales_of_one_round() -> None:
    """The first round by hand: columns first, n - 1, clipped factors."""
    x = tiles(1, 40, 24)[0] * 0.1
    _, row_scale, col_scale = (t.cpu() for t in ops.variance_normalize(x.to(DEVICE), iterations=1))
    col = x.std(0).clamp(1e-3, 1e3).log().clamp(-0.3, 10).exp()
    row = (x / col).std(1).clamp(1e-3, 1e3).log().clamp(-0.3, 10).exp()
    assert torch.allclose(col_scale, col, rtol=1e-5)
    assert torch.allclose(row_scale, row, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 300])
def test_fault06_best_round_in_any_batch(count: int) -> None:
    """More rounds never make it worse, also where the last round is much worse than the best."""
    generator = torch.Generator().manual_seed(0)
    t = 0.1 * torch.randn(2 * count + 20, 64, 32, generator=generator)
    t[:, 3] *= 50
    t[:, :, 4] *= 30
    rounds = torch.stack([imbalance(last_round(t, n)) for n in range(7)])
    t = t[rounds[6] > 1.1 * rounds.amin(0)][:count]
    assert len(t) == count
    on_device = t.to(DEVICE)
    scores = [imbalance(ops.variance_normalize(on_device, iterations=n)[0].cpu()) for n in range(7)]
    for fewer, more in zip(scores, scores[1:], strict=False):
        assert (more <= fewer * (1 + 1e-4)).all()
    assert (imbalance(last_round(t, 6)) > scores[6] * 1.05).all()
    whole = ops.variance_normalize(on_device)
    for i in {0, count // 2, count - 1}:
        alone = ops.variance_normalize(on_device[i])
        assert all(torch.equal(a, w[i]) for a, w in zip(alone, whole, strict=True))


@pytest.mark.parametrize("shape", RESIDENT_AND_NOT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_widened(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = tiles(6, *shape).to(dtype).to(DEVICE)
    got = ops.variance_normalize(x.view(2, 3, *shape))
    want = ops.variance_normalize(x.float())
    for a, b in zip(got, want, strict=True):
        assert a.shape[:2] == (2, 3)
        assert same_bits(a.flatten(0, 1), b)


@pytest.mark.parametrize("leading", [(), (0,), (2, 0), (1,), (70_000,)])
def test_fault10_any_number_of_tiles(leading: tuple[int, ...]) -> None:
    some = tiles(101, 8, 12).to(DEVICE)
    count = torch.Size(leading).numel()
    index = torch.arange(count, device=DEVICE) % 101
    got = ops.variance_normalize(some[index].view(*leading, 8, 12))
    want = ops.variance_normalize(some)
    for a, b, shape in zip(got, want, ((8, 12), (8,), (12,)), strict=True):
        assert a.shape == (*leading, *shape)
        assert torch.equal(a.reshape(count, *shape), b[index])


def test_fault02_constant_rows_and_columns() -> None:
    """Their scales stay 1, and they do not stop the others from being balanced."""
    for shape in ((30, 40), (64, 128), (300, 260)):
        x = tiles(1, *shape, seed=5)[0]
        x[3] = 0.37
        x[7] = 0.0
        balanced, row_scale, _ = (t.cpu() for t in ops.variance_normalize(x.to(DEVICE)))
        assert row_scale[3] == 1
        assert row_scale[7] == 1
        others = [i for i in range(shape[0]) if i not in (3, 7)]
        assert imbalance(balanced[others]) < 0.1 * imbalance(x[others])
        assert (balanced[7] == 0).all()
        _, _, col_scale = (t.cpu() for t in ops.variance_normalize(x.T.contiguous().to(DEVICE)))
        assert col_scale[3] == 1
        assert col_scale[7] == 1
    for constant, side in itertools.product((0.0, 0.37, 6e4), (128, 300)):
        t = torch.full((side, side), constant, device=DEVICE)
        balanced, row_scale, col_scale = ops.variance_normalize(t)
        assert (balanced == constant).all()
        assert (row_scale == 1).all()
        assert (col_scale == 1).all()


def test_fault02_huge_and_tiny_values() -> None:
    for factor in (1e-30, 1e15):
        for result in ops.variance_normalize((tiles(1, 16, 16)[0] * factor).to(DEVICE)):
            assert result.isfinite().all()


@pytest.mark.parametrize("shape", RESIDENT_AND_NOT)
def test_fault03_nan_stays_in_its_tile(shape: tuple[int, int]) -> None:
    x = tiles(5, *shape).to(DEVICE)
    want = ops.variance_normalize(x)
    x[2, 3, 4] = float("nan")
    got = ops.variance_normalize(x)
    for i in (0, 1, 3, 4):
        assert all(torch.equal(a[i], b[i]) for a, b in zip(got, want, strict=True))
    assert torch.equal(got[0][2].isnan(), x[2].isnan())
    assert (got[1][2] == 1).all()
    assert (got[2][2] == 1).all()


def views(x: Tensor) -> list[Tensor]:
    return [scattered(x), x.transpose(0, 1).contiguous().transpose(0, 1), x[:1].expand(x.shape)]


@pytest.mark.parametrize("shape", RESIDENT_AND_NOT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fault12_views(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = tiles(4, *shape).to(dtype).to(DEVICE)
    for view in views(x):
        want = ops.variance_normalize(view.clone(memory_format=torch.contiguous_format))
        got = ops.variance_normalize(view)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("shape", [(300, 128, 128), (140, 300, 260)])
def test_fault07_repeats_are_bit_identical(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, device=DEVICE)
    first = ops.variance_normalize(x)
    for _ in range(10):
        again = ops.variance_normalize(x)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
