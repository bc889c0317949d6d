"""The rows of sessions: how many turns, when, what it is called, and what it was forked from.

Knows the table and copying; every function works in its caller's transaction. The counts are kept with each turn,
so that a list of sessions reads no turns but the first ones.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from perilune.core import SessionInfo
from perilune.errors import Conflict, InvalidRequest, NotFound
from perilune.memory import entries
from perilune.memory.locality import set_local_only
from perilune.memory.schema import (
    ANSWERS,
    CORRECTIONS,
    ENTRIES,
    FACTS,
    FEEDBACK,
    INDEX_WORK,
    LOCAL_ONLY,
    SESSIONS,
    SUMMARIES,
    SUMMARY_WORK,
    VECTORS,
)
from perilune.memory.summaries import FAN_OUT, LEAF_ENTRIES

MAX_FORK_TURNS = 20_000
"""A fork is one transaction, and nobody else can write meanwhile."""

MAX_TITLE_CHARS = 200
_SHOWN_CHARS = 80
_READ_CHARS = 400
_ID_BYTES = 12

_FIRST_TEXT = (
    sa.select(sa.func.substr(ENTRIES.c.text, 1, _READ_CHARS))
    .where(
        ENTRIES.c.tenant == SESSIONS.c.tenant, ENTRIES.c.source_id == SESSIONS.c.source_id, ENTRIES.c.number == 0
    )
    .correlate(SESSIONS)
    .scalar_subquery()
)
_LOCAL = sa.exists().where(LOCAL_ONLY.c.tenant == SESSIONS.c.tenant, LOCAL_ONLY.c.source_id == SESSIONS.c.source_id)
_QUERY = sa.select(SESSIONS, _FIRST_TEXT.label("first_text"), _LOCAL.label("local_only"))


def add_turns(connection: sa.Connection, tenant: str, session_id: str, times_s: Sequence[float]) -> None:
    """Count turns that were said at these seconds since the epoch; the session begins with its first."""
    if not times_s:
        return
    statement = (
        "INSERT INTO sessions (tenant, source_id, created_at, updated_at, turns) "
        "VALUES (:tenant, :source_id, :first, :last, :turns) ON CONFLICT (tenant, source_id) DO UPDATE SET "
        "turns = sessions.turns + excluded.turns, updated_at = excluded.updated_at"
    )
    row = {"tenant": tenant, "source_id": session_id, "turns": len(times_s)}
    connection.execute(sa.text(statement), {**row, "first": min(times_s), "last": max(times_s)})


def get(connection: sa.Connection, tenant: str, session_id: str) -> SessionInfo:
    """Raises `NotFound`, for another tenant's session too."""
    row = connection.execute(_QUERY.where(*_mine(tenant, session_id))).first()
    if row is None:
        raise NotFound("There is no such session.", hint="GET /v1/sessions lists yours.", param="session")
    return _shown(row)


def part(connection: sa.Connection, tenant: str, limit: int, cursor: str | None) -> list[SessionInfo]:
    """Up to `limit` sessions behind the one that `cursor_of` was made of, that with the newest turn first. Raises
    `InvalidRequest` for what is no cursor."""
    query = _QUERY.where(SESSIONS.c.tenant == tenant)
    if cursor is not None:
        at, session_id = _place_of(cursor)
        same = sa.and_(SESSIONS.c.updated_at == at, SESSIONS.c.source_id > session_id)
        query = query.where(sa.or_(SESSIONS.c.updated_at < at, same))
    query = query.order_by(SESSIONS.c.updated_at.desc(), SESSIONS.c.source_id).limit(limit)
    return [_shown(row) for row in connection.execute(query)]


def cursor_of(info: SessionInfo) -> str:
    """Where a list goes on behind a session, whatever happens to the session meanwhile."""
    return base64.urlsafe_b64encode(f"{info.last_at!r} {info.session_id}".encode()).decode()


