"""Random faults over three fake engines and a real one: no request is lost that had not begun, and nothing leaks.

Two minutes of it here; `LLAMARACK_CHAOS_S=1800` runs the long form (`make proof-chaos`), 0 none. The same seed gives
the same order of faults; `LLAMARACK_CHAOS_SEED` chooses another, `LLAMARACK_CHAOS_RESULT` names a file for the result.
"""

import asyncio
import dataclasses
import gc
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from llamarack.config import Deployment, parse
from llamarack.engine import ADAPTORS
from llamarack.errors import ModelError
from llamarack.hardware.detect import detect_machine
from llamarack.hardware.host import read_host
from llamarack.model.demo import demo_model
from llamarack.model.read import read_model
from llamarack.paths import cache_dir
from llamarack.supervise.admin import ask
from llamarack.supervise.change import Outcome as Ended
from llamarack.supervise.layout import lay_out
from llamarack.supervise.preparing import Prepared
from llamarack.supervise.replica_record import ReplicaSpec
from llamarack.supervise.supervisor import Supervisor
from tests import fake_rack
from tests.fake_adaptor import fake_plan_again, fake_spec
from tests.supervise.asking import many
from tests.supervise.chaos import Chaos
from tests.supervise.conftest import RunningRack, left_of, processes_of, until_http_ready

pytestmark = [pytest.mark.process, pytest.mark.llamacpp]
LASTS_S = float(os.environ.get("LLAMARACK_CHAOS_S", "120"))
SEED = int(os.environ.get("LLAMARACK_CHAOS_SEED", "20261130"))
RESULT = os.environ.get("LLAMARACK_CHAOS_RESULT")
ASKERS = 4
# A hang is found after half of it and a question of 10 s; the rest is for two busy cores.
STUCK_S = 40.0
_SETTLES_S = 120.0
_MOST_AFTERWARDS = 40


class _ChaosRack(Supervisor):
    """Lays the same four engines out again, whatever is asked for: what an operator's `reload --restart` needs."""

    def __init__(self, deployment: Deployment, layout: Sequence[ReplicaSpec], folder: Path) -> None:
        super().__init__(deployment, layout, fake_rack.paths_in(folder), planner=fake_plan_again)
        self._layout = layout

    async def prepare(self, deployment: Deployment) -> Prepared:
        return Prepared(deployment=deployment, specs=self._layout)


def _real_spec() -> ReplicaSpec:
    """One real llama.cpp on a small model, under the same name as the fakes, so that requests go to either."""
    try:
        path = demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    limits = {"context_tokens": 256, "sequences": 4, "threads": 1}
    row = {"name": "fake", "path": str(path), "gpus": [], "limits": limits}
    deployment = parse(json.dumps({"models": [row]})).deployment
    (spec,) = lay_out(deployment, detect_machine(), {path: read_model(path)})
    assert spec.adaptor is ADAPTORS["llamacpp"]
    return dataclasses.replace(spec, id="real-0", start_deadline_s=120.0)


def _rack_in(folder: Path) -> RunningRack:
    faults: dict[str, Any] = {"token_interval_s": 0.01, "load_s": 0.05, "grandchild": True}
    specs = [fake_spec(f"fake-{number}", folder, **faults) for number in range(3)]
    settings = {
        "models": [{"name": "fake", "path": str(folder / "fake.gguf"), "replicas": 4, "gpus": []}],
        "gateway": {"port": 0, "max_queue_s": 120},
        "supervise": {
            "drain_s": 20,
            "stuck_request_s": STUCK_S,
            "sample_s": 0.5,
            "restarts": {"max": 100_000, "window_s": 600},
        },
    }
    supervisor = _ChaosRack(parse(json.dumps(settings)).deployment, [*specs, _real_spec()], folder)
    # The growing wait after a death is another test's business.
    supervisor.restarts = dataclasses.replace(supervisor.restarts, longest_wait_s=0.05)
    return RunningRack(supervisor)


