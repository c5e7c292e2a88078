"""How soon an engine sees that a client left: through the gateway, wherever the request is.

python -m benchmarks.gateway.cancel [--repeats 30]

The engine is the fake one, which notes when a connection ends; client and engine read one clock. `queue`: how soon the
gateway lets a waiting request go, by its access log, whose times are whole milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from tests.gateway.raw import chat, connect, post_bytes
from tests.rigs import Engine, GatewayRig, fake_engine, gateway_worker, until

_CHAT = "/v1/chat/completions"
_PHASES = {
    "prefill": ("stall_prefill", "prefill"),
    "decode, silent": ("stall_after=2", "decode"),
    "decode, flowing": ("token_interval_s=0.02", "decode"),
}
_LEFT = re.compile(r"^(\S+ \S+),(\d{3}) .* 499 ", re.MULTILINE)
_RESULTS = Path(__file__).parent.parent / "results"


async def in_phase(engine: Engine, phase: str) -> bool:
    requests = await engine.requests()
    return bool(requests) and requests[-1]["phase"] == phase and not requests[-1]["outcome"]


async def at_the_engine(gateway: GatewayRig, engine: Engine, fault: str, phase: str, stream: bool) -> float:
    async with connect(gateway) as client:
        await client.send(post_bytes(_CHAT, chat(f"[[fault {fault}]]", stream=stream)))
        await until(lambda: in_phase(engine, phase), f"it is in {phase}")
        left = time.monotonic()
        client.leave()
        await until(engine.is_idle, "the engine is told")
    ended: float = (await engine.requests())[-1]["ended_monotonic_s"]
    return ended - left


async def in_the_queue(gateway: GatewayRig, stream: bool) -> float:
    before = len(_LEFT.findall(gateway.log_text()))
    async with connect(gateway) as client:
        await client.send(post_bytes(_CHAT, chat(stream=stream)))
        await until(lambda: gateway.counts_of("queued") == 1, "it waits")
        left = time.time()
        client.leave()
        await until(lambda: len(_LEFT.findall(gateway.log_text())) > before, "it is gone")
    at, ms = _LEFT.findall(gateway.log_text())[-1]
    await until(lambda: gateway.counts_of("queued") == 0, "the queue is empty")
    return max(0.0, time.mktime(time.strptime(at, "%Y-%m-%d %H:%M:%S")) + int(ms) / 1000 - left)


async def measure(repeats: int, folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    async with (
        fake_engine(folder, slots=1, answer_tokens=100_000) as engine,
        gateway_worker(folder, [engine.row()]) as gateway,
    ):
        for stream in (True, False):
            kind = "streaming" if stream else "whole"
            for name, (fault, phase) in _PHASES.items():
                found[f"{name}, {kind}"] = [
                    await at_the_engine(gateway, engine, fault, phase, stream) for _ in range(repeats)
                ]
            async with connect(gateway) as running:
                await running.send(post_bytes(_CHAT, chat("[[fault stall_prefill]]")))
                await until(lambda: in_phase(engine, "prefill"), "the slot is taken")
                found[f"queue, {kind}"] = [await in_the_queue(gateway, stream) for _ in range(repeats)]
            await until(engine.is_idle, "the slot is free")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("-o", "--output", type=Path, default=_RESULTS / "gateway_cancel.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(measure(given.repeats, Path(name)))
    rows: dict[str, Any] = {}
    for name, values in found.items():
        ordered = sorted(values)
        rows[name] = {"median_ms": statistics.median(values) * 1e3, "most_ms": ordered[-1] * 1e3, "n": len(values)}
        print(f"{name:28} median {rows[name]['median_ms']:6.2f} ms   most {rows[name]['most_ms']:6.2f} ms")
    record = {"schema_version": 1, "machine": describe_machine(), "left_to_seen": rows}
    given.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
