"""The predictor learns an engine's real speeds, keeps them, and survives damage."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.engine.observe import LoadObservation, StepObservation
from perilune.service.predictor import Predictor
from perilune.service.rates import Rates
from perilune.telemetry import Telemetry


class Recorder:
    def __init__(self) -> None:
        self.observed: list[tuple[str, float]] = []

    def count(self, name: str, value: float, labels: dict[str, str]) -> None: ...
    def gauge(self, name: str, value: float, labels: dict[str, str]) -> None: ...
    def observe(self, name: str, value: float, labels: dict[str, str]) -> None:
        self.observed.append((name, value))


@given(st.floats(2e-4, 5e-3), st.floats(0, 8e-7))
def test_learns_rates_from_chunks(per_token_s: float, per_context_s: float) -> None:
    truth = Rates(per_token_s, per_context_s)
    predictor = Predictor(None, Telemetry(), 1024)
    for _ in range(3):
        for start in range(0, 7680, 512):
            predictor.observe_prefill(512, start, truth.prefill_s(512, start))
    for tokens, start in ((2000, 0), (7680, 0), (500, 7000)):
        assert predictor.rates.prefill_s(tokens, start) == pytest.approx(truth.prefill_s(tokens, start), rel=0.08)


def test_follows_a_machine_that_became_slower() -> None:
    predictor = Predictor(None, Telemetry(), 1024)
    for _ in range(100):
        predictor.observe_prefill(512, 0, 0.5)
    for _ in range(150):
        predictor.observe_prefill(512, 0, 1.0)
    assert predictor.rates.prefill_s(512) == pytest.approx(1.0, rel=0.08)


def test_tiny_chunks_say_nothing_about_the_rate() -> None:
    predictor = Predictor(None, Telemetry(), 1024)
    before = predictor.rates
    for _ in range(100):
        predictor.observe_prefill(8, 0, 0.5)
    assert predictor.rates == before
    assert not predictor.measured


def test_a_slow_machine_with_small_chunks_is_measured_too() -> None:
    predictor = Predictor(None, Telemetry(), 1024)
    for start in range(0, 2048, 40):
        predictor.observe_prefill(40, start, 0.5)
    assert predictor.measured
    assert predictor.rates.prefill_s(1000) == pytest.approx(12.5, rel=0.1)


@given(st.lists(st.tuples(st.integers(-5, 5000), st.integers(0, 100_000), st.floats(-1, 100)), max_size=30))
def test_rates_stay_sane_whatever_is_observed(observations: list[tuple[int, int, float]]) -> None:
    predictor = Predictor(None, Telemetry(), 1024)
    for tokens, start, seconds in observations:
        predictor.observe_prefill(tokens, start, seconds)
        predictor.observe_load(tokens, seconds)
        predictor.observe_decode(seconds)
        predictor.observe_ttft(1.0, seconds, tokens)
    rates = predictor.rates
    assert rates.prefill_s_per_token > 0
    assert rates.prefill_s_per_token_context >= 0
    assert 0 <= rates.error <= 0.5
    assert rates.ttft_s(1000) > 0


def test_the_next_process_starts_with_measured_rates(tmp_path: Path) -> None:
    path = tmp_path / "rates-abc.json"
    first = Predictor(path, Telemetry(), 1024)
    assert not first.measured
    first.save()
    assert not path.exists(), "a guess is not kept"
    for start in range(0, 4096, 512):
        first.observe_prefill(512, start, Rates(1e-3, 1e-7).prefill_s(512, start))
    first.save()
    second = Predictor(path, Telemetry(), 1024)
    assert second.measured
    assert second.rates == first.rates


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"prefill_s_per_token": -1}', '{"other": 1}', '{"error": "x"}'])
def test_damaged_rates_are_ignored(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "rates-abc.json"
    path.write_text(damage)
    predictor = Predictor(path, Telemetry(), 1024)
    assert predictor.rates == Rates()
    assert not predictor.measured


def test_the_error_is_a_metric_and_a_margin() -> None:
    recorder = Recorder()
    predictor = Predictor(None, Telemetry(recorder), 1024)
    for _ in range(50):
        predictor.observe_ttft(1.0, 1.25, 5000)
    assert ("ttft_prediction_error_ratio", 0.2) in recorder.observed
    assert predictor.rates.error == pytest.approx(0.2, abs=0.01)


def test_learns_from_pure_steps_and_loads_only() -> None:
    predictor = Predictor(None, Telemetry(), 1024)
    before = predictor.rates
    predictor.step(StepObservation(512, 0, 3, 0.5))
    predictor.step(StepObservation(0, 100, 2, 0.5))
    assert predictor.rates == before
    for _ in range(3):
        predictor.step(StepObservation(512, 0, 0, 0.25))
    predictor.step(StepObservation(0, 0, 1, 0.5))
    for _ in range(30):
        predictor.load(LoadObservation(1024 * 1000, 0.5))
    assert predictor.rates.prefill_s(512) == pytest.approx(0.25, rel=0.1)
    assert predictor.rates.decode_s > before.decode_s
    assert predictor.rates.load_s_per_token == pytest.approx(5e-4, rel=0.01)


def test_the_overhead_is_learnt_from_prompts_that_are_all_cached() -> None:
    predictor = Predictor(None, Telemetry(), 1024)
    for _ in range(40):
        predicted = predictor.rates.ttft_s(20)
        predictor.observe_ttft(predicted, 0.4, 20)
    assert predictor.rates.ttft_s(20) == pytest.approx(0.4, rel=0.05)
    overhead = predictor.rates.overhead_s
    predictor.observe_ttft(1.0, 9.0, 4000)
    assert predictor.rates.overhead_s == overhead
