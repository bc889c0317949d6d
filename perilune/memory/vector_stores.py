"""Vector stores: named sets of a tenant's files that are searched together (OpenAI's vector stores).

Knows rows. Holds no text and no index of its own: a store names files of the library, which is searched within
them. A file in a store may be searched from its first page on; it goes with its file, and with its store.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from perilune.core import AttributeFilter, AttributeValue, FileStatus
from perilune.errors import InvalidRequest, NotFound
from perilune.memory import audit, entries
from perilune.memory.attributes import Attributes, matches
from perilune.memory.keys import validate_tenant
from perilune.memory.paging import Part, read_part
from perilune.memory.schema import ENTRIES, FILES, STORE_BATCHES, STORE_FILES, VECTOR_STORES, VECTORS
from perilune.memory.store import Store

MAX_FILES = 10_000
"""In a store: more make the filter of a search too long."""

DAY_S = 86_400.0
ACTIVE_STEP_S = 60.0
"""A search notes its time when the last one noted is this old: not every search is a write."""

_ID_BYTES = 18

_STATUS = sa.case(
    (STORE_FILES.c.cancelled, "cancelled"),
    (FILES.c.status == FileStatus.ERROR, "failed"),
    (FILES.c.text_complete, "completed"),
    else_="in_progress",
).label("state")


@dataclass(frozen=True, slots=True)
class NewStoreFile:
    """A file to be put into a store."""

    file_id: str
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileCounts:
    """Files by state."""

    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def total(self) -> int:
        return self.in_progress + self.completed + self.failed + self.cancelled


@dataclass(frozen=True, slots=True)
class VectorStore:
    """Times are seconds since the epoch; `usage_bytes` is what the search keeps of the files beside their text."""

    store_id: str
    name: str
    description: str | None
    created_at: float
    last_active_at: float
    expires_days: int | None
    metadata: Mapping[str, str]
    counts: FileCounts
    usage_bytes: int

    @property
    def expires_at(self) -> float | None:
        return None if self.expires_days is None else self.last_active_at + DAY_S * self.expires_days


@dataclass(frozen=True, slots=True)
class StoreFile:
    """A file in a store. `state` is in_progress, completed, failed (`error` says why) or cancelled."""

    store_id: str
    file_id: str
    filename: str
    created_at: float
    state: str
    attributes: Attributes
    usage_bytes: int
    error: str | None


@dataclass(frozen=True, slots=True)
class StoreBatch:
    """Files that were put into a store together."""

    batch_id: str
    store_id: str
    created_at: float
    cancelled: bool
    counts: FileCounts


@dataclass(frozen=True, slots=True)
class Changes:
    """What an update sets; a name that isn't in `given` stays as it was."""

    given: frozenset[str]
    name: str = ""
    expires_days: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


