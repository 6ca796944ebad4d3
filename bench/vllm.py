"""``python -m bench.vllm``: decode throughput and capacity of a vLLM engine, by cache dtype.

One engine with random weights in the shape of a model; for each case ``batch:prompt:new`` that many
requests with random prompts and without prefix hits. What is measured begins when as many have a
token as will have one before the first is finished: all, or as many as the cache has room for. It
ends, and the requests with it, when the first is finished. Rows of op "vllm", saved after each
case; what is measured again, in the same process or another, is a further row. An engine takes
most of the GPU's memory, so a process has one: run it again for each cache dtype, with the same
``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import record
from kvarn import Format

#: The shape of Qwen3-8B. Where the folder is, is part of the name of what vLLM compiles and keeps:
#: the next process with the same cache dtype need not compile it.
_MODEL = Path(__file__).parent / "qwen3-8b"
_MAX_NUM_SEQS = 256
_CAPTURED = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]  #: batch sizes of the CUDA graphs


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
    """After a step of the engine that brought tokens."""

    seconds: float
    tokens: int  #: generated so far by all requests
    started: int  #: requests that have a token
    finished: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm", description=__doc__)
    parser.add_argument("--cache", default="auto", help="the cache dtype; auto: that of the model")
    parser.add_argument("--dtype", default="float16", help="of the model")
    parser.add_argument(
        "--model",
        type=Path,
        default=_MODEL,
        help="a folder with a config.json (default: Qwen3-8B's)",
    )
    parser.add_argument(
        "--cases", type=Case.parse, nargs="+", metavar="BATCH:PROMPT:NEW",
        default=[Case(64, 8192, 176), Case(16, 16384, 160), Case(256, 8192, 264)],
        help="default: so many tokens that all requests decode for about 128 steps, in which each "
        "fills one tile of 128; a case that is named twice is measured twice",
    )  # fmt: skip
    parser.add_argument("--engine", type=json.loads, default={}, help="arguments of LLM, as JSON")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--commit", help="what to record as the commit, where git is not at hand")
    args = parser.parse_args(argv)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    import torch
    import vllm

    llm = vllm.LLM(
        **{
            "model": str(args.model),
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
    facts = record.machine(torch.device("cuda"), args.commit) | {"vllm": vllm.__version__}
    measure(llm.llm_engine, args.cache, args.dtype, args.cases, facts, args.out)
    return 0


def measure(
    engine: Any,
    cache: str,
    dtype: str,
    cases: Sequence[Case],
    facts: dict[str, Any],
    out: Path | None,
) -> list[dict[str, Any]]:
    """Runs the cases one after another; returns their rows, which are printed and saved, too."""
    room = engine.vllm_config.cache_config
    vocabulary = engine.vllm_config.model_config.get_vocab_size()
    random = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        prompts = random.integers(vocabulary, size=(case.batch, case.prompt)).tolist()
        moments = generate(engine, f"{number}-", prompts, case.new)
        what = {"cache": cache, "dtype": dtype} | vars(case)
        earlier = [*rows, *(record.load(out)["rows"] if out and out.exists() else ())]
        runs = {row["case"].get("run", 1) for row in earlier if what.items() <= row["case"].items()}
        row = {
            "op": "vllm",
            "format": cache if cache in Format.presets() else None,
            "kv_tokens": room.num_gpu_blocks * room.block_size,
            "case": what | {"run": max(runs, default=0) + 1},
        }
        rows.append(row | summary(moments))
        print(json.dumps(rows[-1]), flush=True)
        if out:
            record.save(out, facts, rows)
    return rows


def generate(engine: Any, prefix: str, prompts: list[list[int]], new: int) -> list[Moment]:
    """Runs the requests until the first is finished, and aborts the others; seconds count from
    before they are added."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
    )
    names = [f"{prefix}{i}" for i in range(len(prompts))]
    begin = time.perf_counter()
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    tokens: dict[str, int] = {}
    moments: list[Moment] = []
    finished = 0
    while not finished and engine.has_unfinished_requests():
        outputs = engine.step()
        if not outputs:  # a step was begun and none has ended
            continue
        for output in outputs:
            tokens[output.request_id] = len(output.outputs[0].token_ids)
            finished += output.finished
        seconds = time.perf_counter() - begin
        moments.append(Moment(seconds, sum(tokens.values()), len(tokens), finished))
    engine.abort_request(names)
    for _ in range(4):  # steps that were begun before, and one in which the workers forget requests
        engine.step()
    return moments


def summary(moments: Sequence[Moment]) -> dict[str, Any]:
    """Rates while as many requests decode as ever do, without the first steps of that."""
    before = [m for m in moments if m.finished == 0]
    started = max((m.started for m in before), default=0)
    plateau = [m for m in before if m.started == started]
    steady = plateau[min(8, len(plateau) // 4) :]
    if len(steady) < 2:
        raise ValueError(f"{len(steady)} steps in which all requests decode: generate more tokens")
    seconds = np.diff([m.seconds for m in steady])
    generated = steady[-1].tokens - steady[0].tokens
    return {
        "tokens_per_s": round(generated / float(seconds.sum()), 1),
        "ms_per_step": round(1e3 * float(seconds.mean()), 3),
        "median_step_ms": round(1e3 * float(np.median(seconds)), 3),
        "steps": len(steady),
        "decoding": round(generated / len(seconds), 1),
        "prefill_s": round(plateau[0].seconds, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
