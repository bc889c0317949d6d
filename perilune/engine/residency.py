"""Which tier holds a block, and moves between tiers: prepared and completed on the engine thread, copied
elsewhere.

Knows the prefix cache, the KV store and whole blocks. Knows nothing of scheduling. Every block of a running
load or save is retained by the job itself, so that neither a cancelled sequence nor an eviction can hand memory
out that an I/O thread is using. Results come back through `post`, which runs a call on the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from perilune.engine.block_pool import BlockPool
from perilune.engine.observe import EngineObserver, LoadObservation
from perilune.engine.prefix_cache import PrefixCache
from perilune.runtime.kv.spec import BlockHash
from perilune.runtime.kv.store import KVStore
from perilune.telemetry import Telemetry

LOAD_BATCH = 32
"""Blocks between two looks at `LoadJob.abandoned`: 24 MB of SmolLM2's KV, 10–20 ms."""

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Worker(Protocol):
    """What a `concurrent.futures.Executor` offers. Saves need one that runs one call at a time, in order."""

    def submit(self, fn: Callable[[], T], /) -> Future[T]: ...


Post = Callable[[Callable[[], None]], None]


@dataclass(slots=True, eq=False)
class LoadJob:
    """Blocks on their way from the store. `good` grows on the I/O thread; `abandoned` is set on the engine
    thread."""

    seq_id: str
    first: int  # index of the first block in its sequence's table
    hashes: Sequence[BlockHash]
    blocks: list[int]
    deadline_s: float
    good: int = 0
    abandoned: bool = False


class Residency:
    """Look-ups may come from any thread; everything else from the engine thread."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        view: Callable[[int], memoryview],
        store: KVStore | None,
        loader: Worker,
        saver: Worker,
        post: Post,
        telemetry: Telemetry,
        observer: EngineObserver,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._view = view
        self._store = store
        self._loader = loader
        self._saver = saver
        self._post = post
        self._telemetry = telemetry
        self._observer = observer
        self._saving_blocks = 0

    # --------------------------------------------------------------------------------------- look-ups

    def lookup(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """Leading blocks in RAM, and the blocks that follow them on disk."""
        in_ram = self._cache.match_length(hashes)
        return in_ram, self.on_disk(hashes, in_ram)

    def on_disk(self, hashes: Sequence[BlockHash], in_ram: int) -> int:
        """Blocks on disk that continue the `in_ram` leading ones. The whole chain counts as used."""
        if self._store is None or not hashes:
            return 0
        stored = self._store.prefix_length(hashes)
        if stored >= in_ram:
            return stored - in_ram
        return self._store.prefix_length(hashes[in_ram:])  # a gap on disk that RAM bridges

    @property
    def keeps(self) -> bool:
        """There is a tier below RAM."""
        return self._store is not None

    @property
    def saving_share(self) -> float:
        """Share of the pool that unfinished saves hold."""
        return self._saving_blocks / self._pool.total

    # ------------------------------------------------------------------------------------------- load

    def load(self, job: LoadJob, done: Callable[[LoadJob], None]) -> None:
        """Start filling `job.blocks`; `done` is called on the engine thread, also for an abandoned job."""
        self._pool.retain(job.blocks)
        views = [self._view(block) for block in job.blocks]
        self._loader.submit(partial(self._fill, job, views, done))

    def _fill(self, job: LoadJob, views: list[memoryview], done: Callable[[LoadJob], None]) -> None:
        start = time.perf_counter()
        try:
            self._fill_batches(job, views)
        except Exception:  # the store breaks its promise; the sequence computes instead
            _LOG.exception("a KV load failed")
            self._telemetry.count("kv_load_failures_total")
        seconds = time.perf_counter() - start
        size_bytes = sum(len(view) for view in views[: job.good])
        self._observer.load(LoadObservation(size_bytes, seconds))
        self._telemetry.observe("kv_load_seconds", seconds)
        self._post(partial(self._filled, job, done))

    def _fill_batches(self, job: LoadJob, views: list[memoryview]) -> None:
        assert self._store is not None
        while job.good < len(views) and not job.abandoned:
            end = min(job.good + LOAD_BATCH, len(views))
            wanted = end - job.good
            count = self._store.load(job.hashes[job.good : end], views[job.good : end])
            job.good += count
            if count < wanted:
                return

    def _filled(self, job: LoadJob, done: Callable[[LoadJob], None]) -> None:
        done(job)
        self._pool.release(job.blocks)

    # ----------------------------------------------------------------------------------- save, forget

    def save(self, owner: str, hashes: Sequence[BlockHash], blocks: list[int]) -> None:
        """Write complete shared blocks in the background. They can't change while the job holds them."""
        self._pool.retain(blocks)
        self._saving_blocks += len(blocks)
        views = [self._view(block) for block in blocks]
        self._saver.submit(partial(self._write, owner, hashes, blocks, views))

    def _write(self, owner: str, hashes: Sequence[BlockHash], blocks: list[int], views: list[memoryview]) -> None:
        assert self._store is not None
        try:
            with self._telemetry.span("kv_save"):
                self._store.save(hashes, views, owner)
        except Exception:  # KV is a cache: a lost save costs a prefill
            _LOG.exception("a KV save failed")
            self._telemetry.count("kv_save_failures_total")
        self._post(partial(self._written, blocks))

    def _written(self, blocks: list[int]) -> None:
        self._saving_blocks -= len(blocks)
        self._pool.release(blocks)

    def skip(self, blocks: int) -> None:
        """Count blocks that aren't saved because the disk doesn't keep up."""
        self._telemetry.count("kv_save_skipped_blocks_total", blocks)

    def forget(self, owner: str) -> Future[int]:
        """Drop an owner's blocks: from RAM now, from the store after the saves that are under way."""
        self._cache.forget(owner, self._pool)
        store = self._store
        return self._saver.submit(lambda: store.forget(owner) if store is not None else 0)
