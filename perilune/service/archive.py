"""Kept answers and conversations, from the caller's side: `memory.responses` off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perilune.errors import NotFound
from perilune.memory.conversations import ConversationInfo
from perilune.memory.responses import KeptResponse, Made, ResponseStore


class Archive:
    """Implements `ports.Responses`. `store` is None in a process that keeps none."""

    def __init__(self, store: ResponseStore | None) -> None:
        self._kept = store
        self.conversations = KeptConversations(store)

    async def begin(self, tenant: str, items: Sequence[dict[str, Any]], body: dict[str, Any]) -> None:
        if self._kept is not None:
            await asyncio.to_thread(self._kept.begin, tenant, items, body)

    async def finish(self, tenant: str, made: Made) -> bool:
        return await asyncio.to_thread(self._kept.finish, tenant, made) if self._kept is not None else False

    async def drop(self, tenant: str, response_id: str) -> None:
        if self._kept is not None:
            await asyncio.to_thread(self._kept.drop, tenant, response_id)

    async def recover(self, failed: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
        """See `ResponseStore.recover`."""
        return await asyncio.to_thread(self._kept.recover, failed) if self._kept is not None else 0

    async def get(self, tenant: str, response_id: str) -> KeptResponse:
        return await asyncio.to_thread(_store(self._kept).get, tenant, response_id)

    async def chain(self, tenant: str, response_id: str) -> list[KeptResponse]:
        return await asyncio.to_thread(_store(self._kept).chain, tenant, response_id)

    async def delete(self, tenant: str, response_id: str) -> None:
        await asyncio.to_thread(_store(self._kept).delete, tenant, response_id)

    async def expire(self, before_s: float) -> int:
        """See `ResponseStore.expire`; of conversations, too."""
        if self._kept is None:
            return 0
        gone = await asyncio.to_thread(self._kept.conversations.expire, before_s)
        return gone + await asyncio.to_thread(self._kept.expire, before_s)


class KeptConversations:
    """Implements `ports.KeptConversations`."""

    def __init__(self, store: ResponseStore | None) -> None:
        self._kept = store

    async def create(
        self, tenant: str, metadata: Mapping[str, str], items: Sequence[dict[str, Any]]
    ) -> ConversationInfo:
        return await asyncio.to_thread(_store(self._kept).conversations.create, tenant, metadata, items)

    async def get(self, tenant: str, conversation_id: str) -> ConversationInfo:
        return await asyncio.to_thread(_store(self._kept).conversations.get, tenant, conversation_id)

    async def update(self, tenant: str, conversation_id: str, metadata: Mapping[str, str]) -> ConversationInfo:
        return await asyncio.to_thread(_store(self._kept).conversations.update, tenant, conversation_id, metadata)

    async def delete(self, tenant: str, conversation_id: str) -> None:
        await asyncio.to_thread(_store(self._kept).conversations.delete, tenant, conversation_id)

    async def add(self, tenant: str, conversation_id: str, items: Sequence[dict[str, Any]]) -> None:
        await asyncio.to_thread(_store(self._kept).conversations.add, tenant, conversation_id, items)

    async def items(
        self, tenant: str, conversation_id: str, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[dict[str, Any]], bool]:
        store = _store(self._kept).conversations
        return await asyncio.to_thread(store.items, tenant, conversation_id, after, limit, newest_first)

    async def all_items(self, tenant: str, conversation_id: str) -> list[dict[str, Any]]:
        return await asyncio.to_thread(_store(self._kept).conversations.all_items, tenant, conversation_id)

    async def item(self, tenant: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        return await asyncio.to_thread(_store(self._kept).conversations.item, tenant, conversation_id, item_id)

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> ConversationInfo:
        return await asyncio.to_thread(
            _store(self._kept).conversations.delete_item, tenant, conversation_id, item_id
        )


def _store(kept: ResponseStore | None) -> ResponseStore:
    if kept is None:
        raise NotFound("This process keeps no responses.", hint="Use `perilune serve`.")
    return kept
