"""From a deployment file to a running rack, in the foreground: the one call behind `serve` and `demo`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from llamarack.config import Deployment, Model
from llamarack.engine.builds import build_of, with_rpc_devices
from llamarack.errors import ModelError
from llamarack.hardware.detect import detect_machine
from llamarack.hardware.finding import Severity
from llamarack.model.check import check_identity
from llamarack.model.read import read_model
from llamarack.model.spec import ModelSpec
from llamarack.paths import RackPaths
from llamarack.supervise import memory_file
from llamarack.supervise.admin import AdminServer
from llamarack.supervise.journal import Entry
from llamarack.supervise.layout import lay_out
from llamarack.supervise.notify import Notifier, status_line, take_notifier
from llamarack.supervise.own_memory import living_engines, without_engines
from llamarack.supervise.state import State
from llamarack.supervise.status import links_record
from llamarack.supervise.supervisor import Supervisor
from llamarack.supervise.unbuilt import unbuilt_settings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def run_rack(
    deployment: Deployment,
    paths: RackPaths,
    *,
    on_entry: Callable[[Entry], None],
    once_settled: Callable[[Supervisor, bool], Awaitable[bool]],
) -> signal.Signals | None:
    """Serves until SIGINT, SIGTERM or `stop`; a second signal ends the drain early. Returns the first signal.

    `once_settled(supervisor, all_ready)` runs when every replica is ready or failed; returning False ends the rack.
    Raises ConfigError, ModelError, HardwareError, DoesNotFit before anything is started, EngineError when no start
    worked.
    """
    machine = await asyncio.to_thread(detect_machine)
    machine = without_engines(machine, living_engines(memory_file.read(paths.state)))
    wanted = {model.path_of(group) for model in deployment.models for group in model.groups}
    wanted |= {path for model in deployment.models for path in model.fallbacks}
    specs = {path: await asyncio.to_thread(read_model, path) for path in wanted}
    warnings = unbuilt_settings(deployment) + [
        warning for model in deployment.models for warning in _judge(model, specs)
    ]
    groups = [group for model in deployment.models for group in model.groups]
    machine = await asyncio.to_thread(with_rpc_devices, machine, groups)
    layout = lay_out(deployment, machine, specs, build_of=lambda group: build_of(group, machine))
    for spec in layout:
        await asyncio.to_thread(spec.adaptor.prepare, spec.group, on_cards=bool(spec.card_uuids))
    supervisor = Supervisor(deployment, layout, paths)
    supervisor.links = links_record(machine)
    return await run_supervisor(supervisor, on_entry=on_entry, once_settled=once_settled, warnings=warnings)


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
    for number in _SIGNALS:
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
        for number in _SIGNALS:
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
    if any(replica.state is State.READY for replica in supervisor.replicas):
        notifier.ready()
    if not await once_settled(supervisor, all_ready):
        supervisor.ask_stop()


def _judge(model: Model, specs: dict[Path, ModelSpec]) -> list[str]:
    """Warnings about tokenizer and template of a model's files. Raises ModelError where they cannot belong together."""
    told = []
    for path in dict.fromkeys([*(model.path_of(group) for group in model.groups), *model.fallbacks]):
        for finding in check_identity(specs[path], model.tokenizer):
            if finding.severity is Severity.ERROR:
                raise ModelError(f"model `{model.name}`: {finding.subject}: {finding.seen}", hint=finding.fix)
            if finding.severity is Severity.WARNING and not (model.chat_template and "template" in finding.code):
                told.append(f"{model.name}: {finding.seen}; {finding.fix}")
    return told
