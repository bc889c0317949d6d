"""Files, their text and their index: what `service.ports.Library` asks for, on SQL and a folder.

Knows tenants, tables and the parser process; nothing of models, tokens or HTTP. Every call is bound to a tenant
in SQL. A batch of pages, its passages and its postings are one transaction: what is parsed is searchable, and
what was interrupted continues at the next page.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import sqlalchemy as sa

from perilune.config import DocumentSettings
from perilune.core import DOCUMENT_PURPOSES, FileRecord, FileStatus, Page, PageView, Passage, SearchResult
from perilune.errors import Conflict, NotFound, Unreadable, UnsupportedDocument
from perilune.memory import audit, entries, responses, sanitise
from perilune.memory.analyse import Analyser
from perilune.memory.blobs import BlobStore
from perilune.memory.index import Hit, Segment, rank, read_segment
from perilune.memory.ingest import sandbox, sniff
from perilune.memory.ingest.protocol import Batch, Job, Opened, Unchanged
from perilune.memory.keys import validate_tenant
from perilune.memory.locality import set_local_only
from perilune.memory.memory import Memory
from perilune.memory.overview import asks_about_whole, overview
from perilune.memory.page_images import PageImages
from perilune.memory.passages import add_new as make_entries
from perilune.memory.reuse import EarlierGone, EarlierVersion, Position, earlier_version, parser_failed
from perilune.memory.schema import FILES, LOCAL_ONLY, PAGES, PASSAGES, POSTINGS
from perilune.memory.scope import Scope
from perilune.memory.store import Store

_ID_BYTES = 18  # 24 url-safe characters
_UNFINISHED = (FileStatus.UPLOADED, FileStatus.PARSING, FileStatus.PREFILLING)
_LOCAL_ONLY = sa.exists().where(LOCAL_ONLY.c.tenant == FILES.c.tenant, LOCAL_ONLY.c.source_id == FILES.c.id)
_RECORD_COLUMNS = [
    *(column for column in FILES.c if column.name not in ("passages", "chars", "text_complete")),
    _LOCAL_ONLY.label("local_only"),
]
_COLUMN_NAMES = {"file_id": "id"}


class Library:
    """Implements `service.ports.Library`. Thread-safe. `counted_by` names the model whose tokens records hold.

    With `memory`, searches find by meaning too; without, by the words of the documents that are asked.
    """

    def __init__(
        self,
        store: Store,
        home: Path,
        settings: DocumentSettings | None = None,
        *,
        counted_by: str = "",
        memory: Memory | None = None,
        clock: Callable[[], float] = time.time,
        starter: Sequence[str] = sandbox.STARTER,
        stall_s: float = sandbox.STALL_S,
    ) -> None:
        self._store = store
        self._blobs = BlobStore(home)
        self._settings = settings or DocumentSettings()
        self._counted_by = counted_by
        self._memory = memory
        self._clock = clock
        self._parsers = sandbox.Parsers(starter, stall_s)
        self._images = PageImages(self._parsers, self._settings)
        self._parsing: set[str] = set()
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------------------ files

    def add_file(
        self,
        tenant: str,
        filename: str,
        purpose: str,
        data: BinaryIO,
        max_bytes: int,
        local_only: bool = False,
        *,
        lasts_s: float | None = None,
        file_id: str | None = None,
    ) -> FileRecord:
        """Store a file; a `local_only` one's text never leaves this machine, and after `lasts_s` it is gone.
        `file_id` is one of `new_file_id` that nobody has yet.

        Raises `TooLarge` past `max_bytes`, `UnsupportedDocument` for an empty one,
        `Overloaded` when the disk is full; nothing is stored then."""
        validate_tenant(tenant)
        file_id = file_id or new_file_id()
        now = self._clock()
        size_bytes, sha256 = self._blobs.put(tenant, file_id, data, max_bytes)
        record = FileRecord(
            file_id,
            tenant,
            sanitise.filename(filename),
            sanitise.label(purpose),
            size_bytes,
            sha256,
            now,
            FileStatus.UPLOADED if purpose in DOCUMENT_PURPOSES else FileStatus.PROCESSED,
            local_only=local_only,
            expires_at=None if lasts_s is None else now + lasts_s,
        )
        row = {_COLUMN_NAMES.get(name, name): value for name, value in asdict(record).items()}
        del row["local_only"]
        with self._store.write() as connection:
            connection.execute(FILES.insert().values(**row, passages=0, chars=0, text_complete=False))
            set_local_only(connection, tenant, file_id, local_only)
        return record

    def get_file(self, tenant: str, file_id: str) -> FileRecord:
        """Raises `NotFound`, for another tenant's file and for one that expired, too."""
        with self._store.read() as connection:
            record = self._record(_file(connection, tenant, file_id))
        if record.expires_at is not None and record.expires_at <= self._clock():
            raise _not_found(file_id)
        return record

    def list_files(self, tenant: str) -> list[FileRecord]:
        """The tenant's files, newest first."""
        alive = sa.or_(FILES.c.expires_at.is_(None), FILES.c.expires_at > self._clock())
        query = sa.select(*_RECORD_COLUMNS).where(FILES.c.tenant == tenant, alive)
        with self._store.read() as connection:
            return [
                self._record(row)
                for row in connection.execute(query.order_by(FILES.c.created_at.desc(), FILES.c.id))
            ]

    def all_files(self) -> list[FileRecord]:
        """Files of every tenant, newest first."""
        query = sa.select(*_RECORD_COLUMNS).order_by(FILES.c.created_at.desc(), FILES.c.id)
        with self._store.read() as connection:
            return [self._record(row) for row in connection.execute(query)]

    def due_files(self) -> list[FileRecord]:
        """Files of every tenant that have expired."""
        query = sa.select(*_RECORD_COLUMNS).where(FILES.c.expires_at <= self._clock())
        with self._store.read() as connection:
            return [self._record(row) for row in connection.execute(query)]

    def unfinished_files(self) -> list[FileRecord]:
        """Files of every tenant whose ingest has not ended, oldest first. Also removes bytes that no row knows."""
        query = sa.select(*_RECORD_COLUMNS).where(FILES.c.status.in_(_UNFINISHED)).order_by(FILES.c.created_at)
        with self._store.read() as connection:
            known = set(connection.execute(sa.select(FILES.c.id)).scalars())
            found = [self._record(row) for row in connection.execute(query)]
        self._blobs.sweep(known, self._clock)
        return found

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Remove bytes, text, passages and index rows. Raises `NotFound`. A running parse of it ends.

        What the index's and the database's files still hold of it goes soon after (`Memory.purged`)."""
        with self._store.write() as connection:
            _file(connection, tenant, file_id)
            entries.remove_source(connection, tenant, file_id)
            responses.forget_quotes(connection, tenant, file_id)
            connection.execute(FILES.delete().where(FILES.c.id == file_id))
            audit.write(connection, self._clock(), "file.delete", tenant, file_id)
        self._blobs.delete(tenant, file_id)
        self._images.forget(file_id)
        self._changed()
        if self._memory is None:  # the index, if there is one, is purged by the next server
            self._store.scrub()

    def _changed(self) -> None:
        """Entries came or went: the index has something to learn."""
        if self._memory:
            self._memory.changed()

    def open_file(self, tenant: str, file_id: str) -> BinaryIO:
        """The uploaded bytes, for the caller to close. Raises `NotFound`, `IntegrityError` where they are gone."""
        self.get_file(tenant, file_id)
        return self._blobs.open(tenant, file_id)

    def set_status(self, record: FileRecord) -> None:
        """Store a record's `status`, `tokens`, `error` and `error_code`. Raises `NotFound`.

        Of a file that failed, nothing is found by a search any more: half a document would pass for all of it."""
        failed = record.status is FileStatus.ERROR
        with self._store.write() as connection:
            if failed:
                entries.remove_entries(connection, record.tenant, record.file_id)
            _update(
                connection,
                record,
                status=record.status,
                tokens=record.tokens,
                tokens_by=self._counted_by,
                error=record.error,
                error_code=record.error_code,
            )
        if failed:
            self._changed()

    def _record(self, row: Any) -> FileRecord:
        """A row as others see it. Tokens of another model's tokenizer are as good as not counted."""
        tokens = row.tokens if row.tokens_by == self._counted_by else None
        return FileRecord(
            row.id,
            row.tenant,
            row.filename,
            row.purpose,
            row.size_bytes,
            row.sha256,
            row.created_at,
            FileStatus(row.status),
            row.pages_total,
            row.pages_parsed,
            tokens,
            row.language,
            row.error,
            row.local_only,
            row.expires_at,
            row.error_code,
        )

    # ------------------------------------------------------------------------------------------------- text

    def pages(self, tenant: str, file_id: str) -> list[Page]:
        """What is parsed so far, in order. Raises `NotFound`."""
        query = sa.select(PAGES).where(PAGES.c.file_id == file_id).order_by(PAGES.c.number)
        with self._store.read() as connection:
            _file(connection, tenant, file_id)
            rows = connection.execute(query).all()
        return [Page(row.number, row.text, row.start, row.start + len(row.text), row.anchor) for row in rows]

    def page(self, tenant: str, file_id: str, number: int) -> PageView:
        """One page. Raises `NotFound`, also for a page that is not read yet."""
        query = sa.select(PAGES).where(PAGES.c.file_id == file_id, PAGES.c.number == number)
        with self._store.read() as connection:
            record = self._record(_file(connection, tenant, file_id))
            row = connection.execute(query).first()
        if row is None:
            raise NotFound(
                f"Page {number} isn't there; {record.pages_parsed} pages are read.",
                hint=f"Ask for page 1 to {record.pages_parsed}.",
                param="page",
            )
        with self._blobs.open(tenant, file_id) as data:
            drawable = sniff.has_pictures(data.read(sniff.HEAD_BYTES))
        page = Page(row.number, row.text, row.start, row.start + len(row.text), row.anchor)
        return PageView(page, record.filename, record.pages_parsed, drawable)

    def page_image(self, tenant: str, file_id: str, number: int, width: int) -> bytes:
        """A page as a PNG of so many pixels' width. Raises `NotFound`, also for a file without pictures, and
        `UnsupportedDocument` for a page that can't be drawn. Takes up to seconds: call it in a thread."""
        view = self.page(tenant, file_id, number)
        if not view.drawable:
            raise NotFound(
                "Pages of this kind of file have no picture.", hint="Read the page's text.", param="page"
            )
        return self._images.get(file_id, self._blobs.path(tenant, file_id), view.filename, number, width)

    def text(self, tenant: str, file_id: str) -> str:
        """What is parsed so far, as one text: the pages joined. Page offsets point into it."""
        return "".join(page.text for page in self.pages(tenant, file_id))

    def text_chars(self, tenant: str, file_id: str) -> int:
        """Length of what is parsed so far. Raises `NotFound`."""
        with self._store.read() as connection:
            return int(_file(connection, tenant, file_id).chars)

    # ------------------------------------------------------------------------------------------------ parse

    def parse(self, tenant: str, file_id: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[FileRecord]:
        """Parse and index in a limited subprocess, yielding the record as pages arrive. Resumes where it stopped.

        Ends with status PREFILLING (text complete) or ERROR (the record says what, why, what to do). Closing
        the iterator stops the parser; so does `stopped`, asked several times a second, between pages too: the file
        stays unfinished then. Raises `NotFound` (also when the file is deleted meanwhile) and `Conflict`
        while the file is being parsed elsewhere.
        """
        with self._claim(file_id):
            with self._store.read() as connection:
                row = _file(connection, tenant, file_id)
            record = self._record(row)
            if row.text_complete:
                yield record
                return
            record = replace(record, status=FileStatus.PARSING, error=None, error_code=None)
            self.set_status(record)
            yield record
            try:
                yield from self._ingest(record, row.chars, row.passages, stopped)
            except sandbox.ParseStopped:
                return
            except UnsupportedDocument as error:
                record = self.get_file(tenant, file_id)
                record = replace(record, status=FileStatus.ERROR, error=str(error), error_code=error.why)
                self.set_status(record)
                yield record

    def _ingest(
        self, record: FileRecord, chars: int, passages: int, stopped: Callable[[], bool]
    ) -> Iterator[FileRecord]:
        with self._store.read() as connection:
            earlier = earlier_version(connection, record)
        at = Position(record.pages_parsed, chars, passages)
        try:
            record, at = yield from self._read(record, at, earlier, stopped)
        except EarlierGone:
            with self._store.read() as connection:
                row = _file(connection, record.tenant, record.file_id)
            at = Position(row.pages_parsed, row.chars, row.passages)
            record, at = yield from self._read(self._record(row), at, None, stopped)
        if at.passages == 0:
            raise UnsupportedDocument(
                "The document holds no text.", hint="Upload a file that holds text.", why=Unreadable.NO_TEXT
            )
        record = replace(record, status=FileStatus.PREFILLING, pages_total=at.pages)
        with self._store.write() as connection:
            _update(connection, record, status=record.status, pages_total=at.pages, text_complete=True)
        yield record

    def _read(
        self, record: FileRecord, at: Position, earlier: EarlierVersion | None, stopped: Callable[[], bool]
    ) -> Generator[FileRecord, None, tuple[FileRecord, Position]]:
        """Store what the parser finds, from `at` on. Raises `EarlierGone`, `UnsupportedDocument`."""
        job = self._job(record, at, earlier)
        with closing(self._parsers.run(job, stopped)) as frames:
            for message in frames:
                if isinstance(message, Opened):
                    if message.pages_total == record.pages_total:
                        continue  # most often unknown, as it was
                    record = replace(record, pages_total=message.pages_total)
                    with self._store.write() as connection:
                        _update(connection, record, pages_total=record.pages_total)
                elif isinstance(message, Batch):
                    record, at = self._save(record, message, at)
                elif isinstance(message, Unchanged):
                    record, at = self._take_over(record, message, at, earlier)
                else:
                    break
                yield record
        return record, at

    def _job(self, record: FileRecord, at: Position, earlier: EarlierVersion | None) -> Job:
        return Job(
            path=str(self._blobs.path(record.tenant, record.file_id)),
            filename=record.filename,
            first_page=at.pages + 1,
            offset_chars=at.chars,
            max_pages=self._settings.max_pages,
            max_text_bytes=self._settings.max_text,
            memory_bytes=self._settings.parser_memory,
            cpu_s=self._settings.parser_cpu_s,
            ocr_pages=self._settings.ocr_pages,
            known=earlier.known if earlier else {},
        )

    def _save(self, record: FileRecord, batch: Batch, at: Position) -> tuple[FileRecord, Position]:
        """Pages, passages and postings in one transaction, if nobody else has moved the file on."""
        _check(batch, at)
        file_id = record.file_id
        pages, start = [], at.chars
        for number, page in enumerate(batch.pages, at.pages + 1):
            row = {
                "number": number,
                "start": start,
                "text": page.text,
                "anchor": page.anchor,
                "digest": page.digest,
            }
            pages.append({"file_id": file_id, **row})
            start += len(page.text)
        spans = [
            {"file_id": file_id, "number": number, "page": span.page, "start": span.start, "end": span.end}
            for number, span in enumerate(batch.passages, at.passages)
        ]
        moved = Position(at.pages + len(pages), start, at.passages + len(spans))
        record = replace(record, pages_parsed=moved.pages, language=batch.language or record.language)
        with self._store.write() as connection:
            _move(connection, record, at, moved)
            connection.execute(PAGES.insert(), pages)
            if spans:
                connection.execute(PASSAGES.insert(), spans)
                connection.execute(
                    POSTINGS.insert().values(file_id=file_id, first_passage=at.passages, data=batch.postings)
                )
                make_entries(connection, file_id)
        self._changed()
        return record, moved

    def _take_over(
        self, record: FileRecord, found: Unchanged, at: Position, earlier: EarlierVersion | None
    ) -> tuple[FileRecord, Position]:
        """Pages of the earlier version in one transaction."""
        if earlier is None:
            raise parser_failed()
        with self._store.write() as connection:
            _move(connection, record, at, at)  # nobody else may have come before
            moved = earlier.copy(connection, record.file_id, found.pages, at)
            record = replace(record, pages_parsed=moved.pages, language=record.language or earlier.language)
            _move(connection, record, at, moved)
            make_entries(connection, record.file_id)
        self._changed()
        return record, moved

    @contextmanager
    def _claim(self, file_id: str) -> Iterator[None]:
        with self._lock:
            if file_id in self._parsing:
                raise _busy()
            self._parsing.add(file_id)
        try:
            yield
        finally:
            with self._lock:
                self._parsing.discard(file_id)

    # ----------------------------------------------------------------------------------------------- search

    def search(self, tenant: str, file_ids: Sequence[str], query: str, limit: int) -> list[Passage]:
        """The hits of `find`."""
        return [hit for hit in self.find(tenant, file_ids, query, limit).hits if isinstance(hit, Passage)]

    def find(self, tenant: str, file_ids: Sequence[str], query: str, limit: int) -> SearchResult:
        """Best passages first, over what is indexed so far; none where no word of the query occurs.

        A question about the documents as a whole gets their opening passages and an even spread of the rest.
        Raises `NotFound` where one of the files isn't the tenant's.
        """
        ids = list(dict.fromkeys(file_ids))
        whole = asks_about_whole(query)
        with self._store.read() as connection:
            counts = _passage_counts(connection, tenant, ids)
            if whole:
                return SearchResult(tuple(_texts(connection, _spread(counts, limit))), "whole")
            if self._memory is None:
                ranked = rank(_segments(connection, ids), Analyser().query_terms(query), limit)
                return SearchResult(tuple(_texts(connection, ranked)))
        found = self._memory.search(query, Scope(tenant, sources=tuple(ids)), limit)
        with self._store.read() as connection:
            hits, evidence = (
                tuple(_texts(connection, [Hit(hit.source_id, hit.number, hit.score) for hit in part]))
                for part in (found.hits, found.evidence)
            )
        return SearchResult(
            hits,
            found.kind.value,
            evidence,
            found.confidence if found.measured else None,
            found.doubtful,
            found.missing,
        )

    def search_faults(self) -> list[str]:
        """Why searches find less than they could, in sentences for people; empty where nothing is amiss."""
        return self._memory.faults() if self._memory else []


# ----------------------------------------------------------------------------------------------------- rows


def _file(connection: sa.Connection, tenant: str, file_id: str) -> Any:
    """The tenant's row. Raises `NotFound`."""
    query = sa.select(FILES, _LOCAL_ONLY.label("local_only")).where(FILES.c.id == file_id, FILES.c.tenant == tenant)
    row = connection.execute(query).first()
    if row is None:
        raise _not_found(file_id)
    return row


def _update(
    connection: sa.Connection, record: FileRecord, *conditions: sa.ColumnElement[bool], **values: object
) -> None:
    """Change the tenant's row. Raises `NotFound` where it is gone, `Conflict` where the conditions fail."""
    mine = (FILES.c.id == record.file_id, FILES.c.tenant == record.tenant)
    if connection.execute(FILES.update().where(*mine, *conditions).values(**values)).rowcount == 0:
        _file(connection, record.tenant, record.file_id)
        raise _busy()


def _move(connection: sa.Connection, record: FileRecord, before: Position, after: Position) -> None:
    """Store how far a file is. Raises `Conflict` where another has moved it on, `NotFound` where it is gone."""
    _update(
        connection,
        record,
        FILES.c.pages_parsed == before.pages,
        pages_parsed=after.pages,
        language=record.language,
        passages=after.passages,
        chars=after.chars,
    )


def _check(batch: Batch, at: Position) -> None:
    """A parser's word isn't trusted: passages must lie, in order, inside the pages it sent."""
    pages = range(at.pages + 1, at.pages + len(batch.pages) + 1)
    end = at.chars + sum(len(page.text) for page in batch.pages)
    start = at.chars
    for span in batch.passages:
        if span.page not in pages or not start <= span.start < span.end <= end:
            raise parser_failed()
        start = span.end


def _passage_counts(connection: sa.Connection, tenant: str, ids: Sequence[str]) -> dict[str, int]:
    """Passages indexed so far per file, in the order asked. Raises `NotFound`."""
    query = sa.select(FILES.c.id, FILES.c.passages).where(FILES.c.id.in_(ids), FILES.c.tenant == tenant)
    counts = {row.id: row.passages for row in connection.execute(query)}
    for file_id in ids:
        if file_id not in counts:
            raise _not_found(file_id)
    return {file_id: counts[file_id] for file_id in ids}


def _segments(connection: sa.Connection, ids: Sequence[str]) -> dict[str, list[Segment]]:
    query = sa.select(POSTINGS.c.file_id, POSTINGS.c.data).where(POSTINGS.c.file_id.in_(ids))
    found: dict[str, list[Segment]] = {file_id: [] for file_id in ids}
    for row in connection.execute(query.order_by(POSTINGS.c.file_id, POSTINGS.c.first_passage)):
        found[row.file_id].append(read_segment(row.data))
    return found


def _spread(counts: dict[str, int], limit: int) -> list[Hit]:
    """Overview passages of every file, taken in turns."""
    share = -(-limit // max(1, len(counts)))
    orders = {file_id: overview(count, share) for file_id, count in counts.items()}
    turns = [
        Hit(file_id, order[turn], 1.0 / (1 + turn))
        for turn in range(share)
        for file_id, order in orders.items()
        if turn < len(order)
    ]
    return turns[:limit]


def _texts(connection: sa.Connection, hits: Sequence[Hit]) -> list[Passage]:
    """The passages' text, in the order of the hits."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for hit in hits:
        numbers[hit.file_id].append(hit.number)
    found: dict[tuple[str, int], Passage] = {}
    for file_id, wanted in numbers.items():
        query = (
            sa.select(PASSAGES, PAGES.c.text, PAGES.c.start.label("page_start"), PAGES.c.anchor)
            .join(PAGES, sa.and_(PAGES.c.file_id == PASSAGES.c.file_id, PAGES.c.number == PASSAGES.c.page))
            .where(PASSAGES.c.file_id == file_id, PASSAGES.c.number.in_(wanted))
        )
        for row in connection.execute(query):
            text = row.text[row.start - row.page_start : row.end - row.page_start]
            found[file_id, row.number] = Passage(file_id, row.page, row.start, row.end, text, 0.0, row.anchor)
    known = ((found.get((hit.file_id, hit.number)), hit.score) for hit in hits)
    return [replace(passage, score=score) for passage, score in known if passage]  # a file may go meanwhile


def new_file_id() -> str:
    return f"file-{secrets.token_urlsafe(_ID_BYTES)}"


def _not_found(file_id: str) -> NotFound:
    return NotFound(f"There is no file {file_id[:64]!r}.", hint="List the files to see their ids.", param="file_id")


def _busy() -> Conflict:
    return Conflict("The file is being parsed by another caller.", hint="Wait until its status has changed.")
