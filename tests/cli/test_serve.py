"""`perilune serve` leaves nothing open when its start fails."""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable

import pytest

from perilune import build
from perilune.cli import serve
from perilune.cli.client import LocalClient
from perilune.config import Settings
from perilune.errors import Overloaded
from perilune.ops import logging as ops_logging


async def test_a_start_that_fails_closes_what_was_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    async def start() -> None:
        raise Overloaded("The warm-up failed.")

    async def close() -> None:
        closed.append(True)

    app = types.SimpleNamespace(start=start, close=close, kernels="native, AVX-512")
    monkeypatch.setattr(build, "build", lambda settings, *, indexed=False: app)
    monkeypatch.setattr(ops_logging, "configure", lambda: None)
    with pytest.raises(Overloaded):
        await serve._serve(Settings())
    assert closed == [True]


@pytest.mark.parametrize("start", [serve._serve, LocalClient.start], ids=["serve", "ask"])
@pytest.mark.parametrize("kernels", ["native, AVX-512", "PyTorch reference (native code isn't built)"])
async def test_slow_kernels_are_said_once_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    start: Callable[[Settings], Awaitable[object]],
    kernels: str,
) -> None:
    said: list[str] = []

    async def begin() -> None:
        said.extend(line for line in capsys.readouterr().err.splitlines() if line.startswith("warning"))
        raise Overloaded("That is enough.")

    async def close() -> None:
        pass

    app = types.SimpleNamespace(start=begin, close=close, kernels=kernels)
    monkeypatch.setattr(build, "build", lambda settings, *, indexed=False: app)
    monkeypatch.setattr(ops_logging, "configure", lambda: None)
    with pytest.raises(Overloaded):
        await start(Settings())
    records = [record for record in caplog.records if record.message == "native kernels are missing"]
    if kernels.startswith("native"):
        assert not said
        assert not records
        return
    (line,) = said
    assert "native code isn't built" in line
    assert "slow" in line
    assert "-m perilune.kernels.build" in line
    (record,) = records
    assert "isn't built" in record.fields["detail"]  # type: ignore[attr-defined]
