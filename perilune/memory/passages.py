"""Makes the entries of a file's passages, from the passages and postings that the parser's batches left in SQL.

Knows those tables; nothing of parsing and searching. Called in the transaction that stores a batch, and at start
for files that have passages without entries (of an earlier version, or taken over from another file).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from perilune.core import FileStatus
from perilune.memory import entries
from perilune.memory.entities import names
from perilune.memory.index import Segment, read_segment
from perilune.memory.schema import ENTRIES, FILES, PAGES, PASSAGES, POSTINGS

_BATCH = 2_000


def add_new(connection: sa.Connection, file_id: str) -> int:
    """Add entries for the file's passages that have none; returns how many. Passages are only ever appended."""
    file = connection.execute(sa.select(FILES).where(FILES.c.id == file_id)).first()
    if file is None:
        return 0
    last = sa.select(sa.func.max(ENTRIES.c.number)).where(
        ENTRIES.c.tenant == file.tenant, ENTRIES.c.source_id == file_id
    )
    known = connection.execute(last).scalar()
    first = 0 if known is None else known + 1
    added = 0
    while rows := _passages(connection, file_id, first, _BATCH):
        terms = _terms(connection, file_id, first, len(rows))
        found = [_entry(file, row, *held) for row, held in zip(rows, terms, strict=True)]
        entries.add(connection, file.tenant, found)
        first += len(rows)
        added += len(rows)
    return added


def incomplete(connection: sa.Connection) -> list[str]:
    """Files that have passages without entries; those of a failed file stay without."""
    known = (
        sa.select(ENTRIES.c.source_id, sa.func.count().label("entries")).group_by(ENTRIES.c.source_id).subquery()
    )
    query = (
        sa.select(FILES.c.id)
        .outerjoin(known, known.c.source_id == FILES.c.id)
        .where(FILES.c.passages > sa.func.coalesce(known.c.entries, 0), FILES.c.status != FileStatus.ERROR)
    )
    return list(connection.execute(query).scalars())


def _passages(connection: sa.Connection, file_id: str, first: int, limit: int) -> Sequence[Any]:
    query = (
        sa.select(PASSAGES, PAGES.c.text, PAGES.c.start.label("page_start"))
        .join(PAGES, sa.and_(PAGES.c.file_id == PASSAGES.c.file_id, PAGES.c.number == PASSAGES.c.page))
        .where(PASSAGES.c.file_id == file_id, PASSAGES.c.number >= first)
        .order_by(PASSAGES.c.number)
        .limit(limit)
    )
    return connection.execute(query).all()


def segments(connection: sa.Connection, file_id: str, first: int, end: int) -> Iterator[tuple[int, Segment]]:
    """The file's postings that hold passages `first` to before `end`, each with its first passage, in order."""
    mine = POSTINGS.c.file_id == file_id
    # Not what lies before: a long document would be read whole for every batch that is added to it.
    begin = sa.select(sa.func.max(POSTINGS.c.first_passage)).where(mine, POSTINGS.c.first_passage <= first)
    query = sa.select(POSTINGS.c.first_passage, POSTINGS.c.data).where(
        mine, POSTINGS.c.first_passage >= begin.scalar_subquery(), POSTINGS.c.first_passage < end
    )
    for row in connection.execute(query.order_by(POSTINGS.c.first_passage)).all():
        yield row.first_passage, read_segment(row.data)


def _terms(connection: sa.Connection, file_id: str, first: int, count: int) -> list[tuple[dict[int, int], int]]:
    """(terms, length) of `count` passages from `first` on."""
    found: list[tuple[dict[int, int], int]] = []
    for begin, segment in segments(connection, file_id, first, first + count):
        found += by_passage(segment)[max(0, first - begin) :]
    return found[:count]


def by_passage(segment: Segment) -> list[tuple[dict[int, int], int]]:
    """A posting blob turned round: each passage's terms with their counts, and its length."""
    begins = segment.begins.astype(np.int64)
    terms = np.repeat(segment.hashes, begins[1:] - begins[:-1])
    order = np.argsort(segment.passages, kind="stable")
    ends = np.searchsorted(segment.passages[order], np.arange(len(segment.lengths)), side="right").tolist()
    held, counts = terms[order].tolist(), segment.frequencies[order].tolist()
    return [
        (dict(zip(held[begin:end], counts[begin:end], strict=True)), length)
        for begin, end, length in zip([0, *ends[:-1]], ends, segment.lengths.tolist(), strict=True)
    ]


def _entry(file: Any, row: Any, terms: dict[int, int], length: int) -> entries.NewEntry:
    text = row.text[row.start - row.page_start : row.end - row.page_start]
    return entries.NewEntry(
        file.id,
        row.number,
        terms,
        length,
        page=row.page,
        start=row.start,
        end=row.end,
        at=file.created_at,
        entities=names(text),
    )
