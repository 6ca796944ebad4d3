"""What the build promises: faults.md class 27, the stable ABI, layers, one source list."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvarn
from kvarn import _host, _load

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


@pytest.mark.parametrize(
    ("folder", "own"),
    [
        ("include", ("kvarn/",)),
        ("device", ("kvarn/", "device/")),
        ("cuda", ("kvarn/", "device/", "cuda/")),
        ("cpu", ("kvarn/", "cpu/")),
        ("torch", ("kvarn/", "torch/")),
        ("python", ("kvarn/", "pybind11/")),
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
