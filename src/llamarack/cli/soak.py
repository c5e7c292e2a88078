"""`llamarack soak FILE|URL --hours H`: a steady load for hours, a report, a verdict."""

from __future__ import annotations

import asyncio
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from llamarack.cli.bench import opened, read_key, require_target
from llamarack.cli.early_end import cancel_on_signals
from llamarack.cli.serve import StateDir
from llamarack.errors import UsageError
from llamarack.measure.client import Client
from llamarack.measure.prompts import FromFile, load_questions
from llamarack.measure.rack import RackSource
from llamarack.measure.result import new_folder
from llamarack.measure.server import ask_server
from llamarack.measure.soak import Soak, SoakSettings, run_soak
from llamarack.measure.soak_result import soak_result, to_json
from llamarack.measure.target import Endpoint, Target
from llamarack.report.soak import RESULT_NAME, print_soak, write_soak_report
from llamarack.units import format_duration


def soak(
    target: Annotated[str, typer.Argument(metavar="FILE|URL", help="a deployment file, or the URL of any server")],
    hours: Annotated[float, typer.Option(min=0.0, help="how long")] = 24.0,
    model: Annotated[str | None, typer.Option(help="default: the only one that is served")] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="chat or completions")] = Endpoint.CHAT,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at once, all the time")] = 4,
    output_tokens: Annotated[int, typer.Option(min=1, help="of each answer, at most")] = 64,
    prompts: Annotated[str, typer.Option(help="JSON lines with `prompt`, business-zh or business-en")] = "business-en",
    sample: Annotated[float, typer.Option(min=0.05, help="seconds between looks at the memory")] = 10.0,
    api_key_file: Annotated[Path | None, typer.Option(help="default: LLAMARACK_API_KEY or OPENAI_API_KEY")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="authority of an https target")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="new folder for record and report")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the record")] = False,
    state_dir: StateDir = None,
) -> None:
    """Load a server for hours and judge it. GO (0), NO-GO (6), INCONCLUSIVE (7).

    A FILE is served for the time unless it is running already; its memory is then watched as well.
    """
    require_target(target, "soak")
    if hours <= 0:
        raise UsageError(f"`--hours {hours:g}` must be above 0", hint="--hours 24, or --hours 0.1 for a trial")
    folder = new_folder(output, kind="soak", marker=RESULT_NAME)
    options = {
        "model": model,
        "endpoint": endpoint,
        "concurrency": concurrency,
        "output_tokens": output_tokens,
        "prompts": prompts,
        "sample_s": sample,
        "duration_s": hours * 3600,
    }
    key = read_key(api_key_file)
    code = asyncio.run(_soak(target, state_dir, folder, key, ca_file, options, json))
    raise typer.Exit(code)


async def _soak(
    target: str,
    state_dir: Path | None,
    folder: Path,
    key: str | None,
    ca_file: Path | None,
    options: dict[str, Any],
    json: bool,
) -> int:
    async with opened(target, key, ca_file, folder, state_dir=state_dir, is_strict=False) as (server, rack):
        return await _run(server, rack, folder, options, json, Console(stderr=True))


async def _run(
    target: Target, rack: RackSource | None, folder: Path, options: dict[str, Any], json: bool, people: Console
) -> int:
    client = Client(target)
    try:
        served = await ask_server(client, model=options["model"], endpoint=options["endpoint"])
    finally:
        client.close()
    settings = SoakSettings(
        target=target,
        served=served,
        prompts=FromFile(
            name=options["prompts"], questions=load_questions(options["prompts"]), seed=secrets.randbits(32)
        ),
        duration_s=options["duration_s"],
        concurrency=options["concurrency"],
        output_tokens=options["output_tokens"],
        sample_s=options["sample_s"],
    )

    received = cancel_on_signals(once=True)
    people.print(f"soaks {target.url} for {format_duration(settings.duration_s)}; Ctrl-C ends it with a report")
    progress = _Progress(settings, folder, people)
    seen = await run_soak(settings, read_status=None if rack is None else rack.status, on_progress=progress.tell)
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
    result = soak_result(seen, settings)
    page = write_soak_report(result, folder)
    if json:
        sys.stdout.buffer.write(to_json(result))
        sys.stdout.flush()
    else:
        print_soak(result, Console())
    people.print(f"report: {page}", highlight=False, soft_wrap=True)
    return received[0] if received else result.exit_code


class _Progress:
    """A line now and then, and the record so far, so that a machine that dies leaves what was seen."""

    def __init__(self, settings: SoakSettings, folder: Path, people: Console) -> None:
        self._settings = settings
        self._folder = folder
        self._people = people
        self._every_s = min(600.0, max(10.0, settings.duration_s / 50))
        self._next_s = self._every_s

    def tell(self, seen: Soak) -> None:
        if seen.lasted_s < self._next_s:
            return
        self._next_s += self._every_s
        result = soak_result(seen, self._settings)
        (self._folder / RESULT_NAME).write_bytes(to_json(result))
        self._people.print(
            f"{format_duration(seen.lasted_s)}: {result.requests:,} requests, {result.failures} failed, "
            f"{result.stalls.count} pauses, {result.tokens_per_s:.1f} tokens/s",
            highlight=False,
        )
