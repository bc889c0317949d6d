"""A prompt past the measured effective length is told so; without a measurement or a failure nothing is."""

from __future__ import annotations

import pytest

from perilune.runtime.evaluate.length_record import Cell, judge
from perilune.service.model import ServedModel


def model(*shares: int) -> ServedModel:
    cells = [Cell("passkey", 512 << index, 0.5, right, 10) for index, right in enumerate(shares)]
    return ServedModel("m", 8192, "", 0, 100, effective=judge("m", cells) if shares else None)


@pytest.mark.parametrize("tokens", [1, 1024])
def test_nothing_is_said_up_to_the_measured_length(tokens: int) -> None:
    assert model(10, 10, 2).past_its_length(tokens) == ()


def test_a_longer_prompt_is_told_what_was_measured() -> None:
    (said,) = model(10, 10, 2).past_its_length(1025)
    assert said.code == "effective_length"
    for part in ("1,025", "1,024", "2,048", "20 %"):
        assert part in said.reason


@pytest.mark.parametrize("shares", [(), (10, 10, 10), (1, 1, 0)])
def test_nothing_is_claimed_that_was_not_measured(shares: tuple[int, ...]) -> None:
    assert model(*shares).past_its_length(8000) == ()
