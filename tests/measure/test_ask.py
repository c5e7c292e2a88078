"""The one question of `demo`: its answer is timed, and whatever else comes back is told."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from llamarack.errors import EngineError
from llamarack.measure.ask import _Seen, ask_once

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


@pytest.mark.parametrize(("pieces", "rate"), [(3, 2.0), (1, None)])
def test_the_rate_is_of_what_came_after_the_first_token(
    monkeypatch: pytest.MonkeyPatch, pieces: int, rate: float | None
) -> None:
    """Tokens that came in one piece, as on a busy machine, have none."""
    clock = itertools.count(100.0, 0.5)
    monkeypatch.setattr("llamarack.measure.ask.time", SimpleNamespace(monotonic=lambda: next(clock)))
    seen = _Seen()
    words = [_WORD % b"Pa", _WORD % b"ri", _WORD % b"s" + _USAGE.replace(b"2}", b"3}")]
    for piece in words if pieces == 3 else [b"".join(words)]:
        seen.take(200, piece)
    answer = seen.answer()
    assert (answer.text, answer.tokens, answer.first_token_s, answer.tokens_per_s) == ("Paris", 3, 0.5, rate)


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
