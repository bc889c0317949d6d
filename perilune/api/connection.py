"""One client connection: what it may hold while no request runs, and a clear answer to bytes that are no request.

Knows uvicorn's h11 protocol; doesn't know requests' meaning. uvicorn alone waits for ever for the end of a request,
or of a body that was refused already, and takes as many connections as there are descriptors: one client without a
key could shut everybody out (slow loris).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any, ClassVar

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from perilune.api import errors
from perilune.errors import InvalidRequest, Overloaded, PeriluneError

HEADERS_S = 20.0
"""How long a connection may take from its first byte, or its opening, to the end of a request's headers."""

LINGER_S = 30.0
"""How long a body that was refused early may still be sent, and dropped: closing at once would hide the answer."""

MAX_CONNECTIONS = 512
"""Open at once. One more takes the place of an idle one of the peer that holds the most, never of a peer that holds
fewer than its own: so nobody can push the others out."""

_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 503: b"Service Unavailable"}


class Connection(H11Protocol):
    """What uvicorn makes for each connection. Bounds are class attributes: uvicorn calls the constructor."""

    headers_s: ClassVar[float] = HEADERS_S
    linger_s: ClassVar[float] = LINGER_S
    max_connections: ClassVar[int] = MAX_CONNECTIONS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._refused: object = None  # uvicorn's cycle of the request whose body is lingered for
        self._quiet_since_s = time.monotonic()

    # -------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()
        if len(self.connections) > self.max_connections and not self._make_room():
            self._refuse(
                Overloaded(
                    f"The server already holds {self.max_connections} connections.",
                    hint="Try again in a few seconds.",
                )
            )

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not self._refused:  # that body has ended, and the next request came in the same bytes
            self._end_linger()
        if self._waits_for_headers:
            self._end_linger()
            self._expect_headers()
        else:
            self._end_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_headers()
        self._end_linger()
        super().connection_lost(exc)

    # -------------------------------------------------------------------------------- uvicorn's own hooks

    def on_response_complete(self) -> None:
        self._quiet_since_s = time.monotonic()
        answered = self.cycle
        super().on_response_complete()  # may begin the next request, if that is here already
        if self.cycle is answered and self.conn.their_state is h11.SEND_BODY and self._linger_timer is None:
            self._refused = answered
            self._linger_timer = self.loop.call_later(self.linger_s, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Bytes that no HTTP parser can take. `msg` is uvicorn's and says no more."""
        self._refuse(
            InvalidRequest(
                "The bytes received aren't a valid HTTP/1.1 request.",
                hint="Check the request line, the Host header, and that body and Content-Length agree.",
            )
        )

    # -------------------------------------------------------------------------------- the bounds

    @property
    def _waits_for_headers(self) -> bool:
        return self.conn.their_state is h11.IDLE and not self.transport.is_closing()

    def _expect_headers(self) -> None:
        if self._headers_timer is None:
            self._headers_timer = self.loop.call_later(self.headers_s, self._too_slow)

    def _end_headers(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _end_linger(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = self._refused = None

    def _too_slow(self) -> None:
        self._headers_timer = None
        if self._waits_for_headers:
            self._refuse(
                errors.RequestTimeout(
                    f"The request's headers didn't arrive within {self.headers_s:g} seconds.",
                    hint="Send the request again.",
                )
            )

    def _make_room(self) -> bool:
        """Close, of the peer that holds the most connections, the one that has waited longest for its next request.
        False where all are at work that this peer may push out."""
        others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
        held = Counter(other._peer for other in (self, *others))
        idle = [other for other in others if other._waits_for_headers and held[other._peer] >= held[self._peer]]
        if not idle:
            return False
        min(idle, key=lambda other: (-held[other._peer], other._quiet_since_s)).transport.abort()
        return True

    @property
    def _peer(self) -> str:
        """The address it came from; behind a proxy that is the proxy's."""
        return self.client[0] if self.client else ""

    def _refuse(self, error: PeriluneError) -> None:
        """Say why, where no response has begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            data = orjson.dumps(errors.body(error))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(data)).encode()),
                (b"connection", b"close"),
            ]
            response = h11.Response(status_code=error.status, headers=headers, reason=_REASONS[error.status])
            for event in (response, h11.Data(data=data), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._end_headers()
        self.transport.close()
