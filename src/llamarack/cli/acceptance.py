"""`llamarack acceptance FILE`: check, serve, verify, bench and compare in order, one report, one verdict."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from llamarack.cli.bench import levels
from llamarack.cli.check import deployment_findings, request_of
from llamarack.cli.console import people, print_entry
from llamarack.cli.facts import chosen_model, read_facts
from llamarack.cli.serve import load_target, rack_name
from llamarack.cli.sides import is_saved_run
from llamarack.cli.started_rack import StartedRack, started_rack
from llamarack.cli.verify import Sides, pass_progress, question_passes
from llamarack.config import Deployment, Model
from llamarack.engine.installed import installed_engines
from llamarack.errors import LlamarackError, UsageError
from llamarack.hardware.check import findings, gather, worst_first
from llamarack.hardware.finding import Severity
from llamarack.judge.acceptance import (
    AcceptanceResult,
    Outcome,
    Step,
    to_json,
    verdict_of,
    write_result,
)
from llamarack.judge.asker import Asker
from llamarack.judge.bench_run import read_bench_run
from llamarack.judge.collection import CANDIDATE_NAME, REFERENCE_NAME, Collection, Side, save
from llamarack.judge.compare import Decision, compare
from llamarack.judge.compare_record import RESULT_NAME as COMPARE_NAME
from llamarack.judge.compare_record import write_result as write_compare
from llamarack.judge.facts import Facts, save_facts
from llamarack.judge.gates import Gates, load_gates
from llamarack.judge.passes import Passes, collect_candidate, collect_reference
from llamarack.judge.proofs import Proof, outdated, read_proofs, remember
from llamarack.judge.verdict import judge
from llamarack.judge.verify_record import RESULT_NAME as VERIFY_NAME
from llamarack.judge.verify_record import write_result as write_verify
from llamarack.judge.verify_result import Bounds, VerifyResult
from llamarack.measure.client import Client
from llamarack.measure.result import RESULT_NAME, BenchResult
from llamarack.measure.run import run_bench
from llamarack.measure.settings import Settings
from llamarack.measure.target import parse_target
from llamarack.paths import RackPaths, rack_paths
from llamarack.report.acceptance import print_acceptance, write_acceptance_report
from llamarack.report.bench_rows import overview
from llamarack.report.compare import write_compare_report
from llamarack.report.compare_rows import reasons
from llamarack.report.verify import write_verify_report
from llamarack.report.verify_rows import deciding, headline
from llamarack.report.write import write_bench_report
from llamarack.units import format_bytes, format_duration

_SAVED_VERIFY, _SAVED_BENCH = "verify", "bench"


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
    """Prove a deployment before it is handed over: exit code 0 for GO, 6 for NO-GO, 7 for INCONCLUSIVE."""
    deployment = load_target(file, host=None, port=None)
    served = chosen_model(deployment, model)
    asked = _Asked(
        file=file,
        whole=deployment,
        deployment=deployment.model_copy(update={"models": [served]}),
        model=served,
        base=base,
        reference=reference or _reference_of(base),
        rules=load_gates(gates),
        gates=gates,
        allow=tuple(allow or ()),
        passes=question_passes(prompts, questions, output_tokens=answer_tokens),
        settings=_settings_of(concurrency, requests, repeat, input_tokens, output_tokens),
        functional=functional,
        folder=_new_folder(output),
        paths=rack_paths(rack_name(file)),
    )
    result = asyncio.run(_Run(asked).run())
    written = write_acceptance_report(result, asked.folder)
    if json:
        sys.stdout.buffer.write(to_json(result))
        sys.stdout.flush()
    else:
        print_acceptance(result, Console())
    people.print(f"report: {written}")
    raise typer.Exit(result.verdict.exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    concurrency: str
    requests: int | None
    repeat: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """`whole`: the file with all its models, whose hash is remembered; `deployment`: with the one that is accepted."""

    file: Path
    whole: Deployment
    deployment: Deployment
    model: Model
    base: Path | None
    reference: str | None
    rules: Gates
    gates: str
    allow: tuple[str, ...]
    passes: Passes
    settings: _Bench
    functional: bool
    folder: Path
    paths: RackPaths


def _settings_of(concurrency: str, requests: int | None, repeat: int, input_tokens: int, output_tokens: int) -> _Bench:
    levels(concurrency, None)  # refused before anything starts
    return _Bench(
        concurrency=concurrency,
        requests=requests,
        repeat=repeat,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
    )


def _new_folder(folder: Path | None) -> Path:
    folder = folder or Path(time.strftime("acceptance-%Y%m%d-%H%M%S", time.gmtime()))
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"`-o {folder}` is not empty", hint="-o with a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"`-o {folder}`: {error.strerror}", hint="-o DIR that can be written") from error
    return folder


def _reference_of(base: Path | None) -> str | None:
    """The run that BASE's own acceptance saved."""
    if base is not None and is_saved_run(str(base / _SAVED_VERIFY)):
        return str(base / _SAVED_VERIFY)
    return None


