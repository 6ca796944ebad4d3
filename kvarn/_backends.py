"""Which operators there are, and where they run."""

from __future__ import annotations

import re

import torch

from kvarn import _host, _load

OPS = (
    "append_kv", "decode_attention", "decode_workspace_bytes", "dequantize_tiles", "gather_kv",
    "hadamard_transform", "merge_states", "pack_bits", "pack_records", "quantize_tiles",
    "seal_blocks", "unpack_bits", "unpack_records", "variance_normalize",
)  # fmt: skip

FLOATS = (torch.float16, torch.bfloat16, torch.float32)

#: The largest head dimension of the paged ops on CUDA; the CPU has no limit of its own.
MAX_CUDA_HEAD_DIM = 256


def ops_of(dispatch_key: str) -> frozenset[str]:
    """The operators that have a kernel for a dispatch key, "CPU" or "CUDA"."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(op for op in OPS if has_kernel(f"kvarn::{op}", dispatch_key))


CUDA_OPS = ops_of("CUDA")


def model_dtypes(device_type: str) -> tuple[torch.dtype, ...]:
    """What queries, keys, values and staged pages may be."""
    return FLOATS if device_type == "cpu" else FLOATS[:2]


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    """ "float16, bfloat16 or float32"."""
    *most, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(most)} or {last}" if most else last


def why_missing(device: torch.device) -> str | None:
    """Why not all operators run on a device, or None."""
    if reason := _load.why_unavailable(device.type):
        return reason
    if device.type != "cuda":
        return None
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if missing := sorted(set(OPS) - CUDA_OPS):
        return f"this version of kvarn has no CUDA kernels for {', '.join(missing)}"
    capability = torch.cuda.get_device_capability(device)
    compiled = _host.build_info()["cuda_architectures"]
    if not has_code(compiled, capability):
        name, number = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        return (
            f"{device} ({name}) has compute capability {number}, and kvarn's CUDA library is built "
            f"for {compiled}"
        )
    return None


def has_code(architectures: str, capability: tuple[int, int]) -> bool:
    """Whether a library built for "8.0+PTX;9.0a" runs on a device.

    Machine code runs on its major version from its minor version on, that of a variant (`a`) on
    that very version, PTX on every later one.
    """
    for name in re.split(r"[;\s]+", architectures.strip("; ")):
        known = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", name)
        if known is None:  # "Hopper", or nothing: torch chose
            return True
        major, minor, variant, ptx = known.groups()
        own = (int(major), int(minor))
        later = variant != "a" and own < capability and (own[0] == capability[0] or bool(ptx))
        if own == capability or later:
            return True
    return False
