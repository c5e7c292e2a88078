"""One line a request, with where its time went; over TLS too."""

import asyncio
import json
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.raw import RawClient, ask, chat, connect, get, post_bytes
from tests.rigs import GatewayRig, fake_engine, gateway_worker, until

pytestmark = pytest.mark.process
CHAT = "/v1/chat/completions"


def entries(gateway: GatewayRig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gateway.log_text().splitlines() if line.startswith("{")]


async def test_json_line_tells_who_what_and_where_the_time_went(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path, token_interval_s=0.01) as engine,
        gateway_worker(tmp_path, [engine.row()], access_log="json") as gateway,
    ):
        await ask(gateway, CHAT, chat("a-secret", stream=True, max_tokens=5), X_Request_Id="mine")
        await ask(gateway, "/v1/nothing", {})
        async with connect(gateway) as client:
            await client.send(post_bytes(CHAT, chat("[[fault stall_after=2]]", stream=True)))
            await client.head()
            client.leave()
        await until(lambda: len(entries(gateway)) == 3, "all are written")
        done, missing, left = entries(gateway)
        assert "a-secret" not in gateway.log_text()
    wanted = {"method": "POST", "target": CHAT, "request_id": "mine", "status": 200, "model": "fake"}
    assert wanted.items() <= done.items()
    assert done["replica"] == engine.id
    assert done["generated_tokens"] == 5
    assert done["seconds"] >= done["first_token_s"] > done["queue_s"] >= 0
    assert done["per_token_s"] > 0
    assert missing["status"] == 404
    assert left["status"] == 499  # although its 200 was out


async def test_log_can_be_left_out_and_the_page_that_looks_every_second_is(tmp_path: Path) -> None:
    async with fake_engine(tmp_path) as engine:
        async with gateway_worker(tmp_path, [engine.row()], access_log="off") as gateway:
            await ask(gateway, CHAT, chat())
            assert CHAT not in gateway.log_text()
        async with gateway_worker(tmp_path, [engine.row()], name="second") as gateway:
            await get(gateway, "/dashboard/status")
            await ask(gateway, CHAT, chat(max_tokens=2))
            await until(lambda: CHAT in gateway.log_text(), "it is written")
            assert "/dashboard/status" not in gateway.log_text()
            line = next(line for line in gateway.log_text().splitlines() if CHAT in line)
            assert f"POST {CHAT} 200 id=" in line
            assert f"model=fake replica={engine.id}" in line


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="makes a certificate with `openssl`: apt-get install openssl"
)
async def test_same_answers_over_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True)  # noqa: ASYNC221
    context = ssl.create_default_context(cafile=str(certificate))
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with (
        fake_engine(tmp_path) as engine,
        gateway_worker(tmp_path, [engine.row()], tls_cert=certificate, tls_key=key) as gateway,
    ):
        reader, writer = await asyncio.open_connection(
            gateway.host, gateway.port, ssl=context, server_hostname="localhost", limit=64 * 1024**2
        )
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        client = RawClient(reader, writer)
        for stream in (False, True):
            assert (await client.post(CHAT, chat(stream=stream))).status == 200
        assert (await client.post("/v1/nothing", b"x" * 100)).status == 404
        stalled = chat("[[fault stall_prefill]]")
        reader, writer = await asyncio.open_connection(
            gateway.host, gateway.port, ssl=context, server_hostname="localhost"
        )
        await RawClient(reader, writer).send(post_bytes(CHAT, stalled))
        await until(lambda: gateway.counts_of("in_flight") == 1, "it runs")
        writer.transport.abort()
        await until(engine.is_idle, "the engine is told")
        client.leave()
