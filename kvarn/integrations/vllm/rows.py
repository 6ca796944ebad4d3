"""Which row of the staging pool belongs to which request of a batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvarn.integrations.vllm.options import WHERE


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy that the host does not wait for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class RequestRows:
    """The rows of one model runner.

    Attributes:
        batch: int32 ``[requests]``, the row of each request of the step that is being prepared.
        first_token: int32 ``[max_num_seqs]`` on the device: the first token that the request in a
            row computed itself. The blocks before it came from the prefix cache: records.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.batch: Tensor | None = None
        self.first_token = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._host = np.zeros(max_num_seqs, np.int32)
        self._changed = False

    def add(self, row: int, num_computed_tokens: int, group: int) -> None:
        """A request starts in a row. Raises RuntimeError if it starts within a block."""
        if num_computed_tokens % group:
            raise RuntimeError(
                f"{WHERE}a request must start at a multiple of {group} tokens, got "
                f"{num_computed_tokens}: the 16-bit tokens of its last block are not at hand"
                " (requests that are continued later, and KV connectors, are not supported)"
            )
        self._host[row] = num_computed_tokens
        self._changed = True

    def begin(self, batch: Tensor) -> None:
        """A step with these rows is being prepared."""
        self.batch = batch
        if self._changed:
            self.first_token.copy_(to_device(self._host.copy(), self.first_token.device))
            self._changed = False
