"""The unbiased fit with each of its steps on a switch, to see what each one is worth.

With all of them on it is `kvarn.reference.quantize` on tiles without dead or massive tokens: there
is no guard here, and scales are rounded to 16 bits without being brought into their range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn import reference
from kvarn.format import DEFAULT_ITERATIONS
from kvarn.reference import codes_of, least_squares, moments, round_codes, unbiased_scale


@dataclass(frozen=True)
class Steps:
    """What an encoder does; the names are those of docs/design.md and `kvarn.reference`.

    Attributes:
        rotation: Walsh-Hadamard transform before, and back after.
        normalization: column scales by the variance normalization; ones without it.
        narrow_range: start from a share of the row's range; from all of it without.
        least_squares: fit scale and offset of a row to its codes.
        column_refit: fit the column scales to the codes.
        gain: restore the gain of each row at the end.
        null_mean: values: shift codes against the mean error of their channel.
    """

    rotation: bool = True
    normalization: bool = True
    narrow_range: bool = True
    least_squares: bool = True
    column_refit: bool = True
    gain: bool = True
    null_mean: bool = True

    def __call__(self, tile: Tensor, bits: int, key: bool) -> Tensor:
        """What a reader sees of tiles fp32 [N, R, C]: keys [N, D, G], values [N, G, D]."""
        if self.rotation:
            tile = _rotate(tile, key)
        read = self._encode(tile, bits, key)
        return _rotate(read, key) if self.rotation else read

    def _encode(self, t: Tensor, bits: int, key: bool) -> Tensor:
        n = 2**bits - 1
        rows = torch.ones(t.shape[:2], dtype=torch.bool, device=t.device)
        cols = torch.ones_like(t[:, 0], dtype=torch.bool)
        c = torch.ones_like(t[:, 0])
        if self.normalization:
            sized = reference.bring_to_size(t, rows, cols)
            rounds = DEFAULT_ITERATIONS["unbiased"]
            _, c = reference.sinkhorn_scales(sized, rows, cols, rounds)
            c = reference.to_half(reference.without_gauge(c, cols))
        x, w = t / c[:, None], reference.column_weights(c, cols)

        low, high = x.amin(-1), x.amax(-1)
        share = reference._RANGE_FACTOR[t.shape[2]][bits] if self.narrow_range else 1.0
        s = share * (high - low) / n
        z = (high + low) / 2 - s * n / 2

        for _ in range(2 if self.least_squares else 1):
            q = codes_of(x, s, z, n)
            m = moments(x, q, w)
            if self.least_squares:
                s, z = least_squares(m, s, z)
        if self.column_refit:
            c = reference.refit_columns(x, q * s[:, :, None] + z[:, :, None], c, m, rows, cols)
            x, w = t / c[:, None], reference.column_weights(c, cols)
            if self.least_squares:
                m = moments(x, codes_of(x, s, z, n), w)
                s, z = least_squares(m, s, z)
        q = codes_of(x, s, z, n)
        s_out, z_out = self._gain(x, q, w, s, z)
        if self.null_mean and not key:
            safe = s_out.clamp(min=torch.finfo(s.dtype).tiny)[:, :, None]
            error = ((x - z_out[:, :, None]) / safe - q).clamp(-1.0, 1.0)
            safe = s.clamp(min=torch.finfo(s.dtype).tiny)[:, :, None]
            q = round_codes((x - z[:, :, None]) / safe + error.mean(1, keepdim=True), n)
            s_out, z_out = self._gain(x, q, w, s, z)
        s_out = reference.to_half(s_out)
        zero = reference.to_half(z_out / s_out.clamp(min=torch.finfo(s.dtype).tiny))
        return (q + zero[:, :, None]) * s_out[:, :, None] * c[:, None]

    def _gain(self, x: Tensor, q: Tensor, w: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return unbiased_scale(moments(x, q, w), s, z) if self.gain else (s, z)


def _rotate(tile: Tensor, key: bool) -> Tensor:
    turn = reference.hadamard_transform
    return turn(tile.mT).mT if key else turn(tile)
