"""Cards by name, hardware records, gpu-split files: what is read, and how a bad one is refused."""

import dataclasses
import json
import math
import re

import pytest

from llamarack.errors import ConfigError, HardwareError, UsageError
from llamarack.hardware.machine import LinkKind
from llamarack.plan.catalogue import catalogue, find_card, machine_of
from llamarack.plan.devices import card_of
from llamarack.plan.gpu_split import read_gpu_split
from llamarack.plan.machine_file import read_machine
from llamarack.units import GIB, MIB

ARTICLE = """\
# gpu-split.yaml
model_path: /data/models/llama-2-13b-chat.Q8_0.gguf
main_gpu: 0
split_ratio: [0.5, 0.5]  # two cards of 24 GB
context_length: 4096
batch_size: 512
threads: 8
"""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("RTX 4090 x2", ["NVIDIA GeForce RTX 4090"] * 2),
        ("rtx4090x2", ["NVIDIA GeForce RTX 4090"] * 2),
        ("RTX 3090 x2 + A100-80 x1", ["NVIDIA GeForce RTX 3090"] * 2 + ["NVIDIA A100-SXM4-80GB"]),
        ("H200", ["NVIDIA H200"]),
        ("4090", ["NVIDIA GeForce RTX 4090"]),
        ("2 x 4090", ["NVIDIA GeForce RTX 4090"] * 2),
        ("8x H200", ["NVIDIA H200"] * 8),
        ("NVIDIA A100 80GB PCIe", ["NVIDIA A100 80GB PCIe"]),
        ("T4, L4", ["Tesla T4", "NVIDIA L4"]),
    ],
)
def test_cards_are_found_by_name_and_counted(text, names):
    assert [card.name for card in machine_of(text).cards] == names


def test_cards_of_one_kind_have_their_link_and_mixed_ones_pcie():
    assert {link.kind for card in machine_of("H200 x2").cards for link in card.links} == {LinkKind.NVLINK}
    assert {link.kind for card in machine_of("H200 + A100").cards for link in card.links} == {LinkKind.PCIE_HOST}


def test_unknown_card_is_refused_with_the_nearest_names():
    with pytest.raises(UsageError, match="no card `RTX 4900`") as caught:
        machine_of("RTX 4900 x2")
    assert "RTX 4090" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["", "H200 +", "H200 x0", "L4 x65", "L4 x999999999"])
def test_senseless_list_of_cards_is_refused(text):
    with pytest.raises(UsageError, match="--gpus"):
        machine_of(text)


def test_catalogue_names_are_unambiguous_and_sourced():
    keys = [name for card in catalogue() for name in {card.name, *card.aliases}]
    assert len(keys) == len(set(keys))
    for card in catalogue():
        assert find_card(card.name) is card
        assert all(find_card(alias) is card for alias in card.aliases)
        assert card.source
        assert (card.memory_usable_bytes or 0) < card.memory_total_bytes


def test_hardware_record_is_read_back_whole_or_as_a_part(tmp_path):
    there = machine_of("RTX 3090 x2 + A100-80")
    record = dataclasses.asdict(there)
    part, whole = tmp_path / "part.json", tmp_path / "whole.json"
    part.write_text(json.dumps(record))
    whole.write_text(json.dumps({"schema_version": 1, "hardware": {**record, "new_key": 1}, "findings": []}))
    assert read_machine(part) == there
    assert read_machine(whole) == there


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a hardware record"),
        ('{"hardware": {"cards": [{"index": 0}]}}', "host"),
    ],
)
def test_bad_hardware_record_is_refused_with_how_to_make_one(tmp_path, text, words):
    path = tmp_path / "hardware.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        read_machine(path)
    assert "check --json" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"index": 1}, "`cards[1].index`: must be 0 or more and of one card only, 1 given"),
        ({"index": -3}, "`cards[0].index`"),
        ({"memory_total_bytes": 0}, "`cards[0].memory_total_bytes`: must be from 1"),
        ({"memory_free_bytes": 2**60}, "`cards[0].memory_free_bytes`: must be from 0 to"),
        ({"memory_bandwidth_bytes_per_s": math.inf}, "`cards[0].memory_bandwidth_bytes_per_s`: must be over 0"),
        ({"fp16_flops_per_s": 0.0}, "`cards[0].fp16_flops_per_s`: must be over 0"),
    ],
)
def test_card_that_cannot_be_is_refused_with_its_bound(tmp_path, change, words):
    machine = machine_of("H200 x2")
    odd = dataclasses.replace(machine, cards=(dataclasses.replace(machine.cards[0], **change), machine.cards[1]))
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(dataclasses.asdict(odd)))
    with pytest.raises(UsageError, match=re.escape(words)):
        read_machine(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"cores_usable": 0}, "`host.cores_usable`"), ({"memory_available_bytes": -1}, "`host.memory_available_bytes`")],
)
def test_host_that_cannot_be_is_refused(tmp_path, change, words):
    machine = machine_of("H200")
    path = tmp_path / "hardware.json"
    path.write_text(
        json.dumps(dataclasses.asdict(dataclasses.replace(machine, host=dataclasses.replace(machine.host, **change))))
    )
    with pytest.raises(UsageError, match=words):
        read_machine(path)


