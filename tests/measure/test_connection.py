"""Stamps come before parsing, and a connection is used again only when it may be."""

import asyncio
import socket
import time

import pytest

from llamarack.measure.connection import Connection, connect
from llamarack.measure.target import parse_target

RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
TIMEOUT_S = 20


class Heard:
    """A receiver that writes down what it is told and when."""

    def __init__(self) -> None:
        self.bodies: list[tuple[bytes, int]] = []
        self.ends: list[bool] = []
        self.over = asyncio.Event()

    def headers(self, status: int, at_ns: int) -> None:
        self.status = status

    def body(self, data: bytes, at_ns: int) -> None:
        self.bodies.append((data, at_ns))

    def end(self, *, is_whole: bool, at_ns: int) -> None:
        self.ends.append(is_whole)
        self.over.set()


class Pair:
    """A connection of the product and the other end of its socket."""

    @classmethod
    async def open(cls) -> "Pair":
        pair = cls()
        ours, pair.far = socket.socketpair()
        pair.far.setblocking(False)
        loop = asyncio.get_running_loop()
        _, pair.near = await loop.create_connection(Connection, sock=ours)
        return pair

    near: Connection
    far: socket.socket

    async def answer(self, data: bytes, heard: Heard) -> None:
        self.near.send(b"x", heard)
        await asyncio.get_running_loop().sock_sendall(self.far, data)
        await asyncio.wait_for(heard.over.wait(), TIMEOUT_S)

    def close(self) -> None:
        self.near.abort()
        self.far.close()


@pytest.fixture
async def pair():
    made = await Pair.open()
    yield made
    made.close()
    await asyncio.sleep(0)


async def test_read_is_stamped_at_once_and_parsed_in_the_next_turn(pair: Pair) -> None:
    heard = Heard()
    pair.near.send(b"x", heard)
    before_ns = time.monotonic_ns()
    pair.near.data_received(RESPONSE)
    after_ns = time.monotonic_ns()
    assert heard.bodies == []  # neighbours that are readable now are stamped before this is parsed
    await heard.over.wait()
    ((data, at_ns),) = heard.bodies
    assert data == b"hi"
    assert before_ns <= at_ns <= after_ns


async def test_two_reads_of_one_turn_keep_their_own_stamps(pair: Pair) -> None:
    heard = Heard()
    pair.near.send(b"x", heard)
    pair.near.data_received(RESPONSE[:-1])
    between_ns = time.monotonic_ns()
    pair.near.data_received(RESPONSE[-1:])
    await heard.over.wait()
    assert [data for data, _ in heard.bodies] == [b"h", b"i"]
    assert heard.bodies[0][1] <= between_ns <= heard.bodies[1][1]


async def test_bytes_that_came_before_the_close_are_read_first(pair: Pair) -> None:
    heard = Heard()
    pair.near.send(b"x", heard)
    pair.near.data_received(RESPONSE)
    pair.near.connection_lost(None)
    assert heard.ends == [True]
    assert [data for data, _ in heard.bodies] == [b"hi"]


async def test_whole_response_leaves_the_connection_reusable(pair: Pair) -> None:
    for _ in range(2):
        heard = Heard()
        await pair.answer(RESPONSE, heard)
        assert heard.ends == [True]
        assert pair.near.is_reusable


async def test_connection_close_is_obeyed(pair: Pair) -> None:
    heard = Heard()
    await pair.answer(RESPONSE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), heard)
    assert heard.ends == [True]
    assert not pair.near.is_reusable


async def test_what_is_no_http_ends_the_request_once_and_not_whole(pair: Pair) -> None:
    heard = Heard()
    await pair.answer(b"SSH-2.0-OpenSSH_9\r\n\r\n", heard)
    assert heard.ends == [False]
    assert not pair.near.is_reusable


async def test_bytes_that_nobody_asked_for_spoil_the_connection(pair: Pair) -> None:
    pair.near.data_received(RESPONSE)
    await asyncio.sleep(0)
    assert not pair.near.is_reusable


async def test_aborted_request_hears_nothing_more(pair: Pair) -> None:
    heard = Heard()
    pair.near.send(b"x", heard)
    pair.near.data_received(RESPONSE)
    pair.near.abort()
    await asyncio.sleep(0)
    assert heard.ends == []


async def test_small_requests_are_not_held_back() -> None:
    listener = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    connection = await connect(parse_target(f"http://127.0.0.1:{port}"), None)
    assert connection._transport is not None
    sock = connection._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    connection.abort()
    listener.close()
    await listener.wait_closed()
