"""Builds the native libraries; everything else about the package is in pyproject.toml.

    kvarn/_ops_cpu.so   operator schemas and CPU kernels     | LibTorch stable ABI: one build serves
    kvarn/_ops_cuda.so  CUDA kernels, if nvcc is found       | torch 2.11 and later, any Python
    kvarn/_host.abi3.so layout and build facts, no torch     | Python's stable ABI: 3.10 and later

So one wheel serves them all. nvcc is looked for in $CUDA_HOME, or, where that is not set, on the
PATH and in /usr/local/cuda; an empty CUDA_HOME builds without CUDA. The installed torch need not
have CUDA. TORCH_CUDA_ARCH_LIST ("9.0a", "8.0+PTX;9.0a", ...) overrides cmake/architectures.txt;
MAX_JOBS limits the parallel compilations.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils import cpp_extension

ROOT = Path(__file__).parent
INCLUDE = [str(ROOT / "csrc"), str(ROOT / "csrc" / "include")]
CXX_FLAGS = ["-std=c++17", "-O3", "-g0", "-fno-wrapv", "-fopenmp-simd", "-fvisibility=hidden"]
CXX_FLAGS += ["-Wall", "-Wextra"]
# __FILE__ in torch's headers and in ours must not tell where the build machine keeps them.
CXX_FLAGS += [f"-ffile-prefix-map={p}/=" for p in (ROOT, Path(torch.__file__).parents[1])]
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xcompiler=-fvisibility=hidden,-Wall,-Wextra"]
LINK_FLAGS = ["-Wl,--strip-all"]  # no trace of the inline c10:: code in torch's headers
PYTHON_ABI = "0x030A0000"  # of Python 3.10: the tag cp310-abi3 of the wheel
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]  # of torch 2.11


def sources(*libraries: str) -> list[str]:
    rows = (line.split() for line in (ROOT / "cmake/sources.txt").read_text().splitlines())
    return sorted(row[1] for row in rows if row[0] in libraries)


def find_cuda_home() -> Path | None:
    def complete(home: Path) -> bool:
        return (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists()

    asked = os.environ.get("CUDA_HOME")
    if asked == "":
        return None
    if asked:
        if not complete(Path(asked)):
            sys.exit(f"kvarn: CUDA_HOME is {asked}, without bin/nvcc or include/cuda_runtime.h")
        return Path(asked)
    nvcc = shutil.which("nvcc")
    homes = [*([Path(nvcc).resolve().parents[1]] if nvcc else []), Path("/usr/local/cuda")]
    return next(filter(complete, homes), None)


def default_cuda_architectures() -> str:
    """cmake/architectures.txt in the notation of torch: "80 90a-real" -> "8.0+PTX;9.0a"."""
    names = (ROOT / "cmake/architectures.txt").read_text().split()
    parts = [re.fullmatch(r"(\d+)(\d\w?)(-real)?", name).groups() for name in names]
    return ";".join(f"{a}.{b}" + ("" if real else "+PTX") for a, b, real in parts)


def torch_flags(device: str) -> list[str]:
    """Torch's headers as system headers: their warnings are not ours."""
    return STABLE_ABI + [f"-isystem{path}" for path in cpp_extension.include_paths(device)]


def host_extension(cuda_version: str | None) -> Extension:
    macros = []
    if cuda_version:
        architectures = os.environ["TORCH_CUDA_ARCH_LIST"]
        macros = [
            ("KVARN_CUDA_VERSION", f'"{cuda_version}"'),
            ("KVARN_CUDA_ARCHITECTURES", f'"{architectures}"'),
        ]
    return Extension(
        "kvarn._host",
        sources("host"),
        include_dirs=INCLUDE,
        define_macros=[*macros, ("Py_LIMITED_API", PYTHON_ABI)],
        py_limited_api=True,
        extra_compile_args=CXX_FLAGS,
        language="c++",
    )


def cpu_extension() -> Extension:
    return Extension(
        "kvarn._ops_cpu",
        sources("cpu", "torch_cpu"),
        include_dirs=INCLUDE,
        library_dirs=cpp_extension.library_paths(),
        libraries=["torch_cpu"],
        extra_compile_args=CXX_FLAGS + torch_flags("cpu"),
        extra_link_args=[*LINK_FLAGS, "-Wl,--no-undefined"],
        language="c++",
    )


def cuda_extension(home: Path, version: str) -> Extension:
    # Nothing of torch's own CUDA is used, so the library can be built under any torch: make
    # cpp_extension take this nvcc for the one that torch was built with.
    cpp_extension.CUDA_HOME = str(home)
    torch.version.cuda = version
    return Extension(
        "kvarn._ops_cuda",
        sources("cuda", "torch_cuda"),
        include_dirs=INCLUDE,
        define_macros=[("USE_CUDA", None)],  # or torch's headers leave the stream function out
        library_dirs=cpp_extension.library_paths("cuda"),
        libraries=["cudart_static", "rt", "dl", "pthread"],
        extra_compile_args={"cxx": CXX_FLAGS + torch_flags("cuda"), "nvcc": NVCC_FLAGS},
        # The stream function is in libtorch_cuda, which only a torch with CUDA has; libtorch, which
        # every torch has, pulls it in at load time.
        extra_link_args=[*LINK_FLAGS, "-Wl,--exclude-libs,ALL,--no-as-needed", "-ltorch"],
        language="c++",
    )


class BuildExt(cpp_extension.BuildExtension):
    def finalize_options(self) -> None:
        """One place for the objects, so that every way to build compiles only what has changed."""
        super().finalize_options()
        self.build_temp = f"build/{sys.implementation.cache_tag}"

    def build_extensions(self) -> None:
        """Not with the search path that Python was linked with: it is the build machine's."""
        own = " ".join(sysconfig.get_config_var(v) or "" for v in ("LDSHARED", "LDCXXSHARED"))
        paths = {word for word in own.split() if word.startswith("-Wl,-rpath")}
        for name in ("linker_so", "linker_so_cxx"):
            if command := getattr(self.compiler, name, None):
                setattr(self.compiler, name, [word for word in command if word not in paths])
        super().build_extensions()

    def copy_extensions_to_source(self) -> None:
        """Of `kvarn._host`, Python takes a library of its own version before one of the stable ABI:
        that of an earlier build must not hide this one."""
        package = Path(self.get_finalized_command("build_py").get_package_dir("kvarn"))
        for old in package.glob("_host.cpython-*.so"):
            old.unlink()
        super().copy_extensions_to_source()

    def get_ext_filename(self, ext_name: str) -> str:
        """The op libraries are no Python modules: their names carry no Python version."""
        return re.sub(r"(_ops_\w+)\..*", r"\1.so", super().get_ext_filename(ext_name))


def main() -> None:
    cuda_home = find_cuda_home()
    if cuda_home:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_cuda_architectures())
        output = subprocess.check_output([cuda_home / "bin/nvcc", "--version"], text=True)
        version = re.search(r"release ([\d.]+)", output).group(1)
        print(f"kvarn: CUDA {version} in {cuda_home}: building the CUDA library too")
        extensions = [cpu_extension(), cuda_extension(cuda_home, version), host_extension(version)]
    else:
        print("kvarn: no nvcc found (or CUDA_HOME is empty): building without the CUDA library")
        extensions = [cpu_extension(), host_extension(None)]
    version_header = (ROOT / "csrc/include/kvarn/version.h").read_text()
    setup(
        version=re.search(r'KVARN_VERSION "(.+)"', version_header).group(1),
        ext_modules=extensions,
        cmdclass={"build_ext": BuildExt},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )


main()
