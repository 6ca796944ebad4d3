"""`kvarn.integrations.transformers` on tiny random models of several families."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from kvarn import Format  # noqa: E402
from kvarn.cache import CacheFull  # noqa: E402
from kvarn.integrations.transformers import DecodeGraph, KVarNCache  # noqa: E402
from kvarn.ops import dequantize_tiles  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")

ALL_16_BIT = 10**6  # sink_blocks: nothing is ever quantized
VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attention_dropout": 0.0,
    # Random weights of the usual size give logits that hardly depend on the context.
    "initializer_range": 0.2,
}
FAMILIES = {
    "llama": ("Llama", {"head_dim": 64}),
    "llama_mha": ("Llama", {"head_dim": 64, "num_key_value_heads": 6}),
    "qwen2": ("Qwen2", {"hidden_size": 384, "initializer_range": 0.1}),
    "qwen3": ("Qwen3", {"head_dim": 128}),
    "mistral": ("Mistral", {"head_dim": 128, "sliding_window": 150}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 256,
            "query_pre_attn_scalar": 100,
            "sliding_window": 90,
            "attn_logit_softcapping": 3.0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 256,
            "query_pre_attn_scalar": 100,
            "sliding_window": 70,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 64,
            "sliding_window": 80,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 2,  # all: a router that switches is not continuous
        },
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The tensors are tiny: on a busy machine threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **options):
    name, own = FAMILIES[family]
    config_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**{**COMMON, **own, **options})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.set_attn_implementation("kvarn")
    return model


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def left_padded(ids: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The last ``lengths[b]`` tokens of each row, and their mask."""
    columns = torch.arange(ids.shape[1])
    mask = (columns >= ids.shape[1] - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def run(model, ids: Tensor, cache, chunks: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of all tokens, in forward passes of ``chunks`` tokens."""
    logits, start = [], 0
    for n in chunks:
        stop = start + n
        position_ids = None
        if mask is not None:
            position_ids = (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:stop]
        out = model(
            ids[:, start:stop],
            attention_mask=None if mask is None else mask[:, :stop],
            position_ids=position_ids,
            past_key_values=cache,
        )
        logits.append(out.logits)
        start = stop
    assert start == ids.shape[1]
    return torch.cat(logits, 1)


def reference(model, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The model's own eager attention."""
    model.set_attn_implementation("eager")
    logits = run(model, ids, DynamicCache(config=model.config), [ids.shape[1]], mask)
    model.set_attn_implementation("kvarn")
    return logits


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# The model's own attention, when all blocks are 16-bit ------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_all_blocks_16_bit_equals_the_models_own_attention(family):
    model = make_model(family)
    ids, mask = left_padded(tokens(3, 300), [300, 171, 64])
    cache = KVarNCache(model.config, "kvarn_k4v2_g64", sink_blocks=ALL_16_BIT)
    logits = run(model, ids, cache, [130, 1, 1, 100, 68], mask)
    expected = reference(model, ids, mask)
    assert expected[mask.bool()].std() > 0.1
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits_are_close_and_fewer_are_less_so(family):
    """Random weights multiply errors: what counts is how they fall with the bits."""
    model = make_model(family)
    ids = tokens(1, 400)
    expected = reference(model, ids)[:, 256:]
    errors = []
    for fmt in ("kvarn_k8v8_g64", "kvarn_k4v4_g64", "kvarn_k2v2_g64"):
        cache = KVarNCache(model.config, fmt, sink_blocks=0, recent_blocks=0)
        logits = run(model, ids, cache, [200, 1, 199])[:, 256:]
        errors.append(relative_error(logits, expected))
    assert 1e-3 < errors[0] < 0.1
    assert 5 * errors[0] < errors[1] < errors[2] / 1.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_models(dtype):
    model = make_model("llama", dtype=dtype)
    ids = tokens(2, 200)
    cache = KVarNCache(model.config, "kvarn_k8v8_g64")
    logits = run(model, ids, cache, [150, *[1] * 50])
    assert cache.paged.dtype == dtype
    assert relative_error(logits.float(), reference(model, ids).float()) < 0.05


# Semantics of the quantized cache --------------------------------------------------------------


@pytest.mark.parametrize("recent_blocks", [0, 1])
@pytest.mark.parametrize("chunk", [1, 64, 127, 128, 129, 512])
def test_fault17_chunked_prefill_equals_one_go(chunk, recent_blocks):
    model = make_model("qwen3")
    ids = tokens(1, 520)
    options = {"sink_blocks": 1, "recent_blocks": recent_blocks}
    chunks = [chunk] * (520 // chunk) + [520 % chunk] * (520 % chunk > 0)
    whole, parts = (KVarNCache(model.config, "kvarn_k4v2_g128", **options) for _ in range(2))
    expected = run(model, ids, whole, [520])
    logits = run(model, ids, parts, chunks)
    # A code next to a rounding tie may fall to the other side.
    assert relative_error(logits, expected) < 2e-3


def test_batch_of_unequal_lengths_equals_single_runs():
    model = make_model("gemma2")
    lengths = [330, 64, 129, 1]
    ids, mask = left_padded(tokens(4, 330), lengths)
    cache = KVarNCache(model.config, "kvarn_k4v4_g64", recent_blocks=0)
    logits = run(model, ids, cache, [329, 1], mask)
    for row, length in enumerate(lengths):
        alone = KVarNCache(model.config, "kvarn_k4v4_g64", recent_blocks=0)
        expected = run(model, ids[row : row + 1, 330 - length :], alone, [length])
        assert relative_error(logits[row : row + 1, 330 - length :], expected) < 2e-3
    cache.crop(0)  # the last forward pass counts once it cannot be cropped any more
    assert [cache.paged.length(seq) for seq in cache._seqs] == lengths


def test_a_chunk_may_be_all_padding_for_a_row():
    model = make_model("llama")
    ids, mask = left_padded(tokens(2, 200), [200, 40])
    cache = KVarNCache(model.config, "kvarn_k8v8_g64", sink_blocks=ALL_16_BIT)
    logits = run(model, ids, cache, [100, 50, 50], mask)
    expected = reference(model, ids, mask)
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=2e-4)


def test_right_padding_of_a_scoring_batch():
    model = make_model("llama")
    ids = tokens(2, 150)
    mask = torch.ones(2, 150, dtype=torch.long)
    mask[1, 90:] = 0
    cache = KVarNCache(model.config, "kvarn_k8v8_g64", sink_blocks=ALL_16_BIT)
    logits = run(model, ids, cache, [150], mask)
    torch.testing.assert_close(logits[:, :90], reference(model, ids)[:, :90], rtol=1e-4, atol=2e-4)


def test_what_is_sealed_and_what_stays_16_bit():
    model = make_model("llama")
    cache = KVarNCache(model.config, "kvarn_k4v2_g64", sink_blocks=1, recent_blocks=1)
    run(model, tokens(1, 64 * 5 + 3), cache, [64 * 5 + 3])
    cache.crop(0)
    blocks = cache.paged.blocks(cache._seqs[0])
    staged = [int(cache.paged.block_slot[block]) >= 0 for block in blocks]
    assert staged == [True, False, False, False, True, True]


# generate --------------------------------------------------------------------------------------


def generate(model, ids: Tensor, cache, new: int = 20, **options) -> Tensor:
    options.setdefault("do_sample", False)
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(
        ids, past_key_values=cache, max_new_tokens=new, pad_token_id=0, **options
    )[:, ids.shape[1] :]


def eager_generate(model, ids: Tensor, **options) -> Tensor:
    model.set_attn_implementation("eager")
    out = generate(model, ids, DynamicCache(config=model.config), **options)
    model.set_attn_implementation("kvarn")
    return out


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_generate_greedy(family):
    model = make_model(family)
    ids, mask = left_padded(tokens(2, 120), [120, 70])
    cache = KVarNCache(model.config, "kvarn_k4v2_g64", sink_blocks=ALL_16_BIT)
    out = generate(model, ids, cache, attention_mask=mask)
    assert torch.equal(out, eager_generate(model, ids, attention_mask=mask))


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 50}, {"do_sample": True, "top_k": 5}])
def test_generate_options(options):
    model = make_model("llama")
    ids = tokens(2, 120)
    torch.manual_seed(0)
    cache = KVarNCache(model.config, "kvarn_k4v2_g64", sink_blocks=ALL_16_BIT)
    out = generate(model, ids, cache, **options)
    torch.manual_seed(0)
    assert torch.equal(out, eager_generate(model, ids, **options))


