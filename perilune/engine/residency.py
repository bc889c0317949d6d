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


@dataclass(frozen=True, slots=True, eq=False)
class SegmentLoad:
    """A closed segment on its way from the store into a slot; `end_hash` is its name in RAM."""

    slot: int
    end_hash: BlockHash
    names: Sequence[BlockHash]
    views: Sequence[memoryview]


@dataclass(slots=True, eq=False)
class LoadJob:
    """Blocks on their way from the store. `good` grows on the I/O thread; `abandoned` is set on the engine
    thread."""

    seq_id: str
    first: int  # index of the first block in its sequence's table
    hashes: Sequence[BlockHash]
    blocks: list[int]
    deadline_s: float
    segments: tuple[SegmentLoad, ...] = ()  # read first; not empty or with `tokens` in a jump (`segments`)
    tokens: int = 0  # of a jump: what the sequence has computed once everything is there,
    start: int = 0  # and what it had before
    good: int = 0
    good_segments: int = 0
    abandoned: bool = False

    @property
    def is_jump(self) -> bool:
        return self.tokens > 0

    @property
    def complete(self) -> bool:
        return self.good == len(self.blocks) and self.good_segments == len(self.segments)


class Residency:
    """Look-ups may come from any thread; everything else from the engine thread."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        view: Callable[[int], memoryview],
        store: KVStore | None,
        segment_store: KVStore | None,
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
        self._segment_store = segment_store
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

    def stored(self, hashes: Sequence[BlockHash]) -> int:
        """Leading blocks on disk."""
        return self._store.prefix_length(hashes) if self._store is not None and hashes else 0

    def has_segment(self, names: Sequence[BlockHash]) -> bool:
        """All parts of a closed segment are on disk."""
        return self._segment_store is not None and self._segment_store.prefix_length(names) == len(names)

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
        size_bytes += sum(len(view) for part in job.segments[: job.good_segments] for view in part.views)
        self._observer.load(LoadObservation(size_bytes, seconds))
        self._telemetry.observe("kv_load_seconds", seconds)
        self._post(partial(self._filled, job, done))

    def _fill_batches(self, job: LoadJob, views: list[memoryview]) -> None:
        assert self._store is not None
        for part in job.segments:
            assert self._segment_store is not None
            if job.abandoned or self._segment_store.load(part.names, part.views) < len(part.names):
                return
            job.good_segments += 1
        while job.good < len(views) and not job.abandoned:
            end = min(job.good + LOAD_BATCH, len(views))
            wanted = end - job.good
            count = self._store.load(job.hashes[job.good : end], views[job.good : end])
            job.good += count
            if count < wanted:
                return

    def _filled(self, job: LoadJob, done: Callable[[LoadJob], None]) -> None:
        try:
            done(job)
        finally:
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

    def save_segment(
        self, owner: str, names: Sequence[BlockHash], views: Sequence[memoryview], done: Callable[[], None]
    ) -> None:
        """Write a closed segment in the background; `done` is called on the engine thread, also without a store."""
        store = self._segment_store
        if store is None:
            done()
            return
        self._saver.submit(partial(self._write_segment, store, owner, names, views, done))

    def _write_segment(
        self,
        store: KVStore,
        owner: str,
        names: Sequence[BlockHash],
        views: Sequence[memoryview],
        done: Callable[[], None],
    ) -> None:
        try:
            with self._telemetry.span("kv_save"):
                store.save(names, views, owner)
        except Exception:  # as in `_write`
            _LOG.exception("a closed segment couldn't be saved")
            self._telemetry.count("kv_save_failures_total")
        self._post(done)

    def skip(self, blocks: int) -> None:
        """Count blocks that aren't saved because the disk doesn't keep up."""
        self._telemetry.count("kv_save_skipped_blocks_total", blocks)

    def forget(self, owner: str) -> Future[int]:
        """Drop an owner's blocks: from RAM now, from the stores after the saves that are under way."""
        self._cache.forget(owner, self._pool)
        stores = [store for store in (self._store, self._segment_store) if store is not None]
        return self._saver.submit(lambda: sum(store.forget(owner) for store in stores))
