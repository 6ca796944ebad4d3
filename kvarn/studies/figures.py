"""The study's pictures, from its stored parts: PNG and SVG."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from kvarn.studies import intervals, summary
from kvarn.studies.cases import GROUP
from kvarn.studies.intervals import Estimate
from kvarn.studies.style import COLORS, COMPARATOR_COLOR, STYLE
from kvarn.studies.summary import DEFAULT, Parts

_FAMILY_COLORS = dict(
    zip(
        ("unbiased", "minmax", "KIVI-like", "TurboQuant-like", "naive, rotated", "fp8 e4m3"),
        COLORS,
        strict=False,
    )
) | {"naive": COMPARATOR_COLOR, "16 bits": "0.3"}  # fmt: skip
# The same picture gives the same file.
_SVG = {"svg.hashsalt": "kvarn", "svg.fonttype": "none"}
_NOISE = 1e-6  # of fp32 arithmetic

CAPTIONS = {
    "pareto": "Divergence against stored bits, with the sinks, recent and open tiles of 8,192 "
    "tokens. Lower left is better; bars are 95 % intervals of these texts. The same tokens are "
    "behind all points, so that ratios of two are known better than the bars suggest.",
    "position": "Divergence along the text, means of 128 tokens with 95 % intervals; grey lines "
    "are tile boundaries.",
    "choices": "What each choice does to the divergence: left of 1 the first cache is better; bars "
    "are 95 % intervals.",
    "channels": "Root mean square of each channel of the real key and value tile whose largest "
    "channel stands out most, over the mean of all: as the model made it, rotated, and rotated "
    "and normalized. The normalization levels the channels of values; of keys it levels the "
    "tokens, and each channel has a scale of its own.",
    "codes": "How often each code is used in tiles of all layers and heads.",
    "attention": "Squared error of the attention output over its energy, for each layer (mean of "
    "heads), and for each layer and query head with the default cache.",
}


def draw(parts: Parts, folder: Path) -> dict[str, str]:
    """Writes every figure that the parts suffice for as ``<name>.png`` and ``<name>.svg``; returns
    the latter's text."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    with mpl.rc_context({**STYLE, **_SVG}):
        for name, figure in figures(parts).items():
            figure.savefig(folder / f"{name}.png")
            drawn[name] = _svg(figure)
            (folder / f"{name}.svg").write_text(drawn[name], encoding="utf-8")
    return drawn


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def figures(parts: Parts) -> dict[str, Figure]:
    """Every figure that the parts suffice for, by name."""
    makers: dict[str, Callable[[Parts], Figure | None]] = {
        "pareto": _pareto,
        "position": _position,
        "choices": _choices,
        "channels": _channels,
        "codes": _codes,
        "attention": _attention,
    }
    made = {name: maker(parts) for name, maker in makers.items()}
    return {name: figure for name, figure in made.items() if figure is not None}


