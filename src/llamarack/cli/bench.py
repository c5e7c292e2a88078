"""`llamarack bench URL|FILE`: measure an OpenAI-compatible server, print a table, leave records and a report.

A deployment file that is not running is started for the measurement and stopped after it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from llamarack.cli.bench_progress import BenchProgress
from llamarack.cli.console import people, print_entry
from llamarack.cli.early_end import EXIT_INTERRUPTED, cancel_on_signals
from llamarack.cli.facts import leave_facts
from llamarack.cli.serving import load_target, rack_name
from llamarack.cli.started_rack import started_rack
from llamarack.config import Deployment
from llamarack.errors import NothingRunning, UsageError
from llamarack.measure.arrivals import Arrivals
from llamarack.measure.point import Level
from llamarack.measure.rack import RackSource
from llamarack.measure.result import BenchResult, new_folder, to_json
from llamarack.measure.run import run_bench
from llamarack.measure.settings import Settings
from llamarack.measure.slo import parse_slo
from llamarack.measure.target import Endpoint, Target, parse_target
from llamarack.paths import rack_paths
from llamarack.plan.calibration import Calibration, calibration_path, remember
from llamarack.report.terminal import print_bench
from llamarack.report.write import write_bench_report
from llamarack.supervise.admin import ask
from llamarack.supervise.effective import deployment_sha256
from llamarack.units import parse_duration_s

Number = TypeVar("Number", int, float)
_EXIT_INVALID = 7
_CONCURRENCY = "1,8"
_UNSET = Target(url="", host="", port=0)  # known once the rack is there


def bench(
    target: Annotated[
        str,
        typer.Argument(metavar="URL|FILE", help="with or without /v1; unix:///path; or a deployment file or model"),
    ],
    model: Annotated[str | None, typer.Option(help="default: the only one that is served")] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="chat or completions")] = Endpoint.CHAT,
    concurrency: Annotated[str | None, typer.Option(help="closed loop: requests at once, a list; default: 1,8")] = None,
    rate: Annotated[str | None, typer.Option(help="open loop instead: requests per second, a list")] = None,
    arrivals: Annotated[Arrivals, typer.Option(help="of an open loop: poisson or constant")] = Arrivals.POISSON,
    requests: Annotated[int | None, typer.Option(min=1, help="per level; default: 30, or 10 x concurrency")] = None,
    duration: Annotated[str | None, typer.Option(help="per level instead, such as 60s or 5m")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="of the whole sweep, interleaved; 3 give an interval")] = 1,
    input_tokens: Annotated[int, typer.Option(min=1, help="of each prompt, template included")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="of each answer; with --prompts at most")] = 128,
    prompts: Annotated[str | None, typer.Option(help="JSON lines with `prompt`, business-zh or business-en")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json to count prompts with")] = None,
    warm_cache: Annotated[bool, typer.Option("--warm-cache", help="let the server reuse prompts")] = False,
    slo: Annotated[str | None, typer.Option(help="promise in ms for goodput: ttft:500,tpot:50,e2el:9000")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="client processes; default: by load")] = None,
    timeout: Annotated[str, typer.Option(help="of one request")] = "10m",
    seed: Annotated[int | None, typer.Option(help="of prompts and arrivals; default: fresh, so no cache helps")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="default: LLAMARACK_API_KEY or OPENAI_API_KEY")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="authority of an https target")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="new folder for records and report")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the result record")] = False,
) -> None:
    """Measure a server under load. Exit code 7 when the run proves nothing.

    A FILE whose rack runs is measured as it runs; otherwise it is started for this and stopped again.
    """
    require_target(target, "bench")
    if concurrency is not None and rate is not None:
        raise UsageError("`--concurrency` and `--rate` exclude each other", hint=f"--rate {rate}")
    if requests is not None and duration is not None:
        raise UsageError("`--requests` and `--duration` exclude each other", hint=f"--duration {duration}")
    settings = Settings(
        target=_UNSET,
        levels=levels(concurrency or _CONCURRENCY, rate),
        folder=new_folder(output),
        model=model,
        endpoint=endpoint,
        arrivals=arrivals,
        requests=requests,
        duration_s=None if duration is None else seconds("--duration", duration),
        repeats=repeat,
        prompts=prompts,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        tokenizer=tokenizer,
        is_cache_wanted=warm_cache,
        slo=None if slo is None else parse_slo(slo),
        slo_text=slo,
        workers=workers,
        timeout_s=seconds("--timeout", timeout),
        seed=secrets.randbits(32) if seed is None else seed,
    )
    result, exit_code = asyncio.run(_run(settings, target, read_key(api_key_file), ca_file))
    _tell(result, settings.folder, json)
    raise typer.Exit(exit_code)


def _tell(result: BenchResult, folder: Path, json: bool) -> None:
    """Reports beside the records, the result on stdout, what it teaches into the calibration."""
    written = write_bench_report(result, folder)
    if json:
        sys.stdout.buffer.write(to_json(result))
        sys.stdout.flush()
    else:
        print_bench(result, Console())
    if result.plan is not None and result.plan.lesson is not None:
        _learn(result.plan.lesson)
    people.print(f"report: {escape(str(written))}")


def _learn(lesson: Calibration) -> None:
    """What cannot be kept costs the next plan its precision, not this run its result."""
    try:
        remember(lesson, calibration_path())
    except UsageError as error:
        people.print(f"[yellow]not learnt from[/]: {escape(error.message)}")


async def _run(settings: Settings, target: str, key: str | None, ca_file: Path | None) -> tuple[BenchResult, int]:
    """Ctrl-C and SIGTERM end the run early; what was measured is kept."""
    received = cancel_on_signals()
    try:
        async with opened(target, key, ca_file, settings.folder) as (server, rack):
            with BenchProgress(settings, Console(stderr=True)) as progress:
                result = await run_bench(replace(settings, target=server, rack=rack), progress.on_step)
            if rack is not None:
                paths = rack_paths(rack_name(Path(target)))
                leave_facts(rack.deployment, settings.model, settings.folder, paths, is_valid=result.valid)
    except asyncio.CancelledError:
        raise typer.Exit(received[0] if received else EXIT_INTERRUPTED) from None
    return result, received[0] if received else 0 if result.valid else _EXIT_INVALID


def require_target(target: str, command: str) -> None:
    """Before a folder is made for it. Raises UsageError."""
    if "://" not in target and not Path(target).exists():
        raise UsageError(f"`{target}` is neither a URL nor a file", hint=f"llamarack {command} http://{target}")


@asynccontextmanager
async def opened(
    target: str,
    key: str | None,
    ca_file: Path | None,
    folder: Path,
    *,
    state_dir: Path | None = None,
    is_strict: bool = True,
) -> AsyncIterator[tuple[Target, RackSource | None]]:
    """The server of a URL; the running rack of a file; or one that is started here and gone afterwards, whose logs
    stay in `folder`; `is_strict`: see `started_rack`. Raises what a start raises.
    """
    if "://" in target:
        yield parse_target(target, api_key=key, ca_file=ca_file), None
        return
    deployment = load_target(Path(target), host=None, port=None)
    paths = rack_paths(rack_name(Path(target)), state_dir)
    try:
        record = await ask(paths, {"op": "status"})
    except NothingRunning:
        people.print(f"`{target}` is not running: it is started for this measurement")
        rack = started_rack(deployment, folder=folder / "rack", on_entry=print_entry, is_strict=is_strict)
        async with rack as started:
            yield (
                parse_target(started.base_url, api_key=started.api_key),
                RackSource(paths=started.paths, deployment=deployment),
            )
        return
    require_own_rack(record, Path(target), deployment)
    gateway = record["gateway"]
    url = f"{'https' if gateway['tls'] else 'http'}://{gateway['host']}:{gateway['port']}"
    yield parse_target(url, api_key=key, ca_file=ca_file), RackSource(paths=paths, deployment=deployment)


def require_own_rack(record: Mapping[str, Any], file: Path, deployment: Deployment) -> None:
    """A rack is found by the file's name, and `rack.yaml` may lie in many folders. An edit that was not reloaded yet
    passes: a running rack is measured as it runs. Raises UsageError."""
    source = record.get("source")
    if source is None or Path(source["path"]).resolve() == file.resolve():
        return
    if record.get("deployment_sha256") == deployment_sha256(deployment):
        return
    raise UsageError(
        f"rack `{record['rack']}` runs, but from `{source['path']}`, not from `{file}`",
        hint=f"llamarack stop --rack {record['rack']}; or give this file another name: a rack is called after it",
    )


def levels(concurrency: str, rate: str | None) -> tuple[Level, ...]:
    if rate is not None:
        return tuple(Level(rate_per_s=_number("--rate", part, float)) for part in rate.split(","))
    return tuple(Level(concurrency=_number("--concurrency", part, int)) for part in concurrency.split(","))


def _number(option: str, text: str, kind: type[Number]) -> Number:
    try:
        value = kind(text)
    except ValueError:
        value = kind(0)
    if not 0 < value < 1_000_000:
        raise UsageError(f"`{option}` `{text}` is not a number above 0", hint=f"{option} 1,8,64")
    return value


def seconds(option: str, text: str) -> float:
    try:
        value = parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"`{option}`: {error}") from error
    if value <= 0:
        raise UsageError(f"`{option}` must be above 0; `{text}` given", hint=f"{option} 60s")
    return value


def read_key(path: Path | None) -> str | None:
    """From the file, else from the environment; one line of visible ASCII."""
    if path is None:
        key = os.environ.get("LLAMARACK_API_KEY") or os.environ.get("OPENAI_API_KEY") or None
    else:
        try:
            key = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"`--api-key-file {path}`: cannot be read", hint=f"ls -l {path}") from error
    if key is not None and not (key.isascii() and key.isprintable() and key and " " not in key):
        raise UsageError("the API key is not one word of visible characters", hint="--api-key-file FILE")
    return key
