"""A llama-server that was built on this machine, and RPC servers of its build, for tests that need real devices."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarack.engine.installed import installed_engines
from llamarack.engine.llamacpp_binary import RPC_SERVER
from llamarack.supervise.gateways import listen

VARIABLE = "LLAMARACK_LLAMA_SERVER"
_DEADLINE_S = 60.0


def find_llama_server() -> Path:
    """The one named in the environment, an installed one, or the one on PATH, with RPC beside it; else skips."""
    installed = [one.binary for one in installed_engines() if one.engine == "llamacpp"]
    on_path = shutil.which("llama-server")
    named = os.environ.get(VARIABLE)
    for found in (named, *installed, on_path):
        if found and (Path(found).parent / RPC_SERVER).exists():
            return Path(found)
    pytest.skip(
        "no llama-server with RPC is here: llamarack engine install llamacpp --native --rpc builds one (20 minutes "
        f"on two cores), or {VARIABLE}=/path/to/llama-server"
    )


@contextlib.contextmanager
def rpc_servers(llama_server: Path, count: int, folder: Path) -> Iterator[list[str]]:
    """Addresses of `count` devices, each a process with one thread of this processor."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        addresses = []
        for number in range(count):
            process, address = _started(llama_server.parent / RPC_SERVER, folder / f"rpc{number}.log")
            processes.append(process)
            addresses.append(address)
        yield addresses
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _started(program: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Another port is tried where somebody took the first between its choice and its use."""
    for _ in range(5):
        with contextlib.closing(listen("127.0.0.1", 0)) as chosen:
            port = chosen.getsockname()[1]
        with open(log, "wb") as output:
            command = ["stdbuf", "-oL", str(program), "--host", "127.0.0.1", "--port", str(port), "--threads", "1"]
            process = subprocess.Popen(command, stdout=output, stderr=output)
        deadline = time.monotonic() + _DEADLINE_S
        while process.poll() is None and time.monotonic() < deadline:
            if "transport" in log.read_text(errors="replace"):
                return process, f"127.0.0.1:{port}"
            time.sleep(0.05)
        process.kill()
        process.wait()
    raise AssertionError(f"no RPC server started: {log.read_text(errors='replace')}")
