"""What was done is told from what was planned."""

from __future__ import annotations

import pytest

from perilune.memory.telling import SIGNS, signs


@pytest.mark.parametrize(
    ("text", "plan", "done"),
    [
        ("The bridge is open, we walked across today.", False, True),
        ("Shall we book the boat for 14 June?", True, False),
        ("The bench will cost 900 euros.", True, False),
        ("从三峡回来了。", False, True),
        ("打算六月去三峡，报价4200。", True, False),
        ("Blue.", False, False),
    ],
)
def test_what_is_done_and_what_is_planned(text: str, plan: bool, done: bool) -> None:
    found = signs(text)
    assert len(found) == SIGNS
    assert (bool(found[0]), bool(found[1])) == (plan, done)


def test_many_digits_and_length() -> None:
    assert signs("It runs under HB-20721.")[2] == 1
    assert signs("It took 14 hours.")[2] == 0
    assert signs("a" * 50)[3] > signs("a")[3] >= 0
    assert signs("walked " * 100_000)[1] == 1  # bounded
