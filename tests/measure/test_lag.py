"""A loop that is blocked shows it."""

import asyncio
import time

from llamarack.measure.lag import INTERVAL_S, LagMonitor, _missed


async def test_blocked_loop_shows_at_least_the_length_of_the_block() -> None:
    with LagMonitor() as monitor:
        await asyncio.sleep(3 * INTERVAL_S)
        start_ns = time.monotonic_ns()
        time.sleep(0.05)  # noqa: ASYNC251 - the fault under test
        await asyncio.sleep(3 * INTERVAL_S)
        lag = monitor.between(start_ns, time.monotonic_ns())
    assert lag.event_loop_s.max is not None
    assert lag.event_loop_s.max >= 0.05 - 2 * INTERVAL_S
    assert lag.event_loop_s.n >= 8  # one late wake-up stands for the ones it swallowed
    assert lag.cpu_fraction is not None


def test_block_counts_for_every_sample_it_swallowed() -> None:
    assert [round(lag, 4) for lag in _missed(0.012)] == [0.012, 0.007, 0.002]
    assert _missed(0.0) == [0.0]


async def test_span_without_samples_is_unknown() -> None:
    with LagMonitor() as monitor:
        lag = monitor.between(0, 1)
    assert lag.event_loop_s.max is None
    assert lag.cpu_fraction is None
