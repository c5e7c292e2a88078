"""What does this machine have? One call, one record, bounded in time.

NVML runs in a child of its own: a card that fell off the bus blocks its caller inside the kernel, and only a child
can be left behind.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamarack.errors import HardwareError
from llamarack.hardware.cards import cards_of, cuda_version
from llamarack.hardware.host import read_host
from llamarack.hardware.machine import Machine
from llamarack.hardware.memory_speed import with_remembered_bandwidth
from llamarack.hardware.probe import Answer, ask, module_command

# nvmlInit on a machine with 8 cards and persistence off takes some seconds, since each card is woken.
NVML_DEADLINE_S = 20.0


def detect_machine(*, deadline_s: float = NVML_DEADLINE_S) -> Machine:
    """A machine without NVIDIA's library or driver has no cards. Raises HardwareError where the driver is sick."""
    record = read_nvml(deadline_s=deadline_s)
    if record["status"] == "hung":
        raise HardwareError(
            f"NVIDIA's driver did not answer within {deadline_s:g} s",
            hint="sudo dmesg | grep -iE 'xid|nvrm', then reboot; `gpus: []` serves on the processor meanwhile",
        )
    if record["status"] == "failed":
        raise HardwareError(f"NVIDIA's driver answered: {record['detail']}", hint="llamarack check")
    machine = machine_of(record)
    return replace(machine, host=with_remembered_bandwidth(machine.host))


def machine_of(record: dict[str, Any], root: Path = Path("/")) -> Machine:
    return Machine(
        host=read_host(root),
        cards=cards_of(record),
        driver_version=record.get("driver_version"),
        cuda_version=cuda_version(record),
    )


def read_nvml(command: Sequence[str] | None = None, *, deadline_s: float = NVML_DEADLINE_S) -> dict[str, Any]:
    """The record of `nvml.read_record`; `status` is also `hung` (killed at the deadline) or `failed` (died)."""
    if command is None and not _has_library():
        return {"status": "absent", "detail": "NVML Shared Library Not Found", "devices": [], "pairs": []}
    return nvml_of(ask(command or module_command("nvml"), deadline_s=deadline_s))


def _has_library() -> bool:
    """False where it is surely not there: most machines of people who try this have no card, and the child that asks
    takes 0.1 s. Loading it touches no driver. Where it may lie elsewhere for a child, only the child can tell."""
    if "LD_LIBRARY_PATH" in os.environ:
        return True
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def nvml_of(answer: Answer) -> dict[str, Any]:
    return answer.values or {"status": answer.status.value, "detail": answer.detail, "devices": [], "pairs": []}
