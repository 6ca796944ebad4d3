"""Which column scale the unbiased fit should use: closed form, or Sinkhorn with 4 rounds.

    python -m kvarn.studies.column_scale            synthetic tiles, and time
    python -m kvarn.studies.column_scale --model    KL of SmolLM2-135M on two texts

Every row compares the closed form with Sinkhorn's scales by the ratio of their errors: geometric
mean over tiles (over segments of text) and its 95 % interval. Below 1 the closed form is better.

Errors on synthetic tiles, over the ordinary tokens (the energy of a massive one hides them):

- K, V: squared error over energy, mean over tokens;
- attention: squared error of the output of 32 random queries over its energy;
- massive: of K, squared error over energy of the massive tokens themselves.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvarn import Format, ops
from kvarn.studies import encoders
from kvarn.studies.simulated_cache import Encoder

Kind = Callable[[Tensor, torch.Generator], Tensor]

TILES = 64
CLOSED_FORM, SINKHORN = 0, 4  # iterations
FORMATS = ("kvarn_k4v2_g128", "kvarn_k2v2_g128", "kvarn_k4v4_g128")
HEAD_DIMS = (64, 128, 256)

SEGMENTS, SEGMENT_TOKENS, FIRST_TOKEN = 4, 1024, 256  # of each text


def gaussian(x: Tensor, _: torch.Generator) -> Tensor:
    return x


def log_normal_tokens(x: Tensor, generator: torch.Generator) -> Tensor:
    return x * (0.7 * torch.randn((*x.shape[:3], 1), generator=generator)).exp()


def log_normal_rotated_channels(x: Tensor, generator: torch.Generator) -> Tensor:
    """Channel variances that the rotation does not even out."""
    shape = (x.shape[0], 1, 1, x.shape[3])
    scale = (0.7 * torch.randn(shape, generator=generator)).exp()
    return ops.hadamard_transform(ops.hadamard_transform(x) * scale)


def outlier_channels(x: Tensor, _: torch.Generator) -> Tensor:
    return x * torch.where(torch.arange(x.shape[-1]) % 32 == 5, 50.0, 1.0)


def outlier_tokens(x: Tensor, _: torch.Generator) -> Tensor:
    return x * torch.where(torch.arange(x.shape[1]) % 40 == 7, 20.0, 1.0)[:, None, None]


def outliers_of_both(x: Tensor, generator: torch.Generator) -> Tensor:
    return outlier_tokens(outlier_channels(x, generator), generator)


def small_tile(x: Tensor, generator: torch.Generator) -> Tensor:
    """A tenth of the size, where Sinkhorn's lower clip keeps most scales as they are."""
    return 0.1 * log_normal_tokens(x, generator)


def massive_token(x: Tensor, _: torch.Generator) -> Tensor:
    x[:, 5] = 100.0
    return x


def massive_tokens(x: Tensor, _: torch.Generator) -> Tensor:
    x[:, 5:21] = 1000.0
    return x


