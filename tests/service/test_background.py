"""Profile and summary in the prompt: what enters, in which order, when, what the report says, and how it goes
again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema
import pytest

from perilune.core import Completed, Event, ProfileFact, Report, SummarySentence
from perilune.errors import NotFound
from perilune.memory.indexer import Indexer
from perilune.memory.memory import Memory
from perilune.memory.session_ids import profile_owner
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex
from perilune.service import background
from perilune.service.report import report_dict
from tests.memory.test_summaries import LEAF_ENTRIES, fact
from tests.service.harness import running
from tests.service.test_sessions import Kept

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "perilune-object.schema.json").read_text("utf-8"))


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    store = Store(tmp_path)
    index = LanceIndex(tmp_path / "index", "none", 1)
    memory = Memory(store, index, None, indexer=Indexer(store, index, None))
    sessions = Sessions(store, memory)
    try:
        async with running(kept=sessions) as bench:
            yield Kept(bench, store, memory, index, sessions)
    finally:
        memory.close()
        store.close()


def report(events: list[Event]) -> Report:
    found = next(event.report for event in events if isinstance(event, Completed))
    jsonschema.validate(report_dict(found), SCHEMA)
    return found


async def talk(kept: Kept, session: str, exchanges: int) -> None:
    for number in range(exchanges):
        await kept.bench.ask(fact(number), session=session, recall=())
    await kept.bench.service.conversations.get("local", session)
    while await asyncio.to_thread(kept.memory.summaries.advance):
        pass


async def test_what_one_session_learns_another_knows(kept: Kept) -> None:
    await kept.bench.ask("My name is Anna Keller. I live in Bonn.", session="a")
    events = await kept.bench.ask("Which fair is near me?", session="b")
    assert "What the user has said about themselves:\n- name: Anna Keller\n- residence: Bonn\n" in kept.prompt()
    used = report(events).memory
    assert [(each.key, each.value, each.session_id, each.turn) for each in used.facts] == [
        ("name", "Anna Keller", "a", 1),
        ("residence", "Bonn", "a", 1),
    ]
    assert report_dict(report(events))["memory"]["profile"][0] == {
        "key": "name",
        "value": "Anna Keller",
        "session": "a",
        "turn": 1,
    }


async def test_where_the_profile_is_not_used(kept: Kept) -> None:
    await kept.bench.ask("I live in Bonn.", session="a")
    for options in ({}, {"session": "b", "recall": ()}, {"session": "b", "tenant": "acme"}):
        events = await kept.bench.ask("Which fair is near me?", **options)
        assert "Bonn" not in kept.prompt()
        assert report(events).memory.facts == ()


async def test_off_for_one_request(kept: Kept) -> None:
    await kept.bench.ask("I live in Bonn.", session="a")
    await kept.bench.ask("My name is Anna Keller.", session="b", profile=False)
    assert "Bonn" not in kept.prompt()
    known = await kept.bench.service.conversations.profile("local", False)
    assert [each.value for each in known] == ["Bonn"]


async def test_only_the_question_teaches(kept: Kept) -> None:
    """Neither older messages of the request, nor the answer, nor what memory put into the prompt."""
    history = (("user", "I live in Rome."), ("assistant", "I live in Oslo."))
    await kept.bench.ask("I work at Siemens.", session="a", history=history)
    for _ in range(3):
        await kept.bench.ask("Where do I work?", session="b")
    facts = await kept.bench.service.conversations.profile("local", True)
    assert [(each.key, each.value, each.session_id) for each in facts] == [("employer", "Siemens", "a")]


async def test_the_summary_enters_once_a_leaf_is_whole(kept: Kept) -> None:
    await talk(kept, "s", LEAF_ENTRIES // 2 - 1)
    events = await kept.bench.ask("Are there any geese?", session="s")
    assert report(events).memory.sentences == ()
    await kept.bench.service.conversations.get("local", "s")
    while kept.memory.summaries.advance():
        pass
    events = await kept.bench.ask("Are there any cows?", session="s")
    used = report(events).memory.sentences
    assert used
    assert [each.number for each in used] == sorted(each.number for each in used)
    prompt = kept.prompt()
    assert f"From earlier in this conversation:\n- [turn {used[0].number}, user] {used[0].text}\n" in prompt
    first = prompt.index("From earlier")
    await kept.bench.ask("Are there any hens?", session="s")
    again = kept.prompt()
    assert again[first : again.index("\n\n", first)] == prompt[first : prompt.index("\n\n", first)]


async def test_what_the_request_holds_is_not_summarised(kept: Kept) -> None:
    await talk(kept, "s", LEAF_ENTRIES // 2)
    history = tuple(("user", fact(number)) for number in range(LEAF_ENTRIES // 2))
    events = await kept.bench.ask("Are there any cows?", session="s", history=history)
    assert report(events).memory.sentences == ()


async def test_a_correction_is_what_the_model_reads(kept: Kept) -> None:
    await talk(kept, "s", LEAF_ENTRIES // 2)
    conversations = kept.bench.service.conversations
    await conversations.correct_summary("local", "s", 1, 0, "Parcel 0 was lost.")
    events = await kept.bench.ask("Are there any cows?", session="s", history=(("user", fact(0)),))
    assert "[turn 1, user, corrected] Parcel 0 was lost." in kept.prompt()
    assert [each.text for each in report(events).memory.sentences if each.corrected] == ["Parcel 0 was lost."]


async def test_erasing_drops_kv_and_stops_prepared_answers(kept: Kept) -> None:
    await kept.bench.ask("I live in Bonn.", session="a")
    await kept.bench.ask("Hm.", session="b")
    conversations, engine = kept.bench.service.conversations, kept.bench.engine
    await conversations.get("local", "b")
    assert any(owner and "profile-" in owner for owner in engine.ram.values())
    visit = conversations.visit("local", "c")
    await conversations.erase_profile("local", "residence")
    assert not any(owner and "profile-" in owner for owner in engine.ram.values())
    conversations.require(visit)
    with pytest.raises(NotFound):
        conversations.require(visit, [profile_owner("local")])
    await kept.bench.ask("Where do I live?", session="b", recall=("b",))
    assert "residence" not in kept.prompt()


async def test_deleting_a_session_drops_kv_of_prompts_that_knew_its_facts(kept: Kept) -> None:
    await kept.bench.ask("I live in Bonn.", session="a")
    await kept.bench.ask("Hm.", session="b")
    assert "Bonn" in kept.prompt()
    await kept.bench.service.conversations.delete("local", "a")
    assert not any(owner and "profile-" in owner for owner in kept.bench.engine.ram.values())
    await kept.bench.ask("Hm.", session="b")
    assert "Bonn" not in kept.prompt()


def facts(count: int) -> list[ProfileFact]:
    return [ProfileFact(f"key{at}", "v" * 10, at, at) for at in range(count)]


def test_budgets() -> None:
    brief = [SummarySentence("s", at + 1, 0, 20, f"Sentence number {at:03}.") for at in reversed(range(100))]
    made = background.compose(facts(50), brief, set(), room=100_000, spare=100_000, count=len)
    assert 0 < len(made.facts) < 50
    assert made.facts == tuple(sorted(made.facts, key=lambda each: each.since))
    assert made.facts[-1].key == "key49"  # the newest, where not all fit
    assert [each.number for each in made.sentences] == sorted(each.number for each in made.sentences)
    assert made.sentences[-1].number == 100  # the best
    assert len(made.text) <= background.PROFILE_TOKENS + background.SUMMARY_TOKENS + 2
    assert background.compose(facts(5), brief, set(), room=320, spare=320, count=len) == background.Background()
    assert background.compose(facts(5), brief, set(), room=10_000, spare=0, count=len) == background.Background()


def test_important_facts_come_before_new_ones() -> None:
    name = ProfileFact("name", "Anna", -1, -1)
    made = background.compose([name, *facts(50)], [], set(), room=100_000, spare=100_000, count=len)
    assert made.facts[0] == name
