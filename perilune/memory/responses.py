"""Answers of the Responses API, kept so that a caller can read them again and go on from them (spec S1).

Knows rows and JSON; not what the items mean. Every call is bound to a tenant in SQL. An answer keeps its own input
only, and what it went on from by id: a conversation of n turns takes the room of n turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from perilune.errors import InvalidRequest, NotFound
from perilune.memory import audit
from perilune.memory.entries import owe_purge
from perilune.memory.schema import RESPONSES
from perilune.memory.store import Store

MAX_CHAIN = 2048
"""Answers that one may go on from, one behind the other; longer conversations are sessions' business."""

MAX_CHAIN_CHARS = 32 * 2**20
"""Of JSON, together: a chain is read and checked whole, and each of its answers may hold as much as a request."""


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """`items` are the input of this answer alone, `body` the answer as it was given."""

    items: tuple[dict[str, Any], ...]
    body: dict[str, Any]
    previous_id: str | None


class ResponseStore:
    """Thread-safe; calls block for milliseconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def add(self, tenant: str, items: Sequence[dict[str, Any]], body: dict[str, Any]) -> None:
        """Keep an answer; not one whose forerunner was deleted while it was being made."""
        row = {
            "id": body["id"],
            "tenant": tenant,
            "created_at": self._clock(),
            "previous_id": body.get("previous_response_id"),
            "input": json.dumps(list(items), ensure_ascii=False),
            "body": json.dumps(body, ensure_ascii=False),
        }
        before = row["previous_id"]
        with self._store.write() as connection:
            if before is None or _size(connection, tenant, before):
                connection.execute(RESPONSES.insert().values(row))

    def get(self, tenant: str, response_id: str) -> KeptResponse:
        """Raises `NotFound`, for another tenant's answer too."""
        with self._store.read() as connection:
            return _get(connection, tenant, response_id)

    def chain(self, tenant: str, response_id: str) -> list[KeptResponse]:
        """The answer and those it went on from, oldest first. Raises `NotFound` where one of them was deleted, and
        `InvalidRequest` for a chain that is too long, before what is too much is read."""
        found: list[KeptResponse] = []
        following: str | None = response_id
        left = MAX_CHAIN_CHARS
        with self._store.read() as connection:
            while following is not None:
                left -= _size(connection, tenant, following)
                if len(found) == MAX_CHAIN or left < 0:
                    raise InvalidRequest(
                        f"The conversation has more than {MAX_CHAIN:,} answers or {MAX_CHAIN_CHARS:,} characters.",
                        hint="Begin a new one, or use a session, which finds old turns again.",
                        param="previous_response_id",
                    )
                found.append(_get(connection, tenant, following))
                following = found[-1].previous_id
        return found[::-1]

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises `NotFound`. What went on from it can't be gone on from any longer."""
        with self._store.write() as connection:
            _get(connection, tenant, response_id)
            connection.execute(RESPONSES.delete().where(*_mine(tenant, response_id)))
            owe_purge(connection)
            audit.write(connection, self._clock(), "response.delete", tenant, response_id)
        self._store.scrub()

    def expire(self, before_s: float) -> int:
        """Delete answers older than this wall clock's second that no younger one goes on from; returns how many."""
        before = RESPONSES.alias("before")
        needed = sa.select(RESPONSES.c.previous_id).where(RESPONSES.c.created_at >= before_s).cte(recursive=True)
        needed = needed.union(sa.select(before.c.previous_id).where(before.c.id == needed.c.previous_id))
        wanted = sa.select(needed.c.previous_id).where(needed.c.previous_id.is_not(None))
        old = (RESPONSES.c.created_at < before_s, RESPONSES.c.id.not_in(wanted))
        with self._store.write() as connection:
            rows = connection.execute(sa.select(RESPONSES.c.id, RESPONSES.c.tenant).where(*old)).all()
            for row in rows:
                connection.execute(RESPONSES.delete().where(*_mine(row.tenant, row.id)))
                audit.write(connection, self._clock(), "response.delete", row.tenant, row.id)
            if rows:
                owe_purge(connection)
        if rows:
            self._store.scrub()
        return len(rows)


def forget_quotes(connection: sa.Connection, tenant: str, file_id: str) -> None:
    """Delete the tenant's answers that name a file: they quote it."""
    in_body, in_input = (
        column.contains(file_id, autoescape=True) for column in (RESPONSES.c.body, RESPONSES.c.input)
    )
    named = sa.or_(in_body, in_input)
    connection.execute(RESPONSES.delete().where(RESPONSES.c.tenant == tenant, named))


def _mine(tenant: str, response_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (RESPONSES.c.tenant == tenant, RESPONSES.c.id == response_id)


def _size(connection: sa.Connection, tenant: str, response_id: str) -> int:
    """Characters of an answer and its input; 0 for one that isn't there."""
    size = sa.func.length(RESPONSES.c.input) + sa.func.length(RESPONSES.c.body)
    return int(connection.execute(sa.select(size).where(*_mine(tenant, response_id))).scalar() or 0)


def _get(connection: sa.Connection, tenant: str, response_id: str) -> KeptResponse:
    columns = (RESPONSES.c.input, RESPONSES.c.body, RESPONSES.c.previous_id)
    row = connection.execute(sa.select(*columns).where(*_mine(tenant, response_id))).first()
    if row is None:
        raise NotFound(
            "There is no such response; it may have been deleted, or was asked with store false.",
            hint="Send the conversation as input.",
            param="previous_response_id",
        )
    return KeptResponse(tuple(json.loads(row.input)), json.loads(row.body), row.previous_id)
