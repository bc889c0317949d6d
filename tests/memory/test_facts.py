"""What is read as a fact about the user, in two languages, and above all what isn't."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from perilune.memory.facts import MAX_FACTS, MAX_TURN_CHARS, read

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()


def found(text: str) -> list[tuple[str, str]]:
    return [(fact.key, fact.value) for fact in read(text, NOW)]


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("My name is Anna Keller.", [("name", "Anna Keller")]),
        (
            "Hi, I'm new, my name's Bob and I live in Austin, Texas now.",
            [("name", "Bob"), ("residence", "Austin, Texas")],
        ),
        ("By the way, I live in New York City with my wife.", [("residence", "New York City")]),
        ("I live in Berlin and work at Siemens.", [("residence", "Berlin"), ("employer", "Siemens")]),
        ("I live in Bonn, who collects my taxes?", [("residence", "Bonn")]),
        ("I'm a software engineer. It is cold.", [("occupation", "software engineer")]),
        ("My birthday is on 12 May 1990.", [("birthday", "12 May 1990")]),
        ("My thesis deadline is Friday, 12 June.", [("deadline: thesis", "Friday, 12 June")]),
        (
            "The deadline for my grant application is next Tuesday.",
            [("deadline: grant application", "next Tuesday")],
        ),
        ("my email is anna.k@example.org, thanks", [("email", "anna.k@example.org")]),
        ("I'm allergic to peanuts and shellfish.", [("allergy", "peanuts and shellfish")]),
        ("My locker number is 4471.", [("locker number", "4471")]),
        ("My wife's name is Mei Lin.", [("wife", "Mei Lin")]),
        (
            "我叫李伟，今年34岁，住在上海，在腾讯工作。",
            [("name", "李伟"), ("age", "34"), ("residence", "上海"), ("workplace", "腾讯")],
        ),
        ("对了，我家住在成都。", [("residence", "成都")]),
        ("我住在长沙，要交多少税？", [("residence", "长沙")]),
        ("我是一名电工，腰又开始酸了。", [("occupation", "电工")]),
        ("我的论文截止日期是12月5日。", [("deadline: 论文", "12月5日")]),
        ("我的手机号是138-0013-8000。", [("phone", "138-0013-8000")]),
        ("我对花生过敏。", [("allergy", "花生")]),
        ("我女儿叫小雨。", [("女儿", "小雨")]),
        ("我女儿叫小雨，今年五岁。", [("女儿", "小雨")]),
    ],
)
def test_statements(text: str, facts: list[tuple[str, str]]) -> None:
    assert found(text) == facts


@pytest.mark.parametrize(
    "text",
    [
        "If I live in Berlin, what taxes do I pay?",
        "Do I live in Berlin?",
        "I live in Berlin?",
        "She said I live in Rome.",
        "Translate: I live in Berlin.",
        "Translate this.\nI live in Berlin.",
        'He wrote "I live in Berlin." in his book.',
        "Pretend my name is Bob.",
        "You are a pirate. My name is Bob.",
        "Write a letter: my name is Bob Smith.",
        "I would live in Paris.",
        "I used to live in Rome.",
        "I live in a small house.",
        "My name is not important.",
        "My name is Legion, says the novel.",
        "My deadline is too close.",
        "Her deadline is Friday.",
        "I work at night.",
        "I'm a bit tired.",
        "> I live in Berlin.",
        "`I live in Berlin`",
        "```\nI live in Berlin.\n```",
        "My password is hunter2.",
        "My PIN code is 4471.",
        "My credit card number is 4111 1111 1111 1111.",
        "我住在哪里？",
        "如果我住在北京，要交多少税？",
        "他说我住在北京。",
        "请翻译：我住在北京。",
        "“我住在北京。”",
        "我叫了外卖。",
        "我叫他来。",
        "我住在一个小房子里。",
        "我住在永利澳门酒店，有什么建议吗？",
        "我最近在为父亲研究保险，他快60岁了，住在武汉。",
        "我是不是医生？",
        "我以前住在北京。",
        "我的密码是hunter2。",
    ],
)
def test_what_is_no_statement_about_the_user(text: str) -> None:
    assert found(text) == []


def test_the_time_since_when_it_is_true() -> None:
    (moved,) = read("I moved to Paris last month.", NOW)
    assert moved.since_s == datetime(2026, 10, 1, tzinfo=UTC).timestamp()
    (since,) = read("我从2019年起住在广州。", NOW)
    assert (since.value, since.since_s) == ("广州", datetime(2019, 1, 1, tzinfo=UTC).timestamp())
    (deadline,) = read("My deadline is 12 December.", NOW)
    assert deadline.since_s is None  # that is when it is due, not since when


def test_what_is_no_longer_true() -> None:
    assert [(each.key, each.value, each.ends) for each in read("I no longer live in Paris.", NOW)] == [
        ("residence", "Paris", True)
    ]
    assert [(each.key, each.value, each.ends) for each in read("我已经不住在北京了。", NOW)] == [
        ("residence", "北京", True)
    ]


def test_the_range_is_the_sentence() -> None:
    text = "Good morning! I live in Bonn. Is it cold?"
    (fact,) = read(text, NOW)
    assert text[fact.start : fact.end] == "I live in Bonn."


def test_long_texts_are_not_the_users_own_words() -> None:
    assert found("I live in Bonn. " + "x" * MAX_TURN_CHARS) == []
    assert len(found("My locker number is 1. " * 20)) == 1
    many = " ".join(f"My box{number} number is {number}." for number in range(20))
    assert len(found(many)) == MAX_FACTS


@pytest.mark.parametrize(
    "text", ["I " * 900, "我住在" * 600, "my name is " * 180, "A" * 2_000, "我的" * 900 + "号"]
)
def test_a_hostile_turn_costs_little(text: str) -> None:
    start_s = time.process_time()
    read(text[:MAX_TURN_CHARS], NOW)
    assert time.process_time() - start_s < 2.0
