"""An open-loop HTTP client: requests go out at their times, whether earlier ones were answered or not.

Latency runs from the time at which a request should have been sent, so that a client or server that falls
behind shows it. Bare asyncio protocols and a pool of connections: what it takes itself is small, and the same for
everything it measures. Knows bytes and time only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Timing:
    """One request, in seconds from when it should have been sent; `first_s` is to the first text of a stream."""

    status: int
    first_s: float
    total_s: float


@dataclass(slots=True)
class _Connection(asyncio.Protocol):
    """One connection, one request at a time. `mark` is what the first text holds."""

    mark: bytes
    done: asyncio.Future[None] | None = None
    first_at: float = 0.0
    status: int = 0
    transport: asyncio.Transport | None = None
    _tail: bytes = b""
    _left: int = -1
    _parts: list[bytes] = field(default_factory=list)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, data: bytes) -> asyncio.Future[None]:
        assert self.transport
        self.done = asyncio.get_running_loop().create_future()
        self.first_at, self.status, self._tail, self._left = 0.0, 0, b"", -1
        self.transport.write(data)
        return self.done

    def data_received(self, data: bytes) -> None:
        seen = self._tail + data
        if not self.first_at and self.mark in seen:
            self.first_at = time.perf_counter()
        if not self.status:
            if (end := seen.find(b"\r\n\r\n")) < 0:
                self._tail = seen
                return
            self.status = int(seen[9:12])
            head = seen[:end].lower()
            at = head.find(b"content-length: ")
            if at >= 0:
                self._left = int(head[at + 16 :].split(b"\r\n", 1)[0]) - (len(seen) - end - 4)
        elif self._left >= 0:
            self._left -= len(data)
        chunked_end = self._left < 0 and seen.endswith(b"0\r\n\r\n")
        if self._left == 0 or chunked_end:
            self._finish()
        self._tail = seen[-64:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.status = 0
            self._finish()

    def _finish(self) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(None)


class OpenLoop:
    """Sends `body(0)`, `body(1)`, … `mark` tells the first text of a stream; for whole answers, the body."""

    def __init__(self, port: int, body: Callable[[int], bytes], headers: dict[str, str], mark: bytes) -> None:
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}:{port}\r\ncontent-type: application/json\r\n"
            f"{more}content-length: "
        ).encode()
        self._body = body
        self._sent = 0
        self._port = port
        self._mark = mark
        self._idle: list[_Connection] = []

    async def run(self, per_s: float, seconds: float) -> list[Timing]:
        """Send `per_s` requests a second for so long; returns when all are answered."""
        start = time.perf_counter()
        tasks: list[asyncio.Task[Timing]] = []
        for number in range(int(per_s * seconds)):
            due = start + number / per_s
            if (wait_s := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(self._one(due)))
        timings = list(await asyncio.gather(*tasks))
        self._close()
        return timings

    async def run_closed(self, count: int, at_once: int) -> list[Timing]:
        """So many requests as fast as they are answered, `at_once` at a time: for what isn't about time."""
        numbers = iter(range(count))

        async def work() -> list[Timing]:
            return [await self._one(time.perf_counter()) for _ in numbers]

        done = await asyncio.gather(*(work() for _ in range(at_once)))
        self._close()
        return [timing for each in done for timing in each]

    def _close(self) -> None:
        for connection in self._idle:
            assert connection.transport
            connection.transport.close()
        self._idle = []

    async def _one(self, due: float) -> Timing:
        connection = await self._connected()
        body = self._body(self._sent)
        self._sent += 1
        await connection.send(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
        now = time.perf_counter()
        if connection.status:
            self._idle.append(connection)
        return Timing(connection.status, (connection.first_at or now) - due, now - due)

    async def _connected(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.transport and not connection.transport.is_closing():
                return connection
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: _Connection(self._mark), HOST, self._port)
        return made
