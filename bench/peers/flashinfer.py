"""FlashInfer: attention over a paged cache of fp16 or fp8 (e4m3), and its merge of states."""

from __future__ import annotations

import math
from functools import partial

import torch

from bench.harness import Call, input_sets
from bench.peers.adapter import Peer, require
from bench.problems import Attention, Function

PAGE = 16
WORKSPACE_BYTES = 256 << 20


def _attention(dtype: torch.dtype, problem: Attention) -> list[Call]:
    packed, q = problem.packed, problem.q
    module = require("flashinfer")
    key, value, ids = packed.pages(PAGE, torch.float16)
    key, value = key.to(dtype), value.to(dtype)
    indptr = torch.tensor([0, *map(len, ids)]).cumsum(0).int()
    indices = torch.cat(ids).int()
    last = torch.tensor([(length - 1) % PAGE + 1 for length in packed.lengths]).int()
    sizes = (q.shape[1], packed.kv_heads, packed.fmt.head_dim, PAGE)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    # The other backend on Hopper wants queries in fp8 too.
    backend = "auto" if dtype == torch.float16 else "fa2"
    types = {"q_data_type": q.dtype, "kv_data_type": dtype}
    paging = (indptr.to(q.device), indices, last.to(q.device))
    if problem.query_tokens == 1:
        # The tensor-core kernels are the faster ones for grouped heads.
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend=backend
        )
        wrapper.plan(*paging, *sizes, **types)
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        rows = torch.arange(len(ids) + 1, dtype=torch.int32, device=q.device)
        wrapper.plan(rows * problem.query_tokens, *paging, *sizes, causal=True, **types)
    sets = input_sets(2 * key.nbytes, q.device)
    copies = [(key, value), *((key.clone(), value.clone()) for _ in range(sets - 1))]
    return [lambda kv=kv: wrapper.run(q, kv) for kv in copies]


def _merge(problem: Function) -> list[Call]:
    module = require("flashinfer")
    # Its log-sum-exp is to the base 2.
    inputs = [
        (out_a, lse_a / math.log(2), out_b, lse_b / math.log(2))
        for out_a, lse_a, out_b, lse_b in problem.inputs
    ]
    return [lambda four=four: module.merge_state(*four) for four in inputs]


PEERS = [
    Peer("FlashInfer fp16", "decode_attention", "cuda", partial(_attention, torch.float16)),
    # Keys and values are rounded to three bits of mantissa.
    Peer(
        "FlashInfer fp8", "decode_attention", "cuda", partial(_attention, torch.float8_e4m3fn), 8e-2
    ),
    Peer("FlashInfer", "merge_states", "cuda", _merge),
]
