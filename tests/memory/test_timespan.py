"""Times that questions name, in two languages; and what only looks like one."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone

import pytest

from perilune.memory.timespan import MAX_SPANS, covered, spans

NOW = datetime(2025, 3, 15, 9, 30, tzinfo=UTC)  # a Saturday


def days(question: str) -> list[tuple[str, str]]:
    return [
        (
            f"{datetime.fromtimestamp(span.since_s, UTC):%Y-%m-%d}",
            f"{datetime.fromtimestamp(span.until_s, UTC):%Y-%m-%d}",
        )
        for span in spans(question, NOW)
    ]


@pytest.mark.parametrize(
    ("question", "first", "last"),
    [
        ("1月中旬，她在哪一天参观了展览？", "2025-01-11", "2025-01-20"),
        ("2025年1月，他说了什么", "2025-01-01", "2025-01-31"),
        ("去年12月初的事", "2024-12-01", "2024-12-10"),
        ("今年2月底去了哪里", "2025-02-21", "2025-02-28"),
        ("12月25日晚上做了什么", "2024-12-25", "2024-12-25"),
        ("4月的会议", "2024-04-01", "2024-04-30"),
        ("2024年的计划", "2024-01-01", "2024-12-31"),
        ("上周谁来过", "2025-03-03", "2025-03-09"),
        ("上个月花了多少钱", "2025-02-01", "2025-02-28"),
        ("昨天吃了什么", "2025-03-14", "2025-03-14"),
        ("What happened on 8 May, 2023?", "2023-05-08", "2023-05-08"),
        ("What did she buy on May 8th, 2023", "2023-05-08", "2023-05-08"),
        ("on the 3rd of June", "2024-06-03", "2024-06-03"),
        ("What did Ann do in May 2023?", "2023-05-01", "2023-05-31"),
        ("Where were they in December?", "2024-12-01", "2024-12-31"),
        ("plans since 2021", "2021-01-01", "2021-12-31"),
        ("Who called last week?", "2025-03-03", "2025-03-09"),
        ("log of 2024-03-05", "2024-03-05", "2024-03-05"),
    ],
)
def test_a_named_time(question: str, first: str, last: str) -> None:
    assert days(question) == [(first, last)]


@pytest.mark.parametrize(
    "question",
    [
        *("I may go", "march on", "February 31", "13月", "99/99", "第3章", "version 1.2.3", "2月30日", "3个月前"),
        *("Who is May?", "section 2024", ""),
    ],
)
def test_what_is_no_time(question: str) -> None:
    assert days(question) == []


def test_several_times_and_coverage() -> None:
    named = spans("Compare May 2023 with June 2023", NOW)
    assert len(named) == 2
    assert covered(datetime(2023, 5, 31, 23, 59, tzinfo=UTC).timestamp(), named)
    assert not covered(datetime(2023, 7, 1, tzinfo=UTC).timestamp(), named)
    assert not covered(None, named)


def test_a_day_is_the_same_however_it_is_named() -> None:
    """The clock of the person who asks says which day it is; its zone doesn't move the range."""
    there = datetime(2025, 3, 15, 1, 30, tzinfo=timezone(timedelta(hours=9)))
    assert spans("today", there) == spans("15 March 2025", there) == spans("今天", there.replace(tzinfo=None))


def test_a_pasted_log_names_few_times() -> None:
    log = "".join(f"2024-{1 + n % 12:02}-{1 + n % 28:02} started\n" for n in range(5_000))
    assert len(spans(log, NOW)) == MAX_SPANS
    assert len(spans("May 2023, and again May 2023", NOW)) == 1


@pytest.mark.parametrize("question", [" " * 60_000, "1" * 60_000, "1月 " * 20_000])
def test_a_long_question_is_read_in_linear_time(question: str) -> None:
    begun_s = time.process_time()
    spans(question, NOW)
    assert time.process_time() - begun_s < 3  # in its square: a minute and more