def biased_channels(x: Tensor, generator: torch.Generator) -> Tensor:
    """A large constant in two channels, as the keys of Qwen2.5 have."""
    x = log_normal_tokens(x, generator)
    x[..., 3] += 60.0
    x[..., x.shape[-1] // 2 + 1] -= 40.0
    return x


def rotary_keys(x: Tensor, generator: torch.Generator) -> Tensor:
    """A common direction turned by position at rotary frequencies, plus what differs by token."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None, None] * 1e4 ** (-torch.arange(half) / half)
    a, b = 3 * torch.randn((2, x.shape[0], 1, 1, half), generator=generator)
    sin, cos = angle.sin(), angle.cos()
    return x + torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


KINDS: tuple[Kind, ...] = (
    gaussian, log_normal_tokens, log_normal_rotated_channels, outlier_channels, outlier_tokens,
    outliers_of_both, small_tile, massive_token, massive_tokens, biased_channels, rotary_keys,
)  # fmt: skip


def errors(key: Tensor, value: Tensor, encoder: Encoder) -> list[Tensor]:
    """Errors of each tile: K, V, attention, massive (NaN where there is no massive token)."""
    new_key, new_value = encoder(key, value)
    key, value, new_key, new_value = (x[:, :, 0] for x in (key, value, new_key, new_value))
    energy = key.square().sum(-1)
    massive = energy > 1e3 * energy.median(1, keepdim=True).values

    def of_tokens(new: Tensor, old: Tensor, which: Tensor) -> Tensor:
        share = (new - old).square().sum(-1) / old.square().sum(-1)
        return (share * which).sum(1) / which.sum(1)

    generator = torch.Generator().manual_seed(1)
    q = torch.randn((key.shape[0], 32, key.shape[-1]), generator=generator)
    hidden = massive[:, None, :]
    logits = (q @ key.mT).masked_fill(hidden, 0)
    q *= 2 / logits.std((1, 2), keepdim=True)

    def attention(key: Tensor, value: Tensor) -> Tensor:
        return (q @ key.mT).masked_fill(hidden, -math.inf).softmax(-1) @ value

    exact = attention(key, value)
    out = (attention(new_key, new_value) - exact).square().sum((1, 2)) / exact.square().sum((1, 2))
    return [
        of_tokens(new_key, key, ~massive),
        of_tokens(new_value, value, ~massive),
        out,
        of_tokens(new_key, key, massive),
    ]


def interval(ratio: Tensor) -> str:
    """Geometric mean and its 95 % interval."""
    logs = ratio.double().log()
    if logs.isnan().any():
        return f"{'':21}"
    half = 1.96 * float(logs.std()) / math.sqrt(len(logs))
    mean, low, high = (math.exp(float(logs.mean()) + x) for x in (0, -half, half))
    return f"{mean:6.3f} [{low:5.3f},{high:6.3f}]"


def on_tiles(head_dim: int, name: str) -> Iterator[str]:
    """Rows of the table of one format."""
    fmt = Format(name, head_dim=head_dim)
    for seed, kind in enumerate(KINDS):
        generator = torch.Generator().manual_seed(seed)
        shape = (TILES, fmt.group, 1, head_dim)
        key, value = (kind(torch.randn(shape, generator=generator), generator) for _ in range(2))
        closed, sinkhorn = (
            errors(key, value, encoders.packed(fmt, iterations=n)) for n in (CLOSED_FORM, SINKHORN)
        )
        cells = [interval(a / b) for a, b in zip(closed, sinkhorn, strict=True)]
        yield f"{head_dim:4} {name[6:10]} {kind.__name__:28} " + " ".join(cells)


def microseconds(head_dim: int, iterations: int) -> float:
    """The time of one K and V tile on one thread, the best of several."""
    fmt = Format(FORMATS[0], head_dim=head_dim)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((8, fmt.group, 1, head_dim), generator=generator)
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        ops.quantize_tiles(x, x, fmt, iterations=iterations)
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / len(x)


def on_model() -> Iterator[str]:
    """Rows of the table of KL(16-bit cache || packed cache) on SmolLM2-135M."""
    from kvarn.studies import texts
    from kvarn.studies.divergence import Run, teacher_forced
    from kvarn.studies.models import load_model
    from kvarn.studies.simulated_cache import SimulatedCache

    loaded = load_model()

    def run(encode: Encoder | None) -> Run:
        return Run(lambda: SimulatedCache(loaded.num_layers, encode))

    formats = [Format(name, head_dim=loaded.head_dim) for name in FORMATS[:2]]
    runs = {
        (fmt, iterations): run(encoders.packed(fmt, iterations=iterations))
        for fmt in formats
        for iterations in (CLOSED_FORM, SINKHORN)
    }
    ratios: dict[Format, list[float]] = {fmt: [] for fmt in formats}
    sources = {"py": texts.python_reference(), "vim": texts.vim_manual()}
    for source, text in sources.items():
        if text is None:
            yield f"{source}: this text is not installed"
            continue
        for number, segment in enumerate(loaded.segments(text, SEGMENT_TOKENS, SEGMENTS)):
            names = {str(key): run for key, run in runs.items()}
            _, traces = teacher_forced(loaded.model, segment, run(None), names)
            for fmt in formats:
                closed, sinkhorn = (
                    traces[str((fmt, n))].mean_kl(FIRST_TOKEN) for n in (CLOSED_FORM, SINKHORN)
                )
                ratios[fmt].append(closed / sinkhorn)
                yield (
                    f"{source:4} {number} {str(fmt)[6:10]}  closed form {closed:.5f}  "
                    f"Sinkhorn {sinkhorn:.5f}  ratio {closed / sinkhorn:.3f}"
                )
    for fmt in formats:
        if ratios[fmt]:
            yield f"all    {str(fmt)[6:10]}  ratio {interval(torch.tensor(ratios[fmt]))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="store_true", help="KL on a model, not synthetic tiles")
    if parser.parse_args().model:
        for line in on_model():
            print(line, flush=True)
        return
    print("error of the closed form / error of Sinkhorn's scales, geometric mean [95 %]")
    titles = " ".join(f"{title:21}" for title in ("K", "V", "attention", "massive"))
    print(f"{'D':>4} bits {'tiles':28} {titles}")
    for head_dim in HEAD_DIMS:
        for name in FORMATS:
            for line in on_tiles(head_dim, name):
                print(line, flush=True)
    torch.set_num_threads(1)
    print("\none K and one V tile of 128 tokens on one thread, microseconds")
    for head_dim in HEAD_DIMS:
        closed, sinkhorn = (microseconds(head_dim, n) for n in (CLOSED_FORM, SINKHORN))
        print(f"{head_dim:4} closed form {closed:6.0f}  Sinkhorn {sinkhorn:6.0f}")


if __name__ == "__main__":
    main()
