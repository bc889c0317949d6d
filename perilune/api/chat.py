"""One answer, whole or streamed, and its cancellation, in any dialect: POST /v1/chat/completions, /v1/messages.

Knows the order of things on the wire; the shapes are the dialect's (dialect.py), the work is the service's. Raw
ASGI, because every token passes here. The service's iterator is closed on every way out.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from perilune.api import errors, sse
from perilune.api.auth import caller_of
from perilune.api.completion import completion_id
from perilune.api.dialect import OPENAI_CHAT, Dialect, Parse, Streamed, Whole
from perilune.api.fields import ignored_header
from perilune.api.limits import header, read_body, until_disconnect
from perilune.api.meter import AnswerMeter
from perilune.api.resume import Resumables, StreamLog
from perilune.api.schema import ChatCall
from perilune.api.wire import Headers, send_json
from perilune.config import Settings
from perilune.core import Admitted, Event, Request, StageStarted
from perilune.errors import InvalidRequest, Overloaded, PeriluneError
from perilune.service.ports import ServiceApi
from perilune.telemetry import Telemetry

_PATIENCE_S = 5.0
"""The service gives up first, with a better reason; later than that only a client that doesn't read can last."""

_EVENT_NUMBER = re.compile(r"-1|[0-9]{1,9}", re.ASCII)
_LAST_WORDS_S = 0.2
"""How long a stopping server tries to tell a client why its stream ends."""


