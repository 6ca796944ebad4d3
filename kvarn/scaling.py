"""How long a decode step of a model takes on a GPU, from bytes and bandwidth.

A step reads all weights and all cached keys and values once, and starts kernels. With L layers, T
GPUs that share heads and weights (tensor parallelism) and the datasheet's bandwidth W:

- weights: ``max(weight_bytes / T / (W * weight_share), 2 * parameters * batch / T / (matrix rate *
  matrix_share))``: the matrix products wait for memory, at large batch for arithmetic;
- cache: ``L * bytes of one layer and GPU / (W * share)``; packed caches with the blocks that a
  sequence keeps in 16 bits;
- launch: ``L * (fixed time of an attention call + layer_us)``, and ``2 * allreduce_us`` a layer
  where T > 1.

``share`` and the fixed time of a call are fitted to the recorded runs of decode_attention
(``time = fixed + bytes / (W * share)``, least squares of the relative error) and assumed to hold on
the other GPUs. What was not recorded is assumed, and says so. Not counted: sampling, the
embedding, what a step writes (a token a sequence, and the sealing of a block every G steps).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvarn.capacity import ModelShape, packed_capacity, plain_capacity, positive, read_config
from kvarn.format import Format


@dataclass(frozen=True)
class Gpu:
    """Of the SXM part's datasheet: bytes, bytes/s, dense 16-bit FLOP/s."""

    name: str
    memory: float
    bandwidth: float
    flops: float


GPUS = {
    "a100": Gpu("A100 80 GB", 80e9, 2.039e12, 312e12),
    "h100": Gpu("H100", 80e9, 3.35e12, 989e12),
    "h200": Gpu("H200", 141e9, 4.8e12, 989e12),
}

FP16, FP8 = "FP16/BF16", "FP8"
_PLAIN_BYTES = {FP16: 2, FP8: 1}


@dataclass(frozen=True)
class Assumptions:
    """What no run here has measured.

    Attributes:
        weight_share: of the bandwidth, in the matrix products of a step.
        matrix_share: of the matrix rate, where they wait for arithmetic.
        layer_us: what a layer takes beside bytes and attention: about eight short kernels in a
            graph.
        allreduce_us: a sum of activations over NVLink, of which a layer has two.
        memory_share: of a GPU's memory, for weights and cache together.
    """

    weight_share: float = 0.85
    matrix_share: float = 0.6
    layer_us: float = 12.0
    allreduce_us: float = 10.0
    memory_share: float = 0.9


@dataclass(frozen=True)
class Rate:
    """How fast attention reads a cache: ``fixed_us + bytes / (bandwidth * share)`` a call."""

    share: float
    fixed_us: float
    source: str
    measured: bool = False

    def __str__(self) -> str:
        return f"{self.share:.0%} of the bandwidth after {self.fixed_us:.1f} us ({self.source})"

    def call_us(self, num_bytes: float, gpu: Gpu) -> float:
        return self.fixed_us + num_bytes / (gpu.bandwidth * self.share) * 1e6


ASSUMPTIONS = Assumptions()
ASSUMED_RATE = Rate(0.8, 8.0, "assumed")


