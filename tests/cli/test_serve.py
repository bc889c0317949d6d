"""`perilune serve` leaves nothing open when its start fails."""

from __future__ import annotations

import types

import pytest

from perilune import build
from perilune.cli import serve
from perilune.config import Settings
from perilune.errors import Overloaded
from perilune.ops import logging as ops_logging


async def test_a_start_that_fails_closes_what_was_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    async def start() -> None:
        raise Overloaded("The warm-up failed.")

    async def close() -> None:
        closed.append(True)

    monkeypatch.setattr(build, "build", lambda settings: types.SimpleNamespace(start=start, close=close))
    monkeypatch.setattr(ops_logging, "configure", lambda: None)
    with pytest.raises(Overloaded):
        await serve._serve(Settings())
    assert closed == [True]
