"""The search against machines whose answer is known, and the arithmetic of its claims."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.measure.tune import (
    Budget,
    Found,
    LevelSeen,
    Outcome,
    Space,
    Trial,
    WeightsSpace,
    best,
    claim_of,
    explore,
    gain,
    search,
)

LLAMACPP, VLLM = WeightsSpace(engine="llamacpp"), WeightsSpace(engine="vllm", batch_holds_sequences=True)
START = Trial(batch_tokens=None, sequences=8, context_tokens=4096)
OWN = Trial(is_own=True)
SPACE = Space(
    start=START,
    batch_tokens=(128, 256, 512, 1024, 2048, 4096),
    more_sequences=(16, 32, 64),
    fewer_sequences=(4, 2, 1),
    weights=(LLAMACPP,),
)
NO_LIMIT = Budget(total_s=None, now_s=lambda: 0.0)


def seen(trial: Trial, rate: float | None, *, is_full: bool = False, took_s: float = 1.0) -> Outcome:
    level = LevelSeen(
        concurrency=8,
        rate_per_s=None,
        goodput_per_s=rate,
        kept_fraction=1.0,
        first_token_p50_s=0.1,
        per_token_p50_s=0.01,
        output_tokens_per_s=100.0,
    )
    best_level = None if rate is None else 0
    return Outcome(
        trial=trial, goodput_per_s=rate, is_full=is_full, levels=(level,), best_level=best_level, took_s=took_s
    )


def machine(
    *, batch_knee: int, sequences_knee: int, file: float = 2.0, full_at: int = 10_000
) -> Callable[[Trial], Outcome]:
    """Goodput grows with both until their knees; memory ends at `full_at` sequences."""

    def outcome(trial: Trial) -> Outcome:
        if trial.is_own:
            return seen(trial, file)
        if (trial.sequences or 0) >= full_at * 4096 / (trial.context_tokens or 4096):
            return seen(trial, 50.0, is_full=True)
        batch = 128 * file if trial.batch_tokens is None else min(trial.batch_tokens, batch_knee)
        growth = 1.0 if (trial.sequences or 0) <= 8 else min(trial.sequences or 0, sequences_knee) / 8
        return seen(trial, batch / 128 * growth * min(1.0, (trial.sequences or 0) / 8))

    return outcome


def climb(outcome: Callable[[Trial], Outcome], space: Space = SPACE) -> list[Outcome]:
    done: list[Outcome] = []
    steps = explore(space)
    trial = next(steps, None)
    while trial is not None:
        done.append(outcome(trial))
        assert len(done) <= space.most_trials
        try:
            trial = steps.send(done[-1])
        except StopIteration:
            trial = None
    return done


def chosen(done: list[Outcome], space: Space = SPACE) -> Trial:
    found = best(done, space)
    assert found is not None
    return found.trial


def test_search_measures_the_engines_own_the_file_and_then_doubles_the_batch_to_its_knee() -> None:
    done = climb(machine(batch_knee=1024, sequences_knee=8))
    assert [each.trial for each in done[:2]] == [OWN, START]
    batches = [each.trial.batch_tokens for each in done[2:] if each.trial.sequences == 8]
    assert batches == [128, 256, 512, 1024, 2048, 4096]  # two flat steps make the knee
    assert chosen(done) == replace(START, batch_tokens=1024)


def test_search_doubles_the_sequences_at_the_best_batch() -> None:
    assert chosen(climb(machine(batch_knee=512, sequences_knee=32))) == replace(START, batch_tokens=512, sequences=32)


def test_search_halves_the_sequences_where_more_only_hurts() -> None:
    done = climb(lambda trial: seen(trial, 10.0 / (trial.sequences or 8)))
    assert chosen(done).sequences == 1


def test_one_step_without_a_gain_is_not_yet_the_knee() -> None:
    rates = {128: 3.0, 256: 3.0, 512: 6.0}
    done = climb(lambda trial: seen(trial, rates.get(trial.batch_tokens or 0, 2.0)))
    assert chosen(done).batch_tokens == 512


def test_settings_that_keep_the_promise_for_nobody_are_no_knee() -> None:
    done = climb(lambda trial: seen(trial, 4.0 if (trial.batch_tokens or 0) >= 2048 else 0.0))
    assert chosen(done).batch_tokens == 2048


def test_full_card_ends_the_climb_and_is_never_chosen() -> None:
    done = climb(machine(batch_knee=128, sequences_knee=64, full_at=32))
    assert [each.trial.sequences for each in done if each.is_full] == [32]
    assert chosen(done).sequences == 16


def test_invalid_trial_does_not_end_the_climb() -> None:
    def busy(trial: Trial) -> Outcome:
        if trial.batch_tokens == 256:
            return seen(trial, None)
        return machine(batch_knee=512, sequences_knee=8)(trial)

    assert chosen(climb(busy)).batch_tokens == 512


def test_file_stays_where_nothing_gains_five_percent_over_it() -> None:
    assert chosen(climb(lambda trial: seen(trial, 2.0 if trial == START else 2.08))) == START


def test_shorter_context_is_climbed_where_memory_ended_the_sequences() -> None:
    space = replace(SPACE, contexts=(2048,))
    done = climb(machine(batch_knee=128, sequences_knee=64, full_at=32), space)
    assert chosen(done, space) == replace(START, sequences=32, context_tokens=2048)
    without = climb(machine(batch_knee=128, sequences_knee=16), space)
    assert [each.trial.sequences for each in without if each.trial.context_tokens == 2048] == [16]


def test_other_weights_are_climbed_only_where_they_beat_the_best() -> None:
    space = replace(SPACE, weights=(LLAMACPP, LLAMACPP, LLAMACPP))

    def outcome(trial: Trial) -> Outcome:
        rate = machine(batch_knee=512, sequences_knee=8)(trial).goodput_per_s or 0.0
        return seen(trial, rate * (1.0, 0.9, 2.0)[trial.weights])

    done = climb(outcome, space)
    assert [each.trial for each in done if each.trial.weights == 1] == [replace(START, batch_tokens=512, weights=1)]
    assert chosen(done, space) == replace(START, batch_tokens=512, weights=2)
    assert len([each for each in done if each.trial.weights == 2]) > 3


def test_batch_of_another_engine_starts_with_its_own() -> None:
    space = replace(SPACE, weights=(LLAMACPP, VLLM))
    done = climb(machine(batch_knee=512, sequences_knee=8), space)
    (entry,) = [each.trial for each in done if each.trial.weights == 1]
    assert entry.batch_tokens is None


def test_vllm_is_never_given_fewer_batch_tokens_than_sequences() -> None:
    start = Trial(batch_tokens=None, sequences=256, context_tokens=4096)
    space = replace(SPACE, start=start, more_sequences=(512, 1024), weights=(VLLM,))
    rate = lambda trial: seen(trial, 0.001 * (trial.sequences or 0) + (3.0 if trial.batch_tokens == 256 else 0.0))  # noqa: E731
    done = climb(rate, space)
    sizes = [(each.trial.batch_tokens, each.trial.sequences) for each in done if each.trial.batch_tokens is not None]
    assert all((batch or 0) >= (sequences or 0) for batch, sequences in sizes)
    assert (512, 512) in sizes
    assert 128 not in [batch for batch, _ in sizes]


def test_named_values_are_all_measured() -> None:
    space = replace(
        SPACE,
        batch_tokens=(64, 96, 100, 110),
        is_batch_named=True,
        more_sequences=(2, 9, 10, 11),
        are_sequences_named=True,
        fewer_sequences=(),
    )
    done = climb(lambda trial: seen(trial, 1.0), space)
    assert [each.trial.batch_tokens for each in done if each.trial.batch_tokens] == [64, 96, 100, 110]
    assert [each.trial.sequences for each in done if each.trial.sequences not in (None, 8)] == [2, 9, 10, 11]


@given(st.lists(st.one_of(st.none(), st.floats(0, 100)), min_size=120, max_size=120), st.booleans())
def test_search_ends_whatever_is_measured(values: list[float | None], is_full: bool) -> None:
    remaining = iter(values)
    space = replace(SPACE, contexts=(1024, 2048), weights=(LLAMACPP, VLLM, LLAMACPP))
    climb(lambda trial: seen(trial, next(remaining), is_full=is_full), space)


# -- what it is worth -----------------------------------------------------------------------------------------------


async def _search(
    outcome: Callable[[Trial], Outcome], space: Space = SPACE, budget: Budget = NO_LIMIT
) -> tuple[Found, list[Outcome]]:
    told: list[Outcome] = []

    async def measure(trial: Trial) -> Outcome:
        return outcome(trial)

    return await search(measure, space, told.append, budget=budget), told


async def test_no_trial_is_measured_twice_before_the_rounds() -> None:
    _, told = await _search(machine(batch_knee=512, sequences_knee=16))
    explored = [each.trial for each in told if each.round is None]
    assert len(set(explored)) == len(explored)


async def test_best_own_and_file_are_measured_again_in_turn_and_in_both_orders() -> None:
    found, told = await _search(machine(batch_knee=512, sequences_knee=16))
    top = replace(START, batch_tokens=512, sequences=16)
    rounds = [[each.trial for each in told if each.round == number] for number in (1, 2, 3)]
    assert rounds == [[top, OWN, START], [START, OWN, top], [top, OWN, START]]
    gains = {claim.base: claim.gain_fraction for claim in found.claims}
    assert gains == {"own": pytest.approx(8 / 2 - 1), "file": pytest.approx(8 / 2 - 1)}
    assert found.is_better
    (level,) = found.by_level
    assert (level.best_per_s, level.own_per_s) == (8.0, 2.0)
    assert level.gain_fraction == pytest.approx(3.0)


async def test_noise_is_no_gain() -> None:
    rounds = iter([2.3, 2.0, 2.0, 2.0, 2.0, 1.9, 2.1, 2.0, 2.1])

    def noisy(trial: Trial, counts: dict[Trial, int] = {}) -> Outcome:  # noqa: B006 - remembers over calls
        counts[trial] = counts.get(trial, 0) + 1
        if counts[trial] == 1:
            return seen(trial, 2.2 if trial.batch_tokens == 512 else 2.0)
        return seen(trial, next(rounds))

    found, _ = await _search(noisy)
    assert found.best is not None
    assert found.best.trial.batch_tokens == 512
    assert not found.is_better


async def test_best_that_is_the_file_is_compared_with_the_engines_own_alone() -> None:
    found, told = await _search(lambda trial: seen(trial, 1.0 if trial.is_own else 2.0))
    assert found.best is not None
    assert found.best.trial == START
    assert [claim.base for claim in found.claims] == ["own"]
    assert found.claims[0].gain_fraction == pytest.approx(1.0)
    assert not found.is_better
    assert len([each for each in told if each.round is not None]) == 6


async def test_other_precision_is_compared_with_its_own_engine_and_with_the_files_precision() -> None:
    space = replace(SPACE, weights=(LLAMACPP, LLAMACPP))
    found, _ = await _search(lambda trial: seen(trial, (3.0 if trial.weights else 1.0) + (not trial.is_own)), space)
    pairs = {claim.base: (claim.best_per_s[0], claim.base_per_s[0]) for claim in found.claims}
    assert pairs == {"own": (4.0, 3.0), "file": (4.0, 2.0), "precision": (4.0, 2.0)}


async def test_file_that_does_not_start_is_replaced_by_what_does() -> None:
    def only_small(trial: Trial) -> Outcome:
        is_small = (trial.sequences or 8) < 8
        return seen(trial, 2.0 if is_small else None, is_full=not is_small)

    found, _ = await _search(only_small)
    assert found.best is not None
    assert found.best.trial.sequences == 4
    assert found.is_better
    assert [claim.gain_fraction for claim in found.claims] == [None]


async def test_file_that_only_met_a_bad_moment_is_measured_again_and_not_replaced_unseen() -> None:
    def only_own_is_valid(trial: Trial) -> Outcome:
        return seen(trial, 2.0 if trial.is_own else None)

    found, told = await _search(only_own_is_valid)
    assert found.best is not None
    assert found.best.trial == OWN
    assert [each.trial for each in told if each.round == 1] == [OWN, START]
    assert [(claim.base, claim.gain_fraction) for claim in found.claims] == [("file", None)]
    assert not found.is_better


async def test_engine_whose_own_settings_keep_the_promise_for_nobody_is_beaten_without_a_ratio() -> None:
    found, _ = await _search(lambda trial: seen(trial, 0.0 if trial.is_own else 1.0))
    (claim,) = found.claims
    assert claim.gain_fraction is None
    assert claim.is_better


async def test_nothing_that_starts_is_no_best() -> None:
    found, _ = await _search(lambda trial: seen(trial, None, is_full=True))
    assert found.best is None
    assert found.claims == ()


async def test_promise_that_nobody_keeps_is_not_confirmed() -> None:
    found, told = await _search(lambda trial: seen(trial, 0.0))
    assert found.best is not None
    assert found.best.goodput_per_s == 0
    assert not [each for each in told if each.round is not None]


async def test_round_that_lacks_a_figure_is_made_up_for() -> None:
    count = 0

    def once_busy(trial: Trial) -> Outcome:
        nonlocal count
        count += trial == START
        return seen(trial, None if trial == START and count == 2 else 1.0 if trial.is_own else 2.0)

    found, told = await _search(once_busy)
    assert max(each.round or 0 for each in told) == 4
    assert found.claims[0].gain_fraction == pytest.approx(1.0)


async def test_budget_leaves_time_for_the_rounds() -> None:
    clock = 0.0

    def slow(trial: Trial) -> Outcome:
        nonlocal clock
        clock += 60.0
        return machine(batch_knee=4096, sequences_knee=64)(replace(trial))

    space = SPACE
    found, told = await _search(
        lambda trial: replace(slow(trial), took_s=60.0), space, Budget(total_s=15 * 60.0, now_s=lambda: clock)
    )
    assert found.is_out_of_time
    assert clock <= 15 * 60.0
    assert [each.round for each in told if each.round is not None]
    assert found.claims[0].gain_interval is not None


def test_own_settings_that_the_file_has_already_are_measured_once() -> None:
    space = replace(SPACE, is_start_own=True)
    done = climb(lambda trial: seen(trial, 1.0), space)
    assert done[0].trial == START
    assert not [each for each in done if each.trial.is_own]
    assert space.own(0) == START


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
    assert not claim_of("own", [(2.0, 0.0), (2.0, 1.0), (2.0, 0.0)]).is_better
