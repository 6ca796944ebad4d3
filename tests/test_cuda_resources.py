"""What the compiled CUDA kernels take: no local memory, hardly any memory at first use."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvarn
from kvarn import _host

LIBRARY = Path(kvarn.__file__).parent / "_ops_cuda.so"


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
    spilling = [name for name, _, stack, local in kernels if int(stack) or int(local)]
    assert spilling == []


@pytest.mark.cuda
def test_fault22_first_use_takes_little_memory() -> None:
    script = """
import torch, kvarn
x = torch.ones(1 << 10, 128, dtype=torch.float16, device="cuda")
out = torch.empty_like(x)
torch.cuda.synchronize()
before, _ = torch.cuda.mem_get_info()
kvarn.ops.hadamard_transform(x, out=out)
torch.cuda.synchronize()
print(before - torch.cuda.mem_get_info()[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 << 20
