"""Requests over a kept connection go without a task; whatever goes wrong with one ends as by the way of a task."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from llamarack.config import Defaults, Gateway, validated
from llamarack.engine.dialect import Endpoint
from llamarack.gateway.admission import Admission
from llamarack.gateway.direct import Direct
from llamarack.gateway.keys import Key, KeyFile, Keys, new_key, write_keys
from llamarack.gateway.metrics import Metrics
from llamarack.gateway.server import GatewayServer
from llamarack.supervise.state import State
from llamarack.supervise.table import ModelRow, ReplicaRow, Table
from tests.gateway.raw import RawClient, ask, chat, connect, data_of, events, post_bytes
from tests.gateway.test_metrics import families
from tests.rigs import DEADLINE_S, Address, fake_engine, until

pytestmark = pytest.mark.process
CHAT = "/v1/chat/completions"


@dataclass
class Rig:
    """`by_task`: how many went on by a task, so far. `kept`: connections that wait for another request."""

    address: Address
    admission: Admission
    metrics: Metrics
    by_task: list[Direct]
    kept: Callable[[], int]

    def count(self, name: str) -> float:
        return sum(value for _, value in families(self.metrics.counted_text()).get(f"llamarack_{name}_total", []))

    def codes(self) -> dict[str, float]:
        found = families(self.metrics.counted_text()).get("llamarack_requests_total", [])
        return {labels["code"]: value for labels, value in found}


@contextlib.asynccontextmanager
async def rig(
    replicas: Sequence[ReplicaRow],
    patch: pytest.MonkeyPatch,
    *,
    stuck_request_s: float = 300.0,
    keys: Keys | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    chosen = validated(Gateway, {"port": 0, "access_log": "off", **settings}, strict=False)
    admission, metrics = Admission(max_queue_requests=9, max_queue_s=chosen.max_queue_s), Metrics()
    models = (ModelRow(name="fake", created_unix_s=1, defaults=Defaults(max_tokens=None), max_output_tokens=None),)
    admission.apply(Table(version=1, draining=False, models=models, replicas=tuple(replicas)))
    gateway = GatewayServer(chosen, admission, metrics, keys, stuck_request_s=stuck_request_s)
    protocol = gateway.protocol_factory(http="fast")
    by_task: list[Direct] = []
    hand_over = Direct._hand_over

    def noted(self: Direct) -> None:
        by_task.append(self)
        hand_over(self)

    patch.setattr(Direct, "_hand_over", noted)
    server = await asyncio.get_running_loop().create_server(protocol, chosen.host, 0)
    try:
        host, port = server.sockets[0].getsockname()[:2]
        engines = gateway._relay.engines
        yield Rig(Address(host, port), admission, metrics, by_task, lambda: sum(map(len, engines._idle.values())))
        await until(lambda: not admission.held, "nothing is held")
    finally:
        server.close()
        await protocol.shutdown(30)
        gateway.close()


async def warm(made: Rig, client: RawClient) -> None:
    """So that there is a kept connection, and a head that is known."""
    assert (await client.post(CHAT, chat("warm", max_tokens=2))).status == 200
    made.by_task.clear()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_usual_request_needs_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    async with (
        fake_engine(tmp_path, flavor="vllm", slots=4) as engine,
        rig([engine.row()], monkeypatch) as made,
        connect(made.address) as client,
    ):
        await warm(made, client)
        for number in range(5):
            # An engine ends the framing of a stream after its last event: the client may ask again before that.
            await until(lambda: made.kept() == 1, "its connection is kept")
            answer = await client.post(CHAT, chat("x" * 10**number, stream=stream, max_tokens=3))
            assert answer.status == 200
            if stream:
                assert events(answer.body)[-1] == b"data: [DONE]"
                assert not [chunk for chunk in data_of(answer.body) if chunk.get("usage")]  # asked for by us alone
            else:
                assert answer.json["usage"]["completion_tokens"] == 3
        assert not made.by_task
        # Several in one piece are answered one after the other.
        await client.send(post_bytes(CHAT, chat(stream=stream, max_tokens=2)) * 3)
        assert [(await client.answer()).status for _ in range(3)] == [200] * 3
        assert stream or not made.by_task
    assert made.codes() == {"200": 9}
    assert made.count("generated_tokens") == 2 + 5 * 3 + 3 * 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("refuse=422", 422, b"told to refuse"),
        ("refuse=500", 500, b"told to refuse"),
        ("close_after=0", 502, b"broke off before their first token"),
        ("error_after=0", 500, b"told to fail"),
        ("stall_prefill", 504, b"made no progress for 1 s"),
    ],
)
async def test_what_goes_wrong_is_told_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, status: int, words: bytes, stream: bool
) -> None:
    async with (
        fake_engine(tmp_path, flavor="vllm", slots=4) as engine,
        rig([engine.row()], monkeypatch, stuck_request_s=1.0) as made,
        connect(made.address) as client,
    ):
        await warm(made, client)
        if fault == "stall_prefill" and not stream:
            return  # whether its engine makes tokens is asked by a watch that does not run here
        answer = await client.post(CHAT, chat(f"[[fault {fault}]]", stream=stream))
        assert words in answer.body
        if answer.status == 200:
            assert stream
            assert events(answer.body)[-1].startswith(b"event: error\n")
        else:
            assert (answer.status, set(answer.json)) == (status, {"error"})
        assert len(made.by_task) == 1
        if "stall" in fault:
            made.admission.held.clear()  # kept until the engine proves that it is free


@pytest.mark.parametrize("fault", ["close_after=3", "reset_after=3", "error_after=3", "stall_after=3"])
async def test_stream_that_began_without_a_task_ends_with_an_error_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    async with (
        fake_engine(tmp_path, flavor="vllm", slots=4) as engine,
        rig([engine.row()], monkeypatch, stuck_request_s=1.0) as made,
        connect(made.address) as client,
    ):
        await warm(made, client)
        answer = await client.post(CHAT, chat(f"[[fault {fault}]]", stream=True))
        told = events(answer.body)
        assert len(told) > 3
        assert told[-1].startswith(b"event: error\n")
        assert len(made.by_task) == 1
        assert len(await engine.requests()) == 2  # not asked again
        if "stall" in fault:
            made.admission.held.clear()


@pytest.mark.parametrize("stream", [True, False])
async def test_time_that_is_up_and_clients_that_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with (
        fake_engine(tmp_path, flavor="vllm", slots=4) as engine,
        rig([engine.row()], monkeypatch, request_timeout_s=1) as made,
    ):
        async with connect(made.address) as client:
            await warm(made, client)
            answer = await client.post(CHAT, chat("[[fault stall_after=2]]", stream=stream))
            assert b"not finished within 1 s" in answer.body
            assert answer.status == (200 if stream else 504)
            await until(engine.is_idle, "the engine is told")
            assert (await client.post(CHAT, chat(max_tokens=2))).status == 200
        for fault in ("stall_prefill", "stall_after=2"):
            cancelled = made.count("requests_cancelled")
            made.by_task.clear()
            async with connect(made.address) as client:
                await client.send(post_bytes(CHAT, chat(f"[[fault {fault}]]", stream=stream)))
                await until(lambda: made.admission.held, "it runs")
                client.leave()
                await until(engine.is_idle, "the engine is told")
            await until(lambda: not made.admission.held, "its room is given back")
            assert made.count("requests_cancelled") == cancelled + 1
            # The time may have been up first where this machine is slow; else no task saw it.
            assert len(made.by_task) <= 1
            await ask(made.address, CHAT, chat(max_tokens=2))


async def test_client_that_leaves_before_the_task_takes_over_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_engine(tmp_path, flavor="vllm", slots=1) as engine, rig([engine.row()], monkeypatch) as made:
        async with connect(made.address) as first, connect(made.address) as second:
            await warm(made, first)
            left = made.count("requests_cancelled")
            await first.send(post_bytes(CHAT, chat("[[fault stall_prefill]]")))
            await until(lambda: made.admission.held, "the slot is taken")
            # The next must wait, so a task is made for it; the client is gone before that runs.
            hand_over = Direct._hand_over

            def and_leave(self: Direct) -> None:
                hand_over(self)
                assert self._exchange.on_left is not None
                self._exchange._connection.connection_lost(None)  # type: ignore[attr-defined]

            monkeypatch.setattr(Direct, "_hand_over", and_leave)
            await second.send(post_bytes(CHAT, chat()))
            await until(lambda: made.count("requests_cancelled") == left + 1, "it is accounted")
            assert not made.admission.queued
            first.leave()
        await until(engine.is_idle, "the engine is told")


async def test_key_that_is_revoked_opens_nothing_more_over_its_own_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, digest = new_key()
    mine = Key(name="app", sha256=digest, created_unix_s=1)
    write_keys(tmp_path / "keys.yaml", KeyFile(keys=[mine]))
    async with (
        fake_engine(tmp_path, flavor="vllm", slots=4) as engine,
        rig([engine.row()], monkeypatch, keys=Keys(tmp_path / "keys.yaml")) as made,
        connect(made.address) as client,
    ):

        async def status() -> int:
            return (await client.post(CHAT, chat(max_tokens=2), Authorization=f"Bearer {secret}")).status

        assert [await status() for _ in range(3)] == [200] * 3
        write_keys(tmp_path / "keys.yaml", KeyFile(keys=[mine.model_copy(update={"requests_per_minute": 1})]))

        async def is_limited() -> bool:
            return await status() == 429

        await until(is_limited, "its new limit holds")
        write_keys(tmp_path / "keys.yaml", KeyFile(keys=[]))

        async def is_refused() -> bool:
            return await status() == 401

        await until(is_refused, "it is revoked")
        assert await status() == 401


Script = Callable[[int, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[ReplicaRow]:
    """An engine whose answer to the n-th request on a connection is written by `script`."""

    serving: set[asyncio.Task[Any] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        number = 0
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                await script(number, writer)
                await writer.drain()
                number += 1
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield ReplicaRow(
            id="s-0",
            model="fake",
            engine="vllm",
            state=State.READY,
            endpoint=Endpoint(socket=None, port=server.sockets[0].getsockname()[1], key="k", served_name="fake"),
            slots=4,
            context_tokens=100_000,
        )
    finally:
        server.close()
        await asyncio.wait_for(asyncio.gather(*(task for task in serving if task is not None)), DEADLINE_S)


_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
_DONE = b"data: [DONE]\n\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def test_stream_that_comes_in_one_piece_is_whole_by_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def all_at_once(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(_STREAM_HEAD + _chunk(_EVENT + _EVENT) + _chunk(_EVENT + _DONE) + b"0\r\n\r\n")

    async with scripted(all_at_once) as row, rig([row], monkeypatch) as made, connect(made.address) as client:
        for number in range(3):
            answer = await client.post(CHAT, chat(stream=True))
            assert answer.body == _EVENT * 3 + _DONE
            assert len(made.by_task) == 1  # the first alone, which opened the connection
            assert made.count("requests") == number + 1


@pytest.mark.parametrize("is_warm", [True, False])
async def test_what_the_next_engine_streams_is_not_held_back(monkeypatch: pytest.MonkeyPatch, is_warm: bool) -> None:
    """The first says at once that it is dead; the head of the stream has gone out, and the next one takes its time."""
    may_end = asyncio.Event()
    dead = _chunk(b'data: {"error":{"message":"EngineCore encountered an issue"}}\n\n') + b"0\r\n\r\n"

    async def script(number: int, writer: asyncio.StreamWriter) -> None:
        if not number and is_warm:
            writer.write(_STREAM_HEAD + _chunk(_EVENT + _DONE) + b"0\r\n\r\n")
        elif not asked:
            asked.append(number)
            writer.write(_STREAM_HEAD + dead)
        else:
            raise AssertionError("the dead one was asked again")

    async def other(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(_STREAM_HEAD + _chunk(_EVENT))
        await writer.drain()
        await may_end.wait()
        writer.write(_chunk(_DONE) + b"0\r\n\r\n")

    asked: list[int] = []
    async with scripted(script) as first, scripted(other) as second:
        assert second.endpoint is not None
        rows = [first, replace(second, id="s-1", endpoint=replace(second.endpoint, key="k1"), slots=0)]
        async with rig([first], monkeypatch) as made, connect(made.address) as client:
            if is_warm:
                assert (await client.post(CHAT, chat(stream=True))).status == 200
            rows[1] = replace(rows[1], slots=4)
            made.admission.apply(replace(made.admission.table, version=2, replicas=tuple(rows)))
            for _ in range(2):  # one of the two goes to the first
                await client.send(post_bytes(CHAT, chat(stream=True)))
                assert (await client.head())[0] == 200
                chunks = client.chunks()
                assert await anext(chunks) == _EVENT
                may_end.set()
                assert [chunk async for chunk in chunks] == [_DONE]
                may_end.clear()
                if asked:
                    break
            assert asked


@pytest.mark.parametrize("stream", [True, False])
async def test_kept_connection_that_ends_at_the_next_request_is_no_fault_of_its_engine(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    body = b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}'

    async def once(number: int, writer: asyncio.StreamWriter) -> None:
        if number:
            writer.close()
        elif stream:
            writer.write(_STREAM_HEAD + _chunk(_EVENT + _DONE) + b"0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async with scripted(once) as row, rig([row], monkeypatch) as made, connect(made.address) as client:
        for _ in range(3):
            assert (await client.post(CHAT, chat(stream=stream))).status == 200
        assert len(made.by_task) == 3
        assert made.count("retries") == 0
