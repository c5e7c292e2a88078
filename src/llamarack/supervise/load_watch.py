"""Looks at a load until it is over: samples it, tells when it is slow and why, ends it when its time is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from llamarack.errors import NeverReady
from llamarack.hardware.host import read_host
from llamarack.supervise.journal import Journal
from llamarack.supervise.loading import Load, read_state, slow_causes
from llamarack.supervise.log_tail import read_tail
from llamarack.supervise.replica_record import ReplicaSpec
from llamarack.units import format_duration


def look_at(load: Load, spec: ReplicaSpec, pid: int | None, log: Path, log_from_bytes: int, journal: Journal) -> None:
    """`pid`: of the engine; `log_from_bytes`: where its part of the log begins.

    Raises NeverReady with the causes when the time is over.
    """
    now = time.monotonic()
    if load.is_due(now):
        load.take(
            read_state(
                pid,
                log,
                now_monotonic_s=now,
                fraction=spec.adaptor.load_fraction(read_tail(log, log_from_bytes)),
                weights_bytes=load.weights_bytes,
                on_cards=bool(spec.card_uuids),
            )
        )
    is_over = load.is_over(now)
    if not is_over and (load.is_slow_told or not load.is_slow(now)):
        return
    causes = "; ".join(_why_slow(load, spec.path))
    if is_over:
        raise NeverReady(
            f"not ready within {format_duration(load.deadline_s)}" + (f": {causes}" if causes else ""),
            hint="supervise.start_deadline in seconds allows more; the log tells how far it came",
        )
    load.is_slow_told = True
    done = "" if load.state.fraction is None else f", {100 * load.state.fraction:.0f} % done"
    journal.warn(
        "start_slow",
        f"loading for {format_duration(now - load.started_s)}{done}" + (f": {causes}" if causes else ""),
        replica=spec.id,
        hint=f"it may take {format_duration(load.deadline_s)}",
    )


def _why_slow(load: Load, model: Path) -> Sequence[str]:
    from llamarack.hardware.disk import file_system_of

    return slow_causes(load, time.monotonic(), file_system=file_system_of(model), host=read_host())
