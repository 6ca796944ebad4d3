"""The code blocks of README, CONTRIBUTING and docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])
#: Runs of three or more of ` or ~, at any depth of a list.
FENCE = re.compile(r"^[ \t>]*(?P<fence>`{3,}|~{3,}) *(?P<language>.*?) *$")


@dataclass(frozen=True)
class Block:
    """One block: the page, the number of its first line (from 1), what it says it is, its text."""

    page: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    start, fence, language = 0, "", ""
    for number, line in enumerate(lines, 1):
        found = FENCE.match(line)
        if not fence and found:
            start, fence, language = number + 1, found["fence"], found["language"]
        elif fence and found and not found["language"] and found["fence"].startswith(fence):
            yield Block(page, start, language, "\n".join(lines[start - 1 : number - 1]) + "\n")
            fence = ""
    assert not fence, f"{page.name}:{start - 1}: the block does not end"
