"""What the engine knows of the plugin: dtypes, backend, spec, sizes and refusals."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import engine
import numpy as np
import pytest
import torch
import versions
import vllm
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, set_default_torch_dtype
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.selector import _cached_get_attn_backend, get_attn_backend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.gpu import attn_utils

from kvarn import Format
from kvarn.integrations import vllm as plugin
from kvarn.integrations.vllm import _versions, backend, pool
from kvarn.integrations.vllm.metadata import KVarNMetadataBuilder
from kvarn.integrations.vllm.options import Options
from kvarn.integrations.vllm.rows import RequestRows

PRESETS = Format.presets()
K4V2 = "kvarn_k4v2_g64"


# The dtypes ---------------------------------------------------------------------------------------


def test_entry_point():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    group = re.search(r'^\[project.entry-points."vllm.general_plugins"\]\n(.*)$', text, re.M)
    assert group and group[1] == 'kvarn = "kvarn.integrations.vllm:register"'
    assert callable(plugin.register)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_cache_dtype(model, name):
    config = engine.engine_config(model, name)
    assert config.cache_config.cache_dtype == name
    assert STR_DTYPE_TO_TORCH_DTYPE[name] == torch.uint8
    engine.Engine(config, num_blocks=20)
    assert config.cache_config.block_size == Format(name, 64).group


def test_other_names_are_refused(model):
    with pytest.raises(ValueError, match="kvarn_k5v5_g128"):
        engine.engine_config(model, "kvarn_k5v5_g128")


def test_registering_again_changes_nothing():
    before = versions.cache_dtypes()
    plugin.register()
    assert versions.cache_dtypes() == before
    assert [before.count(name) for name in PRESETS] == [1] * len(PRESETS)
    assert "fp8" in before and "auto" in before


@pytest.mark.parametrize("name", PRESETS)
def test_command_line(name):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", "m", "--kv-cache-dtype", name])
    assert args.kv_cache_dtype == name


@pytest.mark.skipif(versions.MINOR != "0.24", reason="later versions refuse after parsing")
def test_command_line_refuses_other_names(capsys):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--model", "m", "--kv-cache-dtype", "kvarn_k5v5_g128"])
    assert PRESETS[0] in capsys.readouterr().err


@pytest.fixture
def changes(monkeypatch):
    """What is done to vLLM is only counted, in a process that has not registered yet."""
    calls = []
    monkeypatch.setattr(_versions, "_registered", False)
    for name in _versions._SET_UP:
        monkeypatch.setitem(_versions._SET_UP, name, (lambda name=name: calls.append(name),))
    return calls


@pytest.mark.parametrize("version", ["0.23.1", "0.25.0", "0.32.0", "0.34.0", "0.240.0", "1.24.0"])
def test_other_versions_are_left_alone(changes, monkeypatch, caplog, version):
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    plugin.register()
    assert not changes
    assert f"kvarn supports vLLM 0.24 and 0.33, this is {version}" in caplog.text


@pytest.mark.parametrize("version", ["0.24.0", "0.24.3", "0.33.0", "0.33.1.dev7"])
def test_each_version_has_its_own_changes(changes, monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    plugin.register()
    assert changes == [version[:4]]


def test_other_platforms_are_left_alone(changes, monkeypatch):
    monkeypatch.setattr(current_platform, "is_cuda", lambda: False)
    plugin.register()
    assert not changes


def test_this_version_is_changed_once(changes):
    plugin.register()
    plugin.register()
    assert changes == [versions.MINOR]


def test_the_package_asks_for_what_is_supported():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    low, high = re.search(r'"vllm >= 0\.(\d+), < 0\.(\d+)"', text).groups()
    supported = [int(name.split(".")[1]) for name in _versions._SET_UP]
    assert (int(low), int(high)) == (min(supported), max(supported) + 1)


# The backend --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_the_dtype_alone_selects_the_backend(model, name):
    with set_current_vllm_config(engine.engine_config(model, name)):
        found = get_attn_backend(64, torch.float16, name, num_heads=4)
    assert found is backend.BACKENDS[name]
    assert found.get_supported_kernel_block_sizes() == [Format(name, 64).group]
    assert found.get_name() == ("CUSTOM" if versions.MINOR == "0.24" else name.upper())
    assert found.get_impl_cls() is backend.KVarNImpl
    assert found.get_builder_cls() is KVarNMetadataBuilder


@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_other_dtypes_have_their_backends(model, name):
    with set_current_vllm_config(engine.engine_config(model, name)):
        found = get_attn_backend(64, torch.float16, name, num_heads=4)
    assert not issubclass(found, backend.KVarNBackend)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", [K4V2, "kvarn_k4v4_g128"])
def test_spec_and_shapes(model_of, name, head_dim):
    config = engine.engine_config(model_of(head_dim), name)
    small = engine.Engine(config, num_blocks=20)
    fmt = Format(name, head_dim)
    (spec,) = small.specs.values()
    assert isinstance(spec, FullAttentionSpec)
    assert spec.block_size == fmt.group and spec.dtype == torch.uint8
    assert spec.page_size_bytes == 2 * fmt.record_bytes  # two KV heads
    assert spec.copy_with_new_block_size(4 * fmt.group).page_size_bytes == 8 * fmt.record_bytes
    assert type(spec).merge([spec, dataclasses.replace(spec)]) == spec
    cache = small.layer.kv_cache
    assert cache.is_contiguous() and cache.flatten(1).shape == (20, 2 * fmt.record_bytes)
    assert small.layer.kv_cache.dtype == torch.uint8
    staging = small.layer.impl.staging
    assert staging.shape == (4 * 2, 2, 2, fmt.group, head_dim)  # four sequences, two pages each
    assert staging.dtype == torch.float16


def test_a_layer_stores_its_tokens_within_attention(model, monkeypatch):
    """Only attention is always outside of piecewise CUDA graphs. What else a layer does may be
    captured with the metadata of another step."""
    from vllm.model_executor.layers.attention import attention

    def captured(*args):
        raise AssertionError("a second op")

    monkeypatch.setattr(attention, "unified_kv_cache_update", captured)
    config = engine.engine_config(model, compilation_config={"use_inductor_graph_partition": True})
    assert "vllm::unified_attention_with_output" in config.compilation_config.splitting_ops
    assert "vllm::unified_kv_cache_update" not in config.compilation_config.splitting_ops
    small = engine.Engine(config, num_blocks=20)
    small.add("a", [1] * 70, 2)
    small.run()
    assert small.seen["worst"] > 0


@pytest.mark.parametrize("name", [K4V2, "kvarn_k4v2_g128"])
def test_layers_with_and_without_a_window_share_blocks(model_of, name):
    """One group, one block table; each layer has records of its own, side by side."""
    config = engine.engine_config(model_of(128), name)
    first = engine.Engine(config, num_blocks=20)  # layer 0
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float16):
        second = Attention(
            4, 128, 0.1, num_kv_heads=2, cache_config=config.cache_config,
            per_layer_sliding_window=100, prefix="model.layers.1.self_attn.attn",
        )  # fmt: skip
    specs = attn_utils.get_kv_cache_spec(config)
    assert len(specs) == 2 and len(set(specs.values())) == 1
    cache = versions.plan_cache(config, specs, second.attn_backend)
    assert len(cache.kv_cache_groups) == 1 and cache.num_blocks == 20
    groups, _, kernel_sizes = attn_utils.init_attn_backend(cache, config, engine.CPU)
    versions.allocate_cache(config, cache, groups, kernel_sizes)
    assert [len(group) for group in groups] == [1]
    size = 20 * 2 * Format(name, 128).record_bytes
    ranges = []
    for layer in (first.layer, second):
        assert layer.kv_cache.is_contiguous() and layer.kv_cache.nbytes == size
        assert layer.kv_cache.data_ptr() % 16 == 0
        ranges.append((layer.kv_cache.data_ptr(), layer.kv_cache.data_ptr() + size))
    (_, end), (begin, _) = sorted(ranges)
    assert end <= begin
    assert second.impl.window_left == 99 and first.layer.impl.window_left == -1
    assert second.impl.staging.data_ptr() != first.layer.impl.staging.data_ptr()


def test_blocks_of_other_sizes_are_refused():
    with pytest.raises(ValueError, match="a block must have 64 tokens, got 128"):
        backend.BACKENDS[K4V2].get_kv_cache_shape(10, 128, 2, 64, K4V2)


# The pool -----------------------------------------------------------------------------------------


def test_options(model):
    def of(options):
        return Options.of(engine.engine_config(model, additional_config={"kvarn": options}))

    assert of({}) == Options(1, 0) and of({}).pages == 2
    assert of({"recent_blocks": 2, "sink_blocks": 0}) == Options(0, 2)
    assert Options.of(engine.engine_config(model)) == Options()
    with pytest.raises(ValueError, match="sink_blocks and recent_blocks, got"):
        of({"window": 1})
    with pytest.raises(ValueError, match="recent_blocks"):
        of({"recent_blocks": -1})
    with pytest.raises(ValueError, match="sink_blocks"):
        of({"sink_blocks": True})


def test_pages_are_sinks_and_a_ring():
    options = Options(sink_blocks=2, recent_blocks=1)
    tiles = torch.arange(8).numpy()
    pages = pool.page_of_tile(tiles, options)
    assert pages[:2].tolist() == [0, 1] and set(pages[2:].tolist()) == {2, 3}
    # The tile that is filled and the newest full one never share a page.
    assert all(a != b for a, b in zip(pages[2:-1], pages[3:], strict=True))


def test_pool_too_large_is_refused_with_the_numbers(model, monkeypatch):
    monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda *_: 2**19)
    with pytest.raises(ValueError, match=r"max_num_seqs=4 needs .* set max_num_seqs to \d+ or"):
        engine.Engine(engine.engine_config(model, gpu_memory_utilization=0.5), num_blocks=20)


def test_the_number_that_is_named_fits():
    with pytest.raises(ValueError) as error:
        pool.check_size(256, 10 * 2**20, 2**30)
    assert str(error.value) == (
        "kvarn.integrations.vllm: max_num_seqs=256 needs staging pools of 2.5 GiB (10.0 MiB a"
        " sequence), at most 0.5 GiB are allowed: set max_num_seqs to 51 or less"
    )
    pool.check_size(51, 10 * 2**20, 2**30)
    with pytest.raises(ValueError, match="max_num_seqs=52"):
        pool.check_size(52, 10 * 2**20, 2**30)


def test_size_of_the_pool_is_logged(model, monkeypatch):
    lines = []
    monkeypatch.setattr(_versions, "_log_once", lines.append)
    engine.Engine(engine.engine_config(model), num_blocks=20)
    assert lines == [
        "kvarn staging pools: 0.00 GiB, for max_num_seqs=4 sequences of 2 blocks in 16 bits each"
    ]


def test_virtual_blocks_follow_the_real_ones():
    slots = pool.block_slot(3, 4, torch.device("cpu"))
    assert slots.tolist() == [-1, -1, -1, 0, 1, 2, 3] and slots.dtype == torch.int32


# What is refused ----------------------------------------------------------------------------------


def with_changes(config, **changes):
    """A stand-in of an engine's configuration: what `unsupported` reads of it, with changes."""
    given = {
        "speculative_config": None,
        "kv_transfer_config": None,
        "use_v2_model_runner": True,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "kv_offloading_size": None,
        "kv_cache_dtype_skip_layers": [],
        "prefix_match_unit": None,
        "use_ubatching": False,
        "is_hybrid": False,
    } | changes
    everything = SimpleNamespace(**given)
    everything.parallel_config = everything.cache_config = everything
    everything.model_config = everything
    return everything


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"prefill_context_parallel_size": 2}, "context parallelism"),
        ({"kv_transfer_config": object()}, "KV connectors"),
        ({"kv_offloading_size": 1.0}, "offloading"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "kv_cache_dtype_skip_layers"),
        ({"prefix_match_unit": 16}, "prefix_match_unit"),
        ({"use_ubatching": True}, "micro-batches"),
        ({"is_hybrid": True}, "state-space"),
        ({"use_v2_model_runner": False}, "VLLM_USE_V2_MODEL_RUNNER=1"),
    ],
)
def test_configurations_that_are_refused(changes, words):
    (reason,) = backend.unsupported(with_changes(None, **changes))
    assert words in reason
    assert backend.unsupported(with_changes(None)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_size": 80}, "head_size"),
        ({"dtype": torch.float32}, "dtype"),
        ({"use_mla": True}, "MLA"),
        ({"has_sink": True}, "sinks"),
        ({"use_sparse": True}, "sparse"),
        ({"use_kv_connector": True}, "KV connector"),
        ({"use_non_causal": True}, "non-causal"),
        ({"block_size": 32}, "block_size"),
        ({"block_size": 128}, "block_size"),
        ({"kv_cache_dtype": "kvarn_k4v2_g128"}, "kv_cache_dtype"),  # of the other backend
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type"),
    ],
)
def test_layers_that_are_refused(changes, words):
    given = {
        "head_size": 64,
        "dtype": torch.float16,
        "kv_cache_dtype": K4V2,
        "block_size": None,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": current_platform.get_device_capability(),
        "attn_type": AttentionType.DECODER,
    }
    assert backend.BACKENDS[K4V2].validate_configuration(**given) == []
    reasons = backend.BACKENDS[K4V2].validate_configuration(**given | changes)
    assert any(words in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kv_cache_dtype_skip_layers": ["0"]}, "pages of two sizes"),
        ({"block_size": 128}, "block_size"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "KV connectors",
        ),
        ({"kv_offloading_size": 1.0}, "KV connectors and offloading"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative decoding",
        ),
    ],
    ids=str,
)
def test_a_refusal_reaches_the_user(model, arguments, words):
    config = engine.engine_config(model, **arguments)
    _cached_get_attn_backend.cache_clear()  # the engine asks once in a process
    with set_current_vllm_config(config), pytest.raises(ValueError, match=words):
        get_attn_backend(64, torch.float16, K4V2, num_heads=4)


