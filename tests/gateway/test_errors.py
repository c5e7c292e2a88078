"""Every way to be refused gives the one envelope: path, method, size, head, body, key."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from llamarack.gateway.keys import Key, KeyFile, new_key, write_keys
from tests.gateway.raw import Answer, ask, chat, connect, get, head_bytes, post_bytes
from tests.rigs import Engine, GatewayRig, gateway_worker, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
CHAT = "/v1/chat/completions"


async def send(gateway: GatewayRig, *parts: bytes) -> Answer:
    async with connect(gateway) as client:
        await client.send(*parts)
        return await client.answer()


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (post_bytes("/v1/nothing", {}), 404, "unknown_path"),
        (post_bytes("/", {}), 404, "unknown_path"),
        (post_bytes("/v1/chat/completions/more", {}), 404, "unknown_path"),
        (post_bytes("/v2/chat/completions", {}), 404, "unknown_path"),
        (head_bytes("GET", CHAT, {"Host": "rack"}), 405, "method_not_allowed"),
        (head_bytes("DELETE", "/v1/models", {"Host": "rack"}), 405, "method_not_allowed"),
        (head_bytes("OPTIONS", "*", {"Host": "rack"}), 404, "unknown_path"),
        (head_bytes("GET", "/v1/models/none/such", {"Host": "rack"}), 404, "model_not_found"),
        (post_bytes(CHAT, chat(model="nope")), 404, "model_not_found"),
        (post_bytes(CHAT, b""), 400, "invalid_request"),
        (post_bytes(CHAT, b"{"), 400, "invalid_request"),
        (post_bytes(CHAT, b"[1]"), 400, "invalid_request"),
        (post_bytes(CHAT, b'{"messages":[1],"x":"\xff"}'), 400, "invalid_request"),
        (post_bytes(CHAT, b"a=1", Content_Type="application/x-www-form-urlencoded"), 400, "invalid_request"),
        (post_bytes(CHAT, chat(), Content_Encoding="gzip"), 400, "invalid_request"),
        (post_bytes("/v1/embeddings", {"model": "fake", "input": "x"}), 400, "invalid_request"),
        (post_bytes("/tokenize", {"prompt": 3}), 400, "invalid_request"),
        (post_bytes("/tokenize", {"messages": 3}), 400, "invalid_request"),
        (post_bytes("/detokenize", {"tokens": ["a"]}), 400, "invalid_request"),
        (b"NONSENSE\r\n\r\n", 400, "invalid_request"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "invalid_request"),
        (b"GET  HTTP/1.1\r\nHost: r\r\n\r\n", 400, "invalid_request"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), 400, "invalid_request"),  # TLS to a plain port
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: r\r\n\r\n", 400, "invalid_request"),
        (head_bytes("GET", "/v1/mod%ff%fe", {"Host": "rack"}), 404, "unknown_path"),
        (head_bytes("GET", "/v1/models", {"Host": "rack", "X": "y" * 100_000}), 400, "invalid_request"),
        (head_bytes("GET", "/" + "y" * 100_000, {"Host": "rack"}), 400, "invalid_request"),
        (head_bytes("POST", CHAT, {"Host": "rack", "Content-Length": "-1"}), 400, "invalid_request"),
        (head_bytes("POST", CHAT, {"Content-Length": "3", "Transfer-Encoding": "chunked"}), 400, "invalid_request"),
        (head_bytes("POST", CHAT, {"Transfer-Encoding": "chunked"}) + b"zz\r\n{}\r\n0\r\n\r\n", 400, "invalid_request"),
    ],
)  # fmt: skip
async def test_refusal_has_the_envelope_and_a_request_id(
    gateway: GatewayRig, request_bytes: bytes, status: int, code: str
) -> None:
    logged = len(gateway.log_text())
    answer = await send(gateway, request_bytes)
    assert (answer.status, answer.error["code"]) == (status, code), answer.body
    assert answer.headers["x-request-id"]
    assert "Traceback" not in gateway.log_text()[logged:]


async def test_body_over_the_limit_is_refused_before_it_is_read(gateway: GatewayRig) -> None:
    head = head_bytes("POST", CHAT, {"Host": "rack", "Content-Length": str(33 * 1024**2)})
    answer = await send(gateway, head)
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


async def test_chunked_body_over_the_limit_is_refused(gateway: GatewayRig) -> None:
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    head = head_bytes("POST", CHAT, {"Host": "rack", "Transfer-Encoding": "chunked"})
    async with connect(gateway) as client:
        sending = asyncio.create_task(client.send(head, *[chunk] * 33))
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_allowed_methods_are_told(gateway: GatewayRig) -> None:
    assert (await get(gateway, CHAT)).headers["allow"] == "POST"


@pytest.mark.parametrize("prefix", ["", "/v1", "/v1/v1"])
async def test_path_prefixes_are_the_same(gateway: GatewayRig, prefix: str) -> None:
    """Spring AI 1.x gives the base without /v1 and adds it, others give it with; users mix them up."""
    assert (await ask(gateway, f"{prefix}/chat/completions", chat())).json["object"] == "chat.completion"
    answer = await ask(gateway, f"{prefix}/completions/", {"model": "fake", "prompt": "x"})
    assert answer.json["object"] == "text_completion"
    assert (await get(gateway, f"{prefix}/models")).json["data"][0]["id"] == "fake"
    assert (await get(gateway, f"{prefix}/models/fake")).json["id"] == "fake"
    assert (await get(gateway, f"{prefix}/health")).json["status"] == "ready"


async def test_health_paths_answer_head_without_a_body(gateway: GatewayRig) -> None:
    async with connect(gateway) as client:
        for path in ("/live", "/ready", "/health"):
            await client.send(head_bytes("HEAD", path, {"Host": "rack"}))
            status, headers = await client.head()
            assert status == 200
            assert int(headers["content-length"]) > 0  # of what GET would send


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
async def test_request_id_is_echoed_and_passed_on(gateway: GatewayRig, engine: Engine, given: str) -> None:
    answer = await ask(gateway, CHAT, chat(), X_Request_Id=given)
    assert answer.headers["x-request-id"] == given
    assert (await engine.requests())[-1]["headers"]["x-request-id"] == given


@pytest.mark.parametrize("given", ["x" * 129, "a b", ""])
async def test_request_id_of_another_form_is_replaced(gateway: GatewayRig, given: str) -> None:
    made = (await ask(gateway, CHAT, chat(), X_Request_Id=given)).headers["x-request-id"]
    assert made != given
    assert len(made) == 32


async def test_path_with_line_breaks_makes_no_log_line_of_its_own(gateway: GatewayRig) -> None:
    await get(gateway, "/v1/x%0A2026-01-01%20forged")
    assert not [line for line in gateway.log_text().splitlines() if line.startswith("2026-01-01 forged")]


@pytest.mark.parametrize(
    ("status", "body", "message", "code"),
    [
        (400, '{"error":{"code":400,"message":"m","type":"invalid_request_error"}}', "m", None),
        (400, '{"object":"error","message":"flat","type":"BadRequestError","code":400}', "flat", None),
        (422, '{"error":"just-text"}', "just-text", None),
        (500, "<html>oh</html>", "<html>oh</html>", None),
        (500, '""', "engine-answered-500", None),
        (500, '{"error":null}', "engine-answered-500", None),
        (400, '{"error":{"message":"m","type":"exceed_context_size_error"}}', "m", "context_length_exceeded"),
        (404, '{"error":{"message":"m","type":"t","code":"c","param":"p"}}', "m", "c"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_error_of_any_form_reaches_the_client_in_the_one_form(
    gateway: GatewayRig, status: int, body: str, message: str, code: str | None, stream: bool, engine: Engine
) -> None:
    async with engine.ordered(refuse=status, refuse_body=body):
        answer = await ask(gateway, CHAT, chat(stream=stream))
    assert answer.status == status
    assert answer.error["message"].replace(" ", "-") == message
    assert answer.error["code"] == code
    assert answer.headers.get("x-should-retry") == ("false" if status >= 500 else None)


# -- keys -------------------------------------------------------------------------------------------------------


async def test_every_path_but_health_needs_a_key_in_either_header(tmp_path: Path, engine: Engine) -> None:
    key, digest = new_key()
    file = tmp_path / "keys.yaml"
    write_keys(file, KeyFile(keys=[Key(name="app", sha256=digest, created_unix_s=1)]))
    async with gateway_worker(tmp_path, [engine.row()], api_keys_file=file) as gateway:
        for path in ("/live", "/ready", "/health", "/v1/health"):
            assert (await get(gateway, path)).status == 200
        for path in ("/v1/models", "/metrics", "/version", "/nothing", "/models/fake", "/dashboard/status", "/v1"):
            answer = await get(gateway, path)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), path
        assert (await ask(gateway, CHAT, chat())).status == 401
        for good in (
            {"Authorization": f"Bearer {key}"},
            {"Authorization": f"bearer  {key}"},
            {"api_key": key},
            {"api_key": key, "Authorization": "Bearer "},
            {"api_key": key, "Authorization": "Basic eDp5"},
        ):
            assert (await ask(gateway, CHAT, chat(), **good)).status == 200, good
        for bad in (
            {"Authorization": f"Bearer {key}x"},
            {"Authorization": "Bearer"},
            {"Authorization": key},
            {"api_key": key[:-1]},
            {"api_key": digest},
            {"Authorization": "Bearer \xff\xfe"},
        ):
            answer = await ask(gateway, CHAT, chat(), **bad)
            assert (answer.status, answer.error["type"]) == (401, "authentication_error"), bad
        assert key not in gateway.log_text()
        assert (await engine.requests())[-1]["headers"]["authorization"] == f"Bearer {engine.endpoint.key}"


async def test_key_file_that_changes_counts_without_a_restart(tmp_path: Path, engine: Engine) -> None:
    first, second = new_key(), new_key()
    file = tmp_path / "keys.yaml"
    write_keys(file, KeyFile(keys=[Key(name="app", sha256=first[1], created_unix_s=1)]))
    async with gateway_worker(tmp_path, [engine.row()], api_keys_file=file) as gateway:
        assert (await get(gateway, "/v1/models", api_key=first[0])).status == 200
        write_keys(file, KeyFile(keys=[Key(name="app", sha256=second[1], created_unix_s=1)]))

        async def taken() -> bool:
            return (await get(gateway, "/v1/models", api_key=second[0])).status == 200

        await until(taken, "the new key counts")
        assert (await get(gateway, "/v1/models", api_key=first[0])).status == 401
        file.write_text("{")
        os.utime(file, (1, 1))
        assert (await get(gateway, "/v1/models", api_key=second[0])).status == 200


async def test_log_holds_no_prompt(gateway: GatewayRig) -> None:
    await ask(gateway, CHAT, chat("a-secret-of-the-user"))
    await ask(gateway, CHAT, json.dumps(chat("a-secret-of-the-user")).encode() + b"}")
    assert "a-secret-of-the-user" not in gateway.log_text()
