"""Kept conversations: stores what was said behind the answer, finds it again for the next, deletes it everywhere.

Knows the session store and whose KV is made of a session; not prompts. A turn is written in the background, and
whoever reads a session waits for what is still being written to it, so that a finished answer is findable by the
next request. Only the caller's last message and the answer are stored: what memory put into the prompt isn't
learnt again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from perilune.core import Passage, SessionInfo, SessionTurn
from perilune.errors import InvalidRequest, NotFound, PeriluneError
from perilune.memory.session_ids import session_owner
from perilune.service.ports import SessionStore
from perilune.telemetry import Telemetry

USER, ASSISTANT = "user", "assistant"
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Visit:
    """A request that will add to a session, unless it `ended`: was deleted meanwhile."""

    tenant: str
    session_id: str
    asked_at: float
    ended: bool = False


class SessionService:
    """Implements `ports.Conversations`. Used from the event loop; `close` at the end.

    `store` is None in a process that keeps no sessions. `forget_kv` drops the KV that an owner has a part in.
    """

    def __init__(
        self,
        store: SessionStore | None,
        forget_kv: Callable[[str], Awaitable[None]],
        telemetry: Telemetry,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._kept = store
        self._forget_kv = forget_kv
        self._telemetry = telemetry
        self._now = now
        self._writing: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._visits: weakref.WeakSet[Visit] = weakref.WeakSet()

    async def close(self) -> None:
        """Wait until everything that was said is stored."""
        await asyncio.gather(*self._writing.values())

    # ------------------------------------------------------------------------------------- for an answer

    def visit(self, tenant: str, session_id: str) -> Visit:
        """A request that belongs to a session begins. Raises `InvalidRequest` where none are kept."""
        self._store()
        visit = Visit(tenant, session_id, self._now())
        self._visits.add(visit)
        return visit

    @staticmethod
    def require(visit: Visit | None) -> None:
        """Raises `NotFound` for a session that was deleted since. Await nothing between this and a submit."""
        if visit is not None and visit.ended:
            raise NotFound("The session was deleted.", hint="Ask again to begin it anew.", param="session")

    def remember(self, visit: Visit, question: str, answer: str) -> None:
        """Store a question and its answer in the background, behind what is still being stored of the session."""
        key = (visit.tenant, visit.session_id)
        said = [(USER, question, visit.asked_at), (ASSISTANT, answer, self._now())]
        said = [turn for turn in said if turn[1].strip()]
        task = asyncio.create_task(self._add(visit, said, self._writing.get(key)), name="remember")
        self._writing[key] = task
        task.add_done_callback(lambda done: self._written(key, done))

    async def recall(
        self, tenant: str, session_ids: Sequence[str], own: str | None, query: str, limit: int
    ) -> list[SessionTurn]:
        """The best turns for a question, best first. Raises `NotFound` for a session that isn't there, unless it is
        the request's `own`, which begins with it."""
        await self._settled(tenant, session_ids)
        for session_id in session_ids:
            if session_id != own:
                await asyncio.to_thread(self._store().get, tenant, session_id)
        found = await asyncio.to_thread(self._store().search, tenant, session_ids, query, limit)
        return [turn for turn in found if isinstance(turn, SessionTurn)]

    # ------------------------------------------------------------------------------------------ the port

    async def sessions(self, tenant: str, limit: int) -> list[SessionInfo]:
        await self._settled(tenant, None)
        return await asyncio.to_thread(self._store().sessions, tenant, limit)

    async def get(self, tenant: str, session_id: str) -> SessionInfo:
        await self._settled(tenant, [session_id])
        return await asyncio.to_thread(self._store().get, tenant, session_id)

    async def turns(self, tenant: str, session_id: str, after: int, limit: int) -> list[SessionTurn]:
        await self._settled(tenant, [session_id])
        return await asyncio.to_thread(self._store().turns, tenant, session_id, after, limit)

    async def search(
        self, tenant: str, session_ids: Sequence[str] | None, query: str, limit: int
    ) -> list[SessionTurn | Passage]:
        await self._settled(tenant, session_ids)
        for session_id in session_ids or ():
            await asyncio.to_thread(self._store().get, tenant, session_id)
        return await asyncio.to_thread(self._store().search, tenant, session_ids, query, limit)

    async def delete(self, tenant: str, session_id: str) -> None:
        """Delete what is kept of a session, and its KV. Answers under way are not added to it any more."""
        store = self._store()
        visits = [each for each in self._visits if (each.tenant, each.session_id) == (tenant, session_id)]
        for visit in visits:
            visit.ended = True
        await self._settled(tenant, [session_id])
        try:
            await asyncio.to_thread(store.delete, tenant, session_id)
        except NotFound:
            if not visits:  # else nothing of it is stored yet, and nothing will be
                raise
        except BaseException:
            for visit in visits:
                visit.ended = False
            raise
        await self._forget_kv(session_owner(tenant, session_id))

    # ----------------------------------------------------------------------------------------- writing

    def _store(self) -> SessionStore:
        if self._kept is None:
            raise InvalidRequest("No sessions are kept here.", hint="Start `perilune serve`.", param="session")
        return self._kept

    async def _add(
        self, visit: Visit, said: list[tuple[str, str, float]], earlier: asyncio.Task[None] | None
    ) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        if visit.ended:
            return
        try:
            await asyncio.to_thread(self._store().add, visit.tenant, visit.session_id, said)
        except PeriluneError as error:
            self._telemetry.count("turns_lost")
            _log.warning("a session's turns could not be stored: %s", error.message)
        except Exception:
            self._telemetry.count("turns_lost")
            _log.exception("a session's turns could not be stored")

    def _written(self, key: tuple[str, str], done: asyncio.Task[None]) -> None:
        if self._writing.get(key) is done:
            del self._writing[key]

    async def _settled(self, tenant: str, session_ids: Sequence[str] | None) -> None:
        """Wait for what is being stored of these sessions; None: of all of the tenant's."""
        tasks = [
            task
            for (owner, session_id), task in self._writing.items()
            if owner == tenant and (session_ids is None or session_id in session_ids)
        ]
        if tasks:
            await asyncio.wait(tasks)