def set_title(connection: sa.Connection, tenant: str, session_id: str, title: str | None) -> None:
    """Call a session by a name, or again by its first question. Raises `NotFound`, `InvalidRequest`."""
    wanted = None if title is None else title.strip()
    if wanted is not None and not (0 < len(wanted) <= MAX_TITLE_CHARS and wanted.isprintable()):
        raise InvalidRequest(
            f"A title has 1 to {MAX_TITLE_CHARS} printable characters.", hint="null takes it away.", param="title"
        )
    changed = connection.execute(SESSIONS.update().where(*_mine(tenant, session_id)).values(title=wanted))
    if changed.rowcount == 0:
        get(connection, tenant, session_id)


def expired(connection: sa.Connection, before_s: float) -> list[tuple[str, str]]:
    """(tenant, session) of every session without a turn since that time."""
    query = sa.select(SESSIONS.c.tenant, SESSIONS.c.source_id).where(SESSIONS.c.updated_at < before_s)
    return [(row.tenant, row.source_id) for row in connection.execute(query)]


def orphan(connection: sa.Connection, tenant: str, session_id: str) -> None:
    """A session is deleted: what was forked from it doesn't name it any more."""
    named = (SESSIONS.c.tenant == tenant, SESSIONS.c.parent_id == session_id)
    connection.execute(SESSIONS.update().where(*named).values(parent_id=None, parent_turn=None))


# ----------------------------------------------------------------------------------------------------- forking


def fork(
    connection: sa.Connection, tenant: str, session_id: str, turn: int, new_id: str | None, now_s: float
) -> str:
    """Begin a session with the turns up to number `turn` of another; returns its id.

    It has its own rows of everything that is made of them or said about them (vectors, summary, corrections, facts,
    feedback), so that either can be deleted without the other. Raises `NotFound`, `Conflict` for an id that is
    taken, `InvalidRequest` for more turns than there are or than can be copied."""
    parent = get(connection, tenant, session_id)
    if turn > parent.turns:
        raise InvalidRequest(
            f"The session has {parent.turns} turns.", hint=f"Fork at 0 to {parent.turns}.", param="turn"
        )
    if turn > MAX_FORK_TURNS:
        raise InvalidRequest(f"At most {MAX_FORK_TURNS:,} turns can be forked.", hint="Fork earlier.", param="turn")
    new_id = new_id or f"fork-{secrets.token_hex(_ID_BYTES)}"
    if connection.execute(_QUERY.where(*_mine(tenant, new_id))).first() is not None:
        raise Conflict(f"There is a session {new_id} already.", hint="Choose another id.", param="id")
    title = sa.select(SESSIONS.c.title).where(*_mine(tenant, session_id)).scalar_subquery()
    connection.execute(
        SESSIONS.insert().values(
            tenant=tenant,
            source_id=new_id,
            created_at=now_s,
            updated_at=now_s,
            turns=turn,
            title=title,
            parent_id=session_id,
            parent_turn=turn,
        )
    )
    if parent.local_only:
        set_local_only(connection, tenant, new_id, True)
    _copy_entries(connection, tenant, session_id, new_id, turn)
    _copy_summary(connection, tenant, session_id, new_id, turn)
    for table, column in ((CORRECTIONS, CORRECTIONS.c.number), (FACTS, FACTS.c.number)):
        _copy(connection, table, tenant, session_id, new_id, column < turn)
    _copy_named(connection, FEEDBACK, tenant, session_id, new_id, FEEDBACK.c.last < turn)
    _copy_named(connection, ANSWERS, tenant, session_id, new_id, ANSWERS.c.number < turn)
    return new_id


