"""The model of a decode step against numbers worked out by hand."""

from __future__ import annotations

import json

import pytest

from kvarn import Format, cli, scaling
from kvarn.capacity import ModelShape
from kvarn.scaling import FP8, FP16, Assumptions, Decoder, Gpu, Rate

#: 1 TB/s and 100 TFLOP/s: bytes are microseconds per million.
ROUND = Gpu("round", 100e9, 1e12, 100e12)
EXACT = Assumptions(weight_share=1.0, matrix_share=1.0, layer_us=10.0, allreduce_us=5.0,
                    memory_share=1.0)  # fmt: skip
NAME = "kvarn_k4v2_g128"
RATES = {name: Rate(0.5, 2.0, "given") for name in (FP16, FP8, NAME)}
SHAPE = ModelShape(layers=10, kv_heads=4, head_dim=128)
MODEL = Decoder(SHAPE, parameters=10**9, weight_bytes=2 * 10**9, stored_bytes=3 * 10**9)

QWEN3_8B = {
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip


def predict(**changes) -> dict[str, scaling.Step]:
    arguments = {"batch": 2, "context": 1000, "formats": [NAME], "assumptions": EXACT} | changes
    return {s.format: s for s in scaling.predict(MODEL, ROUND, RATES, **arguments)}


def test_fp16():
    step = predict()[FP16]
    assert step.weights_us == pytest.approx(2000)  # 2 GB at 1 TB/s
    # 2 sequences * 1000 tokens * 10 layers * 4 heads * 2 * 128 * 2 B = 40.96 MB at 0.5 TB/s
    assert step.cache_us == pytest.approx(81.92)
    assert step.launch_us == pytest.approx(10 * (2 + 10))
    assert step.step_us == pytest.approx(2201.92)
    assert step.tokens_per_second == pytest.approx(2 / 2201.92e-6)
    assert step.largest == "weights"
    # The cache takes 2120 us where 2 * context * 20,480 B = 1060 MB.
    assert step.cache_largest_from == int(1060e6 / 40960)
    # 97 GB beside the weights, 20.48 MB a sequence
    assert step.fits == int(97e9 // 20.48e6)


def test_fp8_is_half():
    steps = predict()
    assert steps[FP8].cache_us == pytest.approx(steps[FP16].cache_us / 2)
    assert steps[FP8].weights_us == steps[FP16].weights_us


def test_packed_keeps_blocks_in_16_bits():
    step = predict()[NAME]
    # Sinks, a recent block and half of the open one: 320 tokens of 512 B, 680 of 108 B a head.
    per_head = 320 * 512 + 680 * 108
    assert step.cache_us == pytest.approx(2 * 10 * 4 * per_head / 0.5e6)
    none = predict(sink_blocks=0, recent_blocks=0)[NAME]
    assert none.cache_us == pytest.approx(2 * 10 * 4 * (64 * 512 + 936 * 108) / 0.5e6)
    short = predict(context=100)
    assert short[NAME].cache_us == pytest.approx(short[FP16].cache_us)


@pytest.mark.parametrize("name", [FP16, FP8, NAME])
def test_cache_is_largest_from_there_on(name):
    start = predict()[name].cache_largest_from
    before, after = (predict(context=start + d)[name] for d in (-10, 10))
    assert before.cache_us < before.weights_us + before.launch_us
    assert after.cache_us > after.weights_us + after.launch_us
    assert after.largest == "cache"


def test_large_batches_wait_for_arithmetic():
    # 2 * 1e9 * batch operations at 100 TFLOP/s: 20 us a sequence, more than 2000 us from 101 on.
    assert predict(batch=100)[FP16].weights_us == pytest.approx(2000)
    assert predict(batch=150)[FP16].weights_us == pytest.approx(3000)


def test_tensor_parallel():
    step = predict(tensor_parallel=2)[FP16]
    assert step.weights_us == pytest.approx(1000)
    assert step.cache_us == pytest.approx(81.92 / 2)
    assert step.launch_us == pytest.approx(10 * (2 + 10 + 2 * 5))
    # 3 GB of weights on two GPUs, half of the heads of each sequence.
    assert step.fits == int(98.5e9 // 10.24e6)
    # Eight GPUs repeat the four heads.
    assert predict(tensor_parallel=8)[FP16].cache_us == pytest.approx(81.92 / 4)


def test_launches_dominate_a_small_model():
    small = Decoder(SHAPE, 10**6, 2 * 10**6, 2 * 10**6)
    steps = scaling.predict(small, ROUND, RATES, batch=1, context=10, assumptions=EXACT)
    assert {step.largest for step in steps} == {"launch"}


def test_weights_that_do_not_fit():
    large = Decoder(SHAPE, 10**11, 2 * 10**11, 2 * 10**11)
    step = scaling.predict(large, ROUND, RATES, batch=1, context=10, assumptions=EXACT)[0]
    assert (step.fits, step.fits_tokens_per_second) == (0, 0)


def test_every_preset_by_default_and_its_origin():
    steps = scaling.predict(MODEL, ROUND, {NAME: RATES[NAME]}, batch=1, context=10)
    assert [step.format for step in steps] == [FP16, FP8, *Format.presets()]
    origins = {step.format: step.attention for step in steps}
    assert origins.pop(NAME) == "50% of the bandwidth after 2.0 us (given)"
    assert set(origins.values()) == {"80% of the bandwidth after 8.0 us (assumed)"}


@pytest.mark.parametrize("name", ["batch", "context", "tensor_parallel"])
def test_errors(name):
    with pytest.raises(ValueError) as raised:
        predict(**{name: 0})
    assert str(raised.value) == f"kvarn::scaling: {name} must be at least 1, got 0"


# --------------------------------------------------------------------------------------------------
# The weights of a model


def decoder(tmp_path, bits=16, **changes) -> Decoder:
    path = tmp_path / "config.json"
    kept = {k: v for k, v in (QWEN3_8B | changes).items() if v is not None}
    path.write_text(json.dumps(kept))
    return Decoder.from_config(path, weight_bits=bits)


def test_weights_of_a_config(tmp_path):
    model = decoder(tmp_path)
    # q, o: 2 * 4096 * 4096; k, v: 2 * 4096 * 1024; gate, up, down: 3 * 4096 * 12288.
    layer = 33554432 + 8388608 + 150994944
    assert model.parameters == 36 * layer + 151936 * 4096 == 7568097280
    assert model.weight_bytes == 2 * model.parameters
    assert model.stored_bytes == 2 * (model.parameters + 151936 * 4096)  # 8.19 billion
    assert decoder(tmp_path, tie_word_embeddings=True).stored_bytes == model.weight_bytes
    assert decoder(tmp_path, bits=4).weight_bytes == model.parameters // 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 8}, "must be of a dense transformer"),
        ({"n_routed_experts": 8}, "must be of a dense transformer"),
        ({"layer_types": ["linear_attention"] * 35 + ["full_attention"]}, "of a dense transformer"),
        ({"intermediate_size": None}, "intermediate_size, got .* without it"),
    ],
)
def test_configs_of_other_models(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        decoder(tmp_path, **changes)


def test_weights_by_hand():
    assert Decoder.from_bytes(SHAPE, 1000, weight_bits=4) == Decoder(SHAPE, 2000, 1000, 1000)


# --------------------------------------------------------------------------------------------------
# Measured rates


def test_fit_finds_the_line():
    points = [(size, 7 + size / 0.4e6) for size in (10**6, 10**7, 10**8, 10**9)]
    rate = scaling.fit(points, ROUND, "here")
    assert (rate.share, rate.fixed_us) == (pytest.approx(0.4), pytest.approx(7))
    assert rate.measured and rate.source == "here"
    assert rate.call_us(10**7, ROUND) == pytest.approx(32)


def test_fit_weighs_short_calls_like_long_ones():
    """One percent off at the long end must not move the fixed time by more than a little."""
    points = [(10**6, 10.0), (2 * 10**6, 12.5), (4 * 10**6, 17.5), (4 * 10**9, 10100.0)]
    assert scaling.fit(points, ROUND, "").fixed_us == pytest.approx(7.5, abs=0.1)


def test_fit_has_no_negative_time():
    rate = scaling.fit([(10**6, 1.0), (10**7, 19.0), (10**8, 210.0)], ROUND, "")
    assert rate.fixed_us == 0
    assert 0.4 < rate.share < 1.1


def test_too_little_to_fit():
    assert scaling.fit([(10**6, 1.0), (10**6, 2.0), (10**7, 10.0)], ROUND, "") is None
    assert scaling.fit([(10**6, 9.0), (10**7, 6.0), (10**8, 3.0)], ROUND, "") is None
    # A long call at small batch that uses little of the GPU: the line would beat the memory.
    beyond = [(10**6, 90.0), (10**7, 100.0), (10**8, 10**8 / ROUND.bandwidth * 1e6)]
    assert scaling.fit(beyond, ROUND, "") is None


def results(folder, speed=4.8e6, **changes):
    """Four plain decode steps: ours at 0.8 of an H200's bandwidth, fp16 peers at .9 and .6."""

    def row(size, **more):
        case = {"batch": 1, "context": size, "group_size": 4, "head_dim": 128, "query_tokens": 1}
        us = size / speed
        return {
            "format": NAME, "case": case | more, "bytes": size, "bytes_16bit": 4 * size,
            "time_us": 3 + us / 0.8,
            "peers": {"A fp16": 4 + 4 * us / 0.9, "B fp16": 4 + 4 * us / 0.6, "C": 0.1},
        }  # fmt: skip

    rows = [row(10**power) for power in (6, 7, 8, 9)]
    left_out = [row(10**8, query_tokens=4), row(10**8, kv_heads=2), row(10**8, split_tokens=256),
                row(10**8, head_dim=64)]  # fmt: skip
    for bad in left_out:
        bad["time_us"] = 10**6
    run = {"gpu": "NVIDIA H200", "date": "2026-01-02", "rows": rows + left_out} | changes
    (folder / "decode_attention.json").write_text(json.dumps(run))
    return folder


def test_rates_from_recorded_runs(tmp_path):
    rates = scaling.measured_rates(results(tmp_path))
    source = "measured on NVIDIA H200, 2026-01-02, 4 cases"
    assert (rates[NAME].share, rates[NAME].fixed_us) == (pytest.approx(0.8), pytest.approx(3))
    assert (rates[FP16].share, rates[FP16].fixed_us) == (pytest.approx(0.9), pytest.approx(4))
    assert rates[NAME].source == rates[FP16].source == source
    assert FP8 not in rates  # nobody was measured
    other = rates["kvarn_k2v2_g64"]
    assert (other.share, other.measured) == (rates[NAME].share, False)
    assert other.source == f"assumed to be {NAME}'s"


def test_peers_of_an_earlier_run_stand_in(tmp_path):
    """Only for what the run itself did not measure."""
    (tmp_path / "earlier").mkdir()
    case = {"batch": 1, "context": 1, "group_size": 4, "head_dim": 128, "query_tokens": 1}
    rows = [
        {"case": case, "bytes_16bit": size, "peers": {"a fp16": 1.0, "a fp8": 5 + size / 4.8e6}}
        for size in (10**6, 10**7, 10**8)
    ]
    path = tmp_path / "earlier" / "decode_attention_peers.json"
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "rows": rows}))
    alone = scaling.measured_rates(tmp_path)
    assert set(alone) == {FP8}  # a time that does not grow with the bytes has no rate
    assert (alone[FP8].share, alone[FP8].fixed_us) == (pytest.approx(0.5), pytest.approx(5))
    assert alone[FP8].source == "measured on NVIDIA H200, in an earlier run, 3 cases"
    both = scaling.measured_rates(results(tmp_path))
    assert both[FP8] == alone[FP8]
    assert both[FP16].share == pytest.approx(0.9)


