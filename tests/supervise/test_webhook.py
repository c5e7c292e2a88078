"""Warnings and errors reach a URL that answers, and a URL that does not answer reaches nobody else."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from llamarack.config import parse
from llamarack.errors import ConfigError
from llamarack.supervise.journal import Journal
from llamarack.supervise.state import State
from llamarack.supervise.webhook import QUEUE_MAX, Webhook
from tests.supervise.conftest import DEADLINE_S, running_rack

pytestmark = pytest.mark.process


class Receiver:
    """A real HTTP server that answers `statuses` in order, then 200."""

    def __init__(self, *statuses: int) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._statuses = list(statuses)
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> "Receiver":
        app = web.Application()
        app.router.add_post("/hook", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/hook"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        status = self._statuses.pop(0) if self._statuses else 200
        if status == 200:
            self.bodies.append(await request.json())
        return web.Response(status=status)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.bodies) < count:
                await asyncio.sleep(0.01)


def _hook(journal: Journal, url: str) -> Webhook:
    hook = Webhook(url, "rack", journal, first_wait_s=0.01)
    journal.on_entry.append(hook.take)
    return hook


async def test_warnings_and_errors_are_sent_after_failures_and_infos_are_not(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    async with Receiver(503, 429) as receiver:
        sending = asyncio.create_task(_hook(journal, receiver.url).run())
        journal.note("fine", "nothing to see")
        journal.warn("slots_low", "few", replica="a-0", idle=1)
        journal.error("died", "gone")
        await receiver.until(2)
        sending.cancel()
    assert [body["kind"] for body in receiver.bodies] == ["slots_low", "died"]
    assert receiver.bodies[0]["data"] == {"idle": 1}
    assert receiver.bodies[0]["rack"] == "rack"


async def test_refused_body_is_told_once_and_does_not_feed_on_itself(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    async with Receiver(400) as receiver:
        sending = asyncio.create_task(_hook(journal, receiver.url).run())
        journal.error("died", "first")
        journal.error("died", "second")
        await receiver.until(1)
        sending.cancel()
    assert receiver.bodies[0]["message"] == "second"
    assert receiver.bodies[0]["dropped_before"] == 1
    assert [entry.kind for entry in journal.recent].count("webhook_failed") == 1


async def test_receiver_that_never_answers_costs_the_oldest_events_and_no_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")

    async def never(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    hook = _hook(journal, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    sending = asyncio.create_task(hook.run())
    for number in range(QUEUE_MAX + 50):
        journal.error("died", str(number))
    await asyncio.sleep(0)
    assert len(hook._queue) <= QUEUE_MAX
    sending.cancel()
    server.close()


async def test_death_of_an_engine_reaches_the_webhook_of_the_file(tmp_path: Path) -> None:
    async with Receiver() as receiver:
        faults = [{}, {"crash_in_load": True, "load_error": "unknown model architecture: 'mamba9'"}]
        async with running_rack(tmp_path, faults, webhook=receiver.url) as rack:
            await rack.until(lambda: rack.supervisor.replicas[1].state is State.FAILED)
            await receiver.until(2)
        assert [body["kind"] for body in receiver.bodies[:2]] == ["start_failed", "failed"]
        assert receiver.bodies[0]["data"]["cause"] == "unsupported_architecture"


def test_webhook_that_is_no_url_is_refused_with_what_to_type() -> None:
    text = json.dumps({"models": [{"name": "a", "path": "a.gguf"}], "supervise": {"webhook": "example.org"}})
    with pytest.raises(ConfigError, match=r"supervise.webhook.*`example.org` is not an http or https URL") as caught:
        parse(text)
    assert "http://" in str(caught.value.hint)
