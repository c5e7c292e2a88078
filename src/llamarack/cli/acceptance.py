"""`llamarack acceptance FILE`: check, serve, verify, bench and compare in order, one report, one verdict."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from llamarack.cli.acceptance_run import AcceptanceRun, Asked, BenchAsked
from llamarack.cli.bench import levels
from llamarack.cli.console import people
from llamarack.cli.facts import chosen_model
from llamarack.cli.serving import load_target, rack_name
from llamarack.cli.verify import question_passes
from llamarack.errors import UsageError
from llamarack.judge.acceptance import saved_bench, saved_reference, to_json
from llamarack.judge.bench_run import read_bench_run
from llamarack.judge.gates import load_gates
from llamarack.measure.result import make_run_folder
from llamarack.paths import rack_paths
from llamarack.report.acceptance import print_acceptance, write_acceptance_report


def acceptance(
    file: Annotated[Path, typer.Argument(help="deployment file, or a model")],
    base: Annotated[
        Path | None, typer.Option(help="an earlier acceptance or bench folder: what this one is compared with")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="what verify holds it against: URL, file, model or saved run; default: BASE, else itself"),
    ] = None,
    gates: Annotated[str, typer.Option(help="gates file or template for the comparison with BASE")] = "default",
    allow: Annotated[list[str] | None, typer.Option(help="a difference from BASE that is meant")] = None,
    model: Annotated[str | None, typer.Option(help="default: the only one of the file")] = None,
    prompts: Annotated[str, typer.Option(help="question sets of verify")] = "business-zh,business-en",
    questions: Annotated[int | None, typer.Option(min=1, help="of each set; default: all")] = None,
    answer_tokens: Annotated[int, typer.Option(min=1, max=1024, help="of each answer that verify compares")] = 64,
    concurrency: Annotated[str, typer.Option(help="levels of bench")] = "1,8",
    requests: Annotated[int | None, typer.Option(min=1, help="of bench, per level and repeat")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="of bench; 3 give an interval")] = 3,
    input_tokens: Annotated[int, typer.Option(min=1, help="of each prompt of bench")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="of each answer of bench")] = 128,
    functional: Annotated[bool, typer.Option(help="let check put load on the cards")] = True,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="new folder; default: acceptance-TIME")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the result record")] = False,
) -> None:
    """Prove a deployment before it is handed over. Exit code 0 for GO, 6 for NO-GO, 7 for INCONCLUSIVE."""
    deployment = load_target(file, host=None, port=None)
    served = chosen_model(deployment, model)
    if base is not None:
        read_bench_run(str(saved_bench(base)))  # one that proves nothing is refused before anything starts
    asked = Asked(
        file=file,
        whole=deployment,
        deployment=replace(deployment, models=[served]),
        model=served,
        base=base,
        reference=reference or _named(saved_reference(base)),
        rules=load_gates(gates),
        gates=gates,
        allow=tuple(allow or ()),
        passes=question_passes(prompts, questions, output_tokens=answer_tokens),
        bench=_bench_of(concurrency, requests, repeat, input_tokens, output_tokens),
        functional=functional,
        folder=_new_folder(output),
        paths=rack_paths(rack_name(file)),
    )
    result = asyncio.run(AcceptanceRun(asked).run())
    written = write_acceptance_report(result, asked.folder)
    if json:
        sys.stdout.buffer.write(to_json(result))
        sys.stdout.flush()
    else:
        print_acceptance(result, Console())
    people.print(f"report: {written}")
    raise typer.Exit(result.verdict.exit_code)


def _new_folder(folder: Path | None) -> Path:
    folder = folder or Path(time.strftime("acceptance-%Y%m%d-%H%M%S", time.gmtime()))
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"`-o {folder}` is not empty", hint="-o with a new folder")
    return make_run_folder(folder)


def _bench_of(concurrency: str, requests: int | None, repeat: int, input_tokens: int, output_tokens: int) -> BenchAsked:
    levels(concurrency, None)  # refused before anything starts
    return BenchAsked(
        concurrency=concurrency,
        requests=requests,
        repeat=repeat,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
    )


def _named(path: Path | None) -> str | None:
    return None if path is None else str(path)
