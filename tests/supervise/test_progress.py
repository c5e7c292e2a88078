"""Hung or busy: what counts as progress, and from when on stillness is held against an engine."""

from llamarack.supervise.progress import Sight, Stillness, after, answered, is_overdue, limit_s


def _see(*looks: tuple[float, int, int | None]) -> Stillness:
    """`looks`: time, requests in flight, progress."""
    stillness = Stillness()
    for at, in_flight, progress in looks:
        stillness = after(stillness, Sight(at_monotonic_s=at, in_flight=in_flight, progress=progress))
    return stillness


def test_idle_engine_is_never_overdue() -> None:
    assert not is_overdue(_see((0, 0, 5), (100, 0, 5), (1000, 0, 5)), 10_000, 60)


def test_progress_starts_the_time_anew() -> None:
    stillness = _see((0, 2, 5), (50, 2, 6), (100, 2, 7))
    assert not is_overdue(stillness, 150, 60)
    assert is_overdue(stillness, 161, 60)


def test_work_without_progress_is_overdue() -> None:
    assert is_overdue(_see((0, 1, 5), (30, 1, 5), (60, 1, 5)), 60, 60)


def test_engine_that_does_not_answer_is_overdue_with_work_and_without() -> None:
    assert is_overdue(_see((0, 1, 5), (60, 1, None)), 60, 60)
    assert is_overdue(_see((0, 0, 5), (10, 0, None), (70, 0, None)), 70, 60)


def test_work_that_left_without_a_token_does_not_clear_the_engine() -> None:
    """Else a gateway that gives stuck requests up in time would hide a hung engine for ever."""
    assert is_overdue(_see((0, 1, 5), (40, 1, 5), (50, 0, 5), (60, 0, 5)), 60, 60)


def test_work_that_left_after_progress_clears_it() -> None:
    assert not is_overdue(_see((0, 1, 5), (40, 0, 9), (100, 0, 9)), 1000, 60)


def test_an_answer_clears_it() -> None:
    stillness = _see((0, 1, 5), (60, 1, 5))
    assert not is_overdue(answered(stillness, 60, 1), 119, 60)
    assert is_overdue(answered(stillness, 60, 1), 120, 60)
    assert not is_overdue(answered(stillness, 60, 0), 10_000, 60)


def test_restarted_counters_are_progress() -> None:
    assert not is_overdue(_see((0, 1, 500), (60, 1, 3)), 60, 60)


def test_without_counters_nothing_is_judged() -> None:
    sight = Sight(at_monotonic_s=100, in_flight=3, progress=None, has_counters=False)
    assert not is_overdue(after(_see((0, 3, 5)), sight), 10_000, 60)


def test_slow_machine_gets_three_times_its_predicted_first_token() -> None:
    assert limit_s(300, None) == 150
    assert limit_s(300, 20.0) == 150
    assert limit_s(300, 400.0) == 1200
