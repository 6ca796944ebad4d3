"""variance_normalize on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from views import FAR, same_bits, scattered

from kvarn import ops, reference


def tiles(count: int, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Gaussian with rows and columns of very different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, rows, cols, generator=generator)
    x *= (torch.randn(count, rows, 1, generator=generator)).exp()
    return x * (torch.randn(count, 1, cols, generator=generator)).exp()


def imbalance(x: Tensor) -> Tensor:
    rows, cols = x.std(-1), x.std(-2)
    return rows.amax(-1) / rows.amin(-1) + cols.amax(-1) / cols.amin(-1)


@pytest.mark.parametrize("shape", [(2, 2), (3, 5), (64, 128), (128, 64), (17, 130), (512, 128)])
@pytest.mark.parametrize("iterations", [0, 1, 8, 16])
def test_against_reference(shape: tuple[int, int], iterations: int) -> None:
    x = tiles(3, *shape)
    balanced, row_scale, col_scale = ops.variance_normalize(x, iterations=iterations)
    want, *_ = reference.variance_normalize(x.double(), iterations=iterations)
    product = balanced * row_scale[:, :, None] * col_scale[:, None, :]
    assert torch.allclose(product, x, rtol=1e-5)
    # Rounds that balance equally well differ in their scales, so these are not compared.
    assert torch.allclose(imbalance(balanced), imbalance(want).float(), rtol=1e-3)


def test_scales_of_one_round() -> None:
    """The first round by hand: columns first, n - 1, clipped factors."""
    x = tiles(1, 40, 24)[0] * 0.1
    _, row_scale, col_scale = ops.variance_normalize(x, iterations=1)
    col = x.std(0).clamp(1e-3, 1e3).log().clamp(-0.3, 10).exp()
    row = (x / col).std(1).clamp(1e-3, 1e3).log().clamp(-0.3, 10).exp()
    assert torch.allclose(col_scale, col, rtol=1e-5)
    assert torch.allclose(row_scale, row, rtol=1e-5)
    assert (col == col.min()).any() and (row > row.min()).any()  # the clip acts, and not on all


def test_fault06_best_round_not_last() -> None:
    """Every round by hand: the result is the best so far, and the last is not always the best."""
    x = tiles(20, 12, 8, seed=3) * 0.05
    log_col, log_row = torch.zeros(20, 1, 8), torch.zeros(20, 12, 1)
    best = imbalance(x)
    worse_later = torch.zeros(20, dtype=torch.bool)
    for n in range(1, 9):
        current = x / log_col.exp() / log_row.exp()
        log_col = (log_col + current.std(1, keepdim=True).clamp(1e-3, 1e3).log()).clamp(-0.3, 10)
        current = x / log_col.exp() / log_row.exp()
        log_row = (log_row + current.std(2, keepdim=True).clamp(1e-3, 1e3).log()).clamp(-0.3, 10)
        now = imbalance(x / log_col.exp() / log_row.exp())
        worse_later |= now > 1.01 * best
        best = torch.minimum(best, now)
        found = imbalance(ops.variance_normalize(x, iterations=n)[0])
        assert torch.allclose(found, best, rtol=1e-3)
    assert worse_later.any()


def test_fault06_same_in_any_batch() -> None:
    x = tiles(300, 16, 24)
    whole = ops.variance_normalize(x)
    for i in (0, 1, 77, 299):
        alone = ops.variance_normalize(x[i])
        assert all(torch.equal(a, w[i]) for a, w in zip(alone, whole, strict=True))


def test_leading_dimensions_and_dtypes() -> None:
    x = tiles(6, 8, 12).to(torch.bfloat16).view(2, 3, 8, 12)
    balanced, row_scale, col_scale = ops.variance_normalize(x)
    assert balanced.shape == x.shape
    assert row_scale.shape == (2, 3, 8) and col_scale.shape == (2, 3, 12)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = x.to(dtype)
        got = ops.variance_normalize(narrow)
        want = ops.variance_normalize(narrow.float())
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert ops.variance_normalize(x[:0])[0].shape == (0, 3, 8, 12)


def test_fault02_constant_rows_and_columns() -> None:
    """Their scales stay 1, and they do not stop the others from being balanced."""
    x = tiles(1, 30, 40, seed=5)[0]
    x[3] = 0.37
    x[7] = 0.0
    balanced, row_scale, col_scale = ops.variance_normalize(x)
    assert row_scale[3] == 1 and row_scale[7] == 1
    others = [i for i in range(30) if i not in (3, 7)]
    assert imbalance(balanced[others]) < 0.1 * imbalance(x[others])
    assert (balanced[7] == 0).all()
    x = x.T.contiguous()
    _, row_scale, col_scale = ops.variance_normalize(x)
    assert col_scale[3] == 1 and col_scale[7] == 1
    for constant in (0.0, 0.37, 6e4):
        balanced, row_scale, col_scale = ops.variance_normalize(torch.full((128, 128), constant))
        assert (balanced == constant).all() and (row_scale == 1).all() and (col_scale == 1).all()


def test_fault03_nan_stays_in_its_tile() -> None:
    x = tiles(5, 16, 16)
    want = ops.variance_normalize(x)
    x[2, 3, 4] = float("nan")
    got = ops.variance_normalize(x)
    for i in (0, 1, 3, 4):
        assert all(torch.equal(a[i], b[i]) for a, b in zip(got, want, strict=True))
    assert torch.equal(got[0][2].isnan(), x[2].isnan())
    assert (got[1][2] == 1).all() and (got[2][2] == 1).all()


def test_fault12_views() -> None:
    x = tiles(4, 8, 16)
    want = ops.variance_normalize(x)
    for view in (scattered(x), x.transpose(0, 1).contiguous().transpose(0, 1)):
        got = ops.variance_normalize(view)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_fault10_offsets_beyond_int32() -> None:
    memory = torch.empty(FAR + 8 * 16, dtype=torch.float16)
    x = memory.as_strided((2, 8, 16), (FAR, 16, 1))
    x.copy_(tiles(2, 8, 16))
    got = ops.variance_normalize(x)
    want = ops.variance_normalize(x.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_huge_and_tiny_values() -> None:
    for factor in (1e-30, 1e15):
        balanced, row_scale, col_scale = ops.variance_normalize(tiles(1, 16, 16)[0] * factor)
        for result in (balanced, row_scale, col_scale):
            assert result.isfinite().all()
