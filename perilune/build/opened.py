"""What is slow to open: the model, the database, the folders of KV. Side by side, because `ask` counts from process
start.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perilune.build.models import load, tiered
from perilune.config import Settings
from perilune.telemetry import Telemetry

if TYPE_CHECKING:
    from perilune.memory.memory import Memory
    from perilune.memory.store import Store
    from perilune.runtime.hub.pull import ModelFiles
    from perilune.runtime.kv.disk import DiskKVStore
    from perilune.runtime.loader import LoadedModel

KV_FOLDER = "kv"
"""Name of the KV folder in the home folder."""

SEGMENT_FOLDER = "kv-segments"
"""And of the one that holds closed segments of tiered KV."""

SEGMENT_QUOTA_SHARE = 1 / 3
"""Of the disk quota, for closed segments where there are any: INT8 beside the bf16 that they were made of."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What every other part is made of. Memory only for a process that lives on."""

    settings: Settings
    telemetry: Telemetry
    files: ModelFiles
    kv: DiskKVStore | None
    segments: DiskKVStore | None
    loaded: LoadedModel
    store: Store
    memory: Memory | None

    @property
    def kv_stores(self) -> list[DiskKVStore]:
        """The folders that keep KV, none where the quota is 0."""
        return [store for store in (self.kv, self.segments) if store is not None]


def open_all(
    settings: Settings, files: ModelFiles, telemetry: Telemetry, closers: contextlib.ExitStack, indexed: bool
) -> Opened:
    """Open everything at once; `closers` gets each thing that opened, even if another fails. Raises as `build`."""
    share = SEGMENT_QUOTA_SHARE if tiered(settings) else 0.0
    with ThreadPoolExecutor(4, "build") as pool:
        kv = pool.submit(_open_kv, settings, telemetry, KV_FOLDER, 1 - share)
        segments = pool.submit(_open_kv, settings, telemetry, SEGMENT_FOLDER, share)
        loaded = pool.submit(load, settings, files)
        store = pool.submit(_open_store, settings)
    for future in (kv, segments, loaded, store):
        if future.exception() is None and (opened := future.result()) is not None:
            closers.callback(opened.close)
    everything = (kv.result(), segments.result(), loaded.result(), store.result())
    memory = _open_memory(settings, store.result(), closers) if indexed else None
    return Opened(settings, telemetry, files, *everything, memory)


def _open_kv(settings: Settings, telemetry: Telemetry, folder: str, share: float) -> DiskKVStore | None:
    from perilune.runtime.kv.disk import DiskKVStore

    quota = int(settings.kv_cache.disk_quota * share) if settings.runtime.backend == "torch" else 0
    return DiskKVStore(settings.home / folder, quota, telemetry) if quota else None


def _open_store(settings: Settings) -> Store:
    from perilune.memory.store import Store

    return Store(settings.home, settings.database)


def _open_memory(settings: Settings, store: Store, closers: contextlib.ExitStack) -> Memory:
    from perilune.memory.memory import Memory

    memory = Memory.open(store, settings.home, settings.memory)
    closers.callback(memory.close)
    return memory
