"""Pages that a changed document shares with its earlier version: text, passages and postings are taken over.

Knows tables and posting blobs. The earlier version is the tenant's newest other file of the same name; a page is
the same when its digest is, which covers what it was made of and the way it is read. Nothing here trusts a parser:
a digest only ever leads to the tenant's own pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import sqlalchemy as sa

from perilune.core import FileRecord
from perilune.errors import Unreadable, UnsupportedDocument
from perilune.memory.index import cut
from perilune.memory.passages import segments
from perilune.memory.schema import FILES, PAGES, PASSAGES, POSTINGS


class EarlierGone(Exception):
    """The earlier version was deleted meanwhile."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a document is written: its pages, characters and passages so far."""

    pages: int
    chars: int
    passages: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive pages of the earlier version, from `first` on, with their anchors in the new one."""

    first: int
    anchors: tuple[str, ...]


class EarlierVersion:
    """The pages of one file, as a new version may ask for them."""

    def __init__(self, file_id: str, language: str | None, pages: Sequence[tuple[str, int]]) -> None:
        """`pages` are (digest, characters) in order."""
        self.language = language
        self.known = dict(pages)
        self._file_id = file_id
        self._digests = [digest for digest, _ in pages]
        self._number_of = {digest: number for number, digest in enumerate(self._digests, 1)}

    def copy(
        self, connection: sa.Connection, file_id: str, pages: Sequence[tuple[str, str]], at: Position
    ) -> Position:
        """Write the pages with these (digest, anchor) behind what `file_id` has; returns how far it is then.

        Raises `EarlierGone`, and `UnsupportedDocument` for a digest that isn't known.
        """
        for run in self._runs(pages):
            at = self._copy_run(connection, file_id, run, at)
        return at

    def _runs(self, pages: Sequence[tuple[str, str]]) -> Iterator[_Run]:
        """As few as there are: among equal pages, the one that continues a run is taken."""
        numbers: list[int] = []
        for digest, _ in pages:
            following = numbers[-1] if numbers else 0
            if following < len(self._digests) and self._digests[following] == digest:
                numbers.append(following + 1)
            elif digest in self._number_of:
                numbers.append(self._number_of[digest])
            else:
                raise parser_failed()
        anchored = list(zip(numbers, (anchor for _, anchor in pages), strict=True))
        for _, group in groupby(enumerate(anchored), lambda item: item[1][0] - item[0]):
            run = [item for _, item in group]
            yield _Run(run[0][0], tuple(anchor for _, anchor in run))

    def _copy_run(self, connection: sa.Connection, file_id: str, run: _Run, at: Position) -> Position:
        end = run.first + len(run.anchors)
        pages = connection.execute(
            sa.select(PAGES)
            .where(PAGES.c.file_id == self._file_id, PAGES.c.number >= run.first, PAGES.c.number < end)
            .order_by(PAGES.c.number)
        ).all()
        if len(pages) != len(run.anchors):
            raise EarlierGone
        moved_pages, moved_chars = at.pages + 1 - run.first, at.chars - pages[0].start
        connection.execute(
            PAGES.insert(),
            [
                {
                    "file_id": file_id,
                    "number": page.number + moved_pages,
                    "start": page.start + moved_chars,
                    "text": page.text,
                    "anchor": anchor,
                    "digest": page.digest,
                }
                for page, anchor in zip(pages, run.anchors, strict=True)
            ],
        )
        spans = connection.execute(
            sa.select(PASSAGES)
            .where(PASSAGES.c.file_id == self._file_id, PASSAGES.c.page >= run.first, PASSAGES.c.page < end)
            .order_by(PASSAGES.c.number)
        ).all()
        if spans:
            moved = at.passages - spans[0].number
            connection.execute(
                PASSAGES.insert(),
                [
                    {
                        "file_id": file_id,
                        "number": span.number + moved,
                        "page": span.page + moved_pages,
                        "start": span.start + moved_chars,
                        "end": span.end + moved_chars,
                    }
                    for span in spans
                ],
            )
            self._copy_postings(connection, file_id, spans[0].number, spans[-1].number + 1, at.passages)
        chars = pages[-1].start + len(pages[-1].text) - pages[0].start
        return replace(at, pages=at.pages + len(pages), chars=at.chars + chars, passages=at.passages + len(spans))

    def _copy_postings(self, connection: sa.Connection, file_id: str, first: int, end: int, to: int) -> None:
        """Postings of passages `first`:`end`, cut out of the blobs that hold them, from passage `to` on."""
        for begin, segment in segments(connection, self._file_id, first, end):
            low, high = max(first, begin), min(end, begin + len(segment.lengths))
            data = cut(segment, low - begin, high - begin)
            connection.execute(POSTINGS.insert().values(file_id=file_id, first_passage=to + low - first, data=data))


def earlier_version(connection: sa.Connection, record: FileRecord) -> EarlierVersion | None:
    """The newest other file of the tenant with the record's name that has pages, finished ones first."""
    file = connection.execute(
        sa.select(FILES.c.id, FILES.c.language)
        .where(
            FILES.c.tenant == record.tenant,
            FILES.c.filename == record.filename,
            FILES.c.id != record.file_id,
            FILES.c.pages_parsed > 0,
        )
        .order_by(FILES.c.text_complete.desc(), FILES.c.created_at.desc())
        .limit(1)
    ).first()
    if file is None:
        return None
    pages = connection.execute(
        sa.select(PAGES.c.digest, sa.func.length(PAGES.c.text))
        .where(PAGES.c.file_id == file.id)
        .order_by(PAGES.c.number)
    ).all()
    # Pages of a database that had no digests yet are as good as changed: no digest is empty.
    return EarlierVersion(file.id, file.language, [(digest, chars) for digest, chars in pages])


def parser_failed() -> UnsupportedDocument:
    """What a parser said of a document can't be true."""
    return UnsupportedDocument(
        "The parser failed on this file.", hint="Export it again from its source.", why=Unreadable.FAILED
    )
