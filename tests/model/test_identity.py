import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from llamarack.hardware.finding import Finding, Severity
from llamarack.model.check import check_identity
from llamarack.model.identity import Evidence, judge, weights_family
from llamarack.model.read import read_model
from llamarack.model.spec import ModelSpec, TokenizerIdentity
from llamarack.model.tokenizer import Family, canonical_bytes, families, family_of
from tests import gguf_files
from tests.gguf_files import F16, LLAMA2, SMALL, write_llama
from tests.huggingface_files import edit_json, sentencepiece, tokenizer_json, write_tiny_huggingface
from tests.tiny_model import vocabulary, write_tiny_llama

BY_NAME = {family.name: family for family in families()}
LLAMA_2, LLAMA_3, MISTRAL = BY_NAME["LLaMA-1/2"], BY_NAME["LLaMA-3"], BY_NAME["Mistral-7B v0.1"]
CODE, CHINESE = BY_NAME["CodeLlama"], BY_NAME["Chinese-LLaMA-2"]


def _identity(family: Family, **changes: Any) -> TokenizerIdentity:
    """What an honest file of this family says."""
    return dataclasses.replace(
        TokenizerIdentity(
            kind=family.kind,
            pre=family.pre[0],
            vocab_size=family.vocab_size,
            sha256=family.sha256 or "0" * 64,
            bos_id=family.bos_id,
            eos_id=family.eos_ids[0],
            add_bos=family.add_bos,
            known_as=family.name,
        ),
        **changes,
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_model(write_llama(tmp_path_factory.mktemp("m") / "m.gguf"))


def _weights(small: ModelSpec, rows: int, shape: tuple[int, int, int] = (4096, 11008, 32)) -> ModelSpec:
    hidden, feed_forward, layers = shape
    return dataclasses.replace(
        small, vocab_size=rows, hidden_size=hidden, layers=layers, feed_forward_sizes=(feed_forward,) * layers
    )


def _judge(spec: ModelSpec, tokenizer: TokenizerIdentity, **more: Any) -> dict[str, Finding]:
    evidence: dict[str, Any] = {"chat_template": "{{ messages }}", "pieces": {}, "is_gguf": True} | more
    return {f.code: f for f in judge(Evidence(spec=spec, tokenizer=tokenizer, subject="m.gguf", **evidence))}


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_each_family_with_its_own_tokenizer_is_clean(small: ModelSpec, family: Family) -> None:
    shape = family.shapes[0] if family.shapes else (4096, 11008, 32)
    hidden, feed_forward, layers = shape
    assert _judge(_weights(small, family.vocab_size, (hidden, feed_forward, layers)), _identity(family)) == {}


@pytest.mark.parametrize(
    ("rows", "shape", "tokenizer", "code", "told"),
    [
        (32000, (4096, 11008, 32), LLAMA_3, "tokenizer_beyond_embedding", "LLaMA-3"),
        (32000, (4096, 11008, 32), CODE, "tokenizer_beyond_embedding", "CodeLlama"),
        (32000, (4096, 11008, 32), CHINESE, "tokenizer_beyond_embedding", "Chinese-LLaMA-2"),
        (32000, (4096, 11008, 32), MISTRAL, "tokenizer_other_family", "Mistral"),
        (32000, (4096, 14336, 32), LLAMA_2, "tokenizer_other_family", "Mistral"),
        (32016, (4096, 11008, 32), LLAMA_2, "tokenizer_smaller_than_embedding", "CodeLlama"),
        (55296, (4096, 11008, 32), LLAMA_2, "tokenizer_smaller_than_embedding", "Chinese-LLaMA-2"),
        (128256, (4096, 14336, 32), LLAMA_2, "tokenizer_smaller_than_embedding", "LLaMA-3"),
    ],
)
def test_tokenizer_of_another_family_is_an_error_that_names_it(
    small: ModelSpec, rows: int, shape: tuple[int, int, int], tokenizer: Family, code: str, told: str
) -> None:
    findings = _judge(_weights(small, rows, shape), _identity(tokenizer))
    assert findings[code].severity == Severity.ERROR
    assert told in findings[code].seen
    assert findings[code].fix


def test_unknown_tokenizer_beyond_the_embedding_is_told_by_its_size(small: ModelSpec) -> None:
    findings = _judge(_weights(small, 32000), _identity(LLAMA_3, sha256="3" * 64))
    assert "as many as LLaMA-3" in findings["tokenizer_beyond_embedding"].seen


def test_added_pad_token_without_a_row_is_an_error(small: ModelSpec) -> None:
    tokenizer = _identity(LLAMA_2, vocab_size=32001, sha256="1" * 64, pad_id=32000)
    findings = _judge(_weights(small, 32000), tokenizer)
    assert "added pad token" in findings["tokenizer_beyond_embedding"].seen
    assert findings["pad_beyond_embedding"].severity == Severity.ERROR


def test_added_pad_token_with_its_row_is_only_unknown(small: ModelSpec) -> None:
    tokenizer = _identity(LLAMA_2, vocab_size=32001, sha256="1" * 64, pad_id=32000)
    assert {f.severity for f in _judge(_weights(small, 32001), tokenizer).values()} == {Severity.NOTE}


def test_embedding_padded_for_the_hardware_is_clean(small: ModelSpec) -> None:
    assert _judge(_weights(small, 32064), _identity(LLAMA_2)) == {}
    assert "tokenizer_smaller_than_embedding" in _judge(_weights(small, 40000), _identity(LLAMA_2))


def test_unknown_tokenizer_is_a_note(small: ModelSpec) -> None:
    findings = _judge(_weights(small, 30000), _identity(LLAMA_2, vocab_size=30000, sha256="2" * 64))
    assert [finding.severity for finding in findings.values()] == [Severity.NOTE]


@pytest.mark.parametrize(
    ("changes", "code", "severity"),
    [
        ({"bos_id": 0}, "bos_wrong", Severity.ERROR),
        ({"eos_id": 1}, "eos_wrong", Severity.ERROR),
        ({"eos_id": 32000}, "eos_beyond_embedding", Severity.ERROR),
        ({"add_bos": False}, "add_bos_wrong", Severity.WARNING),
        ({"add_eos": True}, "add_eos_wrong", Severity.WARNING),
        ({"kind": "gpt2", "pre": "llama-bpe"}, "tokenizer_wrong_kind", Severity.ERROR),
    ],
)
def test_policy_of_an_old_conversion_is_found(
    small: ModelSpec, changes: dict[str, Any], code: str, severity: Severity
) -> None:
    assert _judge(_weights(small, 32000), _identity(LLAMA_2, **changes))[code].severity == severity


@pytest.mark.parametrize(
    ("pre", "severity"),
    [(None, Severity.WARNING), ("default", Severity.WARNING), ("qwen2", Severity.ERROR)],
)
def test_wrong_pre_of_byte_level_bpe_names_the_right_one(small: ModelSpec, pre: str | None, severity: Severity) -> None:
    spec = _weights(small, 128256, (4096, 14336, 32))
    finding = _judge(spec, _identity(LLAMA_3, pre=pre))["pre_wrong"]
    assert finding.severity == severity
    assert "llama-bpe" in finding.fix
    assert "pre_wrong" not in _judge(spec, _identity(LLAMA_3, pre=None), is_gguf=False)


def test_template_with_marks_the_tokenizer_lacks_is_a_warning(small: ModelSpec) -> None:
    spec, template = _weights(small, 32000), "{{ '<|im_start|>' + messages[0].content }}"
    finding = _judge(spec, _identity(LLAMA_2), chat_template=template)["chat_template_foreign"]
    assert "<|im_start|>" in finding.seen
    assert not _judge(spec, _identity(LLAMA_2), chat_template=template, pieces={"<|im_start|>": 5})


def test_template_of_llama_2_on_llama_3_is_a_warning(small: ModelSpec) -> None:
    spec = _weights(small, 128256, (4096, 14336, 32))
    pieces = {"<|start_header_id|>": 128006}
    findings = _judge(spec, _identity(LLAMA_3), chat_template="[INST] {{ messages }} [/INST]", pieces=pieces)
    assert "chat_template_foreign" in findings
    assert not _judge(spec, _identity(LLAMA_3), chat_template="<|start_header_id|>", pieces=pieces)


def test_missing_template_is_a_note_and_missing_tokenizer_an_error(small: ModelSpec) -> None:
    assert (
        _judge(_weights(small, 32000), _identity(LLAMA_2), chat_template=None)["chat_template_missing"].severity
        == "note"
    )
    findings = _judge(_weights(small, 32000), _identity(LLAMA_2, vocab_size=None))
    assert {code: f.severity for code, f in findings.items()} == {"tokenizer_missing": Severity.ERROR}


def test_weights_of_llama2_sizes_are_known_by_shape(small: ModelSpec) -> None:
    for shape in LLAMA2.values():
        assert (
            weights_family(_weights(small, 32000, (shape["hidden"], shape["feed_forward"], shape["layers"]))) == LLAMA_2
        )
    assert weights_family(_weights(small, 32000, (64, 96, 2))) is None


def test_known_hashes_are_unique() -> None:
    hashes = [value for family in families() for value in (family.sha256, *family.file_sha256) if value]
    assert len(hashes) == len(set(hashes))
    assert all(len(value) == 64 and int(value, 16) for value in hashes)
    assert family_of(LLAMA_2.sha256) == LLAMA_2
    assert family_of(None, [LLAMA_2.file_sha256[0]]) == LLAMA_2


def test_canonical_form_is_what_gguf_stores() -> None:
    pieces = ["<unk>", "▁the", ""]
    assert canonical_bytes(pieces) == b"".join(gguf_files.text(piece) for piece in pieces)


def test_own_tokenizer_of_a_tiny_model_is_only_unknown(tmp_path: Path) -> None:
    for path in (write_tiny_llama(tmp_path / "m.gguf"), write_tiny_huggingface(tmp_path / "hf")):
        assert [finding.code for finding in check_identity(read_model(path))] == ["tokenizer_unknown"]


def test_override_tokenizer_is_judged_against_the_weights(tmp_path: Path) -> None:
    spec = read_model(write_tiny_llama(tmp_path / "m.gguf"))
    other = write_tiny_huggingface(tmp_path / "hf")
    assert [finding.code for finding in check_identity(spec, other)] == ["tokenizer_unknown"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer_json([*vocabulary()[0], "<pad>"])))
    codes = [finding.code for finding in check_identity(spec, other / "tokenizer.json")]
    assert codes[0] == "tokenizer_beyond_embedding"
    assert (
        check_identity(spec, write_llama(tmp_path / "big.gguf", {**SMALL, "vocab": 400}, type_id=F16))[0].code
        == codes[0]
    )


