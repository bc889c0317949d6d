"""Uploaded documents and their ingest: parse, index, count, prefill, all in the background (spec C4).

Knows the library, the composer and the engine's streams; doesn't know requests or plans. A document whose text
leaves room for a question in the model's window is prefilled at idle priority, so that its first question is
already warm; a longer one is only indexed, because no prompt could reuse its KV. Everything here may be
interrupted: what is unfinished is taken up again at the next start.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import BinaryIO, TypeVar

from perilune.core import (
    EngineFinished,
    FileRecord,
    FileStatus,
    FinishReason,
    SamplingParams,
    SequenceSpec,
    ServiceClass,
)
from perilune.errors import InternalError, Overloaded, PeriluneError
from perilune.service.backends.local import LocalBackend
from perilune.service.compose import MAX_CHARS_PER_TOKEN, Composer, slices
from perilune.service.ports import Library
from perilune.telemetry import Telemetry

_log = logging.getLogger(__name__)

QUESTION_RESERVE_TOKENS = 512
"""Window kept free for instructions, question and answer when a document is judged to fit."""

PARALLEL_PARSERS = 2
"""Documents parsed at once; prefill takes them one by one, because the engine is one."""

OWNER_SEPARATOR = "+"
T = TypeVar("T")

_RETRY_S = 0.5
_YIELD_S = 0.001
_FINAL = frozenset({FileStatus.PROCESSED, FileStatus.ERROR})


@dataclass(slots=True)
class _Job:
    """One running ingest. `record` is the newest state, without a trip to the database."""

    record: FileRecord
    stop: threading.Event
    task: asyncio.Task[None] | None = None


def joint_owner(file_ids: Sequence[str]) -> str:
    """Who owns the KV of several documents read together; deleting any of them deletes it."""
    return OWNER_SEPARATOR.join(file_ids)


class DocumentService:
    """Implements `ports.Documents`. Used from the event loop; `start` before the first call, `close` at the end.

    `owners` lists the owners of KV on disk. `max_upload_bytes` bounds an upload.
    """

    def __init__(
        self,
        library: Library,
        composer: Composer,
        backend: LocalBackend,
        salt_of: Callable[[str], bytes],
        owners: Callable[[], Iterable[str]],
        window_tokens: int,
        max_upload_bytes: int,
        telemetry: Telemetry,
    ) -> None:
        self._library = library
        self._composer = composer
        self._backend = backend
        self._salt_of = salt_of
        self._owners = owners
        self._window = window_tokens
        self._max_upload_bytes = max_upload_bytes
        self._telemetry = telemetry
        self._parse_slots = asyncio.Semaphore(PARALLEL_PARSERS)
        self._prefill_slots = asyncio.Semaphore(1)
        # Work that may take minutes keeps off the threads that every request needs.
        self._workers = ThreadPoolExecutor(PARALLEL_PARSERS + 2, "documents")
        self._jobs: dict[str, _Job] = {}
        self._joint: set[str] = set()
        self._closing = False

    # ------------------------------------------------------------------------------------ lifetime

    async def start(self) -> None:
        """Take up every ingest that an earlier run left unfinished."""
        for record in await asyncio.to_thread(self._library.unfinished_files):
            self._begin(record)

    async def close(self) -> None:
        """Stop every ingest; the files stay unfinished and are resumed at the next start. Idempotent."""
        self._closing = True
        await asyncio.gather(*(self._stop(job) for job in list(self._jobs.values())))
        await asyncio.to_thread(self._workers.shutdown)

    async def settled(self) -> None:
        """Wait until no ingest runs (tests, `perilune ingest`)."""
        while tasks := [job.task for job in self._jobs.values() if job.task]:
            await asyncio.wait(tasks)

    # --------------------------------------------------------------------------------- the port

    async def upload(self, tenant: str, filename: str, purpose: str, data: BinaryIO) -> FileRecord:
        self._refuse_when_closing()
        record = await asyncio.to_thread(
            self._library.add_file, tenant, filename, purpose, data, self._max_upload_bytes
        )
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
        await asyncio.to_thread(self._library.get_file, tenant, file_id)
        job = self._jobs.get(file_id)
        if job:
            await self._stop(job)
        await asyncio.to_thread(self._library.delete_file, tenant, file_id)
        self._composer.forget_document(file_id)
        await self._in_worker(partial(self._forget_kv, file_id))

    async def content(self, tenant: str, file_id: str) -> BinaryIO:
        return await asyncio.to_thread(self._library.open_file, tenant, file_id)

    async def text(self, tenant: str, file_id: str) -> str:
        return await asyncio.to_thread(self._library.text, tenant, file_id)

    def remember_joint(self, owner: str) -> None:
        """KV was made for several documents together; it goes when one of them does."""
        if OWNER_SEPARATOR in owner:
            self._joint.add(owner)

    # ------------------------------------------------------------------------------------- ingest

    def _begin(self, record: FileRecord) -> None:
        job = _Job(record, threading.Event())
        self._jobs[record.file_id] = job
        job.task = asyncio.create_task(self._ingest(job), name=f"ingest {record.file_id}")

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise Overloaded("The server is stopping.", hint="Try again in a few seconds.")

    def _in_worker(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._workers, call)

    async def _stop(self, job: _Job) -> None:
        job.stop.set()
        if job.task:
            job.task.cancel()
            await asyncio.wait([job.task])

    async def _ingest(self, job: _Job) -> None:
        try:
            async with self._parse_slots:
                await self._parse(job)
            if job.record.status is not FileStatus.ERROR:
                async with self._prefill_slots:
                    await self._prefill(job)
                await self._set(job, status=FileStatus.PROCESSED)
            self._telemetry.count("files_ingested", status=job.record.status.value)
        except PeriluneError as error:
            await self._fail(job, str(error))
        except Exception:
            _log.exception("ingest of %s failed", job.record.file_id)
            await self._fail(job, "The document could not be processed; the server's log says why.")
        finally:
            self._jobs.pop(job.record.file_id, None)

    async def _fail(self, job: _Job, message: str) -> None:
        self._telemetry.count("files_ingested", status=FileStatus.ERROR.value)
        await self._set(job, status=FileStatus.ERROR, error=message)

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
        record = job.record
        ids = await self._in_worker(partial(self._prefix, record))
        if ids is None or self._closing:
            return
        await self._set(job, status=FileStatus.PREFILLING)
        spec = SequenceSpec(
            seq_id=f"ingest-{record.file_id}",
            token_ids=ids,
            salt=self._salt_of(record.tenant),
            sampling=SamplingParams(),
            max_new_tokens=0,
            service_class=ServiceClass.P2_BATCH,
            shared_tokens=len(ids),
            persist_owner=record.file_id,
            prefill_only=True,
        )
        while True:
            try:
                finished = await self._backend.finish(spec)
            except Overloaded as error:
                if not self._backend.alive:  # it will never have room again
                    finished = EngineFinished(spec.seq_id, FinishReason.ERROR, error.message)
                    break
                await asyncio.sleep(_RETRY_S)
                continue
            except InternalError as error:
                finished = EngineFinished(spec.seq_id, FinishReason.ERROR, error.message)
            break
        if finished.reason is FinishReason.ERROR:
            # KV is a cache: without it the document is still answered from, only colder.
            self._telemetry.count("ingest_prefill_failed")
            _log.warning("prefill of %s failed: %s", record.file_id, finished.error)

    def _prefix(self, record: FileRecord) -> Sequence[int] | None:
        """Count the document and give the prompt prefix to prefill, or None when no prompt could hold it."""
        text = self._library.text(record.tenant, record.file_id)
        limit = self._window - QUESTION_RESERVE_TOKENS
        if len(text) > limit * MAX_CHARS_PER_TOKEN:
            tokens = sum(self._counted_gently(text))
        else:
            tokens = len(self._composer.encode_document(record.file_id, text))
        job = self._jobs[record.file_id]
        job.record = replace(job.record, tokens=tokens)
        if tokens > limit:
            self._composer.forget_document(record.file_id)
            return None
        try:
            piece = self._composer.document_piece(
                record.filename, self._composer.encode_document(record.file_id, text)
            )
            prefix = self._composer.context_prefix([piece])
        except PeriluneError as error:  # a base model, or markers in the text: indexed and searchable all the same
            _log.info("%s is not prefilled: %s", record.file_id, error)
            return None
        return prefix if 0 < len(prefix) <= limit else None

    def _counted_gently(self, text: str) -> Iterator[int]:
        """Tokens of each slice, leaving the interpreter to others in between."""
        for piece in slices(text):
            yield self._composer.count(piece)
            time.sleep(_YIELD_S)

    async def _set(self, job: _Job, status: FileStatus, error: str | None = None) -> None:
        job.record = replace(job.record, status=status, error=error)
        await asyncio.to_thread(self._library.set_status, job.record)

    def _forget_kv(self, file_id: str) -> None:
        owners = {file_id, *self._joint, *self._owners()}
        for owner in owners:
            if file_id in owner.split(OWNER_SEPARATOR):
                self._backend.forget(owner)
                self._joint.discard(owner)
