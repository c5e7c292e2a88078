"""The cards through the real pynvml over a stand-in of NVIDIA's library: what is seen, told and waited for."""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llamarack.hardware.card_state import CardState, card_states
from llamarack.hardware.machine import CardProcess
from llamarack.supervise.admin import ask
from llamarack.supervise.card_findings import Planned, bound_by, card_findings, only_new
from llamarack.supervise.card_watch import CardWatch
from llamarack.supervise.journal import Journal
from llamarack.supervise.state import State
from llamarack.units import GIB
from tests import fake_rack
from tests.hardware.conftest import order, stand_ins  # noqa: F401 - fixtures
from tests.supervise.conftest import DEADLINE_S, RunningRack
from tests.supervise.faults import Fault

pytestmark = pytest.mark.process
CARD = CardState(
    index=0,
    uuid="GPU-1",
    name="H200",
    memory_total_bytes=140 * GIB,
    memory_used_bytes=100 * GIB,
    processes=(CardProcess(pid=10, memory_bytes=99 * GIB),),
    utilisation_fraction=0.99,
    memory_utilisation_fraction=0.7,
)
OURS = {10: "llama-0"}


def _kinds(card: CardState, before: CardState | None = None, planned_gib: float = 110) -> list[str]:
    planned = Planned(high_bytes=int(planned_gib * GIB))
    return [finding.kind for finding in card_findings(card, before, OURS, planned)]


def test_sound_card_has_no_findings() -> None:
    assert _kinds(CARD, CARD) == []


def test_other_tenant_is_told_with_pid_and_bytes() -> None:
    other = CardProcess(pid=77, memory_bytes=8 * GIB, name="train.py", user="eve")
    card = replace(CARD, processes=(*CARD.processes, other))
    (finding,) = card_findings(card, CARD, OURS, None)
    assert (finding.kind, finding.data["pid"], finding.data["bytes"]) == ("foreign_process", 77, 8 * GIB)
    assert "process 77 (train.py, user eve)" in finding.message
    assert "left alone" in str(finding.hint)


def test_what_a_monitoring_agent_holds_is_no_tenant() -> None:
    assert _kinds(replace(CARD, processes=(*CARD.processes, CardProcess(pid=77, memory_bytes=10 * 1024**2)))) == []


def test_use_beyond_the_plan_throttling_ecc_and_xid_are_told() -> None:
    assert _kinds(CARD, CARD, planned_gib=90) == ["memory_over_plan"]
    assert _kinds(replace(CARD, throttle_reasons=("thermal_hardware",)), CARD) == ["card_throttled"]
    assert _kinds(replace(CARD, ecc_uncorrected=3), replace(CARD, ecc_uncorrected=2)) == ["card_ecc"]
    assert _kinds(replace(CARD, ecc_uncorrected=3), replace(CARD, ecc_uncorrected=3)) == []
    (finding,) = card_findings(replace(CARD, xids=(79,)), CARD, OURS, None)
    assert "Xid 79: the card has fallen off the bus" in finding.message


def test_what_lasts_is_told_once_and_again_when_it_comes_back() -> None:
    known: set[str] = set()
    hot = card_findings(replace(CARD, throttle_reasons=("power_cap",)), CARD, OURS, None)
    assert len(only_new(hot, known)) == 1
    assert only_new(hot, known) == []
    assert only_new([], known) == []
    assert len(only_new(hot, known)) == 1


def test_what_holds_the_work_up_is_told_apart() -> None:
    other = replace(CARD, processes=(*CARD.processes, CardProcess(pid=77, memory_bytes=8 * GIB, name="x")))
    assert bound_by(CARD, 1.0, OURS, has_work=True) == "memory"
    assert bound_by(replace(CARD, memory_utilisation_fraction=0.2), 1.0, OURS, has_work=True) == "compute"
    assert bound_by(replace(CARD, utilisation_fraction=0.3), 1.02, OURS, has_work=True) == "cpu"
    assert bound_by(replace(CARD, utilisation_fraction=0.3), 0.2, OURS, has_work=True) is None
    assert bound_by(other, 1.0, OURS, has_work=True) == "other_tenant"
    assert bound_by(CARD, 1.0, OURS, has_work=False) is None


