"""Sessions as the service asks for them (`service.ports.SessionStore`): kept, listed, read, searched, deleted.

Knows the rows of sessions and the search over them; not requests, prompts or HTTP. Every call is bound to a tenant
in SQL. Turns count from 1 here and from 0 in the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from perilune.core import Passage, SessionInfo, SessionTurn
from perilune.errors import NotFound
from perilune.memory import audit, entries
from perilune.memory.memory import Memory, Turn
from perilune.memory.retrieve import Hit
from perilune.memory.schema import ENTRIES
from perilune.memory.scope import Scope
from perilune.memory.store import Store

_OF_SESSION = ENTRIES.c.page.is_(None)  # a passage of a file has a page


class Sessions:
    """Implements `service.ports.SessionStore`. Thread-safe; calls block for milliseconds."""

    def __init__(self, store: Store, memory: Memory, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._memory = memory
        self._clock = clock

    def add(self, tenant: str, session_id: str, said: Sequence[tuple[str, str, float]]) -> int:
        """Append what was said, as (speaker, text, seconds since the epoch); returns the number of the first turn.
        Raises `InvalidRequest` for a bad id."""
        turns = [Turn(speaker, text, at) for speaker, text, at in said]
        return self._memory.add_turns(tenant, session_id, turns) + 1

    def sessions(self, tenant: str, limit: int) -> list[SessionInfo]:
        """The tenant's sessions, the one with the newest turn first."""
        last = sa.func.max(ENTRIES.c.at)
        query = _infos(tenant).order_by(last.desc(), ENTRIES.c.source_id).limit(limit)
        with self._store.read() as connection:
            return [SessionInfo(*row) for row in connection.execute(query)]

    def get(self, tenant: str, session_id: str) -> SessionInfo:
        """Raises `NotFound`, for another tenant's session too."""
        with self._store.read() as connection:
            return _info(connection, tenant, session_id)

    def turns(self, tenant: str, session_id: str, after: int, limit: int) -> list[SessionTurn]:
        """Turns behind number `after`, in order. Raises `NotFound`."""
        columns = [ENTRIES.c[name] for name in ("source_id", "number", "speaker", "text", "at")]
        mine = (ENTRIES.c.tenant == tenant, ENTRIES.c.source_id == session_id, ENTRIES.c.number >= after)
        query = sa.select(*columns).where(*mine, _OF_SESSION).order_by(ENTRIES.c.number).limit(limit)
        with self._store.read() as connection:
            _info(connection, tenant, session_id)
            rows = connection.execute(query).all()
        return [SessionTurn(row.source_id, row.number + 1, row.speaker or "", row.text, row.at) for row in rows]

    def search(
        self, tenant: str, session_ids: Sequence[str] | None, query: str, limit: int
    ) -> list[SessionTurn | Passage]:
        """The best turns of these sessions, best first; None: of all sessions, and passages of all files."""
        sources = None if session_ids is None else tuple(session_ids)
        found = self._memory.search(query, Scope(tenant, sources=sources), limit)
        return [_shown(hit) for hit in found.hits]

    def delete(self, tenant: str, session_id: str) -> None:
        """Remove the session's turns, their vectors and what the index knows of them. Raises `NotFound`."""
        with self._store.write() as connection:
            _info(connection, tenant, session_id)
            entries.remove_source(connection, tenant, session_id)
            audit.write(connection, self._clock(), "session.delete", tenant, session_id)
        self._memory.deleted()


def _infos(tenant: str) -> sa.Select[Any]:
    columns = (sa.func.count(), sa.func.min(ENTRIES.c.at), sa.func.max(ENTRIES.c.at))
    query = sa.select(ENTRIES.c.source_id, *columns).where(ENTRIES.c.tenant == tenant, _OF_SESSION)
    return query.group_by(ENTRIES.c.source_id)


def _info(connection: sa.Connection, tenant: str, session_id: str) -> SessionInfo:
    row = connection.execute(_infos(tenant).where(ENTRIES.c.source_id == session_id)).first()
    if row is None:
        raise NotFound("There is no such session.", hint="GET /v1/sessions lists yours.", param="session")
    return SessionInfo(*row)


def _shown(hit: Hit) -> SessionTurn | Passage:
    if hit.page is None:
        return SessionTurn(hit.source_id, hit.number + 1, hit.speaker or "", hit.text, hit.at, hit.score)
    return Passage(hit.source_id, hit.page, hit.start or 0, hit.end or 0, hit.text, hit.score)
