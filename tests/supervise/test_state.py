"""The transition table and the restart policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.supervise.state import TRANSITIONS, Event, RestartPolicy, State, next_state


def _reachable(start: State) -> set[State]:
    seen, queue = {start}, [start]
    while queue:
        here = queue.pop()
        for (state, _), to in TRANSITIONS.items():
            if state is here and to not in seen:
                seen.add(to)
                queue.append(to)
    return seen


def test_every_state_can_be_reached_and_left_for_stopped() -> None:
    assert _reachable(State.STOPPED) == set(State)
    for state in State:
        assert State.STOPPED in _reachable(state), state


def test_ready_is_entered_only_after_warm_up_or_adoption() -> None:
    assert {key for key, to in TRANSITIONS.items() if to is State.READY} == {
        (State.WARMING, Event.WARMED),
        (State.STOPPED, Event.ADOPTED),
    }


@pytest.mark.parametrize("state", [State.STARTING, State.LOADING, State.WARMING, State.READY, State.DRAINING])
def test_stop_is_legal_wherever_a_process_may_live(state: State) -> None:
    assert next_state(state, Event.STOP) is State.STOPPING


def test_a_transition_that_does_not_exist_is_our_fault_and_raises() -> None:
    with pytest.raises(KeyError):
        next_state(State.STOPPED, Event.WARMED)


deaths = st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=30).map(sorted)


@given(deaths, st.integers(0, 10), st.floats(1, 1e5))
def test_policy_gives_up_exactly_when_the_window_holds_more_deaths_than_allowed(
    at: list[float], most: int, window_s: float
) -> None:
    now = at[-1]
    policy = RestartPolicy(max_restarts=most, window_s=window_s)
    recent = [each for each in at if each >= now - window_s]
    wait_s = policy.wait_s(at, now)
    assert (wait_s is None) == (len(recent) > most)
    if wait_s is not None:
        assert policy.first_wait_s <= wait_s <= policy.longest_wait_s


def test_policy_doubles_the_wait_up_to_its_bound() -> None:
    policy = RestartPolicy(max_restarts=10, window_s=1000, first_wait_s=1, longest_wait_s=5)
    assert [policy.wait_s([0.0] * count, 0.0) for count in (1, 2, 3, 4, 5)] == [1, 2, 4, 5, 5]


def test_policy_forgets_deaths_outside_the_window() -> None:
    policy = RestartPolicy(max_restarts=1, window_s=10)
    assert policy.wait_s([0.0, 1.0], 1.0) is None
    assert policy.wait_s([0.0, 50.0], 50.0) == policy.first_wait_s
