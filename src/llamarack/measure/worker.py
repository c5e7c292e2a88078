"""A worker process: told its share of the load on standard input, answers one JSON line an event.

    in   the order (pickled, hex), then `measure START_NS`, then `stop`
    out  "warm", "done", {"phase", "finished", "failed"} so far, and {"report"} (pickled, hex) as the last line

Records go straight to the run's file, one write a line, so that a killed run keeps what it had.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop

from llamarack.measure.client import Client
from llamarack.measure.lag import Lag, LagMonitor
from llamarack.measure.load import ClosedLoop, LoadRun, Share, Signals
from llamarack.measure.record import Phase, RequestRecord, to_json_line
from llamarack.measure.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything a worker is told. Pickled between two processes of one program, never read from a file."""

    share: Share
    target: Target
    records_path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """`lag`: between the first measured send and the last measured end; of the whole run without one."""

    worker: int
    lag: Lag
    connect_s: tuple[float, ...]


async def work(order: Order, commands: asyncio.StreamReader) -> WorkerReport:
    share = order.share
    client = Client(order.target, worker=share.worker, point=share.point, repeat=share.repeat)
    records = os.open(order.records_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    window = [2**63, 0]
    finished = failed = 0

    def on_record(record: RequestRecord) -> None:
        nonlocal finished, failed
        os.write(records, to_json_line(record))
        if record.phase is Phase.MEASURED:
            window[0] = min(window[0], record.sent_monotonic_ns or record.scheduled_monotonic_ns)
            window[1] = max(window[1], record.finished_monotonic_ns)
            finished, failed = finished + 1, failed + record.is_failure
        _say({"phase": record.phase, "finished": finished, "failed": failed}, may_drop=True)

    signals = Signals(on_record=on_record, on_warm=lambda: _say("warm"), on_done=lambda: _say("done"))
    obeying = asyncio.create_task(_obey(commands, signals))
    started_ns = time.monotonic_ns()
    try:
        with LagMonitor() as monitor:
            if isinstance(share.loop, ClosedLoop):
                await _warm_connections(client, share.loop.slots)
            await LoadRun(share, client, signals).run()
            lag = monitor.between(*window) if window[1] else monitor.between(started_ns, time.monotonic_ns())
    finally:
        obeying.cancel()
        client.close()
        os.close(records)
    return WorkerReport(worker=share.worker, lag=lag, connect_s=tuple(client.connect_s))


async def _warm_connections(client: Client, count: int) -> None:
    try:
        await client.warm_connections(count)
    except OSError:
        pass  # the requests will fail by themselves and say why


async def _obey(commands: asyncio.StreamReader, signals: Signals) -> None:
    """The end of standard input means that the parent is gone, and stops too."""
    while line := await commands.readline():
        command, _, value = line.strip().partition(b" ")
        if command == b"measure":
            signals.start_monotonic_ns = int(value)
            signals.measure.set()
        else:
            break
    signals.stop.set()


def _say(value: Any, *, may_drop: bool = False) -> None:
    """Progress is dropped where the parent is behind with reading: waiting for it would delay the stamps."""
    os.set_blocking(sys.stdout.fileno(), not may_drop)
    try:
        os.write(sys.stdout.fileno(), orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE))
    except BlockingIOError:
        assert may_drop
    except BrokenPipeError:
        pass  # the parent is gone; the end of standard input stops this worker in order


async def _main() -> None:
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    order = pickle.loads(bytes.fromhex((await commands.readline()).decode().strip()))
    report = await work(order, commands)
    _say({"report": pickle.dumps(report).hex()})


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one file a connection
    uvloop.run(_main())
