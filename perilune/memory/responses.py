"""Answers of the Responses API, kept so that a caller can read them again and go on from them (spec S1).

Knows rows and JSON; not what the items mean. Every call is bound to a tenant in SQL. An answer keeps its own input
only, and what it went on from by id: a conversation of n turns takes the room of n turns.

An answer has its row from its beginning: `begin`, then `finish` or `drop`. What is deleted meanwhile (the answer, a
file that it names, its conversation, all of the tenant's) takes the row along, and `finish` keeps nothing then.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from perilune.errors import InvalidRequest, NotFound
from perilune.memory import audit, conversations
from perilune.memory.entries import owe_purge
from perilune.memory.schema import FILES, RESPONSES
from perilune.memory.store import Store

MAX_CHAIN = 2048
"""Answers that one may go on from, one behind the other; longer conversations are sessions' business."""

MAX_CHAIN_CHARS = 32 * 2**20
"""Of JSON, together: a chain is read and checked whole, and each of its answers may hold as much as a request."""

QUOTA_BYTES = 1 << 30
"""Of one tenant's kept answers, about: characters of JSON and bytes of streams. Beyond it the oldest go."""

FINISHED = frozenset({"completed", "incomplete"})
"""What may be gone on from."""


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """`items` are the input of this answer alone, `body` the answer as it was given; `events` its stream, where it
    was made in the background as one."""

    items: tuple[dict[str, Any], ...]
    body: dict[str, Any]
    previous_id: str | None
    conversation_id: str | None = None
    events: bytes | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """What an answer has become: `body` is kept, with its stream; `quoted` are the files that it quotes, which must
    still be there, and `items` (with ids) are added to its conversation."""

    body: dict[str, Any]
    events: bytes | None = None
    quoted: frozenset[str] = frozenset()
    items: Sequence[dict[str, Any]] = field(default=())


