"""Ranking equals BM25 as the formula says, over any cut into blobs; damaged blobs are refused."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import IntegrityError
from perilune.memory import postings
from perilune.memory.index import K1, NEIGHBOUR_WEIGHT, B, rank, read_segment

WORDS = st.sampled_from(["alpha", "beta", "gamma", "delta", "管道"])
DOCUMENT = st.lists(st.lists(WORDS, min_size=1, max_size=8), min_size=1, max_size=12)


def segments(document: list[list[str]], cut: int) -> list[object]:
    return [
        read_segment(postings.build(part, [len(terms) for terms in part]))
        for part in (document[i : i + cut] for i in range(0, len(document), cut))
    ]


def oracle(documents: dict[str, list[list[str]]], query: list[str]) -> list[tuple[str, int, float]]:
    """BM25 word for word, without any index."""
    everything = [terms for document in documents.values() for terms in document]
    total, mean = len(everything), sum(map(len, everything)) / len(everything)
    scored = []
    for name, document in documents.items():
        own = []
        for terms in document:
            counts, score = Counter(terms), 0.0
            for word in query:
                holders = sum(word in each for each in everything)
                if counts[word]:
                    idf = math.log(1 + (total - holders + 0.5) / (holders + 0.5))
                    norm = K1 * (1 - B + B * len(terms) / max(1.0, mean))
                    score += idf * (K1 + 1) * counts[word] / (counts[word] + norm)
            own.append(score)
        for i, score in enumerate(own):
            if score > 0:
                beside = (own[i - 1] if i else 0) + (own[i + 1] if i + 1 < len(own) else 0)
                scored.append((name, i, score + NEIGHBOUR_WEIGHT * beside))
    return sorted(scored, key=lambda hit: -hit[2])


@given(DOCUMENT, DOCUMENT, st.lists(WORDS, min_size=1, max_size=4, unique=True), st.integers(1, 12))
def test_equals_the_formula(one: list[list[str]], two: list[list[str]], query: list[str], cut: int) -> None:
    documents = {"one": one, "two": two}
    expected = oracle(documents, query)
    found = rank({name: segments(each, cut) for name, each in documents.items()}, query, 100)
    assert len(found) == len(expected)
    for hit, (_, _, score) in zip(found, expected, strict=True):
        assert hit.score == pytest.approx(score, rel=1e-4)
    assert {(hit.file_id, hit.number) for hit in found} == {(name, number) for name, number, _ in expected}


def test_no_match_and_no_document() -> None:
    assert rank({"one": segments([["alpha"]], 1)}, ["omega"], 5) == []
    assert rank({"one": []}, ["alpha"], 5) == []
    assert rank({}, ["alpha"], 5) == []
    assert rank({"one": segments([["alpha"]], 1)}, [], 5) == []


@pytest.mark.parametrize("damage", [b"", b"\x01\0\0\0", b"\x09" + b"\0" * 40])
def test_damaged_blob_is_refused(damage: bytes) -> None:
    with pytest.raises(IntegrityError):
        read_segment(damage)


def test_cut_blob_is_refused() -> None:
    blob = postings.build([["alpha", "beta"]], [2])
    with pytest.raises(IntegrityError):
        read_segment(blob[:-1])


def test_blob_bounds() -> None:
    with pytest.raises(ValueError, match="65535"):
        postings.build([["a"]] * 65_536, [1] * 65_536)
    many = read_segment(postings.build([["a"] * 70_000], [70_000]))
    assert int(many.lengths[0]) == int(many.frequencies[0]) == 65_535
