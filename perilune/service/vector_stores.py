"""Vector stores from the caller's side: their rows off the event loop, and the search of their files.

Knows the library's search and what its scores mean; not the wire. A store adds nothing to the index: its search is
the search of the documents in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from perilune.core import (
    AttributeFilter,
    Event,
    FilePart,
    FileSearched,
    FileSearchStarted,
    Passage,
    Request,
    SearchResult,
    StoreHit,
)
from perilune.errors import InternalError, InvalidRequest, NotFound
from perilune.memory.vector_stores import StoreFile, VectorStores
from perilune.service.ports import Library

MAX_FOUND_FILES = 16
"""Files that a search adds to a request: the answer reads of them what helps, as of files that are named."""

T = TypeVar("T")


class VectorStoreService:
    """Implements `ports.VectorStoresApi`. `store` is None in a process that keeps none."""

    def __init__(self, store: VectorStores | None, library: Library | None) -> None:
        self._kept = store
        self._library = library

    async def run(self, work: Callable[[VectorStores], T]) -> T:
        """`work` in a thread."""
        return await asyncio.to_thread(work, self._stores()[0])

    async def search(
        self,
        tenant: str,
        store_ids: Sequence[str],
        queries: Sequence[str],
        wanted: AttributeFilter | None,
        limit: int,
        min_score: float = 0.0,
    ) -> list[StoreHit]:
        """The best passages of the stores' files for any of the queries, best first, of at least this score.
        Raises `NotFound` and `InvalidRequest` as `VectorStores.searchable`."""
        files = await self.run(lambda kept: kept.searchable(tenant, store_ids, wanted))
        return await asyncio.to_thread(self._search, tenant, files, queries, limit, min_score)

    async def looked_up(self, request: Request) -> AsyncGenerator[Event | Request, None]:
        """What a request's file search tells, and last the request with the files that were found. Raises as
        `search`, before the first event."""
        wanted = request.file_search
        if wanted is None:
            raise InternalError("The request asks for no file search.")
        files = await self.run(lambda kept: kept.searchable(request.tenant, wanted.store_ids, wanted.wanted))
        queries = (_question(request),)
        yield FileSearchStarted(queries)
        hits = await asyncio.to_thread(
            self._search, request.tenant, files, queries, wanted.max_results, wanted.min_score
        )
        yield FileSearched(tuple(hits))
        yield _with_files(request, hits)

    def _search(
        self, tenant: str, files: dict[str, StoreFile], queries: Sequence[str], limit: int, min_score: float
    ) -> list[StoreHit]:
        library = self._stores()[1]
        best: dict[tuple[str, int], StoreHit] = {}
        for query in queries if files else ():
            for hit in hits_of(library.find(tenant, list(files), query, limit), files):
                place = (hit.file_id, hit.start)
                if hit.score >= min_score and (place not in best or best[place].score < hit.score):
                    best[place] = hit
        return sorted(best.values(), key=lambda hit: -hit.score)[:limit]

    def _stores(self) -> tuple[VectorStores, Library]:
        if self._kept is None or self._library is None:
            raise NotFound("This process keeps no vector stores.", hint="Use `perilune serve`.")
        return self._kept, self._library


def _question(request: Request) -> str:
    """The newest thing the user said."""
    said = [message.text for message in request.messages if message.role == "user" and message.text.strip()]
    if not said:
        raise InvalidRequest("There is no question to search for.", hint="End with a user's text.", param="input")
    return said[-1]


def _with_files(request: Request, hits: Sequence[StoreHit]) -> Request:
    """The files of the best hits stand before the newest question, like files that the caller named."""
    found = [each for each in dict.fromkeys(hit.file_id for hit in hits) if each not in request.file_ids]
    if not found:
        return request
    at = max(index for index, message in enumerate(request.messages) if message.role == "user")
    messages = list(request.messages)
    parts = (*map(FilePart, found[:MAX_FOUND_FILES]), *messages[at].parts)
    messages[at] = replace(messages[at], parts=parts)
    return replace(request, messages=tuple(messages))


def hits_of(found: SearchResult, files: dict[str, StoreFile]) -> list[StoreHit]:
    """The hits with scores from 0 to 1: the chance that the search found what was asked, where it is known, times
    the hit's own score as a share of the best one's."""
    passages = [hit for hit in found.hits if isinstance(hit, Passage) and hit.file_id in files]
    if not passages:
        return []
    best = max(hit.score for hit in passages)
    chance = 1.0 if found.confidence is None else found.confidence
    return [
        StoreHit(
            hit.file_id,
            files[hit.file_id].filename,
            files[hit.file_id].attributes,
            chance * (max(0.0, hit.score / best) if best > 0 else 1.0),
            hit.page,
            hit.start,
            hit.end,
            hit.text,
        )
        for hit in passages
    ]
