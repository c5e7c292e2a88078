import asyncio
import contextlib
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarack.config import Defaults
from llamarack.engine.dialect import Endpoint, KvUse
from llamarack.errors import NotReady, Overloaded
from llamarack.gateway.admission import Admission
from llamarack.gateway.demand import Demand
from llamarack.gateway.fair_queue import MOST_OVERTAKES
from llamarack.supervise.state import State
from llamarack.supervise.table import ModelRow, ReplicaRow, Table

MODELS = tuple(
    ModelRow(name=name, created_unix_s=1, defaults=Defaults(), max_output_tokens=None) for name in ("m", "n")
)


def replica(id: str, *, slots: int = 1, model: str = "m", state: State = State.READY, life: int = 0) -> ReplicaRow:
    endpoint = Endpoint(socket=None, port=1, key=f"{id}-{life}", served_name=model)
    return ReplicaRow(
        id=id, model=model, engine="llamacpp", state=state, endpoint=endpoint, slots=slots, context_tokens=100
    )


def table(*replicas: ReplicaRow, draining: bool = False) -> Table:
    return Table(version=1, draining=draining, models=MODELS, replicas=replicas)


def admission(*replicas: ReplicaRow, requests: int = 256, wait_s: float = 30.0, **more: Any) -> Admission:
    made = Admission(max_queue_requests=requests, max_queue_s=wait_s, **more)
    made.apply(table(*replicas))
    return made


async def turns(times: int = 5) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_take_fills_the_least_loaded_share_and_then_waits_in_order() -> None:
    desk = admission(replica("a", slots=2), replica("b", slots=1))
    got = [await desk.take("m") for _ in range(3)]
    assert sorted(each.id for each in got) == ["a", "a", "b"]
    order: list[int] = []

    async def wait(number: int) -> None:
        await desk.take("m")
        order.append(number)

    waiting = [asyncio.create_task(wait(i)) for i in range(3)]
    await turns()
    assert desk.queued == {"m": 3}
    for each in got:
        desk.give(each)
        await turns()
    assert order == [0, 1, 2]
    assert desk.in_flight == {"a": 2, "b": 1}
    await asyncio.gather(*waiting)


async def test_take_over_the_bound_of_the_queue_is_refused_with_a_time_to_return() -> None:
    desk = admission(replica("a"), requests=1)
    await desk.take("m")
    waiting = asyncio.create_task(desk.take("m"))
    await turns()
    with pytest.raises(Overloaded) as caught:
        await desk.take("m")
    assert caught.value.retry_after_s is not None
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert desk.queued == {}


async def test_take_past_the_longest_wait_is_refused_and_leaves_no_trace() -> None:
    desk = admission(replica("a"), wait_s=0.01)
    await desk.take("m")
    with pytest.raises(Overloaded, match="10 ms"):
        await desk.take("m")
    assert desk.queued == {}
    assert desk.in_flight == {"a": 1}


async def test_lost_request_goes_before_those_that_wait_and_not_to_the_replica_that_lost_it() -> None:
    desk = admission(replica("a"), replica("b"))
    held = {each.id: each for each in [await desk.take("m"), await desk.take("m")]}
    first = asyncio.create_task(desk.take("m"))
    await turns()
    again = asyncio.create_task(desk.take("m", excluded={"a-0"}, again=True))
    await turns()
    desk.give(held["a"])
    assert (await first).id == "a"
    desk.give(held["b"])
    assert (await again).id == "b"


async def test_take_behind_one_that_waits_for_another_replica_uses_the_free_slot() -> None:
    desk = admission(replica("a"), replica("b"))
    held = await desk.take("m", excluded={"b-0"})
    assert held.id == "a"
    again = asyncio.create_task(desk.take("m", excluded={"b-0"}, again=True))
    await turns()
    async with asyncio.timeout(5):
        assert (await desk.take("m")).id == "b"
    desk.give(held)
    assert (await again).id == "a"


async def test_take_of_a_model_that_is_not_ready_is_refused_with_its_states() -> None:
    desk = admission(replica("a", state=State.LOADING))
    with pytest.raises(NotReady, match="a loading"):
        await desk.take("m")


async def test_lost_request_waits_for_a_replica_that_is_started_anew() -> None:
    desk = admission(replica("a", state=State.BACKOFF))
    again = asyncio.create_task(desk.take("m", excluded={"a-0"}, again=True))
    await turns()
    desk.apply(table(replica("a", life=1)))
    assert (await again).row.endpoint == replica("a", life=1).endpoint


