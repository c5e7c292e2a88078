"""`llamarack verify`: do two deployments say the same?"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from llamarack.cli.console import people, print_entry
from llamarack.cli.sides import OpenSide, is_saved_run, open_side
from llamarack.errors import UsageError
from llamarack.judge.asker import Asker
from llamarack.judge.collection import CANDIDATE_NAME, REFERENCE_NAME, Collection, Side, load, save
from llamarack.judge.passes import (
    METHODS,
    OnStep,
    Passes,
    chosen_questions,
    collect_candidate,
    collect_reference,
    collect_restarted,
)
from llamarack.judge.verdict import judge
from llamarack.judge.verify_record import RESULT_NAME, to_json, write_result
from llamarack.judge.verify_result import Bounds, Verdict, VerifyResult
from llamarack.judge.weights import compare_files
from llamarack.measure.client import Client
from llamarack.measure.prompts import load_questions
from llamarack.measure.result import make_run_folder
from llamarack.measure.server import model_name
from llamarack.report.verify import print_verify, write_verify_report

_SETS = "business-zh,business-en"


def verify(
    reference: Annotated[str, typer.Option(help="what is right: URL, deployment file, model, or saved run")],
    candidate: Annotated[
        str | None, typer.Option(help="what is judged, given likewise; without it the reference is saved alone")
    ] = None,
    prompts: Annotated[str, typer.Option(help="question sets: business-zh, business-en, files of JSON lines")] = _SETS,
    questions: Annotated[int | None, typer.Option(min=1, help="of each set; default: all")] = None,
    output_tokens: Annotated[int, typer.Option(min=1, max=1024, help="of each answer at most")] = 64,
    top: Annotated[int, typer.Option(min=2, max=20, help="log-probabilities asked for per token")] = 10,
    method: Annotated[
        str, typer.Option(help="steps: along the answer; prompt: by prompt_logprobs; text: answers alone")
    ] = "steps",
    load_streams: Annotated[int, typer.Option(min=0, max=64, help="requests beside the loaded pass; 0: none")] = 3,
    restart: Annotated[bool, typer.Option(help="start the reference a second time for its noise")] = True,
    reference_model: Annotated[str | None, typer.Option(help="default: the only one")] = None,
    candidate_model: Annotated[str | None, typer.Option(help="default: the only one")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="default: LLAMARACK_API_KEY or OPENAI_API_KEY")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="of one request, in seconds")] = 300.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="new folder: both runs, result, report")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the result record")] = False,
) -> None:
    """Compare what two deployments answer. Exit code 0 for SAME and ROUNDING, 6 for DRIFT and BROKEN."""
    if method not in METHODS:
        raise UsageError(f"`--method {method}` is none of {', '.join(METHODS)}", hint="--method steps")
    if candidate is None and output is None:
        raise UsageError("`--candidate` is missing", hint="--candidate FILE, or -o DIR to save the reference alone")
    folder = _new_folder(output)
    passes = question_passes(
        prompts, questions, output_tokens=output_tokens, top=top, load_streams=load_streams, method=method
    )
    result = asyncio.run(
        run_verify(
            reference,
            candidate,
            passes,
            folder=folder,
            models=(reference_model, candidate_model),
            restart=restart,
            key_file=api_key_file,
            timeout_s=timeout,
        )
    )
    if result is None:
        people.print(f"saved: {folder}")
        return
    if json:
        sys.stdout.buffer.write(to_json(result))
        sys.stdout.flush()
    else:
        print_verify(result, Console())
    if folder is not None:
        people.print(f"report: {folder / 'report.html'}")
    raise typer.Exit(result.verdict.exit_code)


def question_passes(
    prompts: str,
    questions: int | None,
    *,
    output_tokens: int,
    top: int = 10,
    load_streams: int = 3,
    method: str = "steps",
) -> Passes:
    """Raises UsageError for a set that cannot be read."""
    return Passes(
        questions=chosen_questions([load_questions(name) for name in prompts.split(",")], questions),
        questions_name=prompts if questions is None else f"{prompts}, {questions} of each",
        output_tokens=output_tokens,
        top=top,
        load_streams=load_streams,
        method=method,
    )


async def run_verify(
    reference: str,
    candidate: str | None,
    passes: Passes,
    *,
    folder: Path | None,
    models: tuple[str | None, str | None] = (None, None),
    restart: bool = True,
    key_file: Path | None = None,
    timeout_s: float = 300.0,
) -> VerifyResult | None:
    """None without a candidate: then the reference alone is saved. Raises what opening and asking raise."""
    saved = Sides(passes=passes, key_file=key_file, timeout_s=timeout_s)
    ours = await saved.reference(reference, models[0], restart=restart)
    if folder is not None:
        save(ours, folder / REFERENCE_NAME)
    if candidate is None:
        return None
    theirs = await saved.candidate(candidate, models[1], ours)
    if folder is not None:
        save(theirs, folder / CANDIDATE_NAME)
    _require_like(ours, theirs)
    result = await judged(ours, theirs)
    if folder is not None:
        write_result(result, folder / RESULT_NAME)
        write_verify_report(result, folder)
    return result


async def judged(ours: Collection, theirs: Collection) -> VerifyResult:
    """With the model files compared too, where the answers differ and both files lie here."""
    result = judge(ours, theirs, bounds=Bounds(), finished_unix_s=time.time())
    files = (ours.side.facts.model_path, theirs.side.facts.model_path)
    if result.verdict in (Verdict.DRIFT, Verdict.BROKEN) and files[0] and files[1] and files[0] != files[1]:
        people.print("[dim]they differ: comparing the model files[/]")
        causes = await asyncio.to_thread(compare_files, Path(files[0]), Path(files[1]))
        result = judge(ours, theirs, bounds=Bounds(), file_causes=causes, finished_unix_s=time.time())
    return result


class Sides:
    """Opens a side, asks it, closes it; one at a time, so that two models never share the memory."""

    def __init__(self, *, passes: Passes, key_file: Path | None, timeout_s: float) -> None:
        self._passes = passes
        self._key_file = key_file
        self._timeout_s = timeout_s

    async def reference(self, name: str, model: str | None, *, restart: bool) -> Collection:
        if is_saved_run(name):
            return load(Path(name), prefer=REFERENCE_NAME)
        async with self._asker("reference", name, model) as (asker, side, opened):
            collection = await collect_reference(asker, side, self._passes_of(opened), self._tell("reference"))
            is_ours = opened.is_ours
        if restart and is_ours and self._passes.method != "text":
            async with self._asker("reference, again", name, model) as (asker, _, _):
                collection = await collect_restarted(asker, collection, self._passes, self._tell("reference"))
        return collection

    async def candidate(self, name: str, model: str | None, reference: Collection) -> Collection:
        if is_saved_run(name):
            return load(Path(name))
        async with self._asker("candidate", name, model) as (asker, side, opened):
            # A saved reference has the length of its answers; others would part where one of them was cut.
            passes = replace(self._passes_of(opened), output_tokens=reference.output_tokens)
            return await collect_candidate(asker, side, passes, reference, self._tell("candidate"))

    def _passes_of(self, opened: OpenSide) -> Passes:
        """A single slot batches nothing: load beside it would only wait in the queue."""
        return replace(self._passes, load_streams=0) if opened.slots == 1 else self._passes

    @asynccontextmanager
    async def _asker(self, role: str, name: str, model: str | None) -> AsyncIterator[tuple[Asker, Side, OpenSide]]:
        people.print(f"[bold]{role}[/]: {name}")
        option = f"--{role.partition(',')[0]}-model"
        opening = open_side(name, model=model, option=option, key_file=self._key_file, on_entry=print_entry)
        async with opening as opened:
            client = Client(opened.target)
            with contextlib.closing(client):
                served = (await model_name(client, opened.model, option=option))[0]
                side = Side(name=name, url=opened.target.url, model=served, facts=opened.facts)
                asker = Asker(client, served, top=self._passes.top, timeout_s=self._timeout_s)
                yield asker, side, opened

    def _tell(self, role: str) -> OnStep:
        return pass_progress(role, len(self._passes.questions))


def pass_progress(role: str, total: int) -> OnStep:
    return _Progress(role, total)


class _Progress:
    """One line a pass; on a terminal it counts the questions."""

    def __init__(self, role: str, total: int) -> None:
        self._role = role
        self._total = total
        self._pass = ""
        self._done = 0

    def __call__(self, name: str, question: str) -> None:
        if name != self._pass:
            self._pass, self._done = name, 0
            if not people.is_terminal:
                people.print(f"  {self._role}: {name}")
        self._done += 1
        if people.is_terminal and question:
            end = "\n" if self._done == self._total else "\r"
            people.print(f"  {self._role}: {name} {self._done}/{self._total} ", end=end)


def _require_like(reference: Collection, candidate: Collection) -> None:
    ours, theirs = (
        {one.question_id for one in side.greedy} | {one.question_id for one in side.spoken.get("alone", ())}
        for side in (reference, candidate)
    )
    if not ours & theirs:
        raise UsageError(
            f"the two runs share no question: `{reference.questions}` against `{candidate.questions}`",
            hint=f"--prompts {reference.questions.split(', ')[0]}",
        )


def _new_folder(folder: Path | None) -> Path | None:
    if folder is None:
        return None
    if any((folder / name).exists() for name in (REFERENCE_NAME, CANDIDATE_NAME)):
        raise UsageError(f"`-o {folder}` holds a run already", hint="-o with a new folder")
    return make_run_folder(folder)
