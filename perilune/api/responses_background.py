"""Answers of OpenAI's Responses that are made in the background: nobody need wait for them.

Knows their beginning, end and cancellation, and that an answer's row follows each; the events are the service's,
the log that others read is resume.py's. An answer waits while the queue is full. One whose server stops is
`failed`: here where there was time, else when the server starts again (`ports.Responses.recover`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any

from perilune.api import errors
from perilune.api.meter import AnswerMeter
from perilune.api.responses_answer import StreamedResponse, ended, interrupted
from perilune.api.responses_said import made_of
from perilune.api.resume import Resumables, StreamLog
from perilune.api.schema import ChatCall
from perilune.core import Admitted, Event
from perilune.errors import EngineBusy
from perilune.service.ports import Responses

ROOM_S = 1.0
"""Between two looks for room in the queue."""

Events = Callable[[ChatCall], aclosing[AsyncGenerator[Event]]]
InTime = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(slots=True, eq=False)
class _Run:
    answer: StreamedResponse
    meter: AnswerMeter
    done: asyncio.Event = field(default_factory=asyncio.Event)
    work: asyncio.Task[None] | None = None
    cancelled: bool = False

    def stop(self) -> None:
        self.cancelled = True
        if self.work is not None:
            self.work.cancel()


class BackgroundRuns:
    """The answers that are being made."""

    def __init__(self, archive: Responses, resumables: Resumables) -> None:
        self._archive = archive
        self._resumables = resumables
        self._runs: dict[str, _Run] = {}

    def start(self, answer: StreamedResponse, meter: AnswerMeter, events: Events, in_time: InTime) -> StreamLog:
        """Make an answer whose row has begun; returns its log."""
        run = _Run(answer, meter)
        key, tenant = answer.response_id, answer.call.request.tenant
        self._runs[key] = run
        return self._resumables.start(key, tenant, lambda log: self._run(run, log, events, in_time), patient=True)

    def now(self, tenant: str, response_id: str) -> dict[str, Any] | None:
        """The body of an answer that is being made; None of any other."""
        run = self._find(tenant, response_id)
        return run.answer.unfinished() if run is not None else None

    async def stop(self, tenant: str, response_id: str) -> None:
        """Cancel an answer, if it is being made, and wait until it is."""
        run = self._find(tenant, response_id)
        if run is not None:
            run.stop()
            await run.done.wait()

    def _find(self, tenant: str, response_id: str) -> _Run | None:
        run = self._runs.get(response_id)
        return run if run is not None and run.answer.call.request.tenant == tenant else None

    async def _run(self, run: _Run, log: StreamLog, events: Events, in_time: InTime) -> None:
        answer = run.answer
        log.add(answer.opening(), settled=True)
        run.work = asyncio.create_task(self._make(run, log, events, in_time))
        if run.cancelled:
            run.work.cancel()
        try:
            await run.work
            run.meter.ended(None)
        except asyncio.CancelledError as error:
            run.meter.ended(error)
            body = answer.unfinished()
            await self._end(answer, log, ended(body, "cancelled") if run.cancelled else interrupted(body))
            if not run.cancelled:
                raise
        except Exception as error:
            shown = errors.from_any(error, answer.call.request.request_id)
            run.meter.ended(shown)
            await self._end(answer, log, ended(answer.unfinished(), "failed", shown))
        finally:
            del self._runs[answer.response_id]
            run.done.set()
            log.finish(None)

    async def _make(self, run: _Run, log: StreamLog, events: Events, in_time: InTime) -> None:
        async with in_time():
            while True:
                try:
                    await self._tell(run, log, events)
                    break
                except EngineBusy:
                    if run.answer.status != "queued":
                        raise
                    await asyncio.sleep(ROOM_S)
        body = run.answer.body()
        await self._end(run.answer, log, body, run.answer.end())

    async def _tell(self, run: _Run, log: StreamLog, events: Events) -> None:
        answer = run.answer
        async with events(answer.call) as told:
            async for event in told:
                if isinstance(event, Admitted):
                    continue
                if answer.status == "queued":
                    log.add(answer.started(), settled=True)
                run.meter.see(event)
                log.add(answer.encode(event), settled=True)

    async def _end(
        self, answer: StreamedResponse, log: StreamLog, body: dict[str, Any], last: bytes | None = None
    ) -> None:
        """Keep what has become of an answer, then tell it."""
        last = answer.stopped(body) if last is None else last
        await self._archive.finish(answer.call.request.tenant, made_of(answer, body, log.whole(last)))
        log.add(last, settled=True)
