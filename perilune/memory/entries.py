"""The rows that a search finds: passages of files and turns of sessions, with their terms, counts and vectors.

Knows SQL, not ranking and not the index. Whatever changes an entry also changes the tenant's term counts and leaves
word for the index (`index_work`), in the caller's transaction, so that a kill at any moment leaves nothing apart.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from perilune.memory import scoring
from perilune.memory.schema import (
    AUDIT,
    BATCH_SOURCES,
    BATCHES,
    CORPORA,
    DERIVED,
    ENTRIES,
    INDEX_WORK,
    KEYS,
    METADATA,
    PAGES,
    RATINGS,
    TERM_COUNTS,
    VECTORS,
)
from perilune.memory.scope import Scope, conditions
from perilune.memory.vectors.protocol import Row

Task = Literal["text", "vector", "gone", "purge"]
"""Of `index_work`. "purge" stands for a deletion, not for an entry: what no row has must be nowhere else either."""

HALF = np.dtype("<f2")
_CHUNK = 5_000
_PLACES = 100
_SIGN = 1 << 63


@dataclass(frozen=True, slots=True)
class NewEntry:
    """An entry to be stored. Passages give `page`, `start` and `end`; turns give `text`."""

    source_id: str
    number: int
    terms: Mapping[int, int]
    length: int
    page: int | None = None
    start: int | None = None
    end: int | None = None
    text: str | None = None
    speaker: str | None = None
    at: float | None = None
    entities: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored entry as ranking needs it: no text. `vector` is float16 bytes, None until it is embedded."""

    id: int
    source_id: str
    number: int
    page: int | None
    speaker: str | None
    at: float | None
    entities: str
    terms: bytes
    length: int
    vector: bytes | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """A tenant's entries: how many, how long on average, and how many hold each term."""

    entries: int
    mean_length: float
    holders: Mapping[int, int]


# ------------------------------------------------------------------------------------------------------ writing


def add(connection: sa.Connection, tenant: str, new: Sequence[NewEntry]) -> None:
    """Store entries of one source, in order of their numbers, which must be new to it."""
    if not new:
        return
    rows = [
        {
            "tenant": tenant,
            **{name: getattr(entry, name) for name in _NEW_COLUMNS},
            "entities": "\n".join(entry.entities),
            "terms": scoring.pack(entry.terms),
        }
        for entry in new
    ]
    connection.execute(ENTRIES.insert(), rows)
    ids = connection.execute(
        sa.select(ENTRIES.c.id).where(
            ENTRIES.c.tenant == tenant,
            ENTRIES.c.source_id == new[0].source_id,
            ENTRIES.c.number.between(new[0].number, new[-1].number),
        )
    ).scalars()
    work = [{"entry_id": entry_id, "task": task} for entry_id in ids for task in ("text", "vector")]
    connection.execute(INDEX_WORK.insert(), work)
    _upsert(
        connection,
        "INSERT INTO summary_work (tenant, source_id, entries, done) VALUES (:tenant, :source_id, :entries, 0) "
        "ON CONFLICT (tenant, source_id) DO UPDATE SET entries = excluded.entries",
        [{"tenant": tenant, "source_id": new[0].source_id, "entries": new[-1].number + 1}],
    )
    _count(connection, tenant, [row["terms"] for row in rows], sum(entry.length for entry in new), 1)


_NEW_COLUMNS = ("source_id", "number", "page", "start", "end", "text", "speaker", "at", "length")


def remove_source(connection: sa.Connection, tenant: str, source_id: str) -> None:
    """Delete a source's entries, and all that any table with a tenant and a source says of it. What files and the
    index still hold of it is purged afterwards: `index_work` says so. Results of batches that quote it are owed a
    purge, too (`memory/batches.py`)."""
    remove_entries(connection, tenant, source_id)
    of_source = (BATCH_SOURCES.c.tenant == tenant, BATCH_SOURCES.c.source_id == source_id)
    quoting = sa.select(BATCH_SOURCES.c.batch_id).where(*of_source)
    connection.execute(BATCHES.update().where(BATCHES.c.id.in_(quoting)).values(purge=True))
    for table in _OF_SOURCES:
        connection.execute(table.delete().where(table.c.tenant == tenant, table.c.source_id == source_id))
    connection.execute(RATINGS.delete().where(RATINGS.c.tenant == tenant, RATINGS.c.span_source_id == source_id))