@dataclass(slots=True)
class _Run:
    """One acceptance. Owns its list of steps; a failed step leaves the later ones skipped."""

    asked: _Asked
    steps: list[Step] = field(default_factory=list)
    verified: VerifyResult | None = None
    measured: BenchResult | None = None
    facts: Facts = field(default_factory=Facts)

    async def run(self) -> AcceptanceResult:
        asked = self.asked
        started = time.time()
        before = read_proofs(asked.paths)
        try:
            self.facts = read_facts(asked.whole, asked.model)
            await self._do("check", self._check)
            reference = await self._external_reference()
            await self._with_rack(reference)
            await self._do("compare", self._compare)
        except _Over:
            self._skip_rest()
        result = AcceptanceResult(
            verdict=verdict_of(self.steps),
            file=str(asked.file),
            model=asked.model.name,
            facts=self.facts,
            steps=tuple(self.steps),
            changed_since=outdated(before, self.facts.deployment_sha256 or ""),
            started_unix_s=started,
            finished_unix_s=time.time(),
        )
        write_result(result, asked.folder)
        self._remember("acceptance", str(result.verdict), asked.folder)
        return result

    async def _do(self, name: str, work: Callable[[], object]) -> None:
        """Raises _Over after a step that failed, except for the ones that later steps do not stand on."""
        people.print(f"[bold]{name}[/]")
        begun = time.monotonic()
        try:
            made = work()
            step = await made if asyncio.iscoroutine(made) else made
        except LlamarackError as error:
            details = (error.message, *([f"hint: {error.hint}"] if error.hint else []))
            step = Step(
                name=name, outcome=Outcome.FAILED, seconds=0.0, summary=_first_line(error.message), details=details
            )
        assert isinstance(step, Step)
        self._add(step, time.monotonic() - begun)
        if step.outcome is Outcome.FAILED and name in ("check", "serve"):
            raise _Over

    def _add(self, step: Step, seconds: float) -> None:
        self.steps.append(replace(step, seconds=seconds))
        people.print(f"  {step.outcome}: {step.summary}")

    def _skip_rest(self) -> None:
        done = {step.name for step in self.steps}
        failed = self.steps[-1].name if self.steps else "an earlier step"
        for name in ("check", "serve", "verify", "bench", "compare"):
            if name not in done:
                self.steps.append(Step(name=name, outcome=Outcome.SKIPPED, seconds=0.0, summary=f"{failed} failed"))

    # -- the steps ----------------------------------------------------------------------------------------------

    def _check(self) -> Step:
        asked = self.asked
        known = tuple(engine.python for engine in installed_engines())
        evidence = gather(request_of(asked.deployment, known, functional=asked.functional))
        hung = {look.subject for look in evidence.unanswered if look.hung}
        found = worst_first([*findings(evidence), *deployment_findings(asked.deployment, evidence.machine, hung)])
        errors = [one for one in found if one.severity is Severity.ERROR]
        warnings = [one for one in found if one.severity is Severity.WARNING]
        return Step(
            name="check",
            outcome=Outcome.FAILED if errors else Outcome.PASSED,
            seconds=0.0,
            summary=f"{len(errors)} errors, {len(warnings)} warnings",
            details=tuple(
                f"{one.severity}: {one.code}, {one.subject}: {one.seen}; fix: {one.fix}" for one in [*errors, *warnings]
            ),
        )

    async def _external_reference(self) -> Collection | None:
        """Collected before the rack is up, so that two models never share the memory. None: the deployment itself."""
        if self.asked.reference is None:
            return None
        begun = time.monotonic()
        try:
            sides = Sides(passes=self.asked.passes, key_file=None, timeout_s=300.0)
            return await sides.reference(self.asked.reference, None, restart=False)
        except LlamarackError as error:
            failed = Step(
                name="verify",
                outcome=Outcome.FAILED,
                seconds=0.0,
                summary=f"no reference: {_first_line(error.message)}",
            )
            self._add(failed, time.monotonic() - begun)
            raise _Over from error

    async def _with_rack(self, reference: Collection | None) -> None:
        begun = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            rack: list[StartedRack] = []

            async def serve() -> Step:
                started = started_rack(self.asked.deployment, on_entry=print_entry)
                rack.append(await stack.enter_async_context(started))
                return await _served_step(rack[0], time.monotonic() - begun)

            await self._do("serve", serve)
            await self._do("verify", lambda: self._verify(rack[0], reference))
            await self._do("bench", lambda: self._bench(rack[0]))

    async def _verify(self, rack: StartedRack, reference: Collection | None) -> Step:
        asked = self.asked
        folder = asked.folder / _SAVED_VERIFY
        folder.mkdir()
        client = Client(parse_target(rack.base_url, api_key=rack.api_key))
        slots = min(group.limits.sequences for group in asked.model.groups)
        passes = asked.passes if slots > 1 else replace(asked.passes, load_streams=0)
        with contextlib.closing(client):
            asker = Asker(client, asked.model.name, top=passes.top, timeout_s=300.0)
            side = Side(name=str(asked.file), url=None, model=asked.model.name, facts=self.facts)
            tell = pass_progress("verify", len(passes.questions))
            ours = reference or await collect_reference(asker, side, passes, tell)
            passes = replace(passes, output_tokens=ours.output_tokens)  # a saved one may have other lengths
            theirs = await collect_candidate(asker, side, passes, ours, tell)
        save(ours, folder / REFERENCE_NAME)
        save(theirs, folder / CANDIDATE_NAME)
        result = judge(ours, theirs, bounds=Bounds(), finished_unix_s=time.time())
        write_verify(result, folder / VERIFY_NAME)
        write_verify_report(result, folder)
        self.verified = result
        outcome = {0: Outcome.PASSED, 7: Outcome.INCONCLUSIVE}.get(result.verdict.exit_code, Outcome.FAILED)
        self._remember("verify", str(result.verdict), folder)
        whom = f"against {asked.reference}" if asked.reference else "against itself, alone and under load"
        return Step(
            name="verify",
            outcome=outcome,
            seconds=0.0,
            summary=f"{headline(result)} ({whom})",
            details=tuple(
                [f"{c.message}: {c.evidence}" for c in result.causes] + [f.message for f in deciding(result)]
            ),
            report=f"{_SAVED_VERIFY}/report.html",
        )

    async def _bench(self, rack: StartedRack) -> Step:
        asked = self.asked
        folder = asked.folder / _SAVED_BENCH
        folder.mkdir()
        settings = Settings(
            target=parse_target(rack.base_url, api_key=rack.api_key),
            levels=levels(asked.settings.concurrency, None),
            folder=folder,
            model=asked.model.name,
            requests=asked.settings.requests,
            repeats=asked.settings.repeat,
            input_tokens=asked.settings.input_tokens,
            output_tokens=asked.settings.output_tokens,
            seed=secrets.randbits(32),
        )
        result = await run_bench(settings, lambda step: None)
        save_facts(self.facts, folder)
        write_bench_report(result, folder)
        self.measured = result
        if result.is_interrupted:  # run_bench keeps what it had; the acceptance is over all the same
            raise asyncio.CancelledError
        table = overview(result)
        rows = [
            ", ".join(f"{h} {c}" for h, c in zip(table.headers, row, strict=True) if c != "–") for row in table.rows
        ]
        wrong = [reason for point in result.points for reason in point.invalid_reasons]
        if result.valid:
            self._remember("bench", "valid", folder)
        return Step(
            name="bench",
            outcome=Outcome.PASSED if result.valid else Outcome.INCONCLUSIVE,
            seconds=0.0,
            summary=_speed(result) if result.valid else f"the run is invalid: {(wrong or ['it was interrupted'])[0]}",
            details=tuple(rows),
            report=f"{_SAVED_BENCH}/report.html",
        )

    def _compare(self) -> Step:
        asked = self.asked
        if asked.base is None:
            return Step(
                name="compare",
                outcome=Outcome.SKIPPED,
                seconds=0.0,
                summary=f"no base; the next run can be held against this one: --base {asked.folder}",
            )
        folder = asked.folder / "compare"
        folder.mkdir()
        old = asked.base / _SAVED_BENCH if (asked.base / _SAVED_BENCH / RESULT_NAME).exists() else asked.base
        base = read_bench_run(str(old))
        new = read_bench_run(str(asked.folder / _SAVED_BENCH))
        result = compare(
            base,
            new,
            asked.rules,
            gates_name=asked.gates,
            allowed=asked.allow,
            consistency=self.verified,
            finished_unix_s=time.time(),
        )
        write_compare(result, folder / COMPARE_NAME)
        write_compare_report(result, base, new, folder)
        outcomes = {Decision.GO: Outcome.PASSED, Decision.NO_GO: Outcome.FAILED}
        return Step(
            name="compare",
            outcome=outcomes.get(result.verdict, Outcome.INCONCLUSIVE),
            seconds=0.0,
            summary=f"{result.verdict} against {asked.base} by the gates `{asked.gates}`",
            details=tuple(reasons(result)),
            report="compare/report.html",
        )

    def _remember(self, kind: str, verdict: str, folder: Path) -> None:
        """Of what a valid run proved; a rack given as a bare model has no file that could change."""
        if self.facts.deployment_sha256 is None:
            return
        proof = Proof(
            at_unix_s=time.time(),
            deployment_sha256=self.facts.deployment_sha256,
            verdict=verdict,
            folder=str(folder.absolute()),
        )
        remember(self.asked.paths, kind, proof)


class _Over(Exception):
    """A step failed that the later ones stand on."""


async def _served_step(rack: StartedRack, seconds: float) -> Step:
    record = await rack.status()
    replicas = [replica for model in record["models"] for replica in model["replicas"]]
    details = [
        f"{replica['id']}: {replica['state']}, {replica['slots_total']} slots of {replica['context_tokens']:,} tokens, "
        f"planned {format_bytes(replica['predicted']['total_bytes'])}, resident "
        f"{format_bytes(replica['actual']['resident_bytes'])}"
        for replica in replicas
    ]
    return Step(
        name="serve",
        outcome=Outcome.PASSED,
        seconds=0.0,
        summary=f"{len(replicas)} replica{'s' if len(replicas) > 1 else ''} ready after {format_duration(seconds)}",
        details=tuple(details),
    )


def _speed(result: BenchResult) -> str:
    parts = []
    for point in result.points:
        first, rate = point.metrics.ttft_s.p50, point.output_tokens_per_s
        parts.append(
            f"{point.concurrency} at once: first token {format_duration(first)}, "
            + (f"{rate:.1f} tokens/s" if rate is not None else "rate unknown")
        )
    return "; ".join(parts)


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else "failed"
