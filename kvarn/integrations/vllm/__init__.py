"""kvarn as a KV cache of vLLM: ``vllm serve MODEL --kv-cache-dtype kvarn_k4v2_g128``.

vLLM finds the plugin by its entry point (group ``vllm.general_plugins``); see docs/vllm.md.

``_versions``   all that depends on the version of vLLM
``backend``     what the engine asks, and a layer's part in a step
``metadata``    what the layers need to know about a step
``prefill``     attention of requests with several new tokens
``pool``        the staging pool; ``rows`` its rows, ``options`` its size
"""


def register() -> None:
    """The entry point."""
    from kvarn.integrations.vllm._versions import register

    register()
