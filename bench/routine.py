"""What a file in bench/ops provides: cases, and a prepared measurement for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bench.harness import Call
from bench.problems import Attention, Function
from kvarn import Format, reference

Case = dict[str, Any]


@dataclass
class Prepared:
    """One case, ready to be timed."""

    calls: Sequence[Call]  #: one per input set
    error: Callable[[], float]  #: relative error of the op against the reference
    max_error: float  #: above this nothing is timed
    bytes: int  #: what the op must read (ceiling "read") or move (ceiling "copy")
    ceiling: str  #: "read" or "copy"
    flops: int | None = None  #: multiplications and additions, where a roofline is of use
    bytes_16bit: int | None = None  #: of the same keys and values in 16 bits
    problem: Attention | Function | None = None  #: the inputs, for the peers of the op
    #: Relative error of what a peer returned for input set 0 against what the op returns.
    peer_error: Callable[[Any], float] | None = None


class Routine(Protocol):
    """The benchmark of one op."""

    op: str
    packed: bool  #: whether it is measured for each format

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        """The cases for this kind of device, smallest first."""

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        """Inputs (random, never zeros), poisoned outputs, and the op as callables; ``fmt`` is not
        None for an op that is ``packed``."""


def value_text(value: Any) -> str:
    """A value of a case as it is printed, and as ``--cases KEY=VALUE`` takes it."""
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)


def case_text(case: Case) -> str:
    return ", ".join(f"{key} {value_text(value)}" for key, value in case.items())


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in float64; NaN counts as infinite."""
    want = want.double()
    error = float((got.double() - want).norm() / want.norm())
    return float("inf") if math.isnan(error) else error


def records_error(
    records: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    fmt: Format,
    *,
    fit: str,
    iterations: int,
) -> float:
    """Of the records [Hkv, record_bytes] of one block, from key and value [G, Hkv, D], against the
    reference's: the relative error of what they read as."""
    made = reference.quantize_tiles(
        key.cpu()[None], value.cpu()[None], fmt, fit=fit, iterations=iterations
    )
    got, want = (
        reference.dequantize_tiles(r, fmt, dtype=torch.float32, rotated=True)
        for r in (records.cpu()[None], made)
    )
    return max(relative_error(g, w) for g, w in zip(got, want, strict=True))
