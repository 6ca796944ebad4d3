"""Every op again, in plain PyTorch: the definition that the kernels are tested against.

Written to be read, not to be fast, and never a fallback. Source of the method: KVarN, arXiv
2606.03458. Where a rounding or a degenerate input is at stake, the docstring says what is meant.

Symbols: D head dimension, G tokens of a tile, b bits, n = 2^b - 1 the largest code. A tile
``t [N, R, C]`` has rows (rounding groups) and columns: keys lie as [D, G] (rows = channels), values
as [G, D] (rows = tokens). A reader computes ``(q_ij + zp_i) * s_i * c_j``.

A *dead* token (a NaN, an Inf or nothing but zeros among its D values) takes no part in anything:
not in sums, means or deviations, not in ranges, not in the imbalance. ``rows [N, R]`` and
``cols [N, C]`` are the masks of the live ones (a key tile has dead columns, a value tile dead
rows).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvarn.format import DEFAULT_ITERATIONS, CanonicalRecords, Format

_INPUT_LIMIT = 2.0**26  # larger finite inputs are clamped
_HALF_MAX = 65504.0
_MEAN_FLOOR = 2.0**-10  # of a row's scale, relative to its mean: keeps zero points <= 2^10

# Step 2 of the unbiased fit: the share of a row's range that the codes cover, by row length.
_RANGE_FACTOR = {
    64: {2: 0.65, 3: 0.86, 4: 0.955, 8: 1.0},
    128: {2: 0.62, 3: 0.80, 4: 0.925, 8: 1.0},
    256: {2: 0.58, 3: 0.76, 4: 0.90, 8: 1.0},
    512: {2: 0.55, 3: 0.73, 4: 0.88, 8: 1.0},
}


# --------------------------------------------------------------------------------------------------
# Rotation


@functools.cache
def hadamard_matrix(dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The +-1 Walsh-Hadamard matrix [dim, dim] in Sylvester order: entry (i, j) is
    (-1)^popcount(i & j). Symmetric; ``H @ H = dim * I``."""
    h = torch.ones(1, 1, dtype=dtype)
    while h.shape[0] < dim:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h


