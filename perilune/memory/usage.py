"""What keys have used, day by day: requests, tokens, cost. What quotas are counted against after a restart.

Knows rows and UTC days; doesn't know limits. A day is named as `2026-11-30`, whatever the clock says now: a clock
that jumps counts elsewhere, and loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from perilune.memory.schema import USAGE
from perilune.memory.store import Store


@dataclass(frozen=True, slots=True)
class Used:
    """What was used in some time."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Used) -> Used:
        return Used(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cost + other.cost,
        )


def day_of(now: float) -> str:
    """The UTC day of `now`, in seconds since the epoch."""
    return time.strftime("%Y-%m-%d", time.gmtime(now))


class UsageStore:
    """Adds up and reads. Thread-safe; calls block on the database."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, used: Mapping[tuple[str, str], Used]) -> None:
        """Add to the rows of (key id, day), in one transaction."""
        with self._store.write() as connection:
            for (key_id, day), more in sorted(used.items()):
                at = sa.and_(USAGE.c.key_id == key_id, USAGE.c.day == day)
                row = connection.execute(sa.select(USAGE).where(at)).first()
                total = more if row is None else _used(row) + more
                values = {
                    "requests": total.requests,
                    "prompt_tokens": total.prompt_tokens,
                    "completion_tokens": total.completion_tokens,
                    "cost": total.cost,
                }
                change = USAGE.insert().values(key_id=key_id, day=day, **values)
                connection.execute(change if row is None else USAGE.update().where(at).values(**values))

    def day(self, key_id: str, day: str) -> Used:
        with self._store.read() as connection:
            row = connection.execute(sa.select(USAGE).where(USAGE.c.key_id == key_id, USAGE.c.day == day)).first()
        return Used() if row is None else _used(row)

    def month(self, key_id: str, month: str) -> Used:
        """The whole of a month, named as `2026-11`."""
        query = sa.select(USAGE).where(
            USAGE.c.key_id == key_id, USAGE.c.day.startswith(f"{month}-", autoescape=True)
        )
        with self._store.read() as connection:
            return sum(map(_used, connection.execute(query)), Used())

    def since(self, day: str | None) -> dict[tuple[str, str], Used]:
        """(key id, day) -> what was used, from `day` on; None: ever."""
        query = sa.select(USAGE) if day is None else sa.select(USAGE).where(USAGE.c.day >= day)
        with self._store.read() as connection:
            return {(row.key_id, row.day): _used(row) for row in connection.execute(query)}


def _used(row: sa.Row[tuple[object, ...]]) -> Used:
    return Used(row.requests, row.prompt_tokens, row.completion_tokens, row.cost)
