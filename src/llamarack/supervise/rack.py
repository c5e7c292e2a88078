"""From a deployment file to a running rack, in the foreground: the one call behind `serve` and `demo`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence

from llamarack.config import Deployment
from llamarack.paths import RackPaths
from llamarack.supervise import memory_file, standby
from llamarack.supervise.admin import AdminServer
from llamarack.supervise.journal import Entry
from llamarack.supervise.notify import Notifier, status_line, take_notifier
from llamarack.supervise.preparing import prepare, remembered_specs
from llamarack.supervise.state import State
from llamarack.supervise.supervisor import Source, Supervisor

# SIGHUP: the terminal was closed, or the connection to it lost.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def run_rack(
    deployment: Deployment,
    paths: RackPaths,
    *,
    on_entry: Callable[[Entry], None],
    once_settled: Callable[[Supervisor, bool], Awaitable[bool]],
    source: Source | None = None,
) -> signal.Signals | None:
    """Serves until SIGINT, SIGTERM, SIGHUP or `stop`; a second signal ends the drain early. Returns the first signal.

    `source`: what `reload` reads again. `once_settled(supervisor, all_ready)` runs when every replica is ready or
    failed; returning False ends the rack, an output that is gone does not. SIGHUP is left alone under `nohup`.
    Raises ConfigError, ModelError, HardwareError, DoesNotFit before anything is started, EngineError when no start
    worked.
    """
    remembered = memory_file.read(paths.state)
    prepared = await prepare(deployment, remembered, remembered_specs(remembered))
    supervisor = Supervisor(deployment, prepared.specs, paths, source=source)
    supervisor.links = list(prepared.links)
    return await run_supervisor(supervisor, on_entry=on_entry, once_settled=once_settled, warnings=prepared.warnings)


async def run_supervisor(
    supervisor: Supervisor,
    *,
    on_entry: Callable[[Entry], None],
    once_settled: Callable[[Supervisor, bool], Awaitable[bool]],
    warnings: Sequence[str] = (),
) -> signal.Signals | None:
    """The same for a rack that is laid out; `warnings` go into its journal."""
    supervisor.journal.on_entry.append(on_entry)
    received: list[signal.Signals] = []

    def take(number: signal.Signals) -> None:
        received.append(number)
        supervisor.ask_stop()

    loop = asyncio.get_running_loop()
    numbers = [
        number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP
    ]
    for number in numbers:
        loop.add_signal_handler(number, take, number)
    admin = AdminServer(supervisor)
    notifier = take_notifier(os.environ)
    supervisor.on_change.append(lambda: _tell_manager(supervisor, notifier))
    alive = asyncio.create_task(notifier.keep_alive())
    settling: asyncio.Task[None] | None = None
    try:
        await supervisor.start()
        for warning in warnings:
            supervisor.journal.warn("settings", warning)
        await admin.start()
        settling = asyncio.create_task(_when_settled(supervisor, once_settled, notifier))
        await supervisor.run()
    finally:
        await admin.stop()
        alive.cancel()
        await asyncio.gather(alive, return_exceptions=True)
        if settling is not None:
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)
        for number in numbers:
            loop.remove_signal_handler(number)
    return received[0] if received else None


def _tell_manager(supervisor: Supervisor, notifier: Notifier) -> None:
    """At every change of the table: to systemd, where it started us."""
    states = [(replica.id, replica.state) for replica in supervisor.replicas]
    running = supervisor.gateways.in_flight_total()
    notifier.status(status_line(states, draining=supervisor.draining, running=running))
    if supervisor.draining:
        notifier.stopping()


async def _when_settled(
    supervisor: Supervisor, once_settled: Callable[[Supervisor, bool], Awaitable[bool]], notifier: Notifier
) -> None:
    all_ready = await supervisor.until_settled()
    await asyncio.to_thread(standby.end)  # what was begun for a rack that was taken back, or for another engine
    if any(replica.state is State.READY for replica in supervisor.replicas):
        notifier.ready()
    try:
        goes_on = await once_settled(supervisor, all_ready)
    except (OSError, SystemExit):  # who would have read it is gone; the second is rich's own answer to a broken pipe
        goes_on = True
    if not goes_on:
        supervisor.ask_stop()
