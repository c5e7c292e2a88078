from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from llamarack.engine.dialect import Endpoint
from llamarack.gateway.fair_queue import FairQueue
from llamarack.gateway.routing import choose, home_of, session_of
from llamarack.supervise.state import State
from llamarack.supervise.table import ReplicaRow


def row(id: str) -> ReplicaRow:
    endpoint = Endpoint(socket=None, port=1, key=id, served_name="m")
    return ReplicaRow(
        id=id, model="m", engine="llamacpp", state=State.READY, endpoint=endpoint, slots=4, context_tokens=100
    )


ROWS = [row(f"r-{i}") for i in range(4)]


def test_sessions_spread_and_only_those_of_a_replica_that_goes_move() -> None:
    sessions = [f"session {i}".encode() for i in range(400)]
    homes = {session: home_of(session, ROWS).id for session in sessions}
    assert min(Counter(homes.values()).values()) > 60
    without = {session: home_of(session, ROWS[1:]).id for session in sessions}
    moved = {session for session in sessions if homes[session] != without[session]}
    assert moved == {session for session in sessions if homes[session] == "r-0"}


@given(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.integers(0, 1000), st.binary(max_size=9))
def test_choice_is_among_the_free_and_the_least_loaded_but_for_a_session_at_home(
    loads: list[int], turn: int, session: bytes
) -> None:
    load = {each.id: count / 4 for each, count in zip(ROWS, loads, strict=True)}
    free = [each for each in ROWS if load[each.id] < 1]
    for policy in ("least_loaded", "round_robin", "session"):
        chosen = choose(free, lambda each: load[each.id], policy=policy, turn=turn, session=session, homes=ROWS)
        assert (chosen is None) == (not free)
        if chosen is None:
            continue
        assert chosen in free
        lowest = min(load[each.id] for each in free)
        if policy == "least_loaded":
            assert load[chosen.id] == lowest
        if policy == "session":
            home = home_of(session, ROWS)
            assert chosen is home if home in free else load[chosen.id] == lowest


def test_session_is_told_by_header_then_field_then_prefix() -> None:
    turn_1 = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "first"}]}
    answer = {"role": "assistant", "content": "a"}
    turn_2 = {"messages": [*turn_1["messages"], answer, {"role": "user", "content": "second"}]}
    other = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "another"}]}
    assert session_of({}, turn_1) == session_of({}, turn_2) is not None
    assert session_of({}, turn_1) != session_of({}, other)
    assert session_of({}, {**turn_1, "user": "u"}) == session_of({}, {**other, "user": "u"})
    assert session_of({"x-session-id": "7"}, turn_1) == session_of({"x-session-id": "7"}, {**other, "user": "u"})
    assert session_of({}, {"prompt": "x" * 300}) == session_of({}, {"prompt": "x" * 900})
    assert session_of({}, {"prompt": "y"}) != session_of({}, {"prompt": "x"})
    assert session_of({}, {"prompt": [1, 2]}) is None
    assert session_of({}, {"messages": ["not an object"]}) is None


class Waiter:
    def __init__(self, caller: str, tokens: int, *, first: bool = False) -> None:
        self.caller, self.tokens, self.first, self.overtaken = caller, tokens, first, 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=60))
def test_fair_queue_serves_callers_alike_and_each_in_its_own_order(asked: list[tuple[str, int]]) -> None:
    queue: FairQueue[Waiter] = FairQueue()
    waiters = [Waiter(*each) for each in asked]
    for waiter in waiters:
        queue.push(waiter)
    lost = Waiter("a", 1, first=True)
    queue.push(lost)
    served: list[Waiter] = []
    got: Counter[str] = Counter()
    while len(queue):
        head = next(queue.in_turn())
        queue.grant(head)
        if head is not lost:
            got[head.caller] += head.tokens
        served.append(head)
        waiting = {waiter.caller for waiter in queue}
        shares = [got[caller] for caller in waiting]
        if len(shares) > 1:  # those who still wait are never further apart than one request
            assert max(shares) - min(shares) <= 50
    assert served[0] is lost
    for caller in "abc":
        assert [w for w in served if w.caller == caller and w is not lost] == [w for w in waiters if w.caller == caller]
    assert queue.tokens == 0
    assert not queue.remove(lost)
