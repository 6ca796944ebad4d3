"""bench.vllm with vLLM's engine, scheduler and KV cache manager; what runs the model is replaced by
tokens after known times."""

from __future__ import annotations

import json
from concurrent.futures import Future

import engine  # noqa: F401  (installs the stand-ins)
import pytest
import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.envs import disable_envs_cache
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from bench import vllm as bench

BLOCK = 16
ROOM = 40  # blocks


class Clock:
    """The time of `bench.vllm`: a millisecond a step and a tenth of one a token."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


clock = Clock()


class TokensOnly(Executor):
    """Workers without a model."""

    def _init_executor(self) -> None:
        self.lengths: dict[str, int] = {}
        self.steps: list[dict[str, int]] = []

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False, **_):
        return [getattr(self, f"_{method}", lambda *_: None)(*args)]

    def _get_kv_cache_spec(self):
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float16
        )
        return {"layer": spec}

    def _get_supported_kv_cache_layouts(self):
        return ["LBNHC"]

    def _determine_available_memory(self):
        return ROOM * 2 * BLOCK * 2 * 64 * 2

    def initialize_from_config(self, kv_cache_configs) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    @property
    def supported_tasks(self):
        return ("generate",)

    def check_health(self) -> None:
        pass

    def execute_model(self, scheduler_output, non_block=False):
        self.planned = scheduler_output
        nothing = scheduler_output.total_num_scheduled_tokens == 0
        return self._done(EMPTY_MODEL_RUNNER_OUTPUT if nothing else None, non_block)

    def sample_tokens(self, grammar_output, non_block=False):
        planned = self.planned
        for name in planned.preempted_req_ids or ():
            self.lengths.pop(name)
        computed = {}
        for new in planned.scheduled_new_reqs:
            ids = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            self.lengths[new.req_id] = len(ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = planned.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        counts = planned.num_scheduled_tokens
        self.steps.append(dict(counts))
        clock.now += 1e-3 + 1e-4 * sum(counts.values())
        names = list(counts)
        sampled = [[7] if computed[n] + counts[n] >= self.lengths[n] else [] for n in names]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        return self._done(output, non_block)

    @staticmethod
    def _done(result, non_block):
        if not non_block:
            return result
        future = Future()
        future.set_result(result)
        return future

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def llm(model, request, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(bench, "time", clock)
    arguments = EngineArgs(
        model=model, load_format="dummy", skip_tokenizer_init=True, dtype="float16",
        max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False,
        distributed_executor_backend=TokensOnly, async_scheduling=request.param, block_size=BLOCK,
        disable_log_stats=True,
    )  # fmt: skip
    yield LLMEngine.from_engine_args(arguments)
    disable_envs_cache()  # an engine keeps the environment as it found it, also for other tests


def test_cases_follow_each_other(llm, tmp_path):
    """All requests at once, then more than there is room for, then the first case again."""
    out = tmp_path / "engine.json"
    facts = {"torch": "1", "commit": "2", "date": "3", "gpu": "G", "vllm": "4"}
    cases = [bench.Case(2, 100, 40), bench.Case(8, 120, 40), bench.Case(2, 100, 40)]
    bench.measure(llm, "auto", "float16", cases, facts, out)
    first, many, again = json.loads(out.read_text())["rows"]
    assert not llm.has_unfinished_requests()
    scheduler = llm.engine_core.engine_core.scheduler
    assert not scheduler.has_requests()
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == ROOM - 1

    assert first["kv_tokens"] == ROOM * BLOCK
    # Two tokens a step, of 1.2 ms.
    assert first["decoding"] == 2 and first["ms_per_step"] == pytest.approx(1.2)
    assert first["tokens_per_s"] == pytest.approx(2 / 1.2e-3, rel=1e-3)
    assert {k: v for k, v in again.items() if k != "case"} == {
        k: v for k, v in first.items() if k != "case"
    } | {"prefill_s": again["prefill_s"]}
    assert [row["case"]["run"] for row in (first, many, again)] == [1, 1, 2]
    # 39 blocks of 16 tokens: four prompts of 120 tokens, and what they grow by.
    assert 3 <= many["decoding"] <= 4
    assert many["tokens_per_s"] == pytest.approx(many["decoding"] * 1e3 / many["ms_per_step"], 0.02)


def test_too_few_tokens(llm):
    moments = bench.generate(llm, "x", [[1] * 100] * 2, 2)
    with pytest.raises(ValueError, match="generate more tokens"):
        bench.summary(moments)


@pytest.mark.parametrize("cache", ["auto", "kvarn_k4v2_g128"])
def test_command(cache, tmp_path, monkeypatch, capsys):
    """The whole of it, with the shape that it has by default."""
    facts = {"torch": "1", "commit": "2", "date": "3", "gpu": "G"}
    monkeypatch.setattr(bench.record, "machine", lambda device, commit: facts)
    monkeypatch.setattr(bench, "time", clock)
    out = tmp_path / "engine.json"
    workers = {"distributed_executor_backend": "test_bench.TokensOnly", "max_model_len": 512}
    arguments = [
        "--cache",
        cache,
        "--engine",
        json.dumps(workers),
        "--out",
        str(out),
        "--commit",
        "c",
    ]
    assert bench.main([*arguments, "--cases", "2:100:40", "1:50:20"]) == 0
    assert bench.main([*arguments, "--cases", "2:100:40"]) == 0
    disable_envs_cache()
    found = json.loads(out.read_text())
    assert found["vllm"] == vllm.__version__
    cases = [(row["case"]["batch"], row["case"]["run"], row["format"]) for row in found["rows"]]
    preset = None if cache == "auto" else cache
    assert cases == [(2, 1, preset), (1, 1, preset), (2, 2, preset)]
    assert {row["case"]["cache"] for row in found["rows"]} == {cache}
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith('{"op"')]
    assert [json.loads(line) for line in printed] == found["rows"]
