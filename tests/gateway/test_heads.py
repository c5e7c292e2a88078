"""A head that is known must say what the parser would say of it, whatever stands in it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarack.gateway.exchange import Exchange, Head, OpenExchange
from llamarack.gateway.heads import Heads
from llamarack.gateway.http_server import Connection, FastServer
from tests.gateway.raw import chat, connect, post_bytes
from tests.rigs import fake_engine, gateway_worker


class _Transport(asyncio.Transport):
    """Takes what is written; what is read comes from the test."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: Any) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False


def _heard(server: FastServer, data: bytes) -> None:
    connection = Connection(server)
    connection.connection_made(_Transport())
    connection.data_received(data)
    connection.connection_lost(None)


def _server(seen: list[tuple[Any, ...]]) -> FastServer:
    async def never(exchange: Exchange) -> None:
        raise AssertionError("asked for a task")

    def note(exchange: OpenExchange) -> bool:
        body = exchange.whole_body()
        headers = {name: value for name, value in exchange.headers.items() if name != "content-length"}
        seen.append((exchange.method, exchange.target, exchange.path, headers, exchange.closing, body))
        return True

    return FastServer(never, opens=note, keep_alive_s=60, head_timeout_s=60)


_NAMES = st.sampled_from(
    ["X-A", "x-b", "Content-length", "content-Length", "Authorization", "Connection", "Expect", "Host"]
)
_VALUES = st.sampled_from(["", "1", "12", "close", "keep-alive", "Bearer x", "a\tb", "é", "a: b", "Content-Length: 3"])
_LENGTH_LINE = st.sampled_from(
    ["Content-Length: %d", "content-length:%d", "Content-Length:\t%d \t", "CONTENT-LENGTH: %d"]
)
_END = st.sampled_from(["\r\n", "\r\n", "\r\n", "\n"])


@settings(deadline=None)
@given(
    st.lists(st.tuples(_NAMES, _VALUES, _END), max_size=4), st.integers(0, 4), _LENGTH_LINE, _END, st.integers(1, 12),
    st.integers(0, 12), st.sampled_from(["HTTP/1.1", "HTTP/1.0"]),
)  # fmt: skip
async def test_what_a_known_head_says_is_what_the_parser_says(
    lines: list[tuple[str, str, str]], at: int, length_line: str, end: str, first: int, second: int, version: str
) -> None:
    def request(length: int) -> bytes:
        parts = [f"{name}: {value}{ending}" for name, value, ending in lines]
        parts.insert(min(at, len(parts)), length_line % length + end)
        return f"POST /v1/x?y=%20 {version}\r\n{''.join(parts)}\r\n".encode() + b"b" * length

    known: list[tuple[Any, ...]] = []
    fresh: list[tuple[Any, ...]] = []
    server = _server(known)
    _heard(server, request(first))
    del known[:]
    _heard(server, request(second))  # with a head that the server may know by now
    _heard(_server(fresh), request(second))
    assert known == fresh


def _head(**headers: str) -> Head:
    return Head("POST", "/x", "/x", headers, keeps_alive=True, is_chunkable=True)


def test_a_head_is_known_by_all_but_the_digits_of_its_length() -> None:
    heads = Heads()
    data = b"POST /x HTTP/1.1\r\nA: b\r\nContent-Length: 12\r\nC: d\r\n\r\n"
    head = _head(**{"content-length": "12"})
    heads.learn(data, head)
    known = heads.find(data + b"body")
    assert known is not None
    assert known.head is head
    assert known.begins(data + b"body") == (len(data), 12)
    other = data.replace(b"12", b"34567")
    assert heads.find(other) is known
    assert known.begins(other) == (len(other), 34567)
    for changed in (
        data.replace(b"A: b", b"A: c"),
        data.replace(b"C: d", b"C: e"),
        data.replace(b"/x", b"/y"),
        data.replace(b"12", b"+1"),
        data.replace(b"12", b""),
        data.replace(b"12", b"1" * 10),
        data.replace(b"12", b"12\r\nD: e"),
        data[:-1],
    ):
        assert heads.find(changed) is None
        assert known.begins(changed) is None


@pytest.mark.parametrize("name", ["expect", "upgrade", "transfer-encoding"])
def test_what_is_unusual_is_parsed_each_time(name: str) -> None:
    heads = Heads()
    data = b"POST /x HTTP/1.1\r\nContent-Length: 12\r\n\r\n"
    heads.learn(data, _head(**{"content-length": "12", name: "y"}))
    assert heads.find(data) is None


def test_only_so_many_are_kept_and_none_that_is_long() -> None:
    heads = Heads()
    datas = [b"POST /%d HTTP/1.1\r\nContent-Length: 1\r\n\r\n" % number for number in range(1100)]
    for data in datas:
        heads.learn(data, _head(**{"content-length": "1"}))
    kept = [data for data in datas if heads.find(data) is not None]
    assert kept == datas[-1024:]
    long = b"POST /%b HTTP/1.1\r\nContent-Length: 1\r\n\r\n" % (b"x" * 3000)
    heads.learn(long, _head(**{"content-length": "1"}))
    assert heads.find(long) is None


@pytest.mark.process
async def test_a_known_head_with_its_body_in_pieces_or_none(tmp_path: Path) -> None:
    body = json.dumps(chat("x" * 5000, max_tokens=2)).encode()
    whole = post_bytes("/v1/chat/completions", body)
    head, _, _ = whole.partition(b"\r\n\r\n")
    async with (
        fake_engine(tmp_path, flavor="vllm", context_tokens=1_000_000) as engine,
        gateway_worker(tmp_path, [engine.row()]) as gateway,
        connect(gateway) as client,
    ):
        for pieces in (
            [whole],
            [whole[: len(head) + 4], body],  # the JDK's way
            [whole[: len(head) + 104], body[100:]],
            [whole[:20], whole[20:]],
            [whole + whole[:30], whole[30:]],
        ):
            await client.send(*pieces)
            for _ in range(sum(map(len, pieces)) // len(whole)):
                answer = await client.answer()
                assert answer.status == 200, answer.body
                assert await engine.last_body() == body
        empty = whole[: len(head) + 4].replace(b"Content-Length: %d" % len(body), b"Content-Length: 0")
        await client.send(empty)
        assert (await client.answer()).error["message"].startswith("the request has no body")
        assert (await client.post("/v1/chat/completions", body)).status == 200
