"""``python -m bench.vllm``: decode throughput and capacity of a vLLM engine, by cache dtype.

One engine with random weights in the shape of a model; for each case ``batch:prompt:new`` that many
requests with random prompts and without prefix hits, from the moment when all have a token until
the first is finished. Rows of op "vllm". An engine takes most of the GPU's memory, so a process has
one: run it again for each cache dtype, with the same ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import record
from kvarn import Format

#: Of Qwen3-8B.
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
_MAX_NUM_SEQS = 256
_CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128, 256]  #: batch sizes of the CUDA graphs


@dataclass(frozen=True)
class Case:
    batch: int
    prompt: int  #: tokens
    new: int  #: tokens to generate

    @staticmethod
    def parse(text: str) -> Case:
        return Case(*(int(number) for number in text.split(":")))


@dataclass(frozen=True)
class Moment:
    """After a step of the engine."""

    seconds: float
    tokens: int  #: generated so far by all requests
    started: int  #: requests that have a token
    finished: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm", description=__doc__)
    parser.add_argument("--cache", default="auto", help="the cache dtype; auto: that of the model")
    parser.add_argument("--dtype", default="float16", help="of the model")
    parser.add_argument("--model", help="a folder with a config.json (default: Qwen3-8B's)")
    parser.add_argument(
        "--cases", type=Case.parse, nargs="+", metavar="BATCH:PROMPT:NEW",
        default=[Case(64, 8192, 256), Case(16, 16384, 256)],
    )  # fmt: skip
    parser.add_argument("--engine", type=json.loads, default={}, help="arguments of LLM, as JSON")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--commit", help="what to record as the commit, where git is not at hand")
    args = parser.parse_args(argv)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    import torch
    import vllm

    facts = record.machine(torch.device("cuda"), args.commit) | {"vllm": vllm.__version__}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        llm = vllm.LLM(
            **{
                "model": args.model or folder,
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "dtype": args.dtype,
                "kv_cache_dtype": args.cache,
                "gpu_memory_utilization": 0.9,
                "enable_prefix_caching": False,
                "max_num_seqs": _MAX_NUM_SEQS,
                "compilation_config": {"cudagraph_capture_sizes": _CAPTURED},
                "disable_log_stats": True,
                "seed": 0,
            }
            | args.engine
        )
    engine = llm.llm_engine
    cache = engine.vllm_config.cache_config
    common = {
        "op": "vllm",
        "format": args.cache if args.cache in Format.presets() else None,
        "kv_tokens": cache.num_gpu_blocks * cache.block_size,
    }
    vocabulary = engine.vllm_config.model_config.get_vocab_size()
    random = np.random.default_rng(1)
    rows = []
    for number, case in enumerate(args.cases):
        prompts = random.integers(vocabulary, size=(case.batch, case.prompt)).tolist()
        moments = generate(engine, f"{number}-", prompts, case.new)
        what = {"cache": args.cache, "dtype": args.dtype} | vars(case)
        rows.append(common | {"case": what} | summary(moments, case.batch))
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            record.save(args.out, facts, rows)
    return 0


def generate(engine: Any, prefix: str, prompts: list[list[int]], new: int) -> list[Moment]:
    """Runs the requests to their end; seconds count from before they are added."""
    import torch
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
    )
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{prefix}{i}", {"prompt_token_ids": prompt}, sampling)
    tokens: dict[str, int] = {}
    moments: list[Moment] = []
    finished = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = len(output.outputs[0].token_ids)
            finished += output.finished
        seconds = time.perf_counter() - begin
        moments.append(Moment(seconds, sum(tokens.values()), len(tokens), finished))
    return moments


def summary(moments: Sequence[Moment], batch: int) -> dict[str, Any]:
    """Rates while all ``batch`` requests decode, without the first steps of that."""
    steady = [m for m in moments if m.started == batch and m.finished == 0]
    steady = steady[min(8, len(steady) // 4) :]
    if len(steady) < 2:
        raise ValueError(f"{len(steady)} steps in which all requests decode: generate more tokens")
    seconds = np.diff([m.seconds for m in steady])
    generated = steady[-1].tokens - steady[0].tokens
    return {
        "tokens_per_s": round(generated / float(seconds.sum()), 1),
        "ms_per_step": round(1e3 * float(seconds.mean()), 3),
        "median_step_ms": round(1e3 * float(np.median(seconds)), 3),
        "steps": len(steady),
        "prefill_s": round(next(m.seconds for m in moments if m.started == batch), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