class ChatCompletions:
    """The endpoint of one dialect. `clock` is the monotonic clock of `Request.arrival_s`, `now` the wall clock of
    `created`."""

    def __init__(
        self,
        service: ServiceApi,
        settings: Settings,
        telemetry: Telemetry,
        resumables: Resumables,
        dialect: Dialect = OPENAI_CHAT,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._service = service
        self._settings = settings
        self._telemetry = telemetry
        self._resumables = resumables
        self._dialect = dialect
        self._clock = clock
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._settings.server.max_body)
        call = await self._parsed(scope, body)
        meter = AnswerMeter(self._telemetry, self._clock, call.request)
        try:
            await until_disconnect(receive, self._answered(call, send, meter))
        except BaseException as error:
            if not call.resumable:
                meter.ended(error)
            raise

    async def _parsed(self, scope: Scope, body: bytes) -> ChatCall:
        return self._parse(scope, body, self._dialect.parse)

    def _parse(self, scope: Scope, body: bytes, parse: Parse) -> ChatCall:
        return parse(
            body,
            request_id=scope["state"]["request_id"],
            caller=caller_of(scope),
            arrival_s=self._clock(),
            settings=self._settings,
        )

    async def _prepared(self, call: ChatCall) -> ChatCall:
        """The call as it is answered. It may take a while: a stream shows life meanwhile."""
        return call

    @asynccontextmanager
    async def _kept(self, call: ChatCall) -> AsyncIterator[None]:
        """What lasts as long as an answer is being made."""
        yield

    async def _answered(self, call: ChatCall, send: Send, meter: AnswerMeter) -> None:
        await (self._stream if call.stream else self._whole)(call, send, meter)

    async def _finished(self, call: ChatCall, answer: Whole | Streamed) -> None:
        """Called when an answer is complete, before its last bytes leave."""

    async def _whole(self, call: ChatCall, send: Send, meter: AnswerMeter) -> None:
        call = await self._prepared(call)
        answer = self._dialect.whole(call, int(self._now()))
        headers = ignored_header(call.ignored)
        async with self._kept(call):
            async with self._in_time(), self._events(call) as events:
                async for event in events:
                    if isinstance(event, Admitted):
                        headers += self._dialect.rate_headers(event.rates)
                        continue
                    meter.see(event)
                    answer.add(event)
            await self._finished(call, answer)
        spent_ms = 1000 * (self._clock() - call.request.arrival_s)
        headers.append((b"openai-processing-ms", str(round(spent_ms)).encode()))
        await send_json(send, 200, answer.body(), headers)
        meter.ended(None)

    async def _stream(self, call: ChatCall, send: Send, meter: AnswerMeter) -> None:
        request, headers = call.request, ignored_header(call.ignored)
        if call.resumable:
            key = completion_id(request.request_id)
            log = self._resumables.start(key, request.tenant, lambda log: self._write(log, call, meter))
            await self._deliver(log.read(-1), send, request.request_id, headers, request.arrival_s)
        else:
            events = self._encoded(call, meter, headers)
            meter.ended(await self._deliver(events, send, request.request_id, headers, request.arrival_s))

    async def _write(self, log: StreamLog, call: ChatCall, meter: AnswerMeter) -> None:
        """The answer into its log, whoever reads."""
        try:
            async with self._in_time(), aclosing(self._encoded(call, meter, [])) as events:
                async for encoded, settled in events:
                    log.add(encoded, settled)
        except asyncio.CancelledError as error:
            meter.ended(error)
            raise
        except Exception as error:
            shown = errors.from_any(error, call.request.request_id)
            meter.ended(shown)
            log.finish(shown)
        else:
            meter.ended(None)
            log.finish(None)

    async def resume(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET: the rest of a stream. DELETE: stop it."""
        key, tenant = scope["path_params"]["completion_id"], caller_of(scope).tenant
        if scope["method"] == "DELETE":
            await self._resumables.cancel(key, tenant)
            await send_json(send, 200, {"id": key, "object": "chat.completion.deleted", "deleted": True})
            return
        log = self._resumables.find(key, tenant)
        rest = self._deliver(log.read(starting_after(scope)), send, scope["state"]["request_id"])
        await until_disconnect(receive, ignoring_result(rest))

    async def _deliver(
        self,
        events: AsyncGenerator[tuple[bytes, bool]],
        send: Send,
        request_id: str,
        headers: Headers = (),
        arrival_s: float | None = None,
    ) -> PeriluneError | None:
        """Send encoded events; returns the error that ended the stream, if one did. `arrival_s`: since when a
        client has waited.

        An error before the response has started is raised, and gets its own status; later it is an event.
        """
        waited_s = 0.0 if arrival_s is None else self._clock() - arrival_s
        async with sse.EventStream(send, headers, heartbeat=self._dialect.heartbeat, waited_s=waited_s) as out:
            try:
                async with self._in_time(), aclosing(events):
                    async for encoded, settled in events:
                        if out.started:
                            await out.write_soon(encoded)
                        elif settled:
                            await out.write(encoded)
                        else:
                            out.hold(encoded)
                await out.end()
            except asyncio.CancelledError:
                if out.started:
                    await self._say_goodbye(out, request_id)
                raise
            except Exception as error:
                if not out.started:
                    raise
                shown = errors.from_any(error, request_id)
                await out.end(self._dialect.error_event(shown))
                return shown
        return None

    async def _encoded(
        self, call: ChatCall, meter: AnswerMeter, headers: list[tuple[bytes, bytes]]
    ) -> AsyncGenerator[tuple[bytes, bool]]:
        """Events as bytes, and what the response's head tells as `headers`. A stage may still turn out to be
        impossible; the plan is the first thing that holds."""
        call = await self._prepared(call)
        answer = self._dialect.streamed(call, int(self._now()))
        yield answer.opening(), False
        async with self._kept(call):
            async with self._events(call) as events:
                async for event in events:
                    if isinstance(event, Admitted):
                        headers += self._dialect.rate_headers(event.rates)
                        continue
                    meter.see(event)
                    if encoded := answer.encode(event):
                        yield encoded, not isinstance(event, StageStarted)
            await self._finished(call, answer)
        yield answer.end(), True

    async def _say_goodbye(self, out: sse.EventStream, request_id: str) -> None:
        """To a client that is still there when the server stops; a client that has left is not disturbed."""
        stopping = Overloaded("The server is shutting down.", hint="Send the request again.")
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await out.end(self._dialect.error_event(stopping))
        except TimeoutError:
            errors.log.info("client too slow for a goodbye", extra={"fields": {"request_id": request_id}})

    def _events(self, call: ChatCall) -> aclosing[AsyncGenerator[Event]]:
        """The events of an answer, closed on every way out."""
        return self._run(call.request)

    def _run(self, request: Request) -> aclosing[AsyncGenerator[Event]]:
        """The service's events."""
        return aclosing(cast("AsyncGenerator[Event]", self._service.run(request)))

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Give up soon after `model_serving.timeout`."""
        limit_s = self._settings.model_serving.timeout + _PATIENCE_S
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise Overloaded(
                f"The answer wasn't delivered after {limit_s:g} seconds.",
                hint="Read the stream faster, ask for less, or raise model_serving.timeout.",
            ) from None


class ResumeChat:
    """/v1/chat/completions/{completion_id}, as the ASGI application that a route needs."""

    def __init__(self, chat: ChatCompletions) -> None:
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._chat.resume(scope, receive, send)


async def ignoring_result(work: Coroutine[Any, Any, object]) -> None:
    await work


def starting_after(scope: Scope) -> int:
    """The number of the last event a client has, from `?starting_after=` or `Last-Event-ID`; -1 for none."""
    query = parse_qs(scope["query_string"].decode("latin-1"))
    given = query.get("starting_after", [])[:1] or [(header(scope, b"last-event-id") or b"-1").decode("latin-1")]
    if not _EVENT_NUMBER.fullmatch(given[0]):
        raise InvalidRequest("starting_after must be the id of an event.", param="starting_after")
    return int(given[0])
