import json
import math
from pathlib import Path

import pytest

from llamarack.hardware import environment, probe
from tests.hardware.recorded import write_tree

GPU_INFORMATION = "Model: \t NVIDIA H200\nBus Location: \t 0000:1b:00.0\nDevice Minor: \t {}\n"


def read(root: Path, variables: dict[str, str] | None = None) -> environment.Environment:
    return environment.read_environment(root, variables or {}, affinity=frozenset(range(8)))


def test_environment_keeps_only_variables_that_choose_or_join_cards(tmp_path: Path) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "", "NCCL_P2P_DISABLE": "1", "API_KEY": "secret", "GGML_CUDA_P2P": "0"}
    assert read(tmp_path, variables).variables == {name: variables[name] for name in variables if name != "API_KEY"}


def test_device_nodes_of_every_card_the_driver_names_are_looked_for(tmp_path: Path) -> None:
    tree = {f"proc/driver/nvidia/gpus/0000:{bus}:00.0/information": GPU_INFORMATION.format(minor)
            for bus, minor in (("1b", 0), ("43", 3))}  # fmt: skip
    write_tree(tmp_path, tree | {"dev/nvidia0": "", "dev/nvidiactl": ""})
    expected = {"nvidia0": "ok", "nvidia3": "missing", "nvidiactl": "ok", "nvidia-uvm": "missing"}
    assert read(tmp_path).device_nodes == expected


def test_machine_without_nvidia_driver_lacks_no_nodes(tmp_path: Path) -> None:
    assert read(tmp_path).device_nodes == {}


@pytest.mark.parametrize(
    ("command", "engine"),
    [
        ("/usr/bin/ollama\0runner\0--port\x0041234", "ollama"),
        ("/opt/venv/bin/python3.12\0/opt/venv/bin/vllm\0serve\0m", "vllm"),
        ("python\0-m\0vllm.entrypoints.openai.api_server", "vllm"),
        ("VLLM::EngineCore", "vllm"),
        ("./llama-server\0-m\0x.gguf", "llama.cpp"),
        ("/usr/bin/vim\0/home/me/ollama notes", None),
        ("grep\0vllm serve", None),
        ("bash\0-c\0sleep 1", None),
    ],
)
def test_engines_are_known_by_their_program_not_by_words_in_arguments(
    tmp_path: Path, command: str, engine: str | None
) -> None:
    write_tree(tmp_path, {"proc/4100001/cmdline": command, "proc/4100001/comm": "x"})
    assert [found.engine for found in read(tmp_path).engines] == ([engine] if engine else [])


def test_fabric_manager_and_switches_are_seen(tmp_path: Path) -> None:
    assert (read(tmp_path).nvswitch_present, read(tmp_path).fabric_manager_running) == (False, False)
    tree = {
        "sys/bus/pci/devices/0000:83:00.0/vendor": "0x10de",
        "sys/bus/pci/devices/0000:83:00.0/class": "0x068000",
        "proc/900/cmdline": "/usr/bin/nv-fabricmanager\0-c\0x.cfg",
    }
    write_tree(tmp_path, tree)
    assert (read(tmp_path).nvswitch_present, read(tmp_path).fabric_manager_running) == (True, True)


@pytest.mark.parametrize(("kind", "translates"), [("DMA-FQ", True), ("DMA", True), ("identity", False)])
def test_iommu_counts_where_a_card_sits_in_a_translating_group(tmp_path: Path, kind: str, translates: bool) -> None:
    folder = "sys/bus/pci/devices/0000:1b:00.0"
    write_tree(tmp_path, {f"{folder}/class": "0x030200"})
    assert read(tmp_path).iommu_translates is None
    write_tree(tmp_path, {f"{folder}/iommu_group/type": kind})
    assert read(tmp_path).iommu_translates is translates


def test_numa_nodes_are_those_of_the_cores_this_process_may_use(tmp_path: Path) -> None:
    nodes = {0: "0-3,16", 1: "4-7", 2: "8-15"}
    write_tree(tmp_path, {f"sys/devices/system/node/node{node}/cpulist": text for node, text in nodes.items()})
    assert read(tmp_path).numa_nodes_usable == (0, 1)


@pytest.mark.process
def test_this_machine_s_environment_survives_its_journey_as_json() -> None:
    answer = probe.ask(probe.module_command("environment"), deadline_s=20)
    record = environment.from_json(json.loads(json.dumps(answer.values)))
    assert record.open_files > 0
    assert record.open_files_hard <= math.inf
    assert record.numa_nodes_usable == environment.read_environment().numa_nodes_usable
