"""From a deployment file and a machine to the replicas that will run: ids, cards, plans, fingerprints. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson

from llamarack.config import Deployment, Group, Model, Supervise, plain
from llamarack.engine import ADAPTORS
from llamarack.errors import ConfigError, DoesNotFit
from llamarack.hardware.machine import Machine
from llamarack.model.spec import ModelFormat, ModelSpec
from llamarack.paths import slug
from llamarack.plan.devices import claim
from llamarack.plan.planner import plan_group
from llamarack.plan.record import Candidate
from llamarack.plan.vllm_shard import illegal_cut
from llamarack.supervise.replica_record import ReplicaSpec
from llamarack.units import GIB, format_bytes

_DEADLINE_BASE_S = 300.0
_DEADLINE_PER_GIB_S = 20.0
_FORMAT_OF = {"llamacpp": ModelFormat.GGUF, "vllm": ModelFormat.SAFETENSORS, "transformers": ModelFormat.SAFETENSORS}


def lay_out(
    deployment: Deployment,
    machine: Machine,
    specs: dict[Path, ModelSpec],
    *,
    build_of: Callable[[Group], str | None] = lambda _: None,
) -> list[ReplicaSpec]:
    """All replicas, in file order. Raises ConfigError for a wrong pairing, DoesNotFit for a group without room.

    `specs`: the read model of every path that the file names for a group; `build_of`: the version of a group's engine
    where it is not the newest that the plan knows.
    """
    replicas: list[ReplicaSpec] = []
    held: dict[int, int] = {}  # bytes by card that earlier groups of the file take
    is_kv_shared = sum(len(model.groups) for model in deployment.models) > 1
    for model in deployment.models:
        _require_fallbacks(model, specs)
        number = 0
        for group in model.groups:
            path = model.path_of(group)
            spec = specs[path]
            _require_pairing(model, group, spec)
            _require_legal_cut(model, group, spec)
            candidate = plan_group(
                spec,
                group,
                machine,
                model_name=model.name,
                engine_version=build_of(group),
                claimed_bytes=held,
                is_kv_shared=is_kv_shared,
            )
            _require_fit(model, candidate)
            for index in range(group.replicas):
                claim(held, candidate.replica_plans[index], candidate.host_bytes or 0)
                replicas.append(_replica(deployment.supervise, machine, model, group, spec, candidate, index, number))
                number += 1
    return replicas


def _replica(
    supervise: Supervise,
    machine: Machine,
    model: Model,
    group: Group,
    spec: ModelSpec,
    candidate: Candidate,
    index: int,
    number: int,
) -> ReplicaSpec:
    split = candidate.replica_splits[index] if candidate.replica_splits else candidate.tensor_split
    candidate = replace(candidate, cards=candidate.replica_plans[index], tensor_split=split)
    by_index = {card.index: card for card in machine.cards}
    cards = [by_index[i] for i in candidate.replica_cards[index] if i in by_index] if candidate.replica_cards else []
    uuids = [card.uuid or str(card.index) for card in cards]
    path = model.path_of(group)
    return ReplicaSpec(
        id=f"{slug(model.name)}-{number}",
        model=model,
        group=group,
        path=path,
        candidate=candidate,
        card_uuids=uuids,
        adaptor=ADAPTORS[group.engine],
        has_template=bool(model.chat_template or spec.chat_template),
        start_deadline_s=start_deadline_s(supervise, spec.weights_bytes),
        fingerprint=_fingerprint(model, group, path, candidate, uuids),
        is_deadline_auto=supervise.start_deadline == "auto",
    )


def plan_again(
    was: ReplicaSpec,
    group: Group,
    path: Path,
    machine: Machine,
    spec: ModelSpec,
    supervise: Supervise,
    *,
    claimed_bytes: dict[int, int],
    is_kv_shared: bool,
    build: str | None = None,
) -> ReplicaSpec:
    """One replica with other limits or another file, on the cards it has. Its identity stays that of the file.

    `claimed_bytes`: what other replicas that do not run yet will take, by card index. Raises ConfigError for a wrong
    pairing, DoesNotFit where this machine has no room for it now.
    """
    _require_pairing(was.model, group, spec)
    _require_legal_cut(was.model, group, spec)
    cards: list[int | str | list[int | str]] = [int(card) if card.isdigit() else card for card in was.card_uuids]
    threads = group.limits.threads if group.limits.threads != "auto" else was.candidate.threads
    alone = replace(group, replicas=1, gpus=cards, limits=replace(group.limits, threads=threads or "auto"))
    candidate = plan_group(
        spec,
        alone,
        machine,
        model_name=was.model.name,
        engine_version=build,
        claimed_bytes=claimed_bytes,
        is_kv_shared=is_kv_shared,
    )
    _require_fit(was.model, candidate)
    return replace(
        was,
        group=group,
        path=path,
        candidate=candidate,
        has_template=bool(was.model.chat_template or spec.chat_template),
        start_deadline_s=start_deadline_s(supervise, spec.weights_bytes),
    )


def start_deadline_s(supervise: Supervise, weights_bytes: int) -> float:
    """5 min + 20 s per GiB of weights, unless the file says otherwise."""
    if supervise.start_deadline != "auto":
        return supervise.start_deadline
    return _DEADLINE_BASE_S + _DEADLINE_PER_GIB_S * weights_bytes / GIB


def _fingerprint(model: Model, group: Group, path: Path, candidate: Candidate, uuids: list[str]) -> str:
    """Changes when the engine would be started differently, or its file was replaced.

    An automatic split follows the free memory of the moment: an engine that runs has one as good. On the processor the
    threads of one replica depend on how many there are.
    """
    split = None if group.tensor_split == "auto" else candidate.tensor_split
    files = [path, *([group.engine_binary] if group.engine_binary else [])]
    whole = plain(model)
    engine_side = {
        "model": {name: whole[name] for name in ("name", "path", "tokenizer", "chat_template")},
        "group": plain(group, leave_out={"replicas", "gpus"}),
        "cards": uuids,
        "plan": [candidate.context_tokens, candidate.sequences, candidate.batch_tokens, split],
        "threads": None if uuids else candidate.threads,
        "files": [[status.st_size, status.st_mtime_ns] for status in (file.stat() for file in files)],
    }
    return hashlib.sha256(orjson.dumps(engine_side)).hexdigest()[:16]


def _require_pairing(model: Model, group: Group, spec: ModelSpec) -> None:
    wanted = _FORMAT_OF[group.engine]
    if spec.format is not wanted:
        right = "llamacpp" if spec.format is ModelFormat.GGUF else "vllm"
        raise ConfigError(
            f"model `{model.name}`: engine `{group.engine}` reads {wanted} models, `{spec.path}` is {spec.format}",
            hint=f"engine: {right}",
        )


def _require_fallbacks(model: Model, specs: dict[Path, ModelSpec]) -> None:
    """Each must suit a group's engine and be smaller than what it stands in for; else it would be found at 3 a.m."""
    for index, path in enumerate(model.fallbacks):
        spec = specs[path]
        suited = [group for group in model.groups if _FORMAT_OF[group.engine] is spec.format]
        if not suited:
            raise ConfigError(
                f"model `{model.name}`: fallbacks[{index}]: `{path}` is {spec.format}, which no engine of this model "
                "reads",
                hint=f"name a {_FORMAT_OF[model.groups[0].engine]} model",
            )
        before = min(specs[model.path_of(group)].weights_bytes for group in suited)
        if spec.weights_bytes >= before:
            raise ConfigError(
                f"model `{model.name}`: fallbacks[{index}]: `{path}` has {format_bytes(spec.weights_bytes)} of "
                f"weights, not less than the {format_bytes(before)} that it should stand in for",
                hint="name a coarser quantisation of the same model, such as Q4_K_M for Q8_0",
            )


