"""The share of predictions that hold is the share that was asked for, also when the world changes."""

from __future__ import annotations

import random

import pytest

from perilune.service.calibration import Calibration
from perilune.service.predictor import Predictor
from perilune.service.rates import Rates
from perilune.telemetry import Telemetry


def coverage(calibration: Calibration, ratios: list[float]) -> float:
    return sum(calibration.observe(ratio) for ratio in ratios) / len(ratios)


def lognormal(seed: int, count: int, middle: float, spread: float) -> list[float]:
    chance = random.Random(seed)
    return [middle * chance.lognormvariate(0.0, spread) for _ in range(count)]


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("share", [0.9, 0.99])
def test_the_share_holds(share: float, spread: float) -> None:
    held = coverage(Calibration(share, 1.2), lognormal(1, 1500, 1.0, spread))
    assert held == pytest.approx(share, abs=0.03 if share < 0.95 else 0.01)


def test_the_share_holds_while_a_machine_becomes_slower_and_faster_again() -> None:
    ratios = [
        ratio
        for middle in (1.0, 1.5, 3.0, 2.0, 1.0, 0.4)
        for ratio in lognormal(int(10 * middle), 200, middle, 0.2)
    ]
    assert 0.85 <= coverage(Calibration(0.9, 1.2), ratios) <= 0.95


def test_a_fixed_quantile_would_not_hold() -> None:
    """What the correction is for."""
    past = sorted(lognormal(1, 500, 1.0, 0.2))
    fixed = past[int(0.9 * len(past))]
    now = lognormal(2, 500, 1.5, 0.2)
    assert sum(ratio <= fixed for ratio in now) / len(now) < 0.5


def test_it_starts_with_what_was_known_before() -> None:
    assert Calibration(0.9, 1.5).factor == pytest.approx(1.5, rel=0.03)


def test_the_predictor_keeps_factors_and_never_turns_them_round() -> None:
    predictor = Predictor(None, Telemetry(), 1024, Rates(p90=1.1, p99=1.3))
    for ratio in lognormal(3, 300, 2.0, 0.3):
        predictor.observe_ttft(1.0, ratio, 5000)
        rates = predictor.rates
        assert 0 < rates.p90 <= rates.p99
    assert predictor.rates.factor(0.9) == pytest.approx(2.0 * 1.47, rel=0.15)
    assert predictor.rates.factor(0.99) > predictor.rates.factor(0.9) > predictor.rates.factor(0.5) == 1.0
