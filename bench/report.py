"""``python -m bench.report``: tables and figures for README.md and docs, from the JSON alone.

Text between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->`` is replaced, and the figures in
docs/figures are drawn. NAME is one of

- performance: README's section,
- scaling: the model of a decode step beside measurements,
- earlier-peers: peers of another run on the H200,
- serving: whole decode steps (bench.serving); vllm: a vLLM engine (bench.vllm),
- a folder of bench/results.

With ``--check`` nothing is written and a stale text is an error.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import record, vllm_report
from bench.tables import (
    Row,
    ceiling_us,
    cells,
    heading,
    markdown,
    parameters,
    peer_names,
    ratio_text,
    share_text,
    split_keys,
    time_text,
)
from kvarn import Format, scaling

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Run = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args(argv)
    stale = []
    for path in (ROOT / "README.md", *(ROOT / "docs" / f"{n}.md" for n in ("benchmarks", "vllm"))):
        text = path.read_text()
        new = fill(text, record.RESULTS, FIGURES.relative_to(path.parent).as_posix())
        if new != text:
            stale.append(path.name)
            if not args.check:
                path.write_text(new)
    if stale:
        print(("stale: " if args.check else "written: ") + ", ".join(stale))
    if not args.check:
        for name in draw(record.RESULTS, FIGURES):
            print(f"drawn: {name}")
    return 1 if stale and args.check else 0


def fill(text: str, results: Path, figures: str) -> str:
    """The text with what stands between its markers made anew.

    Args:
        results: the folder of folders of JSON.
        figures: where the figures are, seen from the document.
    """

    def section(match: re.Match[str]) -> str:
        if match[2] == "performance":
            made = performance(results, figures)
        elif match[2] == "scaling":
            made = scaling_table(results / "h200")
        elif match[2] == "earlier-peers":
            made = earlier_peers(results / "h200")
        elif match[2] == "serving":
            made = serving_tables(results / "h200" / "serving" / "steps.json")
        elif match[2] == "vllm":
            made = vllm_report.table(*_vllm(results), figures)
        else:
            made = everything(results / match[2], figures)
        return match[1] + made + match[3]

    marked = r"(<!-- bench:(\S+) -->\n).*?(<!-- /bench:\2 -->)"
    return re.sub(marked, section, text, flags=re.DOTALL)


def _vllm(results: Path) -> tuple[Path, Path]:
    """What engines did, and the study that says how exact their caches are."""
    return results / "h200" / "vllm" / "engine.json", ROOT / "docs" / "accuracy" / "study.json"


def runs(folder: Path) -> dict[str, Run]:
    """By op."""
    return {path.stem: record.load(path) for path in sorted(folder.glob("*.json"))}


def machines(results: Path) -> list[Path]:
    """Folders with results, GPUs first."""
    found = [folder for folder in results.iterdir() if runs(folder)]
    return sorted(found, key=lambda folder: (folder.name.startswith("cpu"), folder.name))


# --------------------------------------------------------------------------------------------------
# Text


def everything(folder: Path, figures: str) -> str:
    """All results of one machine as Markdown."""
    parts = [
        f"**{heading(op, split_keys(run['rows'])[0])}** on {where(run)}{other_commits(run)}\n\n"
        f"{table(run['rows'])}"
        for op, run in runs(folder).items()
    ]
    return "\n".join([*parts, *images(folder, figures, list(FIGURE_TITLES))])


def performance(results: Path, figures: str) -> str:
    """README's section: the attention step and the transform of each machine, in short."""
    parts = []
    for folder in machines(results):
        for op, run in runs(folder).items():
            rows = [row for row in run["rows"] if op in HEADLINES and HEADLINES[op](row)]
            if rows:
                title = f"**{heading(op, split_keys(rows)[0])}** on {where(run)}"
                parts.append(f"{title}\n\n{table(rows, short=True)}")
        if not folder.name.startswith("cpu"):
            parts += images(folder, figures, ("share", "speedup"))
    return "\n".join(parts)


def _plain_decode(row: Row) -> bool:
    case = row["case"]
    return (
        row["format"] == Format.presets()[0]
        and case["group_size"] == 4
        and case["head_dim"] == 128
        and case["query_tokens"] == 1
        and not {"split_tokens", "kv_heads", "staged_tiles"} & set(case)
    )


