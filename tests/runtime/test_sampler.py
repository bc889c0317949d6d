"""Sampling: distributions, penalties, seeds, log probabilities and bounds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from perilune.core import SamplingParams
from perilune.errors import InternalError, InvalidRequest
from perilune.runtime.sampler import Row, SequenceSampler

VOCAB = 50


def logits_of(seed: int = 0, vocab: int = VOCAB) -> Row:
    return np.random.default_rng(seed).normal(0, 2, vocab).astype(np.float32)


def probabilities(logits: Row) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def draws(logits: Row, count: int, **params: object) -> Counter[int]:
    sampler = SequenceSampler(SamplingParams(temperature=1.0, seed=1, **params), [], len(logits), 0)  # type: ignore[arg-type]
    return Counter(sampler.sample(logits)[0] for _ in range(count))


def test_greedy_takes_the_largest() -> None:
    logits = logits_of()
    assert SequenceSampler(SamplingParams(), [], VOCAB, 0).sample(logits) == (int(logits.argmax()), None)


def test_draws_follow_the_distribution() -> None:
    logits = logits_of()
    counts = draws(logits, 20_000)
    expected = probabilities(logits)
    for token in range(VOCAB):
        share, sigma = counts[token] / 20_000, (expected[token] * (1 - expected[token]) / 20_000) ** 0.5
        assert abs(share - expected[token]) < 5 * sigma + 1e-4


def test_temperature_sharpens() -> None:
    logits = logits_of()
    sharp = SequenceSampler(SamplingParams(temperature=0.05, seed=1), [], VOCAB, 0)
    assert {sharp.sample(logits)[0] for _ in range(100)} == {int(logits.argmax())}


def test_top_k_top_p_min_p_limit_the_choice() -> None:
    logits = logits_of()
    ranked = np.argsort(-logits)
    assert set(draws(logits, 2000, top_k=3)) == set(ranked[:3].tolist())
    shares = probabilities(logits)[ranked]
    nucleus = int(np.searchsorted(np.cumsum(shares), 0.5)) + 1
    assert set(draws(logits, 4000, top_p=0.5)) == set(ranked[:nucleus].tolist())
    kept = {int(token) for token, share in zip(ranked, shares, strict=True) if share >= 0.2 * shares[0]}
    assert set(draws(logits, 4000, min_p=0.2)) == kept
    assert set(draws(logits, 50, top_p=0.0)) == {int(ranked[0])}


def test_nucleus_of_a_flat_distribution_over_a_large_vocabulary() -> None:
    """Wider than the part that is sorted first."""
    logits = np.zeros(5000, np.float32)
    assert len(draws(logits, 4000, top_p=0.9)) > 1500
    assert max(draws(logits, 4000, top_p=0.5)) < 2600, "ties are kept in order of id"


@pytest.mark.parametrize("seed", [0, 1, 2**63, -5])
def test_same_seed_same_draws(seed: int) -> None:
    rows = [logits_of(index) for index in range(30)]

    def run(value: int | None, fallback: int) -> list[int]:
        sampler = SequenceSampler(SamplingParams(temperature=1.0, seed=value), [], VOCAB, fallback)
        return [sampler.sample(row)[0] for row in rows]

    assert run(seed, 1) == run(seed, 2)
    assert run(None, 1) == run(None, 1) != run(None, 2)


def test_penalties_and_bias() -> None:
    logits = np.array([1.0, 2.0, 1.95, -1.0], np.float32)
    params = SamplingParams(presence_penalty=0.05, frequency_penalty=0.1)
    sampler = SequenceSampler(params, [1, 1, 1], 4, 0)
    assert [sampler.sample(logits)[0] for _ in range(4)] == [1, 2, 1, 2], "the prompt doesn't count"
    repeat = SequenceSampler(SamplingParams(repetition_penalty=1.5), [1], 4, 0)
    assert [repeat.sample(logits)[0] for _ in range(3)] == [2, 1, 1], "1.95 > 2.0 / 1.5 > 1.95 / 1.5"
    biased = SequenceSampler(SamplingParams(logit_bias=((3, 100.0), (1, -100.0))), [], 4, 0)
    assert biased.sample(logits)[0] == 3
    assert logits.tolist() == [1.0, 2.0, np.float32(1.95), -1.0], "the caller's logits are left alone"


def test_logprobs_are_the_models_own() -> None:
    logits = logits_of()
    params = SamplingParams(temperature=0.3, seed=4, logprobs=5, presence_penalty=1.0)
    token, logprob = SequenceSampler(params, [], VOCAB, 0).sample(logits)
    expected = np.log(probabilities(logits))
    assert logprob is not None
    assert logprob.logprob == pytest.approx(expected[token])
    assert [index for index, _ in logprob.top] == np.argsort(-logits)[:5].tolist()
    assert [value for _, value in logprob.top] == pytest.approx(np.sort(expected)[::-1][:5].tolist())
    _, bare = SequenceSampler(SamplingParams(logprobs=0), [], VOCAB, 0).sample(logits)
    assert bare is not None
    assert bare.top == ()


def test_numbers_that_are_none_stop_the_sequence() -> None:
    for temperature in (0.0, 1.0):
        sampler = SequenceSampler(SamplingParams(temperature=temperature, seed=1), [], 3, 0)
        with pytest.raises(InternalError):
            sampler.sample(np.array([np.nan, np.nan, np.nan], np.float32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("top_k", -1),
        ("logprobs", 21),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("logit_bias", ((50, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, float("nan")),)),
    ],
)
def test_bad_parameters_name_themselves(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SequenceSampler(SamplingParams(**{field: value}), [], VOCAB, 0)  # type: ignore[arg-type]
    assert caught.value.param == field
    assert caught.value.hint


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.01, 5),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 60),
    min_p=st.floats(0, 1),
)
def test_every_draw_was_allowed(seed: int, temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    logits = logits_of(seed % 1000)
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    token, _ = SequenceSampler(params, [], VOCAB, 0).sample(logits)
    rank = int((logits > logits[token]).sum())
    assert 0 <= token < VOCAB
    assert top_k == 0 or rank < top_k
    scaled = probabilities(logits / np.float32(temperature))
    assert scaled[token] >= min_p * scaled.max() - 1e-6
    assert scaled[logits > logits[token]].sum() <= top_p + 1e-6
