"""What the memory of this machine can do, measured in the same process and in the same way."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch

from bench.harness import Timing, calls_per_graph, input_sets, time_calls

#: Bytes of the read that stands for the bandwidth of the machine.
LARGE = {"cpu": 256 << 20, "cuda": 4 << 30}

_READ_KERNEL = r"""
extern "C" __global__ void __launch_bounds__(512) read_all(
    const uint4* __restrict__ in, unsigned* out, int count) {
  unsigned sum = 0;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int stride = gridDim.x * blockDim.x;
  for (; i + 7 * stride < count; i += 8 * stride) {
    uint4 x[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = in[i + k * stride];
#pragma unroll
    for (int k = 0; k < 8; ++k) sum += x[k].x ^ x[k].y ^ x[k].z ^ x[k].w;
  }
  for (; i < count; i += stride) sum += in[i].x ^ in[i].y ^ in[i].z ^ in[i].w;
  if (sum == 1u) *out = sum;  // keeps the loads; hardly ever taken
}
"""


def bandwidth(device: torch.device, *, quick: bool = False) -> float:
    """GB/s of a large streaming read."""
    return LARGE[device.type] / read_time(LARGE[device.type], device, quick=quick).median / 1e3


@functools.cache
def read_time(num_bytes: int, device: torch.device, *, quick: bool = False) -> Timing:
    """A plain streaming read of `num_bytes`: the faster of torch's sum and, on a GPU, a kernel that
    does nothing but 16-byte loads."""
    count = -(-num_bytes // 16) * 4
    buffers = [torch.rand(count, device=device) for _ in range(input_sets(num_bytes, device))]
    total = torch.empty((), device=device)
    readers: list[Callable[[torch.Tensor], object]] = [lambda b: torch.sum(b, dim=0, out=total)]
    if device.type == "cuda" and (kernel := _read_kernel(device)):
        readers.append(kernel)
    together = calls_per_graph(num_bytes, device)
    timings = [
        time_calls([lambda b=b, r=r: r(b) for b in buffers], device, together=together, quick=quick)
        for r in readers
    ]
    return min(timings, key=lambda timing: timing.median)


@functools.cache
def _read_kernel(device: torch.device) -> Callable[[torch.Tensor], object] | None:
    """Compiled at run time (NVRTC); None, with a warning, where that cannot be done."""
    try:
        kernel = torch.cuda._compile_kernel(_READ_KERNEL, "read_all")
    except (AttributeError, RuntimeError, OSError) as error:
        warnings.warn(f"the read ceiling is that of torch.sum alone: {error}", stacklevel=2)
        return None
    blocks = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(1, dtype=torch.int32, device=device)

    def read(buffer: torch.Tensor) -> None:
        kernel(grid=(blocks, 1, 1), block=(512, 1, 1), args=[buffer, out, buffer.numel() // 4])

    return read


@functools.cache
def copy_time(num_bytes: int, device: torch.device, *, quick: bool = False) -> Timing:
    """A copy that moves `num_bytes` in all: half of them read, half of them written."""
    n = max(num_bytes // 8, 1)
    pairs = [
        (torch.rand(n, device=device), torch.empty(n, device=device))
        for _ in range(input_sets(num_bytes, device))
    ]
    calls = [lambda p=p: p[1].copy_(p[0]) for p in pairs]
    together = calls_per_graph(num_bytes, device)
    return time_calls(calls, device, together=together, quick=quick)


CEILINGS: dict[str, Callable[..., Timing]] = {"read": read_time, "copy": copy_time}
