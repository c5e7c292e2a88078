"""From a deployment to replicas that this machine can start now: everything that `lay_out` needs, read and judged."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llamarack.config import Deployment, Group, Model, plain
from llamarack.engine import ADAPTORS
from llamarack.engine.builds import build_of, with_rpc_devices
from llamarack.errors import ModelError
from llamarack.hardware.detect import detect_machine
from llamarack.hardware.finding import Severity
from llamarack.hardware.machine import Machine
from llamarack.model.check import check_identity
from llamarack.model.gguf_header import forget_headers
from llamarack.model.read import read_model
from llamarack.model.spec import ModelSpec
from llamarack.supervise.layout import lay_out
from llamarack.supervise.memory_file import Memory
from llamarack.supervise.own_memory import living_engines, without_engines
from llamarack.supervise.replica_record import ReplicaSpec
from llamarack.supervise.spec_json import spec_from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A layout that fits this machine once nothing else of this rack runs. `warnings`: for its journal. `links`: how
    its cards reach each other, for `status`."""

    deployment: Deployment
    specs: Sequence[ReplicaSpec]
    warnings: Sequence[str] = ()
    links: Sequence[dict[str, Any]] = ()


async def prepare(deployment: Deployment, memory: Memory | None, running: Sequence[ReplicaSpec] = ()) -> Prepared:
    """`memory`: whose engines count as free, since they give way. `running`: whose cards an unchanged group keeps.

    Raises ConfigError, ModelError, HardwareError, DoesNotFit, StartFailed; starts nothing.
    """
    machine = await asyncio.to_thread(detect_machine)
    machine = without_engines(machine, await asyncio.to_thread(living_engines, memory))
    wanted = {model.path_of(group) for model in deployment.models for group in model.groups}
    wanted |= {path for model in deployment.models for path in model.fallbacks}
    specs = {path: await asyncio.to_thread(read_model, path) for path in wanted}
    warnings = [warning for model in deployment.models for warning in _judge(model, specs)]
    forget_headers()
    groups = [group for model in deployment.models for group in model.groups]
    machine = await asyncio.to_thread(with_rpc_devices, machine, groups)
    layout = lay_out(
        with_cards_kept(deployment, running, machine), machine, specs, build_of=lambda group: build_of(group, machine)
    )
    for spec in layout:
        await asyncio.to_thread(spec.adaptor.prepare, spec.group, on_cards=bool(spec.card_uuids))
    return Prepared(deployment=deployment, specs=layout, warnings=warnings, links=links_record(machine))


def remembered_specs(memory: Memory | None) -> list[ReplicaSpec]:
    """The replicas of an earlier supervisor of this rack, as far as this version can read them."""
    saved = [spec_from_json(each.spec, ADAPTORS) for each in memory.replicas] if memory else []
    return [spec for spec in saved if spec is not None]


def with_cards_kept(deployment: Deployment, running: Sequence[ReplicaSpec], machine: Machine) -> Deployment:
    """The same with the cards of running replicas written into groups of `gpus: auto` that ask for nothing else.

    Planned anew they might land on other cards, since free memory has moved, and would be replaced for nothing.
    """
    known = {card.uuid for card in machine.cards}
    held: dict[str, list[list[int | str]]] = {}
    for spec in running:
        if spec.card_uuids and all(uuid in known for uuid in spec.card_uuids):
            held.setdefault(_identity(spec.model, spec.group), []).append(list(spec.card_uuids))
    models = [
        replace(model, groups=[part for group in model.groups for part in _kept(model, group, held)])
        for model in deployment.models
    ]
    return replace(deployment, models=models)


def _kept(model: Model, group: Group, held: Mapping[str, list[list[int | str]]]) -> list[Group]:
    cards = held.get(_identity(model, group), []) if group.gpus == "auto" else []
    here, rest = cards[: group.replicas], group.replicas - len(cards)
    # Two vLLM groups on auto would share the KV cache by other rules than one.
    if not here or (rest > 0 and group.engine == "vllm"):
        return [group]
    parts = [replace(group, gpus=[*here], replicas=len(here))]
    return parts + ([replace(group, replicas=rest)] if rest > 0 else [])


def _identity(model: Model, group: Group) -> str:
    return f"{model.name} {model.path_of(group)} {plain(group, leave_out={'replicas', 'gpus'})}"


def _judge(model: Model, specs: dict[Path, ModelSpec]) -> list[str]:
    """Warnings about tokenizer and template of a model's files. Raises ModelError where they cannot belong together."""
    told = []
    for path in dict.fromkeys([*(model.path_of(group) for group in model.groups), *model.fallbacks]):
        for finding in check_identity(specs[path], model.tokenizer):
            if finding.severity is Severity.ERROR:
                raise ModelError(f"model `{model.name}`: {finding.subject}: {finding.seen}", hint=finding.fix)
            if finding.severity is Severity.WARNING and not (model.chat_template and "template" in finding.code):
                told.append(f"{model.name}: {finding.seen}; {finding.fix}")
    return told


def links_record(machine: Machine) -> list[dict[str, Any]]:
    """Each direction between two cards: `index` to `peer_index`."""
    return [{"index": card.index, **asdict(link)} for card in machine.cards for link in card.links]
