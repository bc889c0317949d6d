"""How answers came about: only places are kept, and what they cite is read from where it lies, or gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from perilune.core import (
    CachedTokens,
    KeptAnswer,
    MemoryUse,
    PlanKind,
    ProfileFact,
    Report,
    SearchResult,
    SummarySentence,
    TokenReport,
    TurnCitation,
)
from perilune.memory.library import Library
from perilune.memory.memory import Memory
from perilune.memory.schema import ANSWERS
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex
from perilune.service.passages import citation
from perilune.service.report import report_dict
from tests.memory.conftest import ingest

SECRET = "The Quetzal account holds 4471 coins."
SAID = "I live in Quetzaltenango."


@pytest.fixture
def memory(store: Store, tmp_path: Path) -> Memory:
    return Memory(store, LanceIndex(tmp_path / "index", "none", 1), None)


def reported(library: Library, file_id: str) -> dict[str, Any]:
    """The object of an answer that used a file, two turns, a fact and a sentence of a summary."""
    found: SearchResult = library.find("local", [file_id], "Quetzal account", 1)
    quoted = [citation(hit, {file_id: "secret.txt"}) for hit in found.hits]  # type: ignore[arg-type]
    turn = TurnCitation("s", 1, "user", 1.0, SAID)
    other = TurnCitation("other", 1, "user", 5.0, SAID)
    report = Report(
        PlanKind.REFINED,
        5.0,
        1.0,
        1.2,
        TokenReport(100, 90, 0, 0, 10, CachedTokens()),
        "m",
        "torch",
        (*quoted, turn, other),
        memory=MemoryUse(
            (ProfileFact("residence", "Quetzaltenango", 1.0, 1.0, None, "s", 1, 0, 25),),
            (SummarySentence("s", 1, 0, len(SAID), SAID),),
        ),
    )
    return report_dict(report)


def test_places_are_kept_and_texts_are_looked_up(store: Store, memory: Memory, tmp_path: Path) -> None:
    library, sessions = Library(store, tmp_path, memory=memory), Sessions(store, memory)
    file_id = ingest(library, SECRET.encode(), "secret.txt").file_id
    sessions.add("local", "s", [("user", SAID, 1.0), ("assistant", "Nice.", 2.0)], learn=True)
    sessions.add("local", "other", [("user", SAID, 5.0)])
    report = reported(library, file_id)
    details = {"finish_reason": "stop", "total_s": 2.0, "files": [file_id], "usage": None, "perilune": report}
    said = [("user", "What holds the account?", 3.0), ("assistant", "Coins.", 4.0)]
    sessions.add("local", "s", said, answer=KeptAnswer("req_abc", "m", details))
    with store.read() as connection:
        kept = connection.execute(sa.select(ANSWERS.c.details)).scalar_one()
    assert "Quetzal" not in kept
    assert "secret.txt" not in kept
    key, shown = sessions.answers("local", "s", 1, 9)[3]
    assert (key, shown) == ("abc", details)  # word for word what was told
    assert sessions.answers("acme", "s", 1, 9) == {}
    forked = sessions.fork("local", "s", 4, None)
    copied, again = sessions.answers("local", forked, 1, 9)[3]
    assert copied != key
    assert again == details

    library.delete_file("local", file_id)
    sessions.delete("local", "other")
    sessions.erase_profile("local", None)
    sessions.correct_summary("local", "s", 1, 0, "")
    gone = sessions.answers("local", "s", 1, 9)[3][1]["perilune"]
    assert [each.get("gone", False) for each in gone["citations"]] == [True, False, True]
    assert [each["quote"] for each in gone["citations"]] == ["", SAID, ""]
    assert gone["citations"][0]["filename"] == ""
    assert gone["memory"]["profile"][0] == {
        "key": "residence",
        "session": "s",
        "turn": 1,
        "value": "",
        "gone": True,
    }
    memory.close()


def test_what_little_is_known_of_a_stopped_answer(store: Store, memory: Memory) -> None:
    sessions = Sessions(store, memory)
    details = {
        "finish_reason": "cancelled",
        "total_s": 0.5,
        "files": [],
        "usage": None,
        "perilune": {"citations": []},
    }
    sessions.add("local", "s", [("user", "a?", 1.0)], answer=KeptAnswer("req_x", "m", details))
    sessions.add("local", "s", [("user", "b?", 1.0)], answer=KeptAnswer("req_y", "m"))
    assert sessions.answers("local", "s", 1, 2) == {1: ("x", details), 2: ("y", {})}
    memory.close()
