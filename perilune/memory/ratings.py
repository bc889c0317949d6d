"""What people think of answers: thumbs, a reason, and where the right answer stands (spec O9).

Knows rows; not the wire. A rating names its answer by id and holds no text of it: where the answer is kept, in a
session or as a kept response, its text is read from there, so it goes with it, and the rating too. A span is also
marked for the search (`feedback.Marks`), so that the repeated question finds it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from perilune.core import Span
from perilune.errors import InvalidRequest, NotFound
from perilune.memory import entries
from perilune.memory.feedback import Marks, PreparedMark
from perilune.memory.paging import Part, read_part
from perilune.memory.schema import ANSWERS, ENTRIES, FEEDBACK, FILES, PAGES, RATINGS, RESPONSES
from perilune.memory.store import Store

BATCH = 100
_ID_BYTES = 18
_SPAN_COLUMNS = ("span_source_id", "span_turn", "span_page", "span_start", "span_end")


@dataclass(frozen=True, slots=True)
class NewRating:
    """`question` is what was asked, for a span of an answer that isn't kept."""

    answer_id: str
    rating: str
    reason: str | None = None
    comment: str | None = None
    span: Span | None = None
    question: str | None = None


@dataclass(frozen=True, slots=True)
class Rating:
    """`kept` says whether the answer's text can be read; of one in a session, `turn` (from 1) is its question's.
    `created_at` is seconds since the epoch."""

    rating_id: str
    created_at: float
    answer_id: str
    rating: str
    reason: str | None
    comment: str | None
    span: Span | None
    kept: bool
    session_id: str | None
    turn: int | None


@dataclass(frozen=True, slots=True)
class RatedAnswer:
    """What the export adds of a kept answer, None and empty of one that isn't; `expected` is the span's text."""

    question: str | None = None
    answer: str | None = None
    model: str | None = None
    citations: tuple[dict[str, Any], ...] = ()
    expected: str | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which ratings a list shows; None is any."""

    rating: str | None = None
    answer_id: str | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an answer is kept: entries of a session from `number` on, or a response; nowhere."""

    source_id: str | None = None
    number: int | None = None
    response_id: str | None = None


