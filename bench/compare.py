"""``--compare``: this run against an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench import record
from bench.tables import Row, ceiling_us, cells, heading, split_keys, time_text
from kvarn._terminal import Table

#: A smaller change than this is noise, however narrow the deciles are: clocks differ that much
#: between two runs of one program.
NOISE = 0.03


def load_rows(path: Path) -> list[Row]:
    """Of a JSON file, or of all in a folder."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    return [row for file in files for row in record.load(file)["rows"]]


def tables(rows: Sequence[Row], earlier: Sequence[Row]) -> list[Table]:
    """One for each op: the times of both runs, their ratio, and a mark where it is no noise."""
    then = {record.key(row): row for row in earlier}
    made = []
    for op in dict.fromkeys(row["op"] for row in rows):
        pairs = [
            (row, then[record.key(row)])
            for row in rows
            if row["op"] == op and record.key(row) in then
        ]
        if not pairs:
            continue
        common, keys = split_keys([row for row, _ in pairs])
        made.append(
            Table(
                f"{heading(op, common)}: now and then",
                (*keys, "then", "now", "now/then", "ceiling", ""),
                [
                    (
                        *cells(now, keys),
                        time_text(old["time_us"]),
                        time_text(now["time_us"]),
                        f"{now['time_us'] / old['time_us']:.3f}",
                        _ceiling_ratio(now, old),
                        verdict(now, old),
                    )
                    for now, old in pairs
                ],
                left=(*range(len(keys)), len(keys) + 4),
                caption="ceiling: the same ratio of a plain read or copy; "
                "what it says is the machine.",
            )
        )
    return made


def verdict(now: Row, then: Row) -> str:
    """ "slower" or "faster" where the medians differ by more than the noise and the ranges between
    first and last decile do not meet; "" else."""
    ratio = now["time_us"] / then["time_us"]
    if ratio > 1 + NOISE and now["p10_us"] > then["p90_us"]:
        return "slower"
    if ratio < 1 - NOISE and now["p90_us"] < then["p10_us"]:
        return "faster"
    return ""


def _ceiling_ratio(now: Row, then: Row) -> str:
    a, b = ceiling_us(now), ceiling_us(then)
    return f"{a / b:.3f}" if a and b else ""
