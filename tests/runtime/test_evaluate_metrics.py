"""Metrics of evaluation: against plain formulas, known distributions, and simulated noise of known size."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.runtime.evaluate import metrics

ROWS, VOCAB = 300, 37


def _logits(seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def _next_tokens(rows: int = ROWS) -> torch.Tensor:
    return torch.arange(rows) * 7 % VOCAB


def test_compare_follows_the_definitions_row_by_row() -> None:
    reference, candidate, tokens = _logits(0), _logits(1), _next_tokens()
    got = metrics.compare(reference, candidate, tokens, first_position=100)
    for row in (0, metrics.ROWS_AT_ONCE - 1, metrics.ROWS_AT_ONCE, ROWS - 1):
        p, q = (np.exp(x[row].double().numpy()) for x in (reference, candidate))
        p, q = p / p.sum(), q / q.sum()
        assert got.kld[row] == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-5)
        assert got.same_top[row] == (p.argmax() == q.argmax())
        assert got.reference_nll[row] == pytest.approx(-math.log(p[tokens[row]]), rel=1e-5)
        assert got.candidate_nll[row] == pytest.approx(-math.log(q[tokens[row]]), rel=1e-5)
        assert got.positions[row] == 100 + row


def test_equal_logits_differ_in_nothing() -> None:
    got = metrics.summarise(metrics.compare(_logits(0), _logits(0), _next_tokens()))
    assert got.kld_max == 0
    assert got.top1_agreement.value == 1
    assert got.ppl_change == metrics.Interval(0, 0, 0)
    assert got.delta_p_rms == 0


def test_a_constant_added_to_logits_changes_nothing() -> None:
    got = metrics.summarise(metrics.compare(_logits(0), _logits(0) + 5, _next_tokens()))
    assert got.kld_max < 1e-5


def test_perplexity_of_a_uniform_model_is_the_vocabulary() -> None:
    got = metrics.summarise(metrics.compare(torch.zeros(ROWS, VOCAB), _logits(0), _next_tokens()))
    assert got.reference_ppl == pytest.approx(VOCAB, rel=1e-5)
    assert got.ppl_change.value == pytest.approx(got.candidate_ppl / VOCAB - 1, rel=1e-6)


def test_stretches_joined_equal_the_whole() -> None:
    reference, candidate, tokens = _logits(0), _logits(1), _next_tokens()
    whole = metrics.compare(reference, candidate, tokens)
    parts = [
        metrics.compare(reference[a:b], candidate[a:b], tokens[a:b], a) for a, b in ((0, 90), (90, 91), (91, ROWS))
    ]
    assert metrics.summarise(metrics.join(parts)) == metrics.summarise(whole)


def test_buckets_hold_each_position_once() -> None:
    edges = metrics.bucket_edges(ROWS, first=64)
    assert edges == (0, 64, 128, 256, ROWS)
    whole = metrics.compare(_logits(0), _logits(1), _next_tokens())
    found = metrics.by_position(whole, edges)
    assert [bucket for bucket, _ in found] == [(0, 64), (64, 128), (128, 256), (256, ROWS)]
    assert sum(fidelity.tokens for _, fidelity in found) == ROWS
    (low, high), second = found[1]
    assert second == metrics.summarise(
        metrics.compare(_logits(0)[low:high], _logits(1)[low:high], _next_tokens()[low:high], low)
    )


@given(st.integers(1, 10_000_000), st.integers(1, 4096))
def test_edges_rise_from_0_to_the_length(length: int, first: int) -> None:
    edges = metrics.bucket_edges(length, first)
    assert edges[0] == 0
    assert edges[-1] == length
    assert all(low < high for low, high in pairwise(edges))


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for trial in range(100):
        noise = rng.normal(size=2000)
        values = 1 + np.convolve(noise, np.ones(8) / 8, "same")  # neighbours err together
        found = metrics.bootstrap([values], lambda means: means[0], draws=300, seed=trial)
        assert found.low <= found.value <= found.high
        covered += found.low <= 1 <= found.high
    assert covered >= 85


def test_an_interval_narrows_with_more_text() -> None:
    rng = np.random.default_rng(4)
    widths = []
    for count in (1_000, 16_000):
        found = metrics.bootstrap([rng.normal(size=count)], lambda means: means[0])
        widths.append(found.high - found.low)
    assert widths[1] < widths[0] / 2.5


def test_a_statistic_of_two_columns_is_drawn_in_pairs() -> None:
    values = np.random.default_rng(5).normal(size=1000)
    found = metrics.bootstrap([values, values], lambda means: means[1] - means[0])
    assert (found.low, found.value, found.high) == (0, 0, 0)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"), [(0, 10, 0.0, 0.278), (10, 10, 0.722, 1.0), (5, 10, 0.237, 0.763)]
)
def test_shares_have_wilsons_interval(successes: int, trials: int, low: float, high: float) -> None:
    found = metrics.share_interval(successes, trials)
    assert [found.low, found.high] == pytest.approx([low, high], abs=1e-3)


def test_what_can_not_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="don't match"):
        metrics.compare(_logits(0), _logits(0, ROWS - 1), _next_tokens())
    empty = metrics.compare(_logits(0, 0), _logits(0, 0), _next_tokens(0))
    assert len(empty) == 0
    with pytest.raises(ValueError, match="nothing to summarise"):
        metrics.summarise(empty)
