"""The `status` record of a running rack, as programs read it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llamarack.supervise.engine_usage import family
from llamarack.supervise.generation import generation_of
from llamarack.supervise.replica import Replica
from llamarack.supervise.state import State
from llamarack.supervise.traffic import traffic_record

if TYPE_CHECKING:
    from llamarack.supervise.supervisor import Supervisor

SCHEMA_VERSION = 1
_EVENTS_IN_STATUS = 20


def status_record(supervisor: Supervisor) -> dict[str, Any]:
    names = dict.fromkeys(model.name for model in supervisor.models)
    names |= dict.fromkeys(replica.spec.model.name for replica in supervisor.replicas)  # one that is still to be ready
    source = supervisor.source
    return {
        "schema_version": SCHEMA_VERSION,
        "rack": supervisor.paths.name,
        "time_unix_s": time.time(),
        "started_unix_s": supervisor.started_unix_s,
        "draining": supervisor.draining,
        "generation": supervisor.generation,
        "change": supervisor.change.record() if supervisor.change else None,
        "source": {"path": str(source.path), "host": source.host, "port": source.port} if source else None,
        "deployment_sha256": supervisor.deployment_sha256,
        "models": [
            {
                "name": name,
                "replicas": [
                    _replica(supervisor, replica) for replica in supervisor.replicas if replica.spec.model.name == name
                ],
            }
            for name in names
        ],
        "gateway": _gateway(supervisor),
        "cards": supervisor.watch.cards.record(),
        "host": supervisor.watch.host.record(),
        "links": supervisor.links,
        "events": [asdict(entry) for entry in list(supervisor.journal.recent)[-_EVENTS_IN_STATUS:]],
    }


def events_record(supervisor: Supervisor, limit: int) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "events": [asdict(entry) for entry in list(supervisor.journal.recent)[-limit:]],
    }


def _gateway(supervisor: Supervisor) -> dict[str, Any]:
    pool = supervisor.gateways
    return {
        "host": pool.settings.host,
        "port": pool.port,
        "tls": pool.settings.tls_cert is not None,
        "workers": [
            {"worker": worker, "pid": child.pid, "connected": worker in pool.counts}
            for worker, child in sorted(pool.children.items())
        ],
        "is_current": pool.has_acted_on(supervisor.table().version),
        "running": sum(sum(counts.in_flight.values()) for counts in pool.counts.values()),
        "queued": sum(sum(counts.queued.values()) for counts in pool.counts.values()),
        "traffic": [
            {
                **traffic_record(model.name, pool.traffic.values(), time.time()),
                "queued": sum(counts.queued.get(model.name, 0) for counts in pool.counts.values()),
            }
            for model in supervisor.deployment.models
        ],
    }


def _replica(supervisor: Supervisor, replica: Replica) -> dict[str, Any]:
    running = supervisor.gateways.in_flight(replica.id)
    stuck = sum(counts.stuck.get(replica.id, 0) for counts in supervisor.gateways.counts.values())
    candidate = replica.spec.candidate
    pid = replica.child.pid if replica.child and replica.child.exit is None else None
    pids = family(pid)
    death = replica.last_death
    return {
        "id": replica.id,
        "generation": generation_of(replica.id),
        "share": supervisor.shares.get(replica.id),
        "engine": replica.spec.group.engine,
        "state": replica.state.value,
        "pid": pid,
        "pids": pids,
        "restarts": replica.restarts,
        "last_death": None
        if death is None
        else {
            "at_unix_s": death.at_unix_s,
            "while": death.while_state.value,
            "cause": death.cause,
            "message": death.message,
            "hint": death.hint,
        },
        "loading": _loading(replica),
        "ready_since_unix_s": replica.ready_since_unix_s,
        "start_seconds": replica.start_seconds,
        "endpoint": replica.endpoint.shown if replica.endpoint else None,
        "cards": list(replica.spec.card_uuids),
        "running": running,
        "waiting": None,
        "slots_total": candidate.sequences,
        "slots_idle": max(0, candidate.sequences - running),
        "slots_busy": running - stuck,
        "slots_stuck": stuck,
        "context_tokens": candidate.context_tokens,
        "predicted": {
            "total_bytes": sum(card.total_bytes for card in candidate.cards),
            "cards": [asdict(card) for card in candidate.cards],
            "speed": asdict(candidate.predicted),
        },
        "actual": {
            "private_bytes": supervisor.watch.private_bytes(replica.id),
            "resident_bytes": _resident_bytes(pids),
            "card_held_bytes": replica.cards.held_bytes,
            "terms": [asdict(check) for check in replica.memory_checks],
        },
        "degraded_from": _degraded_from(replica),
        "log": str(replica.log_path),
    }


def _loading(replica: Replica) -> dict[str, Any] | None:
    """How far a load is; None unless it loads. `fraction` is None where neither its log nor its memory tells."""
    load = replica.load
    if load is None or replica.state is not State.LOADING:
        return None
    return {
        "fraction": load.state.fraction,
        "seconds": time.monotonic() - load.started_s,
        "deadline_s": load.deadline_s,
        "resident_bytes": load.state.resident_bytes,
        "read_bytes": load.state.read_bytes,
    }


def _degraded_from(replica: Replica) -> dict[str, Any] | None:
    """The plan that the file asks for, where a smaller one runs after out of memory."""
    if not replica.rungs:
        return None
    asked = replica.asked_spec
    return {
        "path": str(asked.path),
        "context_tokens": asked.candidate.context_tokens,
        "sequences": asked.candidate.sequences,
        "batch_tokens": asked.candidate.batch_tokens,
        "gpu_memory_fraction": asked.candidate.gpu_memory_fraction,
        "total_bytes": sum(card.total_bytes for card in asked.candidate.cards),
        "steps": [asdict(rung) for rung in replica.rungs],
    }


def _resident_bytes(pids: Sequence[int]) -> int | None:
    """Resident memory of the engine and all it forked; shared pages (the mapped model) count once for each."""
    import psutil  # not for a start, which has nothing to tell yet

    total = 0
    for each in pids:
        try:
            total += psutil.Process(each).memory_info().rss
        except psutil.Error:
            return None
    return total or None
