"""The tables of a study, from its stored parts alone: for the terminal, the report and the
documentation. Every number of a measurement has its 95 % interval."""

from __future__ import annotations

import datetime
import itertools
import math
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvarn import info
from kvarn._terminal import Table
from kvarn.studies import intervals
from kvarn.studies.cases import FAMILIES, GROUP
from kvarn.studies.intervals import Estimate
from kvarn.studies.results import series

Parts = dict[str, dict[str, Any]]

DEFAULT = "k4v2 unbiased"


def facts(device: torch.device) -> dict[str, Any]:
    """What a study ran on."""
    known = info.facts()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "torch": torch.__version__,
        "kvarn": known["kvarn"],
        "date": datetime.date.today().isoformat(),
        "device": gpu or known.get("CPU") or platform.machine(),
        "threads": torch.get_num_threads(),
    }


# --------------------------------------------------------------------------------------------------
# What the parts hold


def case_parts(parts: Parts) -> dict[str, dict[str, Any]]:
    """The caches of a study by name, in the order of their families and bits."""
    found = [part for name, part in parts.items() if name.startswith("case-")]
    order = list(FAMILIES)
    found.sort(key=lambda p: (order.index(p["family"]), -p["bits"], _by_number(p["name"])))
    return {part["name"]: part for part in found}


def _by_number(name: str) -> str:
    """A key that sorts 8 before 16."""
    return re.sub(r"\d+", lambda number: number[0].zfill(3), name)


def first_token(parts: Parts, *names: str) -> int:
    """First token that counts when these caches are compared: with recent blocks in 16 bits,
    nothing packed is read before they are full."""
    known, first = case_parts(parts), int(parts["settings"]["settings"]["first"])
    return first + GROUP * max(int(known[name]["recent_blocks"]) for name in names)


def kl(parts: Parts, name: str, first: int | None = None) -> list[Tensor]:
    """KL of each segment, means of blocks, from token ``first`` on."""
    start = first_token(parts, name) if first is None else first
    return series(case_parts(parts)[name], "kl", start)


def kl_ratio(parts: Parts, name: str, other: str) -> Estimate | None:
    """KL of a cache over that of another on the same tokens; None if one was not run (or not on
    the same segments)."""
    known = case_parts(parts)
    if (
        not {name, other} <= set(known)
        or known[name]["segments"].keys() != known[other]["segments"].keys()
    ):
        return None
    first = first_token(parts, name, other)
    return intervals.paired_ratio(kl(parts, name, first), kl(parts, other, first), block=1)


def title(parts: Parts) -> str:
    """What was measured, in a line."""
    settings, found = parts["settings"]["settings"], parts["settings"]["facts"]
    segments = settings["segments"]
    return (
        f"{settings['model']} ({found['layers']} layers, {found['heads']} query and "
        f"{found['kv_heads']} KV heads of {found['head_dim']} channels), {settings['dtype']} on "
        f"{found['device']}; {len(segments)} segment{'s' * (len(segments) != 1)} of "
        f"{settings['tokens']:,} tokens ({', '.join(segments)}), seed {settings['seed']}"
    )


# --------------------------------------------------------------------------------------------------
# Claims


@dataclass(frozen=True)
class Claim:
    """Something that a cache's KL is said to be, relative to another's.

    Attributes:
        text: the claim.
        name, other: the caches.
        bound: the ratio of their KL stays below this.
    """

    text: str
    name: str
    other: str
    bound: float = 1.0

    def verdict(self, ratio: Estimate) -> str:
        """By the whole interval."""
        if ratio.high < self.bound:
            return "holds"
        return "does not hold" if ratio.low > self.bound else "not established"


