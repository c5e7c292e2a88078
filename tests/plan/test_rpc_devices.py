"""RPC devices in a plan: unequal ones, this computer's own memory behind several, and what limits them."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from llamarack.config import Group, Limits
from llamarack.engine.rpc_devices import with_remotes
from llamarack.errors import ConfigError, HardwareError
from llamarack.hardware.machine import Machine
from llamarack.plan.planner import group_of, plan_group
from llamarack.plan.reference import gguf_spec
from llamarack.units import GIB
from tests.plan.shapes import LLAMA2_7B, h200, machine

LARGE, SMALL = "10.0.0.1:50052", "10.0.0.2:50052"


def _plan(group: Group, there: Machine | None = None):
    there = with_remotes(there or machine(), [(group, None)])
    return plan_group(gguf_spec(LLAMA2_7B, "Q8_0"), group, there, model_name="m", engine_version="b11434")


def _group(*servers: str, **more: object) -> Group:
    values = {"gpus": [], "limits": Limits(context_tokens=4096, sequences=2)} | more
    return Group(rpc_servers=list(servers), **values)  # type: ignore[arg-type]


def test_the_smaller_device_decides_and_is_named():
    even = _plan(_group(f"{LARGE}=80GiB", f"{SMALL}=5GiB", tensor_split=[0.5, 0.5]))
    assert not even.fits
    (reason,) = even.reasons
    assert reason.startswith(f"RPC0 {SMALL} needs")
    dealt = _plan(_group(f"{LARGE}=80GiB", f"{SMALL}=5GiB"))
    assert dealt.fits
    assert dealt.tensor_split is not None
    assert dealt.tensor_split[0] > 0.9
    room = _plan(_group(f"{LARGE}=80GiB", f"{SMALL}=24GiB", tensor_split=[0.5, 0.5]))
    more = _plan(_group(f"{LARGE}=80GiB", f"{SMALL}=48GiB", tensor_split=[0.5, 0.5]))
    assert room.fits
    assert more.fits
    assert room.max_sequences < more.max_sequences
    assert room.max_context_tokens <= more.max_context_tokens


def test_they_stand_before_the_cards_and_the_file_names_only_cards():
    group = _group(f"{SMALL}=24GiB,24GiB", gpus=[1], tensor_split=[0.2, 0.2, 0.6])
    found = _plan(group, machine(h200(0), h200(1)))
    assert [card.name for card in found.cards] == [f"RPC0 {SMALL}", f"RPC1 {SMALL}", "NVIDIA H200"]
    assert found.replica_cards == ((-2, -3, 1),)
    assert group_of(found, group.limits).gpus == [[1]]
    short = _plan(replace(group, tensor_split=[0.5, 0.5]), machine(h200(0), h200(1)))
    assert short.reasons == ("tensor_split has 2 shares for 2 RPC devices and 1 cards",)


def test_processors_of_this_computer_take_of_one_memory():
    """Two servers on loopback that offer this processor: each alone would fit, both do not."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    servers = [f"127.0.0.1:{port}={physical // 1024**2}MiB" for port in (1, 2)]
    there = machine()
    limits = Limits(context_tokens=4096, sequences=1)
    roomy = _plan(_group(*servers, limits=limits, tensor_split=[0.5, 0.5]), there)
    need = sum(card.total_high_bytes for card in roomy.cards)
    tight = Machine(host=_with_memory(there, int(need * 0.8)))
    refused = _plan(_group(*servers, limits=limits, tensor_split=[0.5, 0.5]), tight)
    assert not refused.fits
    assert any("the host's memory has to take" in reason for reason in refused.reasons)
    assert all(card.total_high_bytes < need * 0.8 for card in refused.cards)


def _with_memory(there: Machine, available_bytes: int):
    from dataclasses import replace

    return replace(there.host, memory_available_bytes=available_bytes)


def test_a_server_whose_devices_nobody_knows_is_a_fault_of_the_file():
    group = _group(LARGE)
    with pytest.raises(ConfigError, match=r"the devices of 10\.0\.0\.1:50052 are not known here"):
        plan_group(gguf_spec(LLAMA2_7B, "Q8_0"), group, machine(), model_name="m")
    with pytest.raises(HardwareError, match="no llama-server with RPC is at hand"):
        with_remotes(machine(), [(group, None)])


def test_what_was_kept_of_a_server_may_be_damaged(tmp_path: Path):
    from llamarack.engine.rpc_devices import _read

    path = tmp_path / "rpc-devices.json"
    assert _read(path) == {}
    for damaged in ("", "[]", '{"a": 1}', '{"a": [[1]]}'):
        path.write_text(damaged)
        assert _read(path) == {}
    path.write_text(json.dumps({LARGE: [[24 * GIB, 20 * GIB]]}))
    assert _read(path) == {LARGE: [(24 * GIB, 20 * GIB)]}
