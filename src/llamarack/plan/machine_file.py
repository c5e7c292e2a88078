"""A machine that is not here: the hardware record that `check --json` wrote on it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from llamarack.errors import UsageError
from llamarack.hardware.machine import SCHEMA_VERSION, Machine
from llamarack.plan.catalogue import MOST_CARDS
from llamarack.units import TIB

_MOST_BYTES = 1024 * TIB


def read_machine(path: Path) -> Machine:
    """Takes the whole `check --json` record or its `hardware` part; keys it does not know are passed over.

    Raises UsageError naming the key at fault.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"`--gpus`: `{path}` cannot be read: {error.strerror or error}",
            hint=f"on the machine it describes: llamarack check --json >{path}",
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"`--gpus`: `{path}` is not JSON: {error}", hint=f"llamarack check --json >{path}") from error
    from pydantic import TypeAdapter, ValidationError

    record = value.get("hardware", value) if isinstance(value, dict) else value
    try:
        machine = TypeAdapter(Machine).validate_python(record)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"])) or "the record"
        raise UsageError(
            f"`--gpus`: `{path}` is not a hardware record: `{key}`: {fault['msg'].lower()}",
            hint=f"llamarack check --json >{path}",
        ) from None
    if machine.schema_version != SCHEMA_VERSION:
        raise UsageError(
            f"`--gpus`: `{path}` has schema_version {machine.schema_version}, this llamarack reads {SCHEMA_VERSION}"
        )
    if fault_found := next(_faults(machine), None):
        raise UsageError(f"`--gpus`: `{path}`: {fault_found}", hint=f"llamarack check --json >{path}")
    return machine


def _faults(machine: Machine) -> Iterator[str]:
    """What no machine reports but a hand may write, and the planner would calculate with."""
    host, cards = machine.host, machine.cards
    if len(cards) > MOST_CARDS:
        yield f"`cards`: at most {MOST_CARDS}, {len(cards)} given"
    if host.cores_usable < 1:
        yield f"`host.cores_usable`: must be at least 1, {host.cores_usable} given"
    if not 0 <= host.memory_available_bytes <= host.memory_total_bytes:
        yield (
            f"`host.memory_available_bytes`: must be from 0 to `memory_total_bytes` ({host.memory_total_bytes}), "
            f"{host.memory_available_bytes} given"
        )
    indices = [card.index for card in cards]
    for place, card in enumerate(cards):
        name = f"`cards[{place}]"
        if card.index < 0 or card.index in indices[:place]:
            yield f"{name}.index`: must be 0 or more and of one card only, {card.index} given"
        if not 0 < card.memory_total_bytes <= _MOST_BYTES:
            yield f"{name}.memory_total_bytes`: must be from 1 to {_MOST_BYTES}, {card.memory_total_bytes} given"
        if card.memory_free_bytes is not None and not 0 <= card.memory_free_bytes <= card.memory_total_bytes:
            yield (
                f"{name}.memory_free_bytes`: must be from 0 to `memory_total_bytes` ({card.memory_total_bytes}), "
                f"{card.memory_free_bytes} given"
            )
        for key in ("memory_bandwidth_bytes_per_s", "fp16_flops_per_s"):
            rate = getattr(card, key)
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                yield f"{name}.{key}`: must be over 0, {rate} given; null where it is not known"
