"""A span that a user marked comes first when its question is asked again, in other words too, and for no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from perilune.core import Span
from perilune.errors import InvalidRequest, NotFound
from perilune.memory.embed.process import ProcessEmbedder
from perilune.memory.library import Library
from perilune.memory.memory import Memory, Turn
from perilune.memory.schema import FEEDBACK
from perilune.memory.scope import Scope
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex
from tests.memory.conftest import ingest

ANSWER = "It opens again on the twelfth, they say, once the planks are in."
TALK = (
    "The Moor bridge is an ugly thing.",
    "The bridge at the mill opens when a ship comes.",
    "Bridges open slowly.",
    "When does anything open here?",
    ANSWER,
    "老宅的钥匙在陈伯那里。",
)
ASKED = "When does the bridge on the moor open?"


@pytest.fixture(scope="module")
def embedder() -> Iterator[ProcessEmbedder]:
    opened = ProcessEmbedder(query_s=60.0)
    opened.embed(["warm"], "passage")
    yield opened
    opened.close()


@pytest.fixture
def memory(store: Store, tmp_path: Path, embedder: ProcessEmbedder) -> Iterator[Memory]:
    opened = Memory(store, LanceIndex(tmp_path / "index", embedder.model, embedder.width), embedder)
    opened._indexer.start()
    opened.add_turns("local", "s", [Turn("Ann", text) for text in TALK])
    assert opened.settled()
    yield opened
    opened._indexer.close()
    opened.retriever.close()


def found(library: Library, file_id: str, query: str, limit: int) -> str:
    return " ".join(passage.text for passage in library.search("local", [file_id], query, limit))


def first(memory: Memory, query: str, scope: Scope | None = None) -> str:
    return memory.search(query, scope or Scope("local"), 3).hits[0].text


@pytest.mark.parametrize(
    "query",
    [ASKED, "when will the moor bridge be open?", "On what day can one cross the bridge over the moor again?"],
)
def test_the_question_and_its_paraphrases_hit(memory: Memory, query: str) -> None:
    assert first(memory, query) != ANSWER
    memory.marks.add("local", ASKED, Span("s", turn=5))
    hits = memory.search(query, Scope("local"), 3).hits
    assert hits[0].text == ANSWER
    assert len({hit.entry_id for hit in hits}) == len(hits) == 3


@pytest.mark.parametrize(
    "query",
    [
        "When does the Mill bridge open?",  # another bridge
        "When does the bridge on the moor open in 1987?",
        "Is the bridge on the moor ugly?",
        "Where do I get a ticket for the opera?",
    ],
)
def test_other_questions_find_what_they_found(memory: Memory, query: str) -> None:
    before = [hit.entry_id for hit in memory.search(query, Scope("local"), 3).hits]
    memory.marks.add("local", ASKED, Span("s", turn=5))
    assert [hit.entry_id for hit in memory.search(query, Scope("local"), 3).hits] == before


def test_chinese(memory: Memory) -> None:
    memory.marks.add("local", "谁能打开祖屋的门？", Span("s", turn=6))
    assert first(memory, "祖屋的门谁能打开？") == TALK[5]


def test_marks_keep_to_their_tenant_and_scope(memory: Memory) -> None:
    memory.add_turns("other", "s", [Turn("Eve", text) for text in TALK])
    memory.add_turns("local", "t", [Turn("Eve", TALK[0])])
    memory.marks.add("local", ASKED, Span("s", turn=5))
    assert first(memory, ASKED, Scope("other")) != ANSWER
    assert first(memory, ASKED, Scope("local", sources=("t",))) == TALK[0]
    assert first(memory, ASKED, Scope("local", speakers=("Eve",))) == TALK[0]


def test_a_place_in_a_document(memory: Memory, store: Store, tmp_path: Path) -> None:
    library = Library(store, tmp_path, memory=memory)
    paragraphs = [f"Section {at}. The fee that a ship must pay is a matter of law. " * 20 for at in range(14)]
    paragraphs[11] = "Dues: 940 crowns. " + "The quay is old. " * 60
    record = ingest(library, "\n\n".join(paragraphs).encode())  # found by words at once
    asked = "What must a ship pay?"
    at = library.text("local", record.file_id).index("940")
    page = next(each for each in library.pages("local", record.file_id) if each.start <= at < each.end)
    assert "940" not in found(library, record.file_id, asked, 8)
    mark = memory.marks.add("local", asked, Span(record.file_id, start=at, end=at + 3))
    assert "940" in found(library, record.file_id, asked, 1)
    memory.marks.delete("local", mark)
    memory.marks.add("local", asked, Span(record.file_id, page=page.number))
    assert "940" in found(library, record.file_id, asked, 8)
    for wrong in (Span(record.file_id, page=99), Span("s", turn=99), Span("none", turn=1), Span("s", page=1)):
        with pytest.raises(NotFound):
            memory.marks.add("local", asked, wrong)
    with pytest.raises(InvalidRequest):
        memory.marks.add("local", "?!", Span("s", turn=1))


def test_marks_are_listed_deleted_and_go_with_their_source(memory: Memory, store: Store) -> None:
    sessions = Sessions(store, memory)
    mark = sessions.mark("local", ASKED, Span("s", turn=5))
    assert [(each.feedback_id, each.question, each.source_id) for each in sessions.marks("local", 9)] == [
        (mark, ASKED, "s")
    ]
    assert sessions.marks("other", 9) == []
    with pytest.raises(NotFound):
        sessions.unmark("other", mark)
    sessions.unmark("local", mark)
    assert first(memory, ASKED) != ANSWER
    sessions.mark("local", ASKED, Span("s", turn=5))
    sessions.delete("local", "s")
    with store.read() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(FEEDBACK)).scalar() == 0
