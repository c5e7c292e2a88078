"""What the planner has to know of engines before it plans a deployment file: their builds, and RPC devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llamarack.config import Group
from llamarack.engine import ADAPTORS
from llamarack.engine.llamacpp import binary_of
from llamarack.engine.llamacpp_binary import FIT_PARAMS
from llamarack.engine.rpc_devices import with_remotes
from llamarack.hardware.machine import Machine


def build_of(group: Group, machine: Machine) -> str | None:
    """The version of the engine that would run the group; None: the newest that the plan knows.

    Raises ConfigError for an engine that the file names and that is none.
    """
    return ADAPTORS[group.engine].build(group, on_cards=is_on_cards(group, machine))


def with_rpc_devices(machine: Machine, groups: Sequence[Group]) -> Machine:
    """The machine with the devices of the RPC servers that the groups name. Raises ConfigError, HardwareError."""
    asked = []
    for group in groups:
        is_given = all(address.memory_bytes for address in group.rpc_addresses())
        binary = None if is_given else binary_of(group, on_cards=is_on_cards(group, machine))
        asked.append((group, binary))
    return with_remotes(machine, asked) if any(group.rpc_servers for group in groups) else machine


def fit_params_of(group: Group, *, on_cards: bool) -> Path | None:
    """llama.cpp's own dry run, where the build that would run the group came with it."""
    if group.engine != "llamacpp":
        return None
    binary = binary_of(group, on_cards=on_cards)
    beside = None if binary is None else binary.path.with_name(FIT_PARAMS)
    return beside if beside is not None and beside.exists() else None


def is_on_cards(group: Group, machine: Machine) -> bool:
    return bool(machine.cards) and group.gpus != []
