"""What an adapter file provides."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.harness import Call


class AbsentError(Exception):
    """A peer cannot run here, or not this case; the message says why."""


@dataclass(frozen=True)
class Peer:
    """Something that computes what an op computes.

    Attributes:
        name: in tables; ends in the type of the keys and values that it reads, where it reads any.
        op: the op of kvarn beside which it stands.
        device: the kind of device that it runs on.
        prepare: takes the op's `bench.problems.Attention` or `Function`, returns a callable per
            input set; each returns the result. Raises AbsentError, or whatever the peer raises.
        max_error: allowed relative error against what the op returns.
        slow_start: it compiles for long when it is first called: left out of ``--quick``.
    """

    name: str
    op: str
    device: str
    prepare: Callable[[Any], list[Call]]
    max_error: float = 2e-2
    slow_start: bool = False


def require(module: str) -> Any:
    """The module, or AbsentError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise AbsentError(f"{module} is not installed ({error})") from error
