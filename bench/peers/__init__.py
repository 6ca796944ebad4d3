"""What kvarn is compared with: one adapter file each, used where the thing is installed."""

from __future__ import annotations

from pathlib import Path

from bench.peers import (
    cublas,
    fast_hadamard_transform,
    flash_attention,
    flashinfer,
    kvarn_triton,
    torch_compile,
    torch_sdpa,
)
from bench.peers.adapter import Peer


def all_peers(kvarn_triton_path: Path | None = None) -> list[Peer]:
    """Those of every op, in the order of the tables.

    Args:
        kvarn_triton_path: a checkout of the published Triton implementation.
    """
    return [
        *torch_sdpa.PEERS,
        *flashinfer.PEERS,
        *flash_attention.PEERS,
        *kvarn_triton.peers(kvarn_triton_path),
        *cublas.PEERS,
        *fast_hadamard_transform.PEERS,
        *torch_compile.PEERS,
    ]
