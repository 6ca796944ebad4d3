"""The JSON that a run leaves behind (docs/benchmarks.md describes the fields)."""

from __future__ import annotations

import datetime
import json
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """What the numbers were measured on. The commit is git's, with a + if the checkout has
    changes."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "commit": commit
        or _git("rev-parse", "--short=12", "HEAD") + ("+" if _git("status", "-s") else ""),
        "date": datetime.date.today().isoformat(),
    }
    if device.type == "cuda":
        facts |= {
            "gpu": torch.cuda.get_device_name(device),
            # A line for each GPU, all the same.
            "driver": _run(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
            ).partition("\n")[0],
            "cuda": torch.version.cuda,
        }
    else:
        from kvarn import _host

        facts |= {
            "cpu": _cpu_name(),
            "threads": torch.get_num_threads(),
            "isa": _host.cpu_isa(),
        }
    return facts


def slug(facts: dict[str, Any]) -> str:
    """The folder of bench/results for this machine: h200, cpu-amd-epyc, ..."""
    name = facts.get("gpu") or f"cpu {facts['cpu']}"
    words = re.sub(r"nvidia|\(r\)|\(tm\)|[^a-z0-9]+", " ", name.lower()).split()
    return "-".join(words)


def save(path: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One JSON object. Earlier rows of other cases stay if they were measured on the same machine,
    versions and commit; rows that were not would be given a wrong origin, and go."""
    if path.exists():
        earlier = load(path)
        if _origin(earlier) == _origin(facts):
            mine = {key(row) for row in rows}
            rows = [*(row for row in earlier["rows"] if key(row) not in mine), *rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


def _origin(facts: dict[str, Any]) -> dict[str, Any]:
    """What two runs must have in common to be one result."""
    return {k: v for k, v in facts.items() if k not in ("date", "ceiling_gbps", "rows")}


def key(row: dict[str, Any]) -> str:
    """What names a measurement: op, format and case."""
    return json.dumps([row["op"], row["format"], row["case"]], sort_keys=True)


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"model name\s*:\s*(.+)", text)
    return match[1].strip() if match else platform.machine()


def _git(*args: str) -> str:
    return _run("git", "-C", str(Path(__file__).parent), *args)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