_OF_SOURCES = [table for table in METADATA.sorted_tables if {"tenant", "source_id"} <= set(table.c.keys())]


def remove_entries(connection: sa.Connection, tenant: str, source_id: str) -> None:
    """Delete a source's entries with their vectors and counts, and what was made of them: summaries, corrections,
    facts. The index learns it from `index_work`."""
    for table in DERIVED:
        connection.execute(table.delete().where(table.c.tenant == tenant, table.c.source_id == source_id))
    owe_purge(connection)
    mine = (ENTRIES.c.tenant == tenant, ENTRIES.c.source_id == source_id)
    while True:
        query = sa.select(ENTRIES.c.id, ENTRIES.c.terms, ENTRIES.c.length).where(*mine).limit(_CHUNK)
        rows = connection.execute(query).all()
        if not rows:
            return
        ids = [row.id for row in rows]
        _count(connection, tenant, [row.terms for row in rows], sum(row.length for row in rows), -1)
        connection.execute(INDEX_WORK.delete().where(INDEX_WORK.c.entry_id.in_(ids)))
        connection.execute(INDEX_WORK.insert(), [{"entry_id": entry_id, "task": "gone"} for entry_id in ids])
        connection.execute(VECTORS.delete().where(VECTORS.c.entry_id.in_(ids)))
        connection.execute(ENTRIES.delete().where(ENTRIES.c.id.in_(ids)))


def remove_tenant(connection: sa.Connection, tenant: str) -> None:
    """Delete every row that any table has of a tenant, but its keys and what the audit says."""
    mine = sa.select(ENTRIES.c.id).where(ENTRIES.c.tenant == tenant)
    connection.execute(INDEX_WORK.delete().where(INDEX_WORK.c.entry_id.in_(mine)))
    connection.execute(INDEX_WORK.insert().from_select(["entry_id", "task"], mine.add_columns(sa.literal("gone"))))
    owe_purge(connection)
    connection.execute(VECTORS.delete().where(VECTORS.c.entry_id.in_(mine)))
    for table in reversed(METADATA.sorted_tables):
        if "tenant" in table.c and table not in (AUDIT, KEYS):
            connection.execute(table.delete().where(table.c.tenant == tenant))


def count_source(connection: sa.Connection, tenant: str, source_id: str) -> None:
    """Add a source's entries, which were copied, to the tenant's statistics."""
    mine = (ENTRIES.c.tenant == tenant, ENTRIES.c.source_id == source_id)
    first = 0
    while True:
        query = sa.select(ENTRIES.c.terms, ENTRIES.c.length).where(*mine, ENTRIES.c.number >= first)
        rows = connection.execute(query.order_by(ENTRIES.c.number).limit(_CHUNK)).all()
        if not rows:
            return
        _count(connection, tenant, [row.terms for row in rows], sum(row.length for row in rows), 1)
        first += len(rows)


def _count(connection: sa.Connection, tenant: str, blobs: Sequence[bytes], length: int, sign: int) -> None:
    """Add entries to the tenant's statistics (`sign` 1) or take them out (-1)."""
    _upsert(
        connection,
        "INSERT INTO corpora (tenant, entries, length) VALUES (:tenant, :entries, :length) ON CONFLICT (tenant) "
        "DO UPDATE SET entries = corpora.entries + excluded.entries, length = corpora.length + excluded.length",
        [{"tenant": tenant, "entries": sign * len(blobs), "length": sign * length}],
    )
    hashes, holders = np.unique(np.frombuffer(b"".join(blobs), scoring.TERM)["hash"], return_counts=True)
    _upsert(
        connection,
        "INSERT INTO term_counts (tenant, term, entries) VALUES (:tenant, :term, :entries) "
        "ON CONFLICT (tenant, term) DO UPDATE SET entries = term_counts.entries + excluded.entries",
        [
            {"tenant": tenant, "term": term, "entries": sign * count}
            for term, count in zip(hashes.astype(np.int64).tolist(), holders.tolist(), strict=True)
        ],
    )
    if sign < 0:
        empty = TERM_COUNTS.delete().where(TERM_COUNTS.c.tenant == tenant, TERM_COUNTS.c.entries <= 0)
        connection.execute(empty)


def _upsert(connection: sa.Connection, statement: str, rows: list[dict[str, object]]) -> None:
    if rows:
        connection.execute(sa.text(statement), rows)


