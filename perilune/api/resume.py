"""Streams that outlive a dropped connection (spec C5): a log of one answer's events, and who may read it again.

A caller opts in with `stream_options.resumable`; its answer then runs on for `RESUME_S` after the last reader left,
instead of being cancelled at once. One in the background (OpenAI's Responses) runs to its end, whoever reads. Knows
encoded events and tenants; doesn't know what the events say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from perilune.errors import Conflict, NotFound, Overloaded, PeriluneError

RESUME_S = 30.0
"""How long an answer waits for a reader."""

MAX_LOG_BYTES = 16 * 1024 * 1024
"""Of one answer; older events are dropped first, and can't be resumed from then on."""

_CHECK_S = 0.5
_COMMENT = b":"
_END = b"\n\n"


class StreamLog:
    """The numbered events of one answer. Written by one task, read by any number; not thread-safe."""

    def __init__(self, tenant: str, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.tenant = tenant
        self.readers = 0
        self._max_bytes = max_bytes
        self._events: list[bytes] = []
        self._size_bytes = 0
        self._dropped = 0
        self._settled = False
        self._ended = False
        self._error: PeriluneError | None = None
        self._news = asyncio.Event()

    def add(self, encoded: bytes, settled: bool) -> None:
        """Append the data events in `encoded`; comments aren't kept. `settled`: see `read`."""
        for piece in encoded.split(_END):
            if piece and not piece.startswith(_COMMENT):
                number = self._dropped + len(self._events)
                event = b"id: %d\n" % number + piece + _END
                self._events.append(event)
                self._size_bytes += len(event)
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= len(self._events.pop(0))
            self._dropped += 1
        self._settled = self._settled or settled
        self._wake()

    def whole(self, last: bytes) -> bytes | None:
        """All events and `last`, for `of`; None where the oldest are no longer held."""
        if self._dropped:
            return None
        return b"".join(event.split(b"\n", 1)[1] for event in self._events) + last

    @classmethod
    def of(cls, tenant: str, events: bytes) -> StreamLog:
        """The log of a stream that has ended."""
        log = cls(tenant)
        log.add(events, settled=True)
        log.finish(None)
        return log

    def finish(self, error: PeriluneError | None) -> None:
        """No more events; readers get `error` raised after the last one."""
        self._ended, self._error = True, error
        self._wake()

    async def read(self, after: int) -> AsyncGenerator[tuple[bytes, bool]]:
        """Events from number `after` + 1 on, as they come, each with whether the answer can still be refused with
        an HTTP status (False) or has been settled. Raises `Conflict` for events that are no longer held."""
        self.readers += 1
        try:
            position = after + 1
            while True:
                if position < self._dropped:
                    raise Conflict("That part of the stream is no longer held.", hint="Ask again.")
                while position < self._dropped + len(self._events):
                    event = self._events[position - self._dropped]
                    position += 1
                    yield event, self._settled
                if self._ended:
                    break
                await self._news.wait()
            if self._error is not None:
                raise self._error
        finally:
            self.readers -= 1

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Resumables:
    """The answers that can be resumed now. `close` ends them all."""

    def __init__(self, resume_s: float = RESUME_S) -> None:
        self._resume_s = resume_s
        self._logs: dict[str, StreamLog] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(
        self,
        key: str,
        tenant: str,
        write: Callable[[StreamLog], Coroutine[Any, Any, None]],
        patient: bool = False,
    ) -> StreamLog:
        """Run `write` on a new log, until it ends or nobody has read for a while; `patient`: until it ends. Its
        events are held for a while after it."""
        log = StreamLog(tenant)
        self._logs[key] = log
        self._tasks[key] = asyncio.create_task(self._supervise(key, log, write(log), patient))
        return log

    def holds(self, key: str, tenant: str) -> bool:
        log = self._logs.get(key)
        return log is not None and log.tenant == tenant

    def find(self, key: str, tenant: str) -> StreamLog:
        """Raises `NotFound`, for another tenant's stream too."""
        log = self._logs.get(key)
        if log is None or log.tenant != tenant:
            raise NotFound(
                "There is no such stream, or it was left for too long.",
                hint=f"A stream asked for with stream_options.resumable is kept for {self._resume_s:g} seconds.",
            )
        return log

    async def cancel(self, key: str, tenant: str) -> None:
        """Stop an answer and forget it. Raises `NotFound`."""
        self.find(key, tenant)
        await self._stop([self._tasks[key]])

    async def close(self) -> None:
        await self._stop(list(self._tasks.values()))

    @staticmethod
    async def _stop(tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _supervise(self, key: str, log: StreamLog, writing: Coroutine[Any, Any, None], patient: bool) -> None:
        writer = asyncio.create_task(self._guarded(log, writing))
        idle_s = 0.0
        try:
            while idle_s < self._resume_s:
                pause_s = min(_CHECK_S, self._resume_s)
                await asyncio.sleep(pause_s)
                wanted = log.readers or (patient and not writer.done())
                idle_s = 0.0 if wanted else idle_s + pause_s
        finally:
            writer.cancel()
            await asyncio.wait({writer})
            del self._logs[key], self._tasks[key]

    @staticmethod
    async def _guarded(log: StreamLog, writing: Coroutine[Any, Any, None]) -> None:
        try:
            await writing
        except asyncio.CancelledError:
            log.finish(Overloaded("The answer was stopped.", hint="Send the request again."))
            raise
