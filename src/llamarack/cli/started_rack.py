"""A deployment started for one command and surely stopped after it: what `bench FILE`, `tune` and the proofs run on.

The rack is a child process of its own (`python -m llamarack.cli.started_rack`), which runs the same code as `serve` in
a state folder of its own, so neither the user's racks nor the measuring event loop are touched. The child tells what
happens as JSON lines on its stdout: `{"entry": ...}` of its journal, then `{"ready": ...}` or `{"error": ...}`.

It never outlives its parent: the kernel sends it SIGTERM when the parent dies, and should it be killed itself, the
keepers end the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

from llamarack import config
from llamarack.config import Deployment
from llamarack.errors import LlamarackError, NeverReady, StartFailed
from llamarack.gateway.keys import Key, KeyFile, new_key, write_keys
from llamarack.paths import RackPaths, make_private, rack_paths
from llamarack.supervise.admin import ask
from llamarack.supervise.journal import Entry
from llamarack.supervise.rack import run_rack
from llamarack.supervise.supervisor import Supervisor

_NAME = "started"
_DRAIN_S = 5.0  # whoever started the rack has its answers when it stops it
_START_TIMEOUT_S = 4 * 3600.0  # the supervisor's own deadlines start after the load lock was taken
_ADMITTED_TIMEOUT_S, _ADMITTED_POLL_S = 60.0, 0.02
_STOP_TIMEOUT_S = 120.0  # above the supervisor's own
_MAX_LINE_BYTES = 4 * 1024**2
_PR_SET_PDEATHSIG = 1  # prctl(2)
_FILE, _KEYS, _LOG = "deployment.yaml", "keys.yaml", "serve.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRack:
    """A rack whose replicas are all ready. `base_url`: without `/v1`. `api_key`: where the deployment asks for keys."""

    base_url: str
    api_key: str | None = field(repr=False)
    paths: RackPaths
    pid: int

    async def status(self) -> dict[str, Any]:
        """The `status` record. Raises NothingRunning once the rack has died."""
        return await ask(self.paths, {"op": "status"})


@asynccontextmanager
async def started_rack(
    deployment: Deployment,
    *,
    folder: Path | None = None,
    on_entry: Callable[[Entry], None] = lambda _: None,
    start_timeout_s: float = _START_TIMEOUT_S,
    is_strict: bool = True,
) -> AsyncIterator[StartedRack]:
    """Starts every model of `deployment` on a free loopback port, without TLS; on leaving, no process is left.

    What runs is what the file says or nothing: an engine that fails is not started again and no smaller setting is
    tried. Not `is_strict`: the file's own rules keep it running. `folder`: state and logs are kept there; without it
    they are temporary and stay only after a failed start.
    `on_entry` sees the rack's journal as it happens.

    Raises what `serve` would, with its sentence, hint and exit code: ConfigError, ModelError, HardwareError,
    DoesNotFit, EngineError; NeverReady past `start_timeout_s`. Call it from a thread that lives as long as the rack.
    """
    home = make_private(folder.absolute()) if folder else Path(tempfile.mkdtemp(prefix="llamarack-"))
    is_started = is_explained = False
    try:
        private, api_key = _own_settings(deployment, home, is_strict=is_strict)
        (home / _FILE).write_text(config.to_yaml(private), encoding="utf-8")
        paths = rack_paths(_NAME, home)
        process = await _spawn(home)
        reader = _Reader(process, on_entry, home / _LOG)
        try:
            address = await reader.until_ready(start_timeout_s)
            await _until_admitted(f"http://{address}/ready", process)
            is_started = True
            yield StartedRack(base_url=f"http://{address}", api_key=api_key, paths=paths, pid=process.pid)
        finally:
            try:
                await _stop(process)
            finally:
                reader.close()
                shutil.rmtree(paths.sockets, ignore_errors=True)
    except LlamarackError:
        is_explained = not is_started  # its message names a log in there
        raise
    finally:
        if folder is None and not is_explained:
            shutil.rmtree(home, ignore_errors=True)


def _own_settings(deployment: Deployment, home: Path, *, is_strict: bool) -> tuple[Deployment, str | None]:
    """The deployment as it is started here, and a key that opens it if it asks for keys."""
    key, keys_file = None, None
    if deployment.gateway.api_keys_file is not None:
        key, digest = new_key()
        keys_file = home / _KEYS
        write_keys(keys_file, KeyFile(keys=[Key(name=_NAME, sha256=digest, created_unix_s=int(time.time()))]))
    gateway = replace(
        deployment.gateway,
        host="127.0.0.1",
        port=0,
        tls_cert=None,
        tls_key=None,
        insecure=False,
        api_keys_file=keys_file,
    )
    supervise = replace(deployment.supervise, drain_s=min(deployment.supervise.drain_s, _DRAIN_S), webhook=None)
    models = deployment.models
    if is_strict:
        restarts = replace(deployment.supervise.restarts, max=0)
        supervise = replace(supervise, restarts=restarts)
        models = [replace(model, on_out_of_memory="fail") for model in models]
    return replace(deployment, models=models, gateway=gateway, supervise=supervise), key


async def _spawn(home: Path) -> asyncio.subprocess.Process:
    """A session of its own: Ctrl-C reaches the parent alone, which stops the rack in order."""
    with open(home / _LOG, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "llamarack.cli.started_rack", str(home), str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )


async def _until_admitted(url: str, process: asyncio.subprocess.Process) -> None:
    """The gateway hears of a ready replica a moment after the supervisor; until then it refuses. Raises NeverReady."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ADMITTED_TIMEOUT_S)) as session:
        ends_s = time.monotonic() + _ADMITTED_TIMEOUT_S
        while time.monotonic() < ends_s and process.returncode is None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_ADMITTED_POLL_S)
    raise NeverReady(
        f"the gateway does not admit requests within {_ADMITTED_TIMEOUT_S:g} s of the replicas being ready"
    )