def test_several_turns_equal_one():
    model = make_model("llama")
    ids = tokens(2, 400)
    cache = KVarNCache(model.config, "kvarn_k4v2_g64", recent_blocks=0)
    first = generate(model, ids[:, :150], cache, new=10)
    so_far = torch.cat([ids[:, :150], first, ids[:, 150:260]], 1)
    second = generate(model, so_far, cache, new=10)
    fresh = KVarNCache(model.config, "kvarn_k4v2_g64", recent_blocks=0)
    assert torch.equal(second, generate(model, so_far, fresh, new=10))


def test_a_copied_cache_goes_on_by_itself():
    model = make_model("llama")
    ids = tokens(1, 200)
    prompt = KVarNCache(model.config, "kvarn_k4v2_g64")
    run(model, ids[:, :150], prompt, [150])
    a, b = copy.deepcopy(prompt), copy.deepcopy(prompt)
    out_a = generate(model, ids, a)
    generate(model, torch.cat([ids[:, :150], tokens(1, 50, seed=9)], 1), b)
    assert torch.equal(out_a, generate(model, ids, prompt))


def test_beams_equal_the_models_own_attention_and_leak_nothing():
    model = make_model("llama")
    ids, mask = left_padded(tokens(2, 100), [100, 61])
    options = {"num_beams": 3, "attention_mask": mask, "new": 40}
    cache = KVarNCache(model.config, "kvarn_k4v2_g64", sink_blocks=ALL_16_BIT)
    out = generate(model, ids, cache, **options)
    assert torch.equal(out, eager_generate(model, ids, **options))
    cache.reset()
    assert cache.paged.num_free_blocks == cache.paged.num_blocks
    assert cache.paged.num_free_slots == cache.paged.num_slots


