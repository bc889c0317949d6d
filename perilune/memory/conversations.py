"""Conversations of OpenAI's Conversations API: items in the order in which they came (spec S1).

Knows rows and JSON; not what the items mean. Every call is bound to a tenant in SQL. A conversation's deletion
takes along the kept answers that were given in it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from perilune.errors import InvalidRequest, NotFound, TooLarge
from perilune.memory import audit
from perilune.memory.entries import owe_purge
from perilune.memory.keys import validate_tenant
from perilune.memory.schema import CONVERSATION_ITEMS, CONVERSATIONS, RESPONSES
from perilune.memory.store import Store

MAX_CHARS = 32 * 2**20
"""Of a conversation's items: it is read and checked whole, as a chain of answers is."""


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """`created_at` is seconds since the epoch."""

    conversation_id: str
    created_at: float
    metadata: Mapping[str, str]


class ConversationStore:
    """Thread-safe; calls block for milliseconds. `quota_bytes` bounds the items of one tenant."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time, quota_bytes: int = 1 << 30) -> None:
        self._store = store
        self._clock = clock
        self._quota_bytes = quota_bytes

    def create(self, tenant: str, metadata: Mapping[str, str], items: Sequence[dict[str, Any]]) -> ConversationInfo:
        """A new conversation, with these items (each with its id) in it. Raises as `add`."""
        validate_tenant(tenant)
        info = ConversationInfo(f"conv_{secrets.token_hex(24)}", self._clock(), dict(metadata))
        row = {
            "id": info.conversation_id,
            "tenant": tenant,
            "created_at": info.created_at,
            "last_at": info.created_at,
            "metadata": json.dumps(info.metadata, ensure_ascii=False),
        }
        with self._store.write() as connection:
            connection.execute(CONVERSATIONS.insert().values(row))
            self.append(connection, tenant, info.conversation_id, items)
        return info

    def get(self, tenant: str, conversation_id: str) -> ConversationInfo:
        """Raises `NotFound`, for another tenant's conversation too."""
        with self._store.read() as connection:
            return _info(connection, tenant, conversation_id)

    def update(self, tenant: str, conversation_id: str, metadata: Mapping[str, str]) -> ConversationInfo:
        """Replace the metadata. Raises `NotFound`."""
        text = json.dumps(dict(metadata), ensure_ascii=False)
        with self._store.write() as connection:
            _info(connection, tenant, conversation_id)
            connection.execute(CONVERSATIONS.update().where(*_mine(tenant, conversation_id)).values(metadata=text))
            return _info(connection, tenant, conversation_id)

    def delete(self, tenant: str, conversation_id: str) -> None:
        """Remove a conversation, its items, and the kept answers of it. Raises `NotFound`."""
        with self._store.write() as connection:
            _info(connection, tenant, conversation_id)
            self._remove(connection, tenant, conversation_id)
        self._store.scrub()

    def add(self, tenant: str, conversation_id: str, items: Sequence[dict[str, Any]]) -> None:
        """Append items, each with its id. Raises `NotFound`, `InvalidRequest` where the conversation grows too long
        and `TooLarge` where the tenant's quota is used."""
        with self._store.write() as connection:
            self.append(connection, tenant, conversation_id, items)

    def items(
        self, tenant: str, conversation_id: str, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[dict[str, Any]], bool]:
        """(items behind the one called `after`, whether there are more). Raises `NotFound`, for an unknown `after`,
        too."""
        number = CONVERSATION_ITEMS.c.number
        query = sa.select(CONVERSATION_ITEMS.c.item).where(*_items(tenant, conversation_id))
        with self._store.read() as connection:
            _info(connection, tenant, conversation_id)
            if after is not None:
                at = _item(connection, tenant, conversation_id, after).number
                query = query.where(number < at if newest_first else number > at)
            rows = connection.execute(query.order_by(number.desc() if newest_first else number).limit(limit + 1))
            found = [json.loads(row.item) for row in rows]
        return found[:limit], len(found) > limit

    def all_items(self, tenant: str, conversation_id: str) -> list[dict[str, Any]]:
        """Everything said so far, in order. Raises `NotFound`."""
        query = sa.select(CONVERSATION_ITEMS.c.item).where(*_items(tenant, conversation_id))
        with self._store.read() as connection:
            _info(connection, tenant, conversation_id)
            return [json.loads(row.item) for row in connection.execute(query.order_by(CONVERSATION_ITEMS.c.number))]

    def item(self, tenant: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Raises `NotFound`."""
        with self._store.read() as connection:
            found: dict[str, Any] = json.loads(_item(connection, tenant, conversation_id, item_id).item)
        return found

    def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> ConversationInfo:
        """Raises `NotFound`. Kept answers still hold what was said to them."""
        with self._store.write() as connection:
            _item(connection, tenant, conversation_id, item_id)
            same = CONVERSATION_ITEMS.c.id == item_id
            connection.execute(CONVERSATION_ITEMS.delete().where(*_items(tenant, conversation_id), same))
            owe_purge(connection)
            info = _info(connection, tenant, conversation_id)
        self._store.scrub()
        return info

    def expire(self, before_s: float) -> int:
        """Delete conversations to which nothing was added since this wall clock's second; returns how many."""
        with self._store.write() as connection:
            old = sa.select(CONVERSATIONS.c.tenant, CONVERSATIONS.c.id).where(CONVERSATIONS.c.last_at < before_s)
            rows = connection.execute(old).all()
            for row in rows:
                self._remove(connection, row.tenant, row.id)
        if rows:
            self._store.scrub()
        return len(rows)

    # -------------------------------------------------------------------------- inside others' transactions

    def require(self, connection: sa.Connection, tenant: str, conversation_id: str) -> None:
        """Raises `NotFound`."""
        _info(connection, tenant, conversation_id)

    def append(
        self, connection: sa.Connection, tenant: str, conversation_id: str, items: Sequence[dict[str, Any]]
    ) -> None:
        """See `add`."""
        _info(connection, tenant, conversation_id)
        texts = [json.dumps(item, ensure_ascii=False) for item in items]
        mine = _items(tenant, conversation_id)
        columns = (sa.func.max(CONVERSATION_ITEMS.c.number), sa.func.sum(CONVERSATION_ITEMS.c.size))
        last, chars = connection.execute(sa.select(*columns).where(*mine)).one()
        new_chars = sum(map(len, texts))
        if int(chars or 0) + new_chars > MAX_CHARS:
            raise InvalidRequest(
                f"The conversation would have more than {MAX_CHARS:,} characters.",
                hint="Begin a new one, or delete items.",
                param="conversation",
            )
        self._require_room(connection, tenant, new_chars)
        first = 0 if last is None else int(last) + 1
        rows = [
            {
                "conversation_id": conversation_id,
                "number": first + index,
                "id": item["id"],
                "tenant": tenant,
                "size": len(text),
                "item": text,
            }
            for index, (item, text) in enumerate(zip(items, texts, strict=True))
        ]
        if rows:
            connection.execute(CONVERSATION_ITEMS.insert(), rows)
            touched = CONVERSATIONS.update().where(*_mine(tenant, conversation_id))
            connection.execute(touched.values(last_at=self._clock()))

    def _require_room(self, connection: sa.Connection, tenant: str, new_chars: int) -> None:
        total = sa.select(sa.func.sum(CONVERSATION_ITEMS.c.size)).where(CONVERSATION_ITEMS.c.tenant == tenant)
        if int(connection.execute(total).scalar() or 0) + new_chars > self._quota_bytes:
            raise TooLarge(
                f"Your conversations hold more than {self._quota_bytes:,} bytes together.",
                hint="Delete some, or raise memory.responses_quota.",
                param="conversation",
            )

    def _remove(self, connection: sa.Connection, tenant: str, conversation_id: str) -> None:
        of_it = (RESPONSES.c.tenant == tenant, RESPONSES.c.conversation_id == conversation_id)
        connection.execute(RESPONSES.delete().where(*of_it))
        connection.execute(CONVERSATION_ITEMS.delete().where(*_items(tenant, conversation_id)))
        connection.execute(CONVERSATIONS.delete().where(*_mine(tenant, conversation_id)))
        owe_purge(connection)
        audit.write(connection, self._clock(), "conversation.delete", tenant, conversation_id)


def forget_quotes(connection: sa.Connection, tenant: str, file_id: str) -> None:
    """Delete the items of a tenant's conversations that name a file."""
    named = CONVERSATION_ITEMS.c.item.contains(file_id, autoescape=True)
    connection.execute(CONVERSATION_ITEMS.delete().where(CONVERSATION_ITEMS.c.tenant == tenant, named))


def _mine(tenant: str, conversation_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (CONVERSATIONS.c.tenant == tenant, CONVERSATIONS.c.id == conversation_id)


def _items(tenant: str, conversation_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (CONVERSATION_ITEMS.c.tenant == tenant, CONVERSATION_ITEMS.c.conversation_id == conversation_id)


def _info(connection: sa.Connection, tenant: str, conversation_id: str) -> ConversationInfo:
    row = connection.execute(sa.select(CONVERSATIONS).where(*_mine(tenant, conversation_id))).first()
    if row is None:
        raise NotFound(
            "There is no such conversation.", hint="POST /v1/conversations begins one.", param="conversation"
        )
    return ConversationInfo(row.id, row.created_at, json.loads(row.metadata))


def _item(connection: sa.Connection, tenant: str, conversation_id: str, item_id: str) -> Any:
    same = CONVERSATION_ITEMS.c.id == item_id
    query = sa.select(CONVERSATION_ITEMS).where(*_items(tenant, conversation_id), same)
    row = connection.execute(query).first()
    if row is None:
        raise NotFound("The conversation has no such item.", hint="List its items.", param="item_id")
    return row
