"""The order of a change: properties over random layouts, and the cases that the manual names."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from llamarack.supervise.rolling import Await, Blocked, Start, Step, Stop, Unit, foreseen, next_step, ready_by_model

_GIB = 1024**3


def _unit(id: str, model: str = "m", ready: bool = True, **needs: int) -> Unit:
    """`c0=1` needs 1 GiB on card 0."""
    return Unit(id=id, model=model, needs_bytes={int(k[1:]): v * _GIB for k, v in needs.items()}, is_ready=ready)


def _words(steps: Sequence[Step]) -> str:
    return " ".join({Start: "+", Stop: "-", Await: "?"}[type(step)] + step.replica for step in steps)


def _plan(running: list[Unit], wanted: list[Unit], **free: int) -> str:
    steps, blocked = foreseen(running, wanted, {int(k[1:]): v * _GIB for k, v in free.items()}, ready_by_model(running))
    return _words(steps) + (" blocked" if blocked else "")


def test_replaces_one_replica_at_a_time_the_new_one_first() -> None:
    old = [_unit("m-0", c0=1), _unit("m-1", c0=1)]
    new = [_unit("m-0-g2", c0=1), _unit("m-1-g2", c0=1)]
    assert _plan(old, new, c0=1) == "+m-0-g2 -m-0 +m-1-g2 -m-1"


def test_releases_the_old_one_first_when_both_do_not_fit() -> None:
    assert _plan([_unit("a-0", "a", c0=8)], [_unit("b-0", "b", c0=8)], c0=2) == "-a-0 +b-0"
    assert _plan([_unit("a-0", "a", c0=8)], [_unit("b-0", "b", c0=8)], c0=9) == "+b-0 -a-0"


def test_makes_room_with_as_few_stops_as_can_be() -> None:
    old = [_unit("small-0", "small", c0=1), _unit("big-0", "big", c0=8)]
    new = [_unit("small-0-g2", "small", c0=6), _unit("big-0-g2", "big", c0=3)]
    assert _plan(old, new, c0=1) == "-big-0 +small-0-g2 -small-0 +big-0-g2"


def test_smaller_one_that_fits_goes_before_a_larger_one_that_waits_for_room() -> None:
    old = [_unit("a-0", "a", c0=4), _unit("b-0", "b", c0=4)]
    new = [_unit("a-0-g2", "a", c0=5), _unit("b-0-g2", "b", c0=1)]
    assert _plan(old, new, c0=2) == "+b-0-g2 -b-0 +a-0-g2 -a-0"


def test_what_is_not_ready_goes_at_once_and_what_is_kept_stays() -> None:
    old = [_unit("m-0", c0=1), _unit("m-1", c0=1, ready=False), _unit("k-0", "k", c0=1)]
    new = [_unit("k-0", "k", c0=1), _unit("m-0-g2", c0=1)]
    assert _plan(old, new, c0=0) == "-m-1 +m-0-g2 -m-0"


def test_waits_for_what_stays_before_the_last_ready_one_goes() -> None:
    staying = _unit("m-0", ready=False)
    assert _plan([staying, _unit("m-1")], [staying]) == "?m-0 -m-1"
    assert next_step([staying, _unit("m-1")], [staying], {}, {"m": 1}, waits=False) == Stop(replica="m-1")


def test_more_and_fewer_replicas() -> None:
    assert _plan([_unit("m-0", c0=1)], [_unit("m-0", c0=1), _unit("m-1-g2", c0=1)], c0=1) == "+m-1-g2"
    assert _plan([_unit("m-0", c0=1), _unit("m-1", c0=1)], [_unit("m-0", c0=1)], c0=0) == "-m-1"
    three = [_unit(f"m-{i}", c0=1) for i in range(3)]
    assert _plan(three, [_unit("m-0-g2", c0=1)], c0=1) == "+m-0-g2 -m-0 -m-1 -m-2"


def test_what_cannot_fit_is_told_with_the_card_and_the_bytes() -> None:
    step = next_step([_unit("a-0", "a", c0=1)], [_unit("a-0", "a", c0=1), _unit("b-0", "b", c1=9)], {0: 0, 1: _GIB}, {})
    assert isinstance(step, Blocked)
    assert step.words == "b-0 needs 9.0 GiB on card 1, 1.0 GiB are free"


# -- properties ---------------------------------------------------------------------------------------------------

_MODELS = ("a", "b", "c")
_DEVICES = (-1, 0, 1)
_needs = st.dictionaries(st.sampled_from(_DEVICES), st.integers(1, 8), max_size=2)


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[list[Unit], list[Unit]]:
    """An old and a new layout that shares some of its replicas."""
    old = [
        Unit(
            id=f"{model}-{i}",
            model=model,
            needs_bytes=draw(_needs),
            is_ready=draw(st.booleans()) or draw(st.booleans()),
        )
        for model in _MODELS
        for i in range(draw(st.integers(0, 3)))
    ]
    kept = [unit for unit in old if draw(st.integers(0, 3)) == 0]
    new = kept + [
        Unit(id=f"{model}-{i}-g2", model=model, needs_bytes=draw(_needs))
        for model in _MODELS
        for i in range(draw(st.integers(0, 3)))
    ]
    return old, new


class _Rack:
    """Executes steps as the supervisor does: forward, and back after a failed step."""

    def __init__(self, old: Sequence[Unit], new: Sequence[Unit], free: Mapping[int, int], fails_at: int | None) -> None:
        self.old, self.new = list(old), list(new)
        self.running = list(old)
        self.free = dict(free)
        self.ready_before = ready_by_model(old)
        self.fails_at = fails_at
        self.steps: list[Step] = []
        self.went_back = False
        self.fewest = dict(self.ready_before)

    def run(self) -> None:
        target = self.new
        while True:
            step = next_step(self.running, target, self.free, self.ready_before, waits=not self.went_back)
            if step is None:
                return
            if isinstance(step, Blocked):
                assert not self.went_back, "what ran before must fit again"
                target, self.went_back = self.old, True
                continue
            failed = len(self.steps) == self.fails_at
            self.steps.append(step)
            assert len(self.steps) < 200
            if failed and not self.went_back:
                target, self.went_back = self.old, True
                continue
            self._take(step)

    def _take(self, step: Step) -> None:
        unit = next(each for each in (*self.old, *self.new) if each.id == step.replica)
        if isinstance(step, Await):
            self.running = [replace(each, is_ready=True) if each.id == unit.id else each for each in self.running]
            return
        sign = -1 if isinstance(step, Start) else 1
        if isinstance(step, Start):
            assert all(self.free.get(d, 0) >= n for d, n in unit.needs_bytes.items()), "started where it does not fit"
            self.running.append(Unit(id=unit.id, model=unit.model, needs_bytes=unit.needs_bytes))
        else:
            self.running = [each for each in self.running if each.id != unit.id]
        for device, needs in unit.needs_bytes.items():
            self.free[device] = self.free.get(device, 0) + sign * needs
        for model, count in ready_by_model(self.running).items():
            self.fewest[model] = min(self.fewest.get(model, 0), count)
        for model in set(self.fewest) - set(ready_by_model(self.running)):
            self.fewest[model] = 0


def _ids(units: Sequence[Unit]) -> list[str]:
    return sorted(unit.id for unit in units)


_free = st.fixed_dictionaries({device: st.integers(0, 40) for device in _DEVICES})


@given(_layouts(), _free, st.none() | st.integers(0, 8))
@settings(deadline=None, max_examples=400)
def test_ends_at_the_new_layout_or_at_the_old_one_whatever_step_fails(
    layouts: tuple[list[Unit], list[Unit]], free: dict[int, int], fails_at: int | None
) -> None:
    rack = _Rack(*layouts, free, fails_at)
    rack.run()
    assert _ids(rack.running) == _ids(rack.old if rack.went_back else rack.new)


@given(_layouts(), _free)
@settings(deadline=None, max_examples=400)
def test_stops_for_room_only_what_gives_room_and_only_when_nothing_fits(
    layouts: tuple[list[Unit], list[Unit]], free: dict[int, int]
) -> None:
    rack = _Rack(*layouts, free, None)
    steps: list[tuple[list[Unit], dict[int, int], Step]] = []
    take = rack._take
    rack._take = lambda step: (steps.append((list(rack.running), dict(rack.free), step)), take(step))[1]  # type: ignore[method-assign]
    rack.run()
    by_id = {unit.id: unit for unit in (*rack.old, *rack.new)}
    for running, then_free, step in steps:
        if not isinstance(step, Stop) or step.makes_room_for is None:
            continue
        target = rack.old if rack.went_back else rack.new
        pending = [unit for unit in target if unit.id not in _ids(running)]
        if rack.went_back:
            continue
        assert all(any(then_free.get(d, 0) < n for d, n in unit.needs_bytes.items()) for unit in pending)
        needed = by_id[step.makes_room_for].needs_bytes
        assert any(then_free.get(d, 0) < n and by_id[step.replica].needs_bytes.get(d) for d, n in needed.items())


@given(_layouts(), st.none() | st.integers(0, 8))
@settings(deadline=None, max_examples=400)
def test_never_below_the_needed_ready_replicas_where_all_fit_side_by_side(
    layouts: tuple[list[Unit], list[Unit]], fails_at: int | None
) -> None:
    old, new = layouts
    room = dict.fromkeys(_DEVICES, 10000)
    rack = _Rack(old, new, room, fails_at)
    rack.run()
    after = ready_by_model([Unit(id=unit.id, model=unit.model) for unit in new])
    for model, before in ready_by_model(old).items():
        assert rack.fewest.get(model, 0) >= min(before, after.get(model, 0)), _words(rack.steps)
    if not rack.went_back:  # at most one more of a model than it had or will have
        assert all(not isinstance(step, Stop) or step.makes_room_for is None for step in rack.steps)


@given(_layouts(), _free)
@settings(deadline=None, max_examples=200)
def test_what_is_foreseen_is_what_happens(layouts: tuple[list[Unit], list[Unit]], free: dict[int, int]) -> None:
    rack = _Rack(*layouts, free, None)
    steps, blocked = foreseen(rack.old, rack.new, free, rack.ready_before)
    rack.run()
    assert (blocked is None) == (not rack.went_back)
    assert list(steps) == rack.steps[: len(steps)]
