"""`llamarack tune FILE`: measure settings of one model by goodput under a promise, write the better file.

`tune_command(start)` makes the command; how a deployment is started is given to it, so that it can be tried without an
engine.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from llamarack.cli.bench import levels, seconds
from llamarack.cli.started_rack import started_rack
from llamarack.config import Deployment, load, to_yaml
from llamarack.errors import InvalidRun, UsageError
from llamarack.hardware.detect import detect_machine
from llamarack.measure.point import Level
from llamarack.measure.rack import RackSource, fullest_card_fraction
from llamarack.measure.result import new_folder
from llamarack.measure.run import Step
from llamarack.measure.settings import Settings
from llamarack.measure.slo import parse_slo
from llamarack.measure.target import Target, parse_target
from llamarack.measure.tune import Outcome, Trial, TuneResult, search, with_trial
from llamarack.measure.tune_run import Rack, StartRack, measuring, only_model, space_of, tuned_path

_EXIT_INCONCLUSIVE = 7
_UNSET = Target(url="", host="", port=0)  # each trial has its own


def tune_command(start: StartRack) -> Callable[..., None]:
    def tune(
        file: Annotated[Path, typer.Argument(help="deployment file")],
        slo: Annotated[str, typer.Option(help="the promise, in ms")] = "ttft:1000,tpot:100",
        model: Annotated[str | None, typer.Option(help="default: the only one of the file")] = None,
        concurrency: Annotated[str | None, typer.Option(help="requests at once; default: 2 x the sequences")] = None,
        rate: Annotated[str | None, typer.Option(help="open loop instead: requests per second")] = None,
        requests: Annotated[int | None, typer.Option(min=20, help="per trial")] = None,
        input_tokens: Annotated[int, typer.Option(min=1, help="of each prompt")] = 256,
        output_tokens: Annotated[int, typer.Option(min=1, help="of each answer")] = 128,
        timeout: Annotated[str, typer.Option(help="of one request")] = "10m",
        output: Annotated[
            Path | None, typer.Option("-o", "--output", help="new file; default: NAME.tuned.yaml")
        ] = None,
        folder: Annotated[Path | None, typer.Option(help="new folder for the records")] = None,
        json: Annotated[bool, typer.Option("--json", help="print the result record")] = False,
    ) -> None:
        """Find batch and sequences with the most goodput; exit code 7 when nothing could be measured."""
        deployment = load(file).deployment
        name = only_model(deployment, model)
        space = space_of(deployment, name)
        settings = Settings(
            target=_UNSET,
            levels=(_one_level(concurrency or str(2 * space.sequences), rate),),
            folder=new_folder(folder),
            requests=requests,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            slo=parse_slo(slo),
            slo_text=slo,
            timeout_s=seconds("--timeout", timeout),
            seed=secrets.randbits(32),
        )
        people = Console(stderr=True, highlight=False, soft_wrap=True)
        measure = measuring(deployment, name, start, settings, _on_step(people))
        result = asyncio.run(search(measure, space, lambda outcome: people.print(outcome_line(outcome))))
        if result is None:
            raise InvalidRun("not one setting could be measured", hint=f"llamarack serve {file}")
        if result.is_better:
            written = output or tuned_path(file)
            written.write_text(to_yaml(with_trial(deployment, result.best, model=name)), encoding="utf-8")
            people.print(f"written: {written}")
        if json:
            sys.stdout.buffer.write(orjson.dumps({"schema_version": 1, **asdict(result)}) + b"\n")
        else:
            print(conclusion(result))
        raise typer.Exit(0 if result.gain_fraction is not None or result.is_better else _EXIT_INCONCLUSIVE)

    return tune


def _one_level(concurrency: str, rate: str | None) -> Level:
    chosen = levels(concurrency, rate)
    if len(chosen) != 1:
        raise UsageError("tune compares settings at one load", hint="--concurrency 16, or --rate 2")
    return chosen[0]


def _on_step(people: Console) -> Callable[[Trial, Step], None]:
    def on_step(trial: Trial, step: Step) -> None:
        if step.progress is None:
            people.print(f"{trial_name(trial)}: {step.level}")

    return on_step


def trial_name(trial: Trial) -> str:
    if trial.batch_tokens is None and trial.sequences is None:
        return "the engine's own batch, sequences of the file"
    return f"batch_tokens {trial.batch_tokens}, sequences {trial.sequences}"


def outcome_line(outcome: Outcome) -> str:
    rate = "no goodput" if outcome.goodput_per_s is None else f"{outcome.goodput_per_s:.3f} good requests/s"
    memory = "" if outcome.memory_fraction is None else f", fullest card {outcome.memory_fraction:.0%}"
    reason = "" if outcome.reason is None else f" ({outcome.reason})"
    return f"{trial_name(outcome.trial)}: {rate}{memory}{reason}"


def conclusion(result: TuneResult) -> str:
    best = f"best: {trial_name(result.best)}"
    if result.gain_fraction is None or result.gain_interval is None:
        return f"{best}; how it compares with the engine's own batch could not be measured"
    low, high = result.gain_interval.low, result.gain_interval.high
    verdict = "" if result.is_better else "; not shown to be better, the file stays as it is"
    return f"{best}: {result.gain_fraction:+.1%} [{low:+.1%} to {high:+.1%}] over the engine's own batch{verdict}"


@asynccontextmanager
async def _start(deployment: Deployment) -> AsyncIterator[Rack]:
    async with started_rack(deployment) as rack:
        source = RackSource(paths=rack.paths, deployment=deployment)

        async def memory_fraction() -> float | None:
            machine = await asyncio.to_thread(detect_machine)
            return fullest_card_fraction(await source.status(), machine.cards)

        target = parse_target(rack.base_url, api_key=rack.api_key)
        yield Rack(target=target, source=source, memory_fraction=memory_fraction)


tune = tune_command(_start)
