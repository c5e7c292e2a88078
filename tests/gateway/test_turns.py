"""A first token does not wait behind what comes for streams that are under way; those lose nothing by giving way."""

import asyncio
from collections.abc import Callable

import pytest

from llamarack.gateway.turns import Turns
from llamarack.gateway.upstream import EngineReply, Engines

_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Stream:
    """One that an engine has begun. `got`: the pieces that its sink was given, each what came in one turn."""

    def __init__(self, engines: Engines, *, enough: bytes = b"no such data") -> None:
        self.got: list[bytes] = []
        self.transport = _Transport()
        self.reply = EngineReply(b"", engines, "engine")
        self.reply.connection_made(self.transport)
        self.reply.data_received(_HEAD)

        def sink(data: bytes) -> bool:
            self.got.append(data)
            return enough in data

        self.reply.pass_to(sink)

    def come(self, data: bytes) -> None:
        self.reply.data_received(_chunk(data))


async def _turns(until: Callable[[], bool]) -> None:
    for _ in range(100):
        if until():
            return
        await asyncio.sleep(0)
    raise AssertionError("its turn never came")


async def test_what_is_new_waits_for_few_of_those_under_way() -> None:
    order: list[str] = []

    class Old:
        def __init__(self, number: int) -> None:
            self.name = f"old {number}"

        def pass_on(self) -> None:
            order.append(self.name)

    turns = Turns()
    for number in range(40):
        turns.await_turn(Old(number))
    asyncio.get_running_loop().call_soon(order.append, "new")
    await _turns(lambda: len(order) == 41)
    assert order.index("new") <= 4
    assert [name for name in order if name != "new"] == [f"old {number}" for number in range(40)]


async def test_one_that_has_its_turn_may_wait_for_another() -> None:
    class Again:
        left = 3

        def pass_on(self) -> None:
            self.left -= 1
            if self.left:
                turns.await_turn(self)

    turns, one = Turns(), Again()
    turns.await_turn(one)
    await _turns(lambda: not one.left)


async def test_a_first_token_goes_before_what_came_earlier_for_others() -> None:
    engines = Engines()
    old, new = _Stream(engines), _Stream(engines)
    old.come(b"first")
    old.reply.give_way()
    old.come(b"second")
    new.come(b"first")
    assert (old.got, new.got) == ([b"first"], [b"first"])
    await _turns(lambda: len(old.got) == 2)
    assert old.got[1] == b"second"


async def test_what_came_before_its_turn_goes_in_one_piece() -> None:
    stream = _Stream(Engines())
    stream.reply.give_way()
    for data in (b"a", b"b", b"c"):
        stream.come(data)
    await _turns(lambda: bool(stream.got))
    assert stream.got == [b"abc"]


@pytest.mark.parametrize("is_whole", [True, False])
async def test_what_waits_is_not_lost_with_the_connection(is_whole: bool) -> None:
    stream = _Stream(Engines())
    told: list[tuple[bool, bool]] = []
    stream.reply.listener = lambda reply: told.append((reply.is_ended, reply.fault is not None))
    stream.reply.give_way()
    stream.come(b"last")
    if is_whole:
        stream.reply.data_received(_END)
    stream.reply.connection_lost(None)
    assert stream.got == [b"last"]
    assert told == [(is_whole, not is_whole)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(told) == 1
    assert stream.got == [b"last"]


async def test_who_closes_gets_nothing_more() -> None:
    stream = _Stream(Engines())
    stream.reply.give_way()
    stream.come(b"too late")
    stream.reply.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not stream.got
    assert stream.transport.is_aborted


async def test_kept_connection_gives_way_no_longer_in_its_next_exchange() -> None:
    engines = Engines()
    stream = _Stream(engines, enough=b"done")
    stream.reply.give_way()
    stream.come(b"done")
    await _turns(lambda: stream.reply.is_done)
    stream.reply.close()
    stream.reply.data_received(_END)  # at once: it is kept
    assert not stream.transport.is_aborted
    heads: list[int] = []
    assert stream.reply.take_request(b"again", lambda reply: heads.append(reply.status))
    stream.reply.data_received(_HEAD + _chunk(b"first"))
    assert heads == [200]
