"""The best candidate of a plan as a deployment file. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from llamarack.config import Deployment, Limits, Model
from llamarack.errors import DoesNotFit
from llamarack.model.spec import ModelFormat, ModelSpec
from llamarack.plan.planner import group_of
from llamarack.plan.record import Plan


def deployment_of(plan: Plan, specs: Sequence[ModelSpec], limits: Limits, *, base: Path) -> Deployment:
    """What `serve` runs the first candidate from. Coarser GGUF files of `specs` become its fallbacks, finest first.

    `base`: folder that relative model paths are relative to. Raises DoesNotFit where no candidate fits.
    """
    best = plan.best
    if best is None:
        raise does_not_fit(plan)
    chosen = next(spec for spec in specs if str(spec.path) == best.model_path)
    coarser = [
        spec
        for spec in specs
        if spec.format is chosen.format is ModelFormat.GGUF and spec.weights_bytes < chosen.weights_bytes
    ]
    coarser.sort(key=lambda spec: -spec.weights_bytes)
    model = Model(
        name=plan.model_name,
        path=base / chosen.path,
        fallbacks=[base / spec.path for spec in coarser],
        groups=[group_of(best, limits)],
    )
    return Deployment(schema_version=1, models=[model])


def does_not_fit(plan: Plan) -> DoesNotFit:
    """The least bad candidate's reason, and what would do."""
    first = plan.candidates[0] if plan.candidates else None
    reason = first.reasons[0] if first and first.reasons else "no engine can read its files"
    load = plan.load
    return DoesNotFit(
        f"`{plan.model_name}` at {load.context_tokens} tokens x {load.concurrency} does not fit: {reason}",
        hint="; ".join(plan.notes) or None,
    )


def served_name(spec: ModelSpec) -> str:
    """A name clients can send, from the file's or folder's name."""
    stem = spec.path.stem if spec.format is ModelFormat.GGUF else spec.path.name
    name = re.sub(r"[^A-Za-z0-9._:/@-]+", "-", stem).strip("-._:/@")
    return (name or "model")[:200]
