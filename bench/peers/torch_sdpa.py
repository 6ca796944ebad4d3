"""torch.nn.functional.scaled_dot_product_attention over a contiguous, unquantized cache.

On CUDA by cuDNN and by flash attention, each forced: torch's own choice falls to half the rate at
large batch.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.harness import Call, input_sets
from bench.peers.adapter import AbsentError, Peer
from bench.problems import Attention


def _contiguous_sets(problem: Attention) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of key and value [B, Hkv, S, D], together more than twice the cache."""
    if problem.query_tokens > 1:
        raise AbsentError("its causal mask is not that of the last tokens of a sequence")
    if not problem.equal_lengths:
        raise AbsentError("takes sequences of one length")
    key, value = (
        x.transpose(1, 2).contiguous() for x in problem.packed.contiguous(problem.q.dtype)
    )
    sets = input_sets(2 * key.nbytes, key.device)
    return [(key, value), *((key.clone(), value.clone()) for _ in range(sets - 1))]


def _shared(problem: Attention) -> list[Call]:
    """As models call it: one query row a head, K and V shared by ``enable_gqa``."""
    query = problem.q.unsqueeze(2)
    return [
        lambda k=k, v=v: F.scaled_dot_product_attention(query, k, v, enable_gqa=True).squeeze(2)
        for k, v in _contiguous_sets(problem)
    ]


def _grouped(problem: Attention) -> list[Call]:
    """The query heads of a KV head as query rows, which spares repeating K and V."""
    q = problem.q
    query = q.view(q.shape[0], problem.packed.kv_heads, -1, q.shape[2])
    return [
        lambda k=k, v=v: F.scaled_dot_product_attention(query, k, v).reshape(q.shape)
        for k, v in _contiguous_sets(problem)
    ]


def _forced(backend: SDPBackend, problem: Attention) -> list[Call]:
    def force(call: Call) -> object:
        with sdpa_kernel(backend):
            return call()

    return [partial(force, call) for call in _grouped(problem)]


_CUDNN, _FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION

PEERS = [
    Peer("SDPA fp32", "decode_attention", "cpu", _shared),
    Peer("SDPA, group as rows, fp32", "decode_attention", "cpu", _grouped),
    Peer("cuDNN fp16", "decode_attention", "cuda", partial(_forced, _CUDNN)),
    Peer("SDPA flash fp16", "decode_attention", "cuda", partial(_forced, _FLASH)),
]
