"""Terms: what a question and a passage must agree on for search to find anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.memory.analyse import STOPWORDS, Analyser

ANALYSER = Analyser()


@pytest.mark.parametrize(
    ("question", "passage"),
    [
        ("interpolating", "Interpolation in one dimension"),
        ("matrices", "a matrix"),
        ("clause 3.2.1", "as set out in 3.2.1 below"),
        ("max_pages", "the setting max_pages bounds"),
        ("pages", "the setting max_pages bounds"),
        ("readCsvFile", "call readCsvFile(path)"),
        ("csv", "call readCsvFile(path)"),
        ("XMLParser", "an XMLParser object"),
        ("parser", "an XMLParser object"),
        ("apt-get", "run apt-get update"),
        ("1,024", "exactly 1024 bytes"),
        ("sources.list", "edit /etc/apt/sources.list"),
        ("命名管道", "这是一个命名管道。"),
        ("猫", "小猫咪在睡觉"),
        ("ＡＰＴ", "the APT system"),
        ("user's", "every user"),
        ("Zürich", "in zürich"),
    ],
)
def test_question_meets_passage(question: str, passage: str) -> None:
    assert set(ANALYSER.query_terms(question)) & set(ANALYSER.terms(passage))


@pytest.mark.parametrize(
    ("question", "passage"),
    [("3.2.1", "section 3.2.2"), ("1024", "1025"), ("管道", "官道")],
)
def test_different_things_stay_apart(question: str, passage: str) -> None:
    assert not set(ANALYSER.query_terms(question)) & set(ANALYSER.terms(passage))


def test_identifiers_are_kept_whole_and_split() -> None:
    assert {"max_recursion_depth", "max", "recurs", "depth"} <= set(ANALYSER.terms("max_recursion_depth"))


def test_question_words_are_dropped_while_something_is_left() -> None:
    assert ANALYSER.query_terms("How do I use the tool?") == ["tool"]
    assert ANALYSER.query_terms("please list") == ["pleas", "list"]
    assert ANALYSER.query_terms("请问什么是命名管道") == ["命名", "名管", "管道"]
    assert ANALYSER.query_terms("the of and") == []


def test_stopwords_are_not_indexed() -> None:
    assert not set(ANALYSER.terms("The cat is on the mat and it was here")) & STOPWORDS


def test_questions_are_bounded() -> None:
    assert len(ANALYSER.query_terms(" ".join(f"word{i}" for i in range(5000)))) == 256
    assert max(map(len, ANALYSER.terms("x" * 1_000_000))) <= 64


@given(st.text(max_size=400))
def test_any_text_is_cut_and_finds_itself(text: str) -> None:
    terms = ANALYSER.terms(text)
    assert all(term and len(term) <= 64 for term in terms)
    assert Analyser().terms(text) == terms
    assert set(ANALYSER.query_terms(text)) <= set(terms) | set(ANALYSER.query_terms(text))
    # Whatever a question keeps of a text, the text holds; question words alone may differ.
    asked = ANALYSER.query_terms(text)
    assert not asked or not terms or set(asked) & set(terms)
