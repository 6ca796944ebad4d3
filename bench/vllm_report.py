"""Table and figure of recorded vLLM engines (bench.vllm), with what a cache costs in accuracy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from bench import record
from bench.tables import Row, markdown
from kvarn import Format

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE, TITLE = "h200-vllm.svg", "A vLLM engine, Qwen3-8B's shape"
_HEAD = (
    "requests x prompt", "cache", "decoding", "tokens/s", "ms a step", "median", "steps", "prompts",
    "room, tokens", "KL",
)  # fmt: skip
#: What was aimed at: the least ratio to the cache in float16, by load; None: of the room.
AIMED, AIMS = "kvarn_k4v2_g128", {(64, 8192): 2.0, (16, 16384): 1.6, (256, 8192): 3.0, None: 4.3}
_COLORS = ("#bbbbbb", "#777777", "#ee6677", "#ccbb44", "#4477aa", "#228833", "#aa3377", "#66ccee")


Load = tuple[int, int]  #: requests, tokens of each prompt


@dataclass
class Engine:
    """A cache dtype of an engine.

    Attributes:
        name: the cache dtype, and that of the model if it is not float16; only that of the model,
            if the cache has it.
        kl: of the next-token distribution, in nats; None: not measured.
        loads: the rows of each load: one a run.
    """

    name: str
    kl: float | None
    loads: dict[Load, list[Row]] = field(default_factory=dict)

    @property
    def kv_tokens(self) -> float:
        return mean(row["kv_tokens"] for rows in self.loads.values() for row in rows)

    def rate(self, load: Load) -> float:
        """Tokens a second, the mean of the runs."""
        return mean(row["tokens_per_s"] for row in self.loads[load])


def engines(rows: Sequence[Row], study: Path) -> list[Engine]:
    """By name, 16-bit caches first, then by the tokens that fit."""
    found: dict[str, Engine] = {}
    for row in rows:
        case = row["case"]
        plain = case["cache"] == "auto"
        name = case["dtype"] if plain else case["cache"]
        if not plain and case["dtype"] != "float16":
            name += f" (model in {case['dtype']})"
        if name not in found:
            found[name] = Engine(name, 0.0 if plain else divergence(case["cache"], study))
        load = (case["batch"], case["prompt"])
        found[name].loads.setdefault(load, []).append(row)
    order = list(found)
    return sorted(found.values(), key=lambda e: (e.kl != 0.0, e.kv_tokens, order.index(e.name)))


def divergence(cache: str, study: Path) -> float | None:
    """KL of the next-token distribution with a cache from that with an exact one, as the study of
    docs/accuracy.md has it; None for caches that are not in it."""
    from kvarn.studies import summary

    name = "fp8 e4m3" if cache.startswith("fp8") else None
    if cache in Format.presets() and cache.endswith("_g128"):
        name = f"{cache.split('_')[1]} unbiased"
    if name is None or not study.exists():
        return None
    parts = json.loads(study.read_text())
    if name not in summary.case_parts(parts):
        return None
    return mean(value for blocks in summary.kl(parts, name) for value in blocks.tolist())


def table(path: Path, study: Path, figures: str) -> str:
    """One line a load and cache; ratios are to the cache in float16."""
    if not path.exists():
        return "Not recorded yet.\n"
    run = record.load(path)
    found = engines(run["rows"], study)
    base = next((engine for engine in found if engine.name == "float16"), None)
    loads = list(dict.fromkeys(load for engine in found for load in engine.loads))
    lines = [
        _line(load, engine, base)
        for load in sorted(loads, key=lambda load: (load[0] * load[1], load[1]))
        for engine in found
        if load in engine.loads
    ]
    origin = (
        f"vLLM {run['vllm']}, {run['gpu']}, torch {run['torch']}, {run['date']}, "
        f"commit {run['commit']}.{_of_other_commits(found)} {run.get('note', '')}".rstrip()
    )
    judged = "\n".join(f"- {line}" for line in aims(found))
    return (
        f"{markdown(_HEAD, lines)}\nSteps: those that were measured, of each run; the figures are "
        f"means of the runs.\n\n![{TITLE}]({figures}/{FIGURE})\n\n"
        f"Aims for {AIMED}, in tokens per second and room of float16's:\n\n{judged}\n\n{origin}\n"
    )


def aims(found: Sequence[Engine]) -> list[str]:
    """What was aimed at, and what came of it."""
    by_name = {engine.name: engine for engine in found}
    own, base = by_name.get(AIMED), by_name.get("float16")
    lines = []
    for load, least in AIMS.items():
        what = "room" if load is None else f"{load[0]} x {load[1]}"
        ratio = None
        if own is not None and base is not None:
            if load is None:
                ratio = own.kv_tokens / base.kv_tokens
            elif load in own.loads and load in base.loads:
                ratio = own.rate(load) / base.rate(load)
        verdict = "not measured"
        if ratio is not None:
            verdict = f"{ratio:.2f}x, {'met' if ratio >= least else 'missed'}"
        lines.append(f"{what}: at least {least:.1f}x; {verdict}")
    return lines


def _of_other_commits(found: Sequence[Engine]) -> str:
    """Rows that say so were measured with another commit than the file's."""
    others: dict[str, list[str]] = {}
    for engine in found:
        for (batch, prompt), rows in engine.loads.items():
            for commit in {row["commit"]: None for row in rows if "commit" in row}:
                runs = sum(row.get("commit") == commit for row in rows)
                what = f"{engine.name} at {batch} x {prompt} ({runs} of {len(rows)})"
                others.setdefault(commit, []).append(what)
    return "".join(
        f" Runs of commit {commit}: {', '.join(what)}." for commit, what in others.items()
    )