def test_tokenizer_files_that_disagree_name_the_first_difference(tmp_path: Path) -> None:
    folder = write_tiny_huggingface(tmp_path / "hf")
    pieces = vocabulary()[0]
    pieces[260], pieces[261] = pieces[261], pieces[260]
    (folder / "tokenizer.model").write_bytes(sentencepiece(pieces))
    findings = {finding.code: finding for finding in check_identity(read_model(folder))}
    assert "id 260 is" in findings["tokenizer_files_disagree"].seen
    assert findings["tokenizer_files_disagree"].severity == Severity.ERROR


@pytest.mark.parametrize(("cut", "code"), [(-1, "tokenizer_files_extended"), (None, "")])
def test_tokenizer_json_may_only_add_to_tokenizer_model(tmp_path: Path, cut: int | None, code: str) -> None:
    folder = write_tiny_huggingface(tmp_path / "hf")
    (folder / "tokenizer.model").write_bytes(sentencepiece(vocabulary()[0][:cut]))
    codes = {finding.code: finding.severity for finding in check_identity(read_model(folder))}
    assert codes == {"tokenizer_unknown": "note"} | ({code: "note"} if code else {})


def test_tiktoken_file_is_not_compared_piece_by_piece(tmp_path: Path) -> None:
    folder = write_tiny_huggingface(tmp_path / "hf")
    (folder / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    assert [finding.code for finding in check_identity(read_model(folder))] == ["tokenizer_unknown"]


def test_special_ids_of_early_conversions_are_read_from_config_json(tmp_path: Path) -> None:
    folder = write_tiny_huggingface(tmp_path / "hf", bos_token_id=0, eos_token_id=[1, 2])
    edit_json(folder / "tokenizer_config.json", bos_token="", eos_token="")
    tokenizer = read_model(folder).tokenizer
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_sentencepiece_file_alone_gives_the_same_identity(tmp_path: Path) -> None:
    folder = write_tiny_huggingface(tmp_path / "hf")
    both = read_model(folder).tokenizer
    (folder / "tokenizer.json").unlink()
    alone = read_model(folder).tokenizer
    assert (alone.sha256, alone.kind, alone.vocab_size) == (both.sha256, both.kind, both.vocab_size)
