"""flash-attn (FlashAttention 2, and 3 where it is built) over a paged fp16 cache."""

from __future__ import annotations

from functools import partial

import torch

from bench.harness import Call, input_sets
from bench.peers.adapter import Peer, require
from bench.problems import Attention

PAGE = 256  # the smallest that FlashAttention 2 takes


def _attention(module_name: str, table_argument: str, problem: Attention) -> list[Call]:
    packed = problem.packed
    module = require(module_name)
    key, value, ids = packed.pages(PAGE, torch.float16)
    table = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).int()
    query = problem.q.view(len(packed.lengths), problem.query_tokens, *problem.q.shape[1:])
    sets = input_sets(2 * key.nbytes, key.device)
    copies = [(key, value), *((key.clone(), value.clone()) for _ in range(sets - 1))]

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = module.flash_attn_with_kvcache(
            query, k, v, cache_seqlens=packed.seq_lens, causal=True, **{table_argument: table}
        )
        return (out[0] if isinstance(out, tuple) else out).view(problem.q.shape)

    return [partial(attend, *kv) for kv in copies]


PEERS = [
    Peer(
        "flash-attn 2 fp16", "decode_attention", "cuda",
        partial(_attention, "flash_attn", "block_table"),
    ),
    Peer(
        "flash-attn 3 fp16", "decode_attention", "cuda",
        partial(_attention, "flash_attn_interface", "page_table"),
    ),
]  # fmt: skip
