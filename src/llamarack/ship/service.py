"""What service files of every kind need from a deployment: cards, files, and how long start and stop may take. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llamarack.config import Deployment, Group
from llamarack.errors import UsageError
from llamarack.plan.nodes import node_of
from llamarack.supervise.layout import start_deadline_s

# After the drain: engines get 8 s, their processes are waited for (supervise/supervisor.py, _STOP_TIMEOUT_S).
_END_S = 90
_START_MARGIN_S = 60  # reading headers, planning, the gateway's own start


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """`start_s`: until every replica is ready or has failed; `stop_s`: a drain (`drain_s`) and the end of all
    processes."""

    start_s: int
    drain_s: int
    stop_s: int


def timing(deployment: Deployment, weights_bytes: Mapping[Path, int]) -> Timing:
    """Loads go one after the other, so their deadlines add up. A file that is not known here counts as empty."""
    loads = [
        start_deadline_s(deployment.supervise, weights_bytes.get(model.path_of(group), 0)) * group.replicas
        for model in deployment.models
        for group in model.groups
    ]
    drain_s = math.ceil(deployment.supervise.drain_s)
    return Timing(start_s=math.ceil(sum(loads)) + _START_MARGIN_S, drain_s=drain_s, stop_s=drain_s + _END_S)


def model_paths(deployment: Deployment) -> list[Path]:
    """Every file or folder that engines read, once."""
    found: dict[Path, None] = {}
    for model in deployment.models:
        paths = [model.path_of(group) for group in model.groups] + [*model.fallbacks]
        if model.tokenizer is not None:
            paths.append(model.tokenizer)
        if model.chat_template is not None and model.chat_template.endswith(".jinja"):
            paths.append(Path(model.chat_template))
        found |= dict.fromkeys(paths)
    return list(found)


def needs_shared_memory(deployment: Deployment) -> bool:
    """vLLM's and torch's ranks speak to each other through /dev/shm; llama.cpp is one process."""
    return any(group.engine != "llamacpp" for model in deployment.models for group in model.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """`named`: the machine's cards that the file names, in order; None: it leaves the choice to the plan.

    `count`: how many are needed at least.
    """

    named: tuple[int | str, ...] | None
    count: int


def cards_of(deployment: Deployment) -> Cards:
    """Raises UsageError where some groups name their cards and others leave them to the plan."""
    groups = [group for model in deployment.models for group in model.groups if group.gpus != []]
    if not groups:
        return Cards(named=(), count=0)
    lists = [group.gpu_lists() for group in groups]
    if all(each is None for each in lists):
        return Cards(named=None, count=sum(_least(group) for group in groups))
    if any(each is None for each in lists):
        raise UsageError(
            "some groups name their `gpus` and others leave them to the plan; a container gets its cards beforehand",
            hint="write gpus: for every group, such as gpus: [[0], [1]]",
        )
    named = dict.fromkeys(card for each in lists for cards in each or [] for card in cards)
    ordered = sorted(named, key=lambda card: (isinstance(card, str), card))
    return Cards(named=tuple(ordered), count=len(ordered))


def _least(group: Group) -> int:
    return group.replicas * len(node_of(group).ranks)


def renumbered(deployment: Deployment, cards: Cards) -> Deployment:
    """For a container that sees only `cards`: there they are counted from 0, in the order they were given."""
    if not cards.named:
        return deployment
    place = {card: index for index, card in enumerate(cards.named)}

    def of_group(group: Group) -> Group:
        lists = group.gpu_lists()
        if not group.gpus or lists is None:
            return group
        return replace(group, gpus=[[place[card] for card in each] for each in lists])

    models = [replace(model, groups=[of_group(group) for group in model.groups]) for model in deployment.models]
    return replace(deployment, models=models)