def test_record_of_more_cards_than_a_server_holds_is_refused(tmp_path):
    machine = machine_of("T4")
    path = tmp_path / "hardware.json"
    cards = tuple(dataclasses.replace(machine.cards[0], index=index) for index in range(65))
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(machine, cards=cards))))
    with pytest.raises(UsageError, match="at most 64, 65 given"):
        read_machine(path)


def test_missing_hardware_record_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_machine(tmp_path / "not-there.json")


def test_articles_file_becomes_a_group(tmp_path):
    path = tmp_path / "gpu-split.yaml"
    path.write_text(ARTICLE)
    found = read_gpu_split(path, sequences=2)
    group = found.group
    assert str(found.path) == "/data/models/llama-2-13b-chat.Q8_0.gguf"
    assert (group.engine, group.split_mode, group.gpus, group.tensor_split) == (
        "llamacpp",
        "layer",
        [0, 1],
        [0.5, 0.5],
    )
    limits = group.limits
    assert (limits.context_tokens, limits.batch_tokens, limits.threads, limits.sequences) == (4096, 512, 8, 2)
    assert any("main_gpu has no effect" in note for note in found.notes)


def test_ratio_of_memory_sizes_is_scaled_and_said(tmp_path):
    path = tmp_path / "gpu-split.yaml"
    path.write_text("model_path: m.gguf\nsplit_ratio: [80, 24]\n")
    found = read_gpu_split(path, sequences=1)
    assert found.group.tensor_split == pytest.approx([0.769, 0.231], abs=0.001)
    assert found.path == tmp_path / "m.gguf"
    assert any("scaled to sum to 1" in note for note in found.notes)


def test_one_share_means_one_card_the_main_one(tmp_path):
    path = tmp_path / "gpu-split.yaml"
    path.write_text("model_path: m.gguf\nmain_gpu: 3\n")
    group = read_gpu_split(path, sequences=1).group
    assert (group.gpus, group.split_mode) == ([3], "none")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model_path: m\nsplit_ratios: [1]\n", "split_ratios"),
        ("model_path: m\nsplit_ratio: [0, 0]\n", "shares nothing out"),
        ("model_path: m\nsplit_ratio: [0.5, 0.5]\nmain_gpu: 2\n", "not one of the 2 cards"),
        ("model_path: m\ncontext_length: 0\n", "context_length"),
        ("a: [", "line 1: expected"),
        ("", "gpu-split"),
    ],
)
def test_bad_gpu_split_file_is_refused(tmp_path, text, words):
    path = tmp_path / "gpu-split.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_gpu_split(path, sequences=1)


def test_card_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(HardwareError, match="card `7` is not in this machine") as caught:
        card_of(machine_of("L4 x2"), 7)
    assert "0 (NVIDIA L4), 1 (NVIDIA L4)" in (caught.value.hint or "")


def test_catalogue_leaves_the_host_room_for_what_the_cards_hold():
    there = machine_of("H200 x8")
    assert there.host.memory_total_bytes >= 8 * 143771 * MIB
    assert machine_of("T4").host.memory_total_bytes >= 64 * GIB
