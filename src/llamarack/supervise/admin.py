"""The rack's admin socket: one JSON object a line, for the commands of this user and for gateway workers.

Requests: `status`, `events`, `stop`, `drain` (a replica or the rack), `reload` and its `abort`; `follow`, after which
the connection gets every event as it happens; and `gateway`, which turns the connection into a worker's link. The
socket lies in a folder of mode 0700; there is no other guard.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from llamarack.errors import LlamarackError, NothingRunning, UsageError
from llamarack.paths import RackPaths
from llamarack.supervise.journal import Entry
from llamarack.supervise.rack_lock import is_running, lock_holder
from llamarack.supervise.spec_json import deployment_from_json
from llamarack.supervise.supervisor import Source, Supervisor

_MAX_LINE_BYTES = 4 * 1024**2
_FOLLOW_MAX = 1024  # entries that a slow reader may lag behind
_LAST_LINES_S = 1.0


class AdminServer:
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._followed: list[asyncio.Queue[Entry | None]] = []
        self._following: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        path = self._supervisor.paths.admin_socket
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._server = await asyncio.start_unix_server(self._serve, str(path), limit=_MAX_LINE_BYTES)

    async def stop(self) -> None:
        """Ends the connections of commands that wait for the rack's end; followers get what was told until now."""
        for queue in self._followed:
            queue.put_nowait(None)
        if self._following:
            await asyncio.wait(self._following, timeout=_LAST_LINES_S)
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while line := await reader.readline():
                request = json.loads(line)
                if request["op"] == "gateway":
                    await self._supervisor.gateways.serve_link(request["worker"], reader, writer)
                    return
                if request["op"] == "follow":
                    await self._follow(int(request["limit"]), reader, writer)
                    return
                try:
                    answer = await self._answer(request)
                except LlamarackError as error:
                    answer = {"error": {"code": error.code, "message": error.message, "hint": error.hint}}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError, KeyError):
            pass  # a command that broke off
        finally:
            self._open.discard(writer)
            writer.close()

    async def _follow(self, limit: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The newest entries and then each new one, until the reader leaves or lags too far behind."""
        journal = self._supervisor.journal
        queue: asyncio.Queue[Entry | None] = asyncio.Queue()

        def take(entry: Entry) -> None:
            if queue.qsize() < _FOLLOW_MAX:
                queue.put_nowait(entry)

        for entry in list(journal.recent)[-limit:] if limit else ():
            queue.put_nowait(entry)
        journal.on_entry.append(take)
        self._followed.append(queue)
        writing = asyncio.create_task(_write_all(queue, writer))
        leaving = asyncio.create_task(reader.read())
        self._following.add(writing)
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            journal.on_entry.remove(take)
            self._followed.remove(queue)
            self._following.discard(writing)
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        from llamarack.supervise.status import events_record, status_record  # once somebody asks

        supervisor = self._supervisor
        match request["op"]:
            case "status":
                return status_record(supervisor)
            case "events":
                return events_record(supervisor, int(request["limit"]))
            case "stop":
                supervisor.ask_stop()
                return {"stopping": True}
            case "drain":
                found = await supervisor.drain_replica(request["replica"])
                return {"found": found, "replicas": [replica.id for replica in supervisor.replicas]}
            case "reload":
                return await self._reload(request)
            case "abort":
                change = supervisor.change
                running = change is not None and change.is_running
                if change is not None and running:
                    change.ask_back()
                return {"running": running}
        return {"error": f"unknown request `{request['op']}`"}

    async def _reload(self, request: dict[str, Any]) -> dict[str, Any]:
        deployment = deployment_from_json(request["deployment"])
        if deployment is None:
            raise UsageError(
                "this rack was started by another version of llamarack, which does not know all settings of the file",
                hint="llamarack stop and llamarack serve FILE, with this version",
            )
        from llamarack.supervise.canary import Trial

        given = request["source"]
        source = Source(path=Path(given["path"]), host=given["host"], port=given["port"])
        trial = Trial(**request["trial"]) if request["trial"] else None
        return await self._supervisor.reload(
            deployment, source=source, restart=request["restart"], trial=trial, dry_run=request["dry_run"]
        )


async def _write_all(queue: asyncio.Queue[Entry | None], writer: asyncio.StreamWriter) -> None:
    while (entry := await queue.get()) is not None and queue.qsize() < _FOLLOW_MAX:
        writer.write(orjson.dumps(asdict(entry), option=orjson.OPT_APPEND_NEWLINE, default=str))
        await writer.drain()


async def ask(paths: RackPaths, request: dict[str, Any], *, timeout_s: float = 10.0) -> dict[str, Any]:
    """One request to a running rack. Raises NothingRunning when there is none, and the error that the rack met."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(str(paths.admin_socket), limit=_MAX_LINE_BYTES)
            writer.write(json.dumps(request).encode() + b"\n")
            line = await reader.readline()
            writer.close()
            answer: dict[str, Any] = json.loads(line)
    except (OSError, ValueError, TimeoutError) as error:
        raise nothing_running(paths) from error
    if isinstance(refusal := answer.get("error"), dict):
        raise _error_of(refusal)
    return answer


def _error_of(refusal: dict[str, Any]) -> LlamarackError:
    """The error that the rack met, as the class that it was there."""
    classes = [LlamarackError]
    for known in classes:
        classes += known.__subclasses__()
    found = next((known for known in classes if known.code == refusal["code"]), LlamarackError)
    return found(refusal["message"], hint=refusal["hint"])


async def follow(paths: RackPaths, limit: int) -> AsyncIterator[dict[str, Any]]:
    """The newest `limit` events of a running rack and each new one, until it ends. Raises NothingRunning."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(paths.admin_socket), limit=_MAX_LINE_BYTES)
    except OSError as error:
        raise nothing_running(paths) from error
    try:
        writer.write(json.dumps({"op": "follow", "limit": limit}).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                yield json.loads(line)
    finally:
        writer.close()


def nothing_running(paths: RackPaths) -> NothingRunning:
    if is_running(paths):
        return NothingRunning(
            f"rack `{paths.name}` runs but does not answer on `{paths.admin_socket}`", hint="try again in a few seconds"
        )
    racks = paths.folder.parent
    others = sorted(p.name for p in racks.iterdir() if (p / "state.json").exists()) if racks.is_dir() else []
    hint = f"racks here: {', '.join(others)} (--rack NAME)" if others else "llamarack serve FILE starts one"
    return NothingRunning(f"no rack `{paths.name}` is running", hint=hint)


async def wait_until_gone(paths: RackPaths, timeout_s: float) -> bool:
    """Whether the supervisor has ended within the time: its lock is free and its process is gone."""
    pid = lock_holder(paths)
    try:
        async with asyncio.timeout(timeout_s):
            while is_running(paths) or (pid is not None and _lives(pid)):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.05)
    except TimeoutError:
        return False
    return True


def _lives(pid: int) -> bool:
    """A zombie has ended; that its parent has not looked yet is nobody's concern here."""
    import psutil  # for the command that waits for an end, not for the rack

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
