"""The attention backend: what the engine asks about it, and a layer's part in a step."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType

from kvarn import ops
from kvarn._backends import MAX_CUDA_HEAD_DIM
from kvarn.format import Format
from kvarn.integrations.vllm import _versions, pool, prefill
from kvarn.integrations.vllm.metadata import KVarNMetadata, KVarNMetadataBuilder
from kvarn.integrations.vllm.options import WHERE, Options
from kvarn.integrations.vllm.rows import RequestRows

#: Head dimensions that both our kernels and flash attention have.
HEAD_DIMS = [64, 128, MAX_CUDA_HEAD_DIM]


class KVarNBackend(AttentionBackend):  # type: ignore[misc]
    """Of one cache dtype: what the engine asks of a class, it asks without naming the dtype."""

    cache_dtype: ClassVar[str]
    accept_output_buffer = True
    # The update needs what is computed on the host for each step. Attention runs outside of
    # piecewise CUDA graphs; an update of its own would not always.
    forward_includes_kv_cache_update = True
    supported_dtypes = [torch.float16, torch.bfloat16]

    @classmethod
    def get_name(cls) -> str:
        return _versions.backend_name(cls.cache_dtype)

    @staticmethod
    def get_impl_cls() -> type[KVarNImpl]:
        return KVarNImpl

    @staticmethod
    def get_builder_cls() -> type[KVarNMetadataBuilder]:
        return KVarNMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return HEAD_DIMS

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype == cls.cache_dtype

    @classmethod
    def get_supported_kernel_block_sizes(cls, *_spec: Any) -> list[int]:
        return [Format(cls.cache_dtype, HEAD_DIMS[0]).group]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or [block_size] == cls.get_supported_kernel_block_sizes()

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # steps are planned on the host

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False  # open tiles are not in the pages that it would move

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return _versions.spec_of_records(spec, Format(cls.cache_dtype, spec.head_size))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return _versions.layouts_of_records()

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        fmt = Format(cache_dtype_str, head_size)
        if block_size != fmt.group:
            raise ValueError(f"{WHERE}a block must have {fmt.group} tokens, got {block_size}")
        return fmt.cache_shape(num_blocks, num_kv_heads)

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        reasons: list[str] = super().validate_configuration(*args, **kwargs)
        config = get_current_vllm_config_or_none()
        return reasons if config is None else reasons + unsupported(config)


def _class_name(cache_dtype: str) -> str:
    return f"{KVarNBackend.__name__}_{cache_dtype.removeprefix('kvarn_')}"


#: The backend of each cache dtype. The engine finds them by name in this module.
BACKENDS = {
    name: type(_class_name(name), (KVarNBackend,), {"cache_dtype": name, "__module__": __name__})
    for name in Format.presets()
}
globals().update({backend.__name__: backend for backend in BACKENDS.values()})


def backend_path(cache_dtype: str) -> str:
    """The dotted path of the backend of a cache dtype."""
    return f"{__name__}.{BACKENDS[cache_dtype].__name__}"


def unsupported(config: Any) -> list[str]:
    """What of an engine's configuration cannot be done, in words."""
    parallel, cache = config.parallel_config, config.cache_config
    reasons = []
    if config.speculative_config is not None:
        reasons.append("speculative decoding not supported (rejected tokens would be in records)")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        reasons.append("context parallelism not supported")
    if config.kv_transfer_config is not None or getattr(cache, "kv_offloading_size", None):
        reasons.append("KV connectors and offloading not supported (open tiles are not in pages)")
    if getattr(cache, "kv_cache_dtype_skip_layers", None):
        reasons.append("kv_cache_dtype_skip_layers not supported (pages of two sizes)")
    if getattr(cache, "prefix_match_unit", None):
        reasons.append("prefix_match_unit not supported (prefixes must end with a block)")
    if getattr(parallel, "use_ubatching", False):
        reasons.append("micro-batches not supported")
    if config.model_config.is_hybrid:
        reasons.append("models with state-space layers not supported")
    if not _versions.has_stable_rows(config):
        reasons.append("the V1 model runner is not supported (set VLLM_USE_V2_MODEL_RUNNER=1)")
    return reasons


