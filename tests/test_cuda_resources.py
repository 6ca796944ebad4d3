"""What the compiled CUDA kernels take: no local memory, hardly any memory at first use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cuda_helpers
import pytest

import kvarn
from kvarn import _host

LIBRARY = Path(kvarn.__file__).parent / "_ops_cuda.so"
#: What the names of the kernels hold, those of the helpers of KVARN_CHECKED left out.
KERNELS = (
    "hadamard_kernel", "normalize_kernel", "pack_kernel", "quantize_kernel", "dequantize_kernel",
    "pack_records_kernel", "unpack_records_kernel", "append_kernel",
    "decode_kernel", "decode_group_kernel", "gather_kernel", "merge_kernel",
)  # fmt: skip


def cuobjdump() -> str | None:
    """The one of the toolkit, or of Triton's package."""
    if path := shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin"):
        return path
    try:
        import triton
    except ImportError:
        return None
    bundled = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return str(bundled) if bundled.exists() else None


@pytest.mark.skipif(not LIBRARY.exists(), reason="built without the CUDA library")
def test_fault22_no_kernel_uses_local_memory() -> None:
    tool = cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump here")
    text = subprocess.run(
        [tool, "-res-usage", str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    kernels = re.findall(r"Function (\S+):\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    architectures = _host.build_info()["cuda_architectures"].split(";")
    assert len(kernels) >= 42 * len(architectures)  # the transform alone
    for name in KERNELS:
        assert sum(name in kernel for kernel, *_ in kernels) >= len(architectures), name
    spilling = [name for name, _, stack, local in kernels if int(stack) or int(local)]
    assert spilling == []


@pytest.mark.cuda
def test_fault22_first_use_takes_little_memory() -> None:
    """Every op, one after the other, in a process of its own."""
    script = Path(__file__).parent / "cuda_first_use.py"
    done = subprocess.run(
        [sys.executable, str(script), str(cuda_helpers.DEVICE)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    taken = {op: int(n) for op, n in map(str.split, done.stdout.splitlines())}
    assert taken.keys() == set(cuda_helpers.OPS)
    assert max(taken.values()) < 64 << 20, taken