#: The rows of an op that README shows.
HEADLINES: dict[str, Callable[[Row], bool]] = {
    "decode_attention": _plain_decode,
    "hadamard_transform": lambda row: not row["case"]["in_place"],
    "quantize_tiles": lambda row: (
        (row["case"]["fit"], row["case"]["iterations"]) in (("unbiased", 4), ("minmax", 8))
    ),
}


def where(run: Run) -> str:
    if "gpu" in run:
        machine = f"{run['gpu']} (driver {run['driver']}, CUDA {run['cuda']})"
    else:
        machine = f"{run['cpu']}, {run['threads']} threads, {run['isa']}"
    return f"{machine}, torch {run['torch']}, {run['date']}, commit {run['commit']}"


def other_commits(run: Run) -> str:
    """Rows that say so were measured with another commit than the file's."""
    formats: dict[str, dict[str, None]] = {}
    for row in run["rows"]:
        if "commit" in row:
            formats.setdefault(row["commit"], {})[row["format"]] = None
    return "".join(f"; {', '.join(names)}: commit {commit}" for commit, names in formats.items())


def table(rows: Sequence[Row], *, short: bool = False) -> str:
    """Rows of one op. Peers: their time and in brackets its ratio to ours; short: only that."""
    _, keys = split_keys(rows)
    peers = peer_names(rows)
    kinds = [kind for kind in ("read", "copy") if any(f"{kind}_us" in row for row in rows)]
    head = [
        *keys, "time", *([] if short else ["p10-p90"]), "GB/s",
        *(f"of a plain {kind}" for kind in kinds), *peers,
    ]  # fmt: skip

    def line(row: Row) -> list[str]:
        spread = f"{time_text(row['p10_us'])}-{time_text(row['p90_us'])}"
        return [
            *cells(row, keys),
            f"**{time_text(row['time_us'])}**",
            *([] if short else [spread]),
            f"{row['gbps']:,.1f}",
            *(share_text(row) for _ in kinds),
            *(
                ratio_text(row, peer)
                if short or not row["peers"].get(peer)
                else f"{time_text(row['peers'][peer])} ({ratio_text(row, peer)})"
                for peer in peers
            ),
        ]

    return markdown(head, [line(row) for row in rows])


def scaling_table(folder: Path) -> str:
    """The attention part of the scaling model beside the measured shapes of models, to which it was
    not fitted."""
    gpu = scaling.GPUS["h200"]
    rates = scaling.measured_rates(folder)
    run = runs(folder).get("decode_attention")
    lines = []
    for row in run["rows"] if run else []:
        if "kv_heads" in row["case"] and row["format"] in rates:
            predicted = rates[row["format"]].call_us(row["bytes"], gpu)
            lines.append(
                [
                    row["format"],
                    *(
                        str(row["case"][key])
                        for key in ("kv_heads", "group_size", "batch", "context")
                    ),
                    time_text(row["time_us"]),
                    time_text(predicted),
                    f"{predicted / row['time_us'] - 1:+.0%}",
                ]
            )
    fitted = [f"- {name}: {rate}\n" for name, rate in rates.items() if rate.measured]
    if not lines:
        return "".join([*fitted, "\nThe shapes of models have not been recorded yet.\n"])
    head = ("format", "KV heads", "group", "batch", "context", "measured", "model", "difference")
    return "".join([*fitted, "\n", markdown(head, lines)])


def serving_tables(path: Path) -> str:
    """Whole decode steps (bench.serving): a layer, a model; and what fits into the memory."""
    if not path.exists():
        return "Not recorded yet.\n"
    run = record.load(path)
    note = f" {run['note']}" if "note" in run else ""
    parts = [f"{where(run)}; format {run['rows'][0]['format']}.{note}\n"]
    for what, title, keys in (
        ("attention", "A layer: update of the cache and attention", ("batch", "context", "seals")),
        ("model", "A model of Qwen3-8B's layers", ("batch", "context", "layers")),
    ):
        rows = [row for row in run["rows"] if row["case"]["what"] == what]
        if not rows:
            continue
        rows.sort(key=lambda row: [row["case"][key] for key in keys])
        peers = peer_names(rows)
        lines = [
            [
                *(str(row["case"][key]) for key in keys),
                f"**{time_text(row['time_us'])}**",
                *([f"{row['tokens_per_s']:,.0f}"] if what == "model" else []),
                *(_peer_step(row, peer) for peer in peers),
            ]
            for row in rows
        ]
        head = (*keys, "step", *(["tokens/s"] if what == "model" else []), *peers)
        parts.append(f"**{title}**\n\n{markdown(head, lines)}")
    rows = [row for row in run["rows"] if row["case"]["what"] == "capacity"]
    if rows:
        head = ("layers", "context", "free memory", "sequences", "predicted", "in 16 bits", "ratio")
        lines = [
            [
                str(row["case"]["layers"]),
                str(row["case"]["context"]),
                f"{row['memory_bytes'] / 2**30:.1f} GiB",
                f"**{row['batch']}**",
                str(row["predicted"]),
                str(row["batch_16bit"]),
                f"{row['batch'] / row['batch_16bit']:.2f}",
            ]
            for row in rows
        ]
        parts.append(f"**The largest batch that fits**\n\n{markdown(head, lines)}")
    return "\n".join(parts)


