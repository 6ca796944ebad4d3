"""``python -m kvarn.studies.document``: docs/accuracy.md from recorded studies.

    python -m kvarn.studies.document study-output/study.json    records it, and writes the page
    python -m kvarn.studies.document --as NAME OTHER.json        records it as another study
    python -m kvarn.studies.document --check                     says whether the page is up to date

What is recorded lies in docs/accuracy/NAME.json; in the page the text between
``<!-- NAME:BLOCK -->`` and ``<!-- /NAME:BLOCK -->`` is replaced. For a checkout of the repository.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvarn._terminal import Table
from kvarn.studies import figures, results, summary
from kvarn.studies.intervals import Estimate
from kvarn.studies.summary import Parts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "accuracy.md"
FOLDER = PAGE.with_suffix("")
FIGURES = ("pareto", "position", "choices", "channels", "attention")
MAIN = "study"
_BLOCK = re.compile(r"(<!-- (study\S*):(\S+) -->\n).*?(<!-- /\2:\3 -->)", re.DOTALL)
_VARIANT = re.compile(r"^k4v2 unbiased(, .*(rounds?|sinks|recent blocks?))?$")
_SYNTHETIC = (
    "k4v2 unbiased, 0 rounds", "k4v2 unbiased, 2 rounds", "k4v2 minmax", "k4v2 naive, rotated",
    "k4v2 KIVI-like", "k4v2 TurboQuant-like",
)  # fmt: skip
# Rounding over a range is exact for a token that is the same in every channel, as these are.
_MASSIVE = tuple(n for n in _SYNTHETIC if "naive" not in n and "KIVI" not in n)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or checks the page; exit status 1 if it is not what the recorded study gives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path, nargs="?", help="study.json of a run, to be recorded")
    parser.add_argument("--as", dest="name", default=MAIN, help="its name (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    if args.study is not None and not args.check:
        record(json.loads(args.study.read_text()), args.name)
    studies = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
    old = PAGE.read_text(encoding="utf-8")
    new = fill(old, studies)
    if args.check:
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


def record(parts: Parts, name: str) -> None:
    """Stores a study, and the figures of the main one."""
    FOLDER.mkdir(exist_ok=True)
    results.write(FOLDER / f"{name}.json", parts)
    if name == MAIN:
        with tempfile.TemporaryDirectory() as scratch:
            figures.draw(parts, Path(scratch))
            for figure in FIGURES:
                shutil.copy(Path(scratch) / f"{figure}.svg", FOLDER / f"{figure}.svg")


def fill(page: str, studies: Mapping[str, Parts]) -> str:
    """The page with its marked blocks made anew."""
    texts = {name: blocks(parts) for name, parts in studies.items()}
    return _BLOCK.sub(lambda m: f"{m[1]}{texts[m[2]][m[3]]}\n{m[4]}", page)


def blocks(parts: Parts) -> dict[str, str]:
    """Markdown of every block by name."""
    names = {
        "KL divergence": "predictions",
        "KL by position": "position",
        "Prefill-like": "prefill",
        "Greedy generation": "generation",
        "Squared error": "attention",
        "Perplexity": "perplexity",
    }
    made = {
        name: markdown(table)
        for table in summary.tables(parts)
        for start, name in names.items()
        if table.title.startswith(start)
    }
    main_table = summary.tables(parts)[0]
    made["variants"] = markdown(
        Table("", main_table.columns, [r for r in main_table.rows if _VARIANT.search(r[0])])
    )
    found = parts["settings"]["facts"]
    made["title"] = f"{summary.title(parts)}; torch {found['torch']}, {found['date']}."
    for verdict in ("holds", "does not hold", "not established"):
        made[verdict.replace(" ", "-")] = _claims(parts, verdict)
    made["claims"] = _claims(parts)
    if "synthetic" in parts:
        made["synthetic"] = _synthetic(parts, "attention")
        made["synthetic-keys"] = _synthetic(parts, "K")
        made["massive"] = _synthetic(parts, "massive K", _MASSIVE)
    return made


def markdown(table: Table) -> str:
    """A table without its title."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    rule = ["---" if i in table.left else "---:" for i in range(len(table.columns))]
    note = [f"\n{' '.join(table.caption.split())}"] if table.caption else []
    return "\n".join([line(table.columns), line(rule), *map(line, table.rows), *note])


def _claims(parts: Parts, verdict: str | None = None) -> str:
    """The claims of a verdict; of None: all, with their verdicts."""
    rows: list[Sequence[str]] = [
        (
            claim.text, f"{claim.name} / {claim.other}", f"< {claim.bound:g}", ratio.text(".2f"),
            *([] if verdict else [found]),
        )
        for claim, ratio, found in summary.judged(parts)
        if verdict in (None, found)
    ]  # fmt: skip
    columns = ("claim", "caches", "claimed", "KL ratio", *([] if verdict else ["verdict"]))
    return markdown(Table("", columns, rows, left=(0, 1, 4))) if rows else "None."


def _synthetic(parts: Parts, measure: str, names: Sequence[str] = _SYNTHETIC) -> str:
    rows: list[Sequence[str]] = [
        (kind, *(Estimate(*cases[n][measure]).text(".3g") if measure in cases[n] else "-"
                 for n in names))
        for kind, cases in parts["synthetic"].items()
        if any(measure in cases[name] for name in names)
    ]  # fmt: skip
    return markdown(Table("", ("tiles", *names), rows))


if __name__ == "__main__":
    sys.exit(main())
