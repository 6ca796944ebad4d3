"""One case of one op: compared with the reference, then timed, with its ceiling and its peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.ceilings import CEILINGS
from bench.harness import calls_per_graph, time_calls
from bench.peers.adapter import AbsentError, Peer
from bench.routine import Case, Prepared, Routine
from kvarn import Format


class WrongError(Exception):
    """An op or a peer does not compute what it should."""


@dataclass(frozen=True)
class Options:
    device: torch.device
    quick: bool = False
    refcheck: bool = True


def measure(
    routine: Routine, case: Case, name: str | None, peers: Sequence[Peer], options: Options
) -> dict[str, Any]:
    """A row of the results (docs/benchmarks.md has its fields).

    Raises:
        WrongError: the result is not the reference's; nothing was timed.
    """
    fmt = Format(name, head_dim=case["head_dim"]) if name else None
    prepared = routine.prepare(case, fmt, options.device)
    error = None
    if options.refcheck:
        error = prepared.error()
        if not error <= prepared.max_error:
            raise WrongError(
                f"relative error {error:.1e} against the reference, more than "
                f"{prepared.max_error:.0e}"
            )
    together = calls_per_graph(prepared.bytes, options.device)
    how: dict[str, Any] = {"together": together, "quick": options.quick}
    timing = time_calls(prepared.calls, options.device, **how)
    ceiling = CEILINGS[prepared.ceiling](prepared.bytes, options.device, quick=options.quick)
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
        f"{prepared.ceiling}_us": round(ceiling.median, 3),
        "error": error,
        "peers": {},
        "skipped": {},
    }
    for key in ("flops", "bytes_16bit"):
        if (value := getattr(prepared, key)) is not None:
            row[key] = value
    for peer in peers:
        try:
            row["peers"][peer.name] = _peer_time(peer, prepared, options, how)
        except AbsentError as reason:
            row["skipped"][peer.name] = str(reason)
        # Whatever a peer raises, it must not cost the rest of the run.
        except Exception as raised:
            first_line = (str(raised).splitlines() or [""])[0]
            row["skipped"][peer.name] = f"{type(raised).__name__}: {first_line}"
    return row


def _peer_time(peer: Peer, prepared: Prepared, options: Options, how: dict[str, Any]) -> float:
    if prepared.problem is None:
        raise AbsentError("not for this case")
    if peer.slow_start and options.quick:
        raise AbsentError("left out of --quick: it compiles for long")
    calls = peer.prepare(prepared.problem)
    if options.refcheck and prepared.peer_error is not None:
        error = prepared.peer_error(calls[0]())
        if not error <= peer.max_error:
            raise WrongError(f"its result differs from ours by {error:.1e}")
    return round(time_calls(calls, options.device, **how).median, 3)