class VectorStores:
    """Thread-safe; calls block for milliseconds. Every call is bound to a tenant in SQL."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    # ----------------------------------------------------------------------------------------------- stores

    def create(
        self,
        tenant: str,
        name: str,
        description: str | None,
        expires_days: int | None,
        metadata: Mapping[str, str],
        files: Sequence[NewStoreFile],
    ) -> VectorStore:
        """Raises `NotFound` where one of the files isn't the tenant's; nothing is kept then."""
        validate_tenant(tenant)
        now_s, store_id = self._clock(), f"vs_{secrets.token_urlsafe(_ID_BYTES)}"
        row = {"id": store_id, "tenant": tenant, "name": name, "description": description}
        row |= {"created_at": now_s, "last_active_at": now_s}  # type: ignore[dict-item]
        with self._store.write() as connection:
            connection.execute(
                VECTOR_STORES.insert().values(**row, expires_days=expires_days, metadata=_json(metadata))
            )
            _attach(connection, tenant, store_id, files, now_s, None)
            return _store(connection, tenant, store_id)

    def get(self, tenant: str, store_id: str) -> VectorStore:
        """Raises `NotFound`, for another tenant's store too."""
        with self._store.read() as connection:
            return _store(connection, tenant, store_id)

    def part(self, tenant: str, part: Part) -> tuple[list[VectorStore], bool]:
        """(stores, whether more follow). Raises `InvalidRequest` for an unknown cursor."""
        query = sa.select(VECTOR_STORES).where(VECTOR_STORES.c.tenant == tenant)
        with self._store.read() as connection:
            rows, more = read_part(connection, query, (VECTOR_STORES.c.created_at, VECTOR_STORES.c.id), part)
            return _stores(connection, tenant, rows), more

    def update(self, tenant: str, store_id: str, changes: Changes) -> VectorStore:
        """Raises `NotFound`."""
        values: dict[str, Any] = {
            "name": changes.name,
            "expires_days": changes.expires_days,
            "metadata": _json(changes.metadata),
        }
        values = {name: value for name, value in values.items() if name in changes.given}
        with self._store.write() as connection:
            _store(connection, tenant, store_id)
            if values:
                connection.execute(VECTOR_STORES.update().where(*_mine(tenant, store_id)).values(**values))
            return _store(connection, tenant, store_id)

    def delete(self, tenant: str, store_id: str) -> None:
        """The store and what was noted of its files; the files stay. Raises `NotFound`."""
        with self._store.write() as connection:
            _store(connection, tenant, store_id)
            for table in (STORE_FILES, STORE_BATCHES):
                connection.execute(table.delete().where(table.c.tenant == tenant, table.c.store_id == store_id))
            connection.execute(VECTOR_STORES.delete().where(*_mine(tenant, store_id)))
            entries.owe_purge(connection)
            audit.write(connection, self._clock(), "vector_store.delete", tenant, store_id)
        self._store.scrub()

    # ------------------------------------------------------------------------------------------------ files

    def attach(self, tenant: str, store_id: str, file: NewStoreFile) -> StoreFile:
        """Put a file into a store; one that is there gets the new attributes. Raises `NotFound`, `InvalidRequest`
        for a store that is full or expired."""
        with self._store.write() as connection:
            self._usable(connection, tenant, store_id)
            _attach(connection, tenant, store_id, [file], self._clock(), None)
            return _file(connection, tenant, store_id, file.file_id)

    def file(self, tenant: str, store_id: str, file_id: str) -> StoreFile:
        """Raises `NotFound`."""
        with self._store.read() as connection:
            return _file(connection, tenant, store_id, file_id)

    def files(
        self, tenant: str, store_id: str, part: Part, state: str | None, batch_id: str | None = None
    ) -> tuple[list[StoreFile], bool]:
        """(files, whether more follow); of one state, of one batch. Raises `NotFound`, `InvalidRequest`."""
        query = _links(tenant).where(STORE_FILES.c.store_id == store_id)
        if state is not None:
            query = query.where(_STATUS.in_((state,)))
        if batch_id is not None:
            query = query.where(STORE_FILES.c.batch_id == batch_id)
        order = (STORE_FILES.c.created_at, STORE_FILES.c.file_id)
        with self._store.read() as connection:
            _store(connection, tenant, store_id)
            if batch_id is not None:
                _batch(connection, tenant, store_id, batch_id)
            rows, more = read_part(connection, query, order, part)
            return _files(connection, tenant, rows), more

    def set_attributes(
        self, tenant: str, store_id: str, file_id: str, attributes: Mapping[str, AttributeValue]
    ) -> StoreFile:
        """Raises `NotFound`."""
        with self._store.write() as connection:
            _file(connection, tenant, store_id, file_id)
            link = _link(tenant, store_id, file_id)
            connection.execute(STORE_FILES.update().where(*link).values(attributes=_json(attributes)))
            return _file(connection, tenant, store_id, file_id)

    def detach(self, tenant: str, store_id: str, file_id: str) -> None:
        """Take a file out of a store; the file stays. Raises `NotFound`."""
        with self._store.write() as connection:
            _file(connection, tenant, store_id, file_id)
            connection.execute(STORE_FILES.delete().where(*_link(tenant, store_id, file_id)))
            entries.owe_purge(connection)
        self._store.scrub()

    # ---------------------------------------------------------------------------------------------- batches

    def add_batch(self, tenant: str, store_id: str, files: Sequence[NewStoreFile]) -> StoreBatch:
        """Put files into a store together. Raises as `attach`; all or nothing."""
        batch_id, now_s = f"vsfb_{secrets.token_urlsafe(_ID_BYTES)}", self._clock()
        with self._store.write() as connection:
            self._usable(connection, tenant, store_id)
            row = {"id": batch_id, "tenant": tenant, "store_id": store_id, "created_at": now_s, "cancelled": False}
            connection.execute(STORE_BATCHES.insert().values(row))
            _attach(connection, tenant, store_id, files, now_s, batch_id)
            return _batch(connection, tenant, store_id, batch_id)

    def batch(self, tenant: str, store_id: str, batch_id: str) -> StoreBatch:
        """Raises `NotFound`."""
        with self._store.read() as connection:
            return _batch(connection, tenant, store_id, batch_id)

    def cancel_batch(self, tenant: str, store_id: str, batch_id: str) -> StoreBatch:
        """Files of it that aren't read whole yet won't be searched in this store. Raises `NotFound`."""
        unread = sa.select(FILES.c.id).where(
            FILES.c.tenant == tenant, ~FILES.c.text_complete, FILES.c.status != FileStatus.ERROR
        )
        mine = (STORE_FILES.c.tenant == tenant, STORE_FILES.c.batch_id == batch_id)
        with self._store.write() as connection:
            if _batch(connection, tenant, store_id, batch_id).counts.in_progress:
                waiting = STORE_FILES.c.file_id.in_(unread)
                connection.execute(STORE_FILES.update().where(*mine, waiting).values(cancelled=True))
                connection.execute(
                    STORE_BATCHES.update().where(STORE_BATCHES.c.id == batch_id).values(cancelled=True)
                )
            return _batch(connection, tenant, store_id, batch_id)

    # ----------------------------------------------------------------------------------------------- search

    def searchable(
        self, tenant: str, store_ids: Sequence[str], wanted: AttributeFilter | None
    ) -> dict[str, StoreFile]:
        """Files that a search of these stores may see, by id. The stores are active now. Raises `NotFound`, and
        `InvalidRequest` for a store that is expired."""
        query = _links(tenant).where(STORE_FILES.c.store_id.in_(store_ids), ~STORE_FILES.c.cancelled)
        with self._store.read() as connection:
            idle = [store_id for store_id in store_ids if self._usable(connection, tenant, store_id)]
            rows = connection.execute(query.where(FILES.c.status != FileStatus.ERROR)).all()
        if idle:
            mine = (VECTOR_STORES.c.tenant == tenant, VECTOR_STORES.c.id.in_(idle))
            with self._store.write() as connection:
                connection.execute(VECTOR_STORES.update().where(*mine).values(last_active_at=self._clock()))
        found = (_store_file(row, 0) for row in rows)
        return {file.file_id: file for file in found if matches(wanted, file.attributes)}

    def _usable(self, connection: sa.Connection, tenant: str, store_id: str) -> bool:
        """Whether it was idle for a while. Raises `NotFound`, `InvalidRequest` for one that is expired."""
        row = _row(connection, tenant, store_id)
        idle_s = self._clock() - row.last_active_at
        if row.expires_days is not None and idle_s >= DAY_S * row.expires_days:
            raise InvalidRequest(
                f"The vector store {store_id} has expired.",
                hint="Update its expires_after, or make another.",
                param="vector_store_id",
            )
        return bool(idle_s >= ACTIVE_STEP_S)


