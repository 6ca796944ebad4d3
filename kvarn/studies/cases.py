"""What the study compares: caches, each an encoder, its stored bits, and what stays in 16 bits."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvarn.format import Format
from kvarn.studies import encoders
from kvarn.studies.simulated_cache import Encoder
from kvarn.studies.steps import Steps

GROUP = 128
SINKS = 128

#: Families, in the order of tables and legends.
FAMILIES = {
    "16 bits": "values rounded to 16 bits, nothing else",
    "unbiased": "kvarn, its default fit",
    "minmax": "kvarn, fit minmax: the paper's encoder",
    "naive": "per-token min-max rounding",
    "naive, rotated": "the same after a Walsh-Hadamard transform",
    "KIVI-like": "min-max groups of 32: keys along tokens, values along channels",
    "TurboQuant-like": "token norm, random rotation, Lloyd-Max codebook",
    "fp8 e4m3": "a cast, without scales",
    "steps": "the default fit without some of its steps",
}


@dataclass(frozen=True)
class Case:
    """A cache of the comparison.

    Attributes:
        name: for tables; unique.
        family: one of `FAMILIES`.
        bits: stored for a value by what is packed: codes, scales and zero points, mean of keys and
            values.
        encoder: tiles to what a reader sees; None: as they are.
        sinks: first tokens in 16 bits.
        recent_blocks: newest full tiles in 16 bits.
        prefill: the packed tiles come from an exact prefill (see `SimulatedCache`): no error feeds
            the cache.
    """

    name: str
    family: str
    bits: float
    encoder: Encoder | None
    sinks: int = SINKS
    recent_blocks: int = 0
    prefill: bool = False

    @property
    def slug(self) -> str:
        """The name as that of a file."""
        return re.sub("[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def bits_at(self, context: int) -> float:
        """Stored for a value by a sequence of ``context`` tokens, with the tokens that stay in 16
        bits: sinks, recent tiles and, on average, half an open tile. Every method is counted (and
        run) with the same open tile."""
        if self.encoder is None:
            return 16.0
        plain = min(context, self.sinks + self.recent_blocks * GROUP + GROUP // 2)
        return (plain * 16 + (context - plain) * self.bits) / context


def cases(head_dim: int, suite: str = "standard") -> list[Case]:
    """The caches of a suite: ``quick`` (a handful), ``standard``, or ``full`` (also steps, rounds
    and sinks at 2 bits). The most important ones come first."""
    chosen = [*_main(head_dim)]
    if suite != "quick":
        chosen += [*_prefill(head_dim), *_window(head_dim, "k4v2"), *_rounds(head_dim, "k4v2")]
        chosen += [*_steps(head_dim, "k4v2"), *_other_bits(head_dim)]
    if suite == "full":
        for bits in ("k2v2",):
            chosen += [*_window(head_dim, bits), *_rounds(head_dim, bits), *_steps(head_dim, bits)]
    return chosen


def ours(bits: str, head_dim: int, fit: str, iterations: int | None = None) -> Case:
    """A packed cache, such as ``k4v2``, through kvarn's kernels."""
    fmt = Format(f"kvarn_{bits}_g{GROUP}", head_dim=head_dim)
    rounds = "" if iterations is None else f", {iterations} round{'s' * (iterations != 1)}"
    return Case(
        f"{bits} {fit}{rounds}",
        fit,
        fmt.bytes_per_token * 8 / (2 * head_dim),
        encoders.packed(fmt, fit=fit, iterations=iterations),
    )


def peer(family: str, bits: str, head_dim: int) -> Case:
    """One of the comparators at the bits of ``k4v2`` and the like."""
    key, value = int(bits[1]), int(bits[3])
    codes = (key + value) / 2
    # A 16-bit scale and minimum for each token, or group of 32; a 16-bit norm for each token.
    made = {
        "naive": (encoders.naive(key, value), codes + 32 / head_dim),
        "naive, rotated": (encoders.rotated(encoders.naive(key, value)), codes + 32 / head_dim),
        "KIVI-like": (encoders.kivi_like(key, value), codes + 1),
        "TurboQuant-like": (encoders.turboquant_like(key, value), codes + 16 / head_dim),
    }
    encoder, stored = made[family]
    return Case(f"{bits} {family}", family, stored, encoder)


