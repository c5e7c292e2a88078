import json
import math
import random

import pytest

from llamarack.supervise.traffic import SLOT_S, SLOTS, TrafficLog, traffic_record

START_S = 1_700_000_000.0  # begins a slot


class Clock:
    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


def _log() -> tuple[TrafficLog, Clock]:
    clock = Clock()
    return TrafficLog(clock), clock


def _copy(log: TrafficLog) -> TrafficLog:
    """As the supervisor has it, over JSON."""
    copy = TrafficLog()
    copy.take(json.loads(json.dumps(log.report(whole=True))))
    return copy


def test_quantiles_are_within_two_and_a_half_percent_of_the_values_over_all_workers() -> None:
    draws = random.Random(7)
    values = [math.exp(draws.gauss(-3, 1.2)) for _ in range(1000)]
    logs = [_log()[0] for _ in range(3)]
    for number, value in enumerate(values):
        logs[number % 3].count_request("m", failed=False, first_token_s=value, per_token_s=value / 10)
    record = traffic_record("m", map(_copy, logs), START_S + 1)
    ordered = sorted(values)
    for name, rank in (("p50", 500), ("p90", 900), ("p99", 990)):
        assert record["first_token_s"][name] == pytest.approx(ordered[rank - 1], rel=0.0251)
        assert record["per_token_s"][name] == pytest.approx(ordered[rank - 1] / 10, rel=0.0251)
    assert record["requests"] == record["first_token_s"]["n"] == 1000


@pytest.mark.parametrize(
    ("count", "known"), [(0, set()), (9, {"p50"}), (10, {"p50", "p90"}), (100, {"p50", "p90", "p99"})]
)
def test_quantile_that_the_count_cannot_support_is_unknown(count: int, known: set[str]) -> None:
    log, _ = _log()
    for _ in range(count):
        log.count_request("m", failed=False, first_token_s=0.2, per_token_s=None)
    found = traffic_record("m", [log], START_S)["first_token_s"]
    assert {name for name in ("p50", "p90", "p99") if found[name] is not None} == known


def test_rate_is_of_the_last_five_to_ten_seconds_and_history_of_the_finished_slots() -> None:
    log, clock = _log()
    log.count_tokens("m", 100)
    clock.now_s += SLOT_S
    log.count_tokens("m", 50)
    record = traffic_record("m", [_copy(log)], clock.now_s + 2.5)
    assert record["tokens_per_s"] == pytest.approx(150 / 7.5)
    assert record["tokens_per_s_history"][-1] == 20
    assert len(record["tokens_per_s_history"]) == SLOTS - 1
    later = traffic_record("m", [_copy(log)], clock.now_s + 3 * SLOT_S)
    assert later["tokens_per_s"] == 0
    assert later["tokens_per_s_history"][-4:] == [20, 10, 0, 0]


def test_correction_below_zero_is_never_shown_as_a_negative_rate() -> None:
    log, clock = _log()
    log.count_tokens("m", -2)
    assert traffic_record("m", [log], clock.now_s + 1)["tokens_per_s"] == 0


def test_failures_are_counted_and_other_models_are_not() -> None:
    log, _ = _log()
    log.count_request("m", failed=True, first_token_s=None, per_token_s=None)
    log.count_request("other", failed=True, first_token_s=None, per_token_s=None)
    record = traffic_record("m", [log], START_S)
    assert (record["requests"], record["failures"]) == (1, 1)


def test_report_holds_what_moved_and_the_newer_view_of_a_slot_wins() -> None:
    log, clock = _log()
    seen = TrafficLog()
    log.count_tokens("m", 5)
    seen.take(log.report())
    assert log.report() == {}
    log.count_tokens("m", 5)
    clock.now_s += SLOT_S
    log.count_tokens("m", 1)
    report = log.report()
    assert sorted(int(at) for at in report["m"]) == [START_S // SLOT_S, START_S // SLOT_S + 1]
    seen.take(json.loads(json.dumps(report)))
    assert sum(slot.tokens for slot in seen.models["m"].values()) == 11


def test_old_slots_are_dropped_where_they_are_written_and_where_they_arrive() -> None:
    log, clock = _log()
    seen = TrafficLog()
    for _ in range(3 * SLOTS):
        log.count_tokens("m", 1)
        seen.take(log.report())
        clock.now_s += SLOT_S
    assert len(log.models["m"]) == len(seen.models["m"]) == SLOTS
    clock.now_s += 2 * SLOTS * SLOT_S
    assert traffic_record("m", [seen], clock.now_s)["tokens_per_s_history"] == [0] * (SLOTS - 1)
