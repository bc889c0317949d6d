"""Rows of sessions: titles, pages of a list, and forks that live and go on their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command

from perilune.core import SessionTurn, Span
from perilune.errors import Conflict, InvalidRequest, NotFound
from perilune.memory import session_rows
from perilune.memory.indexer import Indexer
from perilune.memory.memory import Memory
from perilune.memory.schema import CORPORA, ENTRIES, METADATA, SESSIONS, TERM_COUNTS
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store, alembic_settings
from perilune.memory.vectors.lance import LanceIndex

TURNS = 40
LOCKER = "My locker has the number 4471. I live in Oslo."


@pytest.fixture
def memory(store: Store, tmp_path: Path) -> Iterator[Memory]:
    index = LanceIndex(tmp_path / "index", "none", 1)
    memory = Memory(store, index, None, indexer=Indexer(store, index, None))
    yield memory
    memory.close()


@pytest.fixture
def sessions(memory: Memory) -> Sessions:
    return Sessions(memory._store, memory, clock=lambda: 5_000.0)


def talk(sessions: Sessions, session: str, turns: int = TURNS, at: float = 100.0) -> None:
    for number in range(0, turns, 2):
        question = LOCKER if number == 4 else f"Question {number}: how deep is lake {number}?"
        said = [
            ("user", question, at + number),
            ("assistant", f"Lake {number} is {number} m deep.", at + number + 1),
        ]
        sessions.add("acme", session, said, learn=True)


def counted(memory: Memory) -> tuple[int, int]:
    """(entries of the tenant's statistics, entries there are)."""
    with memory._store.read() as connection:
        told = connection.execute(sa.select(CORPORA.c.entries).where(CORPORA.c.tenant == "acme")).scalar_one()
        return told, connection.execute(sa.select(sa.func.count()).select_from(ENTRIES)).scalar_one()


def test_titles(sessions: Sessions) -> None:
    sessions.add("acme", "s", [("user", "  What\tis\n\nthis?  " + "very " * 40, 1.0)])
    title = sessions.get("acme", "s").title
    assert title is not None
    assert title.startswith("What is this? very")
    assert len(title) <= 80
    sessions.set_title("acme", "s", " 旅行 ")
    assert sessions.get("acme", "s").title == "旅行"
    sessions.set_title("acme", "s", None)
    assert sessions.get("acme", "s").title == title
    for bad in ("", " ", "a\0b", "x" * 201):
        with pytest.raises(InvalidRequest):
            sessions.set_title("acme", "s", bad)
    with pytest.raises(NotFound):
        sessions.set_title("bolt", "s", "mine")


def test_a_list_goes_on_where_it_stopped_whatever_is_said_meanwhile(sessions: Sessions) -> None:
    for number in range(9):
        sessions.add("acme", f"s{number}", [("user", "Hello.", float(number // 3))])
    seen: list[str] = []
    cursor: str | None = None
    while part := sessions.sessions("acme", 2, cursor):
        seen += [each.session_id for each in part]
        cursor = session_rows.cursor_of(part[-1])
        sessions.add("acme", seen[0], [("user", "More.", 100.0 + len(seen))])  # moves to the top
    assert seen == ["s6", "s7", "s8", "s3", "s4", "s5", "s0", "s1", "s2"]
    with pytest.raises(InvalidRequest):
        sessions.sessions("acme", 2, "x")


def test_a_fork_has_everything_of_its_own(sessions: Sessions, memory: Memory) -> None:
    talk(sessions, "s")
    while memory.summaries.advance():
        pass
    memory.locality.mark("acme", "s", True)
    sessions.correct_summary("acme", "s", 5, 0, "My locker has the number 4472.")
    sessions.mark("acme", "Where is my locker?", Span("s", turn=5))
    forked = sessions.fork("acme", "s", 34, None)
    info = sessions.get("acme", forked)
    assert (info.turns, info.parent_id, info.parent_turn, info.local_only) == (34, "s", 34, True)
    assert info.last_at == 5_000.0
    texts = [turn.text for turn in sessions.turns("acme", forked, 0, 100)]
    assert texts == [turn.text for turn in sessions.turns("acme", "s", 0, 34)]
    summary = sessions.summary("acme", forked)
    assert {each.source_id for each in summary} == {forked}
    assert "My locker has the number 4472." in [each.text for each in summary]
    assert [each.text for each in sessions.brief("acme", forked)]  # without another round of summarising
    sessions.add("acme", forked, [("user", "Something new.", 6_000.0)])
    assert sessions.get("acme", "s").turns == TURNS
    assert counted(memory) == (TURNS + 35, TURNS + 35)
    hits = sessions.search("acme", [forked], "locker number", 3).hits
    assert (hits[0].session_id, hits[0].turn) == (forked, 5)  # type: ignore[union-attr]


@pytest.mark.parametrize("first", ["s", "fork"])
def test_either_goes_without_the_other(sessions: Sessions, memory: Memory, first: str) -> None:
    talk(sessions, "s")
    sessions.fork("acme", "s", 10, "fork")
    assert [fact.value for fact in sessions.profile("acme", True)] == ["Oslo"]
    sessions.delete("acme", first)
    left = "fork" if first == "s" else "s"
    assert [each.session_id for each in sessions.sessions("acme", 9)] == [left]
    assert sessions.get("acme", left).parent_id is None
    facts = sessions.profile("acme", True)
    assert [(fact.value, fact.session_id, fact.turn) for fact in facts] == [("Oslo", left, 5)]
    hits = sessions.search("acme", None, "locker number", 3).hits
    assert {hit.session_id for hit in hits if isinstance(hit, SessionTurn)} == {left}
    with memory._store.read() as connection:
        for table in METADATA.sorted_tables:
            if {"tenant", "source_id"} <= set(table.c.keys()):
                rows = connection.execute(sa.select(table).where(table.c.source_id == first)).all()
                assert not rows, table.name
    sessions.delete("acme", left)
    assert counted(memory) == (0, 0)
    with memory._store.read() as connection:
        assert connection.execute(sa.select(TERM_COUNTS)).first() is None


def test_what_changed_since_stays_changed(sessions: Sessions) -> None:
    """A fork before a move doesn't bring the old home back."""
    sessions.add("acme", "s", [("user", "I live in Oslo.", 1.0), ("assistant", "Fine.", 2.0)], learn=True)
    sessions.add("acme", "s", [("user", "I live in Bergen now.", 3.0), ("assistant", "Fine.", 4.0)], learn=True)
    sessions.fork("acme", "s", 2, "before")
    assert [fact.value for fact in sessions.profile("acme", False)] == ["Bergen"]
    sessions.delete("acme", "s")
    assert [fact.value for fact in sessions.profile("acme", False)] == ["Oslo"]


def test_what_two_sessions_share_is_found_once(sessions: Sessions) -> None:
    talk(sessions, "s")
    sessions.fork("acme", "s", 20, "fork")
    everywhere = sessions.search("acme", None, "locker number", 5).hits
    assert [hit.text for hit in everywhere].count(LOCKER) == 1
    counted = sessions.search("acme", None, "How often did I mention my locker?", 5)
    assert counted.kind == "count"
    assert [each.text for each in counted.evidence].count(LOCKER) == 1


def test_bad_forks(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    talk(sessions, "s", 4)
    sessions.fork("acme", "s", 0, "empty")
    assert (sessions.get("acme", "empty").turns, sessions.get("acme", "empty").title) == (0, None)
    assert sessions.turns("acme", "empty", 0, 9) == []
    for error, session, turn, new_id in (
        (NotFound, "t", 1, None),
        (InvalidRequest, "s", 5, None),
        (InvalidRequest, "s", 1, "file-x"),
        (Conflict, "s", 1, "empty"),
        (Conflict, "s", 1, "s"),
    ):
        with pytest.raises(error):
            sessions.fork("acme", session, turn, new_id)
    with pytest.raises(NotFound):
        sessions.fork("bolt", "s", 1, None)
    monkeypatch.setattr(session_rows, "MAX_FORK_TURNS", 3)
    with pytest.raises(InvalidRequest):
        sessions.fork("acme", "s", 4, None)


def test_sessions_of_an_older_database_are_listed(tmp_path: Path, database: str) -> None:
    store = Store(tmp_path, database)
    memory = Memory(store, LanceIndex(tmp_path / "index", "none", 1), None)
    talk(Sessions(store, memory), "s", 6)
    settings = alembic_settings()
    with store.write() as connection:
        settings.attributes["connection"] = connection
        connection.execute(SESSIONS.delete())
        command.downgrade(settings, "0010")
    memory.close()
    store.close()
    store = Store(tmp_path, database)
    with store.read() as connection:
        info = session_rows.get(connection, "acme", "s")
    assert (info.turns, info.first_at, info.last_at) == (6, 100.0, 105.0)
    store.close()
