"""Requests to a real server as raw as they are: with a key, as JSON or as a form; what comes back is bytes."""

from __future__ import annotations

import contextlib
import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .conftest import Server

_EDGE = "edge-of-a-part"


@dataclass(frozen=True)
class Reply:
    status: int
    media: str
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Form:
    """A multipart body of one file."""

    field: str
    data: bytes
    filename: str = "a.txt"
    values: tuple[tuple[str, str], ...] = ()

    def encoded(self) -> bytes:
        start = f"--{_EDGE}\r\ncontent-disposition: form-data; name="
        parts = [f'{start}"{name}"\r\n\r\n{value}\r\n'.encode() for name, value in self.values]
        head = f'{start}"{self.field}"; filename="{self.filename}"\r\n\r\n'.encode()
        return b"".join(parts) + head + self.data + f"\r\n--{_EDGE}--\r\n".encode()


def call(server: Server, key: str, method: str, path: str, body: Any = None) -> Reply:
    """`body`: None, a `Form`, bytes as they are, or what becomes JSON."""
    headers = {"authorization": f"Bearer {key}"}
    if isinstance(body, Form):
        headers["content-type"] = f"multipart/form-data; boundary={_EDGE}"
        body = body.encoded()
    elif body is not None and not isinstance(body, bytes):
        headers["content-type"] = "application/json"
        body = json.dumps(body)
    parts = urlsplit(server.url)
    with contextlib.closing(
        http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    ) as connection:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return Reply(reply.status, reply.headers["content-type"] or "", reply.read())