class Ratings:
    """Thread-safe; calls block for milliseconds, `put` with a span for as long as the embedder takes."""

    def __init__(self, store: Store, marks: Marks, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._marks = marks
        self._clock = clock

    def put(self, tenant: str, given: NewRating) -> Rating:
        """Keep a rating, in the place of an earlier one of the same answer. Raises `NotFound` for a span that isn't
        there, `InvalidRequest` where a span has no question to be found by."""
        mark = self._mark(tenant, given)
        with self._store.write() as connection:
            row = {
                "id": f"feedback_{secrets.token_urlsafe(_ID_BYTES)}",
                "tenant": tenant,
                "created_at": self._clock(),
                "answer_id": given.answer_id,
                "rating": given.rating,
                "reason": given.reason,
                "comment": given.comment,
                **_columns_of(_kept_at(connection, tenant, given.answer_id)),
                **_columns_of_span(given.span),
                "mark_id": None,
            }
            mine = (RATINGS.c.tenant == tenant, RATINGS.c.answer_id == given.answer_id)
            before = connection.execute(sa.select(RATINGS.c.id, RATINGS.c.mark_id).where(*mine)).first()
            if before is not None:
                row["id"] = before.id
                _remove(connection, tenant, [before])
            if mark is not None and given.span is not None:
                row["mark_id"] = self._marks.insert(connection, tenant, mark, given.span)
            connection.execute(RATINGS.insert().values(row))
            return _get(connection, tenant, row["id"])

    def get(self, tenant: str, rating_id: str) -> Rating:
        """Raises `NotFound`, for another tenant's rating too."""
        with self._store.read() as connection:
            return _get(connection, tenant, rating_id)

    def part(self, tenant: str, chosen: Chosen, part: Part) -> tuple[list[Rating], bool]:
        """(ratings, whether more follow). Raises `InvalidRequest` for an unknown cursor."""
        query = sa.select(RATINGS).where(RATINGS.c.tenant == tenant)
        for column, wanted in (
            (RATINGS.c.rating, chosen.rating),
            (RATINGS.c.answer_id, chosen.answer_id),
            (RATINGS.c.source_id, chosen.session_id),
        ):
            if wanted is not None:
                query = query.where(column == wanted)
        with self._store.read() as connection:
            rows, more = read_part(connection, query, (RATINGS.c.created_at, RATINGS.c.id), part)
        return [_rating(row) for row in rows], more

    def delete(self, tenant: str, rating_id: str) -> None:
        """The rating, and what the search learnt from it. Raises `NotFound`."""
        with self._store.write() as connection:
            _get(connection, tenant, rating_id)
            mine = (RATINGS.c.tenant == tenant, RATINGS.c.id == rating_id)
            _remove(connection, tenant, connection.execute(sa.select(RATINGS).where(*mine)).all())
        self._store.scrub()

    def expire(self, before_s: float) -> int:
        """Delete ratings older than this wall clock's second, of every tenant; returns how many."""
        with self._store.write() as connection:
            rows = connection.execute(sa.select(RATINGS).where(RATINGS.c.created_at < before_s)).all()
            for row in rows:
                _remove(connection, row.tenant, [row])
        if rows:
            self._store.scrub()
        return len(rows)

    def export(self, tenant: str) -> Iterator[tuple[Rating, RatedAnswer]]:
        """Every rating, oldest first, with what is kept of its answer. Reads a little at a time."""
        last: str | None = None
        while True:
            part = Part(BATCH, after=last, newest_first=False)
            query = sa.select(RATINGS).where(RATINGS.c.tenant == tenant)
            with self._store.read() as connection:
                rows, more = read_part(connection, query, (RATINGS.c.created_at, RATINGS.c.id), part)
                found = [(_rating(row), _rated(connection, row)) for row in rows]
            yield from found
            if not more:
                return
            last = rows[-1].id

    def _mark(self, tenant: str, given: NewRating) -> PreparedMark | None:
        """What a span's question means, found before the transaction: the embedder takes its time."""
        if given.span is None:
            if given.question is not None:
                raise InvalidRequest(
                    "A question is only taken with a span: answers' texts are kept with their session.",
                    hint="Leave question out.",
                    param="question",
                )
            return None
        with self._store.read() as connection:
            question = _kept(connection, tenant, _kept_at(connection, tenant, given.answer_id)).question
        if not (question or given.question):
            raise InvalidRequest(
                "The answer isn't kept, so that what was asked is unknown.",
                hint="Give its question with the span.",
                param="question",
            )
        return self._marks.prepare(tenant, question or given.question or "")


def key_of(answer_or_request_id: str) -> str:
    """What the ids of a request and of its answer have in common."""
    return answer_or_request_id.replace("-", "_", 1).partition("_")[2]


# --------------------------------------------------------------------------------------------------------- rows


def _columns_of(place: _Place) -> dict[str, Any]:
    return {"source_id": place.source_id, "number": place.number, "response_id": place.response_id}


def _columns_of_span(span: Span | None) -> dict[str, Any]:
    values = (span.source_id, span.turn, span.page, span.start, span.end) if span else (None,) * 5
    return dict(zip(_SPAN_COLUMNS, values, strict=True))


def _span(row: Any) -> Span | None:
    return Span(*(getattr(row, name) for name in _SPAN_COLUMNS)) if row.span_source_id is not None else None


def _rating(row: Any) -> Rating:
    return Rating(
        row.id,
        row.created_at,
        row.answer_id,
        row.rating,
        row.reason,
        row.comment,
        _span(row),
        row.source_id is not None or row.response_id is not None,
        row.source_id,
        None if row.number is None else row.number + 1,
    )


def _get(connection: sa.Connection, tenant: str, rating_id: str) -> Rating:
    mine = (RATINGS.c.tenant == tenant, RATINGS.c.id == rating_id)
    row = connection.execute(sa.select(RATINGS).where(*mine)).first()
    if row is None:
        raise NotFound("There is no such feedback.", hint="GET /v1/feedback lists yours.", param="feedback_id")
    return _rating(row)


def _remove(connection: sa.Connection, tenant: str, rows: Sequence[Any]) -> None:
    marks = [row.mark_id for row in rows if row.mark_id is not None]
    connection.execute(FEEDBACK.delete().where(FEEDBACK.c.tenant == tenant, FEEDBACK.c.id.in_(marks)))
    ids = [row.id for row in rows]
    connection.execute(RATINGS.delete().where(RATINGS.c.tenant == tenant, RATINGS.c.id.in_(ids)))
    entries.owe_purge(connection)


# ------------------------------------------------------------------------------------------------- kept answers


def _kept_at(connection: sa.Connection, tenant: str, answer_id: str) -> _Place:
    """Where the tenant's answer is kept. Of another tenant's nothing is known, as of one that isn't kept."""
    mine = (ANSWERS.c.tenant == tenant, ANSWERS.c.id == key_of(answer_id))
    row = connection.execute(sa.select(ANSWERS.c.source_id, ANSWERS.c.number).where(*mine)).first()
    if row is not None:
        return _Place(row.source_id, row.number)
    kept = (RESPONSES.c.tenant == tenant, RESPONSES.c.id == answer_id)
    return _Place(response_id=connection.execute(sa.select(RESPONSES.c.id).where(*kept)).scalar())


def _kept(connection: sa.Connection, tenant: str, place: _Place) -> RatedAnswer:
    if place.source_id is not None and place.number is not None:
        return _in_session(connection, tenant, place.source_id, place.number)
    if place.response_id is None:
        return RatedAnswer()
    query = sa.select(RESPONSES.c.input, RESPONSES.c.body)
    row = connection.execute(query.where(RESPONSES.c.tenant == tenant, RESPONSES.c.id == place.response_id)).first()
    return _of_response(json.loads(row.input), json.loads(row.body)) if row is not None else RatedAnswer()


def _in_session(connection: sa.Connection, tenant: str, session_id: str, number: int) -> RatedAnswer:
    mine = (ENTRIES.c.tenant == tenant, ENTRIES.c.source_id == session_id)
    query = sa.select(ENTRIES.c.speaker, ENTRIES.c.text).where(*mine, ENTRIES.c.number.between(number, number + 1))
    rows = list(connection.execute(query.order_by(ENTRIES.c.number)))
    said = {row.speaker: row.text for row in (rows if rows and rows[0].speaker == "user" else rows[:1])}
    known = (ANSWERS.c.tenant == tenant, ANSWERS.c.source_id == session_id, ANSWERS.c.number == number)
    model = connection.execute(sa.select(ANSWERS.c.model).where(*known)).scalar()
    return RatedAnswer(said.get("user"), said.get("assistant"), model)


def _of_response(items: Sequence[Mapping[str, Any]], body: Mapping[str, Any]) -> RatedAnswer:
    asked = [item for item in items if item.get("role") == "user"]
    parts = [
        part
        for item in body["output"]
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text"
    ]
    cited = tuple(citation for part in parts for citation in part["annotations"])
    answer = "".join(part["text"] for part in parts)
    return RatedAnswer(_text_of(asked[-1].get("content")) if asked else None, answer, body["model"], cited)


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or () if part.get("text"))


