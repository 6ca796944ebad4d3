"""Every Python block of README and docs runs, block after block, on the CPU.

A block that starts with ```python no-run is left out: it needs a model that is not here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
BLOCK = re.compile(r"^```python *\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line, code) of each block."""
    text = page.read_text()
    return [(text.count("\n", 0, m.start(1)), m.group(1)) for m in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.name)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_code_of(page):
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": page.stem}
    for line, code in blocks(page):
        # Blank lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_pages_have_code():
    assert {page.name for page in PAGES if blocks(page)} >= {"README.md", "integration.md"}