class KVarNImpl(AttentionImpl[KVarNMetadata]):  # type: ignore[misc]
    """A layer. It owns its part of the staging pool, which is allocated with the model's weights,
    so that the engine's memory budget counts it.

    Attributes:
        fmt: the format.
        staging: the pool, ``[pages, 2, Hkv, G, D]``.
        rows: the requests that own its pages.
        window_left: tokens before its own that a query sees; -1: all.
        logits_soft_cap: 0: none.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **unknown: Any,
    ) -> None:
        for name, value in {
            "alibi_slopes": alibi_slopes,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            **unknown,
        }.items():
            if value is not None:
                raise NotImplementedError(f"{WHERE}layers with {name} are not supported")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"{WHERE}attention must be of a decoder, got {attn_type}")
        config = get_current_vllm_config()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.fmt = Format(kv_cache_dtype, head_size)
        self.window_left = -1 if sliding_window is None else sliding_window - 1
        self.logits_soft_cap = float(logits_soft_cap or 0.0)
        self.flash_attention_version = _versions.flash_attention_version(head_size)
        dtype = config.model_config.dtype
        rows, options = config.scheduler_config.max_num_seqs, Options.of(config)
        layers = config.model_config.get_num_layers(config.parallel_config)
        row = pool.page_bytes(self.fmt, self.num_kv_heads, dtype) * options.pages * layers
        _versions.check_pool(config, rows, row)
        self.staging = pool.new_pool(rows, options, self.fmt, self.num_kv_heads, dtype)
        self.rows = RequestRows(rows, self.fmt.group)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KVarNMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Stores the step's new tokens, and writes their attention to ``output``.

        Args:
            query: ``[tokens, Hq, D]``, padding included, as is the output; key, value
                ``[tokens, Hkv, D]``.
            kv_cache: uint8 ``[num_blocks, Hkv, record_bytes]`` (vLLM 0.33: ``[.., 1, ..]``).
            attn_metadata: of the step; None while the engine measures its memory.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"{WHERE}quantized outputs are not supported")
        if attn_metadata is None:
            return self._profile(query, key, value, output)
        m, cache = attn_metadata, self._records(kv_cache)
        self._store(key, value, cache, m)
        n = m.num_decodes
        if n > 0:
            ops.decode_attention(
                query[:n],
                cache,
                m.table[:n],
                m.seq_lens[:n],
                self.fmt,
                staging=self.staging,
                block_slot=m.geometry.block_slot,
                sm_scale=self.scale,
                logits_soft_cap=self.logits_soft_cap,
                window_left=self.window_left,
                out=output[:n],
            )
        if m.prefill is not None:
            tokens = m.num_tokens
            prefill.attend(self, query, key, value, cache, m, output)
            # Pages that were read above may be written now.
            self._append(key[:tokens], value[:tokens], m.prefill.rest, m)
        return output

    def _store(self, key: Tensor, value: Tensor, cache: Tensor, m: KVarNMetadata) -> None:
        """Every tile that the new tokens fill is a record afterwards: the engine may have promised
        it to other requests of the same step."""
        key, value = key[: m.num_tokens], value[: m.num_tokens]
        self._append(key, value, m.head, m)
        ops.seal_blocks(
            self.staging, m.seal_pages, m.seal_blocks, cache, self.fmt, count=m.seal_count
        )
        p = m.prefill
        if p is not None and p.tile_blocks.numel() > 0:
            shape = (-1, self.fmt.group, self.num_kv_heads, self.head_size)
            keys, values = (t.index_select(0, p.tile_tokens).view(shape) for t in (key, value))
            cache.index_copy_(0, p.tile_blocks, ops.quantize_tiles(keys, values, self.fmt))

    def _records(self, kv_cache: Tensor) -> Tensor:
        return kv_cache.view(kv_cache.shape[0], self.num_kv_heads, self.fmt.record_bytes)

    def _append(self, key: Tensor, value: Tensor, slots: Tensor, m: KVarNMetadata) -> None:
        ops.append_kv(key, value, slots, self.staging, m.geometry.block_slot, self.fmt)

    def _profile(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> Tensor:
        """The run in which the engine measures its memory: takes what a step may take."""
        parts = [prefill.scratch(self, query, prefill.PIECE_TOKENS), torch.empty_like(query)]
        parts += [torch.empty_like(key), torch.empty_like(value)]
        parts.append(query.new_empty((2, *query.shape[:2]), dtype=torch.float32))
        del parts
        return output.zero_()
