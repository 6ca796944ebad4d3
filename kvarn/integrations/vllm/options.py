"""What a user can set: the ``kvarn`` entry of vLLM's ``additional_config``.

``--additional-config '{"kvarn": {"recent_blocks": 1}}'``
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvarn.cache import require_integer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WHERE = "kvarn.integrations.vllm: "


@dataclass(frozen=True)
class Options:
    """Which blocks of a request keep a 16-bit copy beside the one that is being filled.

    Attributes:
        sink_blocks: its first blocks, if it computed them itself.
        recent_blocks: its newest full blocks, likewise.
    """

    sink_blocks: int = 1
    recent_blocks: int = 0

    @property
    def pages(self) -> int:
        """Pages of the staging pool that a request owns."""
        return self.sink_blocks + self.recent_blocks + 1

    @staticmethod
    def of(vllm_config: VllmConfig) -> Options:
        """Raises ValueError for what is not an option."""
        config = vllm_config.additional_config
        given = config.get("kvarn", {}) if isinstance(config, dict) else {}
        known = [field.name for field in fields(Options)]
        if not isinstance(given, dict) or not set(given) <= set(known):
            raise ValueError(
                f"{WHERE}additional_config['kvarn'] must be a dict of {' and '.join(known)}, "
                f"got {given!r}"
            )
        return Options(**{k: require_integer(f"{WHERE}{k}", v, 0) for k, v in given.items()})
