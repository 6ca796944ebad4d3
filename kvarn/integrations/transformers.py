"""kvarn caches for Hugging Face transformers (v5): a `Cache` and an attention implementation.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvarn")
    model.generate(**inputs, past_key_values=KVarNCache(model.config, "kvarn_k4v2_g128"))

Importing this module registers ``attn_implementation="kvarn"``. The cache holds one sequence of a
`kvarn.PagedCache` for each row of the batch; padding is never stored. `KVarNCache.update` hands
keys and values through to the attention function, which stores them and attends.

A prompt is attended to block by block with `PagedCache.attend`, so a result does not depend on
how the prompt is cut into chunks, and no scratch memory grows with the context. Dequantizing the
context for a prefill kernel (`kvarn.ops.gather_kv`) would be faster for long prompts, but its
scratch memory grows with the context, and a chunk's own tokens would read each other in 16 bits.

`DecodeGraph` captures a model's decode step, of which Python would else take most of the time.

What cannot be done (training, attention weights, custom masks, cross attention, ...) raises.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin

from kvarn.cache import CacheFull, PagedCache, Step, outlives_inference_mode, require_integer
from kvarn.format import Format

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["DecodeGraph", "KVarNCache"]

_NAME = "kvarn"
_LAYER_TYPES = ("full_attention", "sliding_attention")
_WHERE = "kvarn.integrations.transformers: "
_INITIAL_TOKENS = 1024  # per sequence, of pools that grow


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"{_WHERE}{what}")


class _Mask(NamedTuple):
    """What models pass from the mask function to the attention function."""

    valid: Tensor | None  #: bool [B, columns seen, new ones included]; None: no padding
    window: int | None  #: tokens a query sees, its own included; None: all


def _kvarn_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> _Mask:
    """No dense mask is built: causal order and window are arguments of the kernel."""
    if use_vmap or not allow_is_causal_skip:
        _refuse("masks other than causal and sliding window are not supported")
    return _Mask(attention_mask, local_size)


def _kvarn_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, T, D], key and value [B, Hkv, T, D] of the new tokens -> [B, T, Hq, D]."""
    place: _Place | None = getattr(key, "_kvarn_place", None)
    if place is None:
        _refuse("attention needs a cache: pass past_key_values=KVarNCache(model.config)")
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        _refuse("there is no backward pass: use torch.no_grad()")
    if dropout:
        _refuse(f"dropout must be 0, got {dropout}")
    if is_causal is False or not getattr(module, "is_causal", True):
        _refuse("attention must be causal")
    if kwargs.get("output_attentions"):
        _refuse("attention weights are not computed: use attn_implementation='eager'")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            _refuse(f"the attention argument {name} is not supported")
    if isinstance(attention_mask, Tensor):
        _refuse(
            f"custom attention masks are not supported, got one of {list(attention_mask.shape)}"
        )
    mask = _Mask(None, sliding_window) if attention_mask is None else attention_mask
    if mask.window != sliding_window:
        _refuse(f"the mask's window is {mask.window}, the attention's is {sliding_window}")
    out = place.cache._attend(
        place.layer,
        query,
        key,
        value,
        mask.valid,
        sm_scale=scaling,
        logits_soft_cap=softcap or 0.0,
        window_left=-1 if mask.window is None else mask.window - 1,
        sinks=s_aux,
    )
    return out, None


#: Arguments of other attention functions that change the result.
_UNSUPPORTED = (
    "position_bias", "indices", "block_indices", "sinks", "head_mask", "cu_seqlens",
    "cu_seq_lens_q", "cu_seq_lens_k",
)  # fmt: skip

AttentionInterface.register(_NAME, torch.compiler.disable(_kvarn_attention))
AttentionMaskInterface.register(_NAME, _kvarn_mask)


@dataclass(frozen=True)
class _Place:
    """Travels with a key tensor from `KVarNCache.update` to the attention function."""

    cache: KVarNCache
    layer: int


@dataclass
class _Forward:
    """A forward pass under way, or over and not yet committed (drafts may be cropped)."""

    paged: PagedCache
    step: Step
    columns: int
    rows: Tensor | None  #: of the tokens among [B * columns], None: all
    layers_left: set[int]


