"""The ladder after out of memory: its order, its end, and that no plan comes twice."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from llamarack.config import Group, Limits
from llamarack.supervise.degrade import Rung, Smaller, smaller_plans
from tests.fake_adaptor import fake_candidate

BIG, SMALL = Path("q8.gguf"), Path("q4.gguf")


def _ladder(
    group: Group,
    path: Path,
    *,
    fallbacks: tuple[Path, ...] = (),
    cause: str = "out_of_memory",
    fraction: float | None = None,
) -> list[Smaller]:
    """All rungs, each taken, as a replica that runs out every time would."""
    taken: list[Rung] = []
    steps: list[Smaller] = []
    batch = 2048
    while True:
        limits = group.limits
        batch = batch if limits.batch_tokens == "auto" else limits.batch_tokens
        now = limits.gpu_memory_fraction if taken else fraction
        candidate = replace(
            fake_candidate(limits.sequences, limits.context_tokens, batch),
            gpu_memory_fraction=None if fraction is None else now,
        )
        step = next(smaller_plans(group, path, candidate, taken=taken, fallbacks=fallbacks, cause=cause), None)
        if step is None:
            return steps
        steps.append(step)
        taken.append(step.rung)
        group, path = step.group, step.path


def test_vllm_goes_down_fraction_batch_context_concurrency_then_the_coarser_file() -> None:
    group = Group(engine="vllm", limits=Limits(context_tokens=4096, sequences=8))
    words = [step.rung.words for step in _ladder(group, BIG, fallbacks=(SMALL,), fraction=0.90)]
    assert words == [
        "gpu_memory_fraction 0.9 -> 0.85",
        "batch_tokens 2,048 -> 128",
        "context_tokens 4,096 -> 2,048",
        "sequences 8 -> 4",
        "path q8.gguf -> q4.gguf",
        "context_tokens 2,048 -> 1,024",
        "sequences 4 -> 2",
    ]


def test_llamacpp_has_no_fraction_to_lower() -> None:
    group = Group(limits=Limits(context_tokens=4096, sequences=8))
    assert [step.rung.setting for step in _ladder(group, BIG)] == ["batch_tokens", "context_tokens", "sequences"]


def test_fraction_that_others_lowered_already_is_lowered_from_there() -> None:
    group = Group(engine="vllm")
    assert _ladder(group, BIG, fraction=0.70)[0].group.limits.gpu_memory_fraction == 0.65
    assert _ladder(group, BIG, fraction=0.97)[0].group.limits.gpu_memory_fraction == 0.85


def test_cache_of_fixed_size_shrinks_in_place_of_the_fraction_and_with_the_context() -> None:
    cache = 400_000_000
    group = Group(engine="vllm", limits=Limits(kv_cache_bytes=cache))
    steps = _ladder(group, BIG, fraction=0.90)
    assert steps[0].rung.setting == "kv_cache_bytes"
    sizes = [step.group.limits.kv_cache_bytes for step in steps]
    assert sizes[0] == cache - round(0.05 * 1024 * 1024**2)
    assert sizes[2] == sizes[1] // 2  # type: ignore[operator]


def test_cache_too_small_is_not_answered_by_a_smaller_fraction() -> None:
    group = Group(engine="vllm")
    assert _ladder(group, BIG, cause="kv_cache_too_small", fraction=0.9)[0].rung.setting == "context_tokens"


def test_a_rung_that_is_passed_over_is_followed_by_the_next() -> None:
    group = Group(limits=Limits(context_tokens=4096, sequences=8))
    found = smaller_plans(group, BIG, fake_candidate(8, 4096), taken=(), fallbacks=(SMALL,), cause="out_of_memory")
    assert [each.rung.setting for each in found] == ["batch_tokens", "context_tokens", "sequences", "path"]


@given(
    context=st.integers(1, 200_000),
    sequences=st.integers(1, 512),
    batch=st.one_of(st.just("auto"), st.integers(1, 8192)),
    cache=st.one_of(st.just("auto"), st.integers(1, 10**11)),
    fraction=st.one_of(st.none(), st.floats(0.05, 1.0)),
    fallbacks=st.lists(st.sampled_from([BIG, SMALL, Path("q2.gguf")]), max_size=4),
    cause=st.sampled_from(["out_of_memory", "kv_cache_too_small"]),
)
def test_no_plan_comes_twice_each_is_smaller_and_the_ladder_ends(
    context: int,
    sequences: int,
    batch: int | str,
    cache: int | str,
    fraction: float | None,
    fallbacks: list[Path],
    cause: str,
) -> None:
    limits = Limits(context_tokens=context, sequences=sequences, batch_tokens=batch, kv_cache_bytes=cache)  # type: ignore[arg-type]
    group = Group(engine="vllm", limits=limits)
    steps = _ladder(group, BIG, fallbacks=tuple(fallbacks), cause=cause, fraction=fraction)
    assert len(steps) < 16
    plans = [(BIG, str(group.limits))]
    plans += [(step.path, str(step.group.limits)) for step in steps]
    assert len(set(plans)) == len(plans)
    for rung in (step.rung for step in steps if step.rung.setting != "path"):
        assert rung.becomes < rung.was  # type: ignore[operator]