def _rated(connection: sa.Connection, row: Any) -> RatedAnswer:
    kept = _kept(connection, row.tenant, _Place(row.source_id, row.number, row.response_id))
    span = _span(row)
    if span is None:
        return kept
    expected = _expected(connection, row.tenant, span)
    return RatedAnswer(kept.question, kept.answer, kept.model, kept.citations, expected)


def _expected(connection: sa.Connection, tenant: str, span: Span) -> str | None:
    """A span's own text; None where it is gone."""
    if span.turn is not None:
        mine = (ENTRIES.c.tenant == tenant, ENTRIES.c.source_id == span.source_id)
        query = sa.select(ENTRIES.c.text).where(*mine, ENTRIES.c.number == span.turn - 1)
        said: str | None = connection.execute(query).scalar()
        return said[span.start : span.end] if said is not None else None
    of_file = sa.and_(FILES.c.id == PAGES.c.file_id, FILES.c.tenant == tenant)
    query = sa.select(PAGES.c.start, PAGES.c.text).join(FILES, of_file).where(PAGES.c.file_id == span.source_id)
    if span.start is None or span.end is None:
        found = connection.execute(query.where(PAGES.c.number == span.page)).first()
        return None if found is None else str(found.text)
    end = PAGES.c.start + sa.func.length(PAGES.c.text)
    rows = connection.execute(
        query.where(PAGES.c.start < span.end, end > span.start).order_by(PAGES.c.number)
    ).all()
    if not rows:
        return None
    first = rows[0].start
    return "".join(row.text for row in rows)[max(0, span.start - first) : span.end - first]
