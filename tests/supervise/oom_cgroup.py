"""A memory cgroup of a test's own, in which the kernel's out-of-memory killer strikes for real."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

V2, V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """The folder of a new group; write a pid into its `cgroup.procs`. Skips where this user may make none."""
    top, limit = (V1, "memory.limit_in_bytes") if (V1 / "memory.limit_in_bytes").exists() else (V2, "memory.max")
    group = top / f"llamarack-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"needs a memory cgroup ({error}): run as root where /sys/fs/cgroup can be written")
    try:
        yield group
    finally:
        for _ in range(200):  # its processes may still be on their way out
            with contextlib.suppress(OSError):
                group.rmdir()
            if not group.exists():
                break
            time.sleep(0.05)
