"""The benchmark harness on the CPU: cases, checks before timing, what a run prints and writes.

CUDA itself is not exercised: of its timer only which calls go into which graph, with stand-ins for
torch's graphs and events.
"""

from __future__ import annotations

import contextlib
import json
import types

import pytest
import torch

from bench import __main__ as program
from bench import ceilings, compare, harness, record
from bench.measure import Options, WrongError, measure
from bench.ops import ROUTINES
from bench.ops.decode_attention import sequence_lengths
from bench.peers.adapter import AbsentError, Peer
from bench.problems import Attention, Packed
from bench.tables import split_keys
from kvarn import Format, _backends, cli, ops, reference

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FMT = Format("kvarn_k4v2_g64", head_dim=64)

#: One small case of each op.
TINY = {
    "append_kv": {"tokens": 8, "head_dim": 64},
    "decode_attention": {
        "batch": 2, "context": 200, "group_size": 2, "head_dim": 64, "query_tokens": 1,
    },
    "dequantize_tiles": {"records": 16, "head_dim": 64},
    "gather_kv": {"batch": 2, "context": 200, "head_dim": 64},
    "hadamard_transform": {"shape": [6, 64], "dtype": "float16", "in_place": False},
    "merge_states": {"tokens": 3, "head_dim": 64},
    "pack_bits": {"shape": [5, 128], "bits": 3},
    "pack_records": {"records": 16, "head_dim": 64},
    "quantize_tiles": {"records": 16, "head_dim": 64, "fit": "minmax", "iterations": 2},
    "seal_blocks": {"records": 16, "head_dim": 64, "fit": "minmax", "iterations": 2},
    "unpack_bits": {"shape": [5, 128], "bits": 3},
    "unpack_records": {"records": 16, "head_dim": 64},
    "variance_normalize": {"shape": [4, 128, 128], "iterations": 4},
}  # fmt: skip


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Two input sets, two timed calls, small ceilings."""
    monkeypatch.setattr(harness, "cache_bytes", lambda device: 0)
    monkeypatch.setattr(harness, "QUICK_RUNS", 2)
    monkeypatch.setattr(harness, "MIN_RUNS", 2)
    monkeypatch.setattr(harness, "MIN_SECONDS", {"cpu": 0.0, "cuda": 0.0})
    monkeypatch.setattr(ceilings, "LARGE", {"cpu": 1 << 16})
    ceilings.read_time.cache_clear()
    ceilings.copy_time.cache_clear()


@pytest.fixture
def tiny(monkeypatch):
    """The program with `TINY` instead of its cases, three of decode_attention."""
    cases = {op: [case] for op, case in TINY.items()}
    ragged = {**TINY["decode_attention"], "context": "1-300", "split_tokens": 64}
    staged = {**TINY["decode_attention"], "context": 190, "staged_tiles": 2}
    cases["decode_attention"] += [ragged, staged]
    for routine in ROUTINES.values():
        monkeypatch.setattr(type(routine), "cases", lambda self, *_: cases[self.op])


def run(*arguments: str) -> int:
    return program.main(["--device", "cpu", "--format", str(FMT), *arguments])


# --------------------------------------------------------------------------------------------------
# Cases


def test_every_op_has_a_routine():
    """decode_workspace_bytes does nothing on a device."""
    assert set(ROUTINES) == set(_backends.OPS) - {"decode_workspace_bytes"} == set(TINY)


def test_the_cases_of_the_design():
    """Batches, contexts and groups, several query tokens, fixed splits and a ragged batch."""
    cases = ROUTINES["decode_attention"].cases(CUDA, False)
    plain = {
        (c["batch"], c["context"], c["group_size"])
        for c in cases
        if c["query_tokens"] == 1 and c["head_dim"] == 128 and len(c) == 5
    }
    shapes = [
        (1, 8192), (1, 32768), (1, 131072), (8, 16384), (32, 8192), (64, 16384), (128, 4096),
        (256, 2048), (64, "1-32768"), (64, "8000-8300"), (64, "16000-16384"),
    ]  # fmt: skip
    more = {(64, 16384, g) for g in (1, 7, 16)} | {(64, 3172, g) for g in (4, 8)}
    assert plain == {(b, n, g) for b, n in shapes for g in (4, 8)} | more
    assert {c["query_tokens"] for c in cases} >= {1, 2, 4, 8, 16}
    assert any("split_tokens" in c for c in cases) and any("staged_tiles" in c for c in cases)
    assert {(c["kv_heads"], c["group_size"]) for c in cases if "kv_heads" in c} == {
        (8, 4), (4, 8), (2, 8),
    }  # fmt: skip
    assert {c["records"] for c in ROUTINES["quantize_tiles"].cases(CUDA, False)} == {
        64, 1024, 4096, 16384,
    }  # fmt: skip
    assert [c["shape"] for c in ROUTINES["hadamard_transform"].cases(CUDA, False)][::2] == [
        [1 << 20, 128], [1 << 18, 256], [1 << 21, 64], [1 << 16, 1024],
    ]  # fmt: skip


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_cases_differ_and_quick_is_one_of_them(device):
    for routine in ROUTINES.values():
        cases = [json.dumps(case, sort_keys=True) for case in routine.cases(device, False)]
        assert len(set(cases)) == len(cases)
        assert len(routine.cases(device, True)) == 1


def test_ragged_lengths_are_the_same_every_time_and_spread_over_orders_of_magnitude():
    lengths = sequence_lengths(64, "1-32768")
    assert lengths == sequence_lengths(64, "1-32768")
    assert len(lengths) == 64
    assert 1 <= min(lengths) < 32 and 16384 < max(lengths) <= 32768
    assert 50 < sorted(lengths)[32] < 800  # the median of a log-uniform one is 181
    assert sequence_lengths(3, 70) == [70, 70, 70]


# --------------------------------------------------------------------------------------------------
# Inputs


@pytest.mark.parametrize("size", [16, 64, 256])
def test_plain_pages_hold_what_the_packed_cache_reads_as(size):
    packed = Packed(FMT, [1, 64, 300, 129], 2, 3, CPU)
    starts = torch.tensor([0, 1, 65, 365, 494], dtype=torch.int32)
    expected = ops.gather_kv(
        packed.cache, packed.tables[0], packed.seq_lens, FMT, cu_seq_lens=starts,
        dtype=torch.float32,
    )  # fmt: skip
    *pools, ids = packed.pages(size, torch.float32)
    assert [len(i) for i in ids] == [-(-n // size) for n in packed.lengths]
    assert len(torch.cat(ids).unique()) == sum(map(len, ids))
    for pool, want in zip(pools, expected, strict=True):
        assert pool.shape[1:] == (size, 2, 64)
        found = [pool[i].flatten(0, 1)[:n] for i, n in zip(ids, packed.lengths, strict=True)]
        torch.testing.assert_close(torch.cat(found), want, rtol=0, atol=1e-5)


def test_contiguous_is_what_the_packed_cache_reads_as():
    packed = Packed(FMT, [130, 130], 2, 2, CPU)
    starts = torch.tensor([0, 130, 260], dtype=torch.int32)
    expected = ops.gather_kv(
        packed.cache, packed.tables[0], packed.seq_lens, FMT, cu_seq_lens=starts,
        dtype=torch.float32,
    )  # fmt: skip
    for got, want in zip(packed.contiguous(torch.float32), expected, strict=True):
        torch.testing.assert_close(got.flatten(0, 1), want, rtol=0, atol=1e-5)


def test_input_sets_share_no_block():
    packed = Packed(FMT, [100, 1, 300], 1, 4, CPU)
    used = packed.tables[packed.tables < len(packed.cache)]
    assert sorted(used.tolist()) == list(range(4 * (2 + 1 + 5)))
    assert packed.record_bytes == 8 * FMT.record_bytes
    assert packed.bytes_16bit == 401 * 64 * 4


@pytest.mark.parametrize(("lengths", "count"), [([200, 70], 3), ([1, 300, 64], 1)])
def test_exact_attention_is_the_reference(lengths, count):
    packed = Packed(FMT, lengths, 2, 2, CPU)
    problem = Attention(packed, torch.randn(len(lengths) * count, 6, 64), count)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32) * count
    expected, _ = reference.decode_attention(
        problem.q, packed.cache, packed.tables[0], packed.seq_lens, FMT, cu_query_lens=starts
    )
    torch.testing.assert_close(problem.exact(), expected, rtol=0, atol=1e-6)
    assert problem.flops == 4 * sum(lengths) * count * 6 * 64


# --------------------------------------------------------------------------------------------------
# Timing


def test_calls_rotate_over_the_input_sets(monkeypatch):
    monkeypatch.setattr(harness, "MIN_RUNS", 5)
    seen = []
    timing = harness.time_calls([lambda i=i: seen.append(i) for i in range(3)], CPU)
    assert seen[3:] == [0, 1, 2, 0, 1]  # after three calls that warm up
    assert timing.runs == 5
    assert 0 < timing.p10 <= timing.median <= timing.p90


def test_input_sets_exceed_twice_the_cache(monkeypatch):
    monkeypatch.setattr(harness, "cache_bytes", lambda device: 1000)
    for size in (1, 7, 999, 1000, 5000):
        assert size * harness.input_sets(size, CPU) > 2000


def test_median_and_deciles():
    timing = harness.summarize([float(x) for x in range(101)])
    assert (timing.p10, timing.median, timing.p90, timing.runs) == (10, 50, 90, 101)
    assert harness.summarize([3.0]) == harness.Timing(3, 3, 3, 1)


def test_graphs_hold_every_input_set(monkeypatch):
    """With stand-ins for CUDA: each graph has so many calls, all sets are in some graph, replays go
    round, and the time is that of one call."""
    captured: list[list[int]] = []
    replayed: list[int] = []
    calls = [lambda i=i: captured[-1].append(i) for i in range(5)]

    class Graph:
        def replay(self):
            replayed.append(self.number)

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 0.012  # milliseconds

    @contextlib.contextmanager
    def capture(graph, stream):
        graph.number = len(captured)
        captured.append([])
        yield

    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "Stream": lambda device: stream,
        "current_stream": lambda device: None,
        "stream": lambda s: capture(types.SimpleNamespace(), s),
        "synchronize": lambda device: captured.clear(),
        "CUDAGraph": Graph,
        "graph": capture,
        "Event": Event,
        "_sleep": lambda cycles: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    one = harness._cuda_timer(calls, CUDA, 3)
    assert captured == [[0, 1, 2], [3, 4, 0]]
    assert [one(i) for i in range(3)] == [4.0] * 3
    assert replayed == [0, 1, 0]


def test_short_calls_share_a_graph():
    assert harness.calls_per_graph(1, CUDA) == harness.MAX_GRAPH_CALLS
    assert harness.calls_per_graph(20 << 20, CUDA) == 3
    assert harness.calls_per_graph(1 << 30, CUDA) == 1
    assert harness.calls_per_graph(1, CPU) == 1


# --------------------------------------------------------------------------------------------------
# One measurement


@pytest.mark.parametrize("op", TINY)
def test_each_op_is_checked_and_timed(op):
    routine = ROUTINES[op]
    row = measure(routine, TINY[op], str(FMT) if routine.packed else None, [], Options(CPU, True))
    assert row["runs"] == 2
    assert row["time_us"] > 0
    assert row["error"] < 1e-2
    assert row["bytes"] > 0
    assert ("read_us" in row) == (op == "decode_attention")
    assert ("copy_us" in row) == (op != "decode_attention")


#: op -> what its kernel is replaced by: something that runs and is wrong.
WRONG = {
    "append_kv": lambda key, value, slots, staging, *_: staging.fill_(1.0),
    "decode_attention": lambda q, *_, out, **__: out.fill_(0.0),
    "dequantize_tiles": lambda records, fmt, out: [x.fill_(1.0) for x in out],
    "gather_kv": lambda *_, out, **__: [x.fill_(1.0) for x in out],
    "hadamard_transform": lambda x, out: out.copy_(x),
    "merge_states": lambda a, la, b, lb, out: [x.copy_(y) for x, y in zip(out, (a, la))],  # noqa: B905
    "pack_bits": lambda codes, bits, out: out.fill_(1),
    "pack_records": lambda canonical, fmt, out: out.fill_(1),
    "quantize_tiles": lambda key, value, fmt, out, **_: out.fill_(1),
    "seal_blocks": lambda staging, slots, blocks, cache, *_, **__: cache.fill_(1),
    "unpack_bits": lambda packed, bits, count, out: out.fill_(1),
    "variance_normalize": lambda x, **_: (x, torch.ones(x.shape[:2]), torch.ones(x.shape[:2])),
}


@pytest.mark.parametrize("op", WRONG)
def test_a_wrong_op_is_not_timed(op, monkeypatch):
    routine = ROUTINES[op]
    fmt = FMT if routine.packed else None
    prepared = routine.prepare(TINY[op], fmt, CPU)
    monkeypatch.setattr(ops, op, WRONG[op])
    monkeypatch.setattr(routine, "prepare", lambda *_: prepared, raising=False)
    with pytest.raises(WrongError, match="against the reference, more than"):
        measure(routine, TINY[op], fmt and str(fmt), [], Options(CPU, True))


def test_an_op_that_leaves_its_output_alone_is_wrong(monkeypatch):
    """Outputs are poisoned."""
    routine = ROUTINES["decode_attention"]
    monkeypatch.setattr(ops, "decode_attention", lambda *_, **__: None)
    with pytest.raises(WrongError, match="relative error inf"):
        measure(routine, TINY["decode_attention"], str(FMT), [], Options(CPU, True))


def test_peers_are_checked_named_and_never_fatal():
    def peer(name, prepare, **more):
        return Peer(name, "decode_attention", "cpu", prepare, **more)

    def missing(problem):
        raise AbsentError("no_such_module is not installed")

    def broken(problem):
        raise RuntimeError("out of memory\nand more")

    peers = [
        peer("right", lambda problem: [lambda: problem.exact().float()]),
        peer("wrong", lambda problem: [lambda: torch.zeros_like(problem.q)]),
        peer("nan", lambda problem: [lambda: torch.full_like(problem.q, torch.nan)]),
        peer("missing", missing),
        peer("broken", broken),
        peer("slow", missing, slow_start=True),
    ]
    case = TINY["decode_attention"]
    row = measure(ROUTINES["decode_attention"], case, str(FMT), peers, Options(CPU, True))
    assert list(row["peers"]) == ["right"]
    assert row["skipped"] == {
        "wrong": "WrongError: its result differs from ours by 1.0e+00",
        "nan": "WrongError: its result differs from ours by inf",
        "missing": "no_such_module is not installed",
        "broken": "RuntimeError: out of memory",
        "slow": "left out of --quick: it compiles for long",
    }
    assert row["bytes_16bit"] == 2 * 200 * 8 * 64 * 4


# --------------------------------------------------------------------------------------------------
# The program


def test_a_run(tiny, tmp_path, capsys):
    path = tmp_path / "new" / "results.json"
    assert run("--quick", "--out", str(path)) == 0
    printed = capsys.readouterr()
    saved = json.loads(path.read_text())
    assert {"cpu", "threads", "isa", "torch", "commit", "date", "ceiling_gbps"} < set(saved)
    rows = saved["rows"]
    assert {row["op"] for row in rows} == set(TINY)
    assert len(rows) == len(TINY) + 2
    assert "[1/15] hadamard_transform shape 6x64" in printed.err
    for op in TINY:
        assert f"\n{op} (" in "\n" + printed.out
    attention = [row for row in rows if row["op"] == "decode_attention"]
    assert attention[0]["peers"].keys() == {"SDPA fp32", "SDPA, group as rows, fp32"}
    assert attention[1]["skipped"]["SDPA fp32"] == "takes sequences of one length"
    assert "SDPA fp32, decode_attention (1 cases): takes sequences of one length" in printed.out
    assert "torch.compile of the reference" in printed.out


def test_formats_and_cases_are_chosen(tiny, tmp_path):
    path = tmp_path / "results.json"
    names = ["kvarn_k4v2_g64", "kvarn_k2v2_g128"]
    arguments = ["--op", "decode_attention", "merge_states", "--cases", "context=200"]
    command = ["--device", "cpu", "--quick", "--format", *names, *arguments, "--out", str(path)]
    assert program.main(command) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["format"] for row in rows] == names
    # Peers do not depend on our format: they stand beside the first.
    assert [bool(row["peers"]) for row in rows] == [True, False]
    work = program._work(["gather_kv", "merge_states"], CPU, Format.presets(), [], True)
    assert [name for op, _, name in work if op == "gather_kv"] == list(Format.presets())
    assert [name for op, _, name in work if op == "merge_states"] == [None]


def test_a_wrong_op_fails_the_run_but_not_the_others(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ops, "decode_attention", WRONG["decode_attention"])
    path = tmp_path / "results.json"
    chosen = ["--op", "decode_attention", "merge_states"]
    assert run("--quick", "--peers", *chosen, "--out", str(path)) == 1
    assert [row["op"] for row in json.loads(path.read_text())["rows"]] == ["merge_states"]
    assert "WRONG:\n  decode_attention kvarn_k4v2_g64 batch 2" in capsys.readouterr().out


def test_refcheck_can_be_turned_off(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(ops, "merge_states", WRONG["merge_states"])
    path = tmp_path / "results.json"
    assert run("--quick", "--no-refcheck", "--op", "merge_states", "--out", str(path)) == 0
    assert json.loads(path.read_text())["rows"][0]["error"] is None


def test_ops_without_a_kernel_are_named(tiny, monkeypatch, capsys):
    monkeypatch.setattr(_backends, "ops_of", lambda key: frozenset({"pack_bits"}))
    assert run("--quick", "--peers", "--op", "pack_bits", "gather_kv") == 0
    assert "  gather_kv: no cpu kernel in this build\n" in capsys.readouterr().out


def test_the_package_runs_the_same_program(tiny, capsys):
    arguments = ["--quick", "--peers", "--op", "merge_states", "--device", "cpu"]
    assert cli.main(["bench", *arguments]) == 0
    assert "\nMeasured on " in capsys.readouterr().out


def test_saved_results_are_kept_by_machine(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "_cpu_name", lambda: "A(R) CPU 7")
    assert run("--quick", "--peers", "--op", "merge_states", "pack_bits", "--save") == 0
    assert {p.name for p in (tmp_path / "cpu-a-cpu-7").iterdir()} == {
        "merge_states.json", "pack_bits.json",
    }  # fmt: skip


def test_a_folder_and_peers_by_name(tiny, tmp_path):
    chosen = ["--op", "decode_attention", "--cases", "context=200", "--peers", "Rows", "flash"]
    assert run("--quick", *chosen, "--save", str(tmp_path)) == 0
    (row,) = record.load(tmp_path / "decode_attention.json")["rows"]
    assert list(row["peers"]) == ["SDPA, group as rows, fp32"]
    assert row["skipped"] == {}


def test_rows_of_one_origin_add_up(tmp_path):
    path = tmp_path / "op.json"

    def row(batch, time):
        return {"op": "x", "format": None, "case": {"batch": batch}, "time_us": time}

    facts = {"cpu": "c", "commit": "1", "date": "monday", "ceiling_gbps": 1.0}
    record.save(path, facts, [row(1, 10.0), row(2, 20.0)])
    record.save(path, {**facts, "date": "tuesday", "ceiling_gbps": 2.0}, [row(2, 21.0)])
    assert [r["time_us"] for r in record.load(path)["rows"]] == [10.0, 21.0]
    assert record.load(path)["date"] == "tuesday"
    record.save(path, {**facts, "commit": "2"}, [row(3, 30.0)])
    assert [r["time_us"] for r in record.load(path)["rows"]] == [30.0]


def test_slug_of_a_gpu():
    assert record.slug({"gpu": "NVIDIA H200"}) == "h200"


# --------------------------------------------------------------------------------------------------
# Comparison with an earlier run


def result(time, low, high, **more):
    return {
        "op": "x", "format": None, "case": {"batch": 1}, "time_us": time, "p10_us": low,
        "p90_us": high, "read_us": 50.0, "peers": {}, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("now", "then", "mark"),
    [
        (result(110, 108, 112), result(100, 98, 102), "slower"),
        (result(90, 88, 92), result(100, 98, 102), "faster"),
        (result(110, 101, 112), result(100, 98, 102), ""),  # the ranges meet
        (result(102, 101.9, 102.1), result(100, 99.9, 100.1), ""),  # less than the noise
    ],
)
def test_what_is_outside_the_noise_is_marked(now, then, mark):
    assert compare.verdict(now, then) == mark


def test_comparison_prints_ratios(tmp_path):
    record.save(tmp_path / "x.json", {}, [result(100, 98, 102)])
    now = [result(110, 108, 112, read_us=51.0), result(1, 1, 1, case={"batch": 2})]
    (table,) = compare.tables(now, compare.load_rows(tmp_path))
    assert table.rows == [("100.0 us", "110.0 us", "1.100", "1.020", "slower")]
    assert compare.tables(now, []) == []


def test_compare_option(tiny, tmp_path, capsys):
    path = tmp_path / "old.json"
    arguments = ["--quick", "--peers", "--op", "merge_states"]
    assert run(*arguments, "--out", str(path)) == 0
    capsys.readouterr()
    assert run(*arguments, "--compare", str(path)) == 0
    assert "merge_states (tokens 3, head_dim 64): now and then" in capsys.readouterr().out


def test_columns_are_what_differs():
    rows = [
        {"format": "f", "case": {"batch": 1, "context": 2}},
        {"format": "f", "case": {"batch": 1, "context": 3, "split_tokens": 64}},
    ]
    assert split_keys(rows) == ({"format": "f", "batch": 1}, ["context", "split_tokens"])
