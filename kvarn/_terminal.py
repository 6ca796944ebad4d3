"""Tables for the command line: by rich on a terminal if it is installed, in plain text else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec


@dataclass
class Table:
    """Rows of text under headings; the first column is set left, the others right."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    caption: str = ""
    left: Sequence[int] = (0,)
    #: rows that stand out (the numbers of them)
    strong: Sequence[int] = ()

    def print(self) -> None:
        if sys.stdout.isatty() and find_spec("rich"):
            self._print_rich()
        else:
            print(self.plain())

    def plain(self) -> str:
        cells = [list(self.columns), *map(list, self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]

        def line(row: Sequence[str]) -> str:
            padded = (
                cell.ljust(width) if i in self.left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            return "  ".join(padded).rstrip()

        rule = "  ".join("-" * width for width in widths)
        lines = [self.title, line(cells[0]), rule, *map(line, cells[1:])]
        return "\n".join([*lines, *([self.caption] if self.caption else []), ""])

    def _print_rich(self) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(
            title=escape(self.title),
            caption=escape(self.caption) or None,
            box=SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
            title_justify="left",
            title_style="bold",
            caption_justify="left",
        )
        for i, name in enumerate(self.columns):
            table.add_column(
                escape(name),
                justify="left" if i in self.left else "right",
                vertical="bottom",
                no_wrap=i == 0,
            )
        for i, row in enumerate(self.rows):
            table.add_row(*map(escape, row), style="bold" if i in self.strong else None)
        Console().print(table)


def binary_bytes(count: float) -> str:
    """``1536`` -> ``1.5 KiB``: three significant digits, units of 1024."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while abs(count) >= 999.5 and power + 1 < len(units):
        count /= 1024
        power += 1
    return f"{count:.3g} {units[power]}"
