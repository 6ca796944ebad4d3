"""All that depends on the version of vLLM.

0.33 has hooks for a cache dtype, for backends of others, for the content of pages and for the rows
of requests. 0.24 has none of them: what is changed there instead is listed in `_SET_UP`, and so is
what neither has a hook for. In any other version nothing is touched, and vLLM itself refuses the
cache dtype.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
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

_logger = logging.getLogger("vllm.kvarn")
_registered = False
_rows: np.ndarray | None = None  #: of the step whose metadata are being built (0.24)


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
    elif (version := _minor(vllm.__version__)) in _SET_UP:
        for change in _SET_UP[version]:
            change()
    else:
        _logger.warning(
            "kvarn supports vLLM %s, this is %s: its cache dtypes are not registered",
            " and ".join(_SET_UP),
            vllm.__version__,
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def is_ours(kv_cache_dtype: str | None) -> bool:
    return kv_cache_dtype in Format.presets()


# Both versions ------------------------------------------------------------------------------------


def _patch_backend_choice() -> None:
    """The cache dtype alone selects the backend: no flag beside it is needed. There is no hook."""
    import vllm.platforms.cuda as cuda
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    original = cuda._get_backend_priorities
    signature = inspect.signature(original)

    @wraps(original)
    def priorities(*args: Any, **kwargs: Any) -> Any:
        name = signature.bind(*args, **kwargs).arguments.get("kv_cache_dtype")
        if name is None or not is_ours(name):
            return original(*args, **kwargs)
        _name_backend(name)
        return [AttentionBackendEnum[backend_name(name)]]

    cuda._get_backend_priorities = priorities


def _patch_new_requests() -> None:
    """Which blocks of a request came from the prefix cache, only the model runner knows."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    original = DefaultModelState.add_request

    @wraps(original)
    def add_request(self: Any, req_index: int, new_req_data: Any) -> None:
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            rows = getattr(getattr(layer, "impl", None), "rows", None)
            if isinstance(rows, RequestRows):
                rows.add(req_index, new_req_data.num_computed_tokens)
        original(self, req_index, new_req_data)

    DefaultModelState.add_request = add_request


# vLLM 0.33 ----------------------------------------------------------------------------------------


def _register_cache_dtypes() -> None:
    from vllm.config.cache import register_kv_cache_dtype
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        name: str

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            return KVQuantMode.CUSTOM

    for name in Format.presets():
        register_kv_cache_dtype(name)(type(f"{name}_handler", (Handler,), {"name": name}))


def _register_backends() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvarn.integrations.vllm.backend import backend_path

    for name in Format.presets():
        AttentionBackendEnum.register(backend_name(name), backend_path(name))


def spec_of_records(spec: Any, fmt: Format) -> Any:
    """What the KV cache manager is told about a layer: a block is a record for each KV head.
    Layers with a sliding window keep all tokens and read those in it."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, replace_as

    if type(spec) is SlidingWindowSpec:
        spec = replace_as(spec, FullAttentionSpec, drop=("sliding_window", "extra_retained_tokens"))
    if type(spec) is not FullAttentionSpec:
        return spec  # of a kind of layer that is refused, see `is_of_records`
    if spec.block_size % fmt.group:
        return spec  # asked for the size of one token, to choose the size of a block
    return replace(
        spec,
        dtype=torch.uint8,
        tokens_per_state=fmt.group,
        state_content_bytes=fmt.record_bytes,
    )


def layouts_of_records() -> tuple[Any, ...]:
    """Each layer's records side by side."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return (KVCacheLayout.LBHNC,)


# vLLM 0.24 ----------------------------------------------------------------------------------------


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
            head_size_v=self.head_size_v,
            dtype=torch.uint8,
            format_name=self.kv_cache_dtype,
        )

    Attention.get_kv_cache_spec = get_kv_cache_spec


def _patch_rows() -> None:
    """The rows of requests are known to the model runner, and not to metadata builders."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    original = DefaultModelState.prepare_attn

    @wraps(original)
    def prepare_attn(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        global _rows
        # Batches that stand in for others (warm-up, capture, idle ranks) have rows that may be
        # those of requests. They have no prompts.
        real = input_batch.prefill_len_np > 0
        _rows = np.where(real, input_batch.idx_mapping_np, -1)
        try:
            return original(self, input_batch, *args, **kwargs)
        finally:
            _rows = None

    DefaultModelState.prepare_attn = prepare_attn


#: What is done to vLLM, by version.
_SET_UP: dict[str, tuple[Callable[[], None], ...]] = {
    "0.24": (
        _patch_cache_dtypes,
        _patch_backend_choice,
        _patch_spec,
        _patch_new_requests,
        _patch_rows,
    ),
    "0.33": (
        _register_cache_dtypes,
        _register_backends,
        _patch_backend_choice,
        _patch_new_requests,
    ),
}


# What the rest of the package asks ----------------------------------------------------------------


def backend_name(cache_dtype: str) -> str:
    """The name of a backend in vLLM. 0.24 has one for all of others: two such plugins exclude each
    other there."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return cache_dtype.upper() if hasattr(AttentionBackendEnum, "register") else "CUSTOM"


def _name_backend(cache_dtype: str) -> None:
    """Where the name stands for the backend of the last cache dtype that was asked for."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvarn.integrations.vllm.backend import backend_path

    if not hasattr(AttentionBackendEnum, "register"):
        register_backend(AttentionBackendEnum.CUSTOM, backend_path(cache_dtype))


def is_of_records(spec: Any) -> bool:
    """Whether a layer's spec is ours. Kinds of attention with specs of their own (in chunks, with
    sinks, without a causal mask, with values of another size) are not supported."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvarn.integrations.vllm.spec import KVarNSpec

    if hasattr(spec, "tokens_per_state"):
        ours = type(spec) is FullAttentionSpec and spec.tokens_per_state == spec.block_size
    else:
        ours = isinstance(spec, KVarNSpec)
    return ours and not spec.non_causal and spec.head_size_v == spec.head_size


def rows_of_step(common_attn_metadata: Any) -> np.ndarray | None:
    """``[requests]``: the rows of the requests of a step, -1 for those of a batch that stands in
    for others; without padding. None if vLLM does not say."""
    m = common_attn_metadata
    rows = getattr(m, "req_idx", None)
    if rows is None or m.is_prefilling is None:
        return _rows
    count = len(rows)
    # A request without tokens in the cache computes its prompt; a stand-in does neither. (vLLM's
    # stand-ins with a past are of features that are refused: adaptive verification, captures with
    # context parallelism.)
    new = np.diff(m.query_start_loc_cpu[: count + 1].numpy())
    past = m.seq_lens_cpu_upper_bound[:count].numpy() - new
    return np.where((past > 0) | m.is_prefilling[:count].numpy(), rows, -1)


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
