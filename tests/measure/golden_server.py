"""A server whose token counts are known by construction and which writes down when it really sent what.

It is asked by the request's `model`, each naming a script. Between two steps it awaits `between`, so that a test
can make it wait until the client has read, or a measurement can make it keep a pace. It shares no code with the client.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Between = Callable[[], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """Bytes given to the socket in one write. `tokens`: output tokens of the event that these bytes complete.
    `wait_s`: before it.
    """

    data: bytes
    tokens: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Script:
    """`framing`: how the body's end is known. `end`: `orderly` closes the framing, the others break off."""

    steps: tuple[Step, ...]
    framing: Literal["chunked", "close"] = "chunked"
    end: Literal["orderly", "fin", "reset", "hang"] = "orderly"
    status: int = 200
    content_type: str = "text/event-stream"
    closes_after: bool = False  # promises to keep the connection and closes it all the same

    @property
    def tokens(self) -> list[int]:
        return [step.tokens for step in self.steps if step.tokens]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """`request`: which one of the server's, in order of arrival."""

    request: int
    model: str
    step: int
    tokens: int
    before_monotonic_ns: int


@dataclass
class GoldenServer:
    scripts: Mapping[str, Script | Callable[[dict[str, Any]], Script]]
    between: Between
    plain: dict[str, Callable[[Any], tuple[int, Any]]] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    received_monotonic_ns: list[int] = field(default_factory=list)  # whole requests, as `bodies`
    heads: list[str] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    broken_off: asyncio.Event = field(default_factory=asyncio.Event)  # a hung stream's client went away
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        self.idle.clear()
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client is gone, which every client may be
        finally:
            self.num_open -= 1
            if not self.num_open:
                self.idle.set()
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        lengths = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length:")]
        body = json.loads(await reader.readexactly(int(lengths[0]))) if lengths else {}
        path = head.split(" ")[1]
        if not path.endswith("/completions"):
            status, value = self.plain[path](body) if path in self.plain else (404, {})
            data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            return True
        self.bodies.append(body)
        self.received_monotonic_ns.append(time.monotonic_ns())
        number, script = len(self.bodies) - 1, self.scripts[body["model"]]
        played = script if isinstance(script, Script) else script(body)
        return await self._play(number, body["model"], played, reader, writer)

    async def _play(
        self, request: int, model: str, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        framing = "Transfer-Encoding: chunked" if script.framing == "chunked" else "Connection: close"
        head = f"HTTP/1.1 {script.status} X\r\nContent-Type: {script.content_type}\r\n{framing}\r\n\r\n"
        writer.write(head.encode())
        for number, step in enumerate(script.steps):
            await (asyncio.sleep(step.wait_s) if step.wait_s else self.between())
            framed = b"%x\r\n%s\r\n" % (len(step.data), step.data) if script.framing == "chunked" else step.data
            before_ns = time.monotonic_ns()
            writer.write(framed)
            self.sent.append(
                Sent(request=request, model=model, step=number, tokens=step.tokens, before_monotonic_ns=before_ns)
            )
        await self.between()
        return await self._finish(script, reader, writer)

    async def _finish(self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if script.end == "hang":
            try:
                await reader.read()
            finally:
                self.broken_off.set()
        if script.end == "reset":
            writer.transport.abort()
        if script.end == "orderly" and script.framing == "chunked":
            writer.write(b"0\r\n\r\n")
            return not script.closes_after
        return False


@asynccontextmanager
async def serving(server: GoldenServer, listener: asyncio.Server) -> AsyncIterator[int]:
    """The port; waits at the end until the server has seen every client go."""
    name = listener.sockets[0].getsockname()
    try:
        yield name[1] if isinstance(name, tuple) else 0
    finally:
        listener.close()
        if server.num_connections:
            async with asyncio.timeout(20):
                await server.idle.wait()


async def no_wait() -> None:
    await asyncio.sleep(0)


def event(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def delta(text: str | None, *, total: int | None = None, key: str = "content", finish: str | None = None) -> bytes:
    """One chat chunk; `total`: tokens so far, given as vLLM's continuous usage."""
    body: dict[str, Any] = {"choices": [{"index": 0, "delta": {key: text} if text else {}, "finish_reason": finish}]}
    if total is not None:
        body["usage"] = {"prompt_tokens": 7, "completion_tokens": total}
    return event(body)


def usage(total: int | None, *, cached: int = 0) -> bytes:
    details = {"prompt_tokens": 7, "completion_tokens": total, "prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": None if total is None else details})


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
DONE = event("[DONE]")


def steps(*parts: bytes | tuple[bytes, int]) -> tuple[Step, ...]:
    pairs = [(part, 0) if isinstance(part, bytes) else part for part in parts]
    return tuple(Step(data=data, tokens=tokens) for data, tokens in pairs)


def plain_script(num_tokens: int) -> Script:
    """Role event, one token an event with a running count, finish, usage, [DONE]."""
    tokens = [(delta(f" w{i}", total=i + 1), 1) for i in range(num_tokens)]
    return Script(steps=steps(ROLE, *tokens, delta(None, total=num_tokens, finish="length"), usage(num_tokens), DONE))


TEMPLATE_TOKENS = 5


def obedient_script(body: dict[str, Any]) -> Script:
    """As many tokens as asked for; counts the prompt as one token a word, and five for its template."""
    wanted, prompt_tokens = body["max_tokens"], TEMPLATE_TOKENS + len(body["messages"][0]["content"].split())
    tokens = [(delta(f" w{i}", total=i + 1), 1) for i in range(wanted)]
    counts = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": wanted,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    last = event({"choices": [], "usage": counts})
    return Script(steps=steps(ROLE, *tokens, delta(None, total=wanted, finish="length"), last, DONE))


def models(*names: str) -> tuple[int, Any]:
    return 200, {"object": "list", "data": [{"id": name} for name in names]}
