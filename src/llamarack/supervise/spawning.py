"""Starts the process of a replica under a keeper of its own, with a fresh key."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from llamarack.engine.adaptor import LaunchContext
from llamarack.engine.dialect import Endpoint
from llamarack.paths import RackPaths, make_private
from llamarack.supervise.journal import Journal
from llamarack.supervise.keeping import ChildSpec, KeptChild, start_child
from llamarack.supervise.replica_record import ReplicaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    child: KeptChild
    endpoint: Endpoint


async def spawn(spec: ReplicaSpec, paths: RackPaths, journal: Journal) -> Spawned:
    """Raises what the adaptor and `start_child` raise."""
    socket = paths.engine_socket(spec.id)
    context = LaunchContext(
        replica=spec.id,
        model=spec.model,
        group=spec.group,
        path=spec.path,
        candidate=spec.candidate,
        card_uuids=spec.card_uuids,
        files=make_private(paths.folder / "replicas" / spec.id),
        socket=socket,
        key=secrets.token_urlsafe(32),
    )
    # In a thread: an engine that was updated meanwhile is asked for its options first.
    launch = await asyncio.to_thread(spec.adaptor.launch, context)
    child = await start_child(
        ChildSpec(
            argv=launch.argv,
            env=launch.env,
            log_path=paths.log_of(spec.id),
            control_socket=paths.keeper_socket(spec.id),
            unlink=[socket],
            up_mark=launch.up_mark,
        )
    )
    # Told once it loads, since who hears of it takes a moment to say it: a terminal is first made ready.
    message = f"loads {spec.path.name} with {spec.adaptor.name}"
    journal.note("starting", message, replica=spec.id, argv=list(launch.argv))
    return Spawned(child=child, endpoint=launch.endpoint)
