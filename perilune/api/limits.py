"""Bounds on what a client may send: body bytes, time between pieces, JSON depth, requests in flight (spec X4).

Knows ASGI messages; doesn't know what a body means. Bytes are counted while they are read, before any parsing.
The HTTP parser bounds headers while they arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson
from starlette.types import Receive, Scope

from perilune.api.errors import ClientGone, HeadersTooLarge, RequestTimeout
from perilune.errors import InvalidRequest, Overloaded, TooLarge

READ_IDLE_S = 30.0
"""Longest silence inside a request body."""

MIN_BYTES_PER_S = 1024
"""What a body must arrive at, after its first `READ_IDLE_S`: a byte now and then would hold a place for ever."""

MAX_JSON_DEPTH = 64
MAX_HEADER_BYTES = 64 * 1024
"""Request line and headers together."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """A header's value; None when absent. A header sent twice is refused: which one counts is ambiguous."""
    values = [value for key, value in scope["headers"] if key == name]
    if len(values) > 1:
        raise InvalidRequest(f"The header {name.decode()} was sent {len(values)} times.", hint="Send it once.")
    return values[0] if values else None


def check_headers(scope: Scope) -> None:
    """Raises `HeadersTooLarge`. The parser bounds only headers that come in several pieces."""
    size_bytes = len(scope["raw_path"]) + len(scope["query_string"])
    size_bytes += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size_bytes > MAX_HEADER_BYTES:
        raise HeadersTooLarge(
            f"The request's address and headers are larger than {MAX_HEADER_BYTES:,} bytes.", hint="Send less."
        )


def too_large(limit_bytes: int, what: str) -> TooLarge:
    return TooLarge(
        f"The {what} is larger than this server's limit of {limit_bytes:,} bytes.",
        hint="Send less, or raise server.max_body or server.max_upload in the configuration.",
    )


def number_of(query: Mapping[str, str], name: str, usual: int, least: int, most: int) -> int:
    """A number of the query string; `usual` where it isn't given. Raises `InvalidRequest`."""
    value = query.get(name)
    if value is None:
        return usual
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and least <= int(value) <= most):
        raise InvalidRequest(f"Wrong value for {name}.", hint=f"Use {least:,} to {most:,}.", param=name)
    return int(value)


def declared_length(scope: Scope) -> int | None:
    """Content-Length as a number; None when the body is chunked."""
    value = header(scope, b"content-length")
    return int(value) if value is not None and value.isdigit() else None


async def body_chunks(
    scope: Scope, receive: Receive, max_bytes: int, what: str = "request body", idle_s: float = READ_IDLE_S
) -> AsyncIterator[bytes]:
    """The pieces of a body as they arrive.

    Raises `TooLarge` as soon as the limit is known to be passed (at once, when the length is declared),
    `RequestTimeout` after `idle_s` of silence, or of fewer than `MIN_BYTES_PER_S` beyond it, and `ClientGone` when
    the connection closes early.
    """
    declared = declared_length(scope)
    if declared is not None and declared > max_bytes:
        raise too_large(max_bytes, what)
    seen_bytes = 0
    more = True
    clock = asyncio.get_running_loop().time
    late_s = clock() + idle_s
    while more:
        try:
            async with asyncio.timeout_at(min(clock() + idle_s, late_s + seen_bytes / MIN_BYTES_PER_S)):
                message = await receive()
        except TimeoutError:
            raise RequestTimeout(
                f"The {what} stopped arriving for {idle_s:g} seconds, or came at less than {MIN_BYTES_PER_S:,} "
                "bytes a second.",
                hint="Send the request again.",
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        seen_bytes += len(chunk)
        if seen_bytes > max_bytes:
            raise too_large(max_bytes, what)
        more = message.get("more_body", False)
        if chunk:
            yield chunk


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body; errors as in `body_chunks`."""
    return b"".join([chunk async for chunk in body_chunks(scope, receive, max_bytes)])


def parse_json_object(data: bytes) -> dict[str, Any]:
    """A JSON object from untrusted bytes. Raises `InvalidRequest` for anything else, or one nested too deeply.

    NaN, infinities, lone surrogates and invalid UTF-8 are not JSON and are refused by the parser.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(
            f"The body isn't valid JSON (line {error.lineno}, column {error.colno}).",
            hint="Send one JSON object, encoded as UTF-8.",
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", hint='For example {"model": …, "messages": […]}.')
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [item for node in level for item in _children(node) if isinstance(item, (dict, list))]
        if not level:
            return value
    raise InvalidRequest(f"The JSON is nested more than {MAX_JSON_DEPTH} levels deep.", hint="Flatten it.")


def _children(node: Any) -> Iterator[Any]:
    return iter(node.values() if isinstance(node, dict) else node)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it the moment the client goes. Raises `ClientGone` then.

    Listens on `receive` all the time: a write that fails comes far too late (silent prefill), or never.
    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        client_gone = not task.done()
    finally:
        for each in (gone, task):
            each.cancel()
        await asyncio.wait({task, gone})
    if client_gone and task.cancelled():
        raise ClientGone
    task.result()


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class InFlight:
    """How many requests the server holds at once: bounds memory whatever clients do."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Raises `Overloaded` when every slot is taken."""
        if self.count >= self._limit:
            raise Overloaded(
                f"The server already holds {self._limit} requests.", hint="Try again in a few seconds."
            )
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
