"""Choices of the encoder and the cache, judged on a real model.

    python -m kvarn.studies.model_choices

KL divergence from the exact cache through the real kernels, for both fits, the column scale in
closed form or by 4 rounds of the normalization, and 0 or 1 newest full tile in 16 bits. Every
statement is a paired ratio with a 95 % interval (`kvarn.studies.intervals`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import transformers
from torch import Tensor
from transformers import DynamicCache

from kvarn._terminal import Table
from kvarn.format import DEFAULT_ITERATIONS
from kvarn.integrations.transformers import KVarNCache
from kvarn.studies import encoders, texts
from kvarn.studies.divergence import Run, Trace, teacher_forced
from kvarn.studies.intervals import paired_ratio
from kvarn.studies.models import LoadedModel, load_model
from kvarn.studies.simulated_cache import SimulatedCache

_GROUP = 128
_BITS = ("k4v2", "k2v2", "k4v4", "k3v3", "k4v3", "k8v4")


@dataclass(frozen=True)
class Choice:
    """A kvarn cache of the comparison, and the name of the one it is set against."""

    bits: str
    fit: str
    iterations: int | None = None
    recent_blocks: int = 0

    @property
    def name(self) -> str:
        rounds = "" if self.iterations is None else f", {self.iterations} rounds"
        recent = f", {self.recent_blocks} recent" if self.recent_blocks else ""
        return f"{self.bits} {self.fit}{rounds}{recent}"

    @property
    def baseline(self) -> str:
        """The plainer choice: minmax, or for variants of the unbiased fit that fit itself."""
        plain = self.iterations is None and self.recent_blocks == 0
        return Choice(self.bits, "minmax" if plain else self.fit).name

    def run(self, loaded: LoadedModel) -> Run:
        def make_cache() -> KVarNCache:
            return KVarNCache(
                loaded.model.config,
                f"kvarn_{self.bits}_g{_GROUP}",
                fit=self.fit,
                iterations=self.iterations,
                recent_blocks=self.recent_blocks,
            )

        return Run(make_cache, attention="kvarn")


def choices(bits: tuple[str, ...]) -> list[Choice]:
    """Both fits at all bit widths; the variants where errors are largest."""
    plain = [Choice(b, fit) for b in bits for fit in ("minmax", "unbiased")]
    low = [b for b in bits if b in ("k4v2", "k2v2")]
    other = 0 if DEFAULT_ITERATIONS["unbiased"] else 4
    rounds = [Choice(b, "unbiased", iterations=other) for b in low]
    recent = [Choice(b, "unbiased", recent_blocks=1) for b in low]
    return plain + rounds + recent


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="of a segment")
    parser.add_argument("--segments", type=int, default=2, help="of each text")
    parser.add_argument("--first", type=int, default=256, help="first token that counts")
    parser.add_argument("--bits", nargs="+", default=_BITS)
    args = parser.parse_args(argv)

    transformers.logging.set_verbosity_error()
    loaded = load_model()
    tried = choices(tuple(args.bits))
    runs = {choice.name: choice.run(loaded) for choice in tried}
    runs["naive K4 V2"] = Run(lambda: SimulatedCache(loaded.num_layers, encoders.naive(4, 2)))
    runs["naive K2 V2"] = Run(lambda: SimulatedCache(loaded.num_layers, encoders.naive(2, 2)))
    exact = Run(lambda: DynamicCache(config=loaded.model.config))

    traces: dict[str, list[Trace]] = {name: [] for name in runs}
    where: list[str] = []
    for text_name, text in (("py", texts.python_reference()), ("vim", texts.vim_manual())):
        if text is None:
            print("The Vim manual is not installed (Debian package vim-runtime): left out.")
            continue
        for segment, tokens in enumerate(loaded.segments(text, args.tokens, args.segments)):
            print(f"{text_name}, segment {segment} of {args.tokens} tokens", flush=True)
            _, found = teacher_forced(loaded.model, tokens, exact, runs, tile=_GROUP)
            where.append(f"{text_name} {segment}")
            for name, trace in found.items():
                traces[name].append(trace)

    Table(
        f"KL from the exact cache (top-1 agreement), tokens {args.first} to {args.tokens - 1}",
        ("cache", *where),
        [
            (name, *(f"{t.mean_kl(args.first):.5f} ({t.top1(args.first):.3f})" for t in row))
            for name, row in traces.items()
        ],
    ).print()

    def errors(name: str) -> list[Tensor]:
        return [trace.kl[args.first :] for trace in traces[name]]

    pairs = [(choice.name, choice.baseline) for choice in tried]
    pairs += [(f"{name} minmax", "naive K4 V2") for name in args.bits if name == "k4v2"]
    Table(
        "Ratio of KL, geometric mean of the segments, 95 % interval",
        ("cache", "relative to", "ratio"),
        [
            (name, other, str(paired_ratio(errors(name), errors(other))))
            for name, other in pairs
            if name != other
        ],
        left=(0, 1),
    ).print()


if __name__ == "__main__":
    main()