async def test_drain_turns_away_new_requests_and_serves_those_that_wait() -> None:
    desk = admission(replica("a"))
    held = await desk.take("m")
    waiting = asyncio.create_task(desk.take("m"))
    await turns()
    desk.apply(table(replica("a"), draining=True))
    with pytest.raises(NotReady, match="shutting down"):
        await desk.take("m")
    desk.give(held)
    assert (await waiting).id == "a"


async def test_a_caller_with_a_long_line_does_not_hold_up_another() -> None:
    desk = admission(replica("a"))
    running = await desk.take("m", Demand(caller="greedy", tokens=10))
    order: list[str] = []

    async def ask(caller: str) -> None:
        got = await desk.take("m", Demand(caller=caller, tokens=10))
        order.append(caller)
        desk.give(got)

    waiting = [asyncio.create_task(ask("greedy")) for _ in range(6)]
    await turns()
    waiting += [asyncio.create_task(ask("modest")) for _ in range(2)]
    await turns()
    desk.give(running)
    await asyncio.gather(*waiting)
    assert [i for i, caller in enumerate(order) if caller == "modest"][-1] <= 3


async def test_full_queue_makes_room_for_a_caller_with_less_than_its_share() -> None:
    desk = admission(replica("a"), requests=3)
    await desk.take("m")
    greedy = [asyncio.create_task(desk.take("m", Demand(caller="greedy"))) for _ in range(3)]
    await turns()
    modest = asyncio.create_task(desk.take("m", Demand(caller="modest")))
    await turns()
    assert [task.done() for task in greedy] == [False, False, True]
    with pytest.raises(Overloaded, match="3 requests for `m` are waiting"):
        greedy[2].result()
    assert not modest.done()
    with pytest.raises(Overloaded):
        await desk.take("m", Demand(caller="greedy"))
    for task in (*greedy[:2], modest):
        task.cancel()
    await asyncio.gather(*greedy, modest, return_exceptions=True)
    assert desk.queued == {}


async def test_queue_is_bounded_in_tokens() -> None:
    desk = admission(replica("a"), max_queue_tokens=100)
    await desk.take("m")
    waiting = [asyncio.create_task(desk.take("m", Demand(tokens=60))) for _ in range(2)]
    await turns()
    with pytest.raises(Overloaded, match="requests of 120 tokens"):
        await desk.take("m", Demand(tokens=1))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_shared_cache_admits_by_tokens_and_a_lone_request_whatever_its_size() -> None:
    desk = admission(replace(replica("a", slots=8), kv_tokens=100))
    big = await desk.take("m", Demand(tokens=500))
    small = asyncio.create_task(desk.take("m", Demand(tokens=10)))
    await turns()
    assert not small.done()
    desk.give(big)
    got = await small
    assert [(await desk.take("m", Demand(tokens=30))).tokens for _ in range(3)] == [30] * 3
    late = asyncio.create_task(desk.take("m", Demand(tokens=1)))
    await turns()
    assert not late.done()
    desk.see(got.row, KvUse(kv_tokens=100, used_fraction=0.3, preemptions=0, waiting=0))
    assert (await late).tokens == 1  # the engine has room that the guesses hid


async def test_request_for_several_choices_takes_as_many_slots() -> None:
    desk = admission(replica("a", slots=3))
    both = await desk.take("m", Demand(slots=2))
    one = await desk.take("m")
    assert desk.in_flight == {"a": 3}
    waiting = asyncio.create_task(desk.take("m", Demand(slots=2)))
    await turns()
    desk.give(one)
    await turns()
    assert not waiting.done()
    desk.give(both)
    desk.give(await waiting)
    assert desk.held == {}
    assert (await desk.take("m", Demand(slots=9))).slots == 9  # alone: the engine makes them one after the other


async def test_large_request_is_not_overtaken_for_ever() -> None:
    desk = admission(replace(replica("a", slots=8), kv_tokens=100))
    running = [await desk.take("m", Demand(tokens=20)) for _ in range(5)]
    large = asyncio.create_task(desk.take("m", Demand(tokens=90)))
    await turns()
    passed = 0
    while passed < MOST_OVERTAKES + 2:
        small = asyncio.create_task(desk.take("m", Demand(tokens=20)))
        desk.give(running.pop(0))
        await turns()
        if not small.done():
            break
        running.append(small.result())
        passed += 1
    assert passed == MOST_OVERTAKES
    for each in list(running):
        desk.give(each)
    desk.give(await large)
    desk.give(await small)
    assert desk.held == {}