@dataclass(frozen=True)
class Decoder:
    """A model as a decode step sees it.

    Attributes:
        shape: of its cache.
        parameters: that a token is multiplied with.
        weight_bytes: read in a step.
        stored_bytes: of all weights in memory, over all GPUs.
    """

    shape: ModelShape
    parameters: int
    weight_bytes: int
    stored_bytes: int

    @classmethod
    def from_config(cls, path: Path, *, weight_bits: int = 16) -> Decoder:
        """Counts the matrices of a dense transformer with gated feed-forward layers.

        Raises:
            ValueError: the configuration describes another model (experts, linear attention) or
                lacks a size.
            OSError: it cannot be read.
        """
        config = read_config(path)
        shape = ModelShape.from_config(path)
        experts = any("expert" in key and value for key, value in config.items())
        if experts or shape.layers != config["num_hidden_layers"]:
            raise ValueError(
                "kvarn::scaling: config must be of a dense transformer with attention in every "
                f"layer, or the bytes of its weights given, got {path}"
            )
        hidden, inner, words = (
            positive(config, name, path)
            for name in ("hidden_size", "intermediate_size", "vocab_size")
        )
        vocabulary = words * hidden
        _check_weight_bits(weight_bits)
        heads = 2 * (config["num_attention_heads"] + shape.kv_heads)
        layer = hidden * (heads * shape.head_dim + 3 * inner)
        parameters = shape.layers * layer + vocabulary
        stored = parameters + (0 if config.get("tie_word_embeddings") else vocabulary)
        return cls(shape, parameters, parameters * weight_bits // 8, stored * weight_bits // 8)

    @classmethod
    def from_bytes(cls, shape: ModelShape, weight_bytes: int, *, weight_bits: int = 16) -> Decoder:
        """A model of which only the cache and the bytes of the weights are known."""
        _check_weight_bits(weight_bits)
        return cls(shape, weight_bytes * 8 // weight_bits, weight_bytes, weight_bytes)


def _check_weight_bits(weight_bits: int) -> None:
    if weight_bits < 1:
        raise ValueError(f"kvarn::scaling: weight_bits must be at least 1, got {weight_bits}")


@dataclass(frozen=True)
class Step:
    """A decode step with one cache format; times in microseconds.

    Attributes:
        format: its name.
        weights_us, cache_us, launch_us: see the module.
        step_us: their sum.
        tokens_per_second: of the whole batch.
        largest: "weights", "cache" or "launch".
        cache_largest_from: the context from which the cache takes longer than weights and launch
            together, at this batch.
        fits: sequences of this context that fit beside the weights, over all GPUs.
        fits_tokens_per_second: of a batch of so many.
        attention: its share and fixed time, and where these come from.
    """

    format: str
    weights_us: float
    cache_us: float
    launch_us: float
    step_us: float
    tokens_per_second: float
    largest: str
    cache_largest_from: int
    fits: int
    fits_tokens_per_second: float
    attention: str


def predict(
    decoder: Decoder,
    gpu: Gpu,
    rates: dict[str, Rate],
    *,
    batch: int,
    context: int,
    tensor_parallel: int = 1,
    formats: Sequence[str] | None = None,
    sink_blocks: int = 1,
    recent_blocks: int = 1,
    assumptions: Assumptions = ASSUMPTIONS,
) -> list[Step]:
    """A decode step with 16 bits, 8 bits and packed formats (by default every preset).

    Args:
        batch: sequences that decode one token each.
        context: tokens that each has in the cache.
        rates: by format; see `measured_rates`. Formats that are not in it get `ASSUMED_RATE`.
        tensor_parallel: GPUs; KV heads that do not divide are rounded up, as engines repeat them.

    Raises:
        ValueError: a number that is not positive, or an unknown format.
    """
    for name, value in (
        ("batch", batch), ("context", context), ("tensor_parallel", tensor_parallel)
    ):  # fmt: skip
        if value < 1:
            raise ValueError(f"kvarn::scaling: {name} must be at least 1, got {value}")
    shape = decoder.shape
    local = ModelShape(shape.layers, -(-shape.kv_heads // tensor_parallel), shape.head_dim)
    memory = int(gpu.memory * assumptions.memory_share - decoder.stored_bytes / tensor_parallel)

    def step(name: str) -> Step:
        rate = rates.get(name, ASSUMED_RATE)
        fixed_tokens, token_bytes, staged_bytes = _bytes_per_sequence(
            local, name, context, sink_blocks + recent_blocks
        )

        def times(count: int) -> tuple[float, float, float]:
            bandwidth = gpu.bandwidth * assumptions.weight_share
            matrix_rate = gpu.flops * assumptions.matrix_share
            weights = max(
                decoder.weight_bytes / bandwidth, 2 * decoder.parameters * count / matrix_rate
            )
            read = (context - fixed_tokens) * token_bytes + staged_bytes
            layer = rate.fixed_us + assumptions.layer_us
            if tensor_parallel > 1:
                layer += 2 * assumptions.allreduce_us
            return (
                weights / tensor_parallel * 1e6,
                count * read / (gpu.bandwidth * rate.share) * 1e6,
                shape.layers * layer,
            )

        weights_us, cache_us, launch_us = times(batch)
        parts = {"weights": weights_us, "cache": cache_us, "launch": launch_us}
        # From cache_us = weights_us + launch_us, for the tokens that are not in 16 bits anyway.
        rest = (weights_us + launch_us) / 1e6 * gpu.bandwidth * rate.share / batch - staged_bytes
        fits = _sequences(local, name, memory, context, sink_blocks, recent_blocks)
        return Step(
            format=name,
            weights_us=weights_us,
            cache_us=cache_us,
            launch_us=launch_us,
            step_us=sum(parts.values()),
            tokens_per_second=batch / sum(parts.values()) * 1e6,
            largest=max(parts, key=lambda part: parts[part]),
            cache_largest_from=max(int(fixed_tokens + rest / token_bytes), 0),
            fits=fits,
            fits_tokens_per_second=fits / sum(times(fits)) * 1e6,
            attention=str(rate),
        )

    names = Format.presets() if formats is None else formats
    return [step(name) for name in (FP16, FP8, *names)]


def _bytes_per_sequence(
    shape: ModelShape, name: str, context: int, staged_blocks: int
) -> tuple[float, float, float]:
    """Tokens that stay in 16 bits, bytes of each other token, bytes of those in 16 bits: of all
    layers."""
    values = shape.values_per_token
    if name in _PLAIN_BYTES:
        return 0, values * _PLAIN_BYTES[name], 0
    fmt = Format(name, head_dim=shape.head_dim)
    # The open block is half full on average.
    staged = min(context, (staged_blocks + 0.5) * fmt.group)
    return staged, shape.layers * shape.kv_heads * fmt.bytes_per_token, staged * values * 2


def _sequences(
    shape: ModelShape, name: str, memory: int, context: int, sink_blocks: int, recent_blocks: int
) -> int:
    if memory <= 0:
        return 0
    if name in _PLAIN_BYTES:
        plain = plain_capacity(shape, name, _PLAIN_BYTES[name], memory=memory, context=context)
        return plain.sequences
    return packed_capacity(
        shape,
        Format(name, head_dim=shape.head_dim),
        memory=memory,
        context=context,
        sink_blocks=sink_blocks,
        recent_blocks=recent_blocks,
    ).sequences


# --------------------------------------------------------------------------------------------------
# Measured rates


def default_results() -> Path:
    """Where a checkout keeps what was recorded on the H200; an installed package has none."""
    return Path(__file__).resolve().parent.parent / "bench" / "results" / "h200"


def measured_rates(folder: Path) -> dict[str, Rate]:
    """Share and fixed time of each format, from the recorded runs in a folder; empty where there
    are none.

    Of 16 and 8 bits the fastest peer counts; where no line fits, those of an earlier run. A
    preset that was not measured itself is given the rate of the default preset.

    Args:
        folder: of ``bench/results``, with ``decode_attention.json`` or
            ``earlier/decode_attention_peers.json``, or neither.

    Raises:
        ValueError: they are of a device that is not in `GPUS`.
    """
    rates: dict[str, Rate] = {}
    for path in (
        folder / "decode_attention.json", folder / "earlier" / "decode_attention_peers.json",
    ):  # fmt: skip
        if not path.is_file():
            continue
        run = json.loads(path.read_text(encoding="utf-8"))
        gpu = gpu_of(run)
        source = f"measured on {run['gpu']}, {run.get('date', 'in an earlier run')}"
        for name, points in _points(run["rows"]).items():
            rate = fit(points, gpu, f"{source}, {len(points)} cases")
            if rate and name not in rates:
                rates[name] = rate
    default = Format.presets()[0]
    if default in rates:
        like = rates[default]
        for name in Format.presets():
            rates.setdefault(name, Rate(like.share, like.fixed_us, f"assumed to be {default}'s"))
    return rates


def gpu_of(run: dict[str, Any]) -> Gpu:
    """On which a run was recorded."""
    name = str(run.get("gpu") or run.get("cpu"))
    for key, gpu in GPUS.items():
        if key in name.lower():
            return gpu
    raise ValueError(f"kvarn::scaling: results must be of {', '.join(GPUS)}, got those of {name}")


def _points(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """(bytes, microseconds) of calls, by format."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in filter(is_fitted, rows):
        if "time_us" in row:
            points.setdefault(row["format"], []).append((row["bytes"], row["time_us"]))
        for name, ending in ((FP16, "fp16"), (FP8, "fp8")):
            times = [time for peer, time in row["peers"].items() if peer.endswith(ending)]
            if times:
                num_bytes = row["bytes_16bit"] * _PLAIN_BYTES[name] / 2
                points.setdefault(name, []).append((num_bytes, min(times)))
    return points


def is_fitted(row: dict[str, Any]) -> bool:
    """Whether a row is one of those that the rates are fitted to: plain decode steps. The shapes of
    models (``kv_heads``) are kept out, to be compared with."""
    case = row["case"]
    return (
        case["query_tokens"] == 1
        and case["head_dim"] == 128
        and "split_tokens" not in case
        and "staged_tiles" not in case
        and "kv_heads" not in case
        and "bytes_16bit" in row
    )


def fit(points: Sequence[tuple[float, float]], gpu: Gpu, source: str) -> Rate | None:
    """The line ``us = fixed + slope * bytes`` with the least squares of ``(line - us) / us``, fixed
    not below 0; None for fewer than three different sizes, or a slope that is not positive or
    beyond the bandwidth: then the times are not those of one way to read (a peer that leaves most
    of the GPU idle at small batch, for example)."""
    if len({num_bytes for num_bytes, _ in points}) < 3:
        return None
    # Normal equations of rows (1/us, bytes/us) and right sides 1.
    a = sum(1 / us**2 for _, us in points)
    b = sum(size / us**2 for size, us in points)
    c = sum(size**2 / us**2 for size, us in points)
    d = sum(1 / us for _, us in points)
    e = sum(size / us for size, us in points)
    fixed = (d * c - b * e) / (a * c - b * b)
    slope = (a * e - b * d) / (a * c - b * b)
    if fixed < 0:
        fixed, slope = 0.0, e / c
    if slope * gpu.bandwidth < 1e6:
        return None
    return Rate(1e6 / (slope * gpu.bandwidth), fixed, source, measured=True)


def to_json(
    steps: Sequence[Step], gpu: Gpu, *, batch: int, context: int, tensor_parallel: int
) -> dict[str, Any]:
    """The prediction as plain data, assumptions included."""
    return {
        "gpu": asdict(gpu),
        "batch": batch,
        "context": context,
        "tensor_parallel": tensor_parallel,
        "assumptions": asdict(ASSUMPTIONS),
        "formats": [asdict(step) for step in steps],
    }