def _peer_step(row: dict[str, Any], peer: str) -> str:
    if row["peers"].get(peer):
        return f"{time_text(row['peers'][peer])} ({ratio_text(row, peer)})"
    return "out of memory" if "out of memory" in row.get("skipped", {}).get(peer, "") else ""


def earlier_peers(folder: Path) -> str:
    """Peers that were timed in another run, for machines where they cannot be installed; in
    brackets their time over that of decode_attention now, where it was recorded."""
    run = record.load(folder / "earlier" / "decode_attention_peers.json")
    now = runs(folder).get("decode_attention", {"rows": []})["rows"]
    ours = {
        (row["case"]["batch"], row["case"]["context"]): row["time_us"]
        for row in now
        if _plain_decode(row)
    }
    peers = peer_names(run["rows"])
    lines = []
    for row in run["rows"]:
        case = (row["case"]["batch"], row["case"]["context"])
        times = [
            time_text(us) + (f" ({us / ours[case]:.2f}x)" if case in ours else "")
            for us in row["peers"].values()
        ]
        lines.append([*map(str, case), time_text(row["read_us"]), *times])
    head = ("batch", "context", "plain read of the packed bytes", *peers)
    return f"{run['gpu']}. {run['note']}\n\n{markdown(head, lines)}"


def images(folder: Path, figures: str, names: Sequence[str]) -> list[str]:
    """Links to those figures for which there are results."""
    found = runs(folder)
    return [
        f"![{FIGURE_TITLES[name]} ({folder.name})]({figures}/{folder.name}-{name}.svg)\n"
        for name in names
        if PLOTS[name](found) is not None
    ]


# --------------------------------------------------------------------------------------------------
# Figures: each function looks for its data and returns what draws it, or None.

Plot = Callable[["Axes"], None]


def _attention_rows(found: dict[str, Run]) -> list[Row]:
    return found["decode_attention"]["rows"] if "decode_attention" in found else []


def share_plot(found: dict[str, Run]) -> Plot | None:
    """Share of the ceiling by case."""
    rows = [row for row in _attention_rows(found) if _plain_decode(row) and ceiling_us(row)]
    if not rows:
        return None
    _, keys = split_keys(rows)

    def plot(axes: Axes) -> None:
        labels = [
            ", ".join(f"{k} {v}" for k, v in parameters(r).items() if k in keys) for r in rows
        ]
        shares = [100 * ceiling_us(row) / row["time_us"] for row in rows]  # type: ignore[operator]
        bars = axes.barh(labels[::-1], shares[::-1], color="#4477aa")
        axes.bar_label(bars, fmt="%.0f %%", padding=2)
        axes.set_xlim(0, 110)
        axes.set_xlabel("% of the rate of a plain read of the same bytes")

    return plot


def speedup_plot(found: dict[str, Run]) -> Plot | None:
    """Speed-up over the peers by context."""
    rows = [
        row
        for row in _attention_rows(found)
        if _plain_decode(row) and isinstance(row["case"]["context"], int)
    ]
    peers = peer_names(rows)
    if not peers:
        return None

    def plot(axes: Axes) -> None:
        for marker, peer in zip("osD^vP*X<>", peers, strict=False):
            mine = [row for row in rows if peer in row["peers"]]
            x = [row["case"]["context"] for row in mine]
            y = [row["peers"][peer] / row["time_us"] for row in mine]
            axes.plot(x, y, marker, label=peer, alpha=0.8)
        for row in rows:
            if row["peers"]:
                highest = max(row["peers"].values()) / row["time_us"]
                at = (row["case"]["context"], highest)
                axes.annotate(
                    f"batch {row['case']['batch']}", at, xytext=(0, 6),
                    textcoords="offset points", ha="center", fontsize=7,
                )  # fmt: skip
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("time of the peer / time of kvarn")
        axes.legend(fontsize=8)

    return plot


