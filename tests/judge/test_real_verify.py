"""`verify` on the real engine: sound copies pass, and each negative control is found and named.

The reference is collected once; every candidate is a rack of its own, as a user would have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from llamarack.errors import ModelError
from llamarack.judge.collection import CANDIDATE_NAME, REFERENCE_NAME, load
from llamarack.judge.diagnosis import CauseCode
from llamarack.judge.verdict import judge
from llamarack.judge.verify_result import Bounds, Verdict
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir
from tests.judge import broken_models as broken
from tests.judge.command import Verified, verify, write_questions, write_rack

pytestmark = pytest.mark.llamacpp


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("verify")).parent


@pytest.fixture(scope="module")
def itself(home: Path, model: Path) -> Verified:
    """The reference with its noise (again, under load, after a restart), and the same deployment as a candidate."""
    file = write_rack(home, "q4", model)
    return verify(home, file, file, "itself", load_streams=2)


def verified(home: Path, name: str, candidate: Path) -> Verified:
    return verify(home, home / "itself" / REFERENCE_NAME, candidate, name)


def test_deployment_says_what_it_says(itself: Verified, home: Path) -> None:
    assert itself.verdict in ("SAME", "ROUNDING"), itself.record["findings"]
    assert itself.exit_code == 0
    assert {one["factor"] for one in itself.record["drift"]} >= {"again", "under load", "after a restart", "batching"}
    assert itself.record["forced"]["real"] == 0
    assert itself.cause_codes == []
    assert itself.verdict in (home / "itself" / "report.html").read_text()


def test_chinese_answer_has_every_token_though_the_server_hides_some(itself: Verified, home: Path) -> None:
    chinese = next(one for one in load(home / "itself" / REFERENCE_NAME).greedy if one.question_id == "zh")
    assert len(chinese.ids) == 16 or chinese.finish_reason == "stop"


def test_q4_against_f16_is_drift_put_down_to_quantisation_and_no_fault(home: Path, model: Path) -> None:
    """The numbers of the demo model at 16 bits, against the same cut to 4."""
    whole = broken.requantized(model, home / "f16.gguf", gguf.GGMLQuantizationType.F16)
    coarse = broken.requantized(model, home / "q4-0.gguf", gguf.GGMLQuantizationType.Q4_0)
    files = write_rack(home, "f16", whole), write_rack(home, "q4-0", coarse)
    result = verify(home, *files, "q4-against-f16", restart=False)
    assert (result.verdict, result.exit_code) == ("DRIFT", 6)
    assert result.record["factors"] == ["quantisation"]
    assert result.record["drift"][-1]["factor"] == "quantisation"
    assert result.cause_codes == []


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
def test_broken_copy_is_found_and_named(itself: Verified, home: Path, model: Path, name: str) -> None:
    breaking, code, evidence = CONTROLS[name]
    result = verified(home, name, write_rack(home, name, breaking(model, home / f"{name}.gguf")))
    assert (result.verdict, result.exit_code) == ("BROKEN", 6)
    assert code in result.cause_codes
    assert evidence in result.evidence
    # And by behaviour alone, as against an endpoint whose files nobody has.
    reference, candidate = load(home / "itself" / REFERENCE_NAME), load(home / name / CANDIDATE_NAME)
    blind = judge(reference, candidate, bounds=Bounds(), finished_unix_s=time.time())
    assert blind.verdict.exit_code == 6
    assert code in {cause.code for cause in blind.causes}, blind.shape


def test_wrong_chat_template_is_found_and_named(itself: Verified, home: Path, model: Path) -> None:
    result = verified(home, "template", write_rack(home, "template", model, chat_template="llama-2"))
    assert (result.verdict, result.exit_code) == (Verdict.BROKEN, 6)
    assert result.cause_codes == [CauseCode.CHAT_TEMPLATE]
    assert "[INST]" in result.evidence
    assert result.record["forced"]["real"] == 0  # made to read the reference's prompt, the weights say the same
