import json
from pathlib import Path
from typing import Any

import pytest

from llamarack.errors import ModelError
from llamarack.model.sentencepiece import read_pieces
from llamarack.model.tokenizer_files import read_tokenizer
from tests.huggingface_files import edit_json, sentencepiece, tokenizer_json

PIECES = ["<unk>", "<s>", "</s>", "▁a", "▁b"]
BOS = {"SpecialToken": {"id": "<s>", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(PIECES)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return tmp_path


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"type": "TemplateProcessing", "single": [BOS, TEXT]}, (True, False)),
        ({"type": "TemplateProcessing", "single": [TEXT, BOS]}, (False, True)),
        ({"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"single": [BOS, TEXT]}]}, (True, False)),
        ({"type": "ByteLevel"}, (None, None)),
        (None, (None, None)),
    ],
)
def test_bos_policy_is_read_from_the_template_where_nothing_sets_it(
    folder: Path, processor: Any, expected: tuple[Any, Any]
) -> None:
    edit_json(folder / "tokenizer.json", post_processor=processor)
    identity = read_tokenizer(folder).identity
    assert (identity.add_bos, identity.add_eos) == expected
    edit_json(folder / "tokenizer_config.json", add_bos_token=False, add_eos_token=False)
    assert read_tokenizer(folder).identity.add_bos is False


@pytest.mark.parametrize(
    ("settings", "file", "expected"),
    [
        ({}, None, None),
        ({"chat_template": "A"}, None, "A"),
        ({"chat_template": [{"name": "rag", "template": "B"}, {"name": "default", "template": "C"}]}, None, "C"),
        ({"chat_template": "A"}, "D", "D"),
        ({"chat_template": 5}, None, None),
    ],
)
def test_chat_template_is_found_in_each_of_its_places(folder: Path, settings: Any, file: Any, expected: Any) -> None:
    edit_json(folder / "tokenizer_config.json", **settings)
    if file:
        (folder / "chat_template.jinja").write_text(file)
    assert read_tokenizer(folder).chat_template == expected


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ({"type": "BPE", "byte_fallback": True, "vocab": {"a": 0}}, "llama"),
        ({"type": "BPE", "byte_fallback": False, "vocab": {"a": 0}}, "gpt2"),
        ({"type": "WordPiece", "vocab": {"a": 0}}, "bert"),
        ({"type": "Unigram", "vocab": [["a", -1.5]]}, "t5"),
    ],
)
def test_kind_is_named_as_gguf_names_it(folder: Path, model: Any, kind: str) -> None:
    edit_json(folder / "tokenizer.json", model=model, added_tokens=[{"id": 3, "content": "x"}])
    files = read_tokenizer(folder)
    assert files.identity.kind == kind
    assert files.pieces == ("a", "[PAD1]", "[PAD2]", "x")


@pytest.mark.parametrize("vocab", [{}, {"a": -1}, {"a": 10**7}, {"a": "b"}, None])
def test_vocabulary_with_impossible_ids_is_refused(folder: Path, vocab: Any) -> None:
    edit_json(folder / "tokenizer.json", model={"type": "BPE", "vocab": vocab}, added_tokens=[])
    with pytest.raises(ModelError, match="no vocabulary"):
        read_tokenizer(folder)


def test_sentencepiece_pieces_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    pieces = [*PIECES, "long" * 100, ""]
    path.write_bytes(sentencepiece(pieces))
    assert read_pieces(path) == pieces


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x0a\x7f\x0a\x01a", "claims 127 bytes"),
        (b"\x0a\x02\x10\x01", "has no text"),
        (b"\x0a\x03\x0a\x01a\x0b", "wire type 3"),
        (b"\x0a" + b"\xff" * 11, "does not end"),
        (b"\x0a", "cut off"),
        (b"\x0a\x03\x0a\x01\xff", "utf-8"),
    ],
)
def test_damaged_sentencepiece_file_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=message):
        read_pieces(path)


def test_sentencepiece_file_with_too_much_in_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece(PIECES))
    monkeypatch.setattr("llamarack.model.sentencepiece.MAX_PIECES", len(PIECES) - 1)
    with pytest.raises(ModelError, match="more than 4 pieces"):
        read_pieces(path)
    with path.open("r+b") as file:
        file.truncate(2**33)
    with pytest.raises(ModelError, match="the bound is"):
        read_pieces(path)
