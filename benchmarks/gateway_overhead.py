"""What the gateway adds to the first token: 16 streams through it against 16 on the engine's own socket.

python benchmarks/gateway_overhead.py [--streams 16] [--repeats 9]

The engine is the fake one, since a real one's own spread hides a millisecond. Both ways alternate within one run. A
repeat keeps `--streams` running, each followed by the next after a random pause, and takes the median first token of
all; `--burst` sends them all in the same moment instead, so that the last waits for the work of all before it. Client,
engine and gateway share the machine's cores. Prints medians with spread, and writes the record beside the others.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.machine import describe_machine
from llamarack.measure.client import Client, Job
from llamarack.measure.record import Phase
from llamarack.measure.target import Target, parse_target
from tests.rigs import fake_engine, gateway_worker

_TOKENS = 50
_INTERVAL_S = 0.02
_TIMEOUT_S = 60.0
_ROUNDS = 4
_RESULTS = Path(__file__).with_name("results")


async def first_tokens_s(target: Target, streams: int, *, burst: bool) -> list[float]:
    """Sent to first content, over open connections."""
    client = Client(target)
    await client.warm_connections(streams)
    body = json.dumps(
        {
            "model": "fake",
            "messages": [{"role": "user", "content": "How long?"}],
            "max_tokens": _TOKENS,
            "stream": True,
        }
    ).encode()

    async def one_slot() -> list[float]:
        found = []
        for index in range(1 if burst else _ROUNDS):
            if not burst:
                await asyncio.sleep(random.random() * _TOKENS * _INTERVAL_S)
            job = Job(
                index=index,
                path="/v1/chat/completions",
                body=body,
                phase=Phase.MEASURED,
                prompt_id="p",
                scheduled_monotonic_ns=time.monotonic_ns(),
            )
            record = await client.stream(job, timeout_s=_TIMEOUT_S)
            found.append((record.chunks[0].at_monotonic_ns - record.sent_monotonic_ns) / 1e9)
        return found

    slots = await asyncio.gather(*(one_slot() for _ in range(streams)))
    client.close()
    return [first for slot in slots for first in slot]


async def measure(streams: int, repeats: int, burst: bool, folder: Path) -> dict[str, list[float]]:
    medians: dict[str, list[float]] = {"direct": [], "gateway": []}
    async with (
        fake_engine(folder, slots=streams, token_interval_s=_INTERVAL_S) as engine,
        gateway_worker(folder, [engine.row()]) as gateway,
    ):
        direct = parse_target(f"unix://{engine.endpoint.socket}", api_key=engine.endpoint.key)
        through = parse_target(gateway.url)
        for repeat in range(repeats + 1):
            ways = [("direct", direct), ("gateway", through)]
            for name, target in ways if repeat % 2 else reversed(ways):
                median = statistics.median(await first_tokens_s(target, streams, burst=burst))
                if repeat:  # the first pair warms both
                    medians[name].append(median)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--burst", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        medians = asyncio.run(measure(arguments.streams, arguments.repeats, arguments.burst, Path(folder)))
    added = [through - direct for direct, through in zip(medians["direct"], medians["gateway"], strict=True)]
    for name, values in (*medians.items(), ("added", added)):
        low, mid, high = min(values), statistics.median(values), max(values)
        print(f"{name:8} first token, median of {arguments.streams} streams: {mid * 1e3:.2f} ms "
              f"({low * 1e3:.2f}-{high * 1e3:.2f} over {len(values)} repeats)")  # fmt: skip
    record = {
        "machine": describe_machine(),
        "streams": arguments.streams,
        "burst": arguments.burst,
        "medians_s": medians,
        "added_s": added,
    }
    _RESULTS.mkdir(exist_ok=True)
    name = "gateway_overhead_burst.json" if arguments.burst else "gateway_overhead.json"
    (_RESULTS / name).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
