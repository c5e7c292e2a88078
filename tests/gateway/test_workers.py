"""Several workers behind one port: their limits hold together, and any of them tells for all."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llamarack.config import Defaults, Gateway, plain, validated
from llamarack.gateway.admission import Admission
from llamarack.gateway.capacity import Held
from llamarack.gateway.demand import Demand
from llamarack.gateway.keys import Key, KeyFile, new_key, write_keys
from llamarack.gateway.ledger import Ledger, Part
from llamarack.supervise.table import ModelRow, ReplicaRow, Table, to_json
from tests.gateway.raw import Answer, ask, chat, connect, get, post_bytes
from tests.gateway.test_admission import replica, table, turns
from tests.rigs import Address, fake_engine, until

CHAT = "/v1/chat/completions"


class Workers:
    """As a supervisor sees them."""

    def __init__(self, address: Address, processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
        self.address = address
        self.processes = processes
        self.logs = logs
        self.counts: dict[int, dict[str, Any]] = {}

    def counts_of(self, name: str) -> int:
        return sum(sum(each.get(name, {}).values()) for each in self.counts.values())


@contextlib.asynccontextmanager
async def workers(folder: Path, rows: Sequence[ReplicaRow], count: int = 2, **settings: Any) -> AsyncIterator[Workers]:
    chosen = validated(Gateway, {"port": 0, "workers": count, **settings}, strict=False)
    models = [ModelRow(name="fake", created_unix_s=1, defaults=Defaults(max_tokens=None), max_output_tokens=None)]
    sent = Table(version=1, draining=False, models=tuple(models), replicas=tuple(rows))
    admin = folder / "admin.sock"

    async def serve_link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = json.loads(await reader.readline())["worker"]
        for message in (
            {"settings": plain(chosen), "folder": str(folder), "stuck_request_s": 300},
            {"table": to_json(sent)},
        ):
            writer.write(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                rig.counts[number] = json.loads(line)["counts"]
        writer.close()

    server = await asyncio.start_unix_server(serve_link, str(admin), limit=4 * 1024**2)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        rig = Workers(Address(*listener.getsockname()[:2]), [], [])
        for number in range(count):
            argv = [sys.executable, "-m", "llamarack.gateway.worker", str(listener.fileno()), str(admin), str(number)]
            rig.logs.append(folder / f"worker-{number}.log")
            with rig.logs[-1].open("wb") as out:
                rig.processes.append(
                    subprocess.Popen(argv, pass_fds=[listener.fileno()], stdout=out, stderr=out)  # noqa: ASYNC220
                )
    try:
        await until(lambda: len(rig.counts) == count, "all workers have the table")
        yield rig
    finally:
        for process in rig.processes:
            process.terminate()
        for process in rig.processes:
            await asyncio.to_thread(process.wait, 30)
        server.close()


@pytest.mark.process
async def test_slots_are_given_once_over_all_workers_and_none_lies_idle(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path, "a", slots=3, token_interval_s=0.01) as a,
        fake_engine(tmp_path, "b", slots=1, token_interval_s=0.01) as b,
        workers(tmp_path, [a.row(), b.row()], max_queue_s=30) as rig,
    ):
        answers = await asyncio.gather(*(ask(rig.address, CHAT, chat(stream=i % 2 == 0)) for i in range(40)))
        assert [answer.status for answer in answers] == [200] * 40
        assert [(await each.record())["max_running"] for each in (a, b)] == [3, 1]
        await until(lambda: rig.counts_of("in_flight") == 0, "all slots are free")
        asked = 40
        # The kernel spreads connections as it likes, and the first worker awake may take a whole crowd.
        while not all(CHAT in log.read_text() for log in rig.logs):
            assert asked < 2000, "one worker takes everything"
            assert (await ask(rig.address, CHAT, chat())).status == 200
            asked += 1
        await until(lambda: rig.counts_of("in_flight") == 0, "all slots are free again")
        pages = [(await get(rig.address, "/metrics")).body.decode() for _ in range(6)]
    for page in pages:
        found = {family.name: family for family in text_string_to_metric_families(page)}
        total = [s.value for s in found["llamarack_requests"].samples if s.name == "llamarack_requests_total"]
        assert total == [float(asked)]
        assert [s.value for s in found["llamarack_slots"].samples if s.labels["state"] == "idle"] == [3.0, 1.0]
        buckets = [s for s in found["llamarack_request_seconds"].samples if s.name.endswith("_count")]
        assert [s.value for s in buckets] == [float(asked)]


@pytest.mark.process
async def test_queue_bound_and_key_limit_hold_over_all_workers(tmp_path: Path) -> None:
    key, digest = new_key()
    write_keys(
        tmp_path / "keys.yaml",
        KeyFile(keys=[Key(name="app", sha256=digest, created_unix_s=1, max_parallel=6)]),
    )
    async with (
        fake_engine(tmp_path, "a", slots=1, stall_prefill=True) as a,
        workers(tmp_path, [a.row()], max_queue_requests=3, api_keys_file=tmp_path / "keys.yaml") as rig,
        contextlib.AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(connect(rig.address)) for _ in range(4)]
        for number, client in enumerate(clients, 1):
            await client.send(post_bytes(CHAT, chat(), api_key=key))
            await until(lambda n=number: rig.counts_of("in_flight") + rig.counts_of("queued") == n, "it is known")  # type: ignore[misc]
        refused = [await ask(rig.address, CHAT, chat(), api_key=key) for _ in range(4)]
        assert {(answer.status, answer.error["code"]) for answer in refused} == {(503, "server_is_overloaded")}
        assert (await a.record())["max_running"] == 1
        write_keys(
            tmp_path / "keys.yaml",
            KeyFile(keys=[Key(name="app", sha256=digest, created_unix_s=1, max_parallel=4)]),
        )

        async def limited() -> Answer | None:
            answer = await ask(rig.address, CHAT, chat(), api_key=key)
            return answer if answer.status == 429 else None

        answer = await until(limited, "the new limit counts, on whichever worker")
        assert answer.error["code"] == "rate_limit_exceeded"
        assert "4 requests running" in answer.error["message"]


async def test_waiter_of_another_worker_is_woken_and_the_longest_waiting_goes_first(tmp_path: Path) -> None:
    ledgers = [Ledger(tmp_path, number, 2) for number in range(2)]
    desks = [Admission(max_queue_requests=9, max_queue_s=30, ledger=ledger) for ledger in ledgers]
    loop = asyncio.get_running_loop()
    for desk, ledger in zip(desks, ledgers, strict=True):
        desk.apply(table(replica("a")))
        loop.add_reader(ledger.bell, lambda desk=desk, ledger=ledger: (ledger.hush(), desk.rung()))  # type: ignore[misc]
    try:
        held = await desks[0].take("m")
        assert desks[1].in_flight_of_all("a") == 1
        first = asyncio.create_task(desks[1].take("m"))
        await turns()
        second = asyncio.create_task(desks[0].take("m"))
        await turns()
        assert desks[0].queued_of_all("m") == 2
        desks[0].give(held)
        async with asyncio.timeout(30):
            got = await first
            assert not second.done()
            desks[1].give(got)
            desks[0].give(await second)
        assert [desk.held for desk in desks] == [{}, {}]
    finally:
        for ledger in ledgers:
            loop.remove_reader(ledger.bell)
            ledger.close()


async def test_free_slot_left_to_a_worker_that_does_not_take_it_is_not_lost(tmp_path: Path) -> None:
    here, silent = Ledger(tmp_path, 0, 2), Ledger(tmp_path, 1, 2)
    try:
        desk = Admission(max_queue_requests=9, max_queue_s=30, ledger=here)
        desk.apply(table(replica("a")))
        held = await desk.take("m")
        with silent.locked():
            silent.publish(Part(queued={"m": 1}, oldest={"m": 0.0}))
        waiting = asyncio.create_task(desk.take("m"))
        await turns()
        desk.give(held)
        async with asyncio.timeout(30):
            desk.give(await waiting)
    finally:
        here.close()
        silent.close()


def test_part_of_a_worker_that_died_while_writing_counts_as_empty_and_is_cleared_by_the_next(tmp_path: Path) -> None:
    here, other = Ledger(tmp_path, 0, 2), Ledger(tmp_path, 1, 2)
    part = Part(held={"a": Held(slots=2, tokens=9)}, callers={"k": (1, 2, 3, 4, 5)})
    with other.locked():
        other.publish(part)
    assert here.others() == [(1, part)]
    other._map[64 * 1024 + 6] = 0
    assert here.others() == [(1, Part())]
    with other.locked():
        other.publish(part)
    other.close()
    again = Ledger(tmp_path, 1, 2)
    assert here.others() == [(1, Part())]
    again.close()
    here.close()


async def test_unlocked_ledger_of_a_stopped_worker_does_not_stop_the_others(tmp_path: Path) -> None:
    here, stopped = Ledger(tmp_path, 0, 2), Ledger(tmp_path, 1, 2)
    try:
        desk = Admission(max_queue_requests=9, max_queue_s=30, ledger=here)
        with stopped.locked():
            desk.apply(table(replica("a")))
            assert (await desk.take("m", Demand(caller="x"))).id == "a"
    finally:
        here.close()
        stopped.close()
