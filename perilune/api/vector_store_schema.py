"""Vector stores on the wire: bodies that are sent, objects that are shown. OpenAI's shapes.

Knows the dialect. What can't be honoured is refused: chunks of a given size (one index serves every search),
weights of words and meaning. `ranker` and `rewrite_query` change nothing: there is one ranking, and it knows
synonyms and times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from perilune.api.errors import Unsupported
from perilune.api.wire import Wire
from perilune.core import (
    AttributeCombination,
    AttributeComparison,
    AttributeFilter,
    AttributeValue,
    StoreHit,
)
from perilune.errors import InvalidRequest
from perilune.memory.vector_stores import FileCounts, NewStoreFile, StoreBatch, StoreFile, VectorStore

MAX_BATCH_FILES = 2_000
MAX_RESULTS = 50
MAX_QUERIES = 16
MAX_CONDITIONS = 64
MAX_FILTER_DEPTH = 8

Key = Annotated[str, Field(min_length=1, max_length=64)]
ShortText = Annotated[str, Field(max_length=512)]
Value = StrictBool | StrictInt | StrictFloat | ShortText
Metadata = Annotated[dict[Key, ShortText], Field(max_length=16)]
FileId = Annotated[str, Field(min_length=1, max_length=128)]
WireAttributes = Annotated[dict[Key, Value], Field(max_length=16)]


class WireExpiry(Wire):
    anchor: Literal["last_active_at"]
    days: int = Field(ge=1, le=365)


class WireChunking(Wire):
    type: str = Field(max_length=64)


def _automatic(chunking: WireChunking | None) -> WireChunking | None:
    if chunking is not None and chunking.type != "auto":
        raise Unsupported(
            "Chunks of a given size aren't supported: one index serves every search, and its passages end where "
            "paragraphs and sentences do.",
            hint='Leave chunking_strategy out, or send {"type": "auto"}.',
            param="chunking_strategy",
        )
    return chunking


Chunking = Annotated[WireChunking | None, AfterValidator(_automatic)]


class WireNewStore(Wire):
    """The body of POST /v1/vector_stores."""

    name: str | None = Field(None, max_length=256)
    description: ShortText | None = None
    file_ids: Annotated[list[FileId], Field(max_length=MAX_BATCH_FILES)] | None = None
    expires_after: WireExpiry | None = None
    chunking_strategy: Chunking = None
    metadata: Metadata | None = None


class WireStoreChanges(Wire):
    """The body of POST /v1/vector_stores/{id}; what isn't there stays."""

    name: str | None = Field(None, max_length=256)
    expires_after: WireExpiry | None = None
    metadata: Metadata | None = None


class WireStoreFile(Wire):
    """The body of POST …/files."""

    file_id: FileId
    attributes: WireAttributes | None = None
    chunking_strategy: Chunking = None

    def new(self) -> NewStoreFile:
        return NewStoreFile(self.file_id, self.attributes or {})


class WireFileChanges(Wire):
    attributes: WireAttributes | None


class WireFileBatch(Wire):
    """The body of POST …/file_batches: `file_ids`, which share attributes, or `files`."""

    file_ids: Annotated[list[FileId], Field(min_length=1, max_length=MAX_BATCH_FILES)] | None = None
    files: Annotated[list[WireStoreFile], Field(min_length=1, max_length=MAX_BATCH_FILES)] | None = None
    attributes: WireAttributes | None = None
    chunking_strategy: Chunking = None

    def new(self) -> list[NewStoreFile]:
        """Raises `InvalidRequest` unless there is one of both lists."""
        if (self.file_ids is None) == (self.files is None):
            raise InvalidRequest("Give file_ids or files, one of them.", param="file_ids")
        if self.files is not None:
            return [file.new() for file in self.files]
        return [NewStoreFile(file_id, self.attributes or {}) for file_id in self.file_ids or ()]


class WireHybrid(Wire):
    embedding_weight: float | None = None
    text_weight: float | None = None


def _no_weights(weights: WireHybrid | None) -> WireHybrid | None:
    if weights is not None:
        raise Unsupported(
            "The weights of words and meaning can't be set.",
            hint="Leave hybrid_search out: every search has the same weights.",
            param="ranking_options.hybrid_search",
        )
    return weights


class WireRanking(Wire):
    ranker: Literal["none", "auto", "default-2024-11-15", "default_2024_08_21"] | None = None
    score_threshold: float | None = Field(None, ge=0, le=1)
    hybrid_search: Annotated[WireHybrid | None, AfterValidator(_no_weights)] = None


class WireFilter(Wire):
    """A comparison, or a combination of filters; which fields count depends on `type`."""

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "and", "or"]
    key: Key | None = None
    value: Value | Annotated[list[Value], Field(max_length=256)] | None = None
    filters: Annotated[list[WireFilter], Field(min_length=1, max_length=MAX_CONDITIONS)] | None = None


