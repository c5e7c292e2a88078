"""How llama.cpp is compiled for this machine: compiler, CMake options, jobs. Pure, but for `find_compiler`.

Options: ggml of llama.cpp b11434 (`ggml/CMakeLists.txt`, `ggml/src/ggml-cpu/CMakeLists.txt`). Instruction sets are
named one by one where they are known: `-march=native` leaves out what a hypervisor shows but the compiler's table of
processors does not list, and gives no way to leave one out.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from llamarack.errors import HardwareError
from llamarack.hardware.machine import Host
from llamarack.units import GIB

# What nobody needs of a build that serves: tests, examples, a page of its own, its own TLS.
_SLIM = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
# ggml's options, and the names that a build reports in `system_info`.
_AVX2 = ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")
_AVX2_REPORTED = ("AVX", "AVX2", "FMA", "F16C", "BMI2")
# The same by the kernel's name in /proc/cpuinfo; options and reported names are one.
_SETS = {
    "avx512f": "AVX512",
    "avx512_vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
}
_AMX = ("amx_tile", "amx_int8", "amx_bf16")
# One C++ compiler of llama.cpp takes up to 1 GiB (cc1plus of gcc 12: 0.6 GiB seen); nvcc takes several.
_JOB_BYTES = int(1.5 * GIB)
_CUDA_JOB_BYTES = 4 * GIB
_ASK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """`family`: `gcc` or `clang`."""

    family: str
    version: str
    cc: str
    cxx: str

    @property
    def shown(self) -> str:
        return f"{self.family} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """`expected`: instruction sets that the result has to report."""

    is_cuda: bool
    is_native: bool
    has_rpc: bool
    cmake_args: tuple[str, ...]
    compiler: Compiler
    expected: tuple[str, ...]
    jobs: int

    @property
    def has_amx(self) -> bool:
        return "AMX_INT8" in self.expected

    @property
    def environment(self) -> dict[str, str]:
        """What the package's build reads."""
        return {
            "CMAKE_ARGS": shlex.join(self.cmake_args),
            "LLAMA_CPP_BUILD_JOBS": str(self.jobs),
            "CC": self.compiler.cc,
            "CXX": self.compiler.cxx,
        }

    @property
    def name(self) -> str:
        """Two builds with other options never share a folder."""
        kinds = [("cuda", self.is_cuda), ("native", self.is_native), ("rpc", self.has_rpc)]
        text = f"{shlex.join(self.cmake_args)} {self.compiler.shown}"
        return "-".join([*(kind for kind, is_so in kinds if is_so), hashlib.sha256(text.encode()).hexdigest()[:8]])

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(name for name, has in (("native", self.is_native), ("rpc", self.has_rpc)) if has)


def plan_build(
    host: Host,
    compiler: Compiler,
    *,
    cuda: bool,
    native: bool,
    rpc: bool,
    without_amx: bool = False,
    more: tuple[str, ...] = (),
) -> Build:
    """`native`: for this very processor; otherwise for any with AVX2. `more`: the user's own CMake arguments, last."""
    expected: tuple[str, ...] = ()
    arguments = [*_SLIM]
    if "avx2" not in host.instruction_sets:  # another architecture, or too old to name: the compiler knows best
        arguments.append(f"-DGGML_NATIVE={_switch(native)}")
    else:
        options, expected = _instruction_sets(host, compiler, native=native, without_amx=without_amx)
        arguments += ["-DGGML_NATIVE=OFF", *(f"-DGGML_{option}=ON" for option in options)]
        if "AMX_INT8" in options:
            arguments.append(f"-DCMAKE_CXX_FLAGS={_amx_cure(compiler)}")
    if cuda:
        arguments += ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"]
    if rpc:
        arguments.append("-DGGML_RPC=ON")
    job_bytes = _CUDA_JOB_BYTES if cuda else _JOB_BYTES
    return Build(
        is_cuda=cuda,
        is_native=native,
        has_rpc=rpc,
        cmake_args=(*arguments, *more),
        compiler=compiler,
        expected=expected,
        jobs=max(1, min(host.cores_usable, host.memory_available_bytes // job_bytes)),
    )


def _instruction_sets(
    host: Host, compiler: Compiler, *, native: bool, without_amx: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    has = host.instruction_sets
    # ggml's AVX512 is F, CD, VL, DQ and BW together.
    if not native or "avx512f" not in has or "avx512bw" not in has:
        return _AVX2, _AVX2_REPORTED
    wide = tuple(name for kernel_name, name in _SETS.items() if kernel_name in has)
    # ggml's AMX code needs VNNI beside it and is left out otherwise.
    if without_amx or not all(name in has for name in (*_AMX, "avx512_vnni")):
        return (*_AVX2, *wide), (*_AVX2_REPORTED, *wide)
    return (*_AVX2, *wide, "AMX_TILE", "AMX_INT8", "AMX_BF16"), (*_AVX2_REPORTED, *wide, "AMX_INT8")


def _amx_cure(compiler: Compiler) -> str:
    """GCC 12 loses the tile configuration; clang up to 14 spells the macros that ggml asks for differently."""
    if compiler.family == "clang":
        return "-D__AMX_TILE__=1 -D__AMX_INT8__=1 -D__AMX_BF16__=1"
    return f"-include {shlex.quote(str(files('llamarack.engine').joinpath('data', 'amx_tile_config.h')))}"


def _switch(on: bool) -> str:
    return "ON" if on else "OFF"


def find_compiler(environment: Mapping[str, str] = os.environ) -> Compiler:
    """$CC and $CXX, else c++, g++ or clang++ on PATH. Raises HardwareError where there is none."""
    pairs = [("cc", "c++"), ("gcc", "g++"), ("clang", "clang++")]
    if environment.get("CXX"):
        pairs = [(environment.get("CC") or "cc", environment["CXX"])]
    for cc, cxx in pairs:
        found_cc, found_cxx = shutil.which(cc), shutil.which(cxx)
        if found_cc and found_cxx:
            return _asked(found_cc, found_cxx)
    raise HardwareError(
        f"no C++ compiler is here ({', '.join(cxx for _, cxx in pairs)} not found)",
        hint="apt-get install g++ (or dnf install gcc-c++), or CC=... CXX=... llamarack engine install llamacpp",
    )


def _asked(cc: str, cxx: str) -> Compiler:
    try:
        done = subprocess.run([cxx, "--version"], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise HardwareError(f"the compiler `{cxx}` does not run: {error}", hint=f"{cxx} --version") from error
    first = done.stdout.splitlines()[0] if done.stdout else ""
    family = "clang" if "clang" in first.lower() else "gcc"
    numbers = re.findall(r"\d+(?:\.\d+)+", first)
    return Compiler(family=family, version=numbers[-1] if numbers else "unknown", cc=cc, cxx=cxx)


def require_cuda_compiler(
    environment: Mapping[str, str] = os.environ, usual: Path = Path("/usr/local/cuda/bin/nvcc")
) -> Path:
    """nvcc. Raises HardwareError where the CUDA toolkit is not installed: the driver alone compiles nothing."""
    homes = [environment.get("CUDACXX"), shutil.which("nvcc")]
    homes += [f"{environment[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    for home in [*homes, str(usual)]:
        if home and Path(home).exists():
            return Path(home)
    raise HardwareError(
        "the CUDA toolkit is not here: nvcc was not found",
        hint="install NVIDIA's cuda-toolkit package, or CUDACXX=/usr/local/cuda-13/bin/nvcc llamarack engine install "
        "llamacpp --cuda",
    )
