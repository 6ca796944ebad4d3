"""torch.compile of `kvarn.reference`: what one gets from the definition without a kernel."""

from __future__ import annotations

from functools import partial

import torch

from bench.harness import Call
from bench.peers.adapter import Peer
from bench.problems import Function
from kvarn import reference

#: quantize_tiles is not among them: its definition, with a loop for each round and each step of the
#: fit, takes minutes to trace.
OPS = (
    "hadamard_transform", "variance_normalize", "pack_bits", "unpack_bits", "dequantize_tiles",
    "merge_states",
)  # fmt: skip


def _compile(problem: Function) -> list[Call]:
    torch._dynamo.reset()
    compiled = torch.compile(partial(problem.reference, **problem.options), dynamic=False)
    device = next(x.device for x in problem.inputs[0] if isinstance(x, torch.Tensor))

    def call(inputs: tuple[object, ...]) -> object:
        # The reference makes its index tensors on the default device.
        with torch.device(device), torch.no_grad():
            return compiled(*inputs)

    reference.code_bit_addresses.cache_clear()
    reference.hadamard_matrix.cache_clear()
    return [partial(call, inputs) for inputs in problem.inputs]


PEERS = [
    Peer("torch.compile of the reference", op, device, _compile, max_error=3e-2, slow_start=True)
    for device in ("cpu", "cuda")
    for op in OPS
]
