"""A vLLM engine of one attention layer, or more, on the CPU: the real configuration, scheduler, KV
cache manager, cache allocation, metadata path and `Attention` layer. What a model runner does
between the scheduler and the layer, with CUDA and Triton, is done here in numpy.

Every step is compared with attention computed in fp64 from what its tokens should see.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import stand_in
import torch

stand_in.install()

import versions  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402
from vllm.v1.worker.gpu import attn_utils  # noqa: E402
from vllm.v1.worker.gpu.input_batch import InputBatch  # noqa: E402
from vllm.v1.worker.gpu.model_states.default import DefaultModelState  # noqa: E402

from kvarn import Format, ops  # noqa: E402
from kvarn.integrations.vllm import register  # noqa: E402

register()  # what vLLM does when it finds the entry point

VOCABULARY = 50
#: Two units of fp16 at the largest outputs, 4 to 8: keys, values and the parts that are merged are
#: rounded to it, and so is the result. What is quantized and should not be is off by 0.1.
TOLERANCE = 2 * 2.0**-8
CPU = torch.device("cpu")


def write_model(folder: Path, head_dim: int = 64, q_heads: int = 4, kv_heads: int = 2) -> str:
    """The configuration of a Qwen3 of one layer."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": head_dim,
        "hidden_size": 64,
        "intermediate_size": 64,
        "max_position_embeddings": 4096,
        "num_attention_heads": q_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCABULARY,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def engine_config(model: str, cache: str = "kvarn_k4v2_g64", **arguments):
    defaults = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float16",
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": True,
        "async_scheduling": False,
    }
    return EngineArgs(
        model=model, kv_cache_dtype=cache, **defaults | arguments
    ).create_engine_config()


