"""Batches and their lines in SQL: what is to be done, what is done, and what came of it.

Knows rows, states and counts; not what a line says, nor who runs it. A line's result is stored with its state in
one transaction, and only where the line still waits: so a line that two runs answer (a kill between answer and
commit) has one result. Every call of a caller is bound to a tenant in SQL.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import sqlalchemy as sa

from perilune.core import Usage
from perilune.errors import InvalidRequest, NotFound
from perilune.memory.entries import owe_purge
from perilune.memory.paging import Part, read_part
from perilune.memory.schema import BATCH_LINES, BATCH_SOURCES, BATCHES, FILES
from perilune.memory.store import Store

_ID_BYTES = 18
_CHUNK = 2_000
_QUOTED = re.compile(r'"file_id":"(file-[A-Za-z0-9_-]{24})"', re.ASCII)
"""A citation as the server writes it. Inside a text the quotation marks would be escaped."""


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})
_STAMPED = frozenset(BatchStatus) - {BatchStatus.VALIDATING}
"""Statuses whose begin is kept, in the column `<status>_at`."""


class LineState(IntEnum):
    WAITING = 0
    DONE = 1
    FAILED = 2


NOTHING = Usage(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch. Times are seconds since the epoch; `times` holds when each status began."""

    batch_id: str
    tenant: str
    key_id: str | None
    endpoint: str
    completion_window: str
    input_file_id: str
    status: BatchStatus
    created_at: float
    expires_at: float
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_lasts_s: float | None = None
    errors: tuple[dict[str, Any], ...] = ()
    metadata: Mapping[str, str] | None = None
    model: str | None = None
    usage: Usage = NOTHING
    times: Mapping[str, float] = field(default_factory=dict)
    purge: bool = False

    @property
    def ended(self) -> bool:
        return self.status in ENDED


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input: `start` and `size_bytes` say where it lies in the file."""

    number: int
    custom_id: str
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LineResult:
    """What came of a line. `text` is the JSON that stands in the output or error file."""

    number: int
    ok: bool
    text: str
    usage: Usage = NOTHING


class BatchStore:
    """Thread-safe; calls block for milliseconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def now(self) -> float:
        return self._clock()

    # ------------------------------------------------------------------------------------------- batches

    def create(
        self,
        tenant: str,
        key_id: str | None,
        endpoint: str,
        input_file_id: str,
        completion_window: tuple[str, float],
        metadata: Mapping[str, str] | None,
        output_lasts_s: float | None,
        most_open: int,
    ) -> Batch:
        """A new batch; `completion_window` is as it was asked for, and in seconds. Raises `InvalidRequest` where
        `most_open` of the tenant's haven't ended."""
        now, batch_id = self._clock(), f"batch_{secrets.token_urlsafe(_ID_BYTES)}"
        row = {
            "id": batch_id,
            "tenant": tenant,
            "key_id": key_id,
            "endpoint": endpoint,
            "completion_window": completion_window[0],
            "input_file_id": input_file_id,
            "output_lasts_s": output_lasts_s,
            "status": BatchStatus.VALIDATING,
            "created_at": now,
            "expires_at": now + completion_window[1],
            "metadata": None if metadata is None else json.dumps(dict(metadata), ensure_ascii=False),
            **dict.fromkeys(("total", "completed", "failed"), 0),
            **dict.fromkeys(("input_tokens", "cached_tokens", "output_tokens"), 0),
            "purge": False,
        }
        mine = sa.select(sa.func.count()).where(BATCHES.c.tenant == tenant, BATCHES.c.status.not_in(ENDED))
        with self._store.write() as connection:
            if connection.execute(mine).scalar_one() >= most_open:
                raise InvalidRequest(
                    f"{most_open} of your batches haven't ended yet.",
                    hint="Wait for one, or cancel one.",
                    param="input_file_id",
                )
            connection.execute(BATCHES.insert().values(row))
            return _get(connection, tenant, batch_id)

    def get(self, tenant: str, batch_id: str) -> Batch:
        """Raises `NotFound`, for another tenant's batch too."""
        with self._store.read() as connection:
            return _get(connection, tenant, batch_id)

    def find(self, batch_id: str) -> Batch | None:
        """Anybody's, for who runs it."""
        with self._store.read() as connection:
            row = connection.execute(sa.select(BATCHES).where(BATCHES.c.id == batch_id)).first()
        return None if row is None else _batch(row)

    def page(self, tenant: str, part: Part) -> tuple[list[Batch], bool]:
        """A part of the tenant's batches, and whether there are more. Raises `InvalidRequest` for a bad cursor."""
        query = sa.select(BATCHES).where(BATCHES.c.tenant == tenant)
        with self._store.read() as connection:
            rows, more = read_part(connection, query, (BATCHES.c.created_at, BATCHES.c.id), part)
        return [_batch(row) for row in rows], more

    def unended(self) -> list[Batch]:
        """Of every tenant, oldest first: what is to be done after a restart."""
        query = sa.select(BATCHES).where(BATCHES.c.status.not_in(ENDED)).order_by(BATCHES.c.created_at)
        with self._store.read() as connection:
            return [_batch(row) for row in connection.execute(query)]

    def owed(self) -> list[Batch]:
        """Batches of every tenant whose results have to go."""
        with self._store.read() as connection:
            return [_batch(row) for row in connection.execute(sa.select(BATCHES).where(BATCHES.c.purge))]

    def move(self, batch: Batch, to: BatchStatus, *before: BatchStatus, **values: Any) -> Batch:
        """Begin a status, where the batch is in one of those `before`. Returns it as it is then; raises `NotFound`
        where it is gone."""
        if to in _STAMPED:
            values[f"{to}_at"] = self._clock()
        if "errors" in values:
            values["errors"] = json.dumps(values["errors"], ensure_ascii=False)
        with self._store.write() as connection:
            connection.execute(
                BATCHES.update()
                .where(*_mine(batch.tenant, batch.batch_id), BATCHES.c.status.in_(before))
                .values(status=to, **values)
            )
            return _get(connection, batch.tenant, batch.batch_id)

    def forget_results(self, batch: Batch) -> None:
        """Drop what its lines came to, and the owed purge. Its row stays, without its files."""
        with self._store.write() as connection:
            connection.execute(BATCH_LINES.delete().where(BATCH_LINES.c.batch_id == batch.batch_id))
            connection.execute(BATCH_SOURCES.delete().where(BATCH_SOURCES.c.batch_id == batch.batch_id))
            connection.execute(
                BATCHES.update()
                .where(*_mine(batch.tenant, batch.batch_id))
                .values(purge=False, output_file_id=None, error_file_id=None)
            )
            owe_purge(connection)
        self._store.scrub()

    def forget_tenant(self, tenant: str) -> None:
        """Delete a tenant's batches and their lines; their files are files."""
        with self._store.write() as connection:
            connection.execute(BATCHES.delete().where(BATCHES.c.tenant == tenant))
            owe_purge(connection)

    # --------------------------------------------------------------------------------------------- lines

    def begin_lines(self, batch: Batch) -> None:
        """Forget the lines of a validation that didn't end."""
        with self._store.write() as connection:
            connection.execute(BATCH_LINES.delete().where(BATCH_LINES.c.batch_id == batch.batch_id))

    def add_lines(self, batch: Batch, lines: Sequence[Line], session_ids: Collection[str]) -> None:
        """Store lines that wait, and the sessions that they talk in. A batch that is gone takes none."""
        rows = [
            {
                "batch_id": batch.batch_id,
                "number": line.number,
                "custom_id": line.custom_id,
                "start": line.start,
                "size_bytes": line.size_bytes,
                "state": LineState.WAITING,
            }
            for line in lines
        ]
        with self._store.write() as connection:
            _get(connection, batch.tenant, batch.batch_id)
            connection.execute(BATCH_LINES.insert(), rows)
            _add_sources(connection, batch, session_ids)

    def waiting(self, batch: Batch, first: int, count: int) -> list[Line]:
        """Those of `count` lines from `first` on that have no result yet, in order."""
        columns = [BATCH_LINES.c[name] for name in Line.__slots__]
        query = sa.select(*columns).where(
            BATCH_LINES.c.batch_id == batch.batch_id,
            BATCH_LINES.c.number.between(first, first + count - 1),
            BATCH_LINES.c.state == LineState.WAITING,
        )
        with self._store.read() as connection:
            return [Line(*row) for row in connection.execute(query.order_by(BATCH_LINES.c.number))]

    def settle(self, batch: Batch, results: Sequence[LineResult]) -> None:
        """Store results of lines that have none, and count them. Raises `NotFound` where the batch is gone.

        What they quote is kept in mind: when a document goes, so do the results that quote it. A result that quotes
        one which went meanwhile isn't stored; its line still waits."""
        kept: list[LineResult] = []
        quoted: set[str] = set()
        with self._store.write() as connection:
            _get(connection, batch.tenant, batch.batch_id)
            for result in results:
                files = set(_QUOTED.findall(result.text))
                if files <= _there(connection, batch.tenant, files) and _store_result(connection, batch, result):
                    kept.append(result)
                    quoted |= files
            connection.execute(
                BATCHES.update()
                .where(BATCHES.c.id == batch.batch_id)
                .values(
                    completed=BATCHES.c.completed + sum(result.ok for result in kept),
                    failed=BATCHES.c.failed + sum(not result.ok for result in kept),
                    input_tokens=BATCHES.c.input_tokens + sum(each.usage.prompt_tokens for each in kept),
                    cached_tokens=BATCHES.c.cached_tokens + sum(each.usage.cached_tokens for each in kept),
                    output_tokens=BATCHES.c.output_tokens + sum(each.usage.completion_tokens for each in kept),
                )
            )
            _add_sources(connection, batch, quoted)

    def count(self, batch: Batch, state: LineState) -> int:
        mine = (BATCH_LINES.c.batch_id == batch.batch_id, BATCH_LINES.c.state == state)
        with self._store.read() as connection:
            return int(connection.execute(sa.select(sa.func.count()).where(*mine)).scalar_one())

    def lines(self, batch: Batch, *states: LineState) -> Iterator[tuple[str, str | None]]:
        """(custom id, result) of the lines in these states, in order of the input; little by little, so that a
        large batch is never in memory."""
        last = -1
        while True:
            query = sa.select(BATCH_LINES.c.number, BATCH_LINES.c.custom_id, BATCH_LINES.c.result).where(
                BATCH_LINES.c.batch_id == batch.batch_id,
                BATCH_LINES.c.number > last,
                BATCH_LINES.c.state.in_(states),
            )
            with self._store.read() as connection:
                rows = connection.execute(query.order_by(BATCH_LINES.c.number).limit(_CHUNK)).all()
            for row in rows:
                yield row.custom_id, row.result
            if len(rows) < _CHUNK:
                return
            last = rows[-1].number

    def end(self, batch: Batch, to: BatchStatus, output: str | None, error: str | None) -> Batch:
        """The batch has ended, and its results are in files: the rows of its lines go."""
        with self._store.write() as connection:
            now = self._clock()
            connection.execute(
                BATCHES.update()
                .where(*_mine(batch.tenant, batch.batch_id), BATCHES.c.status.not_in(ENDED))
                .values(status=to, output_file_id=output, error_file_id=error, **{f"{to}_at": now})
            )
            connection.execute(BATCH_LINES.delete().where(BATCH_LINES.c.batch_id == batch.batch_id))
            return _get(connection, batch.tenant, batch.batch_id)


