"""Installs a wheel or an sdist into a new environment of each Python and torch, and tries it.

    python tests/install/matrix.py dist/kvarn-*.whl dist/kvarn-*.tar.gz \
        --python python3.10 python3.13 --torch 2.11.0 2.13.0

In each: `pip check`, `python -m kvarn info`, and the quick tests of the CPU, from a folder in
which no source of kvarn is. An sdist is built without CUDA, as on a machine that has none. Prints a
row of a table for each, with what `info` says is missing; the exit status is 1 if anything failed.

torch comes from uv where that is on the PATH (its environments share files; a torch with CUDA takes
5 GB), otherwise from pip.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICK = ("build", "docs", "format", "golden", "pack", "records")
KINDS = {"wheel": ".whl", "sdist": ".gz"}
BUILD_TOOLS = ("setuptools >= 77", "ninja")  # and torch and numpy: pyproject.toml


class FailedError(Exception):
    """A command did not exit with 0."""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command prints; raises FailedError with its last lines."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-15:])
        raise FailedError(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{last}")
    return done.stdout


def environment(python: str, torch: str, folder: Path) -> Path:
    """The Python of a virtual environment with torch and pytest, made if it is not there."""
    version = run(python, "-c", "import platform; print(platform.python_version())", cwd=ROOT)
    home = folder / f"{version.strip()}-{torch}"
    inside = home / "bin/python"
    if not inside.exists():
        run(python, "-m", "venv", home, cwd=ROOT)
    wanted = (f"torch=={torch}", "numpy", "pytest", "hypothesis", *BUILD_TOOLS)
    if uv := shutil.which("uv"):
        run(uv, "pip", "install", "-q", "--python", inside, *wanted, cwd=folder)
    else:
        run(inside, "-m", "pip", "install", "-q", *wanted, cwd=folder)
    return inside


def tests_without_source(sdist: Path, folder: Path) -> Path:
    """The sdist, unpacked, without the package: what is imported is what is installed."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    home = next(folder.iterdir())
    shutil.rmtree(home / "kvarn")
    return home


def row(python: Path, archive: Path, tests: Path) -> str:
    """Installs one archive into one environment and tries it."""
    without_cuda = {"CUDA_HOME": ""} if archive.suffix == ".gz" else {}
    pip = (python, "-m", "pip")
    run(*pip, "install", "-q", "--force-reinstall", "--no-deps", "--no-build-isolation", archive,
        cwd=tests, **without_cuda)  # fmt: skip
    run(*pip, "check", cwd=tests)
    report = json.loads(run(python, "-m", "kvarn", "info", "--json", cwd=tests))
    states = [check["state"] for check in report["checks"] if check["device"] == "cpu"]
    if set(states) != {"ok"}:
        raise FailedError(f"kvarn info: {states}")
    names = [f"tests/test_{name}.py" for name in QUICK]
    passed = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names, cwd=tests)
    facts = report["facts"]
    words = "; ".join(report["missing"]) or "nothing"
    kind = "wheel" if archive.suffix == ".whl" else "sdist, no nvcc"
    counts = ", ".join(re.findall(r"\d+ (?:passed|skipped)", passed.splitlines()[-1]))
    cells = (facts["Python"], facts["torch"], kind, words, counts)
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archives", nargs="+", type=Path, help="wheels and one sdist")
    parser.add_argument("--python", nargs="+", default=["python3"], help="interpreters")
    parser.add_argument("--torch", nargs="+", default=["2.13.0"], help="versions")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="to install")
    parser.add_argument("--keep", type=Path, help="a folder for the environments, to use again")
    args = parser.parse_args()
    archives = [path.resolve() for path in args.archives]
    sdist = next(path for path in archives if path.suffix == KINDS["sdist"])
    wanted = [path for path in archives if path.suffix in {KINDS[kind] for kind in args.kind}]
    failed = 0
    print("| Python | torch | installed from | `kvarn info`: missing | quick tests |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        tests = tests_without_source(sdist, Path(scratch, "tests"))
        keep = (args.keep or Path(scratch, "environments")).resolve()
        keep.mkdir(parents=True, exist_ok=True)
        for torch in args.torch:
            for python in args.python:
                for archive in wanted:
                    try:
                        print(row(environment(python, torch, keep), archive, tests), flush=True)
                    except FailedError as error:
                        failed += 1
                        print(f"| {python} | {torch} | {archive.name} | FAILED | {error} |")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
