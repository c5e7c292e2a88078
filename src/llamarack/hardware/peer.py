"""Do copies between cards arrive? What does a bare CUDA context cost? Through the driver's own library alone.

Needs no torch: `libcuda.so.1` by ctypes. Run as a program (`python -m llamarack.hardware.peer`) it prints one JSON
object per line as each pair is done, so that whoever kills a hung run knows the pair. Cards are counted in PCI bus
order by the caller's CUDA_DEVICE_ORDER and CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from typing import Any

_COPY_BYTES = 32 * 1024**2  # large enough for the copy engines' full rate, small enough for 56 pairs in seconds
_RANDOM_BYTES = 1024**2  # repeated: making 32 MiB anew for 112 copies would take longer than copying
_TIMED_COPIES = 4
_SECOND_PROCESS = "--second"
_SECOND_PROCESS_S = 10


class CudaError(Exception):
    """A driver call that failed: its name and the driver's own error name."""


class Driver:
    """The few driver calls needed here. Names with `_v2` are the current ones behind CUDA's header macros."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        self.devices = [self._device(number) for number in range(count.value)]
        self.contexts = [self._context(device) for device in self.devices]

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'error').decode()}")

    def _device(self, number: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), number)
        return device

    def _context(self, device: ctypes.c_int) -> ctypes.c_void_p:
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context

    def free_bytes(self, number: int) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.use(number)
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def use(self, number: int) -> None:
        self.call("cuCtxSetCurrent", self.contexts[number])

    def allocate(self, number: int) -> ctypes.c_uint64:
        pointer = ctypes.c_uint64()
        self.use(number)
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(_COPY_BYTES))
        return pointer

    def can_access(self, number: int, peer: int) -> bool:
        answer = ctypes.c_int()
        self.call("cuDeviceCanAccessPeer", ctypes.byref(answer), self.devices[number], self.devices[peer])
        return bool(answer.value)

    def enable_access(self, number: int, peer: int) -> None:
        self.use(number)
        self.call("cuCtxEnablePeerAccess", self.contexts[peer], 0)

    def write(self, number: int, pointer: ctypes.c_uint64, data: bytes) -> None:
        self.use(number)
        self.call("cuMemcpyHtoD_v2", pointer, data, ctypes.c_size_t(len(data)))

    def read(self, number: int, pointer: ctypes.c_uint64) -> bytes:
        buffer = ctypes.create_string_buffer(_COPY_BYTES)
        self.use(number)
        self.call("cuMemcpyDtoH_v2", buffer, pointer, ctypes.c_size_t(_COPY_BYTES))
        return buffer.raw

    def copy(self, source: int, pointer: ctypes.c_uint64, target: int, target_pointer: ctypes.c_uint64) -> None:
        self.call(
            "cuMemcpyPeer",
            target_pointer,
            self.contexts[target],
            pointer,
            self.contexts[source],
            ctypes.c_size_t(_COPY_BYTES),
        )

    def synchronize(self, *numbers: int) -> None:
        for number in numbers:
            self.use(number)
            self.call("cuCtxSynchronize")


def _test_contexts(driver: Driver) -> None:
    """A context costs what a second process's contexts take from the free memory that the first one sees.

    Cards in exclusive mode refuse the second process; then the cost stays unknown.
    """
    before = [driver.free_bytes(number) for number in range(len(driver.devices))]
    command = [sys.executable, "-P", "-m", "llamarack.hardware.peer", _SECOND_PROCESS]
    second = subprocess.run(command, capture_output=True, timeout=_SECOND_PROCESS_S, check=False)
    for number, after in enumerate(json.loads(second.stdout) if second.returncode == 0 else ()):
        _say(event="context", card=number, context_bytes=before[number] - after)


def _test_pairs(driver: Driver, *, direct: bool) -> None:
    """`direct`: with peer access enabled where the driver offers it; else the driver goes through host memory."""
    pointers = [driver.allocate(number) for number in range(len(driver.devices))]
    for source, pointer in enumerate(pointers):
        for target, target_pointer in enumerate(pointers):
            if source == target or (direct and not driver.can_access(target, source)):
                continue
            _say(event="start", source=source, target=target, direct=direct)
            try:
                if direct:
                    driver.enable_access(target, source)
                arrived, seconds = _copied(driver, source, pointer, target, target_pointer)
                _say(
                    event="pair",
                    source=source,
                    target=target,
                    direct=direct,
                    arrived=arrived,
                    seconds=seconds,
                    copy_bytes=_COPY_BYTES,
                )
            except CudaError as error:
                _say(event="pair", source=source, target=target, direct=direct, error=str(error))


def _copied(
    driver: Driver, source: int, pointer: ctypes.c_uint64, target: int, target_pointer: ctypes.c_uint64
) -> tuple[bool, float]:
    """Whether every byte arrived, and seconds per copy. New random bytes each time: stale data cannot pass."""
    data = os.urandom(_RANDOM_BYTES) * (_COPY_BYTES // _RANDOM_BYTES)
    driver.write(source, pointer, data)
    driver.write(target, target_pointer, bytes(_COPY_BYTES))
    driver.synchronize(source, target)
    driver.copy(source, pointer, target, target_pointer)
    driver.synchronize(source, target)
    arrived = driver.read(target, target_pointer) == data
    started_s = time.perf_counter()
    for _ in range(_TIMED_COPIES):
        driver.copy(source, pointer, target, target_pointer)
    driver.synchronize(source, target)
    return arrived, (time.perf_counter() - started_s) / _TIMED_COPIES


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    driver = Driver()
    if _SECOND_PROCESS in sys.argv:
        print(json.dumps([driver.free_bytes(number) for number in range(len(driver.devices))]))
        return
    _test_contexts(driver)
    if len(driver.devices) > 1:
        _test_pairs(driver, direct=False)
        _test_pairs(driver, direct=True)
    _say(event="done")


if __name__ == "__main__":
    main()