class _Reader:
    """Reads the child's lines until it ends; owns the answer to "is it ready?"."""

    def __init__(self, process: asyncio.subprocess.Process, on_entry: Callable[[Entry], None], log: Path) -> None:
        self._process = process
        self._on_entry = on_entry
        self._log = log
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._read())

    async def until_ready(self, timeout_s: float) -> str:
        """`host:port`. Raises the child's own error."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._address
        except TimeoutError:
            raise NeverReady(f"the rack was not ready within {timeout_s:g} s", hint=f"read {self._log}") from None

    def close(self) -> None:
        self._task.cancel()
        if self._address.done() and not self._address.cancelled():
            self._address.exception()  # looked at, so that nobody warns that it was not

    def _hear(self, entry: Entry) -> None:
        """A listener that fails ends the start; later it is let be, for the rack must still be read."""
        try:
            self._on_entry(entry)
        except Exception as error:
            if not self._address.done():
                self._address.set_exception(error)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message = orjson.loads(line)
            if "entry" in message:
                self._hear(Entry(**message["entry"]))
            elif self._address.done():
                continue
            elif "ready" in message:
                self._address.set_result(message["ready"])
            else:
                self._address.set_exception(_error_of(message["error"]))
        code = await self._process.wait()
        if not self._address.done():
            tail = self._log.read_text(errors="replace").strip()[-2000:]
            self._address.set_exception(
                StartFailed(
                    f"the rack ended with exit code {code} before it was ready\n{tail}", hint=f"read {self._log}"
                )
            )


def _error_of(said: dict[str, Any]) -> LlamarackError:
    """The same class again, hence the same exit code."""
    kind = next((each for each in _tree(LlamarackError) if each.code == said["code"]), LlamarackError)
    return kind(said["message"], hint=said["hint"])


def _tree(root: type[LlamarackError]) -> Iterator[type[LlamarackError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and after `_STOP_TIMEOUT_S`, or when this wait is cancelled, SIGKILL for all that is left."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            _kill_family(process.pid)


def _kill_family(pid: int) -> None:
    """Engines lead sessions of their own, so they are found by descent, before their parent is gone."""
    try:
        root = psutil.Process(pid)
        family = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(family, timeout=_DRAIN_S)


# -- the child ------------------------------------------------------------------------------------------------------


def _main(home: Path, parent_pid: int) -> int:
    """Exit code: that of the error, or 0."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        return 0  # it died before it could be watched
    told = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print belongs into the log
    has_failed = False

    def tell(message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a parent that no longer reads
            told.write(orjson.dumps(message, default=str) + b"\n")

    def tell_error(error: LlamarackError) -> None:
        nonlocal has_failed
        if not has_failed:
            tell({"error": {"code": error.code, "message": error.message, "hint": error.hint}})
        has_failed = True

    async def once_settled(supervisor: Supervisor, all_ready: bool) -> bool:
        if all_ready:
            tell({"ready": f"127.0.0.1:{supervisor.gateways.port}"})
        else:
            tell_error(_why_not_ready(supervisor))
        return all_ready

    try:
        deployment = config.parse((home / _FILE).read_text(encoding="utf-8")).deployment
        asyncio.run(
            run_rack(
                deployment,
                rack_paths(_NAME, home),
                on_entry=lambda entry: tell({"entry": asdict(entry)}),
                once_settled=once_settled,
            )
        )
    except LlamarackError as error:
        tell_error(error)
        return error.exit_code
    return StartFailed.exit_code if has_failed else 0


def _why_not_ready(supervisor: Supervisor) -> StartFailed:
    """Of the first replica that failed; a rack that is only partly there is not what was asked for."""
    failed = [replica for replica in supervisor.replicas if replica.last_death is not None]
    if not failed:
        return StartFailed("the rack was stopped before it was ready")
    death = failed[0].last_death
    assert death is not None
    which = f"{len(failed)} of {len(supervisor.replicas)} replicas: " if len(supervisor.replicas) > 1 else ""
    tail = "\n".join(f"  | {line}" for line in death.log_tail)
    return StartFailed(
        f"{which}{failed[0].id} did not start: {death.message}\nlast lines of {failed[0].log_path}:\n{tail}",
        hint=death.hint,
    )


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), int(sys.argv[2])))
