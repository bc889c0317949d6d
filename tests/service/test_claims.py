"""Claims of an answer in its report: each with the passage or turn that says it, or doesn't."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perilune.service import claims
from tests.service.harness import Bench, request, running
from tests.service.test_routed import report_of

FACTS = (
    "The locker of the harbour master has the number 417. It is opened with the green key.\n\n"
    "The ferry to Brill leaves at 9:40 from pier 3."
)


async def judged(bench: Bench, answer: str, **options: Any) -> list[dict[str, Any]] | None:
    bench.engine.script = lambda spec: answer
    asked = replace(request("What do you know of the harbour?", **options), verify=True)
    found: list[dict[str, Any]] | None = report_of([event async for event in bench.service.run(asked)])["claims"]
    return found


async def test_each_claim_has_its_verdict_and_its_source() -> None:
    answer = "The locker of the harbour master has the number 417. The ferry to Brill leaves at 9:45 from pier 3."
    async with running() as bench:
        file_id = await bench.upload(FACTS)
        found = await judged(bench, answer, files=(file_id,))
        assert found is not None
        said = [(answer[each["start"] : each["end"]].split(" has")[0], each["verdict"]) for each in found]
        assert said[0] == ("The locker of the harbour master", "supported")
        assert said[1][1] == "unsupported"
        assert "417" in found[0]["citation"]["quote"]
        assert "Brill" in found[1]["citation"]["quote"]


async def test_without_sources_there_is_nothing_to_compare_and_unasked_there_is_nothing() -> None:
    async with running() as bench:
        assert await judged(bench, "The locker has the number 417.") == []
        assert report_of(await bench.ask("Hello."))["claims"] is None


async def test_what_time_is_too_short_for_is_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BUDGET_S", -1.0)
    async with running() as bench:
        file_id = await bench.upload(FACTS)
        found = await judged(bench, "The locker has the number 417.", files=(file_id,))
        assert found == [{"start": 0, "end": 30, "verdict": "unchecked", "citation": None}]
