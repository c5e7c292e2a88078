"""A file that people edit is never lost to a command that writes it again."""

import errno
import os
from pathlib import Path

import pytest

from llamarack.cli.written import write_kept
from llamarack.errors import UsageError


def test_what_was_edited_is_kept_beside_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "rack.yaml"
    assert write_kept(path, "a: 1\n") is None
    assert write_kept(path, "a: 1\n") is None
    path.write_text("a: 2  # mine\n")
    assert write_kept(path, "a: 1\n") == tmp_path / "rack.yaml.bak"
    assert path.read_text() == "a: 1\n"
    assert (tmp_path / "rack.yaml.bak").read_text() == "a: 2  # mine\n"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["rack.yaml", "rack.yaml.bak"]


def test_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rack.yaml"
    path.write_text("old")

    def full(self: Path, *_: object, **__: object) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_kept(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_folder_and_missing_folder_are_named_with_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        write_kept(tmp_path, "a")
    with pytest.raises(UsageError, match="its folder is not there") as caught:
        write_kept(tmp_path / "a" / "b" / "rack.yaml", "a")
    assert caught.value.hint == f"mkdir -p {tmp_path}/a/b"
