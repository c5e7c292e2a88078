"""`verify` across engines: vLLM whole against cut into three, llama.cpp against the reference engine, and controls.

All of SmolLM2-135M-Instruct, as Hugging Face weights and as a GGUF made from the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from llamarack.errors import ModelError
from llamarack.judge.collection import CANDIDATE_NAME, REFERENCE_NAME, load
from llamarack.judge.diagnosis import CauseCode
from llamarack.judge.verdict import judge
from llamarack.judge.verify_result import Bounds
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir
from tests.judge import broken_folders as broken
from tests.judge.broken_models import requantized
from tests.judge.command import run_verify, verify, write_questions, write_rack
from tests.vllm.conftest import EAGER, LIMITS

pytestmark = pytest.mark.vllm
# In float32 sums in another order move a log-probability by 1e-5, so nothing but the cut or the engine is seen.


Breaking = Callable[[Path, Path], Path]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("verify")).parent


def on(home: Path, name: str, path: Path, python: Path, engine: str, **settings: Any) -> Path:
    own = {"engine": engine, "engine_python": str(python), "limits": LIMITS} | settings
    return write_rack(home, name, path, **own)


@pytest.fixture(scope="module")
def whole(vllm_python: Path, smollm2: Path, home: Path) -> Callable[[str], Path]:
    """What vLLM in one piece answers in a type of numbers, collected once each."""
    saved: dict[str, Path] = {}

    def collected(dtype: str) -> Path:
        if dtype not in saved:
            file = on(home, f"one-{dtype}", smollm2, vllm_python, "vllm", engine_args=EAGER | {"dtype": dtype})
            run_verify(home, file, None, output=home / f"saved-{dtype}", load_streams=2, restart=False)
            saved[dtype] = home / f"saved-{dtype}" / REFERENCE_NAME
        return saved[dtype]

    return collected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_ranks_say_what_one_says(
    vllm_python: Path, smollm2: Path, home: Path, whole: Callable[[str], Path], dtype: str
) -> None:
    settings = {"engine_args": EAGER | {"dtype": dtype}, "tensor_parallel": 3}
    three = on(home, f"three-{dtype}", smollm2, vllm_python, "vllm", **settings)
    result = verify(home, whole(dtype), three, f"cut-{dtype}", load_streams=2, restart=False)
    assert result.verdict in ("SAME", "ROUNDING"), result.numbers
    assert result.exit_code == 0
    assert result.record["factors"] == ["parallelism"]
    assert result.record["forced"]["real"] == 0
    assert result.cause_codes == []


# Of a base model. With LLaMA-2's the model says nothing at all, and the start is refused.
PLAIN = "{% for one in messages %}{{ one['role'] }}: {{ one['content'] }}\n{% endfor %}assistant:"
SERVED: dict[str, tuple[Breaking, CauseCode, str]] = {
    "tokenizer": (broken.with_tokens_swapped, CauseCode.TOKENIZER, "`vocab`"),
    "chat-template": (
        lambda model, target: broken.with_chat_template(model, target, PLAIN),
        CauseCode.CHAT_TEMPLATE,
        "user: Hello",
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_broken_folder_that_vllm_serves_is_found_and_named(
    vllm_python: Path, smollm2: Path, home: Path, whole: Callable[[str], Path], name: str
) -> None:
    breaking, code, evidence = SERVED[name]
    copy = breaking(smollm2, home / name)
    settings = {"engine_args": EAGER | {"dtype": "bfloat16"}}
    file = on(home, f"{name}-rack", copy, vllm_python, "vllm", **settings)
    result = verify(home, whole("bfloat16"), file, f"control-{name}", restart=False)
    assert (result.verdict, result.exit_code) == ("BROKEN", 6), result.numbers
    assert set(result.cause_codes) == {code}
    assert evidence in result.evidence
    _require_found_blind(home, whole("bfloat16"), f"control-{name}", code)


def _require_found_blind(home: Path, reference: Path, name: str, code: CauseCode) -> None:
    """By what it says alone, as against an endpoint whose files nobody has."""
    candidate = load(home / name / CANDIDATE_NAME)
    blind = judge(load(reference), candidate, bounds=Bounds(), finished_unix_s=time.time())
    assert blind.verdict.exit_code == 6
    assert [cause.code for cause in blind.causes] == [code], blind.shape


@pytest.fixture(scope="module")
def reference(vllm_python: Path, smollm2: Path, home: Path) -> Path:
    """The reference engine's answers, collected once."""
    file = on(home, "reference", smollm2, vllm_python, "transformers", engine_args={"dtype": "float32"})
    run_verify(home, file, None, output=home / "saved", restart=False)
    return home / "saved" / REFERENCE_NAME


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_llamacpp_says_what_the_reference_engine_says(home: Path, reference: Path, kind: str) -> None:
    """The same numbers in a GGUF; at F16 llama.cpp rounds what flows between the matrices too."""
    try:
        source = demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    same = requantized(
        source, home / f"same-{kind}.gguf", gguf.GGMLQuantizationType[kind], through=gguf.GGMLQuantizationType.BF16
    )
    result = verify(home, reference, write_rack(home, f"llamacpp-{kind}", same), f"against-{kind}")
    assert result.verdict in ("SAME", "ROUNDING"), result.record["findings"]
    assert "engine" in result.record["factors"]
    assert result.record["forced"]["real"] == 0
    assert result.cause_codes == []


CONTROLS: dict[str, tuple[Breaking, CauseCode, str]] = {
    "heads": (
        lambda model, target: broken.with_heads_swapped(model, target, heads=(0, 3), layers=(5,)),
        CauseCode.ATTENTION_HEADS,
        "model.layers.5.self_attn.q_proj.weight head 0 holds the reference's 3",
    ),
    "zeroed-slice": (
        lambda model, target: broken.with_slice_zeroed(
            model, target, tensor="model.layers.10.mlp.down_proj.weight", part=0.5
        ),
        CauseCode.WEIGHTS,
        "model.layers.10.mlp.down_proj.weight rows 288 to 575 of 576",
    ),
    "rope-base": (
        lambda model, target: broken.with_rope_base(model, target, 10000.0),
        CauseCode.ROTARY,
        "`rope_theta`: 100000 against 10000",
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_broken_folder_is_found_and_named(
    vllm_python: Path, smollm2: Path, home: Path, reference: Path, name: str
) -> None:
    breaking, code, evidence = CONTROLS[name]
    copy = breaking(smollm2, home / name)
    file = on(home, f"{name}-rack", copy, vllm_python, "transformers", engine_args={"dtype": "float32"})
    result = verify(home, reference, file, f"control-{name}")
    assert (result.verdict, result.exit_code) == ("BROKEN", 6)
    assert set(result.cause_codes) == {code}, result.record["shape"]
    assert evidence in result.evidence
    _require_found_blind(home, reference, f"control-{name}", code)
