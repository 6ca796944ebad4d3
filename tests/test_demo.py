"""`python -m kvarn demo` on a tiny model in a local folder; its parts on made-up data."""

from __future__ import annotations

import io
import json
import re

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from rich.console import Console
from tiny_model import WORDS, save
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvarn import Format, _progress, cli
from kvarn.studies import encoders, intervals
from kvarn.studies.divergence import Run, teacher_forced
from kvarn.studies.models import LoadedModel
from kvarn.studies.simulated_cache import SimulatedCache


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return LoadedModel("tiny", LlamaForCausalLM.from_pretrained(folder).eval(), tokenizer)


def test_demo_of_a_local_model(folder, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(WORDS)
    arguments = ["demo", "--model", str(folder), "--text", str(text), "--tokens", "450"]
    arguments += ["--formats", "kvarn_k8v4_g64", "kvarn_k4v2_g128", "--out", str(out), "--quick"]
    assert cli.main([*arguments, "--memory", "10MiB"]) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.endswith(" ...") or ": done in" in line]
    assert [line.split(" ")[0] for line in lines[::2]] == [
        "Loading", "Reading", "Answering", "Drawing",
    ]  # fmt: skip
    assert [begun.removesuffix(" ...") for begun in lines[2::2]] == [
        done.split(":")[0] for done in lines[3::2]
    ]
    assert "450 tokens of text.txt" in printed
    assert "tokens in 10 MiB" in printed

    results = json.loads((out / "results.json").read_text())
    rows = {row["cache"]: row for row in results["rows"]}
    assert list(rows) == [
        "16-bit cache",
        "kvarn_k8v4_g64",
        "kvarn_k4v2_g128",
        "k4v2 (paper)",
        "naive K4 V2",
        "naive K2 V2",
    ]
    for name in rows:
        assert f"\n{name} " in printed
    # 2 layers, 2 heads: 64 channels of K and V in 16 bits; a record; 4 + 2 bits and 8 bytes more.
    assert rows["16-bit cache"]["bytes_per_token"] == 4 * 256
    record = Format("kvarn_k4v2_g128", head_dim=64).record_bytes
    assert rows["kvarn_k4v2_g128"]["bytes_per_token"] == 4 * record / 128
    assert rows["naive K4 V2"]["bytes_per_token"] == 4 * (48 + 8)
    assert rows["16-bit cache"]["longest_sequence"] == 10 * 2**20 // 1024
    assert rows["16-bit cache"]["kl"] == 0
    assert 0 < rows["kvarn_k8v4_g64"]["kl"] < rows["naive K2 V2"]["kl"]
    assert len(rows["kvarn_k4v2_g128"]["kl_by_token"]) == 450
    assert len(rows["kvarn_k4v2_g128"]["sample"]["tokens"]) == 24
    for picture in ("rotation.png", "error-by-position.png", "memory.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")


def test_progress_is_told_while_it_is_made_where_there_is_no_terminal(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    with _progress.progress(Console(file=file)) as progress:
        task = progress.add_task("Reading", total=1200)
        assert file.getvalue() == "Reading ...\n"
        for _ in range(12):
            now[0] += 3
            progress.advance(task, 100)
            progress.advance(task, 0)
    begun, *middle, done = file.getvalue().splitlines()
    assert middle == ["Reading: 400 of 1,200", "Reading: 800 of 1,200"]
    assert re.fullmatch(r"Reading: done in \d+ s", done)
    with _progress.progress(Console(file=io.StringIO(), force_terminal=True)) as bars:
        assert not bars.disable


def test_demo_needs_enough_text(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Too short.")
    arguments = ["demo", "--model", str(folder), "--text", str(text), "--out", str(tmp_path)]
    assert cli.main(arguments) == 2
    assert "text must have 1023 tokens, got 10" in capsys.readouterr().err


def test_segments_start_with_the_begin_token(loaded):
    first, second = loaded.segments(WORDS, 100, 2)
    assert len(first) == len(second) == 100
    assert first[0] == second[0] == loaded.tokenizer.bos_token_id
    assert loaded.tokenizer.decode(torch.cat([first[1:], second[1:]])) == WORDS[:198]


def test_simulated_cache_replaces_full_tiles_only(loaded):
    """Sinks, recent tiles and the open one stay; each tile is encoded once."""
    seen = []

    def zero(key, value):
        seen.append(tuple(key.shape))
        return torch.zeros_like(key), torch.zeros_like(value)

    cache = SimulatedCache(1, zero, group=16, sinks=16, recent_blocks=1)
    key = torch.randn(2, 3, 100, 8, dtype=torch.float16).float()
    for start in range(0, 100, 16):
        kept, _ = cache.update(key[:, :, start : start + 16], key[:, :, start : start + 16], 0)
    # With 96 tokens before the last call, tiles 1 to 4 (16 to 79) are full and no longer recent.
    assert seen == [(2, 16, 3, 8)] * 4
    assert (kept[:, :, 16:80] == 0).all()
    assert torch.equal(kept[:, :, :16], key[:, :, :16])
    assert torch.equal(kept[:, :, 80:], key[:, :, 80:])


def test_naive_rounding():
    x = torch.tensor([[0.0, 1.0, 2.1, 3.0], [5.0, 5.0, 5.0, 5.0]])
    assert torch.allclose(encoders.round_tokens(x, 2), x.round(), atol=1e-6)
    assert torch.equal(encoders.round_tokens(x, 2)[1], x[1])


def test_divergence_of_the_exact_cache_is_zero(loaded):
    (tokens,) = loaded.segments(WORDS, 70)
    run = Run(lambda: SimulatedCache(loaded.num_layers, None, dtype=torch.float32))
    steps = []
    exact, traces = teacher_forced(
        loaded.model, tokens, run, {"same": run}, tile=32, progress=steps.append
    )
    trace = traces["same"]
    assert trace.kl.abs().max() == 0
    assert trace.agree.all()
    assert steps == [32, 32, 32, 32, 6, 6]
    # The whole text at once: the same perplexity.
    with torch.inference_mode():
        loss = loaded.model(tokens[None], labels=tokens[None]).loss
    assert exact.nll.mean() == pytest.approx(float(loss), rel=1e-5)
    assert trace.perplexity() == pytest.approx(float(loss.exp()), rel=1e-4)


def test_paired_ratio():
    """Paired: a common factor per token does not widen the interval of a constant ratio."""
    noise = [torch.rand(512).exp(), torch.rand(512)]
    ratio = intervals.paired_ratio([0.5 * x for x in noise], noise)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.5, 0.5, 0.5))
    other = intervals.paired_ratio(
        [torch.rand(512) for _ in noise], [torch.rand(512) for _ in noise]
    )
    assert other.low < other.value < other.high
    assert 0.8 < other.low < 1 < other.high < 1.25