def hadamard_transform(x: Tensor, *, scale: float | None = None) -> Tensor:
    """``scale * x @ H`` over the last dimension; ``scale=None`` is ``1/sqrt(D)`` (orthonormal, its
    own inverse). Computed in fp32 (fp64 for fp64 input), returned in the type of x."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    dim = x.shape[-1]
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    matrix = hadamard_matrix(dim, compute).to(x.device)
    return ((x.to(compute) @ matrix) * scale).to(x.dtype)


# --------------------------------------------------------------------------------------------------
# Variance normalization


def _std(x: Tensor, live: Tensor, dim: int) -> Tensor:
    """Unbiased (n-1) standard deviation of the live entries along dim; 0 if fewer than two.

    Taken about the first live entry, so that it is exactly 0 for equal ones.
    """
    first = x.gather(dim, live.to(torch.uint8).argmax(dim, keepdim=True))
    x, count = (x - first) * live, live.sum(dim)
    mean = (x.sum(dim) / count.clamp(min=1)).unsqueeze(dim)
    squares = ((x - mean) * live).square().sum(dim)
    return torch.where(count > 1, (squares / (count - 1).clamp(min=1)).sqrt(), 0.0)


def _ratio(std: Tensor, active: Tensor) -> Tensor:
    """max / max(min, 1e-8) over the active entries of the last dimension; 0 if there are none."""
    high = std.masked_fill(~active, -math.inf).amax(-1)
    low = std.masked_fill(~active, math.inf).amin(-1)
    return torch.where(active.any(-1), high / low.clamp(min=1e-8), 0.0)


def sinkhorn_scales(
    t: Tensor, rows: Tensor, cols: Tensor, iterations: int
) -> tuple[Tensor, Tensor]:
    """Row scales [N, R] and column scales [N, C] of the best round of the variance normalization.

    A round: ``lc += log(clip(col_std(cur), 1e-3, 1e3))``, lc clipped to [-0.3, 10],
    ``cur = t / exp(lc) / exp(lr)``; the same for lr with row_std. The round with the smallest
    ``imbalance = max/min of col_std + max/min of row_std`` wins, of equal ones (up to 1e-6:
    rounding errors must not decide) the latest; the all-ones scales are the first candidate. Dead
    tokens, and rows and columns whose deviation in t is 0, keep log scale 0 and stay out of the
    imbalance.
    """
    live = rows[:, :, None] & cols[:, None, :]
    active_rows = rows & (_std(t, live, 2) != 0)
    active_cols = cols & (_std(t, live, 1) != 0)

    def imbalance(cur: Tensor) -> Tensor:
        return _ratio(_std(cur, live, 1), active_cols) + _ratio(_std(cur, live, 2), active_rows)

    def step(log_scale: Tensor, std: Tensor, active: Tensor) -> Tensor:
        moved = (log_scale + std.clamp(1e-3, 1e3).log()).clamp(-0.3, 10.0)
        return torch.where(active, moved, log_scale)

    log_r, log_c = torch.zeros_like(t[:, :, 0]), torch.zeros_like(t[:, 0, :])
    best, best_r, best_c = imbalance(t), torch.ones_like(log_r), torch.ones_like(log_c)
    cur = t
    for _ in range(iterations):
        log_c = step(log_c, _std(cur, live, 1), active_cols)
        cur = t / log_c.exp()[:, None, :] / log_r.exp()[:, :, None]
        log_r = step(log_r, _std(cur, live, 2), active_rows)
        cur = t / log_c.exp()[:, None, :] / log_r.exp()[:, :, None]
        score = imbalance(cur)
        better = score <= best * (1 + 1e-6)
        best = torch.where(better, score, best)
        best_r = torch.where(better[:, None], log_r.exp(), best_r)
        best_c = torch.where(better[:, None], log_c.exp(), best_c)
    return best_r, best_c


def variance_normalize(tiles: Tensor, *, iterations: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """[..., R, C] -> (balanced [..., R, C], row_scale [..., R], col_scale [..., C]), fp32 (fp64 for
    fp64 input), ``tiles = balanced * row_scale * col_scale``. See `sinkhorn_scales`."""
    compute = torch.float64 if tiles.dtype == torch.float64 else torch.float32
    t = tiles.to(compute).flatten(0, -3) if tiles.dim() > 2 else tiles.to(compute)[None]
    rows = torch.ones(t.shape[:2], dtype=torch.bool)
    cols = torch.ones(t.shape[0], t.shape[2], dtype=torch.bool)
    r, c = sinkhorn_scales(t, rows, cols, iterations)
    balanced = t / c[:, None, :] / r[:, :, None]
    lead = tiles.shape[:-2]
    return balanced.view(tiles.shape), r.view(*lead, -1), c.view(*lead, -1)


# --------------------------------------------------------------------------------------------------
# Packing along a row


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., n] -> uint8 [..., ceil(n*bits/8)]: element i at bits i*bits .. i*bits+bits-1 of
    the row, low bits first; spare bits of the last byte are 0."""
    stream = _bits_of_codes(codes, bits)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 8))
    return _bytes_of_bits(stream)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack_bits`: uint8 [..., ceil(count*bits/8)] -> uint8 [..., count]."""
    stream = _bits_of_bytes(packed)[..., : count * bits].unflatten(-1, (count, bits))
    return _number_of_bits(stream)


def _bits_of_codes(codes: Tensor, bits: int) -> Tensor:
    return ((codes[..., None] >> torch.arange(bits, dtype=torch.uint8)) & 1).flatten(-2)


def _bits_of_bytes(packed: Tensor) -> Tensor:
    return _bits_of_codes(packed, 8)


def _bytes_of_bits(stream: Tensor) -> Tensor:
    return _number_of_bits(stream.unflatten(-1, (-1, 8)))


def _number_of_bits(bits: Tensor) -> Tensor:
    """The last dimension as a number, low bits first."""
    return (bits << torch.arange(bits.shape[-1], dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


# --------------------------------------------------------------------------------------------------
# The encoder


class Tile(NamedTuple):
    """What one tile [N, R, C] becomes: ``(codes + zero_point) * row_scale * col_scale``."""

    codes: Tensor  # uint8 [N, R, C]
    row_scale: Tensor  # fp16 [N, R]
    zero_point: Tensor  # fp16 [N, R], in code units
    col_scale: Tensor  # fp16 [N, C]


def dead_tokens(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Step 0. ``x [..., G, D]`` -> (x without its dead tokens, bad [..., G], zero [..., G]).

    A token is *bad* if any of its values is NaN or Inf, *zero* if all are 0; both are dead and are
    set to 0 here, where the masks keep them out. Other values are clamped to +-2^26.
    """
    bad = ~x.isfinite().all(-1)
    zero = (x == 0).all(-1)
    alive = x.clamp(-_INPUT_LIMIT, _INPUT_LIMIT)
    return torch.where((bad | zero)[..., None], 0.0, alive), bad, zero


def round_codes(x: Tensor, n: int) -> Tensor:
    """``clamp(rint(x), 0, n)``, halves to even; NaN (0/0 of a row with scale 0) becomes 0."""
    return x.nan_to_num(0.0).round().clamp(0, n)


def codes_of(x: Tensor, scale: Tensor, zero: Tensor, n: int) -> Tensor:
    """Codes of ``x [N, R, C]`` given ``scale, zero [N, R]``; 0 where the scale is 0."""
    safe = torch.where(scale > 0, scale, 1.0)
    q = round_codes((x - zero[:, :, None]) / safe[:, :, None], n)
    return q * (scale > 0)[:, :, None]


def row_range(x: Tensor, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest live entry of each row [N, R]; 0, 0 for a row without any."""
    live = rows[:, :, None] & cols[:, None, :]
    lo = x.masked_fill(~live, math.inf).amin(-1)
    hi = x.masked_fill(~live, -math.inf).amax(-1)
    some = live.any(-1)
    return torch.where(some, lo, 0.0), torch.where(some, hi, 0.0)


def min_max(
    t: Tensor, c: Tensor, rows: Tensor, cols: Tensor, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Asymmetric round-to-nearest of ``X = t / c``: per row ``s = (max - min)/n``, ``z = min``,
    ``q = clamp(rint((X - z)/s), 0, n)``. Nothing is rounded to 16 bits. -> (q, s, z)."""
    x = t / c[:, None, :]
    lo, hi = row_range(x, rows, cols)
    s = (hi - lo) / n
    return codes_of(x, s, lo, n), s, lo


def token_rms(t: Tensor, cols: Tensor) -> Tensor:
    """Closed-form column scale of a key tile: ``c_g = sqrt(mean_d t^2)``, divided by the power of
    two nearest to its geometric mean over the live tokens (rint of the mean log2); 1 where it is
    0; clamped to [2^-12, 2^14]."""
    c = t.square().mean(1).sqrt()
    counted = cols & (c > 0)
    log2 = torch.where(counted, c, 1.0).log2()
    shift = (log2.sum(-1) / counted.sum(-1).clamp(min=1)).round()
    return _clamp_scale(torch.where(counted, c * torch.exp2(-shift)[:, None], 1.0))


def channel_spread(t: Tensor, rows: Tensor) -> Tensor:
    """Closed-form column scale of a value tile: each token divided by its deviation, then per
    channel ``c_d = (max(ms - mu^2, ms/64) * ms)^(1/4)`` with ms the mean square, mu the mean over
    tokens. Tokens with deviation 0 are left out; 1 where c is 0; clamped to [2^-12, 2^14]."""
    sigma = _std(t, torch.ones_like(t, dtype=torch.bool), 2)
    counted = rows & (sigma > 0)
    count = counted.sum(-1, keepdim=True).clamp(min=1)
    y = t / torch.where(counted, sigma, math.inf)[:, :, None]
    ms, mu = y.square().sum(1) / count, y.sum(1) / count
    c = (torch.maximum(ms - mu.square(), ms / 64) * ms).sqrt().sqrt()
    return _clamp_scale(torch.where(c > 0, c, 1.0))


def _clamp_scale(c: Tensor) -> Tensor:
    return c.clamp(2.0**-12, 2.0**14)


def guarded_sinkhorn(
    t: Tensor, rows: Tensor, cols: Tensor, bits: int, iterations: int, key: bool
) -> Tensor:
    """Column scale of the variance normalization [N, C], or of the alternative (keys: token rms,
    values: ones) where the latter loses less than 0.75 as much.

    The loss is the sum over live tokens of ``|step|^2 / |t|^2``, where the step of an element is
    the range of its row of ``t / c`` (min-max coding divides it by the levels) times the scale of
    its column. One token of 100 sigma along a single Walsh row otherwise drives one column scale so
    high that all other tokens are destroyed. Among keys it takes one channel of D from the others,
    which with 2 or 3 bits is less than their rounding error: these keep the normalization.
    """
    _, sinkhorn = sinkhorn_scales(t, rows, cols, iterations)
    if key and bits < 4:
        return sinkhorn
    alternative = token_rms(t, cols) if key else torch.ones_like(sinkhorn)
    energy = t.square().sum(1 if key else 2)
    counted = (cols if key else rows) & (energy > 0)
    share = counted / torch.where(counted, energy, 1.0)  # of a token

    def loss(c: Tensor) -> Tensor:
        lo, hi = row_range(t / c[:, None, :], rows, cols)
        of_rows = ((hi - lo).square() * (rows if key else share)).sum(-1)
        of_cols = (c.square() * (share if key else cols)).sum(-1)
        return of_rows * of_cols

    take = loss(alternative) < 0.75 * loss(sinkhorn)
    return torch.where(take[:, None], alternative, sinkhorn)


def bring_to_size(t: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """The tiles times the power of two that brings the root mean square of their live entries to
    about 64: ``64 * 2^-rint(log2(mean square) / 2)``.

    The clips of the normalization are absolute, and the lower one (exp(-0.3)) would keep a small
    tile as it is: the unbiased fit of ``2^n * t`` has to be 2^n times that of t.
    """
    live = rows[:, :, None] & cols[:, None, :]
    mean = (t.square() * live).sum((1, 2)) / live.sum((1, 2)).clamp(min=1)
    exponent = (torch.where(mean > 0, mean, 4096.0).log2() / 2).round()
    return t * (64.0 * torch.exp2(-exponent))[:, None, None]


def without_gauge(c: Tensor, cols: Tensor) -> Tensor:
    """Sinkhorn's column scales divided by their geometric mean over the live columns.

    They are determined up to a factor, which the row scales take up, and ties of the best round
    move that factor. Column weights and rounding to fp16 would depend on it.
    """
    mean_log2 = (c.log2() * cols).sum(-1, keepdim=True) / cols.sum(-1, keepdim=True).clamp(min=1)
    return c * torch.exp2(-mean_log2)


class Moments(NamedTuple):
    """Weighted means [N, R] and central second moments of rows of X and of codes q."""

    mx: Tensor
    mq: Tensor
    xx: Tensor
    xq: Tensor
    qq: Tensor


def moments(x: Tensor, q: Tensor, w: Tensor) -> Moments:
    """Moments of the rows of ``x, q [N, R, C]`` with column weights ``w [N, C]`` that sum to 1."""
    w = w[:, None, :]
    mx, mq = (w * x).sum(-1), (w * q).sum(-1)
    dx, dq = x - mx[:, :, None], q - mq[:, :, None]
    # A residual mean of dx is rounding of mx; adding it makes rows with a large bias exact.
    mx = mx + (w * dx).sum(-1)
    dx = x - mx[:, :, None]
    return Moments(mx, mq, (w * dx * dx).sum(-1), (w * dx * dq).sum(-1), (w * dq * dq).sum(-1))


def least_squares(m: Moments, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset that predict X from the codes best: ``s = Sxq/Sqq``, ``z = mx - s*mq`` where
    both moments are positive; elsewhere s and z stay."""
    good = (m.xq > 0) & (m.qq > 0)
    fitted = m.xq / torch.where(good, m.qq, 1.0)
    return torch.where(good, fitted, s), torch.where(good, m.mx - fitted * m.mq, z)


def unbiased_scale(m: Moments, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Reverse regression: ``s' = Sxx/Sxq``, ``z' = mx - s'*mq``, so that about the row's mean
    ``<T_hat, T> = <T, T>`` and the mean itself is exact: the quantizer does not shrink the data.
    Elsewhere (a constant row) s and z stay."""
    good = (m.xx > 0) & (m.xq > 0)
    fitted = m.xx / torch.where(good, m.xq, 1.0)
    return torch.where(good, fitted, s), torch.where(good, m.mx - fitted * m.mq, z)


def column_weights(c: Tensor, cols: Tensor) -> Tensor:
    """``min(c_j^2, 16)`` of the live columns, normalized to sum 1 (all 0 if there are none)."""
    w = c.square().clamp(max=16.0) * cols
    total = w.sum(-1, keepdim=True)
    return w / torch.where(total > 0, total, 1.0)


def refit_columns(
    x: Tensor, y: Tensor, c: Tensor, m: Moments, rows: Tensor, cols: Tensor
) -> Tensor:
    """Step 4: ``c_j *= clamp(sum_i v_i X_ij y_ij / sum_i v_i y_ij^2, 1/2, 2)``, rounded to fp16.

    Row weight ``v_i = 1/max(Sxx_i, 2^-20 mx_i^2)``, 0 if that is 0 or the row a dead token. (2^-20
    is the square of the floor of step 7: a row that is constant up to rounding must not own the
    refit.)
    """
    spread = torch.maximum(m.xx, _MEAN_FLOOR**2 * m.mx.square())
    counted = rows & (spread > 0)
    v = (counted / torch.where(counted, spread, 1.0))[:, :, None]
    num, den = (v * x * y).sum(1), (v * y * y).sum(1)
    usable = cols & (den > 0)
    factor = torch.where(usable, num / torch.where(usable, den, 1.0), 1.0)
    return to_half(c * factor.clamp(0.5, 2.0))


def to_half(x: Tensor) -> Tensor:
    """Rounded to fp16 (nearest even, clamped to +-65504), kept in its type."""
    return x.clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16).to(x.dtype)


def unbiased(
    t: Tensor, c: Tensor, rows: Tensor, cols: Tensor, bits: int, key: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Steps 1-6 of the unbiased fit, from a column scale ``c [N, C]`` on.

    -> (codes, s', z', column scale, row means mx): everything that `store` needs.
    """
    n = 2**bits - 1
    c = to_half(_clamp_scale(c))  # end of step 1
    x, w = t / c[:, None, :], column_weights(c, cols)

    # Step 2: a range narrower than min-max, centred.
    lo, hi = row_range(x, rows, cols)
    s = _RANGE_FACTOR[t.shape[2]][bits] * (hi - lo) / n
    z = (hi + lo) / 2 - s * n / 2

    # Step 3: codes and least squares, twice.
    for _ in range(2):
        q = codes_of(x, s, z, n)
        m = moments(x, q, w)
        s, z = least_squares(m, s, z)

    # Step 4: the column scale from the codes.
    c = refit_columns(x, q * s[:, :, None] + z[:, :, None], c, m, rows, cols)
    x, w = t / c[:, None, :], column_weights(c, cols)

    # Step 5: rows again (the last codes are those of this s, z), then the scale that does not
    # shrink.
    m = moments(x, codes_of(x, s, z, n), w)
    s, z = least_squares(m, s, z)
    q = codes_of(x, s, z, n)
    m = moments(x, q, w)
    s_out, z_out = unbiased_scale(m, s, z)

    # Step 6, values: codes again, shifted against the mean error of their channel.
    if not key:
        counted = rows & (s_out > 0)
        safe = torch.where(s_out > 0, s_out, 1.0)[:, :, None]
        error = ((x - z_out[:, :, None]) / safe - q).clamp(-1.0, 1.0)
        u = (error * counted[:, :, None]).sum(1) / counted.sum(-1, keepdim=True).clamp(min=1)
        safe = torch.where(s > 0, s, 1.0)[:, :, None]
        q = round_codes((x - z[:, :, None]) / safe + u[:, None, :], n) * (s > 0)[:, :, None]
        m = moments(x, q, w)
        s_out, z_out = unbiased_scale(m, s, z)
    return q, s_out, z_out, c, m.mx


def store(
    t: Tensor,
    q: Tensor,
    s: Tensor,
    z: Tensor,
    c: Tensor,
    mx: Tensor,
    rows: Tensor,
    cols: Tensor,
    bits: int,
) -> Tile:
    """Step 7, both fits: floor, share a power of two between the axes, round to 16 bits.

    - Floor ``s >= 2^-10 |mx|``. Where it acts the centre of the range stays,
      ``z'' = z + s*n/2 - s''*2^(b-1)``, and the codes are taken again. So zero points stay below
      about 2^10, and a constant row reads back as itself within 16-bit rounding.
    - ``k = rint((log2 max s - log2 max c)/2)`` over live rows and columns; s is stored divided by
      2^k, c multiplied: the product is what counts, each factor stays in range.
    - ``zp = z / (s16 * 2^k)``, with the stored scale; 0 where that is 0.
    """
    n = 2**bits - 1
    floor = _MEAN_FLOOR * mx.abs()
    low = rows & (s < floor)
    z = torch.where(low, z + s * (n / 2) - floor * 2 ** (bits - 1), z)
    s = torch.where(low, floor, s)
    again = codes_of(t / c[:, None, :], s, z, n)
    q = torch.where(low[:, :, None], again, q)

    max_s = (s * rows).amax(-1)
    max_c = (c * cols).amax(-1)
    usable = (max_s > 0) & (max_c > 0)
    ratio = torch.where(usable, max_s, 1.0).log2() - torch.where(usable, max_c, 1.0).log2()
    shift = torch.exp2((ratio / 2).round())[:, None]
    s16, c16 = to_half(s / shift), to_half(c * shift)
    stored = s16 * shift
    zp = torch.where(stored > 0, z / torch.where(stored > 0, stored, 1.0), 0.0)
    half = torch.float16
    return Tile(q.to(torch.uint8), s16.to(half), to_half(zp).to(half), c16.to(half))


def encode(
    t: Tensor, rows: Tensor, cols: Tensor, bits: int, fit: str, iterations: int, key: bool
) -> Tile:
    """Codes and scales of rotated tiles ``t [N, R, C]`` whose live tokens the masks name."""
    if fit == "minmax":
        c = guarded_sinkhorn(t, rows, cols, bits, iterations, key)
        q, s, z = min_max(t, c, rows, cols, 2**bits - 1)
        lo, hi = row_range(t / c[:, None, :], rows, cols)
        return store(t, q, s, z, c, (lo + hi) / 2, rows, cols, bits)
    if iterations > 0:
        sized = bring_to_size(t, rows, cols)
        c = without_gauge(guarded_sinkhorn(sized, rows, cols, bits, iterations, key), cols)
    else:
        c = token_rms(t, cols) if key else channel_spread(t, rows)
    q, s, z, c, mx = unbiased(t, c, rows, cols, bits, key)
    return store(t, q, s, z, c, mx, rows, cols, bits)


def quantize(
    key: Tensor,
    value: Tensor,
    fmt: Format,
    *,
    fit: str = "unbiased",
    iterations: int | None = None,
    rotated: bool = False,
    dtype: torch.dtype = torch.float32,
) -> CanonicalRecords:
    """Key and value ``[N, G, Hkv, D]`` -> canonical codes and scales, computed in ``dtype``.

    A dead token is judged on the row as given and gets codes 0 and token scale NaN (bad) or 0
    (zero); no live token depends on it. ``pack_records`` makes the record bytes of the result.
    """
    if iterations is None:
        iterations = DEFAULT_ITERATIONS[fit]
    tokens, heads, dim = fmt.group, key.shape[2], fmt.head_dim

    def side(x: Tensor, bits: int, is_key: bool) -> Tile:
        x, bad, zero = dead_tokens(x.permute(0, 2, 1, 3).reshape(-1, tokens, dim).to(dtype))
        t = x if rotated else hadamard_transform(x)
        live, every = ~(bad | zero), torch.ones(t.shape[0], dim, dtype=torch.bool)
        mark = torch.where(bad, math.nan, 0.0).to(torch.float16)
        if is_key:
            tile = encode(t.transpose(1, 2), every, live, bits, fit, iterations, True)
            codes = tile.codes * live[:, None, :]
            token_scale = torch.where(live, tile.col_scale, mark)
            return Tile(codes, tile.row_scale, tile.zero_point, token_scale)
        tile = encode(t, live, every, bits, fit, iterations, False)
        codes = tile.codes * live[:, :, None]
        token_scale = torch.where(live, tile.row_scale, mark)
        return Tile(codes, token_scale, tile.zero_point * live, tile.col_scale)

    k = side(key, fmt.key_bits, True)
    v = side(value, fmt.value_bits, False)
    # Tile and CanonicalRecords have their fields in the same order.
    return CanonicalRecords(*(field.unflatten(0, (-1, heads)) for field in (*k, *v)))


def dequantize(
    canonical: CanonicalRecords,
    fmt: Format,
    *,
    rotated: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Canonical codes and scales -> key, value ``[N, G, Hkv, D]``, in ``dtype``.

    ``key[g, d] = (q[d, g] + zp[d]) * s_chan[d] * s_tok[g]`` and
    ``value[g, d] = (q[g, d] + zp[g]) * s_tok[g] * s_chan[d]``, multiplied from left to right, then
    rotated back unless ``rotated``.
    """

    def tile(codes: Tensor, scale: Tensor, zero: Tensor, col_scale: Tensor) -> Tensor:
        x = (codes.to(dtype) + zero.to(dtype)[..., None]) * scale.to(dtype)[..., None]
        return x * col_scale.to(dtype)[..., None, :]

    key = tile(*canonical[:4]).permute(0, 3, 1, 2)
    value = tile(*canonical[4:]).permute(0, 2, 1, 3)
    if rotated:
        return key, value
    return hadamard_transform(key), hadamard_transform(value)


# --------------------------------------------------------------------------------------------------
# The record


def key_position(token: Tensor, channel: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(lane, half2 number of the lane, half of it) that holds the K code of (token, channel).

    The A operand of mma.m16n8k16: lane (r, c) = divmod(lane, 4) owns rows r, r + 8 and columns 2c,
    2c+1, 2c+8, 2c+9 of a 16 x 16 fragment. Rows stand for tokens 64i + 8r + 0..7, columns for
    channels 32j + 8c + 0..7, two and four at a time.
    """
    row_tile = token // 64 * 4 + token % 8 // 2
    col_tile = channel // 32 * 2 + channel % 8 // 4
    lane = token % 64 // 8 * 4 + channel % 32 // 8
    register = token % 2 + channel % 4 // 2 * 2
    return lane, 4 * (row_tile * (head_dim // 16) + col_tile) + register, channel % 2


def value_position(token: Tensor, channel: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same for V, whose fragment rows are channels and whose columns are tokens."""
    col_tile = token // 64 * 4 + token % 8 // 2
    row_tile = channel // 64 * 4 + channel % 8 // 2
    column = token % 64 // 8
    lane = channel % 64 // 8 * 4 + column // 2
    register = channel % 2 + token % 2 * 2
    return lane, 4 * (col_tile * (head_dim // 16) + row_tile) + register, column % 2


@functools.lru_cache(maxsize=64)
def code_bit_addresses(group: int, head_dim: int, bits: int, key: bool) -> Tensor:
    """Where bit j of the code of (token, channel) lies in the codes of a tile: int64 [G, D, bits],
    counted in bits from the first byte, low bits first.

    A lane's half2 are fields of two half-words: 16/bits to a 32-bit word, each field's halves 16
    bits apart. With 3 bits a unit of three words holds 16: five fields a half-word each, and of
    the 16th bit j stands at the top (bit 15) of the half-words of word j. A lane has 16 bytes of
    every 512.
    """
    token = torch.arange(group)[:, None]
    channel = torch.arange(head_dim)[None, :]
    position = key_position if key else value_position
    lane, index, half = position(token, channel, head_dim)
    lane, index, half = (p.expand(group, head_dim)[..., None] for p in (lane, index, half))
    j = torch.arange(bits)
    if bits == 3:
        unit, field = index // 16, index % 16
        spread = field == 15
        word = 3 * unit + torch.where(spread, j, field // 5)
        bit = torch.where(spread, 15, field % 5 * 3 + j)
    else:
        fields = 16 // bits
        word = index // fields
        bit = index % fields * bits + j
    byte = word // 4 * 512 + lane * 16 + word % 4 * 4
    return byte * 8 + bit + 16 * half


def pack_codes(codes: Tensor, bits: int, key: bool) -> Tensor:
    """Codes [..., G, D], one a byte -> bytes in fragment order [..., G*D*bits/8]."""
    group, dim = codes.shape[-2:]
    address = code_bit_addresses(group, dim, bits, key).flatten()
    stream = _bits_of_codes(codes.flatten(-2), bits)
    placed = torch.empty_like(stream)
    placed[..., address] = stream
    return _bytes_of_bits(placed)


def unpack_codes(packed: Tensor, group: int, head_dim: int, bits: int, key: bool) -> Tensor:
    """The inverse of `pack_codes`: codes uint8 [..., G, D]."""
    address = code_bit_addresses(group, head_dim, bits, key)
    return _number_of_bits(_bits_of_bytes(packed)[..., address])


def pack_records(canonical: CanonicalRecords, fmt: Format) -> Tensor:
    """Canonical codes and scales -> records uint8 [N, Hkv, record_bytes], format version 1:
    K codes | s_chan [D] | zp [D] | s_tok [G] | V codes | s_tok [G] | zp [G] | s_chan [D]."""
    key_codes = pack_codes(canonical.key_codes.transpose(-1, -2), fmt.key_bits, True)
    value_codes = pack_codes(canonical.value_codes, fmt.value_bits, False)
    key_scales = [f.contiguous().view(torch.uint8) for f in canonical[1:4]]
    value_scales = [f.contiguous().view(torch.uint8) for f in canonical[5:8]]
    return torch.cat([key_codes, *key_scales, value_codes, *value_scales], -1)


def unpack_records(records: Tensor, fmt: Format) -> CanonicalRecords:
    """Records uint8 [N, Hkv, record_bytes] -> canonical codes and scales."""
    g, d = fmt.group, fmt.head_dim
    key_bytes, value_bytes = g * d * fmt.key_bits // 8, g * d * fmt.value_bits // 8
    sizes = [key_bytes, 2 * d, 2 * d, 2 * g, value_bytes, 2 * g, 2 * g, 2 * d]
    fields = list(records.split(sizes, -1))
    fields[0] = unpack_codes(fields[0], g, d, fmt.key_bits, True).transpose(-1, -2)
    fields[4] = unpack_codes(fields[4], g, d, fmt.value_bits, False)
    for i in (1, 2, 3, 5, 6, 7):
        fields[i] = fields[i].clone(memory_format=torch.contiguous_format).view(torch.float16)
    return CanonicalRecords(*fields)


def quantize_tiles(
    key: Tensor,
    value: Tensor,
    fmt: Format,
    *,
    fit: str = "unbiased",
    iterations: int | None = None,
    rotated: bool = False,
) -> Tensor:
    """Key and value [N, G, Hkv, D] -> records uint8 [N, Hkv, record_bytes]; see `quantize`."""
    made = quantize(key, value, fmt, fit=fit, iterations=iterations, rotated=rotated)
    return pack_records(made, fmt)


def dequantize_tiles(
    records: Tensor,
    fmt: Format,
    *,
    dtype: torch.dtype = torch.float16,
    rotated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Records -> key, value [N, G, Hkv, D]; see `dequantize`."""
    key, value = dequantize(unpack_records(records, fmt), fmt, rotated=rotated)
    return key.to(dtype), value.to(dtype)


# --------------------------------------------------------------------------------------------------
# The paged cache


def append_kv(
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    staging: Tensor,
    block_slot: Tensor,
    fmt: Format,
) -> None:
    """key, value [T, Hkv, D] -> rows of staging [slots, 2, Hkv, G, D], unchanged, in place.
    ``slot_mapping[i] = block*G + row``; negative: padding, skipped."""
    for i, where in enumerate(slot_mapping.tolist()):
        if where >= 0:
            block, row = divmod(where, fmt.group)
            staging[int(block_slot[block]), 0, :, row] = key[i]
            staging[int(block_slot[block]), 1, :, row] = value[i]


def seal_blocks(
    staging: Tensor,
    slots: Tensor,
    blocks: Tensor,
    cache: Tensor,
    fmt: Format,
    *,
    fit: str = "unbiased",
    iterations: int | None = None,
    count: Tensor | None = None,
) -> None:
    """``cache[blocks[i]]`` = records of ``staging[slots[i]]`` for i < count, in place; an entry
    whose slot or block is negative is skipped."""
    limit = len(slots) if count is None else int(count)
    for slot, block in list(zip(slots.tolist(), blocks.tolist(), strict=True))[:limit]:
        if slot >= 0 and block >= 0:
            tile = staging[slot].transpose(1, 2)[:, None]  # [2, 1, G, Hkv, D]
            cache[block] = quantize_tiles(tile[0], tile[1], fmt, fit=fit, iterations=iterations)[0]


def _block(
    cache: Tensor,
    staging: Tensor | None,
    block_slot: Tensor | None,
    block: int,
    fmt: Format,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, bool]:
    """Key, value [G, Hkv, D] of a block and whether they are in the rotated basis (a record)."""
    slot = -1 if staging is None or block_slot is None else int(block_slot[block])
    if staging is not None and slot >= 0:
        key, value = staging[slot].to(dtype).transpose(1, 2)
        return key, value, False
    canonical = unpack_records(cache[block][None], fmt)
    key, value = dequantize(canonical, fmt, rotated=True, dtype=dtype)
    return key[0], value[0], True


def decode_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: Format,
    *,
    staging: Tensor | None = None,
    block_slot: Tensor | None = None,
    cu_query_lens: Tensor | None = None,
    causal: bool = True,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """``softmax(sm_scale * q.k [soft-capped] + mask) . v`` over records and staged tiles.

    q [T, Hq, D]; -> (out [T, Hq, D], lse [T, Hq], natural log), both in ``dtype`` and not rounded.
    The n query tokens of a sequence are its last ones: query i stands at ``p = seq_len - n + i``
    and sees keys j with ``j <= p`` if causal and ``j >= p - window_left`` if that is not negative.
    A sink is one more logit that only the denominator (and so the LSE) sees. A query without
    visible keys has output 0, and LSE -inf or the sink's logit; a sequence of length 0 always LSE
    -inf.

    Records are in the rotated basis (scores from ``q H``), staged tiles in the original one (scores
    from q). Outputs are linear: the records' part is summed in the rotated basis and rotated once.
    """
    total, q_heads, dim = q.shape
    kv_heads = cache.shape[1]
    group_of = torch.arange(q_heads) // (q_heads // kv_heads)
    scale = 1.0 / math.sqrt(dim) if sm_scale is None else sm_scale
    starts = list(range(total + 1)) if cu_query_lens is None else cu_query_lens.tolist()
    out = torch.zeros(total, q_heads, dim, dtype=dtype)
    lse = torch.full((total, q_heads), -math.inf, dtype=dtype)

    for b, length in enumerate(seq_lens.tolist()):
        queries = q[starts[b] : starts[b + 1]].to(dtype)
        rotated_queries = hadamard_transform(queries)
        count = len(queries)
        if length == 0 or count == 0:
            continue
        blocks = block_table[b, : -(-length // fmt.group)].tolist()
        parts = [_block(cache, staging, block_slot, block, fmt, dtype) for block in blocks]

        logits = []
        for key, _, in_rotated_basis in parts:
            basis = rotated_queries if in_rotated_basis else queries
            logits.append(torch.einsum("qhd,ghd->qhg", basis, key[:, group_of]) * scale)
        score = torch.cat(logits, -1)
        if logits_soft_cap > 0:
            score = logits_soft_cap * (score / logits_soft_cap).tanh()

        position = length - count + torch.arange(count)[:, None]
        token = torch.arange(score.shape[-1])[None, :]
        visible = (token < length).expand(count, -1)
        if causal:
            visible = visible & (token <= position)
        if window_left >= 0:
            visible = visible & (token >= position - window_left)
        visible = visible[:, None, :].expand_as(score)
        score = torch.where(visible, score, -math.inf)

        everything = score
        if sinks is not None:
            sink = sinks.to(dtype)[None, :, None].expand(count, -1, 1)
            everything = torch.cat([score, sink], -1)
        total_lse = everything.logsumexp(-1)
        # exp(-inf - -inf) of a query that sees nothing is not a number; its weights are 0.
        weight = torch.where(visible, (score - total_lse[..., None]).exp(), 0.0)

        sums = {True: torch.zeros_like(queries), False: torch.zeros_like(queries)}
        for i, (_, value, in_rotated_basis) in enumerate(parts):
            columns = slice(i * fmt.group, (i + 1) * fmt.group)
            for query in range(count):
                # What a query does not see may be NaN, and 0 * NaN must not reach the sum.
                seen = visible[query, 0, columns]
                picked = torch.where(seen[:, None, None], value, 0.0)[:, group_of]
                part = torch.einsum("hg,ghd->hd", weight[query, :, columns], picked)
                sums[in_rotated_basis][query] += part
        out[starts[b] : starts[b + 1]] = hadamard_transform(sums[True]) + sums[False]
        lse[starts[b] : starts[b + 1]] = total_lse
    return out, lse


def gather_kv(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: Format,
    *,
    staging: Tensor | None = None,
    block_slot: Tensor | None = None,
    cu_seq_lens: Tensor,
    rotated: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Packed pages -> key, value [cu_seq_lens[-1], Hkv, D] in ``dtype``: token t of sequence b at
    row ``cu_seq_lens[b] + t``. Records are rotated back, or with ``rotated`` staged rows
    rotated."""
    shape = (int(cu_seq_lens[-1]), cache.shape[1], fmt.head_dim)
    key_out, value_out = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    for b, length in enumerate(seq_lens.tolist()):
        for i in range(0, length, fmt.group):
            block = int(block_table[b, i // fmt.group])
            key, value, basis = _block(cache, staging, block_slot, block, fmt, dtype)
            if basis != rotated:
                key, value = hadamard_transform(key), hadamard_transform(value)
            rows = min(fmt.group, length - i)
            first = int(cu_seq_lens[b]) + i
            key_out[first : first + rows] = key[:rows]
            value_out[first : first + rows] = value[:rows]
    return key_out, value_out


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Two partial attentions [T, H, D] with LSE [T, H] of the same queries, over disjoint keys.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = out_a * exp(lse_a - lse) + out_b * exp(lse_b -
    lse)``. A part with LSE -inf is empty and is not read.
    """
    lse = torch.logaddexp(lse_a.double(), lse_b.double())

    def part(out: Tensor, own: Tensor) -> Tensor:
        empty = own.isneginf()
        weight = torch.where(empty, 0.0, (own.double() - lse).exp())[..., None]
        return weight * torch.where(empty[..., None], 0.0, out.double())

    return (part(out_a, lse_a) + part(out_b, lse_b)).to(out_a.dtype), lse.to(lse_a.dtype)
