"""The results of a study: a folder of small JSON files, one a configuration, so that a run that
was stopped goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvarn.studies.divergence import Trace
from kvarn.studies.intervals import BLOCK

SETTINGS = "settings.json"


class Results:
    """A folder with ``settings.json``, what every result was made with, and for each finished
    part ``<name>.json``.

    Raises:
        ValueError: the folder has results of other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / SETTINGS
        if path.exists():
            stored = json.loads(path.read_text())["settings"]
            if stored != settings:
                names = sorted(k for k in {*stored, *settings} if stored.get(k) != settings.get(k))
                raise ValueError(
                    f"out must be a folder for this study, got {folder} with results of another "
                    f"one ({', '.join(names)} differ)"
                )
        else:
            write(path, {"settings": settings, "facts": facts})

    def get(self, name: str) -> dict[str, Any] | None:
        """A part that was finished before, or None."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def put(self, name: str, part: dict[str, Any]) -> None:
        write(self.folder / f"{name}.json", part)


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON, whole or not at all."""
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(content, indent=None, separators=(",", ":")) + "\n")
    scratch.replace(path)


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """All parts of a folder by name, ``settings`` among them.

    Raises:
        ValueError: the folder holds no study.
    """
    if not (folder / SETTINGS).exists():
        raise ValueError(f"results must be a folder with {SETTINGS}, got {folder}")
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def blocks_of(trace: Trace) -> dict[str, list[float]]:
    """Means over blocks of 64 tokens: KL, top-1 agreement, and of what follows each token -log p.
    (The last token is followed by none: its block has one entry less.)"""

    def means(x: Tensor) -> list[float]:
        return [float(f"{part.double().mean():.5g}") for part in x.split(BLOCK) if len(part)]

    agree = trace.agree.float()
    return {"kl": means(trace.kl), "top1": means(agree), "nll": means(trace.nll)}


def series(part: dict[str, Any], measure: str, first: int = 0) -> list[Tensor]:
    """A measure of each segment of a part, means of blocks [blocks], from token ``first`` on."""
    return [
        torch.tensor(segment[measure][first // BLOCK :], dtype=torch.float64)
        for segment in part["segments"].values()
    ]
