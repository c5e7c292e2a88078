"""`llamarack tune FILE|MODEL`: measure settings of one model by goodput under a promise, write the better file.

`tune_command(start)` makes the command; how a deployment is started is given to it, so that it can be tried without an
engine.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from llamarack.cli.bench import levels, seconds
from llamarack.cli.early_end import EXIT_INTERRUPTED, cancel_on_signals
from llamarack.cli.serving import load_target, rack_name
from llamarack.cli.started_rack import started_rack
from llamarack.config import Deployment, plain, to_yaml
from llamarack.engine.version import engine_version
from llamarack.errors import InvalidRun, UsageError
from llamarack.hardware.detect import detect_machine
from llamarack.measure.point import Level
from llamarack.measure.rack import RackSource, fullest_card_fraction
from llamarack.measure.result import environment, new_folder
from llamarack.measure.run import Step
from llamarack.measure.settings import Settings, num_requests
from llamarack.measure.slo import parse_slo
from llamarack.measure.target import Target, parse_target
from llamarack.measure.tune import CONFIRMATIONS, MAX_CONFIRMATIONS, Budget, Found, Outcome, Space, Trial, search
from llamarack.measure.tune_record import Load, TuneResult, WeightsUsed, to_json, write_tune
from llamarack.measure.tune_run import REQUESTS_PER_SLOT, Listening, Rack, StartRack, measuring, tuned_path
from llamarack.measure.tune_space import (
    Allowed,
    Others,
    Subject,
    deployment_of,
    only_model,
    own_sequences,
    space_of,
    subject_of,
)
from llamarack.model.read import read_model
from llamarack.paths import rack_paths
from llamarack.report.terminal import table_lines
from llamarack.report.tune import (
    conclusion,
    failures_table,
    levels_table,
    outcome_line,
    requests_text,
    trial_name,
    trials_table,
    write_tune_report,
)
from llamarack.report.write import write_bench_report
from llamarack.supervise.rack_lock import is_running
from llamarack.units import format_duration

_EXIT_INCONCLUSIVE = 7
_FIRST_TRIAL = "trial-1"  # is in the folder of every run
_UNSET = Target(url="", host="", port=0)  # each trial has its own


def tune_command(start: StartRack) -> Callable[..., None]:
    def tune(
        file: Annotated[Path, typer.Argument(metavar="FILE|MODEL", help="deployment file, or a model as it is")],
        slo: Annotated[str, typer.Option(help="the promise, in ms")] = "ttft:1000,tpot:100",
        model: Annotated[str | None, typer.Option(help="default: the only one of the file")] = None,
        concurrency: Annotated[
            str | None, typer.Option(help="requests at once, a list; default: half, once and twice the sequences")
        ] = None,
        rate: Annotated[str | None, typer.Option(help="open loop instead: requests per second, a list")] = None,
        requests: Annotated[int | None, typer.Option(min=20, help="per load and setting")] = None,
        input_tokens: Annotated[int, typer.Option(min=1, help="of each prompt")] = 256,
        output_tokens: Annotated[int, typer.Option(min=1, help="of each answer")] = 128,
        prompts: Annotated[
            str | None, typer.Option(help="JSON lines with `prompt`, business-zh or business-en")
        ] = None,
        batch_tokens: Annotated[str | None, typer.Option(help="a list; default: 128, 256, ... to the knee")] = None,
        sequences: Annotated[str | None, typer.Option(help="a list; default: doubled from the file's")] = None,
        context: Annotated[str | None, typer.Option(help="a list of contexts that would do as well")] = None,
        also: Annotated[
            str | None, typer.Option(help="a list of other weights of the same model: quantisations, formats")
        ] = None,
        engine_python: Annotated[Path | None, typer.Option(help="interpreter with vLLM, for --also")] = None,
        engine_binary: Annotated[Path | None, typer.Option(help="llama-server, for --also")] = None,
        confirm: Annotated[
            int, typer.Option(min=CONFIRMATIONS, max=MAX_CONFIRMATIONS, help="rounds that the gain is measured in")
        ] = CONFIRMATIONS,
        budget: Annotated[str | None, typer.Option(help="time for all of it, such as 30m")] = None,
        timeout: Annotated[str, typer.Option(help="of one request")] = "10m",
        output: Annotated[
            Path | None, typer.Option("-o", "--output", help="new file; default: NAME.tuned.yaml")
        ] = None,
        folder: Annotated[Path | None, typer.Option(help="new folder for the records")] = None,
        json: Annotated[bool, typer.Option("--json", help="print the result record")] = False,
    ) -> None:
        """Find the settings with the most goodput. Exit code 7 when nothing could be measured.

        Each setting is started, loaded and stopped. FILE is never changed.
        """
        promise = parse_slo(slo)
        allowed = Allowed(
            batch_tokens=None if batch_tokens is None else _numbers("--batch-tokens", batch_tokens),
            sequences=None if sequences is None else _numbers("--sequences", sequences),
            contexts=() if context is None else _numbers("--context", context),
        )
        target = output or tuned_path(file)
        _require_writable(target, file)
        deployment = load_target(file, host=None, port=None)
        if is_running(rack_paths(rack_name(file))):
            raise UsageError(
                f"`{file}` is running; its settings are tried one after the other on the same cards",
                hint=f"llamarack stop --rack {rack_name(file)}",
            )
        name = only_model(deployment, model)
        subject = _read_subject(deployment, name, also, engine_python, engine_binary)
        space = space_of(subject, allowed, input_tokens=0 if prompts else input_tokens, output_tokens=output_tokens)
        chosen = _levels(concurrency, rate, space, own_sequences(subject))
        settings = Settings(
            target=_UNSET,
            levels=chosen,
            folder=new_folder(folder, kind="tune", marker=_FIRST_TRIAL),
            requests=requests,
            requests_per_slot=REQUESTS_PER_SLOT,
            prompts=prompts,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            slo=promise,
            slo_text=slo,
            timeout_s=seconds("--timeout", timeout),
            seed=secrets.randbits(32),
        )
        run = _Run(file, subject, space, settings, Console(stderr=True, highlight=False, soft_wrap=True), confirm)
        total_s = None if budget is None else seconds("--budget", budget)
        result, exit_code = asyncio.run(run.run(start, Budget(total_s=total_s, now_s=time.monotonic)))
        if result.is_better and result.best is not None:
            target.write_text(to_yaml(deployment_of(subject, result.best)), encoding="utf-8")
            result = replace(result, written=str(target))
        run.tell(result, json)
        if exit_code == _EXIT_INCONCLUSIVE and not result.claims:
            raise InvalidRun(conclusion(result)[0], hint=_hint(result, file))
        raise typer.Exit(exit_code)

    return tune


class _Run:
    """Owns what was measured so far, and tells it as it comes."""

    def __init__(
        self, file: Path, subject: Subject, space: Space, settings: Settings, people: Console, confirmations: int
    ) -> None:
        self._space = space
        self._settings = settings
        self._subject = subject
        self._people = people
        self._confirmations = confirmations
        self._outcomes: list[Outcome] = []
        self._started_s = time.monotonic()
        now = environment(started_unix_s=time.time(), started_monotonic_ns=time.monotonic_ns())
        self._result = TuneResult(
            file=str(file),
            model=subject.model,
            environment=now,
            weights=tuple(
                WeightsUsed(
                    path=str(each.path),
                    engine=each.engine,
                    engine_version=engine_version(each.groups[0]),
                    precision=each.precision,
                    own=plain(each.own[0]),
                )
                for each in subject.weights
            ),
            load=_load(settings),
            start=space.start,
            outcomes=(),
            notes=_notes(settings.levels, own_sequences(subject)),
        )

    async def run(self, start: StartRack, budget: Budget) -> tuple[TuneResult, int]:
        """Ctrl-C and SIGTERM end it early; the trial that runs is stopped, what was measured is kept."""
        received = cancel_on_signals()
        self._say_what()
        listening = Listening(on_step=self._on_step, on_retry=self._on_retry, on_result=write_bench_report)
        measure = measuring(self._subject, start, self._settings, listening)
        try:
            found = await search(
                measure, self._space, self._on_outcome, confirmations=self._confirmations, budget=budget
            )
        except asyncio.CancelledError:
            result = replace(self._result, outcomes=tuple(self._outcomes), is_interrupted=True)
            return result, received[0] if received else EXIT_INTERRUPTED
        result = self._of(found)
        is_known = result.is_better or any(
            claim.gain_fraction is not None or claim.is_better for claim in result.claims
        )
        return result, 0 if is_known else _EXIT_INCONCLUSIVE

    def tell(self, result: TuneResult, json: bool) -> None:
        write_tune(result, self._settings.folder)
        page = write_tune_report(result, self._settings.folder)
        if json:
            sys.stdout.buffer.write(to_json(result))
            sys.stdout.flush()
        else:
            self._print(result)
        if result.written is not None:
            self._people.print(f"written: {escape(result.written)}")
        self._people.print(f"report: {escape(str(page))}")

    def _print(self, result: TuneResult) -> None:
        console = Console(highlight=False)
        for table in (trials_table(result), levels_table(result)):
            if table is None:
                continue
            for line in table_lines(table):
                console.print(line, soft_wrap=True, highlight=False)
            console.print(f"[dim]{escape(table.note or '')}[/]\n", soft_wrap=True)
        failures = failures_table(result)
        for name, why in failures.rows if failures is not None else ():
            console.print(f"[yellow]{escape(name)}[/]: {escape(why)}", soft_wrap=True)
        for sentence in conclusion(result):
            console.print(escape(sentence), soft_wrap=True)

    def _of(self, found: Found) -> TuneResult:
        return replace(
            self._result,
            outcomes=found.outcomes,
            best=None if found.best is None else found.best.trial,
            claims=found.claims,
            by_level=found.by_level,
            is_better=found.is_better,
            is_out_of_time=found.is_out_of_time,
        )

    def _say_what(self) -> None:
        first, load = self._result.weights[0], self._result.load
        levels = ", ".join(map(str, self._settings.levels))
        tokens = f"{load.prompts}, {load.output_tokens} tokens at most"
        if load.input_tokens is not None:
            tokens = f"{load.input_tokens} + {load.output_tokens} tokens"
        version = f" {first.engine_version}" if first.engine_version else ""
        self._people.print(
            f"{escape(self._subject.model)}: {first.precision} on {first.engine}{version}; promise "
            f"{load.slo}; {levels}; {requests_text(load.requests)} requests of {tokens} at each"
        )
        most = self._space.most_trials
        for note in self._result.notes:
            self._people.print(f"[yellow]note[/]: {escape(note)}")
        self._people.print(
            f"at most {most} settings, most searches end sooner; then {self._confirmations} rounds of the best beside "
            "the engine's own settings and the file"
        )

    def _on_step(self, trial: Trial, step: Step) -> None:
        if step.progress is not None:
            return
        name = trial_name(trial, self._result)
        if step.number == 0:
            taken = format_duration(time.monotonic() - self._started_s)
            self._people.print(f"[dim]{taken}[/] {len(self._outcomes) + 1}. {escape(name)}: {step.level}")
        else:
            self._people.print(f"[dim]   {step.level}[/]")

    def _on_retry(self, trial: Trial, reason: str) -> None:
        self._people.print(f"   [yellow]not valid, so once more[/]: {escape(reason)}")

    def _on_outcome(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._result = replace(self._result, outcomes=tuple(self._outcomes))
        write_tune(self._result, self._settings.folder)
        colour = "green" if outcome.is_usable else "yellow"
        self._people.print(f"   [{colour}]{escape(outcome_line(outcome, self._result))}[/]")


def _read_subject(
    deployment: Deployment, name: str, also: str | None, engine_python: Path | None, engine_binary: Path | None
) -> Subject:
    model = next(each for each in deployment.models if each.name == name)
    for option, path in (("--engine-python", engine_python), ("--engine-binary", engine_binary)):
        if path is not None and not path.exists():
            raise UsageError(f"`{option} {path}` is not there", hint=f"ls {path.parent}")
    paths = [] if also is None else [Path(part.strip()) for part in also.split(",") if part.strip()]
    others = Others(
        specs=tuple(map(read_model, paths)),
        engine_python=None if engine_python is None else engine_python.absolute(),
        engine_binary=None if engine_binary is None else engine_binary.absolute(),
    )
    fallbacks = {path: read_model(path) for path in model.fallbacks}
    return subject_of(deployment, name, read_model(model.path_of(model.groups[0])), others, detect_machine(), fallbacks)


def _levels(concurrency: str | None, rate: str | None, space: Space, own_sequences: int) -> tuple[Level, ...]:
    """By default half, once and twice the file's sequences, and the engine's own where those are fewer: each setting
    speaks by its best load, so each needs one that suits it.
    """
    if concurrency is not None and rate is not None:
        raise UsageError("`--concurrency` and `--rate` exclude each other", hint=f"--rate {rate}")
    if concurrency is not None or rate is not None:
        return levels(concurrency or "1", rate)
    own, mine = own_sequences, space.start.sequences or 1
    wanted = {max(1, mine // 2), mine, 2 * mine, *([own] if own < mine // 2 else [])}
    return tuple(Level(concurrency=each) for each in sorted(wanted))


def _notes(chosen: tuple[Level, ...], own_sequences: int) -> tuple[str, ...]:
    least = min((level.concurrency for level in chosen if level.concurrency is not None), default=0)
    if least <= own_sequences:
        return ()
    return (
        f"no load is as small as the {own_sequences} sequences that the engine itself runs, so its own settings look "
        f"worse here than they need to: add {own_sequences} to --concurrency",
    )


def _load(settings: Settings) -> Load:
    return Load(
        concurrency=tuple(level.concurrency for level in settings.levels if level.concurrency is not None),
        rates_per_s=tuple(level.rate_per_s for level in settings.levels if level.rate_per_s is not None),
        requests=tuple(num_requests(settings, level) for level in settings.levels),
        prompts=settings.prompts or "synthetic",
        input_tokens=None if settings.prompts else settings.input_tokens,
        output_tokens=settings.output_tokens,
        slo=settings.slo_text or "",
    )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Ascending, each once."""
    return tuple(sorted({level.concurrency or 0 for level in _whole_numbers(option, text)}))


