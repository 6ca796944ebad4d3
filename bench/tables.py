"""Rows of results as columns of text, for the terminal and for the documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bench.routine import case_text, value_text

Row = dict[str, Any]


def split_keys(rows: Sequence[Row]) -> tuple[Row, list[str]]:
    """What all rows have in common, and the keys in which they differ. A key is "format" or one of
    the case."""
    flat = [parameters(row) for row in rows]
    keys = list(dict.fromkeys(key for row in flat for key in row))
    common = {k: flat[0][k] for k in keys if all(row.get(k) == flat[0].get(k) for row in flat)}
    return common, [key for key in keys if key not in common]


def parameters(row: Row) -> Row:
    """The format, if the op has one, and the case."""
    return ({"format": row["format"]} if row["format"] else {}) | row["case"]


def heading(op: str, common: Row) -> str:
    return f"{op} ({case_text(common)})" if common else op


def cells(row: Row, keys: Iterable[str]) -> list[str]:
    found = parameters(row)
    return [value_text(found[key]) if key in found else "" for key in keys]


def peer_names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["peers"]))


def ceiling_us(row: Row) -> float | None:
    """Time of a plain read or copy of the same bytes."""
    return row.get("read_us") or row.get("copy_us")


def share_text(row: Row) -> str:
    """How much of the rate of a plain read or copy the op reaches."""
    limit = ceiling_us(row)
    return f"{limit / row['time_us']:.0%}" if limit else ""


def ratio_text(row: Row, peer: str) -> str:
    """A peer's time over ours."""
    time = row["peers"].get(peer)
    return f"{time / row['time_us']:.2f}x" if time else ""


def time_text(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.1f} us"


def skipped_peers(rows: Sequence[Row]) -> list[str]:
    """One line for each peer and reason."""
    cases: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.get("skipped", {}).items():
            cases.setdefault((name, reason), []).append(row["op"])
    return [
        f"{name}, {', '.join(dict.fromkeys(ops))} ({len(ops)} cases): {reason}"
        for (name, reason), ops in cases.items()
    ]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