def test_fault16_reordered_rows_equal_rows_run_alone():
    """Beam search by hand, over several tile borders, with sealed blocks."""
    model = make_model("qwen3")
    options = {"sink_blocks": 0, "recent_blocks": 0}
    cache = KVarNCache(model.config, "kvarn_k4v4_g64", **options)
    generator = torch.Generator().manual_seed(0)
    rows = tokens(1, 120).repeat(3, 1)
    run(model, rows, cache, [120])
    for _ in range(80):
        beam_idx = torch.randint(0, 3, (3,), generator=generator)
        cache.reorder_cache(beam_idx)
        new = torch.randint(3, VOCAB, (3, 1), generator=generator)
        logits = model(new, past_key_values=cache).logits
        rows = torch.cat([rows[beam_idx], new], 1)
    for row, expected in zip(rows, logits, strict=True):
        fresh = KVarNCache(model.config, "kvarn_k4v4_g64", **options)
        alone = run(model, row[None], fresh, [rows.shape[1]])[:, -1:]
        assert relative_error(expected[None], alone) < 2e-3


def test_batch_repeat_and_select():
    model = make_model("llama")
    ids, mask = left_padded(tokens(2, 100), [100, 61])
    cache = KVarNCache(model.config, "kvarn_k8v8_g64", sink_blocks=ALL_16_BIT)
    run(model, ids, cache, [100], mask)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([True, False, True, True]))
    new = tokens(3, 5, seed=2)
    ids, mask = torch.cat([ids[[0, 1, 1]], new], 1), torch.cat([mask[[0, 1, 1]], new > 0], 1)
    positions = (mask.cumsum(1) - 1)[:, 100:]
    out = model(new, attention_mask=mask, position_ids=positions, past_key_values=cache)
    expected = reference(model, ids, mask.long())[:, 100:]
    torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("recent_blocks", [1, 2])
