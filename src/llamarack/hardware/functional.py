"""Do the cards work together? Runs the tests in children that can be killed, and reads what they got done.

1. `peer` (no torch): what a CUDA context costs, and a verified copy for each ordered pair, through host memory and
   directly.
2. `data/collective.py` in an interpreter with torch: a matrix product per card, an all-reduce of three sizes.
3. Only where 2 broke with several cards: the same with NCCL_P2P_DISABLE=1, so that the flag is named only on proof.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from llamarack.hardware.machine import Card, Link
from llamarack.hardware.probe import Events, Probe, Status, module_command

_COLLECTIVE_SCRIPT = Path(__file__).parent / "data" / "collective.py"
PEER_DEADLINE_S = 15.0  # 56 pairs of 8 cards, twice, take a few seconds; the rest is for waking cards
COLLECTIVE_DEADLINE_S = 25.0  # importing torch from a cold disk takes most of it


class Outcome(StrEnum):
    OK = "ok"
    WRONG = "wrong data"
    HUNG = "hung"
    FAILED = "failed"
    NOT_REACHED = "not reached"  # something before it hung, or the time was up before the test began


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """A copy from one card to another, by card index. `direct`: without going through host memory."""

    source_index: int
    target_index: int
    direct: bool
    outcome: Outcome
    bandwidth_bytes_per_s: float | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceResult:
    size_bytes: int
    seconds: float
    correct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """`outcome`: of the all-reduce as a whole. `matrix_wrong_ranks`: whose product is not the processor's."""

    backend: str
    world: int
    outcome: Outcome
    reduces: tuple[ReduceResult, ...] = ()
    matrix_wrong_ranks: tuple[int, ...] = ()
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Functional:
    """None: not run. `without_p2p`: the all-reduce again with NCCL_P2P_DISABLE=1, where the first one broke."""

    card_indices: tuple[int, ...] = ()  # of ranks 0, 1, ...
    pairs: tuple[PairResult, ...] = ()
    context_bytes: Mapping[int, int] | None = None  # card index -> memory of a bare CUDA context
    peer_detail: str | None = None
    collective: Collective | None = None
    without_p2p: Collective | None = None


def run_functional(cards: Sequence[Card], interpreter: str | None, *, ends_monotonic_s: float) -> Functional:
    """`interpreter`: one with torch, or None. Without cards two processes add up over gloo."""
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if cards:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(card.uuid or str(card.index) for card in cards)
    peer = _run(module_command("peer"), environment, PEER_DEADLINE_S, ends_monotonic_s) if cards else None
    pairs = pair_results(peer, cards) if peer else ()
    contexts = {cards[event["card"]].index: event["context_bytes"] for event in peer.named("context")} if peer else None
    collective = without_p2p = None
    if interpreter is not None:
        backend, world = ("nccl", len(cards)) if cards else ("gloo", 2)
        command = [interpreter, str(_COLLECTIVE_SCRIPT), backend, str(world)]
        collective = collective_of(_run(command, environment, COLLECTIVE_DEADLINE_S, ends_monotonic_s), backend, world)
        if world > 1 and backend == "nccl" and collective.outcome not in (Outcome.OK, Outcome.NOT_REACHED):
            again = _run(command, environment | {"NCCL_P2P_DISABLE": "1"}, COLLECTIVE_DEADLINE_S, ends_monotonic_s)
            without_p2p = collective_of(again, backend, world)
    return Functional(
        card_indices=tuple(card.index for card in cards),
        pairs=pairs,
        context_bytes=contexts or None,
        peer_detail=peer.detail if peer else None,
        collective=collective,
        without_p2p=without_p2p,
    )


def _run(command: list[str], environment: Mapping[str, str], deadline_s: float, ends_monotonic_s: float) -> Events:
    deadline_s = min(deadline_s, ends_monotonic_s - time.monotonic())
    if deadline_s <= 0:
        return Events(status=Status.HUNG, events=(), detail="no time was left for it")
    try:
        return Probe(command, deadline_s=deadline_s, environment=environment).events()
    except OSError as error:
        return Events(status=Status.FAILED, events=(), detail=str(error))


def pair_results(ran: Events, cards: Sequence[Card]) -> tuple[PairResult, ...]:
    """Pairs in the order they were tried. The pair that was started and never ended is the one that hung."""
    results = []
    for event in ran.named("pair"):
        seconds = event.get("seconds")
        arrived = event.get("arrived")
        results.append(
            PairResult(
                source_index=cards[event["source"]].index,
                target_index=cards[event["target"]].index,
                direct=event["direct"],
                outcome=Outcome.FAILED if arrived is None else Outcome.OK if arrived else Outcome.WRONG,
                bandwidth_bytes_per_s=event["copy_bytes"] / seconds if seconds else None,
                detail=event.get("error"),
            )
        )
    started = ran.named("start")
    if len(started) > len(results):
        last = started[-1]
        results.append(
            PairResult(
                source_index=cards[last["source"]].index,
                target_index=cards[last["target"]].index,
                direct=last["direct"],
                outcome=Outcome.HUNG if ran.status is Status.HUNG else Outcome.FAILED,
                detail=ran.detail,
            )
        )
    return tuple(results)


def collective_of(ran: Events, backend: str, world: int) -> Collective:
    """Time and correctness per size over all ranks: the slowest rank's time, right only where all are right."""
    sizes = dict.fromkeys(event["size_bytes"] for event in ran.named("reduce"))
    reduces = []
    for size_bytes in sizes:
        events = [event for event in ran.named("reduce") if event["size_bytes"] == size_bytes]
        if len(events) == world:
            seconds = max(event["seconds"] for event in events)
            correct = all(event["correct"] for event in events)
            reduces.append(ReduceResult(size_bytes=size_bytes, seconds=seconds, correct=correct))
    return Collective(
        backend=backend,
        world=world,
        outcome=_collective_outcome(ran, reduces),
        reduces=tuple(reduces),
        matrix_wrong_ranks=tuple(event["rank"] for event in ran.named("matrix") if not event["correct"]),
        detail=ran.detail,
    )


def _collective_outcome(ran: Events, reduces: Sequence[ReduceResult]) -> Outcome:
    if not all(result.correct for result in reduces):
        return Outcome.WRONG
    if ran.status is Status.OK and ran.named("done"):
        return Outcome.OK
    if ran.status is Status.HUNG:
        # Before the cards have computed, the time went into starting torch, which says nothing about the links.
        return Outcome.HUNG if ran.named("matrix") else Outcome.NOT_REACHED
    return Outcome.FAILED


def bus_rate(result: ReduceResult, world: int) -> float:
    """Bytes per second over one card's link: an all-reduce moves 2 (n-1)/n of the message each way."""
    return 2 * (world - 1) / world * result.size_bytes / result.seconds if result.seconds else 0.0


def slowest_link(cards: Sequence[Card]) -> Link | None:
    links = [link for card in cards for link in card.links if link.bandwidth_bytes_per_s is not None]
    return min(links, key=lambda link: link.bandwidth_bytes_per_s or 0.0, default=None)
