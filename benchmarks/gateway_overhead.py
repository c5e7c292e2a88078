"""What the gateway adds to the first token: 16 streams through it against 16 on the engine's own socket.

python benchmarks/gateway_overhead.py [--streams 16] [--repeats 9]

The engine is the fake one, since a real one's own spread hides a millisecond. Both ways alternate within one run; each
repeat sends its streams at once and takes the median first token. Prints medians with spread, and writes the record
beside the other results.
"""

import argparse
import asyncio
import json
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
_RESULT = Path(__file__).with_name("results") / "gateway_overhead.json"


async def first_tokens_s(target: Target, streams: int) -> list[float]:
    """Sent to first content, of each of `streams` sent at once over open connections."""
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
    jobs = [
        Job(
            index=index,
            path="/v1/chat/completions",
            body=body,
            phase=Phase.MEASURED,
            prompt_id="p",
            scheduled_monotonic_ns=time.monotonic_ns(),
        )
        for index in range(streams)
    ]
    records = await asyncio.gather(*(client.stream(job, timeout_s=_TIMEOUT_S) for job in jobs))
    client.close()
    return [(record.chunks[0].at_monotonic_ns - record.sent_monotonic_ns) / 1e9 for record in records]


async def measure(streams: int, repeats: int, folder: Path) -> dict[str, list[float]]:
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
                median = statistics.median(await first_tokens_s(target, streams))
                if repeat:  # the first pair warms both
                    medians[name].append(median)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        medians = asyncio.run(measure(arguments.streams, arguments.repeats, Path(folder)))
    added = [through - direct for direct, through in zip(medians["direct"], medians["gateway"], strict=True)]
    for name, values in (*medians.items(), ("added", added)):
        low, mid, high = min(values), statistics.median(values), max(values)
        print(f"{name:8} first token, median of {arguments.streams} streams: {mid * 1e3:.2f} ms "
              f"({low * 1e3:.2f}-{high * 1e3:.2f} over {len(values)} repeats)")  # fmt: skip
    record = {"machine": describe_machine(), "streams": arguments.streams, "medians_s": medians, "added_s": added}
    _RESULT.parent.mkdir(exist_ok=True)
    _RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
