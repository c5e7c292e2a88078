"""What does NVIDIA's management library say? Raw readings as plain JSON values; no judgement, no unit conversion.

Run as a program (`python -m llamarack.hardware.nvml`) it prints the record. `detect` runs it as a child, because a
sick driver blocks inside the kernel where no thread can be stopped. A reading that the card or the driver does not
offer is None. Each reading names the `nvidia-smi --query-gpu` field that says the same; `tests/hardware/test_gpu.py`
compares them on a real card.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pynvml

RECORD_VERSION = 1
# pynvml 13 declares NVML_P2P_CAPS_INDEX_READ as a tuple by a stray comma; nvml.h says 0.
_P2P_READ = 0
_P2P_NVLINK = 2
_ECC_UNCORRECTED = 1
_ECC_VOLATILE = 0

Reading = dict[str, Any]


def read_record() -> Reading:
    """`status`: `ok`, `absent` (no library), `no_driver`, or `failed` with the library's own words in `detail`."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        names = {
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "absent",
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "no_driver",
        }
        return {
            "record_version": RECORD_VERSION,
            "status": names.get(error.value, "failed"),
            "detail": str(error),
            "devices": [],
            "pairs": [],
        }
    try:
        handles, lost = _handles()
        return {
            "record_version": RECORD_VERSION,
            "status": "ok",
            "detail": None,
            "driver_version": _ask(pynvml.nvmlSystemGetDriverVersion),  # driver_version
            "cuda_version": _ask(pynvml.nvmlSystemGetCudaDriverVersion_v2),  # "CUDA Version" of the plain output
            "devices": [_device(handle) for handle in handles],
            "pairs": [_pair(handles, a, b) for a in range(len(handles)) for b in range(len(handles)) if a != b],
            "lost": lost,
        }
    finally:
        pynvml.nvmlShutdown()


def _handles() -> tuple[list[Any], list[str]]:
    """Handles in NVML's order, which is PCI bus order, and what the library says of cards it cannot open."""
    handles, lost = [], []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handles.append(pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError as error:
            lost.append(f"card {index}: {error}")
    return handles, lost


def _ask(function: Callable[..., Any], *arguments: object) -> Any:
    """The reading, or None where this card or driver does not offer it."""
    try:
        value = function(*arguments)
    except (pynvml.NVMLError, UnicodeDecodeError):
        return None
    return value.decode() if isinstance(value, bytes) else value


def _device(handle: Any) -> Reading:
    mig_mode = _ask(pynvml.nvmlDeviceGetMigMode, handle)
    pci = _ask(pynvml.nvmlDeviceGetPciInfo, handle)
    return {
        "uuid": _ask(pynvml.nvmlDeviceGetUUID, handle),  # uuid
        "name": _ask(pynvml.nvmlDeviceGetName, handle),  # name
        "pci_bus_id": pci and _decoded(pci.busId),  # pci.bus_id
        "compute_capability": _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle),  # compute_cap
        "memory": _memory(handle),
        "memory_bus_bits": _ask(pynvml.nvmlDeviceGetMemoryBusWidth, handle),
        "memory_clock_max_mhz": _ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM),  # clocks.max.mem
        "mig_enabled": mig_mode and bool(mig_mode[0]),  # mig.mode.current
        "mig_devices": _mig_devices(handle) if mig_mode and mig_mode[0] else [],
        "ecc_enabled": _flag(_ask(pynvml.nvmlDeviceGetCurrentEccMode, handle)),  # ecc.mode.current
        "ecc_uncorrected_volatile": _ask(  # ecc.errors.uncorrected.volatile.total
            pynvml.nvmlDeviceGetTotalEccErrors, handle, _ECC_UNCORRECTED, _ECC_VOLATILE
        ),
        "remapped_rows": _ask(pynvml.nvmlDeviceGetRemappedRows, handle),  # corrected, uncorrected, pending, failed
        "persistence_enabled": _flag(_ask(pynvml.nvmlDeviceGetPersistenceMode, handle)),  # persistence_mode
        "power_limit_mw": _ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle),  # enforced.power.limit
        "power_limit_default_mw": _ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle),  # power.default_limit
        "temperature_c": _ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),  # temperature.gpu
        "temperature_slowdown_c": _ask(
            pynvml.nvmlDeviceGetTemperatureThreshold, handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        ),
        "throttle_mask": _ask(  # clocks_event_reasons.active
            pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle
        ),
        "utilization_percent": _utilization(handle),  # utilization.gpu
        "pcie_generation": _ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),  # pcie.link.gen.gpucurrent
        "pcie_generation_max": _ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),  # pcie.link.gen.max
        "pcie_width": _ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),  # pcie.link.width.current
        "pcie_width_max": _ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),  # pcie.link.width.max
        "numa_node": _numa_node(pci and _decoded(pci.busId)),
        "nvlinks": _nvlinks(handle),
        "fabric_state": _fabric_state(handle),  # fabric.state
        "processes": _processes(handle),
    }


