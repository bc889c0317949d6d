"""Kept conversations: stores what was said behind the answer, finds it again for the next, deletes it everywhere.

Knows the session store and whose KV is made of a session; not prompts. A turn is written in the background, and
whoever reads a session waits for what is still being written to it, so that a finished answer is findable by the
next request. Only the caller's last message and the answer are stored: what memory put into the prompt isn't
learnt again. The user's profile and the summaries, which are made of sessions, are asked for here, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perilune.core import (
    ANY_TIME,
    Feedback,
    KeptAnswer,
    ProfileFact,
    Request,
    SearchResult,
    SessionInfo,
    SessionTurn,
    Span,
    SummarySentence,
    Times,
)
from perilune.errors import InvalidRequest, KeptHere, NotFound, Overloaded, PeriluneError
from perilune.memory.session_ids import profile_owner, session_owner, tenant_owner
from perilune.service.ports import SessionStore
from perilune.telemetry import Telemetry

USER, ASSISTANT = "user", "assistant"
RETRY_S = 5.0
"""Between two tries to store what a full disk refused."""

MAX_WAITING = 1_000
"""Questions with their answers that wait for room, of one session; the oldest go first."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Visit:
    """A request that will add to a session, unless it `ended`: was deleted meanwhile. `lost` are the owners of what
    else was deleted since."""

    tenant: str
    session_id: str
    asked_at: float
    ended: bool = False
    local_only: bool = False
    lost: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What is to be stored: (speaker, text, seconds since the epoch) of each turn."""

    visit: Visit
    said: list[tuple[str, str, float]]
    learn: bool
    answered: KeptAnswer | None


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
        self._waiting: dict[tuple[str, str], list[_Exchange]] = {}  # for room on the disk
        self._trying: asyncio.Task[None] | None = None
        self._visits: weakref.WeakSet[Visit] = weakref.WeakSet()

    async def close(self) -> None:
        """Wait until everything that was said is stored; what waits for room on the disk is tried once more."""
        if self._trying is not None:
            self._trying.cancel()
        for key in list(self._waiting):
            self._write(key, [])
        await asyncio.gather(*self._writing.values())
        for waiting in self._waiting.values():
            self._lost(len(waiting), "the disk is full")

    # ------------------------------------------------------------------------------------- for an answer

    def visit(self, tenant: str, session_id: str, local_only: bool = False) -> Visit:
        """A request that belongs to a session begins. Raises `InvalidRequest` where none are kept."""
        self._store()
        visit = Visit(tenant, session_id, self._now(), local_only=local_only)
        self._visits.add(visit)
        return visit

    @staticmethod
    def require(visit: Visit | None, owners: Sequence[str] = ()) -> None:
        """Raises `NotFound` for a session that was deleted since, or where one of these `owners` was. Await nothing
        between this and a submit."""
        if visit is not None and (visit.ended or not visit.lost.isdisjoint(owners)):
            raise NotFound(
                "The session, or what memory told of the user, was deleted.", hint="Ask again.", param="session"
            )

    def remember(
        self, visit: Visit, question: str, answer: str, learn: bool, answered: KeptAnswer | None = None
    ) -> None:
        """Store a question and its answer in the background, behind what is still being stored of the session;
        `learn` facts about the user from the question. `answered` says how the answer came about."""
        said = [(USER, question, visit.asked_at), (ASSISTANT, answer, self._now())]
        said = [turn for turn in said if turn[1].strip()]
        self._write((visit.tenant, visit.session_id), [_Exchange(visit, said, learn, answered)])

    async def recall(
        self, tenant: str, session_ids: Sequence[str], own: str | None, query: str, limit: int
    ) -> tuple[SearchResult, list[SessionTurn]]:
        """What the search found, and its turns, best first; where the best few can't answer a question, the set
        that can comes before them. Raises `NotFound` for a session that isn't there, unless it is
        the request's `own`, which begins with it."""
        await self.settled(tenant, session_ids)
        for session_id in session_ids:
            if session_id != own:
                await asyncio.to_thread(self._store().get, tenant, session_id)
        found = await asyncio.to_thread(self._store().search, tenant, session_ids, query, limit)
        turns = {
            (turn.session_id, turn.turn): turn
            for turn in (*found.evidence, *found.hits)
            if isinstance(turn, SessionTurn)
        }
        return found, list(turns.values())

    async def background(
        self, tenant: str, session_id: str, with_profile: bool
    ) -> tuple[list[ProfileFact], list[SummarySentence]]:
        """What is known about the user, if wanted, and the session's summary, the best first."""
        await self.settled(tenant, None if with_profile else [session_id])
        facts = await asyncio.to_thread(self._store().profile, tenant, False) if with_profile else []
        return facts, await asyncio.to_thread(self._store().brief, tenant, session_id)

    async def require_may_leave(self, request: Request) -> None:
        """Raises `KeptHere` where a document or the session of a request is local-only, or all of it is."""
        named = [*request.file_ids, *([request.session_id] if request.session_id is not None else [])]
        kept = await self.kept_here(request.tenant, named)
        if request.local_only or kept:
            what = "This request" if request.local_only else sorted(kept)[0]
            raise KeptHere(
                f"{what} is local-only: nothing of it may leave this machine.",
                hint="Ask a model of this machine, or lift local_only.",
            )

    async def kept_here(self, tenant: str, source_ids: Sequence[str]) -> frozenset[str]:
        """Those of the sessions and files whose text must not leave this machine."""
        if self._kept is None or not source_ids:
            return frozenset()
        return await asyncio.to_thread(self._kept.kept_here, tenant, source_ids)

    # ------------------------------------------------------------------------------------------ the port

    async def mark(self, tenant: str, question: str, span: Span) -> str:
        await self.settled(tenant, [span.source_id])
        return await asyncio.to_thread(self._store().mark, tenant, question, span)

    async def marks(self, tenant: str, limit: int) -> list[Feedback]:
        return await asyncio.to_thread(self._store().marks, tenant, limit)

    async def unmark(self, tenant: str, feedback_id: str) -> None:
        await asyncio.to_thread(self._store().unmark, tenant, feedback_id)

    async def keep_here(self, tenant: str, session_id: str, local_only: bool) -> None:
        await self.settled(tenant, [session_id])
        await asyncio.to_thread(self._store().keep_here, tenant, session_id, local_only)

    async def sessions(self, tenant: str, limit: int, cursor: str | None = None) -> list[SessionInfo]:
        await self.settled(tenant, None)
        return await asyncio.to_thread(self._store().sessions, tenant, limit, cursor)

    async def set_title(self, tenant: str, session_id: str, title: str | None) -> None:
        await self.settled(tenant, [session_id])
        await asyncio.to_thread(self._store().set_title, tenant, session_id, title)

    async def fork(self, tenant: str, session_id: str, turn: int, new_id: str | None) -> SessionInfo:
        """A new session with the turns up to number `turn` of another."""
        await self.settled(tenant, [session_id])
        made = await asyncio.to_thread(self._store().fork, tenant, session_id, turn, new_id)
        return await asyncio.to_thread(self._store().get, tenant, made)

    async def get(self, tenant: str, session_id: str) -> SessionInfo:
        await self.settled(tenant, [session_id])
        return await asyncio.to_thread(self._store().get, tenant, session_id)

    async def turns(self, tenant: str, session_id: str, after: int, limit: int) -> list[SessionTurn]:
        await self.settled(tenant, [session_id])
        return await asyncio.to_thread(self._store().turns, tenant, session_id, after, limit)

    async def answers(
        self, tenant: str, session_id: str, first: int, last: int
    ) -> dict[int, tuple[str, dict[str, Any]]]:
        await self.settled(tenant, [session_id])
        return await asyncio.to_thread(self._store().answers, tenant, session_id, first, last)

    async def search(
        self, tenant: str, session_ids: Sequence[str] | None, query: str, limit: int, times: Times = ANY_TIME
    ) -> SearchResult:
        await self.settled(tenant, session_ids)
        for session_id in session_ids or ():
            await asyncio.to_thread(self._store().get, tenant, session_id)
        return await asyncio.to_thread(self._store().search, tenant, session_ids, query, limit, times)

    async def delete(self, tenant: str, session_id: str) -> None:
        """Delete what is kept of a session, and its KV. Answers under way are not added to it any more."""
        store = self._store()
        visits = [each for each in self._visits if (each.tenant, each.session_id) == (tenant, session_id)]
        for visit in visits:
            visit.ended = True
        await self.settled(tenant, [session_id])
        try:
            await asyncio.to_thread(store.delete, tenant, session_id)
        except NotFound:
            if not visits:  # else nothing of it is stored yet, and nothing will be
                raise
        except BaseException:
            for visit in visits:
                visit.ended = False
            raise
        await self._lose(tenant, session_owner(tenant, session_id))

    async def profile(self, tenant: str, history: bool) -> list[ProfileFact]:
        await self.settled(tenant, None)
        return await asyncio.to_thread(self._store().profile, tenant, history)

    async def edit_profile(self, tenant: str, values: Mapping[str, str | None]) -> None:
        await self.settled(tenant, None)
        await asyncio.to_thread(self._store().edit_profile, tenant, values)
        if None in values.values():
            await self._lose(tenant, profile_owner(tenant))

    async def erase_profile(self, tenant: str, key: str | None) -> int:
        """Delete a key or all of the profile, and KV that was made of it."""
        await self.settled(tenant, None)
        gone = await asyncio.to_thread(self._store().erase_profile, tenant, key)
        await self._lose(tenant, profile_owner(tenant))
        return gone

    async def summary(self, tenant: str, source_id: str) -> list[SummarySentence]:
        await self.settled(tenant, [source_id])
        return await asyncio.to_thread(self._store().summary, tenant, source_id)

    async def correct_summary(self, tenant: str, source_id: str, number: int, start: int, text: str | None) -> None:
        await self.settled(tenant, [source_id])
        await asyncio.to_thread(self._store().correct_summary, tenant, source_id, number, start, text)

    async def export(self, tenant: str) -> Iterator[dict[str, Any]]:
        await self.settled(tenant, None)
        return self._store().export(tenant)

    async def _lose(self, tenant: str, owner: str) -> None:
        """Something was deleted: answers that are being prepared don't use it, and its KV goes."""
        for visit in self._visits:
            if visit.tenant == tenant:
                visit.lost.add(owner)
        await self._forget_kv(owner)

    async def forget_tenant(self, tenant: str) -> None:
        """Delete all that is kept of a tenant, and the KV of its sessions. Answers under way aren't added."""
        store = self._store()
        for visit in [each for each in self._visits if each.tenant == tenant]:
            visit.ended = True
        await self.settled(tenant, None)
        session_ids = await asyncio.to_thread(store.forget_tenant, tenant)
        for owner in [*(session_owner(tenant, each) for each in session_ids), tenant_owner(tenant)]:
            await self._forget_kv(owner)

    async def expire(self, before_s: float) -> int:
        """Delete sessions of every tenant in which nothing was said since; returns how many."""
        found = await asyncio.to_thread(self._store().expired, before_s)
        for tenant, session_id in found:
            await self.delete(tenant, session_id)
        return len(found)

    # ----------------------------------------------------------------------------------------- writing

    def _store(self) -> SessionStore:
        if self._kept is None:
            raise InvalidRequest("No sessions are kept here.", hint="Start `perilune serve`.", param="session")
        return self._kept

    def _write(self, key: tuple[str, str], said: list[_Exchange]) -> None:
        """Begin to store what waits for a session and then this, behind what is being stored."""
        task = asyncio.create_task(self._add(key, said, self._writing.get(key)), name="remember")
        self._writing[key] = task
        task.add_done_callback(lambda done: self._written(key, done))

    async def _add(self, key: tuple[str, str], said: list[_Exchange], earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        left = [*self._waiting.pop(key, []), *said]
        while left:
            each, visit = left[0], left[0].visit
            try:
                if not visit.ended:
                    await asyncio.to_thread(
                        self._store().add, *key, each.said, each.learn, visit.local_only, each.answered
                    )
            except Overloaded as error:
                self._keep(key, left, error)
                return
            except PeriluneError as error:
                self._lost(1, error.message)
            except Exception:
                self._telemetry.count("turns_lost")
                _log.exception("a session's turns could not be stored")
            left = left[1:]

    def _keep(self, key: tuple[str, str], left: list[_Exchange], error: Overloaded) -> None:
        """Hold what the full disk refused, up to a bound, and try again until it is stored."""
        if not self._waiting:
            _log.warning("turns of sessions wait to be stored: %s", error.message)
        self._waiting[key] = left[-MAX_WAITING:]
        self._lost(len(left) - len(self._waiting[key]), error.message)
        if self._trying is None or self._trying.done():
            self._trying = asyncio.create_task(self._try_again(), name="remember again")

    async def _try_again(self) -> None:
        while self._waiting:
            await asyncio.sleep(RETRY_S)
            for key in list(self._waiting):
                self._write(key, [])
            await asyncio.wait(list(self._writing.values()))  # unlike gather, its end doesn't end them

    def _lost(self, count: int, why: str) -> None:
        if count:
            self._telemetry.count("turns_lost", count)
            _log.warning("a session's turns could not be stored: %s", why)

    def _written(self, key: tuple[str, str], done: asyncio.Task[None]) -> None:
        if self._writing.get(key) is done:
            del self._writing[key]

    async def settled(self, tenant: str, session_ids: Sequence[str] | None) -> None:
        """Wait for what is being stored of these sessions; None: of all of the tenant's."""
        tasks = [
            task
            for (owner, session_id), task in self._writing.items()
            if owner == tenant and (session_ids is None or session_id in session_ids)
        ]
        if tasks:
            await asyncio.wait(tasks)
