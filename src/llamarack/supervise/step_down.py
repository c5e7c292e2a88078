"""The next smaller plan after out of memory, as this machine has room for it; also for an engine that is taken back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from llamarack.config import Group
from llamarack.errors import LlamarackError
from llamarack.supervise.degrade import Rung, smaller_plans
from llamarack.supervise.journal import Journal
from llamarack.supervise.replica_record import Degraded, ReplicaSpec

PlanAgain = Callable[[str, Group, Path], Awaitable[ReplicaSpec]]


async def next_smaller(
    spec: ReplicaSpec,
    asked_path: Path,
    taken: tuple[Rung, ...],
    cause: str,
    plan_again: PlanAgain,
    journal: Journal,
) -> tuple[ReplicaSpec, Rung] | None:
    """One rung below `spec`, which ran out of memory; None where the ladder ends. `asked_path`: the file's own, whose
    format the engine reads; `taken`: the rungs that led to `spec`."""
    fallbacks = [path for path in spec.model.fallbacks if path.is_dir() == asked_path.is_dir()]
    for smaller in smaller_plans(spec.group, spec.path, spec.candidate, taken=taken, fallbacks=fallbacks, cause=cause):
        try:
            return await plan_again(spec.id, smaller.group, smaller.path), smaller.rung
        except (LlamarackError, OSError) as error:
            journal.warn("degrade_skipped", f"{smaller.rung.words} is passed over: {error}", replica=spec.id)
    return None


async def as_degraded(spec: ReplicaSpec, degraded: Degraded, plan_again: PlanAgain) -> ReplicaSpec:
    """What an engine that is taken back was started with."""
    try:
        return await plan_again(spec.id, degraded.group, degraded.path)
    except (LlamarackError, OSError):  # the bytes shown are then the file's; what is admitted must be the engine's
        limits = degraded.group.limits
        candidate = replace(spec.candidate, context_tokens=limits.context_tokens, sequences=limits.sequences)
        return replace(spec, group=degraded.group, path=degraded.path, candidate=candidate)
