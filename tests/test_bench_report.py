"""Tables and figures come from the recorded JSON, and the documents are up to date."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import report, vllm_report
from bench.ops.decode_attention import _cuda_cases, sequence_lengths
from kvarn import Format

#: A made-up machine: microseconds of a call, and bytes that it reads in one.
FIXED, RATE = 6.0, 4.0e6
NAME = Format.presets()[0]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """A folder of results as a whole run on an H200 would leave it."""
    folder = tmp_path_factory.mktemp("results")
    machine = {
        "gpu": "NVIDIA H200", "driver": "1", "cuda": "13.0", "torch": "2.11.0", "commit": "abc",
        "date": "2026-01-02",
    }  # fmt: skip
    attention = []
    for case in _cuda_cases():
        fmt = Format(NAME, head_dim=case["head_dim"])
        lengths, heads = sequence_lengths(case["batch"], case["context"]), case.get("kv_heads", 8)
        num_bytes = sum(-(-n // 128) for n in lengths) * heads * fmt.record_bytes
        bytes_16bit = sum(lengths) * heads * fmt.head_dim * 4
        time = (FIXED + num_bytes / RATE) * (1 + (case["query_tokens"] - 1) / 10)
        slower = {"cuDNN fp16": 5 + bytes_16bit / 4.3e6, "FlashInfer fp8": 9 + bytes_16bit / 7e6}
        attention.append(
            row(
                "decode_attention",
                case,
                time,
                num_bytes,
                read_us=num_bytes / 4.6e6,
                bytes_16bit=bytes_16bit,
                flops=num_bytes * 20,
                peers=slower if case["query_tokens"] == 1 else {},
            )  # fmt: skip
        )
    quantize = [
        row(
            "quantize_tiles",
            {"records": 64, "head_dim": 128, "fit": f, "iterations": i},
            100.0 + i,
            10**6,
            copy_us=3.0,
        )  # fmt: skip
        for f in ("unbiased", "minmax")
        for i in (0, 4, 8)
    ]
    (folder / "h200").mkdir()
    for op, rows, more in (
        ("decode_attention", attention, {"ceiling_gbps": 4580}), ("quantize_tiles", quantize, {}),
    ):  # fmt: skip
        text = json.dumps({**machine, **more, "rows": rows})
        (folder / "h200" / f"{op}.json").write_text(text)
    (folder / "cpu-x").mkdir()
    transform = row("hadamard_transform", {"shape": [6, 64], "in_place": False}, 2000.0, 10**6)
    facts = {"cpu": "X", "threads": 2, "isa": "avx2", "torch": "2", "commit": "c", "date": "d"}
    text = json.dumps({**facts, "rows": [{**transform, "format": None}]})
    (folder / "cpu-x" / "hadamard_transform.json").write_text(text)
    return folder


def row(op: str, case: dict, time: float, num_bytes: int, **more) -> dict:
    return {
        "op": op, "format": NAME, "case": case, "time_us": time, "p10_us": time, "p90_us": 2 * time,
        "bytes": num_bytes, "gbps": num_bytes / time / 1e3, "error": 1e-4, "peers": {}, **more,
    }  # fmt: skip


def between(text: str, name: str) -> str:
    return f"Before.\n<!-- bench:{name} -->\n{text}<!-- /bench:{name} -->\nAfter.\n"


def filled(results: Path, name: str) -> str:
    text = report.fill(between("old", name), results, "docs/figures")
    start, end = between("|", name).split("|")
    assert text.startswith(start) and text.endswith(end)
    return text[len(start) : -len(end)]


def test_documents_are_up_to_date(capsys):
    """`python -m bench.report` writes them."""
    assert report.main(["--check"]) == 0, capsys.readouterr().out


def test_check_writes_nothing(tmp_path, monkeypatch, results, capsys):
    (tmp_path / "docs").mkdir()
    for path in (tmp_path / "README.md", tmp_path / "docs" / "benchmarks.md"):
        path.write_text(between("old\n", "h200"))
    (tmp_path / "docs" / "vllm.md").write_text("Without a table.\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "FIGURES", tmp_path / "docs" / "figures")
    monkeypatch.setattr(report.record, "RESULTS", results)
    assert report.main(["--check"]) == 1
    assert capsys.readouterr().out == "stale: README.md, benchmarks.md\n"
    assert (tmp_path / "README.md").read_text() == between("old\n", "h200")
    monkeypatch.setattr(report, "draw", lambda *_: ["a.svg"])
    assert report.main([]) == 0
    assert "](docs/figures/h200-share.svg)" in (tmp_path / "README.md").read_text()
    assert "](figures/h200-share.svg)" in (tmp_path / "docs" / "benchmarks.md").read_text()
    assert report.main(["--check"]) == 0


def test_table_of_a_machine(results):
    text = filled(results, "h200")
    assert "on NVIDIA H200 (driver 1, CUDA 13.0), torch 2.11.0, 2026-01-02, commit abc\n" in text
    # batch, context, group, head dimension, query tokens; no split, staged tiles or KV heads
    (line,) = [
        x for x in text.splitlines() if x.startswith("| 64 | 16384 | 4 | 128 | 1 |  |  |  |")
    ]
    # 64 * 128 blocks * 8 heads * 13,824 B = 906 MB: 6 + 226.5 us, the read of them 197 us; cuDNN
    # 5 + 998.8 us.
    assert line.split(" | ")[8:13] == [
        "**232.5 us**", "232.5 us-465.0 us", "3,896.8", "85%", "1.00 ms (4.32x)",
    ]  # fmt: skip
    assert "![Roofline of decode_attention (h200)](docs/figures/h200-roofline.svg)" in text


def test_rows_of_another_commit_say_so(results, tmp_path):
    run = report.runs(results / "h200")["decode_attention"]
    assert report.other_commits(run) == ""
    run["rows"].append(run["rows"][0] | {"format": "kvarn_k4v4_g128", "commit": "abc"})
    run["rows"].append(run["rows"][0] | {"format": "kvarn_k3v3_g128", "commit": "abc"})
    assert report.other_commits(run) == "; kvarn_k4v4_g128, kvarn_k3v3_g128: commit abc"
    (tmp_path / "decode_attention.json").write_text(json.dumps(run))
    assert report.other_commits(run) in report.everything(tmp_path, "figures")


def test_performance_is_the_headlines_of_every_machine_gpus_first(results):
    text = filled(results, "performance")
    gpu, cpu = text.index("NVIDIA H200"), text.index("on X, 2 threads, avx2")
    assert gpu < cpu
    assert "decode_attention (format kvarn_k4v2_g128, group_size 4" in text
    rows = [line for line in text.splitlines() if line.startswith(("| 1 |", "| 64 |", "| 256 |"))]
    assert [line.split(" | ")[1] for line in rows] == [
        "8192", "32768", "131072", "16384", "2048", "1-32768", "8000-8300", "16000-16384", "3172",
    ]  # fmt: skip
    assert "hadamard_transform (shape 6x64, in_place False)" in text
    assert "| **2.00 ms** | 0.5 |" in text


def test_scaling_model_beside_shapes_it_was_not_fitted_to(results):
    text = filled(results, "scaling")
    assert (
        f"- {NAME}: 83% of the bandwidth after 6.0 us (measured on NVIDIA H200, 2026-01-02" in text
    )
    assert "- FP16/BF16: 90% of the bandwidth after 5.0 us" in text
    assert "- FP8: 73% of the bandwidth after 9.0 us" in text
    assert "kvarn_k2v2_g128" not in text
    lines = [line for line in text.splitlines() if line.startswith(f"| {NAME}")]
    assert len(lines) == 6
    assert all(line.endswith((" +0% |", " -0% |")) for line in lines)


def test_scaling_model_without_measurements(tmp_path):
    (tmp_path / "h200").mkdir()
    text = filled(tmp_path, "scaling")
    assert text == "\nThe shapes of models have not been recorded yet.\n"


def test_peers_of_an_earlier_run(results):
    """Their ratio to ours is only there where we have the case."""
    (results / "h200" / "earlier").mkdir()
    case = {"context": 16384, "group_size": 4, "head_dim": 128, "query_tokens": 1}
    rows = [
        {"case": {"batch": batch, **case}, "read_us": 10.0, "peers": {"a fp16": 465.0}}
        for batch in (64, 3)
    ]
    path = results / "h200" / "earlier" / "decode_attention_peers.json"
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "note": "Long ago.", "rows": rows}))
    text = filled(results, "earlier-peers")
    assert text.startswith("NVIDIA H200. Long ago.\n")
    assert "| 64 | 16384 | 10.0 us | 465.0 us (2.00x) |" in text
    assert "| 3 | 16384 | 10.0 us | 465.0 us |" in text
    path.unlink()


def test_figures(results, tmp_path, monkeypatch):
    drawn = report.draw(results, tmp_path / "a")
    assert drawn == [
        "h200-share.svg", "h200-speedup.svg", "h200-query-tokens.svg", "h200-iterations.svg",
        "h200-roofline.svg",
    ]  # fmt: skip
    monkeypatch.setattr(report, "PLOTS", {"speedup": report.PLOTS["speedup"]})
    (name,) = report.draw(results, tmp_path / "b")
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_curves(results):
    """What is drawn: the numbers of the rows."""
    from matplotlib.figure import Figure

    found = report.runs(results / "h200")

    def axes_of(name):
        axes = Figure().subplots()
        report.PLOTS[name](found)(axes)
        return axes

    query = {line.get_label(): line for line in axes_of("query-tokens").get_lines()}
    line = query["batch 8, context 16384, group 4"]
    assert list(line.get_xdata()) == [1, 2, 3, 4, 8, 16]
    assert line.get_ydata() == pytest.approx([1, 1.1, 1.2, 1.3, 1.7, 2.5])
    iterations = {line.get_label(): line for line in axes_of("iterations").get_lines()}
    assert list(iterations["minmax, 64 records"].get_ydata()) == [100 / 64, 104 / 64, 108 / 64]
    speedup = {line.get_label(): line for line in axes_of("speedup").get_lines()}
    assert set(speedup) >= {"cuDNN fp16", "FlashInfer fp8"}
    assert len(speedup["cuDNN fp16"].get_xdata()) == 9  # the ragged batch has no one context
    share = [bar.get_width() for bar in axes_of("share").patches]
    assert len(share) == 12
    assert max(share) < 100
    points = axes_of("roofline").get_lines()[0]
    assert points.get_xdata() == pytest.approx([20.0] * len(points.get_xdata()))


def test_a_machine_without_results_has_no_figures():
    assert all(plot({}) is None for plot in report.PLOTS.values())


def test_whole_decode_steps(tmp_path):
    """A layer, a model and what fits, each with its own columns."""
    path = tmp_path / "steps.json"
    assert report.serving_tables(path) == "Not recorded yet.\n"
    common = {"op": "serving_step", "format": NAME}
    layer = {"what": "attention", "batch": 64, "context": 16384, "seals": 1}
    network = {"what": "model", "batch": 64, "context": 16384, "layers": 4, "steps": 128}
    memory = {"what": "capacity", "layers": 36, "context": 16384}
    rows = [
        {"case": layer, "time_us": 200.0, "peers": {"cuDNN fp16": 1000.0}},
        {
            "case": layer | {"context": 131072}, "time_us": 400.0, "peers": {},
            "skipped": {"cuDNN fp16": "OutOfMemoryError: CUDA out of memory. Tried to allocate"},
        },
        {"case": layer | {"batch": 4}, "time_us": 50.0, "peers": {"cuDNN fp16": 100.0}},
        {"case": network, "time_us": 2000.0, "tokens_per_s": 32000, "peers": {}},
        {
            "case": memory, "memory_bytes": 128 << 30, "batch": 220, "batch_16bit": 55,
            "predicted": 221, "predicted_16bit": 55,
        },
    ]  # fmt: skip
    machine = {"gpu": "G", "driver": "1", "cuda": "2", "torch": "3", "date": "4", "commit": "5"}
    note = "The model: commit 6."
    path.write_text(json.dumps({**machine, "note": note, "rows": [common | row for row in rows]}))
    text = report.serving_tables(path)
    assert text.startswith(f"G (driver 1, CUDA 2), torch 3, 4, commit 5; format {NAME}. {note}\n")
    assert (
        "| 4 | 16384 | 1 | **50.0 us** | 100.0 us (2.00x) |\n"
        "| 64 | 16384 | 1 | **200.0 us** | 1.00 ms (5.00x) |\n"
        "| 64 | 131072 | 1 | **400.0 us** | out of memory |\n"
    ) in text
    assert "| 64 | 16384 | 4 | **2.00 ms** | 32,000 |" in text
    assert "| 36 | 16384 | 128.0 GiB | **220** | 221 | 55 | 4.00 |" in text


@pytest.fixture
def engines(tmp_path):
    """The results of a vLLM engine with three caches; two runs of one load."""
    path = tmp_path / "h200" / "vllm" / "engine.json"
    path.parent.mkdir(parents=True)
    rows = [
        {
            "case": {"cache": cache, "dtype": "float16", "batch": b, "prompt": p, "new": 256},
            "op": "vllm", "format": None, "kv_tokens": tokens, "tokens_per_s": rate * b,
            "ms_per_step": 1e3 / rate, "median_step_ms": 9.0, "prefill_s": 1.5, "steps": 200,
        }
        for cache, tokens, rates in (
            (NAME, 4300, (100.0, 120.0)), ("auto", 1000, (40.0, 80.0)), ("other", 2000, (50.0,)),
        )
        for b, p, rate in zip((64, 16), (8192, 16384), rates, strict=False)
    ]  # fmt: skip
    rows[-1]["case"]["dtype"] = "bfloat16"
    shorter = rows[0]["case"] | {"new": 128, "run": 2}
    again = rows[0] | {"tokens_per_s": 6600.0, "steps": 90, "case": shorter}
    many = rows[2] | {
        "decoding": 95.4, "case": rows[2]["case"] | {"batch": 256}, "commit": "earlier"
    }  # fmt: skip
    machine = {"gpu": "G", "torch": "3", "date": "4", "commit": "5", "vllm": "6", "note": "Once."}
    path.write_text(json.dumps({**machine, "rows": [*rows, again, many]}))
    return path


@pytest.fixture
def study(tmp_path):
    """Of one cache: KL is the mean from token 256 on, in blocks of 64."""
    path = tmp_path / "study.json"
    case = {
        "name": "k4v2 unbiased", "family": "unbiased", "bits": 3.5625, "recent_blocks": 0,
        "segments": {"a": {"kl": [9.0] * 4 + [0.01, 0.02]}, "b": {"kl": [9.0] * 4 + [0.03]}},
    }  # fmt: skip
    settings = {"settings": {"first": 256, "block": 64}}
    path.write_text(json.dumps({"settings": settings, "case-k4v2-unbiased": case}))
    return path


def test_engines_of_vllm(engines, study):
    """Ratios are to the 16-bit cache of the same load; runs are averaged."""
    text = vllm_report.table(engines, study, "figures")
    assert (
        "| 64 x 8192 | float16 | 64 | **2,560** | 25.00 | 9.00 | 200 | 1.50 s | 1,000 | 0 |" in text
    )
    assert (
        f"| 64 x 8192 | {NAME} | 64 | **6,500** (2.54x), 6,400-6,600 | 10.00 | 9.00 | 200, 90 "
        "| 1.50 s | 4,300 (4.30x) | 0.0200 |" in text
    )
    assert f"| 16 x 16384 | {NAME} | 16 | **1,920** (1.50x) |" in text
    assert "| 64 x 8192 | other (model in bfloat16) | 64 | **3,200** (1.25x) |" in text
    assert "| 1.50 s | 2,000 (2.00x) |  |" in text
    assert "| 256 x 8192 | float16 | 95 |" in text
    assert text.endswith(
        "vLLM 6, G, torch 3, 4, commit 5. Runs of commit earlier: float16 at 256 x 8192 (1 of 1). "
        "Once.\n"
    )
    assert f"(figures/{vllm_report.FIGURE})" in text
    assert "\n- 64 x 8192: at least 2.0x; 2.54x, met\n" in text
    assert "\n- 16 x 16384: at least 1.6x; 1.50x, missed\n" in text
    assert "\n- 256 x 8192: at least 3.0x; not measured\n" in text
    assert "\n- room: at least 4.3x; 4.30x, met\n" in text
    order = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| ")]
    assert [load for load, _ in order if load not in ("| requests x prompt", "| ---")] == [
        "| 16 x 16384", "| 16 x 16384", "| 64 x 8192", "| 64 x 8192", "| 64 x 8192", "| 256 x 8192",
    ]  # fmt: skip


def test_the_study_says_how_exact_a_cache_is(study):
    assert vllm_report.divergence(NAME, study) == pytest.approx(0.02)
    assert vllm_report.divergence("kvarn_k4v4_g128", study) is None  # not in this study
    assert vllm_report.divergence("kvarn_k4v2_g64", study) is None  # the study is of 128
    recorded = report.ROOT / "docs" / "accuracy" / "study.json"
    assert (
        "| k4v2 unbiased | 3.56 | 3.85 | 0.0078"
        in (recorded.parents[1] / "accuracy.md").read_text()
    )
    assert f"{vllm_report.divergence(NAME, recorded):.4f}" == "0.0078"
    assert f"{vllm_report.divergence('fp8', recorded):.4f}" == "0.0013"


def test_figure_of_engines(engines, study, tmp_path):
    out = tmp_path / "drawn"
    assert vllm_report.draw(engines, study, out) == [vllm_report.FIGURE]
    text = (out / vllm_report.FIGURE).read_text()
    for words in (
        "KL 0.0200",
        "KL 0",
        "other (model in bfloat16)",
        "million tokens that fit",
        "256 x 8192",
    ):
        assert f"<!-- {words} -->" in text, words
    assert report.draw(tmp_path, out) == [vllm_report.FIGURE]


def test_no_engines(tmp_path):
    assert vllm_report.table(tmp_path / "no", tmp_path, "figures") == "Not recorded yet.\n"
    assert vllm_report.draw(tmp_path / "no", tmp_path, tmp_path) == []


def test_rates_of_an_engine():
    """Only steps in which all requests decode count, without the first of them."""
    from bench import vllm

    assert vllm.Case.parse("64:8192:256") == vllm.Case(64, 8192, 256)
    moments = [vllm.Moment(1.0, 1, 1, 0)]
    moments += [vllm.Moment(2.0 + 0.5 * i, 2 + 2 * i, 2, 0) for i in range(20)]
    moments += [vllm.Moment(99.0, 42, 2, 1)]
    found = vllm.summary(moments)
    assert found == {
        "tokens_per_s": 4.0, "ms_per_step": 500.0, "median_step_ms": 500.0, "steps": 15,
        "decoding": 2.0, "prefill_s": 2.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match="1 steps in which all requests decode"):
        vllm.summary(moments[:2])
