"""One line a request, as text or JSON: who asked what, how it ended, and where the time went. Never a prompt or key.

Lines are gathered and written together, since a write of its own for each costs more than relaying a token.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from typing import Literal, TextIO

import orjson

from llamarack.logs import log_format

_FLUSH_S = 0.05
_MOST_LINES = 512

Style = Literal["auto", "text", "json", "off"]


@dataclass(slots=True, kw_only=True)
class Entry:
    """Seconds from the arrival. `status` 499: the client left. `per_token_s`: after the first."""

    method: str
    target: str
    request_id: str
    status: int
    seconds: float
    caller: str | None = None
    model: str | None = None
    replica: str | None = None
    queue_s: float | None = None
    first_token_s: float | None = None
    per_token_s: float | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None


class AccessLog:
    def __init__(self, style: Style = "auto", out: TextIO | None = None) -> None:
        self._style = log_format().value if style == "auto" else style
        self._out = out or sys.stdout
        self._lines: list[str] = []
        self._flushing: asyncio.TimerHandle | None = None

    @property
    def is_on(self) -> bool:
        return self._style != "off"

    def note(self, entry: Entry) -> None:
        if self._style == "off":
            return
        now = time.time()
        self._lines.append(_json(entry, now) if self._style == "json" else _text(entry, now))
        if len(self._lines) >= _MOST_LINES:
            self.flush()
        elif self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)

    def flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._lines:
            self._out.write("".join(self._lines))
            self._out.flush()
            self._lines.clear()


def _text(entry: Entry, now: float) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    parts = [
        f"{at},{int(now % 1 * 1000):03d} INFO llamarack.access {entry.method} {entry.target} {entry.status}",
        f"id={entry.request_id} {entry.seconds:.3f} s",
    ]
    if entry.status == 499:
        parts.append("client left")
    for name in ("caller", "model", "replica"):
        value = getattr(entry, name)
        if value is not None:
            parts.append(f"{name}={value}")
    for name in ("queue_s", "first_token_s", "per_token_s"):
        value = getattr(entry, name)
        if value is not None:
            parts.append(f"{name}={value:.4f}")
    if entry.generated_tokens is not None:
        parts.append(f"tokens={entry.prompt_tokens or 0}+{entry.generated_tokens}")
    return " ".join(parts) + "\n"


def _json(entry: Entry, now: float) -> str:
    value = {"time_unix_s": round(now, 3)}
    value |= {
        name: round(given, 6) if isinstance(given, float) else given
        for name in Entry.__slots__
        if (given := getattr(entry, name)) is not None
    }
    return orjson.dumps(value).decode() + "\n"
