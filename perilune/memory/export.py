"""Everything that is kept about a tenant's user, as records: the profile with its history, sessions, turns,
corrections and the list of files.

Knows the tables, not the wire. Reads a little at a time, each part in a transaction of its own, so that a large
export holds up nobody; what is said meanwhile may or may not be in it. Files' bytes are fetched as files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from perilune.memory import profile
from perilune.memory.schema import CORRECTIONS, ENTRIES, FILES
from perilune.memory.store import Store

BATCH = 500

Record = dict[str, Any]


def records(store: Store, tenant: str) -> Iterator[Record]:
    """One record a thing, each with its `type`."""
    with store.read() as connection:
        facts = profile.history(connection, tenant)
        corrections = connection.execute(sa.select(CORRECTIONS).where(CORRECTIONS.c.tenant == tenant)).all()
        files = connection.execute(
            sa.select(FILES).where(FILES.c.tenant == tenant).order_by(FILES.c.created_at)
        ).all()
    for fact in facts:
        yield {"type": "profile.fact", **asdict(fact)}
    for row in corrections:
        yield {
            "type": "summary.correction",
            "source": row.source_id,
            "entry": row.number,
            "start": row.start,
            "end": row.end,
            "text": row.text,
            "written_at": row.written_at,
        }
    for row in files:
        yield {
            "type": "file",
            "id": row.id,
            "filename": row.filename,
            "bytes": row.size_bytes,
            "sha256": row.sha256,
            "created_at": row.created_at,
            "status": row.status,
        }
    yield from _turns(store, tenant)


def _turns(store: Store, tenant: str) -> Iterator[Record]:
    """Session by session, in order."""
    columns = [ENTRIES.c[name] for name in ("source_id", "number", "speaker", "at", "text")]
    last = ("", -1)
    while True:
        behind = sa.or_(
            ENTRIES.c.source_id > last[0], sa.and_(ENTRIES.c.source_id == last[0], ENTRIES.c.number > last[1])
        )
        query = sa.select(*columns).where(ENTRIES.c.tenant == tenant, ENTRIES.c.page.is_(None), behind)
        with store.read() as connection:
            rows = connection.execute(query.order_by(ENTRIES.c.source_id, ENTRIES.c.number).limit(BATCH)).all()
        for row in rows:
            yield {
                "type": "turn",
                "session": row.source_id,
                "turn": row.number + 1,
                "speaker": row.speaker,
                "at": row.at,
                "text": row.text,
            }
        if len(rows) < BATCH:
            return
        last = (rows[-1].source_id, rows[-1].number)