def test_rates_of_another_device(tmp_path):
    h100 = scaling.measured_rates(results(tmp_path, gpu="NVIDIA H100 80GB HBM3", speed=2.4e6))
    assert h100[NAME].share == pytest.approx(0.8 * 2.4 / 3.35)
    with pytest.raises(ValueError, match="must be of a100, h100, h200, got those of some CPU"):
        scaling.measured_rates(results(tmp_path, gpu=None, cpu="some CPU"))


def test_nothing_recorded(tmp_path):
    assert scaling.measured_rates(tmp_path) == {}
    assert scaling.measured_rates(results(tmp_path, rows=[])) == {}


# --------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_8B))
    return str(path)


def test_command(config, tmp_path, capsys):
    command = ["capacity", "--config", config, "--gpu", "h200", "--formats", NAME]
    assert cli.main([*command, "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "A decode step on H200, batch 32, context 32,768: milliseconds" in printed
    assert "Attention at 80% of the bandwidth after 8.0 us (assumed)." in printed
    assert "Assumed: weights at 85% of the bandwidth" in printed
    results(tmp_path)
    assert cli.main([*command, "--results", str(tmp_path), "--tp", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "A decode step on 2 x H200" in printed
    assert "(measured on NVIDIA H200, 2026-01-02, 4 cases): FP16/BF16." in printed
    assert "Attention at 80% of the bandwidth after 8.0 us (assumed): FP8." in printed


def test_command_fits_a_terminal(config, capsys):
    assert cli.main(["capacity", "--config", config, "--gpu", "a100", "--tp", "4"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_json(config, capsys):
    command = ["capacity", "--config", config, "--gpu", "h100", "--batch", "8", "--json"]
    assert cli.main(command) == 0
    step = json.loads(capsys.readouterr().out)["decode_step"]
    assert (step["gpu"]["name"], step["batch"], step["tensor_parallel"]) == ("H100", 8, 1)
    assert step["assumptions"]["layer_us"] == 12
    assert [row["format"] for row in step["formats"]] == [FP16, FP8, *Format.presets()]


def test_weights_are_needed(capsys):
    shape = ["--layers", "2", "--kv-heads", "2", "--head-dim", "64"]
    assert cli.main(["capacity", *shape, "--gpu", "h200"]) == 2
    assert "--gpu needs the weights: --config, or --weights" in capsys.readouterr().err
    assert cli.main(["capacity", *shape, "--gpu", "h200", "--weights", "1GB"]) == 0