def signed(term: int) -> int:
    """A 64-bit hash as databases keep it."""
    return term - 2 * _SIGN if term >= _SIGN else term


# ------------------------------------------------------------------------------------------------------ reading


def statistics(connection: sa.Connection, tenant: str, terms: Iterable[int]) -> Statistics:
    """The tenant's statistics for these terms."""
    total = connection.execute(sa.select(CORPORA).where(CORPORA.c.tenant == tenant)).first()
    if total is None or total.entries <= 0:
        return Statistics(0, 1.0, {})
    wanted = {signed(term): term for term in terms}
    query = sa.select(TERM_COUNTS.c.term, TERM_COUNTS.c.entries).where(
        TERM_COUNTS.c.tenant == tenant, TERM_COUNTS.c.term.in_(wanted)
    )
    holders = {wanted[row.term]: int(row.entries) for row in connection.execute(query)}
    return Statistics(int(total.entries), max(1.0, total.length / total.entries), holders)


def _select(model: str) -> sa.Select[Any]:
    columns = [ENTRIES.c[name] for name in Entry.__slots__ if name != "vector"]
    join = sa.and_(VECTORS.c.entry_id == ENTRIES.c.id, VECTORS.c.model == model)
    return sa.select(*columns, VECTORS.c.vector).select_from(ENTRIES.outerjoin(VECTORS, join))


def load(connection: sa.Connection, tenant: str, ids: Collection[int], model: str) -> list[Entry]:
    """The tenant's entries among these ids, with their vectors of `model`; what is gone is left out."""
    # The tenant is compared here: with it in the query, SQLite reads all of the tenant's index, not these rows.
    query = _select(model).add_columns(ENTRIES.c.tenant).where(ENTRIES.c.id.in_(ids))
    return [Entry(*row[:-1]) for row in connection.execute(query).all() if row.tenant == tenant]


def load_places(
    connection: sa.Connection, tenant: str, places: Collection[tuple[str, int]], model: str
) -> list[Entry]:
    """The tenant's entries at these (source, number) places; places that don't exist are left out."""
    # One condition a place: SQLite reads its whole index for (source, number) IN (…), and nothing else for these.
    found: list[Entry] = []
    wanted = sorted(places)
    for at in range(0, len(wanted), _PLACES):
        here = sa.or_(
            *(
                sa.and_(ENTRIES.c.tenant == tenant, ENTRIES.c.source_id == source, ENTRIES.c.number == number)
                for source, number in wanted[at : at + _PLACES]
            )
        )
        found += [Entry(*row) for row in connection.execute(_select(model).where(here))]
    return found


def scan(connection: sa.Connection, scope: Scope, model: str) -> Iterator[list[Entry]]:
    """Every entry in scope, a few thousand at a time: the search that needs no index."""
    last = -1
    while True:
        query = _select(model).where(*conditions(scope, ENTRIES), ENTRIES.c.id > last)
        rows = connection.execute(query.order_by(ENTRIES.c.id).limit(_CHUNK)).all()
        if not rows:
            return
        last = rows[-1].id
        found = [Entry(*row) for row in rows]
        yield [entry for entry in found if in_entities(entry, scope)]


def count(connection: sa.Connection, scope: Scope, most: int) -> int:
    """How many entries are in scope, names aside; counting stops behind `most`."""
    some = sa.select(sa.literal(1)).where(*conditions(scope, ENTRIES)).limit(most + 1).subquery()
    return int(connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one())


def in_entities(entry: Entry, scope: Scope) -> bool:
    """Whether the entry holds one of the names that the scope asks for."""
    return not scope.entities or not set(scope.entities).isdisjoint(entry.entities.split("\n"))


@dataclass(frozen=True, slots=True)
class Text:
    """What an entry says, and where. `start` and `end` are characters of a file's whole text."""

    text: str
    page: int | None
    start: int | None
    end: int | None


