"""vLLM on a machine without GPU: a platform that says it is a GPU, and a flash attention in torch.

Nothing of vLLM is replaced but what needs the CUDA driver: its compiled kernels and its queries of
the device. To be imported before anything of vllm.
"""

from __future__ import annotations

import sys
import types

import torch


def flash_attn_varlen_func(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k,
    softmax_scale,
    causal=False,
    window_size=None,
    softcap=0.0,
    return_softmax_lse=False,
    out=None,
    fa_version=None,
):
    """Attention of sequences side by side, in fp64, by the documentation of the real one."""
    result = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    q_bounds, k_bounds = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert q_bounds[-1] == len(q) and k_bounds[-1] == len(k)
    for b in range(len(q_bounds) - 1):
        rows, cols = slice(*q_bounds[b : b + 2]), slice(*k_bounds[b : b + 2])
        n, s = q[rows].shape[0], k[cols].shape[0]
        assert n <= max_seqlen_q and s <= max_seqlen_k
        result[rows], lse[rows] = attention(
            q[rows], k[cols], v[cols], softmax_scale, s - n, causal, window_size[0], softcap
        )
    out = q.new_empty(q.shape) if out is None else out
    out.copy_(result)
    return (out, lse.float().t().contiguous()) if return_softmax_lse else out


def attention(q, k, v, scale, offset, causal=True, window_left=-1, soft_cap=0.0):
    """Dense attention in fp64: query i is token ``offset + i``."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    ages = torch.arange(len(q))[:, None] + offset - torch.arange(len(k))
    hidden = torch.zeros(ages.shape, dtype=torch.bool)
    if causal:
        hidden |= ages < 0
    if window_left >= 0:
        hidden |= ages > window_left
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), torch.logsumexp(scores, -1).t()


_keep: list[torch.library.Library] = []  # a library that is collected takes its ops along


def _module(name: str, **contents: object) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module


def install() -> None:
    interface = {
        "fa_version_unsupported_reason": lambda version: None,
        "is_fa_version_supported": lambda version: version == 3,
    }
    _module("vllm._C_stable_libtorch")
    _module("vllm.vllm_flash_attn.flash_attn_interface", **interface)
    _module(
        "vllm.vllm_flash_attn",
        __path__=[],
        flash_attn_varlen_func=flash_attn_varlen_func,
        compile_flash_attn_varlen_func_from_specs=None,
        get_scheduler_metadata=None,
        **interface,
    )
    library = torch.library.Library("_C", "FRAGMENT")
    for name in (
        "cutlass_scaled_mm_supports_fp8",
        "cutlass_scaled_mm_supports_block_fp8",
        "cutlass_group_gemm_supported",
        "cutlass_scaled_mm_supports_fp4",
    ):
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    _keep.append(library)
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Platform(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id=0):
            return "stand-in"

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return 140 * 2**30

        @classmethod
        def import_kernels(cls):
            pass

    vllm.platforms._current_platform = Platform()
    import vllm.triton_utils

    if not vllm.triton_utils.HAS_TRITON:  # vLLM's placeholder has no attributes
        vllm.triton_utils.triton.Config = lambda kwargs, num_stages=1, num_warps=1: (
            types.SimpleNamespace(kwargs=kwargs, num_stages=num_stages, num_warps=num_warps)
        )
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True  # else the model runner would be V1