def _whole_numbers(option: str, text: str) -> tuple[Level, ...]:
    try:
        return levels(text, None)
    except UsageError as error:
        raise UsageError(error.message.replace("--concurrency", option), hint=f"{option} 512,1024") from None


def _require_writable(target: Path, file: Path) -> None:
    """Before hours are measured for it."""
    if target.absolute() == file.absolute():
        raise UsageError(f"`-o {target}` is the file itself, which is never changed", hint=f"-o {tuned_path(file)}")
    if not target.parent.is_dir():
        raise UsageError(f"`-o {target}`: the folder is not there", hint=f"mkdir -p {target.parent}")


def _hint(result: TuneResult, file: Path) -> str:
    best = next((each for each in result.outcomes if each.trial == result.best), None)
    if best is not None and best.goodput_per_s == 0:
        return f"--slo with more than {result.load.slo}, or a lower --concurrency"
    return f"llamarack bench {file} shows what a load of it looks like"


@asynccontextmanager
async def _start(deployment: Deployment, folder: Path) -> AsyncIterator[Rack]:
    async with started_rack(deployment, folder=folder) as rack:
        source = RackSource(paths=rack.paths, deployment=deployment)

        async def memory_fraction() -> float | None:
            machine = await asyncio.to_thread(detect_machine)
            return fullest_card_fraction(await source.status(), machine.cards)

        target = parse_target(rack.base_url, api_key=rack.api_key)
        yield Rack(target=target, source=source, memory_fraction=memory_fraction)


tune = tune_command(_start)
