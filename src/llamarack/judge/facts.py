"""What was measured: model, engine, cut, hardware. Two results are alike when their facts are.

A hash of a 70B file takes minutes; `model_sha256` is of each file's size and its first and last MiB, which hold the
header and the last tensor. Settings that change no answer and no speed (names, ports, keys) are not facts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import orjson
from pydantic import TypeAdapter, ValidationError

from llamarack.config import Deployment, Group, Model, plain
from llamarack.engine.chat_template import is_known, template_text
from llamarack.errors import UsageError
from llamarack.hardware.machine import Machine
from llamarack.model.read import read_model
from llamarack.supervise.effective import deployment_sha256, quick_sha256

FACTS_NAME = "facts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """None: not known; all None for a bare endpoint. `weights`: the quantisation's label. `devices`: cards of a
    replica, RPC devices, or `cpu`. `settings`: engine_args, env and limits that are not facts of their own.
    """

    model_path: str | None = None
    model_sha256: str | None = None
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None
    weights: str | None = None
    kv_dtype: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    replicas: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    split_mode: str | None = None
    devices: tuple[str, ...] | None = None
    context_tokens: int | None = None
    sequences: int | None = None
    settings: str | None = None
    cards: tuple[str, ...] | None = None
    driver: str | None = None
    processor: str | None = None
    deployment_sha256: str | None = None


# What a difference of two facts is called when it explains one of two answers.
FACTORS: Mapping[str, tuple[str, ...]] = {
    "quantisation": ("weights",),
    "KV cache type": ("kv_dtype",),
    "parallelism": ("tensor_parallel", "pipeline_parallel", "split_mode", "devices"),
    "engine": ("engine", "engine_version"),
    "hardware": ("cards", "processor"),
    "settings": ("settings", "context_tokens", "sequences"),
    "template": ("chat_template_sha256",),
    "tokenizer": ("tokenizer_sha256",),
}
# Follow from others, or say where and not what.
_DERIVED = frozenset({"deployment_sha256", "model_path"})


def facts_of(deployment: Deployment, model: Model, machine: Machine, *, engine_version: str | None) -> Facts:
    """Of the model's first group. Raises ModelError."""
    group = model.groups[0]
    spec = read_model(model.path_of(group))
    template = spec.chat_template if model.chat_template is None else _named_template(model.chat_template)
    return Facts(
        model_path=str(spec.path),
        model_sha256=quick_sha256(spec.files),
        tokenizer_sha256=spec.tokenizer.sha256,
        chat_template_sha256=None if template is None else hashlib.sha256(template.encode()).hexdigest(),
        weights=spec.quantization.label,
        kv_dtype=group.limits.kv_dtype,
        engine=group.engine,
        engine_version=engine_version,
        replicas=sum(one.replicas for one in model.groups),
        tensor_parallel=group.tensor_parallel,
        pipeline_parallel=group.pipeline_parallel,
        split_mode=_split_mode(group, machine),
        devices=_devices(group, machine),
        context_tokens=group.limits.context_tokens,
        sequences=group.limits.sequences,
        settings=_settings(group),
        cards=tuple(card.name for card in machine.cards),
        driver=machine.driver_version,
        processor=machine.host.processor,
        deployment_sha256=deployment_sha256(deployment),
    )


def differences(a: Facts, b: Facts) -> tuple[str, ...]:
    """Names of the facts that both know and that differ, in their order; what only follows from others is left out."""
    known = ((one.name, getattr(a, one.name), getattr(b, one.name)) for one in fields(Facts))
    return tuple(n for n, x, y in known if n not in _DERIVED and x is not None and y is not None and x != y)


def factors_of(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(factor for factor, members in FACTORS.items() if set(members) & set(names))


def save_facts(facts: Facts, folder: Path) -> None:
    (folder / FACTS_NAME).write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def load_facts(folder: Path) -> Facts:
    """Empty where the run left none. Raises UsageError for a file that is not one."""
    path = folder / FACTS_NAME
    if not path.exists():
        return Facts()
    try:
        return TypeAdapter(Facts).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UsageError(f"`{path}` cannot be read as the facts of a run", hint="measure again") from error


def _named_template(given: str) -> str:
    """Ours by name, or a file; other names are the engine's own."""
    return template_text(given) if is_known(given) or Path(given).is_file() else given


def _split_mode(group: Group, machine: Machine) -> str | None:
    return group.split_mode if group.engine == "llamacpp" and len(_devices(group, machine)) > 1 else None


def _devices(group: Group, machine: Machine) -> tuple[str, ...]:
    lists = group.gpu_lists()
    cards = [str(card) for card in lists[0]] if lists else []
    if lists is None:
        cards = ["auto"] if machine.cards else []
    return (*group.rpc_servers, *cards) or ("cpu",)


def _settings(group: Group) -> str:
    own = plain(group.limits, leave_out={"context_tokens", "sequences", "kv_dtype"})
    value = {"limits": own, "engine_args": group.engine_args, "env": group.env, "gpu_layers": group.gpu_layers}
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