def claims() -> list[Claim]:
    """What the method, its default fit and its defaults claim."""
    made = [
        Claim(
            f"the default fit beats the paper's at {bits}", f"{bits} unbiased", f"{bits} minmax", x
        )
        for bits, x in (("k4v2", 0.72), ("k2v2", 0.52), ("k4v4", 0.97), ("k3v3", 0.99))
    ]
    for fit, bound in (("minmax", 0.6), ("unbiased", 0.35)):
        made.append(Claim(f"k4v2 {fit} beats naive rounding", f"k4v2 {fit}", "k4v2 naive", bound))
    for fit, family, bits in itertools.product(
        ("minmax", "unbiased"), ("KIVI-like", "TurboQuant-like"), ("k4v2", "k2v2")
    ):
        made.append(Claim(f"{bits} {fit} beats {family}", f"{bits} {fit}", f"{bits} {family}"))
    made += [
        Claim("rotated and normalized beats rotated", "k4v2 minmax", "k4v2 naive, rotated"),
        Claim("k4v4 beats KIVI-like at more bits", "k4v4 unbiased", "k4v4 KIVI-like"),
        Claim("k3v3 beats KIVI-like at more bits", "k3v3 unbiased", "k3v3 KIVI-like"),
        Claim("k3v3 beats k4v2 at the same bits", "k3v3 unbiased", DEFAULT),
        Claim("k4v4 beats fp8 at fewer bits", "k4v4 unbiased", "fp8 e4m3"),
        Claim("k8v4 beats fp8 at fewer bits", "k8v4 unbiased", "fp8 e4m3"),
        Claim(
            "k4v2 and a recent block beat k4v4", "k4v2 unbiased, 1 recent block", "k4v4 unbiased"
        ),
    ]
    made.append(
        Claim(
            "a recent block in 16 bits halves the divergence",
            "k4v2 unbiased, 1 recent block", DEFAULT, 0.5,
        )
    )  # fmt: skip
    made.append(
        Claim(
            "a second recent block helps again",
            "k4v2 unbiased, 2 recent blocks", "k4v2 unbiased, 1 recent block",
        )
    )  # fmt: skip
    for sinks in (0, 4, 16, 64):
        made.append(Claim(f"128 sinks beat {sinks}", DEFAULT, f"k4v2 unbiased, {sinks} sinks"))
    for step in (
        "rotation", "normalization", "rotation and normalization", "narrow range", "least squares",
        "column refit", "gain", "null mean",
    ):  # fmt: skip
        made.append(Claim(f"leaving out {step} is worse", DEFAULT, f"k4v2 unbiased without {step}"))
    for rounds in (0, 1, 2):
        text = f"4 rounds of the normalization beat {rounds or 'the closed form'}"
        plural = "s" * (rounds != 1)
        made.append(Claim(text, DEFAULT, f"k4v2 unbiased, {rounds} round{plural}"))
    for rounds in (8, 16):
        made.append(Claim(f"{rounds} rounds beat 4", f"k4v2 unbiased, {rounds} rounds", DEFAULT))
    made.append(
        Claim("the paper's fit needs its normalization", "k4v2 minmax", "k4v2 minmax, 0 rounds")
    )
    made.append(
        Claim("16 rounds beat 8 in the paper's fit", "k4v2 minmax, 16 rounds", "k4v2 minmax")
    )
    for name in ("k4v2 naive", "k4v2 minmax", DEFAULT, "k2v2 minmax", "k2v2 unbiased"):
        made.append(Claim(f"{name}: errors feed later ones", f"{name}, exact prefill", name))
    return made


# --------------------------------------------------------------------------------------------------
# Tables


def tables(parts: Parts) -> list[Table]:
    """All tables that the parts suffice for."""
    made = [
        _main(parts), _claims(parts), _positions(parts), _prefill(parts), _generation(parts),
        _attention(parts), _perplexity(parts), _synthetic(parts),
    ]  # fmt: skip
    return [table for table in made if table is not None and table.rows]


def _main(parts: Parts) -> Table:
    known = case_parts(parts)
    rows: list[Sequence[str]] = []
    for name, part in known.items():
        first = first_token(parts, name)
        ratio = kl_ratio(parts, name, DEFAULT)
        rows.append(
            (
                name,
                f"{part['bits']:.2f}",
                f"{part['bits_at']['8192']:.2f}",
                _floored(intervals.mean(kl(parts, name), block=1)),
                intervals.mean(series(part, "top1", first), block=1).text(".3f"),
                "1" if name == DEFAULT else ratio.text(".2f") if ratio else "-",
            )
        )
    return Table(
        "KL divergence of the next-token distribution from that with an exact cache (nats)",
        ("cache", "bits", "bits at 8k", "KL", "top-1 agreement", f"KL / {DEFAULT}"),
        rows,
        caption="Bits: stored for a value, codes and scales; at 8k with the sinks, recent and open "
        "tiles of a\nsequence of 8,192 tokens in 16 bits. From token "
        f"{parts['settings']['settings']['first']} on, where a recent block is kept a tile later\n"
        "(the ratio then over the same tokens of both).",
    )


def _floored(estimate: Estimate) -> str:
    return estimate.map(lambda x: max(x, 0.0)).text(".4f")


def judged(parts: Parts) -> Iterator[tuple[Claim, Estimate, str]]:
    """The claims that the parts can judge."""
    for claim in claims():
        ratio = kl_ratio(parts, claim.name, claim.other)
        if ratio is not None:
            yield claim, ratio, claim.verdict(ratio)


def _claims(parts: Parts) -> Table:
    return Table(
        "What holds, and what does not: KL of one cache over that of another",
        ("claim", "caches", "claimed", "measured", "verdict"),
        [
            (
                claim.text,
                f"{claim.name} / {claim.other}",
                f"< {claim.bound:g}",
                ratio.text(".2f"),
                verdict,
            )
            for claim, ratio, verdict in judged(parts)
        ],
        left=(0, 1, 4),
        caption="The verdict is that of the whole interval: not established where the bound lies "
        "inside it.",
    )


