"""Greedy text generation with a given cache, timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.studies.divergence import Run, cache_argument
from kvarn.studies.models import LoadedModel

_QUESTION = "What is the text above about? Answer in two sentences."


@dataclass(frozen=True)
class Sample:
    """What a model wrote.

    Attributes:
        tokens: ids of what it wrote, the end-of-text token not included.
        text: the same, decoded.
        tokens_per_second: of the decode steps; the prompt is not in it.
    """

    tokens: list[int]
    text: str
    tokens_per_second: float


def prompt(loaded: LoadedModel, text: Tensor) -> Tensor:
    """Token ids int64 [tokens]: a text and a question about it, as a chat if the model has one."""
    passage = loaded.tokenizer.decode(text, skip_special_tokens=True)
    if not loaded.tokenizer.chat_template:
        return text
    message = {"role": "user", "content": f"{passage}\n\n{_QUESTION}"}
    chat = loaded.tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, tokenize=False
    )
    return loaded.encode(chat)


@torch.inference_mode()
def greedy(
    loaded: LoadedModel,
    run: Run,
    prompt: Tensor,
    steps: int,
    *,
    tile: int = 128,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Sample:
    """Writes up to ``steps`` tokens after a prompt int64 [tokens], which enters tile by tile."""
    model, argument = loaded.model, cache_argument(loaded.model)
    own_attention = model.config._attn_implementation
    ends = _end_tokens(loaded)
    cache = run.make_cache()

    def next_token(ids: Tensor) -> int:
        logits = model(ids[None], **{argument: cache}, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    model.set_attn_implementation(run.attention)
    try:
        ids = prompt.to(model.device)
        token = -1
        for start in range(0, len(ids), tile):
            chunk = ids[start : start + tile]
            token = next_token(chunk)
            progress(len(chunk))
        written: list[int] = []
        begin = time.perf_counter()
        while token not in ends and len(written) < steps:
            written.append(token)
            token = next_token(torch.tensor([token], device=model.device))
            progress(1)
        elapsed = time.perf_counter() - begin
    finally:
        model.set_attn_implementation(own_attention)
    progress(steps - len(written))
    text = loaded.tokenizer.decode(written, skip_special_tokens=True)
    return Sample(written, text, len(written) / elapsed if written else float("nan"))


def _end_tokens(loaded: LoadedModel) -> set[int]:
    ends = getattr(loaded.model.generation_config, "eos_token_id", None)
    if ends is None:
        ends = loaded.tokenizer.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}
