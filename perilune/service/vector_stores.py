"""Vector stores from the caller's side: their rows off the event loop, and the search of their files.

Knows the library's search and what its scores mean; not the wire. A store adds nothing to the index: its search is
the search of the documents in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from perilune.core import AttributeFilter, Passage, SearchResult, StoreHit
from perilune.errors import NotFound
from perilune.memory.vector_stores import StoreFile, VectorStores
from perilune.service.ports import Library

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
        return await asyncio.to_thread(self._search, tenant, store_ids, queries, wanted, limit, min_score)

    def _search(
        self,
        tenant: str,
        store_ids: Sequence[str],
        queries: Sequence[str],
        wanted: AttributeFilter | None,
        limit: int,
        min_score: float,
    ) -> list[StoreHit]:
        stores, library = self._stores()
        files = stores.searchable(tenant, store_ids, wanted)
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
