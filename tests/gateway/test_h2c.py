"""Every stock Java HttpClient offers an upgrade to h2c on every cleartext request; the body must come through whole."""

import asyncio
import base64
import json

import pytest

from tests.gateway.raw import H2C_OFFER, RawClient, chat, connect, head_bytes
from tests.rigs import Engine, GatewayRig

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

SHORT = json.dumps(chat(max_tokens=2), separators=(",", ":")).encode()
# 300 kB, over the size of any read buffer, with bytes that differ everywhere.
LONG = json.dumps(chat(" ".join(str(i) for i in range(53_000)), max_tokens=2), indent=1, ensure_ascii=False).encode()


def parts(body: bytes, *, chunked: bool, cut: str, offer: bool) -> list[bytes]:
    """The request as segments. `cut`: all in one, head and body apart, or in the middle of the body."""
    length = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(len(body))}
    head = head_bytes("POST", "/v1/chat/completions", {"Host": "rack", **(H2C_OFFER if offer else {}), **length})
    if chunked:
        pieces = [body[i : i + 16_384] for i in range(0, len(body), 16_384)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    half = len(body) // 2
    return {"coalesced": [head + body], "split": [head, body], "halves": [head + body[:half], body[half:]]}[cut]


@pytest.mark.parametrize("offer", [False, True], ids=["plain", "h2c"])
@pytest.mark.parametrize(
    ("body", "cut"), [(SHORT, "coalesced"), (SHORT, "split"), (LONG, "halves")], ids=["coalesced", "split", "300kB"]
)
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_request_in_each_form_reaches_engine_byte_for_byte_twice_on_one_connection(
    gateway: GatewayRig, engine: Engine, chunked: bool, body: bytes, cut: str, offer: bool
) -> None:
    segments = parts(body, chunked=chunked, cut=cut, offer=offer)
    async with connect(gateway) as client:
        for _ in range(2):
            before = len(await engine.requests())
            await client.send(*segments)
            answer = await client.answer()
            assert answer.status == 200, answer.body
            seen = (await engine.requests())[before:]
            assert [base64.b64decode(each["body_base64"]) for each in seen] == [body]
            assert "upgrade" not in seen[0]["headers"]


async def test_stream_after_an_h2c_offer_is_answered_in_http_1(gateway: GatewayRig) -> None:
    body = json.dumps(chat(stream=True)).encode()
    async with connect(gateway) as client:
        await client.send(*parts(body, chunked=True, cut="split", offer=True))
        answer = await client.answer()
        assert answer.status == 200
        assert answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("value", ["100-continue", "100-Continue"])
async def test_expect_continue_is_answered_before_the_body_comes(gateway: GatewayRig, value: str) -> None:
    headers = {"Host": "rack", "Expect": value, "Content-Length": str(len(SHORT))}
    async with connect(gateway) as client:
        for _ in range(2):
            await client.send(head_bytes("POST", "/v1/chat/completions", headers))
            status, _ = await client.head()
            assert status == 100
            await client.send(SHORT)
            answer = await client.answer()
            assert answer.status == 200
            assert answer.json["choices"]


async def test_expect_continue_refused_before_its_body_ends_the_connection(gateway: GatewayRig) -> None:
    """The client keeps its body to itself after a final answer: its next request would be taken for it."""
    headers = {"Host": "rack", "Expect": "100-continue", "Content-Length": str(len(SHORT))}
    async with connect(gateway) as client:
        await client.send(head_bytes("POST", "/v1/unknown", headers))
        refused = await client.answer()
        assert refused.status == 404
        assert refused.headers["connection"] == "close"


async def test_offer_of_a_websocket_is_declined_and_ends_the_connection(gateway: GatewayRig) -> None:
    """The HTTP parser reads no further request after one; a client that thinks so must be told."""
    headers = {"Host": "rack", "Connection": "Upgrade", "Upgrade": "websocket", "Content-Length": str(len(SHORT))}
    async with connect(gateway) as client:
        await client.send(head_bytes("POST", "/v1/chat/completions", headers) + SHORT)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.ends() == b""


async def test_pipelined_requests_are_answered_in_order(gateway: GatewayRig) -> None:
    """Without the offer: after one, the HTTP parser drops what was sent ahead of the answer. No client does both."""
    bodies = [json.dumps(chat(f"[[fault prefill_s={s}]]", max_tokens=n)).encode() for s, n in ((0.2, 1), (0, 2))]
    requests = [b"".join(parts(body, chunked=False, cut="coalesced", offer=False)) for body in bodies]
    async with connect(gateway) as client:
        await client.send(b"".join(requests))
        counts = [(await client.answer()).json["usage"]["completion_tokens"] for _ in range(2)]
    assert counts == [1, 2]


async def test_byte_at_a_time_request_is_understood(gateway: GatewayRig, engine: Engine) -> None:
    whole = b"".join(parts(SHORT, chunked=True, cut="coalesced", offer=True))
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    try:
        for i in range(len(whole)):
            writer.write(whole[i : i + 1])
            await asyncio.sleep(0)
        answer = await RawClient(reader, writer).answer()
    finally:
        writer.transport.abort()
    assert answer.status == 200
    assert await engine.last_body() == SHORT
