"""Files of replicas that are gone for good."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection

from llamarack.paths import RackPaths

_REPLICA_FILE = re.compile(r"(.+-\d+(?:-g\d+)?)(?:\.log(?:\.\d)?)?")


def drop_replaced(paths: RackPaths, kept: Collection[str]) -> None:
    """Logs and settings of replicas that were replaced before the newest change; those of it stay to be read."""
    for path in [*paths.logs.glob("*.log*"), *(paths.folder / "replicas").glob("*")]:
        found = _REPLICA_FILE.fullmatch(path.name)
        if found is None or found[1] in kept or found[1].startswith("gateway-"):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
