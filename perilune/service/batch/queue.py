"""The durable queue of batches: one DBOS workflow a batch, one step a shard of its lines.

Knows DBOS, and nothing of lines. DBOS is a process singleton, so it is imported and launched here only, and not
before there is a batch to run: a server without batches neither loads it nor polls for it. Its database holds ids
and counts, no text. What a workflow had done is skipped after a kill; the step that was under way runs again, and
its lines know which of them are done (`memory/batches.py`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import logging
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from perilune.errors import NotFound
from perilune.service.batch.runner import SHARD_LINES

DATABASE_FILE = "batches.db"
VERSION = "1"
"""Of the workflow's order of steps: another order needs another number, and begins workflows anew."""

BATCHES_AT_ONCE = 16
TENANT_BATCHES_AT_ONCE = 4
POLL_S = 0.5
"""Between two looks for batches that wait."""

_QUEUE = "batches"
_AGAIN_S = (1.0, 60.0)
"""Before a step that failed is tried again: at first, and at most."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Steps(Protocol):
    """`BatchRunner`."""

    async def prepare(self, batch_id: str) -> int: ...
    async def work(self, batch_id: str, first: int) -> bool: ...
    async def finish(self, batch_id: str) -> None: ...


class _Stopped(BaseException):
    """The process ends. No `Exception`: DBOS records those as the workflow's end, and this one goes on later."""


class BatchQueue:
    """Runs batches by `steps`, on the event loop that calls `put` first. `url` is a PostgreSQL URL; without one the
    queue is a SQLite file in `home`."""

    def __init__(self, steps: Steps, home: Path, url: str = "", poll_s: float = POLL_S) -> None:
        self._poll_s = poll_s
        self._steps = steps
        self._home = home
        self._url = url if url.startswith("postgresql") else ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._launching = asyncio.Lock()
        self._workflow: Callable[[str], None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    async def put(self, tenant: str, batch_id: str) -> None:
        """Run a batch; one that was put before goes on where it was. A tenant's batches take turns. Raises what
        opening the queue's database raises."""
        async with self._launching:
            if self._closing:
                return
            if self._workflow is None:
                self._loop = asyncio.get_running_loop()
                try:
                    self._workflow = await asyncio.to_thread(self._launch)
                except BaseException:
                    await asyncio.to_thread(_destroy)  # so that it can be launched again
                    raise
        await asyncio.to_thread(self._enqueue, self._workflow, tenant, batch_id)

    async def forget(self, batch_id: str) -> None:
        """Nothing of the batch stays in the queue."""
        if self._workflow is not None:
            await asyncio.to_thread(_forget, _workflow_id(batch_id))

    async def close(self) -> None:
        """Stop between two commits; at the next start everything goes on. Idempotent."""
        self._closing = True
        async with self._launching:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            if self._workflow is not None:
                self._workflow = None
                await asyncio.to_thread(_destroy)

    # -------------------------------------------------------------------------------- in other threads

    def _launch(self) -> Callable[[str], None]:
        from dbos import DBOS, DBOSConfig

        config = DBOSConfig(
            name="perilune",
            system_database_url=self._url or self._sqlite(),
            executor_id="local",
            application_version=VERSION,
            log_level="WARNING",
        )
        DBOS(config=config)

        @DBOS.workflow(name="batch", max_recovery_attempts=None)
        def workflow(batch_id: str) -> None:
            self._run(batch_id)

        DBOS.launch()
        DBOS.register_queue(
            _QUEUE,
            worker_concurrency=BATCHES_AT_ONCE,
            partition_worker_concurrency=TENANT_BATCHES_AT_ONCE,
            polling_interval_sec=self._poll_s,
            on_conflict="always_update",
        )
        return workflow

    def _sqlite(self) -> str:
        path = self._home / DATABASE_FILE
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return f"sqlite:///{path}"

    @staticmethod
    def _enqueue(workflow: Callable[[str], None], tenant: str, batch_id: str) -> None:
        from dbos import DBOS, SetEnqueueOptions, SetWorkflowID

        partition = hashlib.sha256(tenant.encode()).hexdigest()[:16]
        with SetWorkflowID(_workflow_id(batch_id)), SetEnqueueOptions(queue_partition_key=partition):
            DBOS.enqueue_workflow(_QUEUE, workflow, batch_id)

    def _run(self, batch_id: str) -> None:
        """The workflow, in a thread of DBOS's."""
        total = self._step("prepare", partial(self._steps.prepare, batch_id)) or 0
        for first in range(0, total, SHARD_LINES):
            if not self._step(f"lines from {first}", partial(self._steps.work, batch_id, first)):
                break
        self._step("finish", partial(self._steps.finish, batch_id))

    def _step(self, name: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        from dbos import DBOS

        return DBOS.run_step({"name": name}, self._call, work)

    def _call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Run a step on the event loop and wait for it. Raises `_Stopped` when the process ends."""
        assert self._loop is not None
        if self._closing or self._loop.is_closed():
            raise _Stopped
        try:
            return asyncio.run_coroutine_threadsafe(self._until_done(work), self._loop).result()
        except concurrent.futures.CancelledError:
            raise _Stopped from None

    async def _until_done(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """A step doesn't fail: a full disk or a locked database is waited for. None where its batch is gone."""
        if self._closing:  # since the thread looked
            raise asyncio.CancelledError
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        wait_s = _AGAIN_S[0]
        try:
            while True:
                try:
                    return await work()
                except NotFound:
                    return None
                except Exception:
                    _log.exception("a step of a batch failed; it is tried again in %g s", wait_s)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _AGAIN_S[1])
        finally:
            self._tasks.discard(task)


def _workflow_id(batch_id: str) -> str:
    return f"{batch_id}.{VERSION}"


def _forget(workflow_id: str) -> None:
    from dbos import DBOS

    DBOS.delete_workflow(workflow_id)


def _destroy() -> None:
    from dbos import DBOS

    DBOS.destroy(destroy_registry=True)
