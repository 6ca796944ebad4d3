"""How much a key/value cache of a given memory holds, in 16 and 8 bits and packed.

What a sequence of ``t`` tokens takes, with ``L`` layers, ``H`` KV heads of ``D`` channels, blocks
of ``G`` tokens:

- 16 bits: ``2 * L * H * D * 2`` bytes a token (keys and values), 8 bits half of it; per-tensor FP8
  scales are not counted, nor is the rounding of the last page.
- packed: ``ceil(t / G)`` records for each layer and head, ``record_bytes`` each (codes and scales:
  csrc/include/kvarn/layout.h), plus the staging pool: the sinks, the ``recent_blocks`` newest
  full tiles and the open one are ordinary 16-bit pages of ``2 * L * H * G * D * 2`` bytes. A
  staged block has a block id, so the room of its record counts too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvarn.format import Format

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def read_config(path: Path) -> dict[str, Any]:
    """A Hugging Face ``config.json`` (or the one in a model's folder), of its text model.

    Raises:
        ValueError: the file is not a JSON object.
        OSError: it cannot be read.
    """
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"kvarn::capacity: {path} must be JSON, got {error}") from error
    if not isinstance(config, dict):
        got = type(config).__name__
        raise ValueError(f"kvarn::capacity: {path} must be a JSON object, got a {got}")
    text = config.get("text_config")
    return text if isinstance(text, dict) and text else config


def positive(config: dict[str, Any], name: str, path: Path) -> int:
    """A size of a configuration. ValueError: it has none, or no size that a model can have."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        got = f"got {path} " + (f"with {value!r}" if name in config else "without it")
        raise ValueError(f"kvarn::capacity: config must have a positive integer {name}, {got}")
    return value


@dataclass(frozen=True)
class ModelShape:
    """What a model's cache depends on.

    Args:
        layers: attention layers that keep keys and values.
        kv_heads: key/value heads of a layer (of one GPU, under tensor parallelism).
        head_dim: channels of a head.
    """

    layers: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"kvarn::capacity: {name} must be a positive int, got {value!r}")

    @classmethod
    def from_config(cls, path: Path) -> ModelShape:
        """Reads a Hugging Face ``config.json`` (or the one in a model's folder).

        Layers of linear attention (``layer_types``) keep no keys and are not counted; layers with a
        sliding window are, at full length.

        Raises:
            ValueError: the file does not describe a cache of keys and values.
            OSError: it cannot be read.
        """
        config = read_config(path)
        if config.get("kv_lora_rank"):
            raise ValueError(
                f"kvarn::capacity: config must keep keys and values, got {path} with multi-head "
                "latent attention (kv_lora_rank), which caches a latent instead"
            )
        layers, heads = (
            positive(config, name, path) for name in ("num_hidden_layers", "num_attention_heads")
        )
        if config.get("head_dim"):
            head_dim = positive(config, "head_dim", path)
        else:
            head_dim = positive(config, "hidden_size", path) // heads
        types = config.get("layer_types")
        if types:
            layers = sum(kind in ("full_attention", "sliding_attention") for kind in types)
        return cls(layers, config.get("num_key_value_heads") or heads, head_dim)

    @property
    def values_per_token(self) -> int:
        """Numbers that a token adds to the cache: keys and values of all layers and heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Capacity:
    """What one format makes of a memory.

    Attributes:
        format: its name.
        bytes_per_token: of a long sequence, over all layers; the staging pool is not in it.
        ratio: bytes per token in 16 bits / bytes_per_token.
        staging_bytes: 16-bit pages that each sequence holds.
        sequence_bytes: one sequence of the asked context, staging included.
        sequences: of that context that fit.
        tokens: in these sequences together.
        effective_ratio: sequence_bytes in 16 bits / sequence_bytes.
        longest_sequence: tokens of the longest single sequence that fits.
    """

    format: str
    bytes_per_token: float
    ratio: float
    staging_bytes: int
    sequence_bytes: int
    sequences: int
    tokens: int
    effective_ratio: float
    longest_sequence: int


def plain_capacity(
    shape: ModelShape, name: str, bytes_per_value: int, *, memory: int, context: int
) -> Capacity:
    """A cache that stores ``bytes_per_value`` bytes a number and nothing else."""
    token = shape.values_per_token * bytes_per_value
    sequences = memory // (token * context)
    return Capacity(
        format=name,
        bytes_per_token=token,
        ratio=2 / bytes_per_value,
        staging_bytes=0,
        sequence_bytes=token * context,
        sequences=sequences,
        tokens=sequences * context,
        effective_ratio=2 / bytes_per_value,
        longest_sequence=memory // token,
    )


def packed_capacity(
    shape: ModelShape,
    fmt: Format,
    *,
    memory: int,
    context: int,
    sink_blocks: int = 1,
    recent_blocks: int = 1,
) -> Capacity:
    """The packed cache with its staging pool; a sequence's peak over its life counts."""
    heads = shape.layers * shape.kv_heads
    block = heads * fmt.record_bytes
    page = heads * 2 * fmt.group * fmt.head_dim * 2
    most_staged = sink_blocks + recent_blocks + 1

    def staged(tokens: int) -> int:
        return min(-(-tokens // fmt.group), most_staged)

    def size(tokens: int) -> int:
        return -(-tokens // fmt.group) * block + staged(tokens) * page

    if memory >= size(most_staged * fmt.group):
        blocks = (memory - most_staged * page) // block
    else:
        blocks = memory // (block + page)
    sequences = memory // size(context)
    return Capacity(
        format=fmt.name,
        bytes_per_token=block / fmt.group,
        ratio=fmt.compression,
        staging_bytes=staged(context) * page,
        sequence_bytes=size(context),
        sequences=sequences,
        tokens=sequences * context,
        effective_ratio=shape.values_per_token * 2 * context / size(context),
        longest_sequence=blocks * fmt.group,
    )


def compare(
    shape: ModelShape,
    *,
    memory: int,
    context: int,
    formats: Sequence[str] | None = None,
    sink_blocks: int = 1,
    recent_blocks: int = 1,
) -> list[Capacity]:
    """FP16, FP8 and packed formats (by default every preset) side by side.

    Args:
        memory: bytes of the cache (not of the GPU: weights and activations need room too).
        context: tokens of a sequence.
        formats: names, see :class:`kvarn.Format`.

    Raises:
        ValueError: a number that is not positive, an unknown format, or a head dimension for which
            there is no packed format.
    """
    for name, value, least in (
        ("memory", memory, 1),
        ("context", context, 1),
        ("sink_blocks", sink_blocks, 0),
        ("recent_blocks", recent_blocks, 0),
    ):
        if value < least:
            raise ValueError(f"kvarn::capacity: {name} must be at least {least}, got {value}")
    names = Format.presets() if formats is None else formats
    packed = [Format(name, head_dim=shape.head_dim) for name in names]
    return [
        plain_capacity(shape, "FP16/BF16", 2, memory=memory, context=context),
        plain_capacity(shape, "FP8", 1, memory=memory, context=context),
        *(
            packed_capacity(
                shape,
                fmt,
                memory=memory,
                context=context,
                sink_blocks=sink_blocks,
                recent_blocks=recent_blocks,
            )
            for fmt in packed
        ),
    ]


def parse_bytes(text: str) -> int:
    """``"16GiB"``, ``"80 GB"``, ``"1.5g"`` or a plain number of bytes -> bytes.

    GiB is 2^30, GB (or G) 10^9.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] == "i":
        raise ValueError(f"kvarn::capacity: memory must be like 16GiB or 80GB, got {text!r}")
    return int(float(match[1]) * {**_UNITS, **_BINARY_UNITS}[match[2]])


def to_json(
    shape: ModelShape, rows: Sequence[Capacity], *, memory: int, context: int
) -> dict[str, Any]:
    """The comparison as plain data."""
    return {
        "model": asdict(shape),
        "memory_bytes": memory,
        "context": context,
        "formats": [asdict(row) for row in rows],
    }