def test_the_old_model_runner_is_refused(model, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    config = engine.engine_config(model)
    _cached_get_attn_backend.cache_clear()
    with set_current_vllm_config(config), pytest.raises(ValueError, match="V1 model runner"):
        get_attn_backend(64, torch.float16, K4V2, num_heads=4)


def test_layers_with_specs_of_their_own_are_refused(model):
    """Attention in chunks, with a mask that is not causal, and the like."""
    config = engine.engine_config(model)
    small = engine.Engine(config, num_blocks=20)
    (spec,) = small.specs.values()
    assert _versions.is_of_records(spec)

    def build(other):
        with set_current_vllm_config(config):
            KVarNMetadataBuilder(other, [small.layer.layer_name], config, engine.CPU)

    build(spec)
    common = {"block_size": 64, "num_kv_heads": 2, "head_size": 64, "dtype": torch.uint8}
    for other in (
        dataclasses.replace(spec, non_causal=True),
        dataclasses.replace(spec, head_size_v=32),
        ChunkedLocalAttentionSpec(**common, attention_chunk_size=64),
        SlidingWindowSpec(**common, sliding_window=64),
        FullAttentionSpec(**common),
    ):
        with pytest.raises(NotImplementedError, match=f"layers with a {type(other).__name__}"):
            build(other)


@pytest.mark.skipif(versions.MINOR == "0.24", reason="has no such hook")
def test_specs_of_other_kinds_are_left_as_they_are():
    common = {"block_size": 64, "num_kv_heads": 2, "head_size": 64, "dtype": torch.uint8}
    chunks = ChunkedLocalAttentionSpec(**common, attention_chunk_size=64)
    backend_of = backend.BACKENDS[K4V2]
    assert backend_of.customize_spec(chunks) is chunks
    full = backend_of.customize_spec(FullAttentionSpec(**common))
    window = backend_of.customize_spec(SlidingWindowSpec(**common, sliding_window=64))
    assert full == window and _versions.is_of_records(full)
    assert backend_of.customize_spec(full) == full  # it is asked more than once


@pytest.mark.parametrize(
    "options",
    [
        {"alibi_slopes": [1.0]},
        {"kv_sharing_target_layer_name": "other"},
        {"sinks": torch.zeros(4)},
        {"attn_type": AttentionType.ENCODER},
    ],
)
def test_layers_that_cannot_be_made(model, options):
    with (
        set_current_vllm_config(engine.engine_config(model)),
        pytest.raises(NotImplementedError, match=r"^kvarn\.integrations\.vllm: "),
    ):
        backend.KVarNImpl(4, 64, 0.125, 2, kv_cache_dtype=K4V2, **options)


def test_a_request_within_a_block_is_refused():
    rows = RequestRows(4, 64)
    rows.add(1, 128)
    assert rows.first_token.tolist() == [-1, 128, -1, -1]
    with pytest.raises(RuntimeError, match="a multiple of 64 tokens, got 130"):
        rows.add(1, 130)


def step_of(small, **changes):
    """What the metadata builder reads of a step of one request in row 2."""
    given = {
        "causal": True,
        "num_reqs": 1,
        "num_actual_tokens": 1,
        "max_query_len": 1,
        "block_table_tensor": small.table,
        "query_start_loc_cpu": torch.tensor([0, 1]),
        "seq_lens_cpu_upper_bound": torch.tensor([1]),
        "seq_lens": torch.tensor([1]),
        "req_idx": np.array([2]),
        "is_prefilling": torch.tensor([True]),
    }
    return SimpleNamespace(**given | changes)


def test_a_step_of_unknown_requests_is_refused(model, monkeypatch):
    small = engine.Engine(engine.engine_config(model), num_blocks=20)
    builder = small.groups[0][0].get_metadata_builder()
    with pytest.raises(RuntimeError, match="which requests are in the step"):
        builder.build(0, step_of(small, req_idx=None))
    with pytest.raises(ValueError, match="must be causal"):
        builder.build(0, step_of(small, causal=False))
    with pytest.raises(RuntimeError, match="did not say where a request starts"):
        builder.build(0, step_of(small))
    small.layer.impl.rows.add(2, 0)
    assert builder.build(0, step_of(small)).batch.rows.tolist() == [2]


def test_the_rows_of_a_step_are_forgotten_after_it(model):
    small = engine.Engine(engine.engine_config(model), num_blocks=20)
    small.add("a", [1] * 10, 2)
    small.run()
    assert _versions.rows_of_step(SimpleNamespace(req_idx=None)) is None