Query = Annotated[StrictStr, Field(min_length=1, max_length=8_000)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class WireSearch(Wire):
    """The body of POST …/search."""

    query: Annotated[
        list[Query],
        BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
        Field(min_length=1, max_length=MAX_QUERIES),
    ]
    filters: WireFilter | None = None
    max_num_results: int = Field(10, ge=1, le=MAX_RESULTS)
    ranking_options: WireRanking | None = None
    rewrite_query: bool | None = None


def filter_of(wire: WireFilter | None) -> AttributeFilter | None:
    """Raises `InvalidRequest` for one that is incomplete, too deep or too long."""
    if wire is None:
        return None
    if sum(1 for _ in _nodes(wire, 0)) > MAX_CONDITIONS:
        raise _bad_filter(f"has more than {MAX_CONDITIONS} conditions")
    return _filter(wire)


def _nodes(wire: WireFilter, depth: int) -> Iterator[WireFilter]:
    if depth == MAX_FILTER_DEPTH:
        raise _bad_filter(f"is nested more than {MAX_FILTER_DEPTH} deep")
    yield wire
    for each in wire.filters or ():
        yield from _nodes(each, depth + 1)


def _filter(wire: WireFilter) -> AttributeFilter:
    if wire.type in ("and", "or"):
        if wire.filters is None:
            raise _bad_filter(f"of type {wire.type} has no filters")
        return AttributeCombination(wire.type, tuple(_filter(each) for each in wire.filters))
    among = wire.type in ("in", "nin")
    if wire.key is None or wire.value is None or isinstance(wire.value, list) is not among:
        raise _bad_filter(f"of type {wire.type} needs a key and {'a list of values' if among else 'one value'}")
    value: AttributeValue | tuple[AttributeValue, ...]
    value = tuple(wire.value) if isinstance(wire.value, list) else wire.value
    return AttributeComparison(wire.key, wire.type, value)  # type: ignore[arg-type]


def _bad_filter(what: str) -> InvalidRequest:
    return InvalidRequest(f"A filter {what}.", param="filters")


# ------------------------------------------------------------------------------------------------------ objects


def store_dict(store: VectorStore, now_s: float) -> dict[str, Any]:
    expires = store.expires_at
    status = "in_progress" if store.counts.in_progress else "completed"
    return {
        "id": store.store_id,
        "object": "vector_store",
        "created_at": int(store.created_at),
        "name": store.name,
        "description": store.description,
        "usage_bytes": store.usage_bytes,
        "file_counts": counts_dict(store.counts),
        "status": "expired" if expires is not None and now_s >= expires else status,
        "expires_after": None
        if store.expires_days is None
        else {"anchor": "last_active_at", "days": store.expires_days},
        "expires_at": None if expires is None else int(expires),
        "last_active_at": int(store.last_active_at),
        "metadata": dict(store.metadata),
    }


def counts_dict(counts: FileCounts) -> dict[str, int]:
    return {
        "in_progress": counts.in_progress,
        "completed": counts.completed,
        "failed": counts.failed,
        "cancelled": counts.cancelled,
        "total": counts.total,
    }


def file_dict(file: StoreFile) -> dict[str, Any]:
    """`chunking_strategy` is `other`: passages end where paragraphs and sentences do."""
    error = {"code": "invalid_file", "message": file.error} if file.error is not None else None
    return {
        "id": file.file_id,
        "object": "vector_store.file",
        "created_at": int(file.created_at),
        "vector_store_id": file.store_id,
        "status": file.state,
        "last_error": error,
        "usage_bytes": file.usage_bytes,
        "attributes": dict(file.attributes),
        "chunking_strategy": {"type": "other"},
    }


def batch_dict(batch: StoreBatch) -> dict[str, Any]:
    """It has failed where all of its files have."""
    counts, status = batch.counts, "completed"
    if batch.cancelled:
        status = "cancelled"
    elif counts.in_progress:
        status = "in_progress"
    elif counts.failed and counts.failed == counts.total:
        status = "failed"
    return {
        "id": batch.batch_id,
        "object": "vector_store.files_batch",
        "created_at": int(batch.created_at),
        "vector_store_id": batch.store_id,
        "status": status,
        "file_counts": counts_dict(counts),
    }


def page_dict(kind: str, data: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """The one page of a search, or of a file's content."""
    return {"object": f"vector_store.{kind}.page", **more, "data": list(data), "has_more": False, "next_page": None}


def hit_dict(hit: StoreHit) -> dict[str, Any]:
    """`page`, `start` and `end` are ours: where the passage stands in its file."""
    return {
        "file_id": hit.file_id,
        "filename": hit.filename,
        "score": round(hit.score, 6),
        "attributes": dict(hit.attributes),
        "content": [{"type": "text", "text": hit.text}],
        "page": hit.page,
        "start": hit.start,
        "end": hit.end,
    }