def _bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Lengths of error bars, down and up."""
    return [[e.value - e.low for e in estimates], [e.high - e.value for e in estimates]]


def _pareto(parts: Parts) -> Figure:
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.subplots()
    for family, color in _FAMILY_COLORS.items():
        points = [
            part
            for part in summary.case_parts(parts).values()
            if part["family"] == family
            and not part["prefill"]
            and " round" not in part["name"]
            and "sinks," not in f"{part['name']},"
        ]
        if not points or family == "16 bits":
            continue
        x = [part["bits_at"]["8192"] for part in points]
        y = [intervals.mean(summary.kl(parts, part["name"]), block=1) for part in points]
        axes.errorbar(
            x, [e.value for e in y], yerr=_bars(y), fmt="o", color=color, capsize=2, markersize=5,
            label=family,
        )  # fmt: skip
        for part, at, e in zip(points, x, y, strict=True):
            recent = f" +{part['recent_blocks']}" if part["recent_blocks"] else ""
            bits = part["name"].split(" ")[0] if family != "fp8 e4m3" else "e4m3"
            axes.annotate(
                bits + recent, (at, e.value), xytext=(5, 3), textcoords="offset points",
                color=color, fontsize=8,
            )  # fmt: skip
    axes.set(
        yscale="log",
        xlabel="stored bits a value at 8,192 tokens (k4v2 +1: a recent block in 16 bits)",
        ylabel="KL divergence (nats)",
        title="Accuracy against stored bits",
    )
    axes.legend(loc="upper right", fontsize=9)
    return figure


_IN_POSITION = (
    "k2v2 naive", "k2v2 minmax", "k2v2 unbiased", "k4v2 naive", "k4v2 TurboQuant-like",
    "k4v2 KIVI-like", "k4v2 minmax", DEFAULT, "k4v2 unbiased, 1 recent block", "k4v4 unbiased",
    "fp8 e4m3",
)  # fmt: skip


def _position(parts: Parts) -> Figure:
    settings = parts["settings"]["settings"]
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.subplots()
    known, span = summary.case_parts(parts), GROUP // settings["block"]
    shown = [name for name in _IN_POSITION if name in known]
    for number, name in enumerate(shown):
        starts = range(settings["first"], settings["tokens"] - GROUP + 1, GROUP)
        means = [
            intervals.mean([x[:span] for x in summary.kl(parts, name, start)], block=1)
            for start in starts
        ]
        # Nothing packed has been read yet where a recent block is kept.
        kept = [(s + GROUP / 2, e) for s, e in zip(starts, means, strict=True) if e.value > _NOISE]
        if not kept:
            continue
        x, y = [at for at, _ in kept], [e for _, e in kept]
        axes.errorbar(
            x, [e.value for e in y], yerr=_bars(y), color=COLORS[number % len(COLORS)],
            linestyle="--" if known[name]["family"] not in ("unbiased", "minmax") else "-",
            marker="." if number < len(COLORS) else "s", markersize=4, capsize=1.5,
            elinewidth=0.8, label=name,
        )  # fmt: skip
    for boundary in range(settings["first"], settings["tokens"] + 1, GROUP):
        axes.axvline(boundary, color="0.9", linewidth=0.8, zorder=0)
    axes.set(
        yscale="log",
        xlabel="position in the text",
        ylabel="KL divergence (nats)",
        title="Error by position",
    )
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=4, fontsize=8)
    return figure


def _choices(parts: Parts) -> Figure | None:
    judged = list(summary.judged(parts))
    if not judged:
        return None
    figure = Figure(figsize=(9, 1 + 0.24 * len(judged)), layout="constrained")
    axes = figure.subplots()
    colors = {"holds": COLORS[2], "does not hold": COLORS[1], "not established": "0.5"}
    for row, (claim, ratio, verdict) in enumerate(judged):
        axes.errorbar(
            [ratio.value], [row], xerr=_bars([ratio]), fmt="o", color=colors[verdict], capsize=2,
            markersize=4,
        )  # fmt: skip
        axes.plot([claim.bound], [row], marker="|", color="black", markersize=8)
    axes.axvline(1, color="black", linewidth=0.8, zorder=0)
    axes.set(
        xscale="log",
        xlabel="KL of the first cache over that of the second (tick: what is claimed)",
        ylim=(-0.8, len(judged) - 0.2),
        yticks=range(len(judged)),
        yticklabels=[claim.text for claim, _, _ in judged],
        title="Claims: green holds, orange does not, grey is not established",
    )
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.tick_params(axis="y", labelsize=8)
    axes.invert_yaxis()
    return figure


def _channels(parts: Parts) -> Figure | None:
    tiles = parts.get("tiles")
    if tiles is None:
        return None
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    grid = figure.subplots(2, 3, sharey="row")
    stages = {"plain": "as it was", "rotated": "rotated", "normalized": "and normalized"}
    for row, name in enumerate(("key", "value")):
        for column, (stage, label) in enumerate(stages.items()):
            size = torch.tensor(tiles[name]["channels"][stage])
            relative = size / size.mean()
            axes = grid[row, column]
            axes.bar(range(len(size)), relative.tolist(), color=COLORS[row])
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set(xlabel="channel", title=f"{label}: largest {relative.max():.1f}x the mean")
        where = f"layer {tiles[name]['layer']}, head {tiles[name]['head']}"
        grid[row, 0].set_ylabel(f"{name}s, {where}\nrms / mean of them")
    return figure


def _codes(parts: Parts) -> Figure | None:
    tiles = parts.get("tiles")
    if tiles is None:
        return None
    figure = Figure(figsize=(9, 3), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("key", "value"), strict=True):
        codes = tiles[name]["codes"]
        for number, (fit, share) in enumerate(codes.items()):
            at = [code + 0.4 * (number - 0.5) for code in range(len(share))]
            axes.bar(at, share, width=0.4, label=fit, color=COLORS[1 - number])
        axes.set(title=f"codes of {name}s", xlabel="code", ylabel="share", xticks=range(len(share)))
        axes.legend()
    return figure


def _attention(parts: Parts) -> Figure | None:
    if not parts.get("attention"):
        return None
    segments = list(parts["attention"].values())
    heads = {
        name: torch.tensor([segment[name]["heads"] for segment in segments]).mean(0)
        for name in segments[0]
        if all(name in segment for segment in segments)
    }
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for number, name in enumerate(name for name in _IN_POSITION if name in heads):
        left.plot(
            heads[name].mean(1).tolist(), label=name, marker=".",
            color=COLORS[number % len(COLORS)], linestyle="-" if number < len(COLORS) else "--",
        )  # fmt: skip
    left.set(yscale="log", xlabel="layer", ylabel="error / energy", title="Mean of heads")
    left.legend(loc="upper left", bbox_to_anchor=(0, -0.14), ncols=3, fontsize=8)
    if DEFAULT in heads:
        image = right.imshow(
            heads[DEFAULT].log10().T.numpy(), aspect="auto", cmap="magma_r", interpolation="nearest"
        )
        right.set(xlabel="layer", ylabel="query head", title=DEFAULT)
        figure.colorbar(image, ax=right, label="log10 of error / energy")
    return figure
