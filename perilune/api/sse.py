"""Server-sent events: encoding, and a stream that is never silent.

Knows bytes and time; doesn't know what the events mean. The response starts as late as an error could still
change its status, and as early as `COMMIT_AFTER_S`, so that a client sees life within 200 ms (spec C5).
"""

from __future__ import annotations

import asyncio
from types import TracebackType

import orjson
from starlette.types import Send

from perilune.api.wire import Headers

COMMIT_AFTER_S = 0.1
"""After this the response starts, whatever the service is doing: half of the promise, because on a busy machine the
loop itself may be late."""

HEARTBEAT_S = 0.5
"""Longest silence on a started stream: half of the promised second, for the same reason."""

MOST_HELD_BYTES = 64 * 1024
"""Of events that wait to be sent together; then the writer waits, so that a slow client slows the answer."""

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # reverse proxies must not collect the events
)


def data(payload: object) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that every client ignores and every human can read."""
    return b": " + text.replace("\n", " ").replace("\r", " ").encode() + b"\n\n"


class EventStream:
    """One streamed response. Use as a context manager; then `write`, or `hold` what may still be undone.

    `heartbeat` is what is said in silence; `headers`, beside the usual ones, may be a list that grows until it
    starts. `waited_s`: how long the client has waited before. Writes from the heartbeat and from the owner never
    interleave.
    """

    def __init__(
        self,
        send: Send,
        headers: Headers = (),
        *,
        heartbeat: bytes = KEEP_ALIVE,
        waited_s: float = 0.0,
        commit_after_s: float = COMMIT_AFTER_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._send = send
        self._held = b""
        self._headers = headers
        self._heartbeat = heartbeat
        self._commit_after_s = commit_after_s
        self._heartbeat_s = heartbeat_s
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last_write_s = self._loop.time() - waited_s
        self._ended = False
        self._heart: asyncio.Task[None] | None = None
        self._flusher: asyncio.Task[None] | None = None
        self.started = False
        """Whether the status line is out: from here on errors are events."""

    async def __aenter__(self) -> EventStream:
        self._heart = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        heart = self._heart
        helpers = {task for task in (self._flusher, heart) if task is not None}
        for task in helpers:  # all before anything is awaited: whoever waits here may be cancelled, too
            task.cancel()
        if helpers:
            await asyncio.wait(helpers)
        if heart is not None and error is None and not heart.cancelled():
            heart.result()

    def hold(self, event: bytes) -> None:
        """Queue an event that goes out with the next write, or when the response starts."""
        self._held += event

    async def write(self, event: bytes, more: bool = True) -> None:
        """Start the response if it hasn't, and send what is held and `event`."""
        async with self._lock:
            if self._ended:
                return  # a heartbeat that waited while the last write was stuck
            self._ended = not more
            if not self.started:
                self.started = True
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": [*HEADERS, *self._headers]}
                )
            out, self._held = self._held + event, b""
            self._last_write_s = self._loop.time()
            await self._send({"type": "http.response.body", "body": out, "more_body": more})

    async def write_soon(self, event: bytes) -> None:
        """As `write`, but what comes before the loop turns goes out at once: a send costs more than a chunk."""
        self._held += event
        if len(self._held) >= MOST_HELD_BYTES:
            await self.write(b"")
            await asyncio.sleep(0)  # a write to a client that has left waits for nothing: let the loop tell of it
        elif self._flusher is None:
            self._flusher = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        self._flusher = None
        if self._held:
            await self.write(b"")

    async def end(self, last: bytes = b"") -> None:
        """Send `last` and close the response."""
        await self.write(last, more=False)

    async def _beat(self) -> None:
        while not self._ended:  # a write that has nothing to do any more wouldn't let the loop turn
            limit_s = self._heartbeat_s if self.started else self._commit_after_s
            silent_s = self._loop.time() - self._last_write_s
            if silent_s >= limit_s:
                await self.write(self._heartbeat)
            else:
                await asyncio.sleep(limit_s - silent_s)
