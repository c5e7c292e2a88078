import asyncio
import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarack.config import Defaults
from llamarack.engine.adaptor import Endpoint
from llamarack.errors import NotReady, Overloaded
from llamarack.gateway.admission import Admission
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


def admission(*replicas: ReplicaRow, requests: int = 256, wait_s: float = 30.0) -> Admission:
    made = Admission(max_queue_requests=requests, max_queue_s=wait_s)
    made.apply(table(*replicas))
    return made


async def turns(times: int = 5) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_take_fills_the_least_loaded_share_and_then_waits_in_order() -> None:
    desk = admission(replica("a", slots=2), replica("b", slots=1))
    got = [(await desk.take("m")).id for _ in range(3)]
    assert sorted(got) == ["a", "a", "b"]
    order: list[int] = []

    async def wait(number: int) -> None:
        await desk.take("m")
        order.append(number)

    waiting = [asyncio.create_task(wait(i)) for i in range(3)]
    await turns()
    assert desk.queued == {"m": 3}
    for id in ("b", "a", "a"):
        desk.give(id, "m")
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
    assert {(await desk.take("m")).id for _ in range(2)} == {"a", "b"}
    first = asyncio.create_task(desk.take("m"))
    await turns()
    again = asyncio.create_task(desk.take("m", excluded={"a-0"}, again=True))
    await turns()
    desk.give("a", "m")
    assert (await first).id == "a"
    desk.give("b", "m")
    assert (await again).id == "b"


async def test_take_behind_one_that_waits_for_another_replica_uses_the_free_slot() -> None:
    desk = admission(replica("a"), replica("b"))
    assert (await desk.take("m", excluded={"b-0"})).id == "a"
    again = asyncio.create_task(desk.take("m", excluded={"b-0"}, again=True))
    await turns()
    async with asyncio.timeout(5):
        assert (await desk.take("m")).id == "b"
    desk.give("a", "m")
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
    assert (await again).endpoint == replica("a", life=1).endpoint


async def test_drain_turns_away_new_requests_and_serves_those_that_wait() -> None:
    desk = admission(replica("a"))
    await desk.take("m")
    waiting = asyncio.create_task(desk.take("m"))
    await turns()
    desk.apply(table(replica("a"), draining=True))
    with pytest.raises(NotReady, match="shutting down"):
        await desk.take("m")
    desk.give("a", "m")
    assert (await waiting).id == "a"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 6), st.integers(1, 40))
def test_counts_return_to_zero_over_any_schedule_of_cancels_deaths_and_timeouts(
    seed: int, slots: int, queue: int, num_requests: int
) -> None:
    asyncio.run(run_schedule(random.Random(seed), slots, queue, num_requests))


async def run_schedule(rng: random.Random, slots: int, queue: int, num_requests: int) -> None:
    desk = admission(*fleet(rng, slots), requests=queue, wait_s=0.003)
    over = 0

    async def request() -> None:
        nonlocal over
        broke: set[str] = set()
        model = rng.choice(["m", "m", "n"])
        with contextlib.suppress(NotReady, Overloaded):
            for number in range(3):
                row = await desk.take(model, excluded=broke, again=number > 0, wait_s=rng.choice([None, 0.001]))
                try:
                    # Slots may shrink under running requests; a new one must never be let in above them.
                    over += desk.in_flight[row.id] > row.slots
                    await asyncio.sleep(rng.choice([0, 0, 0.0005, 0.002]))
                    if rng.random() < 0.6:
                        return
                    assert row.endpoint is not None
                    broke.add(row.endpoint.key)
                finally:
                    desk.give(row.id, model)

    running = []
    for _ in range(num_requests):
        running.append(asyncio.create_task(request()))
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        if rng.random() < 0.4:
            rng.choice(running).cancel()
        if rng.random() < 0.3:
            desk.apply(table(*fleet(rng, slots), draining=rng.random() < 0.1))
    results = await asyncio.gather(*running, return_exceptions=True)
    assert [r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)] == []
    assert desk.in_flight == {}
    assert desk.queued == {}
    assert not over
    # Nothing is stuck either: what is free can be taken at once.
    desk.apply(table(replica("a", slots=slots)))
    assert [(await desk.take("m")).id for _ in range(slots)] == ["a"] * slots


def fleet(rng: random.Random, slots: int) -> list[ReplicaRow]:
    states = [State.READY, State.READY, State.LOADING, State.DRAINING]
    rows = [("a", "m"), ("b", "m"), ("c", "n")]
    return [
        replica(id, slots=slots, model=model, state=rng.choice(states), life=rng.randrange(3)) for id, model in rows
    ]
