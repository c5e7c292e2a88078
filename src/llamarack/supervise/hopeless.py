"""A start of which nothing came, with the cause and the end of the log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llamarack.errors import EngineError
from llamarack.supervise.replica import Replica


def why_hopeless(replicas: Sequence[Replica], events: Path) -> EngineError:
    death = next((replica.last_death for replica in replicas if replica.last_death), None)
    if not replicas:
        return EngineError("nothing is left that could serve", hint=f"read {events}")
    first = replicas[0]
    if death is None:
        return EngineError("no replica became ready", hint=f"read {first.log_path}")
    tail = "\n".join(f"  | {line}" for line in death.log_tail)
    return EngineError(
        f"no replica became ready: {death.message}\nlast lines of {first.log_path}:\n{tail}", hint=death.hint
    )