def _decoded(text: bytes | str) -> str:
    return text.decode() if isinstance(text, bytes) else text


def _flag(value: int | list[int] | None) -> bool | None:
    return None if value is None else bool(value)


def _memory(handle: Any) -> Reading | None:
    """memory.total, memory.reserved, memory.free, memory.used (nvidia-smi prints MiB)."""
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if memory is not None:
        return {key: getattr(memory, key) for key in ("total", "reserved", "free", "used")}
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)  # drivers before 510 count the reserve as used
    return memory and {"total": memory.total, "reserved": None, "free": memory.free, "used": memory.used}


def _mig_devices(handle: Any) -> list[Reading]:
    """Slices with their own memory: asked of the parent, NVML would give the parent's."""
    found = []
    for index in range(_ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        slice_handle = _ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if slice_handle is not None:
            found.append(
                {
                    "uuid": _ask(pynvml.nvmlDeviceGetUUID, slice_handle),
                    "name": _ask(pynvml.nvmlDeviceGetName, slice_handle),
                    "memory": _memory(slice_handle),
                    "processes": _processes(slice_handle),
                }
            )
    return found


def _utilization(handle: Any) -> int | None:
    rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return None if rates is None else int(rates.gpu)


def _nvlinks(handle: Any) -> list[Reading]:
    """Links that exist, with the far end: another card's PCI id, or a switch. `nvidia-smi nvlink -s` lists them."""
    links = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = _ask(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            continue
        remote = _ask(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link) if state else None
        links.append(
            {
                "link": link,
                "active": bool(state),
                "version": _ask(pynvml.nvmlDeviceGetNvLinkVersion, handle, link),
                "remote_type": _ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) if state else None,
                "remote_pci_bus_id": remote and _decoded(remote.busId),
            }
        )
    return links


def _fabric_state(handle: Any) -> int | None:
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    info.version = pynvml.nvmlGpuFabricInfo_v2
    done = _ask(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, pynvml.byref(info))
    return None if done is None else int(info.state)


def _processes(handle: Any) -> list[Reading]:
    """Compute and graphics processes (`--query-compute-apps`). One process can appear in both lists."""
    found: dict[int, Reading] = {}
    readers = (pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3)
    for process in [process for reader in readers for process in _ask(reader, handle) or []]:
        found[process.pid] = {"pid": process.pid, "memory": process.usedGpuMemory, **_owner(process.pid)}
    return list(found.values())


def _owner(pid: int) -> Reading:
    """Name and user, where this process may see them: in a container, processes outside it have neither."""
    try:
        process = psutil.Process(pid)
        return {"name": process.name(), "user": process.username()}
    except psutil.Error:
        return {"name": None, "user": None}


def _numa_node(bus_id: str | None) -> int | None:
    """As `nvidia-smi topo -m` shows it. The kernel writes -1 where the firmware names no node."""
    if bus_id is None:
        return None
    try:
        node = int(Path("/sys/bus/pci/devices", sysfs_name(bus_id), "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def sysfs_name(bus_id: str) -> str:
    """`00000000:1B:00.0`, as NVML writes it, is `0000:1b:00.0` in /sys."""
    domain, _, rest = bus_id.partition(":")
    return f"{domain[-4:]}:{rest}".lower()


def _pair(handles: list[Any], a: int, b: int) -> Reading:
    """One direction of a pair: cell (a, b) of `nvidia-smi topo -m`, `topo -p2p r` and `topo -p2p n`."""
    return {
        "from": a,
        "to": b,
        "ancestor": _ask(pynvml.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b]),
        "p2p_read": _ask(pynvml.nvmlDeviceGetP2PStatus, handles[a], handles[b], _P2P_READ),
        "p2p_nvlink": _ask(pynvml.nvmlDeviceGetP2PStatus, handles[a], handles[b], _P2P_NVLINK),
    }


if __name__ == "__main__":
    json.dump(read_record(), sys.stdout, indent=1)
    sys.stdout.write("\n")