def _require_legal_cut(model: Model, group: Group, spec: ModelSpec) -> None:
    """No amount of memory makes a cut legal, so it is the file that is wrong."""
    if group.engine != "vllm":
        return
    reasons = illegal_cut(spec, group.tensor_parallel, group.pipeline_parallel)
    if not reasons:
        return
    field = "tensor_parallel" if group.tensor_parallel > 1 else "pipeline_parallel"
    most = max(spec.attention_heads)
    legal = [degree for degree in range(1, most + 1) if not illegal_cut(spec, degree, 1)]
    raise ConfigError(
        f"model `{model.name}`: {field}: {'; '.join(reasons)}",
        hint=f"tensor_parallel: one of {', '.join(map(str, legal))}" if legal else "another engine or checkpoint",
    )


def _require_fit(model: Model, candidate: Candidate) -> None:
    if candidate.fits:
        return
    worst = min(candidate.cards, key=lambda card: card.free_after_bytes)
    reasons = "; ".join(dict.fromkeys(candidate.reasons))
    raise DoesNotFit(
        f"model `{model.name}` needs {format_bytes(worst.total_high_bytes)} on {worst.name}, "
        f"{format_bytes(max(0, worst.memory_free_bytes or 0))} are free" + (f" ({reasons})" if reasons else ""),
        hint=f"llamarack plan {model.path} shows what fits",
    )
