"""A transformers cache in which any encoder can be tried: full tiles are replaced by what a reader
of their packed form would see. No memory is saved; the model's own attention reads it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

#: key, value [N, G, Hkv, D] fp32 -> the same, as read back from their packed form.
Encoder = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class SimulatedCache(Cache):  # type: ignore[misc]
    """Keys and values pass through ``encoder`` tile by tile, as the paged cache does it.

    Tokens are first rounded to ``dtype``. When further tokens arrive, every full tile that is
    neither among the first ``sink_blocks`` nor among the ``recent_blocks`` newest full ones is
    replaced. Feed it whole tiles (or less) at a time: the queries of one call all read the same
    cache.

    Args:
        encoder: None keeps everything in ``dtype``.
        group: tokens of a tile (G).
        dtype: of the cached values before encoding; the model's own type is what attention reads.
    """

    def __init__(
        self,
        num_layers: int,
        encoder: Encoder | None,
        *,
        group: int = 128,
        sink_blocks: int = 1,
        recent_blocks: int = 0,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__(
            layers=[
                _SimulatedLayer(encoder, group, sink_blocks, recent_blocks, dtype)
                for _ in range(num_layers)
            ]
        )


class _SimulatedLayer(DynamicLayer):  # type: ignore[misc]
    def __init__(
        self,
        encoder: Encoder | None,
        group: int,
        sink_blocks: int,
        recent_blocks: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._encoder = encoder
        self._group = group
        self._next_tile = sink_blocks * group  # first token that is not yet encoded
        self._recent_tokens = recent_blocks * group
        self._dtype = dtype

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states [B, Hkv, T, D] -> all keys, values [B, Hkv, length, D]."""
        if self._encoder is not None:
            self._encode_full_tiles(self._encoder)
        key = key_states.to(self._dtype).to(key_states.dtype)
        value = value_states.to(self._dtype).to(value_states.dtype)
        return super().update(key, value)  # type: ignore[no-any-return]

    def _encode_full_tiles(self, encoder: Encoder) -> None:
        sealed_end = self.get_seq_length() - self._recent_tokens
        while self._next_tile + self._group <= sealed_end:
            rows = slice(self._next_tile, self._next_tile + self._group)
            key, value = (x[:, :, rows].transpose(1, 2) for x in (self.keys, self.values))
            new_key, new_value = encoder(key.float(), value.float())
            key.copy_(new_key)
            value.copy_(new_value)
            self._next_tile += self._group
