"""The staging pool: pages of 16-bit keys and values, one run of pages for each request.

A request keeps the row that the model runner gives it as long as it runs, so page numbers follow
from rows and tile numbers alone; nothing is allocated or freed while the engine runs.

To the operators a staged tile is a *virtual block*: the ids after those of the real blocks name
the pages of the pool, and the map from blocks to pages never changes. Whether a request reads a
tile in 16 bits is then a matter of its own block table. Another request that shares the block has
the real id in its table, and reads the record.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvarn.format import Format
from kvarn.integrations.vllm.options import WHERE, Options

#: Part of the memory of an engine that staging pools may take.
_LARGEST_SHARE = 0.5


def page_of_tile(tiles: np.ndarray, options: Options) -> np.ndarray:
    """The page, within the run of a request, of a tile that is a sink, recent or open."""
    ring = options.sink_blocks + tiles % (options.recent_blocks + 1)
    return np.where(tiles < options.sink_blocks, tiles, ring)


def page_bytes(fmt: Format, num_kv_heads: int, dtype: torch.dtype) -> int:
    return 2 * num_kv_heads * fmt.group * fmt.head_dim * dtype.itemsize


def new_pool(
    rows: int, options: Options, fmt: Format, num_kv_heads: int, dtype: torch.dtype
) -> Tensor:
    """``[rows * pages, 2, Hkv, G, D]`` on torch's default device; rows of no token are not read."""
    return torch.empty(rows * options.pages, 2, num_kv_heads, fmt.group, fmt.head_dim, dtype=dtype)


def check_size(rows: int, bytes_per_row: int, engine_bytes: int) -> None:
    """Raises ValueError if the pools of all layers would take too much of an engine's memory."""
    limit = int(engine_bytes * _LARGEST_SHARE)
    if rows * bytes_per_row > limit:
        raise ValueError(
            f"{WHERE}max_num_seqs={rows} needs staging pools of {rows * bytes_per_row / 2**30:.1f}"
            f" GiB ({bytes_per_row / 2**20:.1f} MiB a sequence), at most {limit / 2**30:.1f} GiB"
            f" are allowed: set max_num_seqs to {limit // bytes_per_row} or less"
        )


def block_slot(num_blocks: int, pages: int, device: torch.device) -> Tensor:
    """int32 ``[num_blocks + pages]``: real blocks are records, virtual ones are the pages."""
    slots = torch.full((num_blocks + pages,), -1, dtype=torch.int32, device=device)
    slots[num_blocks:] = torch.arange(pages, dtype=torch.int32, device=device)
    return slots