def _spans(parts: Parts) -> list[tuple[int, int]]:
    """Up to four spans of tokens, in whole blocks."""
    settings = parts["settings"]["settings"]
    first, tokens, block = settings["first"], settings["tokens"], settings["block"]
    count = min(4, (tokens - first) // (2 * block))
    bounds = [first + (tokens - first) * i // count // block * block for i in range(count + 1)]
    return list(itertools.pairwise(bounds))


def _positions(parts: Parts) -> Table:
    known, block = case_parts(parts), parts["settings"]["settings"]["block"]
    rows: list[Sequence[str]] = []
    for name, part in known.items():
        if part["family"] == "steps" or " round" in name or "sinks" in name or part["prefill"]:
            continue
        cells = []
        for start, stop in _spans(parts):
            errors = [x[: (stop - start) // block] for x in kl(parts, name, start)]
            cells.append(_floored(intervals.mean(errors, block=1)))
        rows.append((name, *cells))
    return Table(
        "KL by position in the text",
        ("cache", *(f"{start}-{stop - 1}" for start, stop in _spans(parts))),
        rows,
    )


def _prefill(parts: Parts) -> Table:
    rows: list[Sequence[str]] = []
    for name, part in case_parts(parts).items():
        if not part["prefill"]:
            continue
        plain = name.removesuffix(", exact prefill")
        ratio = kl_ratio(parts, plain, name)
        if ratio is not None:
            cells = (_floored(intervals.mean(kl(parts, x), block=1)) for x in (name, plain))
            rows.append((plain, *cells, ratio.text(".2f")))
    return Table(
        "Prefill-like against decode-like: what errors add that feed the cache",
        ("cache", "KL, exact prefill", "KL, decode-like", "decode / prefill"),
        rows,
        caption="Exact prefill: each tile is packed from exact keys and values, as after a prompt "
        "that was read\nat once. Decode-like: keys and values were themselves computed with the "
        "packed cache.",
    )


def _generation(parts: Parts) -> Table | None:
    if "generation" not in parts:
        return None
    steps = parts["generation"]["steps"]
    rows: list[Sequence[str]] = []
    for name, case in parts["generation"]["cases"].items():
        first, same = (torch.tensor(case[key], dtype=torch.float64) for key in ("first", "same"))
        rows.append(
            (
                name,
                intervals.mean([first], block=1).text(".1f"),
                f"{int((first == steps).sum())} of {len(first)}",
                intervals.mean([same], block=1).text(".2f"),
            )
        )
    return Table(
        f"Greedy generation of {steps} tokens",
        ("cache", "steps until it differs", "never differs", "tokens the same"),
        rows,
        caption="Mean over prompts, interval by bootstrap over them. Few prompts, and noisy by "
        "nature: one\nnear-tie decides a text. The 16-bit cache shows how much arithmetic does.",
    )


def _attention(parts: Parts) -> Table | None:
    if not parts.get("attention"):
        return None
    segments = list(parts["attention"].values())
    rows: list[Sequence[str]] = []
    for name in segments[0]:
        if not all(name in segment for segment in segments):
            continue
        errors = [torch.tensor(s[name]["blocks"], dtype=torch.float64) for s in segments]
        heads = torch.tensor([s[name]["heads"] for s in segments]).mean(0)
        worst = int(heads.mean(1).argmax())
        by_layer = [torch.tensor(s[name]["heads"][worst], dtype=torch.float64) for s in segments]
        rows.append(
            (
                name,
                intervals.mean(errors, block=1).text(".4f"),
                f"{worst}: {intervals.mean(by_layer, block=1).text('.4f')}",
            )
        )
    return Table(
        "Squared error of a layer's attention output over its energy",
        ("cache", "mean of layers and heads", "worst layer"),
        rows,
        caption="Exact queries, keys and values; the last 128 tokens ask. Interval: over blocks of "
        "32 queries;\nof a layer: over its heads.",
    )


def _perplexity(parts: Parts) -> Table:
    known = case_parts(parts)
    if (exact := known.get("16-bit cache")) is None:
        return Table("Perplexity", ())
    rows: list[Sequence[str]] = []
    for name, part in known.items():
        if part["family"] == "steps" or part["segments"].keys() != exact["segments"].keys():
            continue
        first = first_token(parts, name)
        own, other = series(part, "nll", first), series(exact, "nll", first)
        change = intervals.difference(own, other, block=1).map(lambda x: 100 * math.expm1(x))
        rows.append(
            (name, intervals.mean(own, block=1).map(math.exp).text(".2f"), change.text("+.2f"))
        )
    return Table(
        "Perplexity, and its change against the 16-bit cache in percent",
        ("cache", "perplexity", "change, %"),
        rows,
        caption="Warning: perplexity ranks caches wrongly at this length. It mixes divergence that "
        "hurts with\ndivergence that happens to help; judge by KL and top-1.",
    )


def _synthetic(parts: Parts) -> Table | None:
    if "synthetic" not in parts:
        return None
    rows: list[Sequence[str]] = []
    for kind, cases in parts["synthetic"].items():
        for name, measures in cases.items():
            cells = (
                Estimate(*measures[m]).text(".3g") if m in measures else "-"
                for m in ("K", "V", "attention", "massive K")
            )
            rows.append((kind, name, *cells))
    return Table(
        f"Made-up tiles, head dimension 128: error over that of {DEFAULT}",
        ("tiles", "encoder", "K", "V", "attention", "massive K"),
        rows,
        left=(0, 1),
        caption="No real keys or values: see kvarn.studies.column_scale for what each kind is. "
        "Massive K: of\nthe massive key tokens themselves; the other columns leave them out.",
    )