class Engine:
    """Requests are added at any time; `step` runs one step and checks it."""

    def __init__(
        self, config, num_blocks: int, *, window=None, soft_cap=None, seed=0, layers=1
    ) -> None:
        self.config = config
        self.rng = np.random.default_rng(seed)
        shape = config.model_config.hf_config
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        dim = config.model_config.get_head_size()
        self.fmt = Format(config.cache_config.cache_dtype, dim)
        self.window_left = -1 if window is None else window - 1
        self.soft_cap = soft_cap or 0.0
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
            self.layers = [
                Attention(
                    heads,
                    dim,
                    dim**-0.5,
                    num_kv_heads=kv_heads,
                    cache_config=config.cache_config,
                    per_layer_sliding_window=window,
                    logits_soft_cap=soft_cap,
                    prefix=f"model.layers.{i}.self_attn.attn",
                )
                for i in range(layers)
            ]
        self.layer = self.layers[0]
        current_platform.update_block_size_for_backend(config)
        config.cache_config.num_gpu_blocks_override = num_blocks
        self.specs = attn_utils.get_kv_cache_spec(config)
        self.kv_cache_config = versions.plan_cache(config, self.specs, self.layer.attn_backend)
        config.cache_config.num_gpu_blocks = self.kv_cache_config.num_blocks
        self.groups, self.graphs, kernel_sizes = attn_utils.init_attn_backend(
            self.kv_cache_config, config, CPU
        )
        versions.allocate_cache(config, self.kv_cache_config, self.groups, kernel_sizes)
        for layer in self.layers:
            layer.use_direct_call = True  # the custom ops have no kernel for the CPU
            layer.kv_cache.fill_(0xFF)  # what was never written is NaN
            layer.impl.staging.fill_(torch.nan)
        init_none_hash(sha256)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            config,
            self.kv_cache_config,
            StructuredOutputManager(config),
            block_size=config.cache_config.block_size,
            hash_block_size=config.cache_config.block_size,
        )
        #: Steps that the scheduler has planned and whose tokens it has not seen yet.
        self.in_flight: list[tuple] = []
        self.hasher = get_request_block_hasher(config.cache_config.block_size, sha256)
        self.state = DefaultModelState.__new__(DefaultModelState)
        self.state.__dict__.update(
            vllm_config=config,
            model_config=config.model_config,
            scheduler_config=config.scheduler_config,
            device=CPU,
            max_num_reqs=config.scheduler_config.max_num_seqs,
            max_model_len=config.model_config.max_model_len,
            rope_state=None,
            supports_mm_inputs=False,
            prompt_embeds_state=None,
        )
        length = config.model_config.max_model_len
        generator = torch.Generator().manual_seed(seed)
        self.by_token, self.by_position = (
            [torch.randn(n, h, dim, generator=generator) for h in (heads, kv_heads, kv_heads)]
            for n in (VOCABULARY, length)
        )
        rows = config.scheduler_config.max_num_seqs
        self.rows: dict[str, int] = {}
        self.free_rows = set(range(rows))
        self.blocks: dict[int, list[int]] = {}
        self.first: dict[str, int] = {}
        self.prefill: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        # Buffers that stay, with what earlier steps left in them.
        self.table = torch.zeros(rows, -(-length // self.fmt.group), dtype=torch.int32)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32)
        self.query_start_loc = torch.zeros(rows + 1, dtype=torch.int32)
        tokens = config.scheduler_config.max_num_batched_tokens
        self.slots = torch.full((1, tokens), -1, dtype=torch.int64)
        self.records: dict[tuple[int, ...], torch.Tensor] = {}
        self.seen = {"steps": 0, "preempted": 0, "hit_tokens": 0, "mixed": 0, "worst": 0.0}

    # Requests ----------------------------------------------------------------------------------

    def add(self, name: str, prompt: list[int], new_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self.hasher))

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def running(self) -> list[str]:
        return list(self.scheduler.requests)

    def run(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError("the requests do not end")

    # A step ------------------------------------------------------------------------------------

    def step(self) -> None:
        """With asynchronous scheduling, the next step is planned before the tokens of this one are
        known to the scheduler."""
        planned = self.scheduler.schedule()
        self._update_rows(planned)
        names = sorted(planned.num_scheduled_tokens, key=planned.num_scheduled_tokens.get)
        sampled = self._forward(names, planned.num_scheduled_tokens) if names else []
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        self.in_flight.append((planned, output))
        ahead = self.config.scheduler_config.async_scheduling and names
        while len(self.in_flight) > (1 if ahead else 0):
            self.scheduler.update_from_output(*self.in_flight.pop(0))
        self.seen["steps"] += 1

    def _update_rows(self, planned) -> None:
        gone = set(planned.finished_req_ids) | set(planned.preempted_req_ids or ())
        self.seen["preempted"] += len(planned.preempted_req_ids or ())
        for name in gone & set(self.rows):
            self.free_rows.add(self.rows.pop(name))
        for new in planned.scheduled_new_reqs:
            row = int(self.rng.choice(sorted(self.free_rows)))
            self.free_rows.remove(row)
            self.rows[new.req_id] = row
            self.blocks[row] = list(new.block_ids[0])
            self.first[new.req_id] = new.num_computed_tokens
            self.prefill[new.req_id] = len(new.prefill_token_ids)
            self.tokens[new.req_id] = list(new.prefill_token_ids)
            self.seen["hit_tokens"] += new.num_computed_tokens
            self.state.add_request(row, new)
        cached = planned.scheduled_cached_reqs
        for name, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_blocks is not None:
                self.blocks[self.rows[name]] += new_blocks[0]

    def _forward(self, names: list[str], counts: dict[str, int]) -> list[list[int]]:
        requests = [self.scheduler.requests[name] for name in names]
        new = np.array([counts[name] for name in names])
        # The scheduler has counted the new tokens already.
        past = np.array([r.num_computed_tokens for r in requests]) - new
        graph = bool((new == 1).all())
        self.seen["mixed"] += not graph and bool((new == 1).any())
        live, tokens = len(names), int(new.sum())
        padded = self.rng.integers(live, len(self.seq_lens) + 1) if graph else live
        token_rows = padded if graph else tokens
        group = self.fmt.group
        starts = np.zeros(len(self.seq_lens) + 1, np.int32)
        starts[1 : live + 1] = np.cumsum(new)
        starts[live + 1 :] = tokens
        self.query_start_loc.copy_(torch.from_numpy(starts))
        self.seq_lens.zero_()
        self.seq_lens[:live] = torch.from_numpy(past + new)
        self.slots.fill_(-1)
        self.table[live:padded] = 0
        ids, positions = [], []
        for i, name in enumerate(names):
            blocks = self.blocks[self.rows[name]]
            self.table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            where = np.arange(past[i], past[i] + new[i])
            slots = np.array(blocks)[where // group] * group + where % group
            self.slots[0, starts[i] : starts[i + 1]] = torch.from_numpy(slots)
            ids += self.tokens[name][past[i] : past[i] + new[i]]
            positions += where.tolist()
        ids += [0] * (token_rows - tokens)
        positions += [0] * (token_rows - tokens)
        upper_bound = torch.zeros(padded, dtype=torch.int32)
        upper_bound[:live] = self.seq_lens[:live]
        computed = np.minimum(past, [self.prefill[name] for name in names])
        batch = SimpleNamespace(
            req_ids=names,
            idx_mapping_np=np.array([self.rows[name] for name in names], np.int32),
            prefill_len_np=np.array([self.prefill[name] for name in names], np.int32),
            is_prefilling_np=computed < [self.prefill[name] for name in names],
            num_reqs=live,
            num_reqs_after_padding=int(padded),
            num_tokens=tokens,
            num_tokens_after_padding=int(token_rows),
            num_scheduled_tokens=new,
            query_start_loc=self.query_start_loc[: padded + 1],
            query_start_loc_np=starts[: padded + 1],
            seq_lens=self.seq_lens[:padded],
            seq_lens_cpu_upper_bound=upper_bound,
            dcp_local_seq_lens=None,
            max_query_len=None,
            pcp=None,
            prompt_lens=None,
            fast_prefill=None,
            positions=torch.tensor(positions),
        )
        q, out = self._attend(
            batch, graph, self.table[:padded], self.slots[:, :token_rows], ids, positions
        )
        sampled: list[list[int]] = []
        for i, name in enumerate(names):
            rows = slice(starts[i], starts[i + 1])
            self._check(name, int(past[i]), int(new[i]), q[rows], out[rows])
            done = past[i] + new[i] == len(self.tokens[name])
            sampled.append([int(self.rng.integers(VOCABULARY))] if done else [])
            self.tokens[name] += sampled[-1]
        if graph:
            assert out[live:].count_nonzero() == 0
        return sampled

    def _attend(self, batch, graph: bool, table, slots, ids, positions):
        """Queries and outputs of the layer."""
        metadata = self.state.prepare_attn(
            batch,
            CUDAGraphMode.FULL if graph else CUDAGraphMode.NONE,
            (table,),
            slots,
            self.groups,
            self.kv_cache_config,
        )
        q, k, v = self.vectors(ids, positions)
        slot_mapping = {self.layer.layer_name: slots[0]}
        with set_forward_context(metadata, self.config, slot_mapping=slot_mapping):
            out = self.layer(q.flatten(1), k.flatten(1), v.flatten(1)).view(q.shape)
        return q, out

    def stand_in_step(self, requests: int, tokens: int) -> None:
        """What warm-up, capture and idle ranks run: a batch that names the rows of others. It must
        leave no trace."""
        buffers = SimpleNamespace(
            device=CPU,
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc,
            input_ids=torch.zeros(tokens, dtype=torch.int32),
            positions=torch.zeros(tokens, dtype=torch.int64),
            is_padding=torch.zeros(tokens, dtype=torch.bool),
        )
        batch = InputBatch.make_dummy(requests, tokens, buffers)
        state = [
            t.view(torch.uint8).clone() for t in (self.layer.kv_cache, self.layer.impl.staging)
        ]
        self.table[:requests] = 0
        self.slots.fill_(-1)
        nothing = [0] * tokens
        self._attend(
            batch,
            requests == tokens,
            self.table[:requests],
            self.slots[:, :tokens],
            nothing,
            nothing,
        )
        now = [t.view(torch.uint8) for t in (self.layer.kv_cache, self.layer.impl.staging)]
        assert all(map(torch.equal, state, now)), "stand-in: something was written"

    # What should be ----------------------------------------------------------------------------

    def vectors(self, ids, positions) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values ``[tokens, heads, D]`` of tokens at positions."""
        return tuple(
            (a[ids] + b[positions]).half()
            for a, b in zip(self.by_token, self.by_position, strict=True)
        )

    def record(self, name: str, tile: int) -> torch.Tensor:
        """The record of a full tile, [1, Hkv, bytes]."""
        group = self.fmt.group
        where = range(tile * group, (tile + 1) * group)
        ids = tuple(self.tokens[name][where.start : where.stop])
        key = (tile, *ids)
        if key not in self.records:
            _, k, v = self.vectors(list(ids), list(where))
            self.records[key] = ops.quantize_tiles(k[None], v[None], self.fmt)
        return self.records[key]

    def _check(self, name: str, past: int, new: int, q: torch.Tensor, out: torch.Tensor) -> None:
        group = self.fmt.group
        options = self.config.additional_config.get("kvarn", {})
        sink, recent = options.get("sink_blocks", 1), options.get("recent_blocks", 0)
        end = past + new
        _, k, v = self.vectors(self.tokens[name][:end], list(range(end)))
        k, v = k.double(), v.double()
        for tile in range(past // group):
            kept = tile < sink or tile >= past // group - recent
            if not (kept and tile * group >= self.first[name]):
                where = slice(tile * group, (tile + 1) * group)
                k[where], v[where] = ops.dequantize_tiles(
                    self.record(name, tile), self.fmt, dtype=torch.float32
                )
        expected, _ = stand_in.attention(
            q, k, v, self.fmt.head_dim**-0.5, past, True, self.window_left, self.soft_cap
        )
        error = (out.double() - expected).abs().max().item()
        assert error < TOLERANCE, f"{name}: {error} at {past} + {new}"
        self.seen["worst"] = max(self.seen["worst"], error)
        blocks = self.blocks[self.rows[name]]
        for tile in range(end // group):
            stored = self.layer.kv_cache[blocks[tile]].view(-1, self.fmt.record_bytes)
            assert torch.equal(stored, self.record(name, tile)[0]), f"{name}: tile {tile}"
