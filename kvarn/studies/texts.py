"""Long texts that a Python installation or a Debian system has at hand."""

from __future__ import annotations

from pathlib import Path

_VIM_MANUAL_GLOB = "vim*/doc/usr_[0-9]*.txt"
_VIM_ROOT = Path("/usr/share/vim")


def python_reference() -> str:
    """Python's language reference, as ``help()`` shows it: the chapters on data and execution model
    (about 27,000 tokens)."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in ("objects", "types", "specialnames", "execmodel"))


def vim_manual() -> str | None:
    """The Vim user manual (Debian package ``vim-runtime``), chapters in order; None if absent."""
    chapters = sorted(_VIM_ROOT.glob(_VIM_MANUAL_GLOB))
    if not chapters:
        return None
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in chapters)
