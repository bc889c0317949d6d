"""Who made or ended keys and deleted files, when, and how it ended. Rows are added, never changed.

Knows the table and who acts now. An entry is written in the transaction of the change it tells of, so that neither
exists without the other. Holds ids only: no key, no file name, no text.
"""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa

from perilune.memory.schema import AUDIT
from perilune.memory.store import Store

Action = Literal[
    "key.create",
    "key.revoke",
    "key.limits",
    "file.delete",
    "session.delete",
    "response.delete",
    "vector_store.delete",
    "conversation.delete",
    "profile.erase",
    "tenant.forget",
]
Outcome = Literal["done", "unchanged", "not_found"]

_ACTOR_CHARS, _SUBJECT_CHARS = 128, 64
_actor: ContextVar[str | None] = ContextVar("actor", default=None)  # follows a request through tasks and threads


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One act. `at` is seconds since the epoch; `subject` is a key's or a file's id or a session's label, `tenant`
    whose it is."""

    at: float
    actor: str
    action: str
    tenant: str
    subject: str
    outcome: str


@contextmanager
def acting(actor: str) -> Iterator[None]:
    """What is done inside, also in tasks and threads started there, is this actor's."""
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)


def write(
    connection: sa.Connection, at: float, action: Action, tenant: str, subject: str, outcome: Outcome = "done"
) -> None:
    """Add an entry to the caller's transaction. Outside `acting` the actor is the process's own user."""
    values = {
        "at": at,
        "actor": (_actor.get() or _this_user())[:_ACTOR_CHARS],
        "action": action,
        "tenant": tenant,
        "subject": subject[:_SUBJECT_CHARS],
        "outcome": outcome,
    }
    connection.execute(AUDIT.insert().values(**values))


def read(store: Store, limit: int) -> list[AuditEntry]:
    """The newest `limit` entries, oldest first."""
    query = sa.select(AUDIT).order_by(AUDIT.c.id.desc()).limit(limit)
    with store.read() as connection:
        rows = connection.execute(query).all()
    return [
        AuditEntry(row.at, row.actor, row.action, row.tenant, row.subject, row.outcome) for row in reversed(rows)
    ]


def _this_user() -> str:
    try:
        return f"user:{getpass.getuser()}"
    except (KeyError, OSError):  # a container's user id without an entry in passwd
        import os

        return f"user:{os.getuid()}"
