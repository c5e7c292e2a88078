"""One HTTP/1.1 request over a connection of its own, to an engine or a gateway on this machine.

The supervisor asks some questions at a start and then a few a minute: a client library of a quarter of a second of
imports would be the longest step of a small model's start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httptools

_READ_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """`body`: empty where it was passed on as it came."""

    status: int
    body: bytes


class _Parts:
    """What the parser found so far."""

    def __init__(self, on_data: Callable[[int, bytes], None] | None) -> None:
        self.body: list[bytes] = []
        self.is_whole = self.has_head = self.is_framed = False
        self._on_data = on_data
        self._parser = httptools.HttpResponseParser(self)

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.is_framed |= name.lower() in {b"content-length", b"transfer-encoding"}

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, data: bytes) -> None:
        if self._on_data is None:
            self.body.append(data)
        else:
            self._on_data(self.status, data)

    def on_message_complete(self) -> None:
        self.is_whole = True


async def exchange(
    where: Path | tuple[str, int],
    method: str,
    path: str,
    *,
    headers: Mapping[str, str],
    body: bytes = b"",
    on_data: Callable[[int, bytes], None] | None = None,
) -> Reply:
    """`where`: a Unix socket, or host and port. `on_data`: gets status and each part of the body as it comes.

    Waits as long as it takes. Raises OSError when nobody listens, or the reply breaks off or is none.
    """
    if isinstance(where, Path):
        reader, writer = await asyncio.open_unix_connection(str(where))
    else:
        reader, writer = await asyncio.open_connection(*where)
    try:
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        parts = _Parts(on_data)
        while not parts.is_whole:
            data = await reader.read(_READ_BYTES)
            if not data:
                if parts.has_head and not parts.is_framed:  # its end is the end of the connection
                    break
                raise ConnectionError("the reply broke off")
            try:
                parts.feed(data)
            except httptools.HttpParserError as error:
                raise ConnectionError(f"the reply is not HTTP: {error}") from error
        return Reply(status=parts.status, body=b"".join(parts.body))
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
