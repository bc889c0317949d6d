"""Which questions pass for the same one, in both languages, and which never do."""

from __future__ import annotations

import pytest

from perilune.service.caches.verify import plain, same_question

SAME = [
    ("What is the rent?", "what is the rent"),
    ("What's the notice period of the lease?", "What is the notice period of the lease?"),
    ("Please tell me what the monthly rent is", "What is the monthly rent?"),
    ("房租是多少？", "请问房租是多少"),
    ("Ｗｈａｔ is the rent", "What is the rent?"),
]
OTHER = [
    ("What is the rent in 2024?", "What is the rent in 2025?"),
    ("Can I keep a dog?", "Can I not keep a dog?"),
    ("Can I keep a dog?", "Can't I keep a dog?"),
    ("Who pays the rent?", "When is the rent paid?"),
    ("What is the highest fee?", "What is the lowest fee?"),
    ("What did Anna say about the rent?", "What did Berta say about the rent?"),
    ("What does “term” mean?", "What does “notice” mean?"),
    ("What is the rent?", "What is the deposit?"),
    ("合同什么时候开始？", "合同什么时候结束？"),
    ("可以养狗吗？", "不可以养狗吗？"),
    ("第三条说什么？", "第四条说什么？"),
    ("转账给张三要多少？", "转账给李四要多少？"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_same(one: str, other: str) -> None:
    assert same_question(one, other)
    assert same_question(other, one)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_other(one: str, other: str) -> None:
    assert not same_question(one, other)
    assert not same_question(other, one)


def test_plain_drops_case_width_and_punctuation() -> None:
    assert plain("  Ｗhen ARE you open?! ") == plain("when are you open")
