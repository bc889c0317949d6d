"""The bench of summaries in small: it counts what is claimed, and would notice a wrong figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import summaries
from perilune.core import SummarySentence
from perilune.memory.sessions import Sessions


def figures(tmp_path: Path) -> dict[str, float]:
    target = tmp_path / "out.json"
    summaries.main(["--quick", "--json", str(target)])
    found: dict[str, float] = json.loads(target.read_text(encoding="utf-8"))["figures"]
    return found


def test_it_measures(tmp_path: Path) -> None:
    found = figures(tmp_path)
    assert found["exact_share"] == 1.0
    assert found["facts_of_summary"] > 0.8
    assert found["survival"] > 0.2


def test_it_notices_a_wrong_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Sessions.summary

    def shifted(self: Sessions, tenant: str, source_id: str) -> list[SummarySentence]:
        shown = real(self, tenant, source_id)
        return [
            SummarySentence(each.source_id, each.number, each.start, each.start + 9, each.text) for each in shown
        ]

    monkeypatch.setattr(Sessions, "summary", shifted)
    assert figures(tmp_path)["exact_share"] < 0.5
