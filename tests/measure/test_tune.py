"""The search against machines whose answer is known, and the arithmetic of its claim."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.config import parse
from llamarack.measure.tune import (
    DEFAULTS,
    MEMORY_CEILING_FRACTION,
    Outcome,
    Space,
    Trial,
    best,
    gain,
    next_trial,
    search,
    with_trial,
)

SPACE = Space(sequences=8, max_batch_tokens=4096, max_sequences=64)


def machine(
    *, batch_knee: int, sequences_knee: int, memory_per_sequence: float = 0.01, default: float = 2.0
) -> Callable[[Trial], Outcome]:
    """Goodput grows with both until their knees; memory grows with the sequences."""

    def outcome(trial: Trial) -> Outcome:
        if trial == DEFAULTS:
            return Outcome(trial=trial, goodput_per_s=default, memory_fraction=0.3)
        batch, sequences = trial.batch_tokens or 0, trial.sequences or 0
        rate = 1.0 * min(batch, batch_knee) / 128 + min(sequences, sequences_knee)
        return Outcome(trial=trial, goodput_per_s=rate, memory_fraction=0.2 + memory_per_sequence * sequences)

    return outcome


def climb(outcome) -> list[Outcome]:
    done: list[Outcome] = []
    while (trial := next_trial(done, SPACE)) is not None:
        assert trial not in [each.trial for each in done]
        done.append(outcome(trial))
        assert len(done) < 50
    return done


def test_search_starts_with_the_defaults_and_doubles_the_batch_to_its_knee() -> None:
    done = climb(machine(batch_knee=1024, sequences_knee=8))
    assert done[0].trial == DEFAULTS
    batches = [each.trial.batch_tokens for each in done[1:] if each.trial.sequences == 8]
    assert batches == [128, 256, 512, 1024, 2048]
    chosen = best(done)
    assert chosen is not None
    assert chosen.trial == Trial(batch_tokens=1024, sequences=8)


def test_search_doubles_the_sequences_at_the_best_batch() -> None:
    chosen = best(climb(machine(batch_knee=256, sequences_knee=32)))
    assert chosen is not None
    assert chosen.trial == Trial(batch_tokens=256, sequences=32)


def test_search_halves_the_sequences_where_more_only_hurts() -> None:
    def crowded(trial: Trial) -> Outcome:
        rate = 10.0 / (trial.sequences or 8)
        return Outcome(trial=trial, goodput_per_s=rate, memory_fraction=None)

    chosen = best(climb(crowded))
    assert chosen is not None
    assert chosen.trial.sequences == 1


def test_setting_over_the_memory_ceiling_ends_the_climb_and_is_never_chosen() -> None:
    done = climb(machine(batch_knee=128, sequences_knee=64, memory_per_sequence=0.025))
    over = [each for each in done if (each.memory_fraction or 0) > MEMORY_CEILING_FRACTION]
    assert [each.trial.sequences for each in over] == [32]
    chosen = best(done)
    assert chosen is not None
    assert chosen.trial.sequences == 16


def test_setting_that_runs_out_of_memory_ends_its_climb() -> None:
    def fragile(trial: Trial) -> Outcome:
        if (trial.batch_tokens or 0) >= 512:
            return Outcome(trial=trial, goodput_per_s=None, memory_fraction=None, reason="out of memory")
        return machine(batch_knee=4096, sequences_knee=8)(trial)

    done = climb(fragile)
    assert [each.trial.batch_tokens for each in done if each.reason] == [512]
    chosen = best(done)
    assert chosen is not None
    assert chosen.trial.batch_tokens == 256


@given(st.lists(st.one_of(st.none(), st.floats(0, 100)), min_size=60, max_size=60))
def test_search_ends_whatever_is_measured(values: list[float | None]) -> None:
    remaining = iter(values)
    climb(lambda trial: Outcome(trial=trial, goodput_per_s=next(remaining), memory_fraction=None))


async def _search(outcome: Callable[[Trial], Outcome]) -> tuple[Any, list[Outcome]]:
    seen: list[Outcome] = []

    async def measure(trial: Trial) -> Outcome:
        return outcome(trial)

    return await search(measure, SPACE, seen.append), seen


async def test_best_and_defaults_are_measured_again_in_turn() -> None:
    result, seen = await _search(machine(batch_knee=256, sequences_knee=16, default=4.0))
    assert [each.trial for each in seen[-6:]] == [seen[-2].trial, DEFAULTS] * 3
    assert result.gain_fraction == pytest.approx((2 + 16) / 4 - 1)
    assert result.is_better


async def test_noise_is_no_gain() -> None:
    rates = iter([2.0, 2.1, 2.0, 2.0, 2.0, 2.0, *[1.9, 2.1, 2.3, 2.0, 2.0, 2.2]])

    def noisy(trial: Trial) -> Outcome:
        return Outcome(trial=trial, goodput_per_s=next(rates), memory_fraction=None)

    result, _ = await _search(noisy)
    assert not result.is_better


async def test_defaults_that_do_not_start_leave_the_best_without_a_gain() -> None:
    small = machine(batch_knee=256, sequences_knee=8)

    def only_small(trial: Trial) -> Outcome:
        if trial == DEFAULTS:
            return Outcome(trial=trial, goodput_per_s=None, memory_fraction=None, reason="out of memory")
        return small(trial)

    result, _ = await _search(only_small)
    assert result.gain_fraction is None
    assert result.is_better


async def test_nothing_that_starts_is_no_result() -> None:
    result, _ = await _search(lambda trial: Outcome(trial=trial, goodput_per_s=None, memory_fraction=None))
    assert result is None


def test_gain_is_symmetric_in_its_two_sides() -> None:
    pairs = [(4.0, 2.0), (5.0, 2.0), (4.5, 2.1)]
    forward, backward = gain(pairs), gain([(b, a) for a, b in pairs])
    assert forward is not None
    assert backward is not None
    assert math.log1p(forward[0]) == pytest.approx(-math.log1p(backward[0]))
    assert forward[1].low <= forward[0] <= forward[1].high


def test_gain_needs_three_pairs_above_zero() -> None:
    assert gain([(2.0, 1.0)] * 2) is None
    assert gain([(2.0, 1.0), (0.0, 1.0), (2.0, 1.0)]) is None


def test_trial_changes_the_limits_of_one_model_only() -> None:
    text = """
schema_version: 1
models:
  - {name: a, path: /a.gguf, limits: {sequences: 8, batch_tokens: 512}}
  - {name: b, path: /b.gguf, limits: {sequences: 4}}
"""
    deployment = parse(text).deployment
    tuned = with_trial(deployment, Trial(batch_tokens=1024, sequences=16), model="a")
    assert tuned.models[0].groups[0].limits.batch_tokens == 1024
    assert tuned.models[0].groups[0].limits.sequences == 16
    assert tuned.models[1] == deployment.models[1]
    untouched = with_trial(deployment, DEFAULTS, model="a").models[0].groups[0].limits
    assert (untouched.batch_tokens, untouched.sequences) == ("auto", 8)
