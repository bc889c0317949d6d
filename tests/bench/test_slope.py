"""The slope's interval: right on average, neither blind nor jumpy."""

from __future__ import annotations

import random

import pytest

from bench.slope import MIN_SAMPLES, slope

SAMPLES = 24


def noise(chance: random.Random, correlation: float) -> list[float]:
    values = [chance.gauss(0, 1)]
    for _ in range(SAMPLES - 1):
        values.append(correlation * values[-1] + chance.gauss(0, 1))
    return values


@pytest.mark.parametrize(("correlation", "least"), [(0.0, 0.93), (0.5, 0.9), (0.8, 0.86)])
@pytest.mark.parametrize("true", [0.0, 3.0])
def test_the_interval_holds_the_true_slope(correlation: float, least: float, true: float) -> None:
    chance, runs, held = random.Random(7), 400, 0
    for _ in range(runs):
        found = slope(range(SAMPLES), [true * t + e for t, e in enumerate(noise(chance, correlation))])
        held += found.low <= true <= found.high
    assert held / runs >= least


def test_a_leak_of_the_noises_size_is_seen() -> None:
    """Half of the noise's deviation each round."""
    chance = random.Random(3)
    seen = [slope(range(SAMPLES), [t / 2 + e for t, e in enumerate(noise(chance, 0.3))]) for _ in range(100)]
    assert sum(not found.includes_zero for found in seen) >= 90


def test_exact_series() -> None:
    line = slope(range(10), [5.0 + 2 * t for t in range(10)])
    assert (line.estimate, line.low, line.high) == pytest.approx((2, 2, 2))
    assert slope(range(10), [5.0] * 10).includes_zero


def test_too_little_to_tell() -> None:
    with pytest.raises(ValueError, match="least"):
        slope(range(MIN_SAMPLES - 1), [1.0] * (MIN_SAMPLES - 1))
    with pytest.raises(ValueError, match="vary"):
        slope([1.0] * MIN_SAMPLES, [1.0] * MIN_SAMPLES)
