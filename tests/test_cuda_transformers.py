"""`kvarn.integrations.transformers` on CUDA, in 16 bits, on tiny random models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from test_transformers import ALL_16_BIT, left_padded, relative_error, tokens  # noqa: E402
from test_transformers import make_model as make_cpu_model  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from kvarn.integrations.transformers import DecodeGraph, KVarNCache  # noqa: E402
from kvarn.ops import dequantize_tiles  # noqa: E402

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore:`past_key_values` is")]

DEVICE = "cuda"
FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "gemma3"]
DTYPES = [torch.float16, torch.bfloat16]
#: Logits as near as this, in units of their spread, may change places: 16-bit products are summed
#: in another order. 16-bit keys and values alone move them by a tenth of that.
TIE = {torch.float16: 0.05, torch.bfloat16: 0.3}


def make_model(family: str = "llama", dtype: torch.dtype = torch.float16, **options):
    return make_cpu_model(family, dtype=dtype, **options).to(DEVICE)


def ids_of(batch: int, length: int, seed: int = 1) -> Tensor:
    return tokens(batch, length, seed).to(DEVICE)


def padded(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Rows of unequal length, on the right, and their mask."""
    lengths = [length - 29 * i % length for i in range(batch)]
    ids, mask = left_padded(tokens(batch, length), lengths)
    return ids.to(DEVICE), mask.to(DEVICE)


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def run(model, ids: Tensor, cache, chunks: list[int], mask: Tensor) -> Tensor:
    """Logits of all tokens, in forward passes of ``chunks`` tokens."""
    logits, start = [], 0
    for n in chunks:
        stop = start + n
        out = model(
            ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions(mask[:, :stop])[:, start:],
            past_key_values=cache,
        )
        logits.append(out.logits)
        start = stop
    assert start == ids.shape[1]
    return torch.cat(logits, 1).float()


def eager_logits(model, ids: Tensor, mask: Tensor) -> Tensor:
    """The model's own attention."""
    model.set_attn_implementation("eager")
    logits = run(model, ids, DynamicCache(config=model.config), [ids.shape[1]], mask)
    model.set_attn_implementation("kvarn")
    return logits


def generate(model, ids: Tensor, cache, new: int = 24, **options) -> Tensor:
    options.setdefault("attention_mask", torch.ones_like(ids))
    options.setdefault("do_sample", False)
    return model.generate(
        ids, past_key_values=cache, max_new_tokens=new, pad_token_id=0, **options
    )[:, ids.shape[1] :]


def eager_generate(model, ids: Tensor, **options) -> Tensor:
    model.set_attn_implementation("eager")
    out = generate(model, ids, DynamicCache(config=model.config), **options)
    model.set_attn_implementation("kvarn")
    return out


