"""What the build promises: faults.md class 27, the stable ABI, layers, one source list."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shutil
import struct
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import setuptools
import torch
from install import archives

import kvarn
from kvarn import _backends, _host, _load

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
PACKAGE = Path(kvarn.__file__).parent
OP_LIBRARIES = sorted(PACKAGE.glob("_ops_*.so"))


def run(*command: str | Path) -> str:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_version_has_one_source():
    header = (CSRC / "include/kvarn/version.h").read_text()
    version = re.search(r'KVARN_VERSION "(.+)"', header).group(1)
    assert kvarn.__version__ == _host.version == _host.build_info()["version"] == version
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: _host.record_layout(5, 2, 128, 96),
            "kvarn::record_layout: key_bits, value_bits, group, head_dim must be valid_bits, "
            "valid_bits, valid_groups, valid_head_dims, got 5, 2, 128, 96",
        ),
        (
            lambda: _host.key_position(0, 64, 64),
            "kvarn::key_position: channel must be in [0, head_dim), got 64",
        ),
        (
            lambda: _host.value_position(-1, 0, 64),
            "kvarn::value_position: token must not be negative, got -1",
        ),
        (
            lambda: _host.value_position(0, 0, 0),
            "kvarn::value_position: head_dim must be one of valid_head_dims, got 0",
        ),
        (
            lambda: _host.field_position(0, 0),
            "kvarn::field_position: bits must be one of valid_bits, got 0",
        ),
        (
            lambda: _host.word_offset(0, 32),
            "kvarn::word_offset: lane must be in [0, 32), got 32",
        ),
    ],
)
def test_host_errors_in_words(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message


def test_source_list_is_complete():
    rows = [
        line.split()
        for line in (ROOT / "cmake/sources.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    shared = [["host", "csrc/cpu/isa.cpp"]]  # tells which instruction set this machine has
    rows = [row for row in rows if row not in shared]
    listed = [path for _, path in rows]
    found = [str(p.relative_to(ROOT)) for p in CSRC.rglob("*") if p.suffix in {".cpp", ".cu"}]
    assert sorted(listed) == sorted(found)
    folders = {"cpu": "cpu", "cuda": "cuda", "host": "python", "torch_cpu": "torch"}
    for library, path in rows:
        assert path.startswith(f"csrc/{folders.get(library, 'torch')}/"), path


def includes(folder: str) -> set[tuple[str, str]]:
    """(file, what it includes) of every source file below csrc/<folder>."""
    return {
        (str(path.relative_to(ROOT)), name)
        for path in (CSRC / folder).rglob("*")
        if path.is_file()
        for name in re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), re.M)
    }


@pytest.mark.parametrize(("table", "row"), [("BITS", 5), ("GROUP", 256), ("HEAD_DIM", 1024)])
@pytest.mark.parametrize("header", ["encode.h", "attention_plan.h"])
def test_a_row_of_the_variant_table_alone_does_not_compile(tmp_path, header, table, row):
    """Scratch memory of the CPU kernels is of the largest variant: more would overrun it."""
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler")
    (tmp_path / "kvarn").mkdir()
    command = [compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", f"-I{tmp_path}",
               f"-I{CSRC}", f"-I{CSRC / 'include'}", str(CSRC / "cpu" / header)]  # fmt: skip
    variants = (CSRC / "include/kvarn/variants.h").read_text()
    start = f"#define KVARN_FOR_EACH_{table}(X)"
    for text in (variants, variants.replace(start, f"{start} X({row})")):
        (tmp_path / "kvarn/variants.h").write_text(text)
        done = subprocess.run(command, capture_output=True, text=True)
        known = text == variants or (header, table) == ("attention_plan.h", "BITS")
        assert (done.returncode == 0) == known, done.stderr
        assert known or "docs/variants.md" in done.stderr


@pytest.mark.parametrize(
    ("folder", "own"),
    [
        ("include", ("kvarn/",)),
        ("device", ("kvarn/", "device/")),
        ("cuda", ("kvarn/", "device/", "cuda/")),
        ("cpu", ("kvarn/", "cpu/")),
        ("torch", ("kvarn/", "torch/")),
        ("python", ("kvarn/",)),
    ],
)
def test_layers_know_only_those_below(folder, own):
    found = includes(folder)
    assert found
    for path, name in found:
        if "/" in name:
            assert name.startswith(own), f"{path} must not include {name}"
        elif name.startswith("cu"):
            assert folder in {"device", "cuda"}, f"{path} must not include {name}"
        if folder == "torch":
            assert not name.endswith(".cuh"), f"{path} must not include {name}"


def test_torch_layer_uses_the_stable_abi_only():
    allowed = ("torch/csrc/stable/", "torch/csrc/inductor/aoti_torch/c/", "torch/headeronly/")
    own = {f"torch/{p.name}" for p in (CSRC / "torch").iterdir()}
    for path, name in includes("torch"):
        if name.startswith("torch/") and name not in own:
            assert name.startswith(allowed), f"{path} includes {name}"


@pytest.mark.parametrize("library", OP_LIBRARIES, ids=lambda p: p.stem)
def test_fault27_op_libraries_have_no_unstable_torch_symbol(library):
    symbols = run("nm", "-CD", library)
    assert "aoti_torch_" in symbols
    assert re.findall(r".*\b(?:at|c10)::.*", symbols + run("nm", "-C", library)) == []


@pytest.mark.parametrize("library", OP_LIBRARIES, ids=lambda p: p.stem)
def test_fault27_op_libraries_need_no_cuda_and_no_python_library(library):
    needed = re.findall(r"NEEDED.*\[(.+)\]", run("readelf", "-d", library))
    assert needed
    for name in needed:
        assert not re.match(r"lib(cuda|cudart|nvrtc|python|torch_python|torch_cuda|c10)", name)


@pytest.mark.parametrize("library", sorted(PACKAGE.glob("*.so")), ids=lambda p: p.stem)
def test_libraries_hold_no_path_of_the_build_machine(library):
    assert list(archives.paths_in(library.read_bytes())) == []


def test_one_build_serves_every_python():
    assert [path.name for path in PACKAGE.glob("_host*.so")] == ["_host.abi3.so"]
    symbols = run("nm", "-D", "--undefined-only", PACKAGE / "_host.abi3.so")
    names = set(re.findall(r" U (_?Py\w+)", symbols))
    assert names and not [
        name for name in names if name.startswith("_Py") and name != "_Py_Dealloc"
    ]


@pytest.mark.parametrize(
    ("architectures", "code"),
    [
        ("80 90a-real", {"sm_80", "compute_80", "sm_90a"}),
        ("90a-real", {"sm_90a"}),
        ("", set()),
    ],
)
def test_code_of_architectures(architectures, code):
    assert archives.code_of(architectures) == code


def test_fatbins_are_told_apart():
    def entry(kind: int, architecture: int, flags: int, size: int) -> bytes:
        return (
            struct.pack("<HHIQ12xI8xQ16x", kind, 257, 64, size, architecture, flags) + b"x" * size
        )

    def fatbin(*entries: bytes) -> bytes:
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)

    first = fatbin(entry(2, 80, 0x11, 24), entry(1, 80, 0x8011, 8))
    image = b"\x7fELF" + first + b"\0" * 9 + fatbin(entry(2, 90, 0x100011, 16)) + b"\0"
    assert list(archives.fatbins(image)) == ["sm_80", "compute_80", "sm_90a"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"\0/home/me/kvarn/csrc/torch/ops_cpu.cpp\0", 1),
        (b"\0file:///build/x/y.h\0", 1),
        (b"\0" + bytes(ROOT / "csrc/cpu/pack.cpp") + b"\0", 1),
        (
            b"\0csrc/torch/ops_cpu.cpp\0torch/include/torch/csrc/stable/ops.h\0/lib64/ld-linux.so.2",
            0,
        ),
    ],
)
def test_paths_of_build_machines_are_seen(text, found):
    assert len(list(archives.paths_in(text))) == found


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"CUDA_HOME": ""}, "no nvcc found (or CUDA_HOME is empty): building without the CUDA lib"),
        ({"CUDA_HOME": "/nowhere"}, "CUDA_HOME is /nowhere, without bin/nvcc or "),
    ],
)
def test_a_stated_cuda_home_is_taken_or_refused(environment, words):
    """No other nvcc is taken in its place."""
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert words in done.stdout + done.stderr
    assert (done.returncode == 0) == (environment["CUDA_HOME"] == "")


def test_an_earlier_build_does_not_hide_a_later_one(tmp_path, monkeypatch):
    """Of two libraries, Python imports that of its own version."""
    made = {}
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.setattr(setuptools, "setup", made.update)
    runpy.run_path(str(ROOT / "setup.py"))
    monkeypatch.chdir(tmp_path)
    names = [f"_host{suffix}" for suffix in EXTENSION_SUFFIXES]
    assert names.index("_host.abi3.so") > 0
    (tmp_path / "kvarn").mkdir()
    for name in (*names, "_ops_cpu.so"):
        (tmp_path / "kvarn" / name).touch()
    command = made["cmdclass"]["build_ext"](setuptools.Distribution({"ext_modules": []}))
    command.ensure_finalized()
    command.copy_extensions_to_source()
    left = {path.name for path in (tmp_path / "kvarn").iterdir()}
    assert left == {"_host.abi3.so", "_host.so", "_ops_cpu.so"}
    assert next(name for name in names if name in left) == "_host.abi3.so"


@pytest.mark.parametrize(
    ("architectures", "runs", "does_not"),
    [
        ("8.0+PTX;9.0a", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)], [(7, 5)]),
        ("9.0a", [(9, 0)], [(8, 0), (8, 9), (10, 0)]),
        ("8.6", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("8.0 10.0f", [(8, 9), (10, 0), (10, 3)], [(9, 0), (12, 0)]),
        ("Hopper", [(9, 0)], []),
        ("9.0a;Ampere", [(8, 0), (9, 0)], []),
        ("", [(9, 0)], []),
    ],
)
def test_gpus_that_a_library_is_built_for(architectures, runs, does_not):
    assert [c for c in runs if not _backends.has_code(architectures, c)] == []
    assert [c for c in does_not if _backends.has_code(architectures, c)] == []


def test_an_older_gpu_is_named(monkeypatch):
    monkeypatch.setattr(_load, "_CUDA_ERROR", None)
    monkeypatch.setattr(_backends, "CUDA_OPS", frozenset(_backends.OPS))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    build = _host.build_info() | {"cuda_architectures": "8.0+PTX;9.0a"}
    monkeypatch.setattr(_host, "build_info", lambda: build)
    assert _backends.why_missing(torch.device("cuda", 0)) == (
        "cuda:0 (Tesla T4) has compute capability 7.5, and kvarn's CUDA library is built for "
        "8.0+PTX;9.0a"
    )


def test_fault27_default_architectures_have_ptx():
    names = (ROOT / "cmake/architectures.txt").read_text().split()
    assert "90a-real" in names
    assert any(not name.endswith("-real") for name in names)  # CMake: machine code and PTX


def test_fault27_cuda_library_has_the_code_that_it_says():
    info = _host.build_info()
    if info["cuda_version"] is None:
        pytest.skip("built without nvcc")
    assert (PACKAGE / "_ops_cuda.so").exists()
    image = (PACKAGE / "_ops_cuda.so").read_bytes()
    for name in info["cuda_architectures"].replace(" ", ";").split(";"):
        number = name.removesuffix("+PTX").replace(".", "")
        assert f"sm_{number}".encode() in image


def test_fault27_status_names_every_library():
    status = _load.status()
    assert list(status) == ["_host", "_ops_cpu", "_ops_cuda"]
    assert status["_host"] == status["_ops_cpu"] == "loaded"
    assert _load.why_unavailable("cpu") is None
    assert _load.why_unavailable("xla") == "kvarn has no kernels for xla"
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA"
        assert status["_ops_cuda"] == _load.why_unavailable("cuda") == reason


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A copy of the package's loader, under another name, next to the libraries it is given."""
    package = tmp_path / "kvarn_broken"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(PACKAGE / "_load.py", package)
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(*libraries: str):
        for pattern in libraries:
            for path in PACKAGE.glob(pattern):
                (package / path.name).symlink_to(path)
        try:
            return importlib.import_module("kvarn_broken._load")
        finally:
            for name in [n for n in sys.modules if n.startswith("kvarn_broken")]:
                del sys.modules[name]

    load.package = package
    return load


