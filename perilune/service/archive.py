"""Kept answers of the Responses API, from the caller's side: `memory.responses` off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from perilune.errors import NotFound
from perilune.memory.responses import KeptResponse, ResponseStore


class Archive:
    """Implements `ports.Responses`. `store` is None in a process that keeps none."""

    def __init__(self, store: ResponseStore | None) -> None:
        self._kept = store

    async def add(self, tenant: str, items: Sequence[dict[str, Any]], body: dict[str, Any]) -> None:
        if self._kept is not None:
            await asyncio.to_thread(self._kept.add, tenant, items, body)

    async def get(self, tenant: str, response_id: str) -> KeptResponse:
        return await asyncio.to_thread(self._store().get, tenant, response_id)

    async def chain(self, tenant: str, response_id: str) -> list[KeptResponse]:
        return await asyncio.to_thread(self._store().chain, tenant, response_id)

    async def delete(self, tenant: str, response_id: str) -> None:
        await asyncio.to_thread(self._store().delete, tenant, response_id)

    async def expire(self, before_s: float) -> int:
        """See `ResponseStore.expire`."""
        return await asyncio.to_thread(self._kept.expire, before_s) if self._kept is not None else 0

    def _store(self) -> ResponseStore:
        if self._kept is None:
            raise NotFound("This process keeps no responses.", hint="Use `perilune serve`.")
        return self._kept