def query_tokens_plot(found: dict[str, Run]) -> Plot | None:
    """Cost by number of query tokens."""
    lines: dict[str, dict[int, float]] = {}
    for row in _attention_rows(found):
        case = row["case"]
        if row["format"] == Format.presets()[0] and not {
            "split_tokens",
            "kv_heads",
            "staged_tiles",
        } & set(case):
            rest = f"batch {case['batch']}, context {case['context']}, group {case['group_size']}"
            if case["head_dim"] == 128:
                lines.setdefault(rest, {})[case["query_tokens"]] = row["time_us"]
    lines = {label: times for label, times in lines.items() if len(times) > 1 and 1 in times}
    if not lines:
        return None

    def plot(axes: Axes) -> None:
        for label, times in lines.items():
            counts = sorted(times)
            axes.plot(counts, [times[n] / times[1] for n in counts], "o-", label=label)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("query tokens of a sequence")
        axes.set_ylabel("time / time of one query token")
        axes.legend(fontsize=8)

    return plot


def iterations_plot(found: dict[str, Run]) -> Plot | None:
    """Cost of quantization by iterations."""
    rows = found["quantize_tiles"]["rows"] if "quantize_tiles" in found else []
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        case = row["case"]
        if row["format"] == Format.presets()[0]:
            label = f"{case['fit']}, {case['records']} records"
            lines.setdefault(label, {})[case["iterations"]] = row["time_us"] / case["records"]
    lines = {label: times for label, times in lines.items() if len(times) > 1}
    if not lines:
        return None

    def plot(axes: Axes) -> None:
        for label, times in lines.items():
            counts = sorted(times)
            axes.plot(counts, [times[n] for n in counts], "o-", label=label)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("iterations of the variance normalization")
        axes.set_ylabel("us per record")
        axes.legend(fontsize=8)

    return plot


def roofline_plot(found: dict[str, Run]) -> Plot | None:
    """Roofline of decode_attention."""
    rows = [row for row in _attention_rows(found) if "flops" in row]
    gbps = found["decode_attention"].get("ceiling_gbps") if rows else None
    if not rows or not gbps:
        return None
    peak = next(
        (gpu.flops / 1e9 for name, gpu in scaling.GPUS.items()
         if name in found["decode_attention"].get("gpu", "").lower()), None,
    )  # fmt: skip

    def plot(axes: Axes) -> None:
        intensity = [row["flops"] / row["bytes"] for row in rows]
        axes.plot(intensity, [r["flops"] / r["time_us"] / 1e3 for r in rows], "o", color="#4477aa",
                  label="decode_attention")  # fmt: skip
        ends = [min(intensity) / 2, max(intensity) * 4]
        axes.plot(ends, [gbps * x for x in ends], color="black", linewidth=0.8,
                  label=f"plain read, {gbps:,.0f} GB/s (measured)")  # fmt: skip
        if peak:
            label = f"16-bit matrix products, {peak / 1e3:,.0f} TFLOP/s (datasheet)"
            axes.axhline(peak, color="gray", linewidth=0.8, linestyle="--", label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("operations per byte of the packed cache")
        axes.set_ylabel("GFLOP/s")
        axes.legend(fontsize=8)

    return plot


PLOTS: dict[str, Callable[[dict[str, Run]], Plot | None]] = {
    "share": share_plot,
    "speedup": speedup_plot,
    "query-tokens": query_tokens_plot,
    "iterations": iterations_plot,
    "roofline": roofline_plot,
}
FIGURE_TITLES = {name: str(plot.__doc__).strip(".") for name, plot in PLOTS.items()}


def draw(results: Path, out: Path) -> list[str]:
    """Writes the figures of all machines as SVG; returns their names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # The same data, the same file.
    matplotlib.rcParams["svg.hashsalt"] = "kvarn"
    drawn = []
    for folder in machines(results):
        found = runs(folder)
        for name, find in PLOTS.items():
            plot = find(found)
            if plot is None:
                continue
            figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
            plot(axes)
            run = next(iter(found.values()))
            axes.set_title(f"{FIGURE_TITLES[name]}\n{run.get('gpu') or run['cpu']}", fontsize=10)
            out.mkdir(parents=True, exist_ok=True)
            path = out / f"{folder.name}-{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)
            drawn.append(path.name)
    drawn += vllm_report.draw(*_vllm(results), out)
    return drawn


if __name__ == "__main__":
    sys.exit(main())