def assert_same_choices(
    got: Tensor, want: Tensor, logits_of: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """Greedy tokens [B, N] are the same, until two are as good as each other: from there on the
    texts are different ones. ``logits_of(want)`` are the logits [B, N, V] that chose ``want``."""
    assert got.shape == want.shape
    logits = logits_of(want)
    for row in range(len(got)):
        differing = (got[row] != want[row]).nonzero()
        if len(differing):
            at = int(differing[0])
            choice = logits[row, at]
            behind = choice[want[row, at]] - choice[got[row, at]]
            assert behind / choice.std() < TIE[dtype], f"row {row}, token {at}"


# The model's own attention ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_twice_the_error_of_16_bit_attention(family, dtype):
    """All blocks 16-bit: beside the model's own attention, both against fp32 on the CPU."""
    model = make_model(family, dtype)
    exact_model = make_cpu_model(family)
    exact_model.load_state_dict({k: v.float().cpu() for k, v in model.state_dict().items()})
    ids, mask = padded(3, 300)
    exact = eager_logits(exact_model, ids.cpu(), mask.cpu())[mask.bool().cpu()]
    own = eager_logits(model, ids, mask)[mask.bool()].cpu()
    cache = KVarNCache(model.config, "kvarn_k4v2_g64", sink_blocks=ALL_16_BIT)
    ours = run(model, ids, cache, [130, 1, 1, 100, 68], mask)[mask.bool()].cpu()
    assert cache.paged.dtype == dtype
    assert cache.paged.device.type == DEVICE
    assert relative_error(ours, exact) < 2 * relative_error(own, exact) + 1e-4


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_generate_as_with_a_dynamic_cache(family, dtype, batch):
    model = make_model(family, dtype)
    ids, mask = padded(batch, 120)
    cache = KVarNCache(model.config, "kvarn_k4v2_g64", recent_blocks=100)
    out = generate(model, ids, cache, attention_mask=mask)
    expected = eager_generate(model, ids, attention_mask=mask)

    def logits_of(new: Tensor) -> Tensor:
        text = torch.cat([ids, new], 1)
        full = torch.cat([mask, torch.ones_like(new)], 1)
        return eager_logits(model, text, full)[:, ids.shape[1] - 1 : -1]

    assert_same_choices(out, expected, logits_of, dtype)
    lengths = mask.sum(1) + out.shape[1] - 1
    cache.crop(0)
    assert [cache.paged.length(seq) for seq in cache._seqs] == lengths.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_fewer_bits_are_farther_from_the_models_own_logits(family, dtype):
    model = make_model(family, dtype)
    ids, mask = padded(2, 400)
    expected = eager_logits(model, ids, mask)[:, 256:]
    errors = []
    for fmt in ("kvarn_k8v8_g64", "kvarn_k4v4_g64", "kvarn_k2v2_g64"):
        cache = KVarNCache(model.config, fmt, sink_blocks=0, recent_blocks=0)
        logits = run(model, ids, cache, [200, *[1] * 70, 130], mask)[:, 256:]
        assert logits.isfinite().all()
        errors.append(relative_error(logits, expected))
    assert errors[0] < 0.15
    assert errors[0] < errors[1] < errors[2]


def test_generate_with_a_packed_cache_of_two_formats():
    """Finite, of the asked length, the same twice, and over several borders of a block."""
    model = make_model("qwen3")
    ids, mask = padded(5, 150)
    for fmt in ("kvarn_k4v2_g128", "kvarn_k2v2_g64"):
        outs = []
        for _ in range(2):
            cache = KVarNCache(model.config, fmt, sink_blocks=0, recent_blocks=0)
            outs.append(generate(model, ids, cache, new=140, attention_mask=mask))
        assert outs[0].shape == (5, 140)
        assert torch.equal(*outs)


# What generate does besides --------------------------------------------------------------------


def test_fault17_chunked_prefill_equals_one_go():
    model = make_model("qwen3")
    ids, mask = padded(1, 520)
    whole, parts = (KVarNCache(model.config, recent_blocks=0) for _ in range(2))
    expected = run(model, ids, whole, [520], mask)
    logits = run(model, ids, parts, [127, 1, 128, 129, 135], mask)
    assert relative_error(logits, expected) < 2e-2


def test_beams_leak_nothing():
    model = make_model("llama")
    ids, mask = padded(2, 100)
    cache = KVarNCache(model.config, "kvarn_k4v2_g64", sink_blocks=0)
    out = generate(model, ids, cache, new=70, num_beams=3, attention_mask=mask)
    assert out.shape == (2, 70)
    cache.reset()
    assert cache.paged.num_free_blocks == cache.paged.num_blocks
    assert cache.paged.num_free_slots == cache.paged.num_slots


def test_several_turns_and_a_copy_of_the_cache():
    model = make_model("llama")
    ids = ids_of(2, 260)
    cache = KVarNCache(model.config, "kvarn_k4v2_g64", recent_blocks=0)
    first = generate(model, ids[:, :150], cache, new=10)
    so_far = torch.cat([ids[:, :150], first, ids[:, 150:]], 1)
    other = copy.deepcopy(cache)
    assert torch.equal(generate(model, so_far, cache), generate(model, so_far, other))


@pytest.mark.parametrize("draft", ["prompt_lookup", "assistant", "itself"])
def test_fault15_assisted_decoding_equals_decoding_without_drafts(draft):
    """Over two borders of a block; where the texts are the same, so are the records."""
    model = make_model("llama")
    ids = ids_of(1, 20).repeat(1, 6)
    options = {"prompt_lookup_num_tokens": 7}
    if draft != "prompt_lookup":
        assistant = make_model("llama", seed=5 if draft == "assistant" else 0)
        assistant.set_attn_implementation("eager")
        assistant.generation_config.num_assistant_tokens = 7
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        options = {"assistant_model": assistant}
    caches = [KVarNCache(model.config, "kvarn_k4v2_g64", sink_blocks=0) for _ in range(2)]
    plain = generate(model, ids, caches[0], new=150)
    assisted = generate(model, ids, caches[1], new=150, **options)

    def logits_of(new: Tensor) -> Tensor:
        text = torch.cat([ids, new], 1)
        cache = KVarNCache(model.config, "kvarn_k4v2_g64", sink_blocks=0)
        logits = run(model, text, cache, [text.shape[1]], torch.ones_like(text))
        return logits[:, ids.shape[1] - 1 : -1]

    assert_same_choices(assisted, plain, logits_of, torch.float16)
    same = int((assisted != plain).int().argmax()) if not torch.equal(assisted, plain) else 149
    states = []
    for cache in caches:
        cache.crop(ids.shape[1] + same - cache.get_seq_length())
        states.append(cache.paged.export_sequence(cache._seqs[0]))
    fmt = caches[0].fmt
    count = min(state.records.shape[1] for state in states)
    for a, b in zip(
        *(dequantize_tiles(s.records[:, :count].flatten(0, 1), fmt) for s in states), strict=True
    ):
        assert relative_error(a.float(), b.float()) < 0.05


# Decode steps ----------------------------------------------------------------------------------


def test_a_decode_step_does_not_wait_for_the_device():
    """With a mask and without, over a border of a block, with seals."""
    model = make_model("llama")
    for ids, mask in (padded(3, 250), (ids_of(3, 250), torch.ones(3, 250, device=DEVICE).long())):
        cache = KVarNCache(
            model.config, "kvarn_k4v2_g64", max_tokens=600, sink_blocks=0, recent_blocks=0
        )
        run(model, ids, cache, [250], mask)
        mask = torch.cat([mask, mask.new_ones(3, 80)], 1)
        position_ids = positions(mask)
        new = ids_of(3, 80, seed=2)
        sealed = cache.paged.num_free_slots
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            for i in range(80):
                model(
                    new[:, i : i + 1],
                    attention_mask=mask[:, : 251 + i],
                    position_ids=position_ids[:, 250 + i, None],
                    past_key_values=cache,
                )
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        cache.crop(0)
        assert cache.paged.num_free_slots == sealed
        assert cache.get_seq_length() == 330


@pytest.mark.parametrize(("family", "dtype"), [("llama", DTYPES[0]), ("gemma2", DTYPES[1])])
@pytest.mark.parametrize("batch", [1, 5])
def test_fault25_a_captured_decode_step_equals_an_eager_one(family, dtype, batch):
    """Both with the same kernels: they differ by how attention is divided."""
    model = make_model(family, dtype)
    ids, mask = padded(batch, 150)
    new = ids_of(batch, 140, seed=2)
    options = {"max_tokens": 400, "sink_blocks": 0, "recent_blocks": 0}
    eager, captured = (KVarNCache(model.config, "kvarn_k4v4_g64", **options) for _ in range(2))
    for cache in (eager, captured):
        run(model, ids, cache, [150], mask)
    decode = DecodeGraph(model, captured)
    full = torch.cat([mask, torch.ones_like(new)], 1)
    logits, expected = [], []
    for i in range(140):
        logits.append(decode(new[:, i : i + 1]).clone())
        out = model(
            new[:, i : i + 1],
            attention_mask=full[:, : 151 + i],
            position_ids=positions(full)[:, 150 + i, None],
            past_key_values=eager,
        )
        expected.append(out.logits)
    assert relative_error(torch.cat(logits, 1).float(), torch.cat(expected, 1).float()) < 0.03
    # Other uses of the cache come in between.
    for cache in (eager, captured):
        cache.crop(-30)
        assert cache.get_seq_length() == 260
    more = ids_of(batch, 40, seed=3)
    full = torch.cat([full[:, :260], torch.ones_like(more)], 1)
    after = [
        model(
            more,
            attention_mask=full,
            position_ids=positions(full)[:, 260:],
            past_key_values=cache,
        ).logits.float()
        for cache in (eager, captured)
    ]
    assert relative_error(after[1], after[0]) < 0.03
    last = ids_of(batch, 1, seed=4)
    out = model(
        last,
        attention_mask=torch.cat([full, torch.ones_like(last)], 1),
        position_ids=positions(full)[:, -1:] + 1,
        past_key_values=eager,
    )
    assert relative_error(decode(last).float(), out.logits.float()) < 0.03
    captured.crop(0)
    assert [captured.paged.length(seq) for seq in captured._seqs] == (full.sum(1) + 1).tolist()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_decode_graph_of_a_gpu_that_is_not_the_current_one():
    ids = tokens(2, 120)
    logits = []
    for device in ("cuda:0", "cuda:1"):
        model = make_cpu_model("llama", dtype=torch.float16).to(device)
        cache = KVarNCache(model.config, "kvarn_k4v4_g64", max_tokens=256)
        model(ids[:, :100].to(device), past_key_values=cache)
        decode = DecodeGraph(model, cache)
        steps = [decode(ids[:, i : i + 1].to(device)).clone() for i in range(100, 120)]
        assert steps[0].device == torch.device(device)
        logits.append(torch.cat(steps, 1).cpu())
    assert torch.cuda.current_device() == 0
    assert torch.equal(*logits)


def test_what_a_decode_graph_cannot_do_is_refused():
    model = make_model("llama")
    ids = ids_of(2, 20)
    for cache, words in (
        (KVarNCache(model.config), "needs a cache with max_tokens"),
        (KVarNCache(model.config, max_tokens=200), "needs a cache that holds a batch"),
    ):
        with pytest.raises(ValueError, match=words):
            DecodeGraph(model, cache)
    model(ids, past_key_values=cache)
    decode = DecodeGraph(model, cache)
    decode(ids[:, :1])
    with pytest.raises(ValueError, match=r"input_ids must be \[2, 1\] .*, got \[2, 2\] and 2"):
        decode(ids[:, :2])
    cache.batch_select_indices(torch.tensor([1]))
    with pytest.raises(ValueError, match=r"hold as many sequences, got \[2, 1\] and 1"):
        decode(ids[:, :1])
    cache.batch_repeat_interleave(2)
    decode(ids[:, :1])
    cache.reset()
    model(ids_of(2, 256), past_key_values=cache)
    with pytest.raises(ValueError, match="must be at most 256 in this graph step, got 257"):
        decode(ids[:, :1])
    cache.crop(0)


def test_a_model_in_fp32_is_refused_on_cuda():
    model = make_model("llama", torch.float32)
    if DEVICE == "cuda":
        with pytest.raises(ValueError, match="^kvarn.PagedCache: .*float32"):
            model(ids_of(1, 5), past_key_values=KVarNCache(model.config))
