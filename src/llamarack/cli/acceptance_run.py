"""The steps of one acceptance, in order, on a rack that is started for it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.markup import escape

from llamarack.cli.bench import levels
from llamarack.cli.bench_progress import BenchProgress
from llamarack.cli.check import deployment_findings, request_of
from llamarack.cli.console import people, print_entry
from llamarack.cli.facts import read_facts
from llamarack.cli.started_rack import StartedRack, started_rack
from llamarack.cli.verify import Sides, judged, pass_progress
from llamarack.config import Deployment, Model
from llamarack.engine.installed import installed_engines
from llamarack.errors import LlamarackError
from llamarack.hardware.check import findings, gather, worst_first
from llamarack.judge.acceptance import (
    BENCH_FOLDER,
    COMPARE_FOLDER,
    INVALID_BENCH_FOLDER,
    VERIFY_FOLDER,
    AcceptanceResult,
    Step,
    ends_the_run,
    saved_bench,
    skipped_rest,
    step_of_error,
    verdict_of,
    write_result,
)
from llamarack.judge.asker import Asker
from llamarack.judge.bench_run import read_bench_run
from llamarack.judge.collection import CANDIDATE_NAME, REFERENCE_NAME, Collection, Side, save
from llamarack.judge.compare import compare
from llamarack.judge.compare_record import RESULT_NAME as COMPARE_NAME
from llamarack.judge.compare_record import write_result as write_compare
from llamarack.judge.facts import Facts, save_facts
from llamarack.judge.gates import Gates
from llamarack.judge.passes import Passes, collect_candidate, collect_reference
from llamarack.judge.proofs import Proof, outdated, read_proofs, remember
from llamarack.judge.verify_record import RESULT_NAME as VERIFY_NAME
from llamarack.judge.verify_record import write_result as write_verify
from llamarack.judge.verify_result import VerifyResult
from llamarack.measure.client import Client
from llamarack.measure.result import BenchResult
from llamarack.measure.run import run_bench
from llamarack.measure.settings import Settings
from llamarack.measure.target import parse_target
from llamarack.paths import RackPaths
from llamarack.report.acceptance_steps import (
    bench_step,
    check_step,
    compare_step,
    invalid_reason,
    no_base_step,
    serve_step,
    verify_step,
)
from llamarack.report.compare import write_compare_report
from llamarack.report.verify import write_verify_report
from llamarack.report.write import write_bench_report

_REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchAsked:
    """What bench is asked for. `concurrency`: the levels as typed, such as `1,8`."""

    concurrency: str
    requests: int | None
    repeat: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`whole`: the file with all its models, whose hash is remembered; `deployment`: with the one that is accepted.
    `reference`: None holds the deployment against itself.
    """

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
    bench: BenchAsked
    functional: bool
    folder: Path
    paths: RackPaths


class _Over(Exception):
    """A step failed that the later ones stand on."""


