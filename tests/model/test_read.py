import os
from pathlib import Path

import pytest

from llamarack.errors import ModelError
from llamarack.model.read import read_model
from tests.gguf_files import write_llama
from tests.huggingface_files import write_tiny_huggingface

FOREIGN = {
    "empty": (b"", "is empty"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n", "git-lfs pointer"),
    "html": (b"\n<!DOCTYPE html><html><body>401</body></html>", "web page"),
    "ggml": (b"lmgg" + bytes(60), "GGML file of 2023"),
    "ggjt": (b"tjgg" + bytes(60), "GGML file of 2023"),
    "zip": (b"PK\x03\x04" + bytes(60), "can run code"),
    "pickle": (b"\x80\x02\x8a\nl\xfc" + bytes(60), "can run code"),
    "json": (b'{"model": 1}', "JSON"),
    "zeros": (bytes(4096), "begins with zeros"),
    "other": (b"\x7fELF" + bytes(60), "not a model"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_file_is_named_for_what_it_is(tmp_path: Path, kind: str) -> None:
    content, message = FOREIGN[kind]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_model(path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_model(tmp_path / "nothing.gguf")


def test_fifo_in_place_of_a_model_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        read_model(tmp_path / "model.gguf")


def test_path_the_system_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: File name too long"):
        read_model(tmp_path / ("x" * 300))


def test_folder_with_one_gguf_is_that_model(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")
    (tmp_path / "mmproj-m.gguf").write_bytes(b"GGUF")
    assert read_model(tmp_path).path == path


def test_folder_with_two_ggufs_asks_which(tmp_path: Path) -> None:
    write_llama(tmp_path / "a.gguf")
    write_llama(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"2 models: a\.gguf, b\.gguf"):
        read_model(tmp_path)


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither"):
        read_model(tmp_path)


def test_file_of_a_huggingface_folder_means_the_folder(tmp_path: Path) -> None:
    folder = write_tiny_huggingface(tmp_path / "m")
    assert read_model(folder / "config.json") == read_model(folder / "model.safetensors") == read_model(folder)
