"""How many events per second does one client process stamp, how late, and at what cost?

    python -m benchmarks.client_throughput [--streams 200] [--events-per-s 100] [--seconds 5] [-o FILE]

A second process writes server-sent events at a fixed pace; each event carries the CLOCK_MONOTONIC stamp from just
before its write. The difference to the client's stamp is the way through the kernel plus everything the client adds.
The client is the product's own, parsing included. Prints one JSON object and writes it to results/.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import orjson
import uvloop

from benchmarks.machine import describe_machine
from llamarack.measure.client import Client, Job
from llamarack.measure.distribution import summarize
from llamarack.measure.lag import LagMonitor
from llamarack.measure.record import Phase
from llamarack.measure.target import parse_target

_RESULTS = Path(__file__).with_name("results") / "client_throughput.json"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
DONE = b"data: [DONE]\n\n"
# The padding makes an event as long as llama.cpp's and vLLM's are, about 300 bytes.
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1796038154,'
    b'"model":"model-name","system_fingerprint":"b0-unknown","choices":[{"index":0,"delta":{"content":"%d "},'
    b'"finish_reason":null}],"usage":{"prompt_tokens":256,"completion_tokens":%d,"total_tokens":400}}\n\n'
)


class Emitter(asyncio.Protocol):
    """Starts a stream at each request; `tick` writes one event to each stream."""

    live: set[Emitter] = set()  # noqa: RUF012 - one process, one set

    def __init__(self, events: int) -> None:
        self.left = self.events = events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"}"):
            self.transport.write(HEAD)  # type: ignore[attr-defined]
            Emitter.live.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        Emitter.live.discard(self)

    def tick(self) -> None:
        self.left -= 1
        event = EVENT % (time.monotonic_ns(), self.events - self.left)
        self.transport.write(b"%x\r\n%s\r\n" % (len(event), event))  # type: ignore[attr-defined]
        if self.left == 0:
            tail = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in (END, DONE))
            self.transport.write(tail + b"0\r\n\r\n")  # type: ignore[attr-defined]
            Emitter.live.discard(self)


async def emit(pipe: Pipe, streams: int, events_per_s: float, events: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Emitter(events), "127.0.0.1", 0, backlog=4096)
    pipe.send(server.sockets[0].getsockname()[1])
    while len(Emitter.live) < streams:  # noqa: ASYNC110 - before the clock starts
        await asyncio.sleep(0.01)
    ordered, start = list(Emitter.live), time.monotonic()
    total = streams * events
    for sent in range(total):  # stream after stream, evenly over time
        due = start + sent / (streams * events_per_s)
        while (early := due - time.monotonic()) > 0.001:  # noqa: ASYNC110 - the pace itself
            await asyncio.sleep(early)
        ordered[sent % streams].tick()
        if sent % 64 == 0:
            await asyncio.sleep(0)
    pipe.send({"sent": total, "seconds": time.monotonic() - start})
    await asyncio.sleep(1)


def emitter(pipe: Pipe, streams: int, events_per_s: float, events: int) -> None:
    uvloop.run(emit(pipe, streams, events_per_s, events))


async def receive(port: int, streams: int, timeout_s: float) -> dict[str, object]:
    client = Client(parse_target(f"http://127.0.0.1:{port}"), keep_text=True)
    await client.warm_connections(streams)
    now = time.monotonic_ns()
    job = Job(index=0, path="/v1/chat/completions", body=b'{"model": "m"}', phase=Phase.MEASURED, prompt_id="",
              scheduled_monotonic_ns=now)  # fmt: skip
    with LagMonitor() as monitor:
        records = await asyncio.gather(*(client.stream(job, timeout_s=timeout_s) for _ in range(streams)))
        start = min(record.chunks[0].at_monotonic_ns for record in records)
        end = max(record.chunks[-1].at_monotonic_ns for record in records)
        lag = monitor.between(start, end)
    client.close()
    delays_s = [
        (chunk.at_monotonic_ns - int(sent)) * 1e-9
        for record in records
        for chunk, sent in zip(record.chunks, (record.text or "").split(), strict=True)
    ]
    delay = summarize(delays_s, with_intervals=False)
    seconds = (end - start) * 1e-9
    return {
        "failed_streams": sum(record.is_failure for record in records),
        "events": len(delays_s),
        "events_per_s": round(len(delays_s) / seconds),
        "client_cpu_fraction": lag.cpu_fraction,
        "client_cpu_us_per_event": None
        if lag.cpu_fraction is None
        else lag.cpu_fraction * seconds * 1e6 / len(delays_s),
        "client_lag_s": {"p50": lag.event_loop_s.p50, "p99": lag.event_loop_s.p99, "max": lag.event_loop_s.max},
        "stamp_after_write_s": {"min": delay.min, "p50": delay.p50, "p99": delay.p99, "max": delay.max},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--events-per-s", type=float, default=100.0, help="of each stream")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("-o", "--output", type=Path, default=_RESULTS)
    asked = parser.parse_args()
    events = round(asked.events_per_s * asked.seconds)
    mine, theirs = multiprocessing.Pipe()
    arguments = (theirs, asked.streams, asked.events_per_s, events)
    child = multiprocessing.get_context("spawn").Process(target=emitter, args=arguments, daemon=True)
    child.start()
    port = mine.recv()
    received = uvloop.run(receive(port, asked.streams, asked.seconds * 10 + 60))
    server = mine.recv() if mine.poll(10) else None
    child.terminate()
    child.join(10)
    load = {"streams": asked.streams, "asked_events_per_s": round(asked.streams * asked.events_per_s)}
    record = {"machine": describe_machine(), **load, "server": server, "client": received}
    text = orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()
    asked.output.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
