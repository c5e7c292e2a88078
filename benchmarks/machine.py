"""What stands beside every number: processor, cores, memory, kernel, versions, and how busy the machine was."""

import importlib.metadata
import os
import platform
import time
from typing import Any

from llamarack.hardware.host import read_host


def describe_machine() -> dict[str, Any]:
    host = read_host()
    packages = ("xllamacpp", "aiohttp", "uvloop")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": host.processor,
        "cores_usable": host.cores_usable,
        "memory_total_bytes": host.memory_total_bytes,
        "kernel": host.kernel,
        "python": platform.python_version(),
        "load_average_1_min": os.getloadavg()[0],
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }
