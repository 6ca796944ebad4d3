"""Formats of the packed cache: what a preset's name means in bytes."""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from kvarn import _backends, _host

FITS = ("unbiased", "minmax")

#: Sinkhorn rounds when the caller names none. 0, for "unbiased" only: column scales in closed form.
DEFAULT_ITERATIONS = {"unbiased": 4, "minmax": 8}

_NAME = re.compile(
    "kvarn_k({0})v({0})_g({1})".format(
        "|".join(map(str, _host.valid_bits)), "|".join(map(str, _host.valid_groups))
    )
)
_PRESETS = tuple(f"kvarn_{bits}_g{group}" for group in (128, 64) for bits in (
    "k4v2", "k4v4", "k2v2", "k3v3", "k8v4"))  # fmt: skip


class Format:
    """How a tile of ``group`` tokens is packed: immutable, hashable, ``str(fmt)`` is its name.

    Args:
        name: ``kvarn_k{bits}v{bits}_g{group}``: bits per key code and per value code (2, 3, 4 or
            8) and tokens per tile (64 or 128). `presets` lists the usual ones.
        head_dim: channels of a head: 64, 128, 256 or 512.

    Attributes:
        name, key_bits, value_bits, group, head_dim: as given.
        record_bytes: bytes of a record, the packed keys and values of one block and KV head.
        bytes_per_token: record_bytes / group, per KV head.
        compression: bytes of the same keys and values in 16 bits / record_bytes.

    Raises:
        ValueError: for a name or head dimension that is not one of these.
    """

    __slots__ = (
        "bytes_per_token", "compression", "group", "head_dim", "key_bits", "name", "record_bytes",
        "value_bits",
    )  # fmt: skip
    name: str
    key_bits: int
    value_bits: int
    group: int
    head_dim: int
    record_bytes: int
    bytes_per_token: float
    compression: float

    def __init__(self, name: str, head_dim: int) -> None:
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            bits = ",".join(map(str, _host.valid_bits))
            groups = ",".join(map(str, _host.valid_groups))
            raise ValueError(
                f"kvarn.Format: name must be kvarn_k{{{bits}}}v{{{bits}}}_g{{{groups}}}, "
                f"for example {', '.join(_PRESETS)}, got {name!r}"
            )
        if type(head_dim) is not int or head_dim not in _host.valid_head_dims:
            *most, last = map(str, _host.valid_head_dims)
            raise ValueError(
                f"kvarn.Format: head_dim must be {', '.join(most)} or {last}, got {head_dim!r}"
            )
        key_bits, value_bits, group = map(int, match.groups())
        record_bytes = _host.record_layout(key_bits, value_bits, group, head_dim)["bytes"]
        for attribute, value in {
            "name": name,
            "key_bits": key_bits,
            "value_bits": value_bits,
            "group": group,
            "head_dim": head_dim,
            "record_bytes": record_bytes,
            "bytes_per_token": record_bytes / group,
            "compression": 2 * group * head_dim * 2 / record_bytes,
        }.items():
            object.__setattr__(self, attribute, value)

    def cache_shape(self, num_blocks: int, num_kv_heads: int) -> tuple[int, int, int]:
        """Shape of the uint8 tensor that holds ``num_blocks`` blocks."""
        return (num_blocks, num_kv_heads, self.record_bytes)

    @staticmethod
    def presets() -> tuple[str, ...]:
        """The names in common use; the first is the default of this library."""
        return _PRESETS

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"kvarn.Format is immutable: cannot set {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"kvarn.Format is immutable: cannot delete {name}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Format):
            return NotImplemented
        return self.name == other.name and self.head_dim == other.head_dim

    def __hash__(self) -> int:
        return hash((self.name, self.head_dim))

    def __reduce__(self) -> tuple[type[Format], tuple[str, int]]:
        return Format, (self.name, self.head_dim)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"kvarn.Format({self.name!r}, head_dim={self.head_dim})"


class CanonicalRecords(NamedTuple):
    """Codes and scales of N x Hkv records in their natural order; scales are fp16.

    In the rotated basis, for token g and channel d, without the names' first word::

        key[g, d] = (codes[d, g] + zero_point[d]) * channel_scale[d] * token_scale[g]
        value[g, d] = (codes[g, d] + zero_point[g]) * token_scale[g] * channel_scale[d]
    """

    key_codes: Tensor  #: uint8 [N, Hkv, D, G], one code a byte
    key_channel_scale: Tensor  #: [N, Hkv, D]
    key_zero_point: Tensor  #: [N, Hkv, D], in code units
    key_token_scale: Tensor  #: [N, Hkv, G]
    value_codes: Tensor  #: uint8 [N, Hkv, G, D], one code a byte
    value_token_scale: Tensor  #: [N, Hkv, G]
    value_zero_point: Tensor  #: [N, Hkv, G], in code units
    value_channel_scale: Tensor  #: [N, Hkv, D]


def is_supported(fmt: Format, *, dtype: torch.dtype, device: torch.device | str | int) -> list[str]:
    """Why a cache of this format cannot be used here; empty when it can.

    Args:
        fmt: the format.
        dtype: of queries, keys and values: float16 or bfloat16, on the CPU float32 too.
        device: where the tensors would be.
    """
    if not isinstance(fmt, Format):
        raise ValueError(f"kvarn.is_supported: fmt must be a kvarn.Format, got {fmt!r}")
    device = torch.device(device)
    reasons = []
    if dtype not in _backends.model_dtypes(device.type):
        names = _backends.dtype_names(_backends.model_dtypes(device.type))
        reasons.append(f"dtype must be {names} on {device.type}, got {dtype}")
    if device.type != "cpu" and fmt.head_dim > _backends.MAX_CUDA_HEAD_DIM:
        reasons.append(
            f"head_dim must be at most {_backends.MAX_CUDA_HEAD_DIM} on {device.type},"
            f" got {fmt.head_dim}"
        )
    if missing := _backends.why_missing(device):
        reasons.append(missing)
    return reasons
