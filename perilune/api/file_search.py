"""The hosted tool `file_search` of OpenAI's Responses: what of it is asked, and the item that tells of it.

Knows the tool's fields and shapes. A search is made once for the newest question, whenever the tool is offered and
`tool_choice` isn't `none`: small models choose badly whether to search.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, ValidationError

from perilune.api.schema import wrong_field
from perilune.api.vector_store_schema import MAX_RESULTS, WireFilter, WireRanking, filter_of
from perilune.api.wire import Wire
from perilune.core import FileSearch, StoreHit
from perilune.errors import InvalidRequest

RESULTS = "file_search_call.results"
TOOL = "file_search"
MAX_STORES = 16

StoreId = Annotated[str, Field(min_length=1, max_length=64)]


class WireFileSearch(Wire):
    """A tool of type `file_search`."""

    vector_store_ids: list[StoreId] = Field(min_length=1, max_length=MAX_STORES)
    filters: WireFilter | None = None
    max_num_results: int | None = Field(None, ge=1, le=MAX_RESULTS)
    ranking_options: WireRanking | None = None


def file_search_of(tools: Sequence[dict[str, Any]], choice: object) -> FileSearch | None:
    """What is searched, of the tools as they came. Raises `InvalidRequest`."""
    asked = [(index, tool) for index, tool in enumerate(tools) if tool.get("type") == TOOL]
    if len(asked) > 1:
        raise InvalidRequest(
            "file_search is offered more than once.", hint="Name all stores in one.", param=f"tools[{asked[1][0]}]"
        )
    if not asked or choice == "none":
        return None
    try:
        wire = WireFileSearch.model_validate(asked[0][1])
    except ValidationError as error:
        raise wrong_field(error) from None
    ranking = wire.ranking_options
    return FileSearch(
        tuple(dict.fromkeys(wire.vector_store_ids)),
        filter_of(wire.filters),
        wire.max_num_results or 20,
        (ranking.score_threshold if ranking is not None else None) or 0.0,
    )


@dataclass(slots=True)
class SearchItem:
    """A file_search_call item; `results` are shown where the request includes them."""

    queries: Sequence[str]
    with_results: bool
    hits: Sequence[StoreHit] = ()
    item_id: str = field(default_factory=lambda: f"fs_{secrets.token_hex(16)}")

    def item(self, status: str) -> dict[str, Any]:
        shown = self.with_results and status not in ("in_progress", "searching")
        return {
            "id": self.item_id,
            "type": "file_search_call",
            "status": status,
            "queries": list(self.queries),
            "results": [_result(hit) for hit in self.hits] if shown else None,
        }


def _result(hit: StoreHit) -> dict[str, Any]:
    """`page`, `start` and `end` are ours."""
    return {
        "file_id": hit.file_id,
        "filename": hit.filename,
        "score": round(hit.score, 6),
        "attributes": dict(hit.attributes),
        "text": hit.text,
        "page": hit.page,
        "start": hit.start,
        "end": hit.end,
    }
