"""What rotation and normalization make of real tiles, and which codes come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvarn import Format, reference

_BITS = "k4v2"


def describe(
    keys: Sequence[Tensor], values: Sequence[Tensor], first_token: int, group: int
) -> dict[str, Any]:
    """The key tile and the value tile whose largest channel stands out most.

    Args:
        keys, values: of each layer, [Hkv, tokens, D].
        first_token, group: of the tiles.

    Returns:
        For ``key`` and ``value``: layer, head, root mean squares of channels and tokens before and
        after rotation and after normalization, and how often each code is used by both fits.
    """
    found: dict[str, Any] = {"first_token": first_token, "group": group}
    for name, all_layers in (("key", keys), ("value", values)):
        tiles = torch.stack([x[:, first_token : first_token + group] for x in all_layers])
        size = tiles.square().mean(2).sqrt()  # [layers, Hkv, D]
        outlier = size.amax(-1) / size.mean(-1)
        layer, head = divmod(int(outlier.argmax()), tiles.shape[1])
        found[name] = {"layer": layer, "head": head, **_stages(tiles[layer, head], name == "key")}
        found[name]["codes"] = {
            fit: _code_counts(keys, values, first_token, group, fit, name)
            for fit in ("minmax", "unbiased")
        }
    return found


def _stages(tile: Tensor, key: bool) -> dict[str, Any]:
    rotated = reference.hadamard_transform(tile)
    rows = (rotated.T if key else rotated)[None]
    live = [torch.ones(1, count, dtype=torch.bool) for count in rows.shape[1:]]
    sized = reference.bring_to_size(rows, *live)  # as the default fit does it
    balanced = reference.variance_normalize(sized[0])[0]
    stages = {"plain": tile, "rotated": rotated, "normalized": balanced.T if key else balanced}
    return {
        axis: {stage: _rounded(x.square().mean(dim).sqrt()) for stage, x in stages.items()}
        for axis, dim in (("channels", 0), ("tokens", 1))
    }


def _code_counts(
    keys: Sequence[Tensor], values: Sequence[Tensor], first: int, group: int, fit: str, name: str
) -> list[float]:
    """Share of each code in all layers and heads."""
    fmt = Format(f"kvarn_{_BITS}_g{group}", head_dim=keys[0].shape[-1])
    key, value = (
        torch.cat([x[:, first : first + group] for x in layers]).transpose(0, 1)[None]
        for layers in (keys, values)
    )
    made = reference.quantize(key, value, fmt, fit=fit)
    codes, bits = (
        (made.key_codes, fmt.key_bits) if name == "key" else (made.value_codes, fmt.value_bits)
    )
    count = torch.bincount(codes.flatten().int(), minlength=2**bits)
    return _rounded(count / count.sum())


def _rounded(x: Tensor) -> list[float]:
    return [float(f"{y:.4g}") for y in x.tolist()]
