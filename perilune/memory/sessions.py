"""Sessions as the service asks for them (`service.ports.SessionStore`): kept, listed, read, searched, deleted;
and what is made of them: summaries and the user's profile.

Knows the rows of sessions and the search over them; not requests, prompts or HTTP. Every call is bound to a tenant
in SQL. Turns count from 1 here and from 0 in the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from perilune.core import (
    ANY_TIME,
    Feedback,
    KeptAnswer,
    Passage,
    ProfileFact,
    SearchResult,
    SessionInfo,
    SessionTurn,
    Span,
    SummarySentence,
    Times,
)
from perilune.errors import InvalidRequest, NotFound
from perilune.memory import answers, audit, entries, export, profile, session_rows
from perilune.memory.facts import MAX_KEY_CHARS, MAX_VALUE_CHARS, normal_key
from perilune.memory.keys import validate_tenant
from perilune.memory.memory import Memory, Turn
from perilune.memory.retrieve import Hit
from perilune.memory.schema import ENTRIES, SESSIONS
from perilune.memory.scope import Scope
from perilune.memory.session_ids import SESSION_ID_FORM, is_session_id, session_owner
from perilune.memory.store import Store

_OF_SESSION = ENTRIES.c.page.is_(None)  # a passage of a file has a page


class Sessions:
    """Implements `service.ports.SessionStore`. Thread-safe; calls block for milliseconds."""

    def __init__(self, store: Store, memory: Memory, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._memory = memory
        self._clock = clock

    def add(
        self,
        tenant: str,
        session_id: str,
        said: Sequence[tuple[str, str, float]],
        learn: bool = False,
        local_only: bool = False,
        answer: KeptAnswer | None = None,
    ) -> int:
        """Append what was said, as (speaker, text, seconds since the epoch); returns the number of the first turn.
        `learn` facts for the profile from what the user says; `local_only` keeps the session on this machine from
        now on; `answer` says how the answer came about. Raises `InvalidRequest` for a bad id."""
        turns = [Turn(speaker, text, at) for speaker, text, at in said]
        return self._memory.add_turns(tenant, session_id, turns, learn, local_only, answer) + 1

    def mark(self, tenant: str, question: str, span: Span) -> str:
        """Remember where a question's answer is, so that it is found when that is asked again; returns the mark's
        id. Raises `NotFound` for a span that isn't there."""
        return self._memory.marks.add(tenant, question, span)

    def marks(self, tenant: str, limit: int) -> list[Feedback]:
        """The newest marks first."""
        return self._memory.marks.recent(tenant, limit)

    def unmark(self, tenant: str, feedback_id: str) -> None:
        """Raises `NotFound`."""
        self._memory.marks.delete(tenant, feedback_id)
        self._memory.changed()

    def kept_here(self, tenant: str, source_ids: Sequence[str]) -> frozenset[str]:
        """Those of the sessions and files whose text must not leave this machine."""
        return self._memory.locality.kept(tenant, source_ids)

    def keep_here(self, tenant: str, session_id: str, local_only: bool) -> None:
        """Keep a session's text on this machine, or let it go again. Raises `NotFound`."""
        self.get(tenant, session_id)
        self._memory.locality.mark(tenant, session_id, local_only)
        self._memory.changed()

    def sessions(self, tenant: str, limit: int, cursor: str | None = None) -> list[SessionInfo]:
        """The tenant's sessions, the one with the newest turn first; behind a `cursor`, where one is given."""
        with self._store.read() as connection:
            return session_rows.part(connection, tenant, limit, cursor)

    def get(self, tenant: str, session_id: str) -> SessionInfo:
        """Raises `NotFound`, for another tenant's session too."""
        with self._store.read() as connection:
            return session_rows.get(connection, tenant, session_id)

    def set_title(self, tenant: str, session_id: str, title: str | None) -> None:
        """See `session_rows.set_title`."""
        with self._store.write() as connection:
            session_rows.set_title(connection, tenant, session_id, title)

    def fork(self, tenant: str, session_id: str, turn: int, new_id: str | None) -> str:
        """See `session_rows.fork`. Raises `InvalidRequest` for a bad id, too."""
        if new_id is not None and not is_session_id(new_id):
            raise InvalidRequest(f"A session id {SESSION_ID_FORM}.", param="id")
        with self._store.write() as connection:
            made = session_rows.fork(connection, tenant, session_id, turn, new_id, self._clock())
        self._memory.changed()
        return made

    def turns(self, tenant: str, session_id: str, after: int, limit: int) -> list[SessionTurn]:
        """Turns behind number `after`, in order. Raises `NotFound`."""
        columns = [ENTRIES.c[name] for name in ("source_id", "number", "speaker", "text", "at")]
        mine = (ENTRIES.c.tenant == tenant, ENTRIES.c.source_id == session_id, ENTRIES.c.number >= after)
        query = sa.select(*columns).where(*mine, _OF_SESSION).order_by(ENTRIES.c.number).limit(limit)
        with self._store.read() as connection:
            session_rows.get(connection, tenant, session_id)
            rows = connection.execute(query).all()
        return [SessionTurn(row.source_id, row.number + 1, row.speaker or "", row.text, row.at) for row in rows]

    def answers(self, tenant: str, session_id: str, first: int, last: int) -> dict[int, tuple[str, dict[str, Any]]]:
        """(id, how it came about) of the answers to the questions from turn `first` to `last`, by their turns."""
        with self._store.read() as connection:
            found = answers.read(connection, tenant, session_id, first - 1, last - 1)
        return {number + 1: answer for number, answer in found.items()}

    def search(
        self, tenant: str, session_ids: Sequence[str] | None, query: str, limit: int, times: Times = ANY_TIME
    ) -> SearchResult:
        """The best turns of these sessions; None: of all sessions, and passages of all files. Of a range of times
        there are turns only: passages have none."""
        sources = None if session_ids is None else tuple(session_ids)
        scope = Scope(tenant, sources=sources, since_s=times.since_s, until_s=times.until_s)
        found = self._memory.search(query, scope, limit)
        return SearchResult(
            _once(map(_shown, found.hits)),
            found.kind.value,
            _once(map(_shown, found.evidence)),
            found.confidence if found.measured else None,
            found.doubtful,
            found.missing,
        )

    def expired(self, before_s: float) -> list[tuple[str, str]]:
        """(tenant, session) of every session whose last turn was said before that time."""
        with self._store.read() as connection:
            return session_rows.expired(connection, before_s)

    def forget_tenant(self, tenant: str) -> list[str]:
        """Remove all that is kept of a tenant but its keys and the audit; returns its sessions' ids. Files'
        bytes are the library's."""
        with self._store.write() as connection:
            mine = sa.select(SESSIONS.c.source_id).where(SESSIONS.c.tenant == tenant)
            ids = connection.execute(mine).scalars().all()
            entries.remove_tenant(connection, tenant)
            audit.write(connection, self._clock(), "tenant.forget", tenant, tenant)
        self._memory.changed()
        return list(ids)

    def delete(self, tenant: str, session_id: str) -> None:
        """Remove the session's turns, their vectors and what the index knows of them. Raises `NotFound`."""
        with self._store.write() as connection:
            session_rows.get(connection, tenant, session_id)
            entries.remove_source(connection, tenant, session_id)
            session_rows.orphan(connection, tenant, session_id)
            audit.write(connection, self._clock(), "session.delete", tenant, session_owner(tenant, session_id))
        self._memory.changed()

    # ------------------------------------------------------------------------------------- profile and summaries

    def profile(self, tenant: str, history: bool) -> list[ProfileFact]:
        """What is known about the user, in the order in which it was learnt; `history` adds what was true
        before."""
        with self._store.read() as connection:
            return (profile.history if history else profile.current)(connection, tenant)

    def edit_profile(self, tenant: str, values: Mapping[str, str | None]) -> None:
        """Set keys by hand; None erases one. All or nothing. Raises `InvalidRequest` for an empty or long one."""
        validate_tenant(tenant)
        changes = {normal_key(key): value for key, value in values.items()}
        for key, value in values.items():
            if not key.strip() or len(key) > MAX_KEY_CHARS or not key.isprintable():
                raise InvalidRequest(f"A key has 1 to {MAX_KEY_CHARS} printable characters.", param="facts")
            if value is not None and (not value.strip() or len(value) > MAX_VALUE_CHARS or not value.isprintable()):
                raise InvalidRequest(
                    f"A value has 1 to {MAX_VALUE_CHARS} printable characters.",
                    hint="null erases a key.",
                    param="facts",
                )
        with self._store.write() as connection:
            for key, value in changes.items():
                if value is None:
                    profile.erase(connection, tenant, key)
                    audit.write(connection, self._clock(), "profile.erase", tenant, key)
                else:
                    profile.write(connection, tenant, key, value.strip(), self._clock())
            if None in changes.values():
                entries.owe_purge(connection)
        self._memory.changed()

    def erase_profile(self, tenant: str, key: str | None) -> int:
        """Delete a key with its history, or everything; returns how many statements that were. Raises
        `NotFound` for a key that isn't there."""
        with self._store.write() as connection:
            gone = profile.erase(connection, tenant, None if key is None else normal_key(key))
            if key is not None and not gone:
                raise NotFound(
                    "The profile has no such key.", hint="`perilune memory show` lists them.", param="key"
                )
            audit.write(connection, self._clock(), "profile.erase", tenant, "" if key is None else normal_key(key))
            entries.owe_purge(connection)
        self._memory.changed()
        return gone

    def summary(self, tenant: str, source_id: str) -> list[SummarySentence]:
        """The whole rolling summary of a session or file, in order. Raises `NotFound`."""
        return self._memory.summaries.read(tenant, source_id)

    def brief(self, tenant: str, session_id: str) -> list[SummarySentence]:
        """A session's summary for a prompt: the best first. Empty where there is none."""
        return self._memory.summaries.best_first(tenant, session_id)

    def correct_summary(self, tenant: str, source_id: str, number: int, start: int, text: str | None) -> None:
        """See `Summaries.correct`."""
        self._memory.summaries.correct(tenant, source_id, number, start, text)

    def export(self, tenant: str) -> Iterator[dict[str, Any]]:
        """See `export.records`."""
        return export.records(self._store, tenant)


def _once(found: Iterable[SessionTurn | Passage]) -> tuple[SessionTurn | Passage, ...]:
    """Without the copies of turns that forks have: who said the same at the same time said it once."""
    kept: dict[object, SessionTurn | Passage] = {}
    for each in found:
        kept.setdefault((each.speaker, each.at, each.text) if isinstance(each, SessionTurn) else each, each)
    return tuple(kept.values())


def _shown(hit: Hit) -> SessionTurn | Passage:
    if hit.page is None:
        return SessionTurn(hit.source_id, hit.number + 1, hit.speaker or "", hit.text, hit.at, hit.score)
    return Passage(hit.source_id, hit.page, hit.start or 0, hit.end or 0, hit.text, hit.score)