@dataclass(slots=True)
class AcceptanceRun:
    """Owns its list of steps, and what later steps need of earlier ones."""

    asked: Asked
    steps: list[Step] = field(default_factory=list)
    verified: VerifyResult | None = None
    facts: Facts = field(default_factory=Facts)

    async def run(self) -> AcceptanceResult:
        """Writes the record too. Raises ModelError for a model whose facts cannot be read."""
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
            self.steps += skipped_rest(self.steps)
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

    async def _do(self, name: str, work: Callable[[], Awaitable[Step]]) -> None:
        """Raises _Over after a failed step that later ones stand on."""
        people.print(f"[bold]{name}[/]")
        begun = time.monotonic()
        try:
            step = await work()
        except LlamarackError as error:
            step = step_of_error(name, error)
        self._add(step, time.monotonic() - begun)
        if ends_the_run(step):
            raise _Over

    def _add(self, step: Step, seconds: float) -> None:
        self.steps.append(replace(step, seconds=seconds))
        people.print(f"  {step.outcome}: {step.summary}")

    # -- the steps ----------------------------------------------------------------------------------------------

    async def _check(self) -> Step:
        asked = self.asked
        known = tuple(engine.python for engine in installed_engines())
        evidence = gather(request_of(asked.deployment, known, functional=asked.functional))
        hung = {look.subject for look in evidence.unanswered if look.hung}
        return check_step(
            worst_first([*findings(evidence), *deployment_findings(asked.deployment, evidence.machine, hung)])
        )

    async def _external_reference(self) -> Collection | None:
        """Collected before the rack is up, so that two models never share the memory. None: the deployment itself."""
        if self.asked.reference is None:
            return None
        begun = time.monotonic()
        try:
            sides = Sides(passes=self.asked.passes, key_file=None, timeout_s=_REQUEST_TIMEOUT_S)
            return await sides.reference(self.asked.reference, None, restart=False)
        except LlamarackError as error:
            self._add(step_of_error("verify", error, prefix="no reference: "), time.monotonic() - begun)
            raise _Over from error

    async def _with_rack(self, reference: Collection | None) -> None:
        async with contextlib.AsyncExitStack() as stack:
            rack: list[StartedRack] = []

            async def serve() -> Step:
                begun = time.monotonic()
                rack.append(await stack.enter_async_context(started_rack(self.asked.deployment, on_entry=print_entry)))
                return serve_step(await rack[0].status(), time.monotonic() - begun)

            await self._do("serve", serve)
            await self._do("verify", lambda: self._verify(rack[0], reference))
            await self._do("bench", lambda: self._bench(rack[0]))

    async def _verify(self, rack: StartedRack, reference: Collection | None) -> Step:
        asked = self.asked
        folder = self._subfolder(VERIFY_FOLDER)
        client = Client(parse_target(rack.base_url, api_key=rack.api_key))
        slots = min(group.limits.sequences for group in asked.model.groups)
        passes = asked.passes if slots > 1 else replace(asked.passes, load_streams=0)
        with contextlib.closing(client):
            asker = Asker(client, asked.model.name, top=passes.top, timeout_s=_REQUEST_TIMEOUT_S)
            side = Side(name=str(asked.file), url=None, model=asked.model.name, facts=self.facts)
            tell = pass_progress("verify", len(passes.questions))
            ours = reference or await collect_reference(asker, side, passes, tell)
            passes = replace(passes, output_tokens=ours.output_tokens)  # a saved one may have other lengths
            theirs = await collect_candidate(asker, side, passes, ours, tell)
        save(ours, folder / REFERENCE_NAME)
        save(theirs, folder / CANDIDATE_NAME)
        result = await judged(ours, theirs)
        write_verify(result, folder / VERIFY_NAME)
        write_verify_report(result, folder)
        self.verified = result
        self._remember("verify", str(result.verdict), folder)
        return verify_step(result, asked.reference)

    async def _bench(self, rack: StartedRack) -> Step:
        """A run that is not valid is made once more: a busy moment of the machine proves nothing."""
        asked = self.asked
        folder = self._subfolder(BENCH_FOLDER)
        before, result = None, await self._measured(rack, folder)
        if not result.valid:
            people.print(f"  not valid, so once more: {escape(invalid_reason(result))}")
            folder.rename(asked.folder / INVALID_BENCH_FOLDER)
            before, result = result, await self._measured(rack, self._subfolder(BENCH_FOLDER))
        if result.valid:
            self._remember("bench", "valid", folder)
        return bench_step(result, before)

    async def _measured(self, rack: StartedRack, folder: Path) -> BenchResult:
        asked = self.asked
        settings = Settings(
            target=parse_target(rack.base_url, api_key=rack.api_key),
            levels=levels(asked.bench.concurrency, None),
            folder=folder,
            model=asked.model.name,
            requests=asked.bench.requests,
            repeats=asked.bench.repeat,
            input_tokens=asked.bench.input_tokens,
            output_tokens=asked.bench.output_tokens,
            seed=secrets.randbits(32),
        )
        with BenchProgress(settings, people) as progress:
            result = await run_bench(settings, progress.on_step)
        save_facts(self.facts, folder)
        write_bench_report(result, folder)
        if result.is_interrupted:  # run_bench keeps what it had; the acceptance is over all the same
            raise asyncio.CancelledError
        return result

    async def _compare(self) -> Step:
        asked = self.asked
        if asked.base is None:
            return no_base_step(str(asked.folder))
        folder = self._subfolder(COMPARE_FOLDER)
        base = read_bench_run(str(saved_bench(asked.base)))
        new = read_bench_run(str(asked.folder / BENCH_FOLDER))
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
        return compare_step(result, str(asked.base))

    def _subfolder(self, name: str) -> Path:
        folder = self.asked.folder / name
        folder.mkdir()
        return folder

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
