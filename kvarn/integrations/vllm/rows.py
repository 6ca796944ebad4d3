"""The requests in the rows of a model runner, which are the rows of the staging pool."""

from __future__ import annotations

import numpy as np

from kvarn.integrations.vllm.options import WHERE


class RequestRows:
    """What is known of the requests in the rows of one model runner, on the host.

    Attributes:
        first_token: int32 ``[max_num_seqs]``: the first token that the request in a row computed
            itself. The blocks before it came from the prefix cache: records. -1: no request was
            ever in that row.
    """

    def __init__(self, max_num_seqs: int, group: int) -> None:
        self._group = group
        self.first_token = np.full(max_num_seqs, -1, np.int32)

    def add(self, row: int, num_computed_tokens: int) -> None:
        """A request starts in a row. Raises RuntimeError if it starts within a block."""
        if num_computed_tokens % self._group:
            raise RuntimeError(
                f"{WHERE}a request must start at a multiple of {self._group} tokens, got "
                f"{num_computed_tokens}: the 16-bit tokens of its last block are not at hand"
                " (requests that are continued later, and KV connectors, are not supported)"
            )
        self.first_token[row] = num_computed_tokens
