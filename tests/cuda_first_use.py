"""Prints for each op how much memory of the device its first call takes; test_cuda_resources.py
runs it in a process of its own. The argument is the device."""

from __future__ import annotations

import sys

import cuda_helpers
import op_calls
import torch


def free_bytes() -> int:
    """Of the device, as if torch's allocator kept nothing back."""
    if cuda_helpers.DEVICE.type != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


cuda_helpers.DEVICE = torch.device(sys.argv[1])
for op in cuda_helpers.OPS:
    arguments = cuda_helpers.call(op)
    before = free_bytes()
    op_calls.run(op, arguments)
    print(op, before - free_bytes())
