"""Lines of batches, answered by the endpoints that clients call: one seam for every dialect.

Knows ASGI and which routes batches may use; a new dialect's route works as soon as it is among them. An endpoint
sees an ordinary request: a body, a caller, and nobody who leaves.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive

from perilune.api import errors
from perilune.errors import InternalError, PeriluneError
from perilune.service.ports import Caller, LineAnswer

BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/embeddings")


class EndpointLines:
    """Implements `ports.LineAnswers` by those of the routes that batches may use."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._apps: dict[str, ASGIApp] = {
            route.path: route.app
            for route in routes
            if route.path in BATCH_ENDPOINTS and "POST" in (route.methods or ())
        }

    @property
    def endpoints(self) -> frozenset[str]:
        return frozenset(self._apps)

    async def answer(self, endpoint: str, caller: Caller, body: bytes) -> LineAnswer:
        request_id = f"req_{uuid.uuid4().hex}"
        reply = _Reply()
        try:
            scope = _scope(endpoint, caller, request_id, len(body))
            await self._apps[endpoint](scope, _receive(body), reply)
            return LineAnswer(reply.status, request_id, reply.parsed())
        except Exception as error:
            shown: PeriluneError = errors.from_any(error, request_id)
            return LineAnswer(shown.status, request_id, dict(errors.body(shown)), shown)


def _scope(endpoint: str, caller: Caller, request_id: str, size_bytes: int) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": endpoint,
        "raw_path": endpoint.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(size_bytes).encode())],
        "path_params": {},
        "client": None,
        "server": None,
        "state": {"request_id": request_id, "caller": caller},
    }


def _receive(body: bytes) -> Receive:
    """The body, then silence: whoever listens for a client that leaves waits until the end."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    return receive


class _Reply:
    """What an endpoint sends."""

    def __init__(self) -> None:
        self.status = 0
        self._data: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self._data.append(message.get("body", b""))

    def parsed(self) -> dict[str, Any]:
        """Raises `InternalError` for an endpoint that didn't answer with an object."""
        try:
            body = orjson.loads(b"".join(self._data))
        except orjson.JSONDecodeError:
            body = None
        if not isinstance(body, dict):
            raise InternalError("The endpoint gave no answer.", hint="Send the request again.")
        return body