@pytest.mark.parametrize("draft", ["prompt_lookup", "assistant", "itself"])
def test_fault15_assisted_decoding_equals_decoding_without_drafts(draft, recent_blocks):
    """Over several tile borders: not a record is different afterwards."""
    model = make_model("llama")
    ids = tokens(1, 20).repeat(1, 6)
    options = {
        "prompt_lookup": {"prompt_lookup_num_tokens": 7},
        "assistant": {"assistant_model": make_model("llama", seed=5)},
        "itself": {"assistant_model": make_model("llama")},
    }[draft]
    if draft != "prompt_lookup":
        options["assistant_model"].set_attn_implementation("eager")
        options["assistant_model"].generation_config.num_assistant_tokens = 7
        options["assistant_model"].generation_config.num_assistant_tokens_schedule = "constant"
    caches = [
        KVarNCache(model.config, "kvarn_k4v2_g64", sink_blocks=0, recent_blocks=recent_blocks)
        for _ in range(2)
    ]
    plain = generate(model, ids, caches[0], new=150)
    assert torch.equal(generate(model, ids, caches[1], new=150, **options), plain)
    length = min(cache.get_seq_length() for cache in caches)
    states = []
    for cache in caches:
        cache.crop(length - cache.get_seq_length())
        state = cache.paged.export_sequence(cache._seqs[0])
        assert state.length == length
        states.append(state)
    assert states[0].staged == states[1].staged
    # A code next to a rounding tie may fall to the other side, and so on in the next layer.
    for a, b in zip(
        *(dequantize_tiles(s.records.flatten(0, 1), cache.fmt) for s in states), strict=True
    ):
        assert relative_error(a.float(), b.float()) < 0.02


def test_crop_across_forward_passes():
    model = make_model("llama")
    ids, mask = left_padded(tokens(2, 200), [200, 50])
    cache = KVarNCache(model.config, "kvarn_k8v8_g64", sink_blocks=ALL_16_BIT)
    run(model, ids, cache, [140, 30, 30], mask)
    cache.crop(-70)  # 60 columns in later passes and 10 of the first; row 1 keeps nothing
    assert cache.get_seq_length() == 130
    assert [cache.paged.length(seq) for seq in cache._seqs] == [130, 0]
    new = tokens(2, 20, seed=2)
    ids, mask = torch.cat([ids[:, :130], new], 1), torch.cat([mask[:, :130], new > 0], 1)
    positions = (mask.cumsum(1) - 1)[:, 130:]
    out = model(new, attention_mask=mask, position_ids=positions, past_key_values=cache)
    expected = reference(model, ids, mask.long())[:, 130:]
    torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=2e-4)


def test_a_decode_graph_equals_forward_passes():
    """Padding, borders of blocks, and other uses of the cache in between."""
    model = make_model("gemma2")
    ids, mask = left_padded(tokens(2, 180), [100, 61])
    ids, mask = ids[:, 80:], mask[:, 80:]
    new = tokens(2, 90, seed=2)
    options = {"max_tokens": 256, "sink_blocks": 0, "recent_blocks": 0}
    caches = [KVarNCache(model.config, "kvarn_k4v4_g64", **options) for _ in range(2)]
    for cache in caches:
        run(model, ids, cache, [100], mask)
    decode = DecodeGraph(model, caches[1])
    full = torch.cat([mask, torch.ones_like(new)], 1)
    for i in range(90):
        if i == 70:
            for cache in caches:
                cache.reorder_cache(torch.tensor([1, 0]))
            full = full[[1, 0]]
        column = new[:, i : i + 1]
        seen = full[:, : 101 + i]
        position_ids = seen.sum(1, keepdim=True) - 1
        expected = model(
            column, attention_mask=seen, position_ids=position_ids, past_key_values=caches[0]
        ).logits
        torch.testing.assert_close(decode(column), expected, rtol=1e-3, atol=1e-3)
    for cache in caches:
        cache.crop(-95)
        assert cache.get_seq_length() == 95


