"""``python -m bench``: time kvarn's ops beside their peers and beside the memory of the machine."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import kvarn
from bench import ceilings, record
from bench.harness import Timing, calls_per_graph, time_calls
from bench.ops import ROUTINES
from bench.routine import Case, Routine

CEILINGS = {"read": ceilings.read_time, "copy": ceilings.copy_time}

#: Ratios to an earlier run inside this band are called noise.
NOISE = 0.05


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    device = torch.device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    facts = record.machine(device)
    console = Console()
    rows: list[dict[str, Any]] = []
    work = [
        (ROUTINES[op], case, fmt)
        for op in args.op
        for case in ROUTINES[op].cases(device, args.quick)
        for fmt in (args.format if "head_dim" in case else [None])
        if _selected(case, args.cases)
    ]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(work))
        for routine, case, fmt in work:
            progress.update(task, description=f"{routine.op} {_text(case)}")
            rows.append(_measure(routine, case, fmt, device, args))
            progress.advance(task)
    console.print(_table(rows, facts))
    if args.compare:
        _compare(console, rows, record.load(args.compare)["rows"])
    for op in args.op:
        mine = [row for row in rows if row["op"] == op]
        if args.out or args.save:
            path = args.out or record.RESULTS / record.slug(facts) / f"{op}.json"
            record.save(path, facts, rows if args.out else mine)
            console.print(f"written: {path}")
            if args.out:
                break
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--op", nargs="+", choices=sorted(ROUTINES), default=list(ROUTINES), metavar="OP",
        help=f"which ops: {', '.join(ROUTINES)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--format",
        nargs="+",
        default=["kvarn_k4v2_g128"],
        metavar="NAME",
        help="kvarn formats",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="only cases with these values",
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda or cpu",
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--refcheck", action=argparse.BooleanOptionalAction, default=True,
        help="compare with the reference before timing",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one small case an op, fewer runs")
    parser.add_argument("--out", type=Path, help="write all rows to this JSON file")
    parser.add_argument(
        "--save", action="store_true", help="write bench/results/<machine>/<op>.json"
    )
    parser.add_argument("--compare", type=Path, help="an earlier JSON file: print the ratios")
    return parser


def _measure(
    routine: Routine,
    case: Case,
    name: str | None,
    device: torch.device,
    args: argparse.Namespace,
) -> dict[str, Any]:
    fmt = kvarn.Format(name, head_dim=case["head_dim"]) if name else None
    prepared = routine.prepare(case, fmt, device)
    error = None
    if args.refcheck:
        error = prepared.error()
        if not error <= prepared.max_error:
            sys.exit(
                f"{routine.op} {_text(case)}: relative error {error:.2e} against the reference, "
                f"more than {prepared.max_error:.0e}: not timed"
            )
    together = calls_per_graph(prepared.bytes, device)
    timing = time_calls(prepared.calls, device, together=together, quick=args.quick)
    row: dict[str, Any] = {
        "op": routine.op,
        "format": name,
        "case": case,
        "time_us": round(timing.median, 3),
        "p10_us": round(timing.p10, 3),
        "p90_us": round(timing.p90, 3),
        "runs": timing.runs,
        "calls_per_graph": together,
        "bytes": prepared.bytes,
        "gbps": round(prepared.bytes / timing.median / 1e3, 3),
        "error": error,
        "peers": {},
    }
    if prepared.ceiling in CEILINGS:
        ceiling = _ceiling(prepared.ceiling, prepared.bytes, device, args.quick)
        row[f"{prepared.ceiling}_us"] = round(ceiling.median, 3)
        row["ceiling_gbps"] = round(prepared.bytes / ceiling.median / 1e3, 3)
    if args.peers:
        for peer, calls in prepared.peers.items():
            time = time_calls(calls, device, together=together, quick=args.quick)
            row["peers"][peer] = round(time.median, 3)
            check = prepared.peer_errors.get(peer)
            if args.refcheck and check and not check() <= 2e-2:
                sys.exit(f"{routine.op} {_text(case)}: {peer} computes something else")
    return row


@functools.cache
def _ceiling(kind: str, num_bytes: int, device: torch.device, quick: bool) -> Timing:
    """Measured once for every number of bytes."""
    return CEILINGS[kind](num_bytes, device, quick=quick)


def _selected(case: Case, wanted: list[str]) -> bool:
    pairs = (w.split("=", 1) for w in wanted)
    return all(str(case.get(key)) == value for key, value in pairs)


def _text(case: Case) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.items())


def _table(rows: list[dict[str, Any]], facts: dict[str, Any]) -> Table:
    where = facts.get("gpu") or f"{facts['cpu']}, {facts['threads']} threads, {facts['isa']}"
    table = Table(title=f"kvarn on {where}, torch {facts['torch']}")
    table.add_column("op, format, case", ratio=1)
    for column in ("time us", "GB/s", "of ceiling", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        limit = row.get("read_us") or row.get("copy_us")
        title = f"[bold]{row['op']}[/] {row['format'] or ''}\n{_text(row['case'])}"
        peers = [f"\n  {n}: {t:.1f} us, {t / row['time_us']:.2f}x" for n, t in row["peers"].items()]
        table.add_row(
            title + "".join(peers),
            f"{row['time_us']:.1f}",
            f"{row['gbps']:.2f}",
            f"{limit / row['time_us']:.0%}" if limit else "",
            f"{row['error']:.1e}" if row["error"] is not None else "",
            end_section=True,
        )
    return table


def _compare(console: Console, rows: list[dict[str, Any]], old: list[dict[str, Any]]) -> None:
    table = Table(title="against the earlier run (time now / time then)")
    for column in ("op", "format", "case", "ratio", ""):
        table.add_column(column)
    before = {(row["op"], row["format"], str(row["case"])): row for row in old}
    for row in rows:
        then = before.get((row["op"], row["format"], str(row["case"])))
        if then is None:
            continue
        ratio = row["time_us"] / then["time_us"]
        word = "" if abs(ratio - 1) <= NOISE else "slower" if ratio > 1 else "faster"
        table.add_row(row["op"], row["format"] or "", _text(row["case"]), f"{ratio:.3f}", word)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
