"""Two model files, compared: each fault is found, named and placed."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from llamarack.judge.diagnosis import CauseCode
from llamarack.judge.weights import compare_files
from tests.judge.broken_models import (
    requantized,
    with_heads_swapped,
    with_rope_base,
    with_slice_zeroed,
    with_tokens_swapped,
)
from tests.tiny_model import write_tiny_llama


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


def test_files_of_another_form_are_left_alone(model: Path, tmp_path: Path) -> None:
    assert compare_files(model, tmp_path) == ()