def test_a_cache_made_in_inference_mode_goes_on_outside_of_it():
    """As with `generate`, which has no_grad, after a prompt that ran under inference_mode."""
    model = make_model("llama")
    ids = tokens(1, 140)
    logits = []
    for mode in (torch.no_grad, torch.inference_mode):
        cache = KVarNCache(model.config, "kvarn_k4v4_g64", max_tokens=256)
        with mode():
            run(model, ids[:, :100], cache, [100])
            decode = DecodeGraph(model, cache)
            steps = [decode(ids[:, 100:101])]
        with torch.no_grad():
            steps += [decode(ids[:, i : i + 1]) for i in range(101, 135)]
            steps.append(model(ids[:, 135:], past_key_values=cache).logits)
        logits.append(torch.cat(steps, 1))
    assert torch.equal(*logits)


# Memory ----------------------------------------------------------------------------------------


def test_pools_grow_unless_max_tokens_is_given():
    model = make_model("llama")
    ids = tokens(1, 700)
    growing = KVarNCache(model.config, "kvarn_k4v2_g64", sink_blocks=ALL_16_BIT)
    growing._staged_blocks = 1
    logits = run(model, ids, growing, [300, 400])
    torch.testing.assert_close(logits, reference(model, ids), rtol=1e-4, atol=2e-4)
    bounded = KVarNCache(model.config, "kvarn_k4v2_g64", max_tokens=640)
    run(model, ids[:, :640], bounded, [640])
    assert bounded.paged.num_free_blocks == 0
    with pytest.raises(CacheFull, match="free blocks must be at least 1, got 0"):
        run(model, ids[:, :1], bounded, [1])
    assert bounded.get_seq_length() == 640
    assert bounded.get_max_length() == 640
    assert bounded.memory_bytes() == bounded.paged.memory_bytes() > 0


def test_reset_frees_all():
    model = make_model("llama")
    ids = tokens(2, 200)
    cache = KVarNCache(model.config, "kvarn_k4v2_g64")
    first = run(model, ids, cache, [200])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.batch_size == -1
    assert cache.paged.num_free_blocks == cache.paged.num_blocks
    assert torch.equal(run(model, ids[:1], cache, [200]), first[:1])


# What is refused -------------------------------------------------------------------------------


def refused(words: str):
    return pytest.raises(ValueError, match=f"^kvarn.integrations.transformers: {words}")


def test_without_the_cache_it_is_refused():
    model = make_model("llama")
    ids = tokens(1, 5)
    with refused("attention needs a cache"):
        model(ids, use_cache=False)
    with refused("attention needs a cache"):
        model(ids, past_key_values=DynamicCache(config=model.config))


def test_with_other_attention_it_is_refused():
    model = make_model("llama")
    model.set_attn_implementation("sdpa")
    with refused("KVarNCache needs attn_implementation='kvarn', got 'sdpa'"):
        model(tokens(1, 5), past_key_values=KVarNCache(model.config))


def test_gradients_and_dropout_are_refused():
    model = make_model("llama", attention_dropout=0.5)
    model.train()
    with refused("dropout must be 0, got 0.5"):
        model(tokens(1, 5), past_key_values=KVarNCache(model.config))
    model.eval()
    model.requires_grad_(True)
    with refused("there is no backward pass"):
        model(tokens(1, 5), past_key_values=KVarNCache(model.config))
    with torch.no_grad():
        model(tokens(1, 5), past_key_values=KVarNCache(model.config))


