"""A transformers cache in which any encoder can be tried: full tiles are replaced by what a reader
of their packed form would see. No memory is saved; the model's own attention reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

#: key, value [N, G, Hkv, D] fp32 -> the same, as read back from their packed form.
Encoder = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class SimulatedCache(Cache):  # type: ignore[misc]
    """Keys and values pass through ``encoder`` tile by tile, as the paged cache does it.

    Tokens are first rounded to ``dtype``. Tiles start after the ``sinks`` first tokens. When
    further tokens arrive, every full tile that is not among the ``recent_blocks`` newest full ones
    is replaced. The queries of one call all read the same cache: feed it the sinks, then whole
    tiles (or less) at a time.

    Args:
        encoder: None keeps everything in ``dtype``.
        group: tokens of a tile (G).
        dtype: of the cached values before encoding; the model's own type is what attention reads.
        source: for each layer keys and values [B, Hkv, tokens, D] of the same text: when further
            tokens arrive, all earlier ones are taken from there. With those of the exact cache
            this is what a model reads whose prompt was packed at once, after an exact prefill: no
            error feeds the cache.
    """

    def __init__(
        self,
        num_layers: int,
        encoder: Encoder | None,
        *,
        group: int = 128,
        sinks: int = 128,
        recent_blocks: int = 0,
        dtype: torch.dtype = torch.float16,
        source: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__(
            layers=[
                _SimulatedLayer(
                    encoder, group, sinks, recent_blocks, dtype, source[i] if source else None
                )
                for i in range(num_layers)
            ]
        )


class _SimulatedLayer(DynamicLayer):  # type: ignore[misc]
    def __init__(
        self,
        encoder: Encoder | None,
        group: int,
        sinks: int,
        recent_blocks: int,
        dtype: torch.dtype,
        source: tuple[Tensor, Tensor] | None,
    ) -> None:
        super().__init__()
        self._encoder = encoder
        self._group = group
        self._next_tile = sinks  # first token that is not yet encoded
        self._recent_tokens = recent_blocks * group
        self._dtype = dtype
        self._source = source
        self._from_source = 0  # tokens taken from there

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states [B, Hkv, T, D] -> all keys, values [B, Hkv, length, D]."""
        if self._source is not None:
            self._take_from(*self._source)
        if self._encoder is not None:
            self._encode_full_tiles(self._encoder)
        key = key_states.to(self._dtype).to(key_states.dtype)
        value = value_states.to(self._dtype).to(value_states.dtype)
        return super().update(key, value)  # type: ignore[no-any-return]

    def _take_from(self, source_key: Tensor, source_value: Tensor) -> None:
        rows = slice(self._from_source, self.get_seq_length())
        if rows.start < rows.stop:
            self.keys[:, :, rows] = source_key[:, :, rows].to(self._dtype).to(self.keys.dtype)
            self.values[:, :, rows] = source_value[:, :, rows].to(self._dtype).to(self.keys.dtype)
        self._from_source = rows.stop

    def _encode_full_tiles(self, encoder: Encoder) -> None:
        sealed_end = self.get_seq_length() - self._recent_tokens
        while self._next_tile + self._group <= sealed_end:
            rows = slice(self._next_tile, self._next_tile + self._group)
            key, value = (x[:, :, rows].transpose(1, 2) for x in (self.keys, self.values))
            new_key, new_value = encoder(key.float(), value.float())
            key.copy_(new_key)
            value.copy_(new_value)
            self._next_tile += self._group
