import os
from pathlib import Path

import pytest

from llamarack.hardware import disk, probe
from llamarack.units import MIB
from tests.hardware.recorded import write_tree

MOUNTS = (
    "27 1 254:0 / / rw - ext4 /dev/vda rw\n"
    "40 27 0:50 / /data rw - nfs4 server:/export rw\n"
    "41 40 259:1 / /data/local rw - xfs /dev/nvme0n1 rw\n"
    "42 27 0:51 / /my\\040share rw - fuse.sshfs host: rw\n"
)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/m.gguf", "nfs4"),
        ("/data/local/m.gguf", "xfs"),
        ("/datax/m.gguf", "ext4"),
        ("/my share/m.gguf", "fuse.sshfs"),
    ],
)
def test_file_system_is_that_of_the_deepest_mount_above(tmp_path: Path, path: str, kind: str) -> None:
    root = write_tree(tmp_path, {"proc/self/mountinfo": MOUNTS})
    assert disk.file_system_of(Path(path), root) == kind


@pytest.mark.parametrize(("kind", "is_network"), [("nfs4", True), ("9p", True), ("fuse.sshfs", True), ("xfs", False)])
def test_network_file_systems_are_told_from_local_ones(tmp_path: Path, kind: str, is_network: bool) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"x")
    mounts = f"27 1 254:0 / / rw - {kind} source rw\n"
    root = write_tree(tmp_path / "root", {"proc/self/mountinfo": mounts})
    assert disk.read_model_disk(model, root).is_network is is_network


def test_split_gguf_and_folders_count_all_their_weights(tmp_path: Path) -> None:
    parts = [f"m-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    for name in [*parts, "other-00001-of-00002.gguf", "config.json"]:
        (tmp_path / name).write_bytes(b"x" * 10)
    assert disk.read_model_disk(tmp_path / parts[0]).size_bytes == 30
    assert disk.read_model_disk(tmp_path).size_bytes == 40


def test_file_just_written_is_cached_and_dropped_pages_are_not(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(os.urandom(4 * MIB + 1))
    assert disk.cached_fraction(model) == 1
    with model.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dropped = disk.cached_fraction(model)
    if dropped == 1:
        pytest.skip("this file system keeps its pages (tmpfs?); use ext4 or xfs for TMPDIR")
    assert dropped == 0
    assert disk.cached_fraction(model) == 0  # asking fetched nothing
    with model.open("rb") as file:
        file.read(2 * MIB)
    half = disk.cached_fraction(model)
    assert half is not None
    assert half > 0.4  # more where the kernel reads ahead


def test_file_of_another_user_has_an_unknown_share_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"x" * 100)
    model.chmod(0o444)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write to everything
    assert disk.cached_fraction(model) is None


def test_read_is_measured_on_the_file_and_bounded(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(os.urandom(3 * MIB + 17))
    speed, _ = disk.measure_read(model)
    assert speed is not None
    assert speed > 0
    assert disk.measure_read(model, limit_bytes=0)[0] is None


def test_predicted_time_counts_only_what_is_not_cached() -> None:
    record = disk.ModelDisk(
        path="/m",
        size_bytes=1000,
        file_system="xfs",
        is_network=False,
        is_rotational=False,
        free_bytes=1,
        cached_fraction=0.75,
        read_bytes_per_s=10.0,
        read_direct=True,
    )
    assert record.predicted_read_s == 25


@pytest.mark.process
def test_missing_file_is_a_failed_answer() -> None:
    answer = probe.ask(probe.module_command("disk", "/nowhere/m.gguf"), deadline_s=20)
    assert answer.status is probe.Status.FAILED
    assert "FileNotFoundError" in str(answer.detail)


@pytest.mark.parametrize("size", [1, MIB, 3 * MIB + 1, 1500 * MIB, 5000 * MIB, 140 * 1024 * MIB])
def test_windows_reach_from_the_start_to_the_end_of_a_file(size: int) -> None:
    windows = disk._windows(size)
    assert windows[0] == 0
    assert windows[-1] < size
    assert size - windows[-1] <= windows.step
    assert len(windows) <= 2048
    assert all(start % os.sysconf("SC_PAGESIZE") == 0 for start in windows)