def test_fault26_masks_that_would_be_ignored_are_refused():
    model = make_model("llama")
    ids = tokens(2, 6)
    cache = KVarNCache(model.config)
    with refused(r"custom attention masks are not supported, got one of \[2, 1, 6, 6\]"):
        model(ids, attention_mask=torch.zeros(2, 1, 6, 6), past_key_values=cache)
    cache.reset()
    with refused("attention_mask must cover the 0 tokens seen and the 6 new ones"):
        model(ids, attention_mask=torch.ones(2, 9), past_key_values=cache)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    model(ids, attention_mask=mask, past_key_values=cache)
    with refused("attention_mask is needed"):
        model(ids[:, :1], past_key_values=cache)
    changed = torch.cat([mask.flip(0), mask[:, -1:]], 1)
    with refused("attention_mask must show the same past tokens"):
        model(ids[:, :1], attention_mask=changed, past_key_values=cache)
    model = make_model("mistral")
    with refused("with a sliding window, padding must be on the left"):
        model(ids, attention_mask=mask.flip(1), past_key_values=KVarNCache(model.config))


def test_fault26_other_arguments_of_attention_are_refused():
    model = make_model("llama")
    ids = tokens(1, 4)
    for name in ("position_bias", "cu_seq_lens_q"):
        with refused(f"the attention argument {name} is not supported"):
            model(ids, past_key_values=KVarNCache(model.config), **{name: torch.zeros(1)})
    with refused("(attention must be causal|masks other than causal)"):
        model(ids, past_key_values=KVarNCache(model.config), is_causal=False)
    with pytest.raises(ValueError, match="attn_implementation"):
        model.generate(
            ids,
            past_key_values=KVarNCache(model.config),
            output_attentions=True,
            return_dict_in_generate=True,
            max_new_tokens=2,
        )


def test_bidirectional_attention_is_refused():
    model = make_model("gemma3", use_bidirectional_attention=True)
    with refused("masks other than causal and sliding window"):
        model(tokens(1, 4), past_key_values=KVarNCache(model.config))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("T5Config", "encoder-decoder models are not supported"),
        ("Llama4TextConfig", "layers must be full_attention or sliding_attention, got"),
        ("Qwen3NextConfig", "layers must be full_attention or sliding_attention, got"),
        ("Gemma3nTextConfig", "layers that share the keys and values of others"),
    ],
)
def test_models_that_do_not_fit_are_refused(config, words):
    with refused(words):
        KVarNCache(getattr(transformers, config)())


def test_head_dimension_and_format_are_checked():
    config = transformers.LlamaConfig(head_dim=80)
    with pytest.raises(ValueError, match="head_dim must be 64, 128, 256 or 512, got 80"):
        KVarNCache(config)
    config = transformers.LlamaConfig(head_dim=64)
    with refused("fmt must have the model's head_dim 64, got 128"):
        KVarNCache(config, Format("kvarn_k4v2_g128", head_dim=128))
    with refused("max_tokens must be at least 1, got 0"):
        KVarNCache(config, max_tokens=0)
    assert KVarNCache(config, Format("kvarn_k4v2_g128", head_dim=64)).paged is None


def test_another_batch_size_is_refused():
    model = make_model("llama")
    cache = KVarNCache(model.config)
    model(tokens(2, 4), past_key_values=cache)
    assert cache.batch_size == 2
    with refused("the cache holds 2 sequences, got a batch of 3"):
        model(tokens(3, 4), past_key_values=cache)


def test_crop_arguments_are_checked():
    model = make_model("llama")
    cache = KVarNCache(model.config)
    cache.crop(0)
    model(tokens(2, 4), past_key_values=cache)
    with refused("crop takes minus the number of tokens to remove, got 2"):
        cache.crop(2)
    with refused("only 4 tokens can be removed, got 5"):
        cache.crop(-5)
    cache.crop(-4)
    assert cache.get_seq_length() == 0


def test_a_failed_forward_pass_is_noticed_and_reset_mends_it(monkeypatch):
    model = make_model("llama")
    ids = tokens(2, 100)
    expected = run(model, ids, KVarNCache(model.config), [100])
    cache = KVarNCache(model.config)
    run(model, ids, cache, [100])
    layer = model.model.layers[1]

    def fail(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", fail)
        with pytest.raises(MemoryError):
            model(ids, past_key_values=cache)
    with pytest.raises(RuntimeError, match=r"layers \[1\] did not attend in the last forward pass"):
        model(ids, past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(run(model, ids, cache, [100]), expected)
