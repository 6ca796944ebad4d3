"""One page of HTML with everything that a study found: no network, no other file."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path

from kvarn._terminal import Table
from kvarn.studies import figures, summary
from kvarn.studies.summary import Parts

_ERROR = ("pareto", "position", "attention")
_WHY = ("channels", "codes")


def write(parts: Parts, drawn: Mapping[str, str], path: Path) -> None:
    """Writes the report of a study's parts; ``drawn``: of `kvarn.studies.figures.draw`."""
    pictures = {name: _figure(name, svg) for name, svg in drawn.items()}
    tables = {table.title: table for table in summary.tables(parts)}
    claims = next((t for name, t in tables.items() if name.startswith("What holds")), None)
    found = parts["settings"]["facts"]
    texts = {
        "TITLE": escape(summary.title(parts)),
        "FACTS": escape(f"kvarn {found['kvarn']}, torch {found['torch']}, {found['date']}"),
        "CLAIMS": pictures.get("choices", "") + (_claims(claims) if claims else ""),
        "ERROR": "".join(pictures.get(name, "") for name in _ERROR),
        "WHY": "".join(pictures.get(name, "") for name in _WHY),
        "TABLES": "".join(_table(table) for table in tables.values() if table is not claims),
    }
    html = files("kvarn.studies").joinpath("report.html").read_text(encoding="utf-8")
    for name, text in texts.items():
        html = html.replace(f"@@{name}@@", text)
    path.write_text(html, encoding="utf-8")


def _figure(name: str, svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    # As an image: the style sheets and names inside of one SVG do not reach the others.
    data = base64.b64encode(svg.encode()).decode()
    caption = escape(figures.CAPTIONS[name])
    return (
        f'<figure id="figure-{name}"><img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>\n"
    )


def _table(table: Table, last_is_verdict: bool = False) -> str:
    def row(cells: tuple[str, ...] | list[str], tag: str) -> str:
        made = []
        for i, cell in enumerate(cells):
            names = ["left"] if i in table.left else []
            if last_is_verdict and tag == "td" and i == len(cells) - 1:
                names.append(f"verdict-{cell.split()[0]}")
            made.append(f'<{tag} class="{" ".join(names)}">{escape(cell)}</{tag}>')
        return f"<tr>{''.join(made)}</tr>"

    body = "\n".join(row(list(cells), "td") for cells in table.rows)
    note = f'<p class="note">{escape(table.caption)}</p>' if table.caption else ""
    head = row(list(table.columns), "th")
    return (
        f'<div class="scroll"><table><caption>{escape(table.title)}</caption>'
        f"<thead>{head}</thead>\n<tbody>{body}</tbody></table></div>{note}\n"
    )


def _claims(table: Table) -> str:
    return _table(table, last_is_verdict=True)
