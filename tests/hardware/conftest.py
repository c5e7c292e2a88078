"""NVIDIA's libraries as stand-ins in C, built once per run: the programs under test load them as the real ones."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for LD_LIBRARY_PATH with `libcuda.so.1` and `libnvidia-ml.so.1`."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-ins of NVIDIA's libraries; install gcc")
    folder = tmp_path_factory.mktemp("nvidia")
    for source, name in (("fake_cuda.c", "libcuda.so.1"), ("fake_nvml.c", "libnvidia-ml.so.1")):
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(folder / name), str(HERE / source)]
        subprocess.run(command, check=True, timeout=60)
    return folder


@pytest.fixture
def order(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Environment of the programs under test; faults are ordered by FAKE_CUDA and FAKE_NVML."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stand_ins))
    return monkeypatch
