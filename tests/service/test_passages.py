"""Passages: within the budget, no text twice, in document order."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from perilune.core import Passage
from perilune.service.passages import choose_passages, citation, joined

TEXT = {name: "".join(chr(97 + (i * 7 + ord(name)) % 26) for i in range(400)) for name in "AB"}


@st.composite
def passage(draw: st.DrawFn) -> Passage:
    name = draw(st.sampled_from("AB"))
    page = draw(st.integers(0, 3))
    start = page * 100 + draw(st.integers(0, 90))
    end = min((page + 1) * 100, start + draw(st.integers(1, 60)))
    return Passage(name, page + 1, start, end, TEXT[name][start:end], draw(st.floats(0, 10)))


def count(item: Passage) -> int:
    return len(item.text) + 10


passages = st.lists(passage(), max_size=25)


@given(passages, st.integers(0, 600))
def test_chosen_passages_fit_and_are_what_the_document_says(found: list[Passage], budget: int) -> None:
    ranked = sorted(found, key=lambda item: -item.score)
    chosen = choose_passages(ranked, budget, count, ["A", "B"])
    assert sum(map(count, chosen)) <= budget
    for item in chosen:
        if "\n" not in item.text:
            assert TEXT[item.file_id][item.start : item.end] == item.text
        assert item.end - item.start == len(item.text)
    keys = [(item.file_id, item.start) for item in chosen]
    assert keys == sorted(keys)
    for first, second in itertools.pairwise(chosen):
        if (first.file_id, first.page) == (second.file_id, second.page):
            assert second.start > first.end, "overlapping or touching passages are one"


@given(passages)
def test_the_best_passage_is_always_in_when_it_fits(found: list[Passage]) -> None:
    ranked = sorted(found, key=lambda item: -item.score)
    if ranked:
        best = ranked[0]
        chosen = choose_passages(ranked, count(best) + 50, count, ["A", "B"])
        assert any(item.start <= best.start and best.end <= item.end for item in chosen)


def test_a_passage_larger_than_the_budget_is_cut() -> None:
    big = Passage("A", 1, 0, 100, TEXT["A"][:100], 1.0)
    (cut,) = choose_passages([big], 60, count, ["A"])
    assert (cut.text, cut.end) == (TEXT["A"][:50], 50)
    assert choose_passages([big], 10, count, ["A"]) == []


def test_neighbours_are_joined_within_a_page_only() -> None:
    parts = [
        Passage("A", 1, 50, 99, TEXT["A"][50:99], 2.0),
        Passage("A", 1, 0, 50, TEXT["A"][:50], 1.0),
        Passage("A", 2, 100, 150, TEXT["A"][100:150], 3.0),
    ]
    first, second = joined(parts, ["A"])
    assert (first.text, first.score, first.page) == (TEXT["A"][:99], 2.0, 1)
    assert second.page == 2


def test_a_citation_quotes_and_names() -> None:
    made = citation(Passage("A", 3, 10, 2010, "w" * 2000, 1.0), {"A": "a.pdf"})
    assert (made.filename, made.page, made.start, made.end) == ("a.pdf", 3, 10, 2010)
    assert made.quote.endswith("…")
    assert len(made.quote) < 700
