"""``python -m bench``: time kvarn's ops beside their peers and beside the memory of the machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import compare, record
from bench.ceilings import bandwidth
from bench.measure import Options, WrongError, measure
from bench.ops import ROUTINES
from bench.peers import all_peers
from bench.routine import Case, case_text, value_text
from bench.tables import (
    Row,
    cells,
    heading,
    peer_names,
    ratio_text,
    share_text,
    skipped_peers,
    split_keys,
    time_text,
)
from kvarn import Format, _backends
from kvarn._terminal import Table

#: op, case, name of the format or None
Work = tuple[str, Case, str | None]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if an op was wrong and therefore not timed."""
    args = _parser().parse_args(argv)
    device = torch.device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    formats = list(Format.presets()) if args.format == ["all"] else args.format
    present = _backends.ops_of(device.type.upper())
    absent = [op for op in args.op if op not in present]
    work = _work([op for op in args.op if op in present], device, formats, args.cases, args.quick)
    peers = [
        peer
        for peer in all_peers(args.kvarn_triton)
        if args.peers is None or any(word.lower() in peer.name.lower() for word in args.peers)
    ]
    options = Options(device, args.quick, args.refcheck)
    facts = record.machine(device, args.commit)
    facts["ceiling_gbps"] = round(bandwidth(device, quick=args.quick), 1)

    rows: list[Row] = []
    failures = []
    for number, (op, case, name) in enumerate(work, 1):
        title = f"[{number}/{len(work)}] {op} {name or ''} {case_text(case)}".replace("  ", " ")
        # What a peer takes does not depend on our format: it stands beside the first one.
        beside = [
            peer
            for peer in peers
            if (peer.op, peer.device) == (op, device.type) and name in (None, formats[0])
        ]
        try:
            row = measure(ROUTINES[op], case, name, beside, options)
        except WrongError as wrong:
            failures.append(f"{op} {name or ''} {case_text(case)}: {wrong}: not timed")
            _progress(f"{title}: {wrong}")
            continue
        rows.append(row)
        _progress(f"{title}: {time_text(row['time_us'])}")
        _save(rows, op, facts, args)

    for op in dict.fromkeys(row["op"] for row in rows):
        _summary([row for row in rows if row["op"] == op]).print()
    print(_where(facts))
    if args.compare:
        for table in compare.tables(rows, compare.load_rows(args.compare)):
            table.print()
    lines = [
        *skipped_peers(rows),
        *(f"{op}: no {device.type} kernel in this build" for op in absent),
    ]
    if lines:
        print("\n  ".join(["Not measured:", *lines]))
    if failures:
        print("\n  ".join(["WRONG:", *failures]))
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--op", nargs="+", choices=sorted(ROUTINES), default=list(ROUTINES), metavar="OP",
        help=f"which ops: {', '.join(ROUTINES)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--format", nargs="+", default=[Format.presets()[0]], metavar="NAME",
        help="kvarn formats, or all for every preset (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--cases", nargs="+", default=[], metavar="KEY=VALUE",
        help="only cases with these values, for example batch=1 context=32768",
    )  # fmt: skip
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument(
        "--peers", nargs="*", metavar="NAME",
        help="only peers with one of these words in their name; none without a word (default: "
        "all that are installed, beside the first format)",
    )  # fmt: skip
    parser.add_argument(
        "--kvarn-triton", type=Path, metavar="PATH",
        help="a checkout of the published Triton implementation, as one more peer",
    )  # fmt: skip
    parser.add_argument(
        "--refcheck", action=argparse.BooleanOptionalAction, default=True,
        help="compare with the reference before timing",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one small case an op, fewer runs")
    parser.add_argument("--out", type=Path, help="write all rows to this JSON file")
    parser.add_argument(
        "--save", nargs="?", const="", metavar="FOLDER",
        help="write FOLDER/<op>.json (default: bench/results/<machine>)",
    )  # fmt: skip
    parser.add_argument("--commit", help="what to record as the commit, where git is not at hand")
    parser.add_argument(
        "--compare", type=Path, metavar="JSON",
        help="an earlier file, or a folder of them: print the ratios",
    )  # fmt: skip
    return parser


def _work(
    ops: Sequence[str],
    device: torch.device,
    formats: Sequence[str],
    wanted: Sequence[str],
    quick: bool,
) -> list[Work]:
    pairs = [w.partition("=")[::2] for w in wanted]
    return [
        (op, case, name)
        for op in ops
        for case in ROUTINES[op].cases(device, quick)
        if all(key in case and value_text(case[key]) == value for key, value in pairs)
        for name in (formats if ROUTINES[op].packed else [None])
    ]


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _save(rows: list[Row], op: str, facts: dict[str, Any], args: argparse.Namespace) -> None:
    """After each case: a run that is cut short leaves what it has measured."""
    if args.out:
        record.save(args.out, facts, rows)
    if args.save is not None:
        folder = Path(args.save) if args.save else record.RESULTS / record.slug(facts)
        record.save(folder / f"{op}.json", facts, [row for row in rows if row["op"] == op])


def _summary(rows: Sequence[Row]) -> Table:
    common, keys = split_keys(rows)
    peers = peer_names(rows)
    ceiling = "of read" if "read_us" in rows[0] else "of copy"
    return Table(
        heading(rows[0]["op"], common),
        (*keys, "time", "GB/s", ceiling, "error", *peers),
        [
            (
                *cells(row, keys),
                time_text(row["time_us"]),
                f"{row['gbps']:.1f}",
                share_text(row),
                "" if row["error"] is None else f"{row['error']:.0e}",
                *(ratio_text(row, peer) for peer in peers),
            )
            for row in rows
        ],
        left=range(len(keys)),
        caption="Peers: their time over ours." if peers else "",
    )


def _where(facts: dict[str, Any]) -> str:
    machine = facts.get("gpu") or f"{facts['cpu']}, {facts['threads']} threads, {facts['isa']}"
    return (
        f"Measured on {machine}, torch {facts['torch']}; "
        f"a large plain read runs at {facts['ceiling_gbps']:,.0f} GB/s.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