def texts(connection: sa.Connection, ids: Collection[int]) -> dict[int, Text]:
    """The text of entries, by id."""
    pages = sa.and_(PAGES.c.file_id == ENTRIES.c.source_id, PAGES.c.number == ENTRIES.c.page)
    query = (
        sa.select(
            *(ENTRIES.c[name] for name in ("id", "page", "start", "end", "text")),
            PAGES.c.text.label("page_text"),
            PAGES.c.start.label("page_start"),
        )
        .select_from(ENTRIES.outerjoin(PAGES, pages))
        .where(ENTRIES.c.id.in_(ids))
    )
    found = {}
    for row in connection.execute(query):
        text = row.text
        if text is None:
            text = (row.page_text or "")[row.start - (row.page_start or 0) : row.end - (row.page_start or 0)]
        found[row.id] = Text(text, row.page, row.start, row.end)
    return found


# ------------------------------------------------------------------------------------------- work for the index


def pending(connection: sa.Connection, task: Task, limit: int) -> list[int]:
    """Entries that wait for a task, newest first: a fresh turn doesn't wait behind a library."""
    query = sa.select(INDEX_WORK.c.entry_id).where(INDEX_WORK.c.task == task)
    return list(connection.execute(query.order_by(INDEX_WORK.c.entry_id.desc()).limit(limit)).scalars())


def indexed(connection: sa.Connection) -> tuple[int, int]:
    """How many entries the index was given for words, and for vectors."""
    total = connection.execute(sa.select(sa.func.count()).select_from(ENTRIES)).scalar_one()
    waiting = sa.select(INDEX_WORK.c.task, sa.func.count()).group_by(INDEX_WORK.c.task)
    left: dict[str, int] = {row[0]: row[1] for row in connection.execute(waiting)}
    return total - left.get("text", 0), total - left.get("vector", 0)


def settle(connection: sa.Connection, task: Task, ids: Collection[int]) -> None:
    """The task is done for these entries."""
    connection.execute(INDEX_WORK.delete().where(INDEX_WORK.c.task == task, INDEX_WORK.c.entry_id.in_(ids)))


def owe_purge(connection: sa.Connection) -> None:
    """Leave word that what this transaction deletes must go from the files, too."""
    connection.execute(INDEX_WORK.insert().values(entry_id=time.time_ns(), task="purge"))


def owe_everything(connection: sa.Connection) -> None:
    """Leave word for the index as if it were empty; vectors that are there aren't computed again."""
    connection.execute(INDEX_WORK.delete().where(INDEX_WORK.c.task != "purge"))
    for task in ("text", "vector"):
        rows = sa.select(ENTRIES.c.id, sa.literal(task))
        connection.execute(INDEX_WORK.insert().from_select(["entry_id", "task"], rows))


def existing(connection: sa.Connection, ids: Collection[int]) -> set[int]:
    """Those of the entries that are there."""
    return set(connection.execute(sa.select(ENTRIES.c.id).where(ENTRIES.c.id.in_(ids))).scalars())


def rows_of(connection: sa.Connection, ids: Collection[int]) -> list[tuple[Row, dict[int, int]]]:
    """What the index keeps of entries: what filters see, and the terms."""
    names = ("id", "tenant", "source_id", "number", "page", "at", "speaker")
    query = sa.select(*(ENTRIES.c[name] for name in names), ENTRIES.c.entities, ENTRIES.c.terms)
    found = []
    for row in connection.execute(query.where(ENTRIES.c.id.in_(ids))):
        entities = tuple(row.entities.split("\n") if row.entities else ())
        found.append((Row(**{name: getattr(row, name) for name in names}, entities=entities), row.terms))
    return [(row, scoring.unpack(terms)) for row, terms in found]


def stored_vectors(connection: sa.Connection, ids: Collection[int], model: str) -> dict[int, bytes]:
    query = sa.select(VECTORS.c.entry_id, VECTORS.c.vector).where(
        VECTORS.c.entry_id.in_(ids), VECTORS.c.model == model
    )
    return {row.entry_id: row.vector for row in connection.execute(query)}


def store_vectors(
    connection: sa.Connection, ids: Sequence[int], model: str, vectors: npt.NDArray[np.float32]
) -> None:
    """Keep new vectors (rows, width); those of entries that were deleted meanwhile are dropped."""
    alive = existing(connection, ids)
    rows = [
        {"entry_id": entry_id, "model": model, "vector": vector.astype(HALF).tobytes()}
        for entry_id, vector in zip(ids, vectors, strict=True)
        if entry_id in alive
    ]
    if rows:
        connection.execute(VECTORS.delete().where(VECTORS.c.entry_id.in_(alive), VECTORS.c.model == model))
        connection.execute(VECTORS.insert(), rows)
