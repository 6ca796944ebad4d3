"""Loads the native libraries and says in words what is missing.

`kvarn._host` (layout, build facts) and `_ops_cpu` (operator schemas, CPU kernels) are needed to
import kvarn at all. `_ops_cuda` is loaded where torch has CUDA; without it kvarn runs on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import torch

_MIN_TORCH = (2, 11)
_PACKAGE = Path(__file__).parent
_BUILD_HINT = (
    "build it with `pip install .` or, in a checkout, `make build` (a C++17 compiler is needed)"
)


def _require_torch() -> None:
    version = torch.__version__.split("+")[0].split(".")
    if (int(version[0]), int(version[1])) < _MIN_TORCH:
        minimum = ".".join(map(str, _MIN_TORCH))
        raise ImportError(f"kvarn needs torch >= {minimum}, found torch {torch.__version__}")


def _load_library(name: str) -> str | None:
    """Loads kvarn/<name>.so; returns what went wrong, or None."""
    path = _PACKAGE / f"{name}.so"
    if not path.exists():
        return f"{path} does not exist"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path} does not load under torch {torch.__version__}: {error.__cause__ or error}"
    return None


_require_torch()

try:
    from ._host import build_info
except ImportError as error:
    raise ImportError(f"kvarn._host cannot be imported ({error}); {_BUILD_HINT}") from error

if _cpu_error := _load_library("_ops_cpu"):
    raise ImportError(f"kvarn's CPU library cannot be loaded ({_cpu_error}); {_BUILD_HINT}")


def _load_cuda() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if build_info()["cuda_version"] is None:
        return "kvarn was built without its CUDA library (no nvcc was found); rebuild it with nvcc"
    return _load_library("_ops_cuda")


_CUDA_ERROR = _load_cuda()


def why_unavailable(device_type: str) -> str | None:
    """The reason why kvarn has no operators for `device_type` ("cpu", "cuda"), or None."""
    if device_type == "cpu":
        return None
    if device_type == "cuda":
        return _CUDA_ERROR
    return f"kvarn has no kernels for {device_type}"


def status() -> dict[str, str]:
    """Native library -> "loaded", or the reason why it is not."""
    return {"_host": "loaded", "_ops_cpu": "loaded", "_ops_cuda": _CUDA_ERROR or "loaded"}
