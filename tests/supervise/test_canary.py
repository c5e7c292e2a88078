"""Counts of what came of requests, and the judgement of a replica on trial."""

import pytest

from llamarack.supervise.canary import Judgement, judge
from llamarack.supervise.tally import Tally, since, step_of, total


def _tally(requests: int, failures: int = 0, first_s: float = 0.1) -> Tally:
    streams = requests - failures
    return Tally(requests=requests, failures=failures, first_token={step_of(first_s): streams} if streams else {})


def test_median_is_right_to_a_step() -> None:
    assert Tally().median_first_token_s is None
    for seconds in (0.0005, 0.004, 0.1, 2.5, 90.0):
        median = _tally(7, first_s=seconds).median_first_token_s
        assert median == pytest.approx(max(seconds, 0.001), rel=0.13)
    mixed = total([_tally(5, first_s=0.1), _tally(4, first_s=10.0)])
    assert mixed.median_first_token_s == pytest.approx(0.1, rel=0.13)


def test_tallies_of_workers_add_up_and_begin_where_the_trial_did() -> None:
    both = total([_tally(3, 1), _tally(4)])
    assert (both.requests, both.failures, both.first_tokens) == (7, 1, 6)
    added = since(both, _tally(3, 1))
    assert (added.requests, added.failures, added.first_tokens) == (4, 0, 4)
    assert since(_tally(2), _tally(50)) == _tally(2)  # the worker was started anew


@pytest.mark.parametrize(
    ("trial", "others", "is_over", "judgement"),
    [
        (_tally(50), _tally(450), False, Judgement.WAIT),
        (_tally(50), _tally(450), True, Judgement.ON),
        (_tally(50, 3), _tally(450), False, Judgement.BACK),
        (_tally(50, 2), _tally(450), False, Judgement.WAIT),  # too few to call it before the end
        (_tally(50, 2), _tally(450), True, Judgement.BACK),
        (_tally(50, 3), _tally(450, 27), True, Judgement.ON),  # the others fail as often
        (_tally(9), _tally(450), True, Judgement.TOO_FEW),
        (_tally(50, first_s=0.5), _tally(450, first_s=0.1), True, Judgement.BACK),
        (_tally(50, first_s=0.5), _tally(450, first_s=0.1), False, Judgement.WAIT),
        (_tally(50, first_s=0.13), _tally(450, first_s=0.1), True, Judgement.ON),
        (_tally(50, first_s=0.03), _tally(450, first_s=0.005), True, Judgement.ON),  # milliseconds are noise
        (_tally(50, first_s=0.5), _tally(9, first_s=0.1), True, Judgement.ON),  # nothing to compare with
    ],
)
def test_judgement(trial: Tally, others: Tally, is_over: bool, judgement: Judgement) -> None:
    found, reason = judge(trial, others, is_over=is_over)
    assert found is judgement
    assert bool(reason) == (found is not Judgement.WAIT)
