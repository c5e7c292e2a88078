"""What does this machine have? One call, one record, bounded in time.

NVML runs in a child of its own: a card that fell off the bus blocks its caller inside the kernel, and only a child
can be left behind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamarack.errors import HardwareError
from llamarack.hardware.cards import cards_of, cuda_version
from llamarack.hardware.host import read_host
from llamarack.hardware.machine import Machine

# nvmlInit on a machine with 8 cards and persistence off takes some seconds, since each card is woken.
NVML_DEADLINE_S = 20.0
NVML_COMMAND = (sys.executable, "-P", "-m", "llamarack.hardware.nvml")


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
    return machine_of(record)


def machine_of(record: dict[str, Any], root: Path = Path("/")) -> Machine:
    return Machine(
        host=read_host(root),
        cards=cards_of(record),
        driver_version=record.get("driver_version"),
        cuda_version=cuda_version(record),
    )


def read_nvml(command: Sequence[str] = NVML_COMMAND, *, deadline_s: float = NVML_DEADLINE_S) -> dict[str, Any]:
    """The record of `nvml.read_record`; `status` is also `hung` (killed at the deadline) or `failed` (died)."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        output, errors = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        _abandon(child)
        return _without_cards("hung", f"no answer within {deadline_s:g} s")
    if child.returncode != 0:
        return _without_cards("failed", errors.decode(errors="replace").strip().rpartition("\n")[2])
    record: dict[str, Any] = json.loads(output)
    return record


def _abandon(child: subprocess.Popen[bytes]) -> None:
    """Kills, and does not wait for a child that the kernel holds: it goes when the driver lets it."""
    child.kill()
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
    try:
        child.wait(timeout=1)
    except subprocess.TimeoutExpired:
        pass


def _without_cards(status: str, detail: str) -> dict[str, Any]:
    return {"status": status, "detail": detail, "devices": [], "pairs": []}
