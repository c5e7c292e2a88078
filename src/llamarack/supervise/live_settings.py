"""Which settings of a running rack an edited file may change. Pure."""

from __future__ import annotations

from llamarack.config import Deployment
from llamarack.errors import UsageError

# The listening socket belongs to the gateway workers from their first breath.
_FIXED = ("host", "port", "workers", "tls_cert", "tls_key")


def require_changeable(old: Deployment, new: Deployment, *, rack: str) -> None:
    """Raises UsageError naming every setting that only a stop and a start can change."""
    told = []
    for name in _FIXED:
        before, after = getattr(old.gateway, name), getattr(new.gateway, name)
        if before != after:
            told.append(f"`gateway.{name}` is `{_shown(before)}`, `{_shown(after)}` in the file")
    if told:
        raise UsageError(
            f"a running rack cannot change where it listens: {'; '.join(told)}",
            hint=f"put it back, or llamarack stop --rack {rack} and llamarack serve FILE",
        )


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
