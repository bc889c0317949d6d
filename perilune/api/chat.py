"""POST /v1/chat/completions: one answer, whole or streamed, and its cancellation.

Knows the order of things on the wire; the dialect is in schema.py and completion.py, the work in the service. Raw
ASGI, because every token passes here. The service's iterator is closed on every way out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import cast

from starlette.types import Receive, Scope, Send

from perilune.api import errors, sse
from perilune.api.auth import caller_of
from perilune.api.completion import StreamedAnswer, WholeAnswer
from perilune.api.limits import read_body, until_disconnect
from perilune.api.meter import AnswerMeter
from perilune.api.schema import ChatCall, parse_chat
from perilune.api.wire import send_json
from perilune.config import Settings
from perilune.core import Event, Request, StageStarted
from perilune.errors import Overloaded
from perilune.service.ports import ServiceApi
from perilune.telemetry import Telemetry

_PATIENCE_S = 5.0
"""The service gives up first, with a better reason; later than that only a client that doesn't read can last."""

_LAST_WORDS_S = 0.2
"""How long a stopping server tries to tell a client why its stream ends."""


class ChatCompletions:
    """The endpoint. `clock` is the monotonic clock of `Request.arrival_s`, `now` the wall clock of `created`."""

    def __init__(
        self,
        service: ServiceApi,
        settings: Settings,
        telemetry: Telemetry,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._service = service
        self._settings = settings
        self._telemetry = telemetry
        self._clock = clock
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._settings.server.max_body)
        call = parse_chat(
            body,
            request_id=scope["state"]["request_id"],
            caller=caller_of(scope),
            arrival_s=self._clock(),
            settings=self._settings,
        )
        meter = AnswerMeter(self._telemetry, self._clock, call.request)
        answer = self._stream if call.stream else self._whole
        try:
            await until_disconnect(receive, answer(call, send, meter))
        except BaseException as error:
            meter.ended(error)
            raise

    async def _whole(self, call: ChatCall, send: Send, meter: AnswerMeter) -> None:
        answer = WholeAnswer(call, int(self._now()))
        async with self._events(call.request) as events:
            async for event in events:
                meter.see(event)
                answer.add(event)
        spent_ms = 1000 * (self._clock() - call.request.arrival_s)
        await send_json(send, 200, answer.body(), [(b"openai-processing-ms", str(round(spent_ms)).encode())])
        meter.ended(None)

    async def _stream(self, call: ChatCall, send: Send, meter: AnswerMeter) -> None:
        """An error before the response has started is raised, and gets its own status; later it is an event."""
        answer = StreamedAnswer(call, int(self._now()))
        async with sse.EventStream(send, answer.opening()) as out:
            try:
                async with self._events(call.request) as events:
                    async for event in events:
                        meter.see(event)
                        await self._forward(event, answer, out)
                await out.end(answer.end())
                meter.ended(None)
            except asyncio.CancelledError:
                if out.started:
                    await self._say_goodbye(out, call.request.request_id)
                raise
            except Exception as error:
                if not out.started:
                    raise
                shown = errors.from_any(error, call.request.request_id)
                meter.ended(shown)
                await out.end(sse.data(errors.body(shown)))

    @staticmethod
    async def _forward(event: Event, answer: StreamedAnswer, out: sse.EventStream) -> None:
        encoded = answer.encode(event)
        if isinstance(event, StageStarted):
            # A stage may still turn out to be impossible; the plan is the first thing that holds.
            if out.started:
                await out.write(encoded)
            else:
                out.hold(encoded)
        elif encoded:
            await out.write(encoded)

    @staticmethod
    async def _say_goodbye(out: sse.EventStream, request_id: str) -> None:
        """To a client that is still there when the server stops; a client that has left is not disturbed."""
        stopping = Overloaded("The server is shutting down.", hint="Send the request again.")
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await out.end(sse.data(errors.body(stopping)))
        except TimeoutError:
            errors.log.info("client too slow for a goodbye", extra={"fields": {"request_id": request_id}})

    @asynccontextmanager
    async def _events(self, request: Request) -> AsyncIterator[AsyncIterator[Event]]:
        """The service's events, closed on every way out, given up soon after `model_serving.timeout`."""
        limit_s = self._settings.model_serving.timeout + _PATIENCE_S
        running = cast("AsyncGenerator[Event]", self._service.run(request))
        limit = asyncio.timeout(limit_s)
        try:
            async with limit, aclosing(running) as events:
                yield events
        except TimeoutError:
            if not limit.expired():
                raise
            raise Overloaded(
                f"The answer wasn't delivered after {limit_s:g} seconds.",
                hint="Read the stream faster, ask for less, or raise model_serving.timeout.",
            ) from None
