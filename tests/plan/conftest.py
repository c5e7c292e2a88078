"""Plans of tests go by nothing that was measured on the machine they run on."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMARACK_STATE_DIR", str(tmp_path / "state"))
