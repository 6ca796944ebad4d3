"""``python -m bench.serving`` on the CPU, in sizes that tell nothing."""

from __future__ import annotations

import json

import pytest
import torch

from bench import ceilings, serving
from bench.measure import WrongError
from kvarn import ops

SIZES = [
    "--device", "cpu", "--format", "kvarn_k4v2_g64", "--batch", "3", "--context", "400",
    "--layers", "2", "--q-heads", "4", "--kv-heads", "2", "--head-dim", "64", "--hidden", "32",
    "--intermediate", "32", "--vocabulary", "50", "--quick",
]  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")


@pytest.fixture(autouse=True)
def small_reads(monkeypatch):
    for module in (ceilings, serving):
        monkeypatch.setattr(module, "input_sets", lambda num_bytes, device: 2)


def test_attention(tmp_path, monkeypatch):
    sealed = []
    seal = ops.seal_blocks

    def seal_blocks(staging, slots, blocks, *args, **kwargs):
        sealed.append(int((slots >= 0).sum()))
        seal(staging, slots, blocks, *args, **kwargs)

    monkeypatch.setattr(ops, "seal_blocks", seal_blocks)
    out = tmp_path / "serving.json"
    assert serving.main([*SIZES, "--what", "attention", "--out", str(out), "--commit", "x"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"]["seals"] for row in rows] == [0, 1]
    assert set(sealed) == {0, 1}
    for row in rows:
        assert row["op"] == "serving_step"
        assert row["error"] < 1e-5
        assert row["time_us"] > 0
        assert row["peers"].keys() == {"SDPA math fp32"}
        assert row["bytes_16bit"] == 2 * 3 * 400 * 2 * 64 * 2


def test_several_sizes(tmp_path):
    out = tmp_path / "serving.json"
    arguments = ["--what", "attention", "--out", str(out), "--commit", "x", "--sizes"]
    assert serving.main([*SIZES, *arguments, "1x130", "2x300"]) == 0
    cases = [row["case"] for row in json.loads(out.read_text())["rows"]]
    assert [(case["batch"], case["context"], case["seals"]) for case in cases] == [
        (1, 130, 0), (1, 130, 1), (2, 300, 0), (2, 300, 1),
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        serving.main(["--sizes", "64"])


def test_model(capsys):
    pytest.importorskip("transformers")
    assert serving.main([*SIZES, "--what", "model", "--steps", "70"]) == 0
    line = capsys.readouterr().out
    assert "'steps': 70" in line
    assert "tokens/s" in line
    assert "transformers SDPA" in line
    assert "SDPA math fp32" in line
    assert "Error" not in line


def test_a_wrong_result_is_not_timed(monkeypatch):
    decode = ops.decode_attention
    monkeypatch.setattr(ops, "decode_attention", lambda *a, **k: decode(*a, **k).mul_(1.01))
    setup = serving.Setup(
        torch.device("cpu"), "kvarn_k4v2_g64", 2, 300, 1, 4, 2, 64, 32, 32, 50, True
    )
    with pytest.raises(WrongError, match="attention is wrong by 1"):
        serving.attention(setup, 0)


def test_largest_batch_is_searched_by_allocating():
    """Torch or the driver says that there is no memory; anything else is no answer."""

    def allocate(error, limit):
        def attempt(batch):
            if batch > limit:
                raise error

        return attempt

    for error in (torch.OutOfMemoryError("x: out of memory"), RuntimeError("CUDA: out of memory")):
        assert [serving._most(allocate(error, n), 100) for n in (0, 1, 36, 99)] == [0, 1, 36, 99]
    with pytest.raises(RuntimeError, match="illegal"):
        serving._most(allocate(RuntimeError("illegal address"), 36), 100)
