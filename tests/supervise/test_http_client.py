"""Bodies by length, in chunks and to the end of the connection; whatever else a peer does is an OSError."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llamarack.supervise.http_client import exchange

_OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def _peer(tmp_path: Path, *parts: bytes) -> AsyncIterator[tuple[Path, list[bytes]]]:
    """Sends `parts` one by one once it has read a request, then closes."""
    requests: list[bytes] = []
    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reply(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            served.set()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"Content-Length" in line), 0)
        requests.append(head + await reader.readexactly(length))
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)

    path = tmp_path / "p.sock"
    async with await asyncio.start_unix_server(serve, str(path)):
        yield path, requests
        await served.wait()


@pytest.mark.parametrize(
    "parts",
    [
        (_OK + b"Content-Length: 5\r\n\r\nhe", b"llo"),
        (_OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n", b"3\r\nllo\r\n0\r\n\r\n"),
        (_OK + b"\r\nhe", b"llo"),
    ],
)
async def test_body_is_whole_however_it_is_framed(tmp_path: Path, parts: tuple[bytes, ...]) -> None:
    async with _peer(tmp_path, *parts) as (path, requests):
        reply = await exchange(path, "POST", "/x", headers={"Authorization": "Bearer k"}, body=b"{}")
        assert (reply.status, reply.body) == (200, b"hello")
        (request,) = requests
        assert request.startswith(b"POST /x HTTP/1.1\r\n")
        assert b"\r\nAuthorization: Bearer k\r\n" in request
        assert request.endswith(b"\r\n\r\n{}")


async def test_parts_of_a_body_are_passed_on_as_they_come(tmp_path: Path) -> None:
    seen: list[tuple[int, bytes]] = []
    head = b"HTTP/1.1 503 Busy\r\nContent-Length: 5\r\n\r\n"
    async with _peer(tmp_path, head + b"he", b"llo") as (path, _):
        reply = await exchange(path, "GET", "/", headers={}, on_data=lambda *part: seen.append(part))
    assert (reply.status, reply.body) == (503, b"")
    assert seen == [(503, b"he"), (503, b"llo")]


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200", _OK + b"Content-Length: 9\r\n\r\nhello", b"SSH-2.0-OpenSSH\r\n\r\n"]
)
async def test_reply_that_breaks_off_or_is_none_is_an_os_error(tmp_path: Path, sent: bytes) -> None:
    async with _peer(tmp_path, sent) as (path, _):
        with pytest.raises(OSError, match="the reply"):
            await exchange(path, "GET", "/", headers={})
