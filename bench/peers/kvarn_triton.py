"""The published Triton implementation (the vLLM fork of the paper's authors), from a checkout.

Of the fork only two files are loaded, with Triton in place of the vLLM module from which they take
it. Its attention reads the same records, in its own layout; its staging pool stays empty.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.harness import Call
from bench.peers.adapter import AbsentError, Peer, require
from bench.problems import Attention, Function
from kvarn import Format, formats_interop, reference

FOLDER = Path("vllm/v1/attention/ops")


def peers(checkout: Path | None) -> list[Peer]:
    return [
        Peer("KVarN, Triton", "decode_attention", "cuda", partial(_attention, checkout)),
        Peer("KVarN, Triton", "variance_normalize", "cuda", partial(_normalize, checkout)),
    ]


def _load(checkout: Path | None, name: str) -> Any:
    if checkout is None:
        raise AbsentError("give a checkout of it by --kvarn-triton PATH")
    path = checkout / FOLDER / f"{name}.py"
    if not path.is_file():
        raise AbsentError(f"{path} does not exist")
    triton, language = require("triton"), require("triton.language")
    spec = importlib.util.spec_from_file_location(f"kvarn_triton_peer.{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    stubs = {
        "vllm": types.ModuleType("vllm"),
        "vllm.triton_utils": SimpleNamespace(tl=language, triton=triton),
    }
    before = {key: sys.modules.get(key) for key in stubs}
    sys.modules.update(stubs)  # type: ignore[arg-type]
    try:
        spec.loader.exec_module(module)
    finally:
        for key, old in before.items():
            if old is None:
                del sys.modules[key]
            else:
                sys.modules[key] = old
    return module


def _layout(fmt: Format) -> SimpleNamespace:
    """The sizes and offsets of its records, by the names that its driver reads."""
    group, dim = fmt.group, fmt.head_dim
    sizes = {
        "k_packed": group * dim * fmt.key_bits // 8,
        "k_s_col": 2 * dim,
        "k_zp": 2 * dim,
        "k_s_row": 2 * group,
        "v_packed": group * dim * fmt.value_bits // 8,
        "v_s_col": 2 * dim,
        "v_s_row": 2 * group,
        "v_zp": 2 * group,
    }
    layout = SimpleNamespace(group=group, key_bits=fmt.key_bits, value_bits=fmt.value_bits)
    offset = 0
    for name, size in sizes.items():
        setattr(layout, f"{name}_offset", offset)
        offset += size
    return layout


def _attention(checkout: Path | None, problem: Attention) -> list[Call]:
    packed, q = problem.packed, problem.q
    module = _load(checkout, "triton_kvarn_decode")
    fmt, (rows, heads, dim) = packed.fmt, q.shape
    if problem.query_tokens > 1:
        raise AbsentError("this adapter calls its decode step of one query token")
    if 3 in (fmt.key_bits, fmt.value_bits):
        raise AbsentError("does not pack 3 bits")
    tiles = formats_interop.to_triton(packed.records, fmt)
    cache = tiles[torch.arange(len(packed.cache), device=q.device) % len(tiles)].contiguous()
    most = packed.tables.shape[2]
    splits = module.adaptive_num_kv_splits(most)

    def buffer(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    pool = buffer(1, fmt.group, packed.kv_heads, dim)
    engine = SimpleNamespace(
        _H_fp16=(reference.hadamard_matrix(dim) * dim**-0.5).to(q.device, torch.float16),
        _q_rot_fp16_buf=buffer(rows * heads, dim),
        _fused_out_buf=buffer(rows * heads, dim),
        _mid_o_buf=buffer(rows * heads, splits, dim, dtype=torch.float32),
        _mid_lse_buf=buffer(rows * heads, splits, dtype=torch.float32),
        _block_to_slot_t=torch.full((len(cache),), -1, dtype=torch.int32, device=q.device),
        _block_lookup_size=len(cache),
        _tail_K_pool=pool,
        _tail_V_pool=pool,
        sliding_window=0,
    )
    layout = _layout(fmt)

    def attend(table: torch.Tensor) -> torch.Tensor:
        step = SimpleNamespace(
            seq_lens=packed.seq_lens, block_table=table, fa_max_blocks_per_req=most
        )
        result: torch.Tensor = module.kvarn_decode_attention(
            q, cache, engine._H_fp16, dim**-0.5, layout, engine, step
        )
        return result

    # Entries beyond a sequence are read by it: they must be blocks.
    tables = packed.tables.where(packed.tables < len(cache), 0)
    return [partial(attend, table) for table in tables]


def _normalize(checkout: Path | None, problem: Function) -> list[Call]:
    module = _load(checkout, "triton_kvarn_sinkhorn")
    return [partial(module.kvarn_sinkhorn_triton, *x, **problem.options) for x in problem.inputs]
