"""Every code block of README, CONTRIBUTING and docs runs.

A block says what it is, ```python, ```sh or ```text (a drawing: no code), so that none is missed:

- python: run block after block, page by page, on the CPU;
- sh: each command is run as far as its arguments: `make -n`, the argument parser of a
  `python -m ...`, the names of `pip install`.

So are commands within a sentence. Blocks about vLLM are run where it is: tests/vllm/test_docs.py.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doc_blocks import PAGES, ROOT, Block, blocks

ALL = [block for page in PAGES for block in blocks(page)]


def needs_vllm(block: Block) -> bool:
    return block.page.name == "vllm.md" and block.language == "python"


def python_pages() -> dict[Path, list[Block]]:
    found = [block for block in ALL if block.language == "python" and not needs_vllm(block)]
    return {
        page: [b for b in found if b.page == page]
        for page in PAGES
        if page in {b.page for b in found}
    }


@pytest.mark.parametrize("block", ALL, ids=str)
def test_every_block_says_what_it_is(block):
    assert block.language in {"python", "sh", "text"}
    if block.language == "text":  # no way to keep code from being run
        assert not re.search(
            r"^\s*(import |from \w+ import|def |\$ |make |pip |python )", block.code, re.M
        )


def test_pages_have_code():
    pages = {page.name for page in python_pages()}
    assert pages >= {
        "README.md",
        "integration.md",
        "format.md",
        "variants.md",
        "troubleshooting.md",
    }
    assert any(needs_vllm(block) for block in ALL)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\nx\n```\n", ["python"]),
        ("- a list\n\n  ```python\n  x\n  ```\n", ["python"]),
        ("~~~python\n```\n~~~\n", ["python"]),
        ("````py\n```\nx\n```\n````\n", ["py"]),
        ("```\nx\n```\n```sh\ny\n```\n", ["", "sh"]),
        ("```python no-run\nx\n```\n", ["python no-run"]),
        ("> ```python\n> x\n> ```\n", ["python"]),
    ],
)
def test_no_block_is_missed(tmp_path, text, found):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert [block.language for block in blocks(page)] == found


@pytest.fixture
def readme(tmp_path):
    """What README's lines about transformers take as given: the folder of a model, a prompt."""
    pytest.importorskip("transformers")
    import tiny_model

    return {
        "path": tiny_model.save(tmp_path / "model"),
        "inputs": {"input_ids": torch.randint(3, 100, (1, 150))},
    }


@pytest.mark.parametrize("page", python_pages(), ids=lambda page: page.name)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_python_of(page, request, capsys):
    namespace: dict[str, object] = {"__name__": page.stem}
    if page.name == "README.md":
        namespace |= request.getfixturevalue("readme")
    torch.manual_seed(0)
    for block in python_pages()[page]:
        if "transformers" in block.code:
            pytest.importorskip("transformers")
        # Blank lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)


# The commands -------------------------------------------------------------------------------------


def commands() -> dict[str, list[str]]:
    """Where a command stands -> its words: the lines of sh blocks, `make ...` within a sentence."""
    found = {}
    for block in ALL:
        if block.language == "sh":
            for i, line in enumerate(block.code.replace("\\\n", " ").splitlines()):
                if words := shlex.split(line, comments=True):
                    found[f"{block}+{i} {' '.join(words)}"] = words
    inline = re.compile(r"`((?:make|python -m|pip install|vllm serve) [^`\n]+)`")
    for page in PAGES:
        for match in inline.finditer(page.read_text()):
            found.setdefault(f"{page.name} {match[1]}", shlex.split(match[1]))
    return found


class Parsed(Exception):  # noqa: N818  (not an error)
    """The arguments are understood."""


def is_vllm(words: list[str]) -> bool:
    return words[:2] == ["vllm", "serve"]


@pytest.mark.parametrize("words", [pytest.param(v, id=k) for k, v in commands().items()])
def test_the_command(words, monkeypatch, capsys):
    while words and re.match(r"[A-Z_]+=", words[0]):  # variables before a command
        words = words[1:]
    match words:
        case ["make", *arguments]:
            run_make(arguments)
        case ["python", "-m", "pytest", *_]:
            pass
        case ["python", "-m", module, *arguments]:
            parse_arguments(module, arguments, monkeypatch)
        case ["python", script, *arguments]:
            monkeypatch.syspath_prepend(str(ROOT))
            parse_arguments(str(ROOT / script), arguments, monkeypatch)
        case ["pip", "install", *arguments]:
            check_pip(arguments)
        case ["cmake", "-S", folder, *_]:
            assert (ROOT / folder / "CMakeLists.txt").exists()
        case ["cmake", "--build" | "--install", *_] | ["git", "clone", *_] | ["cd", *_]:
            pass
        case _:
            assert is_vllm(words), f"not known to this test: {' '.join(words)}"


def run_make(arguments: list[str]) -> None:
    """`make -n`: the targets and what they depend on exist."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    command = ["make", "-n", f"PYTHON={sys.executable}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def parse_arguments(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a module up to the point where it has understood its arguments."""
    parse = argparse.ArgumentParser.parse_args
    if module.startswith("kvarn.studies"):
        pytest.importorskip("transformers")

    def stop(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    run = runpy.run_path if module.endswith(".py") else runpy.run_module
    with pytest.raises(Parsed):
        run(module, run_name="__main__")


def check_pip(arguments: list[str]) -> None:
    """Extras are those of pyproject.toml; files are those of the repository or of `make wheel`."""
    text = (ROOT / "pyproject.toml").read_text()
    optional = re.search(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.M | re.S)[1]
    for name in arguments:
        if extras := re.search(r"\[(.+)\]", name):
            for extra in extras[1].split(","):
                assert re.search(rf"^{extra} = ", optional, re.M), name
        assert re.match(r"--?\w|\.($|\[)|dist/kvarn-|[\w-]+[=<>,.*\[\]\w]*$", name), name
