"""What a search is told by: here whether anything is known of the time that a question names."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest

from perilune.memory.confidence import Ranking, confidence, signs_of
from perilune.memory.entries import Entry
from perilune.memory.timespan import spans

NOW = datetime(2026, 7, 1, tzinfo=UTC)


def empty_time(question: str, text: str, told: datetime | None) -> float:
    found = Entry(1, "s", 1, None, None, told.timestamp() if told else None, "", b"", 10, None)
    numbers = np.ones(1, np.float32)
    ranking = Ranking([found], numbers, numbers, numbers, [0])
    return signs_of(question, {}, 0.0, spans(question, NOW), ranking, [text]).empty_time


@pytest.mark.parametrize(
    ("question", "text", "told", "empty"),
    [
        ("What was special on 11 April?", "We went to the lake.", datetime(2026, 4, 12, 9, tzinfo=UTC), 1),
        ("What was special on 11 April?", "We went to the lake.", datetime(2026, 4, 11, 9, tzinfo=UTC), 0),
        ("What was special on 11 April?", "On 11 April we wed.", datetime(2026, 5, 30, tzinfo=UTC), 0),
        ("What was special on 11 April?", "April was wet.", datetime(2026, 5, 30, tzinfo=UTC), 1),
        ("How many passengers were there in 2022?", "In 2022 there were 900,000.", None, 0),
        ("How many passengers were there in 2022?", "In 2023 there were 900,000.", None, 1),
        ("2022年有多少旅客？", "2022年共有九十万人次。", None, 0),
        ("2022年有多少旅客？", "共有九十万人次。", None, 1),
        ("How many passengers were there?", "900,000.", None, 0),
    ],
)
def test_a_time_is_known_by_when_it_was_told_or_by_what_is_told(
    question: str, text: str, told: datetime | None, empty: float
) -> None:
    assert empty_time(question, text, told) == empty


def test_a_named_time_of_which_nothing_is_known_lowers_the_confidence() -> None:
    def sure(told: datetime) -> float:
        question = "What was special on 11 April?"
        found = Entry(1, "s", 1, None, None, told.timestamp(), "", b"", 10, None)
        numbers = np.full(1, 0.86, np.float32)
        ranking = Ranking([found], numbers, numbers, numbers, [0])
        return confidence(signs_of(question, {}, 0.0, spans(question, NOW), ranking, ["We wed."]))

    assert sure(datetime(2026, 4, 11, 9, tzinfo=UTC)) > 2 * sure(datetime(2026, 4, 12, 9, tzinfo=UTC))
