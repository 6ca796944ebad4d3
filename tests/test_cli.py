"""The command line: what it prints, its exit status, and that it says what is wrong in words."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from kvarn import Format, _backends, cli, info
from kvarn._terminal import Table, binary_bytes

MODEL = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128"]


def test_module_runs():
    command = [sys.executable, "-m", "kvarn", "capacity", *MODEL, "--memory", "16GiB"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "A cache of 16 GiB: 32 layers x 8 KV heads x 128 channels" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("kvarn_k4v2_g128 ")]
    assert [row.split()[1:4] for row in rows] == [["27,648", "108", "4.74x"], ["912", "MiB", "48"]]


def test_capacity_json(capsys):
    arguments = ["capacity", *MODEL, "--context", "8192", "--formats", "kvarn_k2v2_g64", "--json"]
    assert cli.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == {"layers": 32, "kv_heads": 8, "head_dim": 128}
    assert (report["memory_bytes"], report["context"]) == (2**34, 8192)
    assert [row["format"] for row in report["formats"]] == ["FP16/BF16", "FP8", "kvarn_k2v2_g64"]
    fmt = Format("kvarn_k2v2_g64", head_dim=128)
    assert report["formats"][2]["bytes_per_token"] == 256 * fmt.bytes_per_token


def test_capacity_of_a_config(tmp_path, capsys):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["capacity", "--config", str(tmp_path), "--kv-heads", "1", "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model == {"layers": 2, "kv_heads": 1, "head_dim": 64}  # the option overrides the file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["capacity", "--layers", "2"], "kvarn: capacity needs a model: --config"),
        (["capacity", "--config", "nowhere.json"], "kvarn: [Errno 2] No such file or directory"),
        (["capacity", *MODEL, "--memory", "much"], "memory must be like 16GiB or 80GB, got 'much'"),
        (["capacity", *MODEL, "--context", "0"], "context must be at least 1, got 0"),
        (["capacity", *MODEL, "--formats", "k4"], "kvarn.Format: name must be kvarn_k{2,3,4,8}"),
        (["capacity", *MODEL, "--tp", "2"], "--tp is of the decode step: it needs --gpu"),
        (["capacity", *MODEL, "--weight-bits", "8"], "--weight-bits is of the decode step"),
        (["capacity", *MODEL, "--gpu", "h200"], "--gpu needs the weights"),
        (
            ["capacity", *MODEL, "--gpu", "h200", "--weights", "9GB", "--weight-bits", "0"],
            "weight_bits must be at least 1, got 0",
        ),
        (
            ["capacity", *MODEL, "--gpu", "h200", "--weights", "9GB", "--results", "nowhere"],
            "--results must be a folder, got nowhere",
        ),
        (["demo", "--model", "nowhere"], "model must be a local folder or GGUF file, got nowhere"),
        (["demo", "--tokens", "100"], "kvarn demo: tokens must be more than 384, got 100"),
    ],
)
def test_errors_are_words(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert "tokens" not in printed.out  # no table before the error


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[1]", "must be a JSON object, got a list"),
        (b"\xff\xfe", "must be JSON, got 'utf-8' codec"),
        (b"{", "must be JSON, got Expecting"),
        (b"{}", "a positive integer num_hidden_layers, got config.json without it"),
        (b'{"text_config": 3}', "a positive integer num_hidden_layers, got config.json without it"),
        *(
            (json.dumps(SIZES | {name: bad}).encode(), f"a positive integer {name}, got")
            for name in SIZES
            for bad in ("4", -1, 2.0, True)
        ),
        (json.dumps(SIZES | {"num_attention_heads": 0}).encode(), "num_attention_heads, got"),
        (json.dumps(SIZES | {"head_dim": 0, "hidden_size": 0}).encode(), "hidden_size, got"),
        (json.dumps(SIZES | {"head_dim": 0, "hidden_size": 3}).encode(), "head_dim must be"),
        (json.dumps(SIZES | {"num_key_value_heads": "8"}).encode(), "kv_heads must be"),
        (json.dumps(SIZES | {"layer_types": ["linear_attention"]}).encode(), "layers must be"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--gpu", "h200"]])
def test_any_config_that_describes_no_model(text, message, options, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_bytes(text)
    assert cli.main(["capacity", "--config", "config.json", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "vocab_size"])
@pytest.mark.parametrize("bad", [None, 0, "9"])
def test_a_config_without_the_weights(name, bad, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
    Path("config.json").write_text(json.dumps(SIZES | sizes | {name: bad}))
    assert cli.main(["capacity", "--config", "config.json", "--gpu", "h200"]) == 2
    assert f"a positive integer {name}, got config.json with" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m kvarn capacity {' '.join(MODEL)}"
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.returncode in (0, 1)  # 0: it was all written before


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["info", "--unknown"]])
def test_unknown_commands_are_explained(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2
    assert "usage: python -m kvarn" in capsys.readouterr().err


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["--help"])
    assert raised.value.code == 0
    printed = capsys.readouterr().out
    for command in ("info", "capacity", "demo", "bench"):
        assert f"\n    {command} " in printed


def test_info_checks_every_operator(capsys):
    assert cli.main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    cpu = {check["op"]: check["state"] for check in report["checks"] if check["device"] == "cpu"}
    assert cpu == dict.fromkeys(_backends.OPS, "ok")
    assert {"kvarn", "torch", "CPU", "CUDA library"} <= set(report["facts"])


@pytest.fixture
def two_checks(monkeypatch):
    """Only the checks that take no time."""
    few = {op: info._CHECKS[op] for op in ("hadamard_transform", "pack_bits")}
    monkeypatch.setattr(info, "_CHECKS", few)


def test_info_says_what_is_missing(capsys, monkeypatch, two_checks):
    monkeypatch.setattr(info, "missing", lambda: ["_ops_cuda: torch is built without CUDA"])
    monkeypatch.setattr(cli, "_DEMO_MODULES", ("no_such_module",))
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "Missing: _ops_cuda: torch is built without CUDA.\n" in printed
    assert "Missing: the package no_such_module, for `python -m kvarn demo`" in printed


def test_info_fails_on_a_wrong_kernel(capsys, monkeypatch, two_checks):
    right = info.ops.hadamard_transform
    monkeypatch.setattr(
        info,
        "ops",
        types.SimpleNamespace(**vars(info.ops) | {"hadamard_transform": lambda x: 1.1 * right(x)}),
    )
    assert cli.main(["info"]) == 1
    printed = capsys.readouterr().out
    assert "wrong" in printed
    assert "1 of 2 checks failed: hadamard_transform on cpu: error 1e-01" in printed


def test_info_reports_what_a_kernel_raised(monkeypatch, two_checks):
    def broken(device):
        raise RuntimeError("kvarn::pack_bits: no kernel image\nand more")

    monkeypatch.setitem(info._CHECKS, "pack_bits", broken)
    checks = {check.op: check for check in info.self_check(torch.device("cpu"))}
    assert checks["pack_bits"].state == "failed"
    assert checks["pack_bits"].detail == "RuntimeError: kvarn::pack_bits: no kernel image"


def test_info_names_operators_without_a_kernel(monkeypatch):
    monkeypatch.setattr(info._backends, "ops_of", lambda key: frozenset({"pack_bits"}))
    states = {check.op: check.state for check in info.self_check(torch.device("cpu"))}
    assert states.pop("pack_bits") == "ok"
    assert set(states.values()) == {"absent"}


def test_bench_forwards_its_arguments(monkeypatch):
    seen = []
    harness = types.ModuleType("bench.__main__")
    harness.__spec__ = types.SimpleNamespace(name="bench.__main__")  # type: ignore[assignment]
    harness.main = lambda argv: seen.append(argv)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bench.__main__", harness)
    assert cli.main(["bench", "--op", "decode_attention", "--help"]) == 0
    assert seen == [["--op", "decode_attention", "--help"]]


def test_bench_is_not_in_the_installed_package(monkeypatch, capsys):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench"]) == 2
    assert "the benchmarks are not part of the installed package" in capsys.readouterr().err


def test_demo_says_which_packages_it_lacks(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_DEMO_MODULES", ("no_such_module", "torch"))
    assert cli.main(["demo"]) == 2
    assert "the demo needs no_such_module: pip install 'kvarn[demo]'" in capsys.readouterr().err


def test_plain_table():
    table = Table("Title", ("name", "count"), [("a", "1"), ("long name", "1,000")], caption="Why.")
    assert table.plain() == (
        "Title\n"
        "name       count\n"
        "---------  -----\n"
        "a              1\n"
        "long name  1,000\n"
        "Why.\n"
    )  # fmt: skip


def test_rich_table(monkeypatch, capsys):
    """On a terminal the cells are rich's, and brackets are text."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    Table("Title", ("name", "count"), [("[b]", "1"), ("strong", "2")], strong=[1]).print()
    printed = capsys.readouterr().out
    assert "[b]" in printed
    assert "strong" in printed


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (1536, "1.5 KiB"), (2**34, "16 GiB")],
)
def test_binary_bytes(count, text):
    assert binary_bytes(count) == text
