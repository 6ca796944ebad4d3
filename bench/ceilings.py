"""What the memory of this machine can do, measured in the same process and in the same way."""

from __future__ import annotations

import torch

from bench.harness import Timing, calls_per_graph, input_sets, time_calls


def read_time(num_bytes: int, device: torch.device, *, quick: bool = False) -> Timing:
    """A plain streaming read of `num_bytes` (torch's sum over float32, all threads)."""
    n = max(num_bytes // 4, 1)
    buffers = [torch.rand(n, device=device) for _ in range(input_sets(num_bytes, device))]
    out = torch.empty((), device=device)
    calls = [lambda b=b: torch.sum(b, dim=0, out=out) for b in buffers]
    together = calls_per_graph(num_bytes, device)
    return time_calls(calls, device, together=together, quick=quick)


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
