"""What a file in bench/ops provides: cases, and a prepared measurement for each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from bench.harness import Call
from kvarn import Format, reference

Case = dict[str, Any]


@dataclass
class Prepared:
    """One case, ready to be timed."""

    calls: list[Call]  #: one per input set
    error: Callable[[], float]  #: relative error of the op against the reference
    max_error: float  #: above this nothing is timed
    bytes: int  #: what the op must read (ceiling "read") or move (ceiling "copy")
    ceiling: str  #: "read", "copy" or "none"
    peers: dict[str, list[Call]] = field(default_factory=dict)
    peer_errors: dict[str, Callable[[], float]] = field(default_factory=dict)


class Routine(Protocol):
    """The benchmark of one op."""

    op: str

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        """The cases of bench.md for this kind of device, smallest first."""

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        """Inputs (random, never zeros), poisoned outputs, the op and its peers as callables."""


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
    rotated = {"dtype": torch.float32, "rotated": True}
    got = reference.dequantize_tiles(records.cpu()[None], fmt, **rotated)
    made = reference.quantize_tiles(
        key.cpu()[None], value.cpu()[None], fmt, fit=fit, iterations=iterations
    )
    want = reference.dequantize_tiles(made, fmt, **rotated)
    return max(relative_error(g, w) for g, w in zip(got, want, strict=True))
