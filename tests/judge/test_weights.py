"""Two model files, compared: each fault is found, named and placed."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from llamarack.judge.diagnosis import CauseCode
from llamarack.judge.weights import compare_files
from tests.judge import broken_folders as folders
from tests.judge.broken_models import (
    requantized,
    with_heads_swapped,
    with_rope_base,
    with_slice_zeroed,
    with_tokens_swapped,
)
from tests.tiny_model import write_tiny_llama
from tests.tiny_model_hf import write_tiny_hf_llama, write_tiny_quantized


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", layers=4)


def test_equal_files_have_no_cause(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    assert compare_files(model, copy) == ()


def test_another_quantisation_alone_is_no_fault(model: Path, tmp_path: Path) -> None:
    assert compare_files(model, requantized(model, tmp_path / "q.gguf", gguf.GGMLQuantizationType.Q8_0)) == ()


def test_swapped_heads_are_named_with_layer_and_places(model: Path, tmp_path: Path) -> None:
    broken = with_heads_swapped(model, tmp_path / "b.gguf", heads=(0, 2), layers=(1, 3))
    (cause,) = compare_files(model, broken)
    assert cause.code is CauseCode.ATTENTION_HEADS
    assert "blk.1.attn_q.weight head 0 holds the reference's 2, 2 holds the reference's 0" in cause.evidence
    assert "blk.3.attn_q.weight" in cause.evidence
    assert "blk.0" not in cause.evidence


def test_zeroed_slice_is_named_with_its_rows(model: Path, tmp_path: Path) -> None:
    broken = with_slice_zeroed(model, tmp_path / "b.gguf", tensor="blk.2.ffn_down.weight", part=0.25)
    (cause,) = compare_files(model, broken)
    assert cause.code is CauseCode.WEIGHTS
    assert "blk.2.ffn_down.weight rows 48 to 63 of 64" in cause.evidence


def test_fault_is_found_between_two_quantisations(model: Path, tmp_path: Path) -> None:
    broken = with_slice_zeroed(model, tmp_path / "b.gguf", tensor="blk.2.ffn_down.weight", part=0.5)
    other = requantized(broken, tmp_path / "q.gguf", gguf.GGMLQuantizationType.Q8_0)
    (cause,) = compare_files(model, other)
    assert "blk.2.ffn_down.weight rows 32 to 63 of 64" in cause.evidence


def test_header_faults_are_named_with_both_values(model: Path, tmp_path: Path) -> None:
    (rotary,) = compare_files(model, with_rope_base(model, tmp_path / "r.gguf", 500000.0))
    assert rotary.code is CauseCode.ROTARY
    assert "`rope.freq_base`: 10000 against 500000" in rotary.evidence
    (tokens,) = compare_files(model, with_tokens_swapped(model, tmp_path / "t.gguf", first=259))
    assert tokens.code is CauseCode.TOKENIZER


def test_files_of_another_form_are_left_alone(model: Path, folder: Path, tmp_path: Path) -> None:
    assert compare_files(model, tmp_path) == ()
    assert compare_files(model, folder) == ()
    assert compare_files(folder, tmp_path / "gone") == ()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hf_llama(tmp_path_factory.mktemp("folder") / "tiny-hf")


Q_PROJ = "model.layers.{}.self_attn.q_proj.weight"


def test_equal_folders_have_no_cause_nor_has_another_type_of_numbers(folder: Path, tmp_path: Path) -> None:
    assert compare_files(folder, folder) == ()
    assert compare_files(folder, folders.in_bfloat16(folder, tmp_path / "bf16")) == ()


def test_swapped_heads_of_a_folder_are_named_with_layer_and_places(folder: Path, tmp_path: Path) -> None:
    broken = folders.with_heads_swapped(folder, tmp_path / "b", heads=(0, 2), layers=(1, 3))
    (cause,) = compare_files(folder, broken)
    assert cause.code is CauseCode.ATTENTION_HEADS
    assert f"{Q_PROJ.format(1)} head 0 holds the reference's 2, 2 holds the reference's 0" in cause.evidence
    assert Q_PROJ.format(3) in cause.evidence
    assert Q_PROJ.format(0) not in cause.evidence


def test_zeroed_slice_of_a_folder_is_named_also_between_two_types(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    broken = folders.with_slice_zeroed(folder, tmp_path / "b", tensor=name, part=0.25)
    for candidate in (broken, folders.in_bfloat16(broken, tmp_path / "bf16")):
        (cause,) = compare_files(folder, candidate)
        assert cause.code is CauseCode.WEIGHTS
        assert f"{name} rows 96 to 127 of 128" in cause.evidence


def test_settings_of_a_folder_are_named_with_both_values(folder: Path, tmp_path: Path) -> None:
    (rotary,) = compare_files(folder, folders.with_rope_base(folder, tmp_path / "r", 500000.0))
    assert rotary.code is CauseCode.ROTARY
    assert "`rope_theta`: 10000 against 500000" in rotary.evidence
    (tokens,) = compare_files(folder, folders.with_tokens_swapped(folder, tmp_path / "t", first=5))
    assert tokens.code is CauseCode.TOKENIZER
    assert "`vocab`" in tokens.evidence
    (template,) = compare_files(folder, folders.with_chat_template(folder, tmp_path / "c", "{{ messages }}"))
    assert template.code is CauseCode.CHAT_TEMPLATE


def test_packed_matrices_are_compared_as_they_are_stored(tmp_path: Path) -> None:
    gptq = write_tiny_quantized(tmp_path / "gptq", "gptq")
    name = "model.layers.1.self_attn.q_proj.qweight"
    (cause,) = compare_files(gptq, folders.with_slice_zeroed(gptq, tmp_path / "b", tensor=name, part=0.5))
    assert cause.code is CauseCode.WEIGHTS
    assert f"{name} rows 8 to 15 of 16" in cause.evidence
