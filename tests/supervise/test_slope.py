"""A leak is found by its slope within 200 samples, whatever the level; what only looks like one is not."""

import math
import random

import numpy
import pytest

from llamarack.supervise.slope import FEWEST, WINDOW, Leak, Sample, find_leak, mann_kendall, theil_sen
from llamarack.units import GIB, MIB


def _series(level: float, per_sample: float, noise: float, count: int = WINDOW, seed: int = 1) -> list[Sample]:
    chance = random.Random(seed)
    return [
        Sample(at_s=5.0 * i, memory_used_bytes=int(level + per_sample * i + chance.gauss(0, noise)))
        for i in range(count)
    ]


@pytest.mark.parametrize("level", [50 * MIB, 20 * GIB])
@pytest.mark.parametrize("noise", [0.0, 2 * MIB])
def test_leak_of_a_tenth_of_a_mebibyte_a_sample_is_found_at_any_level(level: int, noise: float) -> None:
    leak = find_leak(_series(level, 0.1 * MIB, noise))
    assert isinstance(leak, Leak)
    assert leak.bytes_per_s == pytest.approx(0.1 * MIB / 5, rel=0.15)
    assert leak.samples == WINDOW


def test_large_leak_is_found_as_soon_as_there_are_enough_samples() -> None:
    assert find_leak(_series(GIB, MIB, MIB, FEWEST)) is not None
    assert find_leak(_series(GIB, MIB, MIB, FEWEST - 1)) is None


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_leak(seed: int) -> None:
    assert find_leak(_series(GIB, 0, 20 * MIB, seed=seed)) is None


def test_cache_that_fills_is_no_leak() -> None:
    samples = [
        Sample(at_s=5.0 * i, memory_used_bytes=int(GIB + 800 * MIB * (1 - math.exp(-i / 25)))) for i in range(WINDOW)
    ]
    assert find_leak(samples) is None


def test_one_step_up_is_no_leak() -> None:
    samples = [Sample(at_s=5.0 * i, memory_used_bytes=GIB + (300 * MIB if i > 90 else 0)) for i in range(WINDOW)]
    assert find_leak(samples) is None


def test_garbage_that_is_collected_again_and_again_is_no_leak() -> None:
    samples = [Sample(at_s=5.0 * i, memory_used_bytes=GIB + i % 40 * 4 * MIB) for i in range(WINDOW)]
    assert find_leak(samples) is None


def test_rise_of_less_than_an_allocators_grain_is_no_leak() -> None:
    assert find_leak(_series(GIB, 1000, 0)) is None


def test_memory_that_is_given_back_is_no_leak() -> None:
    assert find_leak(_series(GIB, -MIB, MIB)) is None


def test_statistics_are_the_textbooks() -> None:
    values = numpy.array([1.0, 2, 3, 4, 5])
    # S = 10, variance = 5 * 4 * 15 / 18 = 16.667; (10 - 1) / 4.0825
    assert mann_kendall(values) == pytest.approx(2.2045, abs=1e-4)
    assert theil_sen(numpy.arange(5.0), numpy.array([0.0, 2, 4, 100, 8])) == pytest.approx(2.0)
