"""What the documents say to do with vLLM: the code runs, the commands are understood."""

from __future__ import annotations

import json
import shlex

import doc_blocks
import engine
import pytest
import vllm
from versions import serve_parser
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvarn import Format

BLOCKS = [block for page in doc_blocks.PAGES for block in doc_blocks.blocks(page)]
PYTHON = [b for b in BLOCKS if b.page.name == "vllm.md" and b.language == "python"]
COMMANDS = [
    line.split("#")[0]
    for block in BLOCKS
    if block.language == "sh"
    for line in block.code.replace("\\\n", " ").splitlines()
    if line.startswith("vllm serve ")
]


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_the_python_of(block, model, monkeypatch):
    made = []

    def llm(model, *, kv_cache_dtype, **arguments):  # as far as an engine goes without a GPU
        made.append(engine.engine_config(model, kv_cache_dtype, **arguments))

    monkeypatch.setattr(vllm, "LLM", llm)
    exec(compile(block.code, str(block), "exec"), {"model": model})
    (config,) = made
    assert config.cache_config.cache_dtype in Format.presets()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command(command, model):
    words = [model if word == "MODEL" else word for word in shlex.split(command)[2:]]
    args = serve_parser(FlexibleArgumentParser()).parse_args(words)
    assert args.model_tag == model
    args.model = model
    taken = EngineArgs.from_cli_args(args)
    config = engine.engine_config(
        taken.model,
        taken.kv_cache_dtype,
        max_num_seqs=taken.max_num_seqs,
        additional_config=taken.additional_config,
    )
    assert config.cache_config.cache_dtype in Format.presets()
    assert set(taken.additional_config) <= {"kvarn"}, json.dumps(taken.additional_config)


def test_there_are_some():
    assert PYTHON and len(COMMANDS) >= 3
