"""A run beside what the plan said of it, level by level: times, rates, the share of the hardware's limit.

Two predictions are made: as `plan` prints it, with what earlier runs taught, and without, from which this run's own
lesson is drawn. A closed loop above the slots of the rack is predicted at the slots, since more do not run at once; its
first-token time then holds a wait in the queue that no plan predicts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamarack.config import Deployment, Group, Model
from llamarack.engine.version import engine_version
from llamarack.errors import LlamarackError
from llamarack.hardware.machine import Machine
from llamarack.measure.point import PointResult
from llamarack.measure.prediction import Compared, LimitReached, compare_with_plan, limit_reached
from llamarack.model.spec import ModelSpec
from llamarack.plan.calibration import Calibration
from llamarack.plan.planner import plan_group
from llamarack.plan.record import Candidate, Load
from llamarack.plan.shape import ModelShape, shape_of
from llamarack.plan.speed import device_limits, kv_bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One level. `concurrency`: that it was predicted for. `plain`: without what earlier runs taught."""

    concurrency: int
    compared: tuple[Compared, ...]
    plain: tuple[Compared, ...]
    limit: LimitReached


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """What ran, as the plan sees it. `device`: cards or processor, as calibration names it. `points`: one per level,
    None where nothing can be predicted. `lesson`: what this run teaches, None where no valid level does.
    """

    engine: str
    engine_version: str | None
    device: str
    devices: int
    replicas: int
    sequences: int
    memory_bandwidth_bytes_per_s: float | None
    flop_per_s: float | None
    points: tuple[Planned | None, ...]
    lesson: Calibration | None
    notes: tuple[str, ...] = ()


def planned_group(model: Model, record: Mapping[str, Any]) -> Group | None:
    """The model's one group on the cards that its replicas really have; None where it has several groups."""
    if len(model.groups) != 1:
        return None
    replicas = next(each["replicas"] for each in record["models"] if each["name"] == model.name)
    cards: list[int | str | list[int | str]] = [list(replica["cards"]) for replica in replicas]
    return replace(model.groups[0], gpus=cards if any(cards) else [], replicas=len(replicas))


def against_plan(
    points: Sequence[PointResult],
    deployment: Deployment,
    name: str,
    record: Mapping[str, Any],
    spec: ModelSpec,
    machine: Machine,
    calibrations: Sequence[Calibration],
) -> PlannedRun | None:
    """`record`: the rack's `status` during the run. None where the model has several groups, whose speeds mix."""
    model = next(each for each in deployment.models if each.name == name)
    group = planned_group(model, record)
    if group is None:
        return None
    ran = _ran(name, group, spec, machine)
    rows = tuple(_planned(ran, point, calibrations) for point in points)
    return PlannedRun(
        engine=group.engine,
        engine_version=ran.version,
        device=ran.device,
        devices=ran.num_devices * group.replicas,
        replicas=group.replicas,
        sequences=group.limits.sequences,
        memory_bandwidth_bytes_per_s=ran.bandwidth_bytes_per_s,
        flop_per_s=ran.flop_per_s,
        points=rows,
        lesson=_lesson(points, rows, ran),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """What every level ran on. `num_devices`: of one replica; limits: of one of them."""

    name: str
    group: Group
    spec: ModelSpec
    shape: ModelShape
    machine: Machine
    version: str | None
    device: str
    num_devices: int
    bandwidth_bytes_per_s: float | None
    flop_per_s: float | None

    @property
    def slots(self) -> int:
        return self.group.limits.sequences * self.group.replicas


def _ran(name: str, group: Group, spec: ModelSpec, machine: Machine) -> _Ran:
    cards = (group.gpu_lists() or [[]])[0]
    names = {card.name for card in machine.cards if card.uuid in cards or card.index in cards}
    bandwidth, flop_per_s = device_limits(machine, cards)
    return _Ran(
        name=name,
        group=group,
        spec=spec,
        shape=shape_of(spec),
        machine=machine,
        version=engine_version(group),
        device=" + ".join(sorted(names)) or machine.host.processor or "processor",
        num_devices=max(len(cards), 1),
        bandwidth_bytes_per_s=bandwidth,
        flop_per_s=flop_per_s,
    )


def _planned(ran: _Ran, point: PointResult, calibrations: Sequence[Calibration]) -> Planned | None:
    """One level with and without what earlier runs taught; None where nothing can be predicted."""
    load = _load(point, ran.group, ran.slots)
    if load is None:
        return None
    with_lessons, plain = _predicted(ran, load, calibrations), _predicted(ran, load, ())
    if with_lessons is None or plain is None:
        return None
    limit = limit_reached(
        point,
        replicas=ran.group.replicas,
        weights_bytes=round(ran.shape.decode_bytes / ran.num_devices),
        kv_bytes_per_token=kv_bytes_per_token(ran.shape, ran.group.engine, plain.kv_dtype) / ran.num_devices,
        flop_per_token=2.0 * ran.shape.decode_parameters / ran.num_devices,
        bandwidth_bytes_per_s=ran.bandwidth_bytes_per_s,
        flop_per_s=ran.flop_per_s,
    )
    return Planned(
        concurrency=load.concurrency,
        compared=_compared(point, with_lessons, ran.slots),
        plain=_compared(point, plain, ran.slots),
        limit=limit,
    )


def _predicted(ran: _Ran, load: Load, known: Sequence[Calibration]) -> Candidate | None:
    try:
        return plan_group(
            ran.spec,
            ran.group,
            ran.machine,
            model_name=ran.name,
            engine_version=ran.version,
            load=load,
            calibrations=known,
        )
    except LlamarackError:
        return None


def _load(point: PointResult, group: Group, slots: int) -> Load | None:
    """What this level asked of the rack; an open loop runs as many at once as the server said."""
    concurrency = point.concurrency
    if concurrency is None:
        running = [r.server.running_mean for r in point.repeats if r.server and r.server.running_mean]
        concurrency = round(sum(running) / len(running)) if running else None
    prompt, output = point.input_tokens.mean, point.output_tokens.mean
    if not concurrency or not prompt or not output:
        return None
    return Load(
        context_tokens=group.limits.context_tokens,
        concurrency=min(concurrency, slots),
        input_tokens=round(prompt),
        output_tokens=round(output),
    )


def _compared(point: PointResult, candidate: Candidate, slots: int) -> tuple[Compared, ...]:
    compared = compare_with_plan(point, candidate)
    if point.concurrency is None or point.concurrency <= slots:
        return compared
    return tuple(each for each in compared if each.name != "first_token_s")


def _lesson(points: Sequence[PointResult], rows: Sequence[Planned | None], ran: _Ran) -> Calibration | None:
    """Mean factor, on the logarithm, of the valid levels. First-token times teach only where one runs at a time: how
    the prompts of several fall together is chance.
    """
    kept = [row for point, row in zip(points, rows, strict=True) if row is not None and point.valid]
    steps, firsts = _factors(kept, "per_token_s"), _factors([r for r in kept if r.concurrency == 1], "first_token_s")
    if not steps:
        return None
    return Calibration(
        card=ran.device,
        engine=ran.group.engine,
        engine_version=ran.version or "unknown",
        per_token_factor=_mean(steps),
        first_token_factor=_mean(firsts) if firsts else 1.0,
        decode_bytes=ran.shape.decode_bytes,
        measured_unix_s=int(time.time()),
        levels=len(kept),
    )


def _factors(rows: Sequence[Planned], name: str) -> list[float]:
    errors = [each.error_fraction for row in rows for each in row.plain if each.name == name]
    return [1 + error for error in errors if error is not None]


def _mean(factors: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, factors)) / len(factors))