def test_fault27_without_host_module(broken):
    with pytest.raises(ImportError, match=r"kvarn\._host cannot be imported .*; build it with"):
        broken()


def test_fault27_without_cpu_library(broken):
    with pytest.raises(ImportError, match=r"CPU library .*_ops_cpu\.so does not exist.*build it"):
        broken("_host*.so")


def test_fault27_with_library_that_does_not_load(broken):
    (broken.package / "_ops_cpu.so").write_bytes(b"not a library")
    words = rf"_ops_cpu\.so does not load under torch {re.escape(torch.__version__)}: .*"
    with pytest.raises(ImportError, match=words + "(file too short|invalid ELF header)"):
        broken("_host*.so")


def test_fault27_with_old_torch(broken, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(
        ImportError, match=r"^kvarn needs torch >= 2\.11, found torch 2\.9\.1\+cpu$"
    ):
        broken("_host*.so", "_ops_cpu.so")


def test_fault27_without_cuda_library(broken, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    loaded = broken("_host*.so", "_ops_cpu.so")  # imports: the CPU needs no CUDA library
    reason = loaded.status()["_ops_cuda"]
    assert reason == loaded.why_unavailable("cuda")
    if _host.build_info()["cuda_version"] is None:
        assert reason == (
            "kvarn was built without its CUDA library (no nvcc was found); rebuild it with nvcc"
        )
    else:
        assert reason == f"{broken.package / '_ops_cuda.so'} does not exist"
