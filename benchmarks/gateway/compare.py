"""Our gateway against its peers: the same fake engine, the same client, the same cores, one run.

python -m benchmarks.gateway.compare --peers /path/to/environments [--nginx /usr/sbin/nginx] [--repeats 5]

Engine and client share core 0, the gateway under test has core 1 alone. Every repeat visits all gateways in another
order; all run from start to end, since an idle one costs nothing. Ours runs as it is served: admission, accounting
and keys on, and reaches the engine by a Unix socket: engines in a rack listen at nothing else. The peers know engines
by port, and one row shows ours so. Access logs are off everywhere. Medians of the repeats with their spread;
percentiles of first tokens are of all repeats together. "Added" is less what the client sees of the engine itself: it
can be negative at the 99th percentile, since the engine steps all its streams in one go and a gateway takes up the
first tokens before the rest.

Streams are a closed loop: each connection asks again as soon as it is answered. "128 streams": all begin at once, and
those that begin after the warm-up are measured. "128 begun apart": their first requests are spread over the warm-up,
which is what a service with 128 users sees. "128 in one instant": all wait until the last is answered, and begin again
together.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gateway.gateways import VERSIONS, commands, find_nginx, free_port, resident_bytes, running
from benchmarks.machine import describe_machine
from llamarack.engine.dialect import Endpoint
from llamarack.gateway.keys import Key, KeyFile, new_key, write_keys
from llamarack.supervise.state import State
from llamarack.supervise.table import ReplicaRow
from tests.rigs import gateway_worker

_HERE = Path(__file__).parent
_RESULTS = _HERE.parent / "results"
_ENGINE_CORE, _GATEWAY_CORE = 0, 1
_STEP_US = 10_000
# name -> (engine, body, concurrency, seconds, starts)
TESTS: dict[str, tuple[str, str, int, float, str]] = {
    "short, 1 at once": ("steps", "short", 1, 1.0, "loop"),
    "short, 32 at once": ("steps", "short", 32, 1.2, "loop"),
    "1,000 tokens, 1 at once": ("steps", "long", 1, 1.0, "loop"),
    "1,000 tokens, 32 at once": ("steps", "long", 32, 1.2, "loop"),
    "16 streams": ("steps", "stream", 16, 2.0, "loop"),
    "128 streams": ("steps", "stream", 128, 2.0, "loop"),
    "128 begun apart": ("steps", "stream", 128, 2.0, "apart"),
    "128 in one instant": ("steps", "stream", 128, 3.0, "instant"),
    "16 streams, no pause": ("flood", "flood", 16, 1.2, "loop"),
}
_STREAMS = ("16 streams", "128 streams", "128 begun apart", "128 in one instant")


def bodies(folder: Path) -> dict[str, Path]:
    words = ["river", "stone", "harbour", "morning", "grain", "window", "signal", "copper"]
    text = " ".join(words[i % 8] + str(i % 97) for i in range(500))  # some 1,000 tokens
    message = {"short": "number @@@@@@@@", "long": f"number @@@@@@@@ {text}"}
    made = {}
    for name in ("short", "long", "stream", "flood"):
        content = message["long" if name == "long" else "short"]
        value: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": content}]}
        if name in {"stream", "flood"}:
            value["stream"] = True
        raw = json.dumps(value)[:-1] + (', "max_tokens": 500}' if name == "flood" else ', "max_tokens": %%}')
        made[name] = folder / f"{name}.json"
        made[name].write_text(raw)
    return made


def build(folder: Path) -> None:
    for name in ("engine", "client"):
        subprocess.run(["g++", "-O2", "-o", str(folder / name), str(_HERE / f"{name}.cc")], check=True)


@contextlib.contextmanager
def engine(folder: Path, step_us: int) -> Any:
    """Its port; it listens at `engine.sock` in `folder` too."""
    port = free_port()
    argv = ["taskset", "-c", str(_ENGINE_CORE), str(folder / "engine"), str(port), str(step_us)]
    argv.append(str(folder / "engine.sock"))
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield port
    finally:
        process.kill()
        process.wait()


def measure(
    folder: Path, port: int, body: Path, concurrency: int, seconds: float, key: str | None, starts: str = "loop"
) -> dict[str, Any]:
    headers = [f"Authorization: Bearer {key}"] if key else []
    argv = ["taskset", "-c", str(_ENGINE_CORE), str(folder / "client"), str(port), str(concurrency), str(seconds)]
    done = subprocess.run([*argv, starts, str(body), *headers], capture_output=True, timeout=60, check=True)
    value: dict[str, Any] = json.loads(done.stdout)
    return value


@contextlib.asynccontextmanager
async def ours(folder: Path, engine: Endpoint, name: str, http: str) -> Any:
    """(port, pid, key). Slots above every concurrency here, so that what is measured is the way and not the queue."""
    folder = folder / name
    folder.mkdir()
    key, digest = new_key()
    write_keys(folder / "keys.yaml", KeyFile(keys=[Key(name="bench", sha256=digest, created_unix_s=1)]))
    row = ReplicaRow(
        id="fake-0",
        model="fake",
        engine="vllm",
        state=State.READY,
        endpoint=engine,
        slots=512,
        context_tokens=100_000,
    )
    os.environ["LLAMARACK_GATEWAY_HTTP"] = http
    async with gateway_worker(folder, [row], access_log="off", api_keys_file=folder / "keys.yaml") as gateway:
        os.sched_setaffinity(gateway.process.pid, {_GATEWAY_CORE})
        yield gateway.port, gateway.process.pid, key


async def run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    build(folder)
    files = bodies(folder)
    results: dict[str, dict[str, list[Any]]] = {}
    memory: dict[str, list[float | None]] = {}
    os.sched_setaffinity(0, {_ENGINE_CORE})
    for kind, step_us in (("steps", _STEP_US), ("flood", 0)):
        tests = {name: test for name, test in TESTS.items() if test[0] == kind}
        home = folder / kind
        home.mkdir()
        async with contextlib.AsyncExitStack() as stack:
            port = stack.enter_context(engine(folder, step_us))
            ways: dict[str, tuple[int, str | None, int | None]] = {"direct": (port, None, None)}
            local = Endpoint(socket=folder / "engine.sock", port=None, key="k", served_name="fake")
            for name, http, endpoint in (
                ("llamarack", "fast", local),
                ("llamarack, engine by TCP", "fast", replace(local, socket=None, port=port)),
                ("llamarack over aiohttp", "aiohttp", local),
            ):
                if given.only and name not in given.only:
                    continue
                way = await stack.enter_async_context(ours(home, endpoint, name.replace(" ", "-"), http))
                ways[name] = (way[0], way[2], way[1])
            for name, (argv, at, key) in commands(given.peers, find_nginx(given.nginx), home, port).items():
                if given.only and name not in given.only:
                    continue
                process = stack.enter_context(running(argv, at, key, _GATEWAY_CORE, home / f"{name}.log"))
                ways[name] = (at, key, process.pid)
            idle = {name: resident_bytes(pid) if pid else None for name, (_, _, pid) in ways.items()}
            for repeat in range(given.repeats):
                order = list(ways)
                random.Random(repeat).shuffle(order)
                for name in order:
                    at, key, _ = ways[name]
                    for test, (_, body, concurrency, seconds, starts) in tests.items():
                        found = await asyncio.to_thread(
                            measure, folder, at, files[body], concurrency, seconds * given.scale, key, starts
                        )
                        results.setdefault(name, {}).setdefault(test, []).append(found)
            for name, (_, _, pid) in ways.items():
                if kind == "steps":
                    memory[name] = [idle[name], resident_bytes(pid) if pid else None]
    return {"results": results, "memory": memory}


def percentile(values: list[int], share: float) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1000


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """By gateway and test: rates as (median, least, most), milliseconds of all repeats together."""
    out: dict[str, Any] = {}
    for name, tests in found["results"].items():
        out[name] = {"memory_bytes_idle_and_after": found["memory"].get(name)}
        for test, runs in tests.items():
            per_s = [run["requests"] / run["seconds"] for run in runs]
            events = [run["events"] / run["seconds"] for run in runs]
            first = [each for run in runs for each in run["first_us"]]
            whole = [each for run in runs for each in run["whole_us"]]
            out[name][test] = {
                "requests_per_s": [statistics.median(per_s), min(per_s), max(per_s)],
                "events_per_s": [statistics.median(events), min(events), max(events)],
                "first_ms_p50": percentile(first, 0.5),
                "first_ms_p99": percentile(first, 0.99),
                "first_n": len(first),
                "whole_ms_p50": percentile(whole, 0.5),
                "whole_ms_p99": percentile(whole, 0.99),
                "failures": sum(run["failures"] for run in runs),
            }
    return out


def table(rows: dict[str, Any], repeats: int) -> str:
    def rate(name: str, test: str, what: str) -> str:
        middle, low, high = rows[name][test][what]
        return f"{middle:,.0f} ({low:,.0f}-{high:,.0f})"

    def added(name: str, test: str, what: str) -> str:
        own, base = rows[name][test][what], rows["direct"][test][what]
        if own is None or base is None:
            return "-"
        return f"{own:.2f}" if name == "direct" else f"{own - base:.2f}"

    lines = [
        "## Requests a second, not streaming",
        "| | short, 1 at once | short, 32 at once | 1,000 tokens, 1 at once | 1,000 tokens, 32 at once |",
        "|---|---|---|---|---|",
    ]
    order = sorted(rows, key=lambda n: (n != "direct", -rows[n]["short, 32 at once"]["requests_per_s"][0]))
    whole = [name for name, test in TESTS.items() if test[1] in {"short", "long"}]
    for name in order:
        lines.append(f"| {name} | " + " | ".join(rate(name, test, "requests_per_s") for test in whole) + " |")
    lines += [
        "",
        "## Streams: added first token in ms (of the engine itself: whole), and events a second",
        "| | " + " | ".join(f"{name} p50 | p99" for name in _STREAMS) + " | events/s of 128 | of 16, no pause |",
        "|---|" + "---|" * (2 * len(_STREAMS) + 2),
    ]
    for name in order:
        cells = [added(name, test, f"first_ms_{p}") for test in _STREAMS for p in ("p50", "p99")]
        cells += [rate(name, test, "events_per_s") for test in ("128 streams", "16 streams, no pause")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Memory (proportional set size, MiB) and failed requests",
        "| | idle | after | failed |",
        "|---|---|---|---|",
    ]
    for name in order:
        idle, after = rows[name]["memory_bytes_idle_and_after"] or (None, None)
        failed = sum(rows[name][test]["failures"] for test in TESTS)
        cells = [f"{each / 2**20:.0f}" if each else "-" for each in (idle, after)]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {failed} |")
    return "\n".join(lines) + f"\n\nMedians of {repeats} repeats (least-most).\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path("/nonexistent"))
    parser.add_argument("--nginx")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the seconds of each test")
    parser.add_argument("--only", action="append", help="a gateway's name; several times")
    parser.add_argument("-o", "--output", type=Path, default=_RESULTS / "gateway_peers", help="without an ending")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    started = time.monotonic()
    about_machine = describe_machine()  # before this process keeps to one core
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(run(given, Path(name)))
    rows = summary(found)
    text = table(rows, given.repeats)
    print(text)
    record = {
        "schema_version": 1,
        "machine": about_machine,
        "versions": {**VERSIONS, "nginx": "Debian's"},
        "repeats": given.repeats,
        "seconds": round(time.monotonic() - started, 1),
        "gateways": rows,
    }
    given.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    machine = record["machine"]
    about = f"# Our gateway and its peers\n\n{(__doc__ or '').strip()}\n\n"
    about += f"{machine['processor']}, {machine['cores_usable']} cores, Linux {machine['kernel']}, Python "
    about += f"{machine['python']}, {machine['date']}; " + ", ".join(f"{k} {v}" for k, v in VERSIONS.items()) + ".\n\n"
    given.output.with_suffix(".md").write_text(about + text)


if __name__ == "__main__":
    main()
