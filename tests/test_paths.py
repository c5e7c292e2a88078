"""Each folder follows the most specific word given for it."""

from pathlib import Path

import pytest

from llamarack.paths import cache_dir, install_folder, rack_paths

_NAMES = (
    "LLAMARACK_STATE_DIR", "LLAMARACK_LOG_DIR", "LLAMARACK_CACHE_DIR", "RUNTIME_DIRECTORY", "LOGS_DIRECTORY",
    "CACHE_DIRECTORY", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME",
)  # fmt: skip


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/u")


def test_state_follows_option_variable_service_session_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert rack_paths("r").folder == Path("/home/u/.local/state/llamarack/racks/r")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert rack_paths("r").folder == tmp_path / "llamarack" / "racks" / "r"
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/llamarack-r:/run/other")
    assert rack_paths("r").folder == Path("/run/llamarack-r/racks/r")
    monkeypatch.setenv("LLAMARACK_STATE_DIR", "/srv/state")
    assert rack_paths("r").folder == Path("/srv/state/racks/r")
    assert rack_paths("r", Path("/given")).folder == Path("/given/racks/r")


def test_logs_lie_beside_the_state_unless_they_were_given_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rack_paths("r", Path("/given")).logs == Path("/given/racks/r/logs")
    monkeypatch.setenv("LOGS_DIRECTORY", "/var/log/llamarack-r")
    assert rack_paths("r", Path("/given")).logs == Path("/var/log/llamarack-r/r")
    monkeypatch.setenv("LLAMARACK_LOG_DIR", "/srv/logs")
    assert rack_paths("r", Path("/given")).log_of("m-0") == Path("/srv/logs/r/m-0.log")


def test_downloads_go_into_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == Path("/home/u/.cache/llamarack")
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/llamarack-r")
    assert cache_dir() == Path("/var/cache/llamarack-r")
    monkeypatch.setenv("LLAMARACK_CACHE_DIR", "/srv/cache")
    assert cache_dir() == Path("/srv/cache")


def test_this_is_no_offline_install_without_its_mark() -> None:
    assert install_folder() is None