class KVarNCache(Cache):  # type: ignore[misc]
    """A transformers cache whose layers live in one `kvarn.PagedCache`.

    Works with `generate` (greedy, sampling, beams, assisted decoding, prefill in chunks, several
    turns) and with direct forward passes under `torch.no_grad`. Batches of unequal length are told
    by ``attention_mask``; padded tokens are not stored and their outputs are 0. The mask is looked
    at in every forward pass on the CPU; on CUDA only when a pass has several tokens per sequence or
    ``KVARN_CHECKED=1``, so that a decode step does not wait for the device.

    Args:
        config: ``model.config``.
        fmt: a format or its name.
        max_tokens: most tokens of a sequence: the pools are allocated for that once, and
            `kvarn.cache.CacheFull` is raised beyond. None: the pools grow.
        sink_blocks, recent_blocks, fit, iterations: see `kvarn.PagedCache`.

    Attributes:
        fmt: the `kvarn.Format`.
        paged: the `PagedCache`, made at the first forward pass with the device and dtype of its
            keys; None before.

    Raises:
        ValueError: a model or head dimension that is not supported.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        fmt: Format | str = "kvarn_k4v2_g128",
        *,
        max_tokens: int | None = None,
        sink_blocks: int = 1,
        recent_blocks: int = 1,
        fit: str = "unbiased",
        iterations: int | None = None,
    ) -> None:
        if getattr(config, "is_encoder_decoder", False):
            _refuse("encoder-decoder models are not supported")
        config = config.get_text_config(decoder=True)
        chunked = getattr(config, "attention_chunk_size", None)
        default = "chunked_attention" if chunked else "full_attention"
        kinds = set(getattr(config, "layer_types", None) or [default])
        if not kinds <= set(_LAYER_TYPES):
            _refuse(f"layers must be {' or '.join(_LAYER_TYPES)}, got {sorted(kinds)}")
        if getattr(config, "num_kv_shared_layers", 0):
            _refuse("layers that share the keys and values of others are not supported")
        head_dim = getattr(config, "head_dim", None)
        if head_dim is None:
            head_dim = config.hidden_size // config.num_attention_heads
        if not isinstance(fmt, Format):
            fmt = Format(fmt, head_dim=head_dim)
        elif fmt.head_dim != head_dim:
            _refuse(f"fmt must have the model's head_dim {head_dim}, got {fmt.head_dim}")
        if max_tokens is not None:
            max_tokens = require_integer(f"{_WHERE}max_tokens", max_tokens, 1)
        sink_blocks = require_integer(f"{_WHERE}sink_blocks", sink_blocks, 0)
        recent_blocks = require_integer(f"{_WHERE}recent_blocks", recent_blocks, 0)
        super().__init__(layers=[_Layer(self, i) for i in range(config.num_hidden_layers)])
        self.fmt = fmt
        self.paged: PagedCache | None = None
        self._config = config
        self._sliding = "sliding_attention" in kinds or bool(getattr(config, "sliding_window", 0))
        self._max_tokens = max_tokens
        self._staged_blocks = sink_blocks + recent_blocks + 2  # the open one, and one for drafts
        self._new_paged = partial(
            PagedCache,
            fmt,
            num_layers=config.num_hidden_layers,
            sink_blocks=sink_blocks,
            recent_blocks=recent_blocks,
            fit=fit,
            iterations=iterations,
        )
        self._record_past = False
        self._clear()

    def _clear(self) -> None:
        self._seqs: list[int] = []
        # Runs of columns, each with its bool [B, columns] of tokens; None: no padding.
        self._columns: list[tuple[int, Tensor | None]] = []
        self._forward: _Forward | None = None
        self._handed_out: int | None = None  # layer whose keys are between update and attention

    # Storing and attending ---------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hands the new keys and values [B, Hkv, T, D] through to the attention function."""
        if self._config._attn_implementation != _NAME:
            _refuse(
                f"KVarNCache needs attn_implementation='{_NAME}', "
                f"got '{self._config._attn_implementation}'"
            )
        if self._handed_out is not None:
            raise RuntimeError(
                f"kvarn.integrations.transformers: layer {self._handed_out} did not reach the "
                "attention function (a forward pass that failed? then call reset())"
            )
        key_states._kvarn_place = _Place(self, layer_idx)  # type: ignore[attr-defined]
        self._handed_out = layer_idx
        return key_states, value_states

    def _attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        **arguments: Any,
    ) -> Tensor:
        self._handed_out = None
        if self._forward is None or layer not in self._forward.layers_left:
            self._settle()
            self._forward = self._begin(key, value, valid)
        forward = self._forward
        batch, heads, columns, head_dim = query.shape
        if columns != forward.columns:
            _refuse(
                f"all layers must see {forward.columns} new tokens, layer {layer} has {columns}"
            )
        q, k, v = (t.transpose(1, 2).reshape(-1, *t.shape[1::2]) for t in (query, key, value))
        if forward.rows is None:
            out = forward.paged.attend(forward.step, layer, q, k, v, **arguments)
        else:
            rows = forward.rows
            out = q.new_zeros(q.shape)
            out[rows] = forward.paged.attend(
                forward.step, layer, q[rows], k[rows], v[rows], **arguments
            )
        forward.layers_left.discard(layer)
        return out.view(batch, columns, heads, head_dim)

    def _begin(self, key: Tensor, value: Tensor, valid: Tensor | None) -> _Forward:
        """Plans a forward pass: the first layer to attend calls it."""
        batch, heads, columns, head_dim = key.shape
        if head_dim != self.fmt.head_dim or value.shape != key.shape:
            _refuse(
                f"keys and values must be [batch, heads, tokens, {self.fmt.head_dim}], "
                f"got {list(key.shape)} and {list(value.shape)}"
            )
        if self._seqs and batch != len(self._seqs):
            _refuse(f"the cache holds {len(self._seqs)} sequences, got a batch of {batch}")
        rows, new = None, self._new_tokens(valid, columns)
        if self.paged is None:
            self.paged = self._allocate(batch, heads, columns, key)
        if not self._seqs:
            self._seqs = [self.paged.new_sequence() for _ in range(batch)]
        counts = [columns] * batch if new is None else [int(n) for n in new.sum(1)]
        if new is not None:
            rows = new.flatten().nonzero().squeeze(1).to(key.device)
        # Assisted decoding does not say how many tokens of a pass are drafts.
        drafts = [min(n, self.fmt.group) if self._record_past else 0 for n in counts]
        step = self._plan(self.paged, list(zip(self._seqs, counts, strict=True)), drafts)
        self._add_columns(columns, new)
        return _Forward(self.paged, step, columns, rows, set(range(len(self.layers))))

    def _add_columns(self, columns: int, new: Tensor | None) -> None:
        if new is None and self._columns and self._columns[-1][1] is None:
            self._columns[-1] = (self._columns[-1][0] + columns, None)
        else:
            self._columns.append((columns, new))

    def _new_tokens(self, valid: Tensor | None, columns: int) -> Tensor | None:
        """Which of the new columns are tokens, on the host: bool [B, columns], None for all."""
        if valid is None:
            if any(new is not None for _, new in self._columns):
                _refuse("attention_mask is needed: the cache holds padded sequences")
            return None
        seen = self._num_columns()
        if valid.shape[1] != seen + columns:
            _refuse(
                f"attention_mask must cover the {seen} tokens seen and the {columns} new ones, "
                f"got {list(valid.shape)}"
            )
        if valid.is_cuda and columns == 1 and os.environ.get("KVARN_CHECKED") != "1":
            return None
        mask = valid.cpu()
        *past, new = torch.split(mask, [*(n for n, _ in self._columns), columns], dim=1)
        for now, (_, before) in zip(past, self._columns, strict=True):
            if not (bool(now.all()) if before is None else torch.equal(now, before)):
                _refuse("attention_mask must show the same past tokens as it did before")
        if self._sliding and bool((mask[:, :-1] & ~mask[:, 1:]).any()):
            _refuse("with a sliding window, padding must be on the left")
        return None if bool(new.all()) else new

    def _allocate(self, batch: int, heads: int, columns: int, key: Tensor) -> PagedCache:
        tokens = self._max_tokens or max(_INITIAL_TOKENS, columns + self.fmt.group)
        blocks = -(-tokens // self.fmt.group)
        return self._new_paged(
            num_kv_heads=heads,
            num_blocks=batch * blocks,
            num_slots=batch * min(blocks, self._staged_blocks),
            dtype=key.dtype,
            device=key.device,
        )

    def _plan(self, paged: PagedCache, requests: list[tuple[int, int]], drafts: list[int]) -> Step:
        while True:
            try:
                return paged.plan(requests, draft=drafts)
            except CacheFull as full:
                if self._max_tokens is not None:
                    raise
                blocks, slots = paged.num_blocks, paged.num_slots
                if full.missing_blocks:
                    blocks += max(full.missing_blocks, blocks // 2)
                if full.missing_slots:
                    slots += max(full.missing_slots, slots // 2)
                paged.grow(blocks, slots)

    # Between forward passes --------------------------------------------------------------------

    def _settle(self, removed: list[int] | None = None) -> list[int]:
        """Ends the forward pass under way without the last ``removed`` tokens of each sequence.

        Returns how many of these are left to be truncated.
        """
        removed = removed or [0] * len(self._seqs)
        forward = self._forward
        if forward is None:
            return removed
        if forward.layers_left:
            raise RuntimeError(
                f"kvarn.integrations.transformers: layers {sorted(forward.layers_left)} did not "
                "attend in the last forward pass (if it failed, call reset())"
            )
        rejected = [min(n, r.draft) for n, r in zip(removed, forward.step.requests, strict=True)]
        accepted = [r.num_tokens - n for n, r in zip(rejected, forward.step.requests, strict=True)]
        forward.paged.commit(forward.step, accepted)
        self._forward = None
        return [n - done for n, done in zip(removed, rejected, strict=True)]

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` columns of the batch (0 or negative)."""
        tokens_to_remove = require_integer(f"{_WHERE}tokens_to_remove", tokens_to_remove)
        if tokens_to_remove > 0:
            _refuse(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
        if -tokens_to_remove > self._num_columns():
            _refuse(f"only {self._num_columns()} tokens can be removed, got {-tokens_to_remove}")
        if self.paged is None:
            return
        columns, removed = -tokens_to_remove, [0] * len(self._seqs)
        runs = list(self._columns)
        while columns:
            count, tokens = runs.pop()
            taken = min(columns, count)
            if tokens is None:
                removed = [n + taken for n in removed]
            else:
                tail = tokens[:, count - taken :].sum(1).tolist()
                removed = [n + m for n, m in zip(removed, tail, strict=True)]
            if taken < count:
                runs.append(
                    (count - taken, tokens if tokens is None else tokens[:, : count - taken])
                )
            columns -= taken
        for seq, n in zip(self._seqs, self._settle(removed), strict=True):
            if n:
                self.paged.truncate(seq, self.paged.length(seq) - n)
        self._columns = runs

    def reset(self) -> None:
        """Forgets everything but the memory; also after a forward pass that failed."""
        if self.paged is not None:
            if self._forward is not None:
                self.paged.abort(self._forward.step)
            else:
                for seq in self._seqs:
                    self.paged.free(seq)
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i of the batch goes on from what row ``beam_idx[i]`` was; nothing is copied."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times; nothing is copied."""
        repeats = require_integer(f"{_WHERE}repeats", repeats, 1)
        self._select([row for row in range(len(self._seqs)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows of the batch (indices or a bool mask)."""
        if indices.dtype == torch.bool:
            if indices.shape != (len(self._seqs),):
                _refuse(f"indices must be [{len(self._seqs)}], got {list(indices.shape)}")
            indices = indices.nonzero().squeeze(1)
        self._select(indices.tolist())

    def _select(self, rows: list[int]) -> None:
        batch = len(self._seqs)
        if not all(type(row) is int and 0 <= row < batch for row in rows):
            _refuse(f"rows of the batch must be integers in [0, {batch}), got {rows}")
        self._settle()
        if self.paged is None or not self._seqs:
            return
        seqs = [self.paged.fork(self._seqs[row]) for row in rows]
        for seq in self._seqs:
            self.paged.free(seq)
        self._seqs = seqs
        self._columns = [
            (n, tokens if tokens is None else tokens[rows]) for n, tokens in self._columns
        ]

    def activate_past_recording(self) -> None:
        """The last tokens of a forward pass may be drafts, which `crop` takes back."""
        self._record_past = True

    def _num_columns(self) -> int:
        return sum(columns for columns, _ in self._columns)

    # What transformers asks for ----------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch seen so far, padding included."""
        length = self._num_columns()
        if self._forward is not None and layer_idx in self._forward.layers_left:
            length -= self._forward.columns
        return length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(columns after ``query_length`` new ones, 0)."""
        return self.get_seq_length(layer_idx) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """max_tokens, or -1."""
        return self._max_tokens or -1

    @property
    def batch_size(self) -> int:
        """Sequences held, or -1 before the first forward pass."""
        return len(self._seqs) or -1

    def memory_bytes(self) -> int:
        """Bytes allocated for records and staged tiles, all layers."""
        return 0 if self.paged is None else self.paged.memory_bytes()


class DecodeGraph:
    """A model's decode step with a `KVarNCache`, captured in a CUDA graph.

        cache = KVarNCache(model.config, max_tokens=4096)
        logits = model(prompt, past_key_values=cache).logits
        decode = DecodeGraph(model, cache)
        for _ in range(100):
            logits = decode(logits[:, -1:].argmax(-1))

    Any other use of the cache may come between two steps, as long as its batch has the same size. A
    token's position is the number of tokens that the cache has of its sequence. (On the CPU, which
    has no graphs, a step is just computed.)

    Args:
        model: its forward pass must not depend on anything on the host but shapes.
        cache: after its first forward pass, of a fixed size: ``max_tokens`` was given.

    Raises:
        ValueError: for a cache that may grow, or that is empty.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, cache: KVarNCache) -> None:
        if cache._max_tokens is None:
            _refuse("DecodeGraph needs a cache with max_tokens: pools that grow move")
        cache._settle()
        if cache.paged is None or not cache._seqs:
            _refuse("DecodeGraph needs a cache that holds a batch")
        self._cache, self._paged = cache, cache.paged
        self._step = step = self._paged.graph_step(len(cache._seqs), cache._max_tokens)
        lengths = step.waves[0].seq_lens
        with outlives_inference_mode():
            self._ids = ids = lengths.new_zeros((step.num_tokens, 1), dtype=torch.int64)
        new_name = "cache" in inspect.signature(model.forward).parameters
        past = {"cache" if new_name else "past_key_values": cache}

        def forward() -> Tensor:
            cache._forward = self._forward(layers_left=set(range(len(cache.layers))))
            position_ids = (lengths - 1).clamp(min=0).long()[:, None]  # padding until planned
            try:
                logits: Tensor = model(input_ids=ids, position_ids=position_ids, **past).logits
            finally:
                cache._forward = None
            return logits

        if ids.is_cuda:
            stream = torch.cuda.Stream(ids.device)
            stream.wait_stream(torch.cuda.current_stream(ids.device))
            with torch.cuda.stream(stream):
                forward()
            torch.cuda.current_stream(ids.device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                logits = forward()

            def replay() -> Tensor:
                graph.replay()
                return logits

            self._run = replay
        else:
            self._run = forward

    @torch.no_grad()
    def __call__(self, input_ids: Tensor) -> Tensor:
        """The next token of each sequence, int64 [B, 1] -> logits [B, 1, vocabulary], which the
        next call overwrites.

        Raises:
            ValueError: the batch has another size than when this was captured, or a sequence would
                be longer than ``max_tokens`` allows.
        """
        cache = self._cache
        if input_ids.shape != self._ids.shape or len(cache._seqs) != len(self._ids):
            _refuse(
                f"input_ids must be {list(self._ids.shape)} and the cache hold as many sequences, "
                f"got {list(input_ids.shape)} and {len(cache._seqs)}"
            )
        self._ids.copy_(input_ids)
        cache._settle()
        self._paged.plan([(seq, 1) for seq in cache._seqs], into=self._step)
        cache._add_columns(1, None)
        logits = self._run()
        cache._forward = self._forward(layers_left=set())
        return logits

    def _forward(self, layers_left: set[int]) -> _Forward:
        return _Forward(self._paged, self._step, 1, None, layers_left)


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers expects in `Cache.layers`; everything is done by the cache."""

    is_croppable = True

    def __init__(self, cache: KVarNCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: pools are made at the first forward pass."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._cache.update(key_states, value_states, self._index, *args, **kwargs)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length, self._index)

    def get_max_length(self) -> int:
        return self._cache.get_max_length(self._index)
