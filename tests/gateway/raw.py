"""A client on a bare socket: sends exactly the bytes it is given and tells exactly what came back."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from tests.rigs import DEADLINE_S, Address, GatewayRig

H2C_OFFER = {
    "Connection": "Upgrade, HTTP2-Settings",
    "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    "Upgrade": "h2c",
    "User-Agent": "Java-http-client/17.0.15",
}


class Broken(Exception):
    """The connection ended before the answer did. `partial`: the body so far."""

    def __init__(self, partial: bytes) -> None:
        super().__init__(f"ended after {partial!r}")
        self.partial = partial


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The envelope's inside, held to its form."""
        value: dict[str, Any] = self.json["error"]
        assert {"message", "type", "param", "code"} <= set(value)
        assert isinstance(value["message"], str)
        assert value["message"]
        assert isinstance(value["type"], str)
        assert value["code"] is None or isinstance(value["code"], str)
        assert value["param"] is None or isinstance(value["param"], str)
        assert self.headers["content-type"].startswith("application/json")
        return value


class RawClient:
    """One connection. Each read has a deadline, so that a gateway that hangs fails the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *parts: bytes) -> None:
        """Each part in a segment of its own: the event loop turns between them, and TCP_NODELAY is on."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(0.02 if len(parts) > 1 else 0)

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(DEADLINE_S):
            text = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = text.strip().split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return int(first.split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Of a chunked body, as they come. Raises Broken when it ends without its end."""
        seen = b""
        try:
            while True:
                async with asyncio.timeout(DEADLINE_S):
                    size = int(await self.reader.readuntil(b"\r\n"), 16)
                    data = (await self.reader.readexactly(size + 2))[:-2]
                if not size:
                    return
                seen += data
                yield data
        except (asyncio.IncompleteReadError, ConnectionError):
            raise Broken(seen) from None

    async def answer(self) -> Answer:
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, b"".join([chunk async for chunk in self.chunks()]))
        async with asyncio.timeout(DEADLINE_S):
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(status, headers, body)

    async def post(self, path: str, body: Any, **headers: str) -> Answer:
        await self.send(post_bytes(path, body, **headers))
        return await self.answer()

    async def ends(self) -> bytes:
        """What still comes until the server closes."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    def leave(self) -> None:
        self.writer.transport.abort()


def head_bytes(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def post_bytes(path: str, body: Any, **headers: str) -> bytes:
    """Keyword names become header names, `_` as `-`."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    fixed = {"Host": "rack", "Content-Type": "application/json", "Content-Length": str(len(raw))}
    return head_bytes("POST", path, {**fixed, **given}) + raw


@contextlib.asynccontextmanager
async def connect(gateway: GatewayRig | Address) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port, limit=64 * 1024**2)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()


async def ask(gateway: GatewayRig | Address, path: str, body: Any, **headers: str) -> Answer:
    """One POST on a connection of its own."""
    async with connect(gateway) as client:
        return await client.post(path, body, **headers)


async def get(gateway: GatewayRig | Address, path: str, **headers: str) -> Answer:
    async with connect(gateway) as client:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        await client.send(head_bytes("GET", path, {"Host": "rack", **given}))
        return await client.answer()


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}


def events(body: bytes) -> list[bytes]:
    """The events of a stream, whose bytes must be whole events and nothing else."""
    assert body.endswith(b"\n\n"), body[-100:]
    return body[:-2].split(b"\n\n")


def data_of(body: bytes) -> list[dict[str, Any]]:
    """The JSON of each data event before [DONE]."""
    return [json.loads(each[6:]) for each in events(body) if each.startswith(b"data: {")]


def text_of(body: bytes) -> str:
    """What a stream's deltas spell."""
    choices = [choice for chunk in data_of(body) for choice in chunk["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)
