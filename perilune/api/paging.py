"""Cursors of OpenAI's lists on the wire: what a query asks for, and the list around a page.

Knows `limit`, `order`, `after` and `before`; not what is listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perilune.api.limits import number_of
from perilune.errors import InvalidRequest
from perilune.memory.paging import Part

MAX_LIMIT = 100
DEFAULT_LIMIT = 20


def part_of(query: Mapping[str, str]) -> Part:
    """Raises `InvalidRequest` for a wrong value."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("Wrong value for order.", hint="Use asc or desc.", param="order")
    limit = number_of(query, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
    return Part(limit, query.get("after"), query.get("before"), order == "desc")


def list_dict(data: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": list(data),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }
