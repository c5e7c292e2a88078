"""How fast does this processor read its memory? What every token of a model on the CPU waits for.

All usable cores read a buffer that no cache holds, with the C library's `memchr`, which looks at every byte and keeps
none; the fastest of several passes counts, since other work can only slow one down. Run as a program
(`python -m llamarack.hardware.memory_speed CORES BYTES`) it prints the record as JSON. `check` asks and remembers it;
every later look at the machine has it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamarack.hardware.machine import Host
from llamarack.paths import lasting_dir
from llamarack.units import MIB

SCHEMA_VERSION = 1
DEADLINE_S = 20.0
_FILE = "memory_speed.json"
_LEAST_BYTES = 512 * MIB
_CACHES = 4  # a buffer this many times the last-level cache leaves it no more than a quarter to hold
_MEMORY_FRACTION = 0.25  # of what is available; a machine in use must not be pushed into swapping
_PASSES_S = 1.5
_FEWEST_PASSES = 3


def buffer_bytes(host: Host, root: Path = Path("/")) -> int | None:
    """None where not even twice the last-level cache may be taken: then a pass would measure the cache."""
    cache = _last_level_cache_bytes(root)
    wanted = max(_LEAST_BYTES, _CACHES * cache)
    allowed = int(host.memory_available_bytes * _MEMORY_FRACTION)
    return min(wanted, allowed) if allowed >= max(2 * cache, _LEAST_BYTES // 8) else None


def _last_level_cache_bytes(root: Path) -> int:
    sizes = [0]
    for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * 1024)
    return max(sizes)


def measure_read(cores: int, size_bytes: int, *, seconds: float = _PASSES_S) -> float:
    """Bytes per second of the fastest pass of `cores` threads over `size_bytes` together."""
    library = ctypes.CDLL(None)  # a call through it lets other threads run
    library.memchr.restype = ctypes.c_void_p
    library.memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    part = size_bytes // cores // mmap.PAGESIZE * mmap.PAGESIZE
    with mmap.mmap(-1, part * cores) as buffer, ThreadPoolExecutor(cores) as pool:
        view = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        start = ctypes.addressof(view)

        def fill(core: int) -> None:  # each on its core, so that the pages lie near it; untouched ones are all one page
            ctypes.memset(start + core * part, 1, part)

        def read(core: int) -> None:
            library.memchr(start + core * part, 2, part)

        list(pool.map(fill, range(cores)))
        best_s, passes, ends_s = float("inf"), 0, time.perf_counter() + seconds
        while passes < _FEWEST_PASSES or time.perf_counter() < ends_s:
            before_s = time.perf_counter()
            list(pool.map(read, range(cores)))
            best_s, passes = min(best_s, time.perf_counter() - before_s), passes + 1
        del view
    return part * cores / best_s


def remember_bandwidth(host: Host, bytes_per_s: float) -> None:
    """For later looks at this processor with as many cores. A folder that cannot be written costs just that."""
    path = lasting_dir() / _FILE
    value = {**_subject(host), "memory_bandwidth_bytes_per_s": bytes_per_s, "measured_unix_s": int(time.time())}
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.write_text(json.dumps(value, indent=1) + "\n")
        partial.replace(path)
    except OSError:
        pass


def with_remembered_bandwidth(host: Host) -> Host:
    """The host with what `check` measured of it; unchanged where it did not, or of another processor."""
    try:
        value = json.loads((lasting_dir() / _FILE).read_text())
    except (OSError, ValueError):
        return host
    if not isinstance(value, dict) or any(value.get(key) != known for key, known in _subject(host).items()):
        return host
    rate = value.get("memory_bandwidth_bytes_per_s")
    return (
        replace(host, memory_bandwidth_bytes_per_s=float(rate)) if isinstance(rate, int | float) and rate > 0 else host
    )


def _subject(host: Host) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "processor": host.processor, "cores_usable": host.cores_usable}


if __name__ == "__main__":
    json.dump({"memory_bandwidth_bytes_per_s": measure_read(int(sys.argv[1]), int(sys.argv[2]))}, sys.stdout)
