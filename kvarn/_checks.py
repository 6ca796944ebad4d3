"""Argument checks of kvarn.ops. Every failure is a ValueError that reads
``kvarn::<op>: <argument> must be <rule>, got <value>``.

Only what lies on the host is looked at (shapes, strides, dtypes, devices, numbers), so a check
never waits for a device and torch.compile traces through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kvarn import _backends
from kvarn.format import DEFAULT_ITERATIONS, FITS, Format

INDICES = (torch.int32, torch.int64)

_FLOAT32_MAX = 2.0**128 - 2.0**104
_FLOAT32_MIN = 2.0**-149

#: A dimension: its size, or a name that stands for any size.
Dim = int | str


def _describe(t: Tensor) -> str:
    return f"{_backends.dtype_names((t.dtype,))} {list(t.shape)} on {t.device}"


def _overlaps_itself(t: Tensor) -> bool:
    """Whether some dimension steps into the extent of those inside it."""
    if t.is_contiguous() or t.numel() == 0:
        return False
    inner = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride < inner:
                return True
            inner += stride * (size - 1)
    return False


class Arguments:
    """Checks the arguments of one call of one op; all tensors must be where the first one is."""

    __slots__ = ("device", "op")

    def __init__(self, op: str, name: str, first: Tensor | torch.device) -> None:
        self.op = op
        if isinstance(first, Tensor):
            self.device = first.device
        elif isinstance(first, torch.device):
            self.device = first
        else:
            self.fail(name, "a tensor", type(first).__name__)
        if self.device.type != "cpu":
            self._check_backend(name)

    def _check_backend(self, name: str) -> None:
        kind = self.device.type
        if kind == "meta" or (kind == "cuda" and self.op in _backends.CUDA_OPS):
            return
        reason = _backends.why_missing(self.device)
        rule = "one" if name == "device" else "on a device"
        self.fail(name, f"{rule} with kernels for this op", f"{self.device} ({reason})")

    def fail(self, name: str, rule: str, got: object) -> NoReturn:
        raise ValueError(f"kvarn::{self.op}: {name} must be {rule}, got {got}")

    def tensor(
        self,
        name: str,
        t: Tensor,
        dtypes: tuple[torch.dtype, ...],
        shape: Sequence[Dim],
        *,
        strided: bool = False,
    ) -> None:
        """An input: its dtype, shape and device, and unless ``strided`` that its last dimension
        is contiguous. A shape that starts with "..." has any leading dimensions."""
        if not isinstance(t, Tensor):
            self.fail(name, "a tensor", type(t).__name__)
        have = t.shape
        want = shape
        if shape[0] == "...":
            want = shape[1:]
            have = have[len(have) - len(want) :] if len(have) >= len(want) else have
        right = t.dtype in dtypes and t.device == self.device and len(have) == len(want)
        if right:
            for size, rule in zip(have, want, strict=True):
                if not isinstance(rule, str) and size != rule:
                    right = False
        if not right:
            dims = ", ".join(map(str, shape))
            rule = f"{_backends.dtype_names(dtypes)} [{dims}] on {self.device}"
            self.fail(name, rule, _describe(t))
        if t.requires_grad and self.op != "hadamard_transform" and torch.is_grad_enabled():
            rule = "without gradient (the op is not differentiable: use torch.no_grad())"
            self.fail(name, rule, "requires_grad=True")
        # The level is private to torch, but to ask each tensor takes ten times as long.
        dual = getattr(forward_ad, "_current_level", 0) >= 0
        if dual and forward_ad.unpack_dual(t).tangent is not None:
            self.fail(name, "without tangent (the op has no forward-mode derivative)", "one")
        if not strided and t.stride(-1) != 1 and t.shape[-1] > 1 and t.numel() > 0:
            self.fail(name, "contiguous in its last dimension", f"strides {list(t.stride())}")

    def output(
        self,
        name: str,
        t: Tensor,
        dtype: torch.dtype,
        shape: Sequence[Dim],
        *,
        strided: bool = False,
    ) -> None:
        """A tensor that is written: as an input, and no two of its elements are one in memory."""
        self.tensor(name, t, (dtype,), shape, strided=strided)
        if _overlaps_itself(t):
            raise ValueError(
                f"kvarn::{self.op}: {name} must not overlap itself, got strides {list(t.stride())}"
            )

    def pair(self, name: str, value: Any, parts: str) -> tuple[Tensor, Tensor]:
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            self.fail(name, f"a tuple {parts}", type(value).__name__)
        return value[0], value[1]

    def format(self, fmt: Format) -> None:
        if not isinstance(fmt, Format):
            self.fail("fmt", "a kvarn.Format", repr(fmt))
        if self.device.type == "cuda" and fmt.head_dim > _backends.MAX_CUDA_HEAD_DIM:
            limit = _backends.MAX_CUDA_HEAD_DIM
            self.fail("fmt", f"of a head_dim of at most {limit} on CUDA", repr(fmt))

    def dtype(self, name: str, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> None:
        if dtype not in dtypes:
            self.fail(name, _backends.dtype_names(dtypes), dtype)

    def integer(self, name: str, value: int, low: int, high: int = 2**31 - 1) -> None:
        whole = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
        if not whole or value < low or value > high:
            self.fail(name, f"an integer from {low} to {high}", repr(value))

    def number(self, name: str, value: float) -> None:
        if not isinstance(value, (int, float, torch.SymFloat)) or isinstance(value, bool):
            self.fail(name, "a number", repr(value))
        # Kernels take float32: what is too small for it would become 0, as if it were not given.
        if not (value == 0 or _FLOAT32_MIN <= abs(value) <= _FLOAT32_MAX):
            self.fail(name, "a finite float32 number", value)

    def flag(self, name: str, value: bool) -> None:
        if not isinstance(value, bool):
            self.fail(name, "True or False", repr(value))

    def fit(self, fit: str, iterations: int | None) -> int:
        """Checks both and returns the number of iterations."""
        if fit not in FITS:
            self.fail("fit", " or ".join(map(repr, FITS)), repr(fit))
        if iterations is None:
            return DEFAULT_ITERATIONS[fit]
        self.integer("iterations", iterations, 0)
        return iterations
