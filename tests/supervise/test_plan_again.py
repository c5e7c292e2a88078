"""Planning one replica anew with less, by the real planner; and fallbacks that could never help are refused at once."""

import json
from pathlib import Path

import pytest

from llamarack.config import Deployment, parse
from llamarack.errors import ConfigError, DoesNotFit
from llamarack.hardware.machine import Card, Host, Machine
from llamarack.model.read import read_model
from llamarack.supervise.degrade import Rung, smaller_plans
from llamarack.supervise.layout import lay_out, plan_again
from llamarack.supervise.replica_record import ReplicaSpec
from llamarack.units import GIB
from tests.tiny_model import write_tiny_llama


def _machine(*, available_gib: float = 8, card_gib: float | None = None) -> Machine:
    host = Host(
        processor="x",
        cores_usable=8,
        instruction_sets=(),
        memory_total_bytes=16 * GIB,
        memory_available_bytes=int(available_gib * GIB),
    )
    cards = []
    if card_gib is not None:
        free = int(card_gib * GIB)
        cards = [
            Card(index=0, uuid="GPU-a", vendor="nvidia", name="X", memory_total_bytes=free, memory_free_bytes=free)
        ]
    return Machine(host=host, cards=tuple(cards))


def _deployment(path: Path, fallbacks: list[Path], **row: object) -> Deployment:
    model = {"name": "m", "path": str(path), "fallbacks": [str(each) for each in fallbacks], **row}
    return parse(json.dumps({"models": [model]})).deployment


def _laid(deployment: Deployment, machine: Machine) -> list[ReplicaSpec]:
    model = deployment.models[0]
    paths = {model.path, *model.fallbacks}
    return lay_out(deployment, machine, {path: read_model(path) for path in paths})


@pytest.fixture
def big(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "big.gguf", layers=4, context=4096)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "small.gguf", layers=2, context=4096)


@pytest.mark.parametrize("card_gib", [None, 4.0])
def test_each_rung_takes_less_memory_on_the_same_cards(big: Path, small: Path, card_gib: float | None) -> None:
    machine = _machine(card_gib=card_gib)
    deployment = _deployment(big, [small], replicas=1 if card_gib else 2)
    spec = first = _laid(deployment, machine)[0]
    taken: list[Rung] = []
    totals = [sum(card.total_bytes for card in spec.candidate.cards)]
    while True:
        ladder = smaller_plans(
            spec.group, spec.path, spec.candidate, taken=taken, fallbacks=[small], cause="out_of_memory"
        )
        step = next(ladder, None)
        if step is None:
            break
        taken.append(step.rung)
        spec = plan_again(
            first,
            step.group,
            step.path,
            machine,
            read_model(step.path),
            deployment.supervise,
            claimed_bytes={},
            is_kv_shared=False,
        )
        totals.append(sum(card.total_bytes for card in spec.candidate.cards))
    assert [rung.setting for rung in taken][:4] == ["batch_tokens", "context_tokens", "sequences", "path"]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)
    assert (spec.id, spec.fingerprint, list(spec.card_uuids)) == (first.id, first.fingerprint, list(first.card_uuids))
    assert spec.candidate.threads == first.candidate.threads  # not all cores, though it is planned alone


def test_plan_without_room_is_refused(big: Path) -> None:
    deployment = _deployment(big, [])
    (spec,) = _laid(deployment, _machine())
    with pytest.raises(DoesNotFit):
        plan_again(
            spec,
            spec.group,
            spec.path,
            _machine(available_gib=0.001),
            read_model(big),
            deployment.supervise,
            claimed_bytes={},
            is_kv_shared=False,
        )


def test_fallback_that_is_not_smaller_is_refused_with_what_to_name(big: Path, small: Path) -> None:
    with pytest.raises(ConfigError, match=r"fallbacks\[0\].*not less than") as caught:
        _laid(_deployment(small, [big]), _machine())
    assert "coarser quantisation" in str(caught.value.hint)


def test_fallback_that_no_engine_of_the_model_reads_is_refused(big: Path, tmp_path: Path) -> None:
    from tests.tiny_model_hf import write_tiny_hf_llama

    folder = write_tiny_hf_llama(tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"fallbacks\[0\].*safetensors, which no engine of this model reads"):
        _laid(_deployment(big, [folder]), _machine())
