"""Whether replies are as the OpenAPI document says: no status, media type, field or event that it doesn't describe.

Objects in the document are closed, so that a field without a description is a fault. Knows HTTP, not how replies
are fetched: tests/api checks all of its replies by `Described`, tests/e2e those of a real server.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.api.openapi import document

JsonSchema = dict[str, Any]


def faults(method: str, path: str, status: int, media: str, body: bytes) -> list[str]:
    """What of a reply isn't described; empty for paths that no operation has."""
    operation = _operation(method, path)
    if operation is None:
        return []
    described = operation["responses"].get(str(status))
    if described is None:
        return [f"status {status}"]
    media = media.partition(";")[0]
    content = described["content"].get(media)
    if content is None:
        return [f"media type {media} of status {status}"]
    if "x-itemSchema" in content:
        items = events_in(body) if media == "text/event-stream" else map(json.loads, body.splitlines())
        return [fault for item in items for fault in _faults(content["x-itemSchema"], item)]
    return _faults(content["schema"], json.loads(body)) if media == "application/json" else []


def _faults(schema: JsonSchema, value: Any) -> list[str]:
    found = _validator(json.dumps(schema)).iter_errors(value)
    return [f"{error.instance_path} of {json.dumps(value)[:600]}: {str(error)[:400]}" for error in found]


@functools.cache
def _validator(schema: str) -> jsonschema_rs.Draft202012Validator:
    whole = {**json.loads(schema), "components": _parsed(document()["components"])}
    return jsonschema_rs.Draft202012Validator(whole)


def _parsed(schema: Any) -> Any:
    """The schema of parsed events: what stands in a string of JSON stands for itself."""
    if isinstance(schema, dict):
        if "contentSchema" in schema:
            return _parsed(schema["contentSchema"])
        return {name: _parsed(value) for name, value in schema.items()}
    return [_parsed(value) for value in schema] if isinstance(schema, list) else schema


def events_in(data: bytes) -> Iterator[dict[str, Any]]:
    """Server-sent events with their data parsed; one that was cut off is left out."""
    for piece in data.decode(errors="ignore").split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in piece.split("\n") if not line.startswith(":"))
        if fields:
            told = fields["data"]
            yield {**fields, "data": told if told == "[DONE]" else json.loads(told)}


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    """Those with the fewest parameters first: /v1/feedback/export is no id."""
    paths = sorted(document()["paths"].items(), key=lambda each: each[0].count("{"))
    return [(_pattern(path), operations) for path, operations in paths]


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{\w+\}", path)
    return re.compile("[^/]+".join(map(re.escape, parts)))


def _operation(method: str, path: str) -> dict[str, Any] | None:
    for pattern, operations in _patterns():
        if pattern.fullmatch(path):
            found: dict[str, Any] | None = operations.get(method.lower())
            return found
    return None


class Described:
    """An application whose replies are looked at; `faults` says what of them isn't described."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.faults: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start: Message = {}
        body = b""

        async def seen(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
            else:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    self._look(scope, start, body)
            await send(message)

        await self._app(scope, receive, seen)

    def _look(self, scope: Scope, start: Message, body: bytes) -> None:
        media = dict(start["headers"]).get(b"content-type", b"").decode()
        where = f"{scope['method']} {scope['path']}"
        found = faults(scope["method"], scope["path"], start["status"], media, body)
        self.faults += [f"{where} ({start['status']}): {fault}" for fault in found]