def _there(connection: sa.Connection, tenant: str, file_ids: Collection[str]) -> set[str]:
    """Those of the files that are the tenant's."""
    if not file_ids:
        return set()
    mine = (FILES.c.tenant == tenant, FILES.c.id.in_(file_ids))
    return set(connection.execute(sa.select(FILES.c.id).where(*mine)).scalars())


def _store_result(connection: sa.Connection, batch: Batch, result: LineResult) -> bool:
    """False where the line has a result already."""
    line = (BATCH_LINES.c.batch_id == batch.batch_id, BATCH_LINES.c.number == result.number)
    values = {"state": LineState.DONE if result.ok else LineState.FAILED, "result": result.text}
    stored = BATCH_LINES.update().where(*line, BATCH_LINES.c.state == LineState.WAITING).values(values)
    return connection.execute(stored).rowcount > 0


def _add_sources(connection: sa.Connection, batch: Batch, source_ids: Collection[str]) -> None:
    """Those that aren't there yet."""
    rows = [
        {"tenant": batch.tenant, "source_id": source_id, "batch_id": batch.batch_id}
        for source_id in sorted(source_ids)
    ]
    if rows:
        connection.execute(
            sa.text(
                "INSERT INTO batch_sources (tenant, source_id, batch_id) VALUES (:tenant, :source_id, :batch_id) "
                "ON CONFLICT DO NOTHING"
            ),
            rows,
        )


def _mine(tenant: str, batch_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (BATCHES.c.tenant == tenant, BATCHES.c.id == batch_id)


def _get(connection: sa.Connection, tenant: str, batch_id: str) -> Batch:
    row = connection.execute(sa.select(BATCHES).where(*_mine(tenant, batch_id))).first()
    if row is None:
        raise NotFound("There is no such batch.", hint="GET /v1/batches lists yours.", param="batch_id")
    return _batch(row)


def _batch(row: Any) -> Batch:
    return Batch(
        row.id,
        row.tenant,
        row.key_id,
        row.endpoint,
        row.completion_window,
        row.input_file_id,
        BatchStatus(row.status),
        row.created_at,
        row.expires_at,
        row.total,
        row.completed,
        row.failed,
        row.output_file_id,
        row.error_file_id,
        row.output_lasts_s,
        tuple(json.loads(row.errors)) if row.errors else (),
        json.loads(row.metadata) if row.metadata else None,
        row.model,
        Usage(row.input_tokens, row.output_tokens, row.cached_tokens),
        {status.value: at for status in _STAMPED if (at := getattr(row, f"{status}_at")) is not None},
        row.purge,
    )
