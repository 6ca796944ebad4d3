"""Which row of the staging pool belongs to which request of a batch."""

from __future__ import annotations

import numpy as np

from kvarn.integrations.vllm.options import WHERE


class RequestRows:
    """The rows of one model runner. All of it is on the host.

    Attributes:
        batch: int32 ``[requests]``, the row of each request of the step that is being prepared, -1
            for one that stands in for others.
        first_token: int32 ``[max_num_seqs]``: the first token that the request in a row computed
            itself. The blocks before it came from the prefix cache: records.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.batch = np.zeros(0, np.int32)
        self.first_token = np.zeros(max_num_seqs, np.int32)

    def add(self, row: int, num_computed_tokens: int, group: int) -> None:
        """A request starts in a row. Raises RuntimeError if it starts within a block."""
        if num_computed_tokens % group:
            raise RuntimeError(
                f"{WHERE}a request must start at a multiple of {group} tokens, got "
                f"{num_computed_tokens}: the 16-bit tokens of its last block are not at hand"
                " (requests that are continued later, and KV connectors, are not supported)"
            )
        self.first_token[row] = num_computed_tokens
