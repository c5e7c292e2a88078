"""A whole benchmark: ask the server, calibrate the prompts, run every level in interleaved repeats, judge, write.

Repeats go level by level and then again (A B C A B C), so that a machine that warms up or slows down does not favour
one level. An interrupted run returns what it has, marked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from llamarack.errors import LlamarackError, UsageError
from llamarack.hardware.detect import detect_machine
from llamarack.measure.against_plan import PlannedRun, against_plan
from llamarack.measure.calibrate import choose_counter, one_token_words, usage_counter
from llamarack.measure.client import Client
from llamarack.measure.counters import CounterSample, sample_counters, summarize_counters
from llamarack.measure.crew import Crew, Progress
from llamarack.measure.point import Judging, Level, Measured, PointResult, point_result
from llamarack.measure.prompts import FIRST_WORD, FromFile, PromptSource, Synthetic, common_words, load_questions
from llamarack.measure.rack import MemoryReading, RackSource, memory_series, sample_memory
from llamarack.measure.result import (
    RECORDS_NAME,
    BenchResult,
    TargetInfo,
    Workload,
    environment,
    read_records,
    write_result,
)
from llamarack.measure.server import Served, ask_server
from llamarack.measure.settings import Settings, deadline_s, num_requests, num_workers, shares_of
from llamarack.measure.worker import Order
from llamarack.model.read import read_model
from llamarack.plan.calibration import own_calibrations


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """For the progress line. `total`: measured requests of this level, None for a duration."""

    level: Level
    repeat: int
    number: int
    num_steps: int
    total: int | None
    progress: Progress | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    served: Served
    prompts: PromptSource
    token_counter: str | None
    is_fixed_length: bool
    notes: tuple[str, ...]

    @property
    def template_tokens(self) -> int | None:
        return self.prompts.first_word_tokens - 1 if isinstance(self.prompts, Synthetic) else None


async def run_bench(settings: Settings, on_step: Callable[[Step], None]) -> BenchResult:
    """Raises UsageError, NothingRunning, EngineError before the first level. Ends early, with a result, when its task
    is cancelled after that.
    """
    started = environment(started_unix_s=time.time(), started_monotonic_ns=time.monotonic_ns())
    client = Client(settings.target)
    readings: list[MemoryReading] = []
    try:
        prepared = await _prepare(settings, client)
        async with _watching(settings.rack, readings):
            measured, is_interrupted = await _sweep(settings, prepared, client, on_step)
    finally:
        client.close()
    judging = Judging(
        slo=settings.slo,
        is_fixed_length=prepared.is_fixed_length,
        is_cache_wanted=settings.is_cache_wanted,
        template_tokens=prepared.template_tokens or 0,
        round_trip_s=prepared.served.round_trip_s,
        seed=settings.seed,
    )
    points = tuple(
        point_result(level, measured[number], judging)
        for number, level in enumerate(settings.levels)
        if measured[number]
    )
    planned, plan_note = await _planned(settings.rack, prepared.served.model, points)
    result = BenchResult(
        target=_target_info(settings, prepared),
        environment=started,
        workload=_workload(settings, prepared),
        valid=bool(points) and all(point.valid for point in points) and not is_interrupted,
        is_interrupted=is_interrupted,
        notes=(*prepared.notes, *([plan_note] if plan_note else [])),
        points=points,
        memory=memory_series(readings),
        plan=planned,
    )
    write_result(result, settings.folder)
    return result


async def _prepare(settings: Settings, client: Client) -> _Prepared:
    served = await ask_server(client, model=settings.model, endpoint=settings.endpoint)
    notes = list(served.notes)
    if settings.prompts is not None:
        questions = load_questions(settings.prompts)
        has_nonce = not settings.is_cache_wanted
        source = FromFile(name=settings.prompts, questions=questions, seed=settings.seed, has_nonce=has_nonce)
        return _Prepared(served=served, prompts=source, token_counter=None, is_fixed_length=False, notes=tuple(notes))
    name, counter = await choose_counter(client, served, settings.tokenizer)
    first_word_tokens = await usage_counter(client, served)(FIRST_WORD)
    if first_word_tokens is None:
        raise UsageError(
            "the server gives no usage, so prompts of exact length cannot be checked", hint="--prompts business-en"
        )
    if settings.input_tokens <= first_word_tokens:
        raise UsageError(
            f"`--input-tokens {settings.input_tokens}`: the template alone takes {first_word_tokens - 1}",
            hint=f"--input-tokens {first_word_tokens + 32}",
        )
    words = await one_token_words(counter, common_words())
    if "fixed length" not in served.extras:
        notes.append("the server cannot be told to ignore the end token: answers may be shorter than asked for")
    return _Prepared(
        served=served,
        prompts=Synthetic(
            input_tokens=settings.input_tokens,
            words=words,
            first_word_tokens=first_word_tokens,
            seed=settings.seed,
        ),
        token_counter=name,
        is_fixed_length="fixed length" in served.extras,
        notes=tuple(notes),
    )


async def _sweep(
    settings: Settings, prepared: _Prepared, client: Client, on_step: Callable[[Step], None]
) -> tuple[list[list[Measured]], bool]:
    """Per level its repeats; True: cancelled on the way."""
    measured: list[list[Measured]] = [[] for _ in settings.levels]
    num_steps = settings.repeats * len(settings.levels)
    for step in range(num_steps):
        repeat, point = divmod(step, len(settings.levels))
        level = settings.levels[point]
        total = None if settings.duration_s is not None else num_requests(settings, level)

        def report(
            progress: Progress | None, level: Level = level, total: int | None = total, number: int = step
        ) -> None:
            repeat = number // len(settings.levels)
            on_step(
                Step(level=level, repeat=repeat, number=number, num_steps=num_steps, total=total, progress=progress)
            )

        report(None)
        one = await _level(settings, prepared, client, level, point, repeat, report)
        measured[point].append(one)
        if one.is_interrupted:
            return measured, True
    return measured, False


async def _level(
    settings: Settings,
    prepared: _Prepared,
    client: Client,
    level: Level,
    point: int,
    repeat: int,
    report: Callable[[Progress], None],
) -> Measured:
    records_path = settings.folder / RECORDS_NAME
    offset = records_path.stat().st_size if records_path.exists() else 0
    shares = shares_of(settings, prepared.served, prepared.prompts, prepared.is_fixed_length, level, point, repeat)
    crew = Crew([Order(share=share, target=settings.target, records_path=records_path) for share in shares], report)
    is_interrupted = False
    async with _counters(client) as samples:
        try:
            workers = await crew.run(deadline_s=deadline_s(settings, level))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            while task is not None and task.cancelling():
                task.uncancel()
            workers, is_interrupted = crew.reports, True
    records = tuple(read_records(records_path, offset=offset))
    counters = summarize_counters(samples)
    return Measured(records=records, workers=workers, counters=counters, is_interrupted=is_interrupted)


@contextlib.asynccontextmanager
async def _watching(rack: RackSource | None, readings: list[MemoryReading]) -> AsyncIterator[None]:
    task = None if rack is None else asyncio.create_task(sample_memory(rack, readings))
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _planned(
    rack: RackSource | None, name: str, points: tuple[PointResult, ...]
) -> tuple[PlannedRun | None, str | None]:
    """And why there is none, where the rack is ours: what was measured must not be lost over it."""
    if rack is None or not points:
        return None, None
    try:
        record = await rack.status()
        model = next(each for each in rack.deployment.models if each.name == name)
        machine = await asyncio.to_thread(detect_machine)
        spec = await asyncio.to_thread(read_model, model.path_of(model.groups[0]))
        known = own_calibrations()
    except LlamarackError as error:
        return None, f"no comparison with the plan: {error.message}"
    found = against_plan(points, rack.deployment, name, record, spec, machine, known)
    return found, None if found else f"no comparison with the plan: `{name}` has several groups, whose speeds mix"


@contextlib.asynccontextmanager
async def _counters(client: Client) -> AsyncIterator[list[CounterSample]]:
    samples: list[CounterSample] = []
    task = asyncio.create_task(sample_counters(client, samples))
    try:
        yield samples
    finally:
        task.cancel()


def _target_info(settings: Settings, prepared: _Prepared) -> TargetInfo:
    return TargetInfo(
        url=settings.target.url,
        model=prepared.served.model,
        endpoint=prepared.served.endpoint,
        extras=prepared.served.extras,
        round_trip_s=prepared.served.round_trip_s,
        template_tokens=prepared.template_tokens,
    )


def _workload(settings: Settings, prepared: _Prepared) -> Workload:
    is_open = any(level.rate_per_s is not None for level in settings.levels)
    return Workload(
        load=f"open loop, {settings.arrivals}" if is_open else "closed loop",
        prompts=settings.prompts or "synthetic",
        token_counter=prepared.token_counter,
        input_tokens=None if settings.prompts else settings.input_tokens,
        output_tokens=settings.output_tokens,
        is_fixed_length=prepared.is_fixed_length,
        is_cache_wanted=settings.is_cache_wanted,
        repeats=settings.repeats,
        workers=max(num_workers(settings, level) for level in settings.levels),
        slo=settings.slo_text,
        seed=settings.seed,
    )
