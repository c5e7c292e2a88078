"""The dashboard's files and its record, without a browser."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path

import aiohttp
import pytest

from llamarack.gateway.dashboard import STATUS_PATH, shown
from llamarack.gateway.keys import Key, KeyFile, Keys, new_key, write_keys
from tests.browser.records import event, gateway_of, status
from tests.supervise.asking import stream_once
from tests.supervise.conftest import running_rack

pytestmark = pytest.mark.process
FILES = ("", "dashboard/page.js", "dashboard/draw.js", "dashboard/ask.js", "dashboard/style.css", "dashboard/icon.svg")


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def test_assets_are_small_self_contained_and_free_of_inline_code() -> None:
    folder = resources.files("llamarack.gateway").joinpath("assets")
    texts = {item.name: item.read_text() for item in folder.iterdir()}
    assert sum(len(text.encode()) for text in texts.values()) < 60_000
    for name, text in texts.items():
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), name
        assert "https://" not in text, name
        assert "innerHTML" not in text, name
    assert "<style" not in texts["index.html"]
    assert "style=" not in texts["index.html"]
    assert texts["index.html"].count("<script") == 1


async def test_files_need_no_key_and_the_record_does(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    key, digest = new_key()
    file = tmp_path / "keys.yaml"
    write_keys(file, KeyFile(keys=[Key(name="me", sha256=digest, created_unix_s=1)]))
    async with gateway_of(tmp_path, status(), keys=Keys(file)) as (url, supervisor):
        for name in FILES:
            async with client.get(url + name) as answer:
                assert answer.status == 200, name
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["x-request-id"]
        async with client.get(url + STATUS_PATH[1:]) as answer:
            assert answer.status == 401
            assert "llama2" not in await answer.text()
        assert supervisor.asked == 0
        async with client.get(url + STATUS_PATH[1:], headers={"Authorization": f"Bearer {key}"}) as answer:
            assert (await answer.json())["status"]["rack"] == "llama2"
            assert answer.headers["Cache-Control"] == "no-store"


async def test_file_known_by_its_tag_is_not_sent_again(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    async with gateway_of(tmp_path, status()) as (url, _):
        async with client.get(url) as first:
            tag = first.headers["ETag"]
        async with client.get(url, headers={"If-None-Match": tag}) as second:
            assert (second.status, await second.read()) == (304, b"")


@pytest.mark.parametrize("path", ["v1", "v1/", "dashboard", "dashboard/../server.py", "dashboard/index.html"])
async def test_only_the_named_files_are_served(tmp_path: Path, client: aiohttp.ClientSession, path: str) -> None:
    async with gateway_of(tmp_path, status()) as (url, _), client.get(url + path) as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["code"] == "unknown_path"


async def test_supervisor_is_asked_once_for_many_viewers_and_never_unasked(tmp_path: Path) -> None:
    async with gateway_of(tmp_path, status()) as (url, supervisor), aiohttp.ClientSession() as session:
        started = time.monotonic()

        async def look() -> None:
            async with session.get(url + STATUS_PATH[1:]) as answer:
                assert answer.status == 200

        await asyncio.gather(*(look() for _ in range(40)))
        assert 1 <= supervisor.asked <= 1 + (time.monotonic() - started) / 0.9


async def test_absent_supervisor_leaves_the_last_record_standing_with_its_age(tmp_path: Path) -> None:
    async with gateway_of(tmp_path, status()) as (url, _), aiohttp.ClientSession() as session:
        async with session.get(url + STATUS_PATH[1:]) as answer:
            assert (await answer.json())["supervisor_answers"] is True
        (tmp_path / "rack.sock").unlink()
        await asyncio.sleep(1.0)
        async with session.get(url + STATUS_PATH[1:]) as answer:
            later = await answer.json()
        assert later["supervisor_answers"] is False
        assert later["status"]["rack"] == "llama2"
        assert later["age_s"] >= 1.0


def test_what_is_shown_holds_no_paths_and_no_command_lines() -> None:
    record = status(events=[event("loads", data={"argv": ["vllm", "/srv/secret"], "hint": "do this", "log": "/x/y"})])
    text = json.dumps(shown(record))
    assert "secret" not in text
    assert "/run/" not in text
    assert "do this" in text
    assert "log" in record["models"][0]["replicas"][0]  # the record itself stays whole for `status --json`


async def test_traffic_of_a_real_rack_reaches_its_status_record(tmp_path: Path) -> None:
    async with running_rack(tmp_path, [{}]) as rack:
        await rack.until_ready()
        async with aiohttp.ClientSession() as session:

            async def seen() -> dict[str, object]:
                async with session.get(rack.url + STATUS_PATH) as answer:
                    (traffic,) = (await answer.json())["status"]["gateway"]["traffic"]
                    return dict(traffic)

            for _ in range(3):
                await stream_once(rack.url)
            async with asyncio.timeout(30):
                while (traffic := await seen())["requests"] != 3:
                    await asyncio.sleep(0.1)
    assert traffic["tokens"] == 120  # events while they run, put right by the engine's own count
    assert traffic["first_token_s"]["n"] == 3  # type: ignore[index]
    assert traffic["per_token_s"]["p50"] > 0  # type: ignore[index]
    assert traffic["tokens_per_s"] > 0  # type: ignore[operator]
    assert traffic["failures"] == 0
