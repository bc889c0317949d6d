"""What a tenant's user said about themselves, across sessions: learnt, shown with its history, edited, erased.

Knows the table of facts and how one statement follows another; reading them from text is `facts`. Every statement
stays, with where and when it was said; what is true now follows from their order, the newest wins. So a value that
was superseded keeps its time, and comes back if what superseded it is forgotten. Facts go with their session
(`entries.remove_source`), by key, or all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from perilune.core import ProfileFact
from perilune.memory.fact_rules import MANY
from perilune.memory.facts import Fact
from perilune.memory.schema import ENTRIES, FACTS

ASSISTANT_TURNS = 64
"""How far back a user's words are compared with the assistant's: what it said is not learnt from whoever
repeats it."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A fact with the turn it comes from; `number` is the turn's place in the session, from 0."""

    fact: Fact
    session_id: str
    number: int
    sentence: str
    at_s: float


def learn(connection: sa.Connection, tenant: str, said: Sequence[Statement]) -> None:
    """Add statements of one session, in order, in the caller's transaction.

    Left out is what is known already, and what the assistant said before: a user who quotes it states nothing."""
    if not said:
        return
    echoes = _assistant_texts(connection, tenant, said[0].session_id)
    for statement in said:
        fact = statement.fact
        if any(statement.sentence in text for text in echoes):
            continue
        same = [
            each for each in current(connection, tenant, fact.key) if each.value.casefold() == fact.value.casefold()
        ]
        if fact.ends:
            if not same:
                continue
        elif any(each.session_id == statement.session_id for each in same):
            continue  # what another session says too is kept, because that one may be forgotten
        _insert(
            connection,
            tenant,
            fact.key,
            fact.value,
            statement.at_s,
            ends=fact.ends,
            source_id=statement.session_id,
            number=statement.number,
            start=fact.start,
            end=fact.end,
            event_at=statement.at_s if fact.since_s is None else fact.since_s,
        )


def write(connection: sa.Connection, tenant: str, key: str, value: str, at_s: float) -> None:
    """Set a key by hand: it supersedes every value that is there."""
    if {each.value for each in current(connection, tenant, key)} != {value}:
        _insert(connection, tenant, key, value, at_s)


def _insert(connection: sa.Connection, tenant: str, key: str, value: str, at_s: float, **more: Any) -> None:
    row = {"ends": False, "event_at": at_s, "written_at": at_s, **more}
    connection.execute(FACTS.insert().values(tenant=tenant, key=key, value=value, **row))


def history(connection: sa.Connection, tenant: str, key: str | None = None) -> list[ProfileFact]:
    """Every value there is or was, with its time; the keys in the order in which they were first written."""
    query = sa.select(FACTS).where(FACTS.c.tenant == tenant)
    if key is not None:
        query = query.where(FACTS.c.key == key)
    rows: dict[str, list[Any]] = defaultdict(list)
    for row in connection.execute(query.order_by(FACTS.c.written_at, FACTS.c.id)):  # a fork's copies come later
        rows[row.key].append(row)
    return [fact for of_key in rows.values() for fact in _in_time(of_key)]


def current(connection: sa.Connection, tenant: str, key: str | None = None) -> list[ProfileFact]:
    """What is true now."""
    return [fact for fact in history(connection, tenant, key) if fact.until is None]


def erase(connection: sa.Connection, tenant: str, key: str | None = None) -> int:
    """Delete every statement of a key, or all; returns how many there were."""
    mine = [FACTS.c.tenant == tenant] + ([FACTS.c.key == key] if key is not None else [])
    return connection.execute(FACTS.delete().where(*mine)).rowcount


def _in_time(rows: Sequence[Any]) -> list[ProfileFact]:
    """One key's statements as values with an end, in the order in which they were written."""
    facts: list[ProfileFact] = []
    open_at: list[int] = []  # places in `facts` of what is true so far
    for row in rows:
        same = [at for at in open_at if facts[at].value.casefold() == row.value.casefold()]
        if row.ends:
            over = same
        elif same and row.source_id is not None:
            continue  # said again
        else:
            over = open_at if row.source_id is None or row.key not in MANY else []
        for at in over:
            facts[at] = _ended(facts[at], row)
        open_at = [at for at in open_at if at not in over]
        if not row.ends:
            open_at.append(len(facts))
            facts.append(_fact(row))
    return facts


def _ended(fact: ProfileFact, by: Any) -> ProfileFact:
    return replace(fact, until=by.event_at if by.event_at > fact.since else by.written_at)


def _fact(row: Any) -> ProfileFact:
    turn = None if row.number is None else row.number + 1
    return ProfileFact(
        row.key, row.value, row.event_at, row.written_at, None, row.source_id, turn, row.start, row.end
    )


def _assistant_texts(connection: sa.Connection, tenant: str, session_id: str) -> list[str]:
    query = sa.select(ENTRIES.c.text).where(
        ENTRIES.c.tenant == tenant, ENTRIES.c.source_id == session_id, ENTRIES.c.speaker == "assistant"
    )
    texts = connection.execute(query.order_by(ENTRIES.c.number.desc()).limit(ASSISTANT_TURNS)).scalars()
    return [text for text in texts if text]
