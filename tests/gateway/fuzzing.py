"""Sends malformed requests to a gateway and holds it to its promises: no 500, no fault logged, nothing left over."""

import asyncio
import contextlib
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.gateway.malformed import request
from tests.gateway.raw import ask, chat
from tests.rigs import Address, Engine, GatewayRig, until

# A client that fell silent in the middle of its request waits no longer for an answer.
_PATIENCE_S = 0.3
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
# The listener, the link to the supervisor, and those of the event loop.
_IDLE_SOCKETS = 6
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Raised or logged by the gateway itself, by aiohttp, or by asyncio.
FAULTS = ("Traceback", "ERROR", "never retrieved", "never awaited", "Unhandled")


@dataclass
class Report:
    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)


async def one(gateway: GatewayRig | Address, raw: bytes) -> bytes:
    """What comes back, until the server closes, falls silent, or has answered."""
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    got = b""
    try:
        writer.write(raw)
        while True:
            async with asyncio.timeout(_PATIENCE_S):
                data = await reader.read(65536)
            if not data:
                return got
            got += data
            if b"\r\n\r\n" in got and not raw.endswith(b"\r\n0\r\n\r\n"):
                return got
    except (TimeoutError, ConnectionError):
        return got
    finally:
        writer.transport.abort()


async def fuzz(
    gateway: GatewayRig, engine: Engine, *, seed: int, count: int, parallel: int = 16, most_s: float = math.inf
) -> Report:
    """`count` requests; memory and files are noted at each tenth of them, with nothing running. Past `most_s` no
    further tenth is begun."""
    started = time.monotonic()
    report = Report()
    for part in range(10):
        if time.monotonic() - started > most_s:
            break
        logged = len(gateway.log_text())
        numbers = iter(range(count * part // 10, count * (part + 1) // 10))
        await asyncio.gather(*(_send_all(gateway, report, seed, numbers) for _ in range(parallel)))
        await until(lambda: gateway.counts_of("in_flight") + gateway.counts_of("queued") == 0, "nothing runs")
        await until(engine.is_idle, "the engine is idle")
        assert (await ask(gateway, "/v1/chat/completions", chat())).status == 200
        await until(lambda: _num_sockets(gateway.process.pid) <= _IDLE_SOCKETS, "its connections are closed")
        report.resident_bytes.append(_resident_bytes(gateway.process.pid))
        report.open_files.append(len(os.listdir(f"/proc/{gateway.process.pid}/fd")))
        text = gateway.log_text()
        for fault in FAULTS:
            if (at := text.find(fault, logged)) >= 0:
                report.failures.append(f"in the log: {text[max(0, at - 200) : at + 1500]}")
    return report


async def _send_all(gateway: GatewayRig, report: Report, seed: int, numbers: Iterator[int]) -> None:
    """Several of these share `numbers`."""
    for number in numbers:
        await _send(gateway, report, seed, number)


async def _send(gateway: GatewayRig, report: Report, seed: int, number: int) -> None:
    raw = request(random.Random(f"{seed} {number}"))
    answer = await one(gateway, raw)
    report.sent += 1
    statuses = [int(status) for status in _STATUS.findall(answer)]
    report.statuses.update(statuses or [0])
    if any(status in {500, 502, 504} for status in statuses):
        report.failures.append(f"number {number}: {raw[:600]!r} -> {answer[:600]!r}")


def _resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def _num_sockets(pid: int) -> int:
    count = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    return count
