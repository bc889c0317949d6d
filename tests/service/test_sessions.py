"""Conversations over the real memory: what was said is kept, comes back with its turn, once, and goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from perilune.core import Citation, CitationAdded, Completed, Event, SessionTurn, TurnCitation
from perilune.errors import NotFound, Overloaded
from perilune.memory import audit
from perilune.memory.indexer import Indexer
from perilune.memory.memory import Memory
from perilune.memory.paging import Part
from perilune.memory.ratings import Chosen, NewRating, Ratings
from perilune.memory.schema import ENTRIES, INDEX_WORK
from perilune.memory.session_ids import session_owner
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex
from perilune.service.archive import Archive
from perilune.service.ratings import RatingService
from perilune.service.recall import choose_turns, recall_budget
from perilune.service.retention import DAY_S, Retention
from perilune.telemetry import Telemetry
from tests.service.harness import Bench, running

FACT = "My locker at the Brill station has the number 4471."
ASKED = "Which number does my locker at the station have?"


class Kept:
    """A service over real memory, and what is behind it."""

    def __init__(self, bench: Bench, store: Store, memory: Memory, index: LanceIndex, sessions: Sessions) -> None:
        self.bench, self.store, self.memory, self.index, self.sessions = bench, store, memory, index, sessions

    def prompt(self) -> str:
        """The newest prompt, decoded."""
        return self.bench.tokenizer.decode(self.bench.engine.specs[-1].token_ids)

    def told(self, session: str, tenant: str = "local") -> list[tuple[int, str, str]]:
        return [(turn.turn, turn.speaker, turn.text) for turn in self.sessions.turns(tenant, session, 0, 1000)]


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    store = Store(tmp_path)
    index = LanceIndex(tmp_path / "index", "none", 1)
    memory = Memory(store, index, None, indexer=Indexer(store, index, None))
    memory.start()
    sessions = Sessions(store, memory)
    try:
        async with running(kept=sessions) as bench:
            yield Kept(bench, store, memory, index, sessions)
    finally:
        memory.close()
        store.close()


def citations(events: list[Event]) -> list[TurnCitation]:
    found = [event.citation for event in events if isinstance(event, CitationAdded)]
    report = next(event.report for event in events if isinstance(event, Completed))
    assert list(report.citations) == found
    return [each for each in found if isinstance(each, TurnCitation)]


async def settle(kept: Kept, session: str) -> None:
    await kept.bench.service.conversations.get("local", session)


async def test_question_and_answer_are_kept_with_speaker_and_time(kept: Kept) -> None:
    history = (("user", "An older question."), ("assistant", "An older answer."))
    await kept.bench.ask(FACT, session="trip", history=history)
    await settle(kept, "trip")
    assert kept.told("trip") == [(1, "user", FACT), (2, "assistant", "The answer.")]
    first, second = kept.sessions.turns("local", "trip", 0, 10)
    assert first.at is not None
    assert second.at is not None
    assert 1.7e9 < first.at <= second.at


async def test_an_old_turn_comes_back_at_once_with_its_number_and_is_not_learnt_again(kept: Kept) -> None:
    await kept.bench.ask("Good morning.", session="trip")
    await kept.bench.ask(FACT, session="trip")
    events = await kept.bench.ask(ASKED, session="trip", history=(("user", "Hm."), ("assistant", "Yes?")))
    assert [(each.session_id, each.turn, each.quote) for each in citations(events)][0:1] == [("trip", 3, FACT)]
    prompt = kept.prompt()
    assert "[turn 3, user, " in prompt
    assert prompt.index("Hm.") < prompt.index(FACT) < prompt.index(ASKED)
    await settle(kept, "trip")
    told = kept.told("trip")
    assert [text for _, _, text in told if FACT in text] == [FACT]
    assert [text for _, _, text in told][4:] == [ASKED, "The answer."]


async def test_what_the_client_sends_itself_is_not_recalled(kept: Kept) -> None:
    await kept.bench.ask(FACT, session="trip")
    events = await kept.bench.ask(ASKED, session="trip", history=(("user", FACT), ("assistant", "The answer.")))
    assert citations(events) == []
    assert kept.prompt().count(FACT) == 1


async def test_what_a_full_disk_refuses_is_stored_once_there_is_room(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perilune.service.sessions.RETRY_S", 0.05)
    has_room, add = asyncio.Event(), kept.sessions.add

    def refuse(*given: Any) -> int:
        if not has_room.is_set():
            raise Overloaded("The database's disk is full; nothing was stored.", hint="Free some.")
        return add(*given)

    monkeypatch.setattr(kept.sessions, "add", refuse)
    for said in ("First.", "Second."):
        await kept.bench.ask(said, session="trip", recall=())
    await kept.bench.ask("Not this.", session="gone", recall=())
    assert await kept.bench.service.conversations.sessions("local", 10) == []  # reading doesn't wait for room
    await kept.bench.service.conversations.delete("local", "gone")
    has_room.set()
    await kept.bench.ask("Third.", session="trip", recall=())
    query = sa.select(sa.func.count()).select_from(ENTRIES).where(ENTRIES.c.source_id == "trip")
    async with asyncio.timeout(20):
        stored = 0
        while stored < 6:
            await asyncio.sleep(0.01)
            with kept.store.read() as connection:
                stored = connection.execute(query).scalar_one()
    assert [text for _, speaker, text in kept.told("trip") if speaker == "user"] == ["First.", "Second.", "Third."]
    with pytest.raises(NotFound):
        kept.told("gone")


async def test_scopes(kept: Kept) -> None:
    ask = kept.bench.ask
    await ask(FACT, session="trip")
    await ask(ASKED, session="work")
    assert FACT not in kept.prompt()  # its own session only
    await ask(ASKED, session="work", recall=())
    assert FACT not in kept.prompt()
    events = await ask(ASKED, session="work", recall=("trip",))
    assert [(each.session_id, each.turn) for each in citations(events)] == [("trip", 1)]
    assert "[session 'trip', turn 1, user, " in kept.prompt()
    with pytest.raises(NotFound):
        await ask(ASKED, session="work", recall=("tripp",))
    with pytest.raises(NotFound):
        await ask(ASKED, recall=("trip",), tenant="acme")
    await ask(ASKED, session="trip", tenant="acme")  # a session of its own under the same id
    assert FACT not in kept.prompt()
    await kept.bench.service.conversations.get("acme", "trip")  # waits for what is being stored
    assert [text for _, _, text in kept.told("trip", "acme")] == [ASKED, "The answer."]


async def test_history_that_does_not_fit_comes_back_as_turns(kept: Kept) -> None:
    """The client sends everything; the window (8,192 characters here) drops the oldest, memory brings it back."""
    history: list[tuple[str, str]] = []
    for number in range(12):
        said = FACT if number == 0 else f"Note {number}: " + "the weather was fair and nothing happened. " * 22
        await kept.bench.ask(said, session="long", recall=())
        history += [("user", said), ("assistant", "The answer.")]
    events = await kept.bench.ask(ASKED, session="long", history=tuple(history), max_tokens=8)
    prompt = kept.prompt()
    assert (1, FACT) in [(each.turn, each.quote) for each in citations(events)]
    assert prompt.count(FACT) == 1
    assert len(kept.bench.engine.specs[-1].token_ids) <= kept.bench.window - 8


async def test_deletion_takes_rows_index_and_kv(kept: Kept) -> None:
    engine = kept.bench.engine
    await kept.bench.ask(FACT, session="trip")
    await kept.bench.ask(ASKED, session="trip", recall=())
    await kept.bench.ask(ASKED, session="other", recall=("trip",))
    assert any(owner and "session-" in owner for owner in engine.ram.values())
    assert await asyncio.to_thread(kept.memory.settled)
    await kept.bench.service.conversations.delete("local", "trip")
    with pytest.raises(NotFound):
        kept.sessions.get("local", "trip")
    assert await asyncio.to_thread(kept.memory.settled)
    with kept.store.read() as connection:
        assert list(connection.execute(sa.select(ENTRIES.c.source_id).distinct()).scalars()) == ["other"]
        assert list(connection.execute(sa.select(INDEX_WORK.c.task).where(INDEX_WORK.c.task == "gone"))) == []
    assert kept.index.size().texts == 2
    assert not any(owner for owner in engine.ram.values()), "KV with the deleted text is still there"
    with pytest.raises(NotFound):
        await kept.bench.service.conversations.delete("local", "trip")


async def test_documents_and_sessions_together(kept: Kept) -> None:
    """Deleting the session leaves the document and its KV; both are cited."""
    file_id = await kept.bench.upload("The rent of the house is 940 crowns a month. " * 40)
    await kept.bench.ask(FACT, session="trip")
    events = await kept.bench.ask(ASKED + " And the rent?", session="trip", files=(file_id,))
    cited = [event.citation for event in events if isinstance(event, CitationAdded)]
    assert {type(each) for each in cited} == {TurnCitation, Citation}
    prompt = kept.prompt()
    assert prompt.index("940 crowns") < prompt.index(FACT) < prompt.index(ASKED)
    assert sum(kept.bench.engine.disk[name] != set() for name in kept.bench.engine.disk) > 0
    await kept.bench.service.conversations.delete("local", "trip")
    assert {file_id} == kept.bench.engine.owners()
    assert not any(owner and "session-" in owner for owner in kept.bench.engine.ram.values())


async def test_deleting_while_answering_forgets_the_answer(kept: Kept) -> None:
    await kept.bench.ask(FACT, session="trip")
    kept.bench.engine.token_s = 0.02
    before = len(kept.bench.engine.specs)
    asked = asyncio.create_task(kept.bench.ask("And more?", session="trip", recall=()))
    while len(kept.bench.engine.specs) == before:
        await asyncio.sleep(0.002)
    await kept.bench.service.conversations.delete("local", "trip")
    await asked
    with pytest.raises(NotFound):
        await settle(kept, "trip")


async def test_a_session_deleted_before_its_first_answer_does_not_come_back(kept: Kept) -> None:
    kept.bench.engine.token_s = 0.02
    asked = asyncio.create_task(kept.bench.ask(FACT, session="new"))
    while not kept.bench.engine.specs:
        await asyncio.sleep(0.002)
    await kept.bench.service.conversations.delete("local", "new")
    await asked
    with pytest.raises(NotFound):
        await settle(kept, "new")
    with pytest.raises(NotFound):
        await kept.bench.service.conversations.delete("local", "new")


async def test_everything_of_a_tenant_is_forgotten(kept: Kept) -> None:
    bench = kept.bench
    await bench.upload("The rent of the house is 940 crowns a month. " * 40)
    await bench.upload("Another tenant's paper. " * 40, tenant="acme")
    await bench.ask(FACT, session="trip")
    await bench.ask(FACT)  # in no session: its KV is the tenant's
    await bench.ask(FACT, session="trip", tenant="acme")
    await bench.service.conversations.get("acme", "trip")
    await bench.service.forget_everything("local")
    assert await bench.documents.list("local") == []
    assert await bench.service.conversations.sessions("local", 9) == []
    acme = (await bench.documents.list("acme"))[0].file_id
    assert {owner for owner in bench.engine.ram.values() if owner} == {acme, session_owner("acme", "trip")}
    assert bench.engine.owners() == {acme}
    assert [each.session_id for each in await bench.service.conversations.sessions("acme", 9)] == ["trip"]


async def test_what_is_older_than_its_days_goes_and_the_audit_says_why(kept: Kept) -> None:
    bench, now_s = kept.bench, time.time()
    file_id = await bench.upload("The rent of the house is 940 crowns a month. " * 40)
    await bench.ask(FACT, session="old")
    await settle(kept, "old")
    kept.sessions.add("local", "new", [("user", "Hello.", now_s + 20 * DAY_S)])
    ratings = Ratings(kept.store, kept.memory.marks, lambda: now_s)
    ratings.put("local", NewRating("msg_0", "up"))
    feedback = RatingService(ratings, bench.service.conversations, Telemetry())
    services = (bench.documents, bench.service.conversations, Archive(None), feedback, bench.service.uploads)
    retention = Retention(*services, None, 10, now=lambda: now_s + 11 * DAY_S)
    assert await retention.sweep() == 2
    assert ratings.part("local", Chosen(), Part())[0] == []
    assert [each.session_id for each in kept.sessions.sessions("local", 9)] == ["new"]
    assert [(each.actor, each.action) for each in audit.read(kept.store, 9)] == [("retention", "session.delete")]
    assert await bench.documents.get("local", file_id)
    uploaded_s = (await bench.documents.get("local", file_id)).created_at
    late = uploaded_s + 31 * DAY_S
    old = Retention(*services, 32, None, now=lambda: late)
    assert await old.sweep() == 0
    old = Retention(*services, 30, None, now=lambda: late)
    assert await old.sweep() == 1
    assert await bench.documents.list("local") == []


def turn(number: int, text: str, session: str = "a") -> SessionTurn:
    return SessionTurn(session, number, "user", text, None)


def test_turns_are_chosen_by_rank_and_ordered_by_place() -> None:
    found = [turn(9, "best"), turn(2, "x" * 50), turn(3, "good"), turn(4, "best"), turn(1, "seen")]
    found.append(turn(5, "b", "b"))
    chosen = choose_turns(found, {"seen"}, 12, lambda each: len(each.text), ["b", "a"])
    assert [(each.session_id, each.turn) for each in chosen] == [("b", 5), ("a", 3), ("a", 9)]
    (cut,) = choose_turns([turn(1, "x" * 50)], set(), 12, lambda each: len(each.text), ["a"])
    assert cut.text == "x" * 12


@pytest.mark.parametrize(
    ("room", "whole", "least", "expected"),
    [
        (8_000, 100, 50, 1024),
        (2000, 100, 50, 500),
        (2000, 1900, 50, 36),
        (2000, 1990, 5, -54),
        (2000, 2001, 50, 200),
    ],
)
def test_the_budget(room: int, whole: int, least: int, expected: int) -> None:
    assert recall_budget(room, whole, least) == expected