def floor() -> Case:
    """Values in 16 bits: what the arithmetic alone does."""
    return Case("16-bit cache", "16 bits", 16.0, None)


def _changed(case: Case, suffix: str, **fields: object) -> Case:
    return Case(**{**vars(case), "name": f"{case.name}, {suffix}", **fields})


def _main(head_dim: int) -> Iterable[Case]:
    yield floor()
    yield ours("k4v2", head_dim, "unbiased")
    yield ours("k4v2", head_dim, "minmax")
    yield peer("naive", "k4v2", head_dim)
    yield ours("k2v2", head_dim, "unbiased")
    yield ours("k2v2", head_dim, "minmax")
    yield peer("KIVI-like", "k4v2", head_dim)
    yield peer("TurboQuant-like", "k4v2", head_dim)
    yield ours("k4v4", head_dim, "unbiased")
    default = ours("k4v2", head_dim, "unbiased")
    yield _changed(default, "1 recent block", recent_blocks=1)
    yield _changed(default, "exact prefill", prefill=True)


def _prefill(head_dim: int) -> Iterable[Case]:
    for case in (
        ours("k4v2", head_dim, "minmax"),
        peer("naive", "k4v2", head_dim),
        ours("k2v2", head_dim, "unbiased"),
        ours("k2v2", head_dim, "minmax"),
    ):
        yield _changed(case, "exact prefill", prefill=True)


def _window(head_dim: int, bits: str) -> Iterable[Case]:
    plain = ours(bits, head_dim, "unbiased")
    if bits != "k4v2":
        yield _changed(plain, "1 recent block", recent_blocks=1)
    yield _changed(plain, "2 recent blocks", recent_blocks=2)
    for sinks in (0, 4, 16, 64):
        yield _changed(plain, f"{sinks} sinks", sinks=sinks)


def _rounds(head_dim: int, bits: str) -> Iterable[Case]:
    for rounds in (0, 1, 2, 8, 16):
        yield ours(bits, head_dim, "unbiased", rounds)
    for rounds in (0, 4, 16):
        yield ours(bits, head_dim, "minmax", rounds)


def _steps(head_dim: int, bits: str) -> Iterable[Case]:
    without = {
        "rotation": Steps(rotation=False),
        "normalization": Steps(normalization=False),
        "rotation and normalization": Steps(rotation=False, normalization=False),
        "narrow range": Steps(narrow_range=False),
        "least squares": Steps(least_squares=False),
        "column refit": Steps(column_refit=False),
        "gain": Steps(gain=False),
        "null mean": Steps(null_mean=False),
    }
    fmt = Format(f"kvarn_{bits}_g{GROUP}", head_dim=head_dim)
    stored = fmt.bytes_per_token * 8 / (2 * head_dim)
    for name, steps in without.items():
        encoder = encoders.by_steps(steps, fmt)
        yield Case(f"{bits} unbiased without {name}", "steps", stored, encoder)


def _other_bits(head_dim: int) -> Iterable[Case]:
    yield peer("naive", "k2v2", head_dim)
    yield peer("KIVI-like", "k2v2", head_dim)
    yield peer("TurboQuant-like", "k2v2", head_dim)
    yield peer("naive, rotated", "k4v2", head_dim)
    yield ours("k4v4", head_dim, "minmax")
    yield ours("k3v3", head_dim, "unbiased")
    yield ours("k3v3", head_dim, "minmax")
    yield ours("k8v4", head_dim, "unbiased")
    yield ours("k8v4", head_dim, "minmax")
    yield Case("fp8 e4m3", "fp8 e4m3", 8.0, encoders.fp8)
    for bits in ("k4v4", "k3v3"):
        for family in ("KIVI-like", "TurboQuant-like"):
            yield peer(family, bits, head_dim)
    yield peer("naive", "k4v4", head_dim)
    yield peer("naive, rotated", "k2v2", head_dim)