class ResponseStore:
    """Thread-safe; calls block for milliseconds. `runner` names the process's home: what it leaves unfinished is
    its own to clear up (`recover`)."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float] = time.time,
        runner: str = "local",
        quota_bytes: int = QUOTA_BYTES,
    ) -> None:
        self._store = store
        self._clock = clock
        self._runner = runner
        self._quota_bytes = quota_bytes
        self.conversations = conversations.ConversationStore(store, clock, quota_bytes)

    def begin(self, tenant: str, items: Sequence[dict[str, Any]], body: dict[str, Any]) -> None:
        """An answer is being made; `body` is what is known of it. Raises `NotFound` where what it goes on from, or
        its conversation, was deleted."""
        conversation = body.get("conversation")
        row: dict[str, Any] = {
            "id": body["id"],
            "tenant": tenant,
            "created_at": self._clock(),
            "previous_id": body.get("previous_response_id"),
            "conversation_id": conversation["id"] if conversation else None,
            "input": json.dumps(list(items), ensure_ascii=False),
            "body": json.dumps(body, ensure_ascii=False),
            "runner": self._runner,
        }
        row["size"] = len(row["input"]) + len(row["body"])
        with self._store.write() as connection:
            self._require_before(connection, tenant, row["previous_id"], row["conversation_id"])
            connection.execute(RESPONSES.insert().values(row))

    def finish(self, tenant: str, made: Made) -> bool:
        """Keep what `begin` announced; False, and nothing kept, where it or what it was made of was deleted since.
        Beyond the quota the tenant's oldest answers go, but none that this one goes on from."""
        response_id, body = made.body["id"], json.dumps(made.body, ensure_ascii=False)
        events = None if made.events is None else zlib.compress(made.events)
        with self._store.write() as connection:
            row = connection.execute(_whole(tenant, response_id)).first()
            if row is None:
                return False
            try:
                self._require_before(connection, tenant, row.previous_id, row.conversation_id)
                _require_files(connection, tenant, made.quoted)
            except NotFound:
                connection.execute(RESPONSES.delete().where(*_mine(tenant, response_id)))
                return False
            values: dict[str, Any] = {"body": body, "events": events, "runner": None}
            values["size"] = len(row.input) + len(body) + len(events or b"")
            connection.execute(RESPONSES.update().where(*_mine(tenant, response_id)).values(values))
            if row.conversation_id is not None:
                self.conversations.append(connection, tenant, row.conversation_id, made.items)
            freed = self._make_room(connection, tenant, response_id)
        if freed:
            self._store.scrub()
        return True

    def drop(self, tenant: str, response_id: str) -> None:
        """Forget an answer that was begun and not finished."""
        unfinished = RESPONSES.c.runner.is_not(None)
        with self._store.write() as connection:
            connection.execute(RESPONSES.delete().where(*_mine(tenant, response_id), unfinished))

    def recover(self, failed: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
        """What an earlier process of this home left unfinished is kept as `failed` says of its body, where callers
        may ask for it (it ran in the background), else dropped; returns how many."""
        left = RESPONSES.c.runner == self._runner
        with self._store.write() as connection:
            rows = connection.execute(sa.select(RESPONSES.c.id, RESPONSES.c.body).where(left)).all()
            for row in rows:
                body, mine = json.loads(row.body), RESPONSES.c.id == row.id
                if not body.get("background"):
                    connection.execute(RESPONSES.delete().where(mine))
                    continue
                text = json.dumps(failed(body), ensure_ascii=False)
                connection.execute(RESPONSES.update().where(mine).values(body=text, runner=None))
        return len(rows)

    def get(self, tenant: str, response_id: str) -> KeptResponse:
        """Raises `NotFound`, for another tenant's answer too."""
        with self._store.read() as connection:
            return _get(connection, tenant, response_id)

    def chain(self, tenant: str, response_id: str) -> list[KeptResponse]:
        """The answer and those it went on from, oldest first. Raises `NotFound` where one of them was deleted, and
        `InvalidRequest` for one that isn't finished, and for a chain that is too long, before what is too much is
        read."""
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
                _require_finished(found[-1])
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
        made = RESPONSES.c.runner.is_(None)
        old = (RESPONSES.c.created_at < before_s, RESPONSES.c.id.not_in(wanted), made)
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

    def _require_before(
        self, connection: sa.Connection, tenant: str, previous_id: str | None, conversation_id: str | None
    ) -> None:
        if previous_id is not None and not _size(connection, tenant, previous_id):
            raise _gone()
        if conversation_id is not None:
            self.conversations.require(connection, tenant, conversation_id)

    def _make_room(self, connection: sa.Connection, tenant: str, newest_id: str) -> int:
        """Delete the tenant's oldest answers until its quota holds the rest; returns how many."""
        mine = RESPONSES.c.tenant == tenant
        total = sa.select(sa.func.coalesce(sa.func.sum(RESPONSES.c.size), 0)).where(mine)
        excess = int(connection.execute(total).scalar() or 0) - self._quota_bytes
        if excess <= 0:
            return 0
        needed = _forerunners(connection, tenant, newest_id)
        oldest = sa.select(RESPONSES.c.id, RESPONSES.c.size).where(mine, RESPONSES.c.runner.is_(None))
        gone = []
        for row in connection.execute(oldest.order_by(RESPONSES.c.created_at)):
            if excess <= 0:
                break
            if row.id not in needed:
                gone.append(row.id)
                excess -= row.size
        for response_id in gone:
            connection.execute(RESPONSES.delete().where(*_mine(tenant, response_id)))
        if gone:
            owe_purge(connection)
        return len(gone)


def forget_quotes(connection: sa.Connection, tenant: str, file_id: str) -> None:
    """Delete the tenant's answers that name a file, and items of its conversations: they quote it."""
    in_body, in_input = (
        column.contains(file_id, autoescape=True) for column in (RESPONSES.c.body, RESPONSES.c.input)
    )
    named = sa.or_(in_body, in_input)
    connection.execute(RESPONSES.delete().where(RESPONSES.c.tenant == tenant, named))
    conversations.forget_quotes(connection, tenant, file_id)


def _mine(tenant: str, response_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (RESPONSES.c.tenant == tenant, RESPONSES.c.id == response_id)


def _whole(tenant: str, response_id: str) -> sa.Select[Any]:
    return sa.select(RESPONSES).where(*_mine(tenant, response_id))


def _size(connection: sa.Connection, tenant: str, response_id: str) -> int:
    """What an answer takes, with its input; 0 for one that isn't there."""
    query = sa.select(RESPONSES.c.size).where(*_mine(tenant, response_id))
    return int(connection.execute(query).scalar() or 0)


def _forerunners(connection: sa.Connection, tenant: str, response_id: str) -> set[str]:
    """The answer and what it went on from."""
    found: set[str] = set()
    following: str | None = response_id
    while following is not None and following not in found:
        found.add(following)
        query = sa.select(RESPONSES.c.previous_id).where(*_mine(tenant, following))
        following = connection.execute(query).scalar()
    return found


def _require_files(connection: sa.Connection, tenant: str, file_ids: frozenset[str]) -> None:
    query = sa.select(sa.func.count()).where(FILES.c.tenant == tenant, FILES.c.id.in_(sorted(file_ids)))
    if file_ids and connection.execute(query).scalar() != len(file_ids):
        raise NotFound("A file that the answer quotes was deleted.", param="file_id")


def _require_finished(kept: KeptResponse) -> None:
    if (status := kept.body["status"]) not in FINISHED:
        what = "isn't finished" if status in ("queued", "in_progress") else f"is {status}"
        raise InvalidRequest(
            f"The response {kept.body['id']} {what}: there is no answer to go on from.",
            hint="Wait until it is completed, or go on from another.",
            param="previous_response_id",
        )


def _gone() -> NotFound:
    return NotFound(
        "There is no such response; it may have been deleted, or was asked with store false.",
        hint="Send the conversation as input.",
        param="previous_response_id",
    )


def _get(connection: sa.Connection, tenant: str, response_id: str) -> KeptResponse:
    row = connection.execute(_whole(tenant, response_id)).first()
    if row is None:
        raise _gone()
    events = None if row.events is None else zlib.decompress(row.events)
    return KeptResponse(
        tuple(json.loads(row.input)), json.loads(row.body), row.previous_id, row.conversation_id, events
    )
