"""What llama.cpp is compiled with on which machine; and that the cure for GCC's AMX fault compiles."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from llamarack.engine.llamacpp_build import Compiler, find_compiler, plan_build, require_cuda_compiler
from llamarack.errors import HardwareError
from llamarack.hardware.machine import Host
from llamarack.units import GIB

GCC = Compiler(family="gcc", version="12.2.0", cc="/usr/bin/cc", cxx="/usr/bin/c++")
CLANG = Compiler(family="clang", version="14.0.6", cc="/usr/bin/clang", cxx="/usr/bin/clang++")
AVX512 = ("avx2", "avx512f", "avx512bw", "avx512_vbmi", "avx512_vnni", "avx512_bf16")
SAPPHIRE_RAPIDS = (*AVX512, "amx_int8", "amx_bf16", "amx_tile")


def _host(*sets: str, cores: int = 8, available_gib: int = 64) -> Host:
    return Host(
        processor="a processor",
        cores_usable=cores,
        instruction_sets=sets,
        memory_total_bytes=available_gib * GIB,
        memory_available_bytes=available_gib * GIB,
    )


def _on(arguments: tuple[str, ...]) -> set[str]:
    return {match[1] for argument in arguments if (match := re.fullmatch(r"-DGGML_(\w+)=ON", argument))}


def test_every_set_of_the_processor_is_switched_on_and_expected() -> None:
    build = plan_build(_host(*SAPPHIRE_RAPIDS), GCC, cuda=False, native=True, rpc=True)
    wide = {"AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"}
    assert _on(build.cmake_args) >= {"AVX2", "FMA", "F16C", *wide, "AMX_TILE", "AMX_INT8", "AMX_BF16", "RPC"}
    assert "-DGGML_NATIVE=OFF" in build.cmake_args
    assert set(build.expected) == {"AVX", "AVX2", "FMA", "F16C", "BMI2", *wide, "AMX_INT8"}
    assert build.has_amx


def test_gcc_gets_the_header_and_clang_the_macros() -> None:
    gcc, clang = (plan_build(_host(*SAPPHIRE_RAPIDS), one, cuda=False, native=True, rpc=False) for one in (GCC, CLANG))
    flags = next(one for one in gcc.cmake_args if "CMAKE_CXX_FLAGS" in one)
    header = Path(flags.partition("-include ")[2])
    assert header.is_file()
    assert "-D__AMX_INT8__=1" in next(one for one in clang.cmake_args if "CMAKE_CXX_FLAGS" in one)
    assert gcc.name != clang.name


@pytest.mark.parametrize(
    ("sets", "native", "absent"),
    [
        (("avx2",), True, "AVX512"),
        (("avx2", "avx512f"), True, "AVX512"),  # ggml's AVX512 is five sets
        (tuple(name for name in SAPPHIRE_RAPIDS if name != "avx512_vnni"), True, "AMX_INT8"),
        (AVX512, True, "AMX_INT8"),
        (SAPPHIRE_RAPIDS, False, "AVX512"),
    ],
)
def test_nothing_is_switched_on_that_the_processor_or_the_user_does_not_have(
    sets: tuple[str, ...], native: bool, absent: str
) -> None:
    build = plan_build(_host(*sets), GCC, cuda=False, native=native, rpc=False)
    assert absent not in _on(build.cmake_args)
    assert absent not in build.expected
    assert "AVX2" in build.expected


def test_an_unknown_architecture_is_left_to_the_compiler() -> None:
    build = plan_build(_host(), GCC, cuda=False, native=True, rpc=False)
    assert "-DGGML_NATIVE=ON" in build.cmake_args
    assert build.expected == ()


def test_jobs_follow_cores_and_memory() -> None:
    def jobs(cores: int, gib: int, *, cuda: bool = False) -> int:
        return plan_build(_host(cores=cores, available_gib=gib), GCC, cuda=cuda, native=True, rpc=False).jobs

    assert jobs(2, 64) == 2
    assert jobs(64, 12) == 8
    assert jobs(64, 12, cuda=True) == 3
    assert jobs(4, 1) == 1


def test_the_users_own_arguments_come_last_and_make_another_build() -> None:
    plain = plan_build(_host("avx2"), GCC, cuda=True, native=True, rpc=True)
    own = plan_build(_host("avx2"), GCC, cuda=True, native=True, rpc=True, more=("-DCMAKE_CUDA_ARCHITECTURES=89",))
    assert own.cmake_args[-1] == "-DCMAKE_CUDA_ARCHITECTURES=89"
    assert own.name != plain.name
    assert plain.name.startswith("cuda-native-rpc-")


@pytest.mark.process
def test_compilers_are_found_and_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HardwareError, match=r"no C\+\+ compiler") as caught:
        find_compiler({})
    assert "apt-get install g++" in str(caught.value.hint)
    for name in ("clang", "clang++"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'Debian clang version 14.0.6'\n")
        (tmp_path / name).chmod(0o755)
    assert find_compiler({}).shown == "clang 14.0.6"
    with pytest.raises(HardwareError, match="nvcc was not found"):
        require_cuda_compiler({"CUDA_HOME": str(tmp_path)}, usual=tmp_path / "nvcc")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert require_cuda_compiler({"CUDA_HOME": str(tmp_path)}, usual=tmp_path / "nvcc") == tmp_path / "bin" / "nvcc"


_TILES = """
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
struct config { uint8_t palette, start_row, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; };
void set_up(void) {
  struct config c;
  memset(&c, 0, sizeof c);
  c.palette = 1;
  for (int i = 0; i < 8; i++) { c.rows[i] = 16; c.bytes[i] = 64; }
  _tile_loadconfig(&c);
}
"""


@pytest.mark.process
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc is here: apt-get install gcc")
def test_the_tile_configuration_reaches_the_processor_whole(tmp_path: Path) -> None:
    """The assembly fills all 64 bytes with our header; with GCC 12's own only the first stores are left."""
    if "amx-tile" not in subprocess.run(["gcc", "--target-help"], capture_output=True, text=True, check=False).stdout:
        pytest.skip("this gcc knows no AMX: a processor of another kind, or gcc before 11")
    (tmp_path / "tiles.c").write_text(_TILES)
    header = str(files("llamarack.engine").joinpath("data", "amx_tile_config.h"))

    def stores(*more: str) -> int:
        command = ["gcc", "-O3", "-mamx-tile", "-mavx512f", "-S", "-o", "-", *more, "tiles.c"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.count("ldtilecfg") == 1
        return len(re.findall(r"\bmov\S*\s+\S+,\s*-?\d*\(%r[sb]p\)", done.stdout))

    major = int(
        subprocess.run(["gcc", "-dumpversion"], capture_output=True, text=True, check=True).stdout.split(".")[0]
    )
    cured, own = stores("-include", header), stores()
    assert cured > own if major <= 12 else cured >= own
