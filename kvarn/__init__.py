"""kvarn: a low-bit KV cache with variance-normalized tiles, and attention over it.

`kvarn.Format` says how a tile is packed, `kvarn.ops` has the operators, `kvarn.PagedCache` the
bookkeeping for those who want it done, `kvarn.reference` each operator again in plain torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvarn import _fake as _fake  # registers what torch.compile and autograd need
from kvarn import _host, ops
from kvarn.format import CanonicalRecords, Format, is_supported

if TYPE_CHECKING:
    from kvarn import reference
    from kvarn.cache import PagedCache

__version__: str = _host.version

__all__ = [
    "CanonicalRecords",
    "Format",
    "PagedCache",
    "__version__",
    "is_supported",
    "ops",
    "reference",
]


def __getattr__(name: str) -> Any:
    if name == "reference":
        return importlib.import_module("kvarn.reference")
    if name == "PagedCache":
        return importlib.import_module("kvarn.cache").PagedCache
    raise AttributeError(f"module 'kvarn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