def _line(load: Load, engine: Engine, base: Engine | None) -> list[str]:
    rows = engine.loads[load]

    def average(key: str) -> float:
        return mean(row[key] for row in rows)

    def ratio(own: float, other: float) -> str:
        return "" if engine is base else f" ({own / other:.2f}x)"

    rates = [row["tokens_per_s"] for row in rows]
    rate = f"**{mean(rates):,.0f}**"
    room = f"{average('kv_tokens'):,.0f}"
    if base is not None:
        room += ratio(engine.kv_tokens, base.kv_tokens)
        if load in base.loads:
            rate += ratio(mean(rates), base.rate(load))
    if len(rows) > 1:
        rate += f", {min(rates):,.0f}-{max(rates):,.0f}"
    return [
        f"{load[0]} x {load[1]}",
        engine.name,
        f"{mean(row.get('decoding', load[0]) for row in rows):.0f}",
        rate,
        f"{average('ms_per_step'):.2f}",
        f"{average('median_step_ms'):.2f}",
        ", ".join(str(row["steps"]) for row in rows),
        f"{average('prefill_s'):.2f} s",
        room,
        "" if engine.kl is None else f"{engine.kl:.4f}" if engine.kl else "0",
    ]


def draw(path: Path, study: Path, out: Path) -> list[str]:
    """Writes the figure, if there are results; returns its name."""
    if not path.exists():
        return []
    from matplotlib import pyplot

    run = record.load(path)
    found = engines(run["rows"], study)
    figure, (bars, points) = pyplot.subplots(
        1, 2, figsize=(10, 4), layout="constrained", width_ratios=(3, 2)
    )
    colors = {engine.name: _COLORS[i % len(_COLORS)] for i, engine in enumerate(found)}
    _draw_rates(found, colors, bars)
    _draw_together(found, colors, points)
    figure.suptitle(f"{TITLE} ({run['gpu']})", fontsize=10)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / FIGURE, metadata={"Date": None})
    pyplot.close(figure)
    return [FIGURE]


def _draw_rates(found: Sequence[Engine], colors: dict[str, str], axes: Axes) -> None:
    loads = sorted(
        dict.fromkeys(load for engine in found for load in engine.loads),
        key=lambda load: (load[0] * load[1], load[1]),
    )
    width = 0.8 / len(found)
    for i, engine in enumerate(found):
        at = [loads.index(load) + i * width for load in engine.loads]
        heights = [engine.rate(load) for load in engine.loads]
        drawn = axes.bar(at, heights, width, label=engine.name, color=colors[engine.name])
        axes.bar_label(drawn, fmt="{:,.0f}", fontsize=7, rotation=90, padding=2)
    middle = [i + width * (len(found) - 1) / 2 for i in range(len(loads))]
    axes.set_xticks(middle, [f"{batch} x {prompt}" for batch, prompt in loads])
    axes.margins(y=0.15)
    axes.set_xlabel("requests x prompt")
    axes.set_ylabel("tokens per second")
    axes.legend(fontsize=8)


def _draw_together(found: Sequence[Engine], colors: dict[str, str], axes: Axes) -> None:
    """What fits, how fast, how exact: of the load that most engines have."""
    counts: dict[Load, int] = {}
    for engine in found:
        for load in engine.loads:
            counts[load] = counts.get(load, 0) + 1
    shared = max(counts, key=lambda load: counts[load])
    shown = [engine for engine in found if shared in engine.loads]
    for i, engine in enumerate(shown):
        at = (engine.kv_tokens / 1e6, engine.rate(shared))
        axes.plot(*at, "o", color=colors[engine.name], markersize=9)
        note = "" if engine.kl is None else f"\nKL {engine.kl:.4f}" if engine.kl else "\nKL 0"
        above = not (i and engine.kl == 0)  # two 16-bit caches are in the same place
        axes.annotate(
            engine.name.removeprefix("kvarn_").removesuffix("_g128") + note, at,
            xytext=(0, 8 if above else -28), textcoords="offset points", ha="center", fontsize=8,
        )  # fmt: skip
    axes.set_xlim(0, 1.15 * max(engine.kv_tokens for engine in shown) / 1e6)
    axes.set_ylim(0, 1.2 * max(engine.rate(shared) for engine in shown))
    axes.set_xlabel("million tokens that fit")
    axes.set_ylabel(f"tokens per second, {shared[0]} x {shared[1]}")
