"""Decides whether stored text may leave this machine; nothing else does (spec M12).

A source, which is a document or a session, is local-only where its owner says so, and where settings say it of the
whole tenant. Asked by whoever sends text elsewhere: the indexer and the retriever before an embedding server gets
passages and questions, the service before a backend gets a prompt. Knows SQL; neither embedders nor backends.

Questions quote what they ask about. So while a tenant keeps anything local-only, none of its questions goes to an
embedding server: its searches find by words there.
"""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from perilune.memory.schema import ENTRIES, INDEX_WORK, LOCAL_ONLY, VECTORS
from perilune.memory.store import Store

EVERYBODY = "*"


class Locality:
    """Thread-safe. `tenants` keep all of their text here; `EVERYBODY` among them stands for every tenant."""

    def __init__(self, store: Store, tenants: Collection[str] = ()) -> None:
        self._store = store
        self._tenants = frozenset(tenants)

    def kept(self, tenant: str, source_ids: Collection[str]) -> frozenset[str]:
        """Those of the sources whose text must not leave this machine."""
        if self._whole(tenant):
            return frozenset(source_ids)
        mine = (LOCAL_ONLY.c.tenant == tenant, LOCAL_ONLY.c.source_id.in_(list(source_ids)))
        with self._store.read() as connection:
            return frozenset(connection.execute(sa.select(LOCAL_ONLY.c.source_id).where(*mine)).scalars())

    def may_ask(self, tenant: str) -> bool:
        """Whether an embedding server elsewhere may get the tenant's questions."""
        if self._whole(tenant):
            return False
        some = sa.select(sa.exists().where(LOCAL_ONLY.c.tenant == tenant))
        with self._store.read() as connection:
            return not connection.execute(some).scalar()

    def kept_entries(self, connection: sa.Connection, ids: Collection[int]) -> set[int]:
        """Those of the entries whose text must not leave this machine."""
        query = sa.select(ENTRIES.c.id).where(ENTRIES.c.id.in_(ids), self._is_kept())
        return set(connection.execute(query).scalars())

    def without_vectors(self, connection: sa.Connection, model: str) -> int:
        """How many entries have no vector of a model elsewhere, and won't get one."""
        has = sa.exists().where(VECTORS.c.entry_id == ENTRIES.c.id, VECTORS.c.model == model)
        waits = sa.exists().where(INDEX_WORK.c.entry_id == ENTRIES.c.id, INDEX_WORK.c.task == "vector")
        query = sa.select(sa.func.count()).select_from(ENTRIES).where(self._is_kept(), ~has, ~waits)
        return int(connection.execute(query).scalar_one())

    def mark(self, tenant: str, source_id: str, local_only: bool) -> None:
        """Keep a source's text here from now on, or let it go: what had no vector for that reason gets one."""
        with self._store.write() as connection:
            set_local_only(connection, tenant, source_id, local_only)
            if not local_only:
                mine = (ENTRIES.c.tenant == tenant, ENTRIES.c.source_id == source_id)
                waits = sa.exists().where(INDEX_WORK.c.entry_id == ENTRIES.c.id, INDEX_WORK.c.task == "vector")
                owed = sa.select(ENTRIES.c.id, sa.literal("vector")).where(*mine, ~waits)
                connection.execute(INDEX_WORK.insert().from_select(["entry_id", "task"], owed))

    def _whole(self, tenant: str) -> bool:
        return not self._tenants.isdisjoint((tenant, EVERYBODY))

    def _is_kept(self) -> sa.ColumnElement[bool]:
        if EVERYBODY in self._tenants:
            return sa.true()
        marked = sa.exists().where(
            LOCAL_ONLY.c.tenant == ENTRIES.c.tenant, LOCAL_ONLY.c.source_id == ENTRIES.c.source_id
        )
        return sa.or_(marked, ENTRIES.c.tenant.in_(self._tenants))


def set_local_only(connection: sa.Connection, tenant: str, source_id: str, local_only: bool) -> None:
    """Mark a source in the caller's transaction: that in which its first text is stored."""
    mine = (LOCAL_ONLY.c.tenant == tenant, LOCAL_ONLY.c.source_id == source_id)
    connection.execute(LOCAL_ONLY.delete().where(*mine))
    if local_only:
        connection.execute(LOCAL_ONLY.insert().values(tenant=tenant, source_id=source_id))
