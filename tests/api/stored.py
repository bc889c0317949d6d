"""A scripted service whose files, uploads and batches are real: a library, a database and the durable queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from perilune.core import FileRecord
from perilune.memory.batches import Batch, BatchStore
from perilune.memory.library import Library
from perilune.memory.store import Store
from perilune.memory.uploads import UploadStore
from perilune.service.batch.lines import InputLimits
from perilune.service.batch.queue import BatchQueue
from perilune.service.batch.runner import BatchRunner
from perilune.service.batch.service import BatchService
from perilune.service.ports import Caller
from perilune.service.uploads import UploadService
from perilune.telemetry import Telemetry

from .fakes import FakeService

MAX_BYTES = 4 * 1024**2


class StoredFiles:
    """Implements `ports.Documents` by a library, without ingest."""

    def __init__(self, library: Library) -> None:
        self.library = library

    async def upload(
        self, tenant: str, filename: str, purpose: str, data: BinaryIO, local_only: bool = False, **kept: Any
    ) -> FileRecord:
        add = self.library.add_file
        return await asyncio.to_thread(lambda: add(tenant, filename, purpose, data, MAX_BYTES, local_only, **kept))

    async def get(self, tenant: str, file_id: str) -> FileRecord:
        return await asyncio.to_thread(self.library.get_file, tenant, file_id)

    async def list(self, tenant: str) -> list[FileRecord]:
        return await asyncio.to_thread(self.library.list_files, tenant)

    async def delete(self, tenant: str, file_id: str) -> None:
        await asyncio.to_thread(self.library.delete_file, tenant, file_id)

    async def content(self, tenant: str, file_id: str) -> BinaryIO:
        return await asyncio.to_thread(self.library.open_file, tenant, file_id)

    async def text(self, tenant: str, file_id: str) -> str:
        return await asyncio.to_thread(self.library.text, tenant, file_id)


@dataclass
class Stored:
    """`now` is the wall clock of batches and files."""

    service: FakeService
    store: Store
    rows: BatchStore
    library: Library
    now: list[float]


@asynccontextmanager
async def stored_service(
    home: Path,
    service: FakeService,
    now: list[float],
    concurrency: int = 4,
    limits: InputLimits | None = None,
    revoked: set[str] | None = None,
    most_open: int = 100,
) -> AsyncIterator[Stored]:
    """One life of a server's home folder. It begins with what the last one left."""
    store = Store(home)
    library = Library(store, home, clock=lambda: now[0])
    files = StoredFiles(library)
    rows = BatchStore(store, lambda: now[0])
    gone = revoked if revoked is not None else set()

    def caller_of(batch: Batch) -> Caller | None:
        return None if batch.key_id in gone else Caller(batch.tenant, "user", key_id=batch.key_id)

    input_limits = limits or InputLimits(1_000, 100_000, 1_000_000)
    runner = BatchRunner(rows, library, caller_of, input_limits, concurrency, Telemetry())
    service.documents = files
    service.uploads = UploadService(UploadStore(store, home, lambda: now[0]), files, MAX_BYTES)
    service.batches = BatchService(rows, runner, BatchQueue(runner, home, poll_s=0.02), files, most_open)
    service.batches.start()
    try:
        yield Stored(service, store, rows, library, now)
    finally:
        await service.batches.close()
        store.close()
