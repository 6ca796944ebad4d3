"""``python -m bench.report``: the tables of README.md and docs/benchmarks.md, from the JSON alone.

Text between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->`` is replaced; with ``--check``
nothing is written and a stale document is an error. NAME is the folder in bench/results.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from bench import record

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args(argv)
    stale = []
    for path in DOCUMENTS:
        text = path.read_text()
        new = re.sub(
            r"(<!-- bench:(\S+) -->\n).*?(<!-- /bench:\2 -->)",
            lambda m: m[1] + section(record.RESULTS / m[2]) + m[3],
            text,
            flags=re.DOTALL,
        )
        if new != text:
            stale.append(path.name)
            if not args.check:
                path.write_text(new)
    if stale:
        print(("stale: " if args.check else "written: ") + ", ".join(stale))
    return 1 if stale and args.check else 0


def section(folder: Path) -> str:
    """All results of one machine as Markdown."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        run = record.load(path)
        parts.append(f"**{path.stem}** on {_where(run)}\n\n{_table(run['rows'])}\n")
    return "\n".join(parts)


def _where(run: dict[str, Any]) -> str:
    if "gpu" in run:
        machine = f"{run['gpu']} (driver {run['driver']}, CUDA {run['cuda']})"
    else:
        machine = f"{run['cpu']}, {run['threads']} threads, {run['isa']}"
    return f"{machine}, torch {run['torch']}, {run['date']}, commit {run['commit']}"


def _table(rows: list[dict[str, Any]]) -> str:
    peers = sorted({name for row in rows for name in row["peers"]})
    ceiling = next((k for k in ("read_us", "copy_us") if any(k in row for row in rows)), None)
    head = ["format", "case", "time", "p10-p90", "GB/s"]
    if ceiling:
        head.append("plain " + ceiling.split("_")[0])
    head += peers
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        case = ", ".join(f"{k} {_value(v)}" for k, v in row["case"].items())
        cells = [
            row["format"] or "",
            case,
            f"**{_time(row['time_us'])}**",
            f"{_time(row['p10_us'])}-{_time(row['p90_us'])}",
            f"{row['gbps']:.2f}",
        ]
        if ceiling:
            cells.append(_time(row[ceiling]))
        for name in peers:
            time = row["peers"].get(name)
            cells.append(f"{_time(time)} ({time / row['time_us']:.2f}x)" if time else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    return " x ".join(map(str, value)) if isinstance(value, list) else str(value)


def _time(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.1f} us"


if __name__ == "__main__":
    sys.exit(main())
