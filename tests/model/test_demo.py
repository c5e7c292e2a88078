"""The demo model's file: fetched by one of several that start at once."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from llamarack.model.demo import FILE_NAME, SIZE_BYTES, demo_model
from tests.rigs import DEADLINE_S


def test_who_waits_for_another_ones_download_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # a download of its own would fail
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    told: list[str] = []
    found: list[Path] = []
    asking = threading.Thread(target=lambda: found.append(demo_model(tmp_path, told.append)))
    with open(tmp_path / f"{FILE_NAME}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        asking.start()
        asking.join(0.2)
        assert asking.is_alive()
        with open(tmp_path / FILE_NAME, "wb") as whole:
            os.truncate(whole.fileno(), SIZE_BYTES)
    asking.join(DEADLINE_S)
    assert found == [tmp_path / FILE_NAME]
    assert told == []
