"""Which entries a search may see: the tenant always, and filters a caller may add.

Plain data and its SQL. `conditions` serves every table that has the columns of `schema.ENTRIES` which are named
here; LanceDB, which takes its filter as text, writes its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa


@dataclass(frozen=True, slots=True)
class Scope:
    """None and empty mean "any". Ranges include both ends; times are seconds since the epoch.

    `sources` are file and session ids, `numbers` are turn or passage numbers within a source, `entities` are names
    as `entities.names` writes them, of which an entry needs one.
    """

    tenant: str
    sources: tuple[str, ...] | None = None
    speakers: tuple[str, ...] = ()
    entities: tuple[str, ...] = ()
    since_s: float | None = None
    until_s: float | None = None
    numbers: tuple[int, int] | None = None
    pages: tuple[int, int] | None = None


def conditions(scope: Scope, table: sa.FromClause) -> list[sa.ColumnElement[bool]]:
    """The scope as SQL conditions, all but its entities (databases keep lists differently)."""
    columns = table.c
    found: list[sa.ColumnElement[bool]] = [columns.tenant == scope.tenant]
    if scope.sources is not None:
        found.append(columns.source_id.in_(scope.sources))
    if scope.speakers:
        found.append(columns.speaker.in_(scope.speakers))
    if scope.since_s is not None:
        found.append(columns.at >= scope.since_s)
    if scope.until_s is not None:
        found.append(columns.at <= scope.until_s)
    if scope.numbers is not None:
        found.append(columns.number.between(*scope.numbers))
    if scope.pages is not None:
        found.append(columns.page.between(*scope.pages))
    return found
