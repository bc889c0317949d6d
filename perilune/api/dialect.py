"""What an API dialect is to the endpoint that answers in it: how it asks, answers and fails.

Knows shapes only; the order of things on the wire is chat.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from perilune.api import errors, sse
from perilune.api.completion import StreamedAnswer, WholeAnswer
from perilune.api.schema import ChatCall, parse_chat
from perilune.config import Settings
from perilune.core import Event, RateState
from perilune.errors import PeriluneError
from perilune.service.ports import Caller


class Whole(Protocol):
    """Collects events into one body."""

    def add(self, event: Event) -> None: ...
    def body(self) -> dict[str, Any]:
        """Raises `InternalError` when the service ended without saying that it completed."""
        ...


class Streamed(Protocol):
    """Turns events into bytes of a stream."""

    def opening(self) -> bytes: ...
    def encode(self, event: Event) -> bytes:
        """Empty when the client has nothing to learn yet."""
        ...

    def end(self) -> bytes:
        """The last bytes. Raises as `Whole.body`."""
        ...


class Parse(Protocol):
    def __call__(
        self, body: bytes, *, request_id: str, caller: Caller, arrival_s: float, settings: Settings
    ) -> ChatCall:
        """Untrusted bytes -> a request. Raises `InvalidRequest` naming the field; nothing else."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """`whole` and `streamed` take the call and the wall clock's second; `error_event` ends a stream, `heartbeat` is
    what one says in silence."""

    parse: Parse
    whole: Callable[[ChatCall, int], Whole]
    streamed: Callable[[ChatCall, int], Streamed]
    error_event: Callable[[PeriluneError], bytes]
    heartbeat: bytes = sse.KEEP_ALIVE
    rate_headers: Callable[[RateState], list[tuple[bytes, bytes]]] = errors.rate_headers


def _openai_error(error: PeriluneError) -> bytes:
    return sse.data(errors.body(error))


OPENAI_CHAT = Dialect(parse_chat, WholeAnswer, StreamedAnswer, _openai_error)