# --------------------------------------------------------------------------------------------------------- rows


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), ensure_ascii=False)


def _mine(tenant: str, store_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (VECTOR_STORES.c.tenant == tenant, VECTOR_STORES.c.id == store_id)


def _link(tenant: str, store_id: str, file_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    columns = STORE_FILES.c
    return (columns.tenant == tenant, columns.store_id == store_id, columns.file_id == file_id)


def _links(tenant: str) -> sa.Select[Any]:
    """Files in stores, with what the library knows of them."""
    columns = (FILES.c.filename, FILES.c.error, _STATUS)
    query = sa.select(STORE_FILES, *columns).join(FILES, FILES.c.id == STORE_FILES.c.file_id)
    return query.where(STORE_FILES.c.tenant == tenant, FILES.c.tenant == tenant)


def _attach(
    connection: sa.Connection,
    tenant: str,
    store_id: str,
    files: Sequence[NewStoreFile],
    now_s: float,
    batch_id: str | None,
) -> None:
    """Raises `NotFound` for a file that isn't the tenant's, `InvalidRequest` for a store that is full."""
    given = {file.file_id: file for file in files}
    known = sa.select(FILES.c.id).where(FILES.c.tenant == tenant, FILES.c.id.in_(given))
    if missing := given.keys() - set(connection.execute(known).scalars()):
        raise NotFound(
            f"There is no file {min(missing)[:64]!r}.", hint="GET /v1/files lists yours.", param="file_id"
        )
    inside = (STORE_FILES.c.tenant == tenant, STORE_FILES.c.store_id == store_id)
    connection.execute(STORE_FILES.delete().where(*inside, STORE_FILES.c.file_id.in_(given)))
    held = connection.execute(sa.select(sa.func.count()).select_from(STORE_FILES).where(*inside)).scalar_one()
    if held + len(given) > MAX_FILES:
        raise InvalidRequest(f"A vector store holds at most {MAX_FILES:,} files.", param="file_ids")
    rows = [
        {
            "store_id": store_id,
            "file_id": file.file_id,
            "tenant": tenant,
            "created_at": now_s,
            "batch_id": batch_id,
            "cancelled": False,
            "attributes": _json(file.attributes),
        }
        for file in given.values()
    ]
    if rows:
        connection.execute(STORE_FILES.insert(), rows)
    active = VECTOR_STORES.update().where(*_mine(tenant, store_id))
    connection.execute(active.values(last_active_at=now_s))


def _row(connection: sa.Connection, tenant: str, store_id: str) -> Any:
    row = connection.execute(sa.select(VECTOR_STORES).where(*_mine(tenant, store_id))).first()
    if row is None:
        raise NotFound(
            f"There is no vector store {store_id[:64]!r}.",
            hint="GET /v1/vector_stores lists yours.",
            param="vector_store_id",
        )
    return row


def _store(connection: sa.Connection, tenant: str, store_id: str) -> VectorStore:
    return _stores(connection, tenant, [_row(connection, tenant, store_id)])[0]


def _stores(connection: sa.Connection, tenant: str, rows: Sequence[Any]) -> list[VectorStore]:
    inside = (STORE_FILES.c.tenant == tenant, STORE_FILES.c.store_id.in_([row.id for row in rows]))
    links = connection.execute(
        sa.select(STORE_FILES.c.store_id, STORE_FILES.c.file_id).where(*inside, ~STORE_FILES.c.cancelled)
    ).all()
    sizes = _sizes(connection, tenant, {link.file_id for link in links})
    usage: dict[str, int] = {}
    for link in links:
        usage[link.store_id] = usage.get(link.store_id, 0) + sizes.get(link.file_id, 0)
    counts = _counts(connection, STORE_FILES.c.store_id, *inside)
    return [
        VectorStore(
            row.id,
            row.name,
            row.description,
            row.created_at,
            row.last_active_at,
            row.expires_days,
            json.loads(row.metadata),
            counts.get(row.id, FileCounts()),
            usage.get(row.id, 0),
        )
        for row in rows
    ]


def _counts(
    connection: sa.Connection, by: sa.ColumnElement[str], *conditions: sa.ColumnElement[bool]
) -> dict[str, FileCounts]:
    """Files by state, for each value of a column."""
    query = sa.select(by, _STATUS, sa.func.count()).select_from(
        STORE_FILES.join(FILES, FILES.c.id == STORE_FILES.c.file_id)
    )
    found: dict[str, dict[str, int]] = {}
    for key, state, count in connection.execute(query.where(*conditions).group_by(by, _STATUS)):
        found.setdefault(key, {})[state] = int(count)
    return {key: FileCounts(**states) for key, states in found.items()}


def _sizes(connection: sa.Connection, tenant: str, file_ids: set[str]) -> dict[str, int]:
    """Bytes of terms and vectors, by file."""
    size = sa.func.sum(sa.func.length(ENTRIES.c.terms) + sa.func.coalesce(sa.func.length(VECTORS.c.vector), 0))
    query = sa.select(ENTRIES.c.source_id, size).outerjoin(VECTORS, VECTORS.c.entry_id == ENTRIES.c.id)
    query = query.where(ENTRIES.c.tenant == tenant, ENTRIES.c.source_id.in_(file_ids))
    return {row[0]: int(row[1]) for row in connection.execute(query.group_by(ENTRIES.c.source_id))}


def _file(connection: sa.Connection, tenant: str, store_id: str, file_id: str) -> StoreFile:
    _row(connection, tenant, store_id)
    row = connection.execute(_links(tenant).where(*_link(tenant, store_id, file_id))).first()
    if row is None:
        raise NotFound(
            f"There is no file {file_id[:64]!r} in this vector store.",
            hint="GET /v1/vector_stores/{id}/files lists them.",
            param="file_id",
        )
    return _files(connection, tenant, [row])[0]


def _files(connection: sa.Connection, tenant: str, rows: Sequence[Any]) -> list[StoreFile]:
    sizes = _sizes(connection, tenant, {row.file_id for row in rows})
    return [_store_file(row, sizes.get(row.file_id, 0)) for row in rows]


def _store_file(row: Any, size: int) -> StoreFile:
    attributes = json.loads(row.attributes)
    return StoreFile(
        row.store_id, row.file_id, row.filename, row.created_at, row.state, attributes, size, row.error
    )


def _batch(connection: sa.Connection, tenant: str, store_id: str, batch_id: str) -> StoreBatch:
    columns = STORE_BATCHES.c
    mine = (columns.tenant == tenant, columns.store_id == store_id, columns.id == batch_id)
    row = connection.execute(sa.select(STORE_BATCHES).where(*mine)).first()
    if row is None:
        raise NotFound(f"There is no file batch {batch_id[:64]!r} in this vector store.", param="batch_id")
    inside = (STORE_FILES.c.tenant == tenant, STORE_FILES.c.batch_id == batch_id)
    counts = _counts(connection, STORE_FILES.c.batch_id, *inside).get(batch_id, FileCounts())
    return StoreBatch(row.id, row.store_id, row.created_at, row.cancelled, counts)
