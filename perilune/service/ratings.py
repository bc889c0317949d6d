"""Feedback on answers, from the caller's side: `memory.ratings` off the event loop, behind what is being stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from perilune.errors import NotFound
from perilune.memory.paging import Part
from perilune.memory.ratings import Chosen, NewRating, RatedAnswer, Rating, Ratings
from perilune.service.sessions import SessionService
from perilune.telemetry import Telemetry


class RatingService:
    """Implements `ports.Feedbacks`. `store` is None in a process that keeps none."""

    def __init__(self, store: Ratings | None, sessions: SessionService, telemetry: Telemetry) -> None:
        self._kept = store
        self._sessions = sessions
        self._telemetry = telemetry

    async def put(self, tenant: str, given: NewRating) -> Rating:
        await self._sessions.settled(tenant, None)  # the answer may be one that just ended
        kept = await asyncio.to_thread(self._store().put, tenant, given)
        self._telemetry.count("feedback", rating=kept.rating, reason=kept.reason or "none")
        return kept

    async def get(self, tenant: str, rating_id: str) -> Rating:
        return await asyncio.to_thread(self._store().get, tenant, rating_id)

    async def part(self, tenant: str, chosen: Chosen, part: Part) -> tuple[list[Rating], bool]:
        return await asyncio.to_thread(self._store().part, tenant, chosen, part)

    async def delete(self, tenant: str, rating_id: str) -> None:
        await asyncio.to_thread(self._store().delete, tenant, rating_id)

    async def export(self, tenant: str) -> Iterator[tuple[Rating, RatedAnswer]]:
        await self._sessions.settled(tenant, None)
        return self._store().export(tenant)

    async def expire(self, before_s: float) -> int:
        """See `memory.ratings.Ratings.expire`."""
        return await asyncio.to_thread(self._kept.expire, before_s) if self._kept is not None else 0

    def _store(self) -> Ratings:
        if self._kept is None:
            raise NotFound("This process keeps no feedback.", hint="Use `perilune serve`.")
        return self._kept
