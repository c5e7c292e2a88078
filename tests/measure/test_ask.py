"""The one question of `demo`: its answer is timed, and whatever else comes back is told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from llamarack.errors import EngineError
from llamarack.measure.ask import ask_once

_WORD = b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n'
_USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'


@asynccontextmanager
async def _endpoint(status: bytes, *parts: bytes) -> AsyncIterator[str]:
    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %s\r\n\r\n" % status)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()
        await writer.wait_closed()
        served.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await served.wait()


async def test_answer_is_put_together_and_timed_wherever_the_stream_is_cut() -> None:
    stream = _WORD % b"Par" + _WORD % b"is " + _USAGE
    async with _endpoint(b"200 OK", stream[:30], stream[30:70], stream[70:]) as url:
        answer = await ask_once(url, "m", "Capital?")
    assert (answer.text, answer.tokens) == ("Paris", 2)
    assert answer.first_token_s > 0


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (b"200 OK", b'data: {"error": {"message": "slot lost"}}\n\n', "broke off: slot lost"),
        (b"200 OK", _USAGE, "was empty"),
        (b"503 Busy", b'{"error": "no replica"}', "answered with 503: .*no replica"),
    ],
)
async def test_anything_but_an_answer_is_an_error_in_words(status: bytes, body: bytes, told: str) -> None:
    async with _endpoint(status, body) as url:
        with pytest.raises(EngineError, match=told):
            await ask_once(url, "m", "Capital?")


async def test_nobody_there_is_an_error_in_words() -> None:
    with pytest.raises(EngineError, match="not answered"):
        await ask_once("http://127.0.0.1:1", "m", "Capital?")
