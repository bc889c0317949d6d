"""What people think of answers: kept without the answers' text, exported with it, gone with what it is about."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from perilune.core import KeptAnswer, Span
from perilune.errors import InvalidRequest, NotFound
from perilune.memory.entries import remove_tenant
from perilune.memory.library import Library
from perilune.memory.memory import Memory, Turn
from perilune.memory.paging import Part
from perilune.memory.ratings import Chosen, NewRating, RatedAnswer, Ratings, key_of
from perilune.memory.responses import Made, ResponseStore
from perilune.memory.schema import ANSWERS, FEEDBACK, RATINGS
from perilune.memory.scope import Scope
from perilune.memory.sessions import Sessions
from perilune.memory.store import Store
from perilune.memory.vectors.lance import LanceIndex
from tests.memory.conftest import ingest

ASKED = "When does the bridge on the moor open?"
SAID = "The sources don't say so."
FOUND = "It opens again on the twelfth, they say, once the planks are in."


@pytest.fixture
def memory(store: Store, tmp_path: Path) -> Iterator[Memory]:
    opened = Memory(store, LanceIndex(tmp_path / "index", "none", 1), None)
    opened.add_turns("local", "old", [Turn("user", FOUND), Turn("assistant", "Noted. The bridge is open.")])
    turns = [Turn("user", ASKED), Turn("assistant", SAID)]
    opened.add_turns("local", "s", turns, answer=KeptAnswer("req_a1", "smol"))
    yield opened
    opened.close()


@pytest.fixture
def ratings(store: Store, memory: Memory) -> Ratings:
    clock = itertools.count(100)
    return Ratings(store, memory.marks, lambda: float(next(clock)))


def down(answer_id: str = "chatcmpl-a1", span: Span | None = None, question: str | None = None) -> NewRating:
    return NewRating(answer_id, "down", "not_found", "It stands there.", span, question)


def rows(store: Store, table: sa.Table) -> int:
    with store.read() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def respond(store: Store, response_id: str, tenant: str = "local", cited: str = "file-1") -> None:
    text = {"type": "output_text", "text": SAID, "annotations": [{"type": "file_citation", "file_id": cited}]}
    output = [{"type": "message", "content": [text]}, {"type": "function_call", "name": "f"}]
    items = [
        {"role": "user", "content": "Earlier."},
        {"role": "user", "content": [{"type": "input_text", "text": ASKED}]},
    ]
    body = {"id": response_id, "model": "smol", "status": "completed", "output": output}
    kept = ResponseStore(store)
    kept.begin(tenant, items, {**body, "status": "in_progress", "output": []})
    assert kept.finish(tenant, Made(body))


@pytest.mark.parametrize("answer_id", ["chatcmpl-a1", "msg_a1", "resp_a1"])
def test_an_answer_of_a_session_is_rated_and_exported(ratings: Ratings, answer_id: str) -> None:
    rated = ratings.put("local", down(answer_id))
    assert (rated.kept, rated.session_id, rated.turn, rated.rating) == (True, "s", 1, "down")
    assert ratings.get("local", rated.rating_id) == rated
    ((exported, answer),) = ratings.export("local")
    assert exported == rated
    assert answer == RatedAnswer(ASKED, SAID, "smol")


def test_a_kept_response_is_rated_and_exported(ratings: Ratings, store: Store) -> None:
    respond(store, "resp_b2")
    assert ratings.put("local", NewRating("resp_b2", "up")).kept
    ((_, answer),) = ratings.export("local")
    assert answer == RatedAnswer(ASKED, SAID, "smol", ({"type": "file_citation", "file_id": "file-1"},))
    ResponseStore(store).delete("local", "resp_b2")
    assert rows(store, RATINGS) == 0


def test_of_an_answer_that_is_not_kept_there_is_no_text(ratings: Ratings, store: Store) -> None:
    respond(store, "resp_c3", tenant="other")
    for answer_id in ("chatcmpl-ff", "resp_c3"):  # another tenant's is as unknown as one that never was
        assert not ratings.put("local", NewRating(answer_id, "up")).kept
    assert [answer for _, answer in ratings.export("local")] == [RatedAnswer(), RatedAnswer()]
    with pytest.raises(InvalidRequest, match="question"):
        ratings.put("local", down("chatcmpl-ff", Span("old", turn=1)))
    with pytest.raises(InvalidRequest, match="span"):
        ratings.put("local", down("chatcmpl-ff", question=ASKED))


def first(memory: Memory) -> str:
    return memory.search(ASKED, Scope("local"), 1).hits[0].text


@pytest.mark.parametrize("answer_id", ["chatcmpl-a1", "chatcmpl-ff"])
def test_the_repeated_question_finds_the_span(
    ratings: Ratings, memory: Memory, store: Store, answer_id: str
) -> None:
    assert first(memory) != FOUND
    asked = ASKED if answer_id == "chatcmpl-ff" else None
    rated = ratings.put("local", down(answer_id, Span("old", turn=1, start=0, end=28), asked))
    assert first(memory) == FOUND
    ((_, answer),) = ratings.export("local")
    assert answer.expected == "It opens again on the twelft"
    again = ratings.put("local", NewRating(answer_id, "up"))  # a change of mind takes the span back
    assert (again.rating_id, again.rating, again.span) == (rated.rating_id, "up", None)
    assert first(memory) != FOUND
    assert (rows(store, FEEDBACK), rows(store, RATINGS)) == (0, 1)
    ratings.put("local", down(answer_id, Span("old", turn=1), asked))
    ratings.delete("local", rated.rating_id)
    assert first(memory) != FOUND
    assert (rows(store, FEEDBACK), rows(store, RATINGS)) == (0, 0)


def test_a_span_that_is_not_there_leaves_nothing(ratings: Ratings, store: Store) -> None:
    with pytest.raises(NotFound):
        ratings.put("local", down(span=Span("old", turn=9)))
    assert (rows(store, FEEDBACK), rows(store, RATINGS)) == (0, 0)


def test_the_text_of_a_span_across_pages(ratings: Ratings, store: Store, tmp_path: Path) -> None:
    library = Library(store, tmp_path)
    text = "\n".join(f"Line {at} of the ledger says little." for at in range(400))
    file_id = ingest(library, text.encode()).file_id
    pages = library.pages("local", file_id)
    assert len(pages) > 2
    start, end = pages[1].start - 40, pages[2].start + 30
    ratings.put("local", down(span=Span(file_id, start=start, end=end)))
    ratings.put("local", down("msg_e5", Span(file_id, page=2), ASKED))
    assert [answer.expected for _, answer in ratings.export("local")] == [text[start:end], pages[1].text]
    library.delete_file("local", file_id)
    assert (rows(store, FEEDBACK), rows(store, RATINGS)) == (0, 0)


def test_it_goes_with_its_session_and_tenant(ratings: Ratings, memory: Memory, store: Store) -> None:
    ratings.put("local", NewRating("chatcmpl-a1", "up"))
    sessions = Sessions(store, memory)
    sessions.delete("local", "s")
    assert (rows(store, ANSWERS), rows(store, RATINGS)) == (0, 0)
    ratings.put("local", down("chatcmpl-ff", Span("old", turn=1), ASKED))
    sessions.delete("local", "old")  # the span's
    assert (rows(store, FEEDBACK), rows(store, RATINGS)) == (0, 0)
    respond(store, "resp_d4")
    ratings.put("local", NewRating("resp_d4", "up"))
    kept = ratings.put("other", NewRating("msg_0", "up"))
    with store.write() as connection:
        remove_tenant(connection, "local")
    assert ratings.get("other", kept.rating_id) == kept
    assert rows(store, RATINGS) == 1


def test_tenants_never_meet(ratings: Ratings) -> None:
    mine = ratings.put("local", NewRating("chatcmpl-a1", "up"))
    theirs = ratings.put("other", NewRating("chatcmpl-a1", "down"))
    assert not theirs.kept
    assert [answer for _, answer in ratings.export("other")] == [RatedAnswer()]
    for call in (ratings.get, ratings.delete):
        with pytest.raises(NotFound):
            call("other", mine.rating_id)
    assert ratings.part("other", Chosen(), Part())[0] == [theirs]


def test_parts_in_both_directions(ratings: Ratings) -> None:
    made = [ratings.put("local", NewRating(f"msg_{at}", ("up", "down")[at % 2])) for at in range(7)]
    made = made[::-1]

    def part(**asked: object) -> tuple[list[str], bool]:
        found, more = ratings.part("local", Chosen(), Part(**asked))  # type: ignore[arg-type]
        return [each.answer_id for each in found], more

    ids = [each.answer_id for each in made]
    assert part(limit=3) == (ids[:3], True)
    assert part(limit=3, after=made[2].rating_id) == (ids[3:6], True)
    assert part(limit=3, after=made[5].rating_id) == (ids[6:], False)
    assert part(limit=3, before=made[6].rating_id) == (ids[3:6], True)
    assert part(limit=3, before=made[3].rating_id) == (ids[:3], False)
    assert part(limit=9, after=made[1].rating_id, before=made[5].rating_id) == (ids[2:5], False)
    assert part(limit=2, newest_first=False) == (ids[::-1][:2], True)
    assert part(limit=2, after=made[5].rating_id, newest_first=False) == (ids[::-1][2:4], True)
    with pytest.raises(InvalidRequest, match="after"):
        part(after="feedback_none")
    ups, _ = ratings.part("local", Chosen(rating="up"), Part())
    assert [each.answer_id for each in ups] == ["msg_6", "msg_4", "msg_2", "msg_0"]
    assert ratings.part("local", Chosen(answer_id="msg_3"), Part())[0] == [made[3]]


def test_old_ones_expire(ratings: Ratings) -> None:
    for at in range(3):
        ratings.put("local", NewRating(f"msg_{at}", "up"))
    assert ratings.expire(102.0) == 2
    assert [each.answer_id for each in ratings.part("local", Chosen(), Part())[0]] == ["msg_2"]


def test_what_ids_have_in_common() -> None:
    assert {key_of(each) for each in ("req_ab", "chatcmpl-ab", "resp_ab", "msg_ab", "cmpl-ab")} == {"ab"}
