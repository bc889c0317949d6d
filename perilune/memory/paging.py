"""One part of a list by a cursor, as OpenAI's lists are read: what lies behind, or before, the row with an id.

Knows SQL and order: by time, then by id, so that rows of one second have a place too. Doesn't know what the rows
are. A list may be read while it grows: no row is shown twice, and none is left out that was there all the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from perilune.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Part:
    """Up to `limit` rows behind the row with the id `after`, or the last ones before `before`."""

    limit: int = 20
    after: str | None = None
    before: str | None = None
    newest_first: bool = True


def read_part(
    connection: sa.Connection,
    query: sa.Select[Any],
    order: tuple[sa.ColumnElement[Any], sa.ColumnElement[Any]],
    part: Part,
) -> tuple[list[Any], bool]:
    """(rows, whether more follow in the direction of reading) of a query; `order` are its columns of time and id.
    Raises `InvalidRequest` for a cursor that no row of the query has."""
    at, row_id = order
    backwards = part.before is not None and part.after is None
    downwards = part.newest_first != backwards
    for name, cursor in (("after", part.after), ("before", part.before)):
        if cursor is None:
            continue
        here = connection.execute(query.with_only_columns(at.label("at")).where(row_id == cursor)).first()
        if here is None:
            raise InvalidRequest(
                f"Nothing in this list has the id in {name}.", hint="Use last_id or first_id of a page.", param=name
            )
        place, mark = sa.tuple_(at, row_id), sa.tuple_(sa.literal(here.at), sa.literal(cursor))
        smaller = (name == "after") == part.newest_first
        query = query.where(place < mark if smaller else place > mark)
    ordered = (at.desc(), row_id.desc()) if downwards else (at.asc(), row_id.asc())
    rows = list(connection.execute(query.order_by(*ordered).limit(part.limit + 1)))
    more = len(rows) > part.limit
    rows = rows[: part.limit]
    return (rows[::-1] if backwards else rows), more
