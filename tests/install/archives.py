"""What a wheel and an sdist of kvarn must be: looks into them, installs nothing.

    python tests/install/archives.py dist/kvarn-*.whl dist/kvarn-*.tar.gz

Prints sizes and facts, then what is wrong; the exit status is 1 if anything is. Needs git, binutils
and a checkout, with which the sdist is compared.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARIES = {"kvarn/_host.abi3.so", "kvarn/_ops_cpu.so", "kvarn/_ops_cuda.so"}
NOT_IN_SDIST = re.compile(r"\.ci/|\.gitignore$")
ADDED_BY_SETUPTOOLS = re.compile(r"PKG-INFO$|setup\.cfg$|kvarn\.egg-info/")
#: What the libraries may be linked to: the system's own, and what every torch has.
NEEDED = re.compile(r"lib(c|m|gcc_s|stdc\+\+|dl|rt|pthread|torch|torch_cpu)\.so|ld-linux")
#: Folders of whoever builds: where this checkout is, and where others are.
FOLDERS = "|".join(map(re.escape, (str(ROOT), "/home", "/root", "/tmp", "/usr", "/opt", "/build")))
BUILD_PATHS = re.compile(rb"[\x20-\x7e]*(?:%s)/[\x20-\x7e]+" % FOLDERS.encode())


def fatbins(library: bytes) -> Iterator[str]:
    """ "sm_80" (machine code) or "compute_80" (PTX) of each piece of code in a library.

    A fat binary is a 16-byte header (magic, version, header size, payload size) and entries of a
    kind (1 PTX, 2 ELF), header and payload size, architecture and flags (bit 20: the `a` variant).
    """
    magic = struct.pack("<I", 0xBA55ED50)
    at = library.find(magic)
    while at >= 0:
        header, payload = struct.unpack_from("<6xHQ", library, at)
        entry, end = at + header, at + header + payload
        while entry < end:
            kind, header, size = struct.unpack_from("<H2xIQ", library, entry)
            architecture, flags = struct.unpack_from("<I8xQ", library, entry + 28)
            name = {1: "compute_", 2: "sm_"}[kind] + str(architecture)
            yield name + ("a" if flags & 1 << 20 else "")
            entry += header + size
        at = library.find(magic, end)


def paths_in(library: bytes) -> Iterator[str]:
    """What looks like a file on the machine that built a library."""
    yield from sorted({text.decode() for text in BUILD_PATHS.findall(library)})


def code_of(architectures: str) -> set[str]:
    """cmake/architectures.txt: "80 90a-real" -> sm_80, compute_80, sm_90a."""
    code = set()
    for name in architectures.split():
        code.add("sm_" + name.removesuffix("-real"))
        if not name.endswith("-real"):
            code.add("compute_" + name)
    return code


def readelf(*arguments: str) -> str:
    return subprocess.run(["readelf", "-W", *arguments], check=True, stdout=subprocess.PIPE,
                          text=True).stdout  # fmt: skip


def library_problems(path: Path, code: set[str]) -> Iterator[str]:
    dynamic = readelf("-d", str(path))
    for name in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic):
        if not NEEDED.match(name):
            yield f"{path.name} needs {name}"
    for line in re.findall(r".*\((?:RPATH|RUNPATH)\).*", dynamic):
        yield f"{path.name} has a search path: {line.strip()}"
    image = path.read_bytes()
    for text in paths_in(image):
        yield f"{path.name} holds the path {text}"
    if path.name == "_ops_cuda.so" and set(fatbins(image)) != code:
        yield f"{path.name} holds {sorted(set(fatbins(image)))}, not {sorted(code)}"


def glibc_of(path: Path) -> tuple[int, ...]:
    found = re.findall(r"GLIBC_(\d+)\.(\d+)", readelf("-V", str(path)))
    return max(tuple(map(int, version)) for version in found)


def wheel_problems(wheel: Path, code: set[str]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        files = {p.relative_to(folder).as_posix() for p in Path(folder).rglob("*") if p.is_file()}
        info = next(name.split("/")[0] for name in files if name.endswith(".dist-info/WHEEL"))
        sources = {str(p) for p in tracked() if p.startswith("kvarn/")}
        libraries = LIBRARIES if code else LIBRARIES - {"kvarn/_ops_cuda.so"}
        package = {name for name in files if not name.startswith(info)}
        yield from differences("the wheel", package, sources | libraries)
        tag = re.search(r"^Tag: (.+)$", (Path(folder) / info / "WHEEL").read_text(), re.M)[1]
        if not tag.startswith("cp310-abi3-linux_"):
            yield f"the wheel's tag is {tag}"
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; unpacked:")
        for path in sorted(Path(folder, "kvarn").glob("*.so")):
            glibc = ".".join(map(str, glibc_of(path)))
            held = " ".join(sorted(set(fatbins(path.read_bytes()))))
            print(f"  {path.name}: {path.stat().st_size:,} bytes, glibc {glibc} {held}".rstrip())
            yield from library_problems(path, code)


def sdist_problems(sdist: Path) -> Iterator[str]:
    with tarfile.open(sdist) as archive:
        names = {m.name.split("/", 1)[1] for m in archive.getmembers() if m.isfile()}
    print(f"{sdist.name}: {sdist.stat().st_size:,} bytes, {len(names)} files")
    found = {name for name in names if not ADDED_BY_SETUPTOOLS.match(name)}
    yield from differences("the sdist", found, {p for p in tracked() if not NOT_IN_SDIST.match(p)})


def differences(what: str, found: set[str], expected: set[str]) -> Iterator[str]:
    for name in sorted(expected - found):
        yield f"{what} lacks {name}"
    for name in sorted(found - expected):
        yield f"{what} holds {name}, which is not in the repository"


def tracked() -> list[str]:
    return subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, stdout=subprocess.PIPE,
                          text=True).stdout.splitlines()  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archives", nargs="+", type=Path)
    parser.add_argument(
        "--architectures",
        default=(ROOT / "cmake/architectures.txt").read_text(),
        help="as in cmake/architectures.txt; '' for a wheel that was built without nvcc",
    )
    args = parser.parse_args()
    problems = []
    for path in args.archives:
        wheel = path.suffix == ".whl"
        problems += wheel_problems(path, code_of(args.architectures)) if wheel else (
            sdist_problems(path))  # fmt: skip
    for problem in problems:
        print(f"WRONG: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