@pytest.fixture
def life(order: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:  # noqa: F811
    """Writes what the cards do from now on, a line each."""
    path = tmp_path / "cards.txt"
    path.write_text("")
    order.setenv("FAKE_NVML_FILE", str(path))

    def write(*lines: str) -> None:
        partial = path.with_suffix(".new")
        partial.write_text("".join(line + "\n" for line in lines))
        partial.replace(path)

    return write


def _watch(journal: Journal, command: list[str] | None = None) -> CardWatch:
    return CardWatch(
        journal,
        0.05,
        owners=lambda: {4711: "fake-0"},
        planned=lambda: {"GPU-1": Planned(high_bytes=4 * GIB)},
        engine_cores=lambda names: 1.0 if names else None,
        has_work=lambda names: bool(names),
        command=command,
        again_s=0.1,
    )


async def _until(condition: Callable[[], object], journal: Journal) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError([entry.message for entry in journal.recent]) from None


@pytest.mark.fault(
    "other tenant, use beyond the plan, throttling, ECC, Xid", "each told once, with the card and what to do"
)
async def test_real_reader_follows_memory_use_throttling_xids_and_owners(
    life: Callable[..., None], tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    life(f"process 1 4711 {3 * GIB}", "use 1 98 70", "use 2 0 0")
    watch = _watch(journal)
    running = asyncio.create_task(watch.run())
    try:
        await _until(lambda: watch.states, journal)
        first, second = watch.record()
        assert (first["uuid"], first["memory_used_bytes"]) == ("GPU-1", 4 * GIB)
        assert first["memory_by_owner"] == [{"pid": 4711, "replica": "fake-0", "bytes": 3 * GIB}]
        assert (first["utilisation_fraction"], first["memory_utilisation_fraction"]) == (0.98, 0.7)
        assert (first["power_w"], first["sm_clock_hz"], first["bound_by"]) == (350.0, 1.98e9, "memory")
        assert second["bound_by"] is None
        life(
            f"process 1 4711 {5 * GIB}",
            f"process 1 999999 {7 * GIB}",
            "use 1 98 70",
            "throttle 1 64",
            "ecc 1 2",
            "xid 1 79",
        )
        wanted = {"foreign_process", "memory_over_plan", "card_throttled", "card_ecc", "card_xid"}
        await _until(lambda: wanted <= {entry.kind for entry in journal.recent}, journal)
        await asyncio.sleep(0.3)
        assert sorted(entry.kind for entry in journal.recent) == sorted(wanted)  # each once
        foreign = next(entry for entry in journal.recent if entry.kind == "foreign_process")
        assert (foreign.data["pid"], foreign.data["bytes"]) == (999999, 7 * GIB)
        assert watch.record()[0]["xid"] == 79
        assert watch.record()[0]["throttle_reasons"] == ["thermal_hardware"]
        assert watch.record()[0]["history"][0]["memory_used_bytes"] == 4 * GIB
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.fault("NVIDIA's driver stalls", "only a child waits for it; told, serving goes on, asked again")
async def test_driver_that_stalls_is_told_left_behind_and_asked_again(
    life: Callable[..., None], tmp_path: Path, fault: Fault
) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    life("use 1 10 10")
    watch = _watch(journal)
    running = asyncio.create_task(watch.run())
    try:
        await _until(lambda: watch.states, journal)
        life("stall")
        fault.strikes()
        await _until(lambda: "telemetry_stalled" in [entry.kind for entry in journal.recent], journal)
        fault.is_found()
        assert watch.record() == []
        life("use 1 20 10")
        await _until(lambda: watch.states and watch.states[0].utilisation_fraction == 0.2, journal)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_machine_without_cards_is_not_looked_at_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    line = json.dumps({"status": "absent", "detail": "no library", "cards": []})
    watch = _watch(journal, [sys.executable, "-c", f"print({line!r})"])
    await asyncio.wait_for(watch.run(), DEADLINE_S)
    assert list(journal.recent) == []


def test_recorded_reading_becomes_states() -> None:
    record = json.loads((Path(__file__).parents[1] / "hardware/records/h200_x2.json").read_text())
    cards = [
        {
            **{
                name: device[name] for name in ("uuid", "name", "memory", "processes", "temperature_c", "throttle_mask")
            },
            "utilisation_percent": device["utilization_percent"],
            "memory_utilisation_percent": None,
            "power_mw": None,
            "sm_clock_mhz": None,
            "ecc_uncorrected": device["ecc_uncorrected_volatile"],
            "xids": [],
        }
        for device in record["devices"]
    ]
    first, second = card_states({"cards": cards})
    assert first.uuid == record["devices"][0]["uuid"]
    assert first.memory_total_bytes == record["devices"][0]["memory"]["total"]
    assert (first.power_w, second.index) == (None, 1)


@pytest.mark.fault(
    "somebody else's process fills a card before a start",
    "the start waits and names process and bytes; nothing of others is ended",
)
async def test_start_waits_for_a_card_that_somebody_else_fills(
    life: Callable[..., None], tmp_path: Path, fault: Fault
) -> None:
    life(f"process 1 999999 {22 * GIB}")
    supervisor = fake_rack.build(tmp_path, [{}], sample_s=0.1)
    spec = supervisor._specs[0]
    (plan,) = spec.candidate.cards
    plan = replace(plan, index=0, uuid="GPU-1", total_bytes=4 * GIB, total_high_bytes=4 * GIB)
    candidate = replace(spec.candidate, cards=(plan,))
    supervisor._specs[0] = replace(spec, card_uuids=("GPU-1",), candidate=candidate)
    rack = RunningRack(supervisor)
    fault.strikes()
    await rack.start()
    (replica,) = supervisor.replicas
    try:
        await rack.until(lambda: "memory_waits" in rack.kinds())
        fault.is_found()
        told = next(entry.message for entry in supervisor.journal.recent if entry.kind == "memory_waits")
        assert "4.0 GiB are needed" in told
        assert "process 999999 holds 22.0 GiB" in told
        assert replica.state is State.STARTING
        life("use 1 0 0")
        fault.strikes()
        await rack.until_ready()
        fault.is_over()
        cards = (await ask(supervisor.paths, {"op": "status"}))["cards"]
        assert [card["uuid"] for card in cards] in ([], ["GPU-1", "GPU-2"])  # the first look may be due
    finally:
        await rack.stop()


@pytest.mark.fault("the card stays full", "refused with process and bytes")
async def test_start_is_refused_when_the_card_stays_full(life: Callable[..., None], tmp_path: Path) -> None:
    life(f"process 1 999999 {22 * GIB}")
    supervisor = fake_rack.build(tmp_path, [{}, {"start_deadline_s": 1.0}], restarts={"max": 0})
    spec = supervisor._specs[1]
    (plan,) = spec.candidate.cards
    plan = replace(plan, index=0, uuid="GPU-1", total_bytes=4 * GIB, total_high_bytes=4 * GIB)
    candidate = replace(spec.candidate, cards=(plan,))
    supervisor._specs[1] = replace(spec, card_uuids=("GPU-1",), candidate=candidate)
    rack = RunningRack(supervisor)
    await rack.start()
    replica = supervisor.replicas[1]
    try:
        await rack.until(lambda: replica.state is State.FAILED)
        assert replica.last_death is not None
        assert replica.last_death.cause == "memory_not_free"
        assert "process 999999 holds 22.0 GiB" in replica.last_death.message
        assert "nothing of others is ended" in str(replica.last_death.hint)
    finally:
        await rack.stop()
