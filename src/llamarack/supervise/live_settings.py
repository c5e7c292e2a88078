"""Which settings of a running rack an edited file may change. Pure."""

from __future__ import annotations

from llamarack.config import Deployment
from llamarack.errors import UsageError

# What gateway workers are born with: the listening socket, and what they do for every connection.
_FIXED = {
    "gateway": ("host", "port", "workers", "tls_cert", "tls_key", "keep_alive_s", "access_log"),
    "supervise": ("stuck_request_s", "webhook"),
}


def require_changeable(old: Deployment, new: Deployment, *, rack: str) -> None:
    """Raises UsageError naming every setting that only a stop and a start can change."""
    told = []
    for section, names in _FIXED.items():
        for name in names:
            before, after = (getattr(getattr(deployment, section), name) for deployment in (old, new))
            if before != after:
                told.append(f"`{section}.{name}` is `{_shown(before)}`, `{_shown(after)}` in the file")
    if told:
        raise UsageError(
            f"not while the rack runs: {'; '.join(told)}",
            hint=f"put it back, or llamarack stop --rack {rack} and llamarack serve FILE",
        )


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
