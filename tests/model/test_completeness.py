import hashlib
from pathlib import Path

import pytest

from llamarack.errors import ModelError
from llamarack.model.completeness import check_completeness, read_sums
from llamarack.model.read import read_model
from tests.gguf_files import LLAMA2, write_llama
from tests.huggingface_files import write_sharded
from tests.tiny_model import write_tiny_llama


def _write_sums(folder: Path, files: list[Path], *, mark: str = " ") -> None:
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()} {mark}{file.name}\n" for file in files]
    (folder / "SHA256SUMS").write_text("".join(lines))


def _codes(path: Path, *, checksums: bool = True) -> list[tuple[str, str]]:
    findings = check_completeness(read_model(path), checksums=checksums)
    return [(finding.code, Path(finding.subject).name) for finding in findings]


@pytest.mark.parametrize("mark", [" ", "*"])
def test_file_that_matches_its_sums_is_complete(tmp_path: Path, mark: str) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    _write_sums(tmp_path, [path], mark=mark)
    seen: list[int] = []
    assert check_completeness(read_model(path), progress=seen.append) == ()
    assert sum(seen) == path.stat().st_size


def test_names_in_the_sums_may_begin_with_the_folder(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    _write_sums(tmp_path, [path], mark=" ./")
    assert _codes(path) == []


def test_shard_with_one_flipped_bit_is_the_one_named(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m")
    shards = sorted(folder.glob("*.safetensors"))
    _write_sums(folder, shards)
    content = bytearray(shards[1].read_bytes())
    content[-1] ^= 1
    shards[1].write_bytes(content)
    assert _codes(folder) == [("checksum_wrong", shards[1].name)]
    assert _codes(folder, checksums=False) == []


def test_file_without_a_line_is_a_note(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    (tmp_path / "SHA256SUMS").write_text("# none\n\n")
    assert _codes(path) == [("checksum_missing", "m.gguf")]


def test_sums_in_another_format_are_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "SHA256SUMS"
    path.write_text(f"{'0' * 64}  a\nSHA256 (b) = 00\n")
    with pytest.raises(ModelError, match="line 2"):
        read_sums(path)


def test_file_with_holes_is_a_warning(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", LLAMA2["7b"])
    assert _codes(path) == [("file_has_holes", "m.gguf")]
