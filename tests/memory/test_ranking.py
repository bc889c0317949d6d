"""BM25 against its definition, fusion, and names found in texts: the arithmetic of a search."""

from __future__ import annotations

import math
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perilune.memory import postings, scoring
from perilune.memory.entities import names
from perilune.memory.entries import Entry
from perilune.memory.index import read_segment
from perilune.memory.passages import by_passage
from perilune.memory.rank import Signs, Weights, fuse, order_of, standard

HASHES = st.integers(0, 2**64 - 1)


@given(st.dictionaries(HASHES, st.integers(1, 65_535), max_size=40))
@settings(max_examples=60, deadline=None)
def test_packed_terms_come_back(terms: dict[int, int]) -> None:
    assert scoring.unpack(scoring.pack(terms)) == terms


@given(st.lists(st.dictionaries(st.integers(0, 30), st.integers(1, 9), max_size=12), max_size=8))
@settings(max_examples=60, deadline=None)
def test_frequencies_are_those_of_each_entry(held: list[dict[int, int]]) -> None:
    wanted = [29, 3, 7, 0]
    found = scoring.frequencies([scoring.pack(terms) for terms in held], wanted)
    assert found.tolist() == [[terms.get(term, 0) for term in wanted] for terms in held]


def test_bm25_is_robertsons() -> None:
    counts = np.array([[2.0, 0.0], [1.0, 3.0]], np.float32)
    idf = scoring.inverse_frequency([2, 1], 10)
    assert idf[0] == pytest.approx(math.log(1 + 8.5 / 2.5))
    found = scoring.bm25(counts, [10, 30], idf, 20.0)
    norm = 1.2 * (0.25 + 0.75 * 30 / 20)
    expected = idf[0] * 2.2 / (1 + norm) + idf[1] * 3 * 2.2 / (3 + norm)
    assert found[1] == pytest.approx(expected, rel=1e-5)


def test_postings_turned_round_are_the_passages() -> None:
    texts = [["alpha", "beta", "beta"], [], ["beta", "gamma"]]
    segment = read_segment(postings.build(texts, [3, 0, 7]))
    expected = [
        ({postings.term_hash(t): n for t, n in Counter(text).items()}, length)
        for text, length in zip(texts, (3, 0, 7), strict=True)
    ]
    assert by_passage(segment) == expected


def entry(number: int, source: str = "s", speaker: str | None = None) -> Entry:
    return Entry(number, source, number, None, speaker, None, "", b"", 10, None)


def no_signs(count: int) -> Signs:
    return Signs(np.zeros(count, np.float32), np.zeros(count, np.float32))


def test_neighbours_of_the_same_source_lend_their_score() -> None:
    pool = [entry(0), entry(1), entry(2), entry(3, "t"), entry(9, "t")]
    assert order_of(pool) == list(range(5))
    words = np.array([0, 9, 0, 0, 0], np.float32)
    unknown = np.full(5, np.nan, np.float32)
    scores = fuse(pool, words, unknown, no_signs(5), Weights(near=0.3, next_near=0.1))
    assert np.argmax(scores) == 1
    assert scores[0] == pytest.approx(scores[2])
    assert scores[0] > scores[3]
    alone = fuse(pool, words, unknown, no_signs(5), Weights(near=0.0, next_near=0.0))
    assert alone[0] == alone[3]


def test_an_entry_without_a_vector_is_neither_liked_nor_punished() -> None:
    dense = np.array([0.9, np.nan, 0.7], np.float32)
    z = standard(dense)
    assert z[0] > 0 == z[1] > z[2]


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30))
@example([341.9609375, 341.9609375, 341.958984375])  # a spread near float32's resolution of the values
@settings(max_examples=60, deadline=None)
def test_z_scores_are_finite_and_centred(values: list[float]) -> None:
    z = standard(np.array(values, np.float32))
    assert np.isfinite(z).all()
    assert abs(float(z.mean())) < 1e-5


def test_signs_count() -> None:
    pool = [entry(0), entry(5, "t"), entry(9, "u")]
    flat = np.zeros(3, np.float32)
    signs = Signs(np.array([0, 1, 0], np.float32), np.array([0, 0, 1], np.float32))
    scores = fuse(pool, flat, flat, signs, Weights())
    assert scores[1] > scores[2] > scores[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Yesterday I met Anna Smith and Bob in Paris.", {"anna smith", "bob", "paris"}),
        ("mail jo.doe@example.org about QX-77-B", {"jo.doe@example.org", "qx-77-b"}),
        ("他读了《三体》和“朝花夕拾”。", {"三体", "朝花夕拾"}),
        ("on Monday, in May", set()),
        ("", set()),
    ],
)
def test_names(text: str, expected: set[str]) -> None:
    assert set(names(text)) == expected


@pytest.mark.parametrize("text", ["a" * 60_000, "a-" * 30_000, "1-" * 30_000, "a.b@" * 15_000])
def test_names_of_a_long_text_are_found_in_linear_time(text: str) -> None:
    begun_s = time.process_time()
    names(text)
    assert time.process_time() - begun_s < 2  # in its square: ten seconds and more
