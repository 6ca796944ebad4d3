"""What an engine of one layer needs of vLLM under other names in other versions."""

from __future__ import annotations

from typing import get_args

import torch
import vllm
from vllm.v1.worker.gpu import attn_utils

MINOR = ".".join(vllm.__version__.split(".")[:2])

if MINOR == "0.24":
    from vllm.entrypoints.openai.cli_args import make_arg_parser as serve_parser  # noqa: F401
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
else:
    from vllm.entrypoints.common.cli_args import make_arg_parser as serve_parser  # noqa: F401
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups


def plan_cache(config, specs, backend):
    """The `KVCacheConfig` of 1 GiB, or of as many blocks as the configuration says."""
    if MINOR != "0.24":
        layouts = [layout.name for layout in get_supported_kv_cache_layouts([backend])]
        resolve_kv_cache_layout(config, [layouts], specs.values())
    groups = get_kv_cache_groups(config, specs)
    return get_kv_cache_config_from_groups(config, groups, 2**30)


def allocate_cache(config, kv_cache_config, groups, kernel_sizes):
    """Binds the cache to the layers."""
    device = torch.device("cpu")
    layers = config.compilation_config.static_forward_context
    if MINOR == "0.24":
        attn_utils.init_kv_cache(
            [], layers, kv_cache_config, groups, device, config.cache_config.cache_dtype,
            kernel_sizes, config,
        )  # fmt: skip
    else:
        flat = [group for some in groups for group in some]
        attn_utils.init_kv_cache(
            layers, kv_cache_config, device, kernel_sizes, config, attn_groups=flat
        )


def cache_dtypes() -> list[str]:
    """The names that vLLM takes."""
    import vllm.config.cache as config

    return list(get_args(config.CacheDType) if MINOR == "0.24" else config.KV_CACHE_DTYPES)
