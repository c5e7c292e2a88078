"""Where vLLM's processes meet: in the replica's own folder, and nothing of a killed start is left there."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarack.engine.vllm import rpc_folder
from llamarack.paths import SOCKET_PATH_MAX_BYTES


@pytest.fixture
def short() -> Iterator[Path]:
    """pytest's own folders may be too long for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:
        yield Path(folder) / "rpc"


def test_a_start_finds_its_folder_empty_and_private(short: Path) -> None:
    assert rpc_folder(short) == {"VLLM_RPC_BASE_PATH": str(short)}
    (short / "0ab6bea9-ea00-4e24-8910-aed31a3ec8a8").touch()
    rpc_folder(short)
    assert list(short.iterdir()) == []
    assert short.stat().st_mode & 0o777 == 0o700


def test_too_long_a_path_is_left_to_vllm(short: Path) -> None:
    longest = SOCKET_PATH_MAX_BYTES - len("/0ab6bea9-ea00-4e24-8910-aed31a3ec8a8")
    fits = short.parent / ("x" * (longest - len(os.fsencode(short.parent)) - 1))
    assert rpc_folder(fits)
    assert rpc_folder(fits.with_name(fits.name + "x")) == {}
