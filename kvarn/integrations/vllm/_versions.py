"""All that depends on the version of vLLM.

0.24 has no hooks for a cache dtype, for the size of its pages or for rows of requests:
`_PATCHES_0_24` names what is changed there and why. In any other version nothing is touched, and
vLLM itself refuses the cache dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from kvarn.format import Format
from kvarn.integrations.vllm import pool
from kvarn.integrations.vllm.options import Options
from kvarn.integrations.vllm.rows import RequestRows

if TYPE_CHECKING:
    from kvarn.integrations.vllm.backend import KVarNImpl

#: The name that vLLM 0.24 has for backends of others. There is one: two such plugins exclude each
#: other there.
BACKEND_NAME = "CUSTOM"

_logger = logging.getLogger("vllm.kvarn")
_registered = False
_rows: RequestRows | None = None  #: of the step whose metadata are being built


def register() -> None:
    """Makes the presets cache dtypes of vLLM. Called in every process of an engine, repeatedly."""
    global _registered
    if _registered:
        return
    _registered = True
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        _logger.info("kvarn: not used on %s", current_platform.device_type or "this platform")
    elif vllm.__version__.startswith("0.24."):
        for patch in _PATCHES_0_24:
            patch()
    else:
        _logger.warning(
            "kvarn supports vLLM 0.24, this is %s: its cache dtypes are not registered",
            vllm.__version__,
        )


def is_ours(kv_cache_dtype: str | None) -> bool:
    return kv_cache_dtype in Format.presets()


# vLLM 0.24 ---------------------------------------------------------------------------------------


def _patch_cache_dtypes() -> None:
    """The cache dtypes are a ``Literal`` that pydantic, the selector and the command line read."""
    import vllm.config.cache as config
    import vllm.engine.arg_utils as arguments
    import vllm.v1.attention.selector as selector
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    names = tuple(get_args(config.CacheDType)) + Format.presets()
    dtypes = Literal[names]  # type: ignore[valid-type]
    for name in Format.presets():
        STR_DTYPE_TO_TORCH_DTYPE[name] = torch.uint8
    for module in (config, arguments, selector):
        module.CacheDType = dtypes
    cls = config.CacheConfig
    cls.__annotations__["cache_dtype"] = dtypes
    cls.__dataclass_fields__["cache_dtype"].type = dtypes
    cls.__pydantic_fields__["cache_dtype"].annotation = dtypes
    rebuild_dataclass(cls, force=True)


def _patch_backend_choice() -> None:
    """The cache dtype alone selects the backend: no flag beside it is needed."""
    import vllm.platforms.cuda as cuda
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvarn.integrations.vllm.backend import backend_path

    register_backend(AttentionBackendEnum.CUSTOM, backend_path(Format.presets()[0]))
    original = cuda._get_backend_priorities

    @wraps(original)
    def priorities(
        use_mla: bool,
        device_capability: Any,
        num_heads: int | None = None,
        kv_cache_dtype: str | None = None,
    ) -> Any:
        if kv_cache_dtype is None or not is_ours(kv_cache_dtype):
            return original(use_mla, device_capability, num_heads, kv_cache_dtype)
        # The class says how many tokens a block has.
        register_backend(AttentionBackendEnum.CUSTOM, backend_path(kv_cache_dtype))
        return [AttentionBackendEnum.CUSTOM]

    cuda._get_backend_priorities = priorities


def _patch_spec() -> None:
    """Layers tell the size of their pages by a chain of comparisons with known dtypes."""
    from vllm.model_executor.layers.attention.attention import Attention

    from kvarn.integrations.vllm.spec import KVarNSpec

    original = Attention.get_kv_cache_spec

    @wraps(original)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        if not is_ours(self.kv_cache_dtype):
            return original(self, vllm_config)
        return KVarNSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=torch.uint8,
            format_name=self.kv_cache_dtype,
        )

    Attention.get_kv_cache_spec = get_kv_cache_spec


def _patch_rows() -> None:
    """The rows of requests are known to the model runner, and not to metadata builders."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    add_request, prepare_attn = DefaultModelState.add_request, DefaultModelState.prepare_attn

    def rows_of(state: Any) -> RequestRows | None:
        name = state.vllm_config.cache_config.cache_dtype
        if not is_ours(name):
            return None
        if not hasattr(state, "_kvarn_rows"):
            state._kvarn_rows = RequestRows(state.max_num_reqs)
            state._kvarn_group = Format(name, state.model_config.get_head_size()).group
        rows: RequestRows = state._kvarn_rows
        return rows

    @wraps(add_request)
    def add(self: Any, req_index: int, new_req_data: Any) -> None:
        if (rows := rows_of(self)) is not None:
            rows.add(req_index, new_req_data.num_computed_tokens, self._kvarn_group)
        add_request(self, req_index, new_req_data)

    @wraps(prepare_attn)
    def prepare(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        global _rows
        if (rows := rows_of(self)) is not None:
            # Batches that stand in for others (warm-up, capture, idle ranks) have rows that may be
            # those of requests. They have no prompts.
            real = input_batch.prefill_len_np > 0
            rows.batch = np.where(real, input_batch.idx_mapping_np, -1)
        _rows = rows
        try:
            return prepare_attn(self, input_batch, *args, **kwargs)
        finally:
            _rows = None

    DefaultModelState.add_request, DefaultModelState.prepare_attn = add, prepare


_PATCHES_0_24: tuple[Callable[[], None], ...] = (
    _patch_cache_dtypes,
    _patch_backend_choice,
    _patch_spec,
    _patch_rows,
)


# What the rest of the package asks ----------------------------------------------------------------


def request_rows(common_attn_metadata: Any) -> RequestRows | None:
    """The rows of the requests of a step, for the metadata builder."""
    return _rows


def has_stable_rows(vllm_config: Any) -> bool:
    """Whether the model runner keeps a request in its row."""
    return bool(vllm_config.use_v2_model_runner)


def check_pool(vllm_config: Any, rows: int, bytes_per_row: int) -> None:
    """Compares the staging pools with the memory of the engine, and says how large they are."""
    from vllm.platforms import current_platform

    pages = Options.of(vllm_config).pages
    if current_platform.is_cuda():
        total = current_platform.get_device_total_memory()
        share = vllm_config.cache_config.gpu_memory_utilization
        pool.check_size(rows, bytes_per_row, int(total * share))
    _log_once(
        f"kvarn staging pools: {rows * bytes_per_row / 2**30:.2f} GiB, for max_num_seqs={rows} "
        f"sequences of {pages} blocks in 16 bits each"
    )


def _log_once(message: str) -> None:
    from vllm.logger import init_logger

    init_logger("vllm.kvarn").info_once(message)


def flash_attention_version(head_size: int) -> int | None:
    from vllm.v1.attention.backends import fa_utils

    version: int | None = fa_utils.get_flash_attn_version(head_size=head_size)
    return version


def flash_attention(
    impl: KVarNImpl,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    longest_query: int,
    key_bounds: Tensor,
    longest_key: int,
    *,
    causal: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The engine's flash attention over contiguous keys and values.

    Args:
        impl: the layer: scale, soft cap; with ``causal`` also the window.
        query: ``[T, Hq, D]``; key, value ``[S, Hkv, D]``.
        query_bounds, key_bounds: int32 ``[B + 1]``.
        causal: the last query sees the last key.

    Returns:
        out ``[T, Hq, D]``, log-sum-exp float32 ``[Hq, T]``.
    """
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    window = (impl.window_left, 0) if causal and impl.window_left >= 0 else (-1, -1)
    result: tuple[Tensor, Tensor] = flash_attn_varlen_func(
        q=query,
        k=key,
        v=value,
        cu_seqlens_q=query_bounds,
        max_seqlen_q=longest_query,
        cu_seqlens_k=key_bounds,
        max_seqlen_k=longest_key,
        softmax_scale=impl.scale,
        causal=causal,
        window_size=list(window),
        softcap=impl.logits_soft_cap,
        return_softmax_lse=True,
        out=out,
        fa_version=impl.flash_attention_version,
    )
    return result
