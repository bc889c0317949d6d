"""Batches, from the caller's side: create, look, cancel; and what tends them while they wait or are deleted.

Knows which batch is in which state; the lines are the runner's, and durability is the queue's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Mapping

from perilune.errors import Conflict, InvalidRequest, NotFound
from perilune.memory.audit import acting
from perilune.memory.batches import Batch, BatchStatus, BatchStore
from perilune.memory.paging import Part
from perilune.service.batch.queue import BatchQueue
from perilune.service.batch.runner import BatchRunner
from perilune.service.ports import Caller, Documents, LineAnswers

INPUT_PURPOSE = "batch"
TEND_S = 60.0
"""Between two looks at batches that expired while they waited."""

_HOUR_S = 3_600.0
_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])", re.ASCII)
_LEAST_S, _MOST_S = 12 * _HOUR_S, 7 * 24 * _HOUR_S
_ACTOR = "batch"

_log = logging.getLogger(__name__)


class BatchService:
    """Implements `ports.Batches`. `start` before the first call, `close` at the end."""

    def __init__(
        self, store: BatchStore, runner: BatchRunner, queue: BatchQueue, documents: Documents, most_open: int
    ) -> None:
        self._store = store
        self._runner = runner
        self._queue = queue
        self._documents = documents
        self._most_open = most_open
        self._queued = False  # whether the queue has every batch that hasn't ended
        self._tending: asyncio.Task[None] | None = None
        self._look = asyncio.Event()

    def serve(self, answers: LineAnswers) -> None:
        self._runner.serve(answers)

    def start(self) -> None:
        """Go on with what an earlier run left, as soon as somebody answers lines."""
        self._look.set()
        self._tending = asyncio.create_task(self._tend_for_ever(), name="batches")

    async def close(self) -> None:
        """Stop; at the next start everything goes on. Idempotent."""
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait([self._tending])
        await self._queue.close()

    def wake(self) -> None:
        """Something was deleted that a batch may quote."""
        self._look.set()

    # --------------------------------------------------------------------------------------- the port

    async def create(
        self,
        caller: Caller,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        metadata: Mapping[str, str] | None,
        output_lasts_s: float | None,
    ) -> Batch:
        if endpoint not in self._runner.endpoints:
            known = ", ".join(sorted(self._runner.endpoints))
            raise InvalidRequest("Wrong value for endpoint.", hint=f"Use one of {known}.", param="endpoint")
        window_s = window_of(completion_window)
        record = await self._documents.get(caller.tenant, input_file_id)
        if record.purpose != INPUT_PURPOSE:
            raise InvalidRequest(
                f"The file was uploaded for {record.purpose}.",
                hint="Upload a batch's input with the purpose batch.",
                param="input_file_id",
            )
        batch = await asyncio.to_thread(
            self._store.create,
            caller.tenant,
            caller.key_id,
            endpoint,
            input_file_id,
            (completion_window, window_s),
            metadata,
            output_lasts_s,
            self._most_open,
        )
        try:
            await self._queue.put(batch.tenant, batch.batch_id)
        except Exception:
            _log.exception("the queue of batches can't be opened; batch %s waits until it can", batch.batch_id)
            self._queued = False
        return batch

    async def get(self, tenant: str, batch_id: str) -> Batch:
        return await asyncio.to_thread(self._store.get, tenant, batch_id)

    async def page(self, tenant: str, part: Part) -> tuple[list[Batch], bool]:
        return await asyncio.to_thread(self._store.page, tenant, part)

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        open_ones = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
        batch = await self.get(tenant, batch_id)
        batch = await asyncio.to_thread(self._store.move, batch, BatchStatus.CANCELLING, *open_ones)
        if batch.ended:
            raise Conflict(f"The batch is {batch.status.value}; it can't be cancelled.", param="batch_id")
        self._runner.stop(batch_id)
        self._look.set()  # one that waits for its turn isn't to wait to be cancelled
        return batch

    async def forget_tenant(self, tenant: str) -> None:
        """Stop and delete a tenant's batches. Their files are files."""
        mine = [batch for batch in await asyncio.to_thread(self._store.unended) if batch.tenant == tenant]
        await asyncio.to_thread(self._store.forget_tenant, tenant)
        for batch in mine:
            self._runner.stop(batch.batch_id)
            await self._runner.finish(batch.batch_id)
            await self._queue.forget(batch.batch_id)

    # ------------------------------------------------------------------------------------------ tending

    async def tend(self) -> None:
        """End what expired or was cancelled while it waited; delete results of which something was deleted."""
        for batch in await asyncio.to_thread(self._store.owed):
            await self._purge(batch)
        for batch in await asyncio.to_thread(self._store.unended):
            if batch.status is BatchStatus.CANCELLING or self._store.now() >= batch.expires_at:
                self._runner.stop(batch.batch_id)
                await self._runner.finish(batch.batch_id)

    async def _purge(self, batch: Batch) -> None:
        if not batch.ended:
            open_ones = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
            await asyncio.to_thread(self._store.move, batch, BatchStatus.CANCELLING, *open_ones)
            self._runner.stop(batch.batch_id)
            await self._runner.finish(batch.batch_id)
            return
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                with contextlib.suppress(NotFound), acting(_ACTOR):
                    await self._documents.delete(batch.tenant, file_id)
        await asyncio.to_thread(self._store.forget_results, batch)

    async def _tend_for_ever(self) -> None:
        await self._runner.served.wait()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TEND_S):
                    await self._look.wait()
            self._look.clear()
            for work in (self._queue_what_waits, self.tend):
                try:
                    await work()
                except Exception:
                    _log.exception("batches are tended again in %g s", TEND_S)

    async def _queue_what_waits(self) -> None:
        """After a start, and where the queue couldn't take a batch: a disk may have been full."""
        if self._queued:
            return
        self._queued = True  # first: one that comes meanwhile and can't be put says so itself
        try:
            for batch in await asyncio.to_thread(self._store.unended):
                await self._queue.put(batch.tenant, batch.batch_id)
        except BaseException:
            self._queued = False
            raise


def window_of(text: str) -> float:
    """Seconds of `24h` or `7d`. Raises `InvalidRequest` for less than 12 hours or more than 7 days."""
    match = _WINDOW.fullmatch(text)
    seconds = float(match[1]) * _HOUR_S * (24 if match[2] == "d" else 1) if match else 0.0
    if not _LEAST_S <= seconds <= _MOST_S:
        raise InvalidRequest(
            "Wrong value for completion_window.", hint="Use 24h, or 12h to 7d.", param="completion_window"
        )
    return seconds
