"""What the KV cache manager of vLLM 0.24 is told about a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvarn.format import Format


@dataclass(frozen=True, kw_only=True)
class KVarNSpec(FullAttentionSpec):  # type: ignore[misc]
    """Blocks of records. Layers with a sliding window keep all tokens and read those in it.

    Attributes:
        format_name: the cache dtype.
    """

    format_name: str = ""

    @property
    def real_page_size_bytes(self) -> int:
        fmt = Format(self.format_name, self.head_size)
        page: int = self.block_size // fmt.group * self.num_kv_heads * fmt.record_bytes
        return page

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        return replace(super().merge(specs), format_name=specs[0].format_name)
