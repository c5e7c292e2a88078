"""`verify` on the real engine: sound copies pass, and each negative control is found and named.

The reference is collected once; every candidate is a rack of its own, as a user would have it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from llamarack.cli.verify import question_passes, run_verify
from llamarack.errors import ModelError
from llamarack.judge.collection import CANDIDATE_NAME, REFERENCE_NAME, load
from llamarack.judge.diagnosis import CauseCode
from llamarack.judge.passes import Passes
from llamarack.judge.verdict import judge
from llamarack.judge.verify_result import Bounds, Verdict, VerifyResult
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir
from tests.judge import broken_models as broken

pytestmark = pytest.mark.llamacpp
QUESTIONS = (
    {"id": "en", "language": "en", "prompt": "Explain to a sales team what a force majeure clause is."},
    {"id": "zh", "language": "zh", "prompt": "请解释什么是不可抗力条款。"},
)


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    (folder / "questions.jsonl").write_text("\n".join(json.dumps(one) for one in QUESTIONS))
    return folder


def passes(home: Path, *, load_streams: int) -> Passes:
    return question_passes(str(home / "questions.jsonl"), None, output_tokens=16, load_streams=load_streams)


def rack(home: Path, name: str, model: Path, more: str = "") -> str:
    file = home / f"{name}.yaml"
    # One thread: two spin against whatever else runs on a small machine.
    limits = "{context_tokens: 512, sequences: 4, threads: 1}"
    file.write_text(f"models:\n  - name: {name}\n    path: {model}\n    gpus: []\n    limits: {limits}\n{more}")
    return str(file)


@pytest.fixture(scope="module")
def itself(home: Path, model: Path) -> VerifyResult:
    """The reference with its noise (again, under load, after a restart), and the same deployment as a candidate."""
    file = rack(home, "q4", model)
    result = asyncio.run(run_verify(file, file, passes(home, load_streams=2), folder=_made(home / "itself")))
    assert result is not None
    return result


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def verified(home: Path, name: str, candidate: str) -> VerifyResult:
    saved = str(home / "itself" / REFERENCE_NAME)
    result = asyncio.run(run_verify(saved, candidate, passes(home, load_streams=0), folder=_made(home / name)))
    assert result is not None
    return result


def test_deployment_says_what_it_says(itself: VerifyResult, home: Path) -> None:
    assert itself.verdict in (Verdict.SAME, Verdict.ROUNDING), itself.findings
    assert {drift.factor for drift in itself.drift} >= {"again", "under load", "after a restart", "batching"}
    assert itself.forced is not None
    assert itself.forced.real == 0
    assert itself.causes == ()
    page = (home / "itself" / "report.html").read_text()
    assert str(itself.verdict) in page


def test_chinese_answer_has_every_token_though_the_server_hides_some(itself: VerifyResult, home: Path) -> None:
    chinese = next(one for one in load(home / "itself" / REFERENCE_NAME).greedy if one.question_id == "zh")
    assert len(chinese.ids) == 16 or chinese.finish_reason == "stop"


def test_quantisation_is_drift_put_down_to_it_and_no_fault(itself: VerifyResult, home: Path, model: Path) -> None:
    coarse = broken.requantized(model, home / "coarse.gguf", gguf.GGMLQuantizationType.Q4_0)
    result = verified(home, "coarse", rack(home, "coarse", coarse))
    assert result.verdict is Verdict.DRIFT
    assert result.factors == ("quantisation",)
    assert result.drift[-1].factor == "quantisation"
    assert result.causes == ()


Breaking = Callable[[Path, Path], Path]
CONTROLS: dict[str, tuple[Breaking, CauseCode, str]] = {
    "heads": (
        lambda model, target: broken.with_heads_swapped(model, target, heads=(0, 3), layers=tuple(range(30))),
        CauseCode.ATTENTION_HEADS,
        "head 0 holds the reference's 3",
    ),
    "one-layers-heads": (
        lambda model, target: broken.with_heads_swapped(model, target, heads=(0, 3), layers=(5,)),
        CauseCode.ATTENTION_HEADS,
        "blk.5.attn_q.weight head 0 holds the reference's 3",
    ),
    "zeroed-slice": (
        lambda model, target: broken.with_slice_zeroed(model, target, tensor="blk.10.ffn_down.weight", part=0.5),
        CauseCode.WEIGHTS,
        "blk.10.ffn_down.weight rows 288 to 575 of 576",
    ),
    "rope-base": (
        lambda model, target: broken.with_rope_base(model, target, 10000.0),
        CauseCode.ROTARY,
        "100000 against 10000",
    ),
    "tokenizer": (
        lambda model, target: broken.with_tokens_swapped(model, target),
        CauseCode.TOKENIZER,
        "tokenizer.ggml.tokens",
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_broken_copy_is_found_and_named(itself: VerifyResult, home: Path, model: Path, name: str) -> None:
    breaking, code, evidence = CONTROLS[name]
    result = verified(home, name, rack(home, name, breaking(model, home / f"{name}.gguf")))
    assert result.verdict is Verdict.BROKEN
    assert code in {cause.code for cause in result.causes}
    assert evidence in " ".join(cause.evidence for cause in result.causes)
    # And by behaviour alone, as against an endpoint whose files nobody has.
    reference, candidate = load(home / "itself" / REFERENCE_NAME), load(home / name / CANDIDATE_NAME)
    blind = judge(reference, candidate, bounds=Bounds(), finished_unix_s=time.time())
    assert blind.verdict.exit_code == 6
    assert code in {cause.code for cause in blind.causes}, blind.shape


def test_wrong_chat_template_is_found_and_named(itself: VerifyResult, home: Path, model: Path) -> None:
    result = verified(home, "template", rack(home, "template", model, "    chat_template: llama-2\n"))
    assert result.verdict is Verdict.BROKEN
    assert [cause.code for cause in result.causes] == [CauseCode.CHAT_TEMPLATE]
    assert "[INST]" in result.causes[0].evidence
    assert result.forced is not None
    assert result.forced.real == 0  # made to read the reference's prompt, the weights say the same