def _descriptors(rack: RunningRack) -> dict[str, int]:
    """Of those that outlive every fault here: the supervisor (this process) and the gateway."""
    gc.collect()
    (gateway,) = rack.supervisor.gateways.children.values()
    assert gateway.pid is not None
    return {"supervisor": psutil.Process().num_fds(), "gateway": psutil.Process(gateway.pid).num_fds()}


async def _replace_every_engine(rack: RunningRack) -> None:
    """What an operator does who does not trust engines that went through this: `llamarack reload --restart`.

    A fake that was told to break its streams keeps that order as long as it lives.
    """
    await rack.until_ready(within_s=_SETTLES_S)
    await rack.supervisor.reload(rack.supervisor.deployment, restart=True)
    change = rack.supervisor.change
    assert change is not None
    async with asyncio.timeout(_SETTLES_S):
        await change.done.wait()
    assert change.outcome is Ended.DONE, change.record()
    record = await ask(rack.supervisor.paths, {"op": "status"})
    replicas = [replica for model in record["models"] for replica in model["replicas"]]
    assert [(each["state"], each["generation"], each["restarts"]) for each in replicas] == [("ready", 2, 0)] * 4
    assert [worker["connected"] for worker in record["gateway"]["workers"]] == [True]
    await until_http_ready(rack.url)


@pytest.mark.fault(
    "random faults, one after the other", "no request lost that had not begun; no process, socket or descriptor left"
)
async def test_no_request_is_lost_that_had_not_begun_and_nothing_leaks(tmp_path: Path) -> None:
    if not LASTS_S:
        pytest.skip("minutes of random faults: make proof-chaos, or LLAMARACK_CHAOS_S=120 for two minutes")
    rack = _rack_in(tmp_path)
    chaos = Chaos(rack, random.Random(SEED))
    rack.supervisor.journal.on_entry.append(chaos.take)
    await rack.start()
    try:
        await rack.until_ready(within_s=_SETTLES_S)
        await until_http_ready(rack.url)
        assert {outcome.fault for outcome in await many(rack.url, _MOST_AFTERWARDS, tokens=3)} == {None}
        descriptors, processes = _descriptors(rack), processes_of(tmp_path)
        began = time.monotonic()
        ends = began + LASTS_S
        await asyncio.gather(chaos.strike_until(ends), *(chaos.ask_until(ends) for _ in range(ASKERS)))
        lasted_s = time.monotonic() - began
        print(f"\nseed {SEED}: {chaos.answered} answered, {chaos.broken} broken in mid-stream, {len(chaos.lost)} lost")
        print(f"faults {dict(chaos.done)}\ndeaths {dict(chaos.deaths)}", flush=True)

        await _replace_every_engine(rack)
        afterwards = await many(rack.url, _MOST_AFTERWARDS, tokens=3)
        descriptors_after, processes_after = _descriptors(rack), processes_of(tmp_path)
    finally:
        await rack.stop()
    left = left_of(tmp_path)

    if RESULT is not None:
        result = {
            "seed": SEED,
            "seconds": round(lasted_s),
            "streams": ASKERS,
            "faults": dict(sorted(chaos.done.items())),
            "deaths_by_cause": dict(sorted(chaos.deaths.items())),
            "requests": chaos.answered + chaos.broken + len(chaos.lost),
            "answered": chaos.answered,
            "broken_in_mid_stream": chaos.broken,
            "lost_before_they_began": len(chaos.lost),
            "failed_afterwards": sum(outcome.fault is not None for outcome in afterwards),
            "descriptors": {"before": descriptors, "after": descriptors_after},
            "processes": {"before": len(processes), "after": len(processes_after)},
            "left_after_the_stop": left,
            "machine": {"processor": read_host().processor, "cores_usable": read_host().cores_usable},
        }
        Path(RESULT).write_text(json.dumps(result, indent=2) + "\n")
    assert chaos.lost == []
    assert chaos.answered > LASTS_S
    assert len(chaos.done) == len(chaos.faults()) or LASTS_S < 60
    assert [outcome.fault for outcome in afterwards] == [None] * _MOST_AFTERWARDS
    for owner, count in descriptors.items():
        assert descriptors_after[owner] <= count + 4, owner  # links and looks that are open for the moment
    assert len(processes_after) == len(processes), processes_after
    assert not left