def _copy_entries(connection: sa.Connection, tenant: str, old_id: str, new_id: str, turn: int) -> None:
    _copy(connection, ENTRIES, tenant, old_id, new_id, ENTRIES.c.number < turn, order=ENTRIES.c.number)
    mine = (ENTRIES.c.tenant == tenant, ENTRIES.c.source_id == new_id)
    for task in ("text", "vector"):
        rows = sa.select(ENTRIES.c.id, sa.literal(task)).where(*mine)
        connection.execute(INDEX_WORK.insert().from_select(["entry_id", "task"], rows))
    old, new = ENTRIES.alias("old"), ENTRIES.alias("new")
    same = sa.and_(new.c.tenant == old.c.tenant, new.c.source_id == new_id, new.c.number == old.c.number)
    vectors = (
        sa.select(new.c.id, VECTORS.c.model, VECTORS.c.vector)
        .select_from(old.join(new, same).join(VECTORS, VECTORS.c.entry_id == old.c.id))
        .where(old.c.tenant == tenant, old.c.source_id == old_id)
    )
    connection.execute(VECTORS.insert().from_select(["entry_id", "model", "vector"], vectors))
    entries.count_source(connection, tenant, new_id)


def _copy_summary(connection: sa.Connection, tenant: str, old_id: str, new_id: str, turn: int) -> None:
    """The whole nodes within the turns that were copied; what lies behind them is summarised as in any session."""
    query = sa.select(SUMMARY_WORK.c.done).where(
        SUMMARY_WORK.c.tenant == tenant, SUMMARY_WORK.c.source_id == old_id
    )
    done = min(int(connection.execute(query).scalar() or 0), turn // LEAF_ENTRIES * LEAF_ENTRIES)
    if turn:
        row = {"tenant": tenant, "source_id": new_id, "entries": turn, "done": done}
        connection.execute(SUMMARY_WORK.insert().values(row))
    level, size = 0, LEAF_ENTRIES
    while size <= done:
        whole = sa.and_(SUMMARIES.c.level == level, SUMMARIES.c.number < done // size)
        _copy(connection, SUMMARIES, tenant, old_id, new_id, whole)
        level, size = level + 1, size * FAN_OUT


def _copy_named(
    connection: sa.Connection,
    table: sa.Table,
    tenant: str,
    old_id: str,
    new_id: str,
    condition: sa.ColumnElement[bool],
) -> None:
    """Rows of a table whose ids are names: the copies get new ones."""
    mine = (table.c.tenant == tenant, table.c.source_id == old_id)
    rows = connection.execute(sa.select(table).where(*mine, condition)).mappings().all()
    copies = [{**row, "id": secrets.token_hex(_ID_BYTES), "source_id": new_id} for row in rows]
    if copies:
        connection.execute(table.insert(), copies)


def _copy(
    connection: sa.Connection,
    table: sa.Table,
    tenant: str,
    old_id: str,
    new_id: str,
    condition: sa.ColumnElement[bool],
    order: sa.ColumnElement[Any] | None = None,
) -> None:
    """A source's rows as another's, with ids of their own where a table counts them."""
    columns = [column for column in table.c if column.name != "id"]
    taken = [sa.literal(new_id) if column.name == "source_id" else column for column in columns]
    query = sa.select(*taken).where(table.c.tenant == tenant, table.c.source_id == old_id, condition)
    if order is not None:
        query = query.order_by(order)
    elif "id" in table.c:
        query = query.order_by(table.c.id)
    connection.execute(table.insert().from_select([column.name for column in columns], query))


# ----------------------------------------------------------------------------------------------------- reading


def _mine(tenant: str, session_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return SESSIONS.c.tenant == tenant, SESSIONS.c.source_id == session_id


def _shown(row: Any) -> SessionInfo:
    return SessionInfo(
        row.source_id,
        row.turns,
        row.created_at,
        row.updated_at,
        row.title or _beginning(row.first_text or ""),
        row.parent_id,
        row.parent_turn,
        row.local_only,
    )


def _beginning(text: str) -> str | None:
    """The beginning of a first question, on one line; None where there is nothing to show."""
    words = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    if not words:
        return None
    return words if len(words) <= _SHOWN_CHARS else words[: _SHOWN_CHARS - 1].rstrip() + "…"


def _place_of(cursor: str) -> tuple[float, str]:
    try:
        at, _, session_id = base64.urlsafe_b64decode(cursor.encode()).decode().partition(" ")
        return float(at), session_id
    except ValueError:  # binascii.Error and UnicodeError are such
        raise InvalidRequest("The cursor is none.", hint="Use next_cursor of a page.", param="cursor") from None
