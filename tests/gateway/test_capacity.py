from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from llamarack.engine.dialect import Endpoint, KvUse
from llamarack.engine.vllm import Vllm
from llamarack.gateway.capacity import Held, Pool, corrected, has_room
from llamarack.gateway.demand import Learned, quantile
from llamarack.supervise.state import State
from llamarack.supervise.table import ReplicaRow

FRACTION = st.one_of(st.none(), st.floats(0, 1))
COUNT = st.one_of(st.none(), st.integers(0, 50))
USE = st.builds(
    KvUse, kv_tokens=st.sampled_from([None, 1000]), used_fraction=FRACTION, preemptions=COUNT, waiting=COUNT
)


def row(slots: int) -> ReplicaRow:
    endpoint = Endpoint(socket=None, port=1, key="k", served_name="m")
    return ReplicaRow(
        id="a", model="m", engine="vllm", state=State.READY, endpoint=endpoint, slots=slots, context_tokens=100
    )


@given(
    st.integers(1, 8), st.integers(0, 9), st.integers(0, 5000), st.integers(1, 4), st.integers(1, 5000),
    st.integers(1, 5000),
)  # fmt: skip
def test_room_is_never_above_the_slots_nor_above_the_pool(
    slots: int, running: int, tokens: int, choices: int, wanted: int, limit: int
) -> None:
    held = Held(slots=running, tokens=tokens if running else 0)
    ask = Held(slots=choices, tokens=wanted)
    with_pool = has_room(row(slots), held, ask, Pool(kv_tokens=limit))
    if not running:
        assert with_pool  # never refused for ever
        return
    assert has_room(row(slots), held, ask, None) == (running + choices <= slots)
    if with_pool:
        assert running + choices <= slots
        assert tokens + wanted <= limit


def test_half_a_page_of_each_sequence_holds_nothing() -> None:
    """Ten of 100 tokens fit a cache of 1,000; in pages of 128 each takes 164 on average."""
    one = Held(slots=1, tokens=100)

    def most(page_tokens: int) -> int:
        pool, held = Pool(kv_tokens=1000, page_tokens=page_tokens), Held()
        while has_room(row(99), held, one, pool):
            held = held.plus(one)
        return held.slots

    assert (most(1), most(16), most(128)) == (10, 9, 6)
    told = KvUse(kv_tokens=640, used_fraction=0.5, preemptions=3, waiting=0, page_tokens=16)
    known = corrected(None, told, turned_away=False)
    assert known is not None
    assert known.page_tokens == 16
    silent = KvUse(kv_tokens=None, used_fraction=0.5, preemptions=3, waiting=0)
    again = corrected(known, silent, turned_away=False)
    assert again is not None
    assert again.page_tokens == 16


@given(st.lists(st.tuples(USE, st.booleans()), max_size=60))
def test_overcommit_stays_bounded_and_never_grows_on_a_preemption(looks: list[tuple[KvUse, bool]]) -> None:
    pool: Pool | None = Pool(kv_tokens=1000)
    for use, waits in looks:
        before = pool
        pool = corrected(pool, use, turned_away=waits)
        assert pool is not None
        assert before is not None
        assert 0.5 <= pool.overcommit <= 4.0
        preempted = None not in (before.preemptions, use.preemptions) and (use.preemptions or 0) > (
            before.preemptions or 0
        )
        if preempted:
            assert pool.overcommit < before.overcommit or before.overcommit == 0.5
        if pool.overcommit > before.overcommit:
            assert waits
            assert use.used_fraction is not None
            assert use.used_fraction < 0.5


def test_overcommit_finds_a_load_whose_guesses_are_four_times_too_high() -> None:
    """Requests reserve 400 tokens and hold 100: a pool of 1,000 takes five or more, without a preemption."""
    pool: Pool | None = Pool(kv_tokens=1000)
    for _ in range(200):
        assert pool is not None
        running = min(20, pool.limit_tokens // 400)
        used = min(1.0, running * 100 / 1000)
        preemptions = pool.preemptions or 0
        use = KvUse(kv_tokens=1000, used_fraction=used, preemptions=preemptions + (running > 10), waiting=0)
        pool = corrected(pool, use, turned_away=True)
    assert pool is not None
    assert 5 <= pool.limit_tokens // 400 <= 10
    assert pool.preemptions == 0


def test_pool_is_unknown_until_the_engine_tells_its_size() -> None:
    nothing = KvUse(kv_tokens=None, used_fraction=0.5, preemptions=0, waiting=0)
    assert corrected(None, nothing, turned_away=True) is None
    told = KvUse(kv_tokens=640, used_fraction=0.5, preemptions=3, waiting=0)
    assert corrected(None, told, turned_away=False) == Pool(kv_tokens=640, preemptions=3, peak_fraction=0.5)


@given(st.lists(st.floats(0, 1e6), min_size=16, max_size=256))
def test_quantile_is_one_of_the_values_and_has_its_share_below(values: list[float]) -> None:
    found = quantile(deque(values), 0.9, 16)
    assert found in values
    assert sum(value <= found for value in values if found is not None) >= 0.9 * len(values)


def test_demand_is_learned_from_what_requests_took() -> None:
    learned = Learned()
    assert learned.output_tokens(None) == 512
    assert learned.output_tokens(4000) == 4000  # nothing known: the client's own limit
    assert learned.prompt_tokens(1000) == 400
    assert learned.usual_s == 0
    assert not learned.is_settled
    for number in range(112):
        learned.note(body_bytes=1000, prompt_tokens=250, output_tokens=number, seconds=2.0)
    assert learned.output_tokens(4000) == 100
    assert learned.output_tokens(20) == 20
    assert learned.prompt_tokens(1000) == 250
    assert learned.usual_s == 2.0


def test_vllm_tells_pool_use_and_preemptions() -> None:
    text = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
"""
    use = KvUse(kv_tokens=1600, used_fraction=0.25, preemptions=3, waiting=2, page_tokens=16)
    assert Vllm().kv_use(text) == use
    assert Vllm().kv_use("llamacpp:requests_processing 1\n") is None
