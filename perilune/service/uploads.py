"""Files that arrive in parts, from the caller's side: `memory.uploads` off the event loop, and the file at the end.

Knows the order of things; parts' bytes are the store's, and what becomes of the file is the documents'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import BinaryIO

from perilune.core import FileRecord
from perilune.errors import NotFound, TooLarge
from perilune.memory.uploads import UploadPart, UploadRecord, UploadStore
from perilune.service.ports import Documents


class UploadService:
    """Implements `ports.Uploads`. `store` is None in a process that takes none."""

    def __init__(self, store: UploadStore | None, documents: Documents, max_bytes: int) -> None:
        self._kept = store
        self._documents = documents
        self._max_bytes = max_bytes
        self._completing: dict[str, asyncio.Lock] = {}

    async def create(
        self, tenant: str, filename: str, purpose: str, size_bytes: int, file_lasts_s: float | None
    ) -> UploadRecord:
        if size_bytes > self._max_bytes:
            raise TooLarge(
                f"An upload of {size_bytes:,} bytes is over this server's limit of {self._max_bytes:,}.",
                hint="Split the file, or raise server.max_upload.",
                param="bytes",
            )
        return await asyncio.to_thread(self._store().create, tenant, filename, purpose, size_bytes, file_lasts_s)

    async def add_part(self, tenant: str, upload_id: str, data: BinaryIO) -> UploadPart:
        return await asyncio.to_thread(self._store().add_part, tenant, upload_id, data)

    async def complete(
        self, tenant: str, upload_id: str, part_ids: Sequence[str], md5: str | None
    ) -> tuple[UploadRecord, FileRecord]:
        """Make the file. Asked again, it answers as before: the first answer may have been lost."""
        lock = self._completing.setdefault(upload_id, asyncio.Lock())
        try:
            async with lock:
                return await self._complete(tenant, upload_id, part_ids, md5)
        finally:
            if not lock.locked():
                self._completing.pop(upload_id, None)

    async def _complete(
        self, tenant: str, upload_id: str, part_ids: Sequence[str], md5: str | None
    ) -> tuple[UploadRecord, FileRecord]:
        store = self._store()
        upload = await asyncio.to_thread(store.get, tenant, upload_id)
        if upload.status == "completed":
            return upload, await self._documents.get(tenant, upload.file_id)
        with await asyncio.to_thread(store.joined, tenant, upload_id, part_ids, md5) as data:
            try:  # a kill between file and upload leaves the file
                record = await self._documents.get(tenant, upload.file_id)
            except NotFound:
                record = await self._documents.upload(
                    tenant,
                    upload.filename,
                    upload.purpose,
                    data,
                    lasts_s=upload.file_lasts_s,
                    file_id=upload.file_id,
                )
        return await asyncio.to_thread(store.end, tenant, upload_id, "completed"), record

    async def cancel(self, tenant: str, upload_id: str) -> UploadRecord:
        return await asyncio.to_thread(self._store().end, tenant, upload_id, "cancelled")

    async def expire(self) -> int:
        """See `UploadStore.expire`."""
        return await asyncio.to_thread(self._kept.expire) if self._kept is not None else 0

    async def forget_tenant(self, tenant: str) -> None:
        if self._kept is not None:
            await asyncio.to_thread(self._kept.forget_tenant, tenant)

    def _store(self) -> UploadStore:
        if self._kept is None:
            raise NotFound("This process takes no uploads in parts.", hint="Use `perilune serve`.")
        return self._kept
