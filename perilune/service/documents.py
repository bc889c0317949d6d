"""Uploaded documents and their ingest: parse, index, count, prefill, all in the background (spec C4).

Knows the library, the composer and the engine's streams; doesn't know requests or plans. A document whose text
leaves room for a question in the model's window is prefilled at idle priority, so that its first question is
already warm; a longer one is only indexed, because no prompt could reuse its KV. Everything here may be
interrupted: what is unfinished is taken up again at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import BinaryIO, TypeVar

from perilune.core import BLOCK_TOKENS, FileRecord, FileStatus, KVPolicy, PageView
from perilune.errors import NotFound, Overloaded, PeriluneError, Unreadable, UnsupportedDocument
from perilune.service.backends.local import LocalBackend
from perilune.service.compose import Composer
from perilune.service.ports import Library
from perilune.service.presets import all_full
from perilune.service.warming import Context, Warmer
from perilune.telemetry import Telemetry

_log = logging.getLogger(__name__)

PARALLEL_PARSERS = 2
"""Documents parsed at once; prefill takes them one by one, because the engine is one."""

OWNER_SEPARATOR = "+"
T = TypeVar("T")

_FINAL = frozenset({FileStatus.PROCESSED, FileStatus.ERROR})


@dataclass(slots=True, kw_only=True)
class _Work:
    """Something that runs in the background. `stop` is what its threads look at."""

    stop: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, kw_only=True)
class _Job(_Work):
    """One running ingest. `record` is the newest state, without a trip to the database."""

    record: FileRecord


def joint_owner(file_ids: Sequence[str]) -> str:
    """Who owns the KV of several documents read together; deleting any of them deletes it."""
    return OWNER_SEPARATOR.join(file_ids)


class DocumentService:
    """Implements `ports.Documents`. Used from the event loop; `start` before the first call, `close` at the end.

    `owners` lists the owners of KV on disk; `capacity_tokens` is how much the tiers keep; `max_upload_bytes` bounds
    an upload.
    """

    def __init__(
        self,
        library: Library,
        composer: Composer,
        backend: LocalBackend,
        salt_of: Callable[[str], bytes],
        owners: Callable[[], Iterable[str]],
        window_tokens: int,
        capacity_tokens: int,
        max_upload_bytes: int,
        telemetry: Telemetry,
        kv_of: Callable[[str], KVPolicy] = all_full,
        forget_answers: Callable[[str], None] = lambda part: None,
    ) -> None:
        self._forget_answers = forget_answers
        self._library = library
        self._composer = composer
        self._backend = backend
        self._owners = owners
        self._capacity = capacity_tokens
        self._warmer = Warmer(library, composer, backend, salt_of, window_tokens, telemetry, kv_of)
        self._max_upload_bytes = max_upload_bytes
        self._telemetry = telemetry
        self._parse_slots = asyncio.Semaphore(PARALLEL_PARSERS)
        self._prefill_slots = asyncio.Semaphore(1)
        self._picture_slots = asyncio.Semaphore(PARALLEL_PARSERS)
        # Work that may take minutes keeps off the threads that every request needs.
        self._workers = ThreadPoolExecutor(PARALLEL_PARSERS + 2, "documents")
        self._jobs: dict[str, _Job] = {}
        self._warming: dict[str, _Work] = {}  # by owner
        self._joint: set[str] = set()
        self._deleted: set[str] = set()
        self._closing = False

    # ------------------------------------------------------------------------------------ lifetime

    async def start(self) -> None:
        """Put right what an earlier run left: KV of files that are gone (a kill amid deletion), unfinished ingests,
        documents whose KV was lost (evicted, removed, damaged, of another model)."""
        files = await asyncio.to_thread(self._library.all_files)
        await self._in_worker(partial(self._forget_unknown, {record.file_id for record in files}))
        for record in await asyncio.to_thread(self._library.unfinished_files):
            self._begin(record)
        for record in await asyncio.to_thread(lambda: list(self._cold(files))):
            self.warm([record])

    async def close(self) -> None:
        """Stop every ingest; the files stay unfinished and are resumed at the next start. Idempotent."""
        self._closing = True
        await asyncio.gather(*(self._stop(work) for work in [*self._jobs.values(), *self._warming.values()]))
        await asyncio.to_thread(self._workers.shutdown)

    async def settled(self) -> None:
        """Wait until nothing runs in the background (tests, `perilune ingest`)."""
        while tasks := [work.task for work in [*self._jobs.values(), *self._warming.values()] if work.task]:
            await asyncio.wait(tasks)

    # --------------------------------------------------------------------------------- the port

    async def upload(
        self,
        tenant: str,
        filename: str,
        purpose: str,
        data: BinaryIO,
        local_only: bool = False,
        *,
        lasts_s: float | None = None,
        file_id: str | None = None,
    ) -> FileRecord:
        self._refuse_when_closing()
        keep = partial(self._library.add_file, lasts_s=lasts_s, file_id=file_id)
        limit = self._max_upload_bytes
        record = await asyncio.to_thread(keep, tenant, filename, purpose, data, limit, local_only)
        self._telemetry.count("files_uploaded")
        if record.status not in _FINAL:
            self._begin(record)
        return record

    async def get(self, tenant: str, file_id: str) -> FileRecord:
        job = self._jobs.get(file_id)
        if job and job.record.tenant == tenant:
            return job.record
        return await asyncio.to_thread(self._library.get_file, tenant, file_id)

    async def list(self, tenant: str) -> list[FileRecord]:
        records = await asyncio.to_thread(self._library.list_files, tenant)
        jobs = self._jobs
        return [jobs[item.file_id].record if item.file_id in jobs else item for item in records]

    async def delete(self, tenant: str, file_id: str) -> None:
        """Stop the file's ingest, delete everything made from it, and its KV in every tier."""
        self._refuse_when_closing()
        await self._delete(await asyncio.to_thread(self._library.get_file, tenant, file_id))

    async def _delete(self, record: FileRecord) -> None:
        tenant, file_id = record.tenant, record.file_id
        self._deleted.add(file_id)  # from here on nothing of it is submitted, so that no KV comes after the forget
        try:
            await asyncio.gather(*(self._stop(work) for work in self._work_on(file_id)))
            await asyncio.to_thread(self._library.delete_file, tenant, file_id)
        except Exception:
            self._deleted.discard(file_id)
            raise
        self._composer.forget_document(file_id)
        await self.forget_kv(file_id)

    async def expire(self, before_s: float) -> int:
        """Delete documents of every tenant that were uploaded before that time; returns how many."""
        files = await asyncio.to_thread(self._library.all_files)
        expired = [record for record in files if record.created_at < before_s]
        for record in expired:
            await self.delete(record.tenant, record.file_id)
        return len(expired)

    async def expire_due(self) -> int:
        """Delete files whose own time has come; returns how many."""
        due = await asyncio.to_thread(self._library.due_files)
        for record in due:
            with contextlib.suppress(NotFound):  # deleted meanwhile
                await self._delete(record)
        return len(due)

    async def content(self, tenant: str, file_id: str) -> BinaryIO:
        return await asyncio.to_thread(self._library.open_file, tenant, file_id)

    async def text(self, tenant: str, file_id: str) -> str:
        return await asyncio.to_thread(self._library.text, tenant, file_id)

    async def page(self, tenant: str, file_id: str, number: int) -> PageView:
        return await asyncio.to_thread(self._library.page, tenant, file_id, number)

    async def page_image(self, tenant: str, file_id: str, number: int, width: int) -> bytes:
        async with self._picture_slots:
            return await asyncio.to_thread(self._library.page_image, tenant, file_id, number, width)

    def require(self, file_ids: Iterable[str]) -> None:
        """Raises `NotFound` for a file whose deletion has begun. Await nothing between this and a submit."""
        for file_id in file_ids:
            if file_id in self._deleted:
                raise NotFound(f"The file {file_id} was deleted.", hint="Upload it again.", param="file_id")

    def warm(self, records: Sequence[FileRecord]) -> None:
        """Compute in the background the KV of processed documents that a question would have needed."""
        file_ids = [record.file_id for record in records]
        owner = joint_owner(file_ids)
        busy = owner in self._warming or any(i in self._jobs or i in self._deleted for i in file_ids)
        if busy or self._closing:
            return
        self.remember_joint(owner)
        work = self._warming[owner] = _Work()
        work.task = asyncio.create_task(self._warm(owner, records, work), name=f"warm {owner}")

    async def forget_kv(self, part: str) -> None:
        """Drop KV, and kept answers, made of `part`, a file or a session, alone or together with others."""
        self._forget_answers(part)
        await self._in_worker(partial(self._forget_kv, part))

    def remember_joint(self, owner: str) -> None:
        """KV was made for several documents together; it goes when one of them does."""
        if OWNER_SEPARATOR in owner:
            self._joint.add(owner)

    # ------------------------------------------------------------------------------------- ingest

    def _work_on(self, file_id: str) -> Sequence[_Work]:
        found = [work for owner, work in self._warming.items() if file_id in owner.split(OWNER_SEPARATOR)]
        return [*found, self._jobs[file_id]] if file_id in self._jobs else found

    def _begin(self, record: FileRecord) -> None:
        job = _Job(record=record)
        self._jobs[record.file_id] = job
        job.task = asyncio.create_task(self._ingest(job), name=f"ingest {record.file_id}")

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise Overloaded("The server is stopping.", hint="Try again in a few seconds.")

    def _in_worker(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._workers, call)

    async def _stop(self, work: _Work) -> None:
        work.stop.set()
        if work.task:
            work.task.cancel()
            await asyncio.wait([work.task])

    async def _ingest(self, job: _Job) -> None:
        try:
            async with self._parse_slots:
                await self._parse(job)
            if job.record.status is not FileStatus.ERROR:
                await self._prefill(job)
                await self._set(job, status=FileStatus.PROCESSED)
            self._telemetry.count("files_ingested", status=job.record.status.value)
        except PeriluneError as error:
            await self._fail(job, str(error), error.why if isinstance(error, UnsupportedDocument) else None)
        except Exception:
            _log.exception("ingest of %s failed", job.record.file_id)
            said = "The document could not be processed; the server's log says why."
            await self._fail(job, said, Unreadable.FAILED)
        finally:
            self._jobs.pop(job.record.file_id, None)

    async def _fail(self, job: _Job, message: str, code: Unreadable | None) -> None:
        self._telemetry.count("files_ingested", status=FileStatus.ERROR.value)
        await self._set(job, status=FileStatus.ERROR, error=message, code=code)

    async def _parse(self, job: _Job) -> None:
        """Parse and index in a thread. Cancelling waits until the parser has stopped."""
        work = self._in_worker(partial(self._parse_in_thread, job))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            job.stop.set()
            await asyncio.wait([work])
            raise

    def _parse_in_thread(self, job: _Job) -> None:
        pages = self._library.parse(job.record.tenant, job.record.file_id, job.stop.is_set)
        for record in pages:
            job.record = record
            if job.stop.is_set():
                close = getattr(pages, "close", None)
                if close:
                    close()
                return

    async def _prefill(self, job: _Job) -> None:
        """Count, then prefill what a prompt could hold."""
        async with self._prefill_slots:
            context = await self._count([job.record], job.stop)
            job.record = replace(job.record, tokens=context.tokens[0])
            if context.prefix is None or self._closing:
                return
            await self._set(job, status=FileStatus.PREFILLING)
            await self._warmer.compute(job.record.file_id, job.record.tenant, context.prefix)

    def _count(self, records: Sequence[FileRecord], stop: threading.Event) -> asyncio.Future[Context]:
        return self._in_worker(partial(self._warmer.count, records, stop.is_set))

    # ------------------------------------------------------------------------------------- KV that was lost

    def _cold(self, files: Sequence[FileRecord]) -> Iterator[FileRecord]:
        """Documents without KV or without a count by this model, as many as the tiers can hold, newest first."""
        held = set(self._owners())
        room = self._capacity - sum(record.tokens or 0 for record in files if record.file_id in held)
        for record in files:
            warm = record.tokens is not None and record.file_id in held
            if not record.is_document or record.status is not FileStatus.PROCESSED or warm:
                continue
            if record.tokens is not None:
                if not BLOCK_TOKENS <= record.tokens <= min(room, self._warmer.limit_tokens):
                    continue
                room -= record.tokens
            yield record

    async def _warm(self, owner: str, records: Sequence[FileRecord], work: _Work) -> None:
        try:
            async with self._prefill_slots:
                context = await self._count(records, work.stop)
                for record, tokens in zip(records, context.tokens, strict=True):
                    if record.tokens != tokens:
                        await asyncio.to_thread(self._library.set_status, replace(record, tokens=tokens))
                if context.prefix is not None and not self._closing:
                    await self._warmer.compute(owner, records[0].tenant, context.prefix)
        except PeriluneError as error:
            _log.warning("%s stays cold: %s", owner, error.message)
        finally:
            self._warming.pop(owner, None)

    async def _set(
        self, job: _Job, status: FileStatus, error: str | None = None, code: Unreadable | None = None
    ) -> None:
        job.record = replace(job.record, status=status, error=error, error_code=code)
        await asyncio.to_thread(self._library.set_status, job.record)

    def _forget_unknown(self, known: set[str]) -> None:
        for owner in set(self._owners()):
            if not known.issuperset(owner.split(OWNER_SEPARATOR)):
                self._backend.forget(owner)

    def _forget_kv(self, part: str) -> None:
        owners = {part, *self._joint, *self._owners()}
        for owner in owners:
            if part in owner.split(OWNER_SEPARATOR):
                self._backend.forget(owner)
                self._joint.discard(owner)
