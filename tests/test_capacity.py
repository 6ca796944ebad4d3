"""kvarn.capacity against numbers worked out by hand."""

from __future__ import annotations

import json

import pytest

from kvarn import Format, capacity
from kvarn.capacity import ModelShape

LLAMA_8B = ModelShape(layers=32, kv_heads=8, head_dim=128)
GIB = 2**30


def only(fmt: str, shape: ModelShape = LLAMA_8B, **arguments) -> capacity.Capacity:
    return capacity.compare(shape, formats=[fmt], **arguments)[-1]


def test_sixteen_and_eight_bits():
    fp16, fp8 = capacity.compare(LLAMA_8B, memory=16 * GIB, context=8192, formats=[])
    # 2 (K, V) * 32 layers * 8 heads * 128 channels * 2 bytes = 128 KiB a token; 1 GiB for 8192.
    assert (fp16.bytes_per_token, fp16.sequence_bytes) == (131072, GIB)
    assert (fp16.sequences, fp16.tokens, fp16.longest_sequence) == (16, 131072, 131072)
    assert (fp8.bytes_per_token, fp8.ratio, fp8.sequences, fp8.tokens) == (65536, 2, 32, 262144)
    assert fp16.staging_bytes == fp8.staging_bytes == 0


def test_packed_sequence():
    row = only("kvarn_k4v2_g128", memory=16 * GIB, context=8192)
    # A record: 128*128*6/8 = 12,288 B of codes, twice 2*(2*128 + 128) of scales.
    assert Format("kvarn_k4v2_g128", head_dim=128).record_bytes == 13824
    assert row.bytes_per_token == 32 * 8 * 108
    # Sinks, one recent and the open block: 3 pages of 2 * 128 tokens * 128 channels * 2 B * 256.
    assert row.staging_bytes == 3 * 16 * 2**20 == 50331648
    # 64 blocks of 13,824 * 256 B beside them.
    assert row.sequence_bytes == 64 * 3538944 + 50331648 == 276824064
    assert row.sequences == 16 * GIB // 276824064 == 62
    assert row.tokens == 62 * 8192
    assert row.ratio == pytest.approx(512 / 108)
    assert row.effective_ratio == pytest.approx(GIB / 276824064)
    # One sequence: what the 3 pages leave, in blocks of 128 tokens.
    assert row.longest_sequence == (16 * GIB - 50331648) // 3538944 * 128


@pytest.mark.parametrize(
    ("context", "pages"), [(1, 1), (128, 1), (129, 2), (256, 2), (257, 3), (384, 3), (100000, 3)]
)
def test_staging_of_short_sequences(context, pages):
    row = only("kvarn_k4v2_g128", memory=16 * GIB, context=context)
    assert row.staging_bytes == pages * 16 * 2**20
    assert row.sequence_bytes == -(-context // 128) * 3538944 + row.staging_bytes


def test_recent_blocks_and_sinks_cost_a_page_each():
    sizes = [
        only("kvarn_k4v2_g128", memory=GIB, context=4096, sink_blocks=s, recent_blocks=r)
        for s, r in ((0, 0), (1, 0), (1, 1), (1, 2))
    ]
    steps = {b.sequence_bytes - a.sequence_bytes for a, b in zip(sizes, sizes[1:], strict=False)}
    assert steps == {16 * 2**20}


@pytest.mark.parametrize("memory", [1, 4 * 2**20, 20 * 2**20, 45 * 2**20, 70 * 2**20, GIB])
def test_longest_sequence_is_the_longest(memory):
    """Also where not even the staging pages of a long sequence fit."""
    longest = only("kvarn_k4v2_g128", memory=memory, context=1).longest_sequence
    assert longest % 128 == 0
    if longest:
        fits = only("kvarn_k4v2_g128", memory=memory, context=longest)
        assert fits.sequences >= 1
    assert only("kvarn_k4v2_g128", memory=memory, context=longest + 1).sequences == 0


def test_every_preset_is_compared_by_default():
    rows = capacity.compare(LLAMA_8B, memory=GIB, context=1024)
    assert [row.format for row in rows] == ["FP16/BF16", "FP8", *Format.presets()]


def test_config(tmp_path):
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}
    path = tmp_path / "config.json"

    def shape(**changes):
        path.write_text(json.dumps(config | changes))
        assert ModelShape.from_config(path) == ModelShape.from_config(tmp_path)
        return ModelShape.from_config(path)

    assert shape() == ModelShape(4, 8, 64)
    assert shape(num_key_value_heads=2, head_dim=128) == ModelShape(4, 2, 128)
    assert shape(num_key_value_heads=None, head_dim=None) == ModelShape(4, 8, 64)
    kinds = ["linear_attention", "full_attention", "sliding_attention", "linear_attention"]
    assert shape(layer_types=kinds) == ModelShape(2, 8, 64)
    nested = {"text_config": {**config, "num_hidden_layers": 6}, "vision_config": {}}
    path.write_text(json.dumps(nested))
    assert ModelShape.from_config(path) == ModelShape(6, 8, 64)


def test_config_that_has_no_cache_of_keys(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"kv_lora_rank": 512}')
    with pytest.raises(ValueError, match="multi-head latent attention") as raised:
        ModelShape.from_config(path)
    assert str(path) in str(raised.value)
    path.write_text('{"num_hidden_layers": 2}')
    with pytest.raises(ValueError, match="positive integer num_attention_heads, .* without it"):
        ModelShape.from_config(path)
    path.write_text("layers: 2")
    with pytest.raises(ValueError, match="must be JSON"):
        ModelShape.from_config(path)
    with pytest.raises(OSError, match=r"nowhere"):
        ModelShape.from_config(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16GiB", 2**34),
        ("16 gib", 2**34),
        ("80GB", 80 * 10**9),
        ("80g", 80 * 10**9),
        ("1.5GiB", 3 * 2**29),
        (".5 GiB", 2**29),
        ("512Mi", 2**29),
        ("1000", 1000),
        ("7 B", 7),
    ],
)
def test_parse_bytes(text, count):
    assert capacity.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "16 gigs", "1e9", "1,5GB", "3i", "3iB"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ValueError) as raised:
        capacity.parse_bytes(text)
    message = f"kvarn::capacity: memory must be like 16GiB or 80GB, got {text!r}"
    assert str(raised.value) == message


def test_errors():
    for name, bad in (("layers", 0), ("kv_heads", -1), ("head_dim", 64.0)):
        with pytest.raises(ValueError) as raised:
            ModelShape(**({"layers": 2, "kv_heads": 2, "head_dim": 64} | {name: bad}))
        assert str(raised.value) == f"kvarn::capacity: {name} must be a positive int, got {bad!r}"
    for name, least in (("memory", 1), ("context", 1), ("sink_blocks", 0), ("recent_blocks", 0)):
        arguments = {"memory": GIB, "context": 1024} | {name: least - 1}
        with pytest.raises(ValueError) as raised:
            capacity.compare(LLAMA_8B, **arguments)
        rule = f"kvarn::capacity: {name} must be at least {least}, got {least - 1}"
        assert str(raised.value) == rule
    with pytest.raises(ValueError, match="head_dim must be 64, 128, 256 or 512, got 96"):
        capacity.compare(ModelShape(2, 2, 96), memory=GIB, context=1024)
