"""4-bit checkpoints: they answer where the wheel has kernels for the processor, and elsewhere the cause is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamarack.hardware.host import read_host
from tests.tiny_model_hf import write_tiny_quantized
from tests.vllm.conftest import START_TIMEOUT_S, all_ready, model

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_four_bit_checkpoint_answers_or_says_why_not(
    vllm_python: Path, tmp_path: Path, serve: Any, method: str
) -> None:
    path = write_tiny_quantized(tmp_path / f"tiny-{method}", method)
    rack = serve(model("m", path, vllm_python))
    if "avx512f" in read_host().instruction_sets:
        rack.wait_until(all_ready, "ready")
        return
    assert rack.process.wait(timeout=START_TIMEOUT_S) == 5
    assert "no 4-bit kernels for this processor" in rack.output.read_text()
    assert "not started again" in rack.output.read_text()
