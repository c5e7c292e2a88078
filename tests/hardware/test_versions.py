import dataclasses
import sys
import venv
from pathlib import Path

import pytest

from llamarack.hardware import probe, versions
from tests.hardware.test_visible import card


@pytest.mark.parametrize(
    ("cuda", "driver"),
    [("13.0", 580), ("13.1", 580), ("12.9", 525), ("12.0", 525), ("11.8", 520), ("11.7", 450), ("10.2", None)],
)
def test_driver_needed_for_a_cuda_version_is_nvidia_s(cuda: str, driver: int | None) -> None:
    assert versions.driver_needed(cuda) == driver


@pytest.mark.parametrize(
    ("capability", "cuda", "known"),
    [
        ((9, 0), "11.8", True),
        ((9, 0), "11.7", False),
        ((10, 0), "12.4", False),
        ((12, 0), "12.8", True),
        ((7, 0), "12.9", True),
        ((7, 0), "13.0", False),
        ((7, 5), "13.0", True),
        (None, "13.0", True),
    ],
)
def test_build_knows_cards_between_its_first_and_last(
    capability: tuple[int, int] | None, cuda: str, known: bool
) -> None:
    some_card = dataclasses.replace(card(0, "GPU-1"), compute_capability=capability)
    assert versions.is_known_to(cuda, some_card) is known


@pytest.mark.process
def test_own_interpreter_has_llama_cpp_and_says_its_devices() -> None:
    answer = probe.ask(versions.installed_command(), deadline_s=30)
    builds = versions.builds_of(answer.values, sys.executable)
    (llama,) = [build for build in builds if build.engine == "llamacpp"]
    assert llama.version
    assert llama.gpu_devices is not None


@pytest.mark.process
def test_torch_in_another_interpreter_is_read_without_importing_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    for name, version in (("torch", "2.11.0+cu130"), ("vllm", "0.25.1")):
        (site / f"{name}-{version}.dist-info").mkdir()
        (site / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text("raise SystemExit('imported')\n")
    (site / "torch/version.py").write_text("from typing import Optional\ncuda: Optional[str] = '13.0'\n")
    interpreter = str(tmp_path / "env/bin/python")
    (build,) = versions.builds_of(probe.ask(versions.installed_command(interpreter), deadline_s=30).values, interpreter)
    assert (build.engine, build.version, build.cuda, build.gpu_devices) == ("vllm", "0.25.1", "13.0", None)
    (site / "torch/version.py").write_text("cuda: Optional[str] = None\n")
    (build,) = versions.builds_of(probe.ask(versions.installed_command(interpreter), deadline_s=30).values, interpreter)
    assert build.cuda == "none"


def test_llama_server_device_list_names_gpus_only() -> None:
    listing = (
        "Available devices:\n  CUDA0: NVIDIA H200 (143771 MiB, 143157 MiB free)\n  CPU: Xeon (1 MiB, 1 MiB free)\n"
    )
    assert versions.binary_build(listing, "/opt/llama-server").gpu_devices == ("CUDA0",)
    assert versions.binary_build("Available devices:\n", "/opt/llama-server").gpu_devices == ()