async def test_round_robin_takes_each_in_turn_whatever_is_free() -> None:
    desk = admission(replica("a", slots=9), replica("b", slots=1), replica("c", slots=9), policy="round_robin")
    got = [(await desk.take("m")).id for _ in range(7)]
    assert got == ["a", "b", "c", "a", "c", "a", "c"]
    desk.apply(table(replica("a", slots=9), replica("c", slots=9)))  # a new table does not begin the round again
    assert (await desk.take("m")).id == "a"


async def test_session_returns_to_its_replica_and_spills_over_while_that_is_full() -> None:
    desk = admission(*(replica(id, slots=2) for id in "abc"), policy="session")
    demand = Demand(session=b"one")
    first, second = await desk.take("m", demand), await desk.take("m", demand)
    assert first.id == second.id
    spilled = await desk.take("m", demand)
    assert spilled.id != first.id
    desk.give(second)
    assert (await desk.take("m", demand)).id == first.id


async def test_stuck_reservation_keeps_its_slot_until_it_is_given_back() -> None:
    desk = admission(replica("a"))
    held = await desk.take("m")
    desk.mark_stuck(held)
    assert (desk.in_flight, desk.stuck) == ({"a": 1}, {"a": 1})
    desk.give(held)
    assert (desk.in_flight, desk.stuck) == ({}, {})


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 6), st.integers(1, 40))
def test_counts_return_to_zero_over_any_schedule_of_cancels_deaths_and_timeouts(
    seed: int, slots: int, queue: int, num_requests: int
) -> None:
    asyncio.run(run_schedule(random.Random(seed), slots, queue, num_requests))


async def run_schedule(rng: random.Random, slots: int, queue: int, num_requests: int) -> None:
    policy = rng.choice(["least_loaded", "round_robin", "session"])
    desk = admission(*fleet(rng, slots), requests=queue, wait_s=0.003, policy=policy)
    over = 0

    async def request() -> None:
        nonlocal over
        broke: set[str] = set()
        model = rng.choice(["m", "m", "n"])
        demand = Demand(caller=rng.choice("xyz"), tokens=rng.randrange(1, 60), session=rng.choice([b"1", b"2", None]))
        with contextlib.suppress(NotReady, Overloaded):
            for number in range(3):
                wait_s = rng.choice([None, 0.001])
                got = await desk.take(model, demand, excluded=broke, again=number > 0, wait_s=wait_s)
                try:
                    # Slots may shrink under running requests; a new one must never be let in above them.
                    over += desk.in_flight[got.id] > got.row.slots
                    await asyncio.sleep(rng.choice([0, 0, 0.0005, 0.002]))
                    if rng.random() < 0.6:
                        return
                    if rng.random() < 0.2:
                        desk.mark_stuck(got)
                    assert got.row.endpoint is not None
                    broke.add(got.row.endpoint.key)
                finally:
                    desk.give(got)

    running = []
    for _ in range(num_requests):
        running.append(asyncio.create_task(request()))
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        if rng.random() < 0.4:
            rng.choice(running).cancel()
        if rng.random() < 0.3:
            desk.apply(table(*fleet(rng, slots), draining=rng.random() < 0.1))
        if rng.random() < 0.2:
            use = KvUse(kv_tokens=100, used_fraction=rng.random(), preemptions=rng.randrange(3), waiting=0)
            desk.see(rng.choice(fleet(rng, slots)), use)
    results = await asyncio.gather(*running, return_exceptions=True)
    assert [r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)] == []
    assert (desk.held, desk.stuck, desk.queued) == ({}, {}, {})
    assert not over
    # Nothing is stuck either: what is free can be taken at once.
    desk.apply(table(replica("a", slots=slots)))
    assert [(await desk.take("m")).id for _ in range(slots)] == ["a"] * slots


def fleet(rng: random.Random, slots: int) -> list[ReplicaRow]:
    states = [State.READY, State.READY, State.LOADING, State.DRAINING]
    rows = [("a", "m"), ("b", "m"), ("c", "n")]
    return [
        replace(
            replica(id, slots=slots, model=model, state=rng.choice(states), life=rng.randrange(3)),
            kv_tokens=rng.choice([None, None, 40, 100]),
        )
        for id, model in rows
    ]
