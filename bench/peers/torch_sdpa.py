"""torch.nn.functional.scaled_dot_product_attention over a contiguous, unquantized cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.harness import Call


def decode(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: list) -> Call:
    """q [B, Hq, D], key and value [B, Hkv, S, D]; the result [B, Hq, D] goes to ``out[0]``."""
    query = q.unsqueeze(2)

    def call() -> None:
        out[0] = F.scaled_dot_product_attention(query, key, value, enable_gqa=True).squeeze(2)

    return call


def decode_grouped(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: list) -> Call:
    """The same, with the query heads of a group as query rows, which spares repeating K and V."""
    batch, heads, dim = q.shape
    query = q.view(batch, key.shape[1], heads // key.shape[1], dim)

    def call() -> None:
        out[0] = F.scaled_dot_product_attention(query, key, value).reshape(batch, heads, dim)

    return call
