"""The devices behind RPC servers, asked through the engine's own `--list-devices`, as cards of the machine.

A server serves one client at a time and answers nobody else meanwhile, so what it said last is kept: a supervisor that
takes back a running engine plans from that.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from llamarack.config import Group
from llamarack.engine.llamacpp_binary import Binary, BinaryDevice, devices_of
from llamarack.errors import HardwareError
from llamarack.hardware.machine import Card, Host, Machine
from llamarack.paths import cache_dir
from llamarack.plan.record import CPU_INDEX
from llamarack.rpc_address import RpcAddress

_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 10.0  # an idle server answers within a second on a busy machine
_MIB = 1024**2


def with_remotes(
    machine: Machine, groups: Iterable[tuple[Group, Binary | None]], *, cache: Path | None = None
) -> Machine:
    """The machine with the devices of every RPC server that `groups` name, given or asked with the group's binary.

    Raises HardwareError for a server that does not answer and was never asked before.
    """
    remotes: list[Card] = []
    for group, binary in groups:
        for address in group.rpc_addresses():
            memory, is_busy = [(size, size) for size in address.memory_bytes], False
            if not memory:
                memory, is_busy = _asked(address, binary, cache)
            remotes += [
                replace(
                    _card(CPU_INDEX - 1 - len(remotes) - number, address, number, total, free, machine.host),
                    is_rpc_busy=is_busy,
                )
                for number, (total, free) in enumerate(memory)
            ]
    return replace(machine, remotes=tuple(remotes))


def _card(index: int, address: RpcAddress, number: int, total: int, free: int, host: Host) -> Card:
    # A processor behind an RPC server reports all physical memory of its computer as free, in whole MiB.
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    is_host = address.is_loopback and total // _MIB == physical // _MIB
    return Card(
        index=index,
        uuid=None,
        vendor="rpc",
        name=f"RPC{number} {address.endpoint}",
        memory_total_bytes=total,
        memory_free_bytes=min(free, host.memory_available_bytes) if is_host else free,
        rpc_server=address.endpoint,
        is_host_memory=is_host,
    )


def _asked(address: RpcAddress, binary: Binary | None, cache: Path | None) -> tuple[list[tuple[int, int]], bool]:
    """Total and free bytes of each device, and whether that is from before because the server is busy."""
    if binary is None:
        raise HardwareError(
            f"rpc_servers: no llama-server with RPC is at hand to ask {address.endpoint}",
            hint="llamarack engine install llamacpp --rpc, or engine_binary: /path/to/llama-server",
        )
    path = (cache or cache_dir()) / "rpc-devices.json"
    known = _read(path)
    host, _, port = address.endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise HardwareError(
            f"rpc_servers: {address.endpoint} does not answer: {error.strerror or error}",
            hint=f"start it there: ggml-rpc-server --host {host} --port {port}",
        ) from error
    try:
        devices = devices_of(binary, rpc_servers=[address.endpoint], timeout_s=_ANSWER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        if address.endpoint in known:
            return known[address.endpoint], True
        raise HardwareError(
            f"rpc_servers: {address.endpoint} takes the connection but says nothing: it serves one client at a time",
            hint=f"end the other client, or give its memory: '{address.endpoint}=24GiB'",
        ) from None
    memory = [(one.memory_total_bytes, one.memory_free_bytes) for one in _of(devices, address.endpoint)]
    if not memory:
        raise HardwareError(
            f"rpc_servers: {address.endpoint} offers no device", hint="its own output tells which devices it found"
        )
    _write(path, known | {address.endpoint: memory})
    return memory, False


def _of(devices: Iterable[BinaryDevice], endpoint: str) -> list[BinaryDevice]:
    return [one for one in devices if one.is_rpc and one.description == endpoint]


def _read(path: Path) -> dict[str, list[tuple[int, int]]]:
    try:
        value = json.loads(path.read_text())
        return {endpoint: [(int(total), int(free)) for total, free in memory] for endpoint, memory in value.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, value: dict[str, list[tuple[int, int]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(value))
    os.replace(fresh, path)
