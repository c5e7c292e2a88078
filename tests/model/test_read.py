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


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 13831319808\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize(("content", "message"), [(LFS, "git-lfs pointer"), (b"<html>401", "web page"), (b"", "empty")])
def test_file_of_a_folder_that_never_came_is_named_for_what_lies_there(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    folder = write_tiny_huggingface(tmp_path / "m")
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_model(folder)
    assert str(folder / name) in caught.value.message


def test_tokenizer_model_that_is_a_pointer_is_named(tmp_path: Path) -> None:
    folder = write_tiny_huggingface(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(LFS)
    with pytest.raises(ModelError, match=r"tokenizer\.model` is a git-lfs pointer"):
        read_model(folder)


def test_download_of_meta_itself_is_named_with_the_way_out(tmp_path: Path) -> None:
    for name in ("consolidated.00.pth", "consolidated.01.pth", "params.json", "tokenizer.model"):
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ModelError, match="Meta's own download") as caught:
        read_model(tmp_path)
    assert "-hf" in (caught.value.hint or "")


def test_folder_of_models_names_them(tmp_path: Path) -> None:
    write_tiny_huggingface(tmp_path / "llama-hf")
    (tmp_path / "q8").mkdir()
    write_llama(tmp_path / "q8" / "m.gguf")
    with pytest.raises(ModelError, match=r"models in it: llama-hf, q8/m\.gguf") as caught:
        read_model(tmp_path)
    assert f"`{tmp_path / 'llama-hf'}`" in (caught.value.hint or "")


def test_entry_of_the_hub_cache_names_its_snapshot(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--meta-llama--Llama-2-7b-hf" / "snapshots" / "01c7f73d"
    snapshot.parent.mkdir(parents=True)
    write_tiny_huggingface(snapshot)
    with pytest.raises(ModelError, match="is not a model") as caught:
        read_model(snapshot.parent.parent)
    assert caught.value.hint == f"name one: `{snapshot}`"


def test_safetensors_without_a_config_ask_for_the_small_files(tmp_path: Path) -> None:
    folder = write_tiny_huggingface(tmp_path / "m")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_model(folder)
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_model(folder / "model.safetensors")


def test_file_of_a_huggingface_folder_means_the_folder(tmp_path: Path) -> None:
    folder = write_tiny_huggingface(tmp_path / "m")
    assert read_model(folder / "config.json") == read_model(folder / "model.safetensors") == read_model(folder)
