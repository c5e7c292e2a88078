"""Every model of a deployment file on the same cards, in the file's order, each on what the ones before left. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llamarack.config import Deployment, Group, Model
from llamarack.hardware.machine import Machine
from llamarack.model.spec import ModelSpec
from llamarack.plan.devices import claim
from llamarack.plan.planner import group_of, plan_group
from llamarack.plan.record import Candidate, Load, Plan


def plan_deployment(
    deployment: Deployment,
    machine: Machine,
    read: Callable[[Path], ModelSpec],
    *,
    build_of: Callable[[Group], str | None] = lambda _: None,
) -> tuple[tuple[Plan, ...], Deployment]:
    """One plan per group, and the file again with cards and sizes filled in.

    Where the file has several groups a vLLM group with `kv_cache_bytes: auto` is given what its sequences need, not
    all its fraction allows: the rest is for the others.
    """
    held: dict[int, int] = {}
    plans: list[Plan] = []
    models = []
    several = sum(len(model.groups) for model in deployment.models) > 1
    for model in deployment.models:
        groups = []
        for group in model.groups:
            path = model.path_of(group)
            candidate = plan_group(
                read(path),
                group,
                machine,
                model_name=model.name,
                engine_version=build_of(group),
                claimed_bytes=held,
                is_kv_shared=several,
            )
            for cards in candidate.replica_plans:
                claim(held, cards)
            plans.append(_plan(model, path, group, candidate))
            groups.append(_resolved(group, candidate))
        models.append(replace(model, groups=groups))
    return tuple(plans), replace(deployment, models=models)


def _plan(model: Model, path: Path, group: Group, candidate: Candidate) -> Plan:
    return Plan(
        model_name=model.name,
        model_path=str(path),
        load=Load(context_tokens=group.limits.context_tokens, concurrency=group.limits.sequences * candidate.replicas),
        candidates=(candidate,),
    )


def _resolved(group: Group, candidate: Candidate) -> Group:
    """The group with the cards that were chosen for it; what the file says otherwise stays."""
    found = group_of(candidate, group.limits)
    keys = ("gpus", "tensor_split", "limits")
    return replace(group, **{key: getattr(found, key) for key in keys})
