"""From collections to verdicts: each verdict from the smallest difference that makes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llamarack.errors import UsageError
from llamarack.judge.collect import NextToken, Probes, TokenizedText
from llamarack.judge.collection import CANDIDATE_NAME, REFERENCE_NAME, Collection, Side, load, save
from llamarack.judge.diagnosis import CauseCode, Shape, weights_cause
from llamarack.judge.facts import Facts
from llamarack.judge.observation import Observation, Position, Ranked, Spoken
from llamarack.judge.verdict import judge
from llamarack.judge.verify_result import Bounds, Verdict, VerifyResult
from llamarack.report.verify import verify_html, verify_markdown
from tests.judge.observed import observed, position, sure

TEXT = "The buyer should inspect the goods within five days of their arrival."
ANSWER = [sure(1, margin=3.0), sure(2, second=3, margin=0.005), sure(4, margin=2.0), sure(5, margin=2.0)]


def collection(answers: list[list[Position]], **more) -> Collection:
    greedy = tuple(observed(a, question_id=f"q{i}", text=TEXT) for i, a in enumerate(answers))
    forced = {"alone": tuple(replace(one, text=None, finish_reason=None) for one in greedy)}
    fields = {"greedy": greedy, "passes": {"again": forced["alone"]}, "forced": forced} | more
    return Collection(
        side=Side(name="rack.yaml", url=None, model="m", facts=fields.pop("facts", Facts())),
        created_unix_s=1_790_000_000.0,
        questions="business-en",
        output_tokens=4,
        top=10,
        method="steps",
        **fields,
    )


def shifted(positions: list[Position], by: float) -> list[Position]:
    """The best token loses `by` nats to all others."""
    return [
        replace(p, top=tuple(sorted(
            (Ranked(r.token_id, r.logprob - (by if r.token_id == p.best_id else 0)) for r in p.top),
            key=lambda one: -one.logprob,
        )))
        for p in positions
    ]  # fmt: skip


def forced_like(reference: list[list[Position]], candidate: list[list[Position]]) -> dict[str, tuple[Observation, ...]]:
    return {
        "alone": tuple(
            observed([replace(c, token_id=r.token_id) for r, c in zip(ours, theirs, strict=True)], question_id=f"q{i}")
            for i, (ours, theirs) in enumerate(zip(reference, candidate, strict=True))
        )
    }


def verdict_of(reference: Collection, candidate: Collection, **more) -> VerifyResult:
    return judge(reference, candidate, bounds=Bounds(), finished_unix_s=1_790_000_001.0, **more)


def test_equal_sides_are_the_same() -> None:
    one = collection([ANSWER, ANSWER])
    result = verdict_of(one, one)
    assert result.verdict is Verdict.SAME
    assert result.verdict.exit_code == 0
    assert result.free_run is not None
    assert result.free_run.exact == 2


def test_flip_at_a_tie_is_rounding() -> None:
    other = [ANSWER[0], sure(3, second=2, margin=0.005), *ANSWER[2:]]
    mine = [ANSWER[0], sure(3, second=2, margin=0.005)]  # its own answer goes another way from there
    candidate = collection([mine], forced=forced_like([ANSWER], [other]))
    result = verdict_of(collection([ANSWER]), candidate)
    assert result.verdict is Verdict.ROUNDING
    assert result.questions[0].divergence is not None
    assert result.questions[0].divergence.index == 1
    assert result.forced is not None
    assert (result.forced.ties, result.forced.real) == (1, 0)


def test_flip_where_the_reference_cared_is_drift() -> None:
    other = [*ANSWER[:2], sure(99, second=4, margin=0.1), ANSWER[3]]
    result = verdict_of(collection([ANSWER]), collection([other], forced=forced_like([ANSWER], [other])))
    assert result.verdict is Verdict.DRIFT
    assert result.verdict.exit_code == 6


def test_noise_of_the_reference_widens_what_counts_as_rounding() -> None:
    other = shifted(ANSWER, 0.3)
    candidate = collection([ANSWER], forced=forced_like([ANSWER], [other]))
    quiet = collection([ANSWER])
    noisy = replace(quiet, passes={"again": forced_like([ANSWER], [shifted(ANSWER, 0.25)])["alone"]})
    assert verdict_of(quiet, candidate).verdict is Verdict.DRIFT
    result = verdict_of(noisy, candidate)
    assert result.verdict is Verdict.ROUNDING
    assert result.noise_nats == pytest.approx(0.25)
    assert result.tie_nats == pytest.approx(0.5)


CALM = [sure(1, margin=5.0), sure(2, second=3, margin=0.005), *(sure(n, margin=5.0) for n in (4, 5, 6))]


def _surer(positions: list[Position], by: float) -> list[Position]:
    """Every best token gains `by` nats on the second."""
    told = [(p.top[0], p.top[1]) for p in positions]
    return [sure(a.token_id, second=b.token_id, margin=a.logprob - b.logprob + by) for a, b in told]


def _with_own_batching(by: float, loaded_by: float) -> VerifyResult:
    """The reference is quiet; the candidate is off by `by` alone and by `loaded_by` beside other requests."""
    passes = {
        name: forced_like([CALM], [_surer(CALM, nats)])["alone"]
        for name, nats in (("alone", by), ("loaded", loaded_by))
    }
    return verdict_of(collection([CALM]), collection([CALM], forced=passes))


def test_what_batching_does_to_the_candidate_counts_as_rounding_too() -> None:
    apart = _with_own_batching(0.0, 0.25)  # no more than sums in another order leave in 16 bits
    assert apart.verdict is Verdict.ROUNDING
    assert apart.noise_nats == 0
    assert apart.tie_nats == pytest.approx(0.2)
    assert "the reference by 0: 0.1 were taken for rounding" in apart.notes[0]


def test_candidate_that_is_steadily_off_finds_no_excuse_in_its_batching() -> None:
    assert _with_own_batching(0.25, 0.25).verdict is Verdict.DRIFT
    assert _with_own_batching(0.0, 0.8).verdict is Verdict.DRIFT  # no rounding is that large


def test_rounding_in_no_pattern_names_no_cause() -> None:
    """vLLM in bfloat16 with three ranks against one: largest where positions cannot matter."""
    assert weights_cause(Shape(uniform=0.0056, alone=0.0010, short=0.0010, long=0.0017)) is None
    rotary = weights_cause(Shape(uniform=0.0023, alone=0.0010, short=0.0052, long=0.012))
    assert rotary is not None
    assert rotary.code is CauseCode.ROTARY


def test_other_distributions_altogether_are_broken() -> None:
    other = [position(p.token_id, {50: 0.9, 51: 0.1}) for p in ANSWER]
    result = verdict_of(collection([ANSWER]), collection([other], forced=forced_like([ANSWER], [other])))
    assert result.verdict is Verdict.BROKEN


def test_garbage_that_the_reference_does_not_talk_is_broken() -> None:
    one = collection([ANSWER, ANSWER])
    garbage = replace(one, greedy=tuple(replace(o, text="\ufffd\ufffd\ufffd a") for o in one.greedy))
    result = verdict_of(one, garbage)
    assert result.verdict is Verdict.BROKEN
    assert any(finding.code == "reading_garbage" for finding in result.findings)
    both = verdict_of(garbage, garbage)
    assert both.verdict is Verdict.SAME  # a model may be like that


def test_answers_in_another_language_than_the_references_are_drift() -> None:
    one = collection([ANSWER])
    chinese = replace(one, greedy=(replace(one.greedy[0], text="买方应在五日内完成验收，否则付款期限无法起算。"),))
    assert verdict_of(one, chinese).verdict is Verdict.DRIFT


def probes(**more) -> Probes:
    texts = (TokenizedText(text="Hello", plain_ids=(1, 2), special_ids=(0, 1, 2)),)
    told = tuple(
        NextToken(kind=kind, ids=ids, position=sure(1, second=2, margin=1.0))
        for kind, ids in (
            ("prefix", (3,)),
            ("prefix", (3, 4)),
            ("prefix", (3, 4, 5, 6)),
            ("prefix", tuple(range(16))),
            ("uniform", (4,) * 16),
        )
    )
    fields = {"texts": texts, "template_ids": (9, 1), "template_text": "<s>[INST] Hello", "next_tokens": told} | more
    return Probes(**fields)


def with_probes(one: Collection, **more) -> Collection:
    return replace(one, probes=probes(**more))


@pytest.mark.parametrize(
    ("changes", "code", "evidence"),
    [
        (
            {"texts": (TokenizedText(text="Hello", plain_ids=(1, 5), special_ids=(0, 1, 5)),)},
            CauseCode.TOKENIZER,
            "from token 1 on: [2] against [5]",
        ),
        ({"texts": (TokenizedText(text="Hello", plain_ids=(1, 2), special_ids=(1, 2)),)}, CauseCode.BOS, "[0, 1, 2]"),
        (
            {"template_ids": (8, 8, 1), "template_text": "<|im_start|>user\nHello"},
            CauseCode.CHAT_TEMPLATE,
            "'<|im_start|>user\\nHello'",
        ),
    ],
)
def test_side_that_reads_other_tokens_is_broken_and_the_cause_is_named(changes, code: CauseCode, evidence: str) -> None:
    one = collection([ANSWER])
    result = verdict_of(with_probes(one), with_probes(one, **changes))
    assert result.verdict is Verdict.BROKEN
    assert [cause.code for cause in result.causes] == [code]
    assert evidence in result.causes[0].evidence


@pytest.mark.parametrize(
    ("off", "code"),
    [
        (lambda kind, n: n >= 16 and kind == "prefix", CauseCode.ROTARY),
        (lambda kind, n: n >= 2 and kind == "prefix", CauseCode.ATTENTION_HEADS),
        (lambda kind, n: True, CauseCode.WEIGHTS),
    ],
)
def test_fault_in_the_weights_is_named_by_where_the_next_tokens_part(off, code: CauseCode) -> None:
    told = tuple(
        replace(one, position=sure(2, second=1, margin=1.0)) if off(one.kind, len(one.ids)) else one
        for one in probes().next_tokens
    )
    other = [*ANSWER[:2], sure(99, second=4, margin=0.1), ANSWER[3]]
    candidate = collection([other], forced=forced_like([ANSWER], [other]))
    result = verdict_of(with_probes(collection([ANSWER])), with_probes(candidate, next_tokens=told))
    assert [cause.code for cause in result.causes] == [code]


def test_sound_sides_get_no_cause() -> None:
    one = with_probes(collection([ANSWER]))
    assert verdict_of(one, one).causes == ()


def test_drift_is_put_down_to_what_the_sides_differ_in() -> None:
    ours = collection([ANSWER], facts=Facts(weights="F16", tensor_parallel=1, engine="vllm"))
    theirs = collection([ANSWER], facts=Facts(weights="Q8_0", tensor_parallel=1, engine="vllm"))
    result = verdict_of(ours, theirs)
    assert result.factors == ("quantisation",)
    assert [drift.factor for drift in result.drift] == ["again", "quantisation"]
    both = replace(theirs, side=replace(theirs.side, facts=replace(theirs.side.facts, tensor_parallel=2)))
    mixed = verdict_of(ours, both)
    assert mixed.drift[-1].factor == "quantisation + parallelism"
    assert any("step by step" in note for note in mixed.notes)


def test_batching_is_told_apart_by_the_candidate_under_load() -> None:
    one = collection([ANSWER])
    loaded = forced_like([ANSWER], [shifted(ANSWER, 0.5)])["alone"]
    result = verdict_of(one, replace(one, forced={**one.forced, "loaded": loaded}))
    batching = next(drift for drift in result.drift if drift.factor == "batching")
    assert batching.stats.logprob_error_max == pytest.approx(0.5)
    assert result.verdict is Verdict.DRIFT
    assert any(finding.code == "loaded_logprob_error_p99" for finding in result.findings)


def spoken(texts: list[str]) -> Collection:
    one = collection([])
    said = tuple(
        Spoken(question_id=f"q{i}", language="en", text=text, output_tokens=None, finish_reason="stop")
        for i, text in enumerate(texts)
    )
    return replace(one, method="text", spoken={"alone": said})


def test_answers_alone_are_same_or_open_but_never_rounding() -> None:
    assert verdict_of(spoken([TEXT]), spoken([TEXT])).verdict is Verdict.SAME
    other = verdict_of(spoken([TEXT]), spoken([TEXT + " Or later."]))
    assert other.verdict is Verdict.INCONCLUSIVE
    assert other.verdict.exit_code == 7
    assert verdict_of(spoken([TEXT, TEXT]), spoken(["\ufffd\ufffd", "\ufffd\ufffd"])).verdict is Verdict.BROKEN


def test_saved_run_forced_on_other_tokens_counts_as_far_as_it_says_the_same() -> None:
    mine = [ANSWER[0], ANSWER[1], sure(99, second=4, margin=0.1)]
    candidate = collection([mine])  # forced on its own answer, not on the reference's
    result = verdict_of(collection([ANSWER]), candidate)
    assert result.forced is not None
    assert result.forced.positions == 3
    assert result.verdict is Verdict.DRIFT


def test_runs_of_other_lengths_are_held_against_each_other_as_far_as_both_go() -> None:
    long = replace(collection([[*ANSWER, sure(6), sure(7), sure(8)]]), output_tokens=7)
    short = collection([ANSWER])
    assert verdict_of(long, short).verdict is Verdict.SAME
    assert verdict_of(short, long).verdict is Verdict.SAME


def test_saved_run_comes_back_as_it_was(tmp_path: Path) -> None:
    one = with_probes(collection([ANSWER], facts=Facts(weights="F16", devices=("cpu",))))
    save(one, tmp_path / CANDIDATE_NAME)
    save(replace(one, top=20), tmp_path / REFERENCE_NAME)
    assert load(tmp_path) == one
    assert load(tmp_path, prefer=REFERENCE_NAME).top == 20
    (tmp_path / CANDIDATE_NAME).write_text('{"schema_version": 9}')
    with pytest.raises(UsageError, match="schema_version 9"):
        load(tmp_path)
    (tmp_path / CANDIDATE_NAME).write_text('{"side": 1}')
    with pytest.raises(UsageError, match="no saved run"):
        load(tmp_path)
    with pytest.raises(UsageError, match="holds no saved run"):
        load(tmp_path.parent)


def test_reports_escape_what_models_say_and_name_the_verdict() -> None:
    one = collection([ANSWER, ANSWER])
    evil = replace(one, greedy=tuple(replace(o, text="<script>alert(1)</script> | pipe") for o in one.greedy))
    other = [*ANSWER[:2], sure(99, second=4, margin=0.1), ANSWER[3]]
    evil = replace(evil, forced=forced_like([ANSWER, ANSWER], [other, other]))
    result = verdict_of(evil, evil)
    page, markdown = verify_html(result), verify_markdown(result)
    assert "<script>" not in page
    assert "DRIFT" in page
    assert "\\| pipe" in markdown
