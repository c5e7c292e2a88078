"""What a rack's last start tells the next to load at once, and every reason not to."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llamarack.hardware.loadlock import PATH_VARIABLE, LoadLock
from llamarack.paths import RackPaths, make_private, rack_paths
from llamarack.supervise.ahead import Ahead, forget, remember, take_ahead
from llamarack.supervise.rack_lock import RackLock


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RackPaths:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "load.lock"))
    paths = rack_paths("r", tmp_path / "s")
    for folder in (paths.folder, paths.sockets, paths.folder / "replicas" / "m-0"):
        make_private(folder)
    return paths


@pytest.fixture
def worker(tmp_path: Path) -> list[str]:
    python, program = tmp_path / "python", tmp_path / "worker.py"
    python.touch()
    program.touch()
    return [str(python), "-P", str(program)]


def _remember(paths: RackPaths, worker: list[str], tmp_path: Path, needs_bytes: int = 1000) -> Path:
    model, options = tmp_path / "m.gguf", paths.folder / "replicas" / "m-0" / "llamacpp.json"
    model.write_bytes(b"GGUF")
    options.write_text('{"n_ctx": 512}')
    remember(paths, "m-0", [*worker, str(options)], model, needs_bytes)
    return options


def test_last_start_tells_what_to_load_with_the_lock_held_and_a_key_of_its_own(
    paths: RackPaths, worker: list[str], tmp_path: Path
) -> None:
    options = _remember(paths, worker, tmp_path)
    stale = paths.engine_socket("m-0")
    stale.touch()
    options.write_text("overwritten since")
    ahead = take_ahead(paths, "m-0", worker)
    assert ahead is not None
    assert ahead.options == '{"n_ctx": 512}'
    assert not ahead.is_asked_for(ahead.argv)
    options.write_text('{"n_ctx": 512}')
    assert ahead.is_asked_for(ahead.argv)
    assert not ahead.is_asked_for([*ahead.argv[:-1], str(tmp_path / "other.json")])
    assert not stale.exists()
    assert not LoadLock().try_acquire()
    ahead.lock.release()
    second = take_ahead(paths, "m-0", worker)
    assert second is not None
    assert second.key != ahead.key
    second.lock.release()


def _touch_model(paths: RackPaths, tmp_path: Path) -> None:
    os.utime(tmp_path / "m.gguf", ns=(1, 1))


def _no_model(paths: RackPaths, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").unlink()


def _other_interpreter(paths: RackPaths, tmp_path: Path) -> None:
    (tmp_path / "python").write_text("newer")


def _supervisor_died(paths: RackPaths, tmp_path: Path) -> None:
    paths.state.write_text("{}")


def _open_folder(paths: RackPaths, tmp_path: Path) -> None:
    paths.sockets.chmod(0o755)


def _no_folder(paths: RackPaths, tmp_path: Path) -> None:
    paths.sockets.rmdir()


def _forgotten(paths: RackPaths, tmp_path: Path) -> None:
    forget(paths, "m-0")


def _damaged(paths: RackPaths, tmp_path: Path) -> None:
    (paths.folder / "replicas" / "m-0" / "ahead.json").write_text("{")


def _other_version(paths: RackPaths, tmp_path: Path) -> None:
    file = paths.folder / "replicas" / "m-0" / "ahead.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": 0}))


@pytest.mark.parametrize(
    "change",
    [
        *(_touch_model, _no_model, _other_interpreter, _supervisor_died, _open_folder, _no_folder, _forgotten),
        *(_damaged, _other_version),
    ],
)
def test_nothing_is_loaded_ahead_once_anything_has_changed(
    paths: RackPaths, worker: list[str], tmp_path: Path, change: Callable[[RackPaths, Path], None]
) -> None:
    _remember(paths, worker, tmp_path)
    change(paths, tmp_path)
    assert take_ahead(paths, "m-0", worker) is None
    assert _is_free()


def test_nothing_is_loaded_ahead_without_room_beside_another_load_or_beside_a_rack_that_runs(
    paths: RackPaths, worker: list[str], tmp_path: Path
) -> None:
    _remember(paths, worker, tmp_path, needs_bytes=2**50)
    assert take_ahead(paths, "m-0", worker) is None
    _remember(paths, worker, tmp_path)
    running = RackLock(paths.lock)
    running.take("r")
    assert take_ahead(paths, "m-0", worker) is None
    running.drop()
    with LoadLock():
        assert take_ahead(paths, "m-0", worker) is None
    assert take_ahead(paths, "m-0", [worker[0], "-P", "/elsewhere/worker.py"]) is None
    assert take_ahead(paths, "m-1", worker) is None
    assert _is_free()
    ahead = take_ahead(paths, "m-0", worker)
    assert isinstance(ahead, Ahead)
    ahead.lock.release()


def _is_free() -> bool:
    lock = LoadLock()
    is_free = lock.try_acquire()
    lock.release()
    return is_free
