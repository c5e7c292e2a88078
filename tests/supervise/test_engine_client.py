"""Whatever an engine does to a request of the supervisor, it ends in one of the three announced errors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llamarack.engine.dialect import Endpoint
from llamarack.supervise.engine_client import EngineClient, EngineRefused


@asynccontextmanager
async def _engine(tmp_path: Path, reply: bytes) -> AsyncIterator[EngineClient]:
    """Reads a request's head, sends `reply`, closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    path = tmp_path / "e.sock"
    endpoint = Endpoint(socket=path, port=None, key="k", served_name="m")
    async with await asyncio.start_unix_server(serve, str(path)), EngineClient(endpoint) as client:
        yield client


def _response(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"", OSError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", OSError),
        (b"garbage\r\n\r\n", OSError),
        (_response(b"{}", "500 Oops"), EngineRefused),
        (_response(b"not json"), EngineRefused),
        (_response(b'{"choices": []}'), EngineRefused),
        (_response(b'{"choices": [{"message": null}]}'), EngineRefused),
        (_response(b"[1]"), EngineRefused),
    ],
)
async def test_broken_reply_is_an_announced_error(tmp_path: Path, reply: bytes, error: type[Exception]) -> None:
    async with _engine(tmp_path, reply) as client:
        with pytest.raises(error):
            await client.complete("Hello", max_tokens=1, timeout_s=5)


async def test_engine_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    async with EngineClient(Endpoint(socket=tmp_path / "none.sock", port=None, key="k", served_name="m")) as client:
        assert not await client.is_up()
        with pytest.raises(OSError):
            await client.chat([{"role": "user", "content": "Hello"}], max_tokens=1, timeout_s=5)
