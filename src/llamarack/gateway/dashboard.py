"""The dashboard: a page of static files, and the supervisor's status record as the page reads it.

The files hold nothing of the rack and need no key; the record does. It is asked of the supervisor over the admin socket
at most once a second, and only while somebody looks.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath
from typing import Any

import orjson

from llamarack.gateway.exchange import Exchange
from llamarack.version import __version__

STATUS_PATH = "/dashboard/status"
_FRESH_S = 0.9  # under the page's own second, so that one viewer sees every second anew
_ASK_TIMEOUT_S = 2.0
_RECORD_LIMIT_BYTES = 4 * 1024**2
# Nothing inline, nothing from elsewhere, no frame around it; text can only enter the page as text.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/dashboard/draw.js": ("draw.js", "text/javascript; charset=utf-8"),
    "/dashboard/ask.js": ("ask.js", "text/javascript; charset=utf-8"),
    "/dashboard/style.css": ("style.css", "text/css; charset=utf-8"),
    "/dashboard/icon.svg": ("icon.svg", "image/svg+xml"),
    "/favicon.ico": ("icon.svg", "image/svg+xml"),
}
PAGE_PATHS = frozenset(_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asset:
    body: bytes
    kind: str
    tag: str


class Dashboard:
    """`admin_socket`: where the supervisor answers; None: there is none to ask."""

    def __init__(self, admin_socket: str | None) -> None:
        self._admin_socket = admin_socket
        self._assets = {path: _read_asset(*file) for path, file in _FILES.items()}
        self._record: dict[str, Any] | None = None
        self._asked_monotonic_s = float("-inf")
        self._read_unix_s: float | None = None
        self._is_here = False
        self._asking = asyncio.Lock()

    def page(self, exchange: Exchange, request_id: str) -> None:
        """Answers with the static file of one of `PAGE_PATHS`."""
        asset = self._assets[exchange.path]
        headers = {
            "Content-Type": asset.kind,
            "Content-Security-Policy": _POLICY,
            "Cache-Control": "no-cache",
            "Cross-Origin-Opener-Policy": "same-origin",
            "ETag": asset.tag,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "x-request-id": request_id,
        }
        if exchange.headers.get("if-none-match") == asset.tag:
            exchange.answer(304, headers, b"")
        else:
            exchange.answer(200, headers, asset.body)

    async def record(self) -> tuple[dict[str, Any] | None, bool]:
        """The newest record and whether the supervisor answers; an absent one leaves the last record standing."""
        async with self._asking:
            if time.monotonic() - self._asked_monotonic_s >= _FRESH_S:
                await self._refresh()
        return self._record, self._is_here

    async def status(self) -> bytes:
        """The same as JSON, with its age, as the page reads it."""
        await self.record()
        age_s = None if self._read_unix_s is None else max(0.0, time.time() - self._read_unix_s)
        return orjson.dumps(
            {"version": __version__, "supervisor_answers": self._is_here, "age_s": age_s, "status": self._record}
        )

    async def _refresh(self) -> None:
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                self._record = shown(await self._ask())
            self._read_unix_s = time.time()
            self._is_here = True
        except (OSError, ValueError, TimeoutError):
            self._is_here = False
        self._asked_monotonic_s = time.monotonic()

    async def _ask(self) -> dict[str, Any]:
        if self._admin_socket is None:
            raise ConnectionError("no supervisor")
        reader, writer = await asyncio.open_unix_connection(self._admin_socket, limit=_RECORD_LIMIT_BYTES)
        try:
            writer.write(b'{"op":"status"}\n')
            record: dict[str, Any] = orjson.loads(await reader.readline())
            return record
        finally:
            writer.close()


def shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """What leaves the machine: of an event's data only its hint, since command lines and paths are nobody's business
    who holds a mere API key."""
    events = [{**entry, "data": _only_hint(entry.get("data") or {})} for entry in record.get("events", [])]
    models = [
        {
            **model,
            "replicas": [_without_paths(row) for row in model["replicas"]],
        }
        for model in record.get("models", [])
    ]
    return {**record, "models": models, "events": events}


def _without_paths(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if name not in {"endpoint", "log"}}
    steps = (row.get("degraded_from") or {}).get("steps")
    if steps is not None:
        shown_steps = [{name: PurePath(str(value)).name for name, value in step.items()} for step in steps]
        kept["degraded_from"] = {"steps": shown_steps}
    return kept


def _only_hint(data: Mapping[str, Any]) -> dict[str, Any]:
    return {"hint": str(data["hint"])} if data.get("hint") else {}


def _read_asset(name: str, kind: str) -> _Asset:
    body = resources.files("llamarack.gateway").joinpath("assets", name).read_bytes()
    return _Asset(body=body, kind=kind, tag=f'"{hashlib.sha256(body).hexdigest()[:20]}"')
