"""What are the cards doing now? Raw NVML readings, one JSON object a line, until stdin is closed.

Run as a program (`python -m llamarack.hardware.telemetry INTERVAL_S`): a sick driver blocks its caller inside the
kernel, and only a child can be left behind. A machine without the library or the driver gets one line that says so.
Each reading names the `nvidia-smi --query-gpu` field that says the same; what a card does not offer is None.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Iterator
from typing import Any

import pynvml

from llamarack.hardware.nvml import Reading, _ask, _handles, _memory, _processes

_ECC_UNCORRECTED, _ECC_VOLATILE = 1, 0


def readings(interval_s: float) -> Iterator[Reading]:
    """One record at each interval. `status` as in `nvml.read_record`; only `ok` is followed by more."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        names = {pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "absent", pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "no_driver"}
        yield {"status": names.get(error.value, "failed"), "detail": str(error), "cards": []}
        return
    try:
        handles, _ = _handles()
        events = _xid_events(handles)
        while True:
            xids = _xids(events)
            yield {
                "status": "ok",
                "detail": None,
                "cards": [card for handle in handles for card in _cards(handle, xids)],
            }
            if select.select([sys.stdin], [], [], interval_s)[0]:
                return  # whoever asked has gone
    finally:
        pynvml.nvmlShutdown()


def _cards(handle: Any, xids: dict[str, list[int]]) -> list[Reading]:
    """The card, or its MIG slices with the memory of each; the rest of a slice's readings are its parent's."""
    uuid = _ask(pynvml.nvmlDeviceGetUUID, handle)
    rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    shared = {
        "power_mw": _ask(pynvml.nvmlDeviceGetPowerUsage, handle),  # power.draw
        "temperature_c": _ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),  # temperature.gpu
        "sm_clock_mhz": _ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),  # clocks.sm
        "throttle_mask": _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),  # clocks_event_reasons.active
        "ecc_uncorrected": _ask(  # ecc.errors.uncorrected.volatile.total
            pynvml.nvmlDeviceGetTotalEccErrors, handle, _ECC_UNCORRECTED, _ECC_VOLATILE
        ),
        "xids": xids.get(uuid, []),  # nvidia-smi has no field; the kernel's log says `NVRM: Xid`
    }
    mode = _ask(pynvml.nvmlDeviceGetMigMode, handle)
    if mode and mode[0]:
        slices = [
            _ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            for index in range(_ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0)
        ]
        return [_card(part, None, shared) for part in slices if part is not None]
    return [_card(handle, rates, shared)]


def _card(handle: Any, rates: Any, shared: Reading) -> Reading:
    return {
        "uuid": _ask(pynvml.nvmlDeviceGetUUID, handle),
        "name": _ask(pynvml.nvmlDeviceGetName, handle),
        "memory": _memory(handle),
        "utilisation_percent": None if rates is None else int(rates.gpu),  # utilization.gpu
        "memory_utilisation_percent": None if rates is None else int(rates.memory),  # utilization.memory
        "processes": _processes(handle),
        **shared,
    }


def _xid_events(handles: list[Any]) -> Any:
    """An event set that the driver fills with Xids, or None where it does not offer one (WSL, some MIG setups)."""
    events = _ask(pynvml.nvmlEventSetCreate)
    if events is None:
        return None
    kept = False
    for handle in handles:
        try:
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            kept = True
        except pynvml.NVMLError:
            continue
    return events if kept else None


def _xids(events: Any) -> dict[str, list[int]]:
    """Those since the last call, by the card's UUID."""
    found: dict[str, list[int]] = {}
    while events is not None:
        event = _ask(pynvml.nvmlEventSetWait_v2, events, 0)
        if event is None:  # NVML_ERROR_TIMEOUT: none is left
            return found
        uuid = _ask(pynvml.nvmlDeviceGetUUID, event.device)
        found.setdefault(uuid or "", []).append(int(event.eventData))
    return found


def main() -> None:
    for reading in readings(float(sys.argv[1])):
        try:
            print(json.dumps({**reading, "at_unix_s": time.time()}), flush=True)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
